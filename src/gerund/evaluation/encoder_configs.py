"""Short names of encoder configs.

Knows: which settings tell configs apart. Does not know: models.
"""

from gerund.config import EncoderConfig
from gerund.encoder_methods import NAMED, NO_TEMPLATE

_USUAL = (("combine", "", "sum"), ("variant", "", "paper"), ("recurrent", "recurrent ", "causal"))


def label_of(config: EncoderConfig, n_layers: int) -> str:
    """Return a short name of an encoder config: what tables call it.

    >>> label_of(EncoderConfig(pooling="last"), 8)
    'mask0-bidir k=4, last'
    """
    plan = config.attention.with_defaults(n_layers)
    numbers = [f"{name}={value}" for name in ("k", "k0") if (value := getattr(plan, name)) is not None]
    if plan.sink_tokens != 1:
        numbers.append(f"sink={plan.sink_tokens}")
    if plan.skips is not None:
        numbers.append(f"skips={plan.skips}")
    parts = [" ".join([plan.name, *numbers])]
    parts += [f"{prefix}{value}" for name, prefix, usual in _USUAL if (value := getattr(plan, name)) != usual]
    if config.pooling != "mean":
        parts.append(config.pooling)
    if config.append_eos:
        parts.append("eos")
    if config.template != NO_TEMPLATE:
        parts.append(config.template if config.template in NAMED else f"template {config.template[:20]!r}")
    others = [name for name in config.methods if name != "template"]
    parts += [f"{name} {getattr(config, name)}" if name != "transform" else config.transform for name in others]
    if config.prompt:
        parts.append(f"prompt {config.prompt[:20]!r}")
    return ", ".join(parts)
