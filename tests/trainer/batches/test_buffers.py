"""Memory comes back when the last tensor on it is gone, never before, and no more is kept than allowed."""

import torch

from moa_data.trainer.batches.buffers import BufferPool


def test_memory_is_used_again_only_when_nothing_shares_it() -> None:
    pool = BufferPool(1 << 20)
    first = pool.take((10, 20), torch.bfloat16)
    address = first.data_ptr()
    row = first[3].float().requires_grad_()[:5]
    view = first.flatten()[7:]
    first.fill_(1)
    del first
    other = pool.take((10, 20), torch.bfloat16)
    assert other.data_ptr() != address, "a view still shares the memory"
    del view, row
    assert pool.take((10, 19), torch.bfloat16).data_ptr() == address
    assert pool.n_allocations == 2


def test_shapes_and_dtypes() -> None:
    pool = BufferPool(1 << 20)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensor = pool.take((2, 3, 4), dtype)
        assert tensor.shape == (2, 3, 4)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
    assert pool.take((0, 3), torch.float32).numel() == 0


def test_what_is_kept_is_bounded() -> None:
    pool = BufferPool(10_000)
    for n in (1000, 3000, 7000, 9000, 100, 9000):
        del_me = pool.take((n,), torch.uint8)
        assert del_me.numel() == n
        del del_me
        assert pool.allocated_bytes <= 10_000 + 64
    held = [pool.take((9000,), torch.uint8) for _ in range(3)]
    assert pool.allocated_bytes >= 27_000, "what is in use is never refused"
    del held
    pool.take((5000,), torch.uint8)
    assert pool.allocated_bytes <= 10_000 + 2 * 9000
