"""Whitening and all-but-the-top against their definitions, and what becomes of them when a model is saved."""

from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.models.vectors import WEIGHTS_FILE, compared, compared_in_pairs, fit
from tests.tiny import save_tiny_t5

WORDS = ["cat", "dog", "house", "rain", "thin", "her", "and", "the", "other", "a"]
SAMPLE = [f"{one} {other} {third}" for one in WORDS for other in WORDS for third in WORDS[:2]]


def cloud(count: int = 300, width: int = 12) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.normal(size=(count, width)) @ rng.normal(size=(width, width)) + 3).astype(np.float32)


@pytest.mark.parametrize(("name", "dimensions"), [("whitening", 12), ("whitening-5", 5)])
def test_whitening_is_that_of_the_released_code(name: str, dimensions: int) -> None:
    """BERT-whitening: W = U / sqrt(S) of the covariance's SVD, its first columns."""
    vectors = cloud()
    mean = vectors.mean(axis=0, keepdims=True)
    columns, variances, _ = np.linalg.svd(np.cov(vectors.T))
    kernel = np.dot(columns, np.diag(1 / np.sqrt(variances)))[:, :dimensions]
    found = fit(name, vectors)(vectors)
    expected = (vectors - mean).dot(kernel)
    signs = np.sign((found * expected).sum(axis=0))  # of a direction either sign is right
    np.testing.assert_allclose(found * signs, expected, atol=1e-3)
    assert fit(name, vectors).dimensions == dimensions


def test_all_but_the_top_takes_the_mean_and_the_first_directions_away() -> None:
    """Mu and Viswanath's Algorithm 1, step by step, with the directions as eigenvectors."""
    vectors = cloud().astype(np.float64)
    centred = vectors - vectors.mean(axis=0)
    values, directions = np.linalg.eigh(centred.T @ centred)
    expected = centred.copy()
    for place in np.argsort(-values)[:3]:
        expected -= (centred @ directions[:, place])[:, None] * directions[:, place]
    np.testing.assert_allclose(fit("all-but-the-top-3", cloud())(cloud()), expected, atol=1e-3)
    assert np.linalg.matrix_rank(fit("all-but-the-top", cloud(width=250)).matrix_DE) == 248


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
def test_no_vectors_are_compared(similarity: str) -> None:
    assert compared(np.zeros((0, 3)), np.ones((2, 3)), similarity).shape == (0, 2)


def test_standardized_dimensions_have_mean_0_and_variance_1() -> None:
    vectors = np.hstack([cloud(), np.full((len(cloud()), 1), 7.0, np.float32)])
    found = fit("standardization", vectors)(vectors)
    expected = (cloud() - cloud().mean(axis=0)) / cloud().std(axis=0)
    np.testing.assert_allclose(found[:, :-1], expected, atol=1e-3)
    assert not found[:, -1].any()


@pytest.mark.slow
def test_a_truncation_keeps_the_first_numbers_and_needs_no_sample(tiny_folder, tmp_path) -> None:
    whole, cut = gerund.load(tiny_folder), gerund.load(tiny_folder, transform="truncate-6")
    assert cut.dimensions == 6
    np.testing.assert_array_equal(cut.encode(WORDS), whole.encode(WORDS, dimensions=6))
    [spans], [same] = (one.encode_spans(["the cat"], [[(0, 3), (4, 7)]]) for one in (cut, whole))
    np.testing.assert_allclose(spans, same[:, :6] / np.linalg.norm(same[:, :6], axis=1, keepdims=True), atol=1e-6)
    assert cut.fingerprint() not in (whole.fingerprint(), whole.with_encoder(replace(whole.encoder)).fingerprint())
    cut.save(tmp_path / "cut")
    again = gerund.load(tmp_path / "cut")
    assert again.fingerprint() == cut.fingerprint()
    np.testing.assert_array_equal(again.encode(WORDS), cut.encode(WORDS))
    assert whole.with_encoder(cut.encoder).dimensions == 6
    assert cut.with_encoder(whole.encoder).dimensions == whole.dimensions
    with pytest.raises(ConfigError, match=f"truncate-9999: a vector has {whole.dimensions} numbers"):
        gerund.load(tiny_folder, transform="truncate-9999")
    with pytest.raises(ConfigError, match="is fitted to nothing"):
        cut.fitted(SAMPLE)


@pytest.mark.parametrize(
    ("name", "vectors", "message"),
    [
        ("whitening", cloud(12), "needs more than 12 different texts to be fitted on, and the sample has 12"),
        ("whitening-13", cloud(), "a vector has 12 numbers"),
        ("whitening", np.hstack([cloud(), cloud()[:, :2]]), "vary in 12 dimensions only; take whitening-12 or less"),
        ("all-but-the-top", np.ones((5, 4)), "the sample has 1"),
        ("all-but-the-top-12", cloud(), "a vector has 12 numbers"),
        ("standardization-3", cloud(), "unknown transform 'standardization-3'"),
    ],
)
def test_a_sample_that_is_too_small_is_refused(name: str, vectors: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(name, vectors)


@pytest.mark.parametrize("name", ["whitening", "all-but-the-top-2"])
def test_a_text_that_stands_twice_in_the_sample_counts_twice(tiny_folder, name: str) -> None:
    vectors = cloud()
    often = fit(name, np.vstack([vectors, *[vectors[:1]] * 60]))
    weights = np.array([61, *[1] * (len(vectors) - 1)])
    np.testing.assert_allclose(often.mean_D, np.average(vectors, axis=0, weights=weights), atol=1e-5)
    assert not np.allclose(often.mean_D, fit(name, vectors).mean_D, atol=1e-2)
    plain = gerund.load(tiny_folder, dtype="float32")
    texts = [*SAMPLE, *[SAMPLE[0]] * 60]
    short = "all-but-the-top"
    fitted = gerund.load(tiny_folder, dtype="float32", transform=short).fitted(texts)
    expected = fit(short, plain.encode(texts, normalize=False))
    np.testing.assert_allclose(fitted.transform.mean_D, expected.mean_D, atol=1e-5)


@pytest.mark.parametrize("name", ["whitening-20", "all-but-the-top"])
def test_vectors_of_a_fitted_model_are_the_transform_of_its_own(tiny_folder, name: str) -> None:
    plain = gerund.load(tiny_folder, dtype="float32")
    lm = gerund.load(tiny_folder, dtype="float32", transform=name)
    with pytest.raises(ConfigError, match=f"the transform '{name}' was not fitted"):
        lm.encode("the cat")
    fitted = lm.fitted(SAMPLE)
    own = fit(name, plain.encode(SAMPLE, normalize=False))
    expected = own(plain.encode(["the cat", "a dog"], normalize=False))
    np.testing.assert_allclose(fitted.encode(["the cat", "a dog"], normalize=False), expected, atol=1e-4)
    assert fitted.dimensions == fitted.encode("the cat").shape[0] == own.dimensions
    assert len({plain.fingerprint(), fitted.fingerprint(), lm.fitted(SAMPLE[:150]).fingerprint()}) == 3
    with pytest.raises(ConfigError, match="has no spec; save it first"):
        _ = fitted.spec


@pytest.mark.slow
def test_it_is_saved_with_the_model_and_not_used_for_other_vectors(tiny_folder, tmp_path) -> None:
    fitted = gerund.load(tiny_folder, dtype="float32", transform="whitening-20").fitted(SAMPLE)
    fitted.save(tmp_path / "saved")
    again = gerund.load(tmp_path / "saved", dtype="float32")
    np.testing.assert_array_equal(again.encode(WORDS), fitted.encode(WORDS))
    assert again.fingerprint() == fitted.fingerprint()
    with pytest.raises(ConfigError, match="was not fitted for this encoder config"):
        gerund.load(tmp_path / "saved", pooling="last").encode("the cat")
    assert gerund.load(tmp_path / "saved", transform="none").encode("the cat").shape == (32,)
    with pytest.raises(ConfigError, match="takes no transform"):
        again.export(tmp_path / "out", "merged")
    (tmp_path / "saved" / WEIGHTS_FILE).write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read"):
        gerund.load(tmp_path / "saved")


def test_a_model_with_an_encoder_of_its_own_has_it_too(tmp_path) -> None:
    folder = save_tiny_t5(tmp_path / "t5")
    plain = gerund.load(folder, dtype="float32")
    fitted = gerund.load(folder, dtype="float32", transform="whitening-6").fitted(SAMPLE)
    expected = fit("whitening-6", plain.encode(SAMPLE, normalize=False))(plain.encode(WORDS, normalize=False))
    np.testing.assert_allclose(fitted.encode(WORDS, normalize=False), expected, atol=1e-4)
    np.testing.assert_array_equal(fitted.for_representation().encode(WORDS), fitted.encode(WORDS))
    with pytest.raises(ConfigError, match="prepend and reroute are for decoder-only models"):
        gerund.load(folder, layers="1")
    with pytest.raises(ConfigError, match="prepend and reroute are for decoder-only models"):
        plain.with_encoder(replace(plain.encoder, layers="1")).encode("the cat")


@pytest.mark.slow
def test_a_file_of_texts_fits_it_at_load(tiny_folder, tmp_path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(SAMPLE) + "\n\n", encoding="utf-8")
    lm = gerund.load(tiny_folder, dtype="float32", transform="all-but-the-top-2", sample=path)
    other = gerund.load(tiny_folder, dtype="float32", transform="all-but-the-top-2").fitted(SAMPLE)
    np.testing.assert_array_equal(lm.encode(WORDS), other.encode(WORDS))
    assert gerund.load(lm.spec).fingerprint() == lm.fingerprint()
    with pytest.raises(ConfigError, match="has no spec"):
        _ = lm.fitted(SAMPLE[:150]).spec
    with pytest.raises(ConfigError, match="a sample is for a transform"):
        gerund.load(tiny_folder, sample=path)
    with pytest.raises(DataError, match=r"absent.txt: cannot be read"):
        gerund.load(tiny_folder, transform="whitening", sample=tmp_path / "absent.txt")
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(DataError, match="holds no text"):
        gerund.load(tiny_folder, transform="whitening", sample=path)


def test_cosines_of_pairs():
    left, right = np.random.default_rng(0).standard_normal((2, 5, 3))
    right[4] = 0
    expected = [a @ b / np.linalg.norm(a) / (np.linalg.norm(b) or 1) for a, b in zip(left, right, strict=True)]
    np.testing.assert_allclose(compared_in_pairs(left, right, "cosine"), expected)
