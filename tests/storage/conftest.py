"""A tiny store with known content, written again for each test that uses it."""

from pathlib import Path

import pytest

from moa_data.tests.kit.stores import Recipe, make_recipe


@pytest.fixture
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """The ``RECIPE`` of the test module, or the default one."""
    return getattr(request.module, "RECIPE", None) or make_recipe()


@pytest.fixture
def store(tmp_path: Path, recipe: Recipe) -> Path:
    return recipe.write(tmp_path / "store")
