"""A tiny store with known content, made afresh for each test that asks for one."""

from pathlib import Path

import pytest

from moa_data.tests.kit.stores import Recipe, make_recipe


@pytest.fixture
def recipe() -> Recipe:
    return make_recipe()


@pytest.fixture
def store(tmp_path: Path, recipe: Recipe) -> Path:
    return recipe.write(tmp_path / "store")
