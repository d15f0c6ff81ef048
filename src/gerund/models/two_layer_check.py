"""Verify an attention plan on two random layers of a model's architecture, in a process without the weights.

What a layer attends to depends on its code, not on its weights. So a process that gets its weights from another one can
still check within seconds that its own installation obeys the plan.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.attention.probe import verify
from gerund.attention.recurrent import kind_of
from gerund.models.library_calls import guarded
from gerund.models.weights import LAYER_COUNTS
from gerund.settings.plan import ResolvedPlan

_VOCABULARY = 64


def verify_on_two_layers(model: PreTrainedModel, plan: ResolvedPlan) -> None:
    """Verify the first and the last layer of a plan on a small copy of a model, with random weights.

    An architecture whose layers are of several kinds is left to the process that has the weights and verifies all.
    """
    if len({kind_of(layer) for layer in decoder_layers(model)}) > 1 or len(plan.views) < 2:
        return
    config = two_layers_of(model.config.get_text_config(decoder=True))
    with torch.random.fork_rng(devices=[]):
        small = guarded(
            f"cannot try the attention plan on two layers of this {model.config.model_type} model",
            AutoModelForCausalLM.from_config,
            config,
            dtype=torch.float32,
        )
    attach(small)
    attach_streams(decoder_layers(small))
    verify(small, outermost(plan))


def two_layers_of(config: Any) -> Any:
    """Return a config of two layers, the first and the last, and few tokens.

    >>> from transformers import LlamaConfig
    >>> small = two_layers_of(LlamaConfig(num_hidden_layers=32))
    >>> small.num_hidden_layers, small.vocab_size, small.hidden_size
    (2, 64, 4096)
    """
    small = copy.deepcopy(config)
    count = config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == count > 2:
            setattr(small, name, [value[0], value[-1]])
        elif name.endswith("_token_id"):
            setattr(small, name, None)
    for name in LAYER_COUNTS:
        if getattr(config, name, None) == count:
            setattr(small, name, 2)
    small.vocab_size = min(config.vocab_size, _VOCABULARY)
    return small


def outermost(plan: ResolvedPlan) -> ResolvedPlan:
    """Return what a plan does in the first and in the last layer, as a plan of two layers.

    >>> from gerund.settings.plan import AttentionPlan
    >>> [str(view) for view in outermost(AttentionPlan("mask0-bidir", k=10).resolve(22)).views]
    ['causal', 'bidirectional without the first token']
    """
    last = len(plan.views) - 1
    stream = plan.stream
    if stream is not None:
        inside = [place for place, layer in enumerate((0, last)) if layer in stream.layers]
        stream = replace(stream, layers=range(inside[0], inside[-1] + 1), repeats=min(stream.repeats, 1))
    return replace(plan, views=(plan.views[0], plan.views[-1]), stream=stream, skips=())
