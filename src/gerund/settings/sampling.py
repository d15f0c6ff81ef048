"""How the next token is chosen, and how several continuations are ranked.

Knows: names, ranges. Does not know: torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from gerund.checks import demand_between, demand_number, flag, whole_number
from gerund.errors import ConfigError
from gerund.types import Scorer

MOST_AT_ONCE = 10_000
"""Continuations per prompt that are generated at once; more are a slip."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. All limits apply together, in the order given here.

    >>> Sampling(temperature=0.7, top_p=0.9, seed=1).is_greedy
    False
    """

    temperature: float = 0.0
    """0 takes the most probable token each time (greedy); 1 samples from the model as it is."""

    top_k: int | None = None
    """Only the k most probable tokens."""

    top_p: float | None = None
    """Nucleus sampling: only the most probable tokens that together have this probability."""

    min_p: float | None = field(default=None, kw_only=True)
    """Only tokens that are at least this fraction as probable as the most probable one (Nguyen et al. 2024)."""

    typical_p: float | None = None
    """Locally typical sampling: only tokens of about average surprise that together have this probability."""

    seed: int | Sequence[int] | None = None
    """Makes sampling repeatable. Each prompt samples with the seed alone, whatever is beside it, so equal prompts get
    equal texts; a sequence gives every prompt a seed of its own. None takes a fresh seed for each prompt."""

    repetition_penalty: float = field(default=1.0, kw_only=True)
    """Above 1, tokens of the prompt and of the text so far become less probable: their logits are divided by it, or
    multiplied where they are negative (Keskar et al. 2019). This and the next three come first, for greedy too."""

    frequency_penalty: float = field(default=0.0, kw_only=True)
    """Taken off a token's logit for each time that the text so far (not the prompt) has it; -2 to 2."""

    presence_penalty: float = field(default=0.0, kw_only=True)
    """Taken off a token's logit once where the text so far (not the prompt) has it; -2 to 2."""

    logit_bias: Mapping[int, float] = field(default_factory=dict, kw_only=True, hash=False)
    """Added to the logits of tokens, by token id; -100 to 100, where -100 all but bans a token."""

    def __post_init__(self) -> None:
        demand_number("temperature", self.temperature)
        # numpy's whole numbers overflow where Python's do not, and transformers refuses them.
        if self.top_k is not None:
            object.__setattr__(self, "top_k", whole_number("top_k", self.top_k))
        if self.seed is not None:
            # An array without dimensions has __iter__ and no elements.
            listed = hasattr(self.seed, "__iter__") and getattr(self.seed, "ndim", 1) == 1
            listed = listed and not isinstance(self.seed, (str, bytes, Mapping))
            seeds = tuple(whole_number("a seed", one) for one in self.seed) if listed else None  # type: ignore[union-attr]
            object.__setattr__(self, "seed", whole_number("seed", self.seed) if seeds is None else seeds)
        if not math.isfinite(self.temperature):
            raise ConfigError(
                f"temperature={self.temperature} is not a finite number; 0 is greedy, 1 the model as it is"
            )
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature} is negative; 0 is greedy, 1 the model as it is")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} leaves no token to choose from")
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            if value is None:
                continue
            demand_number(name, value)
            if not 0 < value <= 1:
                raise ConfigError(f"{name}={value} is not above 0 and at most 1")
        self._check_penalties()

    def _check_penalties(self) -> None:
        demand_between("min_p", 0.0 if self.min_p is None else self.min_p, 0, 1)
        demand_between("repetition_penalty", self.repetition_penalty, 0.1, 10)
        demand_between("frequency_penalty", self.frequency_penalty, -2, 2)
        demand_between("presence_penalty", self.presence_penalty, -2, 2)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias is a number by token id, such as {{42: -100}}, not {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            if whole_number("a token id of logit_bias", token) < 0:
                raise ConfigError(f"logit_bias names the token {token}, and token ids begin at 0")
            demand_between(f"logit_bias of the token {token}", bias, -100, 100)
        own = {int(token): float(bias) for token, bias in self.logit_bias.items() if bias}
        object.__setattr__(self, "logit_bias", own)

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
"""The default sampling: the likeliest token each time."""


@dataclass(frozen=True)
class Rerank:
    """Write several continuations and keep those that a scorer likes best (RankGen, section 2.3).

    ``Rerank(samples=20)`` writes twenty whole continuations and takes the best. ``Rerank(samples=10, beams=2,
    every=20)`` is the paper's beam search: after every 20 tokens the two best of twenty are kept and written on.

    >>> Rerank(samples=10, beams=2, every=20).width
    20
    """

    samples: int = 20
    """Continuations sampled from each beam; in the first round ``beams`` times as many from the prompt."""

    beams: int = 1
    """Continuations that are kept each time."""

    every: int | None = None
    """Tokens between two rankings; None ranks only what is finished."""

    scorer: "str | Scorer | None" = None
    """Who ranks: a name, a scorer's folder, or an object with a ``score`` method. None takes the model's own scorer
    where it was trained to be one, else ``pmi``."""

    def __post_init__(self) -> None:
        for name, what in (("samples", "continuation"), ("beams", "continuation"), ("every", "token")):
            value = getattr(self, name)
            if value is None and name == "every":
                continue
            if whole_number(name, value) < 1:
                raise ConfigError(f"{name}={value} leaves no {what}")
        if self.width > MOST_AT_ONCE:
            raise ConfigError(f"{self.width} continuations at a time are more than {MOST_AT_ONCE}, the most")

    @property
    def width(self) -> int:
        """How many continuations of one prompt are written at a time."""
        return self.samples * self.beams


def sampling_or(given: Sampling | None, default: Sampling = GREEDY) -> Sampling:
    """Return how tokens are chosen: as given, or by default (greedily) where nothing is said.

    Raises:
        ConfigError: what is given is no ``Sampling``.
    """
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

    Raises:
        ConfigError: both are given, or the keywords contradict each other.

    >>> sampling_from(None, {"top_p": 0.9, "seed": 1}) == Sampling(temperature=1.0, top_p=0.9, seed=1)
    True
    """
    said = {name: keywords[name] for name in SamplingKeywords.__annotations__ if keywords.get(name) is not None}
    if not said or given is not None:
        if said:
            raise ConfigError(f"`{next(iter(said))}` is a part of `sampling`; pass one of them, not both")
        return sampling_or(given, default)
    samples = said.pop("do_sample", None)
    if samples is not None and not flag("do_sample", samples):
        unused = next((name for name in ("temperature", *_FILTERS) if said.get(name)), None)
        if unused is not None:
            raise ConfigError(f"do_sample=False takes the most probable tokens, so `{unused}` has no use; remove it")
        return replace(default, **{**dict.fromkeys(_FILTERS), "temperature": 0.0, **said})
    if samples is not None and said.get("temperature") == 0:
        raise ConfigError("do_sample=True contradicts temperature=0, which is greedy; remove one of them")
    if "temperature" not in said and default.is_greedy and (samples or any(name in said for name in _FILTERS)):
        said["temperature"] = 1.0
    return replace(default, **said)
