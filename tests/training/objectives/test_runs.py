"""Every objective through ``train``: with an adapter or all weights, and what the finished folder gives."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import gerund
from gerund.errors import ConfigError, ModelError
from gerund.settings.plan import Direction
from gerund.training.corpus.texts import Sources
from gerund.training.objectives.base import prepare_objectives
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from gerund.training.step import StepData, TrainingModule, run_step
from gerund.training.trainable_model import prepare_model
from tests.adapters import PEFT_WARNINGS
from tests.training.conftest import sentences
from tests.training.outcomes import read_log

pytestmark = [pytest.mark.filterwarnings(warning) for warning in PEFT_WARNINGS]

SMALL = {"batch_size": 4, "micro_batch_size": 2, "length": 24}
KINDS = {
    "magnet": [
        {"kind": "causal"},
        {"kind": "mntp"},
        {"kind": "msg", "longest": 8, "whole_fraction": 0.3},
        {"kind": "sscl", "projection": 8},
    ],
    "unimae": [
        {"kind": "unimae"},
        {"kind": "simcse", "min_words": 4},
        {"kind": "contrastive", "hard_negatives": 1, "query_prompt": "ask: "},
    ],
}
LOSSES = {
    "magnet": {"causal", "mntp", "msg", "sscl"},
    "unimae": {"mar", "mrc", "simcse", "contrastive"},
}
# SimCSE's views differ by dropout alone, and pairs from files have no validation.
VALIDATED = {
    "magnet": {"val_a", "val_mntp", "val_msg", "val_sscl"},
    "unimae": {"val_mar", "val_mrc"},
}
ENCODERS = {
    "magnet": {"attention": "bidir", "pooling": "last", "append_eos": True, "prompt": "Find: "},
    "unimae": {"attention": "causal", "pooling": "last", "append_eos": True},
}


@pytest.fixture
def recipe_of(adapting, write_recipe, tmp_path):
    def recipe_of(name, *overrides):
        rows = [{"query": sentences(i, 1), "positive": sentences(i + 50, 1), "negatives": [sentences(i + 99, 1)]}
                for i in range(6)]  # fmt: skip
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
        objectives = [{**SMALL, **settings} for settings in KINDS[name]]
        for settings in objectives:
            if settings["kind"] == "contrastive":
                settings["pairs"] = {"files": [str(tmp_path / "pairs.jsonl")]}
        settings = {
            **adapting,
            "objectives": objectives,
            "encoder": ENCODERS[name],
            "output": str(tmp_path / "out"),
            "steps": 1,
            "log_steps": 1,
            "eval_steps": 1,
            "save_steps": 1,
            "data": {**adapting["data"], "validation_tokens": 64},
        }
        return load_recipe(write_recipe(settings), list(overrides))

    return recipe_of


def opened(folder):
    """Return vectors, logits, and the logits of plain transformers."""
    ids = torch.randint(16, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    lm = gerund.load(folder, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vectors = lm.encode(["The cat runs.", "blue", sentences(3, 2)])
    return vectors, lm.model(input_ids=ids).logits.detach(), model(input_ids=ids).logits.detach()


@pytest.mark.sweep(quick=0, check=2)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", ["adapter", "all-weights"])
def test_a_step_of_every_objective(recipe_of, base, name, way, tmp_path):
    folder = train(recipe_of(name, "model.gradient_checkpointing=true" if way == "adapter" else "model.lora=null"))
    rows = read_log(tmp_path / "out")
    told = {key: value for row in rows for key, value in row.items()}
    assert {key.removeprefix("loss_") for key in told if key.startswith("loss_")} == LOSSES[name]
    assert {key for key in told if key.startswith("val_")} == VALIDATED[name]
    assert all(math.isfinite(value) for key, value in told.items() if key.startswith(("loss", "val_", "grad")))
    assert told["grad_norm"] > 0

    (vectors, own, plain), (untrained, _, untouched) = opened(folder), opened(base)
    assert vectors.shape == (3, 16)
    assert np.isfinite(vectors).all()
    assert not np.allclose(vectors, untrained, atol=1e-4)
    assert torch.equal(plain, own)
    # An adapter is inactive while the model writes; trained weights do not.
    assert torch.equal(plain, untouched) == (way == "adapter")
    names = {path.name for path in folder.rglob("*.safetensors")}
    assert names == ({"model.safetensors", "adapter_model.safetensors"} if way == "adapter" else {"model.safetensors"})


class TestABaseWithAnAdapterOfItsOwn:
    @pytest.mark.slow
    def test_it_is_trained_further_or_left_aside(self, recipe_of, base, tmp_path):
        first = train(recipe_of("magnet", f"output={tmp_path / 'first'}"))

        def of(*more):
            return recipe_of("magnet", f"model.base={first}", f"output={tmp_path / 'second'}", *more)

        recipe = of("model.lora=null")
        adapter = prepare_model(recipe).adapter
        assert adapter is not None
        assert any(bool(value.any()) for name, value in adapter.named_parameters() if "lora_B" in name)

        # A new one of any shape begins at nothing.
        with pytest.raises(ModelError, match=r"set model\.adapter to none for a new one"):
            prepare_model(of("model.lora.rank=2"))
        adapter = prepare_model(of("model.lora.rank=2", "model.adapter=none")).adapter
        assert not any(bool(value.any()) for name, value in adapter.named_parameters() if "lora_B" in name)
        assert adapter.peft_config["default"].r == 2

        # Without one, all weights can be trained.
        folder = train(of("model.lora=null", "model.adapter=none"))
        assert not (folder / "adapter").exists()
        assert gerund.load(folder).fingerprint() != gerund.load(base).fingerprint()

    def test_a_model_from_scratch_has_none(self, settings, write_recipe):
        settings["model"]["adapter"] = "none"
        with pytest.raises(ConfigError, match="from scratch has none"):
            load_recipe(write_recipe(settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_gradient_checkpointing_changes_no_gradient(recipe_of, name):
    found = []
    for checkpointing in ("true", "false"):
        recipe = recipe_of(name, f"model.gradient_checkpointing={checkpointing}")
        prepared, objectives = built(recipe)
        prepared.model.train()
        for parameter in prepared.model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, 0.0, 0.1)
        module = TrainingModule(prepared.model, {objective.name: objective.losses for objective in objectives})
        torch.manual_seed(1)  # simcse's dropout
        result = run_step(module, objectives, StepData(objectives, steps=1)[0])
        found.append([result.total.detach(), *(p.grad for p in module.parameters() if p.requires_grad)])
    assert len(found[0]) > 20
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def built(recipe):
    prepared = prepare_model(recipe)
    return prepared, prepare_objectives(recipe, prepared, Sources(recipe, prepared.tokenizer))


class TestBuilding:
    def test_mntp_and_msg_share_a_pass_unless_they_are_told_not_to(self, recipe_of):
        _, shared = built(recipe_of("magnet"))
        assert [(own.name, list(own.configs)) for own in shared] == [
            ("mntp+msg", ["mntp", "msg"]),
            ("causal", ["causal"]),
            ("sscl", ["sscl"]),
        ]
        batch = shared[0].batches.make(0, 0, 4)
        assert batch["selected"].any()
        assert batch["span"].any()

        _, apart = built(recipe_of("magnet", "objectives.msg.shared_pass=false"))
        assert [own.name for own in apart] == ["causal", "mntp", "msg", "sscl"]
        mntp, msg = (own.batches.make(0, 0, 4) for own in apart[1:3])
        assert mntp["selected"].any()
        assert not mntp["span"].any()
        assert msg["span"].any()
        assert not msg["selected"].any()
        assert torch.equal(msg["input_ids"], msg["labels"])
        # Each has its own counts, and looks its own way.
        assert [set(own.losses.counts(batch)) for own in apart[1:3]] == [{"mntp"}, {"msg"}]
        directions = [{view.direction for view in own.losses.plan.views} for own in apart[1:3]]
        assert directions == [{Direction.BIDIRECTIONAL}, {Direction.HYBRID}]

    def test_texts_end_with_what_the_encoder_appends_and_have_its_prompt_where_it_is_trained(self, recipe_of):
        hybrid, _, sscl = built(recipe_of("magnet", "objectives.msg.whole_fraction=0"))[1]
        tokenizer = sscl.batches.tokenizer
        for batch, has_prompt in [(hybrid.batches.make(0, 0, 4), False), (sscl.batches.make(0, 0, 4)["query"], True)]:
            for ids, real in zip(batch["input_ids"], batch["real"], strict=True):
                text = ids[real].tolist()
                assert len(text) <= 24
                assert (text[0], text[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
                assert tokenizer.decode(text[1:]).startswith("Find: ") == has_prompt

    def test_texts_that_are_too_short_are_counted(self, recipe_of, tmp_path):
        lines = [json.dumps({"text": text}) for text in ("cat", "dog", sentences(1, 20), sentences(2, 20))]
        (tmp_path / "short.jsonl").write_text("\n".join(lines), "utf-8")
        overrides = [f"data.sources=[{{name: c, files: [{tmp_path / 'short.jsonl'}]}}]"]
        for name in ("magnet", "unimae"):
            for objective in built(recipe_of(name, *overrides))[1]:
                if getattr(objective.config, "unit", None) == "documents":
                    assert objective.batches.skipped == 2

    def test_the_decoder_is_as_long_as_the_longest_text(self, recipe_of):
        [unimae, *_] = built(recipe_of("unimae"))[1]
        longest = max(int(unimae.batches.make(0, first, 4)["text_real"].sum(1).max()) for first in range(0, 40, 4))
        assert len(unimae.losses.decoder.positions) == longest == 22


@pytest.mark.full  # each takes minutes, which torch's own compiler needs
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("magnet", []),
        ("magnet", ["encoder.attention=inter-back"]),
        ("unimae", ["objectives.simcse.weight=0", "model.gradient_checkpointing=true"]),
    ],
    ids=["magnet", "layers-twice", "unimae"],
)
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:The .grad attribute:UserWarning")
def test_layers_compiled_to_machine_code_learn_the_same(recipe_of, name, others, tmp_path, monkeypatch):
    compiled = []
    original = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compiled.append(self) or original(self, **how))
    plain, quick = (
        train(recipe_of(name, f"compile={choice}", f"output={tmp_path / choice}", *others)).parent
        for choice in ("false", "true")
    )
    assert len(compiled) == 2
    for one, other in zip(read_log(plain), read_log(quick), strict=True):
        # SimCSE's dropout samples other numbers when it is compiled.
        for key in [key for key in one if ("loss" in key or "val_" in key) and "simcse" not in key]:
            assert other[key] == pytest.approx(one[key], rel=1e-3), key
    weights = [load_file(folder / "model" / "adapter" / "adapter_model.safetensors") for folder in (plain, quick)]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, atol=2e-3, rtol=0.05)


@pytest.mark.slow
def test_what_a_loss_is_divided_by_is_the_recipes_choice(recipe_of):
    def dividing(*overrides):
        recipe = recipe_of("magnet", *overrides)
        model = prepare_model(recipe)
        prepared = prepare_objectives(recipe, model, Sources(recipe, model.tokenizer))
        objective = next(one for one in prepared if one.name == "mntp+msg")
        batch = StepData([objective], steps=1)[0][objective.name]
        counts = objective.losses.counts(batch)
        return counts, {"mntp": int(batch["real"].sum()), "msg": len(batch["real"])}

    predicted, _ = dividing()
    counts, paper = dividing("objectives.mntp.normalisation=paper")
    assert counts == {"mntp": paper["mntp"], "msg": predicted["msg"]}
    counts, paper = dividing("objectives.msg.normalisation=paper")
    assert counts == {"mntp": predicted["mntp"], "msg": paper["msg"]}
