"""Runs a function in several single-threaded processes that find each other like torchrun's."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .object_stores import free_port

_MAIN = "import pickle, sys; f, args = pickle.load(open(sys.argv[1], 'rb')); f(*args)"


def run_ranks(
    n_ranks: int, function: Callable[..., Any], *args: Any, folder: Path, n_nodes: int = 1
) -> None:
    """Call a module's function in each process. The rank is in the environment.

    Args:
        folder: folder for the file with the pickled call.
        n_nodes: number of machines that the processes appear to run on.
    """
    call = folder / "call.pickle"
    call.write_bytes(pickle.dumps((function, args)))
    per_node = n_ranks // n_nodes
    shared = {
        "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": per_node, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    running = []
    for rank in range(n_ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank % per_node, "GROUP_RANK": rank // per_node}
        environment = os.environ | {name: str(value) for name, value in (shared | own).items()}
        command = [sys.executable, "-c", _MAIN, str(call)]
        running.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        )
    ended = [process.communicate(timeout=1200)[1] for process in running]
    assert not any(process.returncode for process in running), "\n".join(ended)
