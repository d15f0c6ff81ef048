"""Names of sentence-transformers, transformers and openai do what gerund's own names do, and never beside them."""

import asyncio
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pytest
import torch

import gerund
from gerund import ConfigError, LanguageModel, Rerank, Sampling
from gerund.inference.generate.config import GenerationConfig, GenerationKeywords
from gerund.language_model import NUCLEUS
from gerund.models import loading
from gerund.models.sources import find
from gerund.poolings import canonical_pooling
from gerund.quantization import nearest
from gerund.settings.aliases import TopK, takes_aliases
from gerund.settings.sampling import sampling_from
from gerund.types import Candidate, Ranked, Ranking

TEXTS = ["the cat", "a dog in the rain", "in"]
SEEDED = Sampling(temperature=0.7, top_p=0.9, seed=3)
AS_KEYWORDS = {"temperature": 0.7, "top_p": 0.9, "seed": 3}
WORDS = [["the", "cat"], ["in"]]


@pytest.fixture(scope="module")
def lm(tiny_folder: Path) -> LanguageModel:
    return gerund.load(
        tiny_folder, attention="mask0-bidir", dtype="float32", prompts={"query": "q: ", "document": "d: "}
    )


@pytest.fixture(scope="module")
def index(lm: LanguageModel) -> gerund.Index:
    index = gerund.open_index(None, lm, chunking=gerund.Chunking(tokens=24))
    index.add_documents(
        [gerund.Document(name, f"{name} is in the sea. The night is long.") for name in ("a", "b", "c")]
    )
    return index


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same, arrays and lists of arrays too."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


ENCODED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (method, name, {name: value}, original)
    for method in ("encode", "encode_query", "encode_document")
    for name, value, original in [
        ("normalize_embeddings", False, {"normalize": False}),
        ("truncate_dim", 8, {"dimensions": 8}),
        ("show_progress_bar", False, {"show_progress": False}),
        ("convert_to_tensor", True, {"output": "torch"}),
        ("convert_to_tensor", False, {"output": "numpy"}),
        ("convert_to_numpy", True, {"output": "numpy"}),
        ("convert_to_numpy", False, {"output": "torch"}),
    ]
]
ENCODED += [
    (method, name, {name: value}, original)
    for method in ("encode_tokens", "encode_with_usage")
    for name, value, original in [
        ("normalize_embeddings", True, {"normalize": True}),
        ("show_progress_bar", False, {"show_progress": False}),
    ]
]


@pytest.mark.parametrize(("method", "name", "alias", "original"), ENCODED)
def test_names_of_sentence_transformers(
    lm: LanguageModel, method: str, name: str, alias: dict[str, Any], original: dict[str, Any]
) -> None:
    encode = getattr(lm, method)
    result, expected = encode(TEXTS, **alias), encode(TEXTS, **original)
    if method == "encode_with_usage":
        result, expected = result.vectors, expected.vectors
    assert same(result, expected)
    with pytest.raises(ConfigError, match=f"`{name}` is another name for `{next(iter(original))}`; pass one of them"):
        encode(TEXTS, **alias, **original)


def test_words_and_spans_take_them_too(lm: LanguageModel) -> None:
    assert same(lm.encode_words(WORDS, normalize_embeddings=True), lm.encode_words(WORDS, normalize=True))
    spans = [[(0, 3)]]
    same_spans = lm.encode_spans(["the cat"], spans, normalize=False)
    assert same(lm.encode_spans(["the cat"], spans, normalize_embeddings=False), same_spans)


def test_an_original_by_its_place_counts_as_given(lm: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="`normalize_embeddings` is another name for `normalize`"):
        lm.encode(TEXTS, None, True, normalize_embeddings=True)
    assert lm.encode(TEXTS, None, None, normalize_embeddings=True).shape == (3, 32)


def test_two_aliases_of_the_same_thing(lm: LanguageModel) -> None:
    assert isinstance(lm.encode("in", convert_to_tensor=True, convert_to_numpy=False), torch.Tensor)
    with pytest.raises(ConfigError, match="`convert_to_tensor` and `convert_to_numpy` contradict each other"):
        lm.encode("in", convert_to_tensor=True, convert_to_numpy=True)
    with pytest.raises(ConfigError, match="convert_to_tensor is True or False, not 'yes'"):
        lm.encode("in", convert_to_tensor="yes")  # type: ignore[arg-type]


def test_none_is_left_out(lm: LanguageModel) -> None:
    assert same(
        lm.encode(TEXTS, truncate_dim=None, normalize=False, normalize_embeddings=None), lm.encode(TEXTS, None, False)
    )


def test_prompts_of_queries_and_documents(lm: LanguageModel, tiny_folder: Path) -> None:
    assert same(lm.encode_query(TEXTS), lm.encode(TEXTS, prompt_name="query"))
    assert same(lm.encode_document(TEXTS[0]), lm.encode(TEXTS[0], prompt_name="document"))
    assert same(lm.encode_query(TEXTS, "x: "), lm.encode(TEXTS, "x: "))
    assert same(lm.encode_query(TEXTS, prompt="x: "), lm.encode(TEXTS, prompt="x: "))
    assert same(lm.encode_query(TEXTS, prompt_name="document"), lm.encode_document(TEXTS))
    assert not np.allclose(lm.encode_query(TEXTS), lm.encode(TEXTS))
    plain = gerund.load(tiny_folder, dtype="float32")
    assert same(plain.encode_query(TEXTS), plain.encode(TEXTS))


def test_batch_size(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = type(lm.runtime).states
    monkeypatch.setattr(type(lm.runtime), "states", lambda self, texts: (sizes.append(len(texts)), run(self, texts))[1])
    np.testing.assert_allclose(lm.encode(TEXTS * 2, batch_size=4), lm.encode(TEXTS * 2), atol=1e-6)
    assert sizes == [4, 2, 6]
    lm.encode_tokens(TEXTS, batch_size=1)
    assert sizes[3:] == [1, 1, 1]
    for wrong in (0, 1.5, True):
        with pytest.raises(ConfigError, match="batch_size"):
            lm.encode(TEXTS, batch_size=wrong)  # type: ignore[arg-type]


def test_token_embeddings(lm: LanguageModel) -> None:
    assert same(lm.encode(TEXTS, output_value="token_embeddings"), lm.encode_tokens(TEXTS))
    assert same(lm.encode(TEXTS[0], output_value="token_embeddings"), lm.encode_tokens(TEXTS[0])[0])
    [states] = lm.encode(TEXTS[:1], output_value="token_embeddings", convert_to_tensor=True)
    assert torch.equal(states, torch.from_numpy(lm.encode_tokens(TEXTS[0])[0]))
    with pytest.raises(ConfigError, match="dimensions is for vectors of texts"):
        lm.encode(TEXTS, output_value="token_embeddings", truncate_dim=8)
    ranges = np.zeros((2, lm.dimensions))
    with pytest.raises(ConfigError, match="ranges is for vectors of texts"):
        lm.encode(TEXTS, output_value="token_embeddings", ranges=ranges)
    with pytest.raises(ConfigError, match="ranges are for int8 and uint8"):
        lm.encode(TEXTS, precision="binary", ranges=ranges)
    with pytest.raises(ConfigError, match="one vector has no range"):
        lm.encode(TEXTS[0], precision="int8")
    assert lm.encode([], precision="binary").shape == (0, lm.dimensions // 8)
    with pytest.raises(ConfigError, match="unknown output_value 'all'"):
        lm.encode(TEXTS, output_value="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarity_of_pairs(tiny_folder: Path, lm: LanguageModel, similarity: str) -> None:
    lm = lm.with_encoder(gerund.EncoderConfig(normalize=False, similarity=similarity))
    others = ["the night", "rain", "the end"]
    expected = lm.similarity(TEXTS, others).diagonal()
    np.testing.assert_allclose(lm.similarity_pairwise(TEXTS, lm.encode(others)), expected, rtol=1e-5)
    with pytest.raises(ConfigError, match="must have the same length, got 3 and 1"):
        lm.similarity_pairwise(TEXTS, "in")


def test_sizes(lm: LanguageModel) -> None:
    assert lm.max_seq_length == lm.max_length == 64
    assert lm.get_embedding_dimension() == lm.get_sentence_embedding_dimension() == lm.dimensions == 32


WRITING: dict[str, Callable[..., Any]] = {
    "generate": lambda lm, *a, **k: lm.generate(["the", "in"], *a, **k),
    "stream": lambda lm, *a, **k: "".join(lm.stream("the", *a, **k)),
    "agenerate": lambda lm, *a, **k: asyncio.run(lm.agenerate("the", *a, **k)),
    "session": lambda lm, *a, **k: lm.prefill("the").generate(*a, **k),
}


@pytest.mark.parametrize("method", WRITING)
def test_sampling_as_keywords(lm: LanguageModel, method: str) -> None:
    write = WRITING[method]
    assert write(lm, max_tokens=5, **AS_KEYWORDS) == write(lm, 5, SEEDED)
    with pytest.raises(ConfigError, match="`temperature` is a part of `sampling`; pass one of them, not both"):
        write(lm, 5, SEEDED, **AS_KEYWORDS)
    with pytest.raises(ConfigError, match="`max_tokens` is another name for `max_new_tokens`"):
        write(lm, 5, max_tokens=5)
    with pytest.raises(ConfigError, match="unknown setting 'colour'"):
        write(lm, 5, colour=1)


def test_chats_take_them_too(bundled: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled.tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    messages = [{"role": "user", "content": "To be or not to"}]
    assert bundled.chat(messages, max_tokens=4, **AS_KEYWORDS) == bundled.chat(messages, 4, SEEDED)


@pytest.mark.parametrize(
    ("keywords", "sampling"),
    [
        ({}, Sampling()),
        ({"seed": 4}, Sampling(seed=4)),
        ({"do_sample": True}, Sampling(temperature=1.0)),
        ({"do_sample": False}, Sampling()),
        ({"top_k": 5}, Sampling(temperature=1.0, top_k=5)),
        ({"min_p": 0.1, "do_sample": True}, Sampling(temperature=1.0, min_p=0.1)),
        ({"temperature": 0, "top_p": 0.5}, Sampling(temperature=0, top_p=0.5)),
        ({"temperature": None, "repetition_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
    ],
)
def test_what_keywords_of_sampling_mean(keywords: dict[str, Any], sampling: Sampling) -> None:
    assert GenerationConfig.of(5, None, GenerationKeywords(**keywords)).sampling == sampling  # type: ignore[typeddict-item]


def test_keywords_change_the_default_of_ranking() -> None:
    assert sampling_from(None, {"seed": 1}, NUCLEUS) == Sampling(temperature=1.0, top_p=0.9, seed=1)
    assert sampling_from(None, {"do_sample": False}, NUCLEUS) == Sampling()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"do_sample": False, "temperature": 0.7}, "do_sample=False takes the most probable tokens, so `temperature`"),
        ({"do_sample": False, "top_p": 0.7}, "so `top_p` has no use; remove it"),
        ({"do_sample": True, "temperature": 0}, "do_sample=True contradicts temperature=0"),
        ({"do_sample": "yes"}, "do_sample is True or False, not 'yes'"),
        ({"temperature": "hot"}, "temperature is a number, not 'hot'"),
    ],
)
def test_keywords_of_sampling_that_mean_nothing(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampling_from(None, keywords)


def test_ranking_takes_them(lm: LanguageModel) -> None:
    rerank = Rerank(samples=2, scorer="overlap")
    assert lm.generate("the", 4, rerank=rerank, seed=1) == lm.generate(
        "the", 4, Sampling(1.0, top_p=0.9, seed=1), rerank=rerank
    )


def test_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    def constraint(**options: Any) -> Any:
        seen = takes_aliases(_options)(5, **options)
        return GenerationConfig.of(5, None, seen).constraint

    expected = constraint(schema=schema)
    assert json.loads(expected.source) == schema
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    assert constraint(response_format=named) == expected
    assert constraint(response_format={"type": "json_object"}) == constraint(schema={"type": "object"})
    assert constraint(response_format={"type": "text"}) is None
    for wrong in ({"type": "xml"}, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 3}, 5):
        with pytest.raises(ConfigError, match=r"response_format|schema"):
            constraint(response_format=wrong)
    with pytest.raises(ConfigError, match="`response_format` is another name for `schema`"):
        constraint(response_format=named, schema=schema)


def _options(max_new_tokens: int, **options: Unpack[GenerationKeywords]) -> GenerationKeywords:
    return options


@pytest.mark.slow
def test_infill_and_expand(bundled: LanguageModel) -> None:
    text = "The old man looked at [blank] and went home."
    expected = bundled.infill(text, max_tokens=2, sampling=SEEDED)
    assert bundled.infill(text, max_new_tokens=2, **AS_KEYWORDS) == expected
    with pytest.raises(ConfigError, match="`temperature` is a part of `sampling`"):
        bundled.infill(text, sampling=SEEDED, **AS_KEYWORDS)
    with pytest.raises(ConfigError, match="`max_new_tokens` is another name for `max_tokens`"):
        bundled.infill(text, max_tokens=2, max_new_tokens=2)
    with pytest.raises(ConfigError, match="unknown setting 'colour'"):
        bundled.infill(text, colour=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="`seed` is a part of `sampling`"):
        bundled.expand("how to bake bread", sampling=SEEDED, seed=3)


@pytest.mark.parametrize("method", ["search", "search_all", "ask", "stream", "aask"])
def test_number_of_results(index: gerund.Index, method: str) -> None:
    def found(*arguments: Any, **keywords: Any) -> Any:
        asked = ["night"] if method == "search_all" else "night"
        result = getattr(index, method)(asked, *arguments, **keywords)
        if method == "stream":
            "".join(result)
            result = result.result
        return asyncio.run(result) if method == "aask" else result

    assert found(top_k=2) == found(2) == found(k=2)
    assert found(top_k=None) == found()
    for arguments, keywords in ((), {"k": 2}), ((2,), {}):
        with pytest.raises(ConfigError, match="`top_k` is another name for `k`; pass one of them, not both"):
            found(*arguments, **keywords, top_k=2)


def test_nearest_takes_top_k() -> None:
    vectors = np.eye(3, dtype=np.float32)
    assert same(list(nearest(vectors, vectors, "float32", top_k=2)), list(nearest(vectors, vectors, "float32", 2)))  # type: ignore[call-arg]


def test_rank(lm: LanguageModel) -> None:
    ranking = lm.rerank("the cat", TEXTS, 2)
    expected = [{"corpus_id": index, "score": score} for index, score in ranking]
    assert lm.rank("the cat", TEXTS, top_k=2) == expected
    with_text = [{**one, "text": TEXTS[one["corpus_id"]]} for one in expected]
    assert lm.rank("the cat", TEXTS, 2, return_documents=True) == with_text
    assert list(with_text[0]) == ["corpus_id", "score", "text"]
    assert lm.rank("the cat", [], return_documents=True) == []
    with pytest.raises(ConfigError, match="return_documents is True or False"):
        lm.rank("the cat", TEXTS, return_documents="text")  # type: ignore[arg-type]


def test_rankings_are_pairs() -> None:
    ranking = Ranking([2, 0], [0.9, 0.1], "vectors")
    assert (list(ranking), len(ranking)) == ([(2, 0.9), (0, 0.1)], 2)
    beams = [Candidate(text, [1], 0.0, True, rank_score=score) for text, score in (("a", 3.0), ("b", 2.0))]
    best = Ranked("a", [1], 0.0, True, rank_score=3.0, beams=beams[:1], history=[beams])
    assert list(best) == [(0, 3.0), (1, 2.0)]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("lasttoken", "last"),
        ("cls", "first"),
        ("weightedmean", "weighted-mean"),
        ("mean_sqrt_len_tokens", "mean-sqrt"),
        ("cls+mean", "first+mean"),
        ("mean", "mean"),
        ("max", "max"),
    ],
)
def test_poolings(theirs: str, ours: str) -> None:
    assert canonical_pooling(theirs) == ours
    assert gerund.EncoderConfig(pooling=theirs) == gerund.EncoderConfig(pooling=ours)
    assert gerund.ModelSpec(pooling=theirs) == gerund.ModelSpec(pooling=ours)


def test_loading_and_saving(lm: LanguageModel, tiny_folder: Path, tmp_path: Path) -> None:
    assert gerund.ModelSpec.of(adapter=False, infill_adapter=False) == gerund.ModelSpec(
        adapter="none", infill_adapter="none"
    )
    with pytest.raises(ConfigError, match="adapter is a text, not True"):
        gerund.ModelSpec.of(adapter=True)
    lm.save_pretrained(tmp_path / "saved")
    again = LanguageModel.from_pretrained(tmp_path / "saved", dtype="float32")
    assert isinstance(again, LanguageModel)
    assert again.fingerprint() == lm.fingerprint()
    with pytest.raises(gerund.GerundError, match="already"):
        lm.save_pretrained(tmp_path / "saved")


class TestHub:
    """A cache of the hub's with two versions of a model, and no network."""

    @pytest.fixture
    def cached(self, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        for place in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
            monkeypatch.setattr(place, str(tmp_path))
        folder = tmp_path / "models--some--tiny"
        for name, commit, pooling in (("main", "a" * 40, "mean"), ("v1", "b" * 40, "last")):
            snapshot = folder / "snapshots" / commit
            shutil.copytree(tiny_folder, snapshot)
            settings = {"format": 1, "encoder": {"pooling": pooling}}
            (snapshot / "gerund.json").write_text(json.dumps(settings), encoding="utf-8")
            (folder / "refs").mkdir(exist_ok=True)
            (folder / "refs" / name).write_text(commit, encoding="utf-8")
        return "some/tiny"

    @pytest.mark.slow
    def test_revision(self, cached: str) -> None:
        main, old = gerund.load(cached), gerund.load(cached, revision="v1", token=False)
        assert (main.encoder.pooling, old.encoder.pooling) == ("mean", "last")
        assert (old.spec.revision, gerund.load(old.spec).encoder.pooling) == ("v1", "last")
        with pytest.raises(gerund.ModelError, match="as a hub id it cannot be read"):
            gerund.load(cached, revision="v2")

    def test_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []

        def config(_name: str, **options: Any) -> Any:
            asked.append(options)
            raise OSError("no")

        monkeypatch.setattr(loading.PreTrainedConfig, "get_config_dict", config)
        with pytest.raises(gerund.ModelError):
            gerund.load("some/model", token="hf_secret", revision="v1")
        assert asked == [{"local_files_only": True, "revision": "v1", "token": "hf_secret"}]
        assert "hf_secret" not in repr(find("some/model", token="hf_secret"))

    @pytest.mark.parametrize("setting", [{"revision": "main"}, {"token": "hf_secret"}, {"token": True}])
    def test_only_for_the_hub(self, tiny_folder: Path, setting: dict[str, Any]) -> None:
        for model in (tiny_folder, None):
            with pytest.raises(ConfigError, match=r"is only for models on the hub, and .* is on this machine") as error:
                gerund.load(model, **setting)
            assert "hf_secret" not in str(error.value)

    @pytest.mark.parametrize("setting", [{"revision": 5}, {"revision": ""}, {"token": 5}, {"token": ""}])
    def test_what_is_none(self, setting: dict[str, Any]) -> None:
        [name] = setting
        with pytest.raises(ConfigError, match=name):
            gerund.load("some/model", **setting)


def test_help_shows_the_aliases(lm: LanguageModel) -> None:
    assert {"normalize_embeddings", "truncate_dim", "batch_size", "output_value"} <= set(
        inspect.signature(lm.encode).parameters
    )
    assert inspect.signature(lm.encode_query) == inspect.signature(lm.encode)
    assert {"temperature", "max_tokens", "response_format", "n"} <= set(inspect.signature(lm.generate).parameters)
    assert str(inspect.signature(LanguageModel.infill).parameters["seed"]).endswith("= ...")
    assert inspect.iscoroutinefunction(lm.agenerate)


def test_unknown_keywords_stay_what_they_were(lm: LanguageModel, index: gerund.Index) -> None:
    with pytest.raises(TypeError, match=r"encode\(\) got an unexpected keyword argument 'colour'"):
        lm.encode("in", colour=1)
    with pytest.raises(TypeError, match="multiple values for argument 'prompt'"):
        lm.encode("in", "q: ", prompt="q: ", truncate_dim=8)
    with pytest.raises(TypeError, match=r"search\(\) got an unexpected keyword argument 'colour'"):
        index.search("in", colour=1)


def test_an_alias_of_nothing_is_a_mistake() -> None:
    def search(query: str, **aliases: Unpack[TopK]) -> None:
        del query, aliases

    with pytest.raises(TypeError, match="has aliases for what it does not take: \\['k'\\]"):
        takes_aliases(search)
