"""Codecs by name, and what a store of another release says."""

from dataclasses import replace
from pathlib import Path

import pytest

from moa_data.errors import StoreDamaged
from moa_data.storage.chunks.field import StoredArray
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.tests.kit.stores import Recipe


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int3", "Unknown codec 'int3'"),
        ("fp8", "commit d02d314 of moa-data is the last"),
        ("int4", "d02d314"),
    ],
)
def test_a_store_of_another_codec_says_what_reads_it(tmp_path: Path, recipe: Recipe, name: str, message: str) -> None:
    manifest = replace(recipe.manifest, codec={**recipe.manifest.codec, "name": name})
    with pytest.raises(StoreDamaged, match=message):
        StoreCodec.open(manifest, tmp_path)


def test_a_stored_array_checks_its_axes() -> None:
    with pytest.raises(ValueError, match="axes"):
        StoredArray("kv/codes", "uint8", (2, 3), ("token", "layer"))
