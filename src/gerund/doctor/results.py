"""Results of a diagnosis, ready for JSON, and advice in sentences."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from gerund.settings.plan import AttentionPlan

# Fractions of the attention from which on a layer counts as a sink.
SINK = 0.2

# What is tried of types to compute in, which a healthy model need not bear; their values are cosines.
COARSE = ("bfloat16", "int8")

# What can be done with an architecture.
MEANINGS = {
    "exact": "attention plans are exact",
    "recurrent": "attention plans are exact, with recurrent layers causal or both ways",
    "causal": "only causal encoding works",
}


@dataclass(frozen=True)
class LayerResult:
    """One layer."""

    layer: int  # its index, 0 at the bottom
    view: str  # what the plan lets it see
    converted: bool  # whether the plan lets it see otherwise than the untouched model does
    hidden: int  # how many first tokens it does not see
    # Its sliding window in tokens, or the size of the parts in which it reads a text; None for neither.
    window: int | None
    obeys: bool  # whether it sees exactly that
    # What it was measured to see on a few tokens, a row a query: ``#`` seen, ``.`` not, ``x`` seen though it must not
    # be, ``o`` not seen though it should be.
    seen: tuple[str, ...]
    # Fraction of attention that the first token takes from later ones in the untouched model; None for a layer without
    # attention.
    sink_before: float | None
    sink_after: float | None  # the same under the plan; None where no plan reaches the model as well
    # Under the plan, the fraction of the first token that is not hidden; None where none is hidden.
    moved_sink: float | None


@dataclass(frozen=True)
class Check:
    """One thing that was tried out."""

    name: str  # a short name, for programs
    what: str  # what ought to be, in a few words
    passed: bool  # whether it is
    value: float | None = None  # what was measured; None where there is only a yes or no
    limit: float | None = None  # how far ``value`` may go


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
    """All that was found out about a model."""

    name: str  # what it was loaded from
    architecture: str  # transformers' ``model_type``
    model_class: str  # its class in transformers
    parameters: int  # their number; tied ones count once
    n_layers: int  # decoder layers
    heads: int  # query heads a layer
    kv_heads: int  # key and value heads a layer
    width: int  # size of a hidden state
    stored_dtype: str  # type that the checkpoint names
    dtype: str  # type in which it was examined
    device: str  # where
    context: int | None  # longest text in tokens; None when nothing says it
    embeddings: int  # rows of the input embeddings
    adapter: bool  # whether an adapter takes part in encoding
    pooling: str  # how token states become one vector
    plan: AttentionPlan  # the attention plan, k and k0 filled in
    reached: bool  # whether the plan reaches every layer and each does what it says
    # What can be done with the architecture: ``exact``, ``recurrent`` (exact, with recurrent layers causal or both
    # ways) or ``causal`` (nothing but causal encoding).
    support: str
    reason: str  # why some plan is refused; empty where none is
    plans: dict[str, bool]  # for every plan by name, whether the model obeys it
    recurrent: dict[str, bool]  # the same for plans with recurrent layers both ways; empty for a model without any
    layers: tuple[LayerResult, ...]  # one result a layer
    even_fraction: float  # the sink fraction that attention without preference would have
    checks: tuple[Check, ...]  # what was tried out
    tokenizer: TokenizerFacts  # what matters of the tokenizer
    seconds: float  # how long the diagnostics took, without loading
    advice: tuple[str, ...] = field(default=())  # plain sentences, most important first
    # How adapters are read, merged or beside the weights, as a sentence; empty without any.
    adapter_computation: str = ""
    settings_from: str = ""  # the file in its folder that says how it is read; empty where none does
    prompts: tuple[str, ...] = ()  # the names of the prompts that it has
    reranker: bool = False  # whether it scores a query and a document together, and gives no vectors

    @property
    def healthy(self) -> bool:
        """Whether the plan reaches the model and everything that was tried out is as it ought to be.

        A model for which bfloat16 is too coarse is healthy: loading finds that out.
        """
        return self.reached and all(check.passed for check in self.checks if check.name not in COARSE)

    @property
    def only_both_ways(self) -> list[str]:
        """Plans that the model obeys with recurrent layers both ways, and else not."""
        return [name for name, obeyed in self.recurrent.items() if obeyed and not self.plans[name]]

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


def advise(diagnosis: Diagnosis) -> list[str]:
    """Return what a user ought to know or do, most important first."""
    advice = [*_reach(diagnosis), *_checks(diagnosis), *_sinks(diagnosis), *_tokenizer(diagnosis)]
    return advice or ["Nothing to do."]


def _reach(diagnosis: Diagnosis) -> list[str]:
    wrong = [layer.layer for layer in diagnosis.layers if not layer.obeys]
    if diagnosis.reached:
        both = diagnosis.only_both_ways
        disobeyed = [name for name, obeyed in diagnosis.plans.items() if not obeyed and name not in both]
        turned = [f"Only with recurrent='both': {', '.join(both)}."] * bool(both)
        is_specific = diagnosis.reason and not diagnosis.reason.startswith("the attention plan reaches")
        why = f"not work: {diagnosis.reason}." if is_specific else "not reach every layer; take one of the others."
        sentence = "The plan {} does {}" if len(disobeyed) == 1 else "The plans {} do {}"
        return [*turned, *[sentence.format(", ".join(disobeyed), why)] * bool(disobeyed)]
    if not any(obeyed for name, obeyed in diagnosis.plans.items() if name not in ("causal", "echo")):
        return [
            f"No attention plan reaches this architecture ({diagnosis.architecture}): it would silently stay causal, "
            "so gerund refuses it. Only attention='causal' works (and 'echo', which is causal too); or take another "
            "architecture, such as llama, qwen, mistral, gemma, gpt2, gpt_neox, olmo, phi3, opt or granite."
        ]
    return [f"The plan {diagnosis.plan.name} does not reach {spans(wrong)} of this {diagnosis.architecture} model; "
            f"plans that do: {', '.join(name for name, obeyed in diagnosis.plans.items() if obeyed)}."]  # fmt: skip


def _checks(diagnosis: Diagnosis) -> list[str]:
    failed = {check.name for check in diagnosis.checks if not check.passed}
    advice = []
    if "untouched" in failed:
        advice.append("Even without a plan the logits have changed: please report this model.")
    sides = [side for side in ("left", "right") if f"padding_{side}" in failed]
    if sides:
        advice.append(
            f"Padding on the {' and on the '.join(sides)} changes the states: encode texts one at a time, or set the "
            "tokenizer's padding_side to the side that does not."
        )
    if "batch" in failed:
        advice.append("A text's states depend on its batch: vectors of different runs may differ a little.")
    if "bfloat16" in failed:
        advice.append("bfloat16 moves the vectors: gerund.load will keep float32.")
    return advice


def _sinks(diagnosis: Diagnosis) -> list[str]:
    high = max(SINK, 2 * diagnosis.even_fraction)
    before = {layer.layer: layer.sink_before for layer in diagnosis.layers if layer.sink_before is not None}
    sinks = [layer for layer in diagnosis.layers if before.get(layer.layer, 0.0) >= high]
    if not before or (not sinks and not diagnosis.reached):
        return []
    if not sinks:
        strongest = max(before.values())
        return [
            f"No layer leans on the first token (at most {strongest:.0%}, where even attention would give it "
            f"{diagnosis.even_fraction:.0%}): there is no sink to hide, so a mask0 plan gains little over "
            "inplace-bidir."
        ]
    fraction = sum(before[layer.layer] for layer in sinks) / len(sinks)
    is_one = len(sinks) == 1
    return [
        f"{_layers(sinks)} {'gives' if is_one else 'give'} {fraction:.0%} of {'its' if is_one else 'their'} attention "
        f"to the first token{_remedy(diagnosis, sinks, high)}"
    ]


def _remedy(diagnosis: Diagnosis, sinks: list[LayerResult], high: float) -> str:
    """Say what becomes of the sinks under the plan, as the end of a sentence."""
    name = diagnosis.plan.name
    # LBW, section 3.5, finding 4: hidden too early, the sink comes back at the next token.
    moved = [layer for layer in diagnosis.layers if layer.hidden and (layer.moved_sink or 0) >= high]
    left = [layer for layer in sinks if layer.converted and (layer.sink_after or 0) >= high]
    if not diagnosis.reached:
        return ", and no plan can hide it here."
    if name in ("causal", "echo"):
        return ": a mask0 plan may help."
    if name.startswith(("inter", "extra", "extend")):
        # An adapter was trained under its plan, and any other would be worse.
        other = "" if diagnosis.adapter else " Compare it with mask0-bidir."
        return f"; {name} leaves them as they are and adds layers that look elsewhere.{other}"
    if moved:
        return (
            f". Hiding it has moved the sink to the next token in {_layers(moved).lower()}: hide it in fewer layers, "
            "the upper ones (mask0-bidir with a smaller k)."
        )
    if left:
        still = "still does so" if len(left) == 1 else "still do so"
        # An adapter was trained under its plan, and any other would be worse.
        other = "." if diagnosis.adapter else ": a mask0 plan may help."
        return f", and {_layers(left).lower()} {still} under {name}{other}"
    return f"; those that {name} converts do so no longer."


def _tokenizer(diagnosis: Diagnosis) -> list[str]:
    facts = diagnosis.tokenizer
    hides = any(layer.hidden for layer in diagnosis.layers)
    cases: list[tuple[bool, Callable[[], str]]] = [
        (
            facts.tokens > diagnosis.embeddings,
            lambda: (
                f"The tokenizer has {facts.tokens} tokens and the model embeds {diagnosis.embeddings}: texts with the "
                "others fail."
            ),
        ),
        (
            hides and not facts.adds_bos,
            lambda: "The tokenizer puts no beginning token before a text, so what the plan hides is the first word.",
        ),
        (
            diagnosis.pooling == "last" and not facts.adds_eos,
            lambda: "Pooling is last and the tokenizer adds no end token: append_eos gives every text the same one.",
        ),
        (facts.pad is None, lambda: "There is no padding token; none is needed, since padding is never looked at."),
        (facts.eos is None, lambda: "There is no end token: the model generates until max_new_tokens."),
        (not facts.fast, lambda: "The tokenizer is a slow one: prompts and words need a tokenizer.json."),
        (
            not facts.round_trip,
            lambda: "The tokenizer does not give a text back as it was: generation may look odd.",
        ),
        (diagnosis.context is None, lambda: "Nothing says how long a text may be: set max_length."),
    ]
    return [sentence() for applies, sentence in cases if applies]


def _layers(layers: list[LayerResult]) -> str:
    return spans([layer.layer for layer in layers]).capitalize()
