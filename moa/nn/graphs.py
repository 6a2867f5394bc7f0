"""CUDA graphs: kernels that were launched one by one once, and that one launch repeats."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
_n_recorded = 0


def n_recorded() -> int:
    """Count the recordings of this process; a call that makes one takes far longer than others."""
    return _n_recorded


def recorded(
    call: Callable[[], Result], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Record the kernels of a call, after running it once; its tensors hold what it gives after each replay.

    The call may depend on the host in nothing but shapes: what it reads stays where it is, and so does what it writes.
    """
    global _n_recorded
    _n_recorded += 1
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(device)
    here = torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        call()  # libraries begin in a first run
    here.wait_stream(side)
    # cuBLAS keeps scratch memory for each stream. What is taken while recording is the graph's own.
    # What was there
    # before would be freed under the graph when torch.compile records one; what stayed would be
    # shared with others.
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, stream=side):
        result = call()
    torch._C._cuda_clearCublasWorkspaces()
    return graph, result
