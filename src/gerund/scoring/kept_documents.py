"""An LRU cache of what a model computed for documents, for use by later queries; imports no torch."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Generic, Protocol, TypeVar

from gerund.inference.text_ids import common_prefix_length

# A beginning shorter than this is read again with every document.
_WORTH_SHARING = 8


class _Sized(Protocol):
    @property
    def n_bytes(self) -> int:
        """Its memory."""


T = TypeVar("T", bound=_Sized)


class Kept(Generic[T]):
    """What was read last of a model's texts, at most ``most`` bytes; ``works`` says if that can be used."""

    def __init__(self, most: int) -> None:
        self.works: bool | None = None
        self._texts: OrderedDict[tuple[int, ...], T] = OrderedDict()
        self._bytes, self._most = 0, most
        self._lock = Lock()

    def find(self, texts: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], T]:
        """Return those of the texts that are kept."""
        with self._lock:
            kept = {text: self._texts[text] for text in texts if text in self._texts}
            for text in kept:
                self._texts.move_to_end(text)
        return kept

    def add(self, read: Mapping[tuple[int, ...], T]) -> None:
        """Keep texts, and drop those that were not needed for longest."""
        with self._lock:
            for text, states in read.items():
                if text not in self._texts and states.n_bytes <= self._most:
                    self._texts[text] = states
                    self._bytes += states.n_bytes
            while self._bytes > self._most:
                _, dropped = self._texts.popitem(last=False)
                self._bytes -= dropped.n_bytes


def shared_beginning(texts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the tokens with which all texts begin; none where they are too few to be worth reading once.

    >>> shared_beginning([tuple(range(12)), (*range(9), 40, 41)])
    (0, 1, 2, 3, 4, 5, 6, 7, 8)
    """
    if len(texts) < 2:
        return ()
    first, last = min(texts), max(texts)  # in the order of words, so that only these two differ soonest
    count = min(common_prefix_length(first, last), *(len(text) - 1 for text in texts))
    return first[:count] if count >= _WORTH_SHARING else ()
