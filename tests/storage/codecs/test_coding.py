"""Codes in bytes, and runs of bytes in pieces: everything comes back, in NumPy and in torch."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from moa_data.storage.codecs import coding
from moa_data.storage.codecs.coding import CODES_PER_BYTE, WIDE_LEVELS, Pieces, pack, piece_bytes, split_wide
from moa_data.storage.schema import StoredArray


@given(levels=st.sampled_from(sorted(CODES_PER_BYTE)), n_codes=st.integers(1, 17), seed=st.integers(0, 99))
def test_packing_round_trips_on_both_libraries(levels: int, n_codes: int, seed: int) -> None:
    top = levels // 2
    codes = np.random.default_rng(seed).integers(-top, top + 1, (5, n_codes)).astype(np.int16)
    packed = pack(codes, levels)
    assert packed.dtype == np.uint8
    assert packed.shape == (5, -(-n_codes // CODES_PER_BYTE[levels]))
    np.testing.assert_array_equal(coding.unpack_table(levels)[packed].reshape(5, -1)[:, :n_codes], codes)
    np.testing.assert_array_equal(pack(torch.from_numpy(codes), levels).numpy(), packed)
    assert not pack(np.zeros_like(codes), levels).any(), "as the padding between sequences"
    assert np.abs(coding.unpack_table(levels)).max() == top, "every byte decodes in range"


def test_wide_codes_are_two_digits() -> None:
    top = WIDE_LEVELS // 2
    codes = np.arange(-top, top + 1)
    low, high = split_wide(codes)
    np.testing.assert_array_equal(low + 255 * high, codes)
    assert (np.abs(low).max(), np.abs(high).max()) == (127, 7)


WIDTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=4)


@given(widths=WIDTHS, n_bytes=st.integers(1, 50), seed=st.integers(0, 99), data=st.data())
def test_runs_come_back_from_the_pieces_of_their_groups(
    widths: list[list[int]], n_bytes: int, seed: int, data: st.DataObject
) -> None:
    runs = [
        [StoredArray(f"kv/codes_{g:02d}_{r:02d}", "uint8", (width,), ("token", "byte")) for r, width in enumerate(own)]
        for g, own in enumerate(widths)
    ]
    pieces = Pieces("kv/codes", runs, n_bytes)
    rng = np.random.default_rng(seed)
    codes = {run.name: rng.integers(0, 256, (3, run.row_bytes), np.uint8) for group in runs for run in group}
    joined = pieces.join(codes)
    assert joined.shape == (3, *pieces.array.row_shape)
    on_torch = pieces.join({name: torch.from_numpy(rows) for name, rows in codes.items()})
    np.testing.assert_array_equal(on_torch.numpy(), joined)
    groups = data.draw(st.lists(st.sampled_from(range(len(widths))), unique=True, min_size=1))
    rows = joined[:, pieces.of_groups(groups)]
    expected = {run.name: codes[run.name] for group in groups for run in runs[group]}
    for split in (pieces.split(rows, groups), pieces.split(torch.from_numpy(rows), groups)):
        assert list(split) == list(expected)
        for name, part in split.items():
            np.testing.assert_array_equal(np.asarray(part), expected[name])


def test_narrow_groups_keep_their_runs_apart() -> None:
    assert piece_bytes([1100, 900]) == piece_bytes([1000, 1047])
    assert [piece_bytes([width]) for width in (1, 1023, 1024, 2047, 2048, 9000)] == [0, 0, 96, 96, 192, 192]
