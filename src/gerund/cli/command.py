"""Shared behavior of commands: help, argument validation, interrupts.

Knows: typer's commands, what options of one name mean in every command. Does not know: any command.
"""

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

from typer import core

from gerund.checks import place
from gerund.cli.text_io import tell
from gerund.errors import ConfigError, GerundError
from gerund.progress import progress_lines
from gerund.settings.encoder import DTYPE_NAMES, unknown_dtype

# Characters of a text that a message shows.
_SHOWN = 60


class LiteralHelp(core.TyperCommand):
    """A command whose help has ``[blank]`` where that was written, and line breaks where the terminal ends."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; without rich there is no markup, and nothing to escape."""
        shown = copy(self)
        shown.help = _unwrapped(self.help or "")
        # Newer versions of typer may be told to do without rich.
        if getattr(core, "HAS_RICH", True):
            from rich.markup import escape

            shown.help = escape(shown.help)
            shown.params = [copy(param) for param in self.params]
            for param in shown.params:
                if text := getattr(param, "help", None):
                    param.help = escape(text)  # type: ignore[attr-defined]
        super(LiteralHelp, shown).format_help(ctx, formatter)


def _unwrapped(text: str) -> str:
    r"""Return a help text with a line for each paragraph, indented examples excepted.

    >>> _unwrapped("What is\nsaid.\n\n    gerund embed a\n    gerund embed b")
    'What is said.\n\n    gerund embed a\n    gerund embed b'
    """
    paragraphs = text.split("\n\n")
    return "\n\n".join(part if part.startswith("    ") else " ".join(part.split("\n")) for part in paragraphs)


class CheckedCommand(LiteralHelp):
    """A command that refuses invalid text, impossible paths and unknown types."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; where there is one too many, say how a model is named."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer brings a copy of click, whose exceptions have no public name
            extra = "unexpected extra argument" in getattr(error, "message", "")
            if extra and any("-m" in param.opts for param in self.params):
                error.message += "; a model is named with -m, as in -m smollm2"  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        for param in self.params:
            name = str(param.name)
            called = max(param.opts, key=len) if param.param_type_name == "option" else f"the {name}"
            for value in _each(ctx.params.get(name)):
                _check(called, value)
        dtype = ctx.params.get("dtype")
        if dtype is not None and dtype not in DTYPE_NAMES:
            raise unknown_dtype(dtype)
        for name in ("model", "answer_with", "rerank_with"):
            if isinstance(model := ctx.params.get(name), str):
                _demand_reachable(model)
        return super().invoke(ctx)


def _demand_reachable(model: str) -> None:
    """Refuse a model that does not exist before torch is imported, which takes seconds."""
    from gerund.models.sources import SENTENCE_TRANSFORMERS, find

    if model.startswith(SENTENCE_TRANSFORMERS):
        return  # of these the command knows more
    try:
        source = find(model)
    except GerundError:
        if any(char.isspace() for char in model):
            return  # a text in the model's place, of which the command may say more
        raise
    source.demand_reachable()


def _each(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _each(item)
    else:
        yield value


def _check(called: str, value: Any) -> None:
    if isinstance(value, Path):
        place(called, value)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            # The name of a file may hold any bytes, and then the file is there.
            if not _is_there(value):
                # Of several queries it is one: what it is called is that of all.
                label = called if called.startswith("-") else "the argument"
                raise ConfigError(f"{label} {_shown(value)} is not valid UTF-8, at character {error.start}") from error


def _shown(text: str) -> str:
    r"""Return the beginning of a text, what is no character spelled as a byte.

    >>> _shown("caf\udce9.txt")
    "'caf\\xe9.txt'"
    """
    begin = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return "'" + begin.encode(errors="surrogateescape").decode(errors="backslashreplace") + "'"


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


class LongCommand(CheckedCommand):
    """A command whose work may take hours.

    It reports its progress without a terminal too, and on an interruption what is saved and how to continue.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the work itself notes on its ``KeyboardInterrupt`` what it has kept."""
        try:
            with progress_lines():
                return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            notes = getattr(stop, "__notes__", None)
            for note in notes or ["nothing new was done yet; run the same command again"]:
                tell(f"interrupted; {note}")
            raise


class WholeFileCommand(CheckedCommand):
    """A command that writes ``--output`` at its end; on an interruption it says that nothing was written."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if output := ctx.params.get("output"):
                tell(f"interrupted; {output} was not written, and nothing of it is kept")
            raise
