"""Errors of the demo."""

from ..errors import MoaDataError


class DemoError(MoaDataError):
    """The demo cannot go on: the text says what was found, what was expected and what to do."""
