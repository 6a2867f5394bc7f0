"""The web page of a client: streams an answer, and has a switch that cuts the network.

The client's own process serves the page, because a browser cannot run the drafter, and because only
a local process can still show text when the network is cut. The process accepts a request only if
the ``Host`` and ``Origin`` headers contain the address of this process. So no other web page can
send requests in the user's name, even with DNS rebinding.
"""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.middleware.base import RequestResponseEndpoint

from ...errors import MoaDataError, OptionInvalid
from ...text import first_line
from .session import OnEvent, as_json

_PAGE = Path(__file__).with_name("page") / "index.html"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; form-action "
    "'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_MAX_PROMPT_CHARS = 100_000
# Interval in seconds at which the page's server looks for new events. Other threads append them.
_LOOK_EVERY_S = 0.02


class _Ask(BaseModel):
    prompt: str = Field(min_length=1, max_length=_MAX_PROMPT_CHARS)


class _Network(BaseModel):
    up: bool


class EventLog:
    """The events of the current answer, for pages that open late, reload or reconnect.

    An item is one event as a JSON object. Its value ``t`` is the time in seconds since the answer
    began. Items are numbered, and the numbers continue from one answer to the next. Any thread may
    append items.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[str] = []
        self._first = 0
        self._began = time.monotonic()
        self.is_closed = False
        # Every event id contains this identifier of the process. A page may still have an event id
        # of an earlier process. The number in such an id is not valid in this process.
        self._run = secrets.token_hex(8)

    def begin(self, *items: dict[str, Any]) -> None:
        """Forget the last answer, and start a new one with these items."""
        with self._lock:
            self._first += len(self._items)
            self._items.clear()
            self._began = time.monotonic()
        for item in items:
            self.append(item)

    def append(self, item: dict[str, Any]) -> None:
        """Append an item."""
        with self._lock:
            self._items.append(json.dumps(item | {"t": round(time.monotonic() - self._began, 4)}))

    async def follow(self, last_id: str) -> AsyncIterator[str]:
        """Yield items as server-sent events: first the items after an event id, then new items."""
        run, _, after = last_id.partition("-")
        last = int(after) if run == self._run and after.isdecimal() else -1
        while not self.is_closed:
            with self._lock:
                start = max(last + 1, self._first)
                items = self._items[start - self._first :]
            for number, item in enumerate(items, start):
                yield f"id: {self._run}-{number}\ndata: {item}\n\n"
            last = start + len(items) - 1
            await asyncio.sleep(_LOOK_EVERY_S)


class ChatPage(AbstractContextManager["ChatPage"]):
    """Serves the page at http://127.0.0.1:``port`` from its own thread, as a context manager.

    Args:
        answer: a function that answers a prompt and reports events. It is called for one prompt at
            a time, and each call runs in a new thread. The page shows errors that it raises.
        set_network: a function that cuts the connection to the server (False) or restores it
            (True).
        port: the port. If it is 0, any free port is used.
    """

    def __init__(
        self,
        answer: Callable[[str, OnEvent], object],
        set_network: Callable[[bool], None],
        port: int = 0,
    ) -> None:
        try:
            self._listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise OptionInvalid(
                f"The web page cannot use port {port} ({error.strerror}). Choose another `port`."
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._answer = answer
        self._set_network = set_network
        self._log = EventLog()
        self._is_up = True
        self._log.begin({"type": "Began", "prompt": None}, self._network())
        self._asking = threading.Lock()
        config = uvicorn.Config(
            self._app(),
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listener],), name="page", daemon=True
        )
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        # The page's server ends here. An answer that is still being made is not stopped; its own
        # thread continues.
        self._server.should_exit = self._log.is_closed = True
        self._thread.join()
        self._listener.close()

    def _network(self) -> dict[str, Any]:
        return {"type": "Network", "up": self._is_up}

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        hosts = {f"{host}:{self.port}" for host in ("127.0.0.1", "localhost")}

        @app.middleware("http")
        async def for_own_pages(request: Request, serve: RequestResponseEndpoint) -> Response:
            origin = request.headers.get("origin")
            is_own = request.headers.get("host") in hosts and (
                origin is None or origin.removeprefix("http://") in hosts
            )
            response = (
                await serve(request)
                if is_own
                else _refuse(
                    403,
                    "This page can be opened only on the machine of `moa-data chat`, at 127.0.0.1.",
                )
            )
            response.headers.update(_HEADERS)
            return response

        @app.get("/")
        def page() -> FileResponse:
            return FileResponse(_PAGE, media_type="text/html; charset=utf-8")

        @app.get("/events")
        def events(request: Request) -> StreamingResponse:
            events = self._log.follow(request.headers.get("last-event-id", ""))
            return StreamingResponse(events, media_type="text/event-stream")

        @app.post("/ask", status_code=202)
        def ask(body: _Ask) -> Response:
            if not self._asking.acquire(blocking=False):
                return _refuse(409, "An answer is in progress. Wait until it ends.")
            self._log.begin({"type": "Began", "prompt": body.prompt}, self._network())
            threading.Thread(
                target=self._ask, args=(body.prompt,), name="answer", daemon=True
            ).start()
            return JSONResponse({}, status_code=202)

        @app.post("/network")
        def network(body: _Network) -> Response:
            self._is_up = body.up
            self._log.append(self._network())
            self._set_network(body.up)
            return JSONResponse({})

        return app

    def _ask(self, prompt: str) -> None:
        try:
            self._answer(prompt, lambda event: self._log.append(as_json(event)))
        except MoaDataError as error:
            self._log.append({"type": "Failed", "message": first_line(error)})
        except BaseException:
            self._log.append(
                {
                    "type": "Failed",
                    "message": "`moa-data chat` failed; its terminal shows the error.",
                }
            )
            raise
        finally:
            self._log.append({"type": "Ended"})
            self._asking.release()


def _refuse(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message}, status_code=status)
