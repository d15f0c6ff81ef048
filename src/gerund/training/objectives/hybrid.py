"""MNTP and MSG: masked tokens of the context and missing spans, in one pass under MAGNET's hybrid mask.

MAGNET, sections 3.2.1 and 3.2.3 and Figure 4: of a text, one or more spans are marked; of the remaining tokens,
the context, some are masked. Context tokens see the whole (corrupted) context, span tokens see the context and
their own span so far. Both losses read the output at the position before the token that they predict.

Where only one of the two is trained, the other's corruption is left out: without spans the mask is plainly
bidirectional (LLM2Vec's MNTP), without masked tokens the context is intact.

Knows: how a text is corrupted, the two losses. Does not know: where texts come from.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from gerund.data.masking import mask_tokens, sample_spans
from gerund.errors import ConfigError
from gerund.settings.plan import AttentionPlan
from gerund.training.objectives.base import Batch, Batches, Objective, ObjectiveConfig, Purpose, TextConfig, TokenLosses
from gerund.training.objectives.batches import padded, row_generator, text_batch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from gerund.inference.tokens import Tokens
    from gerund.settings.encoder import EncoderConfig
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.corpus.texts import Texts
    from gerund.training.objectives.context import Context


Normalisation = Literal["predicted", "paper"]
"""What a loss is divided by: the tokens that it predicts, or what MAGNET's equations divide by."""


class MntpConfig(TextConfig):
    """Masked next-token prediction (MAGNET, section 3.2.1; LLM2Vec)."""

    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_TEXTS
    seed_offset: ClassVar[int | None] = 10
    renamed: ClassVar[Mapping[str, str]] = {"mask_share": "mask_fraction", "random_share": "random_fraction"}

    kind: Literal["mntp"]
    rate: float = Field(default=0.2, gt=0, lt=1)
    """Fraction of the context's tokens that are selected."""
    mask_fraction: float = Field(default=0.8, ge=0, le=1)
    """Fraction of the selected tokens that become the mask token."""
    random_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the selected tokens that become a random token; the others stay."""
    mask_token: str | None = None
    """Text of the mask token; left out, the tokenizer's own, else ``_``."""
    predict: Literal["next", "same"] = "next"
    """``next``: the output before a masked token predicts it. ``same``: its own output does, as in BERT (MTP,
    MAGNET's Appendix E), for comparison."""
    normalisation: Normalisation = "predicted"
    """``predicted``: the mean over the tokens that are predicted. ``paper``: their sum divided by all tokens of the
    batch (equation 2), so with a rate of 0.2 it counts a fifth."""

    @model_validator(mode="after")
    def _fractions_fit(self) -> Self:
        if self.mask_fraction + self.random_fraction > 1:
            raise ValueError("mask_fraction and random_fraction together are more than 1")
        return self

    def plans(self, encoder: "EncoderConfig") -> list[AttentionPlan]:
        """Return the plan without spans."""
        del encoder
        return [AttentionPlan("bidir")]

    def joint(self, other: ObjectiveConfig) -> "Callable[[Context], Objective] | None":
        """Return what prepares both objectives in one pass."""
        return _one_pass(self, other) if isinstance(other, MsgConfig) else None

    def prepare(self, context: "Context") -> Objective:
        """Return batches with masked tokens alone."""
        return _prepare(context, self, None)


class MsgConfig(TextConfig):
    """Missing-span generation under the hybrid mask (MAGNET, section 3.2.3)."""

    purpose: ClassVar[Purpose] = Purpose.FILL
    seed_offset: ClassVar[int | None] = 10
    renamed: ClassVar[Mapping[str, str]] = {"whole_share": "whole_fraction"}

    kind: Literal["msg"]
    spans: int = Field(default=2, ge=1)
    """A text gets one to so many spans."""
    shortest: int = Field(default=4, ge=1)
    """Tokens in a span, at least."""
    longest: int = Field(default=128, ge=1)
    """Tokens in a span, at most."""
    whole_fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the texts that are one single span, which is plain language modelling (section 3.3)."""
    shared_pass: bool = True
    """Whether mntp and msg work on one corrupted view in one pass, where both are in the recipe."""
    normalisation: Normalisation = "predicted"
    """``predicted``: the mean over the span tokens. ``paper``: their sum divided by the number of texts (equation 4),
    so it counts as many times as much as a text has span tokens."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} is above longest {self.longest}")
        return self

    def plans(self, encoder: "EncoderConfig") -> list[AttentionPlan]:
        """Return the plan with spans."""
        del encoder
        return [AttentionPlan("hybrid")]

    def joint(self, other: ObjectiveConfig) -> "Callable[[Context], Objective] | None":
        """Return what prepares both objectives in one pass."""
        return _one_pass(other, self) if isinstance(other, MntpConfig) else None

    def prepare(self, context: "Context") -> Objective:
        """Return batches with missing spans alone."""
        return _prepare(context, None, self)


# What has to agree for one pass.
_SHARED = ("batch_size", "micro_batch_size", "length", "sources", "unit", "min_words")


def _one_pass(mntp: MntpConfig, msg: MsgConfig) -> "Callable[[Context], Objective] | None":
    differing = [name for name in _SHARED if getattr(mntp, name) != getattr(msg, name)]
    if msg.shared_pass and differing:
        raise ConfigError(
            f"mntp and msg share a pass and must agree in {', '.join(differing)}; "
            "make them equal, or set shared_pass: false for msg"
        )
    return (lambda context: _prepare(context, mntp, msg)) if msg.shared_pass else None


def _prepare(context: "Context", mntp: MntpConfig | None, msg: MsgConfig | None) -> Objective:
    """Return one of the two objectives, or both in one pass."""
    from gerund.training.corpus.tokenizer import pick_mask_token

    config = mntp or msg
    assert config is not None
    configs: dict[str, ObjectiveConfig] = {c.kind: c for c in (mntp, msg) if c is not None}
    formatter = context.formatter(config)
    tokenizer = context.model.tokenizer
    special = set(tokenizer.all_special_ids)
    vocabulary = min(len(tokenizer), context.model.vocabulary)
    options: dict[str, Any] = {
        "mntp": mntp,
        "msg": msg,
        "mask_id": pick_mask_token(tokenizer, mntp.mask_token) if mntp is not None else 0,
        "random_ids": np.array([token for token in range(vocabulary) if token not in special]),
        "pad": context.model.pad,
    }

    def batches(texts: Any, seed: int) -> Batches:
        return HybridBatches(texts, formatter, seed=seed, **options)

    predict = mntp.predict if mntp is not None else "next"
    by_paper = tuple(kind for kind, own in (("mntp", mntp), ("msg", msg)) if own and own.normalisation == "paper")
    losses = HybridLosses(context.model.n_layers, tuple(configs), predict=predict, by_paper=by_paper)
    return context.text_objective(
        "+".join(configs), config, batches, losses, overhead=formatter.overhead, configs=configs
    )


class HybridBatches(Batches):
    """Corrupted views of texts.

    Args:
        texts: Token ids by number.
        formatter: Puts prompt and special tokens around them.
        mntp: Settings of the masked tokens; None for none.
        msg: Settings of the spans; None for none.
        mask_id: The mask token.
        random_ids: What a random token is sampled from.
        pad: The padding token.
        seed: Determines masks and spans.
    """

    def __init__(
        self,
        texts: "Texts",
        formatter: "InputFormatter",
        *,
        mntp: MntpConfig | None,
        msg: MsgConfig | None,
        mask_id: int,
        random_ids: np.ndarray,
        pad: int,
        seed: int,
    ) -> None:
        self.texts, self.formatter, self.mntp, self.msg = texts, formatter, mntp, msg
        self.mask_id, self.random_ids, self.pad, self.seed = mask_id, random_ids, pad, seed

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return ``input_ids`` (corrupted), ``real``, ``labels`` (the text), ``selected`` and ``span``, all (B, T)."""
        del step
        texts, views = [], []
        for number in range(first, first + count):
            text, view = self._view(number)
            texts.append(text)
            views.append(view)
        batch = text_batch(texts, self.pad)
        batch["labels"] = batch["input_ids"]
        batch["input_ids"] = padded([corrupted for corrupted, _, _ in views], self.pad)
        batch["selected"] = padded([selected for _, selected, _ in views]).bool()
        batch["span"] = padded([span for _, _, span in views])
        return batch

    def _view(self, number: int) -> tuple["Tokens", tuple[np.ndarray, np.ndarray, np.ndarray]]:
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
    """The cross-entropy of masked tokens (``mntp``) and of span tokens (``msg``).

    Args:
        n_layers: Layers of the model.
        names: Which of the two losses there are.
        predict: ``next``: the output before a masked token predicts it; ``same``: its own (MAGNET, Appendix E).
        by_paper: Which losses are divided as in the paper's equations; the others by the tokens that they predict.
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

    def __call__(self, model: "PreTrainedModel", batch: Batch) -> "dict[str, Tensor]":
        """Return the summed cross-entropies; MAGNET, equations 2 and 4 without their constant divisors."""
        import torch

        from gerund.attention.bound_plan import BoundPlan
        from gerund.training.losses.vocabulary import head_of, token_loss

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
