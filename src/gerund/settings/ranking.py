"""Ranking settings: relevance measures, the second stage of a search, and how a reranker reads a document.

A ``RerankerConfig`` says how a model scores a query and a document. What published families do is from the released
code and model cards of Qwen3-Reranker, mxbai-rerank-v2 (``mxbai_rerank``) and bge-reranker-v2-gemma
(``FlagEmbedding``), and sentence-transformers' ``LogitScore`` and ``CrossEncoder``.

Knows: names, ranges, JSON. Does not know: torch, tokenizers, folders.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

from pydantic import AfterValidator, Field

from gerund.checks import demand_fields, one_of
from gerund.errors import ConfigError
from gerund.settings.fields import Fraction, Number, Whole, check, checked, documented, setting

OWN = "own"
"""The old name of the measure ``model``, which is still accepted."""

RelevanceMeasure = Literal[
    "lift", "mixed", "likelihood", "maxsim", "vectors", "model", "yesno", "listwise", "attention", "own"
]
QUERY_MEASURES: tuple[RelevanceMeasure, ...] = ("lift", "mixed", "likelihood")
"""Measures of how likely a document makes the query."""

MAXSIM: Literal["maxsim"] = "maxsim"
"""The measure of late interaction."""

PROMPT_MEASURES: tuple[RelevanceMeasure, ...] = ("yesno", "listwise", "attention")
"""Measures that ask a language model which documents are relevant, or read its attention."""

BASE_MEASURES = (*QUERY_MEASURES, *PROMPT_MEASURES)
"""Measures of the base model: with its causal mask and no adapter."""

RELEVANCE_MEASURES: tuple[RelevanceMeasure, ...] = (*QUERY_MEASURES, MAXSIM, "vectors", "model", *PROMPT_MEASURES)
DEFAULT_WEIGHT = 0.5
"""Weight of the measure, where it is fused with the scores of a first stage."""

DEFAULT_DEPTH = 100
"""Documents that are read, from the first stage's best on."""

TRAINED_FUSION, UNTRAINED_FUSION = 0.5, 0.2
"""Weight of the vectors beside words in hybrid search, where it is not tuned: of a model that was trained to embed, and
of any other language model, whose vectors find less than words do."""

MOST_HITS = 10_000
"""Hits that a search returns or re-ranks at most."""


def check_measure(by: str | None) -> None:
    """Refuse an unknown measure of relevance; None is the default."""
    if by is not None and not (isinstance(by, str) and by == OWN):
        one_of("measure of relevance", by, RELEVANCE_MEASURES)


Measure = Annotated[str, AfterValidator(checked(lambda _, by: check_measure(by)))]


class RerankKeywords(TypedDict, total=False):
    """The fields of ``SecondStage`` as keywords of ``search`` and its like; all have defaults."""

    rerank: int
    """Number of the first hits that the model re-ranks; their scores count too."""

    rerank_by: str | None
    """The measure of ``lm.rerank``. None: the tuned one, else ``lift``, or ``vectors`` for a model that only embeds."""

    rerank_weight: float | None
    """What the measure counts beside the scores of the search, from 0 to 1. None: the tuned weight, else 0.5."""

    rerank_deadline: float | None
    """Seconds per query after which no further hit is re-ranked; those that are left keep their place."""


@documented
@dataclass(frozen=True)
class SecondStage:
    """How the first hits of a search are re-ranked."""

    rerank: Annotated[Whole, Field(ge=0, le=MOST_HITS)] = setting(
        0, "Re-rank this many first hits with the model, by its measure and the scores of the search together."
    )
    rerank_by: Measure | None = setting(
        None,
        "How the model measures relevance: lift (how much likelier a chunk makes the query), mixed, likelihood, maxsim "
        "(of token vectors), model (its trained scorer), vectors, or for large models yesno, listwise or attention. "
        "[default: the tuned one, else lift]",
    )
    rerank_weight: Fraction | None = setting(
        None, "Weight of that measure beside the scores of the search, 0 to 1. [default: the tuned one, else 0.5]"
    )
    rerank_deadline: Annotated[Number, Field(gt=0)] | None = setting(
        None, "Seconds per query after which no further hit is re-ranked; those that are left keep their place."
    )

    def __post_init__(self) -> None:
        check(self)
        for name, value in self.keywords.items():
            if value is not None and not self.rerank and name != "rerank":
                raise ConfigError(f"{name} is for re-ranking; set rerank too, or leave it out")

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> "SecondStage":
        """Return the settings that keywords say; an unknown one is a mistake."""
        for name in keywords:
            if name not in RerankKeywords.__annotations__:
                raise TypeError(f"search() got an unexpected keyword argument {name!r}")
        return cls(**keywords)

    @property
    def keywords(self) -> RerankKeywords:
        """The settings as keywords of ``search``."""
        return {name: getattr(self, name) for name in RerankKeywords.__annotations__}  # type: ignore[return-value]


ONE_STAGE = SecondStage()
"""No re-ranking."""


RERANKER_FILE = "reranker.json"
NO_RERANKER = "none"
OWN_RERANKER = "own"
"""As the model's folder or name says, also where an attention plan or a pooling is given."""
QUERY, DOCUMENT = "{query}", "{document}"
PLACES = ("query", "document", "instruction", "bos")
"""Names that a piece may contain in braces; ``bos`` is the tokenizer's beginning token."""

RerankerLayout = Literal["pieces", "chat", "pair", "chat-or-pair"]
ScoreActivation = Literal["Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU"]


@dataclass(frozen=True)
class RerankerConfig:
    """How a language model scores a query and a document.

    Attributes:
        layout: how both become one text: ``pieces``, ``chat`` (the model's chat template, with the roles ``query`` and
            ``document`` and the instruction as ``system``), ``pair`` (the tokenizer's layout of two texts, with the
            instruction before the query), or ``chat-or-pair``, by whether the chat template takes these roles.
        pieces: texts that are tokenized apart, with places such as ``{query}`` in them (see ``PLACES``).
        optional: the part of a piece that is omitted without an instruction.
        instruction: what the model is asked to find, unless the user says something else.
        true: the token whose logit is the score, as text or id; None for a sequence classifier, whose weights have a
            linear layer for it.
        false: the token whose logit is subtracted; None for none.
        activation: applied to the score, a class of ``torch.nn``.
        max_length: longest text in tokens, everything included; None for what the model was made for.
        template_variables: variables of the chat template.
        is_structured: the chat template takes lists of parts instead of texts; None to tell it from the template.
        ignored_end: a token that is skipped at the end, as transformers' sequence classifiers skip padding.
        embeds: the model encodes too: it scores with an adapter of its own, which encoding does not use.
    """

    layout: RerankerLayout
    pieces: tuple[str, ...] = ()
    optional: str = ""
    instruction: str = ""
    true: str | int | None = None
    false: str | int | None = None
    activation: ScoreActivation = "Sigmoid"
    max_length: int | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    is_structured: bool | None = None
    ignored_end: int | None = None
    embeds: bool = False

    def __post_init__(self) -> None:
        one_of("layout of a reranker", self.layout, get_args(RerankerLayout))
        one_of("activation of a reranker", self.activation, get_args(ScoreActivation))
        whole = "".join(self.pieces)
        if self.layout == "pieces" and not (QUERY in whole and DOCUMENT in whole):
            raise ConfigError("the pieces of a reranker need {query} and {document}")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict without defaults."""
        usual = {item.name: item.default for item in fields(self)}
        return {name: value for name, value in asdict(self).items() if value not in (usual[name], {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RerankerConfig":
        """Read settings back; raises ``ConfigError`` for an unknown field or a value of another type."""
        kinds = {
            **dict.fromkeys(("layout", "optional", "instruction", "activation"), (str,)),
            **{"pieces": (list, tuple), "true": (str, int), "false": (str, int), "max_length": (int,)},
            **{"template_variables": (dict,), "is_structured": (bool,), "ignored_end": (int,)},
            "embeds": (bool,),
        }
        demand_fields(cls, data, f"in {RERANKER_FILE}")
        for key, value in data.items():
            texts = value if key == "pieces" and isinstance(value, list | tuple) else ()
            if type(value) not in kinds[key] or any(not isinstance(text, str) for text in texts):
                raise ConfigError(f"{RERANKER_FILE}: {key} cannot be {value!r}")
        if "layout" not in data:
            raise ConfigError(f"{RERANKER_FILE} names no layout")
        return cls(**{**data, "pieces": tuple(data.get("pieces", ()))})


_RETRIEVE = "Given a web search query, retrieve relevant passages that answer the query"

FAMILIES: dict[str, RerankerConfig] = {
    "qwen3-reranker": RerankerConfig(
        layout="pieces",
        pieces=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
            "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        instruction=_RETRIEVE,
        true="yes",
        false="no",
        max_length=8192,
    ),
    "mxbai-rerank-v2": RerankerConfig(
        layout="pieces",
        pieces=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n",
            "instruction: {instruction}\nquery: {query}",
            "\n",
            "document: {document}",
            "\n",
            "You are a search relevance expert who evaluates how well documents match search queries. For each "
            "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
            "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        optional="instruction: {instruction}\n",
        true="1",
        false="0",
        activation="Identity",
        max_length=8192,
    ),
    "bge-reranker-v2-gemma": RerankerConfig(
        layout="pieces",
        pieces=(
            "{bos}",
            "A: {query}",
            "\n",
            "B: {document}",
            "\n",
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'.",
        ),
        true="Yes",
        activation="Identity",
        max_length=1024,
    ),
}
"""Families of yes/no rerankers whose folders don't say how they score."""

# By these parts of a folder's name or hub id an original checkpoint is known.
_NAMES = {
    r"qwen3[-_]reranker": "qwen3-reranker",
    r"mxbai[-_]rerank[-_](base|large)[-_]v2": "mxbai-rerank-v2",
    r"bge[-_]reranker[-_]v2[-_]gemma": "bge-reranker-v2-gemma",
}


def family_of(name: str) -> str | None:
    """Return the family of a folder's name or hub id; None for another model.

    >>> family_of("Qwen/Qwen3-Reranker-0.6B"), family_of("Qwen/Qwen3-0.6B")
    ('qwen3-reranker', None)
    """
    return next((family for pattern, family in _NAMES.items() if re.search(pattern, name, re.IGNORECASE)), None)


def check_reranker(name: str) -> None:
    """Refuse what is neither a family nor a folder."""
    if reranker_folder(name) is None:
        one_of("reranker", name, [*FAMILIES, OWN_RERANKER, NO_RERANKER, "a folder"])


def reranker_folder(name: str | None) -> Path | None:
    """Return the folder of a reranker that was trained from the same weights; None for a family or no reranker."""
    is_path = name is not None and name not in (*FAMILIES, OWN_RERANKER, NO_RERANKER) and Path(name).is_dir()
    return Path(str(name)) if is_path else None
