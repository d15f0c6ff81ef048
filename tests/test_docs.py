"""What README, docs and docstrings say is true: examples run, commands and options exist, links lead somewhere."""

import doctest
import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

import gerund
from gerund.cli.main import app
from tests.pictures import picture
from tests.test_architecture import FILES, PACKAGE, module_name
from tests.tiny import CONFIGS, REFUSED

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(PACKAGE.glob("assets/*/*.md"))]
HAS_DEFAULT = (PACKAGE / "assets" / "default" / "config.json").is_file()
needs_default = pytest.mark.skipif(not HAS_DEFAULT, reason="the embedded default model is not in this checkout")

FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)|<img[^>]* src=\"(?P<image>[^\"]+)\"")
# Paths of somebody's machine, hosts that packages come from, notes to oneself.
FOREIGN = re.compile(r"(?<![\w.])/(?:work|root|home|opt|Users)/|pypi[.]org|pythonhosted|\b(?:TODO|FIXME)\b")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[tuple[int, str, str]]:
    """Return line, info string and body of every fenced block in one of the languages."""
    text = read(path)
    found = [(text.count("\n", 0, match.start()) + 1, match["info"], match["body"]) for match in FENCE.finditer(text)]
    return [block for block in found if block[1].split(" ", maxsplit=1)[0] in languages]


def docstring_examples() -> Iterator[object]:
    for path in FILES:
        name = f"gerund.{module_name(path)}".rstrip(".")
        if ">>>" not in read(path):
            continue
        for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name), name):
            if test.examples:
                marks = [needs_default] if "gerund.load()" in test.docstring else []
                yield pytest.param(test, id=test.name, marks=marks)


@pytest.mark.parametrize("test", list(docstring_examples()))
def test_docstring_examples(test: doctest.DocTest) -> None:
    test.globs["gerund"] = gerund
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    said: list[str] = []
    runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


@needs_default
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_id)
def test_python_examples_run_as_they_stand(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
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


@cache
def commands() -> dict[str, set[str]]:
    """Return every command and its options."""
    found = get_command(app).commands
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in found.items()
    }


def check_command(text: str, where: str) -> None:
    """Fail unless a line that calls `make` or `gerund` calls something that exists."""
    parts = text.split(" | ")
    words = shlex.split(parts[-1] if parts[-1].startswith("gerund ") else parts[0], comments=True)
    if words and words[0] == "make":
        targets = set(re.findall(r"^([a-z][a-z-]*):", read(ROOT / "Makefile"), re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word} <= targets, where
    if words and words[0] == "gerund" and not words[1].startswith("-"):
        assert words[1] in commands(), where
        used = {word.split("=")[0] for word in words[2:] if re.fullmatch(r"--?[A-Za-z][\w-]*(=.*)?", word)}
        assert used - {"--help", "-h"} <= commands()[words[1]], where


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_their_options_exist(page: Path) -> None:
    for line, text in command_lines(page):
        check_command(text, f"{page_id(page)}, block at line {line}: {text}")
    for name in re.findall(r"`gerund ([a-z][a-z-]*)", read(page)):
        assert name in commands(), f"{page_id(page)} names `gerund {name}`"


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_examples_and_a_place_in_the_docs(name: str) -> None:
    help_text = get_command(app).commands[name].help
    examples = [line.strip() for line in help_text.splitlines() if line.strip().startswith("gerund ")]
    assert examples, f"gerund {name} --help shows no example"
    for example in examples:
        check_command(example, example)
    assert f"\n## {name}\n" in read(ROOT / "docs" / "cli.md")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(read(page)):
        target = match["target"] or match["image"]
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page_id(page)} links to {target}"
        if anchor:
            assert anchor in anchors(path), f"{page_id(page)} links to {target}"


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, made as the usual renderers make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", read(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name]


def test_nothing_names_a_machine() -> None:
    endings = {".py", ".md", ".yaml", ".toml", ".txt", ".json", ".jsonl", ".cfg", ""}
    for path in tracked():
        if path.suffix in endings and path.is_file() and path != Path(__file__):
            found = FOREIGN.search(read(path))
            assert not found, f"{page_id(path)} has {found[0]!r}"


def test_mask_pictures_are_what_the_code_does() -> None:
    found = [(info, body) for _, info, body in blocks(ROOT / "docs" / "attention.md", "text") if " plan " in info]
    assert len(found) >= 8
    for info, body in found:
        _, _, name, n_layers, *settings = info.split()
        numbers = {key: int(value) for key, value in (setting.split("=") for setting in settings)}
        assert body == picture(name, int(n_layers), **numbers) + "\n", info


def test_every_plan_and_every_tested_architecture_is_documented() -> None:
    page = read(ROOT / "docs" / "attention.md")
    for name in (*gerund.PLAN_NAMES, *CONFIGS, *REFUSED):
        assert f"`{name}`" in page, name


def test_the_readme_tree_names_every_file() -> None:
    [tree] = [body for _, info, body in blocks(ROOT / "README.md", "text") if info.endswith("tree")]
    entries, folders = [], []
    for line in tree.splitlines():
        name = line.split("#")[0].rstrip()
        depth = (len(name) - len(name.lstrip())) // 2
        folders[depth:] = [name.strip()]
        entries.append("".join(folders))
        assert "#" in line or name.endswith("/"), f"{name.strip()} has no comment"
    for entry in entries:
        assert (ROOT / entry).exists(), f"the tree names {entry}"
    for path in FILES:
        name = page_id(path)
        if path.name != "__init__.py" or name == "src/gerund/__init__.py":
            assert name in entries, f"the tree lacks {name}"
