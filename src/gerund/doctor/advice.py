"""Plain sentences: what the results mean and what to do about them.

Knows: results. Does not know: models.
"""

from collections.abc import Callable

from gerund.doctor.results import SINK, Diagnosis, LayerResult, spans


def advise(found: Diagnosis) -> list[str]:
    """Return what a user ought to know or do, most important first."""
    advice = [*_reach(found), *_checks(found), *_sinks(found), *_tokenizer(found)]
    return advice or ["Nothing to do."]


def _reach(found: Diagnosis) -> list[str]:
    wrong = [layer.layer for layer in found.layers if not layer.obeys]
    if found.reached:
        disobeyed = [name for name, obeyed in found.plans.items() if not obeyed]
        return [f"The plans {', '.join(disobeyed)} do not reach every layer; take one of the others."] * bool(disobeyed)
    if not any(obeyed for name, obeyed in found.plans.items() if name not in ("causal", "echo")):
        return [
            f"No attention plan reaches this architecture ({found.architecture}): it would silently stay causal, so "
            "gerund refuses it. Only attention='causal' works (and 'echo', which is causal too); or take another "
            "architecture, such as llama, qwen, mistral, gemma, gpt2, gpt_neox, olmo, phi3, opt or granite."
        ]
    return [f"The plan {found.plan.name} does not reach {spans(wrong)} of this {found.architecture} model; "
            f"plans that do: {', '.join(name for name, obeyed in found.plans.items() if obeyed)}."]  # fmt: skip


def _checks(found: Diagnosis) -> list[str]:
    failed = {check.name for check in found.checks if not check.passed}
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


def _sinks(found: Diagnosis) -> list[str]:
    high = max(SINK, 2 * found.even_fraction)
    sinks = [layer for layer in found.layers if layer.sink_before >= high]
    if not sinks and not found.reached:
        return []
    if not sinks:
        strongest = max(layer.sink_before for layer in found.layers)
        return [
            f"No layer leans on the first token (at most {strongest:.0%}, where even attention would give it "
            f"{found.even_fraction:.0%}): there is no sink to hide, so a mask0 plan gains little over inplace-bidir."
        ]
    fraction = sum(layer.sink_before for layer in sinks) / len(sinks)
    one = len(sinks) == 1
    return [
        f"{_layers(sinks)} {'gives' if one else 'give'} {fraction:.0%} of {'its' if one else 'their'} attention to the "
        f"first token{_remedy(found, sinks, high)}"
    ]


def _remedy(found: Diagnosis, sinks: list[LayerResult], high: float) -> str:
    """Say what becomes of the sinks under the plan, as the end of a sentence."""
    name = found.plan.name
    # LBW, section 3.5, finding 4: hidden too early, the sink comes back at the next token.
    moved = [layer for layer in found.layers if layer.hidden and (layer.moved_sink or 0) >= high]
    left = [layer for layer in sinks if layer.converted and (layer.sink_after or 0) >= high]
    if not found.reached:
        return ", and no plan can hide it here."
    if name in ("causal", "echo"):
        return ": a mask0 plan will help."
    if name.startswith(("inter", "extra", "extend")):
        # An adapter was trained under its plan, and any other would be worse.
        other = "" if found.adapter else " Compare it with mask0-bidir."
        return f"; {name} leaves them as they are and adds layers that look elsewhere.{other}"
    if moved:
        return (
            f". Hiding it has moved the sink to the next token in {_layers(moved).lower()}: hide it in fewer layers, "
            "the upper ones (mask0-bidir with a smaller k)."
        )
    if left:
        still = "still does so" if len(left) == 1 else "still do so"
        return f", and {_layers(left).lower()} {still} under {name}: a mask0 plan will help."
    return f"; those that {name} converts do so no longer."


def _tokenizer(found: Diagnosis) -> list[str]:
    facts = found.tokenizer
    hides = any(layer.hidden for layer in found.layers)
    cases: list[tuple[bool, Callable[[], str]]] = [
        (
            facts.tokens > found.embeddings,
            lambda: (
                f"The tokenizer has {facts.tokens} tokens and the model embeds {found.embeddings}: texts with the "
                "others fail."
            ),
        ),
        (
            hides and not facts.adds_bos,
            lambda: "The tokenizer puts no beginning token before a text, so what the plan hides is the first word.",
        ),
        (
            found.pooling == "last" and not facts.adds_eos,
            lambda: "Pooling is last and the tokenizer adds no end token: append_eos gives every text the same one.",
        ),
        (facts.pad is None, lambda: "There is no padding token; none is needed, since padding is never looked at."),
        (facts.eos is None, lambda: "There is no end token: the model writes until max_new_tokens."),
        (not facts.fast, lambda: "The tokenizer is a slow one: prompts and words need a tokenizer.json."),
        (not facts.round_trip, lambda: "The tokenizer does not give a text back as it was: writing may look odd."),
        (found.context is None, lambda: "Nothing says how long a text may be: set max_length."),
    ]
    return [sentence() for applies, sentence in cases if applies]


def _layers(layers: list[LayerResult]) -> str:
    return spans([layer.layer for layer in layers]).capitalize()
