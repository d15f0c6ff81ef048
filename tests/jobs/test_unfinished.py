"""The rows of a lot that was interrupted are there again, its own and nobody else's."""

import errno
import os

import numpy as np
import pytest

from gerund.errors import ResourceError
from gerund.jobs.unfinished import Unfinished, has_rows

ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)


def filled(folder, lot="lot", number=0, of=1):
    vectors = np.full_like(ROWS, np.nan)
    done = Unfinished(folder, lot).reading(number, of).fill(vectors)
    np.testing.assert_array_equal(vectors[sorted(done)], ROWS[sorted(done)])
    assert np.isnan(vectors[sorted(set(range(8)) - done)]).all()
    return sorted(done)


def test_rows_come_back_into_their_places(tmp_path):
    with Unfinished(tmp_path / "a", "lot") as lot:
        lot.reading().keep([5, 1], ROWS[[5, 1]])
        lot.reading().keep([2], ROWS[[2]])
    assert filled(tmp_path / "a") == [1, 2, 5]
    assert filled(tmp_path / "a", lot="another") == []
    assert filled(tmp_path / "a", number=1, of=2) == []


def test_another_width_is_not_taken(tmp_path):
    with Unfinished(tmp_path / "a", "lot") as lot:
        lot.reading().keep([1], ROWS[[1]])
    assert Unfinished(tmp_path / "a", "lot").reading().fill(np.zeros((8, 2), np.float32)) == frozenset()


def test_rows_wait_only_so_long(tmp_path):
    at_once, later = (Unfinished(tmp_path / name, "lot", seconds=time) for name, time in (("a", 0.0), ("b", 1e9)))
    for lot in (at_once, later):
        lot.reading().keep([1], ROWS[[1]])
    assert has_rows(tmp_path / "a")
    assert not has_rows(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt), later:
        raise KeyboardInterrupt
    assert has_rows(tmp_path / "b")
    later.forget()
    assert not (tmp_path / "b").exists()


def test_rows_count_once_their_last_reading_is_done(tmp_path):
    told = []
    with Unfinished(tmp_path / "a", "lot", advance=told.append) as lot:
        lot.reading(0, 2).keep([0, 1], ROWS[:2])
        assert lot.rows == 0
        lot.reading(1, 2).keep([0], ROWS[:1])
    again = Unfinished(tmp_path / "a", "lot", advance=told.append)
    assert again.reading(0, 2).fill(ROWS.copy()) == {0, 1}
    assert again.reading(1, 2).fill(ROWS.copy()) == {0}
    assert (lot.rows, again.rows, again.resumed, told) == (1, 1, 1, [1, 1])


def test_without_a_folder_nothing_is_kept():
    with Unfinished(None, "lot") as lot:
        lot.reading().keep([1], ROWS[[1]])
        assert lot.reading().fill(ROWS.copy()) == frozenset()


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_an_append_that_was_broken_off_shifts_nothing(tmp_path, monkeypatch, after):
    """The disk refuses at some flush of the second append; the third comes out right all the same."""
    lot = Unfinished(tmp_path / "a", "lot")
    lot.reading().keep([0], ROWS[:1])
    lot.flush()
    calls = 0

    def full(handle):
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        lot.reading().keep([4, 6], ROWS[[4, 6]])
        if after < 2:
            with pytest.raises(ResourceError, match=r"vectors cannot be kept in .*a: No space left"):
                lot.flush()
    lot.reading().keep([7], ROWS[[7]])
    lot.flush()
    assert filled(tmp_path / "a") == [0, 4, 6, 7]


@pytest.mark.parametrize("name", ["keys", "vectors"])
@pytest.mark.parametrize("lost", [1, 11, 20, 30])
def test_what_a_kill_has_torn_is_cut_off(tmp_path, name, lost):
    with Unfinished(tmp_path / "a", "lot") as lot:
        lot.reading().keep([0, 1, 2], ROWS[:3])
    torn = tmp_path / "a" / name
    os.truncate(torn, torn.stat().st_size - lost)
    left = filled(tmp_path / "a")
    assert left == [0, 1, 2][: len(left)]
    assert len(left) < 3
    with Unfinished(tmp_path / "a", "lot") as lot:
        lot.reading().keep([5], ROWS[[5]])
    assert filled(tmp_path / "a") == [*left, 5]
