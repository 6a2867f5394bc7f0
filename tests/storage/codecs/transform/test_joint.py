"""Joint hidden states: each is predicted from the one stored below it, in codes, in stores and in training."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.errors import StoreDamaged, StoreError
from moa_data.pipeline.forwards.calibrate import calibrate
from moa_data.storage.care.verify import verify_store
from moa_data.storage.chunks.field import TOKENS, Learning
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform.codec import TransformCodec
from moa_data.storage.codecs.transform.settings import TransformSettings
from moa_data.storage.dtypes import from_float32, to_float32
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import StoreManifest, hidden_field, response_mask_field, tokens_field
from moa_data.storage.write.addition import extended_codec
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.predicted import decoded, exact, relative_error, write_store
from moa_data.tests.kit.stores import Recipe, make_recipe

WIDTH, VOCABULARY = 24, 100
HIDDEN = ("hidden/last", "hidden/layer_2", "hidden/layer_10")
FIELDS = (tokens_field(), response_mask_field(), *(hidden_field(name.split("/")[1], WIDTH) for name in HIDDEN))
LENGTHS = (150, 1, 90, 64, 200, 33, 120, 180, 75, 140)
RECIPE: Recipe = make_recipe(LENGTHS, FIELDS)
_RNG = np.random.default_rng(0)
EMBEDDINGS = _RNG.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
_TURN = _RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5


def residual_stream(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """A sequence whose layers add a little to what comes from below, as they are stored."""
    rng, n = np.random.default_rng(row["first_token"]), row["n_tokens"]
    tokens = rng.integers(0, VOCABULARY, n).astype(np.int32)
    low = EMBEDDINGS[tokens] + 0.5 * rng.standard_normal((n, WIDTH))
    high = low + 0.3 * rng.standard_normal((n, WIDTH))
    states = {"hidden/layer_2": low, "hidden/layer_10": high, "hidden/last": high @ _TURN}
    stored = {name: from_float32(values.astype(np.float32), "bfloat16") for name, values in states.items()}
    return stored | {TOKENS: tokens, "response_mask": RECIPE.values(FIELDS[1], row)}


ROWS = RECIPE.plan.to_pylist()
SEQUENCES = [residual_stream(row) for row in ROWS]


def learned(name: str, fields: Any = FIELDS) -> StoreCodec:
    codec = StoreCodec(name, fields)
    lengths = np.array([row["n_tokens"] for row in ROWS])
    given = (SimpleNamespace(), torch.randn(VOCABULARY, WIDTH), torch.from_numpy(EMBEDDINGS))

    def read(i: int) -> dict[str, np.ndarray]:
        return exact(SEQUENCES[i], HIDDEN) | {TOKENS: SEQUENCES[i][TOKENS]}

    calibrate(codec, lengths, read, *given, Learning())
    return codec


@pytest.fixture(scope="module")
def codec() -> StoreCodec:
    return learned("transform:1,hidden=1.2,joint")


@pytest.fixture(scope="module")
def store(codec: StoreCodec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("joint") / "store", RECIPE, codec, residual_stream)


def errors(codec: StoreCodec) -> list[float]:
    """The relative error of each hidden state."""
    return [relative_error(codec, SEQUENCES, name) for name in HIDDEN]


def test_each_is_predicted_from_the_layer_below(codec: StoreCodec) -> None:
    assert codec.sources == {"hidden/layer_10": ("hidden/layer_2",), "hidden/last": ("hidden/layer_10",)}
    assert codec.with_sources("hidden/last") == ["hidden/layer_2", "hidden/layer_10", "hidden/last"]
    assert codec.in_order[-3:] == ["hidden/layer_2", "hidden/layer_10", "hidden/last"]
    described = codec.describe()["transform"]
    assert described["hidden/last"]["predicted_from"] == "hidden/layer_10"
    assert "predicted_from" not in described["hidden/layer_2"]


def test_it_errs_less_at_equal_bits() -> None:
    alone, joint, from_tokens = (
        errors(learned(f"transform:1,hidden=1.2{more}")) for more in ("", ",joint", ",tokens,joint")
    )
    assert max(mine / other for mine, other in zip(joint, alone, strict=True)) < 0.8
    assert max(joint) < 1.3 * min(joint), "bits are split so that all err alike"
    assert from_tokens[1] < 0.9 * joint[1]


def test_every_way_of_reading_gives_the_same(codec: StoreCodec, store: Path) -> None:
    assert verify_store(store).ok
    with ActivationStore(store) as opened:
        assert opened.codec.describe() == codec.describe()
        batch = opened.read_batch(range(len(opened)), list(HIDDEN))
        rows = opened.read_batch(range(len(opened)), [TOKENS, *HIDDEN], decoded=False)
        for i, sequence in enumerate(SEQUENCES):
            n = len(sequence[TOKENS])
            for name in HIDDEN:
                whole = to_float32(opened.read(i, name), "bfloat16")
                np.testing.assert_allclose(whole, decoded(codec, sequence, name), rtol=2**-7, atol=1e-3)
                np.testing.assert_array_equal(to_float32(batch[name][i, :n], "bfloat16"), whole)
                part = to_float32(opened.read(i, name, tokens=slice(n // 2, n)), "bfloat16")
                np.testing.assert_allclose(part, whole[n // 2 :], rtol=2**-7, atol=1e-3)
                own = {key: torch.from_numpy(value[i]) for key, value in rows.items()}
                on_torch = opened.codec.fields[name].decode(own, 0, n).numpy()
                np.testing.assert_allclose(on_torch, whole, rtol=2**-7, atol=1e-3)
        assert {array.name for array in opened.codec.fields["hidden/last"].arrays} < {*rows}
        alone = opened.read_batch([0], "hidden/last", decoded=False)
        assert {name.rpartition("/")[0] for name in alone} == {*HIDDEN}, "what it is predicted from is read too"


def test_a_field_alone_says_what_it_lacks(codec: StoreCodec, store: Path, tmp_path: Path) -> None:
    values = exact(SEQUENCES[0], HIDDEN)["hidden/last"]
    with pytest.raises(ValueError, match="'hidden/last' is predicted from 'hidden/layer_10': encode them together by"):
        codec.fields["hidden/last"].encode(values)
    manifest = replace(RECIPE.manifest, codec=codec.describe())
    with (
        StoreWriter.create_or_resume(tmp_path / "store", manifest, RECIPE.plan, codec.files()) as writer,
        writer.part(0) as out,
        pytest.raises(StoreError, match="'hidden/last' is predicted from 'hidden/layer_10': encode the sequence by"),
    ):
        out.write("hidden/last", ROWS[0]["first_token"], SEQUENCES[0]["hidden/last"])


@pytest.mark.parametrize("base", ["hidden/last", "hidden/layer_3", "tokens"])
def test_a_damaged_record_of_what_it_is_predicted_from(store: Path, base: str) -> None:
    manifest = StoreManifest.from_json((store / "store.json").read_bytes())
    settings = {name: dict(of) for name, of in manifest.codec["transform"].items()}
    settings["hidden/layer_2"]["predicted_from"] = base
    damaged = replace(manifest, codec={**manifest.codec, "transform": settings})
    with pytest.raises(StoreDamaged, match=r"would be predicted from itself|cannot be predicted from"):
        StoreCodec.open(damaged, store)


def test_a_field_that_is_added_is_coded_alone(codec: StoreCodec) -> None:
    wider = extended_codec(codec, (*FIELDS, hidden_field("layer_4", WIDTH)))
    assert wider.sources == codec.sources
    new = wider.fields["hidden/layer_4"]
    assert isinstance(new, TransformCodec)
    assert not new.sources


def test_the_name() -> None:
    settings = TransformSettings.parse("transform:0.8,hidden=0.9,tokens,joint@group2")
    assert (settings.from_tokens, settings.is_joint, settings.group_layers) == (True, True, 2)
    assert settings.spelling("@all") == "transform:0.8,hidden=0.9,tokens,joint@all"
    assert not TransformSettings.parse("transform:1,tokens").is_joint
