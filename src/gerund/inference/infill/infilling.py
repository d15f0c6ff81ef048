"""Infilling: choose the length and tokens of each blank, from the text on both sides (MAGNET, 3.1, 3.2.3 and 4.3).

A model cannot know beforehand how long a span is, and where the right side stands depends on it. So a blank is filled
once per candidate length; the best span is the one after which the text continues most naturally.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median_low
from typing import Annotated, Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.interface import attach
from gerund.checks import check_texts, is_listing, one_of, whole_number
from gerund.errors import ConfigError, TextError, unknown_name
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.generate.detokenizing import continuation_text
from gerund.inference.generate.prompts import prompt_ids
from gerund.inference.infill import BLANK
from gerund.inference.infill.span_search import Context, Path, beamed, ended, sampled, write
from gerund.inference.likelihood import causal_runtime, sequence_logprobs, verified_hybrid
from gerund.inference.text_ids import end_ids, ids_inside
from gerund.inference.tokens import check_unicode
from gerund.settings.aliases import Alias, names_of
from gerund.settings.encoder import INFILL_METHODS, InfillMethod
from gerund.settings.sampling import GREEDY, MOST_AT_ONCE, Sampling, SamplingKeywords, sampling_from, sampling_or
from gerund.types import Infill

# A space before a gap is part of the gap's first token in most tokenizers. A line break is not, and stays.
_SPACES = " \t"
# How byte-level and SentencePiece vocabularies write a space.
_SPACE_MARKS = ("\u0120", "\u2581")


@dataclass(frozen=True)
class BlankedText:
    """The n + 1 pieces around the n blanks of a text, of which only the outer two may be empty.

    Spaces before a blank are removed: the model generates them. White space after a blank belongs to the next piece.

    >>> BlankedText.of("He ran [blank] home.", "[blank]").pieces
    ('He ran', ' home.')
    """

    pieces: tuple[str, ...]
    spaced: tuple[bool, ...] = ()  # for each blank, whether spaces before it were removed

    @classmethod
    def of(cls, text: Any, blank: Any, spaces: str = _SPACES) -> "BlankedText":
        """Split a text at its blanks."""
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
        bare = [piece.rstrip(spaces) for piece in pieces[:-1]]
        spaced = tuple(plain != piece for plain, piece in zip(bare, pieces, strict=False))
        return cls((*bare, pieces[-1]), spaced)

    @property
    def gaps(self) -> int:
        """Number of blanks."""
        return len(self.pieces) - 1

    def trimmed(self, gap: int, span: str) -> str:
        """Remove spaces from the end of a span where the next piece begins with white space."""
        return span.rstrip() if self.pieces[gap + 1][:1].isspace() else span

    def joined(self, spans: Sequence[str]) -> str:
        """Return the text with its blanks filled."""
        return self.pieces[0] + "".join(span + piece for span, piece in zip(spans, self.pieces[1:], strict=True))

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the tokens of every piece but the first, as they are inside a text, without white space at its end."""
        *inner, last = self.pieces[1:]
        return [ids_inside(tokenizer, piece) for piece in [*inner, last.rstrip()]]


def continuing_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that would continue a word before them: they begin with a letter or digit and no space.

    A tokenizer none of whose tokens begins with a space encodes spaces in another way, and has none of these.
    """
    tokens = tokenizer.get_vocab()
    if not any(token.startswith(_SPACE_MARKS) for token in tokens):
        return []
    # Only the decoder of a byte-level tokenizer knows a token's letters.
    decoder = tokenizer.backend_tokenizer.decoder
    bare = ((token, index) for token, index in tokens.items() if not token.startswith(_SPACE_MARKS))
    return [index for token, index in bare if (decoder.decode([token]) if decoder else token)[:1].isalnum()]


Method = InfillMethod
_SEARCHED = ("infill", "left-only")

# MAGNET, appendix F: long blanks are better filled 32 tokens at a time.
CHUNK = 32
# Tokens after a blank that are scored with its span.
FOLLOWING = 16
_SPREAD = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Search:
    """How to search for spans."""

    lengths: Sequence[int]  # candidates, in tokens, ascending
    sampling: Sampling
    beams: int = 1  # per length
    samples: int = 1  # per length
    sees_right: bool = True  # False reads the left context only, causally
    chunk: int = CHUNK  # tokens that are generated before they become context
    until_end: bool = False  # the model ends a span itself; the longest length only truncates it


def infill(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    blank: str = BLANK,
    max_tokens: int = 32,
    lengths: int | Sequence[int] | None = None,
    sampling: Sampling | None = None,
    beams: int = 1,
    samples: int = 1,
    method: str = "infill",
    shots: int = 0,
    adapter: str | None = None,
) -> Infill:
    """Fill the blanks of a text; see ``LanguageModel.infill``."""
    sampling = sampling_or(sampling)
    text_ = BlankedText.of(text, blank)
    search = planned(method, lengths, max_tokens, sampling, beams=beams, samples=samples, shots=shots)
    if method not in _SEARCHED:
        prompting = {"method": method, "shots": shots, "max_tokens": max_tokens, "sampling": sampling}
        return _prompted(model, tokenizer, text.split(blank), text_, prompting)
    return fill(model, tokenizer, text_, search, strict=lengths is not None, adapter=adapter)


def fill(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: BlankedText,
    search: Search,
    *,
    strict: bool = True,
    adapter: str | None = None,
) -> Infill:
    """Fill the blanks from left to right.

    The context of a blank is everything on its left, earlier spans included, and all pieces on its right. Later blanks
    are still empty; the pieces after them have the positions that they would have if every later blank had the median
    candidate length, as in MAGNET's training, where a span is hidden from other spans and keeps its positions.
    ``strict`` demands that every candidate length fits the model's context, rather than one.
    """
    runtime = causal_runtime(model, tokenizer)
    left = prompt_ids(model, tokenizer, text.pieces[0], "the text before the first span")
    pieces = text.ids(tokenizer)
    if search.sees_right:
        total = len(left) + sum(len(piece) for piece in pieces)
        search = replace(search, lengths=_that_fit(search.lengths, total, text.gaps, runtime.max_length, strict))
        verified_hybrid(runtime)
        runtime = replace(runtime, adapter=adapter)
    else:
        attach(model)
    spans: list[str] = []
    paths: list[Path] = []
    scores: list[float] = []
    for gap in range(text.gaps):
        # After a word and a space a span must not continue that word.
        is_apart = text.spaced[gap] and text.pieces[gap][-1:].isalnum()
        not_first = continuing_ids(tokenizer) if is_apart else []
        # Nothing reads the piece after the last blank here, so it takes no context.
        used = search if search.sees_right else _with_room(search, left, pieces[gap:-1], runtime.max_length, strict)
        path, score = _best(runtime, left, pieces[gap:], used, gap, not_first)
        span = continuation_text(tokenizer, left, list(path.tokens))
        spans.append(text.trimmed(gap, span))
        paths.append(path)
        scores.append(score)
        left = [*left, *path.tokens, *pieces[gap]]
    return Infill(
        text.joined(spans), spans, [list(path.tokens) for path in paths], scores, [path.length for path in paths]
    )


def _with_room(
    search: Search, left: Sequence[int], between: Sequence[Sequence[int]], limit: int | None, strict: bool
) -> Search:
    """Return a left-only search with the lengths that leave room for the later blanks and pieces."""
    total, gaps = len(left) + sum(len(piece) for piece in between), len(between) + 1
    lengths = search.lengths
    if search.until_end and limit is not None:
        lengths = [max(1, min(*lengths, (limit - total) // gaps))]
    return replace(search, lengths=_that_fit(lengths, total, gaps, limit, strict))


def planned(
    method: str,
    lengths: int | Sequence[int] | None,
    max_tokens: int,
    sampling: Sampling,
    *,
    beams: int = 1,
    samples: int = 1,
    shots: int = 0,
) -> Search:
    """Validate the arguments of ``infill``; return how to search."""
    one_of("way to infill", method, INFILL_METHODS)
    if method in _SEARCHED and sampling.has_penalties:
        raise ConfigError("penalties and logit_bias are for texts that are continued, not for infilling")
    candidates = candidate_lengths(lengths, max_tokens)
    search = Search(candidates, sampling, beams, samples, sees_right=method == "infill")
    if method == "left-only" and lengths is None:
        search = replace(search, lengths=candidates[-1:], until_end=True)
    _check_search(search)
    if method in _SEARCHED:
        if type(shots) is not int or shots != 0:
            raise ConfigError(f"shots={shots!r} belongs to the methods that prompt, not to {method!r}")
        return search
    if lengths is not None or beams != 1 or samples != 1:
        raise ConfigError(f"the method {method!r} generates until it stops: it takes no lengths, beams or samples")
    from gerund.inference.infill.prompting import check_prompting

    check_prompting(method, shots, max_tokens)
    return search


def candidate_lengths(lengths: int | Sequence[int] | None, max_tokens: int) -> list[int]:
    """Return the candidate lengths of a blank, ascending.

    >>> candidate_lengths(None, 10), candidate_lengths([5, 3, 5], 1), candidate_lengths(40, 1)
    ([1, 2, 3, 4, 6, 8, 10], [3, 5], [40])
    """
    max_tokens = _count("max_tokens", max_tokens)
    if lengths is None:
        return [*(length for length in _SPREAD if length < max_tokens), max_tokens]
    if isinstance(lengths, int | np.integer):
        lengths = [whole_number("a length", lengths)]
    given = list(lengths) if is_listing(lengths) else []
    if not given:
        raise ConfigError(f"lengths are one or several whole numbers, not {lengths!r}")
    return sorted({_count("a length", length) for length in given})


def _best(
    runtime: EncoderRuntime,
    left: Sequence[int],
    pieces: Sequence[Sequence[int]],
    search: Search,
    gap: int,
    not_first: Sequence[int],
) -> tuple[Path, float]:
    """Return the best span between ``left`` and ``pieces``, and its score.

    The best span of each length has the highest score; the text after the blank decides between lengths: the tokens of
    a long span are easy to predict one after the other, so a mean that includes them would nearly always choose the
    longest. A left-only search ignores the text after the blank: its spans are compared by their own tokens, and
    lengths by how likely the model is to end its text there.
    """
    room = median_low(search.lengths)
    right = [token for piece in pieces for token in piece] if search.sees_right else []
    offset = _offsets(pieces, room)

    def context(length: int, begun: tuple[int, ...]) -> Context:
        behind = [len(left) + length + at for at in offset] if search.sees_right else []
        return Context([*left, *begun], right, behind)

    banned = banned_ids(runtime.model, runtime.tokenizer)
    ends = end_ids(runtime.model, runtime.tokenizer)
    if search.until_end:
        banned = [token for token in banned if token not in ends]
        not_first = [*not_first, *ends]
    if search.beams > 1:
        choose = beamed(search.beams, banned, not_first=not_first)
    else:
        choose = sampled(search.sampling, banned, gap, not_first=not_first)
    if search.until_end:
        choose = ended(choose, ends)
    paths = [Path(length, sample) for length in search.lengths for sample in range(search.samples)]
    written = write(
        runtime,
        context,
        paths,
        choose,
        sees_right=search.sees_right,
        # Under the causal mask a span is its own left context anyway.
        chunk=search.chunk if search.sees_right else max(search.lengths),
        rows_each=search.beams,
    )
    following = pieces[0][:FOLLOWING]
    if runtime.max_length is not None:  # a left-only search counted only its left context
        following = following[: max(0, runtime.max_length - len(left) - max(len(path.tokens) for path in written))]
    behind = _behind(runtime, left, [path.tokens for path in written], following)
    scores = [
        (path.logprob + after) / max(1, len(path.tokens) + len(following))
        for path, after in zip(written, behind, strict=True)
    ]
    ranks = scores if search.sees_right else [path.mean for path in written]
    # A span that the model ended chose its length itself; else the best span of each length, then the best length.
    best_of: dict[int, int] = {}
    for index, path in enumerate(written):
        length = 0 if search.until_end else path.length
        if length not in best_of or ranks[index] > ranks[best_of[length]]:
            best_of[length] = index
    kept = list(best_of.values())
    if search.sees_right:
        criterion = [(behind if following else scores)[index] for index in kept]
    else:
        criterion = _endings(runtime, left, [written[index].tokens for index in kept], ends)
    best = kept[max(range(len(kept)), key=criterion.__getitem__)]
    return written[best], scores[best]


def _behind(
    runtime: EncoderRuntime, left: Sequence[int], spans: Sequence[Sequence[int]], following: Sequence[int]
) -> list[float]:
    """Return the log-probability of ``following`` after the left context and each span, under the causal model."""
    if not following:
        return [0.0] * len(spans)
    sequences = [([*left, *tokens, *following], len(left) + len(tokens)) for tokens in spans]
    behind = sequence_logprobs(runtime.model, runtime.tokenizer, sequences, show=False)
    return [float(logprobs.sum(dtype="float64")) for logprobs in behind]


def _endings(
    runtime: EncoderRuntime, left: Sequence[int], spans: Sequence[Sequence[int]], ends: Sequence[int]
) -> list[float]:
    """Return the probability that the causal model ends its text after each span; its length without end tokens."""
    if len(spans) == 1 or not ends:
        return [float(len(tokens)) for tokens in spans]
    sequences = [([*left, *tokens, end], len(left) + len(tokens)) for tokens in spans for end in ends]
    scored = sequence_logprobs(runtime.model, runtime.tokenizer, sequences, show=False)
    probabilities = np.exp(np.array([float(logprobs[0]) for logprobs in scored]).reshape(len(spans), len(ends)))
    return [float(value) for value in probabilities.sum(axis=1)]


def _offsets(pieces: Sequence[Sequence[int]], room: int) -> list[int]:
    """Return the positions of the tokens of pieces when every blank between two of them has ``room`` tokens.

    >>> _offsets([[7, 7], [8], [9]], 5)
    [0, 1, 7, 13]
    """
    starts = accumulate((len(piece) + room for piece in pieces), initial=0)
    return [start + place for start, piece in zip(starts, pieces, strict=False) for place in range(len(piece))]


def banned_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that no span may contain: special tokens, end tokens, and unused rows of the vocabulary."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    vocabulary = model.get_output_embeddings().weight.shape[0]
    unused = range(len(tokenizer), vocabulary)
    return sorted({*tokenizer.all_special_ids, *special, *end_ids(model, tokenizer), *unused})


def _that_fit(lengths: Sequence[int], total: int, gaps: int, limit: int | None, strict: bool) -> list[int]:
    """Return the lengths for which the text fits the model's context with every blank that long."""
    fitting = [length for length in lengths if limit is None or total + gaps * length <= limit]
    if not fitting or (strict and len(fitting) < len(lengths)):
        longest = max(lengths) if strict else min(lengths)
        what = f"a span of {longest}" if gaps == 1 else f"{gaps} spans of {longest}"
        room = 0 if limit is None else (limit - total) // gaps
        hint = f"set a length of at most {room}" if room > 0 else "shorten it"
        raise TextError(f"the text has {total} tokens and {what} more, and the model's context ends at {limit}; {hint}")
    return fitting


def _prompted(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pieces: Sequence[str],
    text: BlankedText,
    settings: dict[str, Any],
) -> Infill:
    """Fill by prompting; scored like ``left-only``, by the base model."""
    from gerund.inference.infill import prompting

    filled = prompting.fill(model, tokenizer, pieces, **settings)
    spans: list[str] = []
    tokens: list[list[int]] = []
    scores: list[float] = []
    left = prompt_ids(model, tokenizer, text.pieces[0], "the text before the first span")
    runtime = causal_runtime(model, tokenizer)
    for gap, (answer, following) in enumerate(zip(filled, text.ids(tokenizer), strict=True)):
        # An answer gets the space that preceded the blank.
        span = pieces[gap][len(text.pieces[gap]) :] + answer.strip() if answer.strip() else ""
        spans.append(text.trimmed(gap, span))
        inner_ids = ids_inside(tokenizer, spans[-1])
        scores.append(_causal_score(runtime, left, inner_ids, following[:FOLLOWING]))
        tokens.append(inner_ids)
        left = [*left, *inner_ids, *following]
    return Infill(text.joined(spans), spans, tokens, scores, [len(inner_ids) for inner_ids in tokens])


def _causal_score(runtime: EncoderRuntime, left: Sequence[int], span: Sequence[int], following: Sequence[int]) -> float:
    [logprobs] = sequence_logprobs(
        runtime.model, runtime.tokenizer, [([*left, *span, *following], len(left))], show=False
    )
    return float(logprobs.mean(dtype="float64")) if len(logprobs) else 0.0


def _check_search(search: Search) -> None:
    for name, value in (("beams", search.beams), ("samples", search.samples)):
        if _count(name, value) > MOST_AT_ONCE:
            raise ConfigError(f"{name}={value} is too many; {MOST_AT_ONCE} are the most")
    if search.beams > 1 and not search.sampling.is_greedy:
        raise ConfigError("beams look for the most probable span and sampling takes one by chance: give one of them")
    if search.samples > 1 and search.sampling.is_greedy:
        raise ConfigError(f"samples={search.samples} would all be the same span without a temperature above 0")


def _count(name: str, value: Any) -> int:
    if (count := whole_number(name, value)) < 1:
        raise ConfigError(f"{name} is a whole number of at least 1, not {value!r}")
    return count


def each(fill: Callable[[str], Infill], texts: str | Sequence[str]) -> Any:
    """Fill a text, or a list of texts; an error names the text that it is about."""
    if not is_listing(texts) or isinstance(texts, str):
        return fill(texts)  # type: ignore[arg-type]
    filled = []
    for index, text in enumerate(texts):
        try:
            filled.append(fill(text))
        except TextError as error:
            raise TextError.about("text", index, f"cannot be filled: {error}") from error
    return filled


class InfillKeywords(SamplingKeywords, total=False):
    """The fields of ``Sampling`` in the place of ``sampling``, and ``max_new_tokens`` for ``max_tokens``."""

    max_new_tokens: Annotated[int | None, Alias("max_tokens")]


_OPTIONS = names_of(InfillKeywords)


def infill_sampling(given: Sampling | None, options: InfillKeywords, default: Sampling = GREEDY) -> Sampling:
    """Return how tokens are chosen; see ``sampling_from``."""
    for name in options:
        if name not in _OPTIONS:
            raise unknown_name("setting", name, _OPTIONS)
    return sampling_from(given, options, default)
