"""A small store to train from, written once per test session."""

from pathlib import Path

import pytest

from moa_data.tests.kit.training import build_store


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("trainer") / "store")
