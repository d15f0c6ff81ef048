"""Which pictures there are, what they are drawn of, and that a report outlives those that cannot be drawn."""

import builtins
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import gerund
from gerund.errors import DataError
from gerund.evaluation.data_files import LabelledTexts, RatedPairs
from gerund.evaluation.run import evaluate
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig, Score
from gerund.reporting import evaluation
from gerund.reporting.comparison import compare
from gerund.reporting.evaluation import SUMMARY, pictures_for, write_report
from gerund.reporting.plots import attention, embeddings, scores
from gerund.reporting.rendering import drawn
from gerund.settings.model_spec import parse_encoder_spec
from tests.evaluation.toys import ToyTask
from tests.reporting.html import checked
from tests.reporting.results import made, several

SETTINGS = EvaluationConfig(show_progress=False)
TEXTS = [f"{adjective} {noun}" for adjective in ("a thin", "the", "another") for noun in ("cat", "inn", "end", "rain")]
LABELLED = LabelledTexts(TEXTS, ["animal", "house", "time", "weather"] * 3)
RATED = RatedPairs(TEXTS[:6], TEXTS[6:], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])


@dataclass(frozen=True, kw_only=True)
class Labelled(ToyTask):
    kind: ClassVar = "classification"
    data: LabelledTexts = LABELLED

    def picture_data(self, config):
        return self.data


@dataclass(frozen=True, kw_only=True)
class Clustered(Labelled):
    kind: ClassVar = "clustering"


@dataclass(frozen=True, kw_only=True)
class Paired(ToyTask):
    kind: ClassVar = "sts"
    data: RatedPairs = RATED

    def picture_data(self, config):
        return self.data


@dataclass(frozen=True, kw_only=True)
class Gone(ToyTask):
    def picture_data(self, config):
        raise DataError("gone.tsv: no such file")


@pytest.fixture(scope="module")
def models(tiny_folder):
    configs = [parse_encoder_spec(text) for text in ("causal", "mask0-bidir:k=2")]
    return systems_of([gerund.load(tiny_folder), "bm25"], configs)


@pytest.fixture
def calls(monkeypatch):
    """Take down what is drawn, and draw a small picture in its place."""
    found = []

    def instead(module, name):
        def draw(*arguments, **config):
            from gerund.reporting.plots.style import new_figure

            found.append((name, arguments, config))
            return new_figure(1, 1)

        monkeypatch.setattr(module, name, draw)

    instead(embeddings, "embedding_maps")
    instead(embeddings, "similarity_histograms")
    instead(attention, "attention_figure")
    instead(scores, "score_bars")
    instead(scores, "trade_off")
    return found


def wanted(models, tasks, results=()):
    return pictures_for(compare(list(results)), models, tasks, SETTINGS)


@pytest.mark.slow
def test_real_pictures_of_real_models(models, tmp_path):
    tasks = [Labelled(name="classification/a"), Paired(name="sts/a")]
    done = evaluate(models, tasks, SETTINGS)
    report = write_report(tmp_path, done)
    page = checked(report.page.read_text("utf-8"))
    assert "could not be drawn" not in page.text
    for heading in (
        "Scores task by task",
        "Where the classes lie",
        "How alike pairs are",
        "Attention before and after",
    ):
        assert heading in page.text


def test_every_side_has_its_bars(calls):
    gallery = wanted([], [], several())
    assert not gallery.missing
    panels = [panel for name, (panels,), _ in calls if name == "score_bars" for panel in panels]
    assert [panel.title for panel in panels] == [
        "one, sts", "two, sts", "one, retrieval", "two, retrieval", "one, classification",
        "one, ner", "one, perplexity", "one, writing",
    ]  # fmt: skip
    assert panels[4].scores == {"causal": (0.60, 0.0123), "mask0-bidir k=2": (0.65, 0.0123)}
    assert [(panel.percent, panel.higher_is_better) for panel in panels[5:]] == [
        (True, True),
        (False, False),
        (True, True),
    ]


def bits(system, value, model):
    score = Score("bits_per_byte", {"bits_per_byte": value})
    return made("perplexity/one", system, value, score=score, model=model)


def test_the_trade_off_is_of_both_means(calls):
    results = [
        made("sts/one", "a", 0.2, model="/private/tiny"),
        made("sts/two", "a", 0.4, model="/private/tiny"),
        made("sts/one", "b", 0.3, model="other"),
        made("sts/two", "b", 0.5, model="other"),
        bits("a", 1.5, "/private/tiny"),
        bits("b", 1.2, "other"),
        made("sts/one", "bm25", 0.9),
    ]
    gallery = wanted([], [], results)
    [(points,)] = [arguments for name, arguments, _ in calls if name == "trade_off"]
    assert [(point.label, point.representation, point.generation, point.group) for point in points] == [
        ("a", pytest.approx(0.3), 1.5, "tiny"),
        ("b", pytest.approx(0.4), 1.2, "other"),
    ]
    assert gallery.pictures[0].group == SUMMARY
    assert "a 30.00 and 1.500; b 40.00 and 1.200" in gallery.pictures[0].alt


@pytest.mark.parametrize(
    "results",
    [
        [made("sts/one", "a", 0.2), made("sts/one", "b", 0.2)],
        [bits("a", 1.2, "x"), bits("b", 1.2, "y")],
        [made("sts/one", "a", 0.2), bits("a", 1.2, "x")],
        [made("sts/one", "a", 0.2), made("sts/one", "b", 0.2), bits("a", 1.2, "x")],
        # Bits of another kind are not bits per byte.
        [made(task, name, 1.0) for task in ("sts/one", "perplexity/one") for name in "ab"],
    ],
)
def test_without_both_sides_of_two_there_is_no_trade_off(calls, results):
    wanted([], [], results)
    assert "trade_off" not in [name for name, _, _ in calls]


def test_maps_and_histograms_are_of_the_systems_own_vectors(models, calls):
    gallery = wanted(models, [Labelled(name="classification/a"), Paired(name="sts/a")])
    assert not gallery.missing
    (_, [maps, labels], said), (_, [cosines, ratings], _) = calls[:2]
    assert list(maps) == list(cosines) == ["causal", "mask0-bidir k=2"]
    assert labels == LABELLED.labels
    assert ratings == RATED.ratings
    assert said["seed"] == 0
    for one in models[:2]:
        vectors = one.encode(TEXTS, normalize=True)
        assert maps[one.label] == pytest.approx(one.encode(TEXTS))
        assert cosines[one.label] == pytest.approx((vectors[:6] * vectors[6:]).sum(axis=1), abs=1e-6)


def test_clustering_comes_first_and_files_are_drawn_once(models, calls):
    tasks = [
        Labelled(name="classification/a", files=(Path("a"),)),
        Labelled(name="few-shot/a", files=(Path("a"),)),
        Labelled(name="classification/b", files=(Path("b"),)),
        Clustered(name="clustering/c", files=(Path("c"),)),
        Labelled(name="classification/d", files=(Path("d"),)),
        ToyTask(name="toy/none"),
        Gone(name="toy/gone"),
    ]
    wanted(models, tasks)
    assert [said["title"] for name, _, said in calls if name == "embedding_maps"] == ["c", "a", "b"]


@pytest.mark.slow
def test_attention_is_drawn_once_a_plan(tiny_folder, calls):
    lm = gerund.load(tiny_folder)
    texts = ("causal", "mask0-bidir:k=2", "mask0-bidir:k=2,pooling=last", "bidir")
    models = systems_of([lm], [parse_encoder_spec(text) for text in texts])
    gallery = wanted(models, [])
    titles = [said["title"] for _, _, said in calls]
    assert [title.split(",")[0] for title in titles] == ["mask0-bidir k=2", "bidir"]
    assert len(gallery.pictures) == 2
    # The untouched model has its picture where there is no other.
    calls.clear()
    wanted(models[:1], [])
    assert [said["title"] for _, _, said in calls] == ["causal, 4 layers"]


def test_bm25_alone_has_no_pictures_of_embeddings(models, calls):
    wanted(models[-1:], [Labelled(name="classification/a")])
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, reason",
    [
        (Labelled(name="classification/a", data=LabelledTexts(["the cat"], ["one"])), "a map of 1 texts"),
        (Labelled(name="classification/a", data=LabelledTexts(["the cat"] * 9, ["one", "two", "one"] * 3)), "alike"),
        (Paired(name="sts/a", data=RatedPairs(["a cat"], ["an inn"], [1.0])), "ratings are the same"),
    ],
)
def test_what_cannot_be_drawn_is_left_out_with_a_sentence(models, task, reason):
    gallery = wanted(models, [task])
    [sentence] = gallery.missing
    assert "of a could not be drawn: " in sentence
    assert reason in sentence
    assert sentence.endswith(".")
    # Attention is there all the same.
    assert len(gallery.pictures) == 1


@pytest.mark.slow
def test_an_unforeseen_error_does_not_lose_the_page(models, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "_map_of", lambda *_: 1 / 0)
    done = evaluate(models, [Labelled(name="classification/a")], SETTINGS)
    page = checked(write_report(tmp_path, done).page.read_text("utf-8"))
    assert "A map of a could not be drawn: ZeroDivisionError: division by zero." in page.text


def test_without_matplotlib_the_page_says_how_to_get_it(models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = evaluate(models, [Labelled(name="classification/a")], SETTINGS)
    page = checked(write_report(tmp_path, done).page.read_text("utf-8"))
    assert "There are no pictures: pictures need matplotlib: pip install 'gerund[plot]'." in page.text
    assert not page.having("img")


@pytest.mark.slow
def test_without_scikit_learn_only_the_maps_are_missing(models, monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    gallery = wanted(models, [Labelled(name="classification/a")])
    assert gallery.missing == ("A map of a could not be drawn: t-SNE needs scikit-learn: pip install 'gerund[eval]'.",)
    assert gallery.pictures


def test_the_same_reason_is_said_once():
    def fails():
        raise DataError("nothing")

    assert drawn([("A map", fails), ("A map", fails)]).missing == ("A map could not be drawn: nothing.",)


def test_an_interruption_is_not_swallowed():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drawn([("A map", interrupted)])
