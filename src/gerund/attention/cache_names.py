"""Argument names of the key-value cache across transformers versions."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

# From 5.24 on it is `cache` everywhere; some modules had names of their own before.
_NAMES = ("cache", "past_key_values", "cache_params", "layer_past")
CACHE = next(name for name in _NAMES if name in {field.name for field in fields(CausalLMOutputWithPast)})
"""The keyword that a model takes its cache by, and the attribute of its output that holds it."""


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache among the keywords of a module's call; None where there is none."""
    return next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), None)
