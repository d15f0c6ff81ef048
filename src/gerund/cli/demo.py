"""``gerund demo``: see one set of weights search and write."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gerund.demo import Demo, Found, Proof

PROMPT = "The ship left the harbour early in the morning, and"


def command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the picture and the report.")] = Path(
        "demo-output"
    ),
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A folder or hub id; left out, the embedded default.", show_default=False),
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to continue.")] = PROMPT,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON and nothing else.")] = False,
) -> None:
    """Search a small collection, then write, with the same weights; on texts that come with gerund.

    The folder receives demo.png, which shows the documents before and after the conversion, and demo.json.

    For example:

        gerund demo

        gerund demo -m path/to/a/model -o demo-output --prompt "Once upon a time"
    """
    from rich.console import Console

    from gerund.errors import TextError

    if not prompt.strip():
        raise TextError("the prompt is empty; give some words to continue")
    # Piped, the lines are as long as they are, so that whoever reads them can cut them.
    console = Console(highlight=False, markup=False, emoji=False, quiet=as_json)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, quiet=as_json, width=200)
    report = _run(console, model, output, prompt, device)
    if as_json:
        import json

        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))


def _run(console: "Console", model: str | None, output: Path, prompt: str, device: str) -> dict[str, Any]:
    import time

    with _waiting(console, "loading"):
        start = time.perf_counter()
        from gerund import demo as work
        from gerund.errors import MissingDependencyError

        demo = work.Demo(model, device)
        demo.seconds["import torch and transformers"] = time.perf_counter() - start
        lm = demo.start()
    work.make_folder(output)
    parameters = sum(parameter.numel() for parameter in lm.model.parameters())
    kind = f"{lm.model.config.model_type}, {lm.n_layers} layers, {parameters / 1e6:.1f} million parameters"
    console.print(f"Loaded {lm.name} ({kind})", style="bold")
    console.print(f"Encoding plan {lm.encoder.attention.name}, proven layer by layer; vectors of {lm.dimensions}\n")
    with _waiting(console, "embedding"):
        found, baseline = demo.search(), demo.baseline()
    _print_searches(console, demo, found, baseline)
    with _waiting(console, "writing"):
        written = demo.write(prompt)
    console.print("The same weights go on writing", style="bold")
    console.print(f"  {prompt}", style="dim", end="")
    console.print(f"{written.text}\n")
    with _waiting(console, "comparing"):
        proof = demo.prove(prompt)
    _print_proof(console, proof)
    try:
        demo.draw(found, baseline, output / work.PICTURE)
        picture = f"Picture: {output / work.PICTURE}"
    except MissingDependencyError as error:
        picture = f"No picture: {error}"
    report = work.report(demo, found, baseline, written, proof)
    work.write_report(output, report)
    _print_times(console, demo)
    console.print(picture)
    console.print(f"Report:  {output / work.REPORT}")
    return report


def _waiting(console: "Console", what: str) -> Any:
    """Show that something is going on, on a terminal only."""
    from contextlib import nullcontext

    return console.status(f"{what} ...") if console.is_terminal and not console.quiet else nullcontext()


def _print_searches(console: "Console", demo: "Demo", found: "Found", baseline: "Found") -> None:
    from rich.text import Text

    topics = len({item.topic for item in demo.documents})
    console.print(f"Searches in {len(demo.documents)} documents on {topics} topics", style="bold")
    width = max(40, console.width - 14)
    for query, hits in zip(demo.queries, found.answers, strict=True):
        console.print(f"  {query.text}", style="cyan")
        for hit in hits:
            text = hit.text if len(hit.text) <= width else hit.text[: width - 3].rstrip() + "..."
            mark = Text("+", "green") if hit.right else Text("-", "red")
            console.print(Text(f"    {hit.score:.3f} ") + mark + Text(f" {text}"), overflow="ellipsis", no_wrap=True)
    console.print("\n  right topic (+)       among the answers   among a document's 3 nearest")
    for item in (baseline, found):
        console.print(f"  {item.plan:<22}{item.right:>17.0%}{item.neighbours:>31.0%}")
    documents = len(demo.documents)
    others = (documents / topics - 1) / (documents - 1)
    console.print(f"  {'(by chance)':<22}{1 / topics:>17.0%}{others:>31.0%}\n")


def _print_proof(console: "Console", proof: "Proof") -> None:
    console.print("And it is still the same language model", style="bold")
    if proof.is_equal:
        outcome = (
            f"{proof.numbers:,} logits at {proof.tokens} positions are bit-equal to those of the unconverted model"
        )
        console.print(f"  {outcome}; greedy decoding writes the same text\n", style="green")
    else:
        outcome = (
            f"largest difference of {proof.numbers:,} logits: {proof.difference:.2e}; same text: {proof.same_text}"
        )
        console.print(f"  NOT EQUAL to the unconverted model: {outcome}\n", style="red")


def _print_times(console: "Console", demo: "Demo") -> None:
    console.print("Where the time went", style="bold")
    total = sum(demo.seconds.values())
    for step, seconds in [*demo.seconds.items(), ("together", total)]:
        console.print(f"  {step:<34}{seconds:>7.2f} s{seconds / total:>7.0%}")
    console.print()
