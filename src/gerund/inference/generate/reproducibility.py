"""Check whether batched decoding is reproducible on this machine, by trying it with the model itself.

Whether a row of a matrix product is bit-identical in every batch depends on the kernels: the processor, the dtype and
the number of threads.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from gerund.attention.ragged_batch import BLOCK
from gerund.errors import GerundError
from gerund.inference.generate.compiled_step import quiet_compiler, rows_together
from gerund.inference.generate.slots import MOST_ROWS_MORE, Slots, unsupported_reason
from gerund.inference.generate.transformers_loop import transformers_loop
from gerund.inference.tokens import rotary_limit
from gerund.types import Promise

# Tokens of a prompt that are read at least where the rest is known: fewer take other kernels.
LEAST_READ = 16
# Rows of a step at least, in types that few rows are computed another way in.
_FEW = 4
_ALL_ALIKE = ((_FEW, _FEW), (MOST_ROWS_MORE, MOST_ROWS_MORE))
# Prompts that are compared with transformers' own loop, in tokens, and how much is written behind each.
_PROMPTS = (3, 18, 45, 130)
_WRITTEN = 6
# Of a prompt that is read at once, in parts, and beside others: its tokens, where it may end already, and what may be
# known of it.
_WHOLE, _ENDS, _KNOWN = 300, (20, 60, 150, 200), (BLOCK, 3 * BLOCK, 8 * BLOCK)
# Rows that are tried on each weight: so many numbers come out, of at least and at most so many rows.
_TRIED_NUMBERS, _LEAST_TRIED_ROWS, _MOST_TRIED_ROWS = 1 << 17, 16, 512
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


@dataclass(frozen=True)
class Reproducibility:
    """How texts are written side by side, and what holds for them.

    Attributes:
        fits: whether slots hold what the model keeps; where not, each text is written alone.
        promise: what holds.
        why: how that was found out, or why nothing is promised.
        alone: each row attends in a call of its own.
        at_least: rows of a step at least.
        multiple: rows of a step are a multiple of this.
        recalls: read by blocks, a token of a prompt gives the same to the bit however long the prompt is, however much
            of its beginning is known, and whatever prompts are read with it.
    """

    fits: bool
    promise: Promise
    why: str
    alone: bool = False
    at_least: int = 1
    multiple: int = 1
    recalls: bool = False

    def slots(self, model: PreTrainedModel, count: int, room: int, *, by_blocks: bool = False) -> Slots:
        """Return slots for texts that are written this way."""
        return Slots(
            model,
            count,
            room,
            alone=self.alone,
            at_least=self.at_least,
            multiple=self.multiple,
            by_blocks=by_blocks,
        )


def check_batching(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, room: int, *, recalling: bool = True
) -> Reproducibility:
    """Find out how a model writes side by side and what can be promised; once for a model, its slots and threads."""
    key = (count, room, recalling, torch.get_num_threads(), model.dtype)
    known = _known.setdefault(model, {})
    if key not in known:
        known[key] = _checked(model, tokenizer, count, room, recalling)
    return known[key]


_known: WeakKeyDictionary[PreTrainedModel, dict[object, Reproducibility]] = WeakKeyDictionary()


def _checked(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, room: int, recalling: bool
) -> Reproducibility:
    reason, limit = unsupported_reason(model), rotary_limit(model.config)
    if reason is None and limit is not None and room > limit:
        kind = model.config.model_type
        reason = f"this {kind} model reads all texts of a step otherwise where one has more than {limit} tokens"
    if reason is None:
        try:
            with evaluation_mode(model):
                return _tried(model, tokenizer, count, room, recalling)
        except (GerundError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = f"this {model.config.model_type} model cannot be written with in slots ({error})"
    return Reproducibility(
        False, "bits of generate", f"{reason}; each text is written alone, through transformers' own loop"
    )


def _tried(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, room: int, recalling: bool
) -> Reproducibility:
    size = int(model.get_input_embeddings().weight.shape[0])
    prompts = [_tokens(length, size) for length in _PROMPTS[:count] if length + _WRITTEN < room] or [[size // 2]]
    written = _tokens(_WRITTEN, size)
    own = [_by_own_loop(model, tokenizer, ids, written) for ids in prompts]
    slots = Slots(model, count, room, alone=True)
    found = _by_slots(slots, prompts, written)
    spread = max(1.0, float(own[0].std(dim=-1).max()))
    deviation = max(float((one - other).abs().max()) for one, other in zip(own, found, strict=True))
    if not deviation < spread * (1e-3 if model.dtype == torch.float32 else 0.15):
        raise ValueError(f"logits differ by {deviation:.1e} from those of transformers' own loop")
    if _has_experts(model):
        return Reproducibility(True, "none", "which experts compute together depends on what else is written")
    trial = Slots(model, count, room, alone=True, shared=slots.are_alike)
    trial.read(prompts[0])
    if all(map(torch.equal, own, found)) and _products_agree(model, range(1, count + 1)) and _is_steady(trial, size):
        why = "verified at the start: each row attends alone, with logits bit-equal to those of transformers' own loop"
        return Reproducibility(True, "bits of generate", why, alone=True, recalls=recalling and _recalls(slots, size))
    few = min(_FEW, count) if model.dtype == torch.float32 else 1
    for trial.at_least, trial.multiple in ((few, 1), *_ALL_ALIKE):
        filled_up = (-(-live // trial.multiple) * trial.multiple for live in range(1, count + 1))
        if not _products_agree(model, {max(trial.at_least, rows) for rows in filled_up}):
            continue
        for trial.alone in (False, True):
            if _is_steady(trial, size):
                why = "verified at the start: a row's logits are bit-equal whatever rows are beside it"
                recalls = recalling and _recalls(slots, size)
                way = trial.alone, trial.at_least, trial.multiple
                return Reproducibility(True, "same text under any load", why, *way, recalls)
    why = "what a row computes depends, in its last bits, on the rows beside it on this machine"
    return Reproducibility(True, "none", why)


def check_compiled_batching(
    found: Reproducibility, model: PreTrainedModel, count: int, room: int, *, by_blocks: bool = False
) -> tuple[Slots, Reproducibility]:
    """Return slots with a compiled step, warm, and what can be promised of it; plain ones where nothing is compiled."""
    words = model.get_input_embeddings().weight
    slots = Slots(model, count, room, compiled=rows_together(words.device, count), by_blocks=by_blocks)
    size = int(words.shape[0])
    try:
        with evaluation_mode(model), quiet_compiler():
            slots.read(_tokens(3, size))
            steady = _is_steady(slots, size)
    except Exception as error:  # whatever a compiler and what it calls raise
        plain = found.slots(model, count, room, by_blocks=by_blocks)
        return plain, replace(found, why=f"{found.why}; nothing was compiled ({error})")
    own = replace(found, alone=False, at_least=1, multiple=1)
    if found.promise == "none" or not steady:
        return slots, replace(own, promise="none", why="the step is compiled, and its texts are equal up to near ties")
    why = "verified at the start: a row's logits are bit-equal whatever rows are beside it, in a compiled step"
    return slots, replace(own, promise="same text under any load", why=why)


def _has_experts(model: PreTrainedModel) -> bool:
    """Whether tokens share matrix products with those that happen to take the same expert."""
    config = model.config.get_text_config(decoder=True)
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)


def _tokens(count: int, size: int) -> list[int]:
    """Return tokens of no meaning."""
    return [(17 * place + 5) % size for place in range(count)]


def _by_own_loop(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], written: Sequence[int]
) -> Tensor:
    """Return the logits ``(tokens, V)`` that transformers' own loop sees while these tokens are written."""
    dictated = _Dictated(written)
    transformers_loop(model, tokenizer, [ids], dictated, _Never(), room=len(written))
    return torch.stack(dictated.seen)


class _Dictated(LogitsProcessor):
    """Writes what it was told, and keeps the logits."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.seen = list(tokens), list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        self.seen.append(scores[0].float().clone())
        chosen = torch.full_like(scores, float("-inf"))
        chosen[0, self.tokens[len(self.seen) - 1]] = 0
        return chosen


class _Never(StoppingCriteria):
    """Ends nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        del scores
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _by_slots(slots: Slots, prompts: Sequence[list[int]], written: Sequence[int]) -> list[Tensor]:
    """Return the same of each prompt, all of them side by side."""
    seen = []
    for ids in prompts:
        seen.append([slots.read(ids).float()])
        slots.join(len(ids))
    for token in written[:-1]:
        for own, logits_V in zip(seen, slots.step([token] * len(prompts)).float(), strict=True):
            own.append(logits_V)
    return [torch.stack(own) for own in seen]


@torch.no_grad()
def _products_agree(model: PreTrainedModel, row_counts: Iterable[int]) -> bool:
    """Whether a row times a weight of the model is the same, to the bit, in products of these numbers of rows.

    Kernels differ in the order in which they add. In half precision the sum is rounded so coarsely that it mostly comes
    out the same all the same, and a few steps of the whole model do not show the rest.
    """
    least, *others = sorted(set(row_counts))
    compared = sorted({*others[:3], *others[-1:]})
    weights = {
        (tuple(part.weight.shape), part.weight.dtype): part.weight
        for part in model.modules()
        if isinstance(part, torch.nn.Linear) and part.weight.is_floating_point() and not part.weight.is_meta
    }
    generator = torch.Generator().manual_seed(0)
    for weight_OI in weights.values():
        n_rows = min(_MOST_TRIED_ROWS, max(_LEAST_TRIED_ROWS, _TRIED_NUMBERS // weight_OI.shape[0]))
        rows_NI = torch.randn(n_rows, weight_OI.shape[1], generator=generator).to(weight_OI)
        wanted_NO = _in_products(rows_NI, weight_OI, least)
        if not all(torch.equal(_in_products(rows_NI, weight_OI, count), wanted_NO) for count in compared):
            return False
    return True


def _in_products(rows_NI: Tensor, weight_OI: Tensor, count: int) -> Tensor:
    """Return the rows times a weight, ``count`` rows in each product; rows that come again fill the last one up."""
    n_products = -(-len(rows_NI) // count)
    padded = rows_NI.repeat(-(-n_products * count // len(rows_NI)), 1)[: n_products * count]
    return torch.cat([linear(part, weight_OI) for part in padded.split(count)])[: len(rows_NI)]


def _is_steady(slots: Slots, size: int) -> bool:
    """Whether a row's logits are the same, to the bit, whatever rows are beside it and wherever it stands."""
    try:
        return _same_rows(slots, size)
    finally:
        # Whoever writes by these slots next finds all of them free.
        slots.lengths = []


def _same_rows(slots: Slots, size: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    most, count = slots.room - 2, slots.count
    if most < 1:
        return False
    tokens = _tokens(count, size)
    for trial in range(2):
        lengths = torch.randint(1, most + 1, (count,), generator=generator).tolist()
        lengths[0], lengths[-1] = min(most, 20), most
        slots.fill(lengths, trial)
        all_BV = slots.step(tokens)
        # Every number of rows that may occur, and with it every place in a product that a row may have.
        for rows in range(count - 1, 0, -1) if trial == 0 else sorted({1, 2, count - 1} - {0, count}, reverse=True):
            slots.lengths = lengths[:rows]
            if not torch.equal(slots.step(tokens[:rows]), all_BV[:rows]):
                return False
        slots.fill(lengths, trial)
        order = list(range(count))
        while len(order) > 1:  # rows leave, and the last one takes their place
            slots.leave(0)
            order = [order[-1], *order[1:-1]]
            if len(order) in (1, 2, count - 1):
                before = list(slots.lengths)
                if not torch.equal(slots.step([tokens[row] for row in order]), all_BV[order]):
                    return False
                slots.lengths = before
    return True


def _recalls(slots: Slots, size: int) -> bool:
    """Whether what is read by blocks is the same, to the bit, wherever it ends, whatever is known or read too.

    Compared are keys, values and logits.
    """
    slots.lengths, slots.by_blocks = [], True
    most = min(_WHOLE, slots.room - 1)
    try:
        return most > BLOCK + LEAST_READ and _recalled(slots, _tokens(most, size))
    except (GerundError, RuntimeError, TypeError, ValueError):
        return False
    finally:
        slots.by_blocks = False


def _recalled(slots: Slots, ids: list[int]) -> bool:
    whole_V = slots.read(ids)
    kept = slots.remember(0, len(ids))

    def same(length: int, reader: int = 0) -> bool:
        layers = zip(kept, slots.remember(0, length, reader), strict=True)
        return all(torch.equal(one[:, :length], two) for layer in layers for one, two in zip(*layer, strict=True))

    logits = {len(ids): whole_V}
    for end in (end for end in _ENDS if end < len(ids)):
        logits[end] = slots.read(ids[:end])
        if not same(end):
            return False
    for known in (known for known in _KNOWN if known + LEAST_READ <= len(ids)):
        slots.read(ids[::-1])  # something else lies there now
        slots.recall([(keys[:, :known], values[:, :known]) for keys, values in kept], 0)
        if not (torch.equal(slots.read(ids, known), whole_V) and same(len(ids))):
            return False
    if slots.readers == 1:
        return True
    for order in (sorted(logits), sorted(logits, reverse=True)):
        ends = order[: slots.readers]
        together = slots.read_together([ids[:end] for end in ends], [0] * len(ends))
        if not torch.equal(together, torch.stack([logits[end] for end in ends])):
            return False
        if not all(same(end, reader) for reader, end in enumerate(ends)):
            return False
    return True


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute without dropout until the block ends."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
