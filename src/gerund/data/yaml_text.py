"""YAML as plain data: safely, to a bounded depth, and every mistake in it as an error of YAML.

PyYAML lets what a value's own constructor raises come through as it is: a date that is none, a number of thousands of
digits. Here they are errors as others are.

Knows: YAML. Does not know: files, what is in them.
"""

import re
from typing import Any

import yaml

# Levels of nesting; a recipe has six.
_DEEPEST = 64
# Python writes no whole number of more than 4300 digits out, nor do messages.
_MOST_BITS = 4096


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, with which ``1e-3`` is a number, as it is everywhere but in YAML 1.1."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node, unless it lies so deep that reading it would exhaust the stack."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise yaml.YAMLError(f"nested more than {_DEEPEST} levels deep")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node; what its constructor cannot do with it is an error at its place."""
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            raise self._refused(node, "this is no value of its kind, such as a date or a number") from error
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise self._refused(node, "this number is too large")
        return value

    def _refused(self, node: yaml.Node, reason: str) -> yaml.YAMLError:
        return yaml.constructor.ConstructorError(None, None, reason, node.start_mark)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str) -> Any:
    """Return what a YAML text says.

    Raises:
        yaml.YAMLError: it is no YAML, or says something that cannot be had.

    >>> parse_yaml("steps: 1e3")
    {'steps': 1000.0}
    """
    return yaml.load(text, _Loader)  # noqa: S506  # a subclass of SafeLoader
