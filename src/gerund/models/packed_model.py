"""A packed network with the interface of a transformers model: one ONNX Runtime graph computes all layers.

The model is transformers' own, without weights: its config, its class and its modules say what they always say, and
its body and its head compute by the network. No hook sees a layer of a graph. So what an attention plan means for each
layer goes in as masks, and what is wanted of each layer, its attention or its states, comes out.

Shapes: B texts, T tokens, S keys, D width, V vocabulary, L layers, P different masks.
"""

from collections.abc import Callable
from functools import cache as once
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.layer_state import CACHE
from gerund.attention.preemption import pause
from gerund.attention.ragged_batch import Branches
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.models.adapters import active_name
from gerund.models.light_runtime import not_packed
from gerund.packed.network import MASKED, KeyValues, PackedNetwork, moved_by_layer

# Tokens of a pass without a cache: products are no faster with more, and memory grows.
_TOKENS_AT_ONCE = 512


class WritesInPlace(Protocol):
    """A layer of a cache whose memory a graph writes new keys and values into."""

    def reserve(self, like: Tensor) -> tuple[Tensor, Tensor, int]:
        """Make room for new keys ``like`` ``(B, key heads, T, head_dim)``.

        Returns the memory of keys and of values ``(B, key heads, S or more, head_dim)``, and where the new ones begin.
        """


def packed_model(skeleton: PreTrainedModel, network: PackedNetwork) -> PreTrainedModel:
    """Let a network compute a model of transformers that has no weights (that is on the meta device).

    Its adapters are made active by their names in the network.
    """
    attach(skeleton)
    head, shape = skeleton.get_output_embeddings(), network.shape
    skeleton.tie_weights()  # so that tied ones are counted once
    n_parameters = skeleton.num_parameters()
    for module in skeleton.modules():
        for name in module._parameters:
            module._parameters[name] = None
        # Those of a folder's model have no values either.
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None or buffer.is_meta else buffer
    body = skeleton.base_model
    body.set_input_embeddings(_Embeddings(network))
    if head is not None:
        skeleton.set_output_embeddings(_Head(network))
    if len(shape.windows) != shape.n_layers:
        raise UnsupportedModelError("the packed network does not say how far each of its layers looks")
    object.__setattr__(body, "network", network)
    object.__setattr__(skeleton, "n_parameters", n_parameters)
    for model, own in ((body, PackedBody), (skeleton, PackedCausalLM)):
        kind: Any = type(model)
        model.__class__ = _kind(own, kind)
    return skeleton.eval()


@once
def _kind(own: Any, kind: Any) -> Any:
    return type(kind.__name__, (own, kind), {"__module__": kind.__module__})


def _placeholder(rows: int, width: int) -> nn.Parameter:
    """Return a weight that has a shape, a dtype and a device, and no memory."""
    return nn.Parameter(torch.zeros(()).expand(rows, width), requires_grad=False)


class _Embeddings(nn.Module):
    """The input embeddings of a packed network."""

    def __init__(self, network: PackedNetwork) -> None:
        super().__init__()
        self.network = network
        self.weight = _placeholder(network.shape.vocabulary, network.shape.width)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the embeddings ``(B, T, D)``."""
        return torch.from_numpy(self.network.embed(ids_BT.numpy()))


class _Head(nn.Module):
    """The output head of a packed network."""

    def __init__(self, network: PackedNetwork) -> None:
        super().__init__()
        self.network = network
        self.weight = _placeholder(network.shape.vocabulary, network.shape.width)

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits ``(..., V)`` of last hidden states ``(..., D)``."""
        flat_ND = states.detach().reshape(-1, states.shape[-1]).float()
        return torch.from_numpy(self.network.head(flat_ND.numpy())).view(*states.shape[:-1], -1)


class PackedCausalLM(PreTrainedModel):
    """A causal language model whose body and head are packed."""

    one_graph = True
    n_parameters: int

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of weights that are packed; none of them is trained."""
        del exclude_embeddings
        return 0 if only_trainable else self.n_parameters

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Return what transformers' own class returns: logits, and the cache where one is used."""
        output = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **options,
        )
        states_BTD = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.get_output_embeddings()(states_BTD[:, kept])
        found = CausalLMOutputWithPast(logits=logits, hidden_states=output.hidden_states)
        found[CACHE] = output.past_key_values
        return found

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, computed from packed weights>"

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """Refuse: the weights are packed."""
        raise ConfigError(
            f"this {self.config.model_type} model is computed from packed weights, and this needs them "
            "unpacked: load it with runtime='torch'"
        )

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Refuse: the weights are in the file, packed."""
        self.state_dict()


class PackedBody(PreTrainedModel):
    """The decoder of a packed model: all but its head."""

    network: PackedNetwork

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        attention_plan: BoundPlan | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states ``(B, T, D)``, and the cache where one is used."""
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache()
        one = _Pass(self.network, attention_plan, attention_mask, cache, adapted=self._adapted())
        if cache is None:
            states = one.texts(input_ids, position_ids, inputs_embeds)
        else:
            states = one.continued(input_ids, position_ids, inputs_embeds)
        hidden = (states,) if output_hidden_states else None
        return BaseModelOutputWithPast(last_hidden_state=states, past_key_values=cache, hidden_states=hidden)

    def _adapted(self) -> str | None:
        """Return the adapter that takes part in this thread."""
        name = active_name()
        return name if name in self.network.adapters else None

    @torch.no_grad()
    def moved_by_layer(self, ids_1T: Tensor, plan: BoundPlan) -> Tensor:
        """Return how far each token is moved in each layer by another token, ``(L, T, T)`` (moved token, other token).

        The layers are those that the plan has views for; see ``packed.network``.
        """
        T = ids_1T.shape[1]
        masks, layers = _Pass(self.network, plan, None, None).masks(1, T, T)
        assert masks is not None
        assert layers is not None
        return torch.from_numpy(moved_by_layer(self.network, ids_1T[0].numpy(), masks[:, 0], layers))


class _Pass:
    """One call of the body: its masks, and the memory of its cache."""

    def __init__(
        self,
        network: PackedNetwork,
        plan: BoundPlan | None,
        mask_BS: Tensor | None,
        cache: Cache | None,
        *,
        adapted: str | None = None,
    ) -> None:
        self.network, self.plan, self.cache, self.adapted = network, plan, cache, adapted
        self.depth = network.shape.n_layers if plan is None else len(plan.plan.views)
        self.mask_BS = None if plan is not None or mask_BS is None or bool(mask_BS.all()) else mask_BS.bool()
        if plan is None:
            return
        if (reason := not_packed(plan.plan)) is not None:
            raise ConfigError(f"{reason}: load the model with runtime='torch'")
        if isinstance(plan, Branches):
            raise UnsupportedModelError("a packed network reads no keys but those of a row")
        if plan.after_layer is not None:
            raise ConfigError("a sweep over plans follows each layer: load the model with runtime='torch'")

    def texts(self, ids_BT: Tensor | None, position_BT: Tensor | None, embedded_BTD: Tensor | None) -> Tensor:
        """Return the states of whole texts, some rows at a time."""
        B, T = _given(ids_BT, embedded_BTD).shape[:2]
        masks, layers = self.masks(B, T, T)
        rows = max(1, _TOKENS_AT_ONCE // T)
        found = []
        for first in range(0, B, rows):
            part = slice(first, first + rows)
            found.append(
                self._run(
                    None if ids_BT is None else ids_BT[part],
                    _positions(position_BT, 0, B, T)[part],
                    None if embedded_BTD is None else embedded_BTD[part],
                    None if masks is None else masks[:, part],
                    layers,
                    None if self.mask_BS is None else self.mask_BS[part, :T].numpy(),
                )
            )
        return found[0] if len(found) == 1 else torch.cat(found)

    def continued(self, ids_BT: Tensor | None, position_BT: Tensor | None, embedded_BTD: Tensor | None) -> Tensor:
        """Return the states of tokens that go into a cache."""
        assert self.cache is not None
        B, T = _given(ids_BT, embedded_BTD).shape[:2]
        past = self.cache.get_seq_length()
        memory = _Memory.of(self.cache, self.network, B, T)
        masks, layers = self.masks(B, T, past + T)
        real_BS = None if self.mask_BS is None else self.mask_BS[:, : past + T].numpy()
        position_BT = _positions(position_BT, past, B, T)
        states = self._run(ids_BT, position_BT, embedded_BTD, masks, layers, real_BS, memory)
        memory.done()
        return states

    def _run(
        self,
        ids_BT: Tensor | None,
        position_BT: Tensor,
        embedded_BTD: Tensor | None,
        masks: np.ndarray | None,
        layers: list[int] | None,
        real_BS: np.ndarray | None,
        memory: "_Memory | None" = None,
    ) -> Tensor:
        """Return the last hidden states ``(B, T, D)``, and hand the plan what it wants to see of each layer."""
        plan = self.plan
        wanted = ["states"]
        if plan is not None:
            wanted += ["attention"] * (plan.record is not None) + ["hidden_states"] * (plan.beside is not None)
        if memory is not None and masks is not None and (more := memory.both.capacity - masks.shape[-1]):
            masks = np.pad(masks, (*[(0, 0)] * 4, (0, more)), constant_values=MASKED)
        found = self.network.run(
            None if ids_BT is None else ids_BT.numpy(),
            position_BT.numpy(),
            embedded_BTD=None if embedded_BTD is None else embedded_BTD.detach().float().numpy(),
            masks_PB1TS=masks,
            mask_of_layer_L=layers,
            real_BS=real_BS,
            cache=None if memory is None else memory.both,
            write_B=None if memory is None else memory.begin_B,
            outputs=tuple(wanted),
            depth=self.depth,
            adapted=self.adapted,
            between=pause,
        )
        if plan is not None and plan.record is not None and found.attention is not None:
            for layer, weights_BHTS in enumerate(found.attention):
                plan.record(layer, False, torch.from_numpy(weights_BHTS))
        if plan is not None and plan.beside is not None and found.hidden_states is not None:
            before, *after = map(torch.from_numpy, found.hidden_states)
            for layer, hidden_BTD in enumerate(after):
                plan.beside(layer, (before,), {}, hidden_BTD)
                before = hidden_BTD
        return torch.from_numpy(found.states)

    def masks(self, B: int, T: int, S: int) -> tuple[np.ndarray | None, list[int] | None]:
        """Return the different masks ``(P, B, 1, T, S)`` and which of them each layer takes; None for causal ones."""
        if self.plan is None:
            return None, None
        windows = self.network.shape.windows[: self.depth]
        query = torch.empty(()).expand(B, 1, T, 1)
        width = getattr(self.plan, "width", S)
        self.plan.check_lengths(T, width)
        masks = [self.plan.mask(layer, query, window, torch.float32) for layer, window in enumerate(windows)]
        different = list({id(mask): mask for mask in masks if mask is not None}.values())
        numbers = {id(mask): number for number, mask in enumerate(different)}
        stacked = torch.stack([mask.expand(B, 1, T, mask.shape[-1]) for mask in different])
        return stacked.numpy(), [numbers[id(mask)] for mask in masks]


def _given(ids_BT: Tensor | None, embedded_BTD: Tensor | None) -> Tensor:
    """Return which of both is given."""
    given = embedded_BTD if ids_BT is None else ids_BT
    assert given is not None
    return given


def _positions(position_BT: Tensor | None, start: int, B: int, T: int) -> Tensor:
    if position_BT is None:
        position_BT = torch.arange(start, start + T)[None]
    return position_BT.expand(B, T)


class _Memory:
    """The memory that a graph reads a cache from and writes it into."""

    def __init__(self, both: KeyValues, begin_B: np.ndarray, done: Callable[[], None]) -> None:
        self.both, self.begin_B, self.done = both, begin_B, done

    @classmethod
    def of(cls, cache: Cache, network: PackedNetwork, B: int, T: int) -> "_Memory":
        """Return the memory of a cache with room for ``T`` more tokens."""
        shape = network.shape
        while len(cache.layers) < shape.n_layers:
            cache.layers.append(cache.layer_class_to_replicate())
        like = torch.empty(()).expand(B, shape.n_kv_heads, T, shape.head_dim)
        if not all(hasattr(layer, "reserve") for layer in cache.layers):
            return cls._copied(cache, network, like)
        reserved = [layer.reserve(like) for layer in cache.layers]
        keys, values, begins = zip(*reserved, strict=True)
        # The same memory as in the last step is not bound again.
        place = (keys[0].data_ptr(), keys[0].shape)
        known = getattr(cache, "gerund_memory", None)
        if known is None or known[0] != place:
            both = ([one.numpy() for one in keys], [one.numpy() for one in values])
            known = place, KeyValues.over(shape, *both)
            cache.gerund_memory = known
        return cls(known[1], np.full(B, begins[0]), lambda: None)

    @classmethod
    def _copied(cls, cache: Cache, network: PackedNetwork, like: Tensor) -> "_Memory":
        """Return a copy of a cache whose layers cannot be written into; what is new is added to them afterwards."""
        B, T = like.shape[0], like.shape[2]
        before = cache.get_seq_length()
        both: list[list[np.ndarray]] = [[], []]
        for layer in cache.layers:
            for kind, name in enumerate(("keys", "values")):
                memory = np.zeros((B, like.shape[1], before + T, like.shape[3]), np.float32)
                if layer.is_initialized and before:
                    own = getattr(layer, name)
                    # A layer with a window has the last tokens only.
                    memory[:, :, before - own.shape[2] : before] = own.numpy()
                both[kind].append(memory)

        def done() -> None:
            for number, (keys, values) in enumerate(zip(*both, strict=True)):
                cache.update(torch.from_numpy(keys[:, :, before:]), torch.from_numpy(values[:, :, before:]), number)

        return cls(KeyValues.over(network.shape, *both), np.full(B, before), done)
