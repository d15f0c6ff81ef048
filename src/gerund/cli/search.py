"""``gerund search``: search an index, on this machine or through a running server.

Other commands open an index and show its chunks in the same way.
"""

import json
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options, text_io
from gerund.cli.text_io import tell
from gerund.errors import ConfigError, DataError
from gerund.types import Hit, Hits, RerankCost

if TYPE_CHECKING:
    from rich.text import Text

    from gerund.retrieval.index import Index
    from gerund.retrieval.store import IndexMetadata
    from gerund.settings.model_spec import ModelSpec


# A writer that is still at it can't be told from one that is gone.
COMPLETED = "an earlier gerund index was ended before its last step, or is still running; all words are indexed now"
_SNIPPET = 300


def open_existing(
    where: str, spec: "ModelSpec", answer_with: str | None = None, *, reads_much: bool = False
) -> "Index":
    """Open an index that is there, with the model that is named or else its own, and another to answer with.

    Its own is computed by the runtime that starts sooner, or the one that made the vectors where it ``reads_much``.
    """
    from gerund.retrieval.index import demand_index, open_index

    about = demand_index(where)
    assert about is not None
    if "model" in spec.model_fields_set:
        encoder: ModelSpec | None = spec
    else:
        encoder = own_model(about, where, spec)
        # Vectors in a declared space are compared whichever runtime computed them.
        if about.space and about.spec is not None and spec.runtime == "auto" and not reads_much:
            encoder = (encoder or about.model_spec(where)).model_copy(update={"runtime": "auto"})
    index = open_index(where, encoder, answer_with=answer_with)
    if index.store.finish():
        tell(f"{where}: {COMPLETED}")
    return index


def own_model(about: "IndexMetadata", where: str, spec: "ModelSpec") -> "ModelSpec | None":
    """Return the model that an index names, with what the options say laid over it; None where they say nothing."""
    # An index says which runtime made its vectors, which `auto` does not take back.
    settings = {name: value for name in spec.model_fields_set if (value := getattr(spec, name)) != "auto"}
    return about.model_spec(where).model_copy(update=settings) if settings else None


def highlighted(text: str, query: str, language: str = "en") -> "Text":
    """Return the part of a text that has most of a query's words, on one line, with these words in bold."""
    from rich.text import Text

    from gerund.text_analysis import Analyzer, joined_lines

    line = " ".join(joined_lines(text).split())
    matches = Analyzer(language).matches(line, query)
    begin = _best_begin(line, matches)
    shown = line[begin : begin + _SNIPPET]
    result = Text(("... " if begin else "") + shown + (" ..." if begin + _SNIPPET < len(line) else ""))
    lead = 4 if begin else 0
    for start, end in matches:
        if start >= begin and end <= begin + _SNIPPET:
            result.stylize("bold", start - begin + lead, end - begin + lead)
    return result


def _best_begin(line: str, spans: Sequence[tuple[int, int]]) -> int:
    """Return where the stretch begins that has most of what was found; the beginning where that is as good."""
    if len(line) <= _SNIPPET or not spans:
        return 0
    starts = [0, *(max(0, line.rfind(" ", 0, max(0, start - 40)) + 1) for start, _ in spans)]
    return max(
        starts, key=lambda begin: (sum(begin <= start and end <= begin + _SNIPPET for start, end in spans), -begin)
    )


@options.takes(
    spec=options.model(
        "model",
        *options.MACHINE,
        helps={"model": "Another name of the model that the index was made with. [default: the index's own]"},
    ),
    how=options.search(),
)
def command(
    where: Annotated[
        str,
        typer.Argument(
            metavar="INDEX",
            help="An index's folder, or its path on an object store; with --server the name of its index, or left out.",
        ),
    ],
    queries: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUERY", help="Search query; several, or - for one per line on standard input."),
    ] = None,
    *,
    spec: "ModelSpec",
    k: Annotated[int, typer.Option("--k", "-k", help="Most chunks per query.")] = 10,
    mode: Annotated[str, typer.Option(help="words, vectors, or hybrid: both, joined.")] = "hybrid",
    expand: Annotated[
        int, typer.Option(help="Search with this many more queries, variants that the model generates.")
    ] = 0,
    how: dict[str, Any],
    rerank_with: Annotated[
        str | None,
        typer.Option(help="Another model for --rerank and --expand. [default: the index's own]", metavar="MODEL"),
    ] = None,
    as_json: options.Json = False,
    server: Annotated[
        str | None,
        typer.Option(
            help="Ask the gerund server at this URL, such as http://127.0.0.1:8000, instead of loading a model here."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="For --server: a file with the API key. Or put it into GERUND_API_KEY.")
    ] = None,
) -> None:
    """Find the chunks of documents that fit a query.

    Words (BM25) and vectors find 100 chunks each; BM25's scores, divided by the best of them, and cosines are added up
    with a weight that belongs to the model. What stands in double quotes must stand so in the chunk, but with --mode
    vectors. --mode words needs no model and loads none.

    With --json, prints one JSON object per hit: source, start, end (characters of the document's text), text, score,
    rank, title, heading, words (BM25's score), similarity (the cosine) and relevance (by which --rerank orders); of
    several queries each line has the query too.

    Loading the model takes most of the time. With --server a running gerund serve --index answers instead, with the
    same hits; --rerank-with and --expand are not available then.

    For example:

        gerund search my.index "how bread rises"

        gerund search my.index '"public railway" steam' --mode words -k 3

        gerund search my.index "yeast" --filter "source LIKE 'recipes/%'" --json

        gerund search "how bread rises" --server http://127.0.0.1:8000
    """
    if server is not None:
        _refuse_local(spec, expand=expand, rerank_with=rerank_with)
        # One argument is the query: which index there is, the server knows.
        name, asked = (where, _queries(queries)) if queries else (None, _queries([where]))
        request = {"k": k, "mode": mode, **how}
        hits = _remote_hits(server, api_key_file, name, asked, request)
        (_print_lines if as_json else _print_hits)(asked, hits)
        return
    if api_key_file is not None:
        raise ConfigError("--api-key-file is for --server, which is missing")
    asked = _queries(queries)
    index = open_existing(where, spec, rerank_with, reads_much=bool(how.get("rerank")))
    results = index.search_all(asked, k, mode=mode, expand=expand, **how)  # type: ignore[arg-type]
    if as_json:
        _print_lines(asked, results)
    else:
        _print_hits(asked, results, index.chunking.language)


def _refuse_local(spec: "ModelSpec", **given: Any) -> None:
    """Refuse options that need a model here."""
    named = [name for name in spec.model_fields_set if getattr(spec, name) not in ("auto", "default")]
    named += [name for name, value in given.items() if value]
    if named:
        raise ConfigError(
            f"--{sorted(named)[0].replace('_', '-')} can't be combined with --server, which has its own model"
        )


def _remote_hits(
    url: str, api_key_file: Path | None, index: str | None, asked: Sequence[str], request: dict[str, Any]
) -> "list[Hits]":
    from gerund.cli.remote import Remote

    remote = Remote(url, api_key_file)
    fields = Hit.__dataclass_fields__
    results = []
    for query in asked:
        answer = remote.post(
            "/v1/search", {"query": query, **{key: value for key, value in request.items() if value is not None}}
        )
        served = answer.get("index")
        if index is not None and served is not None and PurePath(index).name != served:
            raise ConfigError(
                f"{remote.url} serves the index {served}, not {PurePath(index).name}; leave INDEX out to search it"
            )
        try:
            hits = [Hit(**{name: hit[name] for name in fields}) for hit in answer["data"]]
            cost = answer.get("rerank")
            results.append(Hits(hits, None if cost is None else RerankCost(**cost)))
        except (KeyError, TypeError) as error:
            raise DataError(f"{remote.url} is not a gerund server, or one of another version") from error
    return results


def _queries(given: "list[str] | None") -> list[str]:
    if not given:
        raise ConfigError("give a query: gerund search INDEX QUERY")
    if given != ["-"]:
        from gerund.retrieval.hybrid_search import check_query

        for query in given:
            check_query(query)
        return given
    [rows] = text_io.one_text("-", "query")
    lines = [line for line in rows.texts[0].replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise DataError("standard input has no query")
    return lines


def _print_lines(asked: Sequence[str], results: Sequence[Hits]) -> None:
    for query, hits in zip(asked, results, strict=True):
        for hit in hits:
            which = {"query": query} if len(asked) > 1 else {}
            typer.echo(json.dumps({**which, **hit.to_dict()}, ensure_ascii=False))


def _print_hits(asked: Sequence[str], results: Sequence[Hits], language: str = "en") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for query, hits in zip(asked, results, strict=True):
        if len(asked) > 1:
            console.print(Text(f"== {query}", style="bold"))
        if not hits:
            tell(f"nothing was found for {query!r}")
        if hits.rerank is not None:
            tell(str(hits.rerank))
        for hit in hits:
            line = Text(f"{hit.rank:2d}  {hit.score:.3f}  ")
            if hit.relevance is not None:
                line.append(f"relevance {hit.relevance:.3f}  ")
            line.append(f"{hit.source}:{hit.start}-{hit.end}", style="cyan")
            if hit.heading or hit.title:
                line.append(f"  {hit.heading or hit.title}", style="dim")
            console.print(line)
            console.print(Text("    ").append_text(highlighted(hit.text, query, language)))
