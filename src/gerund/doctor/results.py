"""What a diagnosis consists of: frozen values, ready for JSON.

Knows: names and numbers. Does not know: torch, how anything is found out.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from gerund.attention.plan import AttentionPlan

# Fractions of the attention from which on a layer counts as a sink.
SINK = 0.2


@dataclass(frozen=True)
class LayerResult:
    """One layer.

    Attributes:
        layer: its index, 0 at the bottom.
        view: what the plan lets it see.
        converted: whether the plan lets it see otherwise than the untouched model does.
        hidden: how many first tokens it does not see.
        window: its sliding window in tokens; None for none.
        obeys: whether it sees exactly that.
        seen: what it was measured to see on a few tokens, a row a looking token: ``#`` seen, ``.`` not,
            ``x`` seen though it must not be, ``o`` not seen though it should be.
        sink_before: fraction of attention that the first token takes from later ones in the untouched model.
        sink_after: the same under the plan; None where no plan reaches the model.
        moved_sink: under the plan, the fraction of the first token that is not hidden; None where none is hidden.
    """

    layer: int
    view: str
    converted: bool
    hidden: int
    window: int | None
    obeys: bool
    seen: tuple[str, ...]
    sink_before: float
    sink_after: float | None
    moved_sink: float | None


@dataclass(frozen=True)
class Check:
    """One thing that was tried out.

    Attributes:
        name: a short name, for programs.
        what: what ought to be, in a few words.
        passed: whether it is.
        value: what was measured; None where there is only a yes or no.
        limit: how far ``value`` may go.
    """

    name: str
    what: str
    passed: bool
    value: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class TokenizerFacts:
    """What matters of a tokenizer. Tokens are given as their text; None for none."""

    kind: str
    tokens: int
    fast: bool
    padding_side: str
    bos: str | None
    eos: str | None
    pad: str | None
    unk: str | None
    adds_bos: bool
    adds_eos: bool
    round_trip: bool


@dataclass(frozen=True)
class Diagnosis:
    """All that was found out about a model.

    Attributes:
        name: what it was loaded from.
        architecture: transformers' ``model_type``.
        model_class: its class in transformers.
        parameters: their number; tied ones count once.
        n_layers: decoder layers.
        heads: query heads a layer.
        kv_heads: key and value heads a layer.
        width: size of a hidden state.
        stored_dtype: type that the checkpoint names.
        dtype: type in which it was examined.
        device: where.
        context: longest text in tokens; None when nothing says it.
        embeddings: rows of the input embeddings.
        adapter: whether an adapter takes part in encoding.
        pooling: how token states become one vector.
        plan: the attention plan, k and k0 filled in.
        reached: whether the plan reaches every layer and each does what it says.
        plans: for every plan by name, whether the model obeys it.
        layers: one result a layer.
        even_fraction: the sink fraction that attention without preference would have.
        checks: what was tried out.
        tokenizer: what matters of the tokenizer.
        seconds: how long the examination took, without loading.
        advice: plain sentences, most important first.
    """

    name: str
    architecture: str
    model_class: str
    parameters: int
    n_layers: int
    heads: int
    kv_heads: int
    width: int
    stored_dtype: str
    dtype: str
    device: str
    context: int | None
    embeddings: int
    adapter: bool
    pooling: str
    plan: AttentionPlan
    reached: bool
    plans: dict[str, bool]
    layers: tuple[LayerResult, ...]
    even_fraction: float
    checks: tuple[Check, ...]
    tokenizer: TokenizerFacts
    seconds: float
    advice: tuple[str, ...] = field(default=())

    @property
    def healthy(self) -> bool:
        """Whether the plan reaches the model and everything that was tried out is as it ought to be.

        A model for which bfloat16 is too coarse is healthy: loading finds that out and keeps float32.
        """
        return self.reached and all(check.passed for check in self.checks if check.name != "bfloat16")

    def to_dict(self) -> dict[str, Any]:
        """Return everything, JSON-ready."""
        return {"healthy": self.healthy, **asdict(self), "plan": self.plan.to_dict()}


def spans(layers: list[int]) -> str:
    """Return layers in words.

    >>> spans([1]), spans([0, 1, 2, 5])
    ('layer 1', 'layers 0-2 and 5')
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    words = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{'layer' if len(layers) == 1 else 'layers'} {words}"
