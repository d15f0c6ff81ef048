"""An index is searched by whoever lies in its space, and written to by the encoder that made it alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import FingerprintError
from gerund.models.heads import ProjectionHead
from gerund.models.light_head import HeadConfig
from gerund.retrieval.documents import Chunking
from gerund.retrieval.store import IndexMetadata
from tests.tiny import save_tiny

DOCUMENTS = [gerund.Document("bread", "Bread is made of flour."), gerund.Document("rail", "Trains need rails.")]


def student(folder: Path, teacher: gerund.LanguageModel, seed: int, dimensions: int | None = None):
    """A model that declares its teacher's space."""
    base = gerund.load(save_tiny(folder / f"base{seed}", "llama"))
    torch.manual_seed(seed)
    settings = HeadConfig(
        base.runtime.state_width, dimensions or teacher.dimensions, "linear", space=teacher.fingerprint()
    )
    base.save(folder / f"student{seed}")
    ProjectionHead(settings).save(folder / f"student{seed}")
    return gerund.load(folder / f"student{seed}")


@pytest.fixture
def teacher(tmp_path):
    return gerund.load(save_tiny(tmp_path / "teacher", "gpt2"), attention="causal")


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "in a folder"])
def test_student_and_teacher_search_each_other_s_index(tmp_path, teacher, kept):
    if kept:
        pytest.importorskip("lancedb")
    one, other = student(tmp_path, teacher, 1), student(tmp_path, teacher, 2)
    assert one.space == other.space == teacher.space == teacher.fingerprint()
    assert len({one.fingerprint(), other.fingerprint(), teacher.fingerprint()}) == 3
    for number, maker in enumerate((teacher, one)):
        where = tmp_path / f"{number}.index" if kept else None
        index = gerund.open_index(where, maker, chunking=Chunking(tokens=16))
        index.add_documents(DOCUMENTS)
        for searcher in (teacher, one, other):
            opened = gerund.open_index(index.store if where is None else where, searcher)
            hits = opened.search("flour", k=2, mode="vectors")
            wanted = maker.encode([hit.text for hit in hits]) @ searcher.encode("flour")
            assert [hit.similarity for hit in hits] == pytest.approx(wanted.tolist(), abs=2e-3)


def test_documents_are_added_by_the_maker_alone(tmp_path, teacher):
    index = gerund.open_index(None, teacher, chunking=Chunking(tokens=16))
    index.add_documents(DOCUMENTS)
    opened = gerund.open_index(index.store, student(tmp_path, teacher, 1))
    with pytest.raises(FingerprintError, match="may search it"):
        opened.add_documents(DOCUMENTS)


def test_others_are_refused(tmp_path, teacher):
    index = gerund.open_index(None, teacher, chunking=Chunking(tokens=16))
    index.add_documents(DOCUMENTS)
    stranger = gerund.load(save_tiny(tmp_path / "stranger", "gpt2"), attention="bidir")
    with pytest.raises(FingerprintError, match="was made with"):
        gerund.open_index(index.store, stranger)
    with pytest.raises(FingerprintError, match="was made with"):
        gerund.open_index(index.store, student(tmp_path, teacher, 3, dimensions=teacher.dimensions - 1))


@pytest.mark.slow
def test_the_space_is_no_longer_declared_when_the_vectors_are_others(tmp_path, teacher):
    found = student(tmp_path, teacher, 1)
    again = gerund.load(tmp_path / "student1", pooling="last")
    assert not np.allclose(found.encode("flour"), again.encode("flour"))
    assert again.space == again.fingerprint() != teacher.fingerprint()
    another = gerund.load(tmp_path / "student1", prompt="passage: ")
    assert another.space == another.fingerprint()
    assert found.with_encoder(another.encoder).space != teacher.fingerprint()


def test_indices_of_earlier_versions_are_read():
    chunking = Chunking()
    about = IndexMetadata("f", "m", 3, "causal, mean", chunking, None, "s")
    assert IndexMetadata.from_json(about.to_json(), "it") == about
    earlier = about.to_json().replace(', "space": "s"', "")
    assert IndexMetadata.from_json(earlier, "it").space == ""
