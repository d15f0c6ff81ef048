"""Short names of encoder configs.

Knows: which settings tell configs apart. Does not know: models.
"""

from gerund.settings.encoder import EncoderConfig
from gerund.settings.templates import NAMED, NO_TEMPLATE


def label_of(config: EncoderConfig, n_layers: int) -> str:
    """Return a short name of an encoder config: what tables call it.

    >>> label_of(EncoderConfig(pooling="last"), 8)
    'mask0-bidir k=4, last'
    """
    parts = [config.attention.label(n_layers)]
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
