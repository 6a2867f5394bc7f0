"""Products with weights laid out for a CPU are those of PyTorch, and follow the weights where these change."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from moa_data.moa.nn import packed
from moa_data.moa.nn.packed import linear, pack, pack_weight


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each product by the layout."""
    found: list[int] = []
    real = packed._product

    def counted(rows: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        found.append(rows.shape[:-1].numel())
        return real(rows, values, bias)

    monkeypatch.setattr(packed, "_product", counted)
    yield found
    if not packed._works(torch.float32):
        pytest.skip("this build of PyTorch lays nothing out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3,), (6,), (64,), (2, 3), (1, 1), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_torch(
    products: list[int], shape: tuple[int, ...], dtype: torch.dtype, has_bias: bool
) -> None:
    layer = nn.Linear(48, 96, bias=has_bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(*shape, 48, dtype=dtype)
    expected = layer(x)
    pack(layer)
    products.clear()
    with torch.inference_mode():
        found, strided = layer(x), layer(torch.cat((x, x), dim=-1)[..., ::2].contiguous()[..., :48])
    assert strided.shape == found.shape == expected.shape
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    n_rows = x.shape[:-1].numel()
    assert products == ([n_rows] * 2 if n_rows > 1 else [])


def test_weights_that_change_and_gradients_are_computed_plainly(products: list[int]) -> None:
    layer, x = nn.Linear(48, 96), torch.randn(5, 48)
    pack(layer)
    products.clear()
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)
        other = copy.deepcopy(layer).double()
        torch.testing.assert_close(other(x.double()), x.double() @ other.weight.T + other.bias)
        assert not products
        pack(layer)
        layer(x)
    assert products == [5]


def test_an_alias_shares_the_layout(products: list[int]) -> None:
    weight = torch.randn(96, 48)
    alias = weight.detach()
    pack_weight(weight)
    pack_weight(alias, like=weight)
    assert vars(alias) == vars(weight)
    other = torch.randn(96, 48)
    pack_weight(other, like=weight)
    with torch.inference_mode():
        torch.testing.assert_close(linear(torch.ones(2, 48), other)[0], other.sum(dim=1), rtol=1e-4, atol=1e-4)


def test_nothing_is_copied_that_memory_does_not_hold(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(48, 96).requires_grad_(False), torch.randn(2, 48)
    monkeypatch.setattr(packed, "free_memory", lambda: layer.weight.nbytes)
    pack(layer)
    products.clear()
    with torch.inference_mode():
        layer(x)
    assert not products
