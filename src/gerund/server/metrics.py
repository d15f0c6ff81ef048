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
        registry = self._registry = CollectorRegistry()
        self._requests = Counter("gerund_requests", "Requests.", ["route", "status"], registry=registry)
        self._seconds = Histogram(
            "gerund_request_seconds", "From first to last byte.", ["route"], registry=registry, buckets=_SECONDS
        )

        def histogram(name: str, help_: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, help_, registry=registry, buckets=buckets)

        self.waits = histogram("gerund_wait_seconds", "Until the engine began with what it was given.")
        self.first = histogram("gerund_first_piece_seconds", "Until a stream's first text.")
        self.gaps = histogram("gerund_piece_gap_seconds", "Between two pieces of a stream.", _GAPS)
        self._counts = {name: Counter(f"gerund_{name}", text_, registry=registry) for name, text_ in _COUNTED.items()}
        self._gauges = {
            name: Gauge(f"gerund_{name}", text_, registry=registry, multiprocess_mode="livesum")
            for name, text_ in _MEASURED.items()
        }
        self._before: dict[str, int] = dict.fromkeys(_COUNTED, 0)

    def done(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def observe(self, state: EngineState) -> None:
        """Add what the engine has counted since the last call."""
        for name, counter in self._counts.items():
            now = getattr(state, name)
            counter.inc(max(0, now - self._before[name]))
            self._before[name] = now
        for name, gauge in self._gauges.items():
            gauge.set(getattr(state, name))

    def text(self) -> bytes:
        """Return the metrics of all workers in Prometheus' format."""
        if FOLDER_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        combined = CollectorRegistry()
        MultiProcessCollector(combined)
        return generate_latest(combined)


def forget_worker(process: int) -> None:
    """Remove the gauges of a worker that has ended."""
    if FOLDER_VARIABLE in os.environ:
        mark_process_dead(process)
