"""A model whose files show other dimensions than an index has is refused before it is loaded."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest

import gerund
from gerund import light_entry
from gerund.errors import FingerprintError
from gerund.models.light_head import HeadConfig
from gerund.retrieval.model_check import refuse_other_dimensions
from tests.cli.helpers import run_cli
from tests.tiny import save_tiny

SMALL = gerund.Chunking(tokens=40)
DOCUMENTS = [gerund.Document("bread", "Bread is made of flour."), gerund.Document("rail", "Trains need rails.")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of one family: one that makes an index, and others."""
    place = tmp_path_factory.mktemp("models")
    save_tiny(place / "maker")
    save_tiny(place / "wide", hidden_size=64)
    save_tiny(place / "deep", num_hidden_layers=6)
    # The same layers and width as the maker, and other weights.
    save_tiny(place / "alike", intermediate_size=80)
    return place


@pytest.fixture
def index(folders):
    index = gerund.open_index(None, gerund.load(folders / "maker"), chunking=SMALL)
    index.add_documents(DOCUMENTS)
    return index


@pytest.fixture
def unloaded(monkeypatch):
    """Let loading a model fail the test."""

    def load(model):
        raise AssertionError(f"{model} was loaded")

    monkeypatch.setattr(light_entry, "load", load)


def test_other_dimensions_are_refused_before_loading(folders, index, unloaded):
    message = r"was made with .*maker, not with .*wide, whose vectors have 64 dimensions, not 32; open it with"
    with pytest.raises(FingerprintError, match=message):
        gerund.open_index(index.store, folders / "wide").search("bread")
    with pytest.raises(FingerprintError, match="64 dimensions"):
        gerund.open_index(index.store, str(folders / "wide")).ask("What is bread made of?")
    with pytest.raises(FingerprintError, match="not with default"):
        gerund.open_index(index.store, "default").search("bread")
    hits = gerund.open_index(index.store, folders / "wide").search("bread", mode="words")
    assert hits[0].source == "bread", "words need no model"


def test_what_files_do_not_tell_is_left_to_the_fingerprint(folders, index, tmp_path):
    about = index.about
    for name in ("maker", "deep", "alike"):
        refuse_other_dimensions(about, "my.index", folders / name)
    with pytest.raises(FingerprintError, match="was made with"):
        gerund.open_index(index.store, folders / "alike").search("bread")
    # Neither do files that can't be read, an adapter, or a hub id.
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[]", encoding="utf-8")
    spec = gerund.ModelSpec.of(folders / "wide", adapter=tmp_path / "adapter")
    for given in (tmp_path / "broken", tmp_path / "nowhere", spec, "someone/some-model"):
        refuse_other_dimensions(about, "my.index", given)


def test_a_head_has_its_own_dimensions(folders, index, tmp_path):
    for dimensions, name in ((32, "fits"), (16, "other")):
        student = shutil.copytree(folders / "wide", tmp_path / name)
        head = {"format": 1, "head": HeadConfig(64, dimensions, "linear").to_dict()}
        (student / "head.json").write_text(json.dumps(head), encoding="utf-8")
    refuse_other_dimensions(index.about, "my.index", tmp_path / "fits")
    with pytest.raises(FingerprintError, match="16 or 64 dimensions, not 32"):
        refuse_other_dimensions(index.about, "my.index", tmp_path / "other")


@pytest.mark.parametrize(("dimensions", "fits"), [(576, True), (384, True), (640, False)])
def test_adapters_that_come_with_gerund_may_be_taken_or_not(folders, index, tmp_path, dimensions, fits):
    save_tiny(tmp_path / "base", hidden_size=576, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3)
    about = replace(index.about, dimensions=dimensions)
    with nullcontext() if fits else pytest.raises(FingerprintError, match="384 or 576 dimensions, not 640"):
        refuse_other_dimensions(about, "my.index", tmp_path / "base")


def test_commands_refuse_it_too(folders, tmp_path, unloaded, monkeypatch):
    pytest.importorskip("lancedb")
    pytest.importorskip("fastapi")
    where = tmp_path / "my.index"
    gerund.open_index(where, gerund.load(folders / "maker"), chunking=SMALL).add_documents(DOCUMENTS)
    wide = ["-m", folders / "wide"]
    for command in (
        ["search", where, "bread", *wide],
        ["ask", where, "What is bread made of?", *wide],
        ["serve", folders / "wide", "--index", where, "--port", 0],
        ["serve", folders / "maker", "--encoder", folders / "wide", "--index", where, "--port", 0],
    ):
        ran = run_cli(*command)
        assert ran.mistake.startswith(f"{where} was made with "), ran.err
        assert "loading" not in ran.out
