"""One line of log and a few counts for each request, and the end of what it had begun."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest

from .answer import Answer
from .metrics import Metrics

LOG = logging.getLogger("moa_data.serving.requests")

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


@dataclass
class Facts:
    """What is known of a request when it has been answered.

    Attributes:
        answer: the answer that it began; it is closed when the request ends, however it ends.
        status: HTTP status that was sent; None before.
    """

    id: str = field(default_factory=lambda: f"req-{secrets.token_hex(8)}")
    answer: Answer | None = None
    n_prompt: int | None = None
    status: int | None = None
    error: str | None = None


def facts_of(request: HttpRequest) -> Facts:
    """The facts of a request that came through :class:`RequestLog`."""
    facts: Facts = request.scope["moa_data.facts"]
    return facts


class RequestLog:
    """Middleware round all routes."""

    def __init__(self, app: _App, metrics: Metrics) -> None:
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

        try:
            with self._metrics.answering():
                await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            # The server ends and waits no longer; this task has nothing more to do.
            facts.error = "broken off: the server ended"
            self._metrics.n_broken_off += 1
        except Exception as error:
            facts.status, facts.error = facts.status or 500, facts.error or type(error).__name__
            raise
        finally:
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
    """Writes each record of a log as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: time, level, message or what a request's record holds, and a traceback if there is one."""
        line: dict[str, Any] = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"), "level": record.levelname.lower()}
        facts = getattr(record, "facts", None)
        line |= facts if facts is not None else {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)
