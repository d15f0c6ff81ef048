"""UniMAE: masked auto-regression, and reconstruction of the text from the state of its end token.

UniMAE, sections 2.3 and 2.4: the model reads a corrupted text causally. Every position predicts the original
next token (MAR). The state of the end token, with what a one-layer decoder sees of the original tokens, has to
give the text back (MRC). The decoder serves the training only.

Knows: how a text is corrupted, the two losses, the decoder. Does not know: where texts come from.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from gerund.data.masking import corrupt
from gerund.training.objectives.base import Batch, Batches, Objective, Purpose, TextConfig, TokenLosses
from gerund.training.objectives.batches import padded, row_generator, text_batch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.corpus.texts import Texts
    from gerund.training.objectives.context import Context
    from gerund.training.recipe import Recipe


class UnimaeConfig(TextConfig):
    """Masked auto-regression and reconstruction from the end token's state (UniMAE, sections 2.3 and 2.4)."""

    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_TEXTS
    seed_offset: ClassVar[int | None] = 20

    kind: Literal["unimae"]
    p_mar: float = Field(default=0.5, ge=0, lt=1)
    """Fraction of the input's tokens that become the mask token; 0 is plain language modelling (Appendix F)."""
    p_mrc: float = Field(default=0.5, ge=0, le=1)
    """How likely each position of the decoder sees each other token (equation 4: 1 lets all of them through)."""
    alpha: float = Field(default=0.1, ge=0)
    """Weight of the auto-regressive loss beside the reconstruction (equation 6)."""
    mask_token: str | None = None
    """Text of the mask token; left out, the tokenizer's own, else ``_``."""
    heads: int | None = Field(default=None, ge=1)
    """Attention heads of the decoder; left out, as many as the model has."""

    def check(self, recipe: "Recipe") -> None:
        """Refuse an encoder that reads anything but the end token's state."""
        super().check(recipe)
        wanted = {"attention": "causal", "pooling": "last", "append_eos": True}
        if recipe.encoder.skips:
            raise ValueError("unimae trains states without skips: leave them out, they would be in its vectors alone")
        if any(getattr(recipe.encoder, name) != value for name, value in wanted.items()):
            raise ValueError(
                "unimae compresses a text into its end token's state, so the recipe needs "
                "encoder: {attention: causal, pooling: last, append_eos: true}"
            )

    def prepare(self, context: "Context") -> Objective:
        """Return batches of corrupted texts, and both losses with their decoder."""
        from gerund.training.corpus.tokenizer import pick_mask_token

        formatter = context.formatter(self)
        sizes = context.model.model.config.get_text_config(decoder=True)
        width = context.model.runtime.state_width
        mask = pick_mask_token(context.model.tokenizer, self.mask_token)

        def batches(texts: Any, seed: int) -> Batches:
            return UnimaeBatches(texts, formatter, self, mask_id=mask, pad=context.model.pad, seed=seed)

        return context.text_objective(
            self.kind,
            self,
            batches,
            UnimaeLosses(width, self.heads or sizes.num_attention_heads, self.length - formatter.overhead),
            overhead=formatter.overhead,
            configs={"mar": self, "mrc": self},
            factors={"mar": self.alpha},
        )


class UnimaeBatches(Batches):
    """Corrupted texts that end with the end token.

    Args:
        texts: Token ids by number.
        formatter: Puts special tokens around them; appends the end token.
        config: Fraction of masked tokens, and of the others that the decoder sees.
        mask_id: The mask token.
        pad: The padding token.
        seed: Determines both masks.
    """

    def __init__(
        self, texts: "Texts", formatter: "InputFormatter", config: UnimaeConfig, *, mask_id: int, pad: int, seed: int
    ) -> None:
        self.texts, self.formatter, self.config = texts, formatter, config
        self.mask_id, self.pad, self.seed = mask_id, pad, seed

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return a batch.

        ``input_ids`` (corrupted), ``real``, ``labels`` (the whole text) and ``inside`` (True for the text's own
        tokens) are ``(B, T)``; ``text`` (only the text's own tokens) and ``text_real`` ``(B, S)``; ``sees``
        ``(B, S, 1 + S)`` is what each position of the decoder sees.
        """
        import torch

        del step
        whole, corrupted, inside, texts, seeds = [], [], [], [], []
        for number in range(first, first + count):
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

    def _sees(self, real_S: "Tensor", length: int, seed: int) -> "Tensor":
        import torch

        from gerund.training.losses.reconstruction import reconstruction_mask

        generator = torch.Generator().manual_seed(seed)
        width = len(real_S)
        own = reconstruction_mask(torch.ones(1, length, dtype=torch.bool), self.config.p_mrc, generator)
        sees = torch.zeros(1, width, 1 + width, dtype=torch.bool)
        sees[..., 0] = True
        sees[:, :length, : 1 + length] = own
        return sees


class UnimaeLosses(TokenLosses):
    """``mar`` (equation 1) and ``mrc`` (equation 5).

    Args:
        width: Size of a hidden state.
        heads: Attention heads of the decoder.
        longest: Tokens of the longest text.
    """

    heads: "nn.ModuleDict"

    def __init__(self, width: int, heads: int, longest: int) -> None:
        from torch import nn

        from gerund.training.losses.reconstruction import ReconstructionDecoder

        self.heads = nn.ModuleDict({"decoder": ReconstructionDecoder(width, heads, longest)})

    @property
    def decoder(self) -> "nn.Module":
        """What rebuilds a text."""
        return self.heads["decoder"]

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return how many tokens are predicted; a text's first token has no predecessor where nothing begins it."""
        return {"mar": int(batch["inside"][:, 1:].sum()), "mrc": int(batch["text_real"].sum())}

    def __call__(self, model: "PreTrainedModel", batch: Batch) -> "dict[str, Tensor]":
        """Return the summed cross-entropies."""
        from gerund.poolings import pool
        from gerund.training.losses.vocabulary import head_of, token_loss

        # Padding stands on the right, where causal attention does not look.
        hidden_BTD = model.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
        head, parameters = head_of(model)
        inside_BT = batch["inside"][:, 1:]
        mar = token_loss(head, hidden_BTD[:, :-1][inside_BT], batch["labels"][:, 1:][inside_BT], parameters=parameters)
        end_BD = pool(hidden_BTD, batch["real"], "last")
        embeddings_BSD = model.get_input_embeddings()(batch["text"])
        states_BSD = self.decoder(end_BD, embeddings_BSD, batch["text_real"], mask_BTS=batch["sees"])
        real_BS = batch["text_real"]
        mrc = token_loss(head, states_BSD[real_BS], batch["text"][real_BS], parameters=parameters)
        return {"mar": mar, "mrc": mrc}
