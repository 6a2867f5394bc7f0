"""Errors of serving; every message says what was wrong and what to do next."""

from ..errors import MoaDataError


class ServingError(MoaDataError):
    """Something the user can mend kept a server or a client from working."""


class Overloaded(ServingError):
    """The server takes no more sessions, tokens or requests just now; try again later."""


class RequestInvalid(ServingError, ValueError):
    """A request that cannot be served as given."""


class NotAllowed(ServingError, PermissionError):
    """The bearer token is missing or wrong."""


class SessionUnknown(ServingError, KeyError):
    """The server holds no session of that id; the client opens it anew."""

    def __str__(self) -> str:
        """Return the message as it is; a KeyError would show it in quotes."""
        return str(self.args[0])


class ProtocolMismatch(ServingError):
    """Client and server differ in protocol version, target, tokenizer or drafter."""


class Disconnected(ServingError, ConnectionError):
    """The connection ended, or could not be made."""


class EmulationUnavailable(ServingError, OSError):
    """This machine cannot emulate a network with real packets."""
