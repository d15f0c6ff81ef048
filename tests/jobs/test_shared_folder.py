"""A worker has to see the driver's folder, and to run the driver's gerund."""

from dataclasses import replace

import pytest

from gerund.errors import InputError
from gerund.jobs import shared_folder
from gerund.jobs.shared_folder import NAME, proof_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(shared_folder, "_PATIENCE", 0.0)


def test_who_sees_the_folder(tmp_path):
    with proof_of(tmp_path) as proof:
        proof.check()
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_see_it(tmp_path):
    with proof_of(tmp_path) as proof:
        (tmp_path / NAME).unlink()
        with pytest.raises(InputError, match="does not see"):
            proof.check()


def test_who_sees_another(tmp_path):
    with proof_of(tmp_path) as proof:
        (tmp_path / NAME).write_text("of another machine")
        with pytest.raises(InputError, match="has another folder at"):
            proof.check()


def test_who_has_another_version(tmp_path):
    with proof_of(tmp_path) as proof, pytest.raises(InputError, match="install the same on all of them"):
        replace(proof, version="0.0.0").check()


def test_no_folder_is_needed():
    with proof_of(None) as proof:
        proof.check()
