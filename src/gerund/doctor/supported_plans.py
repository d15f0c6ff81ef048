"""What can be done with a model: which plans it obeys, and how that is said in one word and one sentence.

Knows: plans, the probe. Does not know: texts, how results are shown.
"""

from dataclasses import dataclass

from transformers import PreTrainedModel

from gerund.attention.probe import verify
from gerund.attention.recurrent import recurrent_modules
from gerund.doctor.results import MEANINGS
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.settings.plan import PLAN_NAMES, AttentionPlan

_CAUSAL = ("causal", "echo")


@dataclass(frozen=True)
class Support:
    """What can be done with a model.

    Attributes:
        verdict: a key of ``MEANINGS``.
        refusals: for each plan, by name, why it is refused; None for a plan that is obeyed.
        both: the same for the plans with recurrent layers both ways; empty for a model without any.
    """

    verdict: str
    refusals: dict[str, str | None]
    both: dict[str, str | None]

    @property
    def reason(self) -> str:
        """Why some plan is refused, one that is refused both ways if there is any; empty where none is."""
        lost = [why for name, why in self.refusals.items() if self.both.get(name, why)]
        return next((why for why in (*lost, *self.refusals.values(), *self.both.values()) if why), "")

    def __str__(self) -> str:
        return MEANINGS[self.verdict]


def support(model: PreTrainedModel, n_layers: int) -> Support:
    """Find out which plans a model obeys.

    Args:
        model: attached to gerund's attention functions; causal, which is not looked at again here.
        n_layers: number of decoder layers.
    """
    refusals = {name: _refusal(model, AttentionPlan(name), n_layers) for name in PLAN_NAMES}
    both: dict[str, str | None] = {}
    has_recurrent = bool(recurrent_modules(model))
    if has_recurrent:
        both = {name: _refusal(model, plan, n_layers) for name in PLAN_NAMES if (plan := _turned(name)) is not None}
    obeyed = [name for name, why in refusals.items() if why is None and name not in _CAUSAL]
    obeyed += [name for name, why in both.items() if why is None]
    verdict = "causal" if not obeyed else "recurrent" if has_recurrent else "exact"
    return Support(verdict, refusals, both)


def _turned(name: str) -> AttentionPlan | None:
    try:
        return AttentionPlan(name, recurrent="both")
    except ConfigError:
        return None


def _refusal(model: PreTrainedModel, plan: AttentionPlan, n_layers: int) -> str | None:
    resolved = plan.resolve(n_layers)
    if resolved.is_causal:
        return None
    try:
        verify(model, resolved)
    except (UnsupportedModelError, ConfigError) as error:
        return str(error)
    return None
