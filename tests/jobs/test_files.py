"""Atomic files and folders survive a kill at any step, and locks keep two processes apart."""

import ctypes
import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import pytest

import gerund
from gerund.errors import InputError, OutputExistsError, ResourceError
from gerund.jobs import files
from gerund.jobs.files import (
    atomic_file,
    atomic_folder,
    lock_folder,
    make_folder,
    remove_abandoned,
    require_new_files,
    require_regular_file,
    write_atomic,
)
from tests.cli.helpers import run_cli
from tests.jobs.crashes import killed_before


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
    with pytest.raises(ResourceError, match="cannot write"):
        write_atomic(tmp_path / "file" / "a.txt", "x")
    with pytest.raises(ResourceError, match=r"cannot write .*: File name too long"):
        write_atomic(tmp_path / ("x" * 300), "x")
    with pytest.raises(ResourceError, match="cannot make the folder"):
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


@contextmanager
def process_within(block: str, target: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a process that stays within ``block`` until it is killed; yields it and the name that it prints."""
    code = f"""
import sys
from pathlib import Path
from gerund.jobs.files import atomic_folder, lock_folder
with {block}(Path(sys.argv[1])) as work:
    print(work and work.parent.name, flush=True)
    sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(target)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process, process.stdout.readline().decode().strip()
        process.kill()


@pytest.fixture
def holder(tmp_path):
    """A process that holds a folder's lock until it is killed."""
    with process_within("lock_folder", tmp_path / "out") as (process, _):
        yield process


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


pytestmark = pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(target: Path, text: str, *, overwrite: bool = True) -> None:
    with atomic_folder(target, overwrite=overwrite) as work:
        (work / "inner").mkdir()
        for name in ("a.txt", "b.txt", "inner/c.txt"):
            (work / name).write_text(f"{name} {text}")


def kills(action, check) -> int:
    """Kill ``action`` before its first, second, ... step on the disk and check what is left; return how many it has."""
    for operation in range(1000):
        died = killed_before(operation, action)
        check(died)
        if not died:
            return operation
    raise AssertionError("it never finishes")


@pytest.mark.slow
def test_killed_anywhere_leaves_nothing_or_all(tmp_path: Path) -> None:
    target = tmp_path / "parent" / "out"
    write(tmp_path / "wanted", "new")

    def check(died: bool) -> None:
        if target.exists():
            assert contents(target) == contents(tmp_path / "wanted")
            for path in sorted(target.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            target.rmdir()
        else:
            assert died

    assert kills(lambda: write(target, "new", overwrite=False), check) > 8


@pytest.mark.slow
@pytest.mark.parametrize("can_exchange", [True, False])
def test_killed_anywhere_leaves_old_or_new(tmp_path: Path, can_exchange: bool, monkeypatch) -> None:
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    target = tmp_path / "out"
    for text in ("old", "new"):
        write(tmp_path / text, text)
    old, new = contents(tmp_path / "old"), contents(tmp_path / "new")
    write(target, "old")
    seen, left, names = [], [], set()

    def check(died: bool) -> None:
        left.append(len(list(tmp_path.glob(".out.*.part"))))
        # Without an exchange there is one moment in which the old folder is whole under another name.
        place = target if target.exists() else tmp_path / ".out.old"
        names.add(place.name)
        assert contents(place) in (old, new)
        seen.append(contents(place) == new)
        write(target, "old")

    assert kills(lambda: write(target, "new"), check) > 8
    assert seen == sorted(seen)  # first old, from some operation on new
    assert seen[-1]
    assert names == ({"out"} if can_exchange else {"out", ".out.old"})
    assert max(left) == 1, "what was left by one is removed by the next"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["new", "old", "out"]


def test_what_a_killed_one_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for name in (".out.0123abcd.part", ".out.v2.0123abcd.part", ".out.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    bystanders = {path.name for path in tmp_path.iterdir()}
    (tmp_path / ".out.v2.0123abcd.part" / "lock").touch()
    with process_within("atomic_folder", target) as (_, work):
        assert work.startswith(".out.")
        write(target, "meanwhile")
        assert {path.name for path in tmp_path.iterdir()} == bystanders | {"out", work}, "the other one is still alive"
    write(target, "afterwards")
    assert {path.name for path in tmp_path.iterdir()} == bystanders | {"out"}


@pytest.mark.slow
def test_killed_anywhere_a_saved_model_is_whole(tmp_path: Path, tiny_folder: Path) -> None:
    lm = gerund.load(tiny_folder, k=1, dtype="float32")
    lm.fingerprint()  # threads do not survive a fork
    other = gerund.load(tiny_folder, k=2, dtype="float32")
    target = tmp_path / "out"
    other.save(target)
    old = contents(target)
    lm.save(tmp_path / "wanted")
    new = contents(tmp_path / "wanted")
    assert old != new
    seen = []

    def check(died: bool) -> None:
        seen.append(contents(target) == new)
        assert seen[-1] or contents(target) == old

    assert kills(lambda: lm.save(target, overwrite=True), check) > 20
    assert seen[0] is False
    assert seen[-1] is True


def test_exchange_is_one_step(tmp_path: Path) -> None:
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "renameat2"):
        pytest.skip("only Linux exchanges two names in one step")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert files._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_full_disk_leaves_nothing_behind(tmp_path: Path, code: int, monkeypatch) -> None:
    write(tmp_path / "out", "old")
    before = contents(tmp_path)

    def full(path: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "flush_folder", full)
    with pytest.raises(ResourceError, match=f"cannot write .*out: {os.strerror(code)}"):
        write(tmp_path / "out", "new")
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_limit_of_the_system_while_weights_are_written(tmp_path: Path, tiny_folder: Path) -> None:
    lm = gerund.load(tiny_folder, dtype="float32")
    lm.save(tmp_path / "out")
    before = contents(tmp_path)
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_signal = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old_limit[1]))
        with pytest.raises(ResourceError, match=r"cannot write .*out: "):
            lm.save(tmp_path / "out", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_signal)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_safetensors_says_of_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="No space left on device"), atomic_folder(tmp_path / "out"):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_an_error_on_the_way_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fail() -> None:
        with atomic_folder(tmp_path / "out") as work:
            (work / "a").touch()
            raise error

    with pytest.raises(type(error)):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    (tmp_path / "file").write_text("x")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    with pytest.raises(OutputExistsError, match="out exists already"):
        write(tmp_path / "out", "new", overwrite=False)
    for name in ("file", "nowhere"):
        with pytest.raises(OutputExistsError, match="not a folder"):
            write(tmp_path / name, "new")
    assert (tmp_path / "out" / "a.txt").read_text() == "a.txt old"


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def overtaken() -> None:
        with atomic_folder(target) as work:
            (work / "a.txt").write_text("mine")
            write(target, "theirs")

    with pytest.raises(OutputExistsError, match="in the meantime"):
        overtaken()
    assert (target / "a.txt").read_text() == "a.txt theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_no_folder_can_be_opened_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, which opens files alone."""
    real = os.open

    def open_file(path: str | Path, *more: Any, **options: Any) -> int:
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *more, **options)

    monkeypatch.setattr(os, "open", open_file)
    with files.atomic_folder(tmp_path / "out") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "a.txt").write_text("a")
    monkeypatch.undo()
    assert (tmp_path / "out" / "deep" / "a.txt").read_text() == "a"


def test_an_empty_folder_and_a_link_are_outputs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "new", overwrite=False)
    assert (tmp_path / "empty" / "a.txt").read_text() == "a.txt new"
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write(tmp_path / "link", "newer")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "a.txt").read_text() == "a.txt newer"


def test_overwriting_leaves_no_file_of_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    (tmp_path / "out" / "extra").touch()
    write(tmp_path / "out", "new")
    assert set(contents(tmp_path / "out")) == {"a.txt", "b.txt", "inner/c.txt"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rights_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with atomic_folder(tmp_path / "out") as work:
            (work / "a").touch(0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "out" / "a").stat().st_mode) == 0o640


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot write next to"):
        write(tmp_path / "file" / "out", "new")


def test_one_file(tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "a.bin"
    write_atomic(target, "old")

    def check(died: bool) -> None:
        assert target.read_bytes() == (b"old" if died else b"new") or target.read_bytes() == b"new"

    kills(lambda: write_atomic(target, "new"), check)
    assert target.read_bytes() == b"new"

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        write_atomic(target, "newer")
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
