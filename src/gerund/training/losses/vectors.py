"""Compute the vectors of training texts with gradients, as ``encode`` does: by length, with dropout, of several layers.

Frozen layers below the lowest trained one read each text once in a training: :class:`LowerStates` caches what they
give. With an adapter on the top ten of thirty layers, a step that finds its texts in the cache costs about a third. The
states are those of the first pass, to the rounding of another batch. In a model's forward pass the lower layers hand
their input on, and the last of them returns the states of the cache; nothing else of an architecture has to be known.

Shapes: B texts of a part, N texts of a batch, K keys of all processes, T tokens, D numbers of a state, E of a vector.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.attention.layouts import decoder_layers, hidden_of
from gerund.errors import ConfigError
from gerund.inference.encode.runtime import EncoderRuntime, hidden_states
from gerund.inference.tokens import token_batches
from gerund.models.heads import ProjectionHead
from gerund.poolings import pool
from gerund.settings.plan import AttentionPlan, ResolvedPlan
from gerund.training.sharding import is_sharded

MOST_BYTES = 2**32
"""Bytes of states that are stored; those of further texts are computed each time."""
_NEAR = 0.05


class LowerStates:
    """The states of texts at the input of the lowest trained layer, by their tokens.

    Args:
        model: what is trained; its adapter decides which layers are below.
        plan: how its texts are read; None for causally.

    Raises:
        ConfigError: the lowest layer is trained, the plan adds to the states of lower layers, or these have dropout.
    """

    def __init__(self, model: PreTrainedModel, plan: ResolvedPlan | None, *, most_bytes: int = MOST_BYTES) -> None:
        layers = decoder_layers(model)
        trained = (number for number, layer in enumerate(layers) if _is_trained(layer))
        self.depth = next(trained, len(layers))
        embeddings = model.get_input_embeddings()
        if self.depth == 0 or _is_trained(embeddings):
            raise ConfigError("model.cache_below: the lowest layer is trained too; set model.lora.lowest_layer")
        if any("forward" in vars(layer) for layer in layers):
            raise ConfigError("model.cache_below is not for models whose layers' forward was replaced")
        self.plan = plan or AttentionPlan("causal").resolve(len(layers))
        stream = self.plan.stream
        if any(skip < self.depth for skip in self.plan.skips) or (stream and stream.layers.start < self.depth):
            raise ConfigError(f"model.cache_below: the plan changes layers below {self.depth}, the lowest trained one")
        if getattr(model.config.get_text_config(decoder=True), "attention_dropout", 0):
            raise ConfigError("model.cache_below: this model's layers have dropout, so no two passes are the same")
        self.most_bytes, self.bytes = most_bytes, 0
        self._states: dict[bytes, Tensor] = {}
        self._outputs = 0  # of a layer that returns a tuple: how many
        self._is_checked = False

    def read(self, model: PreTrainedModel, ids_BT: Tensor, real_BT: Tensor, plan: ResolvedPlan | None) -> Tensor:
        """Return what ``hidden_states`` returns ``(B, T, D)``, with gradients of the trained layers."""
        below_BTD = self._below(model, ids_BT, real_BT)
        with self._in_place_of_layers(model, below_BTD):
            hidden_BTD = hidden_states(model, ids_BT, real_BT, plan)
        if not self._is_checked:
            with torch.no_grad():
                computed_BTD = hidden_states(model, ids_BT, real_BT, plan)
            apart = (hidden_BTD.detach() - computed_BTD)[real_BT].float().norm() / computed_BTD[real_BT].float().norm()
            if not apart <= _NEAR:
                raise ConfigError(
                    "model.cache_below: upper layers of this architecture need more of the lower ones than their states"
                )
            self._is_checked = True
        return hidden_BTD

    @torch.no_grad()
    def _below(self, model: PreTrainedModel, ids_BT: Tensor, real_BT: Tensor) -> Tensor:
        """Return the states ``(B, T, D)``, of the cache where all texts are in it; padding is arbitrary."""
        tokens = [ids_T[real_T].cpu() for ids_T, real_T in zip(ids_BT, real_BT, strict=True)]
        keys = [row_T.numpy().tobytes() for row_T in tokens]
        new = [row for row, key in enumerate(keys) if key not in self._states]
        states = [self._states.get(key) for key in keys]
        if new:
            computed_BTD = self._computed(model, ids_BT[new], real_BT[new])
            for row, own_TD in zip(new, computed_BTD, strict=True):
                states[row] = own_TD = own_TD[real_BT[row]].cpu()
                if self.bytes + own_TD.nbytes <= self.most_bytes:
                    self.bytes += own_TD.nbytes
                    self._states[keys[row]] = own_TD.clone()
        first_TD = states[0]
        assert first_TD is not None
        below_BTD = first_TD.new_zeros((*ids_BT.shape, first_TD.shape[-1]))
        below_BTD[real_BT.cpu()] = torch.cat([own_TD for own_TD in states if own_TD is not None])
        return below_BTD.to(ids_BT.device)

    def _computed(self, model: PreTrainedModel, ids_BT: Tensor, real_BT: Tensor) -> Tensor:
        """Return the states ``(B, T, D)`` of texts that are not in the cache."""
        with _outputs_of(model, [self.depth]) as outputs:
            hidden_states(model, ids_BT, real_BT, self.plan.lower(self.depth))
        output = outputs[self.depth]
        self._outputs = len(output) if isinstance(output, tuple) else 0
        states_BTD: Tensor = hidden_of(output)
        return states_BTD

    @contextmanager
    def _in_place_of_layers(self, model: PreTrainedModel, below_BTD: Tensor) -> Iterator[None]:
        """Let the lower layers return ``below_BTD`` instead of computing."""

        def forward(_hidden_BTD: Tensor, *_args: Any, **_kwargs: Any) -> Any:
            return (below_BTD, *[None] * (self._outputs - 1)) if self._outputs else below_BTD

        below = list(decoder_layers(model))[: self.depth]
        for layer in below:
            vars(layer)["forward"] = forward
        try:
            yield
        finally:
            for layer in below:
                del vars(layer)["forward"]


@contextmanager
def _outputs_of(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Any]]:
    """Yield a dictionary that gets what these layers, counted from 1, return in the block."""
    outputs: dict[int, Any] = {}

    def keep(number: int, _layer: nn.Module, _args: Any, output: Any) -> None:
        outputs[number] = output

    with ExitStack() as hooks:
        for number in layers:
            handle = decoder_layers(model)[number - 1].register_forward_hook(partial(keep, number))
            hooks.callback(handle.remove)
        yield outputs


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


Batch = dict[str, Tensor]

# What a pass should hold, padding left out, to be worth its launching.
_CPU_TOKENS = 512
_GPU_TOKENS = 8192


def read_by_length(read: Callable[[Batch], Tensor], part: Batch, *, min_tokens: int | None = None) -> Tensor:
    """Read texts of like length together; every row is what it would be in one pass over all.

    ``read`` returns one row per text and must not look from one text to another. Padding is on the right; tensors as
    wide as ``real`` are cut to the longest text of a pass. A pass below ``min_tokens`` tokens takes in shorter texts.

    >>> part = {"input_ids": torch.tensor([[7, 0, 0], [1, 2, 3], [8, 0, 0], [4, 5, 6]])}
    >>> part["real"] = part["input_ids"] > 0
    >>> def read(part):
    ...     print(part["input_ids"].tolist())
    ...     return part["input_ids"].sum(1)
    >>> read_by_length(read, part, min_tokens=1).tolist()
    [[1, 2, 3], [4, 5, 6]]
    [[7], [8]]
    [7, 6, 8, 15]
    """
    lengths = part["real"].sum(1).tolist()
    if min_tokens is None:
        min_tokens = _CPU_TOKENS if part["real"].device.type == "cpu" else _GPU_TOKENS
    passes = token_batches(lengths, budget=part["real"].numel(), min_tokens=min_tokens)
    if len(passes) > 1 and len(passes[-1]) == 1:
        # Kernels are compiled anew for a batch of one.
        passes[-2:] = [passes[-2] + passes[-1]]
    if len(passes) == 1:
        return read(part)
    width = part["real"].shape[1]
    order = torch.tensor([row for rows in passes for row in rows], device=part["real"].device)
    made = []
    for rows_B, rows in zip(order.split([len(rows) for rows in passes]), passes, strict=True):
        longest = max(1, *(lengths[row] for row in rows))
        rows_of_pass = {name: tensor[rows_B] for name, tensor in part.items()}
        made.append(read({name: _cut(tensor, width, longest) for name, tensor in rows_of_pass.items()}))
    return torch.cat(made)[order.argsort()]


def _cut(tensor: Tensor, width: int, longest: int) -> Tensor:
    return tensor[:, :longest] if tensor.ndim > 1 and tensor.shape[1] == width else tensor


def may_split_passes(model: PreTrainedModel) -> bool:
    """Tell whether processes may read their texts in different numbers of passes.

    Where FSDP has cut the weights, every pass puts them together, and all processes have to take part in it.
    """
    return not is_sharded(model)


# What an attention module calls the dropout of its probabilities.
_DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")


class VectorEncoder(nn.Module):
    """Reads texts as ``encode`` does, with gradients; holds the projection that is trained beside the model."""

    def __init__(
        self,
        runtime: EncoderRuntime,
        *,
        projection: int | None = None,
        dropout: float | None = None,
        below: LowerStates | None = None,
    ) -> None:
        super().__init__()
        # The plan and the pooling, not the runtime: it holds the model, which is no part of the losses.
        self.plan, self.pooling = runtime.plan if runtime.sends_plan else None, runtime.config.pooling
        self.dropout, self.below = dropout, below
        if dropout and below is not None:
            raise ConfigError("model.cache_below keeps the states of layers, and dropout changes them in every pass")
        self.projection: nn.Module = nn.Identity()
        if projection:
            self.projection = nn.Linear(runtime.width, projection, bias=False)
        if dropout and not dropout_settings(runtime.model):
            raise ConfigError(
                f"{type(runtime.model).__name__} has no attention dropout to set; set dropout: 0 and give "
                "model.lora.dropout"
            )

    def forward(self, model: PreTrainedModel, part: Batch) -> Tensor:
        """Return the vectors ``(B, D)``, as ``encode`` makes them, not normalised."""

        def read(texts: Batch) -> Tensor:
            return self.vectors(self.states(model, texts), texts)

        texts = {name: part[name] for name in ("input_ids", "real", "pooled")}
        return read_by_length(read, texts) if may_split_passes(model) else read(texts)

    def states(self, model: PreTrainedModel, part: Batch) -> Tensor:
        """Return the last hidden states ``(B, T, D)``, all texts in one pass."""
        read = hidden_states if self.below is None else self.below.read
        return read(model, part["input_ids"], part["real"], self.plan)

    def vectors(self, hidden_BTD: Tensor, part: Batch) -> Tensor:
        """Return the vectors ``(B, D)`` of texts whose last hidden states are known."""
        # Autocast would add the states up in bfloat16; ``encode`` pools in float32.
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            pooled_BD = pool(hidden_BTD, part["pooled"], self.pooling)
            if isinstance(self.projection, ProjectionHead):
                return self.projection(pooled_BD, part["input_ids"], part["pooled"])
            vectors_BD: Tensor = self.projection(pooled_BD)
        return vectors_BD

    @contextmanager
    def during(self, model: PreTrainedModel) -> Iterator[None]:
        """Set the dropout of the attention probabilities until the block ends, forward and backward."""
        places = [] if self.dropout is None else dropout_settings(model)
        before = [getattr(module, name) for module, name in places]
        for module, name in places:
            setattr(module, name, self.dropout)
        try:
            yield
        finally:
            for (module, name), rate in zip(places, before, strict=True):
                setattr(module, name, rate)


def dropout_settings(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Return where the dropout of the attention probabilities is kept: the modules and the name of the number."""
    places: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        # Every attention module of transformers knows which layer it is; decoder layers may know it, too.
        if not hasattr(module, "layer_idx") or "Attention" not in type(module).__name__:
            continue
        values = [(name, getattr(module, name)) for name in _DROPOUTS if hasattr(module, name)]
        if values:
            name, value = values[0]
            places.append((value, "p") if isinstance(value, nn.Dropout) else (module, name))
    return places


class DistillEncoder(VectorEncoder):
    """Reads texts as ``encode`` does behind a head, and beside it the pooled states of further layers.

    Further ``layers`` are counted from 1; each gets a linear head that serves the training only.
    """

    def __init__(
        self, runtime: EncoderRuntime, head: ProjectionHead, layers: Sequence[int], below: LowerStates | None
    ) -> None:
        super().__init__(runtime, below=below)
        if below is not None and min(layers, default=below.depth) < below.depth:
            raise ConfigError(f"model.cache_below: layers {min(layers)} is not computed; the lowest is {below.depth}")
        self.projection = head
        self.layers = list(layers)
        width, dimensions = runtime.state_width, head.settings.dimensions
        self.further = nn.ModuleList([nn.Linear(width, dimensions, bias=False) for _ in self.layers])

    def states(self, model: PreTrainedModel, part: Batch) -> Tensor:
        """Return the last hidden states ``(B, T, D)``, side by side with those of further layers ``(B, T, L D)``."""
        if not self.layers:
            return super().states(model, part)
        with _outputs_of(model, self.layers) as outputs:
            last_BTD = super().states(model, part)
        return torch.cat([last_BTD, *(hidden_of(outputs[number]) for number in self.layers)], dim=-1)

    def vectors(self, hidden_BTD: Tensor, part: Batch) -> Tensor:
        """Return the vectors ``(B, E)``, side by side with those of further layers ``(B, L E)``."""
        if not self.layers:
            return super().vectors(hidden_BTD, part)
        last_BTD, *below = hidden_BTD.split(hidden_BTD.shape[-1] // (1 + len(self.layers)), dim=-1)
        result = [super().vectors(last_BTD, part)]
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            result += [
                head(pool(own_BTD, part["pooled"], self.pooling))
                for head, own_BTD in zip(self.further, below, strict=True)
            ]
        return torch.cat(result, dim=-1)
