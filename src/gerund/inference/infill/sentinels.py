"""Infilling with an encoder-decoder trained on span corruption, using sentinel tokens (T5; GUR).

The encoder reads the text with a sentinel in each blank; the decoder generates each sentinel followed by its text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.errors import ConfigError, ModelError, TextError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.detokenizing import continuation_text
from gerund.inference.generate.generation import generate
from gerund.inference.text_ids import text_ids
from gerund.inference.tokens import check_unicode
from gerund.settings.sampling import Sampling
from gerund.types import Infill, Rendered

# Enough tokens before a gap to decode what fills it as it would be read there.
_TAIL = 6


def sentinel_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the sentinels' token ids, first to last; empty where a tokenizer has none.

    T5 calls them ``<extra_id_0>``, ``<extra_id_1>``, ...
    """
    known = tokenizer.get_vocab()
    found: list[int] = []
    while (token := known.get(f"<extra_id_{len(found)}>")) is not None:
        found.append(token)
    return found


@dataclass(frozen=True)
class Gapped:
    """A text with gaps.

    Attributes:
        pieces: what stands around the gaps, one more than there are gaps; spaces before a gap are left out.
    """

    pieces: list[str]

    @classmethod
    def of(cls, text: str, blank: str) -> "Gapped":
        """Cut a text at its gaps."""
        check_unicode("the text", text)
        if not blank:
            raise ConfigError("blank is empty; it marks the gaps, such as [blank]")
        pieces = text.split(blank)
        if len(pieces) == 1:
            raise TextError(f"the text has no gap; {blank} marks one")
        if not "".join(pieces).strip():
            raise TextError("the text is nothing but gaps")
        if any(not piece.strip() for piece in pieces[1:-1]):
            raise TextError("two gaps stand next to each other; make one of them")
        return cls([*(piece.rstrip(" ") for piece in pieces[:-1]), pieces[-1]])

    def with_sentinels(self, tokenizer: PreTrainedTokenizerBase) -> Rendered:
        """Return the text with a sentinel in each gap; a sentinel in the text itself is text."""
        ids = sentinel_ids(tokenizer)
        if len(ids) < len(self.pieces) - 1:
            told = "no sentinels (<extra_id_0>, ...)" if not ids else f"{len(ids)} sentinels"
            raise ModelError(f"this model's tokenizer has {told}, and the text {len(self.pieces) - 1} gaps")
        marks = tokenizer.convert_ids_to_tokens(ids[: len(self.pieces) - 1])
        text, literal = self.pieces[0], [(0, len(self.pieces[0]))]
        for mark, piece in zip(marks, self.pieces[1:], strict=True):
            text += mark + piece
            literal.append((len(text) - len(piece), len(text)))
        return Rendered(text, literal=[one for one in literal if one[0] < one[1]], with_specials=True)


def spans_of(ids: Sequence[int], sentinels: Sequence[int], gaps: int) -> list[range]:
    """Return where in what a decoder wrote the tokens of each gap stand; an empty range where it wrote none.

    The first time that a sentinel stands there counts, and only behind the ones before it.

    >>> spans_of([90, 5, 6, 91, 7, 92], [90, 91, 92], 2)
    [range(1, 3), range(4, 5)]
    """
    every = set(sentinels)
    marks = [(place, token) for place, token in enumerate(ids) if token in every]
    spans: list[range] = []
    after = -1
    for wanted in sentinels[:gaps]:
        begin = next((place for place, token in marks if token == wanted and place > after), None)
        if begin is None:
            spans.append(range(0))
            continue
        end = next((place for place, _ in marks if place > begin), len(ids))
        spans.append(range(begin + 1, end))
        after = begin
    return spans


def fill(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    blank: str,
    max_tokens: int,
    sampling: Sampling,
    samples: int = 1,
) -> list[Infill]:
    """Fill the gaps of a text so many times, the most probable filling first."""
    if max_tokens < 1 or samples < 1:
        raise ConfigError(f"max_tokens={max_tokens} and samples={samples}: both are at least 1")
    if samples > 1 and sampling.is_greedy:
        raise ConfigError(f"{samples} greedy fillings are all the same; set a temperature above 0")
    gapped = Gapped.of(text, blank)
    gaps = len(gapped.pieces) - 1
    asked = gapped.with_sentinels(tokenizer)
    # Of every gap: its sentinel, its tokens; and a sentinel behind the last one.
    most = gaps * (max_tokens + 1) + 1
    written = generate(model, tokenizer, [asked], GenerationConfig(most, sampling, n=samples))
    found = [_filled(model, tokenizer, gapped, asked, one.token_ids, max_tokens) for one in written]
    return sorted(found, key=lambda one: -sum(one.scores) / len(one.scores))


def _filled(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gapped: Gapped,
    asked: str,
    ids: list[int],
    max_tokens: int,
) -> Infill:
    gaps = len(gapped.pieces) - 1
    places = [place[:max_tokens] for place in spans_of(ids, sentinel_ids(tokenizer), gaps)]
    logprobs = _logprobs(model, tokenizer, asked, ids) if ids else torch.zeros(0)
    whole, spans, tokens, scores = gapped.pieces[0], [], [], []
    for place, piece in zip(places, gapped.pieces[1:], strict=True):
        own = ids[place.start : place.stop]
        before = text_ids(tokenizer, whole, specials=False)[-_TAIL:]
        span = continuation_text(tokenizer, before, own) if own else ""
        spans.append(span)
        tokens.append(own)
        scores.append(float(logprobs[place.start : place.stop].mean()) if own else 0.0)
        whole += span + piece
    return Infill(whole, spans, tokens, scores, [len(own) for own in tokens])


@torch.no_grad()
def _logprobs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: str, ids: list[int]) -> Tensor:
    """Return the log-probability of each token that the decoder wrote ``(n,)``, in nats."""
    device = model.get_input_embeddings().weight.device
    prompt_1T = torch.tensor([text_ids(tokenizer, asked)], device=device)
    written_1N = torch.tensor([ids], device=device)
    logits_NV = model(input_ids=prompt_1T, labels=written_1N).logits[0].float()
    return torch.log_softmax(logits_NV, -1).gather(1, written_1N[0][:, None])[:, 0].cpu()
