"""Calls in several threads at once."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make each call in a thread of its own, all begun together; return what they gave, in order, or raise an error."""
    begin = threading.Barrier(len(calls), timeout=60)
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: (begin.wait(), call())[1], calls))
