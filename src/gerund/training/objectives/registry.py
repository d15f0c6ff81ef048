"""The objectives that recipes know: one line each.

Knows: every objective. Does not know: what any of them does.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field, TypeAdapter

from gerund.training.objectives.base import Objective, ObjectiveConfig
from gerund.training.objectives.causal import CausalConfig
from gerund.training.objectives.context import Context, TextSource
from gerund.training.objectives.contrastive import SupervisedConfig
from gerund.training.objectives.distill import DistillConfig
from gerund.training.objectives.gur import GurConfig
from gerund.training.objectives.hybrid import MntpConfig, MsgConfig
from gerund.training.objectives.rankgen import RankgenConfig
from gerund.training.objectives.simcse import SimcseConfig
from gerund.training.objectives.span_corruption import SpanConfig
from gerund.training.objectives.sscl import SsclConfig
from gerund.training.objectives.unimae import UnimaeConfig

if TYPE_CHECKING:
    from gerund.training.recipe import Recipe
    from gerund.training.trainable_model import TrainableModel

OBJECTIVES: tuple[type[ObjectiveConfig], ...] = (
    CausalConfig,
    MntpConfig,
    MsgConfig,
    UnimaeConfig,
    SimcseConfig,
    SsclConfig,
    SupervisedConfig,
    SpanConfig,
    GurConfig,
    DistillConfig,
    RankgenConfig,
)


def class_of(kind: Any) -> type[ObjectiveConfig] | None:
    """Return the objective of a name; None where there is none."""
    return next((own for own in OBJECTIVES if own.name() == kind), None)


def parse_objective(value: Any) -> ObjectiveConfig:
    """Return the settings of an objective, which its ``kind`` names.

    Raises:
        ValidationError: The kind is unknown, or the settings are not those of this kind.
    """
    return value if isinstance(value, ObjectiveConfig) else _union(OBJECTIVES).validate_python(value)


@lru_cache(maxsize=8)
def _union(classes: tuple[type[ObjectiveConfig], ...]) -> TypeAdapter[ObjectiveConfig]:
    union: Any = Annotated[Union[classes], Field(discriminator="kind")]  # noqa: UP007  # of a tuple
    return TypeAdapter(union)


def prepare_objectives(
    recipe: "Recipe", model: "TrainableModel", source: TextSource, *, resuming: bool = False
) -> list[Objective]:
    """Return the recipe's objectives, ready to be trained; first those that share a pass.

    Args:
        recipe: The settings.
        model: The model.
        source: What gives texts.
        resuming: Whether a run goes on from a checkpoint.

    Raises:
        ConfigError: An objective does not fit the model's tokenizer, or a file is not there.
        DataError: A source has no usable text.
    """
    # What never takes part needs no texts.
    waiting = [config for config in recipe.objectives if config.takes_part(recipe.steps)]
    shared: list[Callable[[Context], Objective]] = []
    alone: list[Callable[[Context], Objective]] = []
    while waiting:
        config = waiting.pop(0)
        for other in waiting:
            together = config.joint(other)
            if together is not None:
                waiting.remove(other)
                shared.append(together)
                break
        else:
            alone.append(config.prepare)
    context = Context(recipe, model, source, resuming)
    return [prepare(context) for prepare in (*shared, *alone)]


def renamed_fields(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe, as they were written down earlier, under the names that fields have now."""
    renamed = {own.name(): own.renamed for own in OBJECTIVES}
    objectives = [
        {renamed.get(one.get("kind"), {}).get(key, key): value for key, value in one.items()}
        for one in settings["objectives"]
    ]
    return {**settings, "objectives": objectives}
