"""``gerund mine``: find training pairs in raw documents."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gerund.cli import options
from gerund.cli.text_io import tell, tell_unused
from gerund.errors import FinishedError

if TYPE_CHECKING:
    from gerund.data.mining import Mined


@options.takes(where=options.machines(with_model=False))
def command(
    corpus: Annotated[
        list[str],
        typer.Argument(
            help="Files or folders of documents (.jsonl, .txt, .md, .parquet, .gz, .xz), or URLs of an object store."
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="OUT.parquet or OUT.jsonl; or such a path on an object store.")
    ],
    method: Annotated[
        str,
        typer.Option(
            help="lcs: sentences that share a long substring; none: the same without that condition; ict: a sentence "
            "and the passage around it; crops: two crops of a passage."
        ),
    ] = "lcs",
    pairs: Annotated[
        str, typer.Option(help="title: the title with each sentence; all: any two sentences of a document.")
    ] = "title",
    threshold: Annotated[int, typer.Option(help="What the common substring weighs at least.")] = 30,
    short_threshold: Annotated[
        int | None, typer.Option(help="A smaller one for short texts (GUR: 20, two Chinese characters).")
    ] = None,
    short_characters: Annotated[
        int | None,
        typer.Option(
            help="Two texts with fewer characters are short (GUR: 64); default: two of which one weighs at most 150, "
            "as in the released code."
        ),
    ] = None,
    wide_weight: Annotated[int, typer.Option(help="Weight of a letter beyond U+2710: Han, kana, Hangul.")] = 10,
    letter_weight: Annotated[int, typer.Option(help="Weight of any other letter.")] = 3,
    other_weight: Annotated[int, typer.Option(help="Weight of anything else.")] = 1,
    max_uses: Annotated[int, typer.Option(help="How often a sentence or title is used at most; 0 for any number.")] = 4,
    per_document: Annotated[
        int | None, typer.Option(help="Most pairs per document, sampled by the seed. [default: all]")
    ] = None,
    language: Annotated[str, typer.Option(help="Language of the sentence splitter: en, zh, de, ...")] = "en",
    clean: Annotated[
        str, typer.Option(help="Quirks to remove first: none, gutenberg (hard-wrapped lines) or wikipedia.")
    ] = "none",
    text_column: Annotated[str, typer.Option(help="Column or field that holds the text.")] = "text",
    title_column: Annotated[str, typer.Option(help="Column or field that holds the title; may be absent.")] = "title",
    min_length: Annotated[int, typer.Option(help="Characters of a sentence at least.")] = 2,
    context: Annotated[int, typer.Option(help="Characters of a passage at most, for ict, crops and openings.")] = 1000,
    seed: Annotated[int, typer.Option(help="Random seed of the order of the pairs, and of samples.")] = 0,
    *,
    where: options.Machines,
    work: options.Work = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT, and start again if there is unfinished work.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Find training pairs in raw documents: sentences of a document that share a long substring.

    A letter weighs 3, one of a script with many signs (Han, kana, Hangul) 10, anything else 1; two sentences are a
    pair when a substring that they share weighs at least 30. In a document without a title the first sentence takes
    its place. A .txt or .md file is one document.

    OUT has the columns text_a, text_b, document, file, line, start_a, end_a, start_b, end_b, span, weight, opening:
    both texts, their places, the substring that they share, and in one row of each document with a title how the
    document begins. Each pair occurs once, in an order that depends on the seed and not on the number of processes.
    Documents that cannot be used are counted and listed in OUT.errors.jsonl. An interrupted run continues with
    --resume.

    For example:

        gerund mine articles.jsonl -o pairs.parquet

        gerund mine books/ -o pairs.jsonl --pairs all --clean gutenberg --max-uses 2 --per-document 500

        gerund mine baike.parquet -o pairs.parquet --language zh --threshold 40 --workers 8

        gerund mine shared/crawl/ -o shared/pairs.parquet --engine ray --address auto
    """
    from gerund.data.corpus import corpus_files
    from gerund.data.mining import MiningConfig, SymbolWeights, mine
    from gerund.jobs.files import errors_file_of
    from gerund.jobs.object_stores import staged

    config = MiningConfig(
        method=method,
        pairs=pairs,
        threshold=threshold,
        short_threshold=short_threshold,
        short_characters=short_characters,
        weights=SymbolWeights(wide_weight, letter_weight, other_weight),
        # The methods without uses refuse any but the default.
        max_uses=max_uses if max_uses != 0 else None,
        per_document=per_document,
        language=language,
        clean=clean,
        min_length=min_length,
        context=context,
        seed=seed,
    )
    machines = where.start()
    with (
        _finished_told(output, as_json),
        staged(corpus, output, work=work, force=force, files=lambda path: [errors_file_of(path), path]) as place,
    ):
        mined = mine(
            corpus_files(map(Path, place.sources)),
            place.output,
            config,
            text_column=text_column,
            title_column=title_column,
            engine=machines,
            resume=resume,
            force=force,
        )
        errors = [] if mined.errors_file is None else [mined.errors_file]
        *errors_file, target = place.send([*errors, mined.output])
        _tell(mined, target, next(iter(errors_file), None), as_json)


@contextmanager
def _finished_told(output: str, as_json: bool) -> Iterator[None]:
    """Say of a run that is to be resumed that it is finished, which is no mistake."""
    try:
        yield
    except FinishedError as done:
        tell(f"{done}")
        if as_json:
            typer.echo(json.dumps({"output": output, "finished": True}, ensure_ascii=False))


def _tell(mined: "Mined", target: str, errors_file: str | None, as_json: bool) -> None:
    tell_unused("document", mined.errors, list(map(str, mined.first_errors)), errors_file)
    if as_json:
        typer.echo(json.dumps({**asdict(mined), "output": target, "errors_file": errors_file}, ensure_ascii=False))
        return
    typer.echo(f"{mined.pairs:,} pairs of {mined.documents:,} documents in {target}")
    typer.echo(
        f"{mined.sentences:,} sentences ({mined.repeated:,} repeated in their document), "
        f"{mined.candidates:,} candidate pairs, {mined.found:,} found, {mined.duplicates:,} duplicates dropped"
    )
    before = f", {mined.resumed_parts:,} parts of it made before" if mined.resumed_parts else ""
    typer.echo(f"{mined.megabytes:,.1f} MB in {mined.seconds:.1f} s ({mined.megabytes_per_second:.1f} MB/s{before})")
