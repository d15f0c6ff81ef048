"""Every error that gerund raises on purpose.

::

    GerundError                     root: catch this one
    ├── InputError                  your input cannot be used                   (exit status 2)
    │   ├── ConfigError             an unknown name, an impossible or contradictory setting
    │   ├── TextError               a text that is empty, too long, or not a string
    │   ├── DataError               a missing or malformed file; names file and line
    │   ├── OutputExistsError       the output exists and would be overwritten
    │   ├── FingerprintError        embeddings of two different encoders would be mixed
    │   └── StaleIndexError         another process has replaced an open index
    ├── ModelError                  the model can't be loaded, or isn't a decoder-only LM   (2)
    │   └── UnsupportedModelError   a layer doesn't obey the attention plan
    ├── MissingDependencyError      an optional package is needed; the message has the pip line  (2)
    ├── ResourceError               memory or disk ran out; completed work is kept  (1)
    └── EngineError                 an engine could not complete a request      (1)
        ├── QueueFullError          too many requests are waiting; has the time to retry after
        ├── TooLargeError           larger than the full queue; retrying doesn't help
        ├── DeadlineError           the request missed its deadline
        └── ClosedError             the engine is closed

A message says what was wrong and what to do; on the command line it is all that the user sees. It is one line of at
most 300 characters, whatever it quotes, without control characters.
"""

import re
from difflib import get_close_matches
from itertools import accumulate

_LONGEST = 300
_GAP = " ... "
_MOST_LISTED = 200
"""Characters of a list of valid names."""


class GerundError(Exception):
    r"""Root of the exception tree. ``exit_code`` is what the command line exits with.

    >>> str(GerundError("k is a whole number, not [1,\n 2]"))
    'k is a whole number, not [1, 2]'
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust, such as tokenizers; it is not an ``Exception``."""
    return type(error).__name__ == "PanicException"


def one_line(text: str, most: int = _LONGEST) -> str:
    r"""Return a text as one line of at most ``most`` characters; a longer one loses its middle.

    Line breaks become spaces; control characters and lone surrogates are spelled out.

    >>> one_line("a\n  b\x1b[31m")
    'a b\\x1b[31m'
    >>> one_line("0123456789" * 3, 20)
    '0123456789 ... 56789'
    """
    if len(text) > 4 * most:  # what is quoted may be as large as a file
        text = text[: 2 * most] + _GAP + text[-2 * most :]
    joined = re.sub(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*", " ", text).strip()
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in joined
    )
    if len(shown) <= most:
        return shown
    end = (most - len(_GAP)) // 3
    return shown[: most - len(_GAP) - end] + _GAP + (shown[-end:] if end else "")


class InputError(GerundError):
    """Your input cannot be used."""

    exit_code = 2


class ConfigError(InputError):
    """An unknown name, or a setting that is impossible or contradicts another."""


class TextError(InputError):
    """A text that is empty, too long, or not a string.

    Attributes:
        index: index of the text in the call; None for a single text.
        kind: what the text is, such as ``text``, ``prompt`` or ``prefix``.
        reason: the message without kind and index.
        exceeds_context: whether it has more tokens than the model's context.
    """

    index: int | None = None
    kind: str = "text"
    exceeds_context: bool = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.reason = message

    @classmethod
    def about(cls, kind: str, index: int, reason: str) -> "TextError":
        """Return the error for one of several texts.

        >>> error = TextError.about("prompt", 3, "is empty")
        >>> str(error), error.index, error.reason
        ('prompt 3 is empty', 3, 'is empty')
        """
        error = cls(f"{kind} {index} {reason}")
        error.kind, error.index, error.reason = kind, index, reason
        return error


class DataError(InputError):
    """A file that is missing or malformed; the message names the file and, where there is one, the line."""


class OutputExistsError(InputError):
    """The output exists, and you didn't ask to overwrite it."""


class FinishedError(OutputExistsError):
    """The run to resume is finished; nothing is left to do."""


class FingerprintError(InputError):
    """Embeddings of two different encoders would be mixed."""


class StaleIndexError(InputError):
    """Another process has replaced an open index; open it again."""


class ModelError(GerundError):
    """The model cannot be loaded, or is not a decoder-only language model."""

    exit_code = 2


class UnsupportedModelError(ModelError):
    """A layer of this architecture does not obey the attention plan."""


class MissingDependencyError(GerundError):
    """An optional package is needed; the message has the pip line."""

    exit_code = 2


class ResourceError(GerundError):
    """Memory or disk ran out; completed work is kept."""


class EngineError(GerundError):
    """An engine could not complete a request."""


class QueueFullError(EngineError):
    """Too many requests are waiting for the model.

    Attributes:
        retry_after: estimated seconds until there is capacity: 1 to 60.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooLargeError(EngineError):
    """One request is larger than the full queue: split it; retrying doesn't help."""


class DeadlineError(EngineError):
    """A request missed its deadline."""


class ClosedError(EngineError):
    """The engine is closed, or was closed before a request was done."""


def unknown_name(kind: str, name: object, valid: "list[str] | tuple[str, ...]") -> ConfigError:
    """Return the error for an unknown name, with the valid names and the closest one, if one is similar.

    >>> str(unknown_name("pooling", "max", ["mean", "last"]))
    "unknown pooling 'max'; valid are: mean, last"
    >>> str(unknown_name("pooling", "lsat", ["mean", "last"]))
    "unknown pooling 'lsat'; valid are: mean, last; did you mean 'last'?"
    >>> str(unknown_name("word", "x", ["word"] * 100))[-26:]
    'd, word, word, and 67 more'
    """
    ends = accumulate(len(name) + 2 for name in valid)
    fit = sum(end <= _MOST_LISTED for end in ends) or 1
    more = f", and {len(valid) - fit} more" if fit < len(valid) else ""
    listed = f"{', '.join(valid[:fit])}{more}"
    by_folded = {valid_name.casefold(): valid_name for valid_name in valid}
    similar = get_close_matches(str(name)[:100].casefold(), by_folded, n=1, cutoff=0.7)
    hint = f"; did you mean {by_folded[similar[0]]!r}?" if similar else ""
    return ConfigError(f"unknown {kind} {name!r}; valid are: {listed}{hint}")
