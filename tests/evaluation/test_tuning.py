"""The search finds the best plan within its budget, and costs little."""

from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation import tuning
from gerund.evaluation.search_space import METHODS, ONE_K, PLANS, spread, windows
from gerund.evaluation.systems.selection import label_of
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.retrieval import Retrieval
from gerund.evaluation.tuning import Trial, Tuned, _rungs, _Search, most_k, tune, tune_rerank
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import NAMED
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.evaluation.tables import write_collection
from tests.evaluation.toys import ToyTask, ToyWriting
from tests.tiny import byte_tokenizer, tiny

TOY = ToyTask(name="toy/one")
TEXTS = {"a": "Bread is made of flour.", "b": "The steam railway opened."}
OWN = gerund.EncoderConfig()


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder)


def search(score, *, n, budget, plans=PLANS, configs=(OWN,), own=None):
    """Run a search over a made-up score of plan and pooling."""
    asked = []

    def measure(configs):
        asked.extend(configs)
        return [Trial(config, str(config), {"toy": score(config)}) for config in configs]

    found = _Search(measure, list(configs), Tuned(n, budget))
    found.run(plans, own)
    assert len({str(config) for config in asked}) == len(asked) == len(found.done.trials)
    return found.done


def hill(name, top, height=1.0):
    """Return a score with a peak for one plan at k = top."""
    return lambda config: height - 0.01 * abs((config.attention.k or 0) - top) if config.attention.name == name else 0.1


def test_scores_of_other_judgements_are_not_reused(lm, tmp_path, monkeypatch):
    def measured(judged):
        write_collection(tmp_path / "retrieval" / "small", TEXTS, {"q": "bread"}, judged)
        config = EvaluationConfig(show_progress=False)
        return tune_rerank(lm, Retrieval.find(tmp_path), config, folder=tmp_path).baseline.mean

    monkeypatch.setattr(tuning, "measures_of", lambda _lm: ["vectors"])
    means = [measured([("q", document, 1)]) for document in "aba"]
    assert means == pytest.approx([1, 1 / np.log2(3), 1])  # "b" comes second
    scores = tmp_path / "scores" / "rerank.jsonl"
    assert len(scores.read_text().splitlines()) == 2
    scores.write_text("{broken\n")
    with pytest.raises(DataError, match=r"rerank\.jsonl, line 1 is not a score"):
        measured([("q", "a", 1)])
    scores.unlink()
    with pytest.raises(DataError, match="no query that is scored has a relevant document"):
        measured([("q", "a", 0)])


@pytest.mark.parametrize("n", [1, 2, 5, 8, 22, 80])
@pytest.mark.parametrize("budget", [2, 10, 60, 150])
def test_the_budget_is_kept_and_the_baseline_is_tried(n, budget):
    done = search(hill("inter-back", n // 2), n=n, budget=budget)
    assert len(done.trials) <= budget
    assert done.baseline.plan.name == "causal"
    assert all(trial.plan.k is None or 1 <= trial.plan.k <= n for trial in done.trials)


@pytest.mark.parametrize("top", [1, 13, 37, 80])
def test_a_peak_between_the_spread_places_is_found(top):
    done = search(hill("mask0-for", top), n=80, budget=150)
    assert (done.best.plan.name, done.best.plan.k) == ("mask0-for", top)
    assert len(done.trials) < 80 * len(ONE_K)


def test_every_k_is_tried_where_the_budget_allows():
    done = search(hill("inter-back", 3), n=8, budget=200)
    for name, points in done.curves("mean").items():
        assert [k for k, _ in points] == list(range(1, most_k(name, 8) + 1))


def search_methods(score, *, budget, plans=("mask0-bidir",), methods=METHODS, rungs=1):
    """Search plans and methods by a made-up score of a setting and of the rung it is measured on."""
    asked = [[] for _ in range(rungs)]

    def measurer(rung):
        def measure(configs):
            asked[rung] += configs
            return [Trial(config, label_of(config, 8), {"toy": score(config, rung)}, rung, rung) for config in configs]

        return measure

    measurers = [measurer(rung) for rung in range(rungs)]
    found = _Search(measurers[0], [OWN], Tuned(8, budget))
    found.reserve(methods)
    found.run(plans)
    found.try_methods(methods)
    found.halve(methods, 32, measurers)
    return found.done, asked


def test_methods_are_tried_and_readings_of_a_pass_come_with_it():
    def score(config, rung):
        plain = 0.5 if (config.attention.name, config.attention.k) == ("mask0-bidir", 3) else 0.1
        return plain + 0.2 * (config.attention.skips == 3) + 0.3 * (config.layers == "all")

    done, [asked] = search_methods(score, budget=100)
    assert done.passes <= 100
    assert len({trial.label for trial in done.trials}) == len(done.trials) == len(asked)
    assert (done.best.config.layers, done.best.plan.name) == ("all", "mask0-bidir")
    # Across three layers of the top three, or more, skips are the same.
    assert {config.attention.skips for config in asked if config.attention.k == 3} == {None, 1, 2, 3}
    assert {config.attention.skips for config in asked if config.attention.name == "causal"} == {None, 1, 2, 3, 4}
    assert {config.template for config in asked} == {"none", *NAMED}
    assert {config.prepend for config in asked} == {0, 3, 4, 6, 8}
    assert {config.reroute for config in asked} == {"none", *windows(8)}
    assert {config.states for config in asked} == {"hidden", "values", "attention"}
    assert {config.transform for config in asked} >= {"whitening", "whitening-16", "all-but-the-top"}
    # The curves over k are of plans and nothing else.
    assert all(len({k for k, _ in points}) == len(points) for points in done.curves("mean").values())


def test_a_small_budget_reaches_each_kind_and_says_what_it_left_out():
    done, [tried] = search_methods(lambda config, rung: 0.1, budget=12, methods=METHODS[1:])
    assert done.passes == 12
    for reached in (
        lambda one: one.template == "topic" and one.states == "hidden",
        lambda one: one.template == "topic" and one.states == "attention",
        lambda one: one.template == "topic" and one.pooling == "last-mean",
        lambda one: one.layers == "1+8",
        lambda one: one.attention.skips == 1,
        lambda one: one.reroute != "none",
    ):
        assert any(map(reached, tried))
    assert len(done.untried) > 10
    assert "causal, last, metaeol" in done.untried


def test_a_small_budget_begins_with_the_usual_k_of_each_plan_and_goes_on_around_the_best():
    done = search(hill("inter-back", 5), n=30, budget=24)
    tried = [(trial.plan.name, trial.plan.k) for trial in done.trials]
    usual = [(name, AttentionPlan(name).with_defaults(30).k) for name in ONE_K]
    assert tried[2 : 2 + len(usual)] == usual
    assert (done.best.plan.name, done.best.plan.k) in {("inter-back", 4), ("inter-back", 5), ("inter-back", 6)}


def test_the_best_passes_go_on_to_a_larger_sample_and_the_winner_is_the_best_there():
    def score(config, rung):
        if rung == 0:
            return {"mask0-bidir": 0.6, "inter-back": 0.5}.get(config.attention.name, 0.1)
        # What led on few examples loses on many; a transform adds to what is best there.
        return (0.9 if config.attention.name == "inter-back" else 0.2) + 0.05 * (config.transform == "standardization")

    done, [first, last] = search_methods(score, budget=30, plans=["mask0-bidir", "inter-back"], rungs=2)
    assert done.best.plan.name == "inter-back"
    assert done.best.config.transform == "standardization"
    assert all(config.transform == "none" for config in first)
    assert len({config.attention.label(8) + config.template for config in last}) < 0.4 * done.passes
    assert done.baseline.rung == 1
    assert done.baseline.plan.name == "causal"
    assert {trial.rung for trial in done.first} == {0}


def test_samples_grow_as_long_as_they_save_texts():
    class Sized(ToyTask):
        def texts(self, config):
            return [str(number) for number in range(min(1000, 2 * (config.limit or 500)))]

    def limits(config):
        return [rung.limit for rung in _rungs([Sized(name="toy/sized")], config)]

    assert limits(EvaluationConfig()) == [64, 256, None]
    assert limits(EvaluationConfig(limit=200)) == [64, 200]
    assert limits(EvaluationConfig(limit=80)) == [80]
    assert [rung.limit for rung in _rungs([TOY], EvaluationConfig())] == [None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* were cut")  # a template leaves little room in 64 tokens
@pytest.mark.parametrize("name", ["inter-bidir", "extend-back", "mask0+bidir"])
def test_methods_are_tried_whatever_the_models_own_plan_takes(lm, name):
    own = lm.with_encoder(EncoderConfig(attention=AttentionPlan(name)))
    methods = [method for method in METHODS if method != "transforms"]
    found = tune(own, [TOY], EvaluationConfig(split="validation"), plans=["inplace-back"], methods=methods, budget=14)
    assert any(trial.plan.skips for trial in found.trials)


def test_transforms_are_fitted_on_the_sample(lm):
    sample = [f"{one} and {other}" for one in ("a cat", "rain", "the inn", "her", "x") for other in "abcdefgh"]
    config = EvaluationConfig(split="validation")
    found = tune(lm, [TOY], config, plans=["causal"], methods=["transforms"], sample=sample, budget=20)
    tried = [trial for trial in found.trials if trial.config.transform != "none"]
    assert [trial.config.transform for trial in tried][:2] == ["standardization", "all-but-the-top"]
    assert tried[0].label == "causal, standardization"
    for trial in tried:
        alone = lm.with_encoder(trial.config).fitted(sample).encode(list(TOY.texts_), normalize=True)
        cosine = float((alone[1:] * alone[:-1]).sum(axis=1).mean())
        assert trial.scores["toy/one"] == pytest.approx(cosine, abs=1e-5)
    chosen = replace(found, trials=[next(one for one in tried if one.label == "causal, whitening-16")]).chosen(lm)
    assert chosen.dimensions == 16
    with pytest.raises(ConfigError, match="transforms are fitted on texts"):
        tune(lm, [TOY], config, methods=["transforms"])
    few = tune(lm, [TOY], config, plans=["causal"], methods=["transforms"], sample=sample[:2], budget=20)
    assert {trial.config.transform for trial in few.trials} == {
        "none",
        "standardization",
        "all-but-the-top",
        "all-but-the-top-1",
    }
    assert all("the sample has 2" in str(error) for error in few.refused.values())
    assert len(few.refused) >= 2
    with pytest.raises(ConfigError, match="unknown method to tune 'skip'"):
        tune(lm, [TOY], config, methods=["skip"])


def tune_hybrid(model_type, plans, budget, **changes):
    tokenizer = byte_tokenizer()
    lm = gerund.LanguageModel(
        tiny(model_type, vocab_size=len(tokenizer), **changes),
        tokenizer,
        EncoderConfig(attention=AttentionPlan("causal")),
    )
    config = EvaluationConfig(split="validation")
    return tune(lm, [TOY], config, plans=plans, methods=["recurrent", "reroute", "layers"], budget=budget)


@pytest.mark.slow
def test_a_model_with_recurrent_layers_is_read_by_what_it_can_be_read_by():
    # Attention in the two lower layers: with k up to 2 a plan converts nothing.
    done = tune_hybrid(
        "lfm2", ["inplace-bidir", "inter-bidir", "mask0-for"], 60, layer_types=["full_attention"] * 2 + ["conv"] * 2
    )
    tried = {trial.label for trial in done.trials}
    for name in ("inplace-bidir", "inter-bidir"):
        points = [k for k, _ in done.curves("mean")[name]]
        assert points == [3, 4]
        assert f"{name} k=1" in done.refused
        best = done.best_of(name)
        assert best is not None
        assert [label for label in tried if label.startswith(name) and label.endswith("recurrent both")]
    assert not any("recurrent both" in label for label in tried if label.startswith("mask0-for"))
    assert any("reroute is for attention" in str(error) for error in done.refused.values())
    assert any("layers all" in label for label in tried)


@pytest.mark.slow
def test_a_model_without_attention_is_read_both_ways():
    done = tune_hybrid("mamba2", ["inplace-bidir", "mask0-bidir"], 12)
    assert all(trial.plan.recurrent == "both" for trial in done.trials if trial.plan.name != "causal")
    assert set(done.curves("mean")) == {"inplace-bidir", "mask0-bidir"}


def test_a_model_that_no_plan_fits_is_refused():
    with pytest.raises(ConfigError, match="would convert nothing"):
        tune_hybrid("lfm2", ["extend-bidir"], 10, layer_types=["full_attention"] * 3 + ["conv"])


def test_k0_is_sought_where_the_paper_found_it():
    """mask0+bidir peaks at k = the best of inplace-bidir, k0 = the best of mask0-bidir."""

    def score(config):
        plan = config.attention
        if plan.name == "inplace-bidir":
            return 0.6 - 0.01 * abs(plan.k - 18)
        if plan.name == "mask0-bidir":
            return 0.7 - 0.01 * abs(plan.k - 10)
        if plan.name == "mask0+bidir":
            return 0.9 - 0.01 * abs(plan.k - 19) - 0.01 * abs(plan.k0 - 9)
        return 0.1

    done = search(score, n=22, budget=150)
    assert (done.best.plan.k, done.best.plan.k0) == (19, 9)
    tried = [(t.plan.k, t.plan.k0) for t in done.trials if t.plan.name == "mask0+bidir"]
    assert tried[0] == (18, 10)
    assert {k0 for _, k0 in tried[:5]} == {10, 5, 1, 2, 3}
    assert len(tried) < 22 * 22 / 4
    assert set(done.k0_curves("mean")) >= {"k0 = 1", "k0 = 9"}


@pytest.mark.parametrize("budget", [9, 12])
def test_no_budget_is_left_over_while_a_k_is_untried(budget):
    done = search(hill("mask0-bidir", 5), n=8, budget=budget, plans=["mask0-bidir"])
    assert [k for k, _ in done.curves("mean")["mask0-bidir"]] == list(range(1, 9))


def test_only_the_plans_that_were_asked_for():
    done = search(hill("mask0-bidir", 2), n=4, budget=50, plans=["mask0-bidir"])
    assert {trial.plan.name for trial in done.trials} == {"causal", "mask0-bidir"}
    alone = search(hill("mask0+bidir", 2), n=4, budget=50, plans=["mask0+bidir"])
    assert {trial.plan.name for trial in alone.trials} == {"causal", "mask0+bidir"}


def test_equal_scores_are_decided_by_how_much_is_changed():
    done = search(lambda config: 0.5, n=8, budget=150)
    assert done.best.plan.name == "causal"


def test_poolings_are_tried_with_every_plan():
    configs = [gerund.EncoderConfig(pooling=pooling) for pooling in ("mean", "last")]
    done = search(lambda config: float(config.pooling == "last"), n=4, budget=40, configs=configs)
    assert done.best.config.pooling == "last"
    assert len(done.curves("mean")) == len(done.curves("last"))


@pytest.mark.slow
@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_the_plan_that_an_adapter_was_trained_under_is_tried(tiny_folder, tmp_path):
    own = AttentionPlan("inter-bidir", k=3)
    done = search(hill("inter-bidir", 3), n=40, budget=4, plans=["mask0-bidir"], own=replace(OWN, attention=own))
    assert [trial.plan for trial in done.trials[:2]] == [AttentionPlan("causal"), own]
    assert done.best.plan == own
    adapter = make_adapter(tiny_folder, tmp_path / "adapter")
    for options, tried in (({}, []), ({"adapter": adapter}, ["inter-bidir"])):
        lm = gerund.load(tiny_folder, attention="inter-bidir", k=1, **options)
        done = tune(lm, [TOY], EvaluationConfig(), plans=["mask0-bidir"], budget=3)
        assert [trial.plan.name for trial in done.trials][:-1] == ["causal", *tried, *["mask0-bidir"][: 1 - len(tried)]]


@pytest.mark.slow
def test_scores_are_those_of_each_plan_alone(lm, tmp_path):
    done = tune(lm, [TOY, ToyTask(name="toy/two", weight=2.0)], EvaluationConfig(), budget=60, folder=tmp_path)
    assert {trial.plan.name for trial in done.trials} == set(PLANS)
    for trial in done.trials:
        alone = lm.with_encoder(trial.config)
        vectors = alone.encode(list(TOY.texts_), normalize=True)
        cosine = float((vectors[1:] * vectors[:-1]).sum(axis=1).mean())
        assert trial.scores == pytest.approx({"toy/one": cosine, "toy/two": 2 * cosine}, abs=1e-5)
        assert trial.mean == pytest.approx(1.5 * cosine, abs=1e-5)
    assert done.best.mean == max(trial.mean for trial in done.trials)


@pytest.mark.slow
def test_an_interrupted_search_goes_on(lm, tmp_path):
    calls = []
    first = tune(lm, [TOY], EvaluationConfig(), budget=20, folder=tmp_path, reporter=lambda *told: calls.append(told))
    measured = sum(result is None for *_, result in calls)
    assert measured == len(first.trials)
    calls.clear()
    again = tune(lm, [TOY], EvaluationConfig(), budget=30, folder=tmp_path, reporter=lambda *told: calls.append(told))
    assert sum(result is None for *_, result in calls) < len(again.trials)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plans": ["mask0-bidr"]}, "unknown plan to tune 'mask0-bidr'"),
        ({"tasks": []}, "needs a task"),
        ({"tasks": [ToyWriting(name="toy-writing/one")]}, "no plan improves the score of toy-writing/one"),
        ({"budget": 1}, "a budget of 1"),
    ],
)
def test_mistakes(lm, changes, message):
    given = {"tasks": [TOY], "config": EvaluationConfig(), **changes}
    with pytest.raises(ConfigError, match=message):
        tune(lm, given.pop("tasks"), given.pop("config"), **given)


def test_candidates_are_scored_as_trec_eval_does():
    pytrec_eval = pytest.importorskip("pytrec_eval")
    grades = {"a": 2, "b": 0, "c": 1, "other": 4}
    given, own = {"a": 3.0, "b": 2.0, "c": 1.0}, {"a": 0.1, "b": 0.2, "c": 0.3}
    scored = tuning.Candidates([2, 0, 1], [4, 2, 1], {"bm25": list(given.values()), "lift": list(own.values())})
    measure = pytrec_eval.RelevanceEvaluator({"q": grades}, {"ndcg_cut_10"})
    for scores, weight in ((given, 0), (own, 1)):
        expected = measure.evaluate({"q": scores})["q"]["ndcg_cut_10"]
        assert scored.ndcg("lift", weight) == pytest.approx(expected)


def test_spread():
    assert spread(22, 2) == [1, 22]
    assert spread(1, 5) == [1]
    assert all(len(spread(n, count)) <= max(count, 1) for n in range(1, 40) for count in range(2, 12))


def test_plans_that_do_not_fit_two_numbers_are_named_apart():
    plan = AttentionPlan("mask0+bidir", k=3, k0=2)
    assert Trial(replace(gerund.EncoderConfig(), attention=plan), "x", {"a": 1.0}).converted == 4
