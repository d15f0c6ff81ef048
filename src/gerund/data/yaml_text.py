"""Parse YAML safely, with a nesting limit; every error is a ``yaml.YAMLError``.

PyYAML passes on what a value's own constructor raises: an impossible date, a number of thousands of digits.
"""

import re
from typing import Any

import yaml

# Levels of nesting; a recipe has six.
_DEEPEST = 64
# Python prints no integer of more than 4300 digits.
_MOST_BITS = 4096


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, in which ``1e-3`` is a number, as it is everywhere except in YAML 1.1."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node, unless it is so deep that reading it would exhaust the stack."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise yaml.YAMLError(f"nested more than {_DEEPEST} levels deep")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node; an error of its constructor gets the node's place."""
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            raise self._fault(node, "this is no value of its kind, such as a date or a number") from error
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise self._fault(node, "this number is too large")
        return value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the next mapping; a key given twice is a mistake, though ``<<`` may bring one that is given too."""
        node = super().compose_mapping_node(anchor)
        given = set[tuple[str, str]]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in given:
                    raise self._fault(key, f"{key.value!r} is given twice")
                given.add((key.tag, key.value))
        return node

    def _fault(self, node: yaml.Node, reason: str) -> yaml.YAMLError:
        return yaml.constructor.ConstructorError(None, None, reason, node.start_mark)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text into plain data.

    >>> parse_yaml("steps: 1e3")
    {'steps': 1000.0}
    """
    return yaml.load(text, _Loader)  # noqa: S506  # a subclass of SafeLoader
