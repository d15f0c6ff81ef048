"""Work on shards that the tests of every engine do, in processes that have to find it by its name."""

import os
import signal
from pathlib import Path


def square(number: int) -> int:
    return number * number


def killed_once(place: str) -> str:
    """Kill the process that works on this path for the first time; return the path's name the second time."""
    marker = Path(place)
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return marker.name
