"""Generation: the untouched model, with sampling that is repeatable and independent of the batch.

transformers' ``generate`` does the work. Its own sampling reads torch's global random state, which
threads would share; here each row has a random generator of its own (see ``sampling``).

Knows: models, tokenizers, ``Sampling``. Does not know: attention plans: none is ever sent.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from gerund.config import Sampling, whole_number
from gerund.errors import ConfigError, TextError
from gerund.inference.generate.sampling import chosen_tokens, filters_of, request_seeds, sample_seed
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import check_unicode, context_length
from gerund.models.encoder_decoder import is_encoder_decoder
from gerund.types import Generation

# Enough tokens of the prompt to decode what follows them as it would be read there.
_TAIL = 6


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    batch_size: int,
    samples: int = 1,
) -> list[Generation]:
    """Continue each prompt.

    Args:
        model: the language model.
        tokenizer: its tokenizer.
        prompts: any number of texts, of any lengths.
        max_new_tokens: how much to write at most.
        sampling: how tokens are chosen. A continuation depends on its prompt, its seed and the number of the
            sample, and on nothing that is generated beside it.
        batch_size: continuations in one pass.
        samples: how many continuations of each prompt.

    Returns:
        The results in the order of the prompts, ``samples`` of them a prompt.

    Raises:
        TextError: a prompt fills the model's context, or is empty for a model without a beginning token.
        ConfigError: ``max_new_tokens``, ``batch_size`` or ``samples`` is no positive whole number, there are not as
            many seeds as prompts, or several greedy continuations are asked for.
    """
    ids = [prompt_ids(model, tokenizer, prompt, index=index) for index, prompt in enumerate(prompts)]
    max_new_tokens = demand_room(max_new_tokens)
    if whole_number("batch_size", batch_size) < 1:
        raise ConfigError(f"batch_size={batch_size} leaves no room for a prompt")
    _check_samples(samples, sampling)
    seeds = [sample_seed(seed, sample) for seed in request_seeds(sampling, len(ids)) for sample in range(samples)]
    ids = [own for own in ids for _ in range(samples)]
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    results: dict[int, Generation] = {}
    limit = None if is_encoder_decoder(model) else context_length(model.config, tokenizer)
    for rows in _batches(order, [room_after(len(own), max_new_tokens, limit) for own in ids], batch_size):
        sampler = _Sampler(sampling, [seeds[row] for row in rows])
        batch = [ids[row] for row in rows]
        output = _run(model, tokenizer, batch, max_new_tokens, sampler)
        # A decoder with an encoder beside it begins with a token of its own instead of the prompt.
        width = 1 if is_encoder_decoder(model) else max(len(prompt) for prompt in batch)
        for place, row in enumerate(rows):
            before = [] if is_encoder_decoder(model) else ids[row]
            results[row] = _result(model, tokenizer, before, output[place, width:].tolist(), sampler, place)
    return [results[index] for index in range(len(ids))]


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int,
    sampling: Sampling,
) -> Iterator[str]:
    """Continue one prompt and yield the text as it comes; stopping the iteration stops the model.

    Raises:
        TextError: the prompt fills the model's context.
        ConfigError: ``max_new_tokens`` is no positive whole number.
    """
    ids = prompt_ids(model, tokenizer, prompt, index=0)
    max_new_tokens = demand_room(max_new_tokens)
    sampler = _one_sampler(sampling)
    pieces = _Pieces(tokenizer, [] if is_encoder_decoder(model) else ids)
    stop = _Stop()
    failure: list[BaseException] = []

    def work() -> None:
        try:
            _run(model, tokenizer, [ids], max_new_tokens, sampler, streamer=pieces, stop=stop)
        except BaseException as error:
            failure.append(error)
        finally:
            pieces.texts.put(None)

    thread = threading.Thread(target=work, name="gerund-stream", daemon=True)
    thread.start()
    try:
        while (piece := pieces.texts.get()) is not None:
            yield piece
    finally:
        stop.event.set()
        thread.join()
    if failure:
        raise failure[0]


def prompt_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    what: str = "prompt",
    index: int | None = None,
) -> list[int]:
    """Return the token ids that generation continues.

    Args:
        model: the language model.
        tokenizer: its tokenizer.
        prompt: the text to continue: plain, in which control tokens are text, or ``Rendered``.
        what: what to call it in messages.
        index: its number, where there are several.

    Raises:
        TextError: it fills the model's context, or is empty for a model without a beginning token.
    """

    def refused(reason: str) -> TextError:
        return TextError(f"{what} {reason}") if index is None else TextError.about(what, index, reason)

    check_unicode(what, prompt, index)
    limit = context_length(model.config, tokenizer)
    [found] = encode_texts(tokenizer, [prompt], most=limit)
    ids, end = found.ids, tokenizer.eos_token_id
    count = f"{len(ids)}" if found.is_whole else f"at least {len(ids)}"
    if is_encoder_decoder(model):
        if not prompt.strip():
            raise refused("is empty, and the encoder of this model needs a text to read")
        if limit is not None and len(ids) > limit:
            raise refused(f"has {count} tokens and the model reads {limit}")
        return ids
    if len(ids) > 1 and found.after and ids[-1] == end and end != tokenizer.bos_token_id:
        ids = ids[:-1]  # some tokenizers close every text; a prompt is to go on
    if not ids:
        if tokenizer.bos_token_id is None:
            raise refused("is empty and this model has no beginning token to start from")
        ids = [tokenizer.bos_token_id]
    if limit is not None and len(ids) >= limit:
        count = f"{len(ids)}" if found.is_whole else f"at least {len(ids)}"
        raise refused(f"has {count} tokens and the model's context ends at {limit}")
    return ids


def continue_read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    decode: Callable[..., Tensor],
    *,
    max_new_tokens: int,
    sampling: Sampling,
) -> Generation:
    """Continue one prompt that the model has read already; the result is that of ``generate``.

    Args:
        model: the language model.
        tokenizer: its tokenizer.
        ids: the prompt, from ``prompt_ids``.
        decode: a loop that transformers calls in place of its own (``custom_generate``), which would read the
            prompt again.
        max_new_tokens: how much to write at most.
        sampling: how tokens are chosen.

    Raises:
        ConfigError: ``max_new_tokens`` is no positive whole number.
    """
    max_new_tokens = demand_room(max_new_tokens)
    sampler = _one_sampler(sampling)
    output = _run(model, tokenizer, [ids], max_new_tokens, sampler, decode=decode)
    return _result(model, tokenizer, ids, output[0, len(ids) :].tolist(), sampler, 0)


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampler: "_Sampler",
    *,
    streamer: Any = None,
    stop: "_Stop | None" = None,
    decode: Callable[..., Tensor] | None = None,
) -> Tensor:
    width = max(len(ids) for ids in prompts)
    limit = None if is_encoder_decoder(model) else context_length(model.config, tokenizer)
    max_new_tokens = room_after(width, max_new_tokens, limit)
    ends = end_ids(model, tokenizer)
    pad = next(iter([*([tokenizer.pad_token_id] if tokenizer.pad_token_id is not None else []), *ends, 0]))
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    real = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # generation continues at the right: padding goes left
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        real[row, width - len(prompt) :] = 1
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        eos_token_id=ends or None,
        use_cache=None if decode is None else False,  # a loop of one's own brings its own cache
    )
    output: Tensor = model.generate(
        ids.to(model.device),
        attention_mask=real.to(model.device),
        generation_config=settings,
        logits_processor=LogitsProcessorList([sampler]),
        stopping_criteria=StoppingCriteriaList([stop] if stop else []),
        streamer=streamer,
        custom_generate=decode,
    )
    return output


def demand_room(max_new_tokens: int) -> int:
    """Return how much to write at most, as Python's own number.

    Raises:
        ConfigError: it is no positive whole number.
    """
    count = whole_number("max_new_tokens", max_new_tokens)
    if count < 1:
        raise ConfigError(f"max_new_tokens={count} writes nothing")
    return count


def room_after(tokens: int, max_new_tokens: int, limit: int | None) -> int:
    """Return how many tokens can follow so many of a prompt."""
    return max_new_tokens if limit is None else min(max_new_tokens, limit - tokens)


def _batches(order: Sequence[int], rooms: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of rows that end alike: a prompt near the end of the context must not end the others."""
    for _, alike in groupby(order, key=lambda row: rooms[row]):
        rows = list(alike)
        yield from (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a text."""
    own = model.generation_config.eos_token_id
    ends = list(own) if isinstance(own, (list, tuple)) else [own]
    ends.append(tokenizer.eos_token_id)
    return list(dict.fromkeys(end for end in ends if end is not None))


def _result(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    ids: list[int],
    sampler: "_Sampler",
    place: int,
) -> Generation:
    ends = set(end_ids(model, tokenizer))
    cut = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    finished = cut < len(ids)
    scores = [step[place] for step in sampler.logprobs[: cut + int(finished)]]
    mean = sum(scores) / len(scores) if scores else 0.0
    return Generation(continuation_text(tokenizer, prompt, ids[:cut]), ids[:cut], mean, finished)


def continuation_text(tokenizer: PreTrainedTokenizerBase, prompt: list[int], ids: list[int]) -> str:
    """Decode ``ids`` as they read after the prompt: alone, many tokenizers would drop their first space."""
    tail = prompt[-_TAIL:]
    before: str = tokenizer.decode(tail, skip_special_tokens=True)
    together: str = tokenizer.decode(tail + ids, skip_special_tokens=True)
    return together[len(before) :]


def _check_samples(samples: int, sampling: Sampling) -> None:
    if whole_number("samples", samples) < 1:
        raise ConfigError(f"samples={samples} leaves no continuation")
    if samples > 1 and sampling.is_greedy:
        raise ConfigError(
            "greedy continuations of one prompt are all the same; set a temperature above 0, such as 1, or samples=1"
        )


def _one_sampler(sampling: Sampling) -> "_Sampler":
    [seed] = request_seeds(sampling, 1)
    return _Sampler(sampling, [sample_seed(seed, 0)])


class _Sampler(LogitsProcessor):
    """Leaves of the scores what is chosen, and notes the model's own log-probability of it."""

    def __init__(self, sampling: Sampling, seeds: list[int]) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.logprobs: list[list[float]] = []
        self.filters = filters_of(sampling)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores_BV = scores.float()
        plain_BV = torch.log_softmax(scores_BV, dim=-1)
        for filter_ in self.filters:
            scores_BV = filter_(input_ids, scores_BV)
        chosen_B1 = chosen_tokens(scores_BV, None if self.sampling.is_greedy else self.generators)[:, None]
        self.logprobs.append(plain_BV.gather(1, chosen_B1)[:, 0].tolist())
        return torch.full_like(scores_BV, float("-inf")).scatter(1, chosen_B1, 0.0)


class _Pieces(BaseStreamer):
    """Turns tokens into pieces of text as they come, never splitting a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        self.ids = list(prompt)
        self.read = len(prompt)
        self.start = max(0, self.read - _TAIL)
        self.texts: queue.Queue[str | None] = queue.Queue()
        self.has_prompt = False

    def put(self, value: Tensor) -> None:
        """Take one token; the first call brings the prompt, which is known."""
        if not self.has_prompt:
            self.has_prompt = True
            return
        self.ids += value.flatten().tolist()
        self._give(last=False)

    def end(self) -> None:
        """Give what was held back."""
        self._give(last=True)

    def _give(self, *, last: bool) -> None:
        before = self.tokenizer.decode(self.ids[self.start : self.read], skip_special_tokens=True)
        now = self.tokenizer.decode(self.ids[self.start :], skip_special_tokens=True)
        # A replacement character at the end is a letter whose other bytes are still to come.
        if len(now) > len(before) and (last or not now.endswith("\ufffd")):
            self.texts.put(now[len(before) :])
            self.start, self.read = self.read, len(self.ids)


class _Stop(StoppingCriteria):
    """Ends the generation when the reader of the stream has gone."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        del scores, kwargs
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device, dtype=torch.bool)
