"""A tiny store with known content. It is written once, and each test gets a copy."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moa_data.tests.kit.stores import Recipe, make_recipe


@pytest.fixture
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """The ``RECIPE`` of the test module, or the default one."""
    return getattr(request.module, "RECIPE", None) or make_recipe()


@pytest.fixture(scope="session")
def copy_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe, Path], Path]:
    """Return a function that copies a recipe's store, with a target bundle, to a new folder."""
    folder = tmp_path_factory.mktemp("written once")
    written: dict[tuple[str, str], Path] = {}

    def copy(recipe: Recipe, path: Path) -> Path:
        key = (recipe.manifest.to_json(), str(recipe.plan.to_pydict()))
        if key not in written:
            written[key] = recipe.write_bundled(folder / str(len(written)))
        return Path(shutil.copytree(written[key], path))

    return copy


@pytest.fixture
def bundled_store(
    tmp_path: Path, recipe: Recipe, copy_store: Callable[[Recipe, Path], Path]
) -> Path:
    return copy_store(recipe, tmp_path / "store")


@pytest.fixture
def store(bundled_store: Path) -> Path:
    """The store without its target bundle."""
    shutil.rmtree(bundled_store / "target")
    (bundled_store / "commits/target.json").unlink()
    return bundled_store
