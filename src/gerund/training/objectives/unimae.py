"""Train UniMAE: masked auto-regression, and reconstruction of the text from the state of its end token.

UniMAE, sections 2.3 and 2.4: the model reads a corrupted text causally. Every position predicts the original
next token (MAR). The state of the end token, with what a one-layer decoder sees of the original tokens, has to
give the text back (MRC). The decoder serves the training only.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from gerund.data.masking import corrupt
from gerund.errors import ConfigError
from gerund.poolings import pool
from gerund.training.corpus.texts import Texts
from gerund.training.corpus.tokenizer import InputFormatter, pick_mask_token
from gerund.training.losses.vocabulary import head_of, token_loss
from gerund.training.objectives.base import (
    Batch,
    Batches,
    Context,
    Objective,
    TokenLosses,
    padded,
    row_generator,
    text_batch,
)
from gerund.training.objectives.settings import UnimaeConfig

_FEED_FORWARD = 4


def prepare(context: Context, config: UnimaeConfig) -> Objective:
    """Return batches of corrupted texts, and both losses with their decoder."""
    formatter = context.formatter(config)
    sizes = context.model.model.config.get_text_config(decoder=True)
    width = context.model.runtime.state_width
    mask = pick_mask_token(context.model.tokenizer, config.mask_token)
    return context.text_objective(
        config.kind,
        config,
        lambda texts, seed: UnimaeBatches(texts, formatter, config, mask_id=mask, pad=context.model.pad, seed=seed),
        UnimaeLosses(width, config.heads or sizes.num_attention_heads, config.length - formatter.overhead),
        overhead=formatter.overhead,
        configs={"mar": config, "mrc": config},
        factors={"mar": config.alpha},
    )


@dataclass(eq=False)
class UnimaeBatches(Batches):
    """Corrupted texts that end with the end token, which ``formatter`` appends; ``seed`` determines both masks."""

    texts: Texts
    formatter: InputFormatter
    config: UnimaeConfig
    mask_id: int
    pad: int
    seed: int

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return a batch.

        ``input_ids`` (corrupted), ``real``, ``labels`` (the whole text) and ``inside`` (True for the text's own
        tokens) are ``(B, T)``; ``text`` (only the text's own tokens) and ``text_real`` ``(B, S)``; ``sees``
        ``(B, S, 1 + S)`` is what each position of the decoder sees.
        """
        whole, corrupted, inside, texts, seeds = [], [], [], [], []
        for number in numbers:
            text = self.formatter.format(self.texts.row(number))
            rng = row_generator(self.seed, number)
            places = self.formatter.places(text)
            inside_T = np.zeros(len(text), dtype=bool)
            inside_T[places.start : places.stop] = True
            view_T, _ = corrupt(np.asarray(text.ids), inside_T, rate=self.config.p_mar, mask_id=self.mask_id, rng=rng)
            whole.append(text)
            corrupted.append(view_T)
            inside.append(inside_T)
            texts.append(text.ids[places.start : places.stop])
            seeds.append(int(rng.integers(2**62)))
        batch = text_batch(whole, self.pad)
        batch["labels"] = batch["input_ids"]
        batch["input_ids"] = padded(corrupted, self.pad)
        batch["inside"] = padded(inside).bool()
        batch["text"] = padded(texts, self.pad)
        lengths_B = torch.tensor([len(ids) for ids in texts])
        batch["text_real"] = torch.arange(batch["text"].shape[1]) < lengths_B[:, None]
        batch["sees"] = torch.cat([
            # One text at a time, so that a text's mask does not depend on its neighbours in the batch.
            self._sees(batch["text_real"][row], length, seed)
            for row, (length, seed) in enumerate(zip(lengths_B.tolist(), seeds, strict=True))
        ])  # fmt: skip
        return batch

    def _sees(self, real_S: Tensor, length: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        width = len(real_S)
        sees_text = reconstruction_mask(torch.ones(1, length, dtype=torch.bool), self.config.p_mrc, generator)
        sees = torch.zeros(1, width, 1 + width, dtype=torch.bool)
        sees[..., 0] = True
        sees[:, :length, : 1 + length] = sees_text
        return sees


class UnimaeLosses(TokenLosses):
    """``mar`` (equation 1) and ``mrc`` (equation 5), with a decoder of ``heads`` attention heads."""

    heads: nn.ModuleDict

    def __init__(self, width: int, heads: int, longest: int) -> None:
        self.heads = nn.ModuleDict({"decoder": ReconstructionDecoder(width, heads, longest)})

    @property
    def decoder(self) -> nn.Module:
        """What rebuilds a text."""
        return self.heads["decoder"]

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return how many tokens are predicted; a text's first token has no predecessor where nothing begins it."""
        return {"mar": int(batch["inside"][:, 1:].sum()), "mrc": int(batch["text_real"].sum())}

    def __call__(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Return the summed cross-entropies."""
        # Padding stands on the right, where causal attention does not look.
        hidden_BTD = model.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
        head, parameters = head_of(model)
        inside_BT = batch["inside"][:, 1:]
        mar = token_loss(head, hidden_BTD[:, :-1][inside_BT], batch["labels"][:, 1:][inside_BT], parameters=parameters)
        end_BD = pool(hidden_BTD, batch["real"], "last")
        embeddings_BSD = model.get_input_embeddings()(batch["text"])
        states_BSD = self.decoder(end_BD, embeddings_BSD, batch["text_real"], batch["sees"])
        real_BS = batch["text_real"]
        mrc = token_loss(head, states_BSD[real_BS], batch["text"][real_BS], parameters=parameters)
        return {"mar": mar, "mrc": mrc}


class ReconstructionDecoder(nn.Module):
    """One transformer layer from scratch that predicts every token of a text (UniMAE, section 2.4).

    Queries are the text's vector at every position, keys and values the vector and the embeddings of the *other*
    tokens, many of them hidden: what a query cannot see has to come from the vector. Vector and embeddings are
    normalised first and positions begin with variance 1, so that none of them drowns another. Texts have at most
    ``max_positions`` tokens.
    """

    def __init__(self, width: int, heads: int, max_positions: int) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"{heads} attention heads do not divide a width of {width}")
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

    def forward(self, h_BD: Tensor, embeddings_BTD: Tensor, real_BT: Tensor, mask_BTS: Tensor) -> Tensor:
        """Return states ``(B, T, D)`` whose row i predicts token i itself, through the language model's head.

        ``h_BD`` is the last hidden state of each text's last token, ``embeddings_BTD`` those of the original text,
        before any corruption. Padding may be on either side; its rows have no meaning. ``mask_BTS`` ``(B, T, 1 + T)``
        says which position attends to which.
        """
        n_texts, n_tokens = real_BT.shape
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
    query is left with nothing. (The paper calls ``p_mrc`` a mask ratio, and equation 4 lets through what it samples.)
    Returns bool ``(B, T, 1 + T)``; padding is never seen.

    >>> reconstruction_mask(torch.tensor([[True, True, False]]), 1.0).int().tolist()
    [[[1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]]]
    """
    n_texts, n_tokens = real_BT.shape
    source = real_BT.device if generator is None else generator.device
    sampled_BTT = torch.rand(n_texts, n_tokens, n_tokens, generator=generator, device=source).to(real_BT.device)
    others_TT = ~torch.eye(n_tokens, dtype=torch.bool, device=real_BT.device)
    # rand never reaches 1: with p_mrc = 0 nothing is kept, with 1 everything is.
    kept_BTT = (sampled_BTT >= 1 - p_mrc) & others_TT & real_BT.bool()[:, None]
    return torch.cat([kept_BTT.new_ones(n_texts, n_tokens, 1), kept_BTT], dim=2)
