"""No text is encoded twice, and nothing half-written is ever read."""

import numpy as np
import pytest

from gerund.evaluation.systems.base import EmbeddingCache, key_of_text


class Encoder:
    """Turns a text into (length, first letter) and counts what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, texts, kept):
        self.asked += texts
        return np.array([[len(text), ord(text[0]) if text else 0] for text in texts], dtype=np.float32)


@pytest.fixture(params=["memory", "disk"])
def cache(request, tmp_path):
    return EmbeddingCache(tmp_path / "kept" if request.param == "disk" else None)


def test_each_text_is_encoded_once(cache):
    encode = Encoder()
    first = cache.vectors("f", "", ["bb", "a", "bb", ""], encode)
    np.testing.assert_array_equal(first, [[2, 98], [1, 97], [2, 98], [0, 0]])
    second = cache.vectors("f", "", ["ccc", "a"], encode)
    np.testing.assert_array_equal(second, [[3, 99], [1, 97]])
    assert encode.asked == ["bb", "a", "", "ccc"]


def test_encoders_and_prompts_are_kept_apart(cache):
    encode = Encoder()
    for fingerprint, prompt in [("f", ""), ("g", ""), ("f", "query: ")]:
        cache.vectors(fingerprint, prompt, ["a"], encode)
    assert encode.asked == ["a", "a", "a"]


def test_put_keeps_what_is_there(cache):
    cache.put("f", "", ["a", "b"], np.array([[1.0], [2.0]]))
    cache.put("f", "", ["b", "c", "c"], np.array([[9.0], [3.0], [3.0]]))
    rows = cache.vectors("f", "", ["c", "b", "a"], Encoder())
    assert rows.tolist() == [[3.0], [2.0], [1.0]]
    assert key_of_text("a") in cache.store("f", "")
    assert key_of_text("d") not in cache.store("f", "")


def test_no_text_no_vector(cache):
    assert cache.vectors("f", "", [], Encoder()).shape[0] == 0


def test_vectors_outlive_the_process(tmp_path):
    EmbeddingCache(tmp_path).vectors("f", "p", ["a", "b"], Encoder())
    encode = Encoder()
    again = EmbeddingCache(tmp_path).vectors("f", "p", ["b", "c"], encode)
    assert again.tolist() == [[1, 98], [1, 99]]
    assert encode.asked == ["c"]


@pytest.mark.parametrize(
    ("name", "bytes_left"), [("vectors", 8), ("vectors", 11), ("keys", 16), ("keys", 25), ("keys", 0)]
)
def test_a_killed_writer_leaves_nothing_wrong(tmp_path, name, bytes_left):
    """Whatever of two rows (8 bytes and a key of 16 each) is on the disk, only whole ones are read."""
    EmbeddingCache(tmp_path).vectors("f", "", ["a", "bb"], Encoder())
    [store] = tmp_path.iterdir()
    file = store / name
    file.write_bytes(file.read_bytes()[:bytes_left])
    encode = Encoder()
    again = EmbeddingCache(tmp_path).vectors("f", "", ["bb", "a", "ccc"], encode)
    assert again.tolist() == [[2, 98], [1, 97], [3, 99]]
    assert "bb" in encode.asked
    assert EmbeddingCache(tmp_path).vectors("f", "", ["ccc", "bb"], Encoder()).tolist() == [[3, 99], [2, 98]]
