"""Errors of the demo."""


class DemoError(Exception):
    """The demo cannot go on: the text says what was found, what was expected and what to do."""


class DemoInterrupted(DemoError):
    """The demo was stopped by Ctrl-C; finished phases are kept."""
