"""Settings that `gerund tune` tries: attention plans, and training-free methods.

Torch is not imported, so that a misspelled name is reported at once.
"""

from collections.abc import Sequence
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
METHODS = ("recurrent", "skips", "layers", "states", "templates", "prepend", "reroute", "transforms")
"""What is tried behind the plans: methods without training, most of them on the best plan and on the causal one.

``recurrent``, which reads recurrent layers both ways, is tried on the best setting of every plan that takes it.
"""
_SKIPS = (1, 2, 3, 4)
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


def method_configs(
    methods: Sequence[str], starts: tuple[EncoderConfig, EncoderConfig, EncoderConfig], n_layers: int, dimensions: int
) -> list[EncoderConfig]:
    """Return what is tried on the best setting, the best that takes skips and the causal one.

    One of each kind comes first, then a second one of each, and so on: whatever the budget, no kind is left out for
    another. Within a kind, promising ones come first; what reads a text several times comes last of all.
    """
    best, skipping, causal = starts

    def on(start: EncoderConfig) -> list[EncoderConfig]:
        configs: list[EncoderConfig] = []
        if "layers" in methods:
            named = [f"1+{n_layers}", "all"]
            named += [f"{low}-{n_layers}" for low in (n_layers // 2, n_layers - 2, n_layers - 1) if low > 0]
            named += [str(n_layers - 1)]
            configs += [replace(start, layers=layers) for layers in named]
        if "transforms" in methods:
            names = [STANDARDIZATION, ALL_BUT_THE_TOP, f"{ALL_BUT_THE_TOP}-1"]
            names += [WHITENING, f"{WHITENING}-{max(1, dimensions // 2)}"]
            configs += [replace(start, transform=name) for name in names]
        return configs

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
    parts = parts_read(formatted[0], causal, n_layers) if "states" in methods else []
    kinds = (cheap, on(best), parts, with_skips(causal), with_skips(skipping), rerouted, prepended, on(causal))
    in_turn = [config for some in zip_longest(*kinds) for config in some if config is not None]
    return [*in_turn, *dear]


def parts_read(formatted: EncoderConfig, causal: EncoderConfig, n_layers: int) -> list[EncoderConfig]:
    """Return settings that read outputs of the attention, in a template (AlignedWVA), and its values."""
    late = [f"{max(1, n_layers // 2)}-{n_layers}", f"{max(1, n_layers - n_layers // 4)}-{n_layers}", "all"]
    aligned = [replace(formatted, states="attention", layers=layers) for layers in late]
    return [aligned[0], *(replace(causal, states="values", layers=layers) for layers in ("last", "all")), *aligned[1:]]


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
