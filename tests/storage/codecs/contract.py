"""The contract of every codec.

Its tests inherit :class:`CodecContract` and set the codec's name and largest error::

    class TestInt8(LossyContract):
        name = "int8"
        error = 0.01
        unknown = ("int7", "int8:4")
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from moa_data.errors import CodecUnknown, StoreError, StoreMismatch
from moa_data.moa.targets.facts import TargetFacts
from moa_data.pipeline.forwards.calibrate import calibrate, target_rope
from moa_data.storage.codecs import coding
from moa_data.storage.codecs.field import Learning
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform import Observation, TransformCodec
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import summarize_store, verify_store
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
from moa_data.tests.kit.device import Counts
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.stores import make_recipe, read_tree

KV, LOW, HIGH, LAST = "kv", "hidden/layer_2", "hidden/layer_10", "hidden/last"
HIDDEN = (LAST, LOW, HIGH)
ACTIVATIONS = (*HIDDEN, KV)  # A predicted field comes before the fields that it is predicted from.
WIDTH, VOCABULARY = 16, 100
FIELDS = (
    tokens_field(), response_mask_field(),
    *(hidden_field(name.split("/")[1], WIDTH) for name in HIDDEN),
    kv_field(4, 2, 8),
)  # fmt: skip
RECIPE = make_recipe(fields=FIELDS)
FACTS = TargetFacts.of(LlamaConfig(hidden_size=WIDTH, num_attention_heads=2, head_dim=8))
ROPE = target_rope(FACTS)
_RNG = np.random.default_rng(1)
EMBEDDINGS = _RNG.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
EMBEDDINGS /= np.sqrt(np.square(EMBEDDINGS).mean(1, keepdims=True))
_KV_OF_STATE, _TURN = (_RNG.standard_normal((WIDTH, n)) / WIDTH**0.5 for n in (128, WIDTH))


def activations(seed: int, n_tokens: int) -> dict[str, np.ndarray]:
    """Return the stored activations of a sequence.

    Each layer adds a little to the embeddings, KV is linear in the lower state, and the first
    tokens of all sequences are equal.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, n_tokens).astype(np.int32)
    noise = rng.standard_normal((n_tokens, 2 * WIDTH + 128))
    tokens[:3], noise[:3] = 7, 0
    low = EMBEDDINGS[tokens] + 0.3 * noise[:, :WIDTH]
    high = low + 0.3 * noise[:, WIDTH : 2 * WIDTH]
    kv = (
        (low @ _KV_OF_STATE + 0.05 * noise[:, 2 * WIDTH :])
        .reshape(n_tokens, 4, 2, 2, 8)
        .astype(np.float32)
    )
    kv[:, :, :, 0] = ROPE.rotate(kv[:, :, :, 0])
    values = {KV: kv, LOW: low, HIGH: high, LAST: high @ _TURN}
    return {TOKENS: tokens} | {
        name: from_float32(own.astype(np.float32), "bfloat16") for name, own in values.items()
    }


ROWS = RECIPE.plan.to_pylist()
SEQUENCES = [
    activations(row["source_row"], row["n_tokens"])
    | {"response_mask": RECIPE.values(FIELDS[1], row)}
    for row in ROWS
]
LONG = next(
    sequence for row, sequence in zip(ROWS, SEQUENCES, strict=True) if row["n_tokens"] == 150
)


def exact(sequence: Mapping[str, np.ndarray], n_tokens: int | None = None) -> dict[str, np.ndarray]:
    """Return the first tokens of a sequence's activations in float32."""
    return {name: to_float32(sequence[name][:n_tokens], "bfloat16") for name in ACTIVATIONS}


def learned(name: str) -> StoreCodec:
    """Return a codec; if it learns, it has learned from all sequences."""
    codec = StoreCodec(name, FIELDS)
    if codec.learned:
        head = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))
        lengths = np.array([row["n_tokens"] for row in ROWS])
        embeddings = torch.from_numpy(EMBEDDINGS)
        calibrate(
            codec,
            lengths,
            lambda i: SEQUENCES[i] | exact(SEQUENCES[i]),
            FACTS,
            head,
            embeddings,
            Learning(),
        )
    return codec


def learn_from(
    codec: TransformCodec,
    sample: Iterable[np.ndarray],
    tokens: Sequence[np.ndarray] | None = None,
    learning: Learning | None = None,
) -> None:
    """Let the codec of one field learn from a sample."""
    with closing(Observation(codec, learning or Learning())) as observation:
        for i, values in enumerate(sample):
            observation.observe(values, None if tokens is None else tokens[i])
        observation.learn()


def encoded(codec: StoreCodec, values: Mapping[str, Any], tokens: Any) -> dict[str, Any]:
    """Encode a sequence; return the rows of all stored arrays, and the tokens."""
    of_fields = codec.encode(values, tokens).values()
    return {TOKENS: tokens} | {name: rows for codes in of_fields for name, rows in codes.items()}


class CodecContract:
    """Tests of one codec, alone and through a store of 12 sequences of 1 to 200 tokens."""

    name: str
    error: float
    """Largest relative error (L2) of a sequence."""
    unknown: tuple[str, ...] = ()
    """Names similar to the codec's that must be refused."""
    slice_atol: float = 0.0
    """Largest difference between a decoded slice and that slice of the whole.

    Matrix products of other sizes round differently.
    """
    min_group_bytes = 1024
    """Size of a group of layers in bytes; from this size on, its codes are stored in pieces."""

    @pytest.fixture(scope="class")
    @classmethod
    def codec(cls) -> Iterator[StoreCodec]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coding, "MIN_GROUP_BYTES", cls.min_group_bytes)
            patch.setattr(coding, "_NARROW_PIECE", 4)
            yield learned(cls.name)

    @pytest.fixture(scope="class")
    @classmethod
    def written(cls, codec: StoreCodec, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return cls.write(tmp_path_factory.mktemp("codec") / "store", codec)

    @classmethod
    def write(cls, path: Path, codec: StoreCodec) -> Path:
        def values(name: str, row: dict[str, Any], _: np.ndarray) -> Any:
            sequence = SEQUENCES[ROWS.index(row)]
            if name not in codec.sources:
                return sequence[name]
            # All fields are encoded together, and not by the writer.
            return codec.encode(exact(sequence), sequence[TOKENS])[name]

        return RECIPE.with_manifest(codec=codec.describe()).write(path, values, codec.files())

    def test_settings_and_what_was_learned_survive_the_store(
        self, codec: StoreCodec, written: Path
    ) -> None:
        manifest = StoreManifest.from_json((written / "store.json").read_bytes())
        opened = StoreCodec.open(manifest, written)
        assert opened.describe() == codec.describe() == json.loads(json.dumps(codec.describe()))
        assert opened.files() == codec.files()
        assert [*opened.arrays] == [*codec.arrays]
        assert opened.sources == codec.sources

    def test_equal_inputs_give_equal_bytes_and_another_codec_is_named(
        self, written: Path, tmp_path: Path
    ) -> None:
        assert read_tree(self.write(tmp_path / "again", learned(self.name))) == read_tree(written)
        other = StoreCodec("int8" if self.name != "int8" else "lossless", FIELDS)
        with pytest.raises(StoreMismatch) as caught:
            self.write(tmp_path / "again", other)
        assert caught.value.changes["codec.name"] == (self.name, other.name)

    def test_every_way_of_reading_gives_the_same(self, written: Path) -> None:
        with ActivationStore(written) as store:
            batch = store.read_batch(range(len(store)), [*ACTIVATIONS, TOKENS])
            for i, (row, sequence) in enumerate(zip(ROWS, SEQUENCES, strict=True)):
                n_tokens, wanted = row["n_tokens"], exact(sequence)
                np.testing.assert_array_equal(store.read(i, TOKENS), sequence[TOKENS])
                for field in ACTIVATIONS:
                    bits = store.read(i, field)
                    error = np.linalg.norm(to_float32(bits, "bfloat16") - wanted[field])
                    allowed = (self.error + bool(self.error) * 2**-8) * np.linalg.norm(
                        wanted[field]
                    )
                    assert error <= allowed or n_tokens < 33
                    for tokens in (
                        slice(63, 131),
                        slice(5, 70),
                        slice(n_tokens - 1, n_tokens),
                        slice(4, 4),
                    ):
                        self.equal(store.read(i, field, tokens=tokens), bits[tokens])
                    np.testing.assert_array_equal(batch[field][i][:n_tokens], bits)
                    assert not batch[field][i][n_tokens:].any()
                self.equal(store.read(i, KV, [3, 1], slice(5, 70)), store.read(i, KV)[5:70, [3, 1]])

    def equal(self, got: np.ndarray, expected: np.ndarray) -> None:
        """Compare values that are stored as bfloat16."""
        a, b = to_float32(got, "bfloat16"), to_float32(expected, "bfloat16")
        np.testing.assert_allclose(
            a, b, rtol=2**-7 if self.slice_atol else 0, atol=10 * self.slice_atol
        )

    def test_verify_and_summary_see_every_stored_array(
        self, codec: StoreCodec, written: Path
    ) -> None:
        assert verify_store(written).ok
        summary = summarize_store(written)
        assert summary.codec == self.name
        for field in summary.fields:
            assert tuple(field.arrays) == codec.fields[field.spec.name].arrays
            assert field.stored_bytes == sum(field.arrays.values()) > 0

    def test_unknown_names_are_refused(self) -> None:
        for name in self.unknown:
            with raises_naming(CodecUnknown, f"'{name}'"):
                StoreCodec(name, FIELDS)


class LossyContract(CodecContract):
    """Tests of a codec that changes the values it stores."""

    torch_differs: float = 0.0
    """Largest share of codes that torch may round differently from NumPy."""

    @pytest.mark.parametrize("n_tokens", [0, 1, 64, 150])
    def test_rows_have_the_promised_sizes_and_decode_within_the_error(
        self, codec: StoreCodec, n_tokens: int
    ) -> None:
        values, tokens = exact(LONG, n_tokens), LONG[TOKENS][:n_tokens]
        codes, again = (encoded(codec, values, tokens) for _ in range(2))
        assert all(np.array_equal(again[name], rows) for name, rows in codes.items())
        for field, wanted in values.items():
            one = codec.fields[field]
            for array in one.arrays:
                assert codes[array.name].shape == (array.n_rows(n_tokens), *array.row_shape)
                assert codes[array.name].dtype == array.storage_dtype
            got = one.decode(codes, 0, n_tokens)
            assert got.dtype == np.float32
            assert got.shape == wanted.shape
            assert np.linalg.norm(got - wanted) <= self.error * np.linalg.norm(wanted)

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_torch_gives_what_numpy_gives(self, codec: StoreCodec, device: str) -> None:
        tokens = LONG[TOKENS]
        tensors = {
            name: torch.from_numpy(LONG[name]).view(torch.bfloat16).to(device)
            for name in ACTIVATIONS
        }
        codes = encoded(codec, exact(LONG), tokens)
        on_device = encoded(codec, tensors, torch.from_numpy(tokens).to(device))
        for field in ACTIVATIONS:
            names = [array.name for array in codec.fields[field].arrays]
            differing = [np.mean(on_device[name].cpu().numpy() != codes[name]) for name in names]
            assert np.mean(differing) <= self.torch_differs
        on_device = {name: torch.from_numpy(rows).to(device) for name, rows in codes.items()}
        for field in ACTIVATIONS:
            got, expected = (
                codec.fields[field].decode(rows, 0, len(tokens)) for rows in (on_device, codes)
            )
            np.testing.assert_allclose(got.cpu().numpy(), expected, rtol=0, atol=self.slice_atol)

    def test_a_device_is_not_waited_for(self, codec: StoreCodec, device: Counts) -> None:
        found: list[list[torch.Tensor]] = []
        for kind in ("cpu", "cuda"):
            values = {
                name: torch.from_numpy(LONG[name]).view(torch.bfloat16).to(kind)
                for name in ACTIVATIONS
            }
            tokens = torch.from_numpy(LONG[TOKENS]).to(kind)
            device.reset()
            of_fields = codec.encode(values, tokens, is_finite=True)
            codes = {TOKENS: tokens} | {
                name: rows for own in of_fields.values() for name, rows in own.items()
            }
            decoded = [codec.fields[name].decode(codes, 0, len(tokens)) for name in ACTIVATIONS]
            assert device.waits == 0, device.worst()
            found.append([array.cpu() for array in (*codes.values(), *decoded)])
        for own, expected in zip(*found, strict=True):
            assert torch.equal(own, expected)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_values_that_are_not_finite_are_refused(self, codec: StoreCodec, bad: float) -> None:
        for field, values in exact(LONG).items():
            values.reshape(-1)[7] = bad
            for given in (values, torch.from_numpy(values)):
                with raises_naming(StoreError, f"'{field}'"):
                    codec.encode(exact(LONG) | {field: given}, LONG[TOKENS])

    @pytest.mark.parametrize("fields", [(KV, LAST), (LAST, KV)])
    def test_what_comes_undecoded_can_be_decoded(
        self, written: Path, fields: tuple[str, str]
    ) -> None:
        with ActivationStore(written) as store:
            for field, layers in ((KV, [3]), (LAST, None)):
                codec = store.codec.fields[field]
                needed = (
                    {TOKENS} if any(one.needs_tokens for one in codec.with_sources()) else set()
                )
                codes = store.read_stored(2, field, tokens=slice(70, 100))
                assert codes.keys() == needed | {array.name for array in codec.arrays_read()}
                values = from_float32(codec.decode(codes, 64, 36)[6:], "bfloat16")
                self.equal(values, store.read(2, field, tokens=slice(70, 100)))
                # In a batch, a field shares the codes of the field that it is predicted from.
                batch = store.read_batch([2, 0], [TOKENS, *fields], layers=[-1], decoded=False)
                for row, i in enumerate([2, 0]):
                    rows = {name: array[row] for name, array in batch.items()}
                    values = from_float32(
                        codec.decode(rows, 0, int(store.lengths[i]), layers), "bfloat16"
                    )
                    self.equal(values, store.read(i, field, layers=layers))
