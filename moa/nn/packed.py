"""Linear layers whose weights stay as they are, laid out once as the kernels of a CPU want them.

With a matrix as PyTorch keeps it a product of six rows takes two to four times as long as one of a single row; with
oneDNN's layout it takes about as long, so that verifying a chain of drafts costs little more than a plain step. Weights
that float16 holds, as it does those that were stored in bfloat16 or float16 and are computed in float32, are laid out
for FBGEMM too: it reads half the bytes, computes in float32, and is up to two and a half times as fast for a few rows.
These are copies, which take one and a half times the memory of the weights. ``benchmarks/decoding/products.py``
measures them.
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

_FEWEST_VALUES = 1 << 15  # of fewer values a product takes no longer than asking what to do with it
_ROWS = 8  # that oneDNN's layout is for; with fewer and with more it is nearly as fast
_SMALLEST_NORMAL = 2.0**-14  # of float16, which below it has ever fewer digits
# Of the size of a weight's largest row, by which float16 may miss a row in what is smaller than
# that: what float32
# rounds in a product of some thousand values. Drafts may be rounded to float16's eleven digits.
_MAX_ERROR = 2.0**-19
_MAX_DRAFT_ERROR = 2.0**-9
_DTYPES = (torch.float32, torch.bfloat16)
try:
    _HALVES: Any = torch.classes.quantized.LinearPackedParamsBase
# a PyTorch without FBGEMM, whose functions then run without TorchScript
except (RuntimeError, AttributeError):
    _HALVES = object
_LOG = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def scripted(function: _Function) -> _Function:
    """Compile a function by TorchScript, which takes a third of the time to call an operation; itself without one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is to be replaced some day
            compiled: _Function = torch.jit.script(function)
            return compiled
    except Exception:  # noqa: BLE001 - whatever it is
        return function


class Laid(NamedTuple):
    """A laid out weight and its bias, and both for FBGEMM, where float16 holds the weight."""

    blocked: Tensor  # in no layout that PyTorch knows
    bias: Tensor | None
    halves: Optional[_HALVES]  # noqa: UP045 - TorchScript's classes know no |


class PackedLinear(nn.Linear):
    """A linear layer with copies of its weight for products that need no gradient."""

    packed: Laid | None
    packed_state: list[tuple[int, int]]  # of weight and bias, when they were copied

    @override
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        packed = vars(self).get("packed")
        if packed is None or torch.is_grad_enabled() or x.ndim < 2 or not x.numel():
            return F.linear(x, weight, self.bias)
        # With one row PyTorch's own product is as fast as oneDNN's.
        is_faster = packed.halves is not None or x.numel() > x.shape[-1]
        if not is_faster or x.dtype != weight.dtype or self.packed_state != _states(self):
            return F.linear(x, weight, self.bias)
        return product(x, packed)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the copies out, which cannot be pickled, nor copied with their layer."""
        return {name: value for name, value in vars(self).items() if not name.startswith("packed")}


def pack(module: nn.Module, is_exact: bool = True) -> None:
    """Lay out the large weights of linear layers for decoding, on a CPU with AVX2, if memory holds twice their size.

    For weights that don't change any more. A copy of a weight that changed in place is not used, and made anew by the
    next call; changes behind PyTorch's back (``weight.data``, fused optimizers) are not seen.

    Args:
        is_exact: whether weights that float16 does not hold stay float32; drafts need not be exact.
    """
    found = (one for one in module.modules() if isinstance(one, nn.Linear))
    layers = [one for one in found if type(one) in (nn.Linear, PackedLinear) and _takes(one)]
    n_free = free_memory()
    n_bytes = 2 * sum(layer.weight.nbytes for layer in layers)
    if n_free is not None and n_bytes > n_free:
        _LOG.warning(
            "decoding is slower than it could be: copies of the weights for this CPU take %s, and %s are free",
            format_bytes(n_bytes), format_bytes(n_free),
        )  # fmt: skip
        return
    for layer in layers:
        layer.__class__ = PackedLinear
        laid = laid_out(layer.weight.detach(), layer.bias, is_exact)
        # The weights themselves, since others could be where they were once they are gone.
        held = [weight.detach() for weight in layer.parameters()]
        vars(layer).update(packed=laid, packed_state=_states(layer), packed_of=held)


def as_layer(weight: Tensor) -> nn.Linear:
    """Make a linear layer of a weight [out, in], which is not copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = (
        weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    )
    return layer


def rows_of(weight: Tensor, rows: Tensor, is_packed: bool) -> nn.Linear:
    """Copy some rows [n] of a weight [out, in] to a linear layer, laid out for drafting if asked."""
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
    """What changes when a weight does."""
    return weight.data_ptr(), weight._version


@torch.no_grad()
def laid_out(weight: Tensor, bias: Tensor | None = None, is_exact: bool = True) -> Laid:
    """Copy a weight [out, in] to the layouts of products; ``is_exact`` as in :func:`pack`."""
    bias = None if bias is None else bias.contiguous()
    is_held = weight.dtype == torch.float32 and _halves_work() and _holds(weight, is_exact)
    return Laid(_blocked(weight), bias, _halves(weight, bias) if is_held else None)


def _holds(weight: Tensor, is_exact: bool) -> bool:
    """Whether float16 holds a weight, as it does those that were stored in bfloat16 or float16."""
    if not weight.abs().max() <= torch.finfo(torch.float16).max:  # no number is too large too
        return False
    missed = weight.half().float() - weight
    if is_exact and bool(missed[weight.abs() >= _SMALLEST_NORMAL].any()):
        return False
    size, error = (float(torch.linalg.vector_norm(one, dim=1).max()) for one in (weight, missed))
    return error <= (_MAX_ERROR if is_exact else _MAX_DRAFT_ERROR) * size


def _blocked(weight: Tensor) -> Tensor:
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return blocked


def _halves(weight: Tensor, bias: Tensor | None) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)


@scripted
def product(x: Tensor, laid: Laid) -> Tensor:
    """Multiply x [..., in] by a laid out weight and add its bias: [..., out]."""
    halves, most_rows = laid.halves, 24  # with more oneDNN is faster
    n_rows = x.numel() // x.shape[-1]
    if halves is not None and n_rows <= most_rows:
        few: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, halves)
        return few
    shape = x.shape[:-1]
    if n_rows > most_rows:
        # oneDNN keeps a kernel for each number of rows, and these small blocks stay between the
        # large ones that are
        # freed, so that the allocator cannot reuse those. Calls of 2 to 299 rows leave 1.2 GB; in
        # steps of 16, 0.1 GB.
        # Steps of 8 keep the padding of small calls, such as verifications of several sequences,
        # below a fifth.
        step = 8 if n_rows <= 128 else 16
        x = F.pad(x.reshape(n_rows, x.shape[-1]), [0, 0, 0, -n_rows % step])
    many: Tensor = torch.ops.mkldnn._linear_pointwise(x, laid.blocked, laid.bias, "none", [], "")
    return many[:n_rows].view(shape + many.shape[-1:]) if n_rows > most_rows else many


# Both are PyTorch's own, without a promise for other versions, so they are tried.


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Whether this machine gains by oneDNN's layout, and this build of PyTorch has it and it is right."""
    return _is_right(lambda weight, bias: Laid(_blocked(weight), bias, None), dtype)


@functools.cache
def _halves_work() -> bool:
    """Whether FBGEMM's products are there and right."""
    return _is_right(
        lambda weight, bias: Laid(_blocked(weight), bias, _halves(weight, bias)), torch.float32
    )


def _is_right(lay_out: Callable[[Tensor, Tensor], Laid], dtype: torch.dtype) -> bool:
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 32), (48, 32), (48,)
    x, weight, bias = (
        torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes
    )
    try:
        with torch.inference_mode():
            found = product(x, lay_out(weight, bias))
            if torch.allclose(found, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2):
                return True
        problem = "its products are wrong"
    except (RuntimeError, AttributeError, TypeError) as error:
        problem = first_line(error)
    _LOG.warning(
        "decoding is slower than it could be: PyTorch %s has no fast products of %s weights here (%s)",
        torch.__version__, str(dtype).removeprefix("torch."), problem,
    )  # fmt: skip
    return False
