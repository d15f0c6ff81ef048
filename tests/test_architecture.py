"""The house rules that a reader relies on and no linter knows: who imports whom, sizes, what is never used."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gerund
from tests.architecture_table import BASE, DATA_FROM, RANK

PACKAGE = Path(gerund.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

LINES_OF_A_FILE = 800
PUBLIC_CLASS = "language_model.py", 1320  # two thirds of it are signatures and documentation
LINES_OF_A_FUNCTION = 60

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "peft", "accelerate", "matplotlib")
NETWORK = ("requests", "urllib", "urllib3", "http", "httpx", "aiohttp", "socket", "ftplib")
LISTENS = ("server.connections", "server.running", "server.workers")
ASKS = "cli.remote"
HUB = "huggingface_hub"
# models.origin reads cards on this machine only; exporting.hub uploads what the user names.
ASKS_HUB = (
    *("models.loading", "models.sources", "models.catalog", "models.folder_files", "models.origin"),
    "exporting.hub",
)
UNSAFE = ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")


def module_name(path: Path) -> str:
    """Return the dotted name below `gerund`, the empty string for `gerund` itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = frozenset(f"gerund.{module_name(path)}" for path in FILES)


def part_of(module: str) -> str:
    """Return which part of the house a module belongs to."""
    return module if module in RANK else module.split(".", maxsplit=1)[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield every module that is imported anywhere in a file, in functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole module"
            known = [f"{node.module}.{alias.name}" for alias in node.names]
            # `from gerund.models import loading` brings a module, `from gerund.models.loading import read` a name.
            yield from (name if name in MODULES else str(node.module) for name in known)


def named(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_nothing_imports_upward() -> None:
    # gerund itself imports on use.
    assert [problem for path in FILES if module_name(path) for problem in upward(path)] == []


def upward(path: Path) -> Iterator[str]:
    """Yield what is wrong with a file's imports of the package's own modules."""
    module = module_name(path)
    own = part_of(module)
    for name in imported(tree_of(path)):
        if name != "gerund" and not name.startswith("gerund."):
            continue
        other = part_of(name.removeprefix("gerund").removeprefix("."))
        if not other:
            if own != "cli":
                yield f"{module} imports gerund itself, and with it everything above"
        elif own == "data":
            if other not in ("data", *BASE):
                yield f"data imports only the base, and {module} imports {name}"
        elif other == "data":
            if RANK[own] < RANK[DATA_FROM]:
                yield f"{module} imports {name}, which is for {DATA_FROM} and above"
        elif other != own and RANK[other] >= RANK[own] and other.split(".")[0] != own:
            yield f"{module} imports {name}, which stands above it"


def test_every_part_has_its_place() -> None:
    parts = {part_of(module_name(path)) for path in FILES} - {""}
    assert parts <= {*RANK, "data"}, "a new part of the package needs a row in tests/architecture_table.py"


def test_files_and_functions_stay_small() -> None:
    assert [problem for path in FILES for problem in too_large(path)] == []


def too_large(path: Path) -> Iterator[str]:
    """Yield a file that is too long (ask whether it has two jobs), and the functions in it that are."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    name, most = PUBLIC_CLASS
    if lines > (most if path.name == name and path.parent == PACKAGE else LINES_OF_A_FILE):
        yield f"{named(path)} has {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # What a function takes and promises may be long (a command's options are its signature); what it does
            # may not.
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body and body[-1].end_lineno - body[0].lineno >= LINES_OF_A_FUNCTION:
                yield f"{named(path)}: {node.name} is too long"


def test_no_unsafe_loading_and_no_network() -> None:
    assert [problem for path in FILES for problem in unsafe(path)] == []


def unsafe(path: Path) -> Iterator[str]:
    """Yield imports of what unpickles or opens connections, and calls that run a folder's code."""
    tree = tree_of(path)
    for name in imported(tree):
        # The server listens in one place, and hands what it listens on to its processes; an address of Ray's that
        # the user names is tried before Ray is.
        if name == "socket" and module_name(path) in (*LISTENS, "jobs.engine"):
            continue
        # One module asks a server, whose address the user gives.
        if name == "urllib.parse":  # reads and writes addresses, and opens none
            continue
        if name.split(".")[0] in ("http", "urllib") and module_name(path) == ASKS:
            continue
        if name.split(".")[0] in (*NETWORK, *UNSAFE):
            yield f"{named(path)} imports {name}"
        # Only a model that is named by a hub id is fetched; elsewhere the hub's exceptions are caught at most.
        here = module_name(path) in ASKS_HUB or name == f"{HUB}.errors"
        if name.split(".")[0] == HUB and not here:
            yield f"{named(path)} imports {name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if all(keyword.arg != "trust_remote_code" for keyword in node.keywords) and not (
            isinstance(node.func, ast.Attribute) and node.func.attr == "load"
        ):
            continue
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if keywords.get("trust_remote_code", "False") != "False":
            yield f"{named(path)}: code from a model's folder is never run"
        if ast.unparse(node.func) == "torch.load" and keywords.get("weights_only") != "True":
            yield f"{named(path)}: torch.load unpickles unless it is told not to"


def test_public_names() -> None:
    for name in gerund.__all__:
        assert getattr(gerund, name) is not None
    assert set(dir(gerund)) == {*gerund.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'pooling'"):
        _ = gerund.pooling


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    script = f"""
import sys
import gerund
from gerund.cli.main import app
from typer.main import get_command
from typer.testing import CliRunner
commands = sorted(get_command(app).commands)
for arguments in [["--help"], ["--version"], *([command, "--help"] for command in commands)]:
    assert CliRunner().invoke(app, arguments).exit_code == 0, arguments
print(*[name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
