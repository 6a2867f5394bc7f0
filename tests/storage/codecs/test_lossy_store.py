"""Stores with lossy codecs: written, read in any pieces, checked, and read by a stranger with plain Zarr."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

from moa_data.storage.care.summary import summarize_store
from moa_data.storage.care.verify import verify_store
from moa_data.storage.codecs.quantised import SCHEMES
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.dtypes import from_float32, to_float32
from moa_data.storage.errors import ManifestInvalid, PartIncomplete, StoreMismatch, WriteInvalid
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.write.store import StoreWriter

ERROR = {"int8": 0.01, "fp8": 0.04, "int6": 0.035, "int4": 0.16}


def lossy(recipe, name: str):
    return recipe.with_manifest(codec=StoreCodec(name, recipe.manifest.fields).describe())


@pytest.fixture(params=list(SCHEMES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def written(tmp_path: Path, recipe, name: str) -> Path:
    return lossy(recipe, name).write(tmp_path / "lossy")


def test_reads_back_within_its_error_in_any_pieces(written: Path, recipe, name: str):
    with ActivationStore(written) as store:
        for i, row in enumerate(store.sequences.to_pylist()):
            np.testing.assert_array_equal(store.read(i, "tokens"), recipe.values(store.fields["tokens"], row))
            for field in ("kv", "hidden/last"):
                spec = store.fields[field]
                exact = to_float32(recipe.values(spec, row), "bfloat16")
                bits = store.read(i, field)
                values = to_float32(bits, "bfloat16")
                assert np.linalg.norm(values - exact) < ERROR[name] * np.linalg.norm(exact)
                np.testing.assert_array_equal(store.read(i, field, tokens=slice(63, 131)), bits[63:131])
            kv = store.read(i, "kv")
            np.testing.assert_array_equal(store.read(i, "kv", [3, 1], slice(5, 70)), kv[5:70, [3, 1]])
            out = np.zeros((220, 4, 2, 2, 8), np.uint16)
            assert store.read_into(i, "kv", out) == len(kv)
            np.testing.assert_array_equal(out[: len(kv)], kv)


def test_codes_come_undecoded(written: Path):
    with ActivationStore(written) as store:
        codec = store.codec.fields["kv"]
        codes = store.read(2, "kv", [1], decoded=False)
        n_tokens = int(store.lengths[2])
        assert {key: rows.shape[0] for key, rows in codes.items()} == {
            array.name: array.n_rows(n_tokens) for array in codec.arrays
        }
        values = codec.decode(codes, 0, n_tokens, [1])
        np.testing.assert_array_equal(from_float32(values, "bfloat16"), store.read(2, "kv", [1]))


def test_verify_and_summary_see_every_stored_array(written: Path, name: str):
    assert verify_store(written).ok
    summary = summarize_store(written)
    assert summary.codec == name
    (kv,) = (field for field in summary.fields if field.name == "kv")
    assert [array.name for array in kv.arrays] == [
        "kv/key_codes", "kv/key_scale", "kv/value_codes", "kv/value_scale",
    ]  # fmt: skip
    assert kv.stored_bytes == sum(array.stored_bytes for array in kv.arrays)
    assert kv.bits_per_value == pytest.approx(8 * kv.stored_bytes / (kv.raw_bytes / 2))


def test_scales_that_are_not_finite_are_damage(tmp_path: Path, recipe):
    recipe = lossy(recipe, "int8")
    with StoreWriter.create_or_resume(tmp_path / "store", recipe.manifest, recipe.plan) as writer:
        codec = writer.codec.fields["kv"]
        for part in writer.pending_parts():
            with writer.part(part) as out:
                for row in out.sequences.to_pylist():
                    for spec in recipe.manifest.fields:
                        if spec.name != "kv":
                            out.write(spec.name, row["first_token"], recipe.values(spec, row))
                            continue
                        codes = codec.encode(to_float32(recipe.values(spec, row), "bfloat16"))
                        if row["source_row"] == 2:
                            codes["kv/value_scale"][7, 3, 1] = 0x7FC0
                        out.write_codes("kv", row["first_token"], row["n_tokens"], codes)
                out.commit()
    (damage,) = verify_store(tmp_path / "store").damages
    assert "source row 2" in damage.message
    assert "kv/value_scale" in damage.path
    assert "token 7, layer 3, kv_head 1" in damage.message


def test_equal_inputs_give_equal_bytes_and_another_codec_is_named(tmp_path: Path, recipe, tree):
    one, two = (lossy(recipe, "int4").write(tmp_path / folder) for folder in "ab")
    assert tree(one) == tree(two)
    with pytest.raises(StoreMismatch, match=r"codec\.name: store has 'int4', given 'int8'"):
        lossy(recipe, "int8").write(one)


def test_a_lossy_field_takes_whole_sequences(tmp_path: Path, recipe):
    recipe = lossy(recipe, "int8")
    with StoreWriter.create_or_resume(tmp_path / "store", recipe.manifest, recipe.plan) as writer:
        with writer.part(0) as out:
            row = out.sequences.to_pylist()[0]
            values = recipe.values(recipe.manifest.fields[2], row)
            with pytest.raises(WriteInvalid, match="are not one sequence of the plan"):
                out.write("kv", row["first_token"], values[:-1])
            with pytest.raises(WriteInvalid, match="is stored as kv/key_codes, kv/key_scale"):
                out.write_codes("kv", row["first_token"], row["n_tokens"], {})
            with pytest.raises(WriteInvalid, match="takes uint16 arrays"):
                out.write("kv", row["first_token"], values.astype(np.float32))
            codes = writer.codec.fields["kv"].encode(to_float32(values, "bfloat16"))
            with pytest.raises(WriteInvalid, match=r"'kv/key_scale': \d+ tokens make \d+ rows, got 0"):
                out.write_codes("kv", row["first_token"], row["n_tokens"], codes | {"kv/key_scale": np.empty((0, 4))})
        with writer.part(0) as out:
            for row in out.sequences.to_pylist():
                for spec in recipe.manifest.fields:
                    if spec.name != "kv":
                        out.write(spec.name, row["first_token"], recipe.values(spec, row))
            with pytest.raises(PartIncomplete, match="'kv/key_codes'"):
                out.commit()


def test_a_stranger_dequantises_int8(tmp_path: Path, recipe):
    """What docs/format.md says, with plain zarr-python and NumPy."""
    path = lossy(recipe, "int8").write(tmp_path / "store")
    with ActivationStore(path) as store:
        row = store.sequences.to_pylist()[0]
        part = zarr.open_group(path / "parts/part-00000.zarr", mode="r")
        first, n = row["first_token"], row["n_tokens"]
        span, blocks = slice(first, first + n), slice(first // 64, -(-(first + n) // 64))
        key_scale = (part["kv/key_scale"][blocks].astype(np.uint32) << 16).view(np.float32)
        keys = part["kv/key_codes"][span] * np.repeat(key_scale, 64, axis=0)[:n]
        value_scale = (part["kv/value_scale"][span].astype(np.uint32) << 16).view(np.float32)
        values = part["kv/value_codes"][span] * value_scale[..., None]
        kv = np.stack([keys, values], axis=3)
        np.testing.assert_array_equal(from_float32(kv, "bfloat16"), store.read(0, "kv"))


def test_a_store_of_an_unknown_codec_is_refused(tmp_path: Path, recipe):
    manifest = replace(recipe.manifest, codec=recipe.manifest.codec | {"name": "int3"})
    with pytest.raises(ManifestInvalid, match="Unknown codec 'int3'"):
        StoreCodec.open(manifest, tmp_path)
