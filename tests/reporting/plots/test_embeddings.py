"""Pictures of embeddings: which points are drawn where, and what is said of pairs."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_hex

from gerund.errors import ConfigError, DataError, MissingDependencyError
from gerund.reporting.plots.embeddings import (
    Tsne,
    embedding_map,
    embedding_maps,
    separation,
    similarity_histograms,
)
from gerund.reporting.plots.style import COLOURS, picture


def classes(sizes, dimensions=12, apart=6.0, seed=0):
    """Draw vectors around one centre a class; return them with their labels, in mixed order."""
    generator = np.random.default_rng(seed)
    labels = [f"class {number}" for number, size in enumerate(sizes) for _ in range(size)]
    centres = generator.standard_normal((len(sizes), dimensions)) * apart
    vectors = np.array([centres[int(label[6:])] for label in labels]) + generator.standard_normal(
        (len(labels), dimensions)
    )
    order = generator.permutation(len(labels))
    return vectors[order].astype(np.float32), [labels[place] for place in order]


def drawn(axis):
    return {points.get_label(): np.asarray(points.get_offsets()) for points in axis.collections}


def caption(figure):
    return figure.get_supxlabel()


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_classes_that_are_apart_are_drawn_apart(method):
    vectors, labels = classes([30, 25, 20])
    figure = embedding_map(vectors, labels, title="three", method=method)
    [axis] = figure.axes
    places = drawn(axis)
    assert {name: len(points) for name, points in places.items()} == {"class 0": 30, "class 1": 25, "class 2": 20}
    centres = {name: points.mean(axis=0) for name, points in places.items()}
    for name, points in places.items():
        nearest = [min(centres, key=lambda other: np.linalg.norm(centres[other] - point)) for point in points]
        assert nearest.count(name) >= 0.95 * len(points)
    assert "75 texts; 3 classes" in caption(figure)


def test_the_most_frequent_classes_are_drawn_and_said():
    vectors, labels = classes([10, 40, 20, 30])
    figure = embedding_map(vectors, labels, title="", method="pca", most_classes=2)
    assert list(drawn(figure.axes[0])) == ["class 1", "class 3"]
    assert "the 2 most frequent of 4 classes" in caption(figure)
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["class 1", "class 3"]


def test_too_many_points_are_drawn_by_lot():
    vectors, labels = classes([100, 100])
    some = [embedding_map(vectors, labels, title="", method="pca", most_points=50, seed=seed) for seed in (0, 0, 1)]
    counts = [sum(map(len, drawn(figure.axes[0]).values())) for figure in some]
    assert counts == [50, 50, 50]
    assert picture(some[0]) == picture(some[1]) != picture(some[2])


def test_principal_directions_are_those_of_the_unit_vectors():
    vectors, labels = classes([12, 12])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    values, directions = np.linalg.eigh(np.cov(unit.T))
    expected = np.abs((unit - unit.mean(axis=0)) @ directions[:, ::-1][:, :2])
    figure = embedding_map(vectors * 7, labels, title="", method="pca")
    places = drawn(figure.axes[0])
    for name, points in places.items():
        own = expected[[label == name for label in labels]]
        np.testing.assert_allclose(np.abs(points), own, atol=1e-5)
    assert figure.axes[0].get_title() == f"{values[-2:].sum() / values.sum():.0%} of the variance"


def test_every_encoder_has_a_panel_of_the_same_texts():
    vectors, labels = classes([30, 20, 10])
    maps = {"causal": vectors, "mask0-bidir": vectors[:, ::-1] * 2, "a third $x$": vectors + 1}
    figure = embedding_maps(maps, labels, title="three", method="pca", most_classes=2)
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title().split("\n")[0] for axis in shown] == list(maps)
    assert all(list(drawn(axis)) == ["class 0", "class 1"] for axis in shown)
    # Turning all vectors round, or making them longer, changes no map but for its mirror.
    one, other = (np.concatenate(list(drawn(axis).values())) for axis in shown[:2])
    np.testing.assert_allclose(np.abs(one), np.abs(other), atol=1e-5)
    assert len(figure.legends) == 1


@pytest.mark.parametrize("count", [2, 8, 20])
def test_classes_have_a_mark_each(count):
    vectors, labels = classes([4] * count)
    [axis] = embedding_map(vectors, labels, title="", method="pca", most_classes=20).axes
    marks = {(to_hex(points.get_facecolor()[0]), str(points.get_paths()[0].vertices)) for points in axis.collections}
    assert len(marks) == count
    assert {colour for colour, _ in marks} == set(COLOURS[:count])


@pytest.mark.slow
def test_tsne_repeats_and_obeys_its_seed():
    vectors, labels = classes([20, 20])
    one, again, other = (embedding_map(vectors, labels, title="", seed=seed) for seed in (0, 0, 3))
    assert picture(one) == picture(again)
    assert "perplexity 13" in caption(one)
    assert "seed 3" in caption(other)


@pytest.mark.slow
def test_tsne_is_that_of_figure_2_unless_told_otherwise(monkeypatch):
    """UniMAE, section 3.4: from the main directions, 2000 iterations, an early exaggeration of 20."""
    import sklearn.manifold

    asked, starts, own = [], [], sklearn.manifold.TSNE

    def recorded(**settings):
        asked.append((settings["max_iter"], settings["early_exaggeration"]))
        starts.append(settings["init"])
        return own(**settings)

    monkeypatch.setattr(sklearn.manifold, "TSNE", recorded)
    vectors, labels = classes([20, 20])
    paper = embedding_map(vectors, labels, title="")
    other = embedding_map(vectors, labels, title="", tsne=Tsne(iterations=300, exaggeration=4))
    assert asked == [(2000, 20.0), (300, 4)]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)  # as cosines see them
    centred = unit - unit.mean(axis=0)
    main = np.linalg.svd(centred, full_matrices=False)[2][:2]
    for start, along in zip(starts[0].T, (centred @ main.T).T, strict=True):
        assert abs(np.corrcoef(start, along)[0, 1]) > 0.9999
    assert "2000 iterations, exaggeration 20," in caption(paper)
    assert "300 iterations, exaggeration 4," in caption(other)
    assert picture(paper) != picture(other)


@pytest.mark.parametrize("settings", [{"iterations": 249}, {"exaggeration": 0.5}])
def test_settings_of_tsne_that_make_no_map(settings):
    with pytest.raises(ConfigError, match="at least 250 iterations and an exaggeration of at least 1"):
        Tsne(**settings)


@pytest.mark.parametrize("settings", [{"iterations": 300.5}, {"exaggeration": "x"}, {"exaggeration": float("nan")}])
def test_settings_of_tsne_that_are_no_numbers(settings):
    with pytest.raises(ConfigError):
        Tsne(**settings)


def test_umap_is_asked_for_cosines(monkeypatch):
    asked = {}

    class Fake:
        def __init__(self, **settings):
            asked.update(settings)

        def fit_transform(self, vectors):
            return vectors[:, :2]

    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Fake))
    vectors, labels = classes([10, 10])
    figure = embedding_map(vectors, labels, title="", method="umap", seed=5)
    assert asked == {"metric": "cosine", "random_state": 5, "n_jobs": 1}
    assert "UMAP" in caption(figure)


@pytest.mark.parametrize(
    ("module", "method", "words"),
    [
        ("umap", "umap", "pip install umap-learn"),
        ("sklearn.manifold", "tsne", r"pip install 'gerund\[eval\]'"),
        ("matplotlib", "pca", r"pip install 'gerund\[plot\]'"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, module, method, words):
    monkeypatch.setitem(sys.modules, module, None)
    vectors, labels = classes([10, 10])
    with pytest.raises(MissingDependencyError, match=words):
        embedding_map(vectors, labels, title="", method=method)


@pytest.mark.parametrize(
    ("vectors", "labels", "options", "error", "words"),
    [
        (np.eye(6), ["a"] * 5, {}, ConfigError, "5 labels do not fit 6 vectors"),
        (np.eye(6), ["a"] * 6, {"method": "som"}, ConfigError, "tsne, umap, pca"),
        (np.eye(6), ["a"] * 6, {"most_classes": 99}, ConfigError, "between 1 and 49"),
        (np.eye(4), ["a"] * 4, {}, DataError, "4 texts shows nothing"),
        (np.ones((6, 3)), ["a"] * 6, {}, DataError, "all vectors are alike"),
        (np.full((6, 3), np.inf), ["a"] * 6, {}, DataError, "not finite"),
    ],
)
def test_what_cannot_be_mapped_is_refused(vectors, labels, options, error, words):
    with pytest.raises(error, match=words):
        embedding_map(vectors, labels, title="", **options)
    if error is ConfigError and not options:
        with pytest.raises(error, match="do not fit no vectors"):
            embedding_maps({}, labels, title="")


def test_texts_that_differ_in_one_direction_only_are_drawn_on_a_line():
    vectors = np.linspace(1, 2, 8)[:, None] * [1.0, 0.0] + [0.0, 1.0]
    [axis] = embedding_map(vectors[:, :1] * [1.0] - 1.5, ["a"] * 4 + ["b"] * 4, title="", method="pca").axes
    assert all((points[:, 1] == 0).all() for points in drawn(axis).values())


def test_separation_against_slow_counts():
    generator = np.random.default_rng(0)
    low, high = generator.normal(0.3, 0.1, 300), generator.normal(0.5, 0.1, 200)
    cosines = np.concatenate([low, high])
    said = separation(cosines, [0.0] * 300 + [1.0] * 200)
    assert (said.mean, said.low, said.high) == pytest.approx((cosines.mean(), low.mean(), high.mean()))
    assert said.effect == pytest.approx((high.mean() - low.mean()) / np.sqrt((low.var() + high.var()) / 2))
    gap = max(abs(np.mean(low <= place) - np.mean(high <= place)) for place in cosines)
    assert said.overlap == pytest.approx(1 - gap)
    # Two normal distributions that are two deviations apart share 2 Phi(-1) of their area.
    assert said.overlap == pytest.approx(0.317, abs=0.06)


@pytest.mark.parametrize(
    ("low", "high", "effect", "overlap"), [([0.1, 0.2], [0.8, 0.9], 14.0, 0.0), ([0.5, 0.5], [0.5, 0.5], 0.0, 1.0)]
)
def test_separation_at_its_ends(low, high, effect, overlap):
    said = separation(np.array(low + high), [0, 0, 1, 1])
    assert (said.effect, said.overlap) == pytest.approx((effect, overlap))


def rows(axis):
    """Return the share of pairs in each bin of each row, and the rows' means."""
    bars = [patch.get_data() for patch in axis.patches]
    means = [line.get_xdata()[0] for line in axis.get_lines()]
    return [data.values - data.baseline for data in bars], means


@pytest.mark.slow
def test_histograms_hold_every_pair():
    generator = np.random.default_rng(0)
    ratings = [0.0] * 60 + [1.0] * 40
    cosines = {"one": generator.uniform(0.2, 0.9, 100), "other": generator.uniform(0.9, 1.0, 100)}
    cosines["one"][0] = -0.9  # far out: counted in the first bin
    figure = similarity_histograms(cosines, ratings, title="pairs")
    one, other = figure.axes
    assert one.get_xlim() == other.get_xlim()
    assert one.get_xlim()[1] == 1.0
    for axis, values in zip((one, other), cosines.values(), strict=True):
        heights, means = rows(axis)
        shares = [heights[0] / heights[0].sum(), heights[1] / heights[1].sum()]
        inside = np.clip(values, *axis.get_xlim())
        edges = axis.patches[0].get_data().edges
        for share, members in zip(shares, (inside[:60], inside[60:]), strict=True):
            np.testing.assert_allclose(share * len(members), np.histogram(members, edges)[0], atol=1e-9)
        assert means == pytest.approx([values[:60].mean(), values[60:].mean(), values.mean()])
        # Rows share one scale: their heights are to each other as their shares.
        assert heights[0].sum() == pytest.approx(heights[1].sum())
    assert [label.get_text() for label in one.get_yticklabels()] == ["not the same", "the same"]
    said = separation(cosines["other"], ratings)
    assert other.get_title() == (
        f"other\nmeans {said.low:.2f} and {said.high:.2f}: {said.effect:.1f} sd apart, overlap {said.overlap:.0%}"
    )
    assert picture(figure) == picture(similarity_histograms(cosines, ratings, title="pairs"))


@pytest.mark.parametrize(
    ("ratings", "names"),
    [
        (np.linspace(0, 5, 101), ["rated 0 to 1.25", "rated 1.3 to 2.5", "rated 2.55 to 3.75", "rated 3.8 to 5"]),
        ([0] * 50 + [1] * 30 + [2] * 21, ["rated 0", "rated 1", "rated 2"]),
        ([0] * 2 + [5] * 98 + [3], ["rated 0 to 3", "rated 5"]),
        ([0] * 98 + [1, 2, 3], ["rated 0", "rated 1 to 3"]),
    ],
)
def test_many_ratings_are_cut_into_quarters(ratings, names):
    cosines = {"one": np.linspace(0, 1, 101)}
    [axis] = similarity_histograms(cosines, ratings, title="").axes
    assert [label.get_text() for label in axis.get_yticklabels()] == names
    faces = [patch.get_facecolor() for patch in axis.patches]
    assert len(set(faces)) == len(names)


@pytest.mark.parametrize(
    ("cosines", "ratings", "error", "words"),
    [
        ({}, [1.0], ConfigError, "no cosines"),
        ({"a": np.ones(3)}, [0.0, 1.0], ConfigError, "2 ratings do not fit 3 cosines"),
        ({"a": np.ones(2)}, [1.0, 1.0], DataError, "all ratings are the same"),
    ],
)
def test_pairs_that_cannot_be_drawn_are_refused(cosines, ratings, error, words):
    with pytest.raises(error, match=words):
        similarity_histograms(cosines, ratings, title="")
