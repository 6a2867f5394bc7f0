"""Metrics of a server for Prometheus, and its log of requests as JSON lines."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request as HttpRequest
from typing_extensions import override

from .api import AnswerText
from .engine.engine import Counts
from .grpc import DraftingCounts

LOG = logging.getLogger("moa_data.serving.requests")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# Fields of the engine's counts, then of the gRPC server's -> name and help.
_GAUGES = {
    "n_open": ("moa_sequences_open", "Texts that the engine holds."),
    "n_working": ("moa_sequences_working", "Texts that wait for a target call or share one."),
    "kv_used": ("moa_kv_tokens_used", "Positions whose KV is reserved."),
    "kv_tokens": ("moa_kv_tokens", "Positions whose KV can be kept."),
    "n_sessions": ("moa_drafting_sessions", "Drafting sessions, with a stream or without."),
    "n_streams": ("moa_drafting_streams", "Open streams."),
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
    "n_opened": ("moa_drafting_opened", "Sessions that were opened."),
    "n_resumed": ("moa_drafting_resumed", "Times that a session was resumed."),
    "n_rebuilt": ("moa_drafting_rebuilt", "Times that a resumed text had to be read again."),
    "n_bytes_in": ("moa_drafting_bytes_in", "Bytes of messages from clients."),
    "n_bytes_out": ("moa_drafting_bytes_out", "Bytes of messages to clients."),
}
_LABELLED = {
    "n_messages": ("moa_drafting_messages", "Messages of clients by kind.", "kind"),
    "n_failures": ("moa_drafting_failures", "Failures told to clients by code.", "code"),
}

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Metrics:
    """The metrics of one server, in a registry of its own.

    Attributes:
        n_in_flight: requests that are being answered.
        n_broken_off: requests that were broken off when the server ended.
    """

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._registry, self.n_in_flight, self.n_broken_off = CollectorRegistry(), 0, 0
        self._counts: list[Callable[[], Counts | DraftingCounts]] = [counts]
        self._registry.register(self)
        self.requests = Counter(
            "moa_http_requests", "Requests by path and status.", ("path", "status"), registry=self._registry
        )
        in_flight = Gauge("moa_http_requests_in_flight", "Requests being answered.", registry=self._registry)
        in_flight.set_function(lambda: self.n_in_flight)
        self.duration = Histogram(
            "moa_http_request_seconds", "Seconds until a request was answered completely.", ("path",),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "moa_first_token_seconds", "Seconds from a request to its first token.", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip

    def add(self, counts: Callable[[], DraftingCounts]) -> None:
        """Add counts, which are read when Prometheus asks."""
        self._counts.append(counts)

    def text(self) -> bytes:
        """Write all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield a metric for each field of the counts, as prometheus_client asks for them."""
        values: dict[str, Any] = {}
        for counts in self._counts:
            values |= vars(counts())
        for name, (title, text) in _GAUGES.items():
            if name in values:
                yield GaugeMetricFamily(title, text, value=values[name])
        for name, (title, text) in _COUNTERS.items():
            if name in values:
                yield CounterMetricFamily(title, text, value=values[name])
        for name, (title, text, label) in _LABELLED.items():
            family = CounterMetricFamily(title, text, labels=(label,))
            for value, n in values.get(name, {}).items():
                family.add_metric((value,), n)
            if name in values:
                yield family


@dataclass
class Facts:
    """What is known of a request when it has been answered."""

    id: str = field(default_factory=lambda: f"req-{secrets.token_hex(8)}")
    answer: AnswerText | None = None  # closed when the request ends, however it ends
    n_prompt: int | None = None
    status: int | None = None  # that was sent
    error: str | None = None


def facts_of(request: HttpRequest) -> Facts:
    """The facts of a request that came through :class:`RequestLog`."""
    facts: Facts = request.scope["moa_data.facts"]
    return facts


class RequestLog:
    """Middleware of all routes: logs and counts each request, and frees its answer."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]], metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Serve a request and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts, began = Facts(), time.perf_counter()
        scope["moa_data.facts"] = facts

        async def send_and_note(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                facts.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", facts.id.encode())]
            await send(message)

        self._metrics.n_in_flight += 1
        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            # The server ends and waits no longer; this task has nothing more to do.
            facts.error = "broken off: the server ended"
            self._metrics.n_broken_off += 1
        except Exception as error:
            facts.status, facts.error = facts.status or 500, facts.error or type(error).__name__
            raise
        finally:
            self._metrics.n_in_flight -= 1
            self._end(scope, facts, time.perf_counter() - began)

    def _end(self, scope: _Scope, facts: Facts, seconds: float) -> None:
        path = getattr(scope.get("route"), "path", "other")  # the route's, not the client's: there are few
        self._metrics.requests.labels(path, str(facts.status)).inc()
        self._metrics.duration.labels(path).observe(seconds)
        line: dict[str, Any] = {
            "request": facts.id, "method": scope["method"], "path": scope["path"][:200], "status": facts.status,
            "client": (scope.get("client") or ("",))[0], "seconds": round(seconds, 6),
        }  # fmt: skip
        if (answer := facts.answer) is not None:
            answer.close()
            if answer.first_s is not None:
                self._metrics.first_token.observe(answer.first_s)
                line["first_token_seconds"] = round(answer.first_s, 6)
            line |= {"prompt_tokens": facts.n_prompt, "new_tokens": answer.n_tokens}
            line["finish"] = answer.finish_reason or "client gone"
        if scope["moa_data.connection"].is_cut:
            facts.error = "cut off: the client took its answer too slowly"
        if facts.error is not None:
            line["error"] = facts.error
        LOG.info("request", extra={"facts": line})


class JsonLines(logging.Formatter):
    """Writes each record of a log as one JSON object: time, level, message or what a request's record holds."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"), "level": record.levelname.lower()}
        facts = getattr(record, "facts", None)
        line |= facts if facts is not None else {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)
