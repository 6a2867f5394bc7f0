"""Hidden states that are predicted from the stored keys and values: in codes, in stores and in batches."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from moa_data.errors import CodecUnknown, StoreDamaged
from moa_data.pipeline.forwards.calibrate import calibrate, target_rope
from moa_data.storage.care.verify import verify_store
from moa_data.storage.chunks.field import TOKENS, Learning
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform import codec as codec_module
from moa_data.storage.codecs.transform import pieces
from moa_data.storage.codecs.transform.codec import TransformCodec
from moa_data.storage.codecs.transform.settings import TransformSettings
from moa_data.storage.dtypes import from_float32, to_float32
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import StoreManifest, hidden_field, kv_field, response_mask_field, tokens_field
from moa_data.storage.write.addition import extended_codec
from moa_data.tests.kit.predicted import decoded, exact, relative_error, write_store
from moa_data.tests.kit.stores import Recipe, make_recipe

N_LAYERS, HEAD_DIM, WIDTH, VOCABULARY = 4, 8, 24, 100
KV, LAYER, LAST = "kv", "hidden/layer_1", "hidden/last"
HIDDEN_AND_KV = (KV, LAYER, LAST)
FIELDS = (
    tokens_field(), response_mask_field(), hidden_field("last", WIDTH), hidden_field("layer_1", WIDTH),
    kv_field(N_LAYERS, 1, HEAD_DIM),
)  # fmt: skip
LENGTHS = (150, 1, 90, 64, 200, 33, 120, 180, 75, 140)
RECIPE: Recipe = make_recipe(LENGTHS, FIELDS)
CONFIG = LlamaConfig(hidden_size=WIDTH, num_attention_heads=3, head_dim=HEAD_DIM)
ROPE = target_rope(CONFIG)
_RNG = np.random.default_rng(0)
EMBEDDINGS = _RNG.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
_KEYS, _VALUES = _RNG.standard_normal((2, WIDTH, N_LAYERS * HEAD_DIM)) / WIDTH**0.5
NAME = "transform:2,hidden=0.7,tokens,from-kv@group2"


def activations(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """A sequence whose hidden states are nearly linear in its keys and values, as they are stored."""
    rng, n = np.random.default_rng(row["first_token"]), row["n_tokens"]
    tokens = rng.integers(0, VOCABULARY, n).astype(np.int32)
    state = EMBEDDINGS[tokens] + rng.standard_normal((n, WIDTH))
    keys, values = (
        (state @ matrix).reshape(n, N_LAYERS, 1, HEAD_DIM).astype(np.float32) for matrix in (_KEYS, _VALUES)
    )
    found = {KV: np.stack([ROPE.rotate(keys), values], axis=3), LAYER: state}
    found[LAST] = state + 0.2 * rng.standard_normal((n, WIDTH))
    stored = {name: from_float32(value.astype(np.float32), "bfloat16") for name, value in found.items()}
    return stored | {TOKENS: tokens, "response_mask": RECIPE.values(FIELDS[1], row)}


ROWS = RECIPE.plan.to_pylist()
SEQUENCES = [activations(row) for row in ROWS]


def learned(name: str) -> StoreCodec:
    codec = StoreCodec(name, FIELDS)
    lengths = np.array([row["n_tokens"] for row in ROWS])
    head = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))

    def read(i: int) -> dict[str, np.ndarray]:
        return exact(SEQUENCES[i], HIDDEN_AND_KV) | {TOKENS: SEQUENCES[i][TOKENS]}

    calibrate(codec, lengths, read, CONFIG, head, torch.from_numpy(EMBEDDINGS), Learning())
    return codec


@pytest.fixture(scope="module", params=["runs", "pieces"])
def codec(request: pytest.FixtureRequest) -> Iterator[StoreCodec]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pieces":
            patch.setattr(pieces, "MIN_GROUP_BYTES", 1)
            patch.setattr(pieces, "_NARROW_PIECE", 4)
        yield learned(NAME)


@pytest.fixture(scope="module")
def store(codec: StoreCodec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("from_kv") / "store", RECIPE, codec, activations)


@pytest.fixture
def opened(store: Path) -> ActivationStore:
    return ActivationStore(store)


def test_they_err_less_at_equal_bits_in_every_form() -> None:
    alone, from_kv, both = (
        learned(f"transform:2,hidden=0.7{words}@all") for words in ("", ",from-kv", ",tokens,from-kv,joint")
    )
    for name in (LAYER, LAST):
        assert relative_error(from_kv, SEQUENCES, name) < 0.7 * relative_error(alone, SEQUENCES, name)
        assert relative_error(both, SEQUENCES, name) < 1.05 * relative_error(from_kv, SEQUENCES, name)
    assert both.sources == {LAST: (KV, LAYER), LAYER: (KV,)}
    described = both.describe()["transform"]
    assert described[LAST]["predicted_from"] == [KV, LAYER]
    assert described[LAYER]["predicted_from"] == KV
    again = StoreCodec(both.name, FIELDS)
    again.load(both.files()["basis.safetensors"])
    np.testing.assert_allclose(decoded(again, SEQUENCES[0], LAST), decoded(both, SEQUENCES[0], LAST), atol=1e-4)


def test_every_way_of_reading_gives_the_same(codec: StoreCodec, opened: ActivationStore) -> None:
    assert verify_store(opened.path).ok
    assert opened.codec.describe() == codec.describe()
    assert opened.codec.sources == {LAST: (KV,), LAYER: (KV,)}
    batch = opened.read_batch(range(len(opened)), [LAST, LAYER])
    rows = opened.read_batch(range(len(opened)), [TOKENS, LAST], decoded=False)
    assert rows.keys() == {TOKENS} | {array.name for name in (KV, LAST) for array in codec.fields[name].arrays}
    for i, sequence in enumerate(SEQUENCES):
        n = len(sequence[TOKENS])
        for name in (LAST, LAYER):
            whole = to_float32(opened.read(i, name), "bfloat16")
            np.testing.assert_allclose(whole, decoded(codec, sequence, name), rtol=2**-7, atol=1e-3)
            np.testing.assert_array_equal(to_float32(batch[name][i, :n], "bfloat16"), whole)
            part = to_float32(opened.read(i, name, tokens=slice(n // 2, n)), "bfloat16")
            np.testing.assert_allclose(part, whole[n // 2 :], rtol=2**-7, atol=1e-3)
        own = {key: torch.from_numpy(value[i]) for key, value in rows.items()}
        on_torch = opened.codec.fields[LAST].decode(own, 0, n).numpy()
        np.testing.assert_allclose(on_torch, to_float32(batch[LAST][i, :n], "bfloat16"), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("fields", [(KV, LAST), (LAST, KV)])
def test_a_batch_of_some_layers_shares_the_codes(opened: ActivationStore, fields: tuple[str, str]) -> None:
    rows = opened.read_batch([4, 0], [TOKENS, *fields], layers=[3], decoded=False)
    for row, i in enumerate((4, 0)):
        n = int(opened.lengths[i])
        own = {name: values[row, :n] for name, values in rows.items()}
        for name, layers in ((KV, [3]), (LAST, None)):
            values = from_float32(opened.codec.fields[name].decode(own, 0, n, layers), "bfloat16")
            got, expected = (to_float32(one, "bfloat16") for one in (values, opened.read(i, name, layers)))
            np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-3)


def test_only_leading_components_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "KV_FEATURES", 8)
    codec = learned(NAME.replace(",tokens", ""))
    encoded = codec.encode(exact(SEQUENCES[0], HIDDEN_AND_KV), SEQUENCES[0][TOKENS])
    kv = codec.fields[KV]
    assert isinstance(kv, TransformCodec)
    features = kv.as_features(encoded[KV], 0, LENGTHS[0])
    assert features.shape == (len(SEQUENCES[0][TOKENS]), 2 * 2 * 2), "two of each part of both groups"
    assert kv.n_features == 8
    assert relative_error(codec, SEQUENCES, LAST) < 1


def test_a_field_that_is_added_is_coded_alone(codec: StoreCodec) -> None:
    wider = extended_codec(codec, (*FIELDS, hidden_field("layer_2", WIDTH)))
    assert wider.sources == codec.sources


def test_what_cannot_be_predicted_is_refused(store: Path) -> None:
    without = [spec for spec in FIELDS if spec.name != KV]
    with pytest.raises(CodecUnknown, match=r"predicts 'hidden/last' from keys and values, but .* no field 'kv'"):
        StoreCodec("transform:1,from-kv", without)
    assert not StoreCodec("transform:1,from-kv", FIELDS[-1:]).sources
    manifest = StoreManifest.from_json((store / "store.json").read_bytes())
    for field, names, what in (
        (LAST, [TOKENS], "cannot be predicted from 'tokens'"),
        (LAST, [KV, LAST], "would be predicted from itself"),
        (KV, LAST, "cannot be predicted from 'hidden/last'"),
    ):
        settings = {name: dict(of) for name, of in manifest.codec["transform"].items()}
        settings[field]["predicted_from"] = names
        with pytest.raises(StoreDamaged, match=what):
            StoreCodec.open(replace(manifest, codec={**manifest.codec, "transform": settings}), store)


def test_the_name() -> None:
    settings = TransformSettings.parse("transform:0.8,hidden=0.9,tokens,from-kv,joint@group2")
    assert (settings.from_tokens, settings.from_kv, settings.is_joint) == (True, True, True)
    assert settings.spelling("@all") == "transform:0.8,hidden=0.9,tokens,from-kv,joint@all"
    assert TransformSettings.parse("transform:1,from-kv").spelling("") == "transform:1,from-kv"
