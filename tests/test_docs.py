"""What README, docs and docstrings say is true: examples run, commands and options exist, links lead somewhere.

Checks of many files are one test each, which names every offender.
"""

import ast
import doctest
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import gerund
from gerund.cli.main import app
from gerund.errors import MissingDependencyError
from tests.architecture_table import PAGE, PICTURES, with_pictures
from tests.cli.helpers import run_cli
from tests.pictures import picture
from tests.test_architecture import FILES, PACKAGE, module_name
from tests.tiny import CONFIGS, RECURRENT, REFUSED

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted(PACKAGE.glob("assets/*/*.md"))]
# What was done is told with the names of its time.
HISTORY = {ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "LOG.md"}
HAS_DEFAULT = (PACKAGE / "assets" / "default" / "config.json").is_file()
needs_default = pytest.mark.skipif(not HAS_DEFAULT, reason="the bundled model is not in this checkout")

FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)|<img[^>]* src=\"(?P<image>[^\"]+)\"")
CODE_PATH = re.compile(r"`(?P<path>[\w.-]+(?:/[\w.-]+)+\.(?:py|yaml))`")
# What a page's examples need beyond gerund.
LIBRARIES = {DOCS / "how-to" / "frameworks.md": ("langchain_core", "llama_index.core", "haystack")}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[tuple[int, str, str]]:
    """Return line, info string and body of every fenced block in one of the languages."""
    text = read(path)
    found = [(text.count("\n", 0, match.start()) + 1, match["info"], match["body"]) for match in FENCE.finditer(text)]
    return [block for block in found if block[1].split(" ", maxsplit=1)[0] in languages]


def room(path: Path) -> str:
    """Return the part of the package to which a file belongs."""
    return module_name(path).split(".")[0] or "gerund"


def slow_or_full(part: str) -> Any:
    """Mark the parts that import frameworks, or start an engine on the bundled model."""
    marks = {"integrations": pytest.mark.slow, "engine": pytest.mark.full}
    return pytest.param(part, marks=marks[part]) if part in marks else part


WITH_EXAMPLES = [path for path in FILES if ">>>" in read(path)]
LOADED: dict[str, gerund.LanguageModel] = {}
PARTS = sorted({room(path) for path in WITH_EXAMPLES})  # integrations import one framework after the other


@pytest.fixture
def loaded_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the bundled model once for each set of options: most examples begin with it, and none changes it."""
    load = gerund.load

    def give(*arguments: object, **settings: object) -> gerund.LanguageModel:
        if arguments:
            return load(*arguments, **settings)
        key = repr(sorted(settings.items()))
        if key not in LOADED:
            LOADED[key] = load(**settings) if settings else request.getfixturevalue("bundled")
        return LOADED[key]

    monkeypatch.setattr(gerund, "load", give)


class Finder(doctest.DocTestFinder):
    """Finds the examples of decorated functions too, whose wrappers are another module's."""

    def _from_module(self, module: Any, object: Any) -> bool:
        return bool(super()._from_module(module, inspect.unwrap(object) if callable(object) else object))  # type: ignore[misc]


@pytest.mark.parametrize("part", [slow_or_full(part) for part in PARTS])
@pytest.mark.usefixtures("loaded_once")
def test_docstring_examples(part: str) -> None:
    said: list[str] = []
    for path in (path for path in WITH_EXAMPLES if room(path) == part):
        name = f"gerund.{module_name(path)}".rstrip(".")
        try:
            module = importlib.import_module(name)
        except MissingDependencyError:  # an integration with what is not installed
            continue
        for test in Finder(exclude_empty=True).find(module, name):
            if not HAS_DEFAULT and "gerund.load()" in (test.docstring or ""):
                continue
            test.globs["gerund"] = gerund
            runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS, verbose=False)
            runner.run(test, out=said.append)
    assert not said, "".join(said)


# Pages that train, convert or start engines; ``test_names_in_python_examples_exist`` reads them in ``make check``.
COSTLY = {
    "adapt-to-your-documents.md", "convert-a-checkpoint.md", "engine.md", "index.md", "rank-documents.md",
    "train-a-model.md",
}  # fmt: skip


def marked(page: Path) -> Any:
    return pytest.param(page, marks=pytest.mark.full) if page.name in COSTLY else page


def is_there(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, name) or (is_package and importlib.util.find_spec(f"{module}.{name}") is not None)


def test_names_in_python_examples_exist() -> None:
    offenders = []
    for page in PAGES:
        for line, _, body in blocks(page, "python"):
            named: set[tuple[str, str]] = set()
            for node in ast.walk(ast.parse(body)):
                if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "gerund":
                    named |= {(str(node.module), alias.name) for alias in node.names}
                elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "gerund":
                    named.add(("gerund", node.attr))
            offenders += [f"{page_id(page)}, block at line {line}: {name}" for name in named if not is_there(*name)]
    assert not offenders, "\n".join(offenders)


@pytest.mark.slow
@needs_default
@pytest.mark.usefixtures("loaded_once")
@pytest.mark.parametrize("page", [marked(page) for page in PAGES if blocks(page, "python")], ids=page_id)
def test_python_examples_run_as_they_stand(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    for library in LIBRARIES.get(page, ()):
        pytest.importorskip(library, reason=f"{library} is not installed")
    names: dict[str, object] = {}
    for line, _, body in blocks(page, "python"):
        # Blank lines in front, so that an error names the page's own line.
        exec(compile("\n" * line + body, str(page), "exec"), names)  # one after the other, as a reader types them


def command_lines(page: Path) -> list[tuple[int, str]]:
    found = []
    for line, _, body in blocks(page, "sh", "console"):
        joined = body.replace("\\\n", " ")
        found += [(line, text.removeprefix("$ ").strip()) for text in joined.splitlines() if text.strip()]
    return found


@pytest.mark.full  # it trains, and each of its commands has tests of its own
@needs_default
def test_the_tutorial_of_the_command_line_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = 0
    for line, text in command_lines(DOCS / "tutorial" / "command-line.md"):
        if text.startswith("gerund "):
            words = shlex.split(text, comments=True)
            words, target = (words[:-2], words[-1]) if words[-2] == ">" else (words, None)
            done = run_cli(*words[1:])
            assert done.code == 0, f"line {line}: {text}: {done.err}"
            if target:
                Path(target).write_text(done.out, encoding="utf-8")
            ran += 1
        else:
            subprocess.run(["bash", "-c", text], check=True)
    assert ran >= 10
    assert (tmp_path / "report" / "report.html").is_file()


@cache
def commands() -> dict[str, set[str]]:
    """Return every command and its options."""
    found = get_command(app).commands
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in found.items()
    }


def wrong_in(text: str) -> str:
    """Return what a line that calls `make` or `gerund` names and is not there; the empty string for nothing."""
    parts = text.split(" | ")
    words = shlex.split(parts[-1] if parts[-1].startswith("gerund ") else parts[0], comments=True)
    if words and words[0] == "make":
        targets = set(re.findall(r"^([a-z][a-z-]*):", read(ROOT / "Makefile"), re.MULTILINE))
        return ", ".join({word for word in words[1:] if "=" not in word} - targets)
    if words and words[0] == "gerund" and not words[1].startswith("-"):
        if words[1] not in commands():
            return words[1]
        used = {word.split("=")[0] for word in words[2:] if re.fullmatch(r"--?[A-Za-z][\w-]*(=.*)?", word)}
        return ", ".join(used - {"--help", "-h"} - commands()[words[1]])
    return ""


def test_commands_and_their_options_exist() -> None:
    offenders = []
    for page in PAGES:
        for line, text in command_lines(page):
            if wrong := wrong_in(text):
                offenders.append(f"{page_id(page)}, block at line {line}: {wrong} in {text}")
        for text in re.findall(r"`(gerund [a-z][^`]*)`", read(page)):
            if page not in HISTORY and (wrong := wrong_in(text.replace("|", ""))):
                offenders.append(f"{page_id(page)}: {wrong} in `{text}`")
    assert not offenders, "\n".join(offenders)


def test_every_command_has_examples_and_a_guide() -> None:
    guides = [DOCS / "how-to", DOCS / "tutorial"]
    shown = {words[1] for folder in guides for page in folder.glob("*.md") for words in calls(page)} | {
        words[1] for words in calls(README)
    }
    offenders = [f"gerund {name} is shown in no tutorial or guide" for name in commands() if name not in shown]
    for name, command in get_command(app).commands.items():
        examples = [line.strip() for line in command.help.splitlines() if line.strip().startswith("gerund ")]
        offenders += [] if examples else [f"gerund {name} --help shows no example"]
        offenders += [f"{wrong} in {example}" for example in examples if (wrong := wrong_in(example))]
    assert not offenders, "\n".join(offenders)


def calls(page: Path) -> list[list[str]]:
    return [text.split() for _, text in command_lines(page) if text.startswith("gerund ")]


def test_links_lead_somewhere() -> None:
    offenders = []
    for page in PAGES:
        for match in LINK.finditer(FENCE.sub("", read(page))):
            target = match["target"] or match["image"]
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                offenders.append(f"{page_id(page)} links to {target}")
    assert not offenders, "\n".join(offenders)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, made as the usual renderers make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", read(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_that_are_named_exist() -> None:
    offenders = []
    for page in PAGES:
        if page in HISTORY:
            continue
        for match in CODE_PATH.finditer(read(page)):
            if not any((folder / match["path"]).is_file() for folder in (ROOT, PACKAGE)):
                offenders.append(f"{page_id(page)} names {match['path']}")
    assert not offenders, "\n".join(offenders)


def test_mask_pictures_are_what_the_code_does() -> None:
    page = DOCS / "explanation" / "attention-plans.md"
    found = [(info, body) for _, info, body in blocks(page, "text") if " plan " in info]
    assert len(found) >= 8
    wrong = []
    for info, body in found:
        _, _, name, n_layers, *settings = info.split()
        numbers = {key: int(value) for key, value in (setting.split("=") for setting in settings)}
        if body != (right := picture(name, int(n_layers), **numbers) + "\n"):
            wrong.append(f"{info} is\n{right}")
    assert not wrong, "\n".join(wrong)


def test_pictures_of_packages_and_imports_are_what_the_table_says() -> None:
    page = read(PAGE)
    assert all(f"<!-- drawn: {name} -->" in page for name in PICTURES)
    assert page == with_pictures(page), "run: python -m tests.architecture_table"


def test_every_plan_and_every_tested_architecture_is_documented() -> None:
    page = read(DOCS / "reference" / "attention-plans.md")
    missing = [name for name in (*gerund.PLAN_NAMES, *CONFIGS, *RECURRENT, *REFUSED) if f"`{name}`" not in page]
    assert not missing


def test_every_public_name_is_in_the_reference() -> None:
    page = read(DOCS / "reference" / "python.md")
    missing = [name for name in gerund.__all__ if f"\n::: gerund.{name}\n" not in page]
    assert not missing, "docs/reference/python.md needs a line `::: gerund.NAME` for each"
