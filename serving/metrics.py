"""Metrics of a server for Prometheus, and its request log as JSON lines."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from .api import RequestOutput
from .engine.engine import Counts
from .grpc import DraftingCounts

LOG = logging.getLogger("moa_data.serving.requests")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of one server, in a separate registry.

    The functions in ``counts`` are called each time Prometheus scrapes the metrics.
    """

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self.n_in_flight = 0  # Number of requests that are being answered.
        # Number of requests that were aborted because the server stopped.
        self.n_broken_off = 0
        self.counts: list[Callable[[], Counts | DraftingCounts]] = [counts]
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.requests = Counter(
            "moa_http_requests",
            "Number of HTTP requests that have ended, by path and status.",
            ("path", "status"),
            registry=self._registry,
        )
        in_flight = Gauge(
            "moa_http_requests_in_flight",
            "HTTP requests that are being answered.",
            registry=self._registry,
        )
        in_flight.set_function(lambda: self.n_in_flight)
        self.duration = Histogram(
            "moa_http_request_seconds", "Seconds from a request to the end of its answer.",
            ("path",), buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "moa_first_token_seconds", "Seconds from a request to the first token of its answer.",
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield a metric for each field of the counts. prometheus_client calls this method."""
        for read_counts in self.counts:
            counts = read_counts()
            for item in fields(counts):
                name, text, is_gauge, labels = item.metadata["metric"]
                family = (GaugeMetricFamily if is_gauge else CounterMetricFamily)(
                    name, text, labels=labels
                )
                value = getattr(counts, item.name)
                if labels:
                    for key, n in list(value.items()):
                        family.add_metric((key,), n)
                else:
                    family.add_metric((), value)
                yield family


@dataclass
class Facts:
    """The facts about one request that the request log writes."""

    id: str = field(default_factory=lambda: f"req-{secrets.token_hex(8)}")
    # The answers of the request. They are closed when the request ends, even if it fails.
    output: RequestOutput | None = None
    n_prompt: int | None = None
    status: int | None = None  # The HTTP status that was sent.
    error: str | None = None


class RequestLog:
    """Middleware of all routes that logs and counts each request.

    When a request ends, the middleware closes the request's answers, even if the request failed.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request and log it."""
        facts = Facts()
        began = time.perf_counter()
        scope["moa_data.facts"] = facts

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", facts.id.encode()),
                ]
            await send(message)

        self._metrics.n_in_flight += 1
        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            # The task was cancelled because the server is stopping. Record this, and end the task
            # without an error.
            facts.error = "the answer was cut off, because the server shut down"
            self._metrics.n_broken_off += 1
        except Exception as error:
            facts.status, facts.error = facts.status or 500, facts.error or type(error).__name__
            raise
        finally:
            self._metrics.n_in_flight -= 1
            self._end(scope, facts, time.perf_counter() - began)

    def _end(self, scope: Scope, facts: Facts, seconds: float) -> None:
        connection = scope["moa_data.connection"]
        if connection.is_malformed:
            facts.status = 400
            facts.error = "the body of the request is not valid HTTP"
        # Label the metrics with the path of the route, not with the path that the client sent.
        # Otherwise clients could create any number of labels.
        path = getattr(scope.get("route"), "path", "other")
        self._metrics.requests.labels(path, str(facts.status)).inc()
        self._metrics.duration.labels(path).observe(seconds)
        line: dict[str, Any] = {
            "request": facts.id, "method": scope["method"], "path": scope["path"][:200],
            "status": facts.status, "client": (scope.get("client") or ("",))[0],
            "seconds": round(seconds, 6),
        }  # fmt: skip
        if (output := facts.output) is not None:
            output.close()
            if output.first_s is not None:
                self._metrics.first_token.observe(output.first_s)
                line["first_token_seconds"] = round(output.first_s, 6)
            line |= {"prompt_tokens": facts.n_prompt, "new_tokens": output.n_tokens}
            line["finish"] = output.finish_reason or "client gone"
        if connection.is_cut:
            facts.error = "the answer was cut off, because the client read it too slowly"
        if facts.error is not None:
            line["error"] = facts.error
        LOG.info("request", extra={"facts": line})


def bound_repeats(most: int = 20, window_s: float = 60.0) -> Callable[[logging.LogRecord], bool]:
    """Return a log filter that drops repeats, so that clients cannot fill a disk with errors.

    The filter keeps up to ``most`` records of each kind per time window of ``window_s`` seconds.
    Refused requests are of one kind if they have the same HTTP status. Other records are of one
    kind if the same line of code logs them. The filter keeps all records of successful requests.

    The first record of a new time window has the attribute ``left_out``. It is the number of
    records of the same kind that were dropped in the window before.
    """
    # Kind -> a pair: the start of the current time window of this kind, and the number of its
    # records in this window.
    windows: dict[Hashable, tuple[float, int]] = {}

    def is_kept(record: logging.LogRecord) -> bool:
        status = getattr(record, "facts", {}).get("status")
        if status is not None and status < 400:
            return True
        kind = record.pathname, record.lineno, status
        now = time.monotonic()
        began, n_records = windows.get(kind, (now, 0))
        if now >= began + window_s:
            record.left_out = n_records - most
            began = now
            n_records = 0
        windows[kind] = began, n_records + 1
        return n_records < most

    return is_kept


class JsonLines(logging.Formatter):
    """Formats each log record as one JSON object.

    The object has the time, the level, and either the message or the facts about a request.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
        }
        facts = getattr(record, "facts", None)
        line |= (
            facts if facts is not None else {"logger": record.name, "message": record.getMessage()}
        )
        if (n_left_out := getattr(record, "left_out", 0)) > 0:
            line["left_out"] = n_left_out
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)
