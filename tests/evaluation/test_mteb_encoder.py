"""The adapter to MTEB: its protocol, its own mock tasks, prompts, and vectors that nothing can be scored on."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ModelError
from gerund.evaluation.mteb import MTEBEncoder
from gerund.evaluation.systems.base import EmbeddingCache, key_of_text
from gerund.evaluation.systems.language_model import language_model_system
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import PromptText
from tests.evaluation.tables import Table, forbid_network, random_table
from tests.tiny import byte_tokenizer, tiny


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


@pytest.fixture(scope="module")
def lm():
    tokenizer = byte_tokenizer()
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    tokenizer.model_max_length = 512
    return gerund.LanguageModel(model, tokenizer, EncoderConfig(AttentionPlan("causal")), name="some/model")


def task_named(name="STSBenchmark", kind="STS"):
    return SimpleNamespace(name=name, type=kind)


def test_mteb_takes_it_for_an_encoder(lm):
    from mteb.models import CrossEncoderProtocol, EncoderProtocol, SearchProtocol

    encoder = MTEBEncoder(lm)
    assert isinstance(encoder, EncoderProtocol)
    assert not isinstance(encoder, (SearchProtocol, CrossEncoderProtocol))


@pytest.mark.parametrize(
    "kind", ["STS", "PairClassification", "Classification", "Clustering", "Retrieval", "Reranking"]
)
def test_mtebs_own_mock_tasks_run(lm, kind):
    import mteb
    from mteb import mocks

    task = getattr(mocks, f"Mock{kind}Task")()
    [result] = mteb.evaluate(
        MTEBEncoder(lm, show_progress=False), task, cache=None, co2_tracker=False, show_progress_bar=False
    ).task_results
    assert np.isfinite(result.get_score())


def test_results_are_kept_under_name_and_fingerprint(lm):
    meta = MTEBEncoder(lm).mteb_model_meta
    assert (meta.name, meta.revision) == ("some/model", lm.fingerprint())
    other = lm.with_encoder(replace(lm.encoder, attention=AttentionPlan("bidir")))
    assert MTEBEncoder(other).mteb_model_meta.revision != meta.revision
    assert MTEBEncoder(lm, name="me/it").mteb_model_meta.name == "me/it"


def test_vectors_are_those_of_the_model_in_their_order(lm):
    batches = [{"text": ["a cat", "", "a very long dog"]}, {"text": ["an inn"]}]
    texts = [text for batch in batches for text in batch["text"]]
    raw = MTEBEncoder(lm).encode(batches, task_metadata=task_named(), hf_split="test", hf_subset="default")
    np.testing.assert_allclose(raw, lm.encode(texts, normalize=False, empty="zeros"), atol=1e-6)
    unit = MTEBEncoder(lm, normalize=True).encode(batches, task_metadata=task_named())
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), [1, 0, 1, 1], atol=1e-5)
    kept = EmbeddingCache()
    MTEBEncoder(language_model_system("kept", lm, kept)).encode(batches, task_metadata=task_named())
    assert key_of_text("an inn") in kept.store(language_model_system("tiny", lm).cache_key, "")


def test_documents_may_have_a_prompt_of_their_own():
    table = random_table("a")
    encoder = MTEBEncoder(table, prompts={"SciDocsRR": "q"}, document_prompts={"SciDocsRR": "d"})
    for name, role in (("SciDocsRR", "document"), ("SciDocsRR", "query"), ("SciFact", "document")):
        encoder.encode([{"text": ["a"]}], task_metadata=task_named(name, "Reranking"), prompt_type=role)
    assert [prompt for prompt, _ in table.asked] == ["d", "q", None]


def test_the_name_chooses_the_prompt_before_the_type_and_documents_have_none():
    prompts = {"STS": "by type", "SICK-R": "by name", "Retrieval": "find"}
    asked = [
        (task_named(), None, "by type"),
        (task_named("SICK-R"), None, "by name"),
        (task_named("X", "Clustering"), None, None),
        (task_named("NFCorpus", "Retrieval"), "query", "find"),
        (task_named("NFCorpus", "Retrieval"), "document", None),
    ]
    for metadata, role, wanted in asked:
        table = random_table(["a"])
        MTEBEncoder(table, prompts=prompts).encode([{"text": ["a"]}], task_metadata=metadata, prompt_type=role)
        assert table.asked == [(wanted, ["a"])]


@pytest.mark.parametrize("given", [{}, {"Retrieval": "find: "}])
def test_queries_and_documents_are_read_in_the_encoders_own_prompts(lm, given):
    from mteb.types import PromptType

    own = lm.with_encoder(replace(lm.encoder, prompts={"query": "Ask", "document": "{text} is told"}))
    encoder, metadata = MTEBEncoder(own, prompts=given), task_named("X", "Retrieval")
    for role, wanted in ((PromptType.query, given.get("Retrieval", "Ask")), (PromptType.document, "{text} is told")):
        found = encoder.encode([{"text": ["a cat"]}], task_metadata=metadata, prompt_type=role)
        np.testing.assert_array_equal(found, lm.encode(["a cat"], PromptText(wanted), normalize=False))
    alone = encoder.encode([{"text": ["a cat"]}], task_metadata=task_named())
    np.testing.assert_array_equal(alone, lm.encode(["a cat"], normalize=False))


def test_mtebs_own_roles_are_understood():
    from mteb.types import PromptType

    table = random_table(["a"])
    for role in (PromptType.query, PromptType.document):
        encoder = MTEBEncoder(table, prompts={"STS": "p"})
        encoder.encode([{"text": ["a"]}], task_metadata=task_named(), prompt_type=role)
    assert [prompt for prompt, _ in table.asked] == ["p", None]


def test_similarities_are_cosines_and_zero_for_zero_vectors():
    encoder = MTEBEncoder(random_table(["a"]))
    a, b = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[4.0, 3.0], [1.0, 0.0]])
    torch.testing.assert_close(encoder.similarity(a, b), torch.tensor([[0.96, 0.6], [0.0, 0.0]]))
    torch.testing.assert_close(encoder.similarity_pairwise(a, torch.tensor(b)), torch.tensor([0.96, 0.0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_vectors_that_are_not_finite_are_refused(value):
    with pytest.raises(ModelError, match="table gives vectors that are not finite"):
        MTEBEncoder(Table({"a": [1.0, value]})).encode([{"text": ["a"]}], task_metadata=task_named())


def test_it_is_public():
    from gerund import evaluation

    assert evaluation.MTEBEncoder is MTEBEncoder
