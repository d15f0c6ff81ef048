"""Work that another thread lets go on for one step at a time: transformers' own loop, a token at a time.

The loop asks after each token whether it was cancelled; the answer is what it waits for. So it runs in a thread of its
own, but never while the thread that leads it does.

Knows: threads. Does not know: models, texts.
"""

import threading
import time
from collections.abc import Callable

from gerund.attention.layer_pauses import pausing
from gerund.inference.generate.transformers_loop import Asked, Cancelled

# Seconds of a step, after which the work is interrupted between two layers.
_PATIENCE = 0.02


class Stepwise:
    """Work in steps.

    Args:
        work: called in a thread of its own with what it asks after each step.
    """

    def __init__(self, work: Callable[[Asked], object]) -> None:
        self._work = work
        self._go, self._came_back = threading.Semaphore(0), threading.Semaphore(0)
        self._ends = False
        self._since = 0.0
        self.is_over = False
        self.result: object = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gerund-engine-own-loop", daemon=True)
        self._thread.start()

    def step(self) -> bool:
        """Let the work go on to the end of its next step, or for a while; return whether it is over."""
        if not self.is_over:
            self._go.release()
            self._came_back.acquire()
        return self.is_over

    def end(self) -> None:
        """Tell the work to end, and wait until it has."""
        self._ends = True
        while not self.step():
            pass
        self._thread.join()

    def is_set(self) -> bool:
        """Wait for the next step, in the work's thread; return whether it should end."""
        if not self._ends:
            self._came_back.release()
            self._go.acquire()
            self._since = time.perf_counter()
        return self._ends

    def _between(self) -> None:
        """Wait for the next step where this one takes long: the reading of a long prompt is not done at once."""
        if time.perf_counter() - self._since > _PATIENCE and self.is_set():
            raise Cancelled

    def _run(self) -> None:
        self._go.acquire()
        self._since = time.perf_counter()
        try:
            if not self._ends:
                with pausing(self._between):
                    self.result = self._work(self)
        except BaseException as error:
            self.error = error
        finally:
            self.is_over = True
            self._came_back.release()
