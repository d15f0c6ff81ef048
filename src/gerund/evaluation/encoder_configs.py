"""Encoder configs as the command line spells them: ``mask0+bidir:k=6,k0=3,pooling=last``; and their short names.

Knows: how settings are applied to a config and named. Does not know: models.
"""

from gerund.config import EncoderConfig
from gerund.spec import parse_settings


def parse_encoder_config(text: str, own: EncoderConfig) -> EncoderConfig:
    """Return the encoder config that ``PLAN[:NAME=VALUE,...]`` means; what it leaves out is the model's own.

    Raises:
        ConfigError: an unknown plan or setting, or a value that does not fit.

    >>> parse_encoder_config("causal:pooling=last,append_eos=true", EncoderConfig()).pooling
    'last'
    """
    return parse_settings(text).applied_to(own)


def label_of(config: EncoderConfig, n_layers: int) -> str:
    """Return a short name of an encoder config: what tables call it.

    >>> label_of(EncoderConfig(pooling="last"), 8)
    'mask0-bidir k=4, last'
    """
    plan = config.attention.with_defaults(n_layers)
    numbers = [f"{name}={value}" for name in ("k", "k0") if (value := getattr(plan, name)) is not None]
    if plan.sink_tokens != 1:
        numbers.append(f"sink={plan.sink_tokens}")
    parts = [" ".join([plan.name, *numbers])]
    parts += [value for value, usual in ((plan.combine, "sum"), (plan.variant, "paper")) if value != usual]
    if config.pooling != "mean":
        parts.append(config.pooling)
    if config.append_eos:
        parts.append("eos")
    if config.prompt:
        parts.append(f"prompt {config.prompt[:20]!r}")
    return ", ".join(parts)
