"""Encoders run by sentence-transformers: their vectors, and in an index with another model that answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, ModelError, TextError
from gerund.inference.sentence_encoder import SentenceEncoder
from gerund.worker_model import WorkerModel
from tests.cli.helpers import run_cli

pytest.importorskip("sentence_transformers")

DOCUMENTS = [gerund.Document("bread", "Bread is made of flour."), gerund.Document("rail", "Trains need rails.")]
CHUNKING = gerund.Chunking(tokens=32)


@pytest.fixture(scope="module")
def lm(tiny_folder: Path) -> Any:
    return gerund.load(tiny_folder, attention="bidir", dtype="float32")


@pytest.fixture(scope="module")
def folder(lm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as sentence-transformers reads it, so that it is known what comes out."""
    exported = lm.export(tmp_path_factory.mktemp("exported") / "minilm", "sentence-transformers").folder
    settings = exported / "config_sentence_transformers.json"
    content = {**json.loads(settings.read_text("utf-8")), "prompts": {"query": "find: ", "document": ""}}
    settings.write_text(json.dumps(content), encoding="utf-8")
    return Path(exported)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> SentenceEncoder:
    return SentenceEncoder(str(folder))


class TestVectors:
    def test_they_are_the_models_with_prompts_and_fewer_dimensions(self, encoder: SentenceEncoder, lm: Any) -> None:
        result = encoder.encode_counted(["a cat", "the rain"], prompt_name="query")
        np.testing.assert_allclose(result.vectors, encoder.encode(["a cat", "the rain"], "find: ", True), atol=1e-6)
        assert result.token_counts == [len(lm.tokenizer(f"find: {text}").input_ids) for text in ("a cat", "the rain")]
        fewer = encoder.encode_counted(["a cat"], dimensions=4).vectors
        assert fewer.shape == (1, 4)
        assert np.linalg.norm(fewer) == pytest.approx(1)
        assert encoder.fingerprint(4) != encoder.fingerprint() == encoder.fingerprint(encoder.dimensions)

    def test_an_empty_text_is_a_zero_vector_or_an_error(self, encoder: SentenceEncoder) -> None:
        assert not encoder.encode([" "]).any()
        with pytest.raises(TextError, match="text 1 is empty"):
            encoder.encode_counted(["a", ""])

    def test_a_long_text_is_cut_or_an_error(self, folder: Path) -> None:
        short = SentenceEncoder(str(folder), max_length=6)
        result = short.encode_counted(["a" * 50, "a"])
        assert result.truncated == [True, False]
        assert result.token_counts[0] == 6
        with pytest.raises(TextError, match="reads 6") as raised:
            short.encode_counted(["a" * 50], overflow="error")
        assert raised.value.exceeds_context


class TestIndex:
    def test_it_searches_and_another_model_answers(self, encoder: SentenceEncoder, tmp_path: Path) -> None:
        pytest.importorskip("lancedb")
        index = gerund.open_index(tmp_path / "i", encoder, chunking=CHUNKING)
        index.add_documents(DOCUMENTS)
        expected = [hit.source for hit in index.search("flour", mode="vectors")]
        # The index names its encoder, with st: before the folder.
        lm = gerund.load()
        again = gerund.open_index(tmp_path / "i", answer_with=lm)
        assert [hit.source for hit in again.search("flour", mode="vectors")] == expected
        assert isinstance(again.encoder, SentenceEncoder)
        assert again.lm is lm
        asked = {"method": "generate", "max_new_tokens": 4, "fallback": False}
        assert again.ask("What is bread made of flour?", **asked).method == "generate"

    def test_alone_it_quotes_and_says_what_needs_a_language_model(self, encoder: SentenceEncoder) -> None:
        index = gerund.open_index(None, encoder, chunking=CHUNKING)
        index.add_documents(DOCUMENTS)
        assert index.ask("What is bread made of flour?").text == "Bread is made of flour."
        for options in ({"rerank": 2}, {"expand": 1}):
            with pytest.raises(ConfigError, match="generates nothing; name a language model"):
                index.search("flour", **options)

    def test_a_language_model_may_search_and_another_answer(self, lm: Any) -> None:
        other = gerund.load()
        index = gerund.open_index(None, lm, answer_with=other, chunking=CHUNKING)
        index.add_documents(DOCUMENTS)
        assert (index.encoder, index.lm) == (lm, other)

    def test_what_it_cannot_do_is_refused(self, encoder: SentenceEncoder, folder: Path) -> None:
        with pytest.raises(ConfigError, match="embeds in one process"):
            WorkerModel.of(encoder)
        with pytest.raises(ConfigError, match="one vector for a whole text"):
            gerund.open_index(None, encoder, chunking=gerund.Chunking(tokens=32, late=True)).add_documents(DOCUMENTS)
        with pytest.raises(ConfigError, match="has no setting 'pooling'"):
            _ = gerund.open_index(None, gerund.ModelSpec(model=f"st:{folder}", pooling="last")).encoder
        with pytest.raises(ModelError, match="an encoder that sentence-transformers runs"):
            gerund.load(f"st:{folder}")

    @pytest.mark.slow
    def test_from_the_command_line(self, folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
        pytest.importorskip("lancedb")
        notes, index = tmp_path / "bread.txt", tmp_path / "i"
        notes.write_text("Bread is made of flour.", encoding="utf-8")
        assert run_cli("index", notes, "-o", index, "--encoder", f"st:{folder}", "--chunk-tokens", "32").code == 0
        found = run_cli("search", index, "flour", "--rerank", "1", "--rerank-with", tiny_folder)
        assert "Bread is made of flour." in found.out, found.err
        question = ("ask", index, "What is bread made of flour?", "--answer-with", tiny_folder)
        assert "Bread is made of flour." in run_cli(*question).out
        missing = run_cli(*question[:-1], tmp_path / "nothing")
        assert missing.code == 2
        assert "no folder" in missing.err
