"""Validate the filter of a search, a condition in SQL, and rewrite it in SQL that means the same in every store.

A store's parser may stop after the first condition that it can parse, and would then return too much. So sqlglot
parses the full text, and only columns of an index, values, comparisons and a few functions on texts are allowed. The
result means the same to LanceDB (DataFusion) and to SQLite.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from gerund.checks import check_unicode
from gerund.errors import ConfigError

COLUMNS = ("source", "file", "title", "heading", "text", "start", "stop", "tokens")
"""What a filter may name; ``stop`` is the end of a chunk, since END is a word of SQL."""

_NUMBERS = frozenset(["start", "stop", "tokens"])
# The supported parts of a syntax tree; a tree with another part would lose it in the result.
_PARTS = frozenset(["this", "expression", "expressions", "low", "high", "is_string"])
# DataFusion's parser fails at 50 of its levels; each of these takes up to two.
_MAX_DEPTH = 20
# Sums of columns and numbers below this stay below 64 bits.
_LARGEST_NUMBER = 2**53
_CLOSED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
_QUOTES = "texts stand in single quotes"

_Type = Literal["text", "number", "condition"]
FUNCTIONS: dict[str, tuple[int, _Type]] = {
    "lower": (1, "text"), "upper": (1, "text"), "length": (1, "number"), "starts_with": (2, "condition"),
    "ends_with": (2, "condition"), "contains": (2, "condition"),
}  # fmt: skip
"""The functions of a filter: the number of texts that each takes, and the type of its result."""


def check_filter(where: Any) -> str | None:
    """Return a filter as stores take it, or None where there is none; a ``ConfigError`` has the place of the mistake.

    >>> check_filter("Source LIKE 'notes/%' and not tokens > 5")
    "((source LIKE 'notes/%') AND (NOT (tokens > 5)))"
    """
    if where is None:
        return None
    if not isinstance(where, str) or not where.strip():
        raise ConfigError(f"a filter is a condition in SQL, such as \"source LIKE 'notes/%'\", not {where!r}")
    check_unicode("the filter", where)
    try:
        return _Reader(where).condition()
    except RecursionError as error:
        raise bad_filter(where, "it is nested too deep") from error


def bad_filter(where: str, reason: str) -> ConfigError:
    """Return the error for a filter that cannot be used."""
    # LanceDB adds a list of its columns to the reason, some of which are internal.
    reason = reason.partition("Valid fields are")[0].rstrip(" .;,")
    return ConfigError(f"the filter {where!r} cannot be used: {reason}; its columns are {', '.join(COLUMNS)}")


def quoted(text: str) -> str:
    """Return a text as an SQL literal.

    >>> print(quoted("it's"))
    'it''s'
    """
    return "'" + text.replace("'", "''") + "'"


class _Reader:
    """Rewrites a filter in SQL that means the same in every store."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._depth = 0

    def condition(self) -> str:
        if "\0" in self._where:
            raise self._refused("it has a NUL character", self._where.index("\0"))
        return self._written(self._parsed(), "condition")

    def _parsed(self) -> Any:
        from sqlglot import Dialect, TokenType, exp
        from sqlglot.errors import ParseError, TokenError

        dialect = Dialect.get_or_raise(None)
        try:
            tokens = dialect.tokenize(self._where)
        except TokenError as error:
            rest = _CLOSED.sub(lambda closed: " " * len(closed[0]), self._where)
            start = min((place for sign in ("'", '"', "/*") if (place := rest.find(sign)) >= 0), default=None)
            raise self._refused("a quotation or comment that begins there does not end", start) from error
        for token in tokens:
            if token.token_type == TokenType.SEMICOLON:
                raise self._refused("a filter is one condition, without a semicolon", token.start)
        if not tokens:
            raise self._refused("there is only a comment", None)
        try:
            [tree] = dialect.parser().parse_into(exp.Condition, tokens, self._where)
        except ParseError as error:
            raise self._unreadable(error.errors[0] if error.errors else {}, tokens) from error
        return tree

    def _unreadable(self, error: dict[str, Any], tokens: Sequence[Any]) -> ConfigError:
        """Return the error for a text that is not SQL, at the token where parsing stopped."""
        place = error.get("line"), error.get("col")
        at = next((token for token in tokens if (token.line, token.col) == place), tokens[-1])
        if at is tokens[-1] and "Unexpected" not in str(error.get("description")):
            return self._refused("something is missing there", len(self._where.rstrip()))
        return self._refused(f"{self._where[at.start : at.end + 1]!r} is not expected there", at.start)

    def _refused(self, reason: str, start: int | None) -> ConfigError:
        return bad_filter(self._where, reason if start is None else f"at character {start + 1}: {reason}")

    def _refused_at(self, node: Any, reason: str) -> ConfigError:
        """Return the error for a part of the tree, at its first word with a known place."""
        starts = [part.meta["start"] for part in node.walk() if "start" in part.meta]
        return self._refused(reason, min(starts, default=None))

    def _written(self, node: Any, expected: _Type) -> str:
        """Return a part of the tree as SQL, which must have a type."""
        sql, actual = self._typed(node)
        if actual != expected:
            raise self._refused_at(node, f"{node.sql()} is a {actual} where a {expected} is needed")
        return sql

    def _typed(self, node: Any) -> tuple[str, _Type]:
        from sqlglot import exp

        if isinstance(node, exp.Paren):
            return self._typed(node.this)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._refused_at(node, "it is nested too deep there")
        try:
            is_known = {name for name, value in node.args.items() if value} <= _PARTS
            if isinstance(node, exp.Like | exp.ILike):
                return self._like(node)
            for kinds, write in self._kinds(exp):
                if type(node) in kinds and is_known:
                    return write(node)
            if isinstance(node, exp.Func):
                return self._function(node)
        finally:
            self._depth -= 1
        # A text without quotes, such as notes/bread.txt, is read as columns.
        is_text = any(column.name.lower() not in COLUMNS for column in node.find_all(exp.Column))
        raise self._refused_at(node, f"{node.sql()} is not possible in a filter{f'; {_QUOTES}' if is_text else ''}")

    def _kinds(self, exp: Any) -> Iterator[tuple[tuple[type, ...], Callable[[Any], tuple[str, _Type]]]]:
        yield (exp.Column,), self._column
        yield (exp.Literal, exp.Neg), self._value
        yield (exp.Boolean,), lambda node: ("TRUE" if node.this else "FALSE", "condition")
        yield (exp.And, exp.Or), self._joined
        yield (exp.Not,), lambda node: (f"(NOT {self._written(node.this, 'condition')})", "condition")
        yield (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE), self._compared
        yield (exp.In,), self._one_of
        yield (exp.Between,), self._between
        yield (exp.Is,), self._is_null
        yield (exp.Add, exp.Sub), self._sum

    def _column(self, node: Any) -> tuple[str, _Type]:
        name = node.name if node.this.args.get("quoted") else node.name.lower()
        if name not in COLUMNS:
            raise self._refused_at(node, f"there is no column {node.sql()}; {_QUOTES}")
        return name, "number" if name in _NUMBERS else "text"

    def _value(self, node: Any) -> tuple[str, _Type]:
        sign, literal = ("-", node.this) if node.key == "neg" else ("", node)
        if literal.key != "literal" or (sign and literal.is_string):
            raise self._refused_at(node, f"{node.sql()} is not possible in a filter")
        if literal.is_string:
            return quoted(literal.this), "text"
        number = float(literal.this)
        if not math.isfinite(number) or abs(number) >= _LARGEST_NUMBER:
            raise self._refused_at(node, f"{node.sql()} is too large a number")
        if not number.is_integer():
            raise self._refused_at(node, f"{node.sql()} is not a whole number, as those of an index are")
        return f"{sign}{int(number)}", "number"

    def _joined(self, node: Any) -> tuple[str, _Type]:
        word = f" {node.key.upper()} "
        parts = [self._written(part, "condition") for part in node.flatten()]
        # Pairs of pairs: a chain of a thousand conditions would be a thousand levels to the stores' parsers.
        while len(parts) > 1:
            pairs = [parts[first : first + 2] for first in range(0, len(parts), 2)]
            parts = [f"({word.join(pair)})" if len(pair) > 1 else pair[0] for pair in pairs]
        return parts[0], "condition"

    def _compared(self, node: Any) -> tuple[str, _Type]:
        sign = {"eq": "=", "neq": "<>", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}[node.key]
        left, kind = self._scalar(node.this)
        return f"({left} {sign} {self._written(node.expression, kind)})", "condition"

    def _scalar(self, node: Any) -> tuple[str, _Type]:
        sql, kind = self._typed(node)
        if kind == "condition":
            raise self._refused_at(node, f"{node.sql()} is a condition where a text or a number is needed")
        return sql, kind

    def _one_of(self, node: Any) -> tuple[str, _Type]:
        left, kind = self._scalar(node.this)
        values = node.expressions
        if not values:
            raise self._refused_at(node, "IN needs a list of values, such as IN ('a', 'b')")
        return f"({left} IN ({', '.join(self._written(value, kind) for value in values)}))", "condition"

    def _between(self, node: Any) -> tuple[str, _Type]:
        left, kind = self._scalar(node.this)
        low, high = (self._written(node.args[end], kind) for end in ("low", "high"))
        return f"({left} BETWEEN {low} AND {high})", "condition"

    def _like(self, node: Any) -> tuple[str, _Type]:
        pattern, is_negated = node.expression, bool(node.args.get("negate"))
        if pattern.key != "literal" or not pattern.is_string or len(node.args) - ("negate" in node.args) > 2:
            raise self._refused_at(pattern, "LIKE needs a text in single quotes, such as LIKE 'notes/%'")
        if len(pattern.this) - len(pattern.this.rstrip("\\")) & 1:
            raise self._refused_at(pattern, "the pattern ends in a backslash, which a character must follow")
        left, right = self._written(node.this, "text"), pattern.this
        if node.key == "ilike":
            left, right = f"lower({left})", right.lower()
        like = f"({left} LIKE {quoted(right)})"
        return f"(NOT {like})" if is_negated else like, "condition"

    def _is_null(self, node: Any) -> tuple[str, _Type]:
        if node.expression.key != "null":
            raise self._refused_at(node, "IS is for NULL alone: IS NULL, IS NOT NULL")
        return f"({self._scalar(node.this)[0]} IS NULL)", "condition"

    def _sum(self, node: Any) -> tuple[str, _Type]:
        sign = "+" if node.key == "add" else "-"
        return f"({self._written(node.this, 'number')} {sign} {self._written(node.expression, 'number')})", "number"

    def _function(self, node: Any) -> tuple[str, _Type]:
        name = str(node.this).lower() if node.key == "anonymous" else node.sql_name().lower()
        if name not in FUNCTIONS:
            raise self._refused_at(node, f"there is no function {name} in a filter; there are {', '.join(FUNCTIONS)}")
        takes, gives = FUNCTIONS[name]
        values = [value for value in node.args.values() if value]
        if len(values) != takes or not {part for part, value in node.args.items() if value} <= _PARTS:
            raise self._refused_at(node, f"{name} takes {'a text' if takes == 1 else 'two texts'}")
        return f"{name}({', '.join(self._written(value, 'text') for value in values)})", gives
