"""Linear layers with weights packed for a CPU equal PyTorch's.

They notice weights that change in place.
"""

import copy
import importlib.util
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moa_data.moa.nn import packed
from moa_data.moa.nn.packed import Laid, PackedLinear, pack


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[int]:
    """List the number of rows of each product with packed weights; small weights are packed too."""
    found: list[int] = []
    real = packed.product

    def counted(x: Tensor, laid: Laid) -> Tensor:
        found.append(x.shape[:-1].numel())
        return real(x, laid)

    monkeypatch.setattr(packed, "_FEWEST_VALUES", 1)
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if not packed._works(given.get("dtype", torch.float32)):  # bfloat16 needs more CPU features
        pytest.skip("this machine gains nothing by the layout")
    packed._works(
        torch.float32, in_halves=True
    )  # Its answer is kept. A first call would be counted as a product.
    monkeypatch.setattr(packed, "product", counted)
    return found


def linear(**options: object) -> nn.Linear:
    return nn.Linear(48, 96, **options).requires_grad_(False)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (6,), (64,), (2, 3), (1, 1), (0,), (2, 0)], ids=str
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_torch(
    products: list[int], shape: tuple[int, ...], dtype: torch.dtype, has_bias: bool
) -> None:
    layer, wide = linear(bias=has_bias, dtype=dtype), torch.randn(*shape, 96, dtype=dtype)
    for x in (wide[..., :48].contiguous(), wide[..., ::2]):
        expected = layer(x)
        pack(layer)
        products.clear()
        with torch.inference_mode():
            found = layer(x)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        n_rows = x.shape[:-1].numel()
        assert products == ([n_rows] if n_rows > 1 else [])


class KernelRows(TorchDispatchMode):
    """Record the numbers of rows that oneDNN gets."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.found.add(args[0].shape[:-1].numel())
        return func(*args, **kwargs or {})


@pytest.mark.usefixtures("products")
def test_calls_of_any_sizes_have_few_kernels() -> None:
    """A kernel that oneDNN keeps for each number of rows fragments memory."""
    layer = linear()
    torch.manual_seed(0)
    x = torch.randn(1, 300, 48)
    expected = layer(x)
    pack(layer)
    with torch.inference_mode(), KernelRows() as rows:
        for n_rows in range(2, 301):
            torch.testing.assert_close(
                layer(x[:, :n_rows]), expected[:, :n_rows], rtol=1e-5, atol=1e-5
            )
    assert 0 < len(rows.found) < 50


@pytest.fixture
def halves() -> None:
    if not packed._works(torch.float32, in_halves=True):
        pytest.skip("this machine has no products of float16 weights")


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6,), (2, 3), (24,), (25,), (0,)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_that_float16_holds_are_as_exact(
    products: list[int], shape: tuple[int, ...], has_bias: bool
) -> None:
    """Products are as exact as with weights stored in bfloat16.

    A single row uses the packed layout too.
    """
    layer, wide = linear(bias=has_bias), torch.randn(*shape, 96)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.bfloat16())
        # float16 represents these with fewer digits or as 0.
        layer.weight[0, :3] = torch.tensor([1e-7, 3e-10, 0])
    pack(layer)
    assert vars(layer)["packed"].halves is not None
    for x in (wide[..., :48].contiguous(), wide[..., ::2]):
        products.clear()
        with torch.inference_mode():
            found = layer(x)
        exact = x.double() @ layer.weight.double().T + (layer.bias.double() if has_bias else 0)
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-6)
        n_rows = x.shape[:-1].numel()
        assert products == ([n_rows] if n_rows and shape else [])


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("size", [1.0, 3e-5, 1e-9, 1e6, 1e25])
def test_other_weights_are_not_rounded_but_for_drafts(products: list[int], size: float) -> None:
    """The weights themselves do not change."""
    layer = linear()
    with torch.no_grad():
        layer.weight.mul_(size)
    x = torch.randn(3, 48) / max(1.0, size)
    expected = layer(x)
    for is_exact, tolerance in ((True, 1e-5), (False, 3e-2)):
        layer.__dict__.pop("packed_state", None)
        pack(layer, is_exact)
        laid: Laid = vars(layer)["packed"]
        assert (laid.halves is not None) == (not is_exact and size == 1)
        with torch.inference_mode():
            torch.testing.assert_close(
                layer(x), expected, rtol=tolerance, atol=tolerance * min(1.0, size)
            )
    assert products == [3, 3]


@pytest.mark.usefixtures("halves", "products")
@pytest.mark.parametrize("row", [0.0, 1e-20, 1e-5, 1e-3, 8192.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_other_sizes_decide_nothing(row: float, dtype: torch.dtype) -> None:
    """Rows of other sizes do not affect which weights count as stored in bfloat16.

    Weights from bfloat16 are held in float16, also with small rows. Others are not, also with large
    rows.
    """
    layer = linear()
    with torch.no_grad():
        layer.weight[5].mul_(row)
        layer.weight.copy_(layer.weight.to(dtype))
    pack(layer)
    assert (vars(layer)["packed"].halves is not None) == (dtype == torch.bfloat16)


@pytest.mark.usefixtures("products")
def test_weights_at_the_address_of_others_are_not_taken_for_them() -> None:
    """Freed memory is reused for the next weights."""
    for _ in range(8):
        layer, x = linear(), torch.randn(5, 48)
        pack(layer)
        layer.to(torch.bfloat16).float()
        with torch.no_grad():
            torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)


def test_weights_that_change_and_gradients_are_computed_plainly(products: list[int]) -> None:
    layer, x = nn.Linear(48, 96), torch.randn(5, 48)
    pack(layer)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)
        assert not products
        pack(layer)
        layer(x)
        assert products == [5]
        layer.bias.add_(1)
        torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)
    assert products == [5]


def test_copies_have_no_layout_but_their_weights(products: list[int]) -> None:
    """This holds for ``copy``, ``pickle`` and casts to another dtype."""
    layer, x = linear(), torch.randn(5, 48)
    pack(layer)
    copies = [copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    copies[0].weight = nn.Parameter(layer.weight * 3, requires_grad=False)
    with torch.no_grad():
        for own in copies:
            torch.testing.assert_close(own(x), x @ own.weight.T + own.bias)
        assert not products
        assert layer.double()(x.double()).dtype == torch.float64
    assert type(layer) is PackedLinear


@pytest.mark.parametrize("why", ["memory", "size", "processor"])
def test_what_gains_nothing_is_left(
    products: list[int], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    layer = linear()
    if why == "memory":
        monkeypatch.setattr(packed, "free_memory", lambda: layer.weight.nbytes)
    elif why == "size":
        monkeypatch.setattr(packed, "_FEWEST_VALUES", 96 * 48 + 1)
    else:
        packed._works.cache_clear()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    pack(layer)
    packed._works.cache_clear()
    assert type(layer) is nn.Linear


def test_without_torchscript_functions_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.jit, "script")
    assert packed.scripted(copy.copy) is copy.copy


def test_a_pytorch_without_fbgemm_can_train_and_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: object) -> None:
        raise RuntimeError(
            "Tried to instantiate class 'quantized.LinearPackedParamsBase', but it does not exist!"
        )

    monkeypatch.setattr(
        torch.classes, "quantized", type("Classes", (), {"__getattr__": absent})(), raising=False
    )
    monkeypatch.setattr(
        torch.ops, "quantized", type("Operations", (), {"__getattr__": absent})(), raising=False
    )
    spec = importlib.util.spec_from_file_location(packed.__name__, packed.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    layer, x = nn.Linear(256, 256).requires_grad_(False), torch.randn(6, 256)
    expected = layer(x)
    again.pack(layer)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_weights_that_cannot_be_packed_are_logged(
    products: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed, "free_memory", lambda: 0)
    pack(linear())

    def fail(weight: Tensor) -> Tensor:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(packed, "_blocked", fail)
    assert not packed._works.__wrapped__(torch.float32)
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.split(",")[0] for text in texts] == ["decoding is slower than it could be"] * 2
    assert "0 B are free" in texts[0]
    assert "no such operation" in texts[1]
