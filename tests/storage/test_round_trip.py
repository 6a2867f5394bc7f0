"""What is written is what is read: by this reader, by zarr-python and by tensorstore, for any bits and any lengths."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.storage import grid
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import hidden_field, kv_field, response_mask_field, tokens_field
from moa_data.tests.kit.stores import Recipe, make_recipe, read_by_zarr, read_tree, rows_in_store, zarr_array

# Signalling and quiet NaN, infinities, both zeros, the smallest subnormals, the largest finite numbers.
SPECIAL_BITS = [0x7F81, 0xFFC1, 0x7FC0, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001, 0x7F7F, 0xFF7F]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    fill=st.one_of(st.sampled_from(SPECIAL_BITS), st.integers(0, 0xFFFF)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bits_survive(lengths: list[int], fill: int, seed: int) -> None:
    fields = (tokens_field(), response_mask_field(), kv_field(2, 1, 4), hidden_field("layer_1", 6))
    recipe = make_recipe(tuple(lengths), fields, 200)
    rng = np.random.default_rng(seed)
    written: dict[tuple[str, str], np.ndarray] = {}

    def draw(name: str, row: dict[str, Any], values: np.ndarray) -> np.ndarray:
        info = np.iinfo(values.dtype)
        low, high = (0, 99) if name == "tokens" else (info.min, info.max)  # ids are looked up
        values = rng.integers(low, high, values.shape, values.dtype, endpoint=True)
        if values.dtype == np.uint16:
            values[rng.random(values.shape) < 0.5] = fill
        return written.setdefault((row["sequence_id"], name), values)

    with (
        tempfile.TemporaryDirectory() as folder,
        ActivationStore(recipe.write(Path(folder), draw)) as reader,
    ):
        assert reader.sequences.equals(recipe.plan)
        for (sequence_id, name), values in written.items():
            i = reader.sequences["sequence_id"].to_pylist().index(sequence_id)
            np.testing.assert_array_equal(reader.read(i, name), values)


@pytest.mark.parametrize("shard_bytes", [1 << 31, 1 << 16])
def test_zarr_and_tensorstore_read_the_same(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(grid, "MAX_SHARD_BYTES", shard_bytes)
    store = recipe.write(tmp_path / "store")
    folder = store / "parts"
    for spec in recipe.manifest.fields:
        by_zarr = read_by_zarr(folder, spec.name)
        opened = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / spec.name)}})
        np.testing.assert_array_equal(opened.result().read().result(), by_zarr)
        expected = np.zeros_like(by_zarr)
        for row in recipe.plan.to_pylist():
            first, end = rows_in_store(store, spec.name, row)
            expected[first:end] = recipe.values(spec, row)
        np.testing.assert_array_equal(by_zarr, expected)
        assert zarr_array(folder, spec.name).attrs["logical_dtype"] == spec.dtype


# Of the release before schema version 1 was dropped, with the versions of constraints.txt.
BYTES_OF_A_TINY_STORE = "f4ad4856728584fb90522739f84f7b2805d90b1d1855a956ac5c3f7e03bc0d33"


def test_the_bytes_of_a_tiny_store(tmp_path: Path) -> None:
    """Whatever changes them changes the format: what earlier releases wrote must be read, verified and continued."""
    tree = read_tree(make_recipe((70, 3, 130), part_tokens=192).write(tmp_path / "store"))
    digest = hashlib.sha256()
    for name, content in sorted(tree.items()):
        digest.update(f"{name} {len(content)} {hashlib.sha256(content).hexdigest()}\n".encode())
    assert digest.hexdigest() == BYTES_OF_A_TINY_STORE
