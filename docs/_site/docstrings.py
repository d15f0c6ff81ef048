"""Makes Markdown of what docstrings hold for other readers: bare examples, and roles of reStructuredText.

Knows: griffe's objects. Does not know: what a docstring says.
"""

import re
from typing import Any

from griffe import Extension

# Markdown would take bare `>>>` lines for quotations.
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!$).*)*", re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth|attr|data|exc|mod):`~?([^`]+)`")


class Docstrings(Extension):
    """Rewrites the docstring of every object that is read."""

    def on_object(self, *, obj: Any, **_more: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    r"""Return a docstring with its examples in blocks of code, and names instead of roles.

    >>> as_markdown("Add, as :func:`sum`.\n\n>>> 1 + 1\n2")
    'Add, as `sum`.\n\n```pycon\n>>> 1 + 1\n2\n```'
    """
    return _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", _ROLE.sub(r"`\1`", docstring))
