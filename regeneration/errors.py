"""Errors of regeneration; every message says what was wrong and what to do next."""

from ..errors import MoaDataError


class RegenerationError(MoaDataError):
    """Something the user can mend kept chats from being answered."""


class JournalRefused(RegenerationError, ValueError):
    """The journal cannot be gone on with: another run began it, or it is damaged."""


class ServerUnusable(RegenerationError, ConnectionError):
    """The server cannot be reached, or cannot answer chats in this way."""


class TooManyLost(RegenerationError, ValueError):
    """More rows gave no chat than `max_rejected_fraction` allows."""
