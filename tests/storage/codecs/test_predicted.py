"""Hidden states that are predicted from keys and values, or from the state below: in codes, stores and batches."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from moa_data.errors import CodecUnknown, StoreError
from moa_data.pipeline.forwards.calibrate import calibrate, target_rope
from moa_data.storage.codecs import coding
from moa_data.storage.codecs import transform as codec_module
from moa_data.storage.codecs.field import Learning
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import (
    TOKENS,
    StoreManifest,
    from_float32,
    hidden_field,
    kv_field,
    response_mask_field,
    to_float32,
    tokens_field,
)
from moa_data.storage.write.addition import extended_codec
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.stores import make_recipe

N_LAYERS, HEAD_DIM, WIDTH, VOCABULARY = 4, 8, 24, 100
KV, LOW, HIGH, LAST = "kv", "hidden/layer_2", "hidden/layer_10", "hidden/last"
HIDDEN = (LAST, LOW, HIGH)
FIELDS = (
    tokens_field(), response_mask_field(), *(hidden_field(name.split("/")[1], WIDTH) for name in HIDDEN),
    kv_field(N_LAYERS, 1, HEAD_DIM),
)  # fmt: skip
RECIPE = make_recipe((150, 1, 90, 64, 200, 33, 120, 180, 75, 140), FIELDS)
ROWS = RECIPE.plan.to_pylist()
CONFIG = LlamaConfig(hidden_size=WIDTH, num_attention_heads=3, head_dim=HEAD_DIM)
ROPE = target_rope(CONFIG)
_RNG = np.random.default_rng(0)
EMBEDDINGS = _RNG.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
_TURN, _KEYS, _VALUES = (_RNG.standard_normal((WIDTH, n)) / WIDTH**0.5 for n in (WIDTH, 32, 32))


def activations(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """A sequence whose layers add a little to what comes from below, as it is stored; KV is linear in the state."""
    rng, n = np.random.default_rng(row["first_token"]), row["n_tokens"]
    tokens = rng.integers(0, VOCABULARY, n).astype(np.int32)
    low = EMBEDDINGS[tokens] + 0.5 * rng.standard_normal((n, WIDTH))
    high = low + 0.3 * rng.standard_normal((n, WIDTH))
    keys, values = ((low @ matrix).reshape(n, N_LAYERS, 1, HEAD_DIM).astype(np.float32) for matrix in (_KEYS, _VALUES))
    found = {KV: np.stack([ROPE.rotate(keys), values], axis=3), LOW: low, HIGH: high, LAST: high @ _TURN}
    stored = {name: from_float32(value.astype(np.float32), "bfloat16") for name, value in found.items()}
    return stored | {TOKENS: tokens, "response_mask": RECIPE.values(FIELDS[1], row)}


SEQUENCES = [activations(row) for row in ROWS]


def exact(sequence: Mapping[str, np.ndarray], names: Iterable[str]) -> dict[str, np.ndarray]:
    return {name: to_float32(sequence[name], "bfloat16") for name in names}


def decoded(codec: StoreCodec, sequence: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Encode a sequence and decode one field of it, from its own codes and those that it is predicted from."""
    encoded = codec.encode(exact(sequence, codec.learned), sequence[TOKENS])
    rows = {key: value for one in codec.with_sources(name) for key, value in encoded[one].items()}
    values: np.ndarray = codec.fields[name].decode(rows | {TOKENS: sequence[TOKENS]}, 0, len(sequence[TOKENS]))
    return values


def relative_error(codec: StoreCodec, name: str) -> float:
    pairs = [(decoded(codec, sequence, name), exact(sequence, [name])[name]) for sequence in SEQUENCES]
    wrong = sum(np.square(got - own).sum() for got, own in pairs)
    return float((wrong / sum(np.square(own).sum() for _, own in pairs)) ** 0.5)


def learned(name: str) -> StoreCodec:
    codec = StoreCodec(name, FIELDS)
    head = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))

    def read(i: int) -> dict[str, np.ndarray]:
        return exact(SEQUENCES[i], (KV, *HIDDEN)) | {TOKENS: SEQUENCES[i][TOKENS]}

    lengths = np.array([row["n_tokens"] for row in ROWS])
    calibrate(codec, lengths, read, CONFIG, head, torch.from_numpy(EMBEDDINGS), Learning())
    return codec


SOURCES = {
    "transform:2,hidden=0.7,tokens,from-kv@group2": {LOW: (KV,), HIGH: (KV,), LAST: (KV,)},
    "transform:1,hidden=1.2,joint": {HIGH: (LOW,), LAST: (HIGH,)},
    "transform:2,hidden=0.7,tokens,from-kv,joint@all": {LOW: (KV,), HIGH: (KV, LOW), LAST: (KV, HIGH)},
}
FROM_KV, JOINT, BOTH = SOURCES


@pytest.fixture(scope="module", params=[(FROM_KV, 1024), (FROM_KV, 1), (JOINT, 1024), (BOTH, 1)], ids=str)
def codec(request: pytest.FixtureRequest) -> Iterator[StoreCodec]:
    name, min_group_bytes = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coding, "MIN_GROUP_BYTES", min_group_bytes)
        patch.setattr(coding, "_NARROW_PIECE", 4)
        yield learned(name)


@pytest.fixture(scope="module")
def store(codec: StoreCodec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def encoded(name: str, row: dict[str, Any], _: np.ndarray) -> Any:
        sequence = SEQUENCES[ROWS.index(row)]
        lossy = codec.encode(exact(sequence, codec.learned), sequence[TOKENS]) if name in codec.learned else {}
        return (sequence | lossy)[name]

    recipe = RECIPE.with_manifest(codec=codec.describe())
    return recipe.write(tmp_path_factory.mktemp("predicted") / "store", encoded, codec.files())


@pytest.fixture
def opened(store: Path) -> Iterator[ActivationStore]:
    with ActivationStore(store) as reader:
        yield reader


def test_fields_know_what_they_are_predicted_from(codec: StoreCodec, opened: ActivationStore) -> None:
    assert codec.sources == opened.codec.sources == SOURCES[codec.name]
    assert opened.codec.describe() == codec.describe()
    described = codec.describe()["transform"]
    for name in HIDDEN:
        names = list(codec.sources.get(name, ()))
        assert described[name].get("predicted_from", []) == (names[0] if len(names) == 1 else names)


@pytest.mark.parametrize(
    ("plain", "predicted", "fields", "factor"),
    [
        ("transform:2,hidden=0.7@all", "transform:2,hidden=0.7,from-kv@all", HIDDEN, 0.8),
        ("transform:1,hidden=1.2", JOINT, HIDDEN, 0.8),
        ("transform:1,hidden=1.2,joint", "transform:1,hidden=1.2,tokens,joint", (LOW,), 0.9),
    ],
)
def test_they_err_less_at_equal_bits(plain: str, predicted: str, fields: tuple[str, ...], factor: float) -> None:
    one, other = learned(plain), learned(predicted)
    errors = {name: relative_error(other, name) for name in HIDDEN}
    for name in fields:
        assert errors[name] < factor * relative_error(one, name)
    if predicted == JOINT:
        assert max(errors.values()) < 1.3 * min(errors.values()), "bits are split so that all err alike"


def test_every_way_of_reading_gives_the_same(codec: StoreCodec, opened: ActivationStore) -> None:
    assert verify_store(opened.path).ok
    batch = opened.read_batch(range(len(opened)), list(HIDDEN))
    rows = opened.read_batch(range(len(opened)), [TOKENS, *HIDDEN], decoded=False)
    needed = {one for name in HIDDEN for one in codec.with_sources(name)}
    assert rows.keys() == {TOKENS} | {array.name for name in needed for array in codec.fields[name].arrays}
    for i, sequence in enumerate(SEQUENCES):
        n = len(sequence[TOKENS])
        own = {key: torch.from_numpy(value[i]) for key, value in rows.items()}
        for name in HIDDEN:
            whole = to_float32(opened.read(i, name), "bfloat16")
            np.testing.assert_array_equal(to_float32(batch[name][i, :n], "bfloat16"), whole)
            part = to_float32(opened.read(i, name, tokens=slice(n // 2, n)), "bfloat16")
            on_torch = opened.codec.fields[name].decode(own, 0, n).numpy()
            for got, expected in ((decoded(codec, sequence, name), whole), (part, whole[n // 2 :]), (on_torch, whole)):
                np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-3)


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


def test_a_field_alone_says_what_it_lacks(codec: StoreCodec, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"StoreCodec\.encode"):
        codec.fields[LAST].encode(exact(SEQUENCES[0], HIDDEN)[LAST])
    manifest = replace(RECIPE.manifest, codec=codec.describe())
    with (
        StoreWriter.create_or_resume(tmp_path / "store", manifest, RECIPE.plan, codec.files()) as writer,
        writer.part(0) as out,
        pytest.raises(StoreError),
    ):
        out.write(LAST, ROWS[0]["first_token"], SEQUENCES[0][LAST])


def test_a_field_that_is_added_is_coded_alone(codec: StoreCodec) -> None:
    wider = extended_codec(codec, (*FIELDS, hidden_field("layer_4", WIDTH)))
    assert wider.sources == codec.sources


def test_what_cannot_be_predicted_is_refused(store: Path) -> None:
    without = [spec for spec in FIELDS if spec.name != KV]
    with pytest.raises(CodecUnknown, match="no field 'kv'"):
        StoreCodec("transform:1,from-kv", without)
    manifest = StoreManifest.from_json((store / "store.json").read_bytes())
    for field, names in ((LAST, [TOKENS]), (LAST, [LAST]), (KV, LAST), (LAST, "hidden/layer_3")):
        settings = {name: dict(of) for name, of in manifest.codec["transform"].items()}
        settings[field]["predicted_from"] = names
        with pytest.raises(CodecUnknown, match="predicted from"):
            StoreCodec.open(replace(manifest, codec={**manifest.codec, "transform": settings}), store)


def test_only_leading_components_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "KV_FEATURES", 8)
    codec = learned(FROM_KV.replace(",tokens", ""))
    encoded = codec.encode(exact(SEQUENCES[0], (KV, *HIDDEN)), SEQUENCES[0][TOKENS])
    features = codec.learned[KV].as_features(encoded[KV], 0, len(SEQUENCES[0][TOKENS]))
    assert features.shape == (len(SEQUENCES[0][TOKENS]), 2 * 2 * 2), "two of each part of both groups"
    assert codec.learned[KV].n_features == 8
    assert relative_error(codec, LAST) < 1
