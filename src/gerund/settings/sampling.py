"""Sampling settings (``Sampling``), and how several continuations are ranked (``Rerank``).

Knows: names, ranges. Does not know: torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict

from pydantic import BeforeValidator, Field, SkipValidation

from gerund.checks import flag, is_listing, whole_number
from gerund.errors import ConfigError
from gerund.settings.fields import Count, Fraction, Number, Whole, check, checked, documented, setting
from gerund.types import Scorer

MOST_AT_ONCE = 10_000
"""Continuations per prompt that are generated at once; more are a slip."""


def _seeds(name: str, value: Any) -> int | tuple[int, ...]:
    if is_listing(value):
        return tuple(whole_number("a seed", seed) for seed in value)
    return whole_number(name, value)


Probability = Annotated[Number, Field(gt=0, le=1)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
TokenId = Annotated[Whole, Field(ge=0)]
Seeds = Annotated[int | Sequence[int], BeforeValidator(checked(_seeds))]


@documented
@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. All limits apply together, in the order given here.

    >>> Sampling(temperature=0.7, top_p=0.9, seed=1).is_greedy
    False
    """

    temperature: Annotated[Number, Field(ge=0, allow_inf_nan=False)] = setting(
        0.0, "0 takes the most likely token each time (greedy); 1 samples from the model as it is."
    )
    top_k: Count | None = setting(None, "Sample only from this many of the most likely tokens.")
    top_p: Probability | None = setting(
        None, "Nucleus sampling: only the most likely tokens that together have this probability."
    )
    min_p: Fraction | None = setting(
        None,
        "Only tokens that are at least this fraction as likely as the most likely one (Nguyen et al. 2024).",
        kw_only=True,
    )
    typical_p: Probability | None = setting(
        None, "Typical sampling: only the tokens nearest to the average surprise that together have this probability."
    )
    seed: Seeds | None = setting(
        None,
        "Makes sampling repeatable. Every prompt samples with the same seed, so equal prompts get equal texts; in "
        "Python a sequence gives each prompt its own.",
    )
    repetition_penalty: Annotated[Number, Field(ge=0.1, le=10)] = setting(
        1.0,
        "Above 1: tokens of the prompt and of the text so far become less likely; their logits are divided by it, or "
        "multiplied where they are negative (Keskar et al. 2019).",
        kw_only=True,
    )
    frequency_penalty: Penalty = setting(
        0.0, "Subtracted from a token's logit for each time that the text so far has it; -2 to 2.", kw_only=True
    )
    presence_penalty: Penalty = setting(
        0.0, "Subtracted from a token's logit once if the text so far has it; -2 to 2.", kw_only=True
    )
    logit_bias: Mapping[TokenId, Annotated[Number, Field(ge=-100, le=100)]] = setting(
        {},
        "Added to the logits of tokens, by token id; -100 to 100, where -100 all but bans a token.",
        kw_only=True,
        hash=False,
    )

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "logit_bias", {token: bias for token, bias in self.logit_bias.items() if bias})

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether what was written so far, or a bias, changes what is probable."""
        usual = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) == (1, 0, 0)
        return not usual or bool(self.logit_bias)


GREEDY = Sampling()
"""The default sampling: the most likely token each time."""


@documented
@dataclass(frozen=True)
class Rerank:
    """Write several continuations and keep those that a scorer likes best (RankGen, section 2.3).

    ``Rerank(samples=20)`` writes twenty whole continuations and takes the best. ``Rerank(samples=10, beams=2,
    every=20)`` is the paper's beam search: after every 20 tokens the two best of twenty are kept and written on.

    >>> Rerank(samples=10, beams=2, every=20).width
    20
    """

    samples: Count = setting(
        20, "Continuations sampled from each beam; in the first round beams times as many from the prompt."
    )
    beams: Count = setting(1, "Continuations that are kept each time.")
    every: Count | None = setting(None, "Tokens between two rankings; default: rank only at the end.")
    scorer: SkipValidation[str | Scorer | None] = setting(
        None,
        "What ranks: a name, such as consensus; a scorer's folder, or an object with a score method; default: the "
        "model's trained scorer, else pmi.",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.width > MOST_AT_ONCE:
            raise ConfigError(f"{self.width} continuations at a time are more than {MOST_AT_ONCE}, the most")

    @property
    def width(self) -> int:
        """How many continuations of one prompt are written at a time."""
        return self.samples * self.beams


class RerankKeywords(TypedDict, total=False):
    """``Rerank`` as keywords of ``generate`` and its like, for whole completions that are ranked once."""

    best_of: int | None
    """Sample this many completions and return the best: ``Rerank(samples=best_of)``."""

    rank: str | Scorer | None
    """What ranks them, such as ``consensus`` or ``pmi``: ``Rerank(scorer=rank)``."""


_RERANK_FIELDS = {"best_of": "samples", "rank": "scorer"}


def take_rerank(given: Rerank | None, keywords: RerankKeywords) -> Rerank | None:
    """Return how completions are ranked: as ``given``, or as the keywords say, which are removed.

    >>> take_rerank(None, {"best_of": 8, "rank": "consensus"})
    Rerank(samples=8, beams=1, every=None, scorer='consensus')
    """
    taken: Any = {field: keywords.pop(name, None) for name, field in _RERANK_FIELDS.items()}  # type: ignore[misc]
    passed = {field: value for field, value in taken.items() if value is not None}
    if not passed:
        return given
    if given is not None:
        name = next(name for name, field in _RERANK_FIELDS.items() if field in passed)
        raise ConfigError(f"`{name}` is a part of `rerank`; pass one of them, not both")
    return Rerank(**passed)


def sampling_or(given: Sampling | None, default: Sampling = GREEDY) -> Sampling:
    """Return how tokens are chosen: as given, or by default (greedily) where nothing is said."""
    if given is None:
        return default
    if not isinstance(given, Sampling):
        raise ConfigError(f"sampling is a Sampling, such as Sampling(temperature=0.8), not {given!r}")
    return given


class SamplingKeywords(TypedDict, total=False):
    """The fields of ``Sampling`` as keywords of ``generate`` and its like, in the place of ``sampling``."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    seed: int | Sequence[int] | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    do_sample: bool | None
    """Whether to sample at all, as in transformers: False is greedy, True samples with temperature 1 unless another is
    given."""


_FILTERS = ("top_k", "top_p", "min_p", "typical_p")


def sampling_from(given: Sampling | None, keywords: Mapping[str, Any], default: Sampling = GREEDY) -> Sampling:
    """Return how tokens are chosen: as ``given``, or as the default with the keywords put in.

    A filter (``top_k``, ``top_p``, ``min_p``, ``typical_p``) without a temperature samples with temperature 1.

    Args:
        given: a whole ``Sampling``, which leaves nothing to the keywords.
        keywords: those of ``SamplingKeywords``; others are passed over, and None is left out.
        default: what holds where nothing is said.

    >>> sampling_from(None, {"top_p": 0.9, "seed": 1}) == Sampling(temperature=1.0, top_p=0.9, seed=1)
    True
    """
    passed = {name: keywords[name] for name in SamplingKeywords.__annotations__ if keywords.get(name) is not None}
    if not passed or given is not None:
        if passed:
            raise ConfigError(f"`{next(iter(passed))}` is a part of `sampling`; pass one of them, not both")
        return sampling_or(given, default)
    samples = passed.pop("do_sample", None)
    if samples is not None and not flag("do_sample", samples):
        unused = next((name for name in ("temperature", *_FILTERS) if passed.get(name)), None)
        if unused is not None:
            raise ConfigError(f"do_sample=False takes the most probable tokens, so `{unused}` has no use; remove it")
        return replace(default, **{**dict.fromkeys(_FILTERS), "temperature": 0.0, **passed})
    if samples is not None and passed.get("temperature") == 0:
        raise ConfigError("do_sample=True contradicts temperature=0, which is greedy; remove one of them")
    if "temperature" not in passed and default.is_greedy and (samples or any(name in passed for name in _FILTERS)):
        passed["temperature"] = 1.0
    return replace(default, **passed)
