"""Checks refusals by the class of the error and the facts in its message, not by its wording."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_MIN_WORDS = 4


def _has_fact(message: str, fact: object) -> bool:
    """Return whether a message has a fact as a word of its own, so that 15 does not have 5."""
    text = str(fact)
    pattern = re.escape(text)
    if text[0].isalnum():
        pattern = r"(?<!\w)(?<!\d[.,])" + pattern
    if text[-1].isalnum():
        pattern += r"(?!\w)(?![.,]\d)"
    return re.search(pattern, message) is not None


@contextmanager
def raises_naming(
    error: type[BaseException] | tuple[type[BaseException], ...], *facts: object
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Check that the block raises an error whose message is a sentence that names the facts.

    Args:
        error: class of the error, or several classes.
        facts: what the message must name, such as a path, a tensor, a setting, a shape or a count
            of the test's own input. Each is compared in the form that ``str`` gives it. Words that
            only explain are not facts, because they change whenever somebody improves a message.
    """
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    lacking = [str(fact) for fact in facts if not _has_fact(message, fact)]
    assert not lacking, f"The message lacks {lacking}: {message}"
    assert len(message.split()) >= _MIN_WORDS, f"The message is not a sentence: {message}"
