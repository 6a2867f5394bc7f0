"""Codecs by name, and what a store with a codec of another release says."""

from dataclasses import replace
from pathlib import Path

import pytest

from moa_data.errors import CodecUnknown
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.schema import StoredArray
from moa_data.tests.kit.stores import Recipe


@pytest.mark.parametrize("name", ["int6", "int3", "transform"])
def test_a_store_of_another_codec_is_refused_in_one_line(tmp_path: Path, recipe: Recipe, name: str) -> None:
    manifest = replace(recipe.manifest, codec={**recipe.manifest.codec, "name": name})
    with pytest.raises(CodecUnknown, match=f"{name!r}") as refused:
        StoreCodec.open(manifest, tmp_path)
    assert len(str(refused.value).splitlines()) == 1


def test_lossless_describes_the_byte_chain_and_no_settings(recipe: Recipe) -> None:
    codec = StoreCodec("lossless", recipe.manifest.fields)
    assert codec.is_lossless
    assert codec.describe() == {
        "name": "lossless",
        "transform": "identity",
        "bytes": ["bytes:little", "blosc:zstd:level=1:shuffle:blocksize=1048576", "crc32c"],
    }


def test_a_stored_array_checks_its_axes() -> None:
    with pytest.raises(ValueError, match="axes"):
        StoredArray("kv/codes", "uint8", (2, 3), ("token", "layer"))
