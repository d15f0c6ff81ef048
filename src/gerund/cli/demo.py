"""``gerund demo``: search, generate, rank and infill with one model, and write a page with the results."""

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options
from gerund.errors import TextError

if TYPE_CHECKING:
    from rich.console import Console

    from gerund.demo import Demo, DemoResults, SearchResults, Verification
    from gerund.settings.model_spec import ModelSpec


@options.takes(spec=options.model("model", "device"))
def command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the page and the report.")] = Path(
        "demo-output"
    ),
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Prompt to continue, in addition to the bundled ones.")
    ] = None,
    *,
    spec: "ModelSpec",
    as_json: options.Json = False,
) -> None:
    """Search, generate, rank and infill with the same weights, on bundled texts.

    The folder receives demo.html, one page that shows all of it, and demo.json.

    For example:

        gerund demo

        gerund demo -m path/to/a/model -o demo-output --prompt "Once upon a time"
    """
    from rich.console import Console

    if prompt is not None and not prompt.strip():
        raise TextError("the prompt is empty; give some words to continue")
    # Piped, the lines are as long as they are, so that the reader can cut them.
    console = Console(highlight=False, markup=False, emoji=False, quiet=as_json)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, quiet=as_json, width=200)
    report = _run(console, spec, output, prompt)
    if as_json:
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))


def _run(console: "Console", spec: "ModelSpec", output: Path, prompt: str | None) -> dict[str, Any]:
    with _waiting(console, "loading"):
        start = time.perf_counter()
        from gerund.demo import Demo, gallery, report_of, write_page, write_report
        from gerund.jobs.files import make_folder, require_new_folder

        demo = Demo(spec)
        demo.seconds["import torch and transformers"] = time.perf_counter() - start
        lm = demo.start()
    require_new_folder(output, overwrite=True)
    make_folder(output)
    console.print(f"Loaded {lm.name} ({demo.kind})", style="bold")
    console.print(f"Encoding plan {demo.reads_as}, verified layer by layer; vectors of {lm.dimensions}\n")
    results = _find(console, demo, prompt)
    with _waiting(console, "drawing"):
        inspected = demo.inspect_attention()
        with demo.timed("draw the pictures"):
            pictures = gallery(demo.vectors, demo.topics, inspected, lm.encoder.attention)
    html = write_page(output, demo, results, pictures)
    report = report_of(demo, results)
    path = write_report(output, report)
    for sentence in (*demo.missing, *pictures.missing):
        console.print(sentence)
    console.print("Where the time went", style="bold")
    total = sum(demo.seconds.values())
    for step, seconds in [*demo.seconds.items(), ("together", total)]:
        console.print(f"  {step:<34}{seconds:>7.2f} s{seconds / total:>7.0%}")
    console.print()
    console.print(f"Page:    {html}")
    console.print(f"Report:  {path}")
    return report


def _find(console: "Console", demo: "Demo", prompt: str | None) -> "DemoResults":
    from gerund.demo import LIKELIHOOD, DemoResults

    with _waiting(console, "embedding"):
        searches = demo.search()
    _print_searches(console, demo, searches)
    prompts = demo.prompts(prompt)
    with _waiting(console, "generating"):
        written, fitting = demo.write(prompts), demo.choose()
        likely = sum(item.is_right for item in demo.choose(LIKELIHOOD))
        filled = demo.fill()
        verification = demo.verify(prompts[0])
    results = DemoResults(searches, written, demo.scorer, fitting, likely, filled, verification)
    _print_writing(console, results)
    _print_verification(console, verification)
    return results


def _waiting(console: "Console", what: str) -> Any:
    """Show that something is going on, on a terminal only."""
    return console.status(f"{what} ...") if console.is_terminal and not console.quiet else nullcontext()


def _print_searches(console: "Console", demo: "Demo", searches: "tuple[SearchResults, ...]") -> None:
    from rich.text import Text

    console.print(
        f"{len(demo.queries)} searches in {len(demo.documents)} documents, in other words than theirs", style="bold"
    )
    width = max(40, console.width - 8)
    # One search of each topic, the one that gains most.
    gains = [first - last for first, last in zip(searches[0].ranks, searches[-1].ranks, strict=True)]
    best = {demo.queries[number].answer.topic: number for number in sorted(range(len(gains)), key=gains.__getitem__)}
    for number in sorted(best.values()):
        query = demo.queries[number]
        console.print(f"  {query.text}", style="cyan")
        console.print(Text(f"    {_line(query.answer.text)[:width]}"), overflow="ellipsis", no_wrap=True)
        places = ", ".join(f"{item.plan} {item.ranks[number]}" for item in searches)
        console.print(f"    place: {places}", style="dim")
    console.print("\n  the document is       found first      place, mean")
    for item in searches:
        console.print(f"  {item.plan:<22}{item.right:>4} of {len(demo.queries)}{item.place:>15.1f}")
    console.print()


def _print_writing(console: "Console", results: "DemoResults") -> None:
    first = results.written[0]
    console.print("The same weights continue texts", style="bold")
    console.print(f"  {first.prompt}", style="dim")
    console.print(f"    once             {_line(first.plain)}")
    if first.ranked:
        best, worst = first.ranked[0], first.ranked[-1]
        console.print(f"    the best of {len(first.ranked):<4} {_line(best.text)}  ({best.score:.3f})")
        console.print(f"    the last of them {_line(worst.text)}  ({worst.score:.3f})")
    console.print()
    right = sum(item.is_right for item in results.fitting)
    console.print(f"They know what fits ({results.scorer})", style="bold")
    console.print(
        f"  {right} of {len(results.fitting)} beginnings: the sentence that follows scored above three others; by "
        f"likelihood alone {results.likely}\n"
    )
    if results.filled:
        console.print("They infill spans, using both sides", style="bold")
        for item in results.filled:
            console.print(f"  {item.before}", style="dim", end="")
            console.print(item.span, style="cyan", end="")
            console.print(item.after, style="dim")
        console.print()


def _line(text: str) -> str:
    return " ".join(text.split())


def _print_verification(console: "Console", verification: "Verification") -> None:
    console.print("And it is still the same language model", style="bold")
    if verification.is_equal:
        outcome = (
            f"{verification.numbers:,} logits at {verification.tokens} positions are bit-equal to those of the "
            "unconverted model"
        )
        console.print(f"  {outcome}; greedy decoding generates the same text\n", style="green")
    else:
        outcome = (
            f"largest difference of {verification.numbers:,} logits: {verification.difference:.2e}; "
            f"same text: {verification.same_text}"
        )
        console.print(f"  NOT EQUAL to the unconverted model: {outcome}\n", style="red")
