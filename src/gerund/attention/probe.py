"""Verify on loading that a model's weights are sound, and that a plan is applied in every layer.

A checkpoint may be corrupt: with weights that are not finite, or embeddings that are all zero. And attention that
silently stays causal is the best-known bug of converted decoders. So before a model is used, a short random text is run
once: at every layer, each token in turn is disturbed, and the outputs that change show what that layer really attends
to. This map is compared with the plan's, layer by layer.

The hooks are not registered on the model itself, which other threads may be using: torch registers a hook in two steps,
between which a pass of another thread would fail. They are registered on a copy of the module tree that shares every
tensor with the model, so the verified weights are the model's own, at no cost in memory.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.attention.bound_plan import BoundPlan, module_window, unreached
from gerund.attention.layer_state import refuse_shared
from gerund.attention.layouts import decoder_layers, is_one_graph, lower_layers
from gerund.attention.masks import Near, visible
from gerund.attention.recurrent import kind_of, recurrent_view, refuse_unfit
from gerund.errors import GerundError, ModelError, UnsupportedModelError
from gerund.settings.plan import Direction, ResolvedPlan, View

# So many numbers of a tensor are looked at when a model is loaded: all of an 8B model would take seconds.
_SAMPLE = 65_536
_CHUNK = 2**24
# States of trained models reach some ten thousand.
_LARGEST_STATE = 1e8


def refuse_unsound(model: PreTrainedModel, name: str) -> None:
    """Refuse weights that are damaged through and through.

    The ends of the model, which no probe reads whole, are looked at number by number, all else at places.
    """
    embeddings = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", None)
    for key, weight in model.named_parameters():
        whole = weight is embeddings or weight is head
        if not _is_finite(weight if whole else _sample(weight)):
            raise ModelError(f"cannot load {name}: {key} holds numbers that are not finite (NaN or infinity)")
    if not any(bool(chunk.any()) for chunk in _chunks(embeddings)):
        raise ModelError(f"cannot load {name}: its input embeddings are all zero")


def refuse_damaged(model: PreTrainedModel, layer: nn.Module) -> None:
    """Refuse a model whose layer works wrongly when its weights are why; every number is looked at."""
    for key, weight in model.named_parameters():
        if not _is_finite(weight):
            raise ModelError(f"this model's weights are damaged: {key} holds numbers that are not finite")
    parameter_ids = {id(weight) for weight in layer.parameters()}
    for key, weight in model.named_parameters():
        if id(weight) in parameter_ids and weight.ndim > 1 and not any(bool(chunk.any()) for chunk in _chunks(weight)):
            raise ModelError(f"this model's weights are damaged: {key} is all zero, so its layer mixes no tokens")


@torch.no_grad()
def refuse_overflowing(model: PreTrainedModel) -> None:
    """Refuse a model whose weights are numbers but whose states are too large to compute with.

    A normalization squares what it is given, and makes zeros of numbers that are too large for that; and what a layer
    adds to such a state is lost in its rounding.
    """
    overflowing: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _given: Any, made: Any) -> None:
            if isinstance(made, Tensor) and made.is_floating_point() and not bool(made.abs().max() < _LARGEST_STATE):
                overflowing.append(name)

        return hook

    parts = [
        (name, part) for name, part in model.base_model.named_modules() if name and not next(part.children(), None)
    ]
    hooks = [part.register_forward_hook(look(name)) for name, part in parts]
    was_training = model.training
    model.eval()
    try:
        ids_BT = torch.arange(8, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
        model.base_model(ids_BT, use_cache=False)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    if overflowing:
        dtype = str(model.dtype).removeprefix("torch.")
        hint = ", or made for another type (try dtype='float32')" if model.dtype == torch.float16 else ""
        raise ModelError(
            f"this {model.config.model_type} model's states overflow, or are too large for {dtype}, from "
            f"{overflowing[0]} on: its weights are damaged{hint}"
        )


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLE)]


def _chunks(weight: Tensor) -> list[Tensor]:
    """Return a tensor in parts, so that a look at it takes little memory."""
    return list(weight.detach().flatten().split(_CHUNK))


def _is_finite(weight: Tensor) -> bool:
    if not weight.is_floating_point() or weight.device.type == "meta":
        return True
    return all(
        bool(torch.isfinite(chunk.float().sum())) or bool(torch.isfinite(chunk).all()) for chunk in _chunks(weight)
    )


LENGTH = 6
PADDING = 2
_SEED = 20240517
# A change smaller than this fraction of the disturbed token's own change is rounding, not attention.
_LEAK = {torch.float32: 1e-4, torch.float64: 1e-6}
_LEAK_HALF = 1e-2


@dataclass(frozen=True)
class LayerMap:
    """What one layer sees, as ``(T, T)`` maps of which input (column) moves which output (row)."""

    leaks: Tensor  # moves by more than rounding could
    moves: Tensor  # moves at all. A sink may drown a look so far that it hardly differs from rounding.
    expected: Tensor  # what the plan asks for
    sees_padding: bool  # whether a token is moved by padding
    exact: bool  # whether the layer computed in a precision in which most looks must show

    @property
    def is_right(self) -> bool:
        """Nothing is seen that must not be, and each side that should be seen is."""
        return not self.sees_padding and not bool((self.leaks & ~self.expected).any()) and self.sees_enough

    @property
    def sees_enough(self) -> bool:
        """Each side that should be seen is."""
        ones = torch.ones_like(self.expected)
        for side in (ones.triu(1), ones.tril(-1)):
            wanted = int((self.expected & side).sum())
            seen = int((self.expected & side & self.moves).sum())
            if wanted and (seen == 0 or (self.exact and 2 * seen < wanted)):
                return False
        return True


@dataclass(frozen=True)
class ProbeReport:
    """What the probe saw, one map a layer, padding left out."""

    layers: tuple[LayerMap, ...]

    @property
    def wrong_layers(self) -> list[int]:
        """Layers that do not do what the plan says."""
        return [index for index, layer in enumerate(self.layers) if not layer.is_right]


def probe(model: PreTrainedModel, plan: ResolvedPlan | None, *, padded: bool = True) -> ProbeReport:
    """Measure what each decoder layer of ``model`` sees, and what ``plan`` says it should."""
    model = model if plan is None else lower_layers(model, len(plan.views))
    with _to_hook(model) as free:
        return _probe_graph(free, plan) if is_one_graph(model) else _probe(free, plan, padded=padded)


@torch.no_grad()
def _probe(model: PreTrainedModel, plan: ResolvedPlan | None, *, padded: bool = True) -> ProbeReport:
    layers = decoder_layers(model)
    if plan is not None:
        refuse_unfit(plan, [kind_of(layer) for layer in layers], model.config.model_type)
        refuse_shared(plan, layers, model.config.model_type)
    device = model.get_input_embeddings().weight.device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    start = PADDING if padded else 0
    length = LENGTH + start
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(0, vocabulary, (1, length), generator=generator).expand(length + 1, length).to(device)
    real = torch.ones_like(ids)
    real[:, :start] = 0
    span = torch.zeros_like(ids)
    span[:, -2:] = 1  # only a hybrid plan reads it
    # What skips add is a token's own, and would bring what was disturbed in lower layers.
    bound = None if plan is None else BoundPlan(replace(plan, skips=()), real, span)
    recorder = _Recorder(generator)
    handles = recorder.attach(layers)
    was_training = model.training
    model.eval()
    try:
        extra: dict[str, Any] = {} if bound is None else {"attention_plan": bound}
        position_ids = (real.cumsum(1) - 1).clamp(min=0)
        made = model.base_model(ids, attention_mask=real, position_ids=position_ids, use_cache=False, **extra)
    except (GerundError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model's own code raises
        reason = " ".join(str(error).split())[:160]
        raise UnsupportedModelError(
            f"this {model.config.model_type} model cannot be used: it fails on padded text "
            f"({type(error).__name__}: {reason})"
        ) from error
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    if not bool(made[0].float().square().isfinite().all()):
        refuse_damaged(model, layers[0])
        refuse_overflowing(model)
    if recorder.ran != list(layers):
        different = len(set(recorder.ran))
        reason = f"of its {len(layers)} layers {different} are run on text alone"
        if different == len(layers):
            reason = "its layers run several times or in another order, so a plan cannot count them"
        raise UnsupportedModelError(f"this {model.config.model_type} model cannot be used: {reason}")
    if bound is not None:
        bound.check_all_asked(model.config.model_type)
    resolved = plan or ResolvedPlan((View(Direction.CAUSAL),) * len(layers))
    expected = _expected(resolved, layers, real[:1], span[:1])
    exact = recorder.dtype in _LEAK
    maps = []
    for leak, move, want in zip(recorder.leaks, recorder.moves, expected, strict=True):
        sees_padding = bool(leak[start:, :start].any())
        maps.append(
            LayerMap(leak[start:, start:], move[start:, start:], want[start:, start:].cpu(), sees_padding, exact)
        )
    return ProbeReport(tuple(maps))


# Tokens of the text that probes a graph: fewer, since one layer is looked at in a pass.
_GRAPH_LENGTH = 3


def _probe_graph(model: PreTrainedModel, plan: ResolvedPlan | None) -> ProbeReport:
    """Probe a model whose layers are computed in one graph: layer after layer, all others seeing nothing.

    Then the states at the end differ for exactly those tokens that the one layer has moved. Padding is looked at in a
    pass of all layers.
    """
    layers = decoder_layers(model)
    resolved = plan or ResolvedPlan((View(Direction.CAUSAL),) * len(layers))
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(0, model.get_input_embeddings().weight.shape[0], (1, _GRAPH_LENGTH + 1), generator=generator)
    real, span = torch.ones_like(ids), torch.zeros_like(ids)
    span[:, -1] = 1  # only a hybrid plan reads it
    bound = BoundPlan(resolved, None, span[:, 1:])
    moved = model.base_model.moved_by_layer(ids[:, 1:], bound)
    bound.check_all_asked(model.config.model_type)
    expected = _expected(resolved, layers, real[:, 1:], span[:, 1:])
    real[:, 0] = 0
    padding = torch.cat([ids, ids])
    padding[1, 0] = (ids[0, 0] + 1) % model.get_input_embeddings().weight.shape[0]
    given: dict[str, Any] = {"attention_mask": real} if plan is None else {}
    if plan is not None:
        given["attention_plan"] = BoundPlan(plan, real.expand_as(padding), span.expand_as(padding))
    position_ids = (real.cumsum(1) - 1).clamp(min=0).expand_as(padding)
    states = model.base_model(padding, position_ids=position_ids, use_cache=False, **given).last_hidden_state[:, 1:]
    sees_padding = not torch.equal(states[0], states[1])
    leak = _LEAK[torch.float32]
    return ProbeReport(
        tuple(
            LayerMap(move > leak, move > 0, want, sees_padding, True)
            for move, want in zip(moved, expected, strict=True)
        )
    )


def verify(model: PreTrainedModel, plan: ResolvedPlan) -> ProbeReport:
    """Run the probe and refuse the model unless every layer that a text is read by does what the plan says."""
    model = lower_layers(model, len(plan.views))
    name = model.config.model_type
    with _to_hook(model) as free:
        look = _probe_graph if is_one_graph(model) else _probe
        report = look(free, None)
        if report.wrong_layers:
            refuse_damaged(model, decoder_layers(model)[report.wrong_layers[0]])
            refuse_overflowing(free)
            if report.layers[report.wrong_layers[0]].sees_padding:
                raise ModelError(
                    f"this {name} model cannot be used: layer {report.wrong_layers[0]} reads padding as if it were "
                    "text, so that what a text becomes would depend on the others of its batch"
                )
            raise ModelError(
                f"this {name} model is no plain causal language model: layer {report.wrong_layers[0]} does not see "
                "exactly the earlier tokens; give a decoder-only model"
            )
        if not plan.is_causal:
            report = look(free, plan)
    if report.wrong_layers:
        if all(report.layers[layer].sees_enough for layer in report.wrong_layers):
            which = ", ".join(map(str, report.wrong_layers))
            raise UnsupportedModelError(
                f"layer {which} of this {name} model brings in tokens that the plan hides, by something else than "
                "attention (such as a convolution); take a plan that hides nothing, such as bidir"
            )
        raise UnsupportedModelError(unreached(name, report.wrong_layers, len(report.layers)))
    return report


def verify_once(model: PreTrainedModel, plan: ResolvedPlan) -> None:
    """Verify a plan, unless the same plan of the same model was verified before."""
    key = (plan, str(model.config._attn_implementation))
    with _registry:
        known = key in _verified.get(model, ())
    if not known:
        verify(model, plan)
        with _registry:
            _verified.setdefault(model, set()).add(key)


# Plans that were verified, with the attention function that they were verified with.
_verified: WeakKeyDictionary[PreTrainedModel, set[tuple[ResolvedPlan, str]]] = WeakKeyDictionary()
_registry = Lock()
_live_probe = Lock()


@contextmanager
def _to_hook(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Give the block a model to hang hooks on: a separate copy; where none can be made the model, a block at a time."""
    separate = _separate_copy(model)
    with nullcontext() if separate is not None else _live_probe:
        yield separate or model


def _separate_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the model with modules of its own and the same tensors; None where a module's forward was replaced.

    A replaced forward, as accelerate's, is bound to the original module and would run that one's children.
    """
    if any("forward" in vars(module) for module in model.modules()):
        return None
    copies: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        kind: type[nn.Module] = type(module)
        copies[module] = duplicate = kind.__new__(kind)
        # Hooks, buffers and the like stand in dictionaries, which a shallow copy would share.
        vars(duplicate).update(
            {name: value.copy() if type(value) in _TABLES else value for name, value in vars(module).items()}
        )
    for duplicate in copies.values():
        for name, child in duplicate._modules.items():
            duplicate._modules[name] = None if child is None else copies[child]
    small = copies[model]
    assert isinstance(small, PreTrainedModel)
    return small


_TABLES = (dict, OrderedDict, set)


class _Recorder:
    """Hooks that disturb one token a row before each layer, and see which outputs differ from row 0.

    Row 0 is undisturbed; row j + 1 has token j replaced, padding included. Before every layer all rows start
    again from row 0's state, so that each layer is seen alone. Passes of other threads are left alone.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.thread = get_ident()
        self.leaks: list[Tensor] = []
        self.moves: list[Tensor] = []
        self.ran: list[nn.Module] = []
        self.dtype = torch.float32

    def attach(self, layers: nn.ModuleList) -> list[Any]:
        """Hang the hooks on every layer."""
        handles: list[Any] = []
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(self.before, with_kwargs=True))
            handles.append(layer.register_forward_hook(self.after))
        return handles

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Disturb token j in row j + 1."""
        del layer
        if get_ident() != self.thread:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden_RTD, streams = _states_of_texts(hidden)
        base_TD = hidden_RTD[0]
        # Twice the size and a new direction: a token that the sink drowns out still shows.
        # In float32, since squares of half precision overflow beyond 256.
        size_T1 = base_TD.float().pow(2).mean(dim=-1, keepdim=True).sqrt()
        noise_TD = (torch.randn(base_TD.shape, generator=self.generator).to(size_T1) * 2 * size_T1).to(base_TD)
        disturbed_RTD = base_TD.expand_as(hidden_RTD).clone()
        token_T = torch.arange(len(base_TD), device=base_TD.device)
        disturbed_RTD[token_T + 1, token_T] = noise_TD
        disturbed = disturbed_RTD.unflatten(2, (-1, hidden.shape[-1])).movedim(2, streams).reshape(hidden.shape)
        if args:
            return (disturbed, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": disturbed}

    def after(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note which outputs moved, as a (query, key) map."""
        del args
        if get_ident() != self.thread:
            return
        self.ran.append(layer)
        hidden_RTD, _ = _states_of_texts(output[0] if isinstance(output, tuple) else output)
        self.dtype = hidden_RTD.dtype
        leak = _LEAK.get(hidden_RTD.dtype, _LEAK_HALF)
        change_RTD = hidden_RTD[1:].float() - hidden_RTD[:1].float()
        moved_KQ = change_RTD.pow(2).mean(dim=-1).sqrt()  # row: disturbed key, column: query
        own_K = moved_KQ.diagonal().clone()
        self.leaks.append((moved_KQ > leak * own_K[:, None]).T.cpu())
        self.moves.append((moved_KQ > 0).T.cpu())


def _states_of_texts(hidden: Any) -> tuple[Tensor, int]:
    """Return what goes from layer to layer, if that is a state of each of the probe's tokens and no more.

    Some architectures hand several streams of states on, in front of the texts (Gemma 3n) or behind the tokens (Hunyuan
    4): they become one long state ``(R, T, D)``.
    """
    if isinstance(hidden, Tensor) and hidden.ndim in (3, 4):
        for streams in (2, 0) if hidden.ndim == 4 else (2,):
            rows_first = hidden.movedim(streams, 2) if hidden.ndim == 4 else hidden[:, :, None]
            if rows_first.shape[0] == rows_first.shape[1] + 1:
                return rows_first.flatten(2), streams
    raise UnsupportedModelError(
        "this architecture cannot be used: what goes from layer to layer is not one state of each token"
    )


def _expected(plan: ResolvedPlan, layers: nn.ModuleList, real: Tensor, span: Tensor) -> list[Tensor]:
    """Return for each layer which inputs its output depends on, streams included."""
    kinds = [kind_of(layer) for layer in layers]

    def reach(view: View, layer: int) -> Tensor:
        kind = kinds[layer]
        seen = torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
        if kind.attends:
            window = window_of(layers[layer])
            seen = seen | visible(view, real.shape[1], real_BT=real, span_BT=span, window=window)[0, 0]
        if kind.recurrent:
            seen = seen | visible(recurrent_view(view), real.shape[1], real_BT=real, window=kind.reach)[0, 0]
        return seen

    maps = [reach(view, layer) for layer, view in enumerate(plan.views)]
    stream = plan.stream
    if stream is None:
        return maps
    if stream.kind == "parallel":
        return [map_ | reach(stream.view, i) if i in stream.layers else map_ for i, map_ in enumerate(maps)]
    if stream.kind == "extend":
        for _ in range(stream.repeats):
            maps[-1] = _compose(reach(stream.view, len(maps) - 1), maps[-1])
        return maps
    # A second tower keeps what was disturbed in its first input, and shows it where it joins, at the top.
    tower = reach(stream.view, stream.layers[0])
    for layer in stream.layers[1:]:
        tower = _compose(reach(stream.view, layer), tower)
    maps[-1] = maps[-1] | tower
    return maps


def _compose(outer: Tensor, inner: Tensor) -> Tensor:
    # Floats, since a GPU multiplies no matrices of whole numbers.
    return (outer.float() @ inner.float()) > 0


def window_of(layer: nn.Module) -> Near:
    """Return how far a decoder layer looks; None for everywhere."""
    for module in layer.modules():
        if getattr(module, "layer_idx", None) is not None and hasattr(module, "config"):
            return module_window(module)
    return None
