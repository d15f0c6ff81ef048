"""Infilling with an encoder-decoder trained on span corruption, using sentinel tokens (T5; GUR).

The encoder reads the text with a sentinel in each blank; the decoder generates each sentinel followed by its text.
"""

from collections.abc import Sequence
from statistics import fmean

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.errors import ConfigError, ModelError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.detokenizing import TAIL, continuation_text
from gerund.inference.generate.generation import generate
from gerund.inference.infill.infilling import BlankedText
from gerund.inference.text_ids import text_ids
from gerund.settings.sampling import Sampling
from gerund.types import Generation, Infill, Rendered


def sentinel_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of T5's sentinels ``<extra_id_0>``, ``<extra_id_1>``, ...; empty where a tokenizer has none."""
    vocabulary = tokenizer.get_vocab()
    ids: list[int] = []
    while (token := vocabulary.get(f"<extra_id_{len(ids)}>")) is not None:
        ids.append(token)
    return ids


def with_sentinels(text: BlankedText, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Return a text with a sentinel in each blank; sentinels in the text itself are plain text."""
    ids = sentinel_ids(tokenizer)
    if len(ids) < text.gaps:
        known = f"{len(ids)} sentinels" if ids else "no sentinels (<extra_id_0>, ...)"
        raise ModelError(f"This model's tokenizer has {known}, and the text has {text.gaps} blanks.")
    marks = tokenizer.convert_ids_to_tokens(ids[: text.gaps])
    rendered, literal = text.pieces[0], [(0, len(text.pieces[0]))]
    for mark, piece in zip(marks, text.pieces[1:], strict=True):
        rendered += mark + piece
        literal.append((len(rendered) - len(piece), len(rendered)))
    return Rendered(rendered, literal=[(start, end) for start, end in literal if start < end], with_specials=True)


def spans_of(ids: Sequence[int], sentinels: Sequence[int], blanks: int) -> list[range]:
    """Return where the tokens of each blank are in a decoder's output; an empty range where there are none.

    The first occurrence of a sentinel counts, and only after the sentinels before it.

    >>> spans_of([90, 5, 6, 91, 7, 92], [90, 91, 92], 2)
    [range(1, 3), range(4, 5)]
    """
    every = set(sentinels)
    marks = [(position, token) for position, token in enumerate(ids) if token in every]
    spans: list[range] = []
    last = -1
    for sentinel in sentinels[:blanks]:
        start = next((position for position, token in marks if token == sentinel and position > last), None)
        if start is None:
            spans.append(range(0))
            continue
        end = next((position for position, _ in marks if position > start), len(ids))
        spans.append(range(start + 1, end))
        last = start
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
    """Return ``samples`` fillings of a text by an encoder-decoder model, the most likely first.

    A blank that the model skipped is filled with the empty string and a score of 0.
    """
    if max_tokens < 1 or samples < 1:
        raise ConfigError(f"`max_tokens` and `samples` must be at least 1, got {max_tokens} and {samples}.")
    if samples > 1 and sampling.is_greedy:
        raise ConfigError(f"{samples} greedy samples are all the same. Set a temperature above 0.")
    blanked = BlankedText.of(text, blank, spaces=" ")
    prompt = with_sentinels(blanked, tokenizer)
    # Per blank its sentinel and its tokens; and a sentinel after the last one.
    most = blanked.gaps * (max_tokens + 1) + 1
    results = generate(model, tokenizer, [prompt], GenerationConfig(most, sampling, n=samples, logprobs=0))
    filled = [_filled(tokenizer, blanked, result, max_tokens) for result in results]
    return sorted(filled, key=lambda infill: -sum(infill.scores) / len(infill.scores))


def _filled(tokenizer: PreTrainedTokenizerBase, text: BlankedText, output: Generation, max_tokens: int) -> Infill:
    ids, logprobs = output.token_ids, [token.logprob for token in output.logprobs or []]
    spans = [span[:max_tokens] for span in spans_of(ids, sentinel_ids(tokenizer), text.gaps)]
    full_text, texts, tokens, scores = text.pieces[0], [], [], []
    for span, piece in zip(spans, text.pieces[1:], strict=True):
        span_ids = ids[span.start : span.stop]
        before = text_ids(tokenizer, full_text, specials=False)[-TAIL:]
        texts.append(continuation_text(tokenizer, before, span_ids) if span_ids else "")
        tokens.append(span_ids)
        scores.append(fmean(logprobs[span.start : span.stop]) if span_ids else 0.0)
        full_text += texts[-1] + piece
    return Infill(full_text, texts, tokens, scores, [len(span_ids) for span_ids in tokens])
