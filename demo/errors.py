"""Errors of the demo."""


class DemoError(Exception):
    """The demo cannot go on: the text says what was found, what was expected and what to do."""
