"""Generate continuations of prompts with the base model; a result does not depend on its batch.

transformers' ``generate`` runs the model. What it would choose itself reads torch's global random state, which threads
would share, and the defaults of the model's folder; here each ``Sequence`` chooses its own tokens.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from gerund.checks import whole_number
from gerund.errors import ConfigError
from gerund.inference.generate.batch_decoder import decode_continuously
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.prompts import Prompt, prompt_ids
from gerund.inference.generate.sampling import request_seeds, sample_seed
from gerund.inference.generate.sequence import Emit, RequestSettings, SequenceState, Vocabulary, advance
from gerund.inference.generate.transformers_loop import CancelFlag, Cancelled, end_ids, transformers_loop
from gerund.inference.text_ids import text_ids
from gerund.inference.tokens import context_length, keep_end, rotary_limit, rotary_side
from gerund.models.architectures import is_encoder_decoder
from gerund.settings.sampling import Sampling
from gerund.types import Generation


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: GenerationConfig,
    *,
    batch_size: int = 16,
    emit: Emit | None = None,
    cancelled: CancelFlag | None = None,
) -> list[Generation]:
    """Continue each prompt."""
    if whole_number("batch_size", batch_size) < 1:
        raise ConfigError(f"batch_size={batch_size} leaves no room for a prompt")
    ids = [prompt_ids(model, tokenizer, prompt, index=index) for index, prompt in enumerate(prompts)]
    writing = request_settings(model, tokenizer, settings)
    limit = None if is_encoder_decoder(model) else context_length(model.config, tokenizer)
    rows: list[SequenceState] = []
    read: list[tuple[list[int], int]] = []
    for own, seed in zip(ids, request_seeds(settings.sampling, len(ids)), strict=True):
        room = room_after(len(own), settings.max_new_tokens, limit)
        rows += new_sequences(model, writing, own, room, seed, index=len(rows), emit=emit)
        read += [(own, room)] * settings.n
    if not decode_continuously(model, tokenizer, read, rows, batch_size, cancelled):
        decode_in_batches(model, tokenizer, read, rows, batch_size=batch_size, cancelled=cancelled)
    return [row.result() for row in rows]


def decode_in_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    read: Sequence[tuple[list[int], int]],
    rows: Sequence[SequenceState],
    *,
    batch_size: int = 16,
    cancelled: CancelFlag | None = None,
) -> None:
    """Write rows to their ends through transformers' own loop, those of about the same length together."""
    order = sorted(range(len(rows)), key=lambda number: len(read[number][0]))
    limit = rotary_limit(model.config)
    alike = [(room, rotary_side(len(ids), room, limit)) for ids, room in read]
    for numbers in _batches(order, alike, batch_size):
        _run(
            *(model, tokenizer, [read[number][0] for number in numbers], [rows[number] for number in numbers]),
            room=read[numbers[0]][1],
            cancelled=cancelled,
        )


def continue_read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    decode: Callable[..., Tensor],
    settings: GenerationConfig,
    *,
    emit: Emit | None = None,
    cancelled: threading.Event | None = None,
) -> Generation:
    """Continue one prompt that the model has read already; the result is that of ``generate``."""
    room = room_after(len(ids), settings.max_new_tokens, context_length(model.config, tokenizer))
    [seed] = request_seeds(settings.sampling, 1)
    [row] = new_sequences(model, request_settings(model, tokenizer, settings), ids, room, seed, emit=emit)
    _run(model, tokenizer, [ids], [row], room=room, cancelled=cancelled, decode=decode)
    return row.result()


def request_settings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig
) -> RequestSettings:
    """Return settings, read for this model."""
    head = model.get_output_embeddings()
    # A model without a head says so when it is asked for its first token.
    size = int((head if hasattr(head, "weight") else model.get_input_embeddings()).weight.shape[0])
    return RequestSettings(Vocabulary(tokenizer, size, tuple(end_ids(model, tokenizer))), settings)


def new_sequences(
    model: PreTrainedModel,
    writing: RequestSettings,
    ids: list[int],
    room: int,
    seed: int,
    *,
    index: int = 0,
    emit: Emit | None = None,
) -> list[SequenceState]:
    """Return the continuations of a prompt before anything is written, as many as ``settings.n`` says."""
    # A decoder with an encoder beside it begins with a token of its own instead of the prompt.
    before = [] if is_encoder_decoder(model) else ids
    generators = (torch.Generator().manual_seed(sample_seed(seed, sample)) for sample in range(writing.settings.n))
    return [
        SequenceState(writing, before, room, generator, prompt_tokens=len(ids), index=index + sample, emit=emit)
        for sample, generator in enumerate(generators)
    ]


def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    rows: list[SequenceState],
    *,
    room: int,
    cancelled: CancelFlag | None = None,
    decode: Callable[..., Tensor] | None = None,
) -> None:
    """Write rows to their ends, all in one batch."""
    stop = _Done(rows, cancelled or threading.Event())
    transformers_loop(
        *(model, tokenizer, prompts, _Chooser(rows), stop),
        room=room,
        decode=decode,
        ignore_eos=any(row.writing.settings.ignore_eos for row in rows),
    )
    if stop.cancelled.is_set():
        raise Cancelled


class _Chooser(LogitsProcessor):
    """Lets rows choose, and leaves of the scores what they chose."""

    def __init__(self, rows: Sequence[SequenceState]) -> None:
        self.rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        going = [place for place, row in enumerate(self.rows) if not row.is_done]
        chosen_B1 = torch.zeros((len(self.rows), 1), dtype=torch.long, device=scores.device)
        if going:
            own_BV = scores if len(going) == len(self.rows) else scores[going]
            tokens = advance([self.rows[place] for place in going], own_BV)
            chosen_B1[going, 0] = torch.tensor(tokens, device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter(1, chosen_B1, 0.0)


class _Done(StoppingCriteria):
    """Ends rows where they end themselves, and all of them when nobody waits for them any more."""

    def __init__(self, rows: Sequence[SequenceState], cancelled: CancelFlag) -> None:
        self.rows, self.cancelled = rows, cancelled

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        del scores, kwargs
        is_over = self.cancelled.is_set()
        return torch.tensor([is_over or row.is_done for row in self.rows], device=input_ids.device)


def room_after(tokens: int, max_new_tokens: int, limit: int | None) -> int:
    """Return how many tokens can follow so many of a prompt."""
    return max_new_tokens if limit is None else min(max_new_tokens, limit - tokens)


def _batches(order: Sequence[int], kinds: Sequence[object], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of rows of a kind: a prompt near the end of the context, or a long one, must not change others."""
    for _, alike in groupby(order, key=lambda row: kinds[row]):
        rows = list(alike)
        yield from (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))


def continuations_of_length(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prefixes: Sequence[str],
    examples: Sequence[str],
    sampling: Sampling,
    *,
    batch_size: int,
    key: Sequence[int],
) -> list[str]:
    """Return a continuation of each prefix: as many tokens as its example, and some more for a sentence to end."""
    lengths = [len(text_ids(tokenizer, text, specials=False)) for text in examples]
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    texts = [""] * len(lengths)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        seeds = [int(np.random.SeedSequence([*key, row]).generate_state(1)[0]) for row in rows]
        room = max(lengths[row] for row in rows) * 5 // 4 + 8
        found = generate(
            model,
            tokenizer,
            [fit_prefix(model, tokenizer, prefixes[row], room) for row in rows],
            GenerationConfig(room, replace(sampling, seed=seeds)),
            batch_size=batch_size,
        )
        for row, one in zip(rows, found, strict=True):
            texts[row] = one.text
    return texts


def fit_prefix(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prefix: str, room: int) -> str:
    """Return as much of a prefix's end as leaves ``room`` tokens in the model's context."""
    limit = context_length(model.config, tokenizer)
    if limit is None:
        return prefix
    if limit <= room + 1:
        raise ConfigError(f"{room} new tokens leave no prefix in a context of {limit}; choose shorter continuations")
    specials = len(text_ids(tokenizer, "a")) - len(text_ids(tokenizer, "a", specials=False))
    return keep_end(tokenizer, prefix, limit - room - specials)
