"""The rotation of keys: taken off and put back, against the definition in transformers' Llama."""

import numpy as np
import pytest
import torch

from moa_data.storage.codecs.transform.rope import Rope

HEAD_DIM = 8
INV_FREQ = 100.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)


def keys(n_tokens: int = 11, n_layers: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n_tokens, n_layers, 2, HEAD_DIM)).astype(np.float32)


def llama_rotation(x: torch.Tensor, inv_freq: np.ndarray) -> torch.Tensor:
    """apply_rotary_pos_emb of transformers, tokens first."""
    angles = torch.arange(len(x))[:, None] * torch.from_numpy(inv_freq).float()
    emb = torch.cat((angles, angles), dim=-1)[:, None, None]
    half = torch.cat((-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]), dim=-1)
    return x * emb.cos() + half * emb.sin()


def test_rotation_is_llamas() -> None:
    x = keys()
    rotated = Rope(INV_FREQ, np.array(1)).rotate(x)
    np.testing.assert_allclose(rotated, llama_rotation(torch.from_numpy(x), INV_FREQ).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(INV_FREQ, np.array(1.3)),
        Rope(INV_FREQ[:2], np.array(1)),
        Rope(np.stack([INV_FREQ, INV_FREQ / 2, INV_FREQ / 4]), np.array([1.0, 1.5, 2.0])),
    ],
    ids=["scaled", "partial", "per layer"],
)
def test_unrotating_undoes_rotating(rope: Rope) -> None:
    x = keys()
    np.testing.assert_allclose(rope.unrotate(rope.rotate(x)), x, atol=1e-5)
    assert not np.allclose(rope.rotate(x), x, atol=0.1)


def test_partial_rotation_leaves_the_other_dimensions_alone() -> None:
    x = keys()
    rotated = Rope(INV_FREQ[:2], np.array(1.7)).rotate(x)
    np.testing.assert_array_equal(rotated[..., 4:], x[..., 4:])


def test_positions_and_layers_are_those_asked_for() -> None:
    rope = Rope(np.stack([INV_FREQ, INV_FREQ / 2, INV_FREQ / 4]), np.array([1.0, 1.5, 2.0]))
    x = keys()
    whole = rope.rotate(x)
    np.testing.assert_array_equal(rope.rotate(x[4:, [2, 0]], 4, [2, 0]), whole[4:, [2, 0]])


def test_torch_equals_numpy() -> None:
    rope, x = Rope(INV_FREQ, np.array(1)), keys()
    got = rope.unrotate(torch.from_numpy(x), 5)
    assert isinstance(got, torch.Tensor)
    np.testing.assert_allclose(got.numpy(), rope.unrotate(x, 5), rtol=1e-6)


def test_arrays_that_are_no_rotation_are_refused() -> None:
    with pytest.raises(ValueError, match="rotary_dim"):
        Rope(np.zeros((1, 2, 3)), np.array(1))
    with pytest.raises(ValueError, match="positive"):
        Rope(INV_FREQ, np.array(0))
