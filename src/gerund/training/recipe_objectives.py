"""The settings of each objective, as a recipe writes them.

Knows: which options an objective has, their defaults (the papers') and what contradicts what. Does not know:
torch, or how a loss is computed.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of a recipe: unknown fields are refused, nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def _as_schedule(value: Any) -> Any:
    """Turn a single weight into a schedule with one entry."""
    return [[0, value]] if isinstance(value, int | float) and not isinstance(value, bool) else value


Step = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0)]
Schedule = Annotated[tuple[tuple[Step, Weight], ...], BeforeValidator(_as_schedule), Field(min_length=1)]
"""A weight, or a list of [step, weight]: from that step on it has that weight. It begins with step 0."""


class ObjectiveConfig(Section):
    """What every objective has."""

    weight: Schedule = ((0, 1.0),)
    """Its factor in the sum of losses, or a list of [from step, weight]. With weight 0 it does not run at all."""
    batch_size: int = Field(default=32, ge=1)
    """Texts of one optimizer step, over all processes together."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Texts that go through the model at once, in each process; left out, all of them. It bounds the memory and
    changes nothing else: losses are divided by the counts of the whole step, contrastive gradients are cached."""
    length: int = Field(default=512, ge=2)
    """Longest text in tokens, special tokens included."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of its losses in the logs."""
        return (str(getattr(self, "kind", "")),)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        steps = [step for step, _ in self.weight]
        if steps[0] != 0 or any(one >= two for one, two in pairwise(steps)):
            raise ValueError(f"weight is a list of [step, weight] that begins with step 0 and rises, not {steps}")
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of micro_batch_size {self.micro_batch_size}")
        return self

    def weight_at(self, step: int) -> float:
        """Return the weight in optimizer step ``step``, counted from 0.

        >>> ObjectiveConfig(weight=[[0, 0], [3400, 9]]).weight_at(3399)
        0.0
        """
        return next(weight for first, weight in reversed(self.weight) if first <= step)


class TextConfig(ObjectiveConfig):
    """What every objective on plain text has."""

    sources: list[str] = []
    """Names of the ``data.sources`` that it reads; left out, all."""
    unit: Literal["documents", "sentences"] = "documents"
    """What a text is: a document, cut into pieces of ``length`` tokens, or a sentence."""
    min_words: int = Field(default=0, ge=0)
    """Sentences with fewer words are left out."""

    @model_validator(mode="after")
    def _unit_fits(self) -> Self:
        if self.min_words and self.unit != "sentences":
            raise ValueError("min_words belongs to unit: sentences")
        return self


class CausalConfig(ObjectiveConfig):
    """Plain language modelling on packed blocks: documents follow each other without padding."""

    kind: Literal["causal"]
    sources: list[str] = []
    """Names of the ``data.sources`` that it reads; left out, all."""
    decay_length: int | None = Field(default=None, ge=2)
    """Tokens in a block during the decay of the schedule ``wsd``; left out, ``length``. As many tokens a step
    as before, in fewer blocks. Long blocks only at the end keep most steps cheap, and the model still learns to
    use its whole context."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.decay_length is not None and (self.batch_size * self.length) % self.decay_length:
            raise ValueError(f"decay_length {self.decay_length} does not divide the {self.batch_size * self.length} "
                             "tokens of a batch")  # fmt: skip
        return self


class MntpConfig(TextConfig):
    """Masked next-token prediction (MAGNET, section 3.2.1; LLM2Vec)."""

    kind: Literal["mntp"]
    rate: float = Field(default=0.2, gt=0, lt=1)
    """Share of the context's tokens that are selected."""
    mask_share: float = Field(default=0.8, ge=0, le=1)
    """Share of the selected tokens that become the mask token."""
    random_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the selected tokens that become a random token; the others stay."""
    mask_token: str | None = None
    """Text of the mask token; left out, the tokenizer's own, else ``_``."""
    predict: Literal["next", "same"] = "next"
    """``next``: the output before a masked token predicts it. ``same``: its own output does, as in BERT (MTP,
    MAGNET's Appendix E), for comparison."""

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.mask_share + self.random_share > 1:
            raise ValueError("mask_share and random_share together are more than 1")
        return self


class MsgConfig(TextConfig):
    """Missing-span generation under the hybrid mask (MAGNET, section 3.2.3)."""

    kind: Literal["msg"]
    spans: int = Field(default=2, ge=1)
    """A text gets one to so many spans."""
    shortest: int = Field(default=4, ge=1)
    """Tokens in a span, at least."""
    longest: int = Field(default=128, ge=1)
    """Tokens in a span, at most."""
    whole_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the texts that are one single span, which is plain language modelling (section 3.3)."""
    shared_pass: bool = True
    """Whether mntp and msg work on one corrupted view in one pass, where both are in the recipe."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} is above longest {self.longest}")
        return self


class UnimaeConfig(TextConfig):
    """Masked auto-regression and reconstruction from the end token's state (UniMAE, sections 2.3 and 2.4)."""

    kind: Literal["unimae"]
    p_mar: float = Field(default=0.5, ge=0, lt=1)
    """Share of the input's tokens that become the mask token; 0 is plain language modelling (Appendix F)."""
    p_mrc: float = Field(default=0.5, ge=0, le=1)
    """Share of the other tokens that each position of the decoder does not see."""
    alpha: float = Field(default=0.1, ge=0)
    """Weight of the auto-regressive loss beside the reconstruction (equation 6)."""
    mask_token: str | None = None
    """Text of the mask token; left out, the tokenizer's own, else ``_``."""
    heads: int | None = Field(default=None, ge=1)
    """Attention heads of the decoder; left out, as many as the model has."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of its losses in the logs."""
        return ("mar", "mrc")


Similarity = Literal["cosine", "dot"]


class PairFiles(Section):
    """Files of pairs or triples: jsonl, csv, tsv or parquet."""

    files: list[Path] = Field(min_length=1)
    """Files, relative to ``data.folder``."""
    query: str = "query"
    """Column or field of the query."""
    positive: str = "positive"
    """Column or field of its positive; of a list the first is taken."""
    negatives: str = "negatives"
    """Column or field of its negatives, a text or a list."""


class ContrastiveConfig(Section):
    """What every contrastive objective has."""

    similarity: Similarity = "cosine"
    """``cosine``, or ``dot`` for the raw product."""
    projection: int | None = Field(default=None, ge=1)
    """Size of a linear head between the embedding and the loss, used in training only; left out, none."""


class SimcseConfig(TextConfig, ContrastiveConfig):
    """Two passes over the same text under different dropout are a pair (SimCSE; LLM2Vec)."""

    kind: Literal["simcse"]
    length: int = Field(default=128, ge=2)
    unit: Literal["documents", "sentences"] = "sentences"
    batch_size: int = Field(default=64, ge=2)
    temperature: float = Field(default=0.05, gt=0)
    """Similarities are divided by it."""
    dropout: float = Field(default=0.3, ge=0, lt=1)
    """Dropout of the attention probabilities in these passes."""


class SsclConfig(TextConfig, ContrastiveConfig):
    """Self-supervised contrastive learning with an altered text as positive (MAGNET, section 3.2.2)."""

    kind: Literal["sscl"]
    length: int = Field(default=128, ge=2)
    unit: Literal["documents", "sentences"] = "sentences"
    batch_size: int = Field(default=64, ge=2)
    temperature: float = Field(default=0.1, gt=0)
    """Similarities are divided by it (equation 3)."""
    pairs: PairFiles | None = None
    """Texts with paraphrases, as in the paper; left out, positives are made from the sources."""
    deletion: float = Field(default=0.1, ge=0, lt=1)
    """Share of the words that a made positive lacks."""
    swap: float = Field(default=0.1, ge=0, le=1)
    """Share of its words that change places with a neighbour."""
    crop: float = Field(default=1.0, gt=0, le=1)
    """A made positive keeps a contiguous stretch of at least this share of the words."""


class SupervisedConfig(ObjectiveConfig, ContrastiveConfig):
    """Contrastive fine-tuning on queries, positives and hard negatives from files (UniMAE, Appendix D)."""

    kind: Literal["contrastive"]
    pairs: PairFiles
    batch_size: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.02, gt=0)
    """Similarities are divided by it."""
    hard_negatives: int = Field(default=0, ge=0)
    """How many of an example's own negatives take part; in-batch negatives always do."""
    query_prompt: str | None = None
    """Put before queries; left out, the encoder's prompt."""
    document_prompt: str | None = None
    """Put before positives and negatives; left out, the encoder's prompt."""


class SpanConfig(TextConfig):
    """A decoder writes the spans of a text that the encoder does not see (T5). For encoder-decoder models."""

    kind: Literal["span_corruption"]
    length: int = Field(default=128, ge=8)
    rate: float = Field(default=0.15, gt=0, lt=1)
    """Share of the tokens that are hidden."""
    spans: Literal["hump", "geometric", "t5"] = "hump"
    """How long spans are: ``hump`` (GUR, equation 3), ``geometric`` (SpanBERT's) or ``t5``."""


class PairsOfDocuments(Section):
    """Files of pairs, as ``gerund mine`` writes them."""

    files: list[Path] = Field(min_length=1)
    """Files, relative to ``data.folder``."""
    query: str = "text_a"
    """Column or field of one side; of pairs with a title, the title."""
    positive: str = "text_b"
    """Column or field of the other side."""


class GurConfig(ObjectiveConfig, ContrastiveConfig):
    """Pairs of one document, in one pass for language modelling and contrastive learning (GUR, equation 1)."""

    kind: Literal["gur"]
    pairs: PairsOfDocuments
    batch_size: int = Field(default=64, ge=2)
    """Pairs of one optimizer step; of short ones ``short_factor`` times as many."""
    length: int = Field(default=128, ge=8)
    """Longest text in tokens; of a longer one a random stretch is read."""
    short_length: int | None = Field(default=None, ge=8)
    """Pairs of two short texts make batches of their own, whose texts have at most so many tokens (GUR has 32); left
    out, all pairs are dealt together."""
    short_characters: int = Field(default=64, ge=1)
    """A text of fewer characters is a short one."""
    short_factor: int = Field(default=4, ge=1)
    """A batch of short pairs has so many times ``batch_size``."""
    temperature: float = Field(default=0.1, gt=0)
    """Similarities are divided by it."""
    alpha: float = Field(default=1.0, ge=0)
    """Weight of the contrastive loss beside language modelling; 0 leaves it out (the paper's GUR-CL)."""
    lm: bool | None = None
    """Whether the decoder writes what is hidden of both texts; false leaves it out (the paper's GUR-LM). Left out, it
    does where there is a decoder beside an encoder. A decoder-only model has objectives of its own for that, such as
    ``causal`` or ``unimae``, in the same recipe."""
    rate: float = Field(default=0.15, gt=0, lt=1)
    """Share of the tokens that are hidden."""
    spans: Literal["hump", "geometric", "t5"] = "hump"
    """How long hidden spans are: ``hump`` (equation 3), ``geometric`` (SpanBERT's) or ``t5``."""
    title_share: float = Field(default=0.1, ge=0, le=1)
    """So many of the pairs are also read as a text whose ``query``, the title, is to be written; with ``lm`` only."""
    dimensions: int | None = Field(default=None, ge=1)
    """Numbers of a vector behind a non-linear projection head, which is kept with the model; GUR has 128. Left out,
    as many as the base's head has, or 128 for an encoder-decoder model without one, and no head for others."""
    variant: Literal["paper", "released"] | None = None
    """Of the head: ``paper``, two linear maps with a ReLU between, or ``released``, that of the released code, gated
    and normed. Left out, the base's, or ``paper``."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of its losses in the logs."""
        return ("gur", "lm")

    @model_validator(mode="after")
    def _heads_and_lengths(self) -> Self:
        if self.projection is not None and self.dimensions is not None:
            raise ValueError("projection is a head for training only, dimensions one that is kept: give one of them")
        if self.short_length is not None and self.short_length > self.length:
            raise ValueError(f"short_length {self.short_length} is above length {self.length}")
        if self.lm is False and self.alpha == 0:
            raise ValueError("with lm false and alpha 0 nothing is learned")
        return self


class RankgenConfig(ObjectiveConfig):
    """An encoder that scores continuations of a prefix (RankGen, section 2.2)."""

    kind: Literal["rankgen"]
    passages: list[Path] = Field(min_length=1)
    """What ``gerund negatives`` made: folders or files, relative to ``data.folder``."""
    validation: list[Path] = []
    """What it made of other documents, which is measured at every evaluation."""
    negatives: Literal["both", "inbook", "generative"] = "both"
    """``inbook``: the other continuations of the batch, which is from one document. ``generative``: the generated (and
    hard) ones of the batch. ``both``: all of them. With the last two, passages that have none are left out."""
    batch_size: int = Field(default=64, ge=2)
    length: int = Field(default=512, ge=2)
    """Longest prefix in tokens, marker and special tokens included; of a longer one the end is kept."""
    continuation_length: int = Field(default=128, ge=2)
    """Longest continuation in tokens, marker and special tokens included."""
    prefix_marker: str = "pre "
    """Put before prefixes."""
    continuation_marker: str = "suffi "
    """Put before continuations."""
    similarity: Similarity = "dot"
    """``dot``, as in the paper, or ``cosine``."""
    temperature: float = Field(default=1.0, gt=0)
    """Scores are divided by it."""
    projection: bool = True
    """Whether a linear map without bias makes a state into a vector; it is kept with the model."""

    @model_validator(mode="after")
    def _texts_may_differ(self) -> Self:
        if self.similarity == "cosine" and self.temperature == 1.0:
            raise ValueError("similarity cosine needs a temperature, such as 0.05: cosines lie between -1 and 1")
        return self


AnyObjective = Annotated[
    CausalConfig
    | MntpConfig
    | MsgConfig
    | UnimaeConfig
    | SimcseConfig
    | SsclConfig
    | SupervisedConfig
    | SpanConfig
    | GurConfig
    | RankgenConfig,
    Field(discriminator="kind"),
]
CONTRASTIVE = (SimcseConfig, SsclConfig, SupervisedConfig, GurConfig, RankgenConfig)
WITH_ENCODER = (SpanConfig, GurConfig, SupervisedConfig, SsclConfig, RankgenConfig)
"""Objectives of models with an encoder of their own."""


def reads_texts(objective: ObjectiveConfig) -> bool:
    """Whether an objective reads the recipe's sources, rather than files of its own."""
    return getattr(objective, "pairs", None) is None and not isinstance(objective, RankgenConfig)
