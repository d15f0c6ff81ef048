"""Settings of the training objectives, as recipes write them: one class per objective, without torch.

Fields are settings; class attributes and methods are traits. :attr:`ObjectiveConfig.work` names the function that
makes batches and losses of the settings, which is imported once an objective is trained. A new objective is a class in
a module with such a function, and a line in ``OBJECTIVES``.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union

from pydantic import Field, TypeAdapter, model_validator

from gerund.errors import ConfigError
from gerund.settings.encoder import AnswerPrefix
from gerund.settings.fields import NO_ADAPTER
from gerund.settings.plan import AttentionPlan
from gerund.training.objectives.sections import (
    DECODER_ONLY,
    ENCODER_DECODER,
    ObjectiveConfig,
    PairFiles,
    Purpose,
    ScoredPairFiles,
    Section,
    TaskFiles,
    TextConfig,
    VectorConfig,
    changed_fields,
)

if TYPE_CHECKING:
    from gerund.settings.encoder import EncoderConfig
    from gerund.training.recipe import Recipe

INSTRUCTION = "{instruction}"
"""Placeholder for a query's own instruction in a prompt."""

_WORK = "gerund.training.objectives"

Similarity = Literal["cosine", "dot"]
Normalisation = Literal["predicted", "paper"]
"""What a loss is divided by: the tokens that it predicts, or what MAGNET's equations divide by."""
SpanLengths = Literal["hump", "geometric", "t5"]


class ContrastiveConfig(VectorConfig):
    """What every contrastive objective on texts as the encoder reads them has."""

    if TYPE_CHECKING:
        temperature: float  # each objective has its default

    similarity: Similarity = "cosine"
    """``cosine``, or ``dot`` for the raw product."""
    projection: int | None = Field(default=None, ge=1)
    """Size of a linear head between the embedding and the loss, used in training only; left out, none."""
    matryoshka: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Numbers of dimensions beside all of them: the loss is the mean over vectors that are cut to so many first
    numbers, so that shortened vectors are trained too (Kusupati et al. 2022)."""

    @model_validator(mode="after")
    def _nested_or_projected(self) -> Self:
        if self.matryoshka and self.projection is not None:
            raise ValueError("matryoshka trains the vectors that are kept, and projection is a head that is not")
        return self


class CausalConfig(ObjectiveConfig):
    """Plain language modelling on packed blocks: documents follow each other without padding."""

    work: ClassVar[str] = f"{_WORK}.language_modelling.prepare_causal"
    purpose: ClassVar[Purpose] = Purpose.WRITE
    kind: Literal["causal"]
    sources: list[str] = Field(default_factory=list)
    """Names of the ``data.sources`` that it reads; left out, all."""
    decay_length: int | None = Field(default=None, ge=2)
    """Tokens in a block during the decay of the schedule ``wsd``; left out, ``length``. As many tokens a step
    as before, in fewer blocks. Long blocks only at the end keep most steps cheap, and the model still learns to
    use its whole context."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        tokens = self.batch_size * self.length
        if self.decay_length is not None and tokens % self.decay_length:
            raise ValueError(f"decay_length {self.decay_length} does not divide the {tokens} tokens of a batch")
        return self

    @property
    def longest_text(self) -> int:
        """The longest block, in tokens."""
        return max(self.length, self.decay_length or 0)

    def seed(self, recipe_seed: int) -> int:
        """Return the recipe's own seed."""
        return recipe_seed

    def check(self, recipe: "Recipe") -> None:
        """Raise ValueError for blocks of a decay that the schedule doesn't have."""
        super().check(recipe)
        if self.decay_length and recipe.schedule.name != "wsd":
            raise ValueError("decay_length of the objective causal belongs to the schedule wsd")

    def check_processes(self, processes: int) -> None:
        """Raise ConfigError if so many processes can't share the blocks of a step."""
        super().check_processes(processes)
        blocks = self.batch_size * self.length // (self.decay_length or self.length)
        if blocks % processes:
            raise ConfigError(f"{self.kind}: {processes} processes cannot share {blocks} blocks of the decay")


class MntpConfig(TextConfig):
    """Masked next-token prediction (MAGNET, section 3.2.1; LLM2Vec)."""

    work: ClassVar[str] = f"{_WORK}.hybrid.prepare"
    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_TEXTS
    seed_offset: ClassVar[int | None] = 10

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

    def shares_pass(self, other: ObjectiveConfig) -> bool:
        """Whether ``other`` is MSG, in the same pass."""
        return isinstance(other, MsgConfig) and other.shares_pass(self)


class MsgConfig(TextConfig):
    """Missing-span generation under the hybrid mask (MAGNET, section 3.2.3)."""

    work: ClassVar[str] = f"{_WORK}.hybrid.prepare"
    purpose: ClassVar[Purpose] = Purpose.FILL
    seed_offset: ClassVar[int | None] = 10

    kind: Literal["msg"]
    spans: int = Field(default=2, ge=1)
    """Most spans of a text; it gets at least one."""
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

    def shares_pass(self, other: ObjectiveConfig) -> bool:
        """Whether ``other`` is MNTP, in the same pass; ConfigError if they read different texts."""
        if not (self.shared_pass and isinstance(other, MntpConfig)):
            return False
        same = ("batch_size", "micro_batch_size", "length", "sources", "unit", "min_words")
        differing = [name for name in same if getattr(other, name) != getattr(self, name)]
        if differing:
            raise ConfigError(
                f"mntp and msg share a pass and must agree in {', '.join(differing)}; "
                "make them equal, or set shared_pass: false for msg"
            )
        return True


class UnimaeConfig(TextConfig):
    """Masked auto-regression and reconstruction from the end token's state (UniMAE, sections 2.3 and 2.4)."""

    work: ClassVar[str] = f"{_WORK}.unimae.prepare"
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
        """Raise ValueError for an encoder that reads anything but the end token's state."""
        super().check(recipe)
        expected = {"attention": "causal", "pooling": "last", "append_eos": True}
        if recipe.encoder.skips:
            raise ValueError("unimae trains states without skips: leave them out, they would be in its vectors alone")
        if any(getattr(recipe.encoder, name) != value for name, value in expected.items()):
            raise ValueError(
                "unimae compresses a text into its end token's state, so the recipe needs "
                "encoder: {attention: causal, pooling: last, append_eos: true}"
            )


class SimcseConfig(TextConfig, ContrastiveConfig):
    """Two passes over the same text under different dropout are a pair (SimCSE; LLM2Vec)."""

    work: ClassVar[str] = f"{_WORK}.contrastive.prepare_simcse"
    models: ClassVar[tuple[str, ...]] = (DECODER_ONLY,)
    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_TEXTS
    seed_offset: ClassVar[int | None] = 30

    kind: Literal["simcse"]
    length: int = Field(default=128, ge=2)
    unit: Literal["documents", "sentences"] = "sentences"
    batch_size: int = Field(default=64, ge=2)
    temperature: float = Field(default=0.05, gt=0)
    """Similarities are divided by it."""
    dropout: float = Field(default=0.3, ge=0, lt=1)
    """Dropout of the attention probabilities in these passes."""


class SupervisedConfig(ContrastiveConfig):
    """Contrastive fine-tuning on queries, positives and hard negatives from files (UniMAE, Appendix D)."""

    work: ClassVar[str] = f"{_WORK}.contrastive.prepare_examples"
    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_PAIRS
    reads_pairs: ClassVar[bool] = True
    seed_offset: ClassVar[int | None] = 50

    kind: Literal["contrastive"]
    pairs: TaskFiles
    batch_size: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.02, gt=0)
    """Similarities are divided by it."""
    hard_negatives: int = Field(default=0, ge=0)
    """How many of an example's own negatives take part; in-batch negatives always do."""
    query_prompt: str | None = None
    """Put before queries; left out, the encoder's prompt. With ``pairs.instruction`` it has a place for it, as in
    BGE-ICL's ``<instruct>{instruction}\\n<query>``; a query without an instruction has no prompt then."""
    document_prompt: str | None = None
    """Put before positives and negatives; left out, the encoder's prompt."""
    same_task: bool = False
    """Whether all examples of a batch are of one task, so that negatives are no easier than their task (UniMAE,
    Appendix D, by BGE-ICL's settings)."""

    @model_validator(mode="after")
    def _instructions_and_tasks(self) -> Self:
        placed = INSTRUCTION in (self.query_prompt or "")
        if placed != (self.pairs.instruction is not None):
            raise ValueError(
                f"query_prompt has the place {INSTRUCTION} where pairs.instruction names the column of instructions, "
                "and only there"
            )
        if self.pairs.task is not None and not self.same_task:
            raise ValueError("pairs.task names tasks for same_task: true")
        return self


class CosentConfig(VectorConfig):
    """Cosines in the order of the scores that pairs of texts have (CoSENT)."""

    work: ClassVar[str] = f"{_WORK}.contrastive.prepare_cosent"
    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_PAIRS
    reads_pairs: ClassVar[bool] = True
    seed_offset: ClassVar[int | None] = 45

    kind: Literal["cosent"]
    pairs: ScoredPairFiles
    length: int = Field(default=128, ge=2)
    batch_size: int = Field(default=64, ge=2)
    temperature: float = Field(default=0.05, gt=0)
    """Differences of cosines are divided by it."""


class SsclConfig(TextConfig, ContrastiveConfig):
    """Self-supervised contrastive learning with an altered text as positive (MAGNET, section 3.2.2)."""

    work: ClassVar[str] = f"{_WORK}.contrastive.prepare_sscl"
    files_field: ClassVar[str | None] = "pairs"
    settings_of_sources: ClassVar[tuple[str, ...]] = (*TextConfig.settings_of_sources, "deletion", "swap", "crop")
    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_TEXTS
    seed_offset: ClassVar[int | None] = 40

    kind: Literal["sscl"]
    length: int = Field(default=128, ge=2)
    unit: Literal["documents", "sentences"] = "sentences"
    batch_size: int = Field(default=64, ge=2)
    temperature: float = Field(default=0.1, gt=0)
    """Similarities are divided by it (equation 3)."""
    pairs: PairFiles | None = None
    """Texts with paraphrases, as in the paper; left out, positives are made from the sources."""
    deletion: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the words that a made positive lacks."""
    swap: float = Field(default=0.1, ge=0, le=1)
    """Fraction of its words that change places with a neighbour."""
    crop: float = Field(default=1.0, gt=0, le=1)
    """A made positive keeps a contiguous stretch of at least this fraction of the words."""
    rewritten: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of a made positive's words that the base replaces, by infilling them from both sides, before
    ``deletion``, ``swap`` and ``crop`` change the rest; 0 for none. Each text is rewritten once and kept in the cache;
    it takes about as long as writing so many words does."""

    @model_validator(mode="after")
    def _one_origin_of_positives(self) -> Self:
        if self.pairs is not None and self.rewritten:
            raise ValueError("sscl.rewritten makes positives, and sscl.pairs brings them: give one of them")
        return self

    def check(self, recipe: "Recipe") -> None:
        """Raise ValueError if a model that has learnt nothing is to rewrite texts."""
        super().check(recipe)
        if self.rewritten and recipe.model.base is None:
            raise ValueError("sscl.rewritten lets the base generate, and a model from scratch can't generate yet")


class SpanConfig(TextConfig):
    """A decoder writes the spans of a text that the encoder does not see (T5). For encoder-decoder models."""

    work: ClassVar[str] = f"{_WORK}.language_modelling.prepare_spans"
    models: ClassVar[tuple[str, ...]] = (ENCODER_DECODER,)
    purpose: ClassVar[Purpose] = Purpose.WRITE
    seed_offset: ClassVar[int | None] = 70

    kind: Literal["span_corruption"]
    length: int = Field(default=128, ge=8)
    rate: float = Field(default=0.15, gt=0, lt=1)
    """Fraction of the tokens that are hidden."""
    spans: SpanLengths = "hump"
    """How long spans are: ``hump`` (GUR, equation 3), ``geometric`` (SpanBERT's) or ``t5``."""

    def check_model(self, model: str, encoder: "EncoderConfig") -> None:
        """Raise ConfigError for a model without a decoder in addition to its encoder."""
        _require_decoder(self.kind, model)
        super().check_model(model, encoder)


def _require_decoder(name: str, model: str) -> None:
    if model != ENCODER_DECODER:
        raise ConfigError(
            f"{name} needs an encoder and a decoder, such as a T5; add causal or unimae for a decoder-only model"
        )


class PairsOfDocuments(Section):
    """Files of pairs, as ``gerund mine`` writes them."""

    files: list[Path] = Field(min_length=1)
    """Files, relative to ``data.folder``."""
    query: str = "text_a"
    """Column or field of one side; of pairs with a title, the title."""
    positive: str = "text_b"
    """Column or field of the other side."""
    opening: str = "opening"
    """Column or field of the beginning of the document whose title ``query`` is; empty where it is no title."""
    weight: str = "weight"
    """Column or field of what the two texts' common substring weighs."""
    threshold: int | None = Field(default=None, ge=1)
    """Pairs that weigh less are left out; left out, all are taken."""
    short_threshold: int | None = Field(default=None, ge=1)
    """The same for two texts of fewer than ``short_characters`` each (GUR, section IV-A: 20, two Chinese characters,
    with a ``threshold`` of 30); left out, ``threshold``."""

    @model_validator(mode="after")
    def _thresholds(self) -> Self:
        if self.short_threshold is not None and self.short_threshold > (self.threshold or 0):
            raise ValueError(f"short_threshold {self.short_threshold} is above threshold {self.threshold}")
        return self


class GurConfig(ContrastiveConfig):
    """Pairs of one document, in one pass for language modelling and contrastive learning (GUR, equation 1)."""

    work: ClassVar[str] = f"{_WORK}.gur.prepare"
    trains_head: ClassVar[bool] = True
    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_PAIRS
    reads_pairs: ClassVar[bool] = True
    seed_offset: ClassVar[int | None] = 80

    kind: Literal["gur"]
    pairs: PairsOfDocuments
    batch_size: int = Field(default=64, ge=2)
    """Pairs of one optimizer step; of short ones ``short_factor`` times as many."""
    length: int = Field(default=128, ge=8)
    """Longest text in tokens; of a longer one a random stretch is read."""
    short_length: int | None = Field(default=None, ge=8)
    """Pairs of two short texts make batches of their own, whose texts have at most so many tokens (GUR has 32); left
    out, all pairs are read together."""
    short_characters: int = Field(default=64, ge=1)
    """A text of fewer characters is a short one; a pair is, where both are."""
    short_factor: int = Field(default=4, ge=1)
    """A batch of short pairs has this many times ``batch_size``."""
    temperature: float = Field(default=0.1, gt=0)
    """Similarities are divided by it."""
    alpha: float = Field(default=1.0, ge=0)
    """Weight of the contrastive loss beside language modelling; 0 leaves it out (the paper's GUR-CL)."""
    lm: bool | None = None
    """Whether the decoder writes what is hidden of both texts; false leaves that loss out and reads the same texts with
    the same spans hidden (the paper's GUR-LM). Left out, it does where there is a decoder beside an encoder. A
    decoder-only model reads whole texts, and has objectives of its own for language modelling, such as ``causal`` or
    ``unimae``, in the same recipe."""
    rate: float = Field(default=0.15, ge=0, lt=1)
    """Fraction of the tokens that are hidden; 0, with ``lm`` false only, reads whole texts."""
    spans: SpanLengths = "hump"
    """How long hidden spans are: ``hump`` (equation 3), ``geometric`` (SpanBERT's) or ``t5``."""
    title_fraction: float | None = Field(default=None, ge=0, le=1)
    """Beside the pairs of a batch, so many times their number of documents are read, at least one, whose titles are
    to be written (document2title, section IV-A); with ``lm`` only. Left out, 0.1 where files have openings."""
    dimensions: int | None = Field(default=None, ge=1)
    """Numbers of a vector behind a non-linear projection head, which is kept with the model; GUR has 128. Left out,
    as many as the base's head has, or 128 for an encoder-decoder model without one, and no head for others."""
    variant: Literal["paper", "released"] | None = None
    """Of the head: ``paper``, two linear maps with a ReLU between, or ``released``, that of the released code, gated
    and normed. Left out, the base's, or ``paper``."""

    @classmethod
    def purpose_of(cls, settings: Mapping[str, Any]) -> Purpose:
        """Return what these settings are for."""
        return Purpose.WRITE if settings.get("alpha") == 0 else cls.purpose  # without the contrastive loss

    @model_validator(mode="after")
    def _heads_and_lengths(self) -> Self:
        if self.projection is not None and self.dimensions is not None:
            raise ValueError("projection is a head for training only, dimensions one that is kept: give one of them")
        if self.short_length is not None and self.short_length > self.length:
            raise ValueError(f"short_length {self.short_length} is above length {self.length}")
        if self.short_length is None and changed_fields(self, ["short_factor"]):
            raise ValueError("short_factor is about batches of short pairs, which need short_length")
        if self.lm is False and self.alpha == 0:
            raise ValueError("with lm false and alpha 0 nothing is learned")
        if self.rate == 0 and self.lm is not False:
            raise ValueError("rate 0 hides nothing that could be written; it belongs to lm: false")
        if self.lm is False and self.title_fraction:
            raise ValueError("title_fraction is a fraction of texts whose titles are written, and lm is false")
        return self

    def check_model(self, model: str, encoder: "EncoderConfig") -> None:
        """Raise ConfigError for ``lm`` without a decoder."""
        if self.lm:
            _require_decoder("gur with lm", model)
        super().check_model(model, encoder)


class DistillConfig(TextConfig, VectorConfig):
    """A teacher's vectors are learned: by cosine, by distance, and by what is alike in a batch (distillation)."""

    work: ClassVar[str] = f"{_WORK}.distill.prepare"
    models: ClassVar[tuple[str, ...]] = (DECODER_ONLY,)
    trains_head: ClassVar[bool] = True
    files_field: ClassVar[str | None] = "file"
    files_setting: ClassVar[str | None] = "teacher"
    purpose: ClassVar[Purpose] = Purpose.DISTIL
    seed_offset: ClassVar[int | None] = 90
    shortest_text: ClassVar[int] = 1

    kind: Literal["distill"]
    teacher: str = Field(min_length=1)
    """What gives the vectors: a folder or hub id of a model that sentence-transformers or gerund reads, or a Parquet
    file of ``gerund embed --keep-text``, whose texts are then those that are learned."""
    teacher_prompt: str = ""
    """Put before every text that the teacher reads, as ``query:`` for one that was trained so."""
    unit: Literal["documents", "sentences"] = "sentences"
    length: int = Field(default=128, ge=2)
    batch_size: int = Field(default=64, ge=2)
    cosine: float = Field(default=1.0, ge=0)
    """Weight of one minus the cosine to the teacher's vector."""
    mse: float = Field(default=0.0, ge=0)
    """Weight of the squared distance to it."""
    similarity: float = Field(default=1.0, ge=0)
    """Weight of the divergence between the student's and the teacher's similarities within a batch."""
    temperature: float = Field(default=0.05, gt=0)
    """These similarities are divided by it."""
    layers: list[int] = Field(default_factory=list)
    """Layers, counted from 1, whose pooled states learn the teacher's vectors too, through linear heads that are not
    kept; left out, only the last state does."""
    layer_weight: float = Field(default=0.5, gt=0)
    """What the mean loss of these layers counts beside the last state's."""
    matryoshka: list[int] = Field(default_factory=list)
    """Further numbers of dimensions: the first so many numbers of a vector learn the teacher's similarities too, so
    that shortened vectors keep more of what whole ones know (Kusupati et al. 2022). Needs ``similarity``."""
    token_vectors: bool = False
    """Whether the head adds a vector for each token, the mean over the text. They are fitted to the teacher before the
    first step, by least squares over all texts, so that the language model has to learn only what they miss."""
    word_vectors: int = Field(default=0, ge=0)
    """How many words at most, the commonest of the texts, have a vector of their own that is added too, whatever their
    case and however many tokens they are made of. They are fitted to the teacher (together with those of tokens,
    where there are such), quantized, and stay as they are."""
    word_bytes: int | None = Field(default=None, ge=1)
    """Bytes of a word's vector, as codes of a product quantizer; it divides the dimensions. None stores 8 bits a
    number."""
    words_of: str | None = Field(default=None, min_length=1)
    """A model whose head has vectors of words in the teacher's space, as ``default`` has: those of the words in the
    sources' files, beyond a limit too, are taken in the place of fitted ones, which need many texts. Needs
    ``word_vectors``."""
    fit_head: int = Field(default=0, ge=0)
    """From how many texts the linear map of a new head is fitted by least squares, to what vectors of words miss; 0
    begins at random. Not with ``token_vectors``."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not (self.cosine or self.mse or self.similarity):
            raise ValueError("with cosine, mse and similarity all 0 nothing is learned")
        if self.layers and not (self.cosine or self.mse):
            raise ValueError("layers learn by cosine and mse, which are both 0")
        if self.matryoshka and not self.similarity:
            raise ValueError("matryoshka trains shortened vectors by similarity, which is 0")
        if not self.word_vectors and (self.word_bytes is not None or self.words_of is not None):
            raise ValueError("word_bytes and words_of are about word_vectors, which are off")
        if self.words_of is not None and self.token_vectors:
            raise ValueError("token_vectors are fitted, and words_of takes a model's vectors of words without them")
        if self.fit_head and self.token_vectors:
            raise ValueError("fit_head is for a head without token_vectors, which are fitted themselves")
        if any(size < 1 for size in self.matryoshka):
            raise ValueError(f"matryoshka has numbers of dimensions, above 0, not {self.matryoshka}")
        if len(set(self.layers)) < len(self.layers) or any(layer < 1 for layer in self.layers):
            raise ValueError(f"layers are counted from 1, each named once, not {self.layers}")
        return self

    @property
    def file(self) -> Path | None:
        """The Parquet file of the teacher's vectors, where they are given so."""
        return Path(self.teacher) if self.teacher.lower().endswith(".parquet") else None

    def check(self, recipe: "Recipe") -> None:
        """Raise ValueError after an objective that trains the same head, and for a prompt with a file of vectors."""
        super().check(recipe)
        before = recipe.objectives[: [objective.kind for objective in recipe.objectives].index(self.kind)]
        earlier = next((item.kind for item in before if item.trains_vectors), None)
        if earlier is not None:
            raise ValueError(f"distill makes the head that {earlier} trains too: list it first")
        if self.file is not None and self.teacher_prompt:
            raise ValueError(f"{self.teacher} has vectors that are made already; teacher_prompt is for a model")


class RankgenConfig(VectorConfig):
    """An encoder that scores continuations of a prefix (RankGen, section 2.2)."""

    work: ClassVar[str] = f"{_WORK}.rankgen.prepare"
    files_field: ClassVar[str | None] = "passages"
    purpose: ClassVar[Purpose] = Purpose.SCORE
    seed_offset: ClassVar[int | None] = 60

    kind: Literal["rankgen"]
    passages: list[Path] = Field(min_length=1)
    """What ``gerund negatives`` made: folders or files, relative to ``data.folder``."""
    validation: list[Path] = Field(default_factory=list)
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


class RankedListsConfig(TextConfig):
    """What every objective has that learns to rank documents as a teacher's scores do."""

    models: ClassVar[tuple[str, ...]] = (DECODER_ONLY,)
    files_field: ClassVar[str | None] = "files"
    settings_of_sources: ClassVar[tuple[str, ...]] = (*TextConfig.settings_of_sources, "questions", "lists")
    purpose: ClassVar[Purpose] = Purpose.RANK
    # One for all, which then make the same lists of the same texts.
    seed_offset: ClassVar[int | None] = 100

    files: list[Path] = Field(default_factory=list)
    """Lists: .jsonl with ``query``, ``documents`` and ``scores``; left out, of the recipe's texts, scored by lift."""
    questions: Literal["mined", "written", "both"] = "mined"
    """What asks for the recipe's texts: sentences of them (``mined``), questions that the base model writes to them and
    by which BM25 finds the text among the first three (``written``), or half of each (``both``)."""
    lists: int = Field(default=200, ge=1)
    """How many lists are made of texts, at most; to label one takes a pass over each of its documents."""
    candidates: int = Field(default=6, ge=2)
    """Documents of a list that are read in a step: the best, and others at random."""
    batch_size: int = Field(default=8, ge=1)
    """Lists of one optimizer step."""
    length: int = Field(default=180, ge=8)
    teacher_temperature: float = Field(default=0.5, gt=0)
    """The teacher's scores, standardized in each list, are divided by it."""


class LateObjectiveConfig(RankedListsConfig, VectorConfig):
    """Token vectors whose MaxSim ranks documents as a teacher's scores do (late interaction, ColBERTv2)."""

    work: ClassVar[str] = f"{_WORK}.ranking.prepare_late"

    kind: Literal["late"]
    dimensions: int = Field(default=96, ge=1)
    """Dimensions of a token vector, behind a linear map that is kept with the model."""
    temperature: float = Field(default=0.05, gt=0)
    """The student's scores, mean cosines, are divided by it."""
    in_batch: float = Field(default=0.5, ge=0)
    """Weight of the cross entropy of the best document against those of the other lists."""
    query_marker: str = "Query: "
    """Put before queries."""
    document_marker: str = "Document: "
    """Put before documents."""
    counts: Literal["text", "all"] = "text"
    """Tokens with vectors: the text's, or ``all``, markers and special tokens too (for the export ``multi-vector``)."""


class PointwiseConfig(RankedListsConfig):
    """A reranker: a linear layer scores a query and a document that are read together, as a teacher scores them."""

    work: ClassVar[str] = f"{_WORK}.ranking.prepare_pointwise"
    trains_reranker: ClassVar[bool] = True
    seed_offset: ClassVar[int | None] = 120

    kind: Literal["pointwise"]
    length: int = Field(default=256, ge=16)
    """Longest query and document in tokens, everything included."""

    def check(self, recipe: "Recipe") -> None:
        """Raise ValueError for a recipe that trains something else with the same adapter."""
        super().check(recipe)
        if len(recipe.objectives) > 1:
            raise ValueError("pointwise trains an adapter that only re-ranks: make it the only objective")
        if recipe.model.base is None or recipe.model.lora is None or recipe.model.adapter != NO_ADAPTER:
            raise ValueError("pointwise trains a new adapter: give model.base and model.lora, and model.adapter none")


class GenConfig(TextConfig, VectorConfig):
    """Answer tokens behind a text: their states encode what the frozen model would answer (LLM2Vec-Gen)."""

    work: ClassVar[str] = f"{_WORK}.gen.prepare"
    models: ClassVar[tuple[str, ...]] = (DECODER_ONLY,)
    trains_base: ClassVar[bool] = False
    files_field: ClassVar[str | None] = "files"
    purpose: ClassVar[Purpose] = Purpose.ANSWERS
    seed_offset: ClassVar[int | None] = 110
    shortest_text: ClassVar[int] = 1

    kind: Literal["gen"]
    teacher: str = Field(min_length=1)
    """What gives the vectors of the answers: a folder or hub id of a model that sentence-transformers or gerund
    reads."""
    teacher_prompt: str = ""
    """Put before every answer that the teacher reads."""
    files: list[Path] = Field(default_factory=list)
    """Texts: .jsonl with ``text``, and ``answer`` where the model is not to answer itself; left out, the recipe's."""
    validation: list[Path] = Field(default_factory=list)
    """The same for the validation loss."""
    tokens: int = Field(default=20, ge=1)
    """Answer tokens behind a text."""
    read: int = Field(default=10, ge=1)
    """How many of them, the last ones, have states that are read; the others are room to think."""
    prefix: AnswerPrefix = "vector"
    """What is mapped to a prefix of ``read`` embeddings, after which the frozen model writes the answer: the text's
    ``vector``, which can then be read as text wherever it is kept, or each of the ``states``, as in the paper, which
    hold more."""
    answer_length: int = Field(default=64, ge=1)
    """Longest answer in tokens; the model answers greedily."""
    unit: Literal["documents", "sentences"] = "sentences"
    length: int = Field(default=128, ge=2)
    """Longest text in tokens, special tokens included and answer tokens not."""
    batch_size: int = Field(default=16, ge=1)
    reconstruction: float = Field(default=1.0, ge=0)
    """Weight of the cross entropy of the answer, by token."""
    mse: float = Field(default=1.0, ge=0)
    """Weight of the squared distance to the teacher's vector of the answer."""
    cosine: float = Field(default=0.0, ge=0)
    """Weight of one minus the cosine to it."""
    fit_head: int = Field(default=1024, ge=0)
    """From how many texts the map to vectors is fitted by least squares before the first step; 0 begins at random."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.read > self.tokens:
            raise ValueError(f"read {self.read} is above tokens {self.tokens}")
        if not (self.reconstruction or self.mse or self.cosine):
            raise ValueError("with reconstruction, mse and cosine all 0 nothing is learned")
        return self

    @property
    def longest_text(self) -> int:
        """The longest row that the model will read, in tokens."""
        return max(self.length + self.tokens, self.length + self.answer_length)

    def check(self, recipe: "Recipe") -> None:
        """Raise ValueError for a recipe that would change the base, which has to stay what it is."""
        super().check(recipe)
        if len(recipe.objectives) > 1:
            raise ValueError("gen leaves the model as it is, which others train: make it the only objective")
        if recipe.model.base is None or recipe.model.lora is not None:
            raise ValueError("gen trains nothing of the model: give model.base, and no model.lora")
        if self.teacher.lower().endswith(".parquet"):
            raise ValueError("gen's teacher reads answers that are yet to be written: name a model, not its vectors")
        if recipe.sharding != "none":
            raise ValueError("gen trains few parameters, and takes no sharding")

    def check_model(self, model: str, encoder: "EncoderConfig") -> None:
        """Raise ConfigError for another reading than the one that generates."""
        super().check_model(model, encoder)
        reading = (encoder.attention.name, encoder.pooling, encoder.exit_layer)
        if model == DECODER_ONLY and reading != ("causal", "mean", None):
            raise ConfigError(
                "gen reads texts as the model generates: set encoder.attention to causal and encoder.pooling to mean, "
                "without exit_layer"
            )

    def check_processes(self, processes: int) -> None:
        """Raise ConfigError for more than one process."""
        if processes > 1:
            raise ConfigError("gen is trained in one process: the model answers its texts first")


OBJECTIVES: tuple[type[ObjectiveConfig], ...] = (
    CausalConfig,
    MntpConfig,
    MsgConfig,
    UnimaeConfig,
    SimcseConfig,
    SsclConfig,
    SupervisedConfig,
    CosentConfig,
    SpanConfig,
    GurConfig,
    DistillConfig,
    RankgenConfig,
    LateObjectiveConfig,
    PointwiseConfig,
    GenConfig,
)
"""The objectives that recipes know."""


def class_of(kind: Any) -> type[ObjectiveConfig] | None:
    """Return the objective of a name; None where there is none."""
    return next((objective for objective in OBJECTIVES if objective.name() == kind), None)


def parse_objective(value: Any) -> ObjectiveConfig:
    """Validate the settings of an objective, which its ``kind`` names."""
    return value if isinstance(value, ObjectiveConfig) else _union(OBJECTIVES).validate_python(value)


@lru_cache(maxsize=8)
def _union(classes: tuple[type[ObjectiveConfig], ...]) -> TypeAdapter[ObjectiveConfig]:
    union: Any = Annotated[Union[classes], Field(discriminator="kind")]  # noqa: UP007  # of a tuple
    return TypeAdapter(union)
