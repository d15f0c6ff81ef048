"""Folders are written whole or not at all, whatever happens on the way."""

import ctypes
import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import gerund
from gerund.errors import OutputExistsError, ResourceError
from gerund.jobs import files
from gerund.jobs.files import atomic_folder, write_atomic

KILLED = 77
pytestmark = pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(target: Path, text: str, *, overwrite: bool = True) -> None:
    with atomic_folder(target, overwrite=overwrite) as work:
        (work / "inner").mkdir()
        for name in ("a.txt", "b.txt", "inner/c.txt"):
            (work / name).write_text(f"{name} {text}")


def killed_after(operations: int, action) -> bool:
    """Run ``action`` in a child that dies right before its n-th file operation; tell whether it died."""
    child = os.fork()
    if child == 0:  # pragma: no cover
        left = operations

        def hook(event: str, args: tuple) -> None:
            nonlocal left
            writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if writes or event.startswith(("os.", "shutil.", "ctypes.dlsym")):
                left -= 1
                if left < 0:
                    os._exit(KILLED)

        sys.addaudithook(hook)
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), code
    return code == KILLED


def kills(action, check) -> int:
    """Kill ``action`` before its first, second, ... operation and check what is left; return how many there are."""
    for operation in range(1000):
        died = killed_after(operation, action)
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
    seen, left = [], []

    def check(died: bool) -> None:
        left.append(len(list(tmp_path.glob(".out.*.part"))))
        # Without an exchange there is one moment in which the old folder is whole under another name.
        place = target if target.exists() else tmp_path / ".out.old"
        assert contents(place) in (old, new)
        seen.append(contents(place) == new)
        write(target, "old")

    assert kills(lambda: write(target, "new"), check) > 8
    assert seen == sorted(seen)  # first old, from some operation on new
    assert seen[-1]
    assert max(left) == 1, "what was left by one is removed by the next"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["new", "old", "out"]


HOLDER = """
import sys
from pathlib import Path
from gerund.jobs.files import atomic_folder
with atomic_folder(Path(sys.argv[1]), overwrite=True) as work:
    (work / "a.txt").touch()
    print(work.parent.name, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_one_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    target = tmp_path / "out"
    for name in (".out.0123abcd.part", ".out.v2.0123abcd.part", ".out.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    bystanders = {path.name for path in tmp_path.iterdir()}
    (tmp_path / ".out.v2.0123abcd.part" / "lock").touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(target)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        work = process.stdout.readline().decode().strip()
        assert work.startswith(".out.")
        write(target, "meanwhile")
        assert {path.name for path in tmp_path.iterdir()} == bystanders | {"out", work}, "the other one is still alive"
        process.kill()
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
    with pytest.raises(ResourceError, match=f"out was not written: {os.strerror(code)}"):
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
        with pytest.raises(ResourceError, match="out was not written"):
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
    with pytest.raises(ResourceError, match="cannot write beside"):
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
