"""Docstrings for the site: examples and roles as Markdown, and settings from their declarations.

Knows: griffe's objects. Does not know: what a docstring says.
"""

import inspect
import re
from typing import Any

from griffe import Extension, Parameter, ParameterKind, Parameters

from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import LoadKeywords, ModelSpec, parameters_of, with_arguments
from gerund.settings.plan import AttentionPlan

# What lists its settings at run time, from their declarations.
DECLARED = {f"{one.__module__}.{one.__name__}": one for one in (AttentionPlan, EncoderConfig, ModelSpec)}
# Markdown would take bare `>>>` lines for quotations.
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!$).*)*", re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth|attr|data|exc|mod):`~?([^`]+)`")


class Docstrings(Extension):
    """Rewrites the docstring of every object that is read."""

    def on_object(self, *, obj: Any, **_more: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.path in DECLARED:
            obj.docstring.value = inspect.getdoc(DECLARED[obj.path])
        elif obj.path == "gerund.entry.load":
            obj.docstring.value = with_arguments(obj.docstring.value, LoadKeywords)
            obj.parameters = Parameters(*map(_parameter, parameters_of(LoadKeywords)))
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def _parameter(own: inspect.Parameter) -> Parameter:
    annotation = re.sub(r"\b(?:typing|pathlib|collections\.abc|gerund\.[\w.]+)\.", "", str(own).partition(": ")[2])
    kind = ParameterKind.keyword_only if own.kind is own.KEYWORD_ONLY else ParameterKind.positional_or_keyword
    return Parameter(own.name, annotation=annotation.removesuffix(" = None"), kind=kind, default="None")


def as_markdown(docstring: str) -> str:
    r"""Return a docstring with its examples in blocks of code, and names instead of roles.

    >>> as_markdown("Add, as :func:`sum`.\n\n>>> 1 + 1\n2")
    'Add, as `sum`.\n\n```pycon\n>>> 1 + 1\n2\n```'
    """
    return _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", _ROLE.sub(r"`\1`", docstring))
