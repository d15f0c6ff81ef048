"""Read input texts (argument, standard input or ``--file``) and write results; seeds per text, warnings on stderr.

Knows: the command line's text, standard input, JSON lines. Does not know: what is done with the texts.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from gerund.errors import ConfigError, DataError, TextError
from gerund.types import Ranked

if TYPE_CHECKING:
    from gerund.data.tables import Rows
    from gerund.settings.sampling import Sampling
    from gerund.types import Generation, TokenLogprob

# From the seed of a text to that of the same text further down.
_NEXT_SEED = 1_000_000_007
# Texts that are read and used together: enough to sort by length, few enough that results come soon.
_CHUNK = 128
T = TypeVar("T")


def require_text_or_file(text: str | None, file: str | None, what: str, **of_the_file: str | None) -> None:
    """Require either one text, which messages call ``what``, or a file, and no options for a file without one."""
    if (text is None) == (file is None):
        raise ConfigError(f"give either a {what} or --file" + (", not both" if file else ""))
    require_file(file, **of_the_file)


def require_file(file: str | None, **of_the_file: str | None) -> None:
    """Refuse options that say how a file is read, without a file."""
    for name, value in of_the_file.items():
        if file is None and value is not None:
            raise ConfigError(f"--{name} says how a file is read; it belongs to --file")


def one_text(text: str, what: str) -> "list[Rows]":
    """Return a text of the command line, which messages call ``what``, as ``read_rows`` would; ``-``: from stdin."""
    from gerund.data.files import decode
    from gerund.data.tables import Rows

    if text == "-":
        raw = sys.stdin.buffer.read()
        if not raw:
            raise DataError(f"standard input has no {what}")
        text = decode(raw, "standard input").removesuffix("\n").removesuffix("\r")
    return [Rows([0], [text], [1], f"the {what}", unit="")]


def typed_lines(hint: str) -> Iterator[str]:
    """Yield what is typed, line by line, until the user ends it; a terminal shows ``hint`` first."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        typer.echo(hint, err=True)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                typer.echo()
            return
        if line.strip():
            yield line


def read_texts(
    text: str | None, file: str | None, what: str, *, column: str | None, format: str | None, usual: str | None = None
) -> "list[Rows]":
    """Read a text, or all texts of a file at once: a mistake in the last shows before the first is used.

    Messages call a text ``what``; ``usual`` is the column of tables unless another is given.
    """
    from gerund.data.tables import open_table, read_rows

    if file is None:
        return one_text(text or "", what)
    table = open_table(file, format=format, column=column)
    if column is None and usual is not None and table.format != "txt":
        table = open_table(file, format=format, column=usual)
    chunks = list(read_rows(table, max_rows=_CHUNK))
    if not chunks:
        raise DataError(f"{table.name} has no {what}s")
    return chunks


def each_text(chunks: "list[Rows]", use: Callable[[str], T]) -> Iterator[T]:
    """Yield what a function makes of each text; a ``TextError`` names the text's place."""
    for rows in chunks:
        for index, text in enumerate(rows.texts):
            try:
                yield use(text)
            except TextError as error:
                raise rows.placed(index, error) from error


def one_or_file(
    text: str | None, others: list[str], file: Path | None, names: tuple[str, str], more: str = ""
) -> "list[tuple[str, list[Any], str, Any]]":
    """Return a text with those that belong to it, from the command line, or for each row of a .jsonl file.

    Each comes with its place in the file, empty for the command line, and with what a row says under the name
    ``more``, or None. ``names`` are those of the text and of the others, also in the file. All rows are read at once: a
    mistake in the last shows before the first is used.
    """
    from gerund.evaluation.data_files import read_json_lines

    single, many = names
    if (text is None) == (file is None):
        raise ConfigError(f"give either a {single} with its {many} or --file" + (", not both" if file else ""))
    if file is None:
        if not others:
            raise ConfigError(f"give at least one {many.removesuffix('s')} after the {single}")
        return [(text or "", others, "", None)]
    rows = []
    for row in read_json_lines(file):
        if not isinstance(listed := row.values.get(many), list):
            raise DataError(f"{row.where}: needs {many!r}, a list of texts")
        rows.append((row.text(single), listed, row.where, row.values.get(more)))
    return rows


def refuse_existing(output: Path | None, *, force: bool) -> None:
    """Refuse to write over a file, or to where no file can be written whole."""
    from gerund.jobs.files import require_new_files, require_regular_file

    if output is None:
        return
    require_regular_file(output)
    if not force:
        require_new_files(output)


def as_lines(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each record as a line of JSON."""
    for record in records:
        yield json.dumps(record, ensure_ascii=False)


def write(lines: Iterable[str], output: Path | None, total: int, label: str) -> None:
    """Print lines as they come, or write them into a file, with a progress bar of ``total`` lines."""
    if output is None:
        for line in lines:
            typer.echo(line)
        return
    from gerund.jobs.files import atomic_file, make_folder
    from gerund.progress import progress

    make_folder(output.parent)
    with atomic_file(output) as sink, progress(total, label) as advance:
        for line in lines:
            sink.write(f"{line}\n".encode())
            advance(1)


def tell(sentence: str) -> None:
    """Print a note on standard error."""
    typer.echo(f"gerund: {sentence}", err=True)


def tell_unused(what: str, count: int, shown: Sequence[str], listed: str | Path | None) -> None:
    """Warn of what could not be used: the first few, and where all of them are listed."""
    for warning in shown:
        tell(f"warning: {warning}")
    if count:
        more = f"; the first {len(shown)} are above" if 0 < len(shown) < count else ""
        tell(f"warning: {count:,} {what}{'' if count == 1 else 's'} not used{more}: {listed}")


def as_record(result: "Generation") -> dict[str, Any]:
    """Return a continuation as a JSON object."""
    record: dict[str, Any] = {"text": result.text, "score": round(result.score, 6), "finished": result.finished}
    if result.stop is not None:
        record["stop"] = result.stop
    if result.logprobs is not None:
        record["logprobs"] = [
            {**_token(token), **({"top": [_token(top) for top in token.top]} if token.top else {})}
            for token in result.logprobs
        ]
    if isinstance(result, Ranked):
        record["rank_score"] = round(result.rank_score, 6)
    return record


def _token(token: "TokenLogprob") -> dict[str, Any]:
    return {"id": token.token_id, "text": token.text, "logprob": round(token.logprob, 6)}


class SeedsByText:
    """A seed for each text of a file, made of ``--seed`` and how often that text came before.

    So a text's result does not depend on the other lines of the file, and equal lines get results of their own. The
    first one has the seed that the text would have by itself.

    >>> from gerund.settings.sampling import Sampling
    >>> seeds = SeedsByText(Sampling(temperature=1.0, seed=7))
    >>> seeds.of(["a", "b", "a"]).seed
    (7, 7, 1000000014)
    """

    def __init__(self, sampling: "Sampling") -> None:
        self._sampling = sampling
        self._seen: Counter[str] = Counter()

    def of(self, texts: "Sequence[str]") -> "Sampling":
        """Return the settings for the next texts of the file, with a seed for each of them."""
        seeds = [self._next(text) for text in texts]
        return self._sampling if self._sampling.seed is None else replace(self._sampling, seed=seeds)

    def of_one(self, text: str) -> "Sampling":
        """Return the settings for the next text of the file."""
        seed = self._next(text)
        return self._sampling if self._sampling.seed is None else replace(self._sampling, seed=seed)

    def _next(self, text: str) -> int:
        seed = self._sampling.seed
        before = self._seen[text]
        self._seen[text] += 1
        return (seed if isinstance(seed, int) else 0) + before * _NEXT_SEED
