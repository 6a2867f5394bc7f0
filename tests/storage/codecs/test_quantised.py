"""Quantised codecs: one definition for NumPy and torch, errors within half a step, anything else refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.storage.codecs.quantised import SCHEMES, QuantisedCodec
from moa_data.storage.errors import CodecUnknown, WriteInvalid
from moa_data.storage.schema import FieldSpec, hidden_field, kv_field

KV, HIDDEN = kv_field(3, 2, 8), hidden_field("last", 16)
STEPS = {"int8": 127, "int6": 31, "int4": 7}


def activations(spec: FieldSpec, n_tokens: int, seed: int = 0, spread: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = np.exp(spread * rng.normal(size=spec.token_shape))
    return (rng.normal(size=(n_tokens, *spec.token_shape)) * scale).astype(np.float32)


@pytest.fixture(params=list(SCHEMES))
def scheme(request: pytest.FixtureRequest):
    return SCHEMES[request.param]


@pytest.mark.parametrize("spec", [KV, HIDDEN], ids=["kv", "hidden"])
@pytest.mark.parametrize("n_tokens", [1, 64, 150])
def test_numpy_and_torch_give_the_same_bits(scheme, spec: FieldSpec, n_tokens: int):
    codec, values = QuantisedCodec(spec, scheme), activations(spec, n_tokens, spread=4.0)
    by_numpy, by_torch = codec.encode(values), codec.encode(torch.from_numpy(values))
    assert by_numpy.keys() == by_torch.keys() == {array.name for array in codec.arrays}
    for array in codec.arrays:
        assert by_numpy[array.name].dtype == array.storage_dtype
        assert by_numpy[array.name].shape == (array.n_rows(n_tokens), *array.row_shape)
        np.testing.assert_array_equal(by_torch[array.name].numpy(), by_numpy[array.name])
    decoded = codec.decode(by_numpy, 0, n_tokens)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(codec.decode(by_torch, 0, n_tokens).numpy(), decoded)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [KV, HIDDEN], ids=["kv", "hidden"])
def test_a_gpu_gives_the_same_bits(scheme, spec: FieldSpec):
    codec, values = QuantisedCodec(spec, scheme), activations(spec, 150, spread=4.0)
    expected, got = codec.encode(values), codec.encode(torch.from_numpy(values).cuda())
    for name, rows in expected.items():
        np.testing.assert_array_equal(got[name].cpu().numpy(), rows)
    np.testing.assert_array_equal(codec.decode(got, 0, 150).cpu().numpy(), codec.decode(expected, 0, 150))


def test_bfloat16_tensors_encode_as_their_values(scheme):
    codec = QuantisedCodec(KV, scheme)
    tensor = torch.from_numpy(activations(KV, 70)).bfloat16()
    expected = codec.encode(tensor.float().numpy())
    for name, rows in codec.encode(tensor).items():
        np.testing.assert_array_equal(rows.numpy(), expected[name])


def group_largest(codec: QuantisedCodec, values: np.ndarray) -> np.ndarray:
    """Largest magnitude of what shares a scale with each value."""
    n_tokens = len(values)
    padded = np.pad(np.abs(values), ((0, -n_tokens % 64), *[(0, 0)] * (values.ndim - 1)))
    blocks = padded.reshape(-1, 64, *values.shape[1:]).max(axis=1, keepdims=True)
    largest = np.broadcast_to(blocks, (len(blocks), 64, *values.shape[1:])).reshape(padded.shape)[:n_tokens].copy()
    if codec.spec.name == "kv":
        largest[:, :, :, 1] = np.abs(values[:, :, :, 1]).max(axis=-1, keepdims=True)
    return largest


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(SCHEMES)),
    spec=st.sampled_from([KV, HIDDEN]),
    n_tokens=st.integers(1, 140),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-80, 100),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
)
def test_errors_stay_within_half_a_step(name, spec, n_tokens: int, seed: int, exponent: int, spread: float):
    codec = QuantisedCodec(spec, SCHEMES[name])
    values = activations(spec, n_tokens, seed, spread) * np.float32(2.0**exponent)
    values[np.random.default_rng(seed).random(values.shape) < 0.2] = 0
    decoded = codec.decode(codec.encode(values), 0, n_tokens)
    largest = group_largest(codec, values)
    # The scale's mantissa has two bits, rounded up: a step is at most a quarter larger than it need be.
    if name == "fp8":
        bound = np.maximum(np.abs(values) / 16, 1.25 * largest / 448 / 1024)
    else:
        bound = 0.5 * 1.25 * largest / STEPS[name]
    assert (np.abs(decoded - values) <= bound * (1 + 1e-5) + 2.0**-126).all()
    assert (decoded[values == 0] == 0).all()


def test_zero_blocks_and_tiny_values(scheme):
    codec = QuantisedCodec(KV, scheme)
    values = activations(KV, 130)
    values[:64] = 0
    values[64:128] = 1e-42
    decoded = codec.decode(codec.encode(values), 0, 130)
    assert not decoded[:64].any()
    assert np.abs(decoded[64:128]).max() < 1e-37
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(scheme, bad: float):
    values = activations(HIDDEN, 10)
    values[3, 2] = bad
    for given_as in (values, torch.from_numpy(values)):
        with pytest.raises(WriteInvalid, match=r"'hidden/last' has NaN or infinite values.*lossless"):
            QuantisedCodec(HIDDEN, scheme).encode(given_as)


def test_a_slice_decodes_to_the_slice_of_all(scheme):
    codec, values = QuantisedCodec(KV, scheme), activations(KV, 200)
    codes = codec.encode(values)
    every = codec.decode(codes, 0, 200)
    rows = {
        array.name: codes[array.name][64 // array.block_tokens : array.n_rows(150)][:, [2, 0]] for array in codec.arrays
    }
    np.testing.assert_array_equal(codec.decode(rows, 64, 86, [2, 0]), every[64:150, [2, 0]])


def test_fp8_is_float8_e4m3fn():
    """The conversion of torch is the oracle; a channel whose largest value is 448 has scale 1."""
    values = np.linspace(-448, 448, 64 * 16, dtype=np.float32).reshape(64, 16)
    values[0] = 448
    values[1:20] *= np.float32(1e-4)
    codes = QuantisedCodec(HIDDEN, SCHEMES["fp8"]).encode(values)["hidden/last/codes"]
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(codes, expected.view(torch.uint8).numpy() * (expected.float().numpy() != 0))


def test_padding_is_zero_bytes(scheme):
    for rows in QuantisedCodec(KV, scheme).encode(np.zeros((5, *KV.token_shape), np.float32)).values():
        assert not rows.any()


def test_fields_that_do_not_fit_are_refused():
    with pytest.raises(CodecUnknown, match="two values per byte"):
        QuantisedCodec(hidden_field("last", 15), SCHEMES["int4"])
    with pytest.raises(CodecUnknown, match=r"knows kv and \[token, width\]"):
        QuantisedCodec(FieldSpec("x", "bfloat16", (2, 3), ("token", "a", "b")), SCHEMES["int8"])
