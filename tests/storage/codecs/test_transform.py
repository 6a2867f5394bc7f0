"""The transform codec of one field, with small keys and values of low rank."""

import functools
import math
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from moa_data.errors import CodecUnknown, StoreDamaged, StoreError
from moa_data.storage.chunk import encode_chunk
from moa_data.storage.codecs import coding
from moa_data.storage.codecs.calibration import early_means
from moa_data.storage.codecs.coding import mean_rows
from moa_data.storage.codecs.field import Learning
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform import Rope, TransformCodec, TransformSettings
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import TOKENS, FieldSpec, hidden_field, kv_field, tokens_field
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.stores import flip

from .contract import EMBEDDINGS, KV, ROPE, SEQUENCES, LossyContract, activations, exact, learn_from

N_LAYERS, N_HEADS, HEAD_DIM = 4, 2, 8
INV_FREQ = 100.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
SPEC = kv_field(N_LAYERS, N_HEADS, HEAD_DIM)
SAMPLE = [activations(seed, 100 + 5 * seed) for seed in range(14)]
CALIBRATION = [exact(sequence)[KV] for sequence in SAMPLE]
TEST = [exact(activations(seed, 4 * seed))[KV] for seed in range(25, 45, 4)]


class TestTransform(LossyContract):
    """The codec learns from the contract's own sequences and predicts from tokens."""

    name = "transform:2,tokens@group2"
    error = 0.3
    torch_differs = 1e-3  # A value on the edge between two codes may be rounded to either.
    slice_atol = 1e-4
    unknown = (
        "transform", "transform:", "transform:0", "transform:99", "transform:1@group0",
        "transform:1@all,tokens",
        "transform:tokens", "transform:1,", "transform:1,tokens=1", "transform:1,tokens,hidden=2",
    )  # fmt: skip

    def test_it_needs_a_field_of_tokens_and_those_of_the_values(self, codec: StoreCodec) -> None:
        sequence = SEQUENCES[0]
        for given in (None, sequence[TOKENS][1:]):
            with raises_naming(ValueError, "'kv'", len(sequence[TOKENS])):
                codec.fields[KV].encode(exact(sequence)[KV], given)
        with raises_naming(CodecUnknown, f"'{self.name}'", "'tokens'"):
            StoreCodec(self.name, (kv_field(4, 2, 8),))

    def test_a_basis_that_is_not_the_recorded_one_is_damage(
        self, written: Path, tmp_path: Path
    ) -> None:
        store = shutil.copytree(written, tmp_path / "store")
        basis, following = (store / f"codec/{name}basis.safetensors" for name in ("", "next-"))
        shutil.copy(basis, following)
        flip(basis, -1)
        # A kill between the replacement of store.json and the rename leaves this state.
        ActivationStore(store).close()
        following.unlink()
        with raises_naming(StoreDamaged, basis, "sha256"):
            ActivationStore(store)
        basis.unlink()
        with raises_naming(StoreDamaged, basis):
            ActivationStore(store)


@functools.cache
def make_codec(name: str, rope: Rope | None = ROPE) -> TransformCodec:
    codec = TransformCodec(SPEC, TransformSettings.parse(name), rope)
    learn_from(codec, CALIBRATION)
    return codec


def relative_error(codec: TransformCodec) -> float:
    decoded = [codec.decode(codec.encode(values), 0, len(values)) for values in TEST]
    error = sum(((a - b) ** 2).sum() for a, b in zip(TEST, decoded, strict=True))
    return math.sqrt(error / sum((a**2).sum() for a in TEST))


@pytest.fixture(
    scope="module", params=["transform:2@all", "transform:2@group3", "transform:2@layer"]
)
def codec(request: pytest.FixtureRequest) -> TransformCodec:
    return make_codec(request.param)


def test_stored_bits_are_those_asked_for_and_buy_less_error() -> None:
    errors = []
    for bits in (0.5, 2.0):
        codec = make_codec(f"transform:{bits}@all")
        n_tokens = sum(len(values) for values in TEST)
        encoded = [codec.encode(values) for values in TEST]
        rows = [np.concatenate([codes[array.name] for codes in encoded]) for array in codec.arrays]
        n_bytes = sum(len(encode_chunk(part[:512])) for part in rows) / min(512, n_tokens)
        assert n_bytes * 8 / math.prod(SPEC.token_shape) == pytest.approx(bits, rel=0.15)
        errors.append(relative_error(codec))
    assert errors[1] < errors[0] / 2.5


def test_taking_the_rotation_off_pays() -> None:
    assert relative_error(make_codec("transform:1@all")) < 0.7 * relative_error(
        make_codec("transform:1@all", None)
    )


def test_a_reader_of_one_layer_needs_its_group_only() -> None:
    for name, n_groups in (
        ("transform:2@all", 1),
        ("transform:2@group3", 2),
        ("transform:2@layer", 4),
    ):
        codec = make_codec(name)
        assert [len(group) for group in codec.groups] == {1: [4], 2: [3, 1], 4: [1] * 4}[n_groups]
        of_layers = [tuple(codec.arrays_of([layer])) for layer in range(N_LAYERS)]
        assert len(set(of_layers)) == n_groups
        assert set().union(*of_layers) == set(codec.arrays) == set(codec.arrays_of(None))


def test_codes_in_pieces_are_those_of_the_runs_and_layers_come_in_the_order_wanted(
    codec: TransformCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged, apart = TransformCodec(SPEC, codec.settings), TransformCodec(SPEC, codec.settings)
    apart.load_state(codec.state())
    monkeypatch.setattr(coding, "MIN_GROUP_BYTES", 1)
    merged.load_state(codec.state())
    assert apart.arrays == codec.arrays
    assert [(array.name, array.axes) for array in merged.arrays] == [
        ("kv/codes", ("token", "piece", "byte"))
    ]
    (rows,), codes = merged.encode(TEST[0]).values(), apart.encode(TEST[0])
    whole = apart.decode(codes, 0, 84)
    np.testing.assert_array_equal(merged.decode({"kv/codes": rows}, 0, 84), whole)
    for layers in ([2], [3, 0], [0, 1, 2, 3], [1, 3, 2]):
        runs = {array.name: codes[array.name][64:] for array in apart.arrays_of(layers)}
        pieces = {"kv/codes": rows[64:, merged.arrays_of(layers)[merged.arrays[0]]]}
        got = apart.decode(runs, 64, 20, layers)
        np.testing.assert_allclose(got, whole[64:, layers], atol=1e-4)
        np.testing.assert_array_equal(merged.decode(pieces, 64, 20, layers), got)


def test_state_that_does_not_fit_is_refused() -> None:
    state = make_codec("transform:1@all").state()
    missing = {name: value for name, value in state.items() if not name.endswith("mean")}
    narrow = {**state, "0/0/synthesis": state["0/0/synthesis"][:, 1:]}
    for broken in (missing, narrow, {**state, "0/1/synthesis": state["0/1/synthesis"][:1]}):
        with raises_naming(ValueError, "'kv'", "codec/"):
            TransformCodec(SPEC, TransformSettings.parse("transform:1@all")).load_state(broken)


def test_metrics_of_keys_and_values_move_bits_to_what_counts() -> None:
    layer_width = N_HEADS * HEAD_DIM
    keys = [np.diag(np.repeat([1.0, 100.0], layer_width)), np.eye(2 * layer_width)]
    metrics = [[metric, 0.01 * np.eye(2 * layer_width)] for metric in keys]
    errors = {}
    for name, given in (("even", None), ("given", metrics)):
        codec = TransformCodec(SPEC, TransformSettings.parse("transform:1@group2"), ROPE)
        codec.metrics = given
        learn_from(codec, CALIBRATION)
        restored = TransformCodec(SPEC, TransformSettings.parse("transform:1@group2"))
        restored.load_state(codec.state())
        assert restored.describe() == codec.describe()
        assert codec.describe()["error_metric"] == (
            "relative to layers" if given is None else "given"
        )
        wrong = np.concatenate([restored.decode(codec.encode(x), 0, len(x)) - x for x in TEST])
        # [layer, key or value]
        errors[name] = np.square(wrong, dtype=np.float64).mean(axis=(0, 2, 4))
    of_keys, of_values = (
        errors["given"][:, 0] / errors["even"][:, 0],
        errors["given"][:, 1] / errors["even"][:, 1],
    )
    assert of_keys.argmin() == 1
    assert of_keys[1] < 0.6
    assert (of_values > 2).all()
    np.testing.assert_allclose(codec.whole(codec.parts(TEST[0])), TEST[0], atol=1e-5)


def test_layers_of_a_part_without_components_can_be_read() -> None:
    codec = TransformCodec(SPEC, TransformSettings.parse("transform:1@all"), ROPE)
    width = N_LAYERS * N_HEADS * HEAD_DIM
    codec.metrics = [[np.eye(width), 1e-12 * np.eye(width)]]
    learn_from(codec, CALIBRATION)
    assert not len(codec._groups[0].fit.bases[1].synthesis)
    codes = codec.encode(TEST[0])
    whole = codec.decode(codes, 0, len(TEST[0]))
    layers = codec.decode(codes, 0, len(TEST[0]), [2, 0])
    np.testing.assert_allclose(layers, whole[:, [2, 0]], atol=1e-4)


def test_layers_of_small_values_lose_no_more_than_others() -> None:
    sizes = np.array([1.0, 0.02, 1.0, 0.3], np.float32)[:, None, None, None]
    draw = np.random.default_rng(0).standard_normal
    sequences = [draw((100, *SPEC.token_shape), np.float32) * sizes for _ in range(12)]
    codec = TransformCodec(SPEC, TransformSettings.parse("transform:2@all"))
    learn_from(codec, sequences)
    exact = np.concatenate(sequences)
    wrong = (
        np.concatenate([codec.decode(codec.encode(values), 0, len(values)) for values in sequences])
        - exact
    )
    errors, energies = (np.square(each, dtype=np.float64).sum((0, 2, 4)) for each in (wrong, exact))
    relative = np.sqrt(errors / energies)  # [layer, key or value]
    assert (relative.max(0) < 1.5 * np.median(relative, axis=0)).all()


def test_a_basis_without_a_scale_decodes_as_before() -> None:
    codec = TransformCodec(SPEC, TransformSettings.parse("transform:2@all"), ROPE)
    state = make_codec("transform:2@all").state()
    codec.load_state({name: array for name, array in state.items() if not name.endswith("scale")})
    assert codec.describe()["error_metric"] == "plain"
    for basis in codec._groups[0].fit.bases:
        np.testing.assert_array_equal(basis.analysis, basis.synthesis.T)


def test_what_tokens_say_is_not_stored() -> None:
    tokens = [sequence[TOKENS] for sequence in SAMPLE]
    errors = []
    for name in ("transform:0.5@group2", "transform:0.5,tokens@group2"):
        codec = TransformCodec(SPEC, TransformSettings.parse(name), ROPE)
        codec.embeddings = EMBEDDINGS
        learn_from(codec, CALIBRATION, tokens)
        codes = codec.encode(CALIBRATION[0], tokens[0]) | {TOKENS: tokens[0]}
        errors.append(np.square(codec.decode(codes, 0, len(tokens[0])) - CALIBRATION[0]).sum())
    assert errors[1] < errors[0] / 4
    assert codec.describe()["token_features"] == 16
    del codes[TOKENS]
    without = {name: array for name, array in codec.state().items() if name != "tokens/features"}
    refused: tuple[Callable[[], object], ...] = (
        lambda: codec.encode(TEST[0]), lambda: codec.decode(codes, 0, 10),
        lambda: learn_from(codec, CALIBRATION),
        lambda: TransformCodec(SPEC, codec.settings).load_state(without),
    )  # fmt: skip
    for call in refused:
        with raises_naming(ValueError, "'kv'", "tokens"):
            call()


def test_what_is_constant_costs_no_error() -> None:
    learned = make_codec("transform:1@all")
    np.testing.assert_allclose(
        learned.decode(learned.encode(TEST[0]), 0, 3), TEST[0][:3], atol=1e-3
    )
    codec = TransformCodec(hidden_field("last", 6), TransformSettings(1.0, 1.0))
    values = np.full((40, 6), 2.5, np.float32)
    learn_from(codec, [values] * 4)
    assert len(codec.arrays) == 1
    np.testing.assert_allclose(codec.decode(codec.encode(values), 0, 40), values)


def test_what_cannot_be_learned_or_coded_is_refused() -> None:
    codec = TransformCodec(SPEC, TransformSettings.parse("transform:1"))
    with raises_naming(ValueError, "'kv'", "calibrate"):
        codec.encode(TEST[0])
    values = TEST[0].copy()
    values[5, 0, 0, 0, 0] = np.nan
    for sample in ([values], []):
        with pytest.raises(StoreError):
            learn_from(codec, sample)
    with raises_naming(CodecUnknown, "'tokens'", "hidden", "lossless"):
        TransformCodec(tokens_field(), TransformSettings.parse("transform:1"))


def test_names_say_bits_and_scope() -> None:
    for name, expected in {
        "transform:1.0": TransformSettings(1.0, None, None),
        "transform:0.88,hidden=1.55,tokens@all": TransformSettings(0.88, 1.55, 0, True),
        "transform:1,hidden=2,tokens,from-kv,joint@group2": TransformSettings(
            1.0, 2.0, 2, True, True, True
        ),
        "transform:2@layer": TransformSettings(2.0, None, 1),
    }.items():
        assert TransformSettings.parse(name) == expected


@pytest.mark.parametrize(
    ("name", "of_kv", "of_layer", "of_last"),
    [
        ("transform:1", 1.0, 1.7, 3.0),
        ("transform:4@all", 4.0, 6.8, 6.8),
        ("transform:9", 9.0, 10.0, 10.0),
        ("transform:1,hidden=0.5", 1.0, 0.5, 0.5),
    ],
)
def test_the_last_hidden_state_has_more_bits_unless_the_name_says_otherwise(
    name: str, of_kv: float, of_layer: float, of_last: float
) -> None:
    codec = StoreCodec(name, (SPEC, hidden_field("layer_2", 16), hidden_field("last", 16)))
    assert [field.expected_bits for field in codec.fields.values()] == pytest.approx(
        [of_kv, of_layer, of_last]
    )


def test_layers_share_as_few_bases_as_the_width_allows() -> None:
    settings, every = (
        TransformSettings.parse("transform:1"),
        TransformSettings.parse("transform:1,tokens@all"),
    )
    assert [settings.group_size(n, width) for n, width in ((8, 128), (32, 1024), (2, 10_000))] == [
        8,
        4,
        1,
    ]
    assert [every.group_size(n, 1024) for n in (2, 16, 17, 32, 33, 80)] == [2, 16, 9, 16, 11, 16]
    codec = StoreCodec("transform:1,tokens@all", (tokens_field(), kv_field(32, 8, 128)))
    assert codec.describe()["transform"]["kv"]["group_layers"] == 16


@pytest.mark.parametrize(
    ("name", "field", "facts"),
    [
        ("transform:1,tokens@group20", kv_field(32, 8, 128), ("20,480", "@group16")),
        ("transform:0.5,hidden=2@group32", kv_field(32, 32, 128), ("131,072", "@group4")),
        ("transform:1", kv_field(2, 200, 128), ("'kv'", "25,600", "lossless", "int8")),
        ("transform:1", hidden_field("last", 20_000), ("'hidden/last'", "lossless", "int8")),
    ],
)
def test_a_basis_that_is_too_wide_is_refused_when_it_is_named(
    name: str, field: FieldSpec, facts: tuple[str, ...]
) -> None:
    with raises_naming(CodecUnknown, *facts):
        StoreCodec(name, (tokens_field(), field))


def test_a_basis_from_disk_is_that_of_the_plain_definition_bit_for_bit() -> None:
    codec = make_codec("transform:2@group3")
    state, parts = codec.state(), [codec.parts(values) for values in CALIBRATION]
    for group, part in ((0, 0), (0, 1), (1, 0), (1, 1)):
        sequences = [own[group][part] for i, own in enumerate(parts) if i % 4]
        means = early_means(sequences)
        by_layer = np.square(
            np.concatenate(sequences).reshape(-1, 3 if group == 0 else 1, 16)
        ).mean((0, 2))
        scale = np.repeat(np.sqrt(by_layer / by_layer.mean()), 16)
        np.testing.assert_allclose(state[f"{group}/{part}/scale"], scale, rtol=1e-6)
        scale = state[f"{group}/{part}/scale"]
        rows = (
            np.concatenate([values - means[mean_rows(0, len(values))] for values in sequences])
            / scale
        )
        axes = np.linalg.eigh((rows.T @ rows).astype(np.float64))[1][:, ::-1].T.astype(np.float32)
        np.testing.assert_array_equal(state[f"{group}/{part}/mean"], means)
        both = {row.tobytes() for row in (np.concatenate([axes, -axes]) * scale).astype(np.float16)}
        assert {row.tobytes() for row in state[f"{group}/{part}/synthesis"]} <= both


def test_learning_holds_a_part_of_a_group_in_memory_and_says_how_far_it_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codec = TransformCodec(kv_field(6, 1, 16), TransformSettings.parse("transform:1@layer"))
    told: list[tuple[int, int, str]] = []
    learning = Learning(tmp_path, progress=progress_to(lambda *step: told.append(step)))
    n_tokens, n_sequences = 400, 24
    sequences = (
        rng.standard_normal((n_tokens, 6, 1, 2, 16), dtype=np.float32) for _ in range(n_sequences)
    )
    tracemalloc.start()
    try:
        learn_from(codec, sequences, learning=learning)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 0.7 * 4 * n_tokens * n_sequences * math.prod(codec.spec.token_shape)
    assert [n_done for n_done, _, _ in told] == sorted(n_done for n_done, _, _ in told)
    assert not list(tmp_path.iterdir())


def test_learning_in_torch_gives_the_codec_of_numpy_up_to_rounding() -> None:
    plain = make_codec("transform:2@group3")
    codec = TransformCodec(SPEC, plain.settings, ROPE)
    learn_from(
        codec,
        CALIBRATION,
        learning=Learning(to_device=lambda array: torch.from_numpy(np.ascontiguousarray(array))),
    )
    assert relative_error(codec) == pytest.approx(relative_error(plain), rel=0.02)


KEYS = np.random.default_rng(0).normal(size=(11, 3, 2, HEAD_DIM)).astype(np.float32)


def test_rotation_is_llamas() -> None:
    x = torch.from_numpy(KEYS).transpose(0, 1).transpose(1, 2)  # [layer, head, token, head_dim]
    angles = torch.arange(len(KEYS))[:, None] * torch.from_numpy(np.tile(INV_FREQ, 2)).float()
    rotated, _ = apply_rotary_pos_emb(x, x, angles.cos()[None], angles.sin()[None])
    expected = rotated.transpose(1, 2).transpose(0, 1).numpy()
    np.testing.assert_allclose(Rope(INV_FREQ, np.array(1)).rotate(KEYS), expected, atol=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(INV_FREQ[:2], np.array(1.7)),
        Rope(np.stack([INV_FREQ, INV_FREQ / 2, INV_FREQ / 4]), np.array([1, 1.5, 2])),
    ],
    ids=["partial", "per layer"],
)
def test_unrotating_undoes_rotating_at_any_positions_and_layers(rope: Rope) -> None:
    whole = rope.rotate(KEYS)
    np.testing.assert_allclose(rope.rotate(whole, undo=True), KEYS, atol=1e-5)
    assert not np.allclose(whole, KEYS, atol=0.1)
    n_turned = 2 * rope.inv_freq.shape[-1]
    np.testing.assert_array_equal(whole[..., n_turned:], KEYS[..., n_turned:])
    np.testing.assert_array_equal(rope.rotate(KEYS[4:, [2, 0]], 4, [2, 0]), whole[4:, [2, 0]])
    on_torch = rope.rotate(torch.from_numpy(KEYS), 5, undo=True)
    np.testing.assert_allclose(on_torch.numpy(), rope.rotate(KEYS, 5, undo=True), rtol=1e-6)


@pytest.mark.parametrize(("inv_freq", "scaling"), [(INV_FREQ, 0), (INV_FREQ * np.nan, 1)])
def test_arrays_that_are_no_rotation_are_refused(inv_freq: np.ndarray, scaling: int) -> None:
    with raises_naming(ValueError, "inv_freq", "scaling"):
        Rope(inv_freq, np.array(scaling))


def test_another_thread_may_replace_the_tables_of_rope() -> None:
    class Shorter(dict[str, list[np.ndarray]]):
        """Acts like a thread that stores the tables of a shorter sequence right after this one."""

        def __setitem__(self, key: str, tables: list[np.ndarray]) -> None:
            super().__setitem__(key, [table[:1] for table in tables])

    rope = Rope(INV_FREQ, np.array(1))
    expected = rope.rotate(KEYS)
    rope._kept = Shorter()
    np.testing.assert_array_equal(rope.rotate(KEYS), expected)
