"""Generation: the untouched model, with sampling that is repeatable and independent of the batch.

transformers' ``generate`` runs the model. What it would choose itself reads torch's global random state, which threads
would share, and the defaults of the model's folder; here rows choose for themselves (see ``rows``).

Knows: models, tokenizers, ``Settings``. Does not know: attention plans: none is ever sent.
"""

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

from gerund.config import whole_number
from gerund.errors import ConfigError
from gerund.inference.generate.prompts import Prompt, prompt_ids
from gerund.inference.generate.rows import Emit, Row, Vocabulary, Writing, advance
from gerund.inference.generate.sampling import request_seeds, sample_seed
from gerund.inference.generate.settings import Settings
from gerund.inference.tokens import context_length
from gerund.models.encoder_decoder import is_encoder_decoder
from gerund.types import Generation

# What a model's folder may ask of transformers by default, and the values that ask nothing: rows see plain logits.
_PLAIN: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "guidance_scale": 1.0,
}


class Cancelled(Exception):  # noqa: N818 - nothing went wrong
    """Nobody waits for the text any more."""


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    batch_size: int = 16,
    emit: Emit | None = None,
    cancelled: threading.Event | None = None,
) -> list[Generation]:
    """Continue each prompt.

    Args:
        model: the language model.
        tokenizer: its tokenizer.
        prompts: any number of texts, token ids or conversations, of any lengths.
        settings: how much is written, how tokens are chosen, and so on. A continuation depends on its prompt, its
            seed and the number of the sample, and on nothing that is generated beside it.
        batch_size: continuations in one pass.
        emit: takes the texts as they come; called in this thread.
        cancelled: ends the work within a token once it is set.

    Returns:
        The results in the order of the prompts, ``settings.n`` of them a prompt.

    Raises:
        TextError: a prompt fills the model's context, or is empty for a model without a beginning token.
        ConfigError: ``batch_size`` is no positive whole number, there are not as many seeds as prompts, or the
            settings do not fit the model.
        Cancelled: ``cancelled`` was set before the end.
    """
    if whole_number("batch_size", batch_size) < 1:
        raise ConfigError(f"batch_size={batch_size} leaves no room for a prompt")
    ids = [prompt_ids(model, tokenizer, prompt, index=index) for index, prompt in enumerate(prompts)]
    writing = writing_of(model, tokenizer, settings)
    limit = None if is_encoder_decoder(model) else context_length(model.config, tokenizer)
    rows: list[Row] = []
    read: list[tuple[list[int], int]] = []
    for own, seed in zip(ids, request_seeds(settings.sampling, len(ids)), strict=True):
        room = room_after(len(own), settings.max_new_tokens, limit)
        for sample in range(settings.n):
            rows.append(_row(model, writing, own, room, sample_seed(seed, sample), index=len(rows), emit=emit))
            read.append((own, room))
    order = sorted(range(len(rows)), key=lambda number: len(read[number][0]))
    for numbers in _batches(order, [room for _, room in read], batch_size):
        _run(
            *(model, tokenizer, [read[number][0] for number in numbers], [rows[number] for number in numbers]),
            room=read[numbers[0]][1],
            cancelled=cancelled,
        )
    return [row.result() for row in rows]


def continue_read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    decode: Callable[..., Tensor],
    settings: Settings,
    *,
    emit: Emit | None = None,
    cancelled: threading.Event | None = None,
) -> Generation:
    """Continue one prompt that the model has read already; the result is that of ``generate``.

    Args:
        model: the language model.
        tokenizer: its tokenizer.
        ids: the prompt, from ``prompt_ids``.
        decode: a loop that transformers calls in place of its own (``custom_generate``), which would read the
            prompt again.
        settings: how much is written, how tokens are chosen, and so on.
        emit: takes the text as it comes.
        cancelled: ends the work within a token once it is set.

    Raises:
        Cancelled: ``cancelled`` was set before the end.
    """
    room = room_after(len(ids), settings.max_new_tokens, context_length(model.config, tokenizer))
    [seed] = request_seeds(settings.sampling, 1)
    row = _row(model, writing_of(model, tokenizer, settings), ids, room, sample_seed(seed, 0), emit=emit)
    _run(model, tokenizer, [ids], [row], room=room, cancelled=cancelled, decode=decode)
    return row.result()


def writing_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> Writing:
    """Return settings, read for this model."""
    head = model.get_output_embeddings()
    # A model without a head says so when it is asked for its first token.
    size = int((head if hasattr(head, "weight") else model.get_input_embeddings()).weight.shape[0])
    return Writing(Vocabulary(tokenizer, size, tuple(end_ids(model, tokenizer))), settings)


def _row(
    model: PreTrainedModel,
    writing: Writing,
    ids: list[int],
    room: int,
    seed: int,
    *,
    index: int = 0,
    emit: Emit | None = None,
) -> Row:
    # A decoder with an encoder beside it begins with a token of its own instead of the prompt.
    before = [] if is_encoder_decoder(model) else ids
    generator = torch.Generator().manual_seed(seed)
    return Row(writing, before, room, generator, prompt_tokens=len(ids), index=index, emit=emit)


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    rows: list[Row],
    *,
    room: int,
    cancelled: threading.Event | None = None,
    decode: Callable[..., Tensor] | None = None,
) -> None:
    """Write rows to their ends, all in one batch."""
    width = max(len(ids) for ids in prompts)
    ends = end_ids(model, tokenizer)
    pad = next(iter([*([tokenizer.pad_token_id] if tokenizer.pad_token_id is not None else []), *ends, 0]))
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    real = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # generation continues at the right: padding goes left
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        real[row, width - len(prompt) :] = 1
    settings = GenerationConfig(
        **_PLAIN,
        do_sample=False,
        num_beams=1,
        max_new_tokens=room,
        pad_token_id=pad,
        eos_token_id=ends or None,
        use_cache=None if decode is None else False,  # a loop of one's own brings its own cache
    )
    stop = _Done(rows, cancelled or threading.Event())
    model.generate(
        ids.to(model.device),
        attention_mask=real.to(model.device),
        generation_config=settings,
        logits_processor=LogitsProcessorList([_Chooser(rows)]),
        stopping_criteria=StoppingCriteriaList([stop]),
        custom_generate=decode,
    )
    if stop.cancelled.is_set():
        raise Cancelled


class _Chooser(LogitsProcessor):
    """Lets rows choose, and leaves of the scores what they chose."""

    def __init__(self, rows: Sequence[Row]) -> None:
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

    def __init__(self, rows: Sequence[Row], cancelled: threading.Event) -> None:
        self.rows, self.cancelled = rows, cancelled

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        del scores, kwargs
        is_over = self.cancelled.is_set()
        return torch.tensor([is_over or row.is_done for row in self.rows], device=input_ids.device)


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
