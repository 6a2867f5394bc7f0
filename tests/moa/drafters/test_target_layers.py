"""Draft steps through the target's last layers; that they equal training is part of the contract."""

import pytest
import torch

from moa_data.moa.drafters.target_layers import drafted_target_layers
from moa_data.moa.nn.masks import tree_mask
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.tests.kit.models import build_model


@pytest.mark.parametrize("before", [[6], [6, 3]])
def test_keys_and_values_that_are_no_numbers_do_not_stay_in_the_targets_cache(before: list[int]) -> None:
    frozen, n_rows = FrozenTarget.from_model(build_model(), 2), len(before)
    sizes = frozen.blocks[0].self_attn
    shape = (n_rows, sizes.n_kv_heads, 7, sizes.head_dim)
    views = [(torch.ones(shape), torch.ones(shape)) for _ in range(2)]
    seen = torch.ones(n_rows, 1, 1, dtype=torch.bool)
    drafted_target_layers(
        frozen,
        torch.full((n_rows, 1, 48), torch.nan),
        torch.tensor(before)[:, None],
        views,
        before,
        1,
        {None: tree_mask(before, seen)},
    )
    for keys, values in views:
        for row, length in enumerate(before):
            assert not keys[row, :, length].any()
            assert not values[row, :, length].any()
        assert keys.isfinite().all()
        assert values.isfinite().all()
