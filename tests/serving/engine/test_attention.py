"""Single tokens of many sequences attend together, with the values of each one alone."""

import itertools

import pytest
import torch

from moa_data.serving.engine import attention
from moa_data.serving.engine.attention import Segment, SegmentAttention
from moa_data.serving.engine.pool import BLOCK_TOKENS, Pool, PooledKV

# The windows of two layers. The second one hides nothing of sequences this short.
WINDOWS = (None, 500)
CPU = torch.device("cpu")


def attended(lengths: list[int], n_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one token of each sequence; return all outputs and the pool's content.

    The second layer has four query heads.
    """
    generator = torch.Generator().manual_seed(len(lengths))
    n_blocks = sum(-(-(length + 1) // BLOCK_TOKENS) for length in lengths) + 3
    pool = Pool(
        n_blocks * BLOCK_TOKENS, {"n_layers": 2, "n_kv_heads": 2, "head_dim": 8}, torch.float32, CPU
    )
    pool.buffer.fill_(torch.nan)  # Reading an unwritten value gives NaN.
    segments = []
    for length in lengths:
        pool.reserve(kv := PooledKV(pool), -(-(length + 1) // BLOCK_TOKENS))
        segments.append(Segment(kv, [0]))
        kv.length = length
    for segment in segments:
        segment.kv.view(0, segment.start).copy_(
            torch.randn(2, 2, 2, segment.start, 8, generator=generator)
        )
    found, call = [], SegmentAttention(segments, WINDOWS, CPU)
    for layer in range(2):
        n_own = (n_heads, 4)[layer]
        q, k, v = (torch.randn(1, n, len(segments), 8, generator=generator) for n in (n_own, 2, 2))
        found.append(call.attend(layer, q, k, v).flatten())
    return torch.cat(found), pool.buffer


@pytest.mark.parametrize("n_heads", [2, 6, 8, 16])
@pytest.mark.parametrize(
    "lengths", [[0], [40], [3, 0, 70, 31, 32], [1, 200], [50, 60, 90]], ids=str
)
def test_steps_attend_as_segments_by_themselves(
    lengths: list[int],
    n_heads: int,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    assert attention._steps_work()
    own, held = attended(lengths, n_heads)
    monkeypatch.setattr(attention, "_steps_work", lambda: False)
    expected, expected_held = attended(lengths, n_heads)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(held, expected_held, rtol=0, atol=0, equal_nan=True)
    assert not recwarn.list


def test_a_step_is_the_same_whatever_shares_its_call() -> None:
    """Values are equal to the last bit.

    That holds for any length of the longest sequence in the call, and with many heads too.
    """

    def rows(lengths: list[int], n_heads: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        pool = Pool(
            40 * BLOCK_TOKENS, {"n_layers": 1, "n_kv_heads": 2, "head_dim": 64}, torch.float32, CPU
        )
        segments = []
        for length in lengths:
            pool.reserve(kv := PooledKV(pool), -(-(length + 1) // BLOCK_TOKENS))
            kv.length = length
            segments.append(Segment(kv, [0]))
        for segment in segments:
            own = torch.Generator().manual_seed(segment.start)
            segment.kv.view(0, segment.start).copy_(
                torch.randn(2, 1, 2, segment.start, 64, generator=own)
            )
        q, k, v = (
            torch.randn(1, n, 1, 64, generator=generator).expand(-1, -1, len(segments), -1)
            for n in (n_heads, 2, 2)
        )
        return SegmentAttention(segments, (None,), CPU).attend(0, q, k, v)[0]

    for n_heads, lengths in itertools.product((6, 16), ([5, 37, 300], [150, 170, 201])):
        together = rows(lengths, n_heads)
        for index, length in enumerate(lengths):
            assert torch.equal(rows([length], n_heads)[0], together[index])


def test_a_build_without_the_products_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.sparse.sampled_addmm", lambda scores, *_, **__: scores)
    attention._steps_work.cache_clear()
    assert not attention._steps_work()
    attention._steps_work.cache_clear()
