"""Run workers on the machines of a Ray cluster that share a disk or a bucket, or on this machine.

Each worker is a task of Ray, which waits until the cluster has room for it: so machines may join and leave while the
extraction runs. A worker that is lost is started anew, unless several in a row end without any new commit.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pickle
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..errors import OptionInvalid, WorkerError
from ..machine import usable_cores
from ..storage.write.store import StoreWriter
from ..text import first_line
from .config import ScaleSettings, core_share, resolve_encode_threads
from .forwards.parts import Timings
from .workers import PartProgress, WorkOrder, is_done, is_of_device, portable, run_worker

_MAX_LOST = 5
"""Workers in a row that may end before anything is committed; machines are seldom lost so often."""
_LOOK_EVERY_S = 0.5
_END_S = 10.0
"""Seconds that workers have to report what they spent once everything is committed."""
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
    """Run workers with Ray until all is done.

    Args:
        order: what each worker is told; its threads are left to the machine that it finds itself on.
        encode_threads: threads that encode in each worker; None for its share of its machine's cores.

    Returns:
        What the workers spent, together; why each worker that was lost has ended.

    Raises:
        WorkerError: several workers in a row ended before anything was committed.
        Exception: what a worker raised; the others are ended.
    """
    gpus = 0.0 if order.device == "cpu" else scale.gpus_per_worker or 1.0
    needs = {"CPU": float(scale.cpus_per_worker), "GPU": gpus}
    try:
        with _connected(scale, needs["CPU"]):
            return _run_tasks(order, store, needs, encode_threads, scale.n_workers, progress)
    finally:
        until_s = time.monotonic() + _LEAVE_S
        while any(map(store.is_claimed, store.pending_parts())) and time.monotonic() < until_s:
            time.sleep(0.05)
        store.remove_attempt(f"{store.attempt}-*")


def _run_tasks(
    order: WorkOrder,
    store: StoreWriter,
    needs: Mapping[str, float],
    encode_threads: int | None,
    n_workers: int,
    progress: PartProgress,
) -> tuple[Timings, list[str]]:
    import ray

    task = ray.remote(ray_task).options(
        num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_retries=0, scheduling_strategy="SPREAD"
    )

    def submit(index: int) -> Any:
        attempt = f"{store.attempt}-{index}-{secrets.token_hex(2)}"
        own = replace(order, index=index, n_workers=n_workers, attempt=attempt)
        return task.remote(own, needs, encode_threads)

    running = {submit(index): index for index in range(n_workers)}
    timings, lost, n_in_a_row, n_committed, done_s = Timings(), list[str](), 0, -1, math.inf
    while running and time.monotonic() < done_s + _END_S:
        progress.tell(workers=f", up to {n_workers} workers of Ray")
        # Asleep in Python and not in Ray, which would forget which signal has come.
        time.sleep(_LOOK_EVERY_S)
        ended, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
        for reference in ended:
            index = running.pop(reference)
            try:
                found = pickle.loads(ray.get(reference))
            except ray.exceptions.RayError as error:  # what became of the worker, not what it raised
                lost.append(f"{_cause(error)}; started anew")
                before, n_committed = n_committed, len(store.committed_parts())
                n_in_a_row = 1 if n_committed > before else n_in_a_row + 1
                if n_in_a_row >= _MAX_LOST and not is_done(store):
                    raise WorkerError(
                        f"{n_in_a_row} of Ray's workers in a row have ended before anything was committed, the last "
                        f"one by {_cause(error)}. What was committed is kept: run the same command again to continue, "
                        "with fewer workers on a machine if memory ran out."
                    ) from error
                store.remove_attempt(f"{store.attempt}-{index}-*")
                running[submit(index)] = index
                continue
            if isinstance(found, Exception):
                raise found
            timings += found
        if done_s == math.inf and is_done(store):
            done_s = time.monotonic()  # tasks for which there was no room are left where they wait
    return timings, lost


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
        "num_cpus": max(usable_cores(), math.ceil(scale.n_workers * n_cpus)),
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


def _cause(error: BaseException) -> str:
    """Return the last line of what Ray reports, which names the error in the worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
