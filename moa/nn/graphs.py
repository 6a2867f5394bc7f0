"""CUDA graphs: record the kernels of a call once, then replay all of them with one launch."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
_n_recorded = 0


def n_recorded() -> int:
    """Return how many graphs this process has recorded.

    Callers compare the number to find calls that recorded a graph: these take far longer than
    others.
    """
    return _n_recorded


def recorded(
    call: Callable[[], Result], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run a call once, then record its kernels as a CUDA graph.

    The tensors that the call reads and writes must stay at the same addresses. Apart from the
    shapes of these tensors, the call must not depend on values on the host.

    Returns:
        The graph, and the call's result. Each replay writes its result into the same tensors.
    """
    global _n_recorded
    _n_recorded += 1
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(device)
    here = torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        # Warm up: some libraries initialize themselves in the first run.
        call()
    here.wait_stream(side)
    # cuBLAS keeps a workspace per stream. A workspace that is allocated during recording belongs to
    # the graph. Clear the workspaces before recording, because torch.compile frees an older
    # workspace when it records its own graph, and this graph would still use it. Clear them after
    # recording, because later calls would otherwise share this graph's workspace.
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, stream=side):
        result = call()
    torch._C._cuda_clearCublasWorkspaces()
    return graph, result
