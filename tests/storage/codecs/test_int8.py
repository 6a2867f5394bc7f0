"""The lossless codec and int8.

Errors of int8 are within half a step, its scales are checked, and other programs can decode its
codes.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.errors import CodecUnknown, StoreError
from moa_data.storage.codecs.int8 import Int8Codec
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import FieldSpec, from_float32, hidden_field, kv_field, to_float32
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.stores import Recipe, read_by_zarr

from .contract import CodecContract, LossyContract

KV, HIDDEN = kv_field(3, 2, 8), hidden_field("last", 16)


def activations(spec: FieldSpec, n_tokens: int, seed: int = 0, spread: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = np.exp(spread * rng.normal(size=spec.token_shape))
    return (rng.normal(size=(n_tokens, *spec.token_shape)) * scale).astype(np.float32)


class TestInt8(LossyContract):
    name = "int8"
    error = 0.01
    unknown = ("int6", "int8:4", "fp8")


class TestLossless(CodecContract):
    name = "lossless"
    error = 0.0
    unknown = ("lossles", "lossless:2")


def group_largest(codec: Int8Codec, values: np.ndarray) -> np.ndarray:
    """Return, for each value, the largest magnitude among the values that share its scale."""
    blocks = [np.abs(values[first : first + 64]) for first in range(0, len(values), 64)]
    largest = np.concatenate([np.broadcast_to(block.max(axis=0), block.shape) for block in blocks])
    if codec.spec.name == "kv":
        largest[:, :, :, 1] = np.abs(values[:, :, :, 1]).max(axis=-1, keepdims=True)
    return largest


@settings(max_examples=20, deadline=None)
@given(
    spec=st.sampled_from([KV, HIDDEN]),
    n_tokens=st.integers(1, 140),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-80, 100),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
)
def test_errors_stay_within_half_a_step(
    spec: Any, n_tokens: int, seed: int, exponent: int, spread: float
) -> None:
    codec = Int8Codec(spec)
    values = activations(spec, n_tokens, seed, spread) * np.float32(2.0**exponent)
    values[np.random.default_rng(seed).random(values.shape) < 0.2] = 0
    decoded = codec.decode(codec.encode(values), 0, n_tokens)
    largest = group_largest(codec, values)
    # The scale's mantissa has two bits and is rounded up, so a step is at most a quarter larger
    # than necessary.
    bound = 0.5 * 1.25 * largest / 127
    assert (np.abs(decoded - values) <= bound * (1 + 1e-5) + 2.0**-126).all()
    assert (decoded[values == 0] == 0).all()


def test_zero_blocks_and_tiny_values() -> None:
    codec, values = Int8Codec(KV), np.zeros((70, *KV.token_shape), np.float32)
    values[64:] = 1e-42
    encoded = codec.encode(values)
    assert not any(rows[:64].any() for name, rows in encoded.items() if "codes" in name), (
        "as the padding is"
    )
    decoded = codec.decode(encoded, 0, 70)
    assert not decoded[:64].any()
    assert np.abs(decoded).max() < 1e-37


def test_fields_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CodecUnknown):
        Int8Codec(FieldSpec("x", "bfloat16", (2, 3), ("token", "a", "b"), ""))


def write_kv(
    path: Path, recipe: Recipe, change: Callable[[dict[str, np.ndarray], dict[str, Any]], None]
) -> Path:
    """Write a store; ``change`` modifies the codes of keys and values before they are stored."""
    codec = StoreCodec("int8", recipe.manifest.fields)

    def encoded(name: str, row: dict[str, Any], values: np.ndarray) -> Any:
        if name != "kv":
            return values
        codes = codec.fields["kv"].encode(to_float32(values, "bfloat16"))
        change(codes, row)
        return codes

    return recipe.with_manifest(codec=codec.describe()).write(path, encoded)


def test_scales_that_are_not_finite_are_damage(tmp_path: Path, recipe: Recipe) -> None:
    def spoil(codes: dict[str, np.ndarray], row: dict[str, Any]) -> None:
        if row["source_row"] == 2:
            codes["kv/value_scale"][7, 3, 1] = 0x7FC0

    (damage,) = verify_store(write_kv(tmp_path / "store", recipe, spoil)).damages
    assert "row 2 of the dataset" in damage.message
    assert "kv/value_scale" in damage.path
    assert "token 7, layer 3, kv_head 1" in damage.message


def test_a_lossy_field_takes_whole_sequences(tmp_path: Path, recipe: Recipe) -> None:
    recipe = recipe.with_manifest(codec=StoreCodec("int8", recipe.manifest.fields).describe())
    with StoreWriter.create_or_resume(tmp_path / "store", recipe.manifest, recipe.plan) as writer:
        with writer.part(0) as out:
            row = out.sequences.to_pylist()[0]
            first, values = row["first_token"], recipe.values(recipe.manifest.fields[2], row)
            codes = writer.codec.fields["kv"].encode(to_float32(values, "bfloat16"))
            without_scales = codes | {"kv/key_scale": np.empty((0, 4))}
            wrong: tuple[tuple[int, Any], ...] = (
                (first, values[:-1]), (first, {}), (first + 1, {}),
                (first, values.astype(np.float32)),
                (first, without_scales),
            )  # fmt: skip
            for at, given in wrong:
                with pytest.raises(StoreError):
                    out.write("kv", at, given)
        with writer.part(0) as out:
            for row in out.sequences.to_pylist():
                for spec in (spec for spec in recipe.manifest.fields if spec.name != "kv"):
                    codec, given = out.codec.fields[spec.name], recipe.values(spec, row)
                    encoded = (
                        {} if codec.is_identity else codec.encode(to_float32(given, spec.dtype))
                    )
                    out.write(spec.name, row["first_token"], encoded or given)
            with raises_naming(StoreError, "'kv/key_codes'"):
                out.commit()


def test_a_stranger_dequantises_int8(tmp_path: Path, recipe: Recipe) -> None:
    """Follow docs/format-codecs.md with plain zarr-python and NumPy."""
    path = write_kv(tmp_path / "store", recipe, lambda codes, row: None)
    with ActivationStore(path) as store:
        row = store.sequences.to_pylist()[0]
        part = path / "parts"
        first, n = row["first_token"], row["n_tokens"]
        span, blocks = (first, first + n), (first // 64, -(-(first + n) // 64))
        key_scale = (read_by_zarr(part, "kv/key_scale", *blocks).astype(np.uint32) << 16).view(
            np.float32
        )
        keys = read_by_zarr(part, "kv/key_codes", *span) * np.repeat(key_scale, 64, axis=0)[:n]
        value_scale = (read_by_zarr(part, "kv/value_scale", *span).astype(np.uint32) << 16).view(
            np.float32
        )
        values = read_by_zarr(part, "kv/value_codes", *span) * value_scale[..., None]
        kv = np.stack([keys, values], axis=3)
        np.testing.assert_array_equal(from_float32(kv, "bfloat16"), store.read(0, "kv"))


def test_a_store_of_another_codec_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    with raises_naming(CodecUnknown, tmp_path, "'int6'"):
        StoreCodec.open(
            replace(recipe.manifest, codec={**recipe.manifest.codec, "name": "int6"}), tmp_path
        )
