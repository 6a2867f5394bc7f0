"""Runs a function in several processes that find each other as torchrun's do, each with one thread."""

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
    """Call a function of a module in each process; its rank is in the environment.

    Args:
        folder: for the call, written there once.
        n_nodes: machines that the processes are told to be on.
    """
    call = folder / "call.pickle"
    call.write_bytes(pickle.dumps((function, args)))
    per_node = n_ranks // n_nodes
    shared = {
        "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": per_node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
        "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": 1,
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
