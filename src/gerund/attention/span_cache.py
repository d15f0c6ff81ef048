"""MAGNET's hybrid mask for a span that is still being written, token by token, into a KV cache.

Tokens of the context never look at those of the span. So what a pass over the context alone leaves in a cache
stays right however the span goes on, and the order of the cache's rows does not matter as long as every token
has its true position.

Knows: positions, spans, padding. Does not know: models, caches.
"""

import torch
from torch import Tensor

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.masks import Near, hybrid_visible
from gerund.errors import UnsupportedModelError
from gerund.settings.plan import AttentionPlan, View


class CachedHybrid(BoundPlan):
    """The hybrid plan over cached tokens: first a pass over the context, then one for each new token.

    Unlike its parent it serves many forward passes, and sees more keys than there are queries.

    Args:
        n_layers: number of decoder layers.
        position_BT: true position of each token of the context, in the order in which the model reads them.
        real_BT: 1 for tokens and 0 for padding; None for no padding.
    """

    def __init__(self, n_layers: int, position_BT: Tensor, real_BT: Tensor | None = None) -> None:
        super().__init__(AttentionPlan("hybrid").resolve(n_layers), real_BT, torch.zeros_like(position_BT))
        self.position_BT = position_BT
        self.queries = position_BT.shape[1]
        self._furthest = int(position_BT.max())
        self._has_span = False

    def append(self, position_B: Tensor) -> None:
        """Make room for one more token of each text's span, which the next pass runs."""
        new_B1 = position_B[:, None]
        assert self.span_BT is not None
        self.span_BT = torch.cat([self.span_BT, torch.ones_like(new_B1)], dim=1)
        self.position_BT = torch.cat([self.position_BT, new_B1], dim=1)
        if self.real_BT is not None:
            self.real_BT = torch.cat([self.real_BT, torch.ones_like(new_B1, dtype=torch.bool)], dim=1)
        self.queries = 1
        self._furthest = max(self._furthest, int(position_B.max()))
        self._has_span = True
        self._masks.clear()
        self.asked.clear()

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be kept more than once."""
        assert self.span_BT is not None
        rows = rows.to(self.position_BT.device)
        self.span_BT, self.position_BT = self.span_BT[rows], self.position_BT[rows]
        if self.real_BT is not None:
            self.real_BT = self.real_BT[rows]
        self._masks.clear()

    def check_lengths(self, queries: int, keys: int) -> None:
        """Raise unless the model's cache holds every token so far.

        Raises:
            UnsupportedModelError: it holds fewer, as one that lets go of what lies behind a window.
        """
        known = self.position_BT.shape[1]
        if queries != self.queries or keys != known:
            raise UnsupportedModelError(
                f"this architecture's attention sees {keys} cached tokens where there are {known}, so spans cannot "
                "be written with it; take another architecture"
            )

    def _width(self, length: int) -> int:
        del length
        return self._furthest + 1

    def _visible(self, view: View, length: int, window: Near, device: torch.device) -> Tensor:
        del view
        assert self.span_BT is not None
        real = None if self.real_BT is None else self.real_BT.to(device)
        return hybrid_visible(self.position_BT.to(device), self.span_BT.to(device), length, real_BT=real, window=window)

    def _needs_no_mask(self, view: View, window: Near) -> bool:
        del view
        # Context alone sees all of itself, and a single new token of the span all that there is.
        return window is None and self.real_BT is None and (not self._has_span or self.queries == 1)
