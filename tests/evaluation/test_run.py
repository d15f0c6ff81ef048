"""Evaluations go on where they were, and share what plans share."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError, MissingDependencyError
from gerund.evaluation.run import ResultStore, cache_in, evaluate
from gerund.evaluation.systems.base import EmbeddingCache
from gerund.evaluation.systems.language_model import word_groups
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig
from gerund.inference.encode import runtime as encoding
from gerund.settings.model_spec import ModelSpec, parse_encoder_spec
from tests.evaluation.toys import TEXTS, ToyLikelihood, ToyTask, ToyWords, ToyWriting
from tests.tiny import save_tiny_t5

TOY = ToyTask(name="toy/one")
PLANS = ["causal", "mask0-bidir:k=2", "inter-back:k=1", "causal:pooling=last", "echo"]


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder)


def encoder_configs(*texts):
    return [parse_encoder_spec(text) for text in texts]


def test_scores_are_those_of_encoding_by_hand(lm):
    done = evaluate(systems_of([lm], encoder_configs(*PLANS)), [TOY])
    assert [result.system for result in done.results] == [
        "causal",
        "mask0-bidir k=2",
        "inter-back k=1",
        "causal, last",
        "echo",
    ]
    for text, result in zip(PLANS, done.results, strict=True):
        vectors = lm.with_encoder(parse_encoder_spec(text).applied_to(lm.encoder)).encode(list(TEXTS), normalize=True)
        expected = np.mean([a @ b for a, b in pairwise(vectors)])
        assert result.score.value == pytest.approx(float(expected), abs=1e-6)


def test_columns_are_specs_that_load_the_same_system_again(tiny_folder):
    spec = ModelSpec(model=str(tiny_folder), dtype="float32", max_length=9)
    systems = systems_of([spec, "bm25"], encoder_configs("causal:pooling=last", "mask0-bidir:k=2"))
    models = [one.lm for one in systems[:2]]
    assert models[0].model is models[1].model  # loaded once
    for lm, plan, pooling in zip(models, ("causal", "mask0-bidir"), ("last", "mean"), strict=True):
        assert (lm.spec.model, lm.spec.attention, lm.spec.pooling) == (str(tiny_folder), plan, pooling)
        assert (lm.spec.dtype, lm.spec.max_length) == ("float32", 9)
        assert gerund.load(ModelSpec.model_validate_json(lm.spec.model_dump_json())).fingerprint() == lm.fingerprint()


def test_plans_of_one_model_are_embedded_together(lm, monkeypatch):
    """One causal pass and what lies above it, instead of a pass for each plan; echo reads another text."""
    calls = []
    alone = encoding.EncoderRuntime.states
    monkeypatch.setattr(
        encoding.EncoderRuntime, "states", lambda self, texts: calls.append(len(texts)) or alone(self, texts)
    )
    evaluate(systems_of([lm], encoder_configs(*PLANS)), [TOY])
    assert calls == [len(TEXTS)]


def test_a_finished_score_is_not_measured_again(lm, tmp_path):
    run = lambda **config: evaluate(  # noqa: E731
        systems_of([lm], encoder_configs("causal", "mask0-bidir:k=2"), cache=cache_in(tmp_path)),
        [TOY, ToyWriting(name="toy-writing/one")], EvaluationConfig(**config), folder=tmp_path,
    )  # fmt: skip
    first = run()
    assert first.reused == 0
    again = run()
    assert again.reused == 4
    assert [r.score for r in again.results] == [r.score for r in first.results]
    assert [r.system for r in again.results] == [r.system for r in first.results]
    assert run(limit=3).reused == 0
    assert len(ResultStore(tmp_path).all()) == 3 * 2


def test_an_option_a_prompt_or_other_data_are_another_score(lm, tmp_path):
    data = tmp_path / "data.txt"
    data.write_text("one")
    task = ToyTask(name="toy/one", files=(data,))

    def reused(task, **config):
        return evaluate(systems_of([lm]), [task], EvaluationConfig(**config), folder=tmp_path / "report").reused

    assert [reused(task), reused(task)] == [0, 1]
    assert reused(replace(task, weight=2.0)) == 0
    assert reused(task, prompts={"toy": "Say: "}) == 0
    assert reused(task, prompts={"other": "Say: "}) == 1
    data.write_text("two")
    assert reused(task) == 0


def test_writing_is_measured_once_for_all_plans(lm):
    told = []
    done = evaluate(
        systems_of([lm], encoder_configs("causal", "mask0-bidir:k=2")),
        [ToyWriting(name="toy-writing/one")],
        reporter=lambda task, one, result: told.append((one.label, result is None)),
    )
    assert told == [("causal", True), ("causal", False), ("mask0-bidir k=2", False)]
    assert [result.system for result in done.results] == ["causal", "mask0-bidir k=2"]
    assert done.results[1].description["attention"]["name"] == "mask0-bidir"


def test_what_an_interrupted_evaluation_measured_is_kept(lm, tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Broken(ToyTask):
        kind: ClassVar = "broken"

        def run(self, system, config):
            raise DataError("data.jsonl, line 3: no text")

    with pytest.raises(DataError, match="line 3"):
        evaluate(systems_of([lm]), [TOY, Broken(name="broken/one")], folder=tmp_path)
    assert evaluate(systems_of([lm]), [TOY], folder=tmp_path).reused == 1


def test_a_missing_package_is_named(lm):
    @dataclass(frozen=True, kw_only=True)
    class Needy(ToyTask):
        def run(self, system, config):
            import no_such_package  # noqa: F401

    with pytest.raises(MissingDependencyError, match=r"no_such_package: pip install 'gerund\[eval\]'"):
        evaluate(systems_of([lm]), [Needy(name="toy/needy")])


def test_results_read_back_as_they_were(lm, tmp_path):
    [result] = evaluate(systems_of([lm]), [TOY], folder=tmp_path).results
    [kept] = ResultStore(tmp_path).all()
    assert kept == result
    assert json.loads(json.dumps(kept.to_dict())) == json.loads(json.dumps(result.to_dict()))


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_file_that_is_no_score_is_named(tmp_path, text):
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "toy.one-0.json").write_text(text)
    with pytest.raises(DataError, match=r"toy\.one-0\.json"):
        ResultStore(tmp_path).all()


def test_models_are_told_apart(lm):
    other = gerund.LanguageModel(lm.model, lm.tokenizer, name="other")
    labels = [one.label for one in systems_of([lm, other, "bm25"], encoder_configs("causal"))]
    assert labels == ["tiny-llama: causal", "other: causal", "bm25"]
    same = [one.label for one in systems_of([lm, lm], encoder_configs("causal"))]
    assert same == ["causal", "causal (2)"]


def test_bm25_takes_part_only_where_it_can(lm):
    done = evaluate(systems_of([lm, "bm25"], cache=EmbeddingCache()), [TOY])
    assert [result.system for result in done.results] == ["mask0-bidir k=2"]


@pytest.mark.parametrize("what", ["systems", "tasks"])
def test_nothing_to_do(lm, what):
    with pytest.raises(ConfigError, match="at least one model and one task"):
        evaluate([] if what == "systems" else systems_of([lm]), [] if what == "tasks" else [TOY])


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("prompt", [None, "Say: "])
def test_words_of_many_plans_are_read_together(lm, monkeypatch, shift, prompt):
    task = ToyWords(name="toy-words/one", shift=shift)
    config = EvaluationConfig(prompts={} if prompt is None else {"toy-words": prompt})
    alone = [task.run(one, config).value for one in systems_of([lm], encoder_configs(*PLANS))]
    calls = []
    states = encoding.EncoderRuntime.states
    monkeypatch.setattr(
        encoding.EncoderRuntime, "states", lambda self, texts: calls.append(len(texts)) or states(self, texts)
    )
    systems = systems_of([lm], encoder_configs(*PLANS))
    done = evaluate(systems, [task], config)
    assert [result.score.value for result in done.results] == pytest.approx(alone, abs=1e-6)
    assert [result.system for result in done.results] == [one.label for one in systems]
    assert sum(calls) == len(TEXTS) + 1  # echo alone reads by itself
    assert not any(one.words for one in systems)


def test_words_that_do_not_fit_together_are_read_in_groups(lm, monkeypatch):
    monkeypatch.setattr("gerund.evaluation.systems.language_model._MOST_BYTES", 2 * 4 * lm.dimensions * 14)
    systems = systems_of([lm], encoder_configs(*PLANS))
    groups = word_groups(systems, [["a"] * 7, ["b"] * 7])
    assert sorted(len(group) for group in groups) == [1, 2, 2]
    assert {one.label for group in groups for one in group} == {one.label for one in systems}


def test_an_encoder_decoder_leaves_likelihoods_to_others(lm, tmp_path):
    t5 = gerund.load(save_tiny_t5(tmp_path / "t5"))
    task = ToyLikelihood(name="toy-likelihood/one")
    done = evaluate(systems_of([t5, lm]), [TOY, task])
    first, second = [one.label for one in done.systems]
    assert [(result.task, result.system) for result in done.results] == [
        ("toy/one", first),
        ("toy/one", second),
        ("toy-likelihood/one", second),
    ]
    with pytest.raises(ConfigError, match=r"how probable a text is, and .* can only encode whole texts, encode words"):
        evaluate(systems_of([t5]), [task])


@pytest.mark.slow
def test_another_precision_is_another_score(tiny_folder, tmp_path):
    def reused(dtype):
        lm = gerund.load(tiny_folder, dtype=dtype)
        tasks = [TOY, ToyWriting(name="toy-writing/one")]
        done = evaluate(systems_of([lm], cache=cache_in(tmp_path)), tasks, folder=tmp_path)
        return done.reused

    assert [reused("float32"), reused("bfloat16"), reused("float32"), reused("bfloat16")] == [0, 0, 2, 2]
