"""A simulated CUDA device. Its tensors claim to be on cuda:0, but compute in host memory.

They refuse to mix with tensors of the host, and the device counts what it is asked to do.

``empty`` is registered for the CUDA dispatch key, so that every factory and every ``.to("cuda")``,
in any thread, returns a :class:`CudaTensor`. For C++ this is a tensor of torch's Python backend
(PrivateUse1, which autograd accepts in a CPU build). For Python it is a tensor on cuda:0, and
``__torch_dispatch__`` sees every operation. The device counts

- kernel launches: dispatched operations that are not views,
- synchronizations of the host with the device: ``.item()``, ``nonzero``, masks as indices, copies
  to the host and blocking copies.

A CUDA graph records operations and replays them in the same memory, as one launch. During capture,
a synchronization or a value from the host is an error. Results of the capture itself are discarded
afterwards, so that only replays produce values.

Non-blocking copies between pinned memory and the device on a side stream happen as late as CUDA
allows: when something waits for them. Until then their target contains ones, so that a race is
visible in the values.
"""

# mypy: disable-error-code="arg-type,misc,call-arg,attr-defined,valid-type,no-untyped-call,override,assignment"
import contextlib
import ctypes
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._pytree import tree_iter

try:
    from torch.utils.backend_registration import (
        _DummyBackendModule,
        _setup_privateuseone_for_python_backend,
    )
except ImportError:  # other versions of torch, for which the device is not registered
    _DummyBackendModule = object

TORCH = "2.13."
"""The supported versions of torch. The device relies on internals that torch may change."""
DEVICE = torch.device("cuda", 0)
_KINDS = ("cuda", "nowhere")
aten = torch.ops.aten
_WAITS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim,
    aten.equal, aten.bincount,
}  # fmt: skip
_FREE = {
    aten._unsafe_view, aten._reshape_alias, aten.empty_like, aten.new_empty, aten.empty,
    aten.empty_strided, aten.new_empty_strided, aten.detach, aten.detach_, aten.alias,
    aten.lift_fresh, aten.is_pinned,
}  # fmt: skip
_INDEXED = {
    aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index,
    aten._unsafe_index_put
}  # fmt: skip
# Operations that do not accept a scalar of the host in place of a tensor of the device.
_STRICT = {
    aten.cat, aten.stack, aten.gather, aten.index_select, aten.embedding, aten.mm, aten.bmm,
    aten.addmm
}  # fmt: skip


class Counts:
    """Counts of launches and synchronizations since the last reset, by line of the package."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        self.launches = self.waits = 0
        self.launch_lines: Counter[str] = Counter()
        self.wait_lines: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    def launch(self, name: str, n: int = 1) -> None:
        """Count n kernels of an operation. Operations during graph capture are not launches."""
        if _graph() is not None:
            return
        self.launches += n
        self.launch_lines[f"{_line()} {name}"] += n

    def wait(self, why: str) -> None:
        """Count a synchronization of the host with the device."""
        _refuse_in_graph(why)
        self.waits += 1
        self.wait_lines[f"{_line()} {why}"] += 1

    def worst(self, n_lines: int = 12) -> str:
        """List the lines with the most synchronizations and launches, for failure messages."""
        found = {"waits": self.wait_lines, "launches": self.launch_lines}
        return "\n".join(
            f"{count:6} {kind} {line}"
            for kind, lines in found.items()
            for line, count in lines.most_common(n_lines)
        )


COUNTS = Counts()
# Address, end and tensor of each pinned allocation. It stays until the simulation ends.
_pinned: list[tuple[int, int, Tensor]] = []
_local = threading.local()


def _line() -> str:
    """Return the line of the package that caused the current operation."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("moa_data.") and not name.startswith("moa_data.tests.kit."):
            return f"{name.removeprefix('moa_data.').replace('.', '/')}.py:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class CUDAGraph:
    """The operations that were recorded during a capture, to be replayed."""

    def __init__(self, **_: Any) -> None:
        # Each operation with its output, or None for an operation in place.
        self.work: list[tuple[Callable[[], Any], Any]] = []
        # Tensors that were written to, with their values from before.
        self.before: list[tuple[Tensor, Tensor]] = []

    def replay(self) -> None:
        COUNTS.launch("graph")
        with torch.inference_mode():
            for call, out in self.work:
                new = call()
                for old, one in (
                    zip(tree_iter(out), tree_iter(new), strict=True) if out is not None else ()
                ):
                    old.copy_(one)

    def forget(self) -> None:
        """Undo the effects of the operations of the capture. CUDA does not execute them at all."""
        for tensor, values in reversed(self.before):
            tensor.copy_(values)
        for _, out in self.work:
            for tensor in tree_iter(out):
                if tensor is not None:
                    tensor.fill_(1)


def _graph() -> CUDAGraph | None:
    """Return the graph that this thread is capturing, if any."""
    return getattr(_local, "graph", None)


def _refuse_in_graph(why: str) -> None:
    if _graph() is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {why} at {_line()}")


@contextlib.contextmanager
def capture(graph: CUDAGraph, **_: Any) -> Iterator[None]:
    """Stand in for ``torch.cuda.graph``.

    Raises:
        RuntimeError: cuBLAS still has a workspace from before the capture, which could be freed.
    """
    if getattr(_local, "cleared_at", None) != COUNTS.launches:
        raise RuntimeError(f"cuBLAS has scratch memory from before the graph at {_line()}")
    COUNTS.wait("synchronize")
    _local.graph = graph
    try:
        yield
    finally:
        _local.graph = None
    graph.forget()


def _clear_workspaces() -> None:
    """Stand in for the call that frees the workspaces of cuBLAS.

    Any later launch may allocate a workspace again.
    """
    _local.cleared_at = COUNTS.launches


def _done(call: Callable[[], Any], written: tuple[Tensor, ...] = ()) -> Any:
    """Run an operation on tensors of the host, and record it if a graph is being captured."""
    if (graph := _graph()) is None:
        return call()
    graph.before.extend((tensor, tensor.clone()) for tensor in written)
    out = call()
    graph.work.append((call, None if written else out))
    return out


class CudaTensor(Tensor):
    """Looks like a tensor on cuda:0. ``inner`` holds the values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "CudaTensor":
        layout = {
            "strides": inner.stride(),
            "storage_offset": inner.storage_offset(),
            "dtype": inner.dtype,
        }
        own: Any = Tensor._make_wrapper_subclass(cls, inner.shape, device="nowhere:0", **layout)
        own.inner = inner
        made: CudaTensor = own
        return made

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.inner!r})"

    def cpu(self, *_: Any, **__: Any) -> Any:
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Any) -> None:
        pass  # memory is only reused when Python frees it

    def to(self, *args: Any, **kwargs: Any) -> Any:
        copy = kwargs.pop("copy", False)
        device, dtype, late, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type in _KINDS:
            return (
                self
                if dtype in (None, self.dtype) and not copy
                else aten._to_copy(self, dtype=dtype or self.dtype)
            )
        return aten._to_copy(self, dtype=dtype or self.dtype, device=device, non_blocking=late)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet, facts = dict(kwargs or {}), func.overloadpacket, _facts(func)
        if packet in (aten.copy_, aten._to_copy):
            return _copy(packet, args, kwargs)
        if facts.is_composite:  # in inference mode nothing has decomposed it before
            return func.decompose(*args, **kwargs)
        _check_devices(func, args, kwargs)
        if not facts.is_free:
            COUNTS.launch(packet.__name__)
        on_device = torch.device(kwargs.pop("device", None) or DEVICE).type in _KINDS
        kwargs.pop("pin_memory", None)
        inner_args = [_inner(value) for value in args]
        inner_kwargs = {name: _inner(value) for name, value in kwargs.items()}

        def call() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return func(*inner_args, **inner_kwargs)

        if facts.written:  # in place, or into `out=`: the caller gets its own tensors back
            own = [args[i] if i < len(args) else kwargs[name] for i, name in facts.written]
            _done(call, tuple(tensor.inner for tensor in own))
            return own[0] if len(own) == 1 else tuple(own)
        out = call() if facts.is_free else _done(call)
        # In inference mode, a view of a normal tensor is not an inference tensor.
        outside = func.is_view and isinstance(args[0], Tensor) and not args[0].is_inference()
        with torch.inference_mode(False) if outside else contextlib.nullcontext():
            return _outer(out) if on_device else out


class _Facts(NamedTuple):
    """Properties that are the same in all calls of an operation."""

    is_composite: bool  # consists of other operations
    is_free: bool  # launches no kernel
    # Position and name of each argument that is written to and returned.
    written: tuple[tuple[int, str], ...]


@functools.cache
def _facts(func: Any) -> _Facts:
    packet, arguments, returns = func.overloadpacket, func._schema.arguments, func._schema.returns
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    is_written = returns and all(one.alias_info and one.alias_info.is_write for one in returns)
    written = [
        (i, a.name)
        for i, a in enumerate(arguments)
        if is_written and a.alias_info and a.alias_info.is_write
    ]
    return _Facts(
        is_composite and packet is not aten.linear, func.is_view or packet in _FREE, tuple(written)
    )


# These two functions only handle what operations take and return: tensors and lists of tensors. The
# general pytree functions of torch took half of the time of the tests on this device.
def _inner(value: Any) -> Any:
    """Replace simulated tensors in an argument by the tensors of the host inside them."""
    if isinstance(value, CudaTensor):
        return value.inner
    return type(value)(map(_inner, value)) if type(value) in (list, tuple) else value


def _outer(value: Any) -> Any:
    """Wrap the tensors of an operation's output, so that they are on the device."""
    if isinstance(value, Tensor):
        return CudaTensor(value)
    return type(value)(map(_outer, value)) if type(value) in (list, tuple) else value


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse tensors of the host, and count synchronizations."""
    packet = func.overloadpacket
    if packet in _WAITS:
        COUNTS.wait(packet.__name__)
    for position, value in enumerate((*args, *kwargs.values())):
        is_index = packet in _INDEXED and position == 1
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            is_foreign = not isinstance(tensor, CudaTensor)
            if is_index and (
                tensor.dtype in (torch.bool, torch.uint8) or (is_foreign and tensor.dim())
            ):
                COUNTS.wait(
                    "a mask as index" if tensor.dtype == torch.bool else "an index from the host"
                )
            elif is_foreign and _graph() is not None:
                _refuse_in_graph("a tensor of the host")
            elif is_foreign and not is_index and (tensor.dim() or packet in _STRICT):
                raise RuntimeError(
                    f"expected all tensors to be on cuda:0, but {func} got one on {tensor.device}"
                )


def _copy(packet: Any, args: Any, kwargs: Any) -> Any:
    """Copy between host and device, late if CUDA allows it."""
    # The source is on the device. From the host, `_to_copy` becomes `empty` and `copy_`.
    if packet is aten._to_copy:
        is_inside = torch.device(kwargs.get("device") or DEVICE).type in _KINDS
        COUNTS.launch("_to_copy" if is_inside else "copy to the host")
        if not is_inside:
            COUNTS.wait("copy to the host")
        copied = _done(lambda: args[0].inner.to(kwargs.get("dtype") or args[0].dtype, copy=True))
        return CudaTensor(copied) if is_inside else copied
    into, source, late = (
        args[0],
        args[1],
        args[2] if len(args) > 2 else kwargs.get("non_blocking", False),
    )
    host = [side for side in (into, source) if not isinstance(side, CudaTensor)]
    if host:
        _refuse_in_graph("a copy between host and device")
    to, of = (side.inner if isinstance(side, CudaTensor) else side for side in (into, source))
    COUNTS.launch(
        "copy_" if not host else "copy to the host" if host[0] is into else "copy to the device"
    )
    pinned = [(a, base) for a, b, base in _pinned if late and host and a <= host[0].data_ptr() < b]
    if pinned and current_stream() is not _default:
        # Only keep the pinned allocation alive, not the source tensor. A caller that frees the
        # source's memory too early must see the race.
        if host[0] is source:
            start, base = of.data_ptr() - pinned[0][0], pinned[0][1]
            of = base.view(torch.uint8)[start : start + of.nbytes].view(of.dtype).view(of.shape)
        to.fill_(1)
        stream = current_stream()
        stream.queue.append(lambda: to.copy_(of))
        # Counted separately from `n_done`, which another thread may be changing.
        stream.n_queued += 1
        return into
    if host and not late and host[0].numel():
        COUNTS.wait("copy to the host" if host[0] is into else "blocking copy to the device")
    _done(lambda: to.copy_(of), (to,))
    return into


class Stream:
    """A queue of late copies. The default stream executes everything immediately."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device, self.n_done, self.n_queued = DEVICE, 0, 0
        self.queue: list[Callable[[], object]] = []

    def run(self, upto: float = float("inf")) -> None:
        """Execute the queued copies, up to a count of executed copies."""
        while self.queue and self.n_done < upto:
            self.queue.pop(0)()
            self.n_done += 1

    def wait_stream(self, other: "Stream") -> None:
        other.run()

    def wait_event(self, event: "Event") -> None:
        event.stream.run(event.upto)

    def synchronize(self) -> None:
        COUNTS.wait("stream")
        self.run()


class Event:
    """Completed when the copies that were queued before it are completed."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.record()

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.upto = self.stream.n_queued

    def query(self) -> bool:
        return self.stream.n_done >= self.upto

    def elapsed_time(self, other: "Event") -> float:
        return 0.01

    def synchronize(self) -> None:
        COUNTS.wait("event")
        self.stream.run(self.upto)


_default = Stream()


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of this thread."""
    stream: Stream = getattr(_local, "stream", _default)
    return stream


@contextlib.contextmanager
def _stream_context(stream: Stream) -> Iterator[None]:
    before, _local.stream = current_stream(), stream
    yield
    _local.stream = before


class _Whole(torch.autograd.Function):
    """An operation that is one kernel on CUDA and several elsewhere.

    Its gradient counts as two kernels.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, *given: Any) -> Any:
        with torch.enable_grad():
            ctx.inner = [x.inner.detach().requires_grad_() for x in given]
            ctx.out = call(*ctx.inner)
        return CudaTensor(ctx.out.detach())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        COUNTS.launch("gradient", 2)
        return None, *(CudaTensor(x) for x in torch.autograd.grad(ctx.out, ctx.inner, grad.inner))


def _whole(call: Any, *given: Any) -> Any:
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return (
        _Whole.apply(call, *given)
        if is_trained
        else CudaTensor(_done(lambda: call(*(x.inner for x in given))))
    )


_attend, _empty, _rms_norm, _Generator = (
    F.scaled_dot_product_attention,
    torch.empty,
    F.rms_norm,
    torch.Generator,
)


def attend(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Count the kernel that PyTorch selects on CUDA, and the launches for a boolean mask."""
    if not isinstance(q, CudaTensor):
        return _attend(q, k, v, attn_mask, dropout_p, is_causal, **options)
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    if q.dtype != k.dtype or not (attn_mask is None or isinstance(attn_mask, CudaTensor)):
        raise RuntimeError(
            f"attention got {q.dtype}, {k.dtype} and a mask {type(attn_mask).__name__}"
        )
    is_grouped = options.get("enable_gqa") and q.shape[1] != k.shape[1]
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    is_flash = attn_mask is None and is_half and q.shape[-1] <= 256
    kernel = "flash" if is_flash else "math" if is_grouped else "efficient"
    # A boolean mask is converted to numbers. A mask's last dimension is padded to a multiple of 8.
    of_mask = (
        0 if attn_mask is None else 3 * (attn_mask.dtype == torch.bool) + 2 * (k.shape[2] % 8 != 0)
    )
    COUNTS.kernels[f"{kernel}{' with a mask' if of_mask else ''}"] += 1
    COUNTS.launch(f"attention ({kernel})", of_mask + (12 if kernel == "math" else 1))
    mask = None if attn_mask is None else attn_mask.inner
    return _whole(lambda *inner: _attend(*inner, mask, is_causal=is_causal, **options), q, k, v)


def attend_ragged(
    q: Any, k: Any, v: Any, stops: Any, slots: Any, longest: int, most_seen: int, *,
    window_size: Any, enable_gqa: bool, seqused_k: Any,
) -> Any:  # fmt: skip
    """Count FlashAttention over rows of different lengths as one kernel, and compute it by row."""
    for x in (stops, slots, seqused_k):
        assert x.dtype == torch.int32
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert enable_gqa == (q.shape[1] != k.shape[1])
    COUNTS.kernels["flash for rows of any lengths"] += 1
    COUNTS.launch("attention (flash for rows of any lengths)")
    out = []
    tables = stops.inner[:-1], stops.inner[1:], slots.inner[:-1], seqused_k.inner
    for first, stop, slot, n_seen in torch.stack(tables, dim=1).tolist():
        assert stop - first <= longest
        assert n_seen <= most_seen
        distance = torch.arange(n_seen - (stop - first), n_seen)[:, None] - torch.arange(n_seen)
        mask = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        own = (q.inner[first:stop], k.inner[slot : slot + n_seen], v.inner[slot : slot + n_seen])
        out.append(
            _attend(*(x.transpose(0, 1)[None] for x in own), mask, enable_gqa=enable_gqa)[
                0
            ].transpose(0, 1)
        )
    return CudaTensor(torch.cat(out))


def rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """Count RMSNorm as one kernel."""
    if not isinstance(x, CudaTensor):
        return _rms_norm(x, shape, weight, eps)
    COUNTS.launch("rms_norm")
    given = [
        one.float() if torch.is_autocast_enabled("cuda") else one
        for one in (x, weight)
        if one is not None
    ]
    return _whole(lambda inner, own=None: _rms_norm(inner, shape, own, eps), *given)


def _empty_of(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
    made = _empty(*args, **kwargs)
    if pin_memory:
        _pinned.append((made.data_ptr(), made.data_ptr() + max(1, made.nbytes), made))
    return made


class _HostGenerator(_Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator.__new__(cls, "cpu")


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **options: Any) -> None:
        super().__init__("nowhere" if device_type == "cuda" else device_type, *args, **options)


def _made_by(real: Any) -> Any:
    def made(*args: Any, dtype: Any = None, **_: Any) -> Any:
        COUNTS.launch(real.__name__)
        return CudaTensor(_done(lambda: real(*args, dtype=dtype)))

    return made


def _autocast(name: str) -> Any:
    def cast(*args: Any) -> Any:
        dtype, call = (
            torch.get_autocast_dtype("cuda"),
            F.linear if name == "linear" else getattr(torch, name),
        )
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(key):
            return call(
                *(
                    x.to(dtype) if isinstance(x, CudaTensor) and x.dtype == torch.float32 else x
                    for x in args
                )
            )

    return cast


_libraries: list[Any] = []


def fits() -> bool:
    """Return whether torch is a CPU build of the supported version.

    A CUDA build is refused, because :func:`register` replaces CUDA for the rest of the process.
    """
    return torch.__version__.startswith(TORCH) and torch.version.cuda is None


def register() -> None:
    """Register the operations with torch, once per process and before its first backward pass."""
    if _libraries or not fits():
        return
    # A CPU build has no CUDA device guard. The guard of the Python backend takes its slot in c10's
    # table.
    _setup_privateuseone_for_python_backend("nowhere", _Module())
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[20]
    library, every = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    strided = torch.empty_strided
    for key in ("CUDA", "PrivateUse1"):
        library.impl(
            "empty.memory_format",
            lambda size, *_, dtype=None, **__: CudaTensor(_empty(size, dtype=dtype)),
            key,
        )
        library.impl(
            "empty_strided",
            lambda *args, dtype=None, **_: CudaTensor(strided(*args[:2], dtype=dtype)),
            key,
        )
        # torch resizes the outputs of these factories, so they get their own implementations.
        for name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m"):
            library.impl(name, _made_by(getattr(torch, name.split(".")[0])), key)
    # torch.tensor(..., device="cuda") copies below the level of Python dispatch.
    library.impl("copy_", lambda *args: _copy(aten.copy_, args, {}), "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ("mm", "bmm", "matmul", "linear", "addmm", "baddbmm"):
        library.impl(name, _autocast(name), "AutocastPrivateUse1")
    _libraries.extend((library, every))


_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "_lazy_init": lambda: None,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: "a device that is not there",
    "get_device_capability": lambda *_: (9, 0),
    "current_stream": current_stream,
    "mem_get_info": lambda *_: (139 << 30, 140 << 30),
    "is_bf16_supported": lambda *_, **__: True,
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
    "graph": capture,
    "stream": _stream_context,
    "synchronize": lambda *_: COUNTS.wait("synchronize"),
}


@contextlib.contextmanager
def simulated_device() -> Iterator[Counts]:
    """Install the simulated device. Skips the test if this torch is not supported."""
    if not fits():
        pytest.skip(
            f"the simulated device is written for torch {TORCH}x on CPUs, "
            f"this is {torch.__version__}"
        )
    register()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _CUDA.items():
            patch.setattr(torch.cuda, name, value)
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            real = getattr(torch, name)
            patch.setattr(
                torch,
                name,
                lambda *kind, real=real: real(
                    *("nowhere" if one == "cuda" else one for one in kind)
                ),
            )
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", _clear_workspaces, raising=False)
        patch.setattr(F, "scaled_dot_product_attention", attend)
        patch.setattr(F, "rms_norm", rms_norm)
        patch.setattr(varlen, "varlen_attn", attend_ragged)
        patch.setattr(torch, "empty", _empty_of)
        patch.setattr(Tensor, "pin_memory", lambda self, *_: self)
        patch.setattr(torch, "Generator", _HostGenerator)
        patch.setattr(torch, "autocast", _Autocast)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        # Otherwise `Module.to` assigns to the `.data` of its parameters.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        COUNTS.reset()
        try:
            yield COUNTS
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
            _pinned.clear()
