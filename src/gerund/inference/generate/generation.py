"""Generate continuations of prompts with the base model; a result does not depend on its batch.

transformers' ``generate`` runs the model. What it would choose itself reads torch's global random state, which threads
would share, and the defaults of the model's folder; here each ``Sequence`` chooses its own tokens.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from gerund.attention.layouts import is_one_graph
from gerund.checks import whole_number
from gerund.errors import ConfigError
from gerund.inference.generate.batch_decoder import BatchDecoder, decode_all
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.decoding import Decoding, Reproducibility
from gerund.inference.generate.prompts import Prompt, prompt_ids
from gerund.inference.generate.reproducibility import check_batching, slots_of
from gerund.inference.generate.sequence import CancelFlag, Cancelled, Emit, SequenceState, advance
from gerund.inference.generate.slots import Slots, unsupported_reason
from gerund.inference.generate.transformers_loop import transformers_loop
from gerund.inference.text_ids import end_ids, text_ids
from gerund.inference.tokens import context_length, keep_end, rotary_limit, rotary_side
from gerund.models.kinds import is_encoder_decoder
from gerund.settings.sampling import Sampling
from gerund.types import Generation

T = TypeVar("T")

_HALF = (torch.bfloat16, torch.float16)
# Tokens to generate at most, above which the reproducibility check pays off.
_WORTHWHILE = 8192
# Sequences per slot; with fewer, hardly any waits for a slot.
_ROUNDS = 2
# Least size of a slot in tokens. Sizes are powers of 2, so that one check serves many calls.
_LEAST_ROOM = 64


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
    """Return ``settings.n`` continuations of each prompt, in the order of the prompts.

    A continuation depends on its prompt, its seed and its number, never on its batch. Pieces go to ``emit``, in this
    thread. Raises ``Cancelled`` within a token after ``cancelled`` was set.
    """
    if whole_number("batch_size", batch_size) < 1:
        raise ConfigError(f"`batch_size` must be at least 1, got {batch_size}.")
    ids = [prompt_ids(model, tokenizer, prompt, index=index) for index, prompt in enumerate(prompts)]
    decoding = decoding_of(model, tokenizer)
    sequences = decoding.sequences(ids, settings, emit)
    # A packed network's decoder is continuous in any case.
    if is_one_graph(model) or not _decode_continuously(model, tokenizer, sequences, batch_size, cancelled):
        decoding.decode(sequences, batch_size=batch_size, cancelled=cancelled)
    return [sequence.result() for sequence in sequences]


def _decode_continuously(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[SequenceState],
    batch_size: int,
    cancelled: CancelFlag | None = None,
) -> bool:
    """Generate sequences to their ends, ``batch_size`` at a time, those of one prompt next to each other.

    Returns False without doing anything where it is not worthwhile, or not verified to be reproducible.
    """
    tokens = sum(sequence.room for sequence in sequences)
    if len(sequences) < _ROUNDS * batch_size or tokens < _WORTHWHILE or batch_size < 2:
        return False
    if unsupported_reason(model) is not None:
        return False
    longest = max(len(sequence.ids) + sequence.room for sequence in sequences)
    limits = (context_length(model.config, tokenizer), rotary_limit(model.config))
    power_of_2 = max(_LEAST_ROOM, 1 << (longest - 1).bit_length())
    room = max(longest, min([power_of_2, *(limit for limit in limits if limit is not None)]))
    way = check_batching(model, tokenizer, batch_size, room, recalling=False)
    # In half precision the two most likely tokens are often equally likely to the last bit, so only equal bits will do.
    good_enough = ("bits of generate",) if model.dtype in _HALF else ("bits of generate", "same text under any load")
    if not way.fits or way.guarantee not in good_enough:
        return False
    with torch.no_grad():
        decode_all(BatchDecoder(slots_of(way, model, batch_size, room)), sequences, cancelled)
    return True


@dataclass(frozen=True)
class TransformersDecoding(Decoding):
    """Decodes the sequences of a model of transformers, ``model``."""

    model: PreTrainedModel
    reads_alike = False

    @property
    def why_no_slots(self) -> str | None:
        return unsupported_reason(self.model)

    @property
    def decodes_prompt(self) -> bool:
        return not is_encoder_decoder(self.model)

    @property
    def vocabulary_size(self) -> int:
        head = self.model.get_output_embeddings()
        # A model without a head raises its error later, at its first token.
        return int((head if hasattr(head, "weight") else self.model.get_input_embeddings()).weight.shape[0])

    def check(self, count: int, room: int) -> Reproducibility:
        return check_batching(self.model, self.tokenizer, count, room)

    def slots(self, way: Reproducibility, count: int, room: int, *, by_blocks: bool) -> Slots:
        return slots_of(way, self.model, count, room, by_blocks=by_blocks)

    def decode(
        self, sequences: Sequence[SequenceState], *, batch_size: int = 16, cancelled: CancelFlag | None = None
    ) -> None:
        # Through transformers' own loop; sequences of similar length share a batch.
        limit = rotary_limit(self.model.config)
        order = sorted(sequences, key=lambda sequence: len(sequence.ids))
        # A prompt near the end of the context, or beyond the rotary limit, would change others: it runs in another
        # batch.
        for _, alike in groupby(
            order, key=lambda request: (request.room, rotary_side(len(request.ids), request.room, limit))
        ):
            for batch in _chunks(list(alike), batch_size):
                decode_batch(self.model, self.tokenizer, batch, cancelled)


def decoding_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Decoding:
    """Return how a model decodes: by its packed network where it has one."""
    given = tokenizer, tuple(end_ids(model, tokenizer)), context_length(model.config, tokenizer)
    if is_one_graph(model):
        from gerund.inference.generate.packed_decoder import PackedDecoding  # it needs ONNX Runtime

        return PackedDecoding(*given, model.base_model.network)
    return TransformersDecoding(*given, model)


def _chunks(items: list[T], size: int) -> Iterator[list[T]]:
    yield from (items[start : start + size] for start in range(0, len(items), size))


def decode_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Sequence[SequenceState],
    cancelled: CancelFlag | None,
    decode: Callable[..., Tensor] | None = None,
) -> None:
    """Generate sequences to their ends in one batch; ``decode`` replaces transformers' loop (``custom_generate``)."""
    stop = _Done(batch, cancelled or threading.Event())
    transformers_loop(
        *(model, tokenizer, [sequence.ids for sequence in batch], _Chooser(batch), stop),
        room=batch[0].room,
        decode=decode,
        ignore_eos=any(sequence.request.settings.ignore_eos for sequence in batch),
    )
    if stop.cancelled.is_set():
        raise Cancelled


class _Chooser(LogitsProcessor):
    """Let sequences choose their tokens, and leave only those possible."""

    def __init__(self, batch: Sequence[SequenceState]) -> None:
        self.batch = batch

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        live = [row for row, sequence in enumerate(self.batch) if not sequence.is_done]
        chosen_B1 = torch.zeros((len(self.batch), 1), dtype=torch.long, device=scores.device)
        if live:
            live_BV = scores if len(live) == len(self.batch) else scores[live]
            tokens = advance([self.batch[row] for row in live], live_BV)
            chosen_B1[live, 0] = torch.tensor(tokens, device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter(1, chosen_B1, 0.0)


class _Done(StoppingCriteria):
    """End sequences that are done, and all of them once the work is cancelled."""

    def __init__(self, batch: Sequence[SequenceState], cancelled: CancelFlag) -> None:
        self.batch, self.cancelled = batch, cancelled

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        del scores, kwargs
        is_cancelled = self.cancelled.is_set()
        return torch.tensor([is_cancelled or sequence.is_done for sequence in self.batch], device=input_ids.device)


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
    """Return a continuation of each prefix, about as long as its example, with some tokens more to end a sentence.

    Those with examples of similar length share a batch. Each prefix has its own seed, made from ``key`` and its number;
    the seed in ``sampling`` is not used.
    """
    lengths = [len(text_ids(tokenizer, text, specials=False)) for text in examples]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    texts = [""] * len(lengths)
    for batch in _chunks(order, batch_size):
        seeds = [int(np.random.SeedSequence([*key, number]).generate_state(1)[0]) for number in batch]
        room = max(lengths[number] for number in batch) * 5 // 4 + 8
        results = generate(
            model,
            tokenizer,
            [fit_prefix(model, tokenizer, prefixes[number], room) for number in batch],
            GenerationConfig(room, replace(sampling, seed=seeds)),
            batch_size=batch_size,
        )
        for number, result in zip(batch, results, strict=True):
            texts[number] = result.text
    return texts


def fit_prefix(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prefix: str, room: int) -> str:
    """Return as much of a prefix's end as leaves ``room`` tokens in the model's context."""
    limit = context_length(model.config, tokenizer)
    if limit is None:
        return prefix
    if limit <= room + 1:
        raise ConfigError(f"{room} new tokens leave no prefix in a context of {limit}. Choose shorter continuations.")
    specials = len(text_ids(tokenizer, "a")) - len(text_ids(tokenizer, "a", specials=False))
    return keep_end(tokenizer, prefix, limit - room - specials)
