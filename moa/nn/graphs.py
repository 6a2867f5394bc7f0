"""CUDA graphs: record the kernels of a call once, then replay all of them with one launch."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
_n_recorded = 0


def n_recorded() -> int:
    """Return how many graphs this process has recorded.

    Recording a graph takes far longer than replaying it. If the number changes during a call, the
    call recorded a graph, and its time is not representative.
    """
    return _n_recorded


def recorded(
    call: Callable[[], Result], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run a call once, then record its kernels as a CUDA graph.

    The tensors that the call reads and writes must stay at the same addresses. The call may depend
    on the shapes of these tensors, but on no other values on the host, because a replay does not
    run Python code.

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
    # cuBLAS keeps a workspace per stream, and the graph must have a workspace of its own. So clear
    # the workspaces before recording: torch.compile frees an older workspace when it records its
    # own graph, and this graph would still use it. Clear them again after recording, because later
    # calls would otherwise share the workspace of this graph.
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, stream=side):
        result = call()
    torch._C._cuda_clearCublasWorkspaces()
    return graph, result
