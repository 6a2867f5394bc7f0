"""Linear layers whose constant weights are packed into the layouts of fast CPU kernels.

With PyTorch's layout of a weight, a product with six rows (tokens) takes two to four times as long
as a product with one row. With oneDNN's layout, both products take about the same time, so
verifying a chain of drafts costs little more than a plain decoding step.

Some float32 weights have values that float16 can represent, for example if the model was stored in
float16 or bfloat16. These weights are also packed for FBGEMM, which reads half the bytes and
computes in float32. For a few rows, FBGEMM is up to 2.5 times as fast as oneDNN. The packed copies
take 1.5 times the memory of the weights. ``benchmarks/decoding/products.py`` measures the products.
"""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Optional, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ...machine import free_memory
from ...text import first_line, format_bytes

# Weights with fewer values than this are not packed. For such a small weight, choosing a kernel
# would take as long as the product itself.
_FEWEST_VALUES = 1 << 15
# Number of rows for which oneDNN optimizes its layout. With another number of rows, products are
# nearly as fast.
_ROWS = 8
# Smallest normal number of float16. Smaller numbers have fewer significant bits in float16, so they
# are rounded.
_SMALLEST_NORMAL = 2.0**-14
# Largest allowed float16 rounding error of a row of a weight, relative to the largest row norm.
# ``_MAX_ERROR`` is about as large as the rounding error of a float32 sum of some thousand products.
# ``_MAX_DRAFT_ERROR`` is for drafters. Their weights may be rounded to the 11 significant bits of
# float16.
_MAX_ERROR = 2.0**-19
_MAX_DRAFT_ERROR = 2.0**-9
_DTYPES = (torch.float32, torch.bfloat16)
try:
    _HALVES: Any = torch.classes.quantized.LinearPackedParamsBase
# If this PyTorch has no FBGEMM, the functions below run without TorchScript.
except (RuntimeError, AttributeError):
    _HALVES = object
_LOG = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def scripted(function: _Function) -> _Function:
    """Compile a function with TorchScript, or return it unchanged if that fails.

    A call of a PyTorch operation from TorchScript takes a third of the time of a call from Python.
    """
    try:
        with warnings.catch_warnings():
            # Ignore PyTorch's warning that TorchScript is deprecated.
            warnings.simplefilter("ignore")
            compiled: _Function = torch.jit.script(function)
            return compiled
    except Exception:  # noqa: BLE001 - TorchScript can raise any exception
        return function


class Laid(NamedTuple):
    """A packed weight and its bias."""

    # The weight in oneDNN's layout. Only oneDNN can read it.
    blocked: Tensor
    bias: Tensor | None
    # Weight and bias in float16, in FBGEMM's layout. None if float16 would round the weight too
    # much.
    halves: Optional[_HALVES]  # noqa: UP045 - TorchScript classes do not support `|`


class PackedLinear(nn.Linear):
    """A linear layer that uses packed copies of its weight if no gradient is needed."""

    packed: Laid | None
    # Address and version of weight and bias at the time of packing. If they have changed, the
    # packed copies are not used.
    packed_state: list[tuple[int, int]]

    @override
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        packed = vars(self).get("packed")
        if packed is None or torch.is_grad_enabled() or x.ndim < 2 or not x.numel():
            return F.linear(x, weight, self.bias)
        # With a single row, oneDNN is not faster than PyTorch's own product.
        is_faster = packed.halves is not None or x.numel() > x.shape[-1]
        if not is_faster or x.dtype != weight.dtype or self.packed_state != _states(self):
            return F.linear(x, weight, self.bias)
        return product(x, packed)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy or a pickle of this layer gets.

        The packed weights are left out, because they cannot be pickled or copied.
        """
        return {name: value for name, value in vars(self).items() if not name.startswith("packed")}


def pack(module: nn.Module, is_exact: bool = True) -> None:
    """Pack the large weights of linear layers for decoding on a CPU with AVX2.

    Nothing is packed if less than twice the memory of the weights is free. The weights should not
    change afterwards. If a weight has changed in place, its packed copy is not used, and the next
    call of this function replaces the copy. Changes that PyTorch does not track (``weight.data``,
    fused optimizers) are not detected.

    Args:
        module: A module with linear layers.
        is_exact: If true, weights that float16 cannot represent exactly stay in float32. False is
            for drafters: rounded weights may change their drafts, but not the decoded text.
    """
    layers: list[nn.Linear] = []
    for child in module.modules():
        has_known_type = type(child) in (nn.Linear, PackedLinear)
        if isinstance(child, nn.Linear) and has_known_type and _takes(child):
            layers.append(child)
    n_free = free_memory()
    n_bytes = 2 * sum(layer.weight.nbytes for layer in layers)
    if n_free is not None and n_bytes > n_free:
        _LOG.warning(
            "decoding is slower than it could be, because a copy of the weights in a faster layout "
            "needs %s of memory, and only %s are free",
            format_bytes(n_bytes), format_bytes(n_free),
        )  # fmt: skip
        return
    for layer in layers:
        layer.__class__ = PackedLinear
        laid = laid_out(layer.weight.detach(), layer.bias, is_exact)
        # Keep references to the weights, so that their memory stays allocated. Otherwise a new
        # weight could get the address of a freed weight, and would be mistaken for the freed
        # weight.
        held = [weight.detach() for weight in layer.parameters()]
        vars(layer).update(packed=laid, packed_state=_states(layer), packed_of=held)


def as_layer(weight: Tensor) -> nn.Linear:
    """Make a linear layer that uses a weight [out, in] without a copy."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = (
        weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    )
    return layer


def rows_of(weight: Tensor, rows: Tensor, is_packed: bool) -> nn.Linear:
    """Copy some rows [n] of a weight [out, in] to a new linear layer.

    The new layer is packed for drafting if ``is_packed`` is true.
    """
    with torch.inference_mode(False), torch.no_grad():
        layer = as_layer(weight[rows])
        if is_packed:
            pack(layer, is_exact=False)
    return layer


def _takes(layer: nn.Linear) -> bool:
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or weight.is_inference():
        return False
    is_new = vars(layer).get("packed_state") != _states(layer)
    return is_new and weight.numel() >= _FEWEST_VALUES and _works(weight.dtype)


def _states(layer: nn.Linear) -> list[tuple[int, int]]:
    return [state_of(weight) for weight in (layer.weight, layer.bias) if weight is not None]


def state_of(weight: Tensor) -> tuple[int, int]:
    """Return the address and the version of a weight.

    If the values of the weight change, its address or its version changes too.
    """
    return weight.data_ptr(), weight._version


@torch.no_grad()
def laid_out(weight: Tensor, bias: Tensor | None = None, is_exact: bool = True) -> Laid:
    """Pack a weight [out, in] and its bias. For ``is_exact``, see :func:`pack`."""
    bias = None if bias is None else bias.contiguous()
    is_held = (
        weight.dtype == torch.float32
        and _works(torch.float32, in_halves=True)
        and _holds(weight, is_exact)
    )
    return Laid(_blocked(weight), bias, _halves(weight, bias) if is_held else None)


def _holds(weight: Tensor, is_exact: bool) -> bool:
    """Whether float16 represents a weight with a small enough rounding error.

    The limit is ``_MAX_ERROR``, or the larger ``_MAX_DRAFT_ERROR`` if ``is_exact`` is false.
    """
    # Comparisons with NaN are false, so this negated comparison also finds weights with NaN.
    if not weight.abs().max() <= torch.finfo(torch.float16).max:
        return False
    missed = weight.half().float() - weight
    if is_exact and bool(missed[weight.abs() >= _SMALLEST_NORMAL].any()):
        return False
    size = float(torch.linalg.vector_norm(weight, dim=1).max())
    error = float(torch.linalg.vector_norm(missed, dim=1).max())
    return error <= (_MAX_ERROR if is_exact else _MAX_DRAFT_ERROR) * size


def _blocked(weight: Tensor) -> Tensor:
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return blocked


def _halves(weight: Tensor, bias: Tensor | None) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)


@scripted
def product(x: Tensor, laid: Laid) -> Tensor:
    """Multiply x [..., in] by a packed weight, and add its bias: [..., out]."""
    # With more than 24 rows, oneDNN is faster than FBGEMM.
    halves, most_rows = laid.halves, 24
    n_rows = x.numel() // x.shape[-1]
    if halves is not None and n_rows <= most_rows:
        few: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, halves)
        return few
    shape = x.shape[:-1]
    if n_rows > most_rows:
        # oneDNN caches a kernel for each number of rows. The small allocations of the cached
        # kernels fragment the memory: after one call with each number of rows from 2 to 299, 1.2 GB
        # stay allocated. So pad the rows to a multiple of 16, which leaves 0.1 GB after the same
        # calls. With at most 128 rows, as in verifications of several sequences, pad to a multiple
        # of 8, because the padding would be a larger share of the rows otherwise.
        step = 8 if n_rows <= 128 else 16
        x = F.pad(x.reshape(n_rows, x.shape[-1]), [0, 0, 0, -n_rows % step])
    many: Tensor = torch.ops.mkldnn._linear_pointwise(x, laid.blocked, laid.bias, "none", [], "")
    return many[:n_rows].view(shape + many.shape[-1:]) if n_rows > most_rows else many


@functools.cache
def _works(dtype: torch.dtype, in_halves: bool = False) -> bool:
    """Whether oneDNN's layout is fast on this CPU and gives correct results with this PyTorch.

    If ``in_halves`` is true, FBGEMM's layout is tested instead. Both layouts are internal to
    PyTorch and may change between versions.
    """
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 32), (48, 32), (48,)
    x, weight, bias = (
        torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes
    )
    try:
        with torch.inference_mode():
            halves = _halves(weight, bias) if in_halves else None
            result = product(x, Laid(_blocked(weight), bias, halves))
            if torch.allclose(result, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2):
                return True
        problem = "a test product was wrong"
    except (RuntimeError, AttributeError, TypeError) as error:
        problem = first_line(error)
    _LOG.warning(
        "decoding is slower than it could be, because PyTorch %s has no fast matrix products for "
        "%s weights on this machine (%s)",
        torch.__version__, str(dtype).removeprefix("torch."), problem,
    )  # fmt: skip
    return False
