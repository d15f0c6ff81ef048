"""Sentences are found whatever white space a text has, and whatever becomes of the splitter."""

import random

import pytest
import sentencex

from gerund.data.passages import sentence_bounds
from gerund.papers.generated_texts import sentences_of
from gerund.text_analysis import segments


@pytest.mark.parametrize("space", ["\xa0", "\u2003", "\u3000", "\u2028", "\x85", "\u202f", " \xa0", "\xa0\xa0"])
@pytest.mark.parametrize("language", ["en", "de", "zh"])
def test_white_space_of_several_bytes_before_a_full_stop(space: str, language: str) -> None:
    text = f"The plan W{space}.D was his. It failed."
    assert segments(text, language)[-1] == "It failed."
    assert "".join(segments(text, language)).split() == text.split()
    (first, last), *_ = sentence_bounds(text, language)
    assert text[first:last].startswith("The plan")
    assert sentences_of(text)[-1] == "It failed."


def test_any_text_is_cut_without_loss() -> None:
    generator = random.Random(0)
    for _ in range(3000):
        text = "".join(generator.choices("Wab \xa0\u3000é.D,!?\n\"'(1)。", k=generator.randint(0, 30)))
        assert "".join("".join(segments(text)).split()) == "".join(text.split())


def test_other_texts_are_cut_as_ever() -> None:
    for text in ("Mr. Smith left.  He left. He", "a\xa0.b C. He", "One.\n\nTwo!", ""):
        assert segments(text) == list(sentencex.segment("en", text))


def test_where_the_splitter_panics_lines_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As PyO3's: no Exception."""

    def panics(language: str, text: str) -> list[str]:
        del language, text
        raise PanicException("byte index 1 is not a char boundary")

    monkeypatch.setattr(sentencex, "segment", panics)
    assert segments("One. Two.\nThree.") == ["One. Two.\n", "Three."]
    assert sentence_bounds("One. Two.\nThree.") == [(0, 9), (10, 16)]
