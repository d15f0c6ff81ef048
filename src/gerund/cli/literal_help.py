"""A command whose help stands as it was written: a word in brackets is text, and no markup of the help printer.

Knows: typer's help. Does not know: any command.
"""

from copy import copy
from typing import Any

from typer import core


class LiteralHelp(core.TyperCommand):
    """A command that prints ``[blank]`` in its help where ``[blank]`` was written."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; without rich there is no markup, and nothing to escape."""
        shown = copy(self)
        # Newer versions of typer may be told to do without rich.
        if getattr(core, "HAS_RICH", True):
            from rich.markup import escape

            shown.help = escape(self.help or "")
            shown.params = [copy(param) for param in self.params]
            for param in shown.params:
                if text := getattr(param, "help", None):
                    param.help = escape(text)  # type: ignore[attr-defined]
        super(LiteralHelp, shown).format_help(ctx, formatter)
