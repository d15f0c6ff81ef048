"""``gerund doctor``: examine a model: attention plans that work, attention sinks, numerical checks, tokenizer."""

import io
import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import typer

from gerund.cli import options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from gerund.doctor import Check, Diagnosis, LayerResult
    from gerund.settings.model_spec import ModelSpec

_BAR = 24


@options.takes(spec=options.model("MODEL", *options.PLAN, *options.TORCH, MODEL=options.DEFAULT_MODEL, dtype="float32"))
def command(*, spec: "ModelSpec", as_json: options.Json = False) -> None:
    """Examine a model: does the attention plan reach every layer, where are its sinks, what can be done.

    The probe changes one token at a time before every layer and checks which other tokens change; the pictures show
    what it measured. The exit status is 0 when the model could be examined, whatever was found (healthy says it in
    the JSON), and 2 when it could not be loaded or is no decoder-only language model.

    For example:

        gerund doctor ./model

        gerund doctor ./model --attention mask0+bidir --k 18 --k0 10

        gerund doctor ./model --json > diagnosis.json
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    waiting: Any = console.status("examining ...") if console.is_terminal and not as_json else nullcontext()
    with waiting:
        from gerund.doctor import diagnose

        diagnosis = diagnose(spec)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2, ensure_ascii=False))
        return
    if console.is_terminal:
        _print(console, diagnosis)
        return
    # Piped: as wide as it likes, without colours and without the spaces that rich fills its lines with.
    encoding = console.encoding
    plain = Console(
        highlight=False, markup=False, emoji=False, width=120, file=io.TextIOWrapper(io.BytesIO(), encoding)
    )
    with plain.capture() as captured:
        _print(plain, diagnosis)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _print(console: "Console", diagnosis: "Diagnosis") -> None:
    for part in (_print_model, _print_plan, _print_sinks, _print_checks, _print_tokenizer, _print_advice):
        part(console, diagnosis)


def _print_model(console: "Console", diagnosis: "Diagnosis") -> None:
    healthy, reached = diagnosis.healthy, diagnosis.reached
    verdict, style = ("healthy", "bold green") if healthy else ("needs care", "bold yellow")
    if not reached:
        verdict, style = "this plan does not work", "bold red"
    console.print(f"{diagnosis.name}: ", style="bold", end="")
    console.print(verdict, style=style)
    heads = f"{diagnosis.heads} heads" + (
        f" ({diagnosis.kv_heads} for keys)" if diagnosis.kv_heads != diagnosis.heads else ""
    )
    context = "unknown" if diagnosis.context is None else f"{diagnosis.context:,} tokens"
    console.print(f"  {diagnosis.architecture} ({diagnosis.model_class}), {diagnosis.parameters:,} parameters")
    console.print(f"  {diagnosis.n_layers} layers, {heads}, width {diagnosis.width}, context {context}")
    adapter = ", with its adapter while encoding" if diagnosis.adapter else ""
    console.print(f"  stored as {diagnosis.stored_dtype}, examined in {diagnosis.dtype} on {diagnosis.device}{adapter}")
    if diagnosis.reranker:
        console.print("  a reranker: it scores a query and a document together (gerund rerank), and gives no vectors")
    if diagnosis.settings_from:
        prompts = f", prompts {', '.join(diagnosis.prompts)}" if diagnosis.prompts else ""
        console.print(f"  read as {diagnosis.settings_from} says{prompts}")
    if diagnosis.adapter_computation:
        console.print(f"  {diagnosis.adapter_computation}")
    console.print()


def _print_plan(console: "Console", diagnosis: "Diagnosis") -> None:
    from rich.columns import Columns
    from rich.padding import Padding
    from rich.text import Text

    numbers = [
        f"{name}={value}" for name, value in (("k", diagnosis.plan.k), ("k0", diagnosis.plan.k0)) if value is not None
    ]
    wrong = sum(not layer.obeys for layer in diagnosis.layers)
    outcome = "every layer obeys" if diagnosis.reached else f"{wrong} of {diagnosis.n_layers} layers do not obey"
    console.print(
        f"Plan {' '.join([diagnosis.plan.name, *numbers])}, {diagnosis.pooling} pooling: ", style="bold", end=""
    )
    console.print(outcome, style="green" if diagnosis.reached else "bold red")
    pictures = []
    for layers in _alike(diagnosis):
        first = layers[0]
        title = Text(_name(layers), style="bold" if first.obeys else "bold red")
        window = f", window {first.window}" if first.window else ""
        pictures.append(Text("\n").join([title, Text(first.view + window), *_picture(console, first)]))
    console.print(Columns([Padding(picture, (0, 0, 0, 2)) for picture in pictures], padding=(1, 4)))
    legend = "row: the token that looks; column: what it was measured to see"
    if any(mark in row for layer in diagnosis.layers for row in layer.seen for mark in "xo"):
        legend += "; x: sees what it must not; o: does not see what it should"
    console.print(f"\n  {legend}", style="dim")
    obeyed = [name for name, obeys in diagnosis.plans.items() if obeys]
    both = diagnosis.only_both_ways
    others = [name for name, obeys in diagnosis.plans.items() if not obeys and name not in both]
    from gerund.doctor import MEANINGS

    console.print(f"  {diagnosis.architecture}: {MEANINGS[diagnosis.support]}")
    if both:
        console.print(f"  plans that work with recurrent='both' only: {', '.join(both)}")
    elif not others:
        console.print(f"  all {len(obeyed)} plans work on this model\n", style="dim")
        return
    console.print(f"  plans that work: {', '.join(obeyed)}")
    if others:
        console.print(f"  plans that do not: {', '.join(others)}", style="red")
    console.print(f"  because {diagnosis.reason}\n" if others else "", style="dim")


def _alike(diagnosis: "Diagnosis") -> "list[list[LayerResult]]":
    """Put layers together that look the same."""
    groups: dict[tuple[Any, ...], list[LayerResult]] = {}
    for layer in diagnosis.layers:
        groups.setdefault((layer.view, layer.window, layer.seen, layer.obeys), []).append(layer)
    return list(groups.values())


def _name(layers: "list[LayerResult]") -> str:
    from gerund.doctor import spans

    name = spans([layer.layer for layer in layers])
    return name if len(name) <= 40 else f"{len(layers)} layers, {layers[0].layer} to {layers[-1].layer}"


def _picture(console: "Console", layer: "LayerResult") -> "list[Text]":
    from rich.text import Text

    marks = {"#": "■", ".": "·"} if _draws(console) else {}
    styles = {"#": "magenta", ".": "dim", "x": "bold red", "o": "bold red"}
    return [Text(" ").join(Text(marks.get(cell, cell), style=styles[cell]) for cell in row) for row in layer.seen]


def _draws(console: "Console") -> bool:
    """Whether characters beyond ASCII arrive."""
    return "utf" in (console.encoding or "").lower()


def _print_sinks(console: "Console", diagnosis: "Diagnosis") -> None:
    from rich.table import Table
    from rich.text import Text

    console.print("Attention to the first token ", style="bold", end="")
    console.print(f"(the sink; even attention would give it {diagnosis.even_fraction:.0%})")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("  layer", "before", "after"):
        table.add_column(title, justify="right" if title == "  layer" else "left", no_wrap=True)
    for layer in diagnosis.layers:
        fractions = ((layer.sink_before, "yellow"), (layer.sink_after, "magenta"))
        bars = [Text("-") if fraction is None else _bar(console, fraction, style) for fraction, style in fractions]
        table.add_row(f"  {layer.layer}", *bars)
    console.print(table)
    console.print()


def _bar(console: "Console", fraction: float, style: str) -> "Text":
    from rich.text import Text

    if _draws(console):
        eighths = round(fraction * _BAR * 8)
        bar = "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
    else:
        bar = "#" * round(fraction * _BAR)
    return Text(f"{fraction:4.0%} ") + Text(f"{bar:<{_BAR}}", style=style)


def _print_checks(console: "Console", diagnosis: "Diagnosis") -> None:
    from rich.text import Text

    console.print("Tried out", style="bold")
    for check in diagnosis.checks:
        mark = Text("ok  ", "green") if check.passed else Text("NOT ", "bold red")
        console.print(Text("  ") + mark + Text(check.what) + Text(_measured(check), "dim"), soft_wrap=True)
    console.print()


def _measured(check: "Check") -> str:
    from gerund.doctor import COARSE

    if check.value is None:
        return ""
    if check.name in COARSE:
        return f": {check.value:.5f}"
    return f": largest difference {check.value:.1e} of the largest value"


def _print_tokenizer(console: "Console", diagnosis: "Diagnosis") -> None:
    facts = diagnosis.tokenizer
    console.print("Tokenizer", style="bold")
    added = [name for name, adds in (("beginning", facts.adds_bos), ("end", facts.adds_eos)) if adds]
    console.print(f"  {facts.tokens:,} tokens ({diagnosis.embeddings:,} embedded), {'fast' if facts.fast else 'slow'}, "
                  f"pads on the {facts.padding_side}", soft_wrap=True)  # fmt: skip
    named = [("beginning", facts.bos), ("end", facts.eos), ("padding", facts.pad), ("unknown", facts.unk)]
    console.print("  " + ", ".join(f"{name} {token or 'none'}" for name, token in named), soft_wrap=True)
    console.print(f"  adds to a text: {' and '.join(added) if added else 'nothing'}\n")


def _print_advice(console: "Console", diagnosis: "Diagnosis") -> None:
    from rich.padding import Padding

    console.print("Advice", style="bold")
    for sentence in diagnosis.advice:
        console.print(Padding(f"- {sentence}", (0, 0, 0, 2)))
    console.print(f"\nexamined in {diagnosis.seconds:.1f} s", style="dim")
