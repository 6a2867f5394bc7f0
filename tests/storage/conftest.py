"""A tiny store with known content, made afresh for each test that asks for one."""

from pathlib import Path

import pytest

from moa_data.tests.kit.stores import Recipe, make_recipe


@pytest.fixture
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """The test module's own ``RECIPE``, or the usual one."""
    return getattr(request.module, "RECIPE", None) or make_recipe()


@pytest.fixture
def store(tmp_path: Path, recipe: Recipe) -> Path:
    return recipe.write(tmp_path / "store")
