"""Manifests identify a job, and the finished rows of an interrupted shard are restored."""

import errno
import os
from dataclasses import replace

import numpy as np
import pytest

from gerund.errors import DataError, ResourceError
from gerund.jobs.checkpoints import InputFiles, Manifest, ShardCheckpoint, has_saved_rows, saved_rows, working_folder

ONE = Manifest(
    "embed",
    {"seed": 0, "attention": {"name": "causal", "k": None}, "fingerprint": "f", "sizes": (1, 2)},
    "digest",
    "the rows of a.txt",
    {"model": "m"},
)


def test_goes_through_a_file(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(replace(ONE, stage="making", facts={"truncated": 3}).to_json())
    found = Manifest.read(path)
    assert (found.stage, found.facts) == ("making", {"truncated": 3})
    assert found.key == ONE.key
    assert ONE.difference(found) == ""


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ConnectionResetError(errno.ECONNRESET, "reset"), OSError), (OSError(errno.ENOSPC, "full"), ResourceError)],
)
def test_an_error_that_is_not_the_outputs_stays_what_it_is(tmp_path, error, raised):
    with pytest.raises(raised, match=r"^.Errno|cannot write .*full$"), working_folder(tmp_path / "out"):
        raise error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "kind": "embed"}', "[" * 100_000])
def test_what_is_none(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    assert Manifest.read(tmp_path / "manifest.json") is None
    assert Manifest.read(tmp_path / "absent.json") is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"settings": {**ONE.settings, "seed": 1}}, "seed was 0 and is 1"),
        (
            {"settings": {**ONE.settings, "attention": {"name": "bidir", "k": None}}},
            "attention.name was 'causal' and is 'bidir'",
        ),
        ({"settings": {**ONE.settings, "new": "x"}}, "new was None and is 'x'"),
        (
            {"settings": {**ONE.settings, "fingerprint": "g"}, "names": {"model": "n"}},
            "the model was m and is n, with other weights or settings",
        ),
        ({"settings": {**ONE.settings, "fingerprint": "g", "seed": 2}}, "seed was 0 and is 2"),
        ({"inputs": "other", "inputs_name": "the rows of b.txt"}, "the rows of a.txt have changed"),
        ({"kind": "mine"}, "it was begun by 'embed'"),
    ],
)
def test_differences_are_told_with_both_values(changes, told):
    other = replace(ONE, **changes)
    assert other.difference(ONE) == told
    assert other.key != ONE.key


def test_names_stages_and_facts_do_not_count():
    other = replace(ONE, names={"model": "moved"}, inputs_name="the rows of b.txt", stage="x", facts={"y": 1})
    assert (other.key, other.difference(ONE)) == (ONE.key, "")


def test_inputs_that_change(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    inputs = InputFiles([path])
    assert not inputs.changed()
    os.utime(path, (1, 1))
    assert not inputs.changed(), "only touched"
    path.write_text("two")
    assert inputs.changed()
    assert InputFiles([path]).digest != inputs.digest
    path.unlink()
    with pytest.raises(DataError, match=r"a.txt: cannot be read"):
        inputs.changed()
    with pytest.raises(DataError, match="absent: cannot be read"):
        InputFiles([tmp_path / "absent"])


ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)


def filled(folder, shard="shard", number=0, of=1):
    vectors = np.full_like(ROWS, np.nan)
    done = ShardCheckpoint(folder, shard).encoding_pass(number, of).restore(vectors)
    np.testing.assert_array_equal(vectors[sorted(done)], ROWS[sorted(done)])
    assert np.isnan(vectors[sorted(set(range(8)) - done)]).all()
    return sorted(done)


def test_rows_come_back_into_their_places(tmp_path):
    with ShardCheckpoint(tmp_path / "a", "shard") as shard:
        shard.encoding_pass().save([5, 1], ROWS[[5, 1]])
        shard.encoding_pass().save([2], ROWS[[2]])
    assert filled(tmp_path / "a") == [1, 2, 5]
    assert filled(tmp_path / "a", shard="another") == []
    assert filled(tmp_path / "a", number=1, of=2) == []


def test_another_width_is_not_taken(tmp_path):
    with ShardCheckpoint(tmp_path / "a", "shard") as shard:
        shard.encoding_pass().save([1], ROWS[[1]])
    assert ShardCheckpoint(tmp_path / "a", "shard").encoding_pass().restore(np.zeros((8, 2), np.float32)) == frozenset()


def test_rows_wait_only_so_long(tmp_path):
    at_once, later = (
        ShardCheckpoint(tmp_path / name, "shard", seconds=time) for name, time in (("a", 0.0), ("b", 1e9))
    )
    for shard in (at_once, later):
        shard.encoding_pass().save([1], ROWS[[1]])
    assert has_saved_rows(tmp_path / "a")
    assert not has_saved_rows(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt), later:
        raise KeyboardInterrupt
    assert has_saved_rows(tmp_path / "b")
    later.discard()
    assert not (tmp_path / "b").exists()


def test_rows_count_once_their_last_reading_is_done(tmp_path):
    told = []
    with ShardCheckpoint(tmp_path / "a", "shard", advance=told.append) as shard:
        shard.encoding_pass(0, 2).save([0, 1], ROWS[:2])
        assert shard.rows == 0
        shard.encoding_pass(1, 2).save([0], ROWS[:1])
    again = ShardCheckpoint(tmp_path / "a", "shard", advance=told.append)
    assert again.encoding_pass(0, 2).restore(ROWS.copy()) == {0, 1}
    assert again.encoding_pass(1, 2).restore(ROWS.copy()) == {0}
    assert (shard.rows, again.rows, again.resumed, told) == (1, 1, 1, [1, 1])


def test_without_a_folder_nothing_is_kept():
    with ShardCheckpoint(None, "shard") as shard:
        shard.encoding_pass().save([1], ROWS[[1]])
        assert shard.encoding_pass().restore(ROWS.copy()) == frozenset()


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_an_append_that_was_broken_off_shifts_nothing(tmp_path, monkeypatch, after):
    """The disk refuses at some flush of the second append; the third comes out right all the same."""
    shard = ShardCheckpoint(tmp_path / "a", "shard")
    shard.encoding_pass().save([0], ROWS[:1])
    shard.flush()
    calls = 0

    def full(handle):
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        shard.encoding_pass().save([4, 6], ROWS[[4, 6]])
        if after < 2:
            with pytest.raises(ResourceError, match=r"cannot store vectors in .*a: No space left"):
                shard.flush()
    shard.encoding_pass().save([7], ROWS[[7]])
    shard.flush()
    assert filled(tmp_path / "a") == [0, 4, 6, 7]


@pytest.mark.parametrize("name", ["keys", "vectors"])
@pytest.mark.parametrize("lost", [1, 11, 20, 30])
def test_what_a_kill_has_torn_is_cut_off(tmp_path, name, lost):
    with ShardCheckpoint(tmp_path / "a", "shard") as shard:
        shard.encoding_pass().save([0, 1, 2], ROWS[:3])
    torn = tmp_path / "a" / name
    os.truncate(torn, torn.stat().st_size - lost)
    left = filled(tmp_path / "a")
    assert left == [0, 1, 2][: len(left)]
    assert len(left) < 3
    with ShardCheckpoint(tmp_path / "a", "shard") as shard:
        shard.encoding_pass().save([5], ROWS[[5]])
    assert filled(tmp_path / "a") == [*left, 5]


def test_rows_that_are_kept_are_counted_without_being_opened(tmp_path):
    assert saved_rows(tmp_path / "a", "shard", 8) == 0
    with ShardCheckpoint(tmp_path / "a", "shard") as shard:
        shard.encoding_pass(0, 2).save([0, 1], ROWS[:2])
        shard.encoding_pass(1, 2).save([0], ROWS[:1])
    assert saved_rows(tmp_path / "a", "shard", 8, passes=2) == 1
    assert saved_rows(tmp_path / "a", "shard", 8) == 2
    assert saved_rows(tmp_path / "a", "another", 8) == 0
