"""What sentence-transformers makes of an exported folder is what gerund makes of the model."""

import importlib.util
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import gerund
from gerund import PLAN_NAMES, AttentionPlan, EncoderConfig, LanguageModel
from gerund.errors import ModelError
from gerund.exporting import sentence_transformers as layout
from gerund.models import sentence_transformers_folder as modules_json
from gerund.text_analysis import normalized
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.ready_made import closed
from tests.tiny import CONFIGS, REFUSED, byte_tokenizer, save_tiny, tiny

pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer

from gerund.integrations.sentence_transformers import load as load_exported

TEXTS = ["the cat sat on the mat", "a", "in the beginning there was another thing that", "zürich 数据库", "x y " * 10]
TEXTS += ["Zu\u0308rich, photo\u00adsyn\u200bthesis", "ef\ufb01cient \uff21\uff22 \u00bd \u2764\ufe0f"]
NEAR = 1e-5


def load(folder: Path, **options) -> LanguageModel:
    return gerund.load(folder, **{"dtype": "float32", **options})


def with_settings(folder: Path, **settings) -> LanguageModel:
    lm = load(folder, attention="causal")
    return LanguageModel(lm.model, lm.tokenizer, EncoderConfig(**settings))


def assert_same(
    lm: LanguageModel, model: SentenceTransformer, prompts: tuple[str | None, ...] = (None,), texts: list[str] = TEXTS
) -> None:
    for prompt in prompts:
        given = {"prompt_name": prompt} if prompt in lm.encoder.prompts else {"prompt": prompt}
        np.testing.assert_allclose(model.encode(texts, batch_size=3, **given), lm.encode(texts, **given), atol=NEAR)


def plain(lm: LanguageModel, folder: Path) -> SentenceTransformer:
    done = lm.export(folder, "sentence-transformers")
    assert done.why_custom == ""
    assert done.load == f"sentence_transformers.SentenceTransformer({str(folder)!r})"
    assert "Plain sentence-transformers loads it" in (folder / "README.md").read_text()
    return SentenceTransformer(str(folder), device="cpu")


def custom(lm: LanguageModel, folder: Path, why: str) -> SentenceTransformer:
    done = lm.export(folder, "sentence-transformers")
    assert why in done.why_custom
    assert done.load == f"gerund.integrations.sentence_transformers.load({str(folder)!r})"
    assert done.why_custom in (folder / "README.md").read_text()
    return load_exported(folder, device="cpu", model_kwargs={"dtype": "float32"})


@pytest.mark.parametrize(
    "settings", [{"attention": "causal"}, {"attention": "bidir"}, {"attention": "inplace-bidir", "k": 4}]
)
def test_plain(tiny_folder: Path, tmp_path: Path, settings: dict) -> None:
    lm = load(tiny_folder, **settings)
    model = plain(lm, tmp_path / "out")
    assert_same(lm, model, (None, "", "query:"))
    assert model.max_seq_length == lm.max_length
    assert model.similarity_fn_name == "cosine"
    assert model.get_embedding_dimension() == lm.dimensions
    scores = model.similarity(model.encode(TEXTS), model.encode(TEXTS)).numpy()
    np.testing.assert_allclose(scores, lm.similarity(TEXTS, TEXTS), atol=NEAR)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_says_in_which_type_it_was_checked(tiny_folder: Path, tmp_path: Path, dtype: str) -> None:
    """transformers and its versions choose differently where nothing is said."""
    lm = load(tiny_folder, attention="causal", dtype=dtype)
    lm.export(tmp_path / "out", "sentence-transformers")
    said = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert said["model_args"] == {"dtype": dtype}
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float16"}))
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").dtype == getattr(torch, dtype)


@pytest.mark.sweep(quick=3, check=3)
@pytest.mark.filterwarnings("ignore:.*were cut:UserWarning")  # echo has room for half a text
@pytest.mark.parametrize("name", [name for name in PLAN_NAMES if name not in ("causal", "bidir", "hybrid")])
def test_plans_with_our_own_class(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    lm = load(tiny_folder, attention=name)
    model = custom(lm, tmp_path / "out", f"has no attention plan {name!r}")
    # A prompt that fuses with the text, too.
    assert_same(lm, model, (None, "query:", "the "))


@pytest.mark.sweep(quick=0, check=1)
@pytest.mark.parametrize("recurrent", ["causal", "both"])
def test_hybrid_models_by_our_own_class(tmp_path: Path, recurrent: str) -> None:
    lm = load(save_tiny(tmp_path / "base", "lfm2"), attention=AttentionPlan("bidir", recurrent=recurrent))
    assert_same(lm, custom(lm, tmp_path / "out", ""), (None, "query:"))


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("pooling", ["mean", "weighted-mean", "last", "first"])
@pytest.mark.parametrize("append_eos", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_poolings_and_special_tokens(tmp_path: Path, pooling: str, append_eos: bool, bos: bool) -> None:
    base = save_tiny(tmp_path / "base", bos=bos)
    settings = {"pooling": pooling, "append_eos": append_eos, "normalize": pooling == "mean", "max_length": 12}
    lm = with_settings(base, attention=AttentionPlan("bidir"), **settings)
    model = plain(lm, tmp_path / "out")
    with pytest.warns(UserWarning, match="were cut"):
        assert_same(lm, model)
    assert model.max_seq_length == 12
    assert len(model) == (3 if pooling == "mean" else 2)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"attention": AttentionPlan("bidir", skips=3)}, "skips"),
        ({"pooling": "last-mean"}, "sentence-transformers has no pooling last-mean"),
        ({"pooling": "weighted-mean", "prompt": "Query:"}, "weights of a weighted mean"),
    ],
)
def test_settings_that_only_our_own_class_has(tiny_folder: Path, tmp_path: Path, settings: dict, why: str) -> None:
    usual = with_settings(tiny_folder, attention=AttentionPlan("bidir"))
    lm = with_settings(tiny_folder, **{"attention": AttentionPlan("bidir"), **settings})
    assert not np.allclose(lm.encode(TEXTS), usual.encode(TEXTS), atol=1e-3)
    assert_same(lm, custom(lm, tmp_path / "out", why), (None, ""))


PROMPTS = {"query": "Query:", "document": "Text:"}


def test_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    lm = with_settings(tiny_folder, attention=AttentionPlan("bidir"), prompts=PROMPTS, prompt="Read:", append_eos=True)
    model = plain(lm, tmp_path / "out")
    assert {name: model.prompts[name] for name in (*PROMPTS, "default")} == {**PROMPTS, "default": "Read:"}
    assert model.default_prompt_name == "default"
    assert_same(lm, model, (None, "", "query", "document"))
    np.testing.assert_allclose(model.encode_query(TEXTS), lm.encode(TEXTS, prompt_name="query"), atol=NEAR)
    np.testing.assert_allclose(model.encode_document(TEXTS), lm.encode(TEXTS, prompt_name="document"), atol=NEAR)


def test_the_default_prompt_may_have_a_name() -> None:
    named = EncoderConfig(prompts=PROMPTS, prompt="Query:")
    assert modules_json.prompt_settings(named) == (PROMPTS, "query")
    taken = EncoderConfig(prompts={"default": "x"}, prompt="Query:")
    jobs = {"query": "Query:", "document": "Query:"}
    assert modules_json.prompt_settings(taken) == (
        {"default": "x", **jobs, "gerund-default": "Query:"},
        "gerund-default",
    )
    other = EncoderConfig(prompts=PROMPTS, prompt="Read:")
    assert modules_json.prompt_settings(other) == ({**PROMPTS, "default": "Read:"}, "default")
    assert modules_json.prompt_settings(EncoderConfig(prompts=PROMPTS)) == (PROMPTS, None)


def test_pooled_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"prompts": {"query": "Query: the "}, "prompt": "Read: ", "pool_prompt": True}
    lm = with_settings(tiny_folder, attention=AttentionPlan("bidir"), pooling="weighted-mean", **settings)
    assert_same(lm, plain(lm, tmp_path / "out"), (None, "", "query"))


def test_prompts_that_fuse_with_the_text(tiny_folder: Path, tmp_path: Path) -> None:
    lm = with_settings(tiny_folder, attention=AttentionPlan("bidir"), prompts={"query": "Say t"})
    model = custom(lm, tmp_path / "out", "the last token of the prompt 'Say t' can reach into the text")
    words = ["he cat", "hen", "cat"]
    theirs = model.encode(words, prompt_name="query")
    np.testing.assert_allclose(theirs, lm.encode(words, prompt_name="query"), atol=NEAR)


@pytest.mark.sweep(quick=0, check=3)
@pytest.mark.filterwarnings("ignore:.*were cut:UserWarning", "ignore:The explicitly set RoPE")
@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture(tmp_path: Path, architecture: str) -> None:
    base = save_tiny(tmp_path / "base", architecture)
    lm = load(base, attention="bidir")
    if "sliding_window" not in CONFIGS[architecture]:
        model = plain(lm, tmp_path / "out")
        # transformers makes Qwen2's tokenizer anew, without the normalization that is exported.
        normalizes = "Normalize texts to NFKC" not in (tmp_path / "out" / "README.md").read_text()
        assert normalizes == (architecture != "qwen2")
        assert_same(lm, model, texts=TEXTS if normalizes else list(map(normalized, TEXTS)))
        return
    assert_same(lm, custom(lm, tmp_path / "out", "a sliding window of 3 tokens differently"))
    for settings in ({"attention": AttentionPlan("causal")}, {"attention": AttentionPlan("bidir"), "max_length": 3}):
        lm = LanguageModel(lm.model, lm.tokenizer, EncoderConfig(**settings))
        assert_same(lm, plain(lm, tmp_path / settings["attention"].name))


@pytest.mark.parametrize("architecture", REFUSED)
def test_architectures_that_no_plan_reaches_still_export_causally(tmp_path: Path, architecture: str) -> None:
    lm = load(save_tiny(tmp_path / "base", architecture), attention="causal")
    model = lm.export(tmp_path / "out", "sentence-transformers")
    assert_same(lm, load_exported(tmp_path / "out", device="cpu"))
    assert model.why_custom == ""


FIND_SPEC = importlib.util.find_spec


def without_the_library(name: str, package: str | None = None):
    return None if name == "sentence_transformers" else FIND_SPEC(name, package)


@pytest.mark.parametrize("installed", [True, False])
def test_an_architecture_that_does_not_honour_is_causal(
    tiny_folder: Path, tmp_path: Path, installed: bool, monkeypatch
) -> None:
    """The flag is taken out of the written config, which is what an architecture does that never reads it."""
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", without_the_library)
    change = layout.change_json
    monkeypatch.setattr(
        layout, "change_json", lambda path, **values: values.pop("is_causal", 0) or change(path, **values)
    )
    lm = load(tiny_folder, attention="bidir")
    model = custom(lm, tmp_path / "out", "reads the plain folder differently (cosine distance")
    assert_same(lm, model)
    assert "is_causal" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not (tmp_path / "out" / "1_Pooling").exists()


def test_without_the_library_the_body_is_tried(tiny_folder: Path, tmp_path: Path, monkeypatch) -> None:
    lm = load(tiny_folder, attention="bidir")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", without_the_library)
        lm.export(tmp_path / "out", "sentence-transformers")
    assert_same(lm, SentenceTransformer(str(tmp_path / "out"), device="cpu"))


@pytest.mark.sweep(quick=1, check=1)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(tmp_path: Path, side: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = side
    tokenizer.pad_token = None
    base = save_tiny(tmp_path / "base", "gpt2")
    lm = LanguageModel(load(base).model, tokenizer, EncoderConfig(AttentionPlan("bidir"), pooling="last"))
    model = plain(lm, tmp_path / "out")
    assert_same(lm, model)
    assert (lm.tokenizer.padding_side, lm.tokenizer.pad_token) == (side, None)
    assert model.tokenizer.padding_side == "right"


@pytest.mark.slow
def test_a_tokenizer_that_ends_every_text_by_itself(tmp_path: Path) -> None:
    tokenizer = closed(byte_tokenizer())
    base = save_tiny(tmp_path / "base")
    for append_eos in (True, False):
        config = EncoderConfig(AttentionPlan("bidir"), prompt="Query:", append_eos=append_eos)
        lm = LanguageModel(load(base).model, tokenizer, config)
        assert_same(lm, plain(lm, tmp_path / f"out-{append_eos}"), (None, ""))


@pytest.mark.sweep(quick=0, check=1)
@pytest.mark.filterwarnings(*PEFT_WARNINGS)
@pytest.mark.parametrize("name", ["bidir", "mask0-bidir"])
def test_adapters_are_merged(tmp_path: Path, name: str) -> None:
    base = save_tiny(tmp_path / "base", tie_word_embeddings=True)
    adapter = make_adapter(base, tmp_path / "lora", target_modules=["q_proj", "embed_tokens"])
    lm = load(base, attention=name, adapter=adapter)
    lm.export(tmp_path / "out", "sentence-transformers")
    model = load_exported(tmp_path / "out", device="cpu", model_kwargs={"dtype": "float32"})
    assert_same(lm, model)
    assert not (tmp_path / "out" / "adapter").exists()


@pytest.mark.slow
def test_half_precision(tmp_path: Path) -> None:
    tiny("llama", vocab_size=300).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    lm = gerund.load(tmp_path / "base", attention="bidir", dtype="bfloat16")
    model = plain(lm, tmp_path / "out")
    assert model.dtype == torch.bfloat16
    wide = SentenceTransformer(str(tmp_path / "out"), device="cpu", model_kwargs={"dtype": torch.float32})
    assert_same(load(tmp_path / "base", attention="bidir"), wide)


def test_the_model_in_memory_stays_as_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    lm = with_settings(tiny_folder, attention=AttentionPlan("bidir"), append_eos=True, max_length=20)
    config, vectors = lm.model.config.to_dict(), lm.encode("a cat")
    tokenizer = lm.tokenizer.backend_tokenizer.to_str()
    assert '"truncation":null' in tokenizer
    plain(lm, tmp_path / "out")
    assert lm.model.config.to_dict() == config
    assert lm.tokenizer.backend_tokenizer.to_str() == tokenizer
    assert lm.tokenizer.model_max_length == 64
    assert np.array_equal(lm.encode("a cat"), vectors)


def test_the_plain_folder_is_an_encoder_only(tiny_folder: Path, tmp_path: Path) -> None:
    lm = load(tiny_folder, attention="bidir")
    plain(lm, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaModel"]
    assert config["is_causal"] is False
    with pytest.raises(ModelError, match=r"attends in both directions.*it encodes, but cannot generate"):
        gerund.load(tmp_path / "out").generate("a")


@pytest.mark.slow
def test_our_folder_is_a_language_model_still(tiny_folder: Path, tmp_path: Path) -> None:
    lm = load(tiny_folder, k=2)
    custom(lm, tmp_path / "out", "has no attention plan")
    again = load(tmp_path / "out")
    assert np.array_equal(again.encode(TEXTS), lm.encode(TEXTS))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits, lm.model(ids).logits)


@pytest.mark.slow
def test_export_is_quiet(tiny_folder: Path, tmp_path: Path, capfd) -> None:
    lm = with_settings(tiny_folder, attention=AttentionPlan("bidir"), prompt="Query:")
    level = logging.getLogger("sentence_transformers").level
    plain(lm, tmp_path / "out")
    capfd.readouterr()
    lm.export(tmp_path / "again", "sentence-transformers")
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("sentence_transformers").level == level


@pytest.mark.slow
def test_a_real_model(stories_folder: Path, tmp_path: Path) -> None:
    lm = with_settings(stories_folder, attention=AttentionPlan("bidir"), prompts={"query": "Find: ", "text": "Once:"})
    lm.export(tmp_path / "out", "sentence-transformers")
    model = load_exported(tmp_path / "out", device="cpu", model_kwargs={"dtype": "float32"})
    assert_same(lm, model, (None, "query", "text"))
    lm = LanguageModel(lm.model, lm.tokenizer, replace(lm.encoder, attention=AttentionPlan(), prompt="Once upon "))
    assert_same(lm, custom(lm, tmp_path / "own", "has no attention plan"), (None, ""))
