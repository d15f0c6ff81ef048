"""UniMAE's decoder: rebuilds a text from one vector and a random part of its other tokens.

Knows: a text's vector, the embeddings of its tokens, who may see whom. Does not know: the language model, its head,
the loss. It is used in training only and then dropped.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from gerund.errors import ConfigError

_FEED_FORWARD = 4


class ReconstructionDecoder(nn.Module):
    """One transformer layer from scratch that predicts every token of a text (UniMAE, section 2.4).

    Queries are the text's vector at every position, keys and values the vector and the embeddings of the *other*
    tokens, many of them hidden: what a query cannot see has to come from the vector. Vector and embeddings are
    normalised first and positions begin with variance 1, so that none of them drowns another.

    Args:
        width: of the text's vector and of the embeddings.
        heads: attention heads; they divide the width.
        max_positions: tokens of the longest text.

    Raises:
        ConfigError: the heads do not divide the width.
    """

    def __init__(self, width: int, heads: int, max_positions: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigError(f"{heads} attention heads do not divide a width of {width}")
        if max_positions < 1:
            raise ConfigError(f"a reconstruction decoder has at least one position, not {max_positions}")
        self.width, self.heads = width, heads
        self.positions = nn.Parameter(torch.randn(max_positions, width))
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, _FEED_FORWARD * width), nn.GELU(), nn.Linear(_FEED_FORWARD * width, width)
        )
        self.final_norm = nn.LayerNorm(width)
        self.to_head = nn.Linear(width, width)

    def forward(
        self,
        h_BD: Tensor,
        embeddings_BTD: Tensor,
        real_BT: Tensor,
        p_mrc: float = 0.5,
        generator: torch.Generator | None = None,
        mask_BTS: Tensor | None = None,
    ) -> Tensor:
        """Return states whose row i predicts token i itself, through the language model's head or token table.

        Args:
            h_BD: the vector of each text, the last hidden state of its last token.
            embeddings_BTD: input embeddings of the original text, before any corruption.
            real_BT: True for tokens, False for padding on either side.
            p_mrc: how likely a query sees each other token.
            generator: where the random numbers come from; None takes torch's own.
            mask_BTS: ``(B, T, 1 + T)``, which position attends to which, instead of sampling it.

        Returns:
            ``(B, T, D)``. Rows of padding hold numbers without meaning.

        Raises:
            ConfigError: the texts are longer than the decoder has positions, or ``p_mrc`` is no probability.
        """
        n_texts, n_tokens = real_BT.shape
        if n_tokens > len(self.positions):
            raise ConfigError(
                f"texts of {n_tokens} tokens are longer than the {len(self.positions)} positions of the "
                "reconstruction decoder; shorten the texts or give it more"
            )
        if mask_BTS is None:
            mask_BTS = reconstruction_mask(real_BT, p_mrc, generator)
        vector_B1D = self._normalised(h_BD)[:, None]
        # Counted over tokens, so that padding on the left moves nothing.
        positions_BTD = self.positions[(real_BT.long().cumsum(dim=1) - 1).clamp(min=0)]
        queries_BTD = vector_B1D + positions_BTD
        seen_BSD = torch.cat([vector_B1D, self._normalised(embeddings_BTD) + positions_BTD], dim=1)
        attended_BHTd = functional.scaled_dot_product_attention(
            self._split(self.query(queries_BTD)),
            self._split(self.key(seen_BSD)),
            self._split(self.value(seen_BSD)),
            attn_mask=mask_BTS[:, None],
        )
        attended_BTD = attended_BHTd.transpose(1, 2).reshape(n_texts, n_tokens, self.width)
        states_BTD = queries_BTD + self.attended(attended_BTD)
        states_BTD = states_BTD + self.feed_forward(self.norm(states_BTD))
        predicting_BTD: Tensor = self.to_head(self.final_norm(states_BTD))
        return predicting_BTD

    def _normalised(self, rows: Tensor) -> Tensor:
        return functional.layer_norm(rows.to(self.positions.dtype), (self.width,))

    def _split(self, rows_BTD: Tensor) -> Tensor:
        return rows_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def reconstruction_mask(real_BT: Tensor, p_mrc: float, generator: torch.Generator | None = None) -> Tensor:
    """Sample which of ``[h, x_1, ..., x_T]`` each query sees (UniMAE, equation 4).

    Each query sees h, never its own token, and each other token where ``B_ij = 1``, which is so with probability
    ``p_mrc``, sampled for every pair of the two. Equation 4 would hide h at random as well; here it never is, so no
    query is left with nothing.

    Args:
        real_BT: True for tokens, False for padding; what is padding is never seen.
        p_mrc: how likely a query sees another token. The paper calls it a mask ratio, and equation 4 lets through
            what it samples.
        generator: where the random numbers come from; None takes torch's own.

    Returns:
        Bool ``(B, T, 1 + T)``.

    Raises:
        ConfigError: ``p_mrc`` is no probability.

    >>> reconstruction_mask(torch.tensor([[True, True, False]]), 1.0).int().tolist()
    [[[1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]]]
    """
    if not 0 <= p_mrc <= 1:
        raise ConfigError(f"a probability lies between 0 and 1, unlike p_mrc={p_mrc}")
    n_texts, n_tokens = real_BT.shape
    source = real_BT.device if generator is None else generator.device
    sampled_BTT = torch.rand(n_texts, n_tokens, n_tokens, generator=generator, device=source).to(real_BT.device)
    others_TT = ~torch.eye(n_tokens, dtype=torch.bool, device=real_BT.device)
    # rand never reaches 1: with p_mrc = 0 nothing is kept, with 1 everything is.
    kept_BTT = (sampled_BTT >= 1 - p_mrc) & others_TT & real_BT.bool()[:, None]
    return torch.cat([kept_BTT.new_ones(n_texts, n_tokens, 1), kept_BTT], dim=2)
