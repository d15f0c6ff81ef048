"""One row a context: what the model has read of both sides of a gap, and the span that is written into it.

The context is run once, in the order left side without its last token, right side, last token of the left side,
each token at its true position; the last row predicts the first token of the span. Tokens of the context never
look at the span (MAGNET, section 3.1), so every further token costs one row, and gives the same as running the
whole text anew.

Knows: models, caches, positions. Does not know: texts, how tokens are chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from gerund.attention.bound_plan import BoundPlan, CachedHybrid
from gerund.attention.cache_names import CACHE
from gerund.attention.masked import has_indexer
from gerund.attention.recurrent import keeps_states
from gerund.errors import ModelError, UnsupportedModelError
from gerund.inference.encode.positions import takes_positions
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.generate.preallocated_cache import preallocated_cache
from gerund.inference.likelihood.lm_head import TokenHead
from gerund.models.adapters import active_adapter


@dataclass(frozen=True)
class Context:
    """What stands on both sides of a gap.

    Attributes:
        left: token ids before the gap, at least one; they stand at positions 0, 1, 2, ...
        right: token ids behind it.
        right_at: the position of each token of ``right``, which fixes the length of the gap, and of later gaps.
    """

    left: Sequence[int]
    right: Sequence[int] = ()
    right_at: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.left) + len(self.right)


class SpanPass:
    """Contexts in a KV cache, each with the span that is being written into its gap.

    Args:
        runtime: the model, and the adapter that is active; its plan is not read.
        contexts: one a row, of any lengths.
        sees_right: True for MAGNET's hybrid mask; False for the untouched causal model, which has no right side.

    Raises:
        UnsupportedModelError: it takes no positions, keeps states or has indexers, or its cache drops tokens.
        ModelError: the model's head cannot be run on its own.
    """

    def __init__(self, runtime: EncoderRuntime, contexts: Sequence[Context], *, sees_right: bool) -> None:
        if keeps_states(runtime.model):
            raise UnsupportedModelError(
                f"this {runtime.model.config.model_type} model keeps states of what it has read, which no cached text "
                "can be taken out of, so it fills no gaps and branches off no prompt"
            )
        if has_indexer(runtime.model):
            raise UnsupportedModelError(
                f"gaps cannot be filled with this {runtime.model.config.model_type} model: it chooses by an indexer "
                "which cached tokens it looks at, and those of a gap stand in another order"
            )
        self._runtime = runtime
        self._head = TokenHead(runtime.model)
        self._takes_positions = takes_positions(runtime.model)
        if sees_right and not self._takes_positions:
            raise UnsupportedModelError(
                f"this {runtime.model.config.model_type} model takes no position_ids, so the right side of a gap "
                "cannot be put where it belongs; take the method left-only"
            )
        self.cache = preallocated_cache()  # it keeps what lies behind a window, as the row order is not the text's
        ids_BT, position_BT, real_BT = _rows(contexts, runtime.tokenizer.pad_token_id or 0)
        self._real_BT = None if bool(real_BT.all()) else real_BT.to(runtime.device)
        self._next_B = torch.tensor([len(context.left) for context in contexts])
        self._plan = CachedHybrid(runtime.n_layers, position_BT, self._real_BT) if sees_right else None
        self.logprobs_BV = self._run(ids_BT, position_BT)

    def advance(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep some rows, in this order and perhaps more than once, and write one token into each.

        ``logprobs_BV`` then has what follows each of them.
        """
        if list(rows) != list(range(len(self._next_B))):
            index = torch.tensor(list(rows))
            self.cache.batch_select_indices(index)
            self._next_B = self._next_B[index]
            if self._real_BT is not None:
                self._real_BT = self._real_BT[index.to(self._real_BT.device)]
            if self._plan is not None:
                self._plan.select(index)
        if self._real_BT is not None:
            self._real_BT = torch.cat([self._real_BT, torch.ones_like(self._real_BT[:, :1])], dim=1)
        if self._plan is not None:
            self._plan.append(self._next_B)
        self.logprobs_BV = self._run(torch.tensor(list(tokens))[:, None], self._next_B[:, None])
        self._next_B = self._next_B + 1

    def _run(self, ids_BT: Tensor, position_BT: Tensor) -> Tensor:
        return self.run(ids_BT, position_BT, cache=self.cache, plan=self._plan, real_BT=self._real_BT)

    @torch.no_grad()
    def run(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        *,
        cache: DynamicCache,
        plan: BoundPlan | None,
        real_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the log-probabilities ``(B, V)`` of what follows each row, float32.

        Args:
            ids_BT: the tokens that are read.
            position_BT: their positions.
            cache: what was read before; what is read now is added to it.
            plan: which token attends to which; None for the model's own causal mask.
            real_BT: without a plan, which tokens of the cache and these are real; None for all.
        """
        runtime = self._runtime
        extra: dict[str, Any] = {}
        if self._takes_positions:
            extra["position_ids"] = position_BT.to(runtime.device)
        if plan is not None:
            extra["attention_plan"] = plan
        elif real_BT is not None:
            extra["attention_mask"] = real_BT.long()
        with active_adapter(runtime.adapter):
            output = runtime.model.base_model(ids_BT.to(runtime.device), use_cache=True, **{CACHE: cache}, **extra)
            logits_BV = self._head.logits(output.last_hidden_state[:, -1]).float()
        if plan is not None:
            plan.check_all_asked(runtime.model.config.model_type)
        if not bool(logits_BV.isfinite().all()):
            raise ModelError(
                f"this model's logits are not numbers in {runtime.model.dtype}; load it with another dtype"
            )
        return logits_BV.log_softmax(dim=-1)


def _rows(contexts: Sequence[Context], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and which tokens are real, ``(B, T)`` each, padded on the left."""
    longest = max(len(context) for context in contexts)
    ids_BT = torch.full((len(contexts), longest), pad)
    position_BT = torch.zeros_like(ids_BT)
    real_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, context in enumerate(contexts):
        last = len(context.left) - 1
        begin = longest - len(context)
        ids_BT[row, begin:] = torch.tensor([*context.left[:-1], *context.right, context.left[-1]])
        position_BT[row, begin:] = torch.tensor([*range(last), *context.right_at, last])
        real_BT[row, begin:] = True
    return ids_BT, position_BT, real_BT
