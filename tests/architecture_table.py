"""Who may import whom, as a table, and the pictures of it in docs/explanation/design.md.

`python -m tests.architecture_table` puts the pictures into that page again after a change.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "gerund"
PAGE = ROOT / "docs" / "explanation" / "design.md"

# From the ground up. A module may import what stands in an earlier row, and its own package. `data` is a side
# wing: see below.
ROWS = (
    ("errors", "types", "progress", "version"),
    ("text_analysis", "checks"),
    ("arrays",),
    ("poolings",),
    ("jobs",),
    ("settings",),
    ("quantization", "gguf_file"),
    ("gguf_architectures",),
    ("packed",),
    ("attention",),
    ("models",),
    ("inference",),
    ("scoring",),
    ("exporting",),
    ("language_model",),
    ("seq2seq_model",),
    ("entry",),
    ("worker_model", "light_model"),
    ("light_entry",),
    ("engine", "retrieval"),
    ("training", "evaluation", "doctor"),
    ("reporting",),
    ("integrations", "adaptation", "demo"),
    ("server",),
    ("cli",),
    ("papers",),
    ("__main__",),
)
BASE = (
    *(
        "errors",
        "types",
        "progress",
        "version",
        "text_analysis",
        "checks",
        "quantization",
        "poolings",
        "jobs",
    ),
    "settings",
)
# `data` imports only the base, and is imported by this part, its row and those above.
DATA_FROM = "retrieval"
RANK = {part: rank for rank, parts in enumerate(ROWS) for part in parts}


def exists(part: str) -> bool:
    """Whether the package has this part already."""
    path = SOURCE.joinpath(*part.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def import_picture() -> str:
    """Draw the table: a line a row, from the ground up."""
    rows = [", ".join(filter(exists, parts)) for parts in ROWS if any(map(exists, parts))]
    lines = [f"   {rows[0]}", *(f"<- {row}" for row in rows[1:])]
    base = ", ".join(f"`{part}`" for part in BASE)
    wing = f"`data` imports only {base}, and is imported by `{DATA_FROM}` and what comes after it."
    return "\n".join(["```text", *lines, "```", "", wing])


def package_picture() -> str:
    """List the packages and the modules beside them, each with the first line of its header."""
    return "\n".join(_below(SOURCE, 0))


def _below(folder: Path, depth: int) -> Iterator[str]:
    for path in sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file()):
        yield _line(f"{path.name}/", path / "__init__.py", depth)
        yield from _below(path, depth + 1)
    if folder == SOURCE:
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("__"):
                yield _line(path.name, path, depth)


def _line(name: str, path: Path, depth: int) -> str:
    header = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
    return f"{'    ' * depth}- `{name}`: {header[0].replace('``', '`').removesuffix('.') if header else ''}"


PICTURES = {"imports": import_picture, "packages": package_picture}


def with_pictures(page: str) -> str:
    """Return a page with its pictures drawn anew, each between two marks."""
    for name, draw in PICTURES.items():
        start, end = f"<!-- drawn: {name} -->", f"<!-- end of {name} -->"
        drawn = f"{start}\n\n{draw()}\n\n{end}"
        page = re.sub(f"{re.escape(start)}.*?{re.escape(end)}", lambda _, drawn=drawn: drawn, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_pictures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
