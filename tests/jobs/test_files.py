"""Files are written whole or not at all, and never through a link or onto a device."""

import os
from pathlib import Path

import pytest

from gerund.errors import InputError, OutputExistsError, ResourceError
from gerund.jobs.files import atomic_file, make_folder, require_new_files, require_regular_file, write_atomic
from tests.cli.helpers import run_cli


def test_a_file_is_replaced_in_one_step(tmp_path):
    target = tmp_path / "a.txt"
    write_atomic(target, "old")
    with atomic_file(target) as file:
        file.write(b"new")
        file.flush()
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_error_leaves_what_was_there(tmp_path):
    target = tmp_path / "a.txt"
    write_atomic(target, "old")
    with pytest.raises(ValueError), atomic_file(target):
        raise ValueError
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_neither_followed_nor_replaced(tmp_path, there):
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    if there:
        real.write_text("precious")
    link.symlink_to("real.txt")
    with pytest.raises(InputError, match=r"link.txt is a symbolic link to real.txt; name the file itself"):
        write_atomic(link, "new")
    assert link.is_symlink()
    assert (real.read_text() if there else None) == ("precious" if there else None)
    assert real.exists() is there


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".a.txt.part").symlink_to("precious")
    write_atomic(tmp_path / "a.txt", "new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "a.txt").is_symlink()


def test_folders_on_the_way_may_be_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_atomic(tmp_path / "link" / "a.txt", "new")
    assert (tmp_path / "real" / "a.txt").read_text() == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_or_device_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is not a regular file; choose another output"):
        write_atomic(tmp_path / "pipe", "x")
    with pytest.raises(InputError, match="is not a regular file"):
        require_regular_file(type(tmp_path)(os.devnull))


def test_places_that_are_none(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="was not written"):
        write_atomic(tmp_path / "file" / "a.txt", "x")
    with pytest.raises(ResourceError, match="was not written: File name too long"):
        write_atomic(tmp_path / ("x" * 300), "x")
    with pytest.raises(ResourceError, match="cannot be made"):
        make_folder(tmp_path / "file" / "folder")
    with pytest.raises(OutputExistsError, match="exists already; choose another name or give --force"):
        require_new_files(tmp_path / "absent", tmp_path / "file")


def test_commands_that_write_json_lines_refuse_links_too(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prefix": "One.", "continuation": "Two."}\n')
    link = tmp_path / "link.jsonl"
    link.symlink_to("elsewhere.jsonl")
    mistake = run_cli("score", "--file", tmp_path / "pairs.jsonl", "-o", link, "--force").mistake
    assert "is a symbolic link to elsewhere.jsonl" in mistake


@pytest.mark.parametrize("place", ["", ".", "/"])
def test_a_place_without_a_name_is_a_folder(place):
    with pytest.raises(InputError, match="is a folder; name a file in it as the output"), atomic_file(Path(place)):
        pass
