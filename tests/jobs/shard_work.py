"""Work on shards that the tests of every engine do, in processes that have to find it by its name."""

import gc
import os
import resource
import signal
import time
from pathlib import Path

import numpy as np


def square(number: int) -> int:
    return number * number


def pages_taken(_number: int) -> tuple[int, int, int]:
    """Return this process, how many objects its collector passes over, and pages taken for arrays made in turn."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(2**18)
    return os.getpid(), gc.get_freeze_count(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


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
