"""Work on shards that the tests of every engine do, in processes that have to find it by its name."""

import os
import signal
import time
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


def killed_or_busy_once(place):
    """Kill this process, or be busy for long; the second time do neither."""
    path = Path(place)
    if not path.exists():
        path.touch()
        if path.name == "busy":
            time.sleep(90)
        while not path.with_name("busy").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return path.name
