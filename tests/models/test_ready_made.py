"""A sentence-transformers folder is read as that library reads it, or refused by the name of what is not known."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tokenizers import processors

import gerund
from gerund.errors import ConfigError, DataError, GerundError, ModelError
from gerund.inference.encode.texts import text_tokens
from gerund.models.encoder_settings import stored_settings
from gerund.models.loading import read_config, settings_folder
from gerund.models.sources import Source, find
from gerund.settings.model_spec import EncoderSpec, ModelSpec
from gerund.settings.templates import PromptText
from tests.ready_made import OLD, PROMPTS, WIDTH, change, closed, dense, ready_made, write
from tests.tiny import byte_tokenizer, load, save_tiny

pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer

from tests.cli.helpers import run_cli

pytestmark = pytest.mark.filterwarnings("ignore:.*were cut:UserWarning")

TEXTS = ["the cat sat on the mat, and another thing", "a", "zürich 数据库", "in the beginning there was a thing " * 3]
NEAR = 1e-5


def theirs(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32})


def both(folder: Path, **given: Any) -> tuple[np.ndarray, np.ndarray]:
    return load(folder).encode(TEXTS, **given), theirs(folder).encode(TEXTS, show_progress_bar=False, **given)


def assert_equal(ours: np.ndarray, expected: np.ndarray) -> None:
    assert ours.shape == expected.shape
    cosine = (ours * expected).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() >= 1 - NEAR
    np.testing.assert_allclose(ours, expected, atol=NEAR * max(1.0, float(np.abs(expected).max())))


GEMMA = dict(num_hidden_layers=7, sliding_window=8, layer_types=None, use_bidirectional_attention=True,
             max_position_embeddings=64)  # fmt: skip
TWO_DENSE = [dense(WIDTH, 96), dense(96, 24)]
LAYER_NORM = {
    "kind": "LayerNorm",
    "config": {"dimension": WIDTH},
    "weights": {"norm.weight": torch.linspace(0.5, 2, WIDTH), "norm.bias": torch.linspace(-1, 1, WIDTH)},
}
MIDDLE_NORMALIZE = {"kind": "Normalize", "config": None}


def closing(**changes: Any) -> Callable[[], Any]:
    """Return what makes the usual tokenizer with other attributes."""

    def make() -> Any:
        tokenizer = closed(byte_tokenizer())
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        return tokenizer

    return make


LEFT = {"tokenizer": closing(padding_side="left")}
SHORTER = closing(model_max_length=12)

# What each folder is written with, by what it shows.
LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen3, old": {},
    "qwen3, new": {"layout": "new"},
    "qwen3, padded on the left": LEFT,
    "qwen3, new, padded on the left": {"layout": "new", **LEFT},
    "no end token": {"tokenizer": byte_tokenizer},
    "no beginning token": {"tokenizer": lambda: byte_tokenizer(bos=False)},
    "pad is the end token": {"tokenizer": closing(pad_token="</s>")},
    "pad is the end token, left": {"tokenizer": closing(pad_token="</s>", padding_side="left")},
    "text longer than max_seq_length": {"max_seq_length": 12, "prompts": {}},
    "length by the tokenizer alone": {"layout": "new", "max_seq_length": 16, "prompts": {}},
    "no file of the length": {"max_seq_length": None, "tokenizer": SHORTER, "prompts": {}},
    "longer than the tokenizer says": {"max_seq_length": 30, "tokenizer": SHORTER},
    "no file of prompts": {"prompts": None},
    "with the head of a language model": {"with_head": True},
    "mistral": {"model_type": "mistral"},
    "llama, mean": {"model_type": "llama", "pooling": "mean"},
    "gemma3, window and both dense": {"model_type": "gemma3_text", "pooling": "mean", "behind": TWO_DENSE, **GEMMA},
    "gemma3, new, left": {
        **{"model_type": "gemma3_text", "pooling": "mean", "behind": TWO_DENSE, "layout": "new"},
        **GEMMA,
        **LEFT,
    },
    "gemma3, causal": {"model_type": "gemma3_text", **GEMMA, "use_bidirectional_attention": False},
    "gemma3, is_causal false": {
        "model_type": "gemma3_text",
        **{**GEMMA, "use_bidirectional_attention": False, "is_causal": False},
    },
    "gemma3, both flags": {"model_type": "gemma3_text", **GEMMA, "is_causal": False},
    **{f"{name}, is_causal false": {"model_type": name, "is_causal": False} for name in ("llama", "qwen3")},
    "qwen2, is_causal false": {"model_type": "qwen2", "is_causal": False, "vocab_size": 300},
    "mistral, is_causal false, window": {"model_type": "mistral", "is_causal": False, "sliding_window": 5},
    "gemma2, is_causal false, window": {"model_type": "gemma2", "is_causal": False, "sliding_window": 5},
    "dense without an activation named": {"behind": [dense(WIDTH, 20, activation_function=...)]},
    **{
        f"dense {name}": {"behind": [dense(WIDTH, 20, bias=True, activation_function=f"torch.nn.{path}")]}
        for name, path in {
            **{own: f"modules.activation.{own}" for own in ("Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")},
            "short name": "ReLU",
        }.items()
    },
    "dense, residual of another width": {"behind": [dense(WIDTH, 20, use_residual=True)], "layout": "new"},
    "dense, residual of the same width": {"behind": [dense(WIDTH, WIDTH, use_residual=True)], "layout": "new"},
    "normalised before a dense": {"behind": [MIDDLE_NORMALIZE, dense(WIDTH, 20)]},
    "layer norm and dropout": {"behind": [LAYER_NORM, {"kind": "Dropout", "config": {"dropout": 0.5}}]},
    "normalised twice": {"behind": [MIDDLE_NORMALIZE]},
    "no normalisation": {"normalize": False},
    **{f"{mode}": {"pooling": mode, "normalize": False} for mode in ("cls", "max", "mean_sqrt_len_tokens")},
    "weightedmean, left": {"pooling": "weightedmean", **LEFT},
    "several modes, old": {"pooling": ["lasttoken", "cls", "mean"]},
    "several modes, new": {"pooling": ["mean", "cls"], "layout": "new", "behind": [dense(2 * WIDTH, 8)]},
    "several modes, one only, new": {"pooling": ["mean"], "layout": "new"},
    "default prompt": {"default_prompt_name": "query"},
    "as e5-mistral": {
        **{"model_type": "mistral", "sliding_window": 40, "max_seq_length": 64},
        "prompts": {f"{name}_query": f"Instruct: {name}\nQuery: " for name in ("web_search", "sts", "summarization")},
    },
    "as harrier": {
        **{"max_seq_length": None, "max_position_embeddings": 96},
        "prompts": {"web_search_query": "Instruct: find\nQuery: ", "sts_query": "Instruct: same\nQuery: "},
    },
    "as KaLM": {
        **{"model_type": "qwen2", "vocab_size": 300, "pooling": "mean", "normalize": False},
        "prompts": {"query": "Instruct: find \n Query: "},
    },
    "similarity missing": {"similarity": None},
}


@pytest.mark.sweep(quick=1, check=5)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_vectors_of_sentence_transformers(tmp_path: Path, name: str) -> None:
    settings = dict(LAYOUTS[name])
    if callable(tokenizer := settings.pop("tokenizer", None)):
        settings["tokenizer"] = tokenizer()
    folder = ready_made(tmp_path / "st", **settings)
    lm, st = load(folder), theirs(folder)
    prompts = [None, *(settings.get("prompts", PROMPTS) or {})]
    for prompt_name in prompts:
        ours = lm.encode(TEXTS, prompt_name=prompt_name, batch_tokens=10_000)
        assert_equal(ours, st.encode(TEXTS, prompt_name=prompt_name, show_progress_bar=False))
    assert lm.max_length == st.max_seq_length
    assert lm.dimensions == st.get_embedding_dimension()
    # What gerund writes of it is read the same.
    lm.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.fingerprint() == lm.fingerprint()
    assert np.array_equal(again.encode(TEXTS, prompt_name=prompts[-1]), lm.encode(TEXTS, prompt_name=prompts[-1]))
    assert gerund.load(lm.spec).fingerprint() == lm.fingerprint()


@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_a_prompt_that_is_not_pooled(tmp_path: Path, mode: str, side: str) -> None:
    # The last prompt's space becomes one token with the beginning of the first text.
    prompts = {"query": "Query: ", "document": "", "fused": "read"}
    settings = {"pooling": mode, "include_prompt": False, "max_seq_length": 64}
    folder = ready_made(tmp_path / "st", prompts=prompts, tokenizer=closing(padding_side=side)(), **settings)
    lm, st = load(folder), theirs(folder)
    texts = [*TEXTS[:3], "the cat", " the cat"]
    for prompt in ("Query: ", "", "Text:", "read ", "read"):
        ours = lm.encode(texts, prompt=PromptText(prompt))
        assert_equal(ours, st.encode(texts, prompt=prompt, show_progress_bar=False))


def test_prompts_have_the_names_that_the_folder_gives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = {"web_search_query": "Search: ", "passage": "Text: ", "sts": "Same: "}
    folder = ready_made(tmp_path / "st", prompts=prompts, default_prompt_name="sts")
    lm = load(folder)
    assert lm.encoder.prompts == {**prompts, "query": "Search: ", "document": "Text: "}
    assert lm.encoder.prompt == "Same: "
    assert "searches take its prompt 'web_search_query'" in caplog.text
    assert np.array_equal(lm.encode("a", prompt_name="query"), lm.encode("a", prompt="Search: "))
    assert "searches take its prompt 'passage'" in caplog.text
    assert_equal(lm.encode(TEXTS, prompt_name="document"), theirs(folder).encode(TEXTS, prompt_name="passage"))


def test_a_default_prompt_is_no_prompt_of_queries(tmp_path: Path) -> None:
    folder = ready_made(tmp_path / "st", prompts={"sts": "Same: "}, default_prompt_name="sts")
    lm, st = load(folder), theirs(folder)
    assert_equal(lm.encode(TEXTS, prompt_name="query"), st.encode_query(TEXTS))
    assert_equal(lm.encode(TEXTS), st.encode(TEXTS))


def test_control_tokens_are_parsed_in_a_prompt_and_never_in_a_text(tmp_path: Path) -> None:
    prompts = {"query": "read</s>it", "document": ""}
    folder = ready_made(tmp_path / "st", "llama", pooling="mean", include_prompt=False, prompts=prompts)
    lm, st = load(folder), theirs(folder)
    assert_equal(lm.encode(TEXTS[:3], prompt_name="query"), st.encode(TEXTS[:3], prompt_name="query"))
    [tokens] = text_tokens(lm.runtime, ["a</s>b"], prompt_name="query")
    assert tokens is not None
    assert tokens.ids.count(lm.tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("normalize", [True, False])
def test_a_folder_that_keeps_the_first_numbers(tmp_path: Path, normalize: bool) -> None:
    folder = ready_made(tmp_path / "st", normalize=normalize, truncate_dim=12, behind=[dense(WIDTH, 20)])
    lm, st = load(folder), theirs(folder)
    assert lm.dimensions == 12
    assert_equal(lm.encode(TEXTS), st.encode(TEXTS, normalize_embeddings=normalize))
    assert_equal(lm.encode(TEXTS, dimensions=5), st.encode(TEXTS, normalize_embeddings=normalize, truncate_dim=5))


@pytest.mark.slow
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
def test_vectors_are_compared_as_the_author_compares_them(
    tmp_path: Path, similarity: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = ready_made(tmp_path / "st", normalize=False, similarity=similarity)
    lm, st = load(folder), theirs(folder)
    expected = st.similarity(st.encode(TEXTS[:2]), st.encode(TEXTS)).numpy()
    np.testing.assert_allclose(lm.similarity(TEXTS[:2], TEXTS), expected, rtol=1e-4, atol=1e-4)
    ranking = lm.rerank(TEXTS[0], TEXTS, by="vectors")
    queried = st.similarity(st.encode(TEXTS[:1], prompt_name="query"), st.encode(TEXTS)).numpy()[0]
    np.testing.assert_allclose(np.array(ranking.scores), -np.sort(-queried), rtol=1e-4, atol=1e-4)
    assert ("compares by cosine" in caplog.text) == (similarity != "cosine")
    lm.save(tmp_path / "saved")
    assert load(tmp_path / "saved").encoder.similarity == similarity


def _config(tokenizer: Any, folder: Path, **values: Any) -> None:
    tokenizer.save_pretrained(folder)
    change(folder / "tokenizer_config.json", **values)


@pytest.mark.slow
def test_an_end_token_that_only_the_tokenizers_settings_ask_for(tmp_path: Path) -> None:
    """As in e5-mistral: transformers 5 leaves it out where tokenizer.json begins texts by itself."""
    folder = ready_made(tmp_path / "st", "mistral", tokenizer=byte_tokenizer(), max_seq_length=12)
    _config(byte_tokenizer(), folder, add_eos_token=True)
    right = ready_made(tmp_path / "right", "mistral", max_seq_length=12)
    lm = load(folder)
    assert_equal(lm.encode(TEXTS), theirs(right).encode(TEXTS))
    [short, long] = text_tokens(lm.runtime, [TEXTS[1], TEXTS[3]])
    assert short is not None
    assert long is not None
    assert [short.ids[0], short.ids[-1]] == [1, 2]
    assert (len(long.ids), long.ids[0], long.ids[-1]) == (12, 1, 2)
    # A post-processor that closes texts does it once.
    _config(closed(byte_tokenizer()), folder, add_eos_token=True)
    [short] = text_tokens(load(folder).runtime, [TEXTS[1]])
    assert short is not None
    assert short.ids.count(2) == 1


@pytest.mark.slow
def test_an_end_token_that_is_not_the_tokenizers_own(tmp_path: Path) -> None:
    """As in Qwen3-Embedding, whose eos_token is another than the one that its post-processor puts behind a text."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <pad>", pair="$A <pad> $B", special_tokens=[("<pad>", 0)]
    )
    folder = ready_made(tmp_path / "st", tokenizer=tokenizer)
    assert_equal(*both(folder))
    [tokens] = text_tokens(load(folder).runtime, ["a"])
    assert tokens is not None
    assert tokens.ids[-1] == 0


def test_a_last_token_family_without_an_end_token_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(ready_made(tmp_path / "st", tokenizer=byte_tokenizer()))
    assert "no end token closes its texts" in caplog.text


@pytest.mark.sweep(quick=5, check=7)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("flag", [None, "is_causal", "use_bidirectional_attention"])
def test_a_flag_decides_whether_later_tokens_are_seen(tmp_path: Path, model_type: str, flag: str | None) -> None:
    given = {} if flag is None else {flag: flag != "is_causal"}
    window = {"sliding_window": 16} if model_type in ("mistral", "gemma3_text") else {}
    lm = load(ready_made(tmp_path / "st", model_type, pooling="cls", **given, **window))
    assert lm.encoder.attention.name == ("causal" if flag is None else "bidir")
    one, other = lm.encode(["the cat", "the dog"])
    assert np.allclose(one, other, atol=1e-6) == (flag is None)


@pytest.mark.slow
def test_a_model_that_reads_both_ways_keeps_its_flag_and_does_not_generate(tmp_path: Path) -> None:
    folder = ready_made(tmp_path / "st", "gemma3_text", with_head=True, **{**GEMMA, "sliding_window": 9})
    lm = load(folder)
    message = "attends in both directions, as its config.json says: it encodes, but cannot"
    with pytest.raises(ModelError, match=message):
        lm.generate("a")
    lm.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["use_bidirectional_attention"] is True
    assert config["sliding_window"] == 9 - 1  # as transformers wrote it into the folder
    assert "gerund_flags" not in config
    again = load(tmp_path / "saved")
    assert again.fingerprint() == lm.fingerprint()
    assert_equal(again.encode(TEXTS), theirs(folder).encode(TEXTS))


@pytest.mark.slow
def test_a_body_with_tied_embeddings_does_not_generate(tmp_path: Path) -> None:
    folder = ready_made(tmp_path / "st", tie_word_embeddings=True)
    lm = load(folder)
    lm.save(tmp_path / "saved")
    for own in (lm, load(tmp_path / "saved")):
        with pytest.raises(ModelError, match="was saved without an output head: it encodes, but cannot generate"):
            own.generate("a")


@pytest.mark.slow
def test_names_of_weights_without_the_prefix_of_a_language_model(tmp_path: Path) -> None:
    """As in Qwen3-Embedding, whose config names a class with a head, which is tied."""
    folder = ready_made(tmp_path / "st", tie_word_embeddings=True)
    change(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    assert_equal(*both(folder))
    assert load(folder).generate("a", 3)[0].token_ids


def test_a_whole_language_model_generates(tmp_path: Path) -> None:
    lm = load(ready_made(tmp_path / "st", with_head=True))
    assert lm.generate("a", 3)[0].token_ids


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_module_is_not_read_through_a_link_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = ready_made(tmp_path / "model", behind=[dense(WIDTH, 24)])
    listed = json.loads((folder / "modules.json").read_text())
    (folder / listed[2]["path"]).rename(folder / "projection")
    listed[2]["path"] = "projection"
    write(folder / "modules.json", listed)
    (folder / "projection" / name).rename(tmp_path / "elsewhere")
    (folder / "projection" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="is a link that leads out of its folder"):
        load(folder)


def test_another_plan_is_taken_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = ready_made(tmp_path / "st")
    load(folder, prompts={"query": "Q: "}, max_length=20)
    assert not caplog.text
    with caplog.at_level(logging.WARNING, logger="gerund"):
        lm = load(folder, attention="bidir", pooling="mean")
    assert (lm.encoder.attention.name, lm.encoder.pooling) == ("bidir", "mean")
    assert "attention=bidir, pooling=mean" in caplog.text
    assert "not as its author means it, with attention=causal, pooling=last" in caplog.text
    caplog.clear()
    load(folder, attention="bidir", pooling="mean")  # in a process it is said once
    assert not caplog.text


@pytest.mark.slow
def test_gerund_json_counts_for_more(tmp_path: Path) -> None:
    folder = ready_made(tmp_path / "st")
    lm = load(save_tiny(tmp_path / "other"), pooling="first")
    lm.save(tmp_path / "own")
    shutil.copy(tmp_path / "own" / "gerund.json", folder)
    assert load(folder).encoder == lm.encoder.with_defaults(lm.n_layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"model_type": "gemma3_text", "pooling": "mean", "behind": TWO_DENSE, **GEMMA}, ["Dense", "Dense"]),
        ({"pooling": ["cls", "mean"], "behind": [MIDDLE_NORMALIZE, LAYER_NORM]}, None),
        ({"include_prompt": False, "pooling": "weightedmean", "prompts": {"query": "Query: "}}, []),
        ({"model_type": "mistral", "is_causal": False, "sliding_window": 5}, []),
    ],
)
def test_a_ready_made_encoder_exported_again(tmp_path: Path, settings: dict[str, Any], kinds: list[str] | None) -> None:
    if kinds is None:
        settings = {**settings, "behind": [MIDDLE_NORMALIZE, dense(2 * WIDTH, WIDTH), LAYER_NORM]}
        kinds = ["Normalize", "Dense", "LayerNorm"]
    lm = load(ready_made(tmp_path / "st", **settings))
    exported(lm, tmp_path / "out", ["Transformer", "Pooling", *kinds, "Normalize"])


def exported(lm: gerund.LanguageModel, folder: Path, kinds: list[str]) -> None:
    """Export for plain sentence-transformers, in the old layout, and compare what that and gerund make of it."""
    assert lm.export(folder, "sentence-transformers").why_custom == ""
    types = [item["type"] for item in json.loads((folder / "modules.json").read_text())]
    assert types == [f"sentence_transformers.models.{kind}" for kind in kinds]
    again, st = load(folder), theirs(folder)
    for prompt_name in (None, *lm.encoder.prompts):
        ours = lm.encode(TEXTS, prompt_name=prompt_name)
        assert_equal(again.encode(TEXTS, prompt_name=prompt_name), ours)
        assert_equal(st.encode(TEXTS, prompt_name=prompt_name), ours)


def _modules(folder: Path, *types: str) -> None:
    paths = ["", *(f"{place}_Module" for place in range(1, len(types)))]
    write(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": kind}
            for i, (path, kind) in enumerate(zip(paths, types, strict=True))
        ],
    )


ST = "sentence_transformers"
REFUSED_MODULES = {
    **{f"{ST}.models.{name}": name for name in ("StaticEmbedding", "WordEmbeddings", "BoW", "CNN", "LSTM")},
    **{f"{ST}.models.{name}": name for name in ("WeightedLayerPooling", "WordWeights", "CLIPModel", "Asym", "Router")},
    f"{ST}.base.modules.router.Router": "Router",
    f"{ST}.sparse_encoder.models.MLMTransformer": "sparse",
    f"{ST}.sparse_encoder.models.SpladePooling": "sparse",
    f"{ST}.sparse_encoder.models.SparseAutoEncoder": "sparse",
    f"{ST}.sparse_encoder.models.SparseStaticEmbedding": "sparse",
    f"{ST}.multi_vector_encoder.modules.MultiVectorMask": "late interaction",
    f"{ST}.multi_vector_encoder.modules.HierarchicalTokenPooling": "late interaction",
    f"{ST}.multi_vector_encoder.modules.LambdaTokenPooling": "late interaction",
    "pylate.models.Dense.Dense": "late interaction",
    "custom_st.Transformer": "code of its author",
    "st_quantize.FlexibleQuantizer": "code of its author",
    "gerund.integrations.sentence_transformers.Transformer": "gerund.json is not there",
}


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ready_made(tmp_path_factory.mktemp("ready") / "st", behind=[dense(WIDTH, 20)])


@pytest.fixture
def folder(plain_folder: Path, tmp_path: Path) -> Path:
    """A copy of a folder that a test may spoil."""
    return shutil.copytree(plain_folder, tmp_path / "model")


@pytest.mark.parametrize("kind", REFUSED_MODULES)
@pytest.mark.parametrize("last", [True, False])
def test_a_module_that_gerund_does_not_know_is_refused_by_name(folder: Path, kind: str, last: bool) -> None:
    types = (OLD["Transformer"], OLD["Pooling"], kind) if last else (kind, OLD["Pooling"])
    _modules(folder, *types)
    # What it would import if it were run.
    (folder / f"{kind.split('.', maxsplit=1)[0]}.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert "modules.json" in message
    assert REFUSED_MODULES[kind].split()[0] in message
    assert kind in message or kind.startswith("gerund.")
    assert "use " in message or "copy it along" in message


@pytest.mark.parametrize(
    "name",
    [
        *("NVEmbedModel", "JinaEmbeddingsV5Model", "JinaForRanking", "LlamaBidirectionalModel"),
        *("Qwen3BidirectionalModel", "Lfm2BidirectionalModel"),
    ],
)
def test_an_architecture_of_code_is_refused_by_name(folder: Path, name: str) -> None:
    change(folder / "config.json", architectures=[name], auto_map={"AutoModel": f"modeling.{name}"})
    with pytest.raises(ModelError, match=f"config.json says {name}, .*(use|take) "):
        load(folder)


@pytest.mark.parametrize("name", ["embedding_gemma2", "nvembed", "llama_bidirec", "bidirectional_pplx_qwen3"])
def test_a_model_type_is_refused_by_name(folder: Path, name: str) -> None:
    change(folder / "config.json", model_type=name)
    with pytest.raises(ModelError, match=f"config.json says {name}, .*use "):
        load(folder)


def test_attention_that_is_code_has_to_be_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in gte-Qwen2 and stella: nothing but the author's code says who sees whom."""
    change(folder / "config.json", auto_map={"AutoModel": "modeling_qwen.Qwen2Model"})
    (folder / "modeling_qwen.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ConfigError, match=r"config.json leaves the attention to its author's code.*attention='causal'"):
        load(folder)
    lm = load(folder, attention="bidir")
    assert lm.encoder.append_eos
    assert "an end token is put after every text" in caplog.text
    assert not load(ModelSpec(model=folder, attention="bidir", append_eos=False)).encoder.append_eos


def test_folders_without_a_config(tmp_path: Path) -> None:
    for file, what in (("router_config.json", "Router"), ("encoder_decoder_config.json", "LLM2Vec-Gen")):
        folder = tmp_path / file.split("_", maxsplit=1)[0]
        folder.mkdir()
        write(folder / file, {})
        with pytest.raises(ModelError, match=rf"{file} is of (a )?{what}.*use "):
            load(folder)
    static = tmp_path / "static"
    write(static / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": f"{ST}.models.StaticEmbedding"}])
    with pytest.raises(ModelError, match=r"StaticEmbedding.*no language model; use sentence-transformers"):
        load(static)
    write(static / "modules.json", [{"idx": 0, "name": "0", "path": "0_Transformer", "type": OLD["Transformer"]}])
    with pytest.raises(ModelError, match="puts the language model into 0_Transformer; move"):
        load(static)


def _write_text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None  # type: ignore[func-returns-value]


def _entry(place: int, **values: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        modules = json.loads((folder / "modules.json").read_text())
        modules[place] = {**modules[place], **values}
        write(folder / "modules.json", modules)

    return spoil


def _setting(file: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / file, **values)


def _gone(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def _pickled(folder: Path) -> None:
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")


def _weights(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "2_Dense" / "model.safetensors"
        save_file({**load_file(path), **changes}, path)

    return spoil


DENSE, POOLING = "2_Dense/config.json", "1_Pooling/config.json"
TEXT, MODEL = "sentence_bert_config.json", "config_sentence_transformers.json"
MESSAGE = {"modality_config": {"text": {}, "message": {"format": "flat"}}}
BAD: dict[str, tuple[Callable[[Path], None], type[GerundError], str]] = {
    "no JSON": (_write_text("modules.json", "[{"), DataError, "modules.json is not valid JSON"),
    "no object": (_write_text("modules.json", "[5]"), DataError, "module 0 is no object with path and type"),
    "path up": (_entry(2, path="../2_Dense"), DataError, "module 2 is outside the folder"),
    "absolute path": (_entry(2, path="/etc"), DataError, "module 2 is outside the folder"),
    "path of Windows": (_entry(2, path="C:\\x"), DataError, "module 2 is outside the folder"),
    "no pooling": (lambda folder: _modules(folder, OLD["Transformer"]), ModelError, "lists Transformer; gerund reads"),
    "Dense before the pooling": (
        lambda folder: _modules(folder, OLD["Transformer"], OLD["Dense"], OLD["Pooling"]),
        ModelError,
        "lists Transformer, Dense, Pooling",
    ),
    "Dense gone": (_gone("2_Dense"), DataError, "2_Dense/config.json is missing"),
    "weights of Dense gone": (_gone("2_Dense/model.safetensors"), DataError, "model.safetensors is missing"),
    "pickled": (_pickled, DataError, "pytorch_model.bin may run code.*convert it to safetensors"),
    "damaged": (_write_text("2_Dense/model.safetensors", "x"), DataError, "2_Dense/model.safetensors cannot be read"),
    "width in": (_setting(DENSE, in_features=31), DataError, "2_Dense.*takes vectors of 31 numbers, and is given 32"),
    "width out": (_setting(DENSE, out_features=21), DataError, "does not fit config.json.*21x32.*20x32"),
    "width of nothing": (_setting(DENSE, in_features="32"), DataError, "in_features is a whole number above 0"),
    "NaN": (_weights(**{"linear.weight": torch.full((20, WIDTH), torch.nan)}), DataError, "not finite"),
    "another tensor": (_weights(other=torch.ones(1)), DataError, "other is in one of them only"),
    "bias without one": (_setting(DENSE, bias=True), DataError, "bias is in one of them only"),
    "activation": (
        _setting(DENSE, activation_function="custom.Activation"),
        ModelError,
        "names the activation 'custom.Activation'; gerund has Identity",
    ),
    "late interaction": (_setting(DENSE, module_input_name="token_embeddings"), ModelError, "late interaction"),
    "setting of Dense": (_setting(DENSE, rank=3), ModelError, "has the setting 'rank'"),
    "flag of Dense": (_setting(DENSE, bias="yes"), DataError, "bias and use_residual are true or false"),
    "mode": (_setting(POOLING, pooling_mode="attention"), ModelError, "pools by 'attention'; gerund knows cls, max"),
    "include_prompt": (_setting(POOLING, include_prompt="no"), DataError, "include_prompt is true or false"),
    "Pooling gone": (_gone("1_Pooling"), DataError, "1_Pooling/config.json is missing"),
    "message": (_setting(TEXT, **MESSAGE), ModelError, '"message" in its modality_config'),
    "task": (_setting(TEXT, transformer_task="text-generation"), ModelError, "says transformer_task 'text-generation'"),
    "lower case": (_setting(TEXT, do_lower_case=True), ModelError, "says do_lower_case True"),
    "query length": (_setting(TEXT, query_length=32), ModelError, "says query_length 32"),
    "arguments": (_setting(TEXT, config_args={"rope_theta": 5}), ModelError, "says rope_theta 5 in its config_args"),
    "processing": (_setting(TEXT, processing_kwargs={"text": {"x": 1}}), ModelError, "has processing_kwargs for texts"),
    "length": (_setting(TEXT, max_seq_length=0), DataError, "max_seq_length is a whole number above 0, not 0"),
    "other text states": (
        _setting(TEXT, modality_config={"text": {"method": "get_text_features"}}),
        ModelError,
        "something else than the last hidden state",
    ),
    "sparse": (_setting(MODEL, model_type="SparseEncoder"), ModelError, "says SparseEncoder: its vectors are sparse"),
    "reranker": (_setting(MODEL, model_type="CrossEncoder"), ModelError, "a reranker that gerund reads is"),
    "late": (
        _setting(MODEL, model_type="MultiVectorEncoder"),
        ModelError,
        "lists Transformer, Pooling, Dense.*reads a Transformer in",
    ),
    "another kind": (_setting(MODEL, model_type="Another"), ModelError, "says Another"),
    "similarity": (_setting(MODEL, similarity_fn_name="jaccard"), ModelError, "compares vectors by 'jaccard'"),
    "prompts": (_setting(MODEL, prompts=["a"]), DataError, "prompts are texts by name"),
    "prompt with a place": (_setting(MODEL, prompts={"a": "x {text}"}), ModelError, "the prompt 'a' has a place"),
    "default prompt": (_setting(MODEL, default_prompt_name="no"), ConfigError, "names the default prompt 'no'"),
    "truncate_dim": (_setting(MODEL, truncate_dim=21), DataError, "keeps 21 numbers of a vector.*which has 20"),
    "settings no object": (_write_text(MODEL, "[]"), DataError, "holds no object"),
    "normalize off": (
        lambda folder: write(folder / "3_Normalize" / "config.json", {"normalize_embeddings": False}),
        ModelError,
        "normalize_embeddings is off",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_broken_or_unknown_is_refused(folder: Path, name: str) -> None:
    spoil, kind, words = BAD[name]
    spoil(folder)
    with pytest.raises(kind, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


ODD: tuple[Any, ...] = (None, True, -1, 1.5, "", "x", "../..", [], [1], {}, {"a": 1}, [[]], 10**30, float("nan"))


def _spoiled(data: Any, random: Random) -> Any:
    """Put something odd into one place of a JSON document, or take it out."""
    if not data or not isinstance(data, dict | list) or random.random() < 0.2:
        return random.choice(ODD)
    if isinstance(data, list):
        place = random.randrange(len(data))
        return [*data[:place], _spoiled(data[place], random), *data[place + 1 :]]
    key = random.choice(list(data))
    rest = {name: value for name, value in data.items() if name != key}
    return rest if random.random() < 0.2 else {**rest, key: _spoiled(data[key], random)}


@pytest.mark.slow
def test_whatever_stands_in_its_files_is_read_or_refused(folder: Path) -> None:
    random, config = Random(0), read_config(find(folder))
    change(folder / MODEL, truncate_dim=10)
    files = ["modules.json", MODEL, TEXT, POOLING, DENSE, "tokenizer_config.json"]
    whole = {name: (folder / name).read_text() for name in files}
    refused = 0
    for _ in range(120):
        name = random.choice(files)
        text = json.dumps(_spoiled(json.loads(whole[name]), random))
        (folder / name).write_text(text[: random.randrange(len(text))] if random.random() < 0.1 else text)
        try:
            stored_settings(folder, config, EncoderSpec())
        except GerundError:
            refused += 1
        (folder / name).write_text(whole[name])
    assert refused > 40


def test_what_a_hub_model_says_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        assert (name, local_files_only) == ("someone/model", True)
        asked.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert settings_folder(Source("someone/model", None)) == folder
    assert {"modules.json", "config_sentence_transformers.json", "*/config.json"} <= set(asked)
    parts = ["late.json", "late.safetensors", "transform.safetensors", "training.json", "training-infill.json"]
    assert list(filter_repo_objects(parts, allow_patterns=asked)) == parts
    assert asked[-1] == "2_Dense/model.safetensors"


@pytest.mark.slow
def test_a_body_of_which_nothing_says_how_it_encodes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "modules.json").unlink()
    lm = load(folder)
    assert (lm.encoder.attention.name, lm.encoder.pooling) == ("mask0-bidir", "mean")
    assert "nothing says how it is meant to encode" in caplog.text
    caplog.clear()
    load(folder, attention="causal", pooling="last")
    assert not caplog.text


def test_settings_that_change_nothing_are_taken(folder: Path) -> None:
    before = load(folder).fingerprint()
    change(folder / TEXT, model_args={"torch_dtype": "bfloat16"}, tokenizer_args={"padding_side": "left"})
    change(folder / TEXT, processing_kwargs={"chat_template": {"add_generation_prompt": True}}, unpad_inputs=True)
    change(folder / "config_sentence_transformers.json", requirements={"transformers": ">=4"})
    assert load(folder).fingerprint() == before


@pytest.mark.slow
def test_doctor_says_where_the_settings_are(tmp_path: Path) -> None:
    changes = dict(num_hidden_layers=2, sliding_window=8, layer_types=None, use_bidirectional_attention=True)
    gemma = ready_made(tmp_path / "st", "gemma3_text", pooling="mean", behind=[dense(WIDTH, 20)], **changes)
    ran = run_cli("doctor", gemma)
    assert ran.code == 0
    assert "read as modules.json says, prompts query, document" in ran.out
    assert "Plan bidir, mean pooling: every layer obeys" in ran.out
    found = json.loads(run_cli("doctor", gemma, "--json").out)
    assert (found["settings_from"], found["prompts"]) == ("modules.json", ["query", "document"])
    assert found["width"] == WIDTH


@pytest.mark.slow
def test_training_tells_which_layers_it_leaves_out(tmp_path: Path) -> None:
    base = ready_made(tmp_path / "base", behind=[dense(WIDTH, 24)])
    (tmp_path / "texts.txt").write_text("the cat sat on the mat\n" * 40)
    recipe = {
        "model": {"base": str(base)},
        "data": {"folder": str(tmp_path), "sources": [{"name": "texts", "files": ["texts.txt"]}]},
        "objectives": [{"kind": "simcse", "batch_size": 4, "length": 16}],
        "output": str(tmp_path / "out"),
        "steps": 1,
    }
    write(tmp_path / "recipe.yaml", recipe)  # JSON is YAML
    ran = run_cli("train", tmp_path / "recipe.yaml", "--dry-run")
    assert ran.code == 0
    assert f"its vectors are the pooled states, of {WIDTH} numbers instead of 24" in ran.err
