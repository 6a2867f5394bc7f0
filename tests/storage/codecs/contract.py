"""What every codec does: its tests inherit :class:`CodecContract`, and say what it is called and how exact it is.

::

    class TestInt8(LossyContract):
        name = "int8"
        error = 0.01
        unknown = ("int7", "int8:4")
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.errors import CodecUnknown, StoreError, StoreMismatch
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform import Rope
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import summarize_store, verify_store
from moa_data.storage.schema import TOKENS, StoreManifest, from_float32, to_float32
from moa_data.tests.kit.stores import make_recipe, read_tree

RECIPE = make_recipe()
EMBEDDINGS = np.random.default_rng(1).normal(size=(100, 16)).astype(np.float32)
EMBEDDINGS /= np.sqrt(np.square(EMBEDDINGS).mean(1, keepdims=True))
ROPE = Rope(np.array([1.0, 0.1, 0.01, 0.001]), np.array(1))
_KV_OF_TOKEN = (EMBEDDINGS @ np.random.default_rng(2).normal(size=(16, 128)) / 4).reshape(100, 4, 2, 2, 8)
_ACTIVATIONS = ("kv", "hidden/last")


def _stored(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """The fields of a sequence as they are stored; keys, rotated, and values follow from the tokens, up to noise."""
    values = {spec.name: RECIPE.values(spec, row) for spec in RECIPE.manifest.fields}
    kv = (_KV_OF_TOKEN[values[TOKENS]] + 0.1 * to_float32(values["kv"], "bfloat16")).astype(np.float32)
    kv[:, :, :, 0] = ROPE.rotate(kv[:, :, :, 0])
    return values | {"kv": from_float32(kv, "bfloat16")}


ROWS = RECIPE.plan.to_pylist()
SEQUENCES = [_stored(row) for row in ROWS]
VALUES = {name: [to_float32(sequence[name], "bfloat16") for sequence in SEQUENCES] for name in _ACTIVATIONS}
TOKEN_IDS = [sequence[TOKENS] for sequence in SEQUENCES]
LONG = next(sequence for row, sequence in zip(ROWS, SEQUENCES, strict=True) if row["n_tokens"] == 150)


class CodecContract:
    """Tests of one codec, by itself and through a store of 12 sequences of 1 to 200 tokens."""

    name: str
    error: float
    """Largest relative error (L2) of a sequence."""
    unknown: tuple[str, ...]
    """Names like the codec's that are refused."""
    slice_atol: float = 0.0
    """Largest difference between a slice and the slice of the whole: matrix products of other sizes round otherwise."""

    @classmethod
    def learn(cls, codec: StoreCodec) -> None:
        """Let a codec that learns do so from ``SEQUENCES``."""

    @pytest.fixture(scope="class")
    @classmethod
    def codec(cls) -> StoreCodec:
        codec = StoreCodec(cls.name, RECIPE.manifest.fields)
        cls.learn(codec)
        return codec

    @pytest.fixture(scope="class")
    @classmethod
    def written(cls, codec: StoreCodec, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return cls.write(tmp_path_factory.mktemp("codec") / "store", codec)

    @classmethod
    def write(cls, path: Path, codec: StoreCodec) -> Path:
        recipe = RECIPE.with_manifest(codec=codec.describe())
        return recipe.write(path, lambda name, row, _: SEQUENCES[ROWS.index(row)][name], codec.files())

    def test_settings_and_what_was_learned_survive_the_store(self, codec: StoreCodec, written: Path) -> None:
        manifest = StoreManifest.from_json((written / "store.json").read_bytes())
        opened = StoreCodec.open(manifest, written)
        assert opened.describe() == codec.describe() == json.loads(json.dumps(codec.describe()))
        assert opened.files() == codec.files()
        assert [*opened.arrays] == [*codec.arrays]

    def test_equal_inputs_give_equal_bytes_and_another_codec_is_named(self, written: Path, tmp_path: Path) -> None:
        codec = StoreCodec(self.name, RECIPE.manifest.fields)
        self.learn(codec)
        assert read_tree(self.write(tmp_path / "again", codec)) == read_tree(written)
        other = StoreCodec("int8" if self.name != "int8" else "lossless", RECIPE.manifest.fields)
        with pytest.raises(StoreMismatch, match=rf"codec\.name: store has '{self.name}', given '{other.name}'"):
            self.write(tmp_path / "again", other)

    def test_every_way_of_reading_gives_the_same(self, written: Path) -> None:
        with ActivationStore(written) as store:
            batch = store.read_batch(range(len(store)), ["kv", TOKENS])
            for i, (row, sequence) in enumerate(zip(ROWS, SEQUENCES, strict=True)):
                n_tokens = row["n_tokens"]
                np.testing.assert_array_equal(store.read(i, TOKENS), sequence[TOKENS])
                for field in _ACTIVATIONS:
                    bits, exact = store.read(i, field), to_float32(sequence[field], "bfloat16")
                    whole = to_float32(bits, "bfloat16")
                    error = np.linalg.norm(whole - exact)
                    assert error <= (self.error + bool(self.error) * 2**-8) * np.linalg.norm(exact) or n_tokens < 33
                    for tokens in (slice(63, 131), slice(5, 70), slice(n_tokens - 1, n_tokens), slice(4, 4)):
                        self.equal(store.read(i, field, tokens=tokens), bits[tokens])
                kv = store.read(i, "kv")
                self.equal(store.read(i, "kv", [3, 1], slice(5, 70)), kv[5:70, [3, 1]])
                np.testing.assert_array_equal(batch["kv"][i][:n_tokens], kv)
                assert not batch["kv"][i][n_tokens:].any()

    def equal(self, got: np.ndarray, expected: np.ndarray) -> None:
        """Compare values of bfloat16."""
        a, b = to_float32(got, "bfloat16"), to_float32(expected, "bfloat16")
        np.testing.assert_allclose(a, b, rtol=2**-7 if self.slice_atol else 0, atol=10 * self.slice_atol)

    def test_verify_and_summary_see_every_stored_array(self, codec: StoreCodec, written: Path) -> None:
        assert verify_store(written).ok
        summary = summarize_store(written)
        assert summary.codec == self.name
        for field in summary.fields:
            arrays = codec.fields[field.name].arrays
            assert [array.name for array in field.arrays] == [array.name for array in arrays]
            assert field.stored_bytes == sum(array.stored_bytes for array in field.arrays)

    def test_unknown_names_are_refused(self) -> None:
        for name in self.unknown:
            with pytest.raises(CodecUnknown, match=r"Use one of: lossless|is not transform:|outside 0\.05 to 10"):
                StoreCodec(name, RECIPE.manifest.fields)


class LossyContract(CodecContract):
    """Tests of one codec that encodes what it stores."""

    torch_differs: float = 0.0
    """Share of codes that torch may round to another neighbour than NumPy does."""

    @pytest.mark.parametrize("field", _ACTIVATIONS)
    @pytest.mark.parametrize("n_tokens", [0, 1, 64, 150])
    def test_rows_have_the_promised_sizes_and_decode_within_the_error(
        self, codec: StoreCodec, field: str, n_tokens: int
    ) -> None:
        one, tokens = codec.fields[field], LONG[TOKENS][:n_tokens]
        exact = to_float32(LONG[field][:n_tokens], "bfloat16")
        codes = one.encode(exact, tokens)
        assert list(codes) == [array.name for array in one.arrays]
        for array in one.arrays:
            assert codes[array.name].shape == (array.n_rows(n_tokens), *array.row_shape)
            assert codes[array.name].dtype == array.storage_dtype
        decoded = one.decode(codes | {TOKENS: tokens}, 0, n_tokens)
        assert decoded.dtype == np.float32
        assert decoded.shape == exact.shape
        assert np.linalg.norm(decoded - exact) <= self.error * np.linalg.norm(exact)
        again = one.encode(exact, tokens)
        assert all(np.array_equal(again[name], rows) for name, rows in codes.items())

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    @pytest.mark.parametrize("field", _ACTIVATIONS)
    def test_torch_gives_what_numpy_gives(self, codec: StoreCodec, field: str, device: str) -> None:
        one, stored, tokens = codec.fields[field], LONG[field], LONG[TOKENS]
        tensor, ids = torch.from_numpy(stored).view(torch.bfloat16).to(device), torch.from_numpy(tokens).to(device)
        codes = one.encode(to_float32(stored, "bfloat16"), tokens)
        on_device = one.encode(tensor, ids) | {TOKENS: ids}
        expected = one.decode(codes | {TOKENS: tokens}, 0, len(tokens))
        differing = [np.mean(on_device[name].cpu().numpy() != rows) for name, rows in codes.items()]
        assert np.mean(differing) <= self.torch_differs
        on_device |= {name: torch.from_numpy(rows).to(device) for name, rows in codes.items()}
        got = one.decode(on_device, 0, len(tokens)).cpu().numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=self.slice_atol)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_values_that_are_not_finite_are_refused(self, codec: StoreCodec, bad: float) -> None:
        for field in _ACTIVATIONS:
            one, tokens = codec.fields[field], LONG[TOKENS]
            values = to_float32(LONG[field], "bfloat16")
            values.reshape(-1)[7] = bad
            for given in (values, torch.from_numpy(values)):
                with pytest.raises(StoreError, match=f"'{field}'"):
                    one.encode(given, tokens)

    def test_what_comes_undecoded_can_be_decoded(self, written: Path) -> None:
        with ActivationStore(written) as store:
            codec = store.codec.fields["kv"]
            needed = {TOKENS} if codec.needs_tokens else set()
            codes = store.read_stored(2, "kv", tokens=slice(70, 100))
            assert codes.keys() == needed | {array.name for array in codec.arrays}
            values = from_float32(codec.decode(codes, 64, 36)[6:], "bfloat16")
            self.equal(values, store.read(2, "kv", tokens=slice(70, 100)))
            batch = store.read_batch([2, 0], "kv", layers=[-1], decoded=False)
            for row, i in enumerate([2, 0]):
                n_tokens = int(store.lengths[i])
                rows = {name: array[row] for name, array in batch.items()} | {TOKENS: store.read(i, TOKENS)}
                values = from_float32(codec.decode(rows, 0, n_tokens, [3]), "bfloat16")
                self.equal(values, store.read(i, "kv", layers=[-1]))
