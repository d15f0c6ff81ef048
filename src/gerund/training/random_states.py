"""The random states of the process, put back after a training has used them.

Knows: the generators of Python, numpy and torch. Does not know: what uses them.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Leave all global generators as they were, also after an error.

    transformers' Trainer seeds them, and dropout has no other.
    """
    python, own = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(own)
