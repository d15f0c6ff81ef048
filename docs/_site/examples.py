"""Shows the worked examples of docstrings as code.

Docstrings hold them as bare `>>>` lines, which Markdown would take for quotations.

Knows: griffe's objects. Does not know: what an example shows.
"""

import re
from typing import Any

from griffe import Extension

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!$).*)*", re.MULTILINE)


class Examples(Extension):
    """Puts every example of a docstring into a block of code."""

    def on_object(self, *, obj: Any, **_more: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    r"""Return a docstring with its examples in blocks of code.

    >>> fenced("Add.\n\n>>> 1 + 1\n2")
    'Add.\n\n```pycon\n>>> 1 + 1\n2\n```'
    """
    return _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", docstring)
