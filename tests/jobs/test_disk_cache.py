"""A cache on the disk: what was used last stays, what does not fit goes, and nothing is half there."""

import os
import sys
from pathlib import Path

import pytest

from gerund.errors import ConfigError, InputError, ResourceError
from gerund.jobs.disk_cache import DiskCache, parse_size, user_cache

KEYS = [f"{number:08d}" for number in range(5)]


def put(cache, key, size=100):
    cache.put(key, lambda folder: (folder / "data").write_bytes(b"x" * size))


def test_what_was_used_last_stays(tmp_path):
    cache = DiskCache(tmp_path / "a" / "cache", most_bytes=300)
    for place, key in enumerate(KEYS[:3]):
        put(cache, key)
        os.utime(cache.folder / key, ns=(place, place))
    assert list(cache.sizes().values()) == [100, 100, 100]
    assert cache.get(KEYS[0]) == cache.folder / KEYS[0]  # used now
    put(cache, KEYS[3])
    assert set(cache.sizes()) == {KEYS[0], KEYS[2], KEYS[3]}
    assert cache.get(KEYS[1]) is None
    put(cache, KEYS[4], size=250)
    assert set(cache.sizes()) == {KEYS[4]}
    put(cache, KEYS[4], size=10)  # replaced
    assert cache.sizes() == {KEYS[4]: 10}
    put(cache, KEYS[0], size=301)  # never fits, and drives nothing out
    assert cache.get(KEYS[0]) is None
    assert cache.sizes() == {KEYS[4]: 10}
    cache.drop(KEYS[4])
    cache.drop(KEYS[4])
    assert cache.sizes() == {}


def test_only_its_own_folders_are_ever_removed(tmp_path):
    (tmp_path / "my notes").mkdir()
    (tmp_path / "my notes" / "a.txt").write_text("x" * 1000)
    (tmp_path / "file.txt").write_text("x" * 1000)
    cache = DiskCache(tmp_path, most_bytes=10)
    put(cache, KEYS[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "my notes"]
    for key in ("../evil", "", "UPPER-CASE", "a/b"):
        with pytest.raises(InputError, match="8 to 64 letters and digits"):
            cache.get(key)


def test_who_fails_while_writing_leaves_nothing(tmp_path):
    cache = DiskCache(tmp_path / "cache")

    def fail(folder):
        (folder / "data").write_bytes(b"x")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        cache.put(KEYS[0], fail)
    assert cache.get(KEYS[0]) is None
    assert list(cache.folder.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_others_cannot_read_it(tmp_path):
    cache = DiskCache(tmp_path / "cache")
    put(cache, KEYS[0])
    assert cache.folder.stat().st_mode & 0o077 == 0


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache")
    assert cache.get(KEYS[0]) is None
    assert cache.sizes() == {}
    with pytest.raises(ResourceError, match="cannot be written"):
        put(cache, KEYS[0])
    with pytest.raises(ResourceError, match="cannot be written"):
        put(DiskCache(tmp_path / "file"), KEYS[0])


def test_where_it_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache("sessions") == tmp_path / "gerund" / "sessions"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache("sessions").is_relative_to(Path.home())


@pytest.mark.parametrize("text", ["", "2 apples", "-1", "GB", "1e9", "nan"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match="a size is a number"):
        parse_size(text)


def test_sizes():
    assert [parse_size(text) for text in ("0", "10", "3kB", "2GiB", " 1 T ")] == [0, 10, 3000, 2 * 10**9, 10**12]
