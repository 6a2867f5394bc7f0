"""A store of as many parts as 240 million tokens make: few files a part, and a start that lists no folder of each."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.commit import PartCommit, committed_bytes, read_part_commit
from moa_data.storage.grid import array_grid
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import commit_path, hidden_field, kv_field, response_mask_field, tokens_field
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.stores import make_recipe

N_PARTS = 3772
LLAMA_3_8B = (tokens_field(), response_mask_field(), kv_field(32, 8, 128), hidden_field("last", 4096))
EAGLE_3 = tuple(hidden_field(f"layer_{layer}", 4096) for layer in (2, 16, 29))


@pytest.mark.parametrize("codec", ["lossless", "int8"])
@pytest.mark.parametrize("fields", [LLAMA_3_8B, (*LLAMA_3_8B, *EAGLE_3)], ids=["last", "eagle-3"])
def test_a_full_part_of_an_8b_takes_at_most_16_files(codec: str, fields: tuple[Any, ...]) -> None:
    grids = [array_grid(array, N_PARTS, 65_536) for array in StoreCodec(codec, fields).arrays]
    assert sum(grid.shards_per_part for grid in grids) <= 16


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All parts are alike and empty but for zeros, so that one is written and the others are its copies."""
    recipe = make_recipe(lengths=(64,) * N_PARTS, part_tokens=64)
    store = tmp_path_factory.mktemp("many") / "store"
    with StoreWriter.create_or_resume(store, recipe.manifest, recipe.plan) as writer:
        recipe.write_part(writer, 0, lambda name, row, values: np.zeros_like(values))
    first = read_part_commit(commit_path(store, 0))
    for part in range(1, N_PARTS):
        files = {name.replace("/c.0", f"/c.{part}", 1): record for name, record in first.files.items()}
        for name, copy in zip(first.files, files, strict=True):
            shutil.copyfile(store / "parts" / name, store / "parts" / copy)
        commit = replace(first, part=part, files=dict(sorted(files.items())))
        commit_path(store, part).write_bytes(PartCommit.to_json(commit))
    return store


def test_starting_lists_the_folders_of_the_store_and_none_of_a_part(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(lengths=(64,) * N_PARTS, part_tokens=64)
    listed: list[Any] = []
    looked_at: list[Any] = []
    for calls, name in ((listed, "scandir"), (listed, "listdir"), (looked_at, "stat"), (looked_at, "open")):
        real = getattr(os, name)

        def note(path: Any = ".", *rest: Any, calls: list[Any] = calls, real: Any = real, **more: Any) -> Any:
            calls.append(path)
            return real(path, *rest, **more)

        monkeypatch.setattr(os, name, note)
    with StoreWriter.create_or_resume(many, recipe.manifest, recipe.plan) as writer:
        assert writer.pending_parts() == []
    assert len(listed) < 40
    # Each part has a commit, which is looked for and read, and four shards, whose sizes are compared with it.
    assert len(looked_at) < 8 * N_PARTS
    listed.clear()
    with ActivationStore(many, require_complete=True) as reader:
        assert len(reader) == N_PARTS
        assert not reader.read(N_PARTS - 1, "kv").any()
    assert not listed
    looked_at.clear()
    assert committed_bytes(many) > sum(commit.stored_bytes for commit in reader.commits.values())
    assert len(looked_at) < 2 * N_PARTS
