"""``gerund rerank``: which documents are relevant to a query, on the terminal or for many queries in a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options, text_io
from gerund.errors import TextError
from gerund.settings.model_spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gerund.language_model import LanguageModel

# A query, its documents, and where they stood.
Asked = tuple[str, list[str], str]


@options.takes(spec=options.model("model", *options.PLAN, "pooling", "max_length", "adapter", *options.MACHINE))
def command(
    query: Annotated[str | None, typer.Argument(help="Search query.")] = None,
    documents: Annotated[list[str] | None, typer.Argument(help="The documents, each as one argument.")] = None,
    *,
    spec: "ModelSpec",
    by: Annotated[
        str | None,
        typer.Option(
            help="vectors, model (the model's own scorer) or likelihood (of the query after the document). "
            "[default: vectors]"
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Keep only this many documents, the most relevant.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help='Many queries: a .jsonl file whose lines have "query" and "documents", a list.'
        ),
    ] = None,
    output: options.Lines = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Order documents by how relevant they are to a query.

    For one query its documents are listed with their scores, the most relevant first. With --file, --json or -o, prints
    one JSON object per query: query, indices (of the documents, counted from 0, the most relevant first) and scores.

    For example:

        gerund rerank "how to bake bread" "Trains run on rails." "Bread is baked of flour." --by likelihood

        gerund rerank --file queries.jsonl -m ./model --top-k 10 -o ranked.jsonl
    """
    from gerund.scoring.names import check_relevance

    text_io.refuse_existing(output, force=force)
    asked = text_io.one_or_file(query, documents or [], file, ("query", "documents"))
    for one, texts, where in asked:
        _checked(where, lambda one=one, texts=texts: check_relevance(one, texts, top_k, by))
    from gerund.entry import load

    # Likelihoods are those of the untouched model, whose plan is causal, which every architecture has.
    lm = load(ModelSpec.of(spec, attention="causal") if by == "likelihood" else spec)
    found = _ranked(lm, asked, top_k, by)
    if file is None and output is None and not as_json:
        [(_, texts, _)] = asked
        record = next(found)
        for index, score in zip(record["indices"], record["scores"], strict=True):
            typer.echo(f"{score:10.4f}  {texts[index].strip()}")
        return
    text_io.write(text_io.as_lines(found), output, len(asked), "ranking")


def _checked(where: str, check: Any) -> Any:
    try:
        return check()
    except TextError as error:
        raise TextError(f"{where}: {error}" if where else str(error)) from error


def _ranked(lm: "LanguageModel", asked: list[Asked], top_k: int | None, by: Any) -> "Iterator[dict[str, Any]]":
    for query, texts, where in asked:
        found = _checked(where, lambda query=query, texts=texts: lm.rerank(query, texts, top_k, by=by))
        yield {"query": query, "indices": found.indices, "scores": [round(score, 6) for score in found.scores]}
