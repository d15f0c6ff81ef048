"""Shards run in this process, in several, or on Ray, and killed workers are replaced."""

import os
import platform
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from gerund.errors import ConfigError, InputError, ResourceError
from gerund.jobs import engine
from gerund.jobs.engine import SHARED_FILE, LocalEngine, StatefulWork, cores, map_shards, shared_folder_check
from tests.jobs.shard_work import killed_once, killed_or_busy_once, pages_taken, square


def where(_number: int) -> int:
    return os.getpid()


def killed(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_the_peak_memory_needs_no_module_of_unix(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert engine.peak_resident_mib() >= 0


@pytest.mark.parametrize("workers", [1, 2])
def test_every_shard_once_with_its_result(workers):
    found = dict(map_shards(LocalEngine(workers), square, iter(range(7))))
    assert found == {number: number * number for number in range(7)}


def test_one_worker_or_one_shard_needs_no_process():
    assert {pid for _, pid in map_shards(LocalEngine(1), where, range(3))} == {os.getpid()}
    assert [pid for _, pid in map_shards(LocalEngine(2), where, [1])] == [os.getpid()]
    assert list(map_shards(LocalEngine(2), where, [])) == []


def test_a_process_for_the_work_alone_keeps_its_memory():
    for _, (pid, frozen, pages) in map_shards(LocalEngine(2), pages_taken, range(4)):
        assert pid != os.getpid()
        assert frozen > 1000
        if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
            assert pages < 5 * 2**18 * 8 / resource.getpagesize()  # 20 times as many where each array is new memory


def test_few_shards_are_read_ahead():
    read = []

    def shards():
        for number in range(50):
            read.append(number)
            yield number

    with closing(map_shards(LocalEngine(2), square, shards())) as finished:
        next(finished)
        assert len(read) <= 5


@pytest.mark.slow
def test_a_process_that_is_killed():
    with pytest.raises(ResourceError, match="a process was killed, perhaps because memory ran out"):
        list(map_shards(LocalEngine(2), killed, range(9)))


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from gerund.errors import ResourceError\n"
        "from gerund.jobs.engine import LocalEngine, map_shards\n"
        "try:\n    print(list(map_shards(LocalEngine(2), abs, [-1, -2, -3])))\n"
        "except ResourceError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=100)
    assert "needs `if __name__" in done.stdout


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced(tmp_path):
    shards = [str(tmp_path / name) for name in "abc"]
    assert sorted(map_shards(LocalEngine(2), killed_once, shards)) == [(one, one[-1]) for one in shards]


def test_a_busy_process_is_not_waited_for_when_another_is_killed(tmp_path):
    begun = time.monotonic()
    shards = [str(tmp_path / name) for name in ("busy", "killed")]
    assert sorted(name for _, name in map_shards(LocalEngine(2), killed_or_busy_once, shards)) == ["busy", "killed"]
    assert time.monotonic() - begun < 60


def opener(base):
    os.environ["OPENED"] = str(int(os.environ.get("OPENED", "0")) + 1)
    return partial(in_turn, base)


def in_turn(base, number):
    return base + number, os.environ["OPENED"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pool_makes_what_it_holds_once(workers, monkeypatch):
    monkeypatch.setenv("OPENED", "0")
    with LocalEngine(workers).pool(StatefulWork(partial(opener, 10))) as pool:
        for _ in range(2):
            assert sorted(pool.map(range(4))) == [(number, (10 + number, "1")) for number in range(4)]


def slow(number):
    time.sleep(60 if number else 0)
    return number


def test_whoever_stops_reading_does_not_wait_for_the_rest():
    start = time.monotonic()
    with closing(map_shards(LocalEngine(2), slow, range(3))) as finished:
        assert next(finished) == (0, 0)
    assert time.monotonic() - start < 50


def test_workers():
    assert LocalEngine().workers == cores() >= 1
    with pytest.raises(ConfigError, match="workers must be from 1 to 100000, got 0"):
        LocalEngine(0)
    with pytest.raises(ConfigError, match="from 1 to 100000, got"):
        LocalEngine(10**30)


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


CHILD = """
from gerund.jobs.engine import peak_resident_mib
print(peak_resident_mib())
held = bytearray(b"x") * (200 * 2**20)
print(peak_resident_mib())
"""
LARGE_PARENT = f"""
import subprocess, sys
held = bytearray(b"x") * (3 * 2**28)
print(subprocess.run([sys.executable, "-c", {CHILD!r}], capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak counts the process that starts it")
def test_the_peak_is_of_this_process_alone_and_grows_with_what_is_held():
    done = subprocess.run([sys.executable, "-c", LARGE_PARENT], capture_output=True, text=True, check=True)
    before, holding = map(float, done.stdout.split())
    assert 5 < before < 500
    assert 190 < holding - before < 250
