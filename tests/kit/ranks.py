"""Runs a function in several single-threaded processes that find each other like torchrun's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .apart import Apart
from .object_stores import free_port


def run_ranks(
    n_ranks: int, function: Callable[..., Any], *args: Any, folder: Path, n_nodes: int = 1
) -> None:
    """Call a module's function in each process. The rank is in the environment.

    Args:
        folder: folder for the logs of the processes.
        n_nodes: number of machines that the processes appear to run on.
    """
    per_node = n_ranks // n_nodes
    shared = {
        "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": per_node, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    running = []
    for rank in range(n_ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank % per_node, "GROUP_RANK": rank // per_node}
        environment = {name: str(value) for name, value in (shared | own).items()}
        log = folder / f"rank-{rank}.log"
        running.append(Apart(function, *args, log=log, environment=environment))
    failures = [process.wait(1200) for process in running]
    assert not any(failures), "\n".join(failures)
