"""Attention maps: which tokens attend to which, layer by layer, under the causal mask and under an attention plan.

The probabilities come from the forward pass itself; recording them changes no state. They show the attention sink of
"Look Both Ways and No Sink" (LBW, section 3.4, Figures 3, 8 and 9).

Shapes: T tokens; in a map ``[..., i, j]`` the query i and the key j, so that rows sum to 1. (In models with
learned sinks, such as gpt-oss, the sink takes the rest.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.layouts import decoder_layers, lower_layers
from gerund.attention.recurrent import kind_of
from gerund.errors import ModelError, TextError, UnsupportedModelError
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.tokens import InputFormat, tokenize
from gerund.models.adapters import active_adapter
from gerund.settings.plan import Direction, ResolvedPlan, View

# Maps grow with the square of the length.
LONGEST = 512

# Default texts, of several kinds.
EXAMPLE_TEXTS = (
    "The old man looked at the sea for a long time before he said that the boat would not come back that night.",
    "Germany beat Brazil by seven goals to one in the semi-final, which nobody in the stadium had thought possible.",
    "The central bank raised interest rates for the third time this year, to 4.25 per cent, in order to slow prices.",
    "Cells divide by copying their genetic material first and then separating the two copies into new nuclei.",
    "When she opened the letter, she found that it was written in a language that she had learnt as a child.",
    "To install the package, open a terminal, change to the folder with the sources and run the command below.",
    "The court decided on Tuesday that the company has to pay back the fees that it had charged since March.",
    "Rain is expected in the north until the evening, while the south of the country will stay dry and warm.",
)


@dataclass(frozen=True)
class AttentionMap:
    """The attention of one layer in one pass.

    ``view`` is its mask type. ``run`` is 0 for the layer itself, r for its r-th further run with the same weights
    (``inter-*``, ``extra-*``, ``extend-*`` plans). ``weights`` are probabilities, float32 on the CPU, of the shape
    ``(heads, T, T)``, or ``(T, T)`` averaged over heads. ``taken`` ``(T - 1,)`` is the attention that each token but
    the last gets from all later ones, averaged over heads, queries and texts.
    """

    layer: int
    view: View
    run: int
    weights: Tensor
    taken: Tensor


def causal_plan(n_layers: int) -> ResolvedPlan:
    """Return the plan of the base model."""
    return ResolvedPlan((View(Direction.CAUSAL),) * n_layers)


def mean_maps(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    plan: ResolvedPlan | None,
    *,
    size: int | None = None,
    adapter: str | None = None,
) -> list[AttentionMap]:
    """Average attention over heads and texts, as in LBW's Figure 3: a map ``(size, size)`` per layer and run.

    Texts of different lengths are resampled to one size, by default their median length. ``plan`` None is for base
    models that no plan reaches (see ``unplanned_maps``).
    """
    if not texts:
        raise TextError("there is no text to look at")
    rows = size or sorted(len(ids) for ids in texts)[len(texts) // 2]

    def shrink(weights: Tensor) -> Tensor:
        return resample(weights.mean(dim=0), rows)

    mean: list[AttentionMap] = []
    for count, ids in enumerate(texts):
        if plan is None:
            maps = [replace(item, weights=shrink(item.weights)) for item in unplanned_maps(model, ids)]
        else:
            maps = attention_maps(model, ids, plan, adapter=adapter, keep=shrink)
        mean = [_add(a, b, count) for a, b in zip(mean, maps, strict=True)] if mean else maps
    return mean


@torch.no_grad()
def unplanned_maps(model: PreTrainedModel, ids: Sequence[int]) -> list[AttentionMap]:
    """Return the base model's maps ``(heads, T, T)`` of one text by ``output_attentions`` of transformers.

    For architectures that no plan reaches. The model is in eager mode while it runs, so no other thread may use it.
    """
    current = model.config._attn_implementation
    # By the config alone: falcon can't be switched otherwise, and its attention in SDPA mode is not causal.
    model.config._attn_implementation = "eager"
    try:
        output = model.base_model(_input_ids(model, ids), use_cache=False, output_attentions=True)
    finally:
        model.config._attn_implementation = current
    maps = output.attentions
    if not maps or any(item is None for item in maps):
        raise ModelError(f"this {model.config.model_type} model does not give its attention away")
    views = causal_plan(len(maps)).views
    weights = [item[0].float().cpu() for item in maps]
    return [AttentionMap(i, views[i], 0, item, _taken(item)) for i, item in enumerate(weights)]


def sink_fraction(maps: Sequence[AttentionMap], token: int = 0) -> list[float]:
    """Return the mean attention that a token gets from all later ones, over heads and queries, per map.

    Token 0 is the first real token, the usual sink.
    """
    if any(len(item.taken) <= token for item in maps):
        raise TextError(f"attention to token {token} shows in texts of at least {token + 2} tokens only")
    return [float(item.taken[token]) for item in maps]


def even_fraction(lengths: Sequence[int]) -> float:
    """Return the first token's fraction if every causal token attended evenly to all that it sees.

    >>> round(even_fraction([3]), 3)  # a half from the second token, a third from the last
    0.417
    """
    fractions = [sum(1 / seen for seen in range(2, length + 1)) / (length - 1) for length in lengths]
    return sum(fractions) / len(fractions)


def resample(weights: Tensor, size: int) -> Tensor:
    """Resample maps ``(..., T, T)`` to ``(..., size, size)``: queries are averaged, keys are summed.

    The first token keeps its own row and column, so that a sink keeps its strength.
    """
    length = weights.shape[-1]
    if length == size:
        return weights
    if min(length, size) < 2:
        raise TextError("a text of one token is too short to be averaged with longer ones")
    cells = torch.linspace(0, 1, size, dtype=torch.float64)
    places = torch.linspace(0, 1, length, dtype=torch.float64)
    # How much of each token (column) lies in each cell (row), on a text of length 1.
    overlap = torch.minimum(cells[1:, None], places[None, 1:]) - torch.maximum(cells[:-1, None], places[None, :-1])
    overlap = overlap.clamp(min=0)
    first = torch.ones(1, 1, dtype=torch.float64)
    average = torch.block_diag(first, overlap * (size - 1))
    spread = torch.block_diag(first, overlap.T * (length - 1))
    return (average @ weights.double() @ spread).to(weights.dtype)


def _add(mean: AttentionMap, item: AttentionMap, count: int) -> AttentionMap:
    """Add the map of another text to the mean of ``count`` texts."""
    length = min(len(mean.taken), len(item.taken))
    return replace(
        mean,
        weights=mean.weights + (item.weights - mean.weights) / (count + 1),
        taken=mean.taken[:length] + (item.taken[:length] - mean.taken[:length]) / (count + 1),
    )


def _taken(weights: Tensor) -> Tensor:  # (heads, T, T) -> (T - 1,)
    later = weights.mean(dim=0).tril(-1).sum(dim=0)[:-1]
    return later / torch.arange(len(later), 0, -1)


@torch.no_grad()
def attention_maps(
    model: PreTrainedModel,
    ids: Sequence[int],
    plan: ResolvedPlan,
    *,
    adapter: str | None = None,
    keep: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> list[AttentionMap]:
    """Return what ``keep`` makes of the maps ``(heads, T, T)`` of one text, in the order in which the layers ran.

    The model must be in evaluation mode. Raises ``UnsupportedModelError`` where the plan does not reach every layer.
    """
    model = lower_layers(model, len(plan.views))
    maps: list[AttentionMap] = []
    runs = [0] * len(plan.views)

    def note(layer: int, second: bool, weights_BHTT: Tensor) -> None:
        if second:
            runs[layer] += 1
        view = plan.stream.view if second and plan.stream is not None else plan.views[layer]
        weights = weights_BHTT[0].float().cpu()
        maps.append(AttentionMap(layer, view, runs[layer] if second else 0, keep(weights), _taken(weights)))

    bound = BoundPlan(plan, record=note)
    with active_adapter(adapter):
        model.base_model(_input_ids(model, ids), use_cache=False, attention_plan=bound)
    bound.check_all_asked(model.config.model_type)
    reached = {item.layer for item in maps}
    if len(reached) < sum(kind_of(layer).attends for layer in decoder_layers(model)):
        raise UnsupportedModelError(f"this {model.config.model_type} model does not give its attention away")
    return maps


def _input_ids(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    if not len(ids):
        raise TextError("there is no token to look at")
    return torch.tensor([list(ids)], device=model.get_input_embeddings().weight.device)


@dataclass(frozen=True)
class AttentionInspection:
    """Mean attention maps of some texts."""

    ids: list[list[int]]
    before: list[AttentionMap]  # of the base model
    after: list[AttentionMap]  # under the runtime's plan, further runs of a layer included
    cut: int  # number of truncated texts

    @property
    def even(self) -> float:
        """The fraction of the first token if every causal token attended evenly to all that it sees."""
        return even_fraction([len(item) for item in self.ids])


def inspect_attention(runtime: EncoderRuntime, texts: Sequence[str], longest: int = LONGEST) -> AttentionInspection:
    """Return the mean attention maps of texts without a prompt, before and after the conversion.

    Texts are truncated to ``longest`` tokens. Where no plan reaches the model, both are those of the base model.
    """
    input_format = InputFormat(append_eos=runtime.config.append_eos, repeat_text=runtime.plan.repeats_text)
    longest = min(longest, runtime.max_length or longest)
    tokenized = [item.ids for item in tokenize(runtime.tokenizer, texts, input_format) if item is not None]
    short = next((text for text, ids in zip(texts, tokenized, strict=True) if len(ids) < 2), None)
    if short is not None:
        raise TextError(f"the text {short!r} is a single token, which has nothing to look at")
    ids = [item[:longest] for item in tokenized]
    if not all(kind_of(layer).attends for layer in decoder_layers(runtime.model)):
        kind = runtime.model.config.model_type
        raise UnsupportedModelError(f"attention is shown of models whose every layer attends; this {kind} has others")
    before, after = _maps(runtime, ids)
    return AttentionInspection(ids, before, after, sum(len(item) > longest for item in tokenized))


def _maps(runtime: EncoderRuntime, ids: list[list[int]]) -> tuple[list[AttentionMap], list[AttentionMap]]:
    try:
        before = mean_maps(runtime.model, ids, causal_plan(len(runtime.plan.views)))
    except UnsupportedModelError:
        before = mean_maps(runtime.model, ids, None)
        return before, before
    return before, mean_maps(runtime.model, ids, runtime.plan, adapter=runtime.adapter)


def token_labels(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return each token's text, in twelve characters; a part of a character by its name in the vocabulary."""
    labels = []
    for token in ids:
        label = tokenizer.decode([token]).strip()
        if "\N{REPLACEMENT CHARACTER}" in label:
            label = str(tokenizer.convert_ids_to_tokens(token))
        labels.append(label if len(label) <= 12 else f"{label[:11]}…")
    return [label if label else "␣" for label in labels]
