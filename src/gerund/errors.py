"""Every error that gerund raises on purpose.

::

    GerundError                 root: catch this one
    ├── InputError              what the user gave cannot be used           (exit status 2)
    │   ├── ConfigError         an unknown name, an impossible or contradictory setting
    │   ├── TextError           a text that is empty, too long, or not a string
    │   ├── DataError           a file that is missing or malformed; names file and line
    │   ├── OutputExistsError   refusing to overwrite
    │   ├── FingerprintError    embeddings of two different encoders would be mixed
    │   └── StaleIndexError     another process has put another index in the place of an open one
    ├── ModelError              the model cannot be loaded or is not a decoder-only LM   (2)
    │   └── UnsupportedModelError   the probe found that a layer disobeys the attention plan
    ├── MissingDependencyError  an optional package is needed; the message has the pip line  (2)
    ├── ResourceError           memory or disk ran out; what was complete is kept  (1)
    └── EngineError             an engine did not do what it was asked             (1)
        ├── QueueFullError      too much waits already; says when to try again
        ├── TooLargeError       more than its queue ever takes; not to be tried again
        ├── DeadlineError       it was not done in time
        └── ClosedError         the engine takes nothing any more

A message is one plain sentence that says what is wrong and what to do. On the command line it is all
that the user sees. Whatever a message quotes, it is one line of at most 300 characters that any terminal can show.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

_LONGEST = 300
_GAP = " ... "


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


@contextmanager
def without_panics(what: str) -> Iterator[None]:
    """Turn a panic of a library in Rust into an error that can be caught.

    Args:
        what: what failed then, as the beginning of a sentence.

    Raises:
        ModelError: the library panicked.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ModelError(f"{what}: {one_line(str(error))}") from error


def one_line(text: str, most: int = _LONGEST) -> str:
    r"""Return a text as one line of at most so many characters; what is too long loses its middle.

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
    """What the user gave cannot be used."""

    exit_code = 2


class ConfigError(InputError):
    """An unknown name, or a setting that is impossible or contradicts another."""


class TextError(InputError):
    """A text that is empty, too long, or not a string.

    Attributes:
        index: which of the texts of the call it is, counted from 0; None where it has no number.
        kind: what the text is, such as ``text``, ``prompt`` or ``prefix``.
        reason: the message behind kind and number; the whole message where there is no number.
        exceeds_context: whether it has more tokens than the model reads.
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
    """The output is there already and was not asked to be replaced."""


class FinishedError(OutputExistsError):
    """A run that is to be resumed was finished before; nothing is left to do."""


class FingerprintError(InputError):
    """Embeddings of two different encoders would be mixed."""


class StaleIndexError(InputError):
    """Another process has put another index in the place of one that is open; it is to be opened again."""


class ModelError(GerundError):
    """The model cannot be loaded, or is not a decoder-only language model."""

    exit_code = 2


class UnsupportedModelError(ModelError):
    """A layer of this architecture does not obey the attention plan."""


class MissingDependencyError(GerundError):
    """An optional package is needed; the message has the pip line."""

    exit_code = 2


class ResourceError(GerundError):
    """Memory or disk ran out; whatever was complete before is kept."""


class EngineError(GerundError):
    """An engine did not do what it was asked."""


class QueueFullError(EngineError):
    """Too much waits for the model already.

    Attributes:
        retry_after: in how many seconds there will probably be room: 1 to 60.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooLargeError(EngineError):
    """One request is larger than the whole queue: trying again does not help, dividing it does."""


class DeadlineError(EngineError):
    """A request was not done by its deadline."""


class ClosedError(EngineError):
    """The engine takes nothing any more, or was closed before a request was done."""


def unknown_name(kind: str, name: object, valid: "list[str] | tuple[str, ...]") -> ConfigError:
    """Return the error for an unknown name, with the valid ones listed, and the nearest of them where one is near.

    >>> str(unknown_name("pooling", "max", ["mean", "last"]))
    "unknown pooling 'max'; valid are: mean, last"
    >>> str(unknown_name("pooling", "lsat", ["mean", "last"]))
    "unknown pooling 'lsat'; valid are: mean, last; did you mean 'last'?"
    """
    by_folded = {one.casefold(): one for one in valid}
    near = get_close_matches(str(name)[:100].casefold(), by_folded, n=1, cutoff=0.7)
    hint = f"; did you mean {by_folded[near[0]]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {name!r}; valid are: {', '.join(valid)}{hint}")
