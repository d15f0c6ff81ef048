"""Check whether batched decoding is reproducible on this machine, by trying it with the model itself.

Whether a row of a matrix product is bit-identical in every batch depends on the kernels: the processor, the dtype and
the number of threads.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from gerund.errors import GerundError
from gerund.inference.generate.decoding import Reproducibility, is_steady, recalls, tried_tokens
from gerund.inference.generate.slots import MOST_ROWS_MORE, Slots, unsupported_reason
from gerund.inference.generate.transformers_loop import transformers_loop
from gerund.inference.tokens import rotary_limit

# Least number of rows of a step, in dtypes in which few rows take other kernels.
_FEW = 4
_ALL_ALIKE = ((_FEW, _FEW), (MOST_ROWS_MORE, MOST_ROWS_MORE))
# Lengths of the prompts that are compared with transformers' own loop, and the number of tokens generated after each.
_PROMPTS = (3, 18, 45, 130)
_GENERATED = 6
# Rows tried per weight: as many as make so many output values, within these limits.
_TRIED_VALUES, _LEAST_TRIED_ROWS, _MOST_TRIED_ROWS = 1 << 17, 16, 512
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


def slots_of(way: Reproducibility, model: PreTrainedModel, count: int, room: int, *, by_blocks: bool = False) -> Slots:
    """Return slots that decode in this way."""
    return Slots(
        *(model, count, room), alone=way.alone, at_least=way.at_least, multiple=way.multiple, by_blocks=by_blocks
    )


_checked: WeakKeyDictionary[PreTrainedModel, dict[object, Reproducibility]] = WeakKeyDictionary()


def check_batching(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, room: int, *, recalling: bool = True
) -> Reproducibility:
    """Check how a model decodes in ``count`` slots of ``room`` tokens, and what that guarantees.

    The result is cached per model, slots and threads. ``recalling`` checks ``recalls`` too, which takes about as long
    as reading 2000 tokens.
    """
    key = (count, room, recalling, torch.get_num_threads(), model.dtype)
    cached = _checked.setdefault(model, {})
    if key not in cached:
        cached[key] = _check(model, tokenizer, count, room, recalling)
    return cached[key]


def _check(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, room: int, recalling: bool
) -> Reproducibility:
    reason, limit = unsupported_reason(model), rotary_limit(model.config)
    if reason is None and limit is not None and room > limit:
        kind = model.config.model_type
        reason = (
            f"this {kind} model reads all sequences of a step in another way where one has more than {limit} tokens"
        )
    if reason is None:
        try:
            with evaluation_mode(model):
                return _try(model, tokenizer, count, room, recalling)
        except (GerundError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = f"this {model.config.model_type} model can't be decoded in slots ({error})"
    return Reproducibility(
        False, "bits of generate", f"{reason}; each sequence is generated alone, through transformers' own loop"
    )


def _try(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, room: int, recalling: bool
) -> Reproducibility:
    size = int(model.get_input_embeddings().weight.shape[0])
    prompts = [tried_tokens(length, size) for length in _PROMPTS[:count] if length + _GENERATED < room]
    prompts, tokens = prompts or [[size // 2]], tried_tokens(_GENERATED, size)
    expected = [_logits_of_loop(model, tokenizer, ids, tokens) for ids in prompts]
    slots = Slots(model, count, room, alone=True)
    actual = _logits_of_slots(slots, prompts, tokens)
    alike = all(map(torch.equal, expected, actual))
    spread = max(1.0, float(expected[0].std(dim=-1).max()))
    deviation = max(float((first - second).abs().max()) for first, second in zip(expected, actual, strict=True))
    if not deviation < spread * (1e-3 if model.dtype == torch.float32 else 0.15):
        raise ValueError(f"logits differ by {deviation:.1e} from those of transformers' own loop")
    if _has_experts(model):
        return Reproducibility(True, "none", "which experts compute together depends on the rest of the batch")
    trial = Slots(model, count, room, alone=True, shared=slots.are_alike)
    trial.prefill(prompts[0])
    if alike and _products_agree(model, range(1, count + 1)) and is_steady(trial, size, room):
        why = "verified at the start: each row attends alone, with logits bit-identical to transformers' own loop"
        return Reproducibility(True, "bits of generate", why, alone=True, recalls=recalling and _recalls(slots, size))
    few = min(_FEW, count) if model.dtype == torch.float32 else 1
    for trial.at_least, trial.multiple in ((few, 1), *_ALL_ALIKE):
        padded = (-(-live // trial.multiple) * trial.multiple for live in range(1, count + 1))
        if not _products_agree(model, {max(trial.at_least, rows) for rows in padded}):
            continue
        for trial.alone in (False, True):
            if is_steady(trial, size, room):
                why = "verified at the start: a row's logits are bit-identical whatever the other rows are"
                way = trial.alone, trial.at_least, trial.multiple, recalling and _recalls(slots, size)
                return Reproducibility(True, "same text under any load", why, *way)
    why = "what a row computes depends, in its last bits, on the other rows on this machine"
    return Reproducibility(True, "none", why)


def _has_experts(model: PreTrainedModel) -> bool:
    """Whether the model routes tokens to experts, which compute together all tokens that they get."""
    config = model.config.get_text_config(decoder=True)
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)


def _logits_of_loop(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], tokens: Sequence[int]
) -> Tensor:
    """Return the logits ``(tokens, V)`` of transformers' own loop while it generates these tokens."""
    forced = _Forced(tokens)
    transformers_loop(model, tokenizer, [ids], forced, _Never(), room=len(tokens))
    return torch.stack(forced.seen)


class _Forced(LogitsProcessor):
    """Choose given tokens, and record the logits."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.seen = list(tokens), list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        self.seen.append(scores[0].float().clone())
        chosen = torch.full_like(scores, float("-inf"))
        chosen[:, self.tokens[len(self.seen) - 1]] = 0
        return chosen


class _Never(StoppingCriteria):
    """Stop nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        del scores
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _logits_of_slots(slots: Slots, prompts: Sequence[list[int]], tokens: Sequence[int]) -> list[Tensor]:
    """Return the same for each prompt, decoded in one batch."""
    seen = []
    for ids in prompts:
        seen.append([slots.prefill(ids).float()])
        slots.join(len(ids))
    for token in tokens[:-1]:
        for logits, logits_V in zip(seen, slots.step([token] * len(prompts)).float(), strict=True):
            logits.append(logits_V)
    return [torch.stack(logits) for logits in seen]


@torch.no_grad()
def _products_agree(model: PreTrainedModel, row_counts: Iterable[int]) -> bool:
    """Whether a row times a weight of the model is bit-identical in products of these numbers of rows.

    Kernels differ in the order in which they add. In half precision the sum is rounded so coarsely that it is mostly
    the same anyway, and a few steps of the model do not show the rest.
    """
    least, *others = sorted(set(row_counts))
    compared = sorted({*others[:3], *others[-1:]})
    weights = {
        (tuple(layer.weight.shape), layer.weight.dtype): layer.weight
        for layer in model.modules()
        if isinstance(layer, torch.nn.Linear) and layer.weight is not None and layer.weight.is_floating_point()
    }
    generator = torch.Generator().manual_seed(0)
    for weight_OI in weights.values():
        n_rows = min(_MOST_TRIED_ROWS, max(_LEAST_TRIED_ROWS, _TRIED_VALUES // weight_OI.shape[0]))
        rows_NI = torch.randn(n_rows, weight_OI.shape[1], generator=generator).to(weight_OI)
        expected_NO = _by_matmul(rows_NI, weight_OI, least)
        if not all(torch.equal(_by_matmul(rows_NI, weight_OI, count), expected_NO) for count in compared):
            return False
    return True


def _by_matmul(rows_NI: Tensor, weight_OI: Tensor, count: int) -> Tensor:
    """Return the rows times a weight, ``count`` rows per product; the last one is filled with repeated rows."""
    n_products = -(-len(rows_NI) // count)
    padded = rows_NI.repeat(-(-n_products * count // len(rows_NI)), 1)[: n_products * count]
    return torch.cat([linear(part, weight_OI) for part in padded.split(count)])[: len(rows_NI)]


def _recalls(slots: Slots, size: int) -> bool:
    """Whether block-wise prefill gives the same bits however a prompt is read."""
    slots.by_blocks = True
    try:
        return recalls(slots, size)
    finally:
        slots.by_blocks = False


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Turn dropout off until the block ends."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
