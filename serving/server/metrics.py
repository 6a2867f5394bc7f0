"""What Prometheus reads: requests and answers of the HTTP server, and the counts of the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..engine.engine import Counts

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_GAUGES = {
    "n_open": ("moa_sequences_open", "Texts that the engine holds."),
    "n_working": ("moa_sequences_working", "Texts that wait for a target call or share one."),
    "kv_used": ("moa_kv_tokens_used", "Positions whose KV is reserved."),
    "kv_tokens": ("moa_kv_tokens", "Positions whose KV can be kept."),
}
_COUNTERS = {
    "n_calls": ("moa_target_calls", "Target calls."),
    "call_s": ("moa_target_call_seconds", "Seconds of all target calls."),
    "draft_s": ("moa_draft_seconds", "Seconds of the server's own drafting."),
    "n_read": ("moa_tokens_read", "Tokens that the target read, drafts included."),
    "n_committed": ("moa_tokens_committed", "New tokens of all texts."),
    "n_rounds": ("moa_rounds", "Times that a text got new tokens; tokens over rounds is the acceptance length."),
    "n_drafted": ("moa_drafts_verified", "Drafts that were verified."),
    "n_accepted": ("moa_drafts_accepted", "Drafts that the target agreed with."),
    "n_evicted": ("moa_evictions", "Times that a text lost its KV to another."),
    "n_failed": ("moa_sequences_failed", "Texts that ended with an error."),
}


class Metrics:
    """The metrics of one server, in a registry of its own.

    Args:
        counts: gives the engine's counts.
    """

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._registry, self._n_in_flight = CollectorRegistry(), 0
        self._registry.register(_EngineCollector(counts))
        self.requests = Counter(
            "moa_http_requests", "Requests by path and status.", ("path", "status"), registry=self._registry
        )
        in_flight = Gauge("moa_http_requests_in_flight", "Requests being answered.", registry=self._registry)
        in_flight.set_function(lambda: self._n_in_flight)
        self.duration = Histogram(
            "moa_http_request_seconds", "Seconds until a request was answered completely.", ("path",),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "moa_first_token_seconds", "Seconds from a request to its first token.", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip

    @property
    def n_in_flight(self) -> int:
        """Requests that are being answered."""
        return self._n_in_flight

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as in flight while it is answered."""
        self._n_in_flight += 1
        try:
            yield
        finally:
            self._n_in_flight -= 1

    def text(self) -> bytes:
        """Write all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector:
    """Reads the engine's counts when Prometheus asks."""

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics."""
        counts = self._counts()
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(counts, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(counts, field))
