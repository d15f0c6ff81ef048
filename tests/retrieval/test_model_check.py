"""A model that can't search an index is refused by its files; what they don't tell is left to its fingerprint."""

import json
import shutil

import pytest

import gerund
from gerund import light_entry
from gerund.errors import FingerprintError
from gerund.models.head_settings import HeadConfig
from gerund.retrieval.model_check import refuse_other_model
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


def test_other_sizes_are_refused_before_loading(folders, index, unloaded):
    message = r"was made with .*maker, not with .*wide, whose vectors have 64 dimensions, not 32; open it with"
    with pytest.raises(FingerprintError, match=message):
        gerund.open_index(index.store, folders / "wide").search("bread")
    with pytest.raises(FingerprintError, match="deep, which has 6 layers of width 32, not 4 layers of width 32"):
        gerund.open_index(index.store, str(folders / "deep")).ask("What is bread made of?")
    with pytest.raises(FingerprintError, match="not with default"):
        gerund.open_index(index.store, "default").search("bread")
    with pytest.raises(FingerprintError, match="wide"):  # and before the model that answers
        gerund.open_index(index.store, folders / "wide", answer_with=folders / "maker").lm  # noqa: B018
    hits = gerund.open_index(index.store, folders / "wide").search("bread", mode="words")
    assert hits[0].source == "bread", "words need no model"


def test_what_files_do_not_tell_is_left_to_the_fingerprint(folders, index, tmp_path):
    about = index.about
    for name in ("maker", "alike"):
        refuse_other_model(about, "my.index", folders / name)
    with pytest.raises(FingerprintError, match="was made with"):
        gerund.open_index(index.store, folders / "alike").search("bread")
    # Without the files of the index's model only dimensions tell.
    gone = gerund.open_index(None, gerund.load(shutil.copytree(folders / "maker", tmp_path / "gone")), chunking=SMALL)
    gone.add_documents(DOCUMENTS)
    shutil.rmtree(tmp_path / "gone")
    refuse_other_model(gone.about, "my.index", folders / "deep")
    with pytest.raises(FingerprintError, match="64 dimensions"):
        refuse_other_model(gone.about, "my.index", folders / "wide")
    # Neither do files that can't be read, an adapter, or a hub id.
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[]", encoding="utf-8")
    spec = gerund.ModelSpec.of(folders / "wide", adapter=tmp_path / "adapter")
    for given in (tmp_path / "broken", tmp_path / "nowhere", spec, "someone/some-model"):
        refuse_other_model(about, "my.index", given)


def test_a_shared_space_is_not_refused(folders, index, tmp_path):
    about = index.about
    student = shutil.copytree(folders / "wide", tmp_path / "student")
    head = HeadConfig(64, about.dimensions, "linear", space=about.fingerprint)
    (student / "head.json").write_text(json.dumps(head.to_dict()), encoding="utf-8")
    refuse_other_model(about, "my.index", student)
    head = HeadConfig(64, about.dimensions, "linear", space="0123456789abcdef")
    (student / "head.json").write_text(json.dumps(head.to_dict()), encoding="utf-8")
    with pytest.raises(FingerprintError, match="layers of width 64"):
        refuse_other_model(about, "my.index", student)


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
