"""Codecs by name."""

import pytest

from moa_data.storage.chunks.field import StoredArray
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.errors import CodecUnknown
from moa_data.storage.schema import kv_field, tokens_field


def test_lossless_stores_the_fields_themselves():
    codec = StoreCodec("lossless", (tokens_field(), kv_field(4, 2, 8)))
    assert [array.name for array in codec.arrays] == ["tokens", "kv"]
    assert all(field.is_identity for field in codec.fields.values())
    assert codec.describe() == {
        "name": "lossless",
        "transform": "identity",
        "bytes": ["bytes:little", "blosc:zstd:level=1:shuffle:blocksize=1048576", "crc32c"],
    }


def test_unknown_codec_is_refused():
    with pytest.raises(CodecUnknown, match=r"Unknown codec 'int3'. Use one of: lossless"):
        StoreCodec("int3", (kv_field(4, 2, 8),))


def test_a_stored_array_checks_its_axes():
    with pytest.raises(ValueError, match="axes"):
        StoredArray("kv/codes", "uint8", (2, 3), ("token", "layer"))
