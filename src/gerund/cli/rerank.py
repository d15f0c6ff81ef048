"""``gerund rerank``: rank documents by relevance to a query, on the terminal or for many queries in a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options, text_io
from gerund.errors import ConfigError, TextError
from gerund.settings.model_spec import ModelSpec
from gerund.types import RerankCost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gerund.language_model import LanguageModel

# A query, its documents, where they stood, and the documents' scores in a first stage.
Asked = tuple[str, list[str], str, Any]


@options.takes(
    spec=options.model(
        "model", *options.PLAN, "pooling", "prompt", "max_length", "adapter", "reranker", *options.MACHINE
    )
)
def command(
    query: Annotated[str | None, typer.Argument(help="Search query.")] = None,
    documents: Annotated[list[str] | None, typer.Argument(help="The documents, each as one argument.")] = None,
    *,
    spec: "ModelSpec",
    by: Annotated[
        str | None,
        typer.Option(
            help="lift (how much likelier the document makes the query), mixed, likelihood (of the query after the "
            "document), maxsim (late interaction of token vectors), vectors, model (a reranker, or the model's own "
            "scorer), or for large models yesno, listwise or attention. "
            "[default: model for a reranker, maxsim where token vectors were trained, lift for a language "
            "model, vectors for one that was trained to embed]"
        ),
    ] = None,
    scores: Annotated[
        str | None,
        typer.Option(
            help="Scores of the documents in a first stage, such as BM25's, with commas; in a file each line has its "
            "own, under scores. They count beside the measure, which alone ranks worse."
        ),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(help="Weight of the measure beside the scores, 0 to 1. [default: the tuned one, else 0.5]"),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Read only this many documents, the best by their scores. [default: 100]")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds per query after which no further document is read.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Keep only this many documents, the most relevant.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help='Many queries: a .jsonl file whose lines have "query", "documents", a list, and '
            '"scores", if there are any.',
        ),
    ] = None,
    output: options.Lines = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Order documents by how relevant they are to a query.

    For one query its documents are listed with their scores, the most relevant first. With --file, --json or -o, prints
    one JSON object per query: query, indices (of the documents, counted from 0, the most relevant first), scores, read,
    the number of documents that the depth and the deadline left to be read (those after them keep the order of their
    first scores), and seconds, how long reading them took.

    For example:

        gerund rerank "how to bake bread" "Trains run on rails." "Bread is baked of flour." --by likelihood

        gerund rerank "how to bake bread" "Trains run on rails." "Bread is baked of flour." --scores 0.5,3.25

        gerund rerank "how to bake bread" "Trains run on rails." "Bread is baked of flour." -m ./Qwen3-Reranker-0.6B

        gerund rerank --file queries.jsonl -m ./model --top-k 10 -o ranked.jsonl
    """
    from gerund.scoring.names import check_first_stage, check_relevance
    from gerund.settings.ranking import BASE_MEASURES

    text_io.refuse_existing(output, force=force)
    asked = text_io.one_or_file(query, documents or [], file, ("query", "documents"), "scores")
    if scores is not None:
        asked = [
            (query_text, texts, where, _numbers(scores) if first is None else first)
            for query_text, texts, where, first in asked
        ]
    stage: dict[str, Any] = {"weight": weight, "depth": depth, "deadline": deadline}
    for query_text, texts, where, first in asked:
        _checked(where, lambda query_text=query_text, texts=texts: check_relevance(query_text, texts, top_k, by))
        _checked(where, lambda texts=texts, first=first: check_first_stage(first, len(texts), *stage.values()))
    from gerund.entry import load
    from gerund.models.light_runtime import for_many_texts

    # Measures of the base model need no plan but the causal one, which every architecture has.
    lm = load(for_many_texts(ModelSpec.of(spec, attention="causal") if by in BASE_MEASURES else spec))
    records = _ranked(lm, asked, {"top_k": top_k, "by": by, **stage})
    if lm.reranker is None and any(first is None for *_, first in asked):
        text_io.tell(f"ranked by {by or lm.default_measure()} alone; with --scores of a first stage it ranks better")
    if file is None and output is None and not as_json:
        [(_, texts, _, _)] = asked
        record = next(records)
        for index, score in zip(record["indices"], record["scores"], strict=True):
            typer.echo(f"{score:10.4f}  {texts[index].strip()}")
        if record["seconds"] is not None:
            text_io.tell(str(RerankCost(record["by"], len(texts), record["read"], record["seconds"])))
        return
    text_io.write(text_io.as_lines(records), output, len(asked), "ranking")


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--scores are numbers with commas, such as 0.5,3.25, not {text!r}") from None


def _checked(where: str, check: Any) -> Any:
    try:
        return check()
    except (ConfigError, TextError) as error:
        raise type(error)(f"{where}: {error}" if where else str(error)) from error


def _ranked(lm: "LanguageModel", asked: list[Asked], how: dict[str, Any]) -> "Iterator[dict[str, Any]]":
    for query, texts, where, first in asked:
        ranking = _checked(
            where, lambda query=query, texts=texts, first=first: lm.rerank(query, texts, scores=first, **how)
        )
        yield {
            "query": query,
            "indices": ranking.indices,
            "scores": [round(score, 6) for score in ranking.scores],
            "by": ranking.by,
            "read": ranking.read,
            "seconds": None if ranking.seconds is None else round(ranking.seconds, 3),
        }
