"""Put prompt and special tokens around a training text, exactly as the encoder will read it.

A text is tokenised once, long before its prompt is known, and may be cut out of a longer one. The tokens at the
border depend on both: with many tokenizers "Query: " and "the" make "Query", ":", " the", which are not the tokens of
the one followed by those of the other. A model trained on the latter would meet the former only when it is used.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from gerund.errors import ConfigError, TextError
from gerund.inference.text_ids import prompted, text_ids
from gerund.inference.tokens import InputFormat, Tokens, tokenize

# How many tokens of a text are looked at together with the prompt. Pre-tokenizers keep the effect within a word; where
# it goes on beyond half of this, the whole text is looked at.
_BORDER = 32


class InputFormatter:
    """Formats training texts for the model.

    Attributes:
        before: The special tokens before every text.
        overhead: How many tokens prompt and special tokens take.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt: str = "",
        append_eos: bool = False,
        normalizes: bool = False,
    ) -> None:
        self.tokenizer, self.prompt, self.append_eos = tokenizer, prompt, append_eos
        self._format = InputFormat(prompt=prompt, append_eos=append_eos, normalizes=normalizes)
        # This is also where impossible settings are refused.
        [letter] = tokenize(tokenizer, ["a"], self._format)
        assert letter is not None
        self.before = letter.ids[: letter.specials_before]
        encoding = tokenizer("a", return_special_tokens_mask=True, verbose=False)
        added = encoding["special_tokens_mask"]
        after = next((place for place, flag in enumerate(reversed(added)) if not flag), 0)
        self._after = encoding["input_ids"][len(added) - after :]
        alone = text_ids(tokenizer, prompted(tokenizer, prompt))
        self._prompt = alone[len(self.before) : len(alone) - len(self._after)]
        self._ends_itself = self._after[-1:] == [tokenizer.eos_token_id]
        self.overhead = len(alone) + int(append_eos and not self._ends_itself)

    def format(self, ids: Sequence[int] | np.ndarray) -> Tokens:
        """Return a text, given as tokens without any special ones, as the model reads it.

        Where the tokenizer gives these very tokens for the text that they spell, the result is what
        :func:`gerund.inference.tokens.tokenize` makes of that text, cut to ``overhead + len(ids)`` tokens.

        The result has at most ``overhead + len(ids)`` tokens. One token may hold the end of the prompt and the
        beginning of the text: :meth:`places` says where the text is.
        """
        text = [int(token) for token in ids]
        if not text:
            raise TextError("a text without tokens cannot be formatted")
        start, text_from = self._join(text) if self.prompt else (None, 0)
        if start is None:
            start, text_from = [*self.before, *self._prompt, *text], len(self.before) + len(self._prompt)
        start = start[: len(self.before) + len(self._prompt) + len(text)]
        whole = start + self._after
        if self.append_eos and whole[-1] != self.tokenizer.eos_token_id:
            whole.append(self.tokenizer.eos_token_id)
        return Tokens(whole, text_from, len(self.before))

    def format_text(self, text: str, length: int | None) -> Tokens:
        """Return a text as the encoder reads it.

        It has at most ``length`` tokens, prompt and special tokens included; the end of a longer text is cut off
        without a warning.
        """
        if length is not None and length <= self.overhead:
            raise ConfigError(
                f"length {length} leaves no room for text: prompt and special tokens take {self.overhead}"
            )
        [tokens] = tokenize(self.tokenizer, [text], self._format)
        assert tokens is not None  # an empty text is an error
        if length is None or len(tokens) <= length:
            return tokens
        limited = replace(self._format, max_length=length)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\d+ of \d+ texts were longer than")
            [tokens] = tokenize(self.tokenizer, [text], limited)
        assert tokens is not None
        return tokens

    def places(self, formatted: Tokens) -> range:
        """Return where in a formatted text the text itself stands, without prompt and special tokens.

        A token that holds the end of the prompt and the beginning of the text belongs to the text. An EOS that the
        text ended with by itself is not counted where ``append_eos`` would have put one.
        """
        appended = self.append_eos and not self._ends_itself
        return range(formatted.text_from, len(formatted) - len(self._after) - int(appended))

    def _join(self, text: list[int]) -> tuple[list[int] | None, int]:
        """Return special tokens, prompt and text as tokenised together, and where the text begins; None if it cannot.

        Only the first tokens are read together with the prompt; what stays the same with and without it at their end
        shows how far its effect goes, and everything behind is taken over.
        """
        for size in (_BORDER, len(text)):
            piece = self.tokenizer.decode(text[:size], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if not piece.strip():
                continue
            # Made of token ids: a mask token among them is one.
            [joint] = tokenize(self.tokenizer, [piece], InputFormat(prompt=self.prompt, parses_control=True))
            [alone] = tokenize(self.tokenizer, [piece], InputFormat(parses_control=True))
            assert joint is not None
            assert alone is not None
            together = joint.ids[: len(joint) - len(self._after)]
            single = alone.ids[alone.specials_before : len(alone) - len(self._after)]
            same = _common_end(together, single)
            if same < size // 2 and size < len(text):
                continue
            changed = len(single) - same
            if single[:changed] != text[:changed]:
                break  # the tokens at the border are not what the tokenizer makes of their text
            return together[: len(together) - same] + text[changed:], joint.text_from
        return None, 0


def _common_end(first: list[int], second: list[int]) -> int:
    """Return how many tokens at the end are the same.

    >>> _common_end([5, 1, 2], [1, 2])
    2
    """
    pairs = zip(reversed(first), reversed(second), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
