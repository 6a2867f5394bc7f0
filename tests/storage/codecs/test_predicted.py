"""Hidden states that are predicted from keys and values, or from the state below them."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moa_data.errors import CodecUnknown, StoreError
from moa_data.storage.codecs import transform as codec_module
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.schema import TOKENS, StoreManifest, hidden_field
from moa_data.storage.write.addition import extended_codec
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.errors import raises_naming

from .contract import (
    FIELDS,
    HIDDEN,
    HIGH,
    KV,
    LAST,
    LOW,
    RECIPE,
    ROWS,
    SEQUENCES,
    WIDTH,
    LossyContract,
    encoded,
    exact,
    learned,
)


def relative_errors(codec: StoreCodec) -> dict[str, float]:
    """Return the error of each field of hidden states, over all sequences."""
    wrong = dict.fromkeys(HIDDEN, 0.0)
    energy = dict.fromkeys(HIDDEN, 0.0)
    for sequence in SEQUENCES:
        values, tokens = exact(sequence), sequence[TOKENS]
        codes = encoded(codec, values, tokens)
        for name in HIDDEN:
            got = codec.fields[name].decode(codes, 0, len(tokens))
            wrong[name] += float(np.square(got - values[name]).sum())
            energy[name] += float(np.square(values[name]).sum())
    return {name: (wrong[name] / energy[name]) ** 0.5 for name in HIDDEN}


@cache
def errors_of(name: str) -> dict[str, float]:
    """Return the errors of the codec with this name, which learns from all sequences."""
    return relative_errors(learned(name))


class PredictedContract(LossyContract):
    error = 0.6
    torch_differs = 1e-3
    slice_atol = 1e-4
    sources: dict[str, tuple[str, ...]]

    def test_fields_know_what_they_are_predicted_from(self, codec: StoreCodec) -> None:
        assert codec.sources == self.sources
        described = codec.describe()["transform"]
        for name in HIDDEN:
            names = list(codec.sources.get(name, ()))
            assert described[name].get("predicted_from", []) == (
                names[0] if len(names) == 1 else names
            )

    def test_a_field_alone_says_what_it_lacks(self, codec: StoreCodec, tmp_path: Path) -> None:
        with raises_naming(ValueError, f"'{LAST}'", "StoreCodec.encode"):
            codec.fields[LAST].encode(exact(SEQUENCES[0])[LAST])
        manifest = replace(RECIPE.manifest, codec=codec.describe())
        with (
            StoreWriter.create_or_resume(
                tmp_path / "store", manifest, RECIPE.plan, codec.files()
            ) as writer,
            writer.part(0) as out,
            pytest.raises(StoreError),
        ):
            out.write(LAST, ROWS[0]["first_token"], SEQUENCES[0][LAST])

    def test_a_field_that_is_added_is_coded_alone(self, codec: StoreCodec) -> None:
        wider = extended_codec(codec, (*FIELDS, hidden_field("layer_4", WIDTH)))
        assert wider.sources == codec.sources


class TestFromKv(PredictedContract):
    name = "transform:2,hidden=0.7,tokens,from-kv@group2"
    sources = {LOW: (KV,), HIGH: (KV,), LAST: (KV,)}


@pytest.mark.slow
class TestFromKvInPieces(TestFromKv):
    min_group_bytes = 1


class TestJoint(PredictedContract):
    name = "transform:1,hidden=1.2,joint"
    sources = {HIGH: (LOW,), LAST: (HIGH,)}


@pytest.mark.slow
class TestFromKvAndJoint(PredictedContract):
    name = "transform:2,hidden=0.7,tokens,from-kv,joint@all"
    sources = {LOW: (KV,), HIGH: (KV, LOW), LAST: (KV, HIGH)}
    min_group_bytes = 1


@pytest.mark.parametrize(
    ("plain", "predicted", "fields", "factor"),
    [
        ("transform:2,hidden=0.7@all", "transform:2,hidden=0.7,from-kv@all", HIDDEN, 0.8),
        ("transform:1,hidden=1.2", TestJoint.name, HIDDEN, 0.8),
        ("transform:1,hidden=1.2,joint", "transform:1,hidden=1.2,tokens,joint", (LOW,), 0.9),
    ],
)
def test_they_err_less_at_equal_bits(
    plain: str, predicted: str, fields: tuple[str, ...], factor: float
) -> None:
    errors, errors_of_plain = errors_of(predicted), errors_of(plain)
    for name in fields:
        assert errors[name] < factor * errors_of_plain[name]
    if predicted == TestJoint.name:
        assert max(errors.values()) < 1.3 * min(errors.values()), (
            "bits are split so that all err alike"
        )


def test_what_cannot_be_predicted_is_refused(tmp_path: Path) -> None:
    with raises_naming(CodecUnknown, "'transform:1,from-kv'", "'kv'"):
        StoreCodec("transform:1,from-kv", FIELDS[:-1])
    manifest: StoreManifest = replace(RECIPE.manifest, codec=learned(TestFromKv.name).describe())
    for field, names in (
        (LAST, [TOKENS]), (LAST, [LAST]), (KV, LAST), (LAST, "hidden/layer_3"), (KV, [[LAST]]),
    ):  # fmt: skip
        settings = {name: dict(of) for name, of in manifest.codec["transform"].items()}
        settings[field]["predicted_from"] = names
        with raises_naming(CodecUnknown, tmp_path, f"'{field}'"):
            StoreCodec.open(
                replace(manifest, codec={**manifest.codec, "transform": settings}), tmp_path
            )


def test_only_leading_components_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "KV_FEATURES", 8)
    codec = learned("transform:2,hidden=0.7,from-kv@group2")
    codes = encoded(codec, exact(SEQUENCES[0]), SEQUENCES[0][TOKENS])
    features = codec.learned[KV].as_features(codes, 0, len(SEQUENCES[0][TOKENS]))
    assert features.shape == (len(SEQUENCES[0][TOKENS]), 2 * 2 * 2), (
        "two of each part of both groups"
    )
    assert codec.learned[KV].n_features == 8
    assert relative_errors(codec)[LAST] < 1
