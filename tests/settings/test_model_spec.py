"""``ModelSpec``: one value that says which model and how it is read, wherever it comes from and goes to."""

import ast
import inspect
import json
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import gerund
from gerund.errors import ConfigError
from gerund.models.saved_settings import read_saved, settings_from, settings_text
from gerund.models.sources import find
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import HELP, EncoderSpec, ModelSpec, parse_encoder_spec
from gerund.settings.plan import AttentionPlan
from tests.test_architecture import PACKAGE
from tests.tiny import N_LAYERS

BUNDLED = find(None).folder
FULL = ModelSpec(
    model="some/folder",
    attention="mask0+bidir",
    k=3,
    k0=1,
    sink_tokens=2,
    pooling="last",
    prompt="Represent: ",
    prompts={"query": "Question: "},
    append_eos=True,
    normalize=False,
    max_length=128,
    adapter="none",
    infill_adapter="other",
    scorer="default",
    dtype="float32",
    device="cpu",
)


def loaded(folder, **settings):
    return gerund.load(folder, attention="mask0-bidir", k=1, dtype="float32", **settings)


class TestValue:
    def test_it_goes_through_json_and_pickle(self):
        for spec in (ModelSpec(), FULL):
            assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
            assert ModelSpec.model_validate(json.loads(spec.model_dump_json())) == spec
            assert pickle.loads(pickle.dumps(spec)) == spec
            assert hash(ModelSpec.model_validate_json(spec.model_dump_json())) == hash(spec)

    def test_it_is_frozen_and_compared_by_value(self):
        with pytest.raises(ValidationError, match="frozen"):
            FULL.k = 5
        assert ModelSpec(k=2) == ModelSpec(k=2) != ModelSpec(k=3)
        assert len({ModelSpec(k=2), ModelSpec(k=2), ModelSpec(k=3)}) == 2
        assert len({ModelSpec(prompts={"a": "x", "b": "y"}), ModelSpec(prompts={"b": "y", "a": "x"})}) == 1

    def test_it_needs_no_torch(self):
        script = "import sys, gerund; gerund.ModelSpec(k=2); print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"

    def test_numbers_paths_and_types_of_other_libraries(self):
        spec = ModelSpec(model=Path("a"), k=np.int64(3), dtype=torch.float32, device=torch.device("cpu"))
        assert spec == ModelSpec(model="./a", k=3, dtype="float32", device="cpu")
        assert type(spec.k) is int

    @pytest.mark.parametrize("plan", [AttentionPlan("inter-bidir", k=2, combine="mean"), AttentionPlan("extra-back")])
    def test_a_whole_plan_sets_all_of_its_fields(self, plan):
        own = AttentionPlan(plan.name, k=4, variant="released" if plan.name == "inter-bidir" else "paper")
        assert ModelSpec(attention=plan).plan(own) == plan
        assert ModelSpec(attention=plan.to_dict()).plan(own) == plan
        assert ModelSpec.of(ModelSpec(attention=own), attention=plan).plan(own) == plan

    def test_a_plan_over_another_spec(self):
        spec = ModelSpec(attention="mask0-bidir", k=3, sink_tokens=2)
        for plan in (AttentionPlan("mask0-bidir", k=5), AttentionPlan("bidir")):
            for given in (plan, plan.to_dict()):
                assert ModelSpec.of(spec, attention=given).plan(AttentionPlan()) == plan
        assert ModelSpec.of(spec, attention="MASK0-BIDIR") == spec
        assert ModelSpec.of(spec, attention="MASK5-BIDIR", pooling="last").said()["sink_tokens"] == 5
        assert ModelSpec.of(spec, attention="MASK5-BIDIR").k == 3
        assert ModelSpec.of(spec, attention="inplace-bidir").k is None

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"k": True}, "k is a whole number, not True"),
            ({"k": 3.0}, "k is a whole number, not 3.0"),
            ({"k": -1}, "k must be at least 0, got -1"),
            ({"k": [3]}, r"k is a whole number, not \[3\]"),
            ({"sink_tokens": 0}, "sink_tokens must be at least 1, got 0"),
            ({"sink_tokens": 10**30}, "sink_tokens must be at most 2147483647, got 1000"),
            ({"attention": "bidirr"}, "unknown attention plan 'bidirr'"),
            ({"attention": "bidir", "k": 3}, "takes no k"),
            ({"attention": np.zeros(3)}, "attention is a text, not array"),
            ({"attention": {"name": "bidir", "x": 1}}, "unknown field of an attention plan 'x'"),
            ({"pooling": "class"}, "unknown pooling 'class'"),
            ({"pooling": np.zeros(())}, "pooling is a text, not array"),
            ({"prompts": {"a": 1}}, r"prompts\['a'\] is a text, not 1"),
            ({"normalize": "yes"}, "normalize is true or false, not 'yes'"),
            ({"skips": -1}, "skips must be at least 0, got -1"),
            ({"attention": "inter-bidir", "skips": 3}, "skips belong to plans"),
            ({"combine": "x"}, "unknown combine 'x'; valid are: sum, mean"),
            ({"max_length": 0}, "max_length must be at least 1, got 0"),
            ({"adapter": 5}, "adapter is a text, not 5"),
            ({"dtype": {}}, "dtype is a text, not {}"),
            ({"device": 2**63}, "device is a text, not 9223372036854775808"),
            ({"model": b"x"}, "a model is given by its name or its folder, not as b'x'"),
            ({"depth": 1}, "unknown setting of a model 'depth'"),
        ],
    )
    def test_what_is_wrong_is_one_sentence(self, settings, message):
        for build in (lambda: ModelSpec(**settings), lambda: ModelSpec.model_validate(settings)):
            with pytest.raises(ConfigError, match=message) as caught:
                build()
            assert "\n" not in str(caught.value)


class TestSettings:
    def test_what_is_left_out_is_the_models_own(self):
        own = EncoderConfig(attention=AttentionPlan("mask0-bidir", k=5), pooling="last", prompt="p")
        assert EncoderSpec().applied_to(own) == own
        assert EncoderSpec(k=2).applied_to(own) == replace(own, attention=AttentionPlan("mask0-bidir", k=2))
        assert EncoderSpec(k="auto").applied_to(own).attention.k is None

    def test_another_plan_starts_from_its_own_defaults(self):
        own = EncoderConfig(attention=AttentionPlan("mask0-bidir", k=5, sink_tokens=3))
        assert EncoderSpec(attention="inplace-back").applied_to(own).attention == AttentionPlan("inplace-back")

    def test_the_models_own_length_can_be_undone(self):
        assert EncoderSpec(max_length="auto").applied_to(EncoderConfig(max_length=7)).max_length is None

    def test_a_setting_that_the_models_own_plan_has_no_use_for_is_refused(self):
        with pytest.raises(ConfigError, match="takes no k"):
            EncoderSpec(k=3).applied_to(EncoderConfig(attention=AttentionPlan("bidir")))

    def test_the_papers_spellings(self):
        assert ModelSpec(attention="MASK0&BIDIR", k=3) == ModelSpec(attention="mask0+bidir", k=3)
        assert ModelSpec(attention="MASK5-BIDIR") == ModelSpec(attention="mask0-bidir", sink_tokens=5)
        assert ModelSpec(attention="MASK0-2", k=3) == ModelSpec(attention="mask0+bidir", k=3, k0=2)
        with pytest.raises(ConfigError, match="'MASK5-BIDIR' says sink_tokens=5, and sink_tokens=2 is given"):
            ModelSpec.of(attention="MASK5-BIDIR", sink_tokens=2)
        with pytest.raises(ConfigError, match="k0 = half of the best k of 'mask0-bidir'"):
            parse_encoder_spec("MASK0-MID:k=3")
        with pytest.raises(ConfigError, match="says k twice"):
            parse_encoder_spec("mask0-bidir:k=1,k=2")
        hides_three = EncoderConfig(attention=AttentionPlan("mask0-bidir", sink_tokens=3))
        assert EncoderSpec(attention="MASK1-BIDIR").applied_to(hides_three).attention.sink_tokens == 1
        own = EncoderConfig(attention=AttentionPlan("mask0-bidir", k=5))
        assert EncoderSpec(attention="MASK0-BIDIR").applied_to(own) == own

    def test_skips_are_set_and_taken_away(self):
        own = EncoderConfig(attention=AttentionPlan("mask0-bidir", k=5, skips=2))
        assert EncoderSpec().applied_to(own).attention.skips == 2
        assert EncoderSpec(skips=3).applied_to(own).attention.skips == 3
        assert EncoderSpec(skips=0).applied_to(own).attention.skips is None
        assert EncoderSpec(attention=AttentionPlan("mask0-bidir", k=5)).applied_to(own).attention.skips is None
        assert parse_encoder_spec("mask0-bidir:k=1,skips=3").applied_to(EncoderConfig()).attention.skips == 3

    def test_one_line(self):
        line = "mask0+bidir:k=6,k0=3,pooling=last,append_eos=true,max_length=auto,prompt=Find, please: "
        assert parse_encoder_spec(line).said() == {
            "attention": "mask0+bidir", "k": 6, "k0": 3, "pooling": "last", "append_eos": True, "max_length": "auto",
            "prompt": "Find, please: ",
        }  # fmt: skip

    @pytest.mark.parametrize("template", ["In short, {text} means", "{text}, in short"])
    def test_a_template_with_commas(self, template):
        assert parse_encoder_spec(f"causal:k0=auto,template={template}").template == template
        spec = parse_encoder_spec(f"causal:template=prompteol,prompt={template}")
        assert (spec.template, spec.prompt) == ("prompteol", template)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("bidir:k", "'k' has no value; write NAME=VALUE"),
            ("bidir:depth=3", "unknown setting in 'bidir:depth=3' 'depth'"),
            ("mask0-bidir:k=x", "k is a whole number or auto, not 'x'"),
            ("mask0-bidir:append_eos=maybe", "append_eos is true or false, not 'maybe'"),
            ("nothing", "unknown attention plan 'nothing'"),
            ("bidir:k=3", "takes no k"),
        ],
    )
    def test_a_line_that_means_nothing_is_refused(self, line, message):
        with pytest.raises(ConfigError, match=message):
            parse_encoder_spec(line)


class TestLoading:
    def test_a_spec_and_keywords_give_the_same(self, tiny_folder):
        lm = loaded(tiny_folder, pooling="last", prompt="q: ", max_length=9)
        spec = ModelSpec(
            model=str(tiny_folder), attention="mask0-bidir", k=1, dtype="float32", pooling="last", prompt="q: ",
            max_length=9,
        )  # fmt: skip
        other = gerund.load(spec)
        assert other.encoder == lm.encoder
        assert other.spec == lm.spec
        np.testing.assert_array_equal(other.encode(["a cat"]), lm.encode(["a cat"]))

    @pytest.mark.slow
    def test_a_models_own_spec_loads_it_again(self, tiny_folder):
        lm = loaded(tiny_folder, max_length=9)
        for encoder in (
            lm.encoder,
            EncoderConfig(attention=AttentionPlan("bidir"), pooling="last", append_eos=True),
            EncoderConfig(attention=AttentionPlan("mask0-bidir", k=2, skips=1, variant="released")),
            EncoderConfig(attention=AttentionPlan("inter-back", combine="mean"), prompts={"query": "q: "}),
        ):
            spec = ModelSpec.model_validate_json(lm.with_encoder(encoder).spec.model_dump_json())
            assert gerund.load(spec).encoder == encoder.with_defaults(N_LAYERS)
            assert gerund.load(spec).fingerprint() == lm.with_encoder(encoder).fingerprint()

    def test_keywords_replace_what_a_spec_says(self, tiny_folder):
        spec = ModelSpec(model=str(tiny_folder), attention="mask0-bidir", k=2, pooling="last", dtype="float32")
        assert gerund.load(spec, k=1).encoder.attention == AttentionPlan("mask0-bidir", k=1)
        assert gerund.load(spec, attention="bidir").encoder.attention == AttentionPlan("bidir")
        assert gerund.load(spec, attention="bidir").encoder.pooling == "last"

    def test_a_saved_model_keeps_what_its_spec_said(self, tiny_folder, tmp_path):
        loaded(tiny_folder, pooling="last").save(tmp_path / "saved")
        spec = gerund.load(tmp_path / "saved", dtype="float32").spec
        assert (spec.attention, spec.k, spec.pooling) == ("mask0-bidir", 1, "last")

    def test_a_saved_models_file_is_a_specs_settings(self, tiny_folder, tmp_path):
        lm = loaded(tiny_folder, pooling="last", prompt="q: ", max_length=9)
        lm.save(tmp_path / "saved")
        found = read_saved(tmp_path / "saved")
        assert type(found) is EncoderSpec
        assert found.said() == {name: getattr(lm.spec, name) for name in found.said()}
        assert found.applied_to(EncoderConfig()) == lm.encoder

    def test_files_of_before_are_read_and_written_as_they_were(self):
        """The bundled model's, byte for byte, and that of the first version, which lacks what came later."""
        path = BUNDLED / "gerund.json"
        data = json.loads(path.read_text("utf-8"))
        places = {"encode": "adapter", **data["adapters"]}
        assert settings_text(read_saved(BUNDLED), data["fingerprint"], places) == path.read_text("utf-8")
        first = {"attention": {"name": "mask0-bidir", "k": 3, "k0": None}, "pooling": "last", "max_length": None}
        config = settings_from(first).applied_to(EncoderConfig(max_length=7, prompt="own: "))
        assert config == EncoderConfig(AttentionPlan("mask0-bidir", k=3), pooling="last", max_length=7, prompt="own: ")
        assert settings_from({"attention": "mask0-bidir", "k": 3}).plan(AttentionPlan()).k == 3

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"poling": "last"}, "unknown field in gerund.json 'poling'; valid are: .*; did you mean 'pooling'"),
            ({"pooling": 5}, "pooling is a text, not 5"),
            ({"adapter": 5}, "adapter is a text or nothing, not 5"),
            ({"attention": ["bidir"]}, "attention is a text, not"),
            ({"attention": {"name": "bidir", "k": 2}}, "takes no k"),
            ({"prompts": {"query": 1}}, r"prompts\['query'\] is a text, not 1"),
        ],
    )
    def test_a_file_that_is_wrong(self, fields, message):
        with pytest.raises(ConfigError, match=message):
            settings_from(fields)

    @pytest.mark.slow
    def test_the_bundled_model_keeps_its_adapters_and_its_scorer(self, bundled):
        other = gerund.load(bundled.spec)
        assert bundled.spec.model == "default"
        assert other.scorer is not None
        assert other.adapters.folders == bundled.adapters.folders
        assert gerund.load(bundled.spec, adapter="none").scorer is None

    def test_a_model_made_in_memory_has_no_spec(self, tiny_folder):
        lm = loaded(tiny_folder)
        with pytest.raises(ConfigError, match="was not loaded from a folder or the hub"):
            _ = gerund.LanguageModel(lm.model, lm.tokenizer).spec


def test_every_setting_is_declared_once_and_is_a_keyword_of_load_and_an_option():
    from gerund.cli.options import OPTIONS

    declarations = [
        [line.target.id for line in node.body if isinstance(line, ast.AnnAssign)]
        for path in (PACKAGE / "settings").glob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
        and "setting(" in ast.unparse(node)
        and node.name not in ("Sampling", "Rerank", "SecondStage")
    ]
    declared = Counter(name for names in declarations for name in names)
    assert {name: declared[name] for name in ModelSpec.model_fields} == dict.fromkeys(ModelSpec.model_fields, 1)
    for made in (AttentionPlan, EncoderConfig, EncoderSpec, ModelSpec):
        assert not set(inspect.get_annotations(made)) & set(ModelSpec.model_fields)
    assert all(HELP[name] == field.description for name, field in ModelSpec.model_fields.items())
    written = inspect.getsource(inspect.unwrap(gerund.load)).partition('"""')[0]
    assert [name for name in ModelSpec.model_fields if f"{name}:" in written] == ["model"]

    keywords = inspect.signature(gerund.load).parameters
    # A token is a secret, which no spec stores.
    assert set(keywords) - {"token"} == set(ModelSpec.model_fields)
    assert {one.default for one in keywords.values()} == {None}
    # Prompts by name come out of a file (--prompts), a search weighs vectors and words by --weight, and what the author
    # of a ready-made encoder decided is in its folder. The command line loads the hub's newest version.
    elsewhere = {"prompts", "fusion", "rerank_by", "rerank_weight", "conventions", "similarity", "revision"}
    assert set(OPTIONS) == set(ModelSpec.model_fields) - elsewhere


def test_settings_that_are_flags_or_auto(tiny_folder):
    lm = gerund.load(
        tiny_folder, dtype="float32", append_eos=True, normalize=False, pool_prompt=True, prompt="q: ", k="auto",
        max_length="auto", fusion="auto", prompts=MappingProxyType({"query": "q: "}),
    )  # fmt: skip
    own = lm.encoder
    assert (own.append_eos, own.normalize, own.pool_prompt, own.max_length, own.fusion) == (
        True,
        False,
        True,
        None,
        None,
    )
    assert own.prompts == {"query": "q: "}
    assert np.linalg.norm(lm.encode("a cat")) != pytest.approx(1, abs=1e-3)
    plan = gerund.load(tiny_folder, attention="inter-back", combine="mean", variant="released").encoder.attention
    assert (plan.combine, plan.variant) == ("mean", "released")
