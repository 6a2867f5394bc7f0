"""Fixture of all tests of servers."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from moa_data.moa.targets.proof import serving_problem


@pytest.fixture(scope="session", autouse=True)
def _proofs_of_targets() -> Iterator[None]:
    """Let an engine only prove once that it can serve a target, not again for each engine.

    The proof calls the target, and takes most of the time of an engine's start.
    """
    problems: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def prove_once(target: Any, call: Any) -> str:
        if target not in problems:
            problems[target] = serving_problem(target, call)
        return problems[target]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moa_data.serving.engine.engine.serving_problem", prove_once)
        yield
