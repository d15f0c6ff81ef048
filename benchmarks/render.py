"""Renders the result files as two pages: `python benchmarks/render.py`, or `make benchmark-page`.

`docs/benchmarks.md` is for readers of the documentation, with the short tables of `HEADLINES`.
`benchmarks/TABLES.md` has every table, in the order of `PAGE`. The same files always give the same pages; a test
compares them with those on the disk. Knows the layout of `results.py`, and imports nothing that is not Python's own.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import results
from results import BY_SCRIPT, Cell, Column, Result, Row, Table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "benchmarks.md"
TABLES = ROOT / "benchmarks" / "TABLES.md"


@dataclass(frozen=True)
class Headline:
    """One section of the documentation's page.

    Attributes:
        heading: as on the page of all tables, where it links to.
        text: what is compared, and what a reader should know of it.
        table: a table, as `file:id`.
        columns: keys of the columns that are shown.
        rows: numbers of the rows that are shown; all of them where it is empty.
    """

    heading: str
    text: str
    table: str
    columns: tuple[str, ...]
    rows: tuple[int, ...] = ()


HEADLINES = (
    Headline(
        "## The bundled model",
        "Held-out data. `base` is the same weights without adapters, causal, mean pooling. The bundled model has 15.7 "
        "million parameters and also generates; all-MiniLM-L6-v2 has 22.7 million and doesn't.",
        "quality:vectors",
        ("task", "base", "bundled", "bm25", "bundled + BM25", "peer"),
        (0, 5, 6, 7, 9, 12),
    ),
    Headline(
        "### Short and long prefixes",
        "200 continuations of 96 tokens from books: one nucleus sample, or the best of 20 by the trained scorer.",
        "decoding:prefix-lengths",
        ("prefix", "system", "mauve"),
    ),
    Headline(
        "### Another encoder's vectors",
        "A student aligned on a collection's documents searches vectors that its teacher made (Medline).",
        "alignment:alignment",
        ("queries", "documents", "ndcg", "ratio"),
        (7, 8, 10, 11, 13),
    ),
    Headline(
        "## One model or four",
        "Indexing, searching, re-ranking and answering over 400 documents. The peer is sentence-transformers, LanceDB "
        "and llama.cpp on the same weights.",
        "stack:stages",
        ("stage", "system", "cpu"),
        (20, 22, 23),
    ),
    Headline(
        "## Encoding",
        "2,000 texts, a six-layer Llama of width 384, one thread, the same weights. Most of the gain is less padding.",
        "encode:encode",
        ("system", "dtype", "padded", "ratio"),
        (0, 1, 2, 3),
    ),
    Headline(
        "## What a plan costs",
        "A forward pass with `mask0-bidir` in every layer, compared with the same mask in plain transformers.",
        "plan_overhead:overhead",
        ("batch", "overhead"),
    ),
    Headline(
        "## Memory",
        "Generating and encoding with one set of weights (480 MiB).",
        "memory:one-set-of-weights",
        ("system", "memory", "ratio"),
    ),
    Headline(
        "## The command line",
        "CPU seconds of whole processes with the bundled model; `before` is commit 30183cf.",
        "start_up:start-up",
        ("command", "version", "cpu"),
    ),
    Headline(
        "## Serving",
        "CPU time of `gerund serve` and llama.cpp's server on the bundled weights: streamed chats of 48 tokens. With "
        "100 million parameters and more in float32, llama.cpp generates several times as fast.",
        "serve:llama",
        ("clients", "system", "rate", "ratio"),
        (0, 2, 4, 6),
    ),
    Headline(
        "### Serving quantized files",
        "The same GGUF file in both servers, chats of 48 tokens, on a processor with AVX-512.",
        "serve:gguf",
        ("file", "clients", "system", "rate", "ratio"),
    ),
    Headline(
        "### Embedding requests",
        "One text per request, 32 clients.",
        "serve:embeddings",
        ("texts", "system", "rate", "ratio"),
    ),
    Headline(
        "### Latency",
        "One client, one connection, milliseconds of wall time.",
        "serve:latency",
        ("request", "median", "most"),
    ),
    Headline(
        "## Other runtimes",
        "96 texts with the same weights and plan.",
        "runtimes:encoders",
        ("system", "cosine", "ratio", "size"),
    ),
    Headline(
        "### Quantized files",
        "The network that runs quantized files, without sampler and tokenizer, and llama.cpp on the same file.",
        "packed:work",
        ("file", "work", "system", "rate", "ratio"),
    ),
    Headline(
        "## Choosing a plan",
        "Every k of a plan in one pass over the layers, compared with one run per k.",
        "sweep:all-k",
        ("plan", "layers", "ratio"),
        (1, 3, 5, 7),
    ),
    Headline(
        "## The papers' plans on two small models",
        "Untrained, 8.0 million parameters, each plan at its best k on STS-B dev. The order differs on real models.",
        "quality:plans-default",
        ("plan", "sts/stsb", "retrieval/medline", "classification/banking77"),
        (0, 1, 3, 5, 8, 11, 15),
    ),
    Headline(
        "### Recurrent layers read both ways",
        "A hybrid model (three of four layers recurrent) and an attention model of the same size, untrained.",
        "hybrids:untrained",
        ("base", "plan", "recurrent", "mean"),
        (0, 1, 13, 14, 15),
    ),
    Headline(
        "## Methods without training",
        "The bundled model's base; each method chosen on validation data.",
        "training_free:test-default",
        ("family", "sts", "retrieval", "clustering"),
        (0, 1, 3, 9, 11, 12),
    ),
    Headline(
        "## Evaluation",
        "MAUVE of 200 continuations of 64 tokens.",
        "quality-evaluation:writing",
        ("way", "corpus", "rep_4", "mauve"),
        (0, 1, 2, 3),
    ),
    Headline(
        "## Search",
        "nDCG@10 of an index on two collections that nothing was chosen on, whole documents.",
        "index:unseen",
        ("set", "encoder", "words", "vectors", "fused"),
        (0, 2, 4, 6),
    ),
    Headline(
        "### Answers from documents",
        "Extracted answers to SQuAD 2.0 questions over two articles, bundled model.",
        "quality:answers",
        ("questions", "contains", "citation_precision", "unanswerable"),
    ),
    Headline(
        "### What an index costs",
        "One query for 100 chunks, random vectors of 256 dimensions.",
        "index_cost:asking",
        ("system", "chunks", "cpu", "recall", "memory"),
        (2, 3, 4, 5),
    ),
    Headline(
        "### Documents ranked by relevance",
        "Hybrid search by SmolLM2 with the adapter that comes with gerund; its first 40 documents ranked anew by the "
        "lift, alone and fused with the search by the default weight.",
        "ranking:default-hybrid",
        ("collection", "way", "queries", "ndcg", "interval", "gain", "p"),
        (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19),
    ),
    Headline(
        "## Training for both",
        "Cross-entropy over 128,256 tokens without keeping the logits.",
        "vocabulary_loss:loss",
        ("system", "precision", "memory", "ratio"),
    ),
    Headline(
        "### Large contrastive batches",
        "A step on 512 pairs in chunks of 32, with cached gradients.",
        "cached_contrastive:step",
        ("system", "memory", "ratio"),
    ),
    Headline(
        "### What training brings",
        "100 steps of UniMAE and MNTP, three seeds.",
        "training:unimae",
        ("arm", "sts/stsb cosine_spearman", "retrieval/medline ndcg_at_10", "mean"),
        (0, 1, 3, 5, 6, 7),
    ),
    Headline(
        "## Guided generation",
        "RankGen's beam search: 2 beams, 10 samples, 115 tokens after 256, compared with the released code.",
        "guided_search:search",
        ("scored by", "every", "system", "ratio"),
        (1, 2, 4, 5, 7, 9),
    ),
    Headline(
        "## Engine",
        "Texts of 24 tokens by several callers at once, eight slots.",
        "engine:writing",
        ("writers", "dtype", "system", "ratio"),
        (3, 9),
    ),
    Headline(
        "## Scorers of continuations",
        "Finding the true continuation among eleven, on books and Wikipedia.",
        "scorers:scorers",
        ("scorer", "books 11-way", "wiki 11-way"),
        (0, 2, 3, 4, 8),
    ),
    Headline(
        "### Generation ranked by a scorer",
        "200 continuations of 96 tokens from books, bundled model.",
        "decoding:writing",
        ("system", "mauve", "rep_4"),
        (0, 1, 8, 11, 12),
    ),
    Headline(
        "## Mining pairs",
        "Pairs of sentences with a long common substring, compared with GUR's released code on whole documents.",
        "mining:documents",
        ("document", "ratio"),
        (1, 4, 7, 10),
    ),
    Headline(
        "## Bulk work",
        "20,000 short texts in processes and on Ray.",
        "bulk:embed",
        ("system", "workers", "rate", "ratio"),
    ),
    Headline(
        "## GUR",
        "Three seeds on the bundled model's first base: title retrieval, and intents by nearest label.",
        "gur:default",
        ("arm", "title-retrieval/wiki recall_at_100", "zero-shot/banking77", "perplexity"),
        (0, 1, 2, 3),
    ),
)

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
