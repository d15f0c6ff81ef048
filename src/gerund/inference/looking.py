"""Attention of a reader on some texts, before and after its conversion.

Knows: readers, token ids, attention maps. Does not know: pictures, files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gerund.errors import TextError, UnsupportedModelError
from gerund.inference.encoding import Reader
from gerund.inference.maps import AttentionMap, causal_plan, even_share, mean_maps
from gerund.inference.tokens import Reading, tokenize

# Maps grow with the square of the length.
LONGEST = 512


@dataclass(frozen=True)
class Look:
    """Mean attention maps of some texts.

    Attributes:
        ids: the texts' token ids, as they were read.
        before: one map a layer of the untouched model.
        after: the same under the reader's plan, further runs of a layer included.
        cut: how many texts were cut at the longest length.
    """

    ids: list[list[int]]
    before: list[AttentionMap]
    after: list[AttentionMap]
    cut: int

    @property
    def even(self) -> float:
        """The share of the first token if every causal token looked at all that it sees evenly."""
        return even_share([len(item) for item in self.ids])


def look(reader: Reader, texts: Sequence[str], longest: int = LONGEST) -> Look:
    """Return where each layer looks on average, without the prompt.

    Where no plan reaches the model it was loaded as causal, and both sides are the untouched model.

    Args:
        reader: a model under a plan.
        texts: one or more, none of them empty.
        longest: tokens at which a text is cut; the model's own limit where that is shorter.

    Raises:
        TextError: a text is a single token, which has nothing to look at.
    """
    reading = Reading(append_eos=reader.config.append_eos, repeat_text=reader.plan.repeats_text)
    longest = min(longest, reader.max_length or longest)
    found = [item.ids for item in tokenize(reader.tokenizer, texts, reading) if item is not None]
    short = next((text for text, ids in zip(texts, found, strict=True) if len(ids) < 2), None)
    if short is not None:
        raise TextError(f"the text {short!r} is a single token, which has nothing to look at")
    ids = [item[:longest] for item in found]
    before, after = _maps(reader, ids)
    return Look(ids, before, after, sum(len(item) > longest for item in found))


def _maps(reader: Reader, ids: list[list[int]]) -> tuple[list[AttentionMap], list[AttentionMap]]:
    try:
        before = mean_maps(reader.model, ids, causal_plan(len(reader.plan.views)))
    except UnsupportedModelError:
        before = mean_maps(reader.model, ids, None)
        return before, before
    return before, mean_maps(reader.model, ids, reader.plan, adapter=reader.adapter)
