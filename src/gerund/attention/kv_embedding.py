"""KV-Embedding: the key and the value of the last token stand before the text, where every token sees them.

Tang and Yang, 2026, "KV-Embedding: Training-free Text Embedding via Internal KV Re-routing in Decoder-only LLMs" (arXiv
2601.01046). No code was released; this follows the paper's abstract (one pass, each layer's own keys and values) and
what two independent programs agree on (keys as they are after their rotation, a bias of 1).

Knows: masks, places of tokens. Does not know: models, texts.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

# What is added to the scores of the key that stands before a text (KV-Embedding, section 3.2.2).
_PREFIX_BIAS = 1.0


@dataclass
class Rerouting:
    """In which layers the key and the value of each text's last token stand before the text, seen by every token.

    A second copy of a key with its value, at a bias b, is the key itself with more weight: b is added to its score
    where a token does not see the original, and log(1 + e^b) where it does. So keys and values stay as they are.

    Attributes:
        layers: their indices.
        last_B: the place of each text's last token.
        reached: the layers that made their mask so.
    """

    layers: frozenset[int]
    last_B: Tensor
    reached: set[int] = field(default_factory=set)

    def mask(self, see: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores ``(B, 1, T, T)`` of a layer.

        Args:
            see: what its tokens see by themselves ``(B or 1, 1, T, T)``.
            dtype: of the scores.
        """
        see_B1TT = see.expand(len(self.last_B), *see.shape[1:])
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=see.device)
        added_B1TT = torch.where(see_B1TT, torch.zeros_like(hidden), hidden)
        place_B1T1 = self.last_B.to(see.device)[:, None, None, None].expand(*see_B1TT.shape[:3], 1)
        twice = torch.full_like(hidden, math.log1p(math.exp(_PREFIX_BIAS)))
        own_B1T1 = torch.where(see_B1TT.gather(3, place_B1T1), twice, torch.full_like(hidden, _PREFIX_BIAS))
        return added_B1TT.scatter(3, place_B1T1, own_B1T1)
