"""The manifest survives a round trip and refuses what it would misread."""

import json
from dataclasses import replace
from typing import Any

import pytest

from moa_data.errors import SchemaVersionError, StoreDamaged
from moa_data.storage.schema import CONVENTIONS, FieldSpec, StoreManifest, hidden_field, kv_field
from moa_data.tests.kit.stores import Recipe


def test_round_trip(recipe: Recipe) -> None:
    text = recipe.manifest.to_json()
    assert StoreManifest.from_json(text) == recipe.manifest
    assert StoreManifest.from_json(text).to_json() == text


def edited(recipe: Recipe, **changes: Any) -> str:
    return json.dumps(json.loads(recipe.manifest.to_json()) | changes)


@pytest.mark.parametrize("version", [1, 3, 2.0, None])
def test_another_schema_version_is_named(recipe: Recipe, version: object) -> None:
    with pytest.raises(SchemaVersionError, match=f"{version}"):
        StoreManifest.from_json(edited(recipe, schema_version=version))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "store.json is not valid JSON"),
        ("[]", "a JSON list, expected an object"),
        ('{"format": "x"}', "not the manifest of an activation store"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(StoreDamaged, match=message):
        StoreManifest.from_json(text)


def test_unknown_and_missing_keys_are_named(recipe: Recipe) -> None:
    document = json.loads(recipe.manifest.to_json()) | {"colour": 1}
    del document["codec"]
    with pytest.raises(StoreDamaged, match=r"missing keys \['codec'\], unknown keys \['colour'\]"):
        StoreManifest.from_json(json.dumps(document))


def test_a_field_of_the_wrong_kind_is_refused(recipe: Recipe) -> None:
    fields = json.loads(recipe.manifest.to_json())["fields"]
    fields[0]["dtype"] = "int77"
    with pytest.raises(StoreDamaged, match="wrong kind: Cannot store dtype 'int77'"):
        StoreManifest.from_json(edited(recipe, fields=fields))


def test_another_convention_is_refused(recipe: Recipe) -> None:
    conventions = dict(CONVENTIONS) | {"kv_keys": "before RoPE"}
    with pytest.raises(StoreDamaged, match="'kv_keys' is 'before RoPE'"):
        StoreManifest.from_json(edited(recipe, conventions=conventions))


def test_conventions_of_the_caller_are_kept(recipe: Recipe) -> None:
    manifest = replace(recipe.manifest, conventions={"bos": "exactly one"})
    assert manifest.conventions == {**CONVENTIONS, "bos": "exactly one"}


def test_fields_check_themselves(recipe: Recipe) -> None:
    assert kv_field(32, 8, 128).token_bytes == 131_072
    assert kv_field(32, 8, 128).layer_axis == 1
    assert hidden_field("layer_6", 16).name == "hidden/layer_6"
    with pytest.raises(ValueError, match="must be 'token' and one name for each axis"):
        FieldSpec("x", "int32", (3,), ("token",))
    with pytest.raises(ValueError, match="without empty"):
        FieldSpec("../x", "int32", (), ("token",))
    with pytest.raises(StoreDamaged, match="Fields appear twice: kv"):
        replace(recipe.manifest, fields=(kv_field(1, 1, 2), kv_field(1, 1, 2)))
