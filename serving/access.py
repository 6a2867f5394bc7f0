"""Who may use a server, and how fast: bearer tokens and rates, for HTTP and gRPC alike; web pages of other sites.

Without tokens, everyone who reaches the server may use it. On a machine with a browser that is every web page:
the browser sends its requests (a form, or text/plain) without asking, and a name of the page's own that resolves to
127.0.0.1 makes the answers readable. So such a server takes only JSON, no foreign ``Origin``, and, on a loopback
address, no foreign ``Host``. Tokens make all of this superfluous: no page knows one.
"""

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse

from ..errors import NotAllowed, RequestInvalid
from .api import ApiError

_SCHEME = "bearer "


class BearerTokens:
    """The tokens with which a server may be used; none lets everybody in."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        # Hashes have one length, so that comparing them tells nothing of a token's.
        self._hashes = [_hash(token) for token in tokens]

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in."""
        return not self._hashes

    @classmethod
    def load(cls, path: str | Path) -> "BearerTokens":
        """Read a file of tokens, one a line; empty lines and those that begin with # are skipped.

        Raises:
            RequestInvalid: the file cannot be read, or holds no token, which would let everybody in.
        """
        try:
            lines = [line.strip() for line in Path(path).expanduser().read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise RequestInvalid(f"the tokens in {path} cannot be read: {error}. Give a text file.") from error
        tokens = [line for line in lines if line and not line.startswith("#")]
        if not tokens:
            raise RequestInvalid(f"{path} holds no token; write one a line, or start without a file of tokens.")
        return cls(tokens)

    def check(self, authorization: Sequence[str]) -> str:
        """Check the values of ``authorization`` headers; takes as long for a wrong token as for a right one.

        Returns:
            What stands for the owner of the token, without telling it; empty where everybody may come in.

        Raises:
            NotAllowed: there is none, or it is wrong, or there are several.
        """
        if not self._hashes:
            return ""
        if len(authorization) > 1:  # a proxy may have checked another one
            raise NotAllowed(f"the request has {len(authorization)} authorization headers; send one.")
        given = authorization[0] if authorization else ""
        if given[: len(_SCHEME)].lower() != _SCHEME:
            raise NotAllowed("this server asks for a token; send `authorization: Bearer TOKEN`.")
        digest = _hash(given[len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]  # all of them, whichever is right
        if not any(matches):
            raise NotAllowed("this token is not known here; ask the owner of the server for one.")
        return digest.hex()[:16]


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Rate:
    """A token bucket: so many events a second, and some more at once after a rest."""

    def __init__(self, per_second: float, at_once: float) -> None:
        self._per_second, self._at_once = per_second, at_once
        self._left, self._since = at_once, time.monotonic()

    def take(self) -> float:
        """Count one; returns the seconds to wait before it may be served."""
        now = time.monotonic()
        self._left = min(self._at_once, self._left + (now - self._since) * self._per_second) - 1
        self._since = now
        return max(0.0, -self._left / self._per_second)


def _name_of(authority: str) -> str:
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""


class Guard:
    """Middleware round all routes, inside the log's; ``/health`` is answered to everybody.

    Args:
        names: by which the server may be addressed, other than ``localhost`` and addresses, in lower case.
        checks_hosts: whether the ``Host`` of a request has to be one of them.
        checks_pages: whether web pages of other sites are kept out.
    """

    def __init__(self, app: Any, names: frozenset[str], checks_hosts: bool, checks_pages: bool) -> None:
        self._app, self._names, self._checks_hosts, self._checks_pages = app, names, checks_hosts, checks_pages

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
        return self._refusal_of_page(scope["method"], scope["headers"]) if self._checks_pages else None

    def _refusal_of_page(self, method: str, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        hosts, origins, types = (
            [value.decode("latin-1").lower() for name, value in headers if name == wanted]
            for wanted in (b"host", b"origin", b"content-type")
        )
        foreign = [host for host in hosts if self._checks_hosts and not self._is_own(host)]
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
        if name == "localhost" or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_same_site(self, origin: str, hosts: list[str]) -> bool:
        authority = origin.partition("://")[2]
        return authority in hosts or (bool(authority) and _name_of(authority) in self._names)
