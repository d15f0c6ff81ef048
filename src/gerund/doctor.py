"""``gerund doctor``: check whether a model supports an attention plan, and advise on its attention sinks."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers, lower_layers
from gerund.attention.masks import Chunk, Near, visible
from gerund.attention.probe import LENGTH, LayerMap, probe, verify, window_of
from gerund.attention.recurrent import kind_of, recurrent_modules
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.inference.encode.runtime import ENOUGH, EncoderRuntime, bfloat16_cosine
from gerund.inference.inspection import (
    EXAMPLE_TEXTS,
    AttentionMap,
    causal_plan,
    even_fraction,
    mean_maps,
    sink_fraction,
)
from gerund.inference.tokens import InputFormat, context_length, tokenize
from gerund.models import architectures, loading
from gerund.models.adapters import Adapters, adapter_computation, count_parameters, load_adapters
from gerund.models.architectures import demand_decoder_only
from gerund.models.encoder_settings import stored_settings
from gerund.models.sources import find_spec
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import ModelSpec
from gerund.settings.plan import PLAN_NAMES, AttentionPlan

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
        (not facts.round_trip, lambda: "The tokenizer does not give a text back as it was: generation may look odd."),
        (diagnosis.context is None, lambda: "Nothing says how long a text may be: set max_length."),
    ]
    return [sentence() for applies, sentence in cases if applies]


def _layers(layers: list[LayerResult]) -> str:
    return spans([layer.layer for layer in layers]).capitalize()


_CAUSAL = ("causal", "echo")


@dataclass(frozen=True)
class Support:
    """What can be done with a model."""

    verdict: str  # a key of ``MEANINGS``
    refusals: dict[str, str | None]  # for each plan, by name, why it is refused; None for a plan that is obeyed
    both: dict[str, str | None]  # the same for the plans with recurrent layers both ways; empty for a model without any

    @property
    def reason(self) -> str:
        """Why some plan is refused, one that is refused both ways if there is any; empty where none is."""
        lost = [why for name, why in self.refusals.items() if self.both.get(name, why)]
        return next((why for why in (*lost, *self.refusals.values(), *self.both.values()) if why), "")

    def __str__(self) -> str:
        return MEANINGS[self.verdict]


def support(model: PreTrainedModel, n_layers: int) -> Support:
    """Find out which plans a model obeys."""
    refusals = {name: _refusal(model, AttentionPlan(name), n_layers) for name in PLAN_NAMES}
    both: dict[str, str | None] = {}
    has_recurrent = bool(recurrent_modules(model))
    if has_recurrent:
        both = {name: _refusal(model, plan, n_layers) for name in PLAN_NAMES if (plan := _turned(name)) is not None}
    obeyed = [name for name, why in refusals.items() if why is None and name not in _CAUSAL]
    obeyed += [name for name, why in both.items() if why is None]
    verdict = "causal" if not obeyed else "recurrent" if has_recurrent else "exact"
    return Support(verdict, refusals, both)


def _turned(name: str) -> AttentionPlan | None:
    try:
        return AttentionPlan(name, recurrent="both")
    except ConfigError:
        return None


def _refusal(model: PreTrainedModel, plan: AttentionPlan, n_layers: int) -> str | None:
    resolved = plan.resolve(n_layers)
    if resolved.is_causal:
        return None
    try:
        verify(model, resolved)
    except (UnsupportedModelError, ConfigError) as error:
        return str(error)
    return None


# How far equal states may differ, as a fraction of the largest of them.
_NEAR = {torch.float32: 1e-4, torch.float64: 1e-6}
_NEAR_HALF = 5e-2
_LONGEST = 256


def diagnose(spec: ModelSpec) -> Diagnosis:
    """Load a model and find out how fit it is to be read as an encoder."""
    where = loading.pick_device(spec.device)
    weights_type = loading.pick_dtype(spec.dtype)
    source = find_spec(spec)
    settings = loading.settings_folder(source)
    config = loading.read_config(source)
    reading = stored_settings(settings, config, spec, source)
    encoder = spec.applied_to(reading.encoder)
    reading.tell(source.name, encoder)
    stored = loading.own_dtype(source)
    loaded, tokenizer = loading.read(source, weights_type, config)
    demand_decoder_only(loaded, "be examined: no attention plan applies to it")
    adapters = Adapters(loading.own_adapters(source, settings))
    start = time.perf_counter()
    diagnostics = _Diagnostics(loaded.to(where), tokenizer, encoder)
    logits = diagnostics.logits()
    diagnostics.attach()
    load_adapters(loaded, adapters.by_name)
    diagnostics.adapter = adapters.name("encode")
    diagnosis = diagnostics.diagnose(source.name, stored, torch.equal(logits, diagnostics.logits()))
    computation = adapter_computation(loaded)
    diagnosis = replace(
        diagnosis,
        adapter=diagnostics.adapter is not None,
        settings_from=reading.file,
        prompts=tuple(encoder.prompts),
        reranker=reading.reranker is not None,
        adapter_computation="" if computation is None else computation.summary(),
        seconds=time.perf_counter() - start,
    )
    return replace(diagnosis, advice=tuple(advise(diagnosis)))


class _Diagnostics:
    """One model on the table. It is ours alone, so its tokenizer's padding side may be turned."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoder: EncoderConfig) -> None:
        self._whole = model
        self.model = model = lower_layers(model, encoder.depth(len(decoder_layers(model))))
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.layers = decoder_layers(model)
        self.n_layers = len(self.layers)
        self.kinds = [kind_of(layer) for layer in self.layers]
        self.plan = encoder.attention.resolve(self.n_layers)
        self.causal = causal_plan(self.n_layers)
        self.adapter: str | None = None
        input_format = InputFormat(append_eos=encoder.append_eos, repeat_text=self.plan.repeats_text)
        tokenized = [item for item in tokenize(tokenizer, EXAMPLE_TEXTS, input_format) if item is not None]
        longest = min(_LONGEST, context_length(model.config, tokenizer) or _LONGEST)
        self.texts = [replace(item, ids=item.ids[:longest]) for item in tokenized]

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the logits of the first text, without a plan; its states for a model without a head."""
        device = self.model.get_input_embeddings().weight.device
        ids = torch.tensor([self.texts[0].ids], device=device)
        if isinstance(self.model.get_output_embeddings(), architectures.NoHead):
            states: Tensor = self.model.base_model(ids, use_cache=False).last_hidden_state
            return states
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits

    def attach(self) -> None:
        """Do what loading does."""
        attach(self._whole)  # whose config its layers hold
        attach(self.model)
        attach_streams(self.layers)

    def diagnose(self, name: str, stored: str, is_untouched: bool) -> Diagnosis:
        """Find everything out, but for the advice."""
        verify(self.model, self.causal)
        reached, maps, obeyed = self._probe()
        supported = support(self.model, self.n_layers)
        runtime = EncoderRuntime(
            self.model, self.tokenizer, self.encoder, self.plan if reached else self.causal,
            sends_plan=reached and not self.plan.is_causal, adapter=self.adapter,
        )  # fmt: skip
        config = self.model.config.get_text_config(decoder=True)
        heads = int(getattr(config, "num_attention_heads", 0))  # a model of recurrent layers alone has none
        untouched = Check("untouched", "without a plan, logits are bit-equal to plain transformers'", is_untouched)
        return Diagnosis(
            name=name,
            architecture=self.model.config.model_type,
            model_class=type(self.model).__name__,
            parameters=count_parameters(self.model),
            n_layers=self.n_layers,
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            width=runtime.state_width,
            stored_dtype="not said" if stored == "auto" else stored,
            dtype=_name(self.model.dtype),
            device=runtime.device.type,
            context=runtime.max_length,
            embeddings=self.model.get_input_embeddings().weight.shape[0],
            adapter=False,
            pooling=self.encoder.pooling,
            plan=self.encoder.attention.with_defaults(self.n_layers),
            reached=reached and all(obeyed),
            support=supported.verdict,
            reason=supported.reason,
            plans={plan: why is None for plan, why in supported.refusals.items()},
            recurrent={plan: why is None for plan, why in supported.both.items()},
            layers=self._layers(reached, maps, obeyed),
            even_fraction=even_fraction([len(text) for text in self.texts]),
            checks=(untouched, *self._padding(runtime), self._batches(runtime), *self._precision(runtime)),
            tokenizer=_tokenizer_facts(self.tokenizer),
            seconds=0.0,
        )

    def _probe(self) -> tuple[bool, list[LayerMap], list[bool]]:
        """Say whether the plan arrives at all, what each layer sees, and whether each does what the plan says."""
        try:
            reports = [probe(self.model, self.plan, padded=padded) for padded in (True, False)]
        except UnsupportedModelError:
            if self.plan.is_causal:
                # The model needs no plan for that.
                seen = probe(self.model, None).layers
                return True, list(seen), [layer.is_right for layer in seen]
            maps = [
                replace(layer, expected=visible(view, LENGTH, window=window_of(module))[0, 0])
                for layer, view, module in zip(
                    probe(self.model, None).layers, self.plan.views, self.layers, strict=True
                )
            ]
            return False, maps, [layer.is_right for layer in maps]
        obeyed = [all(layer.is_right for layer in pair) for pair in zip(*(r.layers for r in reports), strict=True)]
        return True, list(reports[0].layers), obeyed

    def _layers(self, reached: bool, maps: list[LayerMap], obeyed: list[bool]) -> tuple[LayerResult, ...]:
        ids = [text.ids for text in self.texts]
        try:
            before = mean_maps(self.model, ids, self.causal)
        except UnsupportedModelError:
            before = mean_maps(self.model, ids, None)
        after = None
        if reached:
            after = before if self.plan.is_causal else self._maps_under_plan(ids)
            after = [item for item in after if item.run == 0]
        hidden = max(view.hidden for view in self.plan.views)
        sinks = _by_layer(before)
        sinks_after = _by_layer(after or [])
        # A sink behind so many tokens as no example has cannot be seen.
        is_seen = 0 < hidden < min((len(item.taken) for item in after or ()), default=0)
        moved = _by_layer(after or [], hidden) if is_seen else {}
        return tuple(
            LayerResult(
                layer=layer,
                view=self._view(layer),
                converted=self.kinds[layer].changes(self.plan.views[layer]),
                hidden=self.plan.views[layer].hidden if self.kinds[layer].attends else 0,
                window=_size(window_of(self.layers[layer])),
                obeys=obeyed[layer],
                seen=_cells(maps[layer]),
                sink_before=sinks.get(layer),
                sink_after=sinks_after.get(layer),
                moved_sink=moved.get(layer),
            )
            for layer in range(self.n_layers)
        )

    def _maps_under_plan(self, ids: list[list[int]]) -> list[AttentionMap]:
        try:
            return mean_maps(self.model, ids, self.plan, adapter=self.adapter)
        except UnsupportedModelError:
            return []  # its attention keeps to itself what it looks at

    def _view(self, layer: int) -> str:
        """Say what a layer sees, a second run of it included."""
        view, stream = self.kinds[layer].named(self.plan.views[layer]), self.plan.stream
        if stream is None:
            return view
        if stream.kind == "parallel":
            twice = layer in stream.layers and self.kinds[layer].changes(stream.view)
            return f"{view}, and {self.kinds[layer].named(stream.view)} beside it" if twice else view
        if layer != self.n_layers - 1:
            return view
        if stream.kind == "extend":
            return f"{view}, then {stream.repeats} times {self.kinds[layer].named(stream.view)} on top"
        return f"{view}, joined by a tower of {len(stream.layers)} {stream.view} layers"

    def _padding(self, runtime: EncoderRuntime) -> list[Check]:
        """Compare texts in one padded batch, on either side, with the same texts alone."""
        texts = [replace(text, ids=text.ids[: 3 + 5 * row]) for row, text in enumerate(self.texts)]
        alone = [runtime.states([text])[0][0] for text in texts]
        own_side = self.tokenizer.padding_side
        checks = []
        for side in ("left", "right"):
            self.tokenizer.padding_side = side
            states, begin = runtime.states(texts)
            rows = zip(states, begin.tolist(), alone, strict=True)
            together = [row[start : start + len(single)] for row, start, single in rows]
            checks.append(self._near(f"padding_{side}", f"padding on the {side} changes no state", together, alone))
        self.tokenizer.padding_side = own_side
        return checks

    def _batches(self, runtime: EncoderRuntime) -> Check:
        """Compare texts of one length in a batch with the same texts alone."""
        length = min(len(text) for text in self.texts)
        texts = [replace(text, ids=text.ids[:length]) for text in self.texts]
        alone = [runtime.states([text])[0][0] for text in texts]
        return self._near("batch", "a batch gives what single texts do", list(runtime.states(texts)[0]), alone)

    def _near(self, name: str, what: str, actual: list[Tensor], expected: list[Tensor]) -> Check:
        limit = _NEAR.get(self.model.dtype, _NEAR_HALF)
        largest = max(float(item.abs().max()) for item in expected)
        apart = max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))
        value = apart / max(largest, 1e-30)
        # Not "value > limit": a state that is no number at all must not pass.
        return Check(name, what, value <= limit, value, limit)

    def _precision(self, runtime: EncoderRuntime) -> list[Check]:
        checks = []
        if self.model.dtype == torch.float32:
            value = bfloat16_cosine(runtime)
            what = "bfloat16 gives nearly the same vectors (cosine)"
            checks.append(Check("bfloat16", what, value >= ENOUGH, value, ENOUGH))
        return checks


def _size(near: Near) -> int | None:
    return near.size if isinstance(near, Chunk) else near


def _by_layer(maps: list[AttentionMap], token: int = 0) -> dict[int, float]:
    return {item.layer: fraction for item, fraction in zip(maps, sink_fraction(maps, token), strict=True)}


def _cells(layer: LayerMap) -> tuple[str, ...]:
    # What a strong sink drowns out on the way is no fault (see LayerMap.is_right).
    marks = {(True, True): "#", (True, False): "#" if layer.is_right else "o", (False, False): "."}
    rows = []
    for expected, moves, leaks in zip(layer.expected, layer.moves, layer.leaks, strict=True):
        cells = zip(expected.tolist(), moves.tolist(), leaks.tolist(), strict=True)
        rows.append("".join("x" if leak and not want else marks[want, want and move] for want, move, leak in cells))
    return tuple(rows)


def _tokenizer_facts(tokenizer: PreTrainedTokenizerBase) -> TokenizerFacts:
    ids = tokenizer("a word", add_special_tokens=True).input_ids
    text = EXAMPLE_TEXTS[0]
    back = tokenizer.decode(tokenizer(text, verbose=False).input_ids, skip_special_tokens=True)
    names = {name: getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
    return TokenizerFacts(
        kind=type(tokenizer).__name__,
        tokens=len(tokenizer),
        fast=bool(tokenizer.is_fast),
        padding_side=tokenizer.padding_side,
        **{name: None if token is None else str(token) for name, token in names.items()},
        adds_bos=tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        adds_eos=tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id,
        round_trip=back.strip() == text,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
