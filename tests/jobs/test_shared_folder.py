"""A worker has to see the driver's folder, and to run the driver's gerund."""

from dataclasses import replace

import pytest

from gerund.errors import InputError
from gerund.jobs import engine
from gerund.jobs.engine import SHARED_FILE, shared_folder_check


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(engine, "_SHARED_FOLDER_SECONDS", 0.0)


def test_who_sees_the_folder(tmp_path):
    with shared_folder_check(tmp_path) as check:
        check.check()
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_see_it(tmp_path):
    with shared_folder_check(tmp_path) as check:
        (tmp_path / SHARED_FILE).unlink()
        with pytest.raises(InputError, match="does not see"):
            check.check()


def test_who_sees_another(tmp_path):
    with shared_folder_check(tmp_path) as check:
        (tmp_path / SHARED_FILE).write_text("of another machine")
        with pytest.raises(InputError, match="has another folder at"):
            check.check()


def test_who_has_another_version(tmp_path):
    with shared_folder_check(tmp_path) as check, pytest.raises(InputError, match="install the same on all of them"):
        replace(check, version="0.0.0").check()


def test_no_folder_is_needed():
    with shared_folder_check(None) as check:
        check.check()
