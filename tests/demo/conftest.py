"""Interrupts the demo."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from moa_data.demo import run

Interrupt = Callable[[str], AbstractContextManager[None]]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """Make a phase of the demo end as Ctrl-C would end it, inside a ``with`` statement."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    @contextmanager
    def at(phase: str) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(run, f"_{phase}", interrupted)
            yield

    return at
