"""Attention plans by name, and what they mean for a model of n layers.

Knows: the layouts of "Look Both Ways and No Sink" (LBW, sections 3.1, 3.5, 3.6), of LLM2Vec (``bidir``),
of MAGNET (``hybrid``) and of echo embeddings (``echo``). Does not know: tensors.

Layers are counted from the bottom: layer 0 sits on the embeddings, layer n-1 is nearest the output, and
"the top k layers" are layers n-k to n-1.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, Never

from pydantic import Field

from gerund.checks import demand_fields
from gerund.errors import ConfigError, unknown_name
from gerund.settings.fields import MOST, Auto, Count, Layers, Unset, check, documented, setting


class Direction(StrEnum):
    """Where the tokens of one layer look, before hidden tokens, windows and padding are taken away."""

    CAUSAL = "causal"
    BACKWARD = "backward"
    BIDIRECTIONAL = "bidirectional"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class View:
    """What the tokens of one layer see: a direction, where no token sees the first ``hidden`` tokens before it.

    ``turns`` says whether a recurrent layer takes the direction as well; without it, it stays causal.
    """

    direction: Direction
    hidden: int = 0
    turns: bool = False

    @property
    def looks_right(self) -> bool:
        """Whether a token sees later ones, all of them."""
        return self.direction in (Direction.BACKWARD, Direction.BIDIRECTIONAL)

    def __str__(self) -> str:
        if not self.hidden:
            return self.direction.value
        hidden = "the first token" if self.hidden == 1 else f"the first {self.hidden} tokens"
        return f"{self.direction.value} without {hidden}"


@dataclass(frozen=True)
class Stream:
    """Layers that run a second time, on a view of their own, with the same weights.

    ``kind`` is ``"parallel"`` (each of ``layers`` runs twice on one input and the outputs are combined),
    ``"stack"`` (``layers`` form a second tower that starts from the input of the first of them and is
    combined with the model's output before the final norm) or ``"extend"`` (the last layer runs
    ``repeats`` more times on top).
    """

    kind: Literal["parallel", "stack", "extend"]
    view: View
    layers: range
    repeats: int = 0
    combine: Literal["sum", "mean"] = "sum"


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan worked out for a model of ``len(views)`` layers: one view a layer, and perhaps a stream."""

    views: tuple[View, ...]
    stream: Stream | None = None
    repeats_text: bool = False
    skips: tuple[int, ...] = ()
    """Layers whose input gets the input of the previous one of them added; so does what the last layer gives."""

    def added_after(self, layer: int) -> int | None:
        """Return whose input is added to what comes out of ``layer``: the index of a layer; None for nothing's.

        >>> plan = AttentionPlan("mask0-bidir", k=4, skips=3).resolve(6)
        >>> plan.skips, [plan.added_after(layer) for layer in range(6)]
        ((2, 5), [None, None, None, None, 2, 5])
        """
        if layer + 1 not in (*self.skips, len(self.views)):
            return None
        return max((skip for skip in self.skips if skip <= layer), default=None)

    @property
    def is_causal(self) -> bool:
        """Whether every layer is the untouched causal one, so that a KV cache stays valid."""
        return self.stream is None and not self.skips and set(self.views) == {View(Direction.CAUSAL)}

    @property
    def is_bidirectional(self) -> bool:
        """Whether every layer looks both ways at everything, as an encoder's own attention does."""
        plain = self.stream is None and not self.repeats_text and not self.skips
        return plain and set(self.views) == {View(Direction.BIDIRECTIONAL)}

    def lower(self, n_layers: int) -> "ResolvedPlan":
        """Return what is left of the plan in the lower ``n_layers`` layers, where these do as they do in all of them.

        Otherwise the plan itself: a tower or further passes end in the top layer, and skips add to what it gives.

        >>> plan = AttentionPlan("inter-back", k=4).resolve(6).lower(3)
        >>> len(plan.views), plan.stream.layers, AttentionPlan("extra-back").resolve(6).lower(3).stream.layers
        (3, range(2, 3), range(0, 3))
        """
        stream = self.stream
        if self.skips or (stream is not None and stream.kind != "parallel"):
            return self
        if stream is not None:
            layers = range(stream.layers.start, min(stream.layers.stop, n_layers))
            stream = replace(stream, layers=layers) if layers else None
        return replace(self, views=self.views[:n_layers], stream=stream)

    def with_recurrent_turned(self) -> "ResolvedPlan":
        """Return the plan with recurrent layers in the place of attention doing likewise where it looks to the right.

        Tokens at the beginning are hidden from attention alone, which is where sinks are: a state has none.
        """
        stream = None if self.stream is None else replace(self.stream, view=_turned(self.stream.view))
        return replace(self, views=tuple(map(_turned, self.views)), stream=stream)


_CAUSAL = View(Direction.CAUSAL)


def _turned(view: View) -> View:
    return replace(view, turns=view.looks_right)


# Fraction of the layers that is converted when k is left out: where the curves of LBW's Figures 2 and 4 peak
# (TinyLlama, n = 22: backward k = 6, mask0-bidir k = 10, bidirectional k = 19). None: the plan has no k.
_DEFAULT_FRACTION: dict[str, float | None] = {
    "causal": None,
    "bidir": None,
    "inplace-back": 0.27,
    "inplace-bidir": 0.85,
    "inter-back": 0.27,
    "inter-bidir": 0.85,
    "extra-back": 0.45,
    "extra-bidir": 0.45,
    "extend-back": 0.05,
    "extend-bidir": 0.05,
    "mask0-for": 0.27,
    "mask0-bidir": 0.45,
    "mask0-all": 0.85,
    "mask0+bidir": 0.85,
    "hybrid": None,
    "echo": None,
}

_K0 = re.compile(r"mask0-([0-9]{1,3}|mid|last)")
_MASK_M = re.compile(r"mask([0-9]{1,6})(-(?:for|bidir|all)|\+bidir|)")
PLAN_NAMES: tuple[str, ...] = tuple(_DEFAULT_FRACTION)
DEFAULT_K0_FRACTION = 0.45
DEFAULT_PLAN = "mask0-bidir"
# Settings that came later, with the value that says what plans said before.
_LATER: dict[str, Any] = {"skips": None, "recurrent": "causal"}
# Plans in which no layer looks to the right, so that there is no direction to take; `hybrid` is no way to encode.
_TURNS_NOTHING = ("causal", "echo", "mask0-for", "hybrid")
_MOST_EXTENDED = 1000


@dataclass(frozen=True)
class PlanSettings(Generic[Auto, Unset]):
    """The settings of an attention plan, each declared here alone."""

    k: Layers | Auto | Unset = setting(
        None,
        "Number of converted layers, counted from the top (extra plans: from the bottom; extend plans: added on top). "
        "Default: the fraction of the layers that did best in the paper.",
    )
    k0: Layers | Auto | Unset = setting(
        None, "For mask0+bidir: number of the k converted layers that hide the first token."
    )
    sink_tokens: Annotated[Count, Field(le=MOST)] | Unset = setting(
        1,
        "Number of first tokens that a mask0 plan hides from all later ones; m of them is the paper's MASKm "
        "(appendix F).",
    )
    combine: Literal["sum", "mean"] | Unset = setting(
        "sum", "How inter and extra plans join their two outputs: sum (the paper) or mean."
    )
    variant: Literal["paper", "released"] | Unset = setting(
        "paper", "Layout of an inter plan and of skips: paper, or released for that of the authors' code."
    )
    skips: Layers | None = setting(
        None,
        "Residual connections across this many layers, from the first converted layer on (LBW, Algorithm 1, line 9; "
        "its code has 3); 0 for none.",
    )
    recurrent: Literal["causal", "both"] | Unset = setting(
        "causal",
        "How converted layers without attention (state spaces, convolutions) read: causal (forward), or both (forward "
        "and backward, the outputs added; backward alone for plans that look back).",
    )


@dataclass(frozen=True)
class _Named:
    name: str = setting(
        DEFAULT_PLAN,
        "One of gerund.PLAN_NAMES. The paper's spellings are understood too, such as MASK0&BIDIR, and mask3-bidir for "
        "mask0-bidir with three sink tokens.",
    )


@documented
@dataclass(frozen=True)
class AttentionPlan(PlanSettings[None, Never], _Named):
    """One of the papers' layouts, not yet bound to a number of layers.

    >>> plan = AttentionPlan("mask0-bidir", k=2)
    >>> for view in plan.resolve(4).views:
    ...     print(view)
    causal
    causal
    bidirectional without the first token
    bidirectional without the first token
    """

    def __post_init__(self) -> None:
        usual = isinstance(self.sink_tokens, int) and self.sink_tokens == 1
        given = {"sink_tokens": None if usual else self.sink_tokens, "k0": self.k0}
        for field, value in spelled_out(self.name, given).items():
            object.__setattr__(self, field, value)
        if not isinstance(self.name, str) or self.name not in _DEFAULT_FRACTION:
            raise unknown_name("attention plan", self.name, PLAN_NAMES)
        check(self)
        _check_fit(self)

    @property
    def takes_k(self) -> bool:
        """Whether this layout has a number of converted layers."""
        return _DEFAULT_FRACTION[self.name] is not None

    @property
    def takes_skips(self) -> bool:
        """Whether this layout runs each layer once to encode, so that there may be skips."""
        return self.name.split("-")[0] not in ("inter", "extra", "extend", "hybrid")

    @property
    def takes_recurrent(self) -> bool:
        """Whether a layer of this layout looks to the right, so that recurrent layers may be read both ways."""
        return self.name not in _TURNS_NOTHING

    def with_defaults(self, n_layers: int) -> "AttentionPlan":
        """Return the same plan with k (and k0) filled in for ``n_layers``, checked against it.

        Raises:
            ConfigError: k is larger than the number of layers, or k0 larger than k.
        """
        fraction = _DEFAULT_FRACTION[self.name]
        if fraction is None:
            return self
        k = self.k if self.k is not None else max(1, round(fraction * n_layers))
        if k > n_layers and not self.name.startswith("extend"):
            raise ConfigError(f"k={k} is larger than the model's {n_layers} layers")
        if self.name != "mask0+bidir":
            return replace(self, k=k)
        k0 = self.k0 if self.k0 is not None else min(k, max(1, round(DEFAULT_K0_FRACTION * n_layers)))
        if k0 > k:
            raise ConfigError(f"k0={k0} is larger than k={k}: k0 counts some of the k converted layers")
        return replace(self, k=k, k0=k0)

    @property
    def repeats_text(self) -> bool:
        """Whether the model reads a text twice."""
        return self.name == "echo"

    def resolve(self, n_layers: int) -> ResolvedPlan:
        """Work the plan out for a model of ``n_layers`` layers.

        Raises:
            ConfigError: k is larger than the number of layers, or k0 larger than k.
        """
        plan = self.with_defaults(n_layers)
        resolved = plan._laid_out(n_layers)
        return resolved.with_recurrent_turned() if plan.recurrent == "both" else resolved

    def _laid_out(self, n_layers: int) -> ResolvedPlan:
        """Return the views of every layer; the defaults are filled in."""
        plan = self
        k, k0 = plan.k or 0, plan.k0 or 0
        lower = n_layers - k
        family, _, way = plan.name.partition("-")
        if family in ("inter", "extra", "extend"):
            return ResolvedPlan((_CAUSAL,) * n_layers, _stream(plan, family, way, k, n_layers))
        sink = plan.sink_tokens
        seen_all, seen_mask0 = View(Direction.BIDIRECTIONAL), View(Direction.BIDIRECTIONAL, sink)
        layouts: dict[str, list[tuple[View, int]]] = {
            "causal": [(_CAUSAL, n_layers)],
            "echo": [(_CAUSAL, n_layers)],
            "bidir": [(seen_all, n_layers)],
            "hybrid": [(View(Direction.HYBRID), n_layers)],
            "inplace-back": [(_CAUSAL, lower), (View(Direction.BACKWARD), k)],
            "inplace-bidir": [(_CAUSAL, lower), (seen_all, k)],
            "mask0-for": [(_CAUSAL, lower), (View(Direction.CAUSAL, sink), k)],
            "mask0-bidir": [(_CAUSAL, lower), (seen_mask0, k)],
            "mask0-all": [(View(Direction.CAUSAL, sink), lower), (seen_mask0, k)],
            "mask0+bidir": [(_CAUSAL, lower), (seen_all, k - k0), (seen_mask0, k0)],
        }
        views = tuple(view for view, count in layouts[plan.name] for _ in range(count))
        return ResolvedPlan(views, repeats_text=plan.repeats_text, skips=_skips(plan, n_layers))

    def label(self, n_layers: int) -> str:
        """Return a short name of all that is not as usual: what tables and pictures call the plan.

        >>> AttentionPlan("mask0-bidir", k=2, skips=3).label(8)
        'mask0-bidir k=2 skips=3'
        """
        plan = self.with_defaults(n_layers)
        numbers = (
            ("k", plan.k, None),
            ("k0", plan.k0, None),
            ("sink", plan.sink_tokens, 1),
            ("skips", plan.skips, None),
        )
        words = (("", plan.combine, "sum"), ("", plan.variant, "paper"), ("recurrent ", plan.recurrent, "causal"))
        named = " ".join([plan.name, *(f"{name}={value}" for name, value, usual in numbers if value != usual)])
        return ", ".join([named, *(f"{name}{value}" for name, value, usual in words if value != usual)])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict that ``from_dict`` reads back."""
        # Plans without skips or turned recurrent layers are written, and hashed, as they were before there were any.
        return {name: value for name, value in asdict(self).items() if _LATER.get(name, ...) != value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AttentionPlan":
        """Read a plan back, refusing fields that do not exist.

        Raises:
            ConfigError: an unknown field or a value that is not valid.
        """
        demand_fields(cls, data, "of an attention plan")
        return cls(**data)


def _stream(plan: AttentionPlan, family: str, way: str, k: int, n_layers: int) -> Stream | None:
    if k == 0:
        return None
    view = View(Direction.BACKWARD if way == "back" else Direction.BIDIRECTIONAL)
    if family == "extend":
        return Stream("extend", view, range(n_layers - 1, n_layers), repeats=k)
    if family == "extra":
        return Stream("stack", view, range(k), combine=plan.combine)
    kind: Literal["stack", "parallel"] = "stack" if plan.variant == "released" else "parallel"
    return Stream(kind, view, range(n_layers - k, n_layers), combine=plan.combine)


def _skips(plan: AttentionPlan, n_layers: int) -> tuple[int, ...]:
    if plan.skips is None:
        return ()
    if plan.variant == "released":
        # use_res_connect counts from the number of layers without the first token (or looking back), not from where
        # they begin.
        counted = {"mask0+bidir": plan.k0, "inplace-bidir": 0}.get(plan.name, plan.k)
        return tuple(range(counted or 0, n_layers, plan.skips))
    converted = n_layers if plan.k is None else plan.k
    return tuple(range(n_layers - converted, n_layers, plan.skips))


def spelled_out(name: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plan's name says, in one of the paper's spellings too: the name as it is here, perhaps a number.

    >>> spelled_out("MASK3-BIDIR", {}), spelled_out("MASK0-2", {})
    ({'name': 'mask0-bidir', 'sink_tokens': 3}, {'name': 'mask0+bidir', 'k0': 2})
    """
    if not isinstance(name, str) or name in _DEFAULT_FRACTION:
        return {"name": name}
    plain, settings = "".join(name.lower().split()).replace("&", "+"), dict[str, Any]()
    if (match := _K0.fullmatch(plain)) is not None:
        if not match[1].isdigit():
            k0 = f"{'half of ' if match[1] == 'mid' else ''}the best k of 'mask0-bidir'"
            raise ConfigError(f"{name!r} is 'mask0+bidir' with k0 = {k0}: give that number")
        plain, settings = "mask0+bidir", {"k0": int(match[1])}
    elif (match := _MASK_M.fullmatch(plain)) is not None:
        if not match[2]:
            raise ConfigError(f"{name!r} does not say which layers: there are {plain}-bidir, {plain}-for, {plain}-all")
        plain, settings = f"mask0{match[2]}", {"sink_tokens": int(match[1])} if int(match[1]) else {}
    for field, value in settings.items():
        if (other := given.get(field)) is not None and not (isinstance(other, int) and other == value):
            raise ConfigError(f"{name!r} says {field}={value}, and {field}={other} is given beside it")
    return {"name": plain, **settings} if plain in _DEFAULT_FRACTION else {"name": name}


def _check_fit(plan: AttentionPlan) -> None:
    """Refuse settings that the plan has no use for: they would be ignored without a word."""
    family = plan.name.split("-")[0]
    if plan.skips == 0:
        raise ConfigError("skips must be at least 1, got 0; for none, leave it out")
    if plan.k is not None and not plan.takes_k:
        raise ConfigError(f"the plan {plan.name!r} converts all or no layers and takes no k")
    if plan.k is not None and family == "extend" and plan.k > _MOST_EXTENDED:
        raise ConfigError(f"k must be at most {_MOST_EXTENDED} for {plan.name!r}, got {plan.k}")
    if plan.k is not None and plan.k0 is not None and plan.k0 > plan.k:
        raise ConfigError(f"k0={plan.k0} is larger than k={plan.k}: k0 counts some of the k converted layers")
    misplaced = {
        "k0 belongs to the plan 'mask0+bidir'": plan.k0 is not None and plan.name != "mask0+bidir",
        "sink_tokens belongs to the mask0 plans": plan.sink_tokens != 1 and not plan.name.startswith("mask0"),
        "skips belong to plans that run each layer once to encode": plan.skips is not None and not plan.takes_skips,
        "recurrent='both' belongs to plans that look to the right": plan.recurrent != "causal"
        and not plan.takes_recurrent,
        "variant belongs to the inter plans and to plans with skips": plan.variant != "paper"
        and family != "inter"
        and plan.skips is None,
        "combine belongs to the inter and extra plans": plan.combine != "sum" and family not in ("inter", "extra"),
    }
    for what, is_misplaced in misplaced.items():
        if is_misplaced:
            raise ConfigError(f"{what}, not to {plan.name!r}")
