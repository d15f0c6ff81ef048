"""``gerund index``: create a search index from files, or update one."""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gerund.cli import options
from gerund.cli.search import COMPLETED, own_model
from gerund.cli.text_io import tell
from gerund.errors import ConfigError, InputError

if TYPE_CHECKING:
    from gerund.inference.sentence_encoder import SentenceEncoder
    from gerund.jobs.engine import JobEngine
    from gerund.language_model import LanguageModel
    from gerund.retrieval.document_reader import ReadLimits
    from gerund.retrieval.documents import Chunking
    from gerund.retrieval.index import Index
    from gerund.retrieval.indexing import Embed, IndexSummary
    from gerund.settings.model_spec import ModelSpec

# Rows of a file that are told of.
_REASONS = 5

_HELPS = {
    "model": "The encoder: a folder, GGUF file, short name (see gerund models) or hub id; st: before it runs it with "
    "sentence-transformers. [default: the index's own; for a new index the bundled model]"
}


@options.takes(
    spec=options.model(
        *("model", *options.PLAN, "pooling", *options.METHODS, "max_length", "adapter", *options.MACHINE),
        helps=_HELPS,
        also=("--encoder",),
    ),
    limits=options.read_limits(),
    where=options.machines(),
)
def command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATHS",
            help="Files and folders: .txt, .md, .html, .docx, .epub, .pdf, .jsonl, .csv, .tsv, .parquet.",
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The index: a folder, or a path on an object store.")
    ] = ...,  # type: ignore[assignment]
    *,
    spec: "ModelSpec",
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens of a chunk at most; 128 for a new index.")] = None,
    late: Annotated[
        bool | None,
        typer.Option(
            "--late/--early",
            help="Pool each chunk's vector from one pass over its document, or embed each chunk on its own. "
            "[default for a new index: early]",
        ),
    ] = None,
    context: Annotated[
        bool | None,
        typer.Option(
            "--context/--no-context",
            help="Read title and headings in front of a chunk when it is embedded; not so for a new index.",
        ),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="Language of the documents. [default for a new index: en]")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="How the numbers of vectors are stored: float32, float16, or binary (a bit each); float32 if new."
        ),
    ] = None,
    multi: Annotated[
        bool | None,
        typer.Option(
            "--multi/--no-multi",
            help="Store a vector for each token of a chunk too, in 8 bits, by which searches re-rank (--rerank-by "
            "maxsim). [default for a new index: no]",
        ),
    ] = None,
    pool_factor: Annotated[
        int | None, typer.Option(help="With --multi: the mean of so many neighboring tokens instead. [default: 1]")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove documents whose files were deleted from PATHS.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Watch PATHS and index changes until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="With --watch: seconds between two looks.")] = 2.0,
    migrate: Annotated[
        bool,
        typer.Option(
            "--migrate", help="First re-embed everything, with another model or in other chunks, and swap in one step."
        ),
    ] = False,
    choose_weight: Annotated[
        int,
        typer.Option(
            help="Then choose what vectors count beside words in searches, on this many questions that the model "
            "writes to the documents; 30 are enough for a first choice."
        ),
    ] = 0,
    query_head: Annotated[
        bool,
        typer.Option(
            "--query-head",
            help="Then fit what lets gerund ask --chat search by the conversation's own states, on sentences of the "
            "index; takes minutes.",
        ),
    ] = False,
    limits: "ReadLimits",
    where: options.Machines,
    as_json: options.Json = False,
) -> None:
    """Make an index of documents, or bring it up to date.

    A file of text is a document; of a .jsonl, .csv, .tsv or .parquet file each row is one, with its text in the column
    text and perhaps title, and id or _id. Documents are cut into chunks of whole sentences, which are embedded and
    stored with their words and vectors. Unchanged files are skipped; what has changed is replaced in
    one step.

    With --watch the command watches PATHS until Ctrl-C or SIGTERM. A file that is being written is indexed
    once it has not changed between two checks.

    A file that cannot be read is reported, the others are indexed, and the exit status is 2. When the command was
    interrupted, even by a power cut, the same command continues from there. Other commands may search the index
    while it runs.

    For example:

        gerund index notes/ papers/*.pdf -o my.index

        gerund index notes/ -o my.index --prune

        gerund index notes/ -o my.index --prune --watch

        gerund index -o my.index --migrate -m ./model --late

        gerund index notes/ -o small.index --transform truncate-128 --precision binary

        gerund index notes/ -o my.index -m smollm2 --template prompteol --transform all-but-the-top --sample notes.txt

        gerund index notes/ -o my.index -m smollm2 --multi --pool-factor 2

        gerund index notes/ -o my.index --encoder st:sentence-transformers/all-MiniLM-L6-v2

        gerund index notes/ -o my.index --workers 8

        gerund index -o my.index --choose-weight 30
    """
    from gerund.models.light_runtime import for_many_texts
    from gerund.retrieval.document_reader import unknown_files
    from gerund.retrieval.documents import Chunking
    from gerund.retrieval.index import open_index, store_at

    _refuse_nothing_to_do(paths, prune=prune, watch=watch, other=migrate or choose_weight > 0 or query_head)
    if choose_weight < 0 or (choose_weight and watch):
        raise ConfigError("--choose-weight takes a number of questions, and has no use with --watch")
    if query_head and watch:
        raise ConfigError("--query-head has no use with --watch")
    store = store_at(output)
    about = store.about()
    requested = {"tokens": chunk_tokens, "late": late, "context": context, "language": language, "precision": precision}
    if pool_factor is not None and (not multi or pool_factor < 1):
        raise ConfigError("--pool-factor is a number of tokens, 1 or more, and goes with --multi")
    requested["multi"] = None if multi is None else (pool_factor or 1) if multi else 0
    given = {name: value for name, value in requested.items() if value is not None}
    chunking = replace(Chunking() if about is None else about.chunking, **given)  # type: ignore[arg-type]
    names_model = bool(spec.model_fields_set - set(options.MACHINE))  # or says how it is read
    encoder_spec = for_many_texts(spec) if about is None or names_model else own_model(about, output, spec)
    machines = _Machines(where.start(usual=1), where.threads)
    if migrate:
        if about is None:
            raise ConfigError(f"{output}: there is no index yet, so nothing to migrate")
        from gerund.retrieval.index import load_encoder
        from gerund.retrieval.indexing import migrate_index

        encoder = load_encoder(encoder_spec or about.model_spec(output))
        with machines.embedding(encoder, chunking) as embed:
            count = migrate_index(store, encoder, chunking, embed=embed)
        tell(f"{count} documents re-embedded: {output}")
        index = open_index(output, encoder)
    else:
        index = open_index(output, encoder_spec, chunking=chunking)
    with machines.adding(index):
        if watch and paths:
            _watch(index, paths, output, limits, prune=prune, interval=interval, as_json=as_json)
            return
        summary = index.add(paths, prune=prune, limits=limits) if paths else None
    if left := unknown_files(paths or []):
        kinds = ", ".join(f"{count} {ending}" for ending, count in left.items())
        tell(f"skipped {_counted(sum(left.values()), 'file')} of unsupported types: {kinds}")
    if choose_weight:
        tell(f"{output}: {index.choose_weight(choose_weight)}")
    if query_head:
        head = index.fit_query_head()
        tell(f"{output}: query head of {len(head.weights)} features, for gerund ask --chat")
    _tell(summary, output, len(index), as_json=as_json)


def _refuse_nothing_to_do(paths: list[Path] | None, *, prune: bool, watch: bool, other: bool) -> None:
    """Refuse a command without files that says nothing else either, and what is said of files that are not named."""
    if not paths and not other:
        raise ConfigError(
            "name the files or folders to index; without any, only --migrate, --choose-weight and --query-head have "
            "something to do"
        )
    if prune and not paths:
        raise ConfigError("--prune removes what lay in PATHS and is gone; name them")
    if watch and not paths:
        raise ConfigError("--watch follows what lies in PATHS; name them")


class _Machines:
    """Who embeds: this process, or the workers of an engine."""

    def __init__(self, engine: "JobEngine", threads: int | None) -> None:
        from gerund.jobs.engine import runs_in_process

        self.engine, self.threads = engine, threads
        self.are_elsewhere = not runs_in_process(engine)

    def adding(self, index: "Index") -> AbstractContextManager[None]:
        """Let them embed what is added to an index meanwhile."""
        if not self.are_elsewhere:
            return nullcontext()
        from gerund.retrieval.embedding import embedded_by

        return embedded_by(self.engine, index, threads=self.threads)

    def embedding(
        self, encoder: "LanguageModel | SentenceEncoder", chunking: "Chunking"
    ) -> "AbstractContextManager[Embed | None]":
        """Return what embeds chunks; None for this process."""
        if not self.are_elsewhere:
            return nullcontext()
        from gerund.retrieval.embedding import embedding_pool
        from gerund.worker_model import WorkerModel

        return embedding_pool(self.engine, WorkerModel.of(encoder, threads=self.threads), chunking)


def _watch(
    index: "Index", paths: list[Path], output: str, limits: "ReadLimits", *, prune: bool, interval: float, as_json: bool
) -> None:
    """Follow files until the user ends it, which is no mistake."""
    from gerund.retrieval.indexing import watch

    def report(summary: "IndexSummary") -> None:
        _print_summary(summary, output, len(index), as_json=as_json)

    tell(f"watching {', '.join(map(str, paths))}; Ctrl-C ends it")
    try:
        watch(index, paths, prune=prune, interval=interval, report=report, limits=limits)
    except KeyboardInterrupt:
        tell(f"stopped; everything that was stored is kept in {output}")


def _tell(summary: "IndexSummary | None", output: str, chunks: int, *, as_json: bool) -> None:
    """Say what was done; files that failed make the exit status that of bad input."""
    if summary is None:
        if as_json:
            typer.echo(json.dumps({"index": output, "chunks_in_all": chunks}, ensure_ascii=False))
        return
    _print_summary(summary, output, chunks, as_json=as_json)
    if summary.failed:
        raise typer.Exit(InputError.exit_code)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _print_summary(summary: "IndexSummary", output: str, chunks: int, *, as_json: bool) -> None:
    for failure in summary.failed:
        for reason in (failure.reason, *failure.more[: _REASONS - 1]):
            tell(f"error: {reason}")
        if failure.rows > _REASONS:
            tell(f"error: {failure.file}: {_counted(failure.rows - _REASONS, 'more row')} could not be read")
    parts = [
        _counted(summary.files, "file"),
        f"{_counted(summary.documents, 'document')} stored ({_counted(summary.chunks, 'chunk')})",
    ]
    if summary.unchanged:
        parts.append(f"{_counted(summary.unchanged, 'file')} unchanged")
    if summary.removed:
        parts.append(f"{_counted(summary.removed, 'document')} removed")
    if summary.failed:
        parts.append(f"{_counted(len(summary.failed), 'file')} skipped, entirely or in part")
    tell(f"{', '.join(parts)}, {summary.seconds:.1f} s: {output} has {_counted(chunks, 'chunk')}")
    if summary.completed:
        tell(f"{output}: {COMPLETED}")
    if as_json:
        typer.echo(json.dumps({"index": output, "chunks_in_all": chunks, **asdict(summary)}, ensure_ascii=False))
