"""Who may use a server, and how fast: bearer tokens and rates, for HTTP and gRPC alike."""

import hashlib
import hmac
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import NotAllowed, RequestInvalid

_SCHEME = "bearer "


class BearerTokens:
    """The tokens with which a server may be used.

    Args:
        tokens: none lets everybody in.
    """

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
            raise NotAllowed("this token is not known here; ask whoever runs the server for one.")
        return digest.hex()[:16]


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Rate:
    """A bound on how often something happens: so many a second, and some more at once after a rest."""

    def __init__(self, per_second: float, at_once: float) -> None:
        self._per_second, self._at_once = per_second, at_once
        self._left, self._since = at_once, time.monotonic()

    def take(self) -> float:
        """Count one; returns the seconds to wait before it may go on."""
        now = time.monotonic()
        self._left = min(self._at_once, self._left + (now - self._since) * self._per_second) - 1
        self._since = now
        return max(0.0, -self._left / self._per_second)
