"""docs/format.md draws the same tree as the schema, and suffices to read a store with plain Zarr libraries."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr

from moa_data.storage import schema

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "format.md").read_text()


@pytest.fixture(scope="module")
def kit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("storage_kit", ROOT / "tests" / "storage" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_tree_is_the_one_of_the_schema():
    assert schema.__doc__ is not None
    tree = schema.__doc__.split("::\n\n")[1].split("\n\n")[0]
    assert block("text").rstrip() == textwrap.dedent(tree).rstrip()


def test_every_manifest_key_and_plan_column_is_explained():
    from dataclasses import fields

    from moa_data.storage.plan import PLAN_SCHEMA

    for name in [item.name for item in fields(schema.StoreManifest)] + PLAN_SCHEMA.names:
        assert f"`{name}`" in DOCUMENT


def test_the_example_reads_a_store_with_tensorstore(kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = kit.make_recipe()
    recipe.write(tmp_path / "STORE")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(block("python"), "docs/format.md", "exec"), names)
    row = recipe.plan.slice(0, 1).to_pylist()[0]
    expected = recipe.values(recipe.manifest.fields[2], row)
    np.testing.assert_array_equal(names["bits"], expected)
    np.testing.assert_array_equal((names["keys"].view(np.uint32) >> 16).astype(np.uint16), expected[:, :, :, 0])
    np.testing.assert_array_equal(names["values"].shape, (row["n_tokens"], 4, 2, 8))


def test_zarr_python_reads_by_the_steps_of_the_document(kit: ModuleType, tmp_path: Path):
    recipe = kit.make_recipe()
    store = recipe.write(tmp_path / "store")
    for row in pq.read_table(store / "plan.parquet").to_pylist():
        part = f"part-{row['part']:05d}"
        assert (store / "commits" / f"{part}.json").exists()
        group = zarr.open_group(store / "parts" / f"{part}.zarr", mode="r")
        for spec in recipe.manifest.fields:
            got = group[spec.name][row["first_token"] : row["first_token"] + row["n_tokens"]]
            np.testing.assert_array_equal(got, recipe.values(spec, row))
