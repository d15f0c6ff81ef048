"""Encoder configs as the command line spells them: ``mask0+bidir:k=6,k0=3,pooling=last``; and their short names.

Knows: names of plans and settings. Does not know: models.
"""

from collections.abc import Iterable
from dataclasses import replace

from gerund.config import EncoderConfig
from gerund.errors import ConfigError, unknown_name

_NUMBERS = ("k", "k0", "sink_tokens")
_PLAN_WORDS = ("combine", "variant")
_FLAGS = ("append_eos", "pool_prompt")
_WORDS = ("pooling", "prompt")
SETTINGS = (*_NUMBERS, *_PLAN_WORDS, "pooling", *_FLAGS, "prompt")


def parse_encoder_config(text: str, own: EncoderConfig) -> EncoderConfig:
    """Return the encoder config that ``PLAN[:NAME=VALUE,...]`` means; what it leaves out is the model's own.

    ``prompt=`` comes last, since a prompt may hold commas.

    Raises:
        ConfigError: an unknown plan or setting, or a value that does not fit.

    >>> parse_encoder_config("causal:pooling=last,append_eos=true", EncoderConfig()).pooling
    'last'
    """
    name, _, rest = text.partition(":")
    config = replace(own, attention=own.attention.with_changes(name.strip()))
    for setting, value in _pairs(rest, text):
        config = _with(config, setting, value, text)
    return config


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


def _pairs(rest: str, text: str) -> Iterable[tuple[str, str]]:
    while rest:
        name, equals, rest = rest.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: {name!r} has no value; write NAME=VALUE")
        name = name.strip()
        if name not in SETTINGS:
            raise unknown_name(f"setting in {text!r}", name, SETTINGS)
        if name == "prompt":
            yield name, rest
            return
        value, _, rest = rest.partition(",")
        yield name, value.strip()


def _with(config: EncoderConfig, name: str, value: str, text: str) -> EncoderConfig:
    if name in _WORDS:
        return replace(config, **{name: value})  # type: ignore[arg-type]
    if name in _FLAGS:
        if value not in ("true", "false"):
            raise ConfigError(f"{text!r}: {name} is true or false, not {value!r}")
        return replace(config, **{name: value == "true"})  # type: ignore[arg-type]
    if name in _NUMBERS and not value.isdigit():
        raise ConfigError(f"{text!r}: {name} is a whole number, not {value!r}")
    changed = replace(config.attention, **{name: int(value) if name in _NUMBERS else value})  # type: ignore[arg-type]
    return replace(config, attention=changed)
