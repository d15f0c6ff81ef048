"""Settings that `gerund tune` tries: attention plans, and training-free methods.

Torch is not imported, so that a misspelled name is reported at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from gerund.checks import one_of
from gerund.errors import ConfigError
from gerund.poolings import POOLINGS
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan, spelled_out
from gerund.settings.templates import (
    ALL_BUT_THE_TOP,
    ECHO,
    KV_EMBEDDING,
    LAST_LAYER,
    NAMED,
    REWRITE,
    STANDARDIZATION,
    TOPIC,
    WHITENING,
    settings_of_template,
)

BASELINES = ("causal", "echo")
ONE_K = (
    "inplace-back",
    "inplace-bidir",
    "inter-back",
    "inter-bidir",
    "extra-back",
    "extra-bidir",
    "extend-back",
    "extend-bidir",
    "mask0-for",
    "mask0-bidir",
    "mask0-all",
)
TWO_K = "mask0+bidir"
PLANS = (*BASELINES, *ONE_K, TWO_K)
METHODS = ("recurrent", "skips", "layers", "states", "poolings", "templates", "prepend", "reroute", "transforms")
"""Training-free methods that are tried after the attention plans.

``recurrent``, which reads recurrent layers both ways, is tried on the best setting of every plan that takes it;
``skips``, ``templates``, ``prepend`` and ``reroute`` each need a pass of the model. ``layers``, ``states`` and
``poolings`` are readings of the same pass, and ``transforms`` are applied to its vectors.
"""
_SKIPS = (1, 2, 3, 4)
# Of a mean and of a last token's state, the pooling that is tried too.
_NEXT_POOLING = {"mean": "weighted-mean", "last": "last-mean"}
# Dimensions that whitening keeps: a sample of a few hundred texts says little of more.
_WHITENED = 128
DEFAULT_BUDGET = 150


def plans_named(names: Sequence[str]) -> list[str]:
    """Return names of plans as they are here, of LBW's spellings too; an unknown name is left as it is.

    >>> plans_named(["MASK0&BIDIR", "causal"])
    ['mask0+bidir', 'causal']
    """
    spelled = [spelled_out(name, {}) for name in names]
    for name, plan in zip(names, spelled, strict=True):
        if len(plan) > 1:
            raise ConfigError(f"a plan to tune is named without numbers, and {name!r} says one; take {plan['name']!r}")
    return [plan["name"] for plan in spelled]


def require_settings(
    plans: Sequence[str],
    poolings: Sequence[str] = (),
    methods: Sequence[str] = (),
    sample: Sequence[str] = (),
    budget: int = DEFAULT_BUDGET,
) -> None:
    """Refuse settings of a search that cannot be tried; the arguments are those of :func:`gerund.evaluation.tune`."""
    for kind, names, valid in (
        ("plan to tune", plans, PLANS),
        ("pooling", poolings, tuple(POOLINGS)),
        ("method to tune", methods, METHODS),
    ):
        for name in names:
            one_of(kind, name, valid)
    if "transforms" in methods and not sample:
        raise ConfigError("transforms are fitted on texts; give a sample of them")
    if budget < 2:
        raise ConfigError(f"a budget of {budget} leaves nothing to compare; give at least 2")


def method_passes(
    methods: Sequence[str], causal: EncoderConfig, skipping: EncoderConfig, n_layers: int
) -> list[EncoderConfig]:
    """Return the passes that methods need, on the causal setting, and for skips on the best one that takes them.

    One of each kind comes first, then a second one of each, and so on: whatever the budget, no kind is left out for
    another. Within a kind, promising ones come first; what reads a text several times comes last of all.
    """

    def with_skips(start: EncoderConfig) -> list[EncoderConfig]:
        if "skips" not in methods:
            return []
        # They begin with the first converted layer: across as many layers as are converted, or more, they are the same.
        plans = {replace(start.attention, skips=skips).resolve(n_layers): skips for skips in reversed(_SKIPS)}
        return [replace(start, attention=replace(start.attention, skips=skips)) for skips in sorted(plans.values())]

    echo = replace(causal, attention=AttentionPlan(ECHO), template=REWRITE)
    names = [TOPIC, *(name for name in NAMED if name not in (TOPIC, REWRITE))]
    formatted = [replace(causal, template=name, **settings_of_template(name)) for name in names]
    low = [below for below in spread(n_layers, 5) if below > 1]
    # Token Prepending reads the output of an earlier layer, of 32 the 27th.
    read = (LAST_LAYER, str(max(1, min(n_layers - 1, round(n_layers * 27 / 32))))) if "prepend" in methods else ()
    prepended = [replace(formatted[1], prepend=below, layers=layers) for layers in read for below in low]
    kv = replace(causal, template=KV_EMBEDDING, **settings_of_template(KV_EMBEDDING))
    rerouted = [replace(kv, reroute=window) for window in windows(n_layers)] if "reroute" in methods else []
    # What reads each text several times is what a small budget leaves out.
    cheap, dear = (
        [config for config in formatted if (len(config.templates) > 1) is several] for several in (False, True)
    )
    cheap = [*cheap, echo]
    if "templates" not in methods:
        cheap, dear = [], []
    kinds = (cheap, with_skips(causal), with_skips(skipping), rerouted, prepended)
    in_turn = [config for some in zip_longest(*kinds) for config in some if config is not None]
    return [*in_turn, *dear]


def readings_of(config: EncoderConfig, methods: Sequence[str], n_layers: int, *, every: bool) -> list[EncoderConfig]:
    """Return other readings of a setting's pass, the promising ones alone or every one."""
    half, late = (f"{max(1, n_layers - n_layers // part)}-{n_layers}" for part in (2, 4))
    ends = f"1+{n_layers}"
    named: dict[str, list[dict[str, str]]] = {"layers": [], "states": [], "poolings": []}
    if "layers" in methods:
        few, more = [ends, "all"], [half, late, f"{n_layers - 1}-{n_layers}", str(n_layers - 1)]
        named["layers"] = [{"layers": layers} for layers in [*few, *(more if every else [])]]
    if "states" in methods and config.attention.takes_skips and not config.attention.skips:
        pairs = [("attention", late), ("values", LAST_LAYER)]
        pairs += [("attention", half), ("attention", "all")] if every else []
        named["states"] = [{"states": states, "layers": of} for states, of in pairs]
    if "poolings" in methods and (pooling := _NEXT_POOLING.get(config.pooling)) is not None:
        layers = [config.layers, *([ends] if "layers" in methods else [])]
        named["poolings"] = [{"pooling": pooling, "layers": of} for of in layers]
    in_turn = [some for several in zip_longest(*named.values()) for some in several if some is not None]
    readings = [replace(config, **changes) for changes in in_turn]
    return distinct_configs(reading for reading in readings if reading != config)


def distinct_configs(configs: Iterable[EncoderConfig]) -> list[EncoderConfig]:
    """Return configs in their order, each of them once."""
    distinct: list[EncoderConfig] = []
    for config in configs:
        distinct += [config] if config not in distinct else []
    return distinct


def transforms_of(config: EncoderConfig, dimensions: int) -> list[EncoderConfig]:
    """Return a setting under each transform that is tried."""
    names = [STANDARDIZATION, ALL_BUT_THE_TOP, f"{ALL_BUT_THE_TOP}-1"]
    names += [WHITENING, f"{WHITENING}-{max(1, min(_WHITENED, dimensions // 2))}"]
    return [replace(config, transform=name) for name in names]


def windows(n_layers: int) -> list[str]:
    """Return the runs of layers in which keys are rerouted: a tenth of the layers and one more, at most at five places.

    KV-Embedding leaves the first fifth of the layers as they are.

    >>> windows(8), windows(2)
    (['2-3', '3-4', '5-6', '6-7', '7-8'], ['1-2'])
    """
    width = min(n_layers, max(1, n_layers // 10) + 1)
    first, last = min(n_layers // 5 + 1, n_layers - width + 1), n_layers - width + 1
    return [f"{low}-{low + width - 1}" for low in (first - 1 + step for step in spread(last - first + 1, 5))]


def spread(most: int, count: int) -> list[int]:
    """Return at most ``count`` whole numbers from 1 to ``most``, evenly spread, both ends among them.

    >>> spread(22, 4), spread(3, 9)
    ([1, 8, 15, 22], [1, 2, 3])
    """
    if most <= count:
        return list(range(1, most + 1))
    return sorted({round(1 + (most - 1) * step / (count - 1)) for step in range(count)})
