"""``gerund ask``: answer a question out of an index."""

from typing import TYPE_CHECKING, Annotated

import typer

from gerund.cli import index_options, streams
from gerund.cli import model_options as options

if TYPE_CHECKING:
    from gerund.spec import ModelSpec
    from gerund.types import Answer


@options.with_spec("model", *options.MACHINE, helps=index_options.HELPS)
def command(
    where: index_options.Place,
    question: Annotated[str, typer.Argument(help="What is asked; - for standard input.", show_default=False)],
    *,
    spec: "ModelSpec",
    extractive: Annotated[
        bool,
        typer.Option(
            "--extractive",
            help="Answer by the best sentence of the documents, as it stands there: the only way so far.",
        ),
    ] = True,
    k: Annotated[int, typer.Option("--k", "-k", help="How many chunks are looked through.")] = 8,
    filter: index_options.Filter = None,
    weight: index_options.Weight = None,
    sources: Annotated[bool, typer.Option("--sources", help="Show all chunks that were looked through.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer with its sources as a JSON object.")
    ] = False,
) -> None:
    """Answer a question by the sentence of an index's documents that fits it best, with its source.

    The sentence is quoted as it stands in its document; nothing is written by the model. Where nothing in the index is
    about the question, the answer says so, and the exit status is 1.

    For example:

        gerund ask my.index "When was the first railway opened?"

        gerund ask my.index "What makes bread rise?" --sources --json
    """
    del extractive  # there is no other way yet
    [rows] = streams.one_text(question, "question")
    index = index_options.open_existing(where, spec)
    answer = index.ask(rows.texts[0], k, filter=filter, weight=weight)
    if as_json:
        import json

        typer.echo(json.dumps(answer.to_dict(), ensure_ascii=False))
    else:
        _print(answer, every=sources)
    if not answer.found:
        raise typer.Exit(1)


def _print(answer: "Answer", *, every: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    cited = "".join(f" [{number}]" for number in answer.cited)
    console.print(Text(f"{answer.text}{cited}"))
    shown = [one for one in answer.sources if every or one.number in answer.cited]
    if shown:
        console.print()
    for one in shown:
        line = Text(f"[{one.number}] ").append(f"{one.source}:{one.start}-{one.end}", style="cyan")
        console.print(line.append(f"  {one.heading or one.title}", style="dim"))
        if every:
            console.print(Text("    ").append_text(index_options.highlighted(one.text, answer.question)))
