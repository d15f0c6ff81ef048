"""Many continuations of few prompts: what was read of a prompt is held once, whatever continues it.

Knows: models, caches, positions. Does not know: texts, how tokens are chosen.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from gerund.attention.interface import FUSED
from gerund.attention.ragged_batch import Branches, Trunk
from gerund.errors import GerundError
from gerund.inference.encode.positions import takes_positions
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.generate.preallocated_cache import PreallocatedLayer, preallocated_cache
from gerund.inference.infill.span_pass import Context, SpanPass


class BranchPass:
    """Prompts in a KV cache, and continuations of them that grow token by token, all by as many tokens.

    Args:
        runtime: the model; its plan is not read.
        prompts: token ids, of any lengths.

    Raises:
        ModelError: the model's head cannot be run on its own.
    """

    def __init__(self, runtime: EncoderRuntime, prompts: Sequence[Sequence[int]]) -> None:
        self._runtime = runtime
        self._prompts = SpanPass(runtime, [Context(ids) for ids in prompts], sees_right=False)
        self.logprobs_BV = self._prompts.logprobs_BV
        lengths = [len(ids) for ids in prompts]
        self._trunks = [
            [_without_padding(layer, row, length) for row, length in enumerate(lengths)]
            for layer in self._prompts.cache.layers
        ]
        self._next_B = torch.tensor(lengths)
        self._prompt_of_B = torch.arange(len(prompts))
        self._branches: DynamicCache = preallocated_cache()

    def advance(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep some rows, in this order and perhaps more than once, and write one token into each.

        Rows of one prompt stay together, in the order of the prompts. ``logprobs_BV`` then has what follows each.
        """
        if list(rows) != list(range(len(self._next_B))):
            index = torch.tensor(list(rows))
            if self._branches.get_seq_length():
                self._branches.batch_select_indices(index)
            self._next_B, self._prompt_of_B = self._next_B[index], self._prompt_of_B[index]
        counts = torch.bincount(self._prompt_of_B, minlength=len(self._trunks[0])).tolist()
        plan = Branches(self._trunks, counts)
        ids_B1 = torch.tensor(list(tokens))[:, None]
        self.logprobs_BV = self._prompts.run(ids_B1, self._next_B[:, None], cache=self._branches, plan=plan)
        self._next_B = self._next_B + 1


def can_branch(runtime: EncoderRuntime) -> bool:
    """Whether a model gives with shared keys what it gives with a copy for every row; found out once for a model."""
    model = runtime.model
    if model not in _known:
        _known[model] = _tried(runtime)
    return _known[model]


def _tried(runtime: EncoderRuntime) -> bool:
    model = runtime.model
    if model.config._attn_implementation != FUSED or not takes_positions(model):
        return False
    size = int(model.get_input_embeddings().weight.shape[0])
    prompts = [[(7 * place + 3) % size for place in range(count)] for count in (9, 6)]
    steps: tuple[Any, ...] = (([0, 0, 1], [1, 2, 3]), ([0, 2], [4, 5]))
    try:
        with torch.no_grad():
            passes = (
                BranchPass(runtime, prompts),
                SpanPass(runtime, [Context(ids) for ids in prompts], sees_right=False),
            )
            for rows, tokens in steps:
                for one in passes:
                    one.advance(rows, [token % size for token in tokens])
    except (GerundError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    own_BV, other_BV = (one.logprobs_BV for one in passes)
    # All tokens together: the one that rounding hits worst says little. Measured on 20 architectures in bfloat16:
    # rounding comes to 0.6 to 2.4% of the spread (21% where it changes a token's experts), a prompt that is not seen
    # to 24% and more.
    difference = float((own_BV - other_BV).square().mean().sqrt() / other_BV.std(dim=-1).mean())
    return difference < (1e-3 if model.dtype == torch.float32 else 0.1)


def _without_padding(layer: Any, row: int, length: int) -> Trunk:
    """Return one text's keys and values ``(key heads, T, head_dim)``; padding stands on the left."""
    if not isinstance(layer, PreallocatedLayer):
        raise TypeError("the cache is of another kind")
    keys: Tensor = layer.keys[row, :, -length:]
    return keys, layer.values[row, :, -length:]


_known: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
