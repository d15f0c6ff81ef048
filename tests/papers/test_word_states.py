import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gerund
from gerund.errors import ResourceError
from gerund.evaluation.systems.language_model import LanguageModelSystem, language_model_system
from gerund.papers import token_labels as module
from gerund.papers.token_labels import word_states

SENTENCES = [["EU", "rejects", "German", "call"], ["Peter", "Blackburn"], ["a"], ["the", "lamb", "."], ["in", "it"]]


@pytest.fixture(scope="module")
def system(tiny_folder: Path) -> LanguageModelSystem:
    return language_model_system("tiny", gerund.load(tiny_folder, attention="causal", dtype="float32"))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("most_bytes", [0, 1 << 30])
def test_words_of_all_sentences_in_their_order(
    system: LanguageModelSystem, shift: bool, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SENTENCES_AT_ONCE", 2)
    with word_states(system, SENTENCES, shift=shift, show=False, most_bytes=most_bytes) as vectors:
        assert isinstance(vectors, np.memmap) == (most_bytes == 0)
        assert vectors.dtype == np.float32
        alone = [system.encode_words([words], shift=shift)[0] for words in SENTENCES]
        np.testing.assert_allclose(vectors, np.concatenate(alone), atol=1e-5)
        other = np.concatenate(system.encode_words(SENTENCES, shift=not shift))
        assert not np.allclose(vectors, other, atol=1e-3)


def test_the_prompt_is_read(system: LanguageModelSystem) -> None:
    with word_states(system, SENTENCES, prompt="tag: ") as vectors:
        expected = np.concatenate(system.encode_words(SENTENCES, prompt="tag: "))
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        assert not np.allclose(vectors, np.concatenate(system.encode_words(SENTENCES)), atol=1e-3)


def test_the_file_is_gone_afterwards(
    system: LanguageModelSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with word_states(system, SENTENCES, most_bytes=0) as vectors:
        [path] = tmp_path.glob("*/states")
        assert path.stat().st_size == vectors.nbytes == 4 * 12 * system.lm.dimensions
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(system: LanguageModelSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opener = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *rest, **more: Full() if path.name == "states" else opener(path, *rest, **more)
    )
    message = rf"the words' vectors need 1 GB in {tmp_path}: No space left on device"
    with pytest.raises(ResourceError, match=message), word_states(system, SENTENCES, most_bytes=0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_no_word_is_encoded_twice(system: LanguageModelSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    encode = system.encode_words

    def remember(sentences: Any, **more: Any) -> list[np.ndarray]:
        asked.extend(sentences)
        return encode(sentences, **more)

    monkeypatch.setattr(system, "encode_words", remember)
    with word_states(system, SENTENCES) as vectors:
        assert vectors.sum() == vectors.sum()
    assert asked == SENTENCES
