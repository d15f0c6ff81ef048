"""How documents are re-ranked: measures of relevance, and the second stage of a search.

Knows: names, ranges. Does not know: torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from pydantic import AfterValidator, Field

from gerund.checks import one_of
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
