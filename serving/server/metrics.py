"""What Prometheus reads: requests and answers of the HTTP server, and the counts of the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..engine.engine import Counts
from .grpc import DraftingCounts

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

_DRAFTING_GAUGES = {
    "n_sessions": ("moa_drafting_sessions", "Drafting sessions, with a stream or without."),
    "n_streams": ("moa_drafting_streams", "Open streams."),
}
_DRAFTING_COUNTERS = {
    "n_opened": ("moa_drafting_opened", "Sessions that were opened anew."),
    "n_resumed": ("moa_drafting_resumed", "Times that a session was taken up again."),
    "n_rebuilt": ("moa_drafting_rebuilt", "Times that its text had to be read again then."),
    "n_bytes_in": ("moa_drafting_bytes_in", "Bytes of messages from clients."),
    "n_bytes_out": ("moa_drafting_bytes_out", "Bytes of messages to clients."),
}


class Metrics:
    """The metrics of one server, in a registry of its own.

    Args:
        counts: gives the engine's counts.

    Attributes:
        n_broken_off: requests that were broken off when the server ended.
    """

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._registry, self._n_in_flight, self.n_broken_off = CollectorRegistry(), 0, 0
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

    def add_drafting(self, counts: DraftingCounts) -> None:
        """Take up the counts of the gRPC server."""
        self._registry.register(_DraftingCollector(counts))

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


class _DraftingCollector:
    """Reads the counts of the gRPC server when Prometheus asks."""

    def __init__(self, counts: DraftingCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield the server's metrics."""
        counts = self._counts
        for field, (name, text) in _DRAFTING_GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(counts, field))
        for field, (name, text) in _DRAFTING_COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(counts, field))
        messages = CounterMetricFamily("moa_drafting_messages", "Messages of clients by kind.", labels=("kind",))
        failures = CounterMetricFamily("moa_drafting_failures", "Failures told to clients by code.", labels=("code",))
        for family, found in ((messages, counts.n_messages), (failures, counts.n_failures)):
            for label, n in found.items():
                family.add_metric((label,), n)
            yield family
