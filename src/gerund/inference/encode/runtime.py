"""Encode tokens: batches, one forward pass, layer mixing, pooling, and a check that bfloat16 is accurate.

Layers are mixed by the mean of their states, as transformers returns them in ``hidden_states``. Token Prepending (Fu et
al., 2025, "Token Prepending: A Training-Free Approach for Eliciting Better Sentence Embeddings from LLMs"): a token of
random embedding stands before the text in its template; in the input of the second layer, and of those after it up to
the ``prepend``-th, it is replaced by the state of the last token, which has read the text.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import SequenceClassifierOutput

from gerund.attention.bound_plan import BoundPlan, Rerouting
from gerund.attention.layer_state import counts_rows
from gerund.attention.layouts import decoder_layers, hidden_of, input_of, is_one_graph, lower_layers
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.inference.encode.batches import Encodes, encode
from gerund.inference.encode.other_states import AttentionParts, EachPart, generated_states, reads_attention, width_of
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.models.adapters import active_adapter
from gerund.models.architectures import encoder_of, state_width
from gerund.models.heads import AnswerTokens, ProjectionHead
from gerund.models.kinds import is_encoder_decoder
from gerund.models.vectors import Transform, truncation
from gerund.poolings import pool
from gerund.settings.encoder import EncoderConfig, same_pass
from gerund.settings.plan import Direction, ResolvedPlan
from gerund.settings.templates import layer_numbers, rerouted_layers


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a model uses ``position_ids`` that count from 0; checked once per model by running it."""
    if model not in _takes_positions:
        takes = "position_ids" in inspect.signature(model.base_model.forward).parameters
        _takes_positions[model] = takes and not counts_rows(model) and _uses_positions(model)
    return _takes_positions[model]


_takes_positions: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


@torch.no_grad()
def _uses_positions(model: PreTrainedModel) -> bool:
    embeddings = model.get_input_embeddings().weight
    position_1T = torch.arange(4, device=embeddings.device)[None]
    ids_1T = (position_1T * 7 + 3) % len(embeddings)
    training = model.training
    model.eval()
    try:
        default, counted, doubled = (
            # Without a mask, positions with gaps would be taken for several texts in one row.
            model.base_model(
                ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False, **positions
            ).last_hidden_state.float()
            for positions in ({}, {"position_ids": position_1T}, {"position_ids": 2 * position_1T})
        )
    finally:
        model.train(training)
    near = 1e-2 * float(default.abs().max())
    return float((default - counted).abs().max()) <= near < float("inf") and not torch.equal(default, doubled)


_STREAMS = "This architecture has several residual streams: `layers` and `prepend` can't be used with it."


class LayerMixing:
    """Layer mixing and Token Prepending in one pass; ``BoundPlan.beside`` calls ``after_layer``."""

    def __init__(self, n_layers: int, config: EncoderConfig) -> None:
        self._numbers = layer_numbers(config.layers, n_layers)
        self._n_layers, self._below = n_layers, config.prepend
        self._total_BTD: Tensor | None = None

    def prepended(
        self, embed: Callable[[Tensor], Tensor], inputs: Mapping[str, Tensor], texts: Sequence[Tokens], begin_B: Tensor
    ) -> dict[str, Tensor]:
        """Return a model's inputs with embeddings instead of ids, that of the placeholder included."""
        device = begin_B.device
        self._row_B = torch.arange(len(texts), device=device)
        self._place_B = begin_B + torch.tensor([text.placeholder or 0 for text in texts], device=device)
        self._last_B = begin_B + torch.tensor([len(text) - 1 for text in texts], device=device)
        embedded_BTD = embed(inputs["input_ids"]).clone()
        embedded_BTD[self._row_B, self._place_B] = placeholder_embedding(embedded_BTD.shape[-1]).to(embedded_BTD)
        others = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
        return {"inputs_embeds": embedded_BTD, **others}

    def after_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Add up the states to mix, and replace the placeholder in the next layer's input."""
        if index == 0 and 0 in self._numbers:
            self._add(input_of(args, kwargs))
        hidden_BTD = hidden_of(output)
        if hidden_BTD.ndim != 3:
            raise UnsupportedModelError(_STREAMS)
        if 1 <= index + 1 < self._below:
            hidden_BTD = hidden_BTD.clone()
            hidden_BTD[self._row_B, self._place_B] = hidden_BTD[self._row_B, self._last_B]
        if index + 1 in self._numbers and index + 1 < self._n_layers:
            self._add(hidden_BTD)
        return (hidden_BTD, *output[1:]) if isinstance(output, tuple) else hidden_BTD

    def mixed(self, last_BTD: Tensor) -> Tensor:
        """Return the mean of the layers' states ``(B, T, D)``, given the last hidden state."""
        if self._n_layers in self._numbers:
            self._add(last_BTD)
        assert self._total_BTD is not None
        if self._total_BTD.shape != last_BTD.shape:  # the last state may be projected to another size
            raise UnsupportedModelError(_STREAMS)
        return self._total_BTD / len(self._numbers)

    def _add(self, hidden_BTD: Tensor) -> None:
        own_BTD = hidden_BTD.float()
        if self._total_BTD is not None and self._total_BTD.shape != own_BTD.shape:
            raise UnsupportedModelError(_STREAMS)
        self._total_BTD = own_BTD if self._total_BTD is None else self._total_BTD + own_BTD


@lru_cache(maxsize=8)
def placeholder_embedding(width: int) -> Tensor:
    """Return the embedding of the placeholder: standard normal, and always the same."""
    return torch.randn(width, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class EncoderRuntime(Encodes):
    """A model prepared to be used as an encoder."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase  # only its padding side and padding id are used here
    config: EncoderConfig
    plan: ResolvedPlan
    sends_plan: bool = True  # False for architectures that support only the causal plan
    autocast: torch.dtype | None = None  # compute in this dtype; None computes in that of the weights
    adapter: str | None = None  # the adapter that is active in every pass; None for the base model
    head: ProjectionHead | None = None  # projects pooled states ``(B, D)``
    transform: Transform | None = None  # applied to vectors after pooling and head
    answers: AnswerTokens | None = None  # trained tokens behind a text, whose states are pooled in its place
    why_no_vectors: str = ""  # the model encodes no texts, and why

    @property
    def device(self) -> torch.device:
        """The device of the model's input."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def device_type(self) -> str:
        """The kind of that device, such as ``cpu``."""
        return self.device.type

    @cached_property
    def state_width(self) -> int:
        """Size of a hidden state."""
        return width_of(self.config.states, self.model, state_width(self.model.config))

    @property
    def read_behind(self) -> int:
        """How many tokens behind a text are pooled in the place of its own."""
        return super().read_behind if self.answers is None else self.answers.settings.read

    @property
    def room_behind(self) -> int:
        """How many tokens the model reads behind a text."""
        return super().room_behind if self.answers is None else self.answers.settings.tokens

    def refuse_answers(self, what: str) -> None:
        """Refuse answer tokens in what does not read them."""
        if self.answers is not None:
            raise ConfigError(
                f"{what} takes no answer tokens, which this model encodes with; gerund's own encode, index and serve do"
            )

    @cached_property
    def n_layers(self) -> int:
        """Number of decoder layers; to encode, ``plan`` has a view for each of them up to ``config.exit_layer``."""
        return len(self.plan.views) if self.config.exit_layer is None else len(decoder_layers(self.model))

    @cached_property
    def pass_plan(self) -> ResolvedPlan:
        """The plan of the layers that a text is read by: layers above the highest one that is mixed change nothing."""
        depth = len(self.plan.views)
        # The embeddings alone, layer 0, are the input of the first layer.
        return self.plan.lower(max(1, *layer_numbers(self.config.layers, depth)))

    @cached_property
    def lower_model(self) -> PreTrainedModel:
        """The model with the layers of ``pass_plan`` alone."""
        return lower_layers(self.model, len(self.pass_plan.views))

    @torch.no_grad()
    def states(self, texts: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """Run one batch: last hidden states ``(B, T, D)``, and the position at which each text begins ``(B,)``."""
        if self.config.generated:
            return generated_states(self, texts, self.config.generated), torch.zeros(len(texts), dtype=torch.long)
        if self.answers is not None:
            return self._answer_states(self.answers, texts), torch.zeros(len(texts), dtype=torch.long)
        [hidden_BTD], begin = states_each([self], texts)
        return hidden_BTD, begin

    def _answer_states(self, answers: AnswerTokens, texts: Sequence[Tokens]) -> Tensor:
        """Return the states ``(B, R, D)`` of the answer tokens that are read."""
        longest = max(map(len, texts)) + answers.settings.tokens
        ids_BT = torch.tensor([[*text.ids, *[0] * (longest - len(text))] for text in texts], device=self.device)
        with self.computing():
            return answers.states(self.model, ids_BT, torch.tensor(list(map(len, texts)), device=self.device))

    def batch(self, texts: Sequence[Tokens]) -> "Batch":
        """Put texts into one tensor, padded on the tokenizer's side."""
        lengths = [len(text) for text in texts]
        longest = max(lengths)
        # Where positions count from the start of a row, padding must be on the right.
        left = self.tokenizer.padding_side == "left" and takes_positions(self.model)
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.full((len(texts), longest), pad, dtype=torch.long)
        begin = torch.zeros(len(texts), dtype=torch.long)
        for row, text in enumerate(texts):
            begin[row] = longest - lengths[row] if left else 0
            ids[row, begin[row] : begin[row] + lengths[row]] = torch.tensor(text.ids)
        inputs = {"input_ids": ids.to(self.device)}
        real_BT: Tensor | None = None
        if min(lengths) < longest:
            place_T = torch.arange(longest)
            end = begin + torch.tensor(lengths)
            real_BT = ((place_T >= begin[:, None]) & (place_T < end[:, None])).to(self.device)
            if left or not self.sends_plan:
                inputs["attention_mask"] = real_BT.long()
            if left:
                inputs["position_ids"] = (real_BT.long().cumsum(1) - 1).clamp(min=0)
        return Batch(inputs, real_BT, begin.to(self.device))

    def truncating(self) -> "EncoderRuntime":
        """Return the same model with truncation, which needs no fitting, where its settings name it."""
        if self.transform is not None:
            return self
        return replace(self, transform=truncation(self.config.transform, self.width))

    def of_lower_layers(self) -> "EncoderRuntime":
        """Return the same encoder of a model that has no layers above an early exit."""
        if self.config.exit_layer is None:
            return self
        lower = lower_layers(self.model, self.config.exit_layer)
        return replace(self, model=lower, config=replace(self.config, exit_layer=None))

    def in_own_type(self) -> "EncoderRuntime":
        """Return the same model, computing in the dtype of its weights."""
        return replace(self, autocast=None)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Apply the adapter and autocast to this thread's passes until the block ends."""
        with ExitStack() as stack:
            stack.enter_context(active_adapter(self.adapter))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=False))
            yield

    @torch.no_grad()
    def run(self, batch: "Batch", plan: BoundPlan | None) -> Tensor:
        """Return the last hidden states of a batch under a plan; None sends none."""
        extra = {} if plan is None else {"attention_plan": plan}
        with self.computing():
            if is_encoder_decoder(self.model):
                output = encoder_of(self.model)(**batch.inputs)
            else:
                output = self._reader(plan).base_model(**batch.inputs, use_cache=False, **extra)
        if plan is not None:
            plan.check_all_asked(self.model.config.model_type)
        hidden_BTD: Tensor = output.last_hidden_state
        return hidden_BTD

    def _reader(self, plan: BoundPlan | None) -> PreTrainedModel:
        """Return the model of the layers that a plan has views for."""
        depth = self.n_layers if plan is None else len(plan.plan.views)
        if depth == self.n_layers:
            return self.model
        return self.lower_model if depth == len(self.pass_plan.views) else lower_layers(self.model, depth)


def shares_pass(first: EncoderRuntime, second: EncoderRuntime) -> bool:
    """Whether two encoders read the same from one pass of the same tokens, up to layers, states and what follows."""
    if first.model is not second.model or first.read_behind or is_encoder_decoder(first.model):
        return False
    apart = ("plan", "adapter", "autocast", "max_length", "n_layers")
    alike = all(getattr(first, name) == getattr(second, name) for name in apart)
    return alike and same_pass(first.config, second.config)


@torch.no_grad()
def states_each(runtimes: Sequence[EncoderRuntime], texts: Sequence[Tokens]) -> tuple[list[Tensor], Tensor]:
    """Run one batch once for encoders that share a pass: the states that each pools, and where each text begins.

    Returns:
        For each encoder ``(B, T, D)``, and ``(B,)``.
    """
    runtime = max(runtimes, key=lambda each: len(each.pass_plan.views))
    if not runtime.sends_plan and any(each.sends_plan for each in runtimes):
        # Plain causal attention needs no plan, and other readings of the same pass do.
        runtime = replace(runtime, sends_plan=True)
    config, batch = runtime.config, runtime.batch(texts)
    readers = {(each.config.states, each.config.layers): _reader(each) for each in runtimes if each.config.reads_beside}
    if not runtime.sends_plan:
        if readers:
            raise ConfigError("layers, states, prepend and reroute are for decoder-only models")
        return [runtime.run(batch, None)] * len(runtimes), batch.begin
    plan = BoundPlan(runtime.pass_plan, batch.real_BT)
    parts = [reader for reader in readers.values() if isinstance(reader, AttentionParts)]
    mixings = [reader for reader in readers.values() if isinstance(reader, LayerMixing)]
    if rerouted := rerouted_layers(config.reroute, len(runtime.plan.views)):
        last_B = batch.begin + torch.tensor([len(text) - 1 for text in texts], device=batch.begin.device)
        read = frozenset(number - 1 for number in rerouted if number <= len(runtime.pass_plan.views))
        plan.rerouting = Rerouting(read, last_B)
    if config.prepend:
        if not mixings:  # all readings are of parts of the attention
            mixings = [LayerMixing(len(runtime.plan.views), config)]
        embed = runtime.model.get_input_embeddings()
        inputs = [mixing.prepended(embed, batch.inputs, texts, batch.begin) for mixing in mixings]
        batch = replace(batch, inputs=inputs[0])
    if parts:
        if is_one_graph(runtime.model):
            raise UnsupportedModelError("states='values' and 'attention' need the layers of a model: runtime='torch'")
        plan.attention_parts = EachPart(parts)
    if mixings:
        plan.beside = partial(_after_layer, mixings)
    last_BTD = runtime.run(batch, plan)
    name = runtime.model.config.model_type
    states = {
        key: reader.mixed(name) if isinstance(reader, AttentionParts) else reader.mixed(last_BTD)
        for key, reader in readers.items()
    }
    return [states.get((each.config.states, each.config.layers), last_BTD) for each in runtimes], batch.begin


def _reader(runtime: EncoderRuntime) -> AttentionParts | LayerMixing:
    config, depth = runtime.config, len(runtime.plan.views)
    if reads_attention(config.states):
        return AttentionParts(config.states, layer_numbers(config.layers, depth))
    return LayerMixing(depth, config)


def _after_layer(
    mixings: Sequence[LayerMixing], index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Hand a layer's output to each mixing; Token Prepending puts the same state in, however often it is done."""
    for mixing in mixings:
        output = mixing.after_layer(index, args, kwargs, output)
    return output


def hidden_states(model: PreTrainedModel, input_ids_BT: Tensor, real_BT: Tensor, plan: ResolvedPlan | None) -> Tensor:
    """Return last hidden states ``(B, T, D)`` with gradients, of texts padded on the right.

    Layers above those that ``plan`` has views for are not computed. ``plan`` None uses the causal mask, which right
    padding does not change, or the model's own encoder.
    """
    if is_encoder_decoder(model):
        states_BTD: Tensor = encoder_of(model)(input_ids=input_ids_BT, attention_mask=real_BT.long()).last_hidden_state
        return states_BTD
    extra: dict[str, Any] = {}
    if plan is not None:
        model, extra = lower_layers(model, len(plan.views)), {"attention_plan": BoundPlan(plan, real_BT)}
    own_BTD: Tensor = model.base_model(input_ids=input_ids_BT, use_cache=False, **extra).last_hidden_state
    return own_BTD


@dataclass(frozen=True)
class Batch:
    """Texts as one tensor."""

    inputs: dict[str, Tensor]  # of the model
    real_BT: Tensor | None  # False for padding; None without padding
    begin: Tensor  # the position at which each text begins ``(B,)``


# Of several kinds and lengths: rounding matters most where tokens are rare and texts are short.
SAMPLE_TEXTS = (
    "A cat sleeps.",
    "The central bank raised interest rates for the third time this year, to 4.25 per cent.",
    "def area(radius): return 3.14159 * radius ** 2",
    "In the beginning the ship moved slowly; later, when the wind had turned, it reached the island by noon.",
)
ENOUGH = 0.999


def bfloat16_cosine(runtime: EncoderRuntime) -> float:
    """Return the smallest cosine between vectors computed in bfloat16 and in the dtype of the weights."""
    config, exact = runtime.config, runtime.in_own_type()
    input_format = InputFormat(append_eos=config.append_eos, repeat_text=runtime.plan.repeats_text, empty="zeros")
    tokens_of = [item for item in tokenize(runtime.tokenizer, SAMPLE_TEXTS, input_format) if item is not None]
    # Truncated here: a warning would be about texts that the user does not know.
    tokens = [replace(item, ids=item.ids[: runtime.max_length]) for item in tokens_of]
    if not tokens:  # a vocabulary of another script
        return 0.0
    versions = (exact, replace(exact, autocast=torch.bfloat16))
    return smallest_cosine(*(encode(version, tokens, show=False) for version in versions))


def smallest_cosine(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """Return the smallest cosine between the two vectors of a text."""
    norm_N = np.linalg.norm(one_ND, axis=1) * np.linalg.norm(other_ND, axis=1)
    return float(((one_ND * other_ND).sum(axis=1) / np.maximum(norm_N, 1e-12)).min())


def choose_autocast(runtime: EncoderRuntime) -> torch.dtype | None:
    """Return bfloat16 where the weights are float32 and the vectors hardly change, else None."""
    fills_spans = any(view.direction is Direction.HYBRID for view in runtime.plan.views)
    if runtime.model.dtype != torch.float32 or fills_spans or is_one_graph(runtime.model):
        return None
    return torch.bfloat16 if bfloat16_cosine(runtime) >= ENOUGH else None


class TextClassifier(nn.Module):
    """Labels of texts from their vectors, with the interface of transformers' ``...ForSequenceClassification``."""

    def __init__(self, runtime: EncoderRuntime, num_labels: int, *, dropout: float = 0.1) -> None:
        super().__init__()
        if type(num_labels) is not int or num_labels < 2:
            raise ConfigError(f"num_labels={num_labels!r}: there is nothing to tell apart")
        runtime.config.refuse_methods("a classifier that is trained with its encoder", takes=("exit_layer",))
        self.model, self.head = runtime.model, runtime.head
        self.plan = runtime.plan if runtime.sends_plan else None
        self.adapter = runtime.adapter
        self.pooling = runtime.config.pooling
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(runtime.width, num_labels).to(runtime.device)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        pooled: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Return ``logits`` ``(B, num_labels)`` and, with ``labels`` ``(B,)``, the mean cross-entropy as ``loss``.

        Tokens ``(B, T)`` are padded on the right; ``pooled`` ``(B, T)`` selects those to pool, all by default.
        """
        real_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        with active_adapter(self.adapter):
            hidden_BTD = hidden_states(self.model, input_ids, real_BT.bool(), self.plan)
        pooled_BT = real_BT.bool() if pooled is None else pooled
        vectors_BD = pool(hidden_BTD, pooled_BT, self.pooling)
        if self.head is not None:
            vectors_BD = self.head(vectors_BD, input_ids, pooled_BT)
        logits_BC = self.classifier(self.dropout(vectors_BD))
        loss = None if labels is None else nn.functional.cross_entropy(logits_BC, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits_BC)
