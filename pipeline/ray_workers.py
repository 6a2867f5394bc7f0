"""Run workers on the machines of a Ray cluster that share a disk or a bucket, or on this machine.

Each worker is a task of Ray, which waits until the cluster has room for it: so machines may join and leave while the
extraction runs. A worker that is lost is started anew, unless several in a row end without any new commit.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..errors import OptionInvalid
from ..machine import usable_cores
from ..storage.write.store import StoreWriter
from ..text import first_line
from .config import ScaleSettings, core_share, resolve_encode_threads
from .report import PartProgress, Timings
from .workers import WorkOrder, direct, is_of_device, portable, run_worker

_LEAVE_S = 1.5
"""Seconds for workers to end after the run; a command that a signal ends has three in all."""
_DEVICE_FAILED = 70
_OBJECT_STORE_BYTES = 128 << 20
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",  # as Ray does by itself for one that it starts, but then with a warning
}


def require_ray() -> None:
    """Refuse the engine where Ray is not installed; raises OptionInvalid."""
    if importlib.util.find_spec("ray") is None:
        raise OptionInvalid("--engine ray needs Ray, which is not installed: pip install 'moa-data[ray]'.")


def run_on_ray(
    order: WorkOrder, store: StoreWriter, scale: ScaleSettings, encode_threads: int | None, progress: PartProgress
) -> tuple[Timings, list[str]]:
    """Run workers with Ray until all is done; see :func:`direct`.

    Args:
        order: what each worker is told; its threads are left to the machine that it finds itself on.
        encode_threads: threads that encode in each worker; None for its share of its machine's cores.
    """
    gpus = 0.0 if order.device == "cpu" else scale.gpus_per_worker or 1.0
    needs = {"CPU": float(scale.cpus_per_worker), "GPU": gpus}
    with _connected(scale, needs["CPU"]):
        return direct(RayCrew(order, store, needs, encode_threads, scale.workers), store, progress)


class RayCrew:
    """Workers that are tasks of Ray."""

    restarts = True
    look_every_s = 0.5

    def __init__(
        self,
        order: WorkOrder,
        store: StoreWriter,
        needs: Mapping[str, float],
        encode_threads: int | None,
        n_workers: int,
    ) -> None:
        import ray

        self._ray, self._order, self._store = ray, order, store
        self._needs, self._encode_threads, self.n_workers = needs, encode_threads, n_workers
        self._task = ray.remote(ray_task).options(
            num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_retries=0, scheduling_strategy="SPREAD"
        )
        self._running: dict[Any, int] = {}

    @property
    def n_running(self) -> int:
        """Tasks that have not ended."""
        return len(self._running)

    def start(self, index: int) -> None:
        """Submit a task."""
        order = self._order.numbered(index, self.n_workers)
        self._running[self._task.remote(order, self._needs, self._encode_threads)] = index

    def ended(self) -> list[tuple[int, Timings | Exception | str]]:
        """Return the tasks that have ended, and what became of each."""
        found: list[tuple[int, Timings | Exception | str]] = []
        for reference in self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)[0]:
            try:
                outcome = pickle.loads(self._ray.get(reference))
            except self._ray.exceptions.RayError as error:  # what became of the worker, not what it raised
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                outcome = f"{lines[-1] if lines else type(error).__name__}; started anew"
            found.append((self._running.pop(reference), outcome))
        return found

    def stop(self) -> None:
        """Disconnect from Ray, which ends its tasks, and wait until they have let go of their parts."""
        self._ray.shutdown()
        until_s = time.monotonic() + _LEAVE_S
        while any(map(self._store.is_claimed, self._store.pending_parts())) and time.monotonic() < until_s:
            time.sleep(0.05)


def ray_task(order: WorkOrder, needs: Mapping[str, float], encode_threads: int | None) -> bytes:
    """Run a worker on its share of the machine; returns what it spent or raised, pickled."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    resources: Mapping[str, float] = next((item["Resources"] for item in ray.nodes() if item["NodeID"] == node), {})
    n_here = workers_that_fit(resources, needs)
    own = replace(order, n_threads=core_share(n_here), n_encode_threads=resolve_encode_threads(encode_threads, n_here))
    found: Timings | Exception
    try:
        found = run_worker(own)
    except Exception as error:  # noqa: BLE001  (the driver raises it)
        if is_of_device(error):
            os._exit(_DEVICE_FAILED)  # as a kill would: the worker is started anew, in another process
        found = portable(error)
    return pickle.dumps(found)


def workers_that_fit(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many workers with these needs a machine can hold, which share its cores; at least one."""
    return max(1, int(min(resources.get(name, 0.0) // need for name, need in needs.items() if need)))


@contextmanager
def _connected(scale: ScaleSettings, n_cpus: float) -> Iterator[None]:
    """Connect this process to Ray, or start a Ray of its own; quietly, and leaving signals to the command."""
    address = scale.address or os.environ.get("RAY_ADDRESS")
    for name, value in _QUIET.items():
        if name != "RAY_AUTH_MODE" or not address:
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        raise OptionInvalid("This process is connected to Ray already. Call ray.shutdown() first.")
    own: dict[str, Any] = {
        "include_dashboard": False,
        "num_cpus": max(usable_cores(), math.ceil(scale.workers * n_cpus)),
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            configure_logging=False,
            namespace="moa-data",
            **({} if address else own),
        )
    except ConnectionError as error:
        raise OptionInvalid(
            f"No Ray cluster is found at {address}: {first_line(error)}. Start one with `ray start --head`, or leave "
            "out --address."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()
