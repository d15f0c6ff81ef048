"""Train masked next-token prediction and missing-span generation in one pass under MAGNET's hybrid mask (MNTP, MSG).

MAGNET, sections 3.2.1 and 3.2.3 and Figure 4: of a text, one or more spans are marked; of the remaining tokens,
the context, some are masked. Context tokens see the whole (corrupted) context, span tokens see the context and
their span so far. Both losses read the output at the position before the token that they predict.

Where only one of the two is trained, the other's corruption is left out: without spans the mask is plainly
bidirectional (LLM2Vec's MNTP), without masked tokens the context is intact.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gerund.attention.bound_plan import BoundPlan
from gerund.data.masking import mask_tokens, sample_spans
from gerund.inference.tokens import Tokens
from gerund.settings.plan import AttentionPlan
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
from gerund.training.objectives.sections import ObjectiveConfig
from gerund.training.objectives.settings import MntpConfig, MsgConfig


def prepare(context: Context, *configs: MntpConfig | MsgConfig) -> Objective:
    """Return one of the two objectives, or both in one pass."""
    mntp = next((config for config in configs if isinstance(config, MntpConfig)), None)
    msg = next((config for config in configs if isinstance(config, MsgConfig)), None)
    by_name: dict[str, ObjectiveConfig] = {config.kind: config for config in (mntp, msg) if config is not None}
    config = mntp or msg
    assert config is not None
    formatter = context.formatter(config)
    tokenizer = context.model.tokenizer
    special = set(tokenizer.all_special_ids)
    vocabulary = min(len(tokenizer), context.model.vocabulary)
    mask_id = pick_mask_token(tokenizer, mntp.mask_token) if mntp is not None else 0
    random_ids = np.array([token for token in range(vocabulary) if token not in special])
    pad = context.model.pad
    predict = mntp.predict if mntp is not None else "next"
    by_paper = tuple(c.kind for c in (mntp, msg) if c is not None and c.normalisation == "paper")
    losses = HybridLosses(context.model.n_layers, tuple(by_name), predict=predict, by_paper=by_paper)
    return context.text_objective(
        "+".join(by_name),
        config,
        lambda texts, seed: HybridBatches(texts, formatter, mntp, msg, mask_id, random_ids, pad, seed),
        losses,
        overhead=formatter.overhead,
        configs=by_name,
    )


@dataclass(eq=False)
class HybridBatches(Batches):
    """Corrupted views of texts: ``mntp`` masks tokens, replacing some by others of ``random_ids``, ``msg`` spans."""

    texts: Texts
    formatter: InputFormatter
    mntp: MntpConfig | None
    msg: MsgConfig | None
    mask_id: int
    random_ids: np.ndarray
    pad: int
    seed: int

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return ``input_ids`` (corrupted), ``real``, ``labels`` (the text), ``selected`` and ``span``, all (B, T)."""
        texts, views = zip(*map(self._view, numbers), strict=True)
        batch = text_batch(texts, self.pad)
        batch["labels"] = batch["input_ids"]
        batch["input_ids"] = padded([corrupted for corrupted, _, _ in views], self.pad)
        batch["selected"] = padded([selected for _, selected, _ in views]).bool()
        batch["span"] = padded([span for _, _, span in views])
        return batch

    def _view(self, number: int) -> tuple[Tokens, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return a text; and itself corrupted, which of its tokens were selected, and the span of each token."""
        rng = row_generator(self.seed, number)
        text = self.formatter.format(self.texts.row(number))
        places = self.formatter.places(text)
        is_one_span = self.msg is not None and rng.random() < self.msg.whole_fraction
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
            mask_fraction=self.mntp.mask_fraction,
            random_fraction=self.mntp.random_fraction,
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
    """The cross-entropy of masked tokens (``mntp``) and of span tokens (``msg``), whichever ``names`` lists.

    With ``predict`` ``next`` the output before a masked token predicts it, with ``same`` its own (MAGNET, Appendix E).
    The losses in ``by_paper`` are divided as in the paper's equations; the others by the tokens that they predict.
    """

    def __init__(
        self, n_layers: int, names: tuple[str, ...], *, predict: str = "next", by_paper: tuple[str, ...] = ()
    ) -> None:
        self.names, self.predict, self.by_paper = names, predict, by_paper
        # Without spans the hybrid mask is the bidirectional one, which needs no mask tensor where nothing is padded.
        self.has_spans = "msg" in names
        self.plan = AttentionPlan("hybrid" if self.has_spans else "bidir").resolve(n_layers)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return what each sum is divided by: the tokens that are predicted; in the paper N times L, and N."""
        predicted = {"mntp": int(batch["selected"].sum()), "msg": int((batch["span"][:, 1:] > 0).sum())}
        paper = {"mntp": int(batch["real"].sum()), "msg": len(batch["real"])}
        return {name: (paper if name in self.by_paper else predicted)[name] for name in self.names}

    def __call__(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
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
