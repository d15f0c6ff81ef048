"""Infill blanks in a text, using the text on both sides."""

BLANK = "[blank]"


def untrained_to_fill(name: str) -> str:
    """Return the warning for a model that is not known to be trained to infill."""
    return (
        f"{name} is not known to be trained to infill, so its spans may make no sense; use a model or an "
        "adapter that is, or the method line-by-line"
    )
