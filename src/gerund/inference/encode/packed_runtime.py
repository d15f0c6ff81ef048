"""Encode by a packed network: masks, states and the check that every layer obeys the plan; imports no torch.

Shapes: B texts, T tokens, D width, P different masks, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gerund.attention.masks import visible
from gerund.attention.preemption import pause
from gerund.errors import UnsupportedModelError
from gerund.inference.encode.batches import Encodes
from gerund.inference.tokens import Tokens
from gerund.models.light_head import LightHead
from gerund.models.light_tokenizer import LightTokenizer
from gerund.models.vectors import Transform
from gerund.packed.network import MASKED, PackedNetwork, moved_by_layer
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import ResolvedPlan

# Tokens of a pass: products are no faster with more, and memory grows.
_TOKENS_AT_ONCE = 128
# Tokens of the text that the layers are looked at with.
_PROBE_LENGTH = 3
# A smaller movement, as a part of a disturbed token's own, is rounding.
_LEAK = 1e-4


@dataclass(frozen=True)
class PackedRuntime(Encodes):
    """A packed network prepared to be used as an encoder.

    ``model`` says what prompts and lengths ask of a model of transformers; ``adapted`` which of the network's adapters
    is used.
    """

    network: PackedNetwork
    model: Any
    tokenizer: LightTokenizer
    config: EncoderConfig
    plan: ResolvedPlan
    adapted: str | None = None
    head: LightHead | None = None
    transform: Transform | None = None
    why_no_vectors: str = ""
    device_type: str = "cpu"
    autocast: None = None

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.network.shape.n_layers

    @property
    def state_width(self) -> int:
        """Size of a hidden state."""
        return self.network.shape.width

    def states(self, texts: Sequence[Tokens]) -> tuple[np.ndarray, np.ndarray]:
        """Run one batch: last hidden states ``(B, T, D)``, and the position at which each text begins ``(B,)``: 0."""
        longest = max(map(len, texts))
        ids_BT = np.full((len(texts), longest), self.tokenizer.pad_token_id or 0, np.int64)
        for row_T, text in zip(ids_BT, texts, strict=True):
            row_T[: len(text)] = text.ids
        real_BT = np.arange(longest) < np.array([len(text) for text in texts])[:, None]
        rows = max(1, _TOKENS_AT_ONCE // longest)
        parts = [slice(first, first + rows) for first in range(0, len(texts), rows)]
        states = []
        for part in parts:
            pause()
            states.append(self._states(ids_BT[part], real_BT[part]))
        return states[0] if len(states) == 1 else np.concatenate(states), np.zeros(len(texts), np.int64)

    def _states(self, ids_BT: np.ndarray, real_BT: np.ndarray) -> np.ndarray:
        masks_PB1TT, mask_of_layer_L = masks_of(self.plan, self.network.shape.windows, real_BT)
        states_BTD = self.network.run(
            ids_BT,
            masks_PB1TS=masks_PB1TT,
            mask_of_layer_L=mask_of_layer_L,
            adapted=self.adapted,
            depth=len(self.plan.views),
        ).states
        assert states_BTD is not None
        return states_BTD


def masks_of(plan: ResolvedPlan, windows: Sequence[int | None], real_BT: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return the different masks of a plan ``(P, B, 1, T, T)``, additive, and which of them each layer takes."""
    T = real_BT.shape[1]
    # A window that hides nothing is none, so that layers share their masks.
    kinds = [
        (view, window if window is not None and window < T else None)
        for view, window in zip(plan.views, windows, strict=False)
    ]
    different = list(dict.fromkeys(kinds))
    see_PB1TT = np.stack([visible(view, T, real_BT=real_BT, window=window) for view, window in different])
    return np.where(see_PB1TT, np.float32(0), MASKED), [different.index(kind) for kind in kinds]


def verify(network: PackedNetwork, plan: ResolvedPlan) -> None:
    """Refuse a network some layer of which does not read the tokens that a plan says.

    Raises:
        UnsupportedModelError: a layer sees what it must not, or does not see what it should.
    """
    ids_T = np.random.default_rng(0).integers(0, network.shape.vocabulary, _PROBE_LENGTH)
    masks_P11TT, mask_of_layer_L = masks_of(plan, network.shape.windows, np.ones((1, _PROBE_LENGTH), bool))
    moved_LTT = moved_by_layer(network, ids_T, masks_P11TT[:, 0], mask_of_layer_L)
    see_LTT = masks_P11TT[mask_of_layer_L, 0, 0] == 0
    sides = np.triu(np.ones((_PROBE_LENGTH, _PROBE_LENGTH), bool), 1)
    for layer, (moved_TT, see_TT) in enumerate(zip(moved_LTT, see_LTT, strict=True)):
        leaks = bool(((moved_TT > _LEAK) & ~see_TT).any())
        counts = [((see_TT & side & (moved_TT > 0)).sum(), (see_TT & side).sum()) for side in (sides, sides.T)]
        if leaks or any(2 * seen < wanted for seen, wanted in counts):
            raise UnsupportedModelError(
                f"layer {layer} of this {network.shape.architecture} model does not read the tokens that the attention "
                "plan says; load it with runtime='torch'"
            )
