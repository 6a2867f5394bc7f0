"""Stores whose keys and values are predicted from tokens: every way of reading decodes with the sequence's tokens."""

from pathlib import Path

import numpy as np
import pytest

from moa_data.storage.care.verify import verify_store
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform.codec import TransformCodec
from moa_data.storage.codecs.transform.rope import Rope
from moa_data.storage.dtypes import from_float32, to_float32
from moa_data.storage.errors import CodecUnknown, ShardCorrupt, WriteInvalid
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import kv_field
from moa_data.storage.write.store import StoreWriter

NAME = "transform:2,tokens@group2"
EMBEDDINGS = np.random.default_rng(1).normal(size=(100, 16)).astype(np.float32)
EMBEDDINGS /= np.sqrt(np.square(EMBEDDINGS).mean(1, keepdims=True))
KV_OF_TOKEN = (EMBEDDINGS @ np.random.default_rng(2).normal(size=(16, 128)) / 4).reshape(100, 4, 2, 2, 8)
ROPE = Rope(np.array([1.0, 0.1, 0.01, 0.001]), np.float32(1))


def values_of(recipe, row: dict) -> dict[str, np.ndarray]:
    """The recipe's fields, but keys and values follow from the tokens, up to noise."""
    values = {spec.name: recipe.values(spec, row) for spec in recipe.manifest.fields}
    kv = (KV_OF_TOKEN[values["tokens"]] + 0.1 * to_float32(values["kv"], "bfloat16")).astype(np.float32)
    kv[:, :, :, 0] = ROPE.rotate(kv[:, :, :, 0])
    return values | {"kv": from_float32(kv, "bfloat16")}


def learned_codec(recipe) -> StoreCodec:
    codec = StoreCodec(NAME, recipe.manifest.fields)
    sample = [values_of(recipe, row) for row in recipe.plan.to_pylist()]
    for name, field in codec.learned.items():
        assert isinstance(field, TransformCodec)
        if name == "kv":
            field.rope, field.embeddings = ROPE, EMBEDDINGS
        field.calibrate([to_float32(v[name], "bfloat16") for v in sample], [v["tokens"] for v in sample])
    return codec


@pytest.fixture
def written(tmp_path: Path, recipe) -> Path:
    codec = learned_codec(recipe)
    manifest = recipe.with_manifest(codec=codec.describe()).manifest
    with StoreWriter.create_or_resume(tmp_path / "store", manifest, recipe.plan, codec.files()) as writer:
        for part in writer.pending_parts():
            with writer.part(part) as out:
                for row in out.sequences.to_pylist():
                    values = values_of(recipe, row)
                    for name, array in values.items():
                        out.write(name, row["first_token"], array, values["tokens"])
                out.commit()
    return tmp_path / "store"


def test_every_way_of_reading_gives_the_same(written: Path, recipe):
    assert verify_store(written).ok
    with ActivationStore(written) as store:
        codec = store.codec.fields["kv"]
        assert codec.needs_tokens
        assert not store.codec.fields["hidden/last"].needs_tokens
        batch = store.read_batch(range(len(store)), ["kv", "tokens"])
        for i, row in enumerate(store.sequences.to_pylist()):
            expected, n_tokens = values_of(recipe, row), row["n_tokens"]
            np.testing.assert_array_equal(batch["tokens"][i, :n_tokens], expected["tokens"])
            bits = store.read(i, "kv")
            out = np.zeros((n_tokens + 3, *bits.shape[1:]), np.uint16)
            assert store.read_into(i, "kv", out) == n_tokens
            for other in (batch["kv"][i], out):
                np.testing.assert_array_equal(other[:n_tokens], bits)
                assert not other[n_tokens:].any()
            whole = to_float32(bits, "bfloat16")
            exact = to_float32(expected["kv"], "bfloat16")
            assert np.linalg.norm(whole - exact) < 0.3 * np.linalg.norm(exact)
            for tokens in (slice(63, 131), slice(5, 70), slice(n_tokens - 1, n_tokens), slice(4, 4)):
                part = to_float32(store.read(i, "kv", [3, 1], tokens), "bfloat16")
                np.testing.assert_allclose(part, whole[tokens][:, [3, 1]], rtol=2**-7, atol=1e-3)


def test_what_comes_undecoded_can_be_decoded(written: Path):
    with ActivationStore(written) as store:
        codec = store.codec.fields["kv"]
        codes = store.read(2, "kv", tokens=slice(70, 100), decoded=False)
        assert codes.keys() == {"tokens", *(array.name for array in codec.arrays)}
        np.testing.assert_array_equal(codes["tokens"], store.read(2, "tokens", tokens=slice(64, 100)))
        values = from_float32(codec.decode(codes, 64, 36)[6:], "bfloat16")
        np.testing.assert_array_equal(values, store.read(2, "kv", tokens=slice(70, 100)))
        only_codes = store.read_batch([2], "kv", decoded=False)
        assert only_codes.keys() == {array.name for array in codec.arrays}
        assert isinstance(codec, TransformCodec)
        last = store.read_batch([2, 0], "kv", layers=[-1], decoded=False)
        assert last.keys() == {array.name for array in codec.arrays_of([3])} < only_codes.keys()
        for row, i in enumerate([2, 0]):
            n_tokens = int(store.lengths[i])
            rows = {name: array[row] for name, array in last.items()} | {"tokens": store.read(i, "tokens")}
            values = from_float32(codec.decode(rows, 0, n_tokens, [3]), "bfloat16")
            np.testing.assert_array_equal(values, store.read(i, "kv", layers=[-1]))


def test_tokens_must_be_given(tmp_path: Path, recipe):
    codec = learned_codec(recipe)
    manifest = recipe.with_manifest(codec=codec.describe()).manifest
    open_store = StoreWriter.create_or_resume(tmp_path / "store", manifest, recipe.plan, codec.files())
    with open_store as writer, writer.part(0) as out:
        row = out.sequences.to_pylist()[0]
        values = values_of(recipe, row)
        with pytest.raises(WriteInvalid, match=r"predicted from tokens: .*got none"):
            out.write("kv", row["first_token"], values["kv"])
        with pytest.raises(WriteInvalid, match="predicted from tokens"):
            out.write("kv", row["first_token"], values["kv"], values["tokens"][1:])
    with pytest.raises(CodecUnknown, match="no field 'tokens'"):
        StoreCodec(NAME, (kv_field(4, 2, 8),))


def test_another_table_of_features_is_damage(written: Path):
    basis = written / "codec/basis.safetensors"
    content = bytearray(basis.read_bytes())
    content[-1] ^= 1
    basis.write_bytes(content)
    with pytest.raises(ShardCorrupt, match="sha256"):
        ActivationStore(written)
