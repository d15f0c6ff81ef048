"""Saving and loading changes nothing: not the vectors, not a bit of the logits, whatever the plan."""

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import gerund
from gerund import PLAN_NAMES, AttentionPlan, EncoderConfig, LanguageModel
from gerund.errors import ConfigError, OutputExistsError
from gerund.scoring.dual_encoder import _for_scoring
from gerund.seq2seq_model import Seq2SeqModel
from tests.tiny import save_tiny, save_tiny_t5

TEXTS = ["the cat", "a dog in the garden and another thing", "x"]
IDS = torch.arange(3, 20)[None]


def load(folder: Path, **options) -> LanguageModel:
    return gerund.load(folder, **{"dtype": "float32", **options})


@torch.no_grad()
def plain_logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("name", [name for name in PLAN_NAMES if name != "hybrid"])
def test_every_plan(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    lm = load(tiny_folder, attention=name)
    lm.save(tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.encoder == replace(lm.encoder, attention=lm.encoder.attention.with_defaults(lm.n_layers))
    assert np.array_equal(again.encode(TEXTS), lm.encode(TEXTS))
    assert again.fingerprint() == lm.fingerprint()
    assert torch.equal(plain_logits(tmp_path / "out"), plain_logits(tiny_folder))


@pytest.mark.slow
def test_plans_are_told_apart(tiny_folder: Path) -> None:
    lm = load(tiny_folder)
    vectors = {
        name: lm.with_encoder(EncoderConfig(AttentionPlan(name))).encode(TEXTS).tobytes()
        for name in PLAN_NAMES
        if name != "hybrid"
    }
    alike = {"echo", "causal"}
    assert len({vectors[name] for name in vectors if name not in alike}) == len(vectors) - len(alike)


def test_every_setting(tiny_folder: Path, tmp_path: Path) -> None:
    model = load(tiny_folder)
    encoder = EncoderConfig(
        AttentionPlan("inter-back", k=2, combine="mean", variant="released"),
        pooling="weighted-mean",
        prompt="Query: ",
        prompts={"document": "Über: "},
        pool_prompt=True,
        append_eos=True,
        normalize=False,
        max_length=33,
    )
    lm = LanguageModel(model.model, model.tokenizer, encoder)
    lm.save(tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.encoder == encoder
    assert again.max_length == 33
    assert np.array_equal(again.encode(TEXTS), lm.encode(TEXTS))
    stored = json.loads((tmp_path / "out" / "gerund.json").read_text())
    assert stored["fingerprint"] == lm.fingerprint()
    assert stored["format"] == 1


@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("architecture", ["gpt2", "opt", "gemma2", "qwen2_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied(tmp_path: Path, architecture: str, tied: bool) -> None:
    base = save_tiny(tmp_path / "base", architecture, tie_word_embeddings=tied)
    lm = load(base, attention="mask0-bidir")
    lm.save(tmp_path / "out")
    again = load(tmp_path / "out")
    assert np.array_equal(again.encode(TEXTS), lm.encode(TEXTS))
    assert again.fingerprint() == lm.fingerprint()
    assert torch.equal(plain_logits(tmp_path / "out"), plain_logits(base))
    saved, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", base))
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    base = save_tiny(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base, dtype=dtype).save_pretrained(base)
    lm = load(base, dtype=name)
    lm.save(tmp_path / "out")
    assert torch.equal(plain_logits(tmp_path / "out"), plain_logits(base))
    assert plain_logits(base).dtype == dtype
    again = load(tmp_path / "out", dtype=name)
    assert np.array_equal(again.encode(TEXTS), lm.encode(TEXTS))
    # A processor without bfloat16 holds the same values in float32, and saves those.
    load(base, dtype="float32").save(tmp_path / "wide")
    wide, narrow = (load_file(folder / "model.safetensors") for folder in (tmp_path / "wide", base))
    assert all(torch.equal(wide[key], narrow[key].float()) for key in narrow)
    assert load(tmp_path / "wide").fingerprint() == lm.fingerprint()


def test_what_is_called_for_wins_over_what_is_stored(tiny_folder: Path, tmp_path: Path) -> None:
    load(tiny_folder, attention="mask0+bidir", k=3, k0=2, pooling="last", prompt="Q: ").save(tmp_path / "out")
    assert load(tmp_path / "out").encoder.attention == AttentionPlan("mask0+bidir", k=3, k0=2)
    changed = load(tmp_path / "out", k0=1, pooling="mean", prompt="", max_length=9)
    assert changed.encoder == EncoderConfig(AttentionPlan("mask0+bidir", k=3, k0=1), max_length=9)
    assert load(tmp_path / "out", attention="bidir").encoder.attention == AttentionPlan("bidir")


def test_the_tokenizer_stays_what_it_was(tiny_folder: Path, tmp_path: Path) -> None:
    lm = load(tiny_folder)
    lm.save(tmp_path / "out")
    one, two = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_folder, tmp_path / "out"))
    assert one(TEXTS).input_ids == two(TEXTS).input_ids
    stored = [json.loads((folder / "tokenizer_config.json").read_text()) for folder in (tiny_folder, tmp_path / "out")]
    assert stored[0] == stored[1]


def test_existing_output(tiny_folder: Path, tmp_path: Path) -> None:
    lm = load(tiny_folder, k=1)
    lm.save(tmp_path / "out")
    with pytest.raises(OutputExistsError):
        load(tiny_folder, k=2).save(tmp_path / "out")
    assert load(tmp_path / "out").encoder.attention.k == 1
    load(tiny_folder, k=2).save(str(tmp_path / "out"), overwrite=True)
    assert load(tmp_path / "out").encoder.attention.k == 2


def test_saving_leaves_the_model_in_memory_alone(tiny_folder: Path, tmp_path: Path) -> None:
    lm = load(tiny_folder)
    before, logits = lm.model.config.to_dict(), lm.model(IDS).logits
    lm.save(tmp_path / "saved")
    lm.export(tmp_path / "merged", "merged")
    assert lm.model.config.to_dict() == before
    assert torch.equal(lm.model(IDS).logits, logits)


@pytest.mark.slow
def test_two_encoders_share_one_model(tiny_folder: Path) -> None:
    plans = {name: AttentionPlan(name) for name in ("inter-bidir", "extra-back", "mask0-all")}
    alone = {name: load(tiny_folder, attention=plan).encode(TEXTS) for name, plan in plans.items()}
    lm = load(tiny_folder, attention="extend-back")
    shared = {name: LanguageModel(lm.model, lm.tokenizer, EncoderConfig(plan)) for name, plan in plans.items()}
    for name, other in shared.items():
        assert np.array_equal(other.encode(TEXTS), alone[name])
    assert np.array_equal(lm.encode(TEXTS), load(tiny_folder, attention="extend-back").encode(TEXTS))


def test_a_language_model_is_loaded_again_as_it_was_read(tiny_folder):
    lm = gerund.load(tiny_folder, attention="mask0-bidir", k=2, pooling="last", prompts={"query": "Q: "})
    data = pickle.dumps(lm)
    assert len(data) < 5000, "the spec, and no weights"
    again = pickle.loads(data)
    assert type(again) is LanguageModel
    assert (again.spec, again.fingerprint()) == (lm.spec, lm.fingerprint())
    np.testing.assert_array_equal(again.encode("the cat", prompt_name="query"), lm.encode("the cat", prompt="Q: "))


def test_what_was_changed_since_goes_along(tiny_folder):
    lm = gerund.load(tiny_folder)
    other = lm.with_encoder(gerund.EncoderConfig(pooling="first", attention=gerund.AttentionPlan("causal")))
    assert pickle.loads(pickle.dumps(other)).fingerprint() == other.fingerprint() != lm.fingerprint()


def test_a_t5(tmp_path):
    lm = gerund.load(save_tiny_t5(tmp_path / "t5"))
    again = pickle.loads(pickle.dumps(lm))
    assert type(again) is Seq2SeqModel
    assert again.fingerprint() == lm.fingerprint()


def test_a_copy_is_the_same_model_in_the_same_memory(tiny_folder):
    lm = gerund.load(tiny_folder)
    assert copy.copy(lm).model is lm.model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda lm: LanguageModel(lm.model, lm.tokenizer), "a model in memory can't be pickled: only models from"),
        (lambda lm: _for_scoring(lm, lm.encoder), "can't be pickled"),
        (
            lambda lm: lm.with_encoder(gerund.EncoderConfig(transform="all-but-the-top")).fitted(list("abcdefgh")),
            "has no spec; save it first",
        ),
    ],
)
def test_what_no_spec_says_is_refused(tiny_folder, make, message):
    with pytest.raises(ConfigError, match=message):
        pickle.dumps(make(gerund.load(tiny_folder)))
