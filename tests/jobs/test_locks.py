"""One process at a time writes into a folder, and a killed one does not lock it for ever."""

import errno
import os
import signal
import subprocess
import sys

import filelock
import pytest

from gerund.errors import InputError, ResourceError
from gerund.jobs.files import lock_folder, remove_abandoned

HOLDER = """
import sys
from pathlib import Path
from gerund.jobs.files import lock_folder
with lock_folder(Path(sys.argv[1]), "the output"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds a folder until it is killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_keeps_others_out_and_says_who_it_is(tmp_path, holder):
    with (
        pytest.raises(InputError, match=rf"^process {holder.pid} is writing {tmp_path / 'out'} already; wait for it"),
        lock_folder(tmp_path / "out"),
    ):
        raise AssertionError
    with pytest.raises(InputError, match="is writing the report already"), lock_folder(tmp_path / "out", "the report"):
        raise AssertionError


def test_a_killed_one_holds_nothing(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "out" / "lock").exists()
    with lock_folder(tmp_path / "out"):
        assert (tmp_path / "out" / "lock").read_text() == f"{os.getpid()}\n"


def test_is_no_matter_of_the_process_alone(tmp_path):
    with lock_folder(tmp_path / "out"), pytest.raises(InputError, match="already"), lock_folder(tmp_path / "out"):
        raise AssertionError
    with lock_folder(tmp_path / "out"):
        pass


def test_leaves_nothing_of_its_own(tmp_path):
    with lock_folder(tmp_path / "new" / "out"):
        pass
    assert not (tmp_path / "new").exists()
    with lock_folder(tmp_path / "out"):
        (tmp_path / "out" / "a").touch()
    (tmp_path / "empty").mkdir()
    with lock_folder(tmp_path / "empty"):
        pass
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {"out", "out/a", "empty"}


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ResourceError, match="cannot write the report: Not a directory"),
        lock_folder(tmp_path / "file" / "out", "the report"),
    ):
        raise AssertionError


def test_a_file_system_without_locks_does_without(tmp_path, monkeypatch):
    def unsupported(self):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(filelock.FileLock, "_acquire", unsupported)
    with lock_folder(tmp_path / "out"):
        (tmp_path / "out" / "a").touch()
    # Nothing says that it is abandoned.
    (tmp_path / "out" / "lock").touch()
    remove_abandoned(tmp_path / "out")
    assert (tmp_path / "out" / "a").exists()


def test_only_what_is_abandoned_is_removed(tmp_path, holder):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "precious").touch()
    (tmp_path / "empty").mkdir()
    remove_abandoned(tmp_path / "empty")
    assert not (tmp_path / "empty").exists()
    for name in ("out", "bare"):
        remove_abandoned(tmp_path / name)
        assert (tmp_path / name).exists()
    holder.kill()
    holder.wait()
    remove_abandoned(tmp_path / "out")
    assert not (tmp_path / "out").exists()
