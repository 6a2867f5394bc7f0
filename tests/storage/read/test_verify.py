"""Verification finds every kind of damage and names part and file.

A summary counts the content of a store.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.storage.read.verify import summarize_store, verify_store
from moa_data.storage.schema import StoreManifest
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.stores import Recipe, flip


def test_a_whole_store_is_ok(store: Path, recipe: Recipe) -> None:
    seen = []
    report = verify_store(
        store,
        progress=progress_to(lambda done, total, message: seen.append((done, total, message))),
    )
    assert report.ok
    assert (report.n_parts, report.n_pending_parts) == (recipe.manifest.n_parts, 0)
    assert (report.n_sequences, report.n_tokens) == (12, 881)
    assert report.n_bytes == sum(path.stat().st_size for path in (store / "parts").rglob("c.*"))
    assert seen[-1][:2] == (report.n_bytes, report.n_bytes)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_checksums_alone_find_flips_and_leave_values_alone(tmp_path: Path, recipe: Recipe) -> None:
    def spoil(name: str, row: dict[str, Any], values: np.ndarray) -> np.ndarray:
        if name == "kv":
            values[0, 0, 0, 0, 0] = 0x7FC0
        return values

    store = recipe.write(tmp_path / "store", spoil)
    report = verify_store(store, values=False)
    assert report.ok
    assert (report.n_sequences, report.n_tokens) == (12, 881)
    assert not verify_store(store).ok
    flip(store / "parts/hidden/last/c.1.0", 20)
    assert [damage.part for damage in verify_store(store, values=False).damages] == [1]


def canonical(document: dict[str, Any]) -> str:
    """Return the text of a document in the only format of commits."""
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def test_damaged_commits_are_found(store: Path) -> None:
    commit = store / "commits/part-00000.json"
    good = commit.read_text()
    document = json.loads(good)
    commit.write_text(canonical(document | {"n_tokens": 1, "part": 3}))
    messages = [damage.message for damage in verify_store(store).damages]
    assert any("n_tokens is 1, expected" in message for message in messages)
    assert any("part is 3, expected 0" in message for message in messages)
    commit.write_text("{}")
    (damage,) = verify_store(store).damages
    assert (damage.part, damage.path) == (0, "commits/part-00000.json")
    commit.write_text(good)
    (store / "commits/part-00099.json").write_text(good)
    (damage,) = verify_store(store).damages
    assert "so this file does not belong to it" in damage.message


@pytest.mark.parametrize(("bits", "layer"), [(0x7FC0, 2), (0xFF80, 0)])
def test_nan_and_infinity_name_sequence_and_layer(
    tmp_path: Path, recipe: Recipe, bits: int, layer: int
) -> None:
    def spoil(name: str, row: dict[str, Any], values: np.ndarray) -> np.ndarray:
        if name == "kv" and row["source_row"] == 2:
            values[150, layer, 1, 0, 3] = bits
        return values

    (damage,) = verify_store(recipe.write(tmp_path / "store", spoil)).damages
    for what in (
        "id-2",
        f"in layer {layer};",
        f"token 150, layer {layer}, kv_head 1, key_value 0, head_dim 3",
    ):
        assert what in damage.message
    row = next(row for row in recipe.plan.to_pylist() if row["source_row"] == 2)
    assert (damage.part, damage.path) == (row["part"], "parts/kv")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("response_mask", 0, "the response mask has 0 response tokens, but the plan says 35"),
        ("tokens", 100, "the vocabulary has only 100 tokens"),
    ],
)
def test_masks_and_tokens_are_held_to_the_plan(
    tmp_path: Path, recipe: Recipe, field: str, value: int, message: str
) -> None:
    def spoil(name: str, row: dict[str, Any], values: np.ndarray) -> np.ndarray:
        return np.full_like(values, value) if name == field and row["source_row"] == 0 else values

    (damage,) = verify_store(recipe.write(tmp_path / "store", spoil)).damages
    assert message in damage.message


def test_manifest_and_plan_that_disagree_are_found(store: Path, recipe: Recipe) -> None:
    (store / "store.json").write_text(replace(recipe.manifest, n_tokens=3).to_json())
    (damage,) = verify_store(store).damages
    assert (damage.part, damage.path) == (None, "store.json")
    assert "has changed since it was written" in damage.message
    (store / "commits/store.json").unlink()  # Older stores have no seal.
    assert StoreManifest.from_json((store / "store.json").read_text()).n_tokens == 3
    (damage,) = verify_store(store).damages
    assert "plan.parquet has n_tokens 881, but store.json says 3" in damage.message


def test_summary_counts_what_is_committed(store: Path, recipe: Recipe) -> None:
    (store / "commits/part-00001.json").unlink()
    summary = summarize_store(store)
    kept = [row for row in recipe.plan.to_pylist() if row["part"] != 1]
    assert summary.n_sequences == len(kept)
    assert summary.n_tokens == sum(row["n_tokens"] for row in kept)
    assert summary.n_response_tokens == sum(row["n_response_tokens"] for row in kept)
    assert (summary.manifest.n_sequences, summary.manifest.n_tokens, summary.n_pending_parts) == (
        12,
        881,
        1,
    )
    by_name = {item.spec.name: item for item in summary.fields}
    assert by_name["kv"].raw_bytes == summary.n_tokens * 4 * 2 * 2 * 8 * 2
    assert by_name["kv"].stored_bytes > 0
    assert summary.bytes_per_token == summary.stored_bytes / summary.n_tokens
    assert sum(summary.lengths[1]) == summary.n_sequences
    assert summary.manifest.identities == recipe.manifest.identities
    assert not summary.has_target
    shutil.rmtree(store / "commits")
    empty = summarize_store(store)
    assert (empty.n_sequences, empty.stored_bytes) == (0, 0)
    assert np.isnan(empty.ratio)
