"""MNTP and MSG: masked tokens of the context and missing spans, in one pass under MAGNET's hybrid mask.

MAGNET, sections 3.2.1 and 3.2.3 and Figure 4: of a text, one or more spans are marked; of the remaining tokens,
the context, some are masked. Context tokens see the whole (corrupted) context, span tokens see the context and
their own span so far. Both losses read the output at the position before the token that they predict.

Where only one of the two is trained, the other's corruption is left out: without spans the mask is plainly
bidirectional (LLM2Vec's MNTP), without masked tokens the context is intact.

Knows: how a text is corrupted, the two losses. Does not know: where texts come from.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gerund.attention.interface import BoundPlan
from gerund.attention.plan import AttentionPlan
from gerund.data.masking import mask_tokens, sample_spans
from gerund.training.losses.vocabulary import head_of, token_loss
from gerund.training.objectives.base import (
    Batch,
    Batches,
    TokenLosses,
    padded,
    row_generator,
    text_batch,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gerund.inference.tokens import Tokens
    from gerund.training.corpus.framing import Framing
    from gerund.training.corpus.texts import Texts
    from gerund.training.recipe_objectives import MntpConfig, MsgConfig


class HybridBatches(Batches):
    """Corrupted views of texts.

    Args:
        texts: Token ids by number.
        framing: Puts prompt and special tokens around them.
        mntp: Settings of the masked tokens; None for none.
        msg: Settings of the spans; None for none.
        mask_id: The mask token.
        random_ids: What a random token is drawn from.
        pad: The padding token.
        seed: Decides masks and spans.
    """

    def __init__(
        self,
        texts: "Texts",
        framing: "Framing",
        *,
        mntp: "MntpConfig | None",
        msg: "MsgConfig | None",
        mask_id: int,
        random_ids: np.ndarray,
        pad: int,
        seed: int,
    ) -> None:
        self.texts, self.framing, self.mntp, self.msg = texts, framing, mntp, msg
        self.mask_id, self.random_ids, self.pad, self.seed = mask_id, random_ids, pad, seed

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return ``input_ids`` (corrupted), ``real``, ``labels`` (the text), ``selected`` and ``span``, all (B, T)."""
        del step
        framed, views = [], []
        for number in range(first, first + count):
            text, view = self._view(number)
            framed.append(text)
            views.append(view)
        batch = text_batch(framed, self.pad)
        batch["labels"] = batch["input_ids"]
        batch["input_ids"] = padded([corrupted for corrupted, _, _ in views], self.pad)
        batch["selected"] = padded([selected for _, selected, _ in views]).bool()
        batch["span"] = padded([span for _, _, span in views])
        return batch

    def _view(self, number: int) -> tuple["Tokens", tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return a text; and itself corrupted, which of its tokens were selected, and the span of each token."""
        rng = row_generator(self.seed, number)
        text = self.framing.frame(self.texts.row(number))
        places = self.framing.places(text)
        is_one_span = self.msg is not None and rng.random() < self.msg.whole_share
        if is_one_span:
            # Behind the text an end token would be context, which every token sees: no plain language modelling.
            text = replace(text, ids=text.ids[: places.stop])
        ids_T = np.asarray(text.ids)
        inside_T = np.zeros(len(ids_T), dtype=bool)
        inside_T[places.start : places.stop] = True
        span_T = self._spans(inside_T, is_one_span, rng)
        if self.mntp is None:
            return text, (ids_T, np.zeros_like(inside_T), span_T)
        maskable_T = inside_T & (span_T == 0)
        # The output before it has to belong to the context, too: there is none before the first token, and MNTP
        # "is conducted exclusively with the context tokens" (section 3.2.1).
        if self.mntp.predict == "next":
            maskable_T[1:] &= span_T[:-1] == 0
            maskable_T[0] = False
        corrupted_T, selected_T = mask_tokens(
            ids_T,
            maskable_T,
            rate=self.mntp.rate,
            mask_id=self.mask_id,
            random_ids=self.random_ids,
            rng=rng,
            mask_fraction=self.mntp.mask_share,
            random_fraction=self.mntp.random_share,
        )
        return text, (corrupted_T, selected_T, span_T)

    def _spans(self, inside_T: np.ndarray, is_one_span: bool, rng: np.random.Generator) -> np.ndarray:
        if self.msg is None:
            return np.zeros(len(inside_T), dtype=np.int64)
        if is_one_span:
            whole_T = inside_T.astype(np.int64)
            whole_T[0] = 0  # nothing precedes the first token
            return whole_T
        return sample_spans(
            inside_T, count=self.msg.spans, shortest=self.msg.shortest, longest=self.msg.longest, rng=rng
        )


class HybridLosses(TokenLosses):
    """The cross-entropy of masked tokens (``mntp``) and of span tokens (``msg``).

    Args:
        n_layers: Layers of the model.
        names: Which of the two losses there are.
        predict: ``next``: the output before a masked token predicts it; ``same``: its own (MAGNET, Appendix E).
    """

    def __init__(self, n_layers: int, names: tuple[str, ...], *, predict: str = "next") -> None:
        super().__init__()
        self.names, self.predict = names, predict
        # Without spans the hybrid mask is the bidirectional one, which needs no mask tensor where nothing is padded.
        self.has_spans = "msg" in names
        self.plan = AttentionPlan("hybrid" if self.has_spans else "bidir").resolve(n_layers)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return how many tokens are predicted."""
        found = {"mntp": int(batch["selected"].sum()), "msg": int((batch["span"][:, 1:] > 0).sum())}
        return {name: found[name] for name in self.names}

    def forward(self, model: "PreTrainedModel", batch: Batch) -> dict[str, Tensor]:
        """Return the summed cross-entropies; MAGNET, equations 2 and 4 without their constant divisors."""
        span_BT = batch["span"] if self.has_spans else None
        bound = BoundPlan(self.plan, batch["real"], span_BT)
        output = model.base_model(input_ids=batch["input_ids"], attention_plan=bound, use_cache=False)
        hidden_BTD = output.last_hidden_state
        head, parameters = head_of(model)
        losses = {}
        for name in self.names:
            wanted_BT = batch["selected"] if name == "mntp" else batch["span"] > 0
            if name == "mntp" and self.predict == "same":
                states_ND = hidden_BTD[wanted_BT]
            else:
                states_ND = hidden_BTD[:, :-1][wanted_BT[:, 1:]]
                wanted_BT = torch.cat([torch.zeros_like(wanted_BT[:, :1]), wanted_BT[:, 1:]], dim=1)
            losses[name] = token_loss(head, states_ND, batch["labels"][wanted_BT], parameters=parameters)
        return losses
