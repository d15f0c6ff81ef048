"""Hooks of the MkDocs build: pages that live elsewhere in the repository, and pages made from the code itself.

Knows: which files outside ``docs/`` become pages, how links are rewritten for them, the marks that generated text
replaces. Does not know: what the pages say.
"""

import json
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from recipe_fields import objective_tables, recipe_tables

import gerund

ROOT = Path(__file__).resolve().parents[2]

# Files of the repository that are pages of the site too.
INCLUDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "src/gerund/assets/default/README.md": "reference/bundled-model.md",
    "benchmarks/LOG.md": "benchmarks-log.md",
}
# Where each of them lies in the repository.
SOURCES = {page: source for source, page in INCLUDED.items()}

_FENCE = re.compile(r"^(?P<fence>```+)(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<bang>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_MARK = re.compile(r"^<!-- generated: (?P<what>[a-z ]+) -->$", re.MULTILINE)
_KINDS = {"int": "NUMBER", "float": "NUMBER", "path": "PATH"}
_EXTERNAL = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//[^>]*>"
    r"|<link\b[^>]*\brel=\"?(?:stylesheet|preconnect|icon)[^>]*\bhref=\"?(?:https?:)?//[^>]*>"
)


def on_files(files: Any, config: Any) -> Any:
    """Add the files of the repository that are pages too."""
    for source, page in INCLUDED.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_more: Any) -> str:
    """Put generated text in, and lead every link to where its page lies in the site."""
    pages = {file.src_uri for file in files}
    text = _MARK.sub(lambda mark: GENERATORS[mark["what"]](), markdown)
    return rewritten(text, page.file.src_uri, pages)


def on_post_build(config: Any) -> None:
    """Refuse a site that would fetch anything from another host."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if found := _EXTERNAL.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path} fetches from another host: {found[0][:120]}")


def rewritten(markdown: str, page: str, pages: Iterable[str]) -> str:
    """Return the text of a page with links that hold in the site.

    Args:
        markdown: the text; what stands in fenced blocks stays, but for words behind the language, which are for tests.
        page: where the page lies in the site.
        pages: where all of them lie.
    """
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        language = fence["info"].split(" ", maxsplit=1)[0]
        parts += [_relinked(markdown[end : fence.start()], page, set(pages))]
        parts += [f"{fence['fence']}{language}\n{fence['body']}{fence['fence']}"]
        end = fence.end()
    return "".join([*parts, _relinked(markdown[end:], page, set(pages))])


def _relinked(text: str, page: str, pages: set[str]) -> str:
    source = SOURCES.get(page, f"docs/{page}")

    def link(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        name, hash_sign, anchor = target.partition("#")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        inside = INCLUDED.get(place, place.removeprefix("docs/"))
        if place.startswith("docs/") or inside in pages:
            there = posixpath.relpath(inside, posixpath.dirname(page))
            return f"{match['bang']}[{match['text']}]({there}{hash_sign}{anchor})"
        # A file that is no page, such as an example: its path says where it is.
        return match["text"] if match["text"].strip("`") == place else f"{match['text']} (`{place}`)"

    return _LINK.sub(link, text)


def command_reference() -> str:
    """Return what every command's own help says."""
    from typer.main import get_command

    from gerund.cli.main import app

    return "\n".join(_command(name, command) for name, command in sorted(get_command(app).commands.items()))


def _command(name: str, command: Any) -> str:
    lines, usage = [f"## {name}", ""], [f"gerund {name} [OPTIONS]"]
    help_text, _, examples = command.help.strip().partition("For example:")
    usage += [_argument(param) for param in command.params if param.param_type_name == "argument"]
    lines += [_escaped(help_text.strip()), "", "```text", " ".join(usage), "```", ""]
    if commands := [line.strip() for line in examples.splitlines() if line.strip()]:
        lines += ["```sh", *commands, "```", ""]
    for param in command.params:
        if param.param_type_name == "argument":
            lines += [f"`{_argument(param)}`", f":   {_described(param)}", ""]
        else:
            names = ", ".join(f"`{option}`" for option in (*param.opts, *param.secondary_opts))
            kind = "" if getattr(param, "is_flag", False) else f" {_kind(param)}"
            lines += [f"{names}{kind}", f":   {_described(param)}", ""]
    return "\n".join(lines)


def _argument(param: Any) -> str:
    name = (param.metavar or str(param.name).upper()).strip("[]").upper()
    return (name if param.required else f"[{name}]") + ("..." if param.nargs != 1 else "")


def _kind(param: Any) -> str:
    # Typer says what a value is in its own words, and before version 0.20 in click's.
    described = getattr(param, "type_descriptor", None)
    kind = getattr(described.annotation, "__name__", "text") if described else param.type.name
    name = next((word for start, word in _KINDS.items() if kind.lower().startswith(start)), "TEXT")
    return f"*{name}*" + (" (may be repeated)" if param.multiple else "")


def _described(param: Any) -> str:
    text = _escaped(" ".join((getattr(param, "help", None) or "").split()))
    default = param.default if getattr(param, "show_default", True) else None
    if param.required:
        text += " *Required.*"
    elif isinstance(default, str | int | float) and not isinstance(default, bool):
        text += f" Default: `{default}`."
    return text.strip() or "Its value."


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", text)


def recipe_list() -> str:
    """Return the recipes of the package, each with what it says of itself."""
    asked = [sys.executable, "-m", "gerund", "recipes", "--json"]
    found = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    rows = [f"| `{name}` | {_escaped(sentence)} |" for name, sentence in found.items()]
    return "\n".join(["| recipe | what it does |", "|---|---|", *rows])


def version() -> str:
    """Return which version the site describes."""
    return f"This site describes gerund {gerund.__version__}."


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": command_reference,
    "objectives": objective_tables,
    "recipe": recipe_tables,
    "recipes": recipe_list,
    "version": version,
}
