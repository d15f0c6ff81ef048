"""Renders the result files as two pages: `python benchmarks/render.py`, or `make benchmark-page`.

`docs/benchmarks.md` is for readers of the documentation, with the short tables of `headlines.py`.
`benchmarks/TABLES.md` has every table, in the order of `PAGE`. The same files always give the same pages; a test
compares them with those on the disk. Knows the layout of `results.py`, and imports nothing that is not Python's own.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import results
from headlines import HEADLINES, Headline
from results import BY_SCRIPT, Cell, Column, Result, Row, Table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "benchmarks.md"
TABLES = ROOT / "benchmarks" / "TABLES.md"

DOCS_HEAD = """# Benchmarks

The headline figures. Every one comes from a JSON file in `benchmarks/results/` with its command, machine, date and
library versions; `benchmarks/TABLES.md` in the repository shows all tables with their spread and what they mean, and
`benchmarks/LOG.md` what was tried and didn't pay.

Systems that are compared give the same result within a stated tolerance before anything is timed, and take turns on one
thread. Time is CPU time, and a ratio above 1 means faster than the system that it names; tables show medians. "±" is
the standard deviation over trainings with different seeds. Most figures are from models of 8 to 16 million parameters,
on two cores without a GPU; they don't carry over to larger models."""

HEAD = """# Benchmarks: all tables

Every table of this page is rendered by `make benchmark-page` from a JSON file in `benchmarks/results/`. A file holds
the figures with their units, the command, the machine, the date, the commit and the versions of the libraries; scripts
in `benchmarks/` write it. Tables that are older than the files were carried over; each says so. What was tried, and
what did not pay, is in `benchmarks/LOG.md`.

The scripts share one harness. Systems that are compared give the same result within a stated tolerance before
anything is timed. They take turns, one thread each unless the table says otherwise; the order is reversed in every
second round. The measure is processor time, with wall time beside it. A ratio is taken within each round, and a table
gives the median with the smallest and largest value. Memory is measured in a process of its own. "±" is the standard
deviation over trainings with different seeds. The best value of a column is bold where one is wanted; reference rows
do not compete. Tables that were carried over are older than the harness: most systems took turns in a fixed order, and
most ratios are those of the medians; their commands are written with today's options.

In tables of 2026-11-22 and earlier, `hybrid` is what `hybrid:rrf` is now: reciprocal rank fusion with BM25.

Tables from before commit ea8f259 of 2026-11-23 read the bundled model by its earlier encoder: pairs mined from its own
texts, the plan `inter-bidir`, 256 numbers. What it writes is the same.

Until 2026-11-26 the bundled model was half as large (8.0 million parameters, 36 million tokens read): tables before
that day, and those of that day that do not say 15.7 million, were measured with it. "The first base" is its base after
the first 2000 steps (16.4 million tokens), without adapters: `gerund train small-base` makes it again, to be given in
the place of `default`.

Tables from before commit c1d8285 of 2026-11-27 read the larger model by an encoder that had learned from 92,160 texts
in the place of 416,000; those of commit 14a4551+ have the new one already. What it writes, fills in and scores is the
same.

Tables from before 2026-11-28, and that of documents ranked anew in an index, score continuations by a scorer of the
larger model that had learned from 16,000 passages in the place of 48,000, but for rows that say otherwise.
"""


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
        heading: with its number signs; other pages link to it.
        files: names of result files, or `name:id` for one table of a file.
    """

    heading: str
    files: tuple[str, ...] = ()


PAGE = (
    Section(
        "## The bundled model",
        ("quality:vectors", "quality:likelihoods", "quality:seeds", "quality:fine-tuning", "quality-bundled"),
    ),
    Section("### Short and long prefixes", ("decoding:prefix-lengths",)),
    Section("### Query expansion", ("quality:expansions",)),
    Section("### Another encoder's vectors", ("alignment",)),
    Section("## One model or four", ("stack",)),
    Section("## Encoding", ("encode",)),
    Section("## What a plan costs", ("plan_overhead",)),
    Section("## Memory", ("memory",)),
    Section("## The command line", ("command-line", "start_up")),
    Section("## Serving", ("serve",)),
    Section("## Other runtimes", ("runtimes",)),
    Section("### Quantized files", ("packed",)),
    Section("### Read and unpacked", ("formats",)),
    Section("## Choosing a plan", ("sweep",)),
    Section("## The papers' plans on two small models", ("quality:plans-default", "quality:plans-stories260k")),
    Section("### Recurrent layers read both ways", ("hybrids",)),
    Section("## Methods without training", ("training_free",)),
    Section("### On real models", ("real_models",)),
    Section("## Evaluation", ("quality-evaluation",)),
    Section("## Search", ("index",)),
    Section("### Answers from documents", ("quality:answers",)),
    Section("### Answers over files of three kinds", ("ask",)),
    Section("### Conversations", ("query_head",)),
    Section("### What an index costs", ("index_cost", "kept_chunks")),
    Section("### Documents ranked by relevance", ("ranking", "relevance")),
    Section(
        "## Training for both",
        ("vocabulary_loss", "cached_contrastive", "shared_pass", "compiled_layers", "pairs_by_length"),
    ),
    Section("### What training brings", ("training",)),
    Section("## Guided generation", ("guided_search",)),
    Section("## Engine", ("engine",)),
    Section("## Scorers of continuations", ("scorers",)),
    Section("### Generation ranked by a scorer", ("decoding:writing", "decoding:sentence-ends")),
    Section("## Mining pairs", ("mining",)),
    Section("## Bulk work", ("bulk",)),
    Section("## GUR", ("gur",)),
    Section("## Code that a call touches", ("walks",)),
)


def headlines(folder: Path = results.RESULTS) -> str:
    """Return the documentation's page."""
    return "\n\n".join([DOCS_HEAD, *(_headline(headline, folder) for headline in HEADLINES)]) + "\n"


def _headline(headline: Headline, folder: Path) -> str:
    name, _, table_id = headline.table.partition(":")
    table = next(table for table in results.read(folder / f"{name}.json").tables if table.id == table_id)
    columns = [next(column for column in table.columns if column.key == key) for key in headline.columns]
    rows = [table.rows[number] for number in headline.rows] or table.rows
    # Without spread and without blanks around the cells, which would double the page.
    lines = [[title(column) for column in columns], ["---"] * len(columns)]
    lines += [[written(row.get(column.key), column).partition(" (")[0] for column in columns] for row in rows]
    date = f" ({table.run.date})" if table.run else ""
    cells = "\n".join(f"|{'|'.join(line)}|" for line in lines)
    return f"{headline.heading}\n\n{headline.text}{date}\n\n{cells}"


def page(folder: Path = results.RESULTS) -> str:
    """Return the page of all tables.

    Raises:
        ValueError: a table stands nowhere in `PAGE`, or twice.
    """
    found = {path.stem: results.read(path) for path in sorted(folder.glob("*.json"))}
    left = {(name, table.id) for name, result in found.items() for table in result.tables}
    blocks = [HEAD.rstrip("\n")]
    for section in PAGE:
        blocks.append(section.heading)
        for entry in section.files:
            name, _, only = entry.partition(":")
            result = found[name]
            tables = [table for table in result.tables if only in ("", table.id)]
            shown = {(name, table.id) for table in tables}
            if not shown or not shown <= left:
                raise ValueError(f"PAGE names {entry!r}, which is not there or stands on the page already")
            left -= shown
            blocks += [part for part in (result.note, *map(table_block, tables, [None, *tables])) if part]
    if left:
        raise ValueError(f"no section of PAGE names {', '.join(f'{name}:{table}' for name, table in sorted(left))}")
    return "\n\n".join(blocks) + "\n"


def table_block(table: Table, before: Table | None = None) -> str:
    """Return caption, table and conclusion."""
    return "\n\n".join(part for part in (caption(table, before), markdown(table), table.conclusion) if part)


def caption(table: Table, before: Table | None = None) -> str:
    """Return what is compared, command, machine and date, in one line; a command is not repeated."""
    parts = [f"**{table.caption}**"]
    if table.checks:
        parts.append(f"Checked first: {'; '.join(table.checks)}.")
    if (run := table.run) is not None:
        last = before.run if before is not None else None
        if run.command:
            parts.append("Command as above." if last and last.command == run.command else f"`{run.command}`.")
        else:
            parts.append("The command was not recorded.")
        busy = ", other work running" if run.machine_busy else ""
        parts.append(f"{run.machine[0].upper()}{run.machine[1:]}{busy}.")
        parts.append(f"{run.date}{'' if run.recorded == BY_SCRIPT else f' ({run.recorded})'}.")
    return " ".join(parts)


def markdown(table: Table) -> str:
    """Return the table itself. A column without any cell is left out."""
    columns = [
        column
        for place, column in enumerate(table.columns)
        if not place or any(row.get(column.key) is not None for row in table.rows)
    ]
    lines = [[title(column) for column in columns], ["---"] * len(columns)]
    best = {column.key: best_row(column, table.rows) for column in columns}
    for row in table.rows:
        cells = [written(row.get(column.key), column) for column in columns]
        lines.append([f"**{cell}**" if row in best[c.key] else cell for cell, c in zip(cells, columns, strict=True)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def title(column: Column) -> str:
    """Return a column's title with its unit."""
    return ", ".join(part for part in (column.title, column.unit) if part)


def best_row(column: Column, rows: list[Row]) -> list[Row]:
    """Return the rows whose cell looks best: all that are written alike."""
    there = [row for row in rows if not row.get("reference") and number(row.get(column.key)) is not None]
    if not column.better or not there:
        return []
    choose = max if column.better == "higher" else min
    best = choose(there, key=lambda row: number(row[column.key]))  # type: ignore[arg-type,return-value]
    best_text = written(best[column.key], column).partition(" ")[0]
    return [row for row in there if written(row[column.key], column).partition(" ")[0] == best_text]


def number(cell: Cell) -> float | None:
    """Return what a cell is compared by."""
    if isinstance(cell, dict):
        return cell.get("mean", cell.get("median"))
    return None if isinstance(cell, str) else cell


def written(cell: Cell, column: Column) -> str:
    """Return a cell as the page shows it."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    if not isinstance(cell, dict):
        return _figure(cell, column.digits)
    digits = cell.get("digits", column.digits)
    if "mean" in cell:
        return _figure(cell["mean"], digits) + (f" ± {_figure(cell['sd'], digits)}" if "sd" in cell else "")
    spread = f" ({_figure(cell['min'], digits)} to {_figure(cell['max'], digits)})" if cell.get("rounds", 1) > 1 else ""
    return _figure(cell["median"], digits) + (spread if "min" in cell else "")


def _figure(value: float, digits: float | None) -> str:
    return f"{value:,}" if digits is None else f"{value:,.{int(digits)}f}"


def printed(result: Result) -> str:
    """Return tables for a terminal, without what the page says around them."""
    parts = [
        "\n".join([table.caption, *(f"  checked: {c}" for c in table.checks), markdown(table)])
        for table in result.tables
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Write both pages, and say which changed."""
    for file, text in ((DOCS, headlines()), (TABLES, page())):
        before = file.read_text(encoding="utf-8") if file.is_file() else ""
        file.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{file.relative_to(ROOT)}: {'unchanged' if text == before else 'written'}\n")


if __name__ == "__main__":
    main()
