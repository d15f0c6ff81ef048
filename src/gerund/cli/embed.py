"""``gerund embed``: turn the texts of a file into vectors in a file."""

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.checks import check_dimensions
from gerund.cli import options
from gerund.cli.text_io import tell, tell_unused
from gerund.settings.templates import PromptText

if TYPE_CHECKING:
    from gerund.data.embedding.job import EmbeddingSummary, Encode, Encoded, EncodingWorkers
    from gerund.jobs.checkpoints import ShardCheckpoint
    from gerund.jobs.engine import JobEngine
    from gerund.language_model import LanguageModel
    from gerund.settings.model_spec import ModelSpec
    from gerund.worker_model import WorkerModel


@options.takes(
    spec=options.model(
        *("model", *options.PLAN, "pooling", "pool_prompt", "append_eos", *options.METHODS, "max_length", "adapter"),
        *options.MACHINE,
    ),
    where=options.machines(),
)
def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="A .txt (one text per line), .jsonl, .csv, .tsv or .parquet file; a folder of them, where a .txt file "
            "is one text; a URL of an object store; or - for standard input. Text formats may also be .gz or .xz.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="OUT.parquet or OUT.npy; or such a path on an object store.")
    ],
    column: options.Column = None,
    id_column: Annotated[
        str | None,
        typer.Option(help="Column with the ids; '' numbers the rows from 0. [default: id or _id, if there is one]"),
    ] = None,
    format: options.Format = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text put before every text and not pooled. [default: the model's own]")
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="Name of one of the model's stored prompts, such as query, instead of a text.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Keep only this many dimensions of each vector, the first ones.")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="Bits of a number: float32, int8, uint8, binary or ubinary.")
    ] = "float32",
    no_normalize: Annotated[
        bool, typer.Option("--no-normalize", help="Leave the vectors as long as they are.")
    ] = False,
    *,
    spec: "ModelSpec",
    empty: Annotated[str, typer.Option(help="A row without a text: error, zeros (a zero vector) or skip.")] = "error",
    overflow: Annotated[str, typer.Option(help="A text that is too long: truncate (its end) or error.")] = "truncate",
    bad_rows: Annotated[
        str, typer.Option(help="A row that cannot be used: error, or skip, which lists them in OUT.errors.jsonl.")
    ] = "error",
    keep_text: Annotated[bool, typer.Option("--keep-text", help="Store the texts too.")] = False,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens a batch, padding included.")] = None,
    shard_rows: Annotated[int, typer.Option(help="Rows a part; batches are made of texts of one part.")] = 4096,
    where: options.Machines,
    work: options.Work = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT, and start again if unfinished work does not match.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Embed the texts of a file, of any size.

    OUT.parquet has the columns id, embedding (and text with --keep-text); its schema metadata has the encoder's
    fingerprint, model, plan and more under the key gerund. OUT.npy is a float32 array with one row per text, with the
    ids in OUT.ids.jsonl (line i belongs to row i) and the encoder in OUT.meta.json. A .tsv file has no quoting, a
    .csv file has.

    A malformed row, or one without a text, is an error before any model is loaded. With --bad-rows skip it is skipped
    and listed in OUT.errors.jsonl, and so are, later, texts that are too long where --overflow is error, and vectors
    that are not finite: no row ends a long job then.

    With --precision int8 or uint8 each number is scaled by the smallest and the largest value of its dimension over
    all rows, which are stored with the encoder, and takes a byte. With binary or ubinary it takes a bit.

    Finished rows are kept in OUT.parts until the end; an interruption loses those of the last seconds. When the
    command was interrupted, even by a power cut, the same command continues from there, and the output is the same to
    the byte as without the interruption. While the parts are joined the disk holds the vectors twice.

    With --workers several processes encode, each with the model, and with --engine ray those of a Ray cluster, whose
    machines see OUT and the model under the same paths. The rows are the same. With the same number of threads in
    each process the vectors are equal too, up to the last digits, which differ between kinds of processors.

    For example:

        gerund embed notes.txt -o notes.parquet

        gerund embed notes/ -o notes.parquet

        gerund embed tickets.csv --column body --id-column key -m ./model --prompt "Find similar: " -o tickets.npy

        gerund embed crawl.parquet -o vectors.parquet --workers 8

        gerund embed s3://bucket/crawl.parquet -o s3://bucket/vectors.parquet

        gerund embed shared/crawl.parquet -o shared/vectors.parquet --engine ray --address auto

        zcat crawl.jsonl.gz | gerund embed - --format jsonl -m ./model --empty skip --bad-rows skip -o crawl.parquet
    """
    from gerund.data.embedding.job import EmbeddingConfig, embedding_job
    from gerund.data.tables import open_table, skipped_files
    from gerund.jobs.engine import runs_in_process
    from gerund.jobs.object_stores import staged
    from gerund.models.light_runtime import for_many_texts
    from gerund.quantization import check_precision

    check_dimensions(dimensions)
    check_precision(precision)
    config = EmbeddingConfig(
        empty=empty,  # type: ignore[arg-type]
        bad_rows=bad_rows,  # type: ignore[arg-type]
        overflow=overflow,  # type: ignore[arg-type]
        keep_text=keep_text,
        shard_rows=shard_rows,
        force=force,
    )
    machines = where.start(usual=1)
    with staged([source], output, work=work, force=force, files=config.files_of, outside=True) as place:
        table = open_table(place.sources[0], format=format, column=column, id_column=id_column, folders=True)
        if left := skipped_files(table):
            kinds = ", ".join(f"{count} {ending}" for ending, count in left.items())
            tell(f"skipped unsupported types in {source}: {kinds}; gerund index reads documents")
        with embedding_job(table, place.output, config) as job:
            alone = runs_in_process(machines)
            spec = for_many_texts(spec)
            lm, threads = _opened(spec, where.threads, alone=alone)
            before = PromptText(lm.encoder.prompt_text(prompt, prompt_name))
            normalize = lm.encoder.normalize and not no_normalize
            refusing = overflow == "error" and bad_rows == "skip"
            settings = {
                "prompt": before,
                "dimensions": dimensions,
                "normalize": normalize,
                "batch_tokens": batch_tokens,
                "empty": "zeros" if empty == "zeros" else "error",
                "overflow": "truncate" if refusing else overflow,
            }
            encoding = Encoding(settings, refusing)
            summary = job.run(
                partial(_encode, lm, encoding),
                _about(lm, before, dimensions, normalize, precision),
                computing={
                    "dtype": str(lm.compute_dtype).removeprefix("torch."),
                    "device": lm.runtime.device_type,
                    "batch_tokens": batch_tokens,
                    "threads": threads,
                },
                workers=None if alone else _workers(machines, lm, spec, threads, encoding),
            )
        errors = [] if summary.errors_file is None else [summary.errors_file]
        files = place.send([*errors, *summary.files])
    errors_file = files.pop(0) if errors else None
    _tell(summary, files, errors_file, lm, dimensions, as_json)


def _workers(
    machines: "JobEngine", lm: "LanguageModel", spec: "ModelSpec", threads: int, encoding: "Encoding"
) -> "EncodingWorkers":
    from gerund.data.embedding.job import EncodingWorkers
    from gerund.inference.encode.texts import template_tokens
    from gerund.worker_model import WorkerModel

    model = WorkerModel.of(lm, spec, threads=threads)
    passes = len(template_tokens(lm.runtime, ["a"], encoding.settings["prompt"]))  # one for each template
    return EncodingWorkers(machines, EncodingWorker(model, encoding), model.gpus, model.threads, passes)


def _opened(spec: "ModelSpec", threads: int | None, *, alone: bool) -> "tuple[LanguageModel, int]":
    """Load the model, and return how many threads each process computes with: this one, where it is ``alone``."""
    from gerund.light_entry import load, load_full
    from gerund.worker_model import checked_threads, used_threads

    if not alone:
        return load_full(spec), checked_threads(threads) or 1
    return load(spec), used_threads()


@dataclass(frozen=True)
class Encoding:
    """How the texts of a shard are encoded."""

    settings: dict[str, Any]  # for ``LanguageModel.encode_with_usage``
    refusing: bool = False  # whether texts that are too long have no vector, rather than one of their beginning


@dataclass(frozen=True)
class EncodingWorker:
    """Makes what encodes in another process."""

    model: "WorkerModel"  # loads the model there
    encoding: Encoding  # how texts are encoded

    def __call__(self) -> "Encode":
        """Load the model there; return what encodes a shard with it."""
        return partial(_encode, self.model.load(), self.encoding)


def _encode(lm: "LanguageModel", encoding: Encoding, texts: list[str], kept: "ShardCheckpoint") -> "Encoded":
    """Encode one shard, counting the texts that were cut."""
    from gerund.data.embedding.job import Encoded

    result = lm.encode_with_usage(texts, show_progress=False, kept=kept, **encoding.settings)
    if not encoding.refusing:
        return Encoded(result.vectors, sum(result.truncated))
    reason = f"the text has more than {lm.max_length} tokens, prompt included"
    return Encoded(result.vectors, refused={index: reason for index, cut in enumerate(result.truncated) if cut})


def _about(lm: "LanguageModel", prompt: str, dimensions: int | None, normalize: bool, precision: str) -> dict[str, Any]:
    check_dimensions(dimensions, lm.dimensions)
    # Of vectors that were cut nothing is known.
    declared = {} if dimensions or lm.space == lm.fingerprint() else {"space": lm.space}
    return {
        "fingerprint": lm.fingerprint(dimensions),
        **declared,
        "model": lm.name,
        "dimensions": dimensions or lm.dimensions,
        "attention": lm.encoder.with_defaults(lm.n_layers).attention.to_dict(),
        "pooling": lm.encoder.pooling,
        "prompt": str(prompt),
        "normalize": normalize,
        "max_length": lm.max_length,
        **({"precision": precision} if precision != "float32" else {}),
    }


def _tell(
    summary: "EmbeddingSummary",
    files: list[str],
    errors_file: str | None,
    lm: "LanguageModel",
    dimensions: int | None,
    as_json: bool,
) -> None:
    tell_unused("row", summary.bad, list(map(str, summary.first_bad)), errors_file)
    speed = f" ({summary.rows_per_second:.0f} rows/s)" if summary.resumed_rows < summary.rows else ""
    parts = [f"{summary.rows} rows in {summary.seconds:.1f} s{speed}"]
    if summary.resumed_rows:
        parts.append(f"{summary.resumed_rows} of them done before")
    if summary.truncated:
        parts.append(f"{summary.truncated} texts cut at {lm.max_length} tokens")
    if summary.empty:
        parts.append(f"{summary.empty} empty")
    tell(f"{', '.join(parts)}: {files[-1]}")
    if not as_json:
        return

    report = {
        "output": files[-1],
        "files": files,
        **{name: getattr(summary, name) for name in ("rows", "resumed_rows", "truncated", "empty", "bad")},
        "errors_file": errors_file,
        "dimensions": summary.dimensions,
        "seconds": round(summary.seconds, 3),
        "rows_per_second": round(summary.rows_per_second, 1),
        "model": lm.name,
        "fingerprint": lm.fingerprint(dimensions),
    }
    typer.echo(json.dumps(report, ensure_ascii=False))
