"""``gerund adapt``: train a model's encoder on the user's own documents, and say whether it helped."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gerund.cli import options
from gerund.cli.text_io import tell
from gerund.errors import ConfigError, DataError

if TYPE_CHECKING:
    from gerund.adaptation.config import AdaptConfig
    from gerund.adaptation.evaluation import Adapted
    from gerund.retrieval.document_reader import ReadLimits
    from gerund.settings.model_spec import ModelSpec


@options.takes(
    spec=options.model(
        "MODEL",
        *options.TORCH,
        MODEL=options.DEFAULT_MODEL,
        helps={
            "dtype": "auto, float32, bfloat16 or float16, to measure in.",
            "device": "auto, cpu, cuda, cuda:1, ..., to make pairs and measure on; training takes a GPU if there is "
            "one.",
        },
    ),
    limits=options.read_limits(),
)
def command(
    texts: Annotated[
        list[Path],
        typer.Option(
            "--texts",
            help="Files and folders of documents: .txt, .md, .html, .docx, .epub, .pdf, .jsonl, .csv, .tsv, .parquet; "
            "may be repeated.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder for the model and the report.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Longest training time; 10, or with --recipe the recipe's own steps.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Train for this many steps, however long they take.")] = None,
    held_out: Annotated[
        float, typer.Option(help="Fraction of the documents held out to measure on: 30 to 500 of them.")
    ] = 0.2,
    questions: Annotated[
        Path | None,
        typer.Option(
            help="Measure on the questions of this .jsonl file (question, source), not on titles and first sentences."
        ),
    ] = None,
    ask: Annotated[
        str,
        typer.Option(
            help="What documents are asked by: titles (first sentences where there is none), or sentences alone."
        ),
    ] = "titles",
    write_questions: Annotated[
        bool,
        typer.Option(
            "--write-questions",
            help="Let the model write questions to the documents, and train on those that find their document.",
        ),
    ] = False,
    reranker: Annotated[
        bool,
        typer.Option(
            "--reranker",
            help="Train a reranker too, for as long as the encoder, and measure it as the second stage of a search.",
        ),
    ] = False,
    recipe: Annotated[
        str | None, typer.Option(help="Another recipe than gur-adapt: a YAML file, or a bundled one.")
    ] = None,
    *,
    spec: "ModelSpec",
    language: Annotated[str, typer.Option(help="Language of the documents: en, zh, de, ...")] = "en",
    seed: Annotated[int, typer.Option(help="Random seed of the held-out documents and of the training.")] = 0,
    limits: "ReadLimits",
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted run from what it left in OUT.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only say what would be trained, for how long, and in how much memory: a few steps are timed.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Train a model on your own documents, and measure whether it finds them better.

    Some of the documents are held out and never trained on. Pairs are made from the other documents, as gerund mine
    makes them, and from titles or first sentences with chunks. An adapter is trained on the pairs for as many steps
    as the time allows. Before and after it, all documents are searched for those that were held out: by words
    (BM25), by vectors, and by both, as gerund search does. OUT receives the model, report.html and report.json. What
    the model generates stays what it was, bit for bit.

    An interrupted run continues with --resume.

    For example:

        gerund adapt --texts notes/ -o adapted --dry-run

        gerund adapt --texts notes/ --texts papers/ -o adapted --minutes 20

        gerund adapt smollm2 --texts notes/ -o adapted --write-questions --reranker

        gerund adapt ./model --texts articles.jsonl --questions questions.jsonl -o adapted
    """
    from gerund.adaptation.config import AdaptConfig

    if output is None and not dry_run:
        raise ConfigError("name the folder for the model and the report: -o OUT")
    config = AdaptConfig(
        held_out=held_out,
        questions=questions,
        ask=ask,
        write_questions=write_questions,
        reranker=reranker,
        recipe=recipe,
        minutes=minutes,
        steps=steps,
        language=language,
        seed=seed,
    )
    _demand_files(texts, output, config)
    from gerund.adaptation.running import adapt, plan

    if dry_run:
        choice = plan(spec, texts, config, say=tell, limits=limits)
        if as_json:
            typer.echo(choice.to_json())
        return
    assert output is not None
    done = adapt(spec, texts, output, config, resume=resume, say=tell, limits=limits)
    _tell(done, texts, as_json=as_json)


def _demand_files(texts: list[Path], output: Path | None, config: "AdaptConfig") -> None:
    """Look for all files that are named: what is wrong is told at once."""
    from gerund.adaptation.data import files_of
    from gerund.training.recipe import find_recipe

    files_of(texts, output)
    named = [config.questions, None if config.recipe is None else find_recipe(config.recipe)]
    for file in named:
        if file is not None and not Path(file).is_file():
            raise DataError(f"{file}: no such file")


def _tell(done: "Adapted", texts: list[Path], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(done.to_dict(), ensure_ascii=False, default=str))
        return
    from gerund.adaptation.evaluation import main_of, rows_of

    rows = [
        ("", "", "before", "after", "change"),
        *((r.name, r.measure, r.before, r.after, r.change) for r in rows_of(done.compared)),
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(5)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    typer.echo(f"\n{done.verdict}\n{done.beside_words}")
    for sentence in (*done.second_stage, *done.advice):
        typer.echo(sentence)
    following = "Next" if main_of(done.compared, "vectors").outcome == "helped" else "To try it all the same"
    typer.echo(f"\nReport: {done.page}\nModel:  {done.encoder}\n{following}:")
    for line in done.next_commands(texts):
        typer.echo(f"  {line}")
