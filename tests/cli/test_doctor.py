"""``gerund doctor``: what it finds on models of several kinds, and what it makes of it."""

import json
from dataclasses import replace

import pytest
import torch

import gerund
from gerund.doctor import advise, diagnose
from gerund.settings.model_spec import ModelSpec
from gerund.settings.plan import PLAN_NAMES, AttentionPlan
from tests.cli.helpers import run_cli
from tests.tiny import N_LAYERS, REFUSED, save_tiny

CHECKS = ["untouched", "padding_left", "padding_right", "batch", "bfloat16"]


def examined(model, **settings):
    return diagnose(ModelSpec.of(model, dtype="float32", **settings))


@pytest.fixture(scope="module")
def found(tiny_folder):
    return examined(str(tiny_folder))


@pytest.mark.slow
def test_a_healthy_model(found, tiny_folder):
    assert found.healthy
    assert found.reached
    assert (found.architecture, found.model_class) == ("llama", "LlamaForCausalLM")
    assert (found.n_layers, found.heads, found.kv_heads, found.width, found.context) == (N_LAYERS, 4, 2, 32, 64)
    assert (found.stored_dtype, found.dtype, found.device) == ("float32", "float32", "cpu")
    assert found.parameters == sum(p.numel() for p in gerund.load(tiny_folder).model.parameters())
    assert found.plans == dict.fromkeys(PLAN_NAMES, True)
    assert found.plan == AttentionPlan("mask0-bidir", k=2)
    assert [check.name for check in found.checks] == CHECKS
    assert all(check.passed for check in found.checks)
    assert [layer.view for layer in found.layers] == ["causal"] * 2 + ["bidirectional without the first token"] * 2
    assert found.layers[0].seen == ("#.....", "##....", "###...", "####..", "#####.", "######")
    assert found.layers[3].seen == ("######", *[".#####"] * 5)
    for layer in found.layers:
        assert layer.obeys
        assert 0 < layer.sink_before < 1
        assert (layer.sink_after == 0) == (layer.hidden == 1)
    facts = found.tokenizer
    assert (facts.bos, facts.eos, facts.pad, facts.unk) == ("<s>", "</s>", "<pad>", None)
    assert facts.adds_bos
    assert facts.fast
    assert facts.round_trip
    assert not facts.adds_eos


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
def test_other_architectures_are_healthy_too(name, tmp_path):
    found = examined(str(save_tiny(tmp_path / name, name)), attention="mask0-all", k=1)
    assert found.healthy
    assert found.architecture == name
    assert all(layer.obeys for layer in found.layers)
    assert {layer.window for layer in found.layers} == ({3, None} if name != "gpt2" else {None})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "support", "sentence"),
    [
        ("bloom", "exact", "bloom: attention plans are exact"),
        ("lfm2", "recurrent", "lfm2: attention plans are exact, with recurrent layers causal or both ways"),
        ("mamba2", "recurrent", "plans that work with recurrent='both' only: bidir, "),
    ],
)
def test_what_can_be_done_with_an_architecture(name, support, sentence, tmp_path):
    folder = save_tiny(tmp_path / name, name)
    report = json.loads(run_cli("doctor", folder, "--json").out)
    assert report["support"] == support
    assert bool(report["recurrent"]) == (support == "recurrent")
    assert bool(report["reason"]) == (support != "exact")
    assert sentence in run_cli("doctor", folder).out


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_no_plan_reaches_is_examined_all_the_same(name, tmp_path):
    folder = save_tiny(tmp_path / name, name)
    ran = run_cli("doctor", folder, "--json")
    report = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert (report["healthy"], report["reached"]) == (False, False)
    assert [plan for plan, obeyed in report["plans"].items() if obeyed] == ["causal", "echo"]
    assert [layer["obeys"] for layer in report["layers"]] == [True, True, False, False]
    assert report["layers"][2]["seen"] == ["#ooooo", "x#oooo", "x##ooo", "x###oo", "x####o", "x#####"]
    assert all(layer["sink_before"] > 0 and layer["sink_after"] is None for layer in report["layers"])
    assert [check["name"] for check in report["checks"]] == CHECKS
    assert all(check["passed"] for check in report["checks"])
    assert name in report["advice"][0]
    assert "attention='causal'" in report["advice"][0]
    text = run_cli("doctor", folder).out
    for sentence in (
        *(f"{name}: only causal encoding works", f"because {report['reason'][:40]}", "this plan does not work"),
        *("2 of 4 layers do not obey", "plans that work: causal, echo", "x: sees what it must not"),
    ):
        assert sentence in text
    assert (report["support"], bool(report["recurrent"])) == ("causal", False)
    causal = json.loads(run_cli("doctor", folder, "--json", "--attention", "causal").out)
    assert (causal["healthy"], causal["reached"]) == (True, True)
    assert "do not reach" in causal["advice"][0]


@pytest.mark.slow
def test_twins_are_told_and_shown(tiny_folder):
    views = {
        plan: [layer.view for layer in examined(str(tiny_folder), attention=plan, k=2).layers]
        for plan in ("inter-back", "extra-bidir", "extend-bidir")
    }
    assert views == {
        "inter-back": ["causal"] * 2 + ["causal, and backward beside it"] * 2,
        "extra-bidir": ["causal"] * 3 + ["causal, joined by a tower of 2 bidirectional layers"],
        "extend-bidir": ["causal"] * 3 + ["causal, then 2 times bidirectional on top"],
    }


@pytest.mark.slow
def test_the_folders_own_settings_count(tiny_folder, tmp_path):
    gerund.load(tiny_folder, attention="inplace-bidir", k=1, pooling="last").save(tmp_path / "own")
    found = examined(str(tmp_path / "own"))
    assert (found.plan, found.pooling) == (AttentionPlan("inplace-bidir", k=1), "last")
    assert any("append_eos" in sentence for sentence in found.advice)
    assert examined(str(tmp_path / "own"), attention="mask0-for").plan == AttentionPlan("mask0-for", k=1)


@pytest.mark.slow
def test_without_special_tokens(tmp_path):
    folder = save_tiny(tmp_path / "bare", bos=False)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for name in ("pad_token", "eos_token"):
        settings.pop(name)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = examined(str(folder))
    assert found.healthy
    assert (found.tokenizer.pad, found.tokenizer.eos, found.tokenizer.adds_bos) == (None, None, False)
    advice = " ".join(found.advice)
    assert "what the plan hides is the first word" in advice
    assert "There is no padding token" in advice
    assert "There is no end token" in advice


@pytest.mark.slow
def test_a_model_whose_padding_shows(tiny_folder, monkeypatch):
    from gerund.inference.encode import runtime as encoding

    own = encoding.EncoderRuntime.states

    def careless(self, texts):
        states, begin = own(self, texts)
        if len({len(text) for text in texts}) > 1 and self.tokenizer.padding_side == "left":
            states = states + 0.01
        return states, begin

    monkeypatch.setattr(encoding.EncoderRuntime, "states", careless)
    found = examined(str(tiny_folder))
    assert not found.healthy
    assert [check.name for check in found.checks if not check.passed] == ["padding_left"]
    assert any("Padding on the left" in sentence for sentence in found.advice)
    monkeypatch.setattr(encoding.EncoderRuntime, "states", lambda *args: (own(*args)[0] * torch.nan, own(*args)[1]))
    assert not examined(str(tiny_folder)).healthy


@pytest.mark.slow
def test_the_text_shows_everything_and_no_colours(tiny_folder):
    ran = run_cli("doctor", tiny_folder)
    assert (ran.code, ran.err) == (0, "")
    assert f"{tiny_folder}: healthy" in ran.out
    assert "llama (LlamaForCausalLM)" in ran.out
    assert "Plan mask0-bidir k=2, mean pooling: every layer obeys" in ran.out
    assert "layers 0-1       layers 2-3" in ran.out
    assert "all 16 plans work" in ran.out
    assert ran.out.count("  ok  ") == len(CHECKS)
    assert "beginning <s>, end </s>, padding <pad>, unknown none" in ran.out
    assert "Advice" in ran.out
    assert "\x1b" not in ran.out
    assert all(line == line.rstrip() and len(line) <= 120 for line in ran.out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["EMPTY"], "config.json"),
        (["BROKEN"], "broken"),
        (["MODEL", "--k", "9"], "k=9"),
        (["MODEL", "--dtype", "int8"], "8-bit weights are computed by the packed runtime"),
        (["MODEL", "--device", "abacus"], "abacus"),
    ],
)
def test_what_cannot_be_examined_ends_in_one_sentence_and_status_2(tiny_folder, tmp_path, arguments, words):
    folders = {"MODEL": tiny_folder, "EMPTY": tmp_path / "empty", "BROKEN": tmp_path / "broken"}
    folders["EMPTY"].mkdir()
    folders["BROKEN"].mkdir()
    (folders["BROKEN"] / "config.json").write_text('{"model_type": "llama"')
    assert words in run_cli("doctor", *(folders.get(word, word) for word in arguments)).mistake


def with_sinks(found, plan, before, after, moved=None, converted=(2, 3), hidden=0):
    layers = tuple(
        replace(
            layer,
            sink_before=before[index],
            sink_after=after[index],
            moved_sink=None if moved is None else moved[index],
            converted=index in converted,
            hidden=hidden if index in converted else 0,
        )
        for index, layer in enumerate(found.layers)
    )
    return replace(found, plan=AttentionPlan(plan), layers=layers)


SINKS = (0.1, 0.7, 0.8, 0.6)


def test_advice_about_sinks(found):
    said = "Layers 1-3 give 70% of their attention to the first token"
    hiding = with_sinks(found, "mask0-bidir", SINKS, (0.1, 0.7, 0, 0), (0.1, 0.1, 0.1, 0.1), hidden=1)
    assert advise(hiding) == [f"{said}; those that mask0-bidir converts do so no longer."]
    bidirectional = with_sinks(found, "inplace-bidir", SINKS, (0.1, 0.7, 0.7, 0.1))
    assert advise(bidirectional) == [f"{said}, and layer 2 still does so under inplace-bidir: a mask0 plan may help."]
    moved = with_sinks(found, "mask0-all", SINKS, (0, 0, 0, 0), (0.1, 0.6, 0.6, 0.6), range(4), hidden=1)
    [sentence] = advise(moved)
    assert sentence.startswith(f"{said}. Hiding it has moved the sink to the next token in layers 1-3")
    untouched = with_sinks(found, "causal", SINKS, SINKS, converted=())
    assert advise(untouched) == [f"{said}: a mask0 plan may help."]
    beside = with_sinks(found, "inter-back", SINKS, SINKS, converted=())
    [sentence] = advise(beside)
    assert sentence.endswith(
        "inter-back leaves them as they are and adds layers that look elsewhere. Compare it with mask0-bidir."
    )
    [sentence] = advise(replace(beside, adapter=True))
    assert sentence.endswith("inter-back leaves them as they are and adds layers that look elsewhere.")
    [sentence] = advise(with_sinks(found, "causal", (0.1,) * 4, SINKS, converted=()))
    assert sentence.startswith("No layer leans on the first token")
    alone = with_sinks(found, "causal", (0.1, 0.9, 0.1, 0.1), SINKS, converted=())
    assert advise(alone) == ["Layer 1 gives 90% of its attention to the first token: a mask0 plan may help."]


def test_other_advice(found):
    lost = replace(found, plans={"causal": True, "hybrid": False})
    assert "The plan hybrid does not reach every layer" in advise(lost)[0]
    large = replace(found, tokenizer=replace(found.tokenizer, tokens=999))
    assert any("999 tokens" in sentence for sentence in advise(large))
    assert any("max_length" in sentence for sentence in advise(replace(found, context=None)))
    failed = replace(found, checks=tuple(replace(check, passed=False) for check in found.checks))
    words = " ".join(advise(failed))
    assert all(word in words for word in ("logits have changed", "left and on the right", "batch", "bfloat16"))
    partly = replace(found, reached=False, layers=(replace(found.layers[0], obeys=False), *found.layers[1:]))
    assert "does not reach layer 0 of this llama model" in advise(partly)[0]


def test_more_sinks_than_an_example_has_tokens(tiny_folder):
    found = diagnose(ModelSpec.of(str(tiny_folder), attention="mask0-bidir", sink_tokens=110, exit_layer=2))
    assert [layer.moved_sink for layer in found.layers] == [None] * 2
    assert (found.healthy, found.n_layers) == (True, 2)  # of the lower layers alone
