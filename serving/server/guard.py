"""What is refused before any route: web pages of other sites, requests of two lengths, and those beyond the bounds.

Without tokens, everyone who reaches the server may use it. On a machine with a browser that is every web page:
the browser sends its requests (a form, or text/plain) without asking, and a name of the page's own that resolves to
127.0.0.1 makes the answers readable. So such a server takes only JSON, no foreign ``Origin``, and, on a loopback
address, no foreign ``Host``. Tokens make all of this superfluous: no page knows one.
"""

import ipaddress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse

from .openai_form import ApiError


@dataclass(frozen=True)
class Sites:
    """By which names a server may be addressed.

    Attributes:
        names: other than ``localhost`` and addresses, in lower case.
        are_hosts_checked: whether the ``Host`` of a request has to be one of them.
        are_pages_checked: whether web pages of other sites are kept out.
    """

    names: frozenset[str] = frozenset()
    are_hosts_checked: bool = True
    are_pages_checked: bool = True

    def refusal(self, method: str, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        """Return why a request is refused, or None."""
        if not self.are_pages_checked:
            return None
        hosts, origins, types = (
            [value.decode("latin-1").lower() for name, value in headers if name == wanted]
            for wanted in (b"host", b"origin", b"content-type")
        )
        foreign = [host for host in hosts if self.are_hosts_checked and not self._is_own(host)]
        if foreign:
            message = f"this server is not {foreign[0][:120]!r}; address it as 127.0.0.1, or start it with "
            return ApiError(403, message + "--allowed-host NAME or a token file.", None, "foreign_host")
        foreign = [origin for origin in origins if not self._is_same_site(origin, hosts)]
        if foreign:
            message = f"web pages of {foreign[0][:120]!r} may not use this server; start it with --allowed-host NAME "
            return ApiError(403, message + "or a token file.", None, "foreign_origin")
        if method == "POST" and [value.partition(";")[0].strip() for value in types] != ["application/json"]:
            return ApiError(415, "send the body as `content-type: application/json`.", None, "unsupported_media_type")
        return None

    def _is_own(self, host: str) -> bool:
        name = _name_of(host)
        return name == "localhost" or name in self.names or _is_address(name)

    def _is_same_site(self, origin: str, hosts: list[str]) -> bool:
        authority = origin.partition("://")[2]
        return authority in hosts or (bool(authority) and _name_of(authority) in self.names)


def _name_of(authority: str) -> str:
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """Middleware round all routes, inside the log's; ``/health`` is answered to everybody."""

    def __init__(self, app: Any, sites: Sites) -> None:
        self._app, self._sites = app, sites

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request, or refuse it and close its connection."""
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        scope["moa_data.facts"].error = error.message
        await JSONResponse(error.body, error.status, error.headers | {"connection": "close"})(scope, receive, send)

    def _refusal(self, scope: Any) -> ApiError | None:
        names = {name for name, _ in scope["headers"]}
        if {b"transfer-encoding", b"content-length"} <= names:  # a proxy may have believed the other one
            message = "a request has either a content-length or a transfer-encoding; send one."
            return ApiError(400, message, None, "invalid_request")
        if scope["path"] == "/health":
            return None
        if scope["moa_data.connection"].is_surplus:
            return ApiError(503, "too many connections are open; try again later.", None, "overloaded", 1)
        return self._sites.refusal(scope["method"], scope["headers"])
