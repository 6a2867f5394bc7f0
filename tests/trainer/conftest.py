"""A small store to train from, written once per session."""

import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from moa_data.tests.kit.training import build_store


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("trainer") / "store")


@pytest.fixture(scope="session")
def store_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that every drafter can be trained from."""
    activations = ("kv", "hidden:last", "hidden:layer:0", "hidden:layer:1")
    return build_store(tmp_path_factory.mktemp("full") / "store", activations=activations)


@pytest.fixture(scope="session", autouse=True)
def entry_points_read_once() -> Iterator[None]:
    """Keep the entry points of all installed packages.

    Lightning's trainer looks for callbacks in them, which takes as long as a training step.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning.fabric.utilities.registry.entry_points", cache(entry_points))
        yield


@pytest.fixture(autouse=True)
def curves(request: pytest.FixtureRequest, pictures: None) -> Iterator[None]:
    """Draw curves only in tests marked as ``draws``, since that takes as long as ten steps."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("draws") is None:
            patch.setattr("moa_data.trainer.fit.plot_curves", lambda run, out: out.touch())
        yield


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that lets the n-th call of another function send this process a signal."""

    def prepare(owner: Any, name: Any, n_th: Any, signum: Any) -> None:
        real, calls = getattr(owner, name), []

        def struck(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == n_th:
                os.kill(os.getpid(), signum)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, struck)

    return prepare
