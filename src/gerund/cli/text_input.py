"""A single text from the command line or from standard input, for the commands that also take many from a file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gerund.data.tables import Rows


def demand_one(text: str | None, file: str | None, what: str, **of_the_file: str | None) -> None:
    """Refuse what is not either one text or a file.

    Args:
        text: the text.
        file: the file.
        what: what the text is, such as ``prompt``.
        **of_the_file: options that say how the file is read; None where they were not given.

    Raises:
        ConfigError: both, neither, or an option for a file without one.
    """
    from gerund.errors import ConfigError

    if (text is None) == (file is None):
        raise ConfigError(f"give either a {what} or --file" + (", not both" if file else ""))
    demand_file(file, **of_the_file)


def demand_file(file: str | None, **of_the_file: str | None) -> None:
    """Refuse options for a file without one; the arguments are those of ``demand_one``.

    Raises:
        ConfigError: there is such an option.
    """
    from gerund.errors import ConfigError

    for name, value in of_the_file.items():
        if file is None and value is not None:
            raise ConfigError(f"--{name} says how a file is read; it belongs to --file")


def one_text(text: str, what: str) -> "list[Rows]":
    """Return a text of the command line as ``read_rows`` would; ``-`` is the text on standard input.

    Args:
        text: the text.
        what: what it is, such as ``prompt``.

    Raises:
        DataError: there is nothing on standard input, or it is not valid UTF-8.
    """
    import sys

    from gerund.data.files import decode
    from gerund.data.tables import Rows
    from gerund.errors import DataError

    if text == "-":
        raw = sys.stdin.buffer.read()
        if not raw:
            raise DataError(f"standard input has no {what}")
        text = decode(raw, "standard input").removesuffix("\n")
    return [Rows([0], [text], [1], f"the {what}", unit="")]
