"""What all tests share: property tests draw the same examples in every run, and a model with chats and a store."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from moa_data.tests.kit.chats import chat
from moa_data.tests.kit.command import build_room

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
# Tiny matrices are slower on several threads, and the bytes must not depend on how many there are.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests an hour instead of the five minutes of pyproject.toml."""
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, drafter/, chats.jsonl and store/ of several parts; tests change copies of them."""
    chats = [chat(f"What is {n} plus {n}?", f"It is {2 * n}.") for n in range(12)]
    return build_room(tmp_path_factory.mktemp("room"), chats)
