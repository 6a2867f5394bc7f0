"""The manifest survives a round trip and refuses documents that it would misread.

Conversions of bfloat16 agree with torch.
"""

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.errors import SchemaVersionError, StoreDamaged
from moa_data.storage.schema import (
    CONVENTIONS,
    FieldSpec,
    StoreManifest,
    bfloat16_bits,
    hidden_field,
    is_finite,
    kv_field,
    kv_group_field,
    to_float32,
)
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.stores import Recipe


def test_round_trip(recipe: Recipe) -> None:
    manifest = replace(recipe.manifest, conventions={"bos": "exactly one"})
    assert manifest.conventions == {**CONVENTIONS, "bos": "exactly one"}
    text = manifest.to_json()
    assert StoreManifest.from_json(text) == manifest
    assert StoreManifest.from_json(text).to_json() == text
    document = json.loads(text)
    with raises_naming(StoreDamaged, "store.json", "colour"):
        StoreManifest.from_json(json.dumps(document | {"colour": 1}))
    for name in document.keys() - {"format", "schema_version"}:
        without = {key: value for key, value in document.items() if key != name}
        with raises_naming(StoreDamaged, "store.json", name):
            StoreManifest.from_json(json.dumps(without))


@pytest.mark.parametrize(
    ("changes", "kind", "facts"),
    [
        *(
            ({"schema_version": version}, SchemaVersionError, (version,))
            for version in (1, 3, 2.0, None)
        ),
        ({"format": "x"}, StoreDamaged, ("store.json", "'moa-data activation store'")),
        (
            {"conventions": CONVENTIONS | {"kv_keys": "before RoPE"}},
            StoreDamaged,
            ("'before RoPE'", "'kv_keys'"),
        ),
        (
            {"fields": [asdict(kv_field(1, 1, 2)) | {"dtype": "int77"}]},
            StoreDamaged,
            ("'int77'",),
        ),
        ({"fields": [asdict(kv_field(1, 1, 2))] * 2}, StoreDamaged, ("kv",)),
        *(
            (
                {"fields": [asdict(kv_group_field("kv/latent", (3,), 1, 4, 2)) | wrong]},
                StoreDamaged,
                facts,
            )
            for wrong, facts in (
                ({"layers": 3}, ("fields.0.layers",)),
                ({"layers": ["x"]}, ("fields.0.layers.0",)),
                ({"layers": [0, 1]}, ("layers", "key_width")),
                ({"key_width": 6}, ("layers", "key_width")),
                ({"key_width": None}, ("layers", "key_width")),
            )
        ),
        ("{", StoreDamaged, ("store.json", "JSON")),
        ("[]", StoreDamaged, ("store.json", "list")),
    ],
)
def test_what_would_be_misread_is_refused(
    recipe: Recipe, changes: Any, kind: type[Exception], facts: tuple[object, ...]
) -> None:
    text = (
        changes
        if isinstance(changes, str)
        else json.dumps(json.loads(recipe.manifest.to_json()) | changes)
    )
    with raises_naming(kind, *facts):
        StoreManifest.from_json(text)


def test_fields_check_themselves() -> None:
    assert kv_field(32, 8, 128).token_bytes == 131_072
    assert kv_field(32, 8, 128).layer_axis == 1
    assert hidden_field("layer_6", 16).name == "hidden/layer_6"
    for name, dtype, shape, facts in (
        ("x", "int32", (3,), ("'x'", "('token',)", (3,))),
        ("../x", "int32", (), ("'../x'",)),
        ("x", "complex64", (), ("'complex64'", "bfloat16")),
    ):
        with raises_naming(ValueError, *facts):
            FieldSpec(name, dtype, shape, ("token",), "")
    with raises_naming(ValueError, "bfloat16", "uint16", "float32"):
        to_float32(np.zeros(2, np.float32), "bfloat16")


def all_bits() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16)


def test_every_bfloat16_converts_as_in_torch() -> None:
    expected = torch.from_numpy(all_bits().view(np.int16)).view(torch.bfloat16).float().numpy()
    got = to_float32(all_bits(), "bfloat16")
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_rounding_to_bfloat16_equals_torch() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(bfloat16_bits(values)[~nan], expected[~nan])
    assert np.isnan(to_float32(bfloat16_bits(values)[nan], "bfloat16")).all()


def test_finite_bits_equal_numpy() -> None:
    np.testing.assert_array_equal(
        is_finite(all_bits(), "bfloat16"), np.isfinite(to_float32(all_bits(), "bfloat16"))
    )
    assert is_finite(np.array([1, 2], np.int32), "int32").all()
    assert is_finite(np.array([1, np.nan], np.float16), "float16").tolist() == [True, False]
