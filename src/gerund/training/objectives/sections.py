"""What settings of objectives are made of: a part of a recipe, what an objective is for, and weights by step."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Purpose(StrEnum):
    """What an objective is for, the paper in brackets; of a recipe with several the first one counts."""

    FILL = "Infill (MAGNET)"
    SCORE = "Score continuations (RankGen)"
    EMBED_BY_PAIRS = "Embed, by pairs that are mined or given (GUR, UniMAE)"
    EMBED_BY_TEXTS = "Embed, by texts alone (UniMAE, LLM2Vec)"
    DISTIL = "Embed, as another model does (distillation)"
    RANK = "Rank documents, by token vectors (ColBERTv2)"
    WRITE = "Make a language model"
    OTHER = "Others"


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
