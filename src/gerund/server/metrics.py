"""Prometheus metrics. No text and no name of a client is ever a label.

With several workers, each writes its counts into files of a shared folder (``PROMETHEUS_MULTIPROC_DIR``), and the
worker that is queried adds them up.
"""

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from gerund.engine.config import EngineState

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAPS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_COUNTED = {
    "tokens_read": "Tokens of prompts that were read.",
    "tokens_reused": "Tokens of prompts that did not have to be read.",
    "tokens_written": "Tokens that were written.",
    "texts_encoded": "Texts that became vectors.",
    "tokens_encoded": "Tokens of these texts.",
    "calls": "Other pieces of work.",
    "cancelled": "Requests that were given up by their clients.",
    "late": "Requests that were not done in time.",
    "failed": "Requests that ended with another error.",
    "refused": "Requests that were not taken.",
}
_MEASURED = {
    "live_rows": "Texts that are being written.",
    "queued": "Requests that are not done.",
    "queued_tokens": "Their tokens.",
}


class Metrics:
    """Counters, gauges and histograms of one process.

    >>> metrics = Metrics()
    >>> metrics.done("/v1/embeddings", 200, 0.1)
    >>> b'gerund_requests_total{route="/v1/embeddings",status="200"} 1.0' in metrics.text()
    True
    """

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self._requests = Counter("gerund_requests", "Requests.", ["route", "status"], registry=own)
        self._seconds = Histogram("gerund_request_seconds", "From first to last byte.", ["route"], "", "", "",
                                  own, buckets=_SECONDS)  # fmt: skip
        self.waits = Histogram("gerund_wait_seconds", "Until the engine began with what it was given.", registry=own,
                               buckets=_SECONDS)  # fmt: skip
        self.first = Histogram("gerund_first_piece_seconds", "Until a stream's first text.", registry=own,
                               buckets=_SECONDS)  # fmt: skip
        self.gaps = Histogram("gerund_piece_gap_seconds", "Between two pieces of a stream.", registry=own,
                              buckets=_GAPS)  # fmt: skip
        self._counts = {name: Counter(f"gerund_{name}", said, registry=own) for name, said in _COUNTED.items()}
        self._gauges = {
            name: Gauge(f"gerund_{name}", said, registry=own, multiprocess_mode="livesum")
            for name, said in _MEASURED.items()
        }
        self._before: dict[str, int] = dict.fromkeys(_COUNTED, 0)

    def done(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def observe(self, state: EngineState) -> None:
        """Bring the engine's own counts up to date."""
        for name, counter in self._counts.items():
            now = getattr(state, name)
            counter.inc(max(0, now - self._before[name]))
            self._before[name] = now
        for name, gauge in self._gauges.items():
            gauge.set(getattr(state, name))

    def text(self) -> bytes:
        """Return everything as Prometheus reads it, that of other workers too."""
        if FOLDER_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)
        return generate_latest(together)


def forget_worker(process: int) -> None:
    """Leave a worker that has ended out of what is measured now."""
    if FOLDER_VARIABLE in os.environ:
        mark_process_dead(process)
