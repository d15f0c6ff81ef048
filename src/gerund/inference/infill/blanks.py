"""A text with blanks: its pieces, their tokens, and how spans are put between them.

Knows: texts, tokenizers, white space. Does not know: models, how spans are written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from gerund.checks import check_texts
from gerund.errors import ConfigError, TextError
from gerund.inference.text_ids import ids_inside
from gerund.inference.tokens import check_unicode

# A space before a gap is part of the gap's first token in most tokenizers. A line break is not, and stays.
_SPACES = " \t"
# How byte-level and SentencePiece vocabularies write a space.
_SPACE_MARKS = ("\u0120", "\u2581")


@dataclass(frozen=True)
class BlankedText:
    """The n + 1 pieces around the n blanks of a text, of which only the outer two may be empty.

    Spaces before a blank are taken away: the model writes them. White space behind a blank belongs to the piece
    there.

    >>> BlankedText.of("He ran [blank] home.", "[blank]").pieces
    ('He ran', ' home.')
    """

    pieces: tuple[str, ...]
    spaced: tuple[bool, ...] = ()
    """For each gap, whether spaces before it were taken away."""

    @classmethod
    def of(cls, text: Any, blank: Any) -> "BlankedText":
        """Split a text at its blanks.

        Raises:
            TextError: it is no string, has no blank or nothing else, or two blanks stand next to each other.
            ConfigError: the blank is no text.
        """
        if not isinstance(text, str):
            raise TextError(f"the text to fill is a string, not {type(text).__name__}")
        if not isinstance(blank, str) or not blank.strip():
            raise ConfigError(f"a blank is written as some text, not {blank!r}")
        check_texts([text])
        check_unicode("the text", text)
        pieces = text.split(blank)
        if len(pieces) == 1:
            raise TextError(f"the text has no {blank} to fill" if text.strip() else "the text is empty")
        if not any(piece.strip() for piece in pieces):
            raise TextError(f"the text is nothing but {blank}; give some text around it, or use generate")
        for number, piece in enumerate(pieces[1:-1], start=1):
            if not piece.strip():
                raise TextError(f"blanks {number} and {number + 1} have nothing between them; make them one")
        bare = [piece.rstrip(_SPACES) for piece in pieces[:-1]]
        spaced = tuple(own != piece for own, piece in zip(bare, pieces, strict=False))
        return cls((*bare, pieces[-1]), spaced)

    @property
    def gaps(self) -> int:
        """How many gaps there are."""
        return len(self.pieces) - 1

    def word_before(self, gap: int) -> bool:
        """Tell whether a word and a space stand before a gap, so that its filling must not grow together with it."""
        return self.spaced[gap] and self.pieces[gap][-1:].isalnum()

    def trimmed(self, gap: int, span: str) -> str:
        """Return a span without spaces at its end where the piece behind the gap begins with white space."""
        return span.rstrip() if self.pieces[gap + 1][:1].isspace() else span

    def joined(self, spans: Sequence[str]) -> str:
        """Return the whole text with its gaps filled."""
        return self.pieces[0] + "".join(span + piece for span, piece in zip(spans, self.pieces[1:], strict=True))

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the tokens of every piece but the first, as they are inside a text.

        White space that ends the whole text is left out: it says nothing about a gap.
        """
        *inner, last = self.pieces[1:]
        return [ids_inside(tokenizer, piece) for piece in [*inner, last.rstrip()]]


def continuing_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that would go on a word before them: they begin with a letter or digit and no space.

    A tokenizer none of whose tokens begins with a space writes spaces in another way, and has none of these.
    """
    tokens = tokenizer.get_vocab()
    if not any(token.startswith(_SPACE_MARKS) for token in tokens):
        return []
    # Of a byte-level token only its decoder knows the letters; a part of a letter stays one.
    decoder = tokenizer.backend_tokenizer.decoder
    bare = ((token, index) for token, index in tokens.items() if not token.startswith(_SPACE_MARKS))
    return [index for token, index in bare if (decoder.decode([token]) if decoder else token)[:1].isalnum()]
