"""The lossless codec: the stored array is the field."""

from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.schema import kv_field, tokens_field

from .contract import CodecContract


class TestLossless(CodecContract):
    name = "lossless"
    error = 0.0
    unknown = ("lossles", "lossless:2")


def test_the_fields_themselves_are_stored() -> None:
    codec = StoreCodec("lossless", (tokens_field(), kv_field(4, 2, 8)))
    assert [array.name for array in codec.arrays] == ["tokens", "kv"]
    assert codec.is_lossless
    assert codec.describe() == {
        "name": "lossless",
        "transform": "identity",
        "bytes": ["bytes:little", "blosc:zstd:level=1:shuffle:blocksize=1048576", "crc32c"],
    }
