"""CUDA graphs: record the kernels of a function call once, then replay them with one launch."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
_n_recorded = 0


def n_recorded() -> int:
    """Return how many graphs this process has recorded.

    Recording a graph takes far longer than replaying it. If the number changes while a function
    runs, the function has recorded a graph, so its measured time is not representative.
    """
    return _n_recorded


def recorded(
    call: Callable[[], Result], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run a function once, then run it again and record its kernels as a CUDA graph.

    The tensors that ``call`` reads and writes must stay at the same addresses. A replay does not
    run Python code. So if a Python value that ``call`` reads changes later, replays still use the
    recorded value.

    Returns:
        The graph, and the result of ``call``. Each replay overwrites the tensors of this result.
    """
    global _n_recorded
    _n_recorded += 1
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(device)
    here = torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        # Warm up: some libraries initialize themselves in the first run, which cannot be recorded.
        call()
    here.wait_stream(side)
    # cuBLAS keeps one workspace per stream. The graph must not share its workspace with other code.
    # Clear the workspaces before recording, so that the graph gets a new workspace. torch.compile
    # frees older workspaces when it records a graph, and this graph would then use freed memory.
    # Clear the workspaces again after recording, so that later calls do not use the new workspace.
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, stream=side):
        result = call()
    torch._C._cuda_clearCublasWorkspaces()
    return graph, result
