"""How an engine divides its time: writing gets so many times what reading took, step by step.

Knows: seconds. Does not know: what is done in them.
"""

# Steps that writing may be behind at most: after a long pass that could not be interrupted, texts do not catch up with
# all that they missed while others wait.
_MOST_BEHIND = 16


class WritingRatio:
    """Counts what reading owes to writing.

    Args:
        ratio: seconds of writing for each second of reading.

    >>> ratio = WritingRatio(1.0)
    >>> ratio.wrote(0.01)
    >>> ratio.read(0.004)
    >>> ratio.is_due
    False
    >>> ratio.read(0.007)
    >>> ratio.is_due
    True
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._step = 0.0  # seconds of one step of writing, lately
        self._owed = 0.0

    def read(self, seconds: float) -> None:
        """Note a time of reading."""
        self._owed = min(self._owed + self._ratio * seconds, _MOST_BEHIND * self._step)

    def wrote(self, seconds: float) -> None:
        """Note the time of one step."""
        self._step = 0.8 * self._step + 0.2 * seconds if self._step else seconds
        self._owed = max(0.0, self._owed - seconds)

    def let_in(self, seconds: float) -> None:
        """Note a time of other work that was let into a long piece of reading; it has to be made up for."""
        self._owed -= seconds

    def forget(self) -> None:
        """Nobody writes any more, so nothing is owed."""
        self._owed = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a step of writing should come next."""
        return self._owed >= self._step
