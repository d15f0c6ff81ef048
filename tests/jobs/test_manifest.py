"""Two runs belong together exactly when everything that determines the result is the same."""

import os
from dataclasses import replace

import pytest

from gerund.errors import DataError
from gerund.jobs.checkpoints import InputFiles, Manifest

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
