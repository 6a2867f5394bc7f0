"""Extract the pending parts of a store, in this process or in several.

The commits in the store tell which parts are done, so workers do not need to know each other: each takes a part that
has no commit and that no other worker is writing, runs the target over it and commits it. Of two that wrote the same
part the first commit stays, and what a killed worker had in flight is taken by the others. Commands on other machines
that write to the same store are workers like any other. Workers are processes of this machine, or tasks on the machines
of a Ray cluster that share a disk or a bucket.
"""

import contextlib
import json
import math
import os
import pickle
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import MoaDataError, OptionInvalid, WorkerError
from ..machine import fix_sums, usable_cores
from ..moa.targets.live import Target, resolve_model_folder
from ..storage.plan import map_texts
from ..storage.schema import TEXTS_NAME
from ..storage.write.store import StoreWriter
from ..text import first_line
from .config import ScaleSettings, core_share, parse_fields, resolve_encode_threads
from .forwards.parts import Forwards, run_parts, save_bundle
from .plan import check_identities, weight_identities
from .report import PartProgress, Timings
from .sequences import Sequences

_LOOK_EVERY_S, _DIRECT_EVERY_S, _RAY_LOOK_EVERY_S, _SIGNAL_EVERY_S = 1.0, 0.05, 0.5, 1.0
_PATIENCE_S = 600.0  # seconds without any commit after which parts that other workers have begun are done here too
_LEAVE_S, _RAY_LEAVE_S = 2.0, 1.5
"""Seconds that workers have to discard their parts when they are told to end; an interrupted command has three."""
_MAX_LOST = 5  # workers in a row that may be lost before anything is committed; machines are seldom lost so often
_END_S, _RAY_END_S = 60.0, 10.0
"""Seconds that workers have to report what they spent once everything is committed; some of Ray may never start."""
_DEVICE_ERRORS = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))
"""What an accelerator that failed raises (torch >= 2.8): its process cannot continue, but others can."""
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from moa_data.pipeline.workers import main
sys.exit(main(int(sys.argv[1])))
"""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",  # as Ray does by itself for one that it starts, but then with a warning
}

Outcome = Timings | Exception | str  # what a worker spent, what it raised, or how it was lost
Watch = Callable[[], Outcome | None]  # gives what became of a worker, once; None while it runs, or waits for room


@dataclass(frozen=True)
class WorkOrder:
    """What a worker is told; what shapes the data is in the store itself, so that workers cannot differ in it."""

    store: str
    texts: str | None  # Arrow file of its sequences; None for the store's own
    model: str  # the target as this worker's machine sees it: a folder, or a Hub id and
    revision: str | None  # a commit
    device: str
    n_threads: int | None  # threads that torch may use on the CPU; None for its own choice
    n_encode_threads: int
    attempt: str  # name of its unfinished files
    index: int = 0  # number of this worker among ``n_workers``, which decides the parts it begins with
    n_workers: int = 1

    def numbered(self, index: int, n_workers: int) -> "WorkOrder":
        """Return the order for one of several workers; ``attempt`` is then the command's own."""
        attempt = f"{self.attempt}-{index}-{secrets.token_hex(2)}"
        return replace(self, attempt=attempt, index=index, n_workers=n_workers)


def is_done(store: StoreWriter) -> bool:
    """Whether every part and the target bundle have their commits."""
    return store.has_target and not store.pending_parts()


def pending_in_turn(store: StoreWriter, index: int = 0, n_workers: int = 1) -> Iterator[int | None]:
    """Yield parts that have no commit when their turn comes; None while others are writing all that are left.

    Each of several workers begins with its own share of the parts, and then takes those of the others.
    """
    parts = store.pending_parts()
    own = parts[index::n_workers]
    others = sorted(set(parts) - set(own))
    if store.joined:
        # Another order than other workers have: a bucket has no locks that tell what they are writing.
        for some in (own, others):
            random.Random(store.attempt).shuffle(some)
    left, moved_s = own + others, time.monotonic()
    while left:
        claimed = []
        for part in left:
            if not store.is_pending(part):
                continue
            if store.is_claimed(part):
                claimed.append(part)
            else:
                yield part
        if len(claimed) < len(left):
            moved_s = time.monotonic()
        elif time.monotonic() > moved_s + _PATIENCE_S:
            yield claimed.pop(0)
        if left := claimed:
            yield None
            time.sleep(_LOOK_EVERY_S)


def work_until_done(
    store: StoreWriter,
    forwards: Forwards,
    folder: Path,
    timings: Timings,
    tell: Callable[[Timings], None] = lambda _: None,
    index: int = 0,
    n_workers: int = 1,
) -> None:
    """Write and commit what has no commit: the bundle of the target in ``folder``, and parts until none is left."""
    n_layers = int(store.manifest.extraction["target_layers"])
    # The first worker writes the bundle; the last one to end finds out whether it was killed.
    if index == 0 and not store.has_target:
        save_bundle(store, forwards.target, folder, n_layers)
    run_parts(forwards, store, pending_in_turn(store, index, n_workers), timings, tell)
    if not store.has_target:
        save_bundle(store, forwards.target, folder, n_layers)


def run_worker(order: WorkOrder) -> Timings:
    """Join a store, load its target, and work until all is done."""
    fix_sums()
    if order.n_threads:
        torch.set_num_threads(order.n_threads)
    timings = Timings()
    with StoreWriter.join(order.store, order.attempt) as store:
        if is_done(store):
            return timings
        folder = resolve_model_folder(order.model, revision=order.revision)
        # Another machine's folder of the same name may hold another target.
        check_identities(store.path, store.manifest.identities, weight_identities(folder))
        spec, extraction = parse_fields(field.name for field in store.manifest.fields), store.manifest.extraction
        target = Target.load(str(folder), getattr(torch, str(extraction["compute_dtype"])), order.device)
        sequences = Sequences.from_arrow(map_texts(Path(order.texts) if order.texts else store.path / TEXTS_NAME))
        dtype, batch_tokens = getattr(torch, str(extraction["dtype"])), int(extraction["batch_tokens"])
        forwards = Forwards(
            target, spec, store.codec, dtype, batch_tokens, spec.kv, sequences.text, order.n_encode_threads
        )
        work_until_done(store, forwards, folder, timings, index=order.index, n_workers=order.n_workers)
    return timings


def direct(
    start: Callable[[WorkOrder], Watch],
    orders: Sequence[WorkOrder],
    store: StoreWriter,
    progress: PartProgress,
    restarts: bool,  # whether a worker that is lost is started anew; else the others do its parts
) -> tuple[Timings, list[str]]:
    """Run workers until all is done.

    Returns:
        What the workers spent, together; how each worker that was lost has ended.

    Raises:
        WorkerError: none is left and there is work to do, or several in a row were lost before anything was committed.
        Exception: what one of them raised; the caller ends the others.
    """
    timings, lost, n_in_a_row, n_committed, done_s = Timings(), list[str](), 0, -1, math.inf
    ends_s = _RAY_END_S if restarts else _END_S
    running = {index: start(order.numbered(index, len(orders))) for index, order in enumerate(orders)}
    # Once all is done, tasks of Ray for which there was no room are left where they wait.
    while running and time.monotonic() < done_s + ends_s and (n_in_a_row < _MAX_LOST or not restarts):
        who = f"{len(orders) - len(lost)} of {len(orders)} workers left" if lost else f"{len(orders)} workers"
        progress.tell(timings, f", up to {len(orders)} workers of Ray" if restarts else f", {who}")
        # Asleep in Python and not in Ray, which would forget which signal has come.
        time.sleep(_RAY_LOOK_EVERY_S if restarts else _DIRECT_EVERY_S)
        for index, outcome_of in list(running.items()):
            outcome = outcome_of()
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is not None:
                del running[index]
            if isinstance(outcome, Timings):
                timings += outcome
            elif outcome is not None:
                lost.append(outcome)
                store.remove_attempt(f"{store.attempt}-{index}-*")
                before, n_committed = n_committed, len(store.committed_parts())
                n_in_a_row = 1 if n_committed > before else n_in_a_row + 1
                if restarts:
                    running[index] = start(orders[index].numbered(index, len(orders)))
        if done_s == math.inf and is_done(store):
            done_s = time.monotonic()
    if not is_done(store):
        raise WorkerError(
            f"{len(lost)} workers ended with work left, the last one by {''.join(lost[-1:])}. What was committed "
            "is kept: run the same command again to continue, with fewer --workers if memory ran out."
        )
    return timings, lost


def run_processes(orders: Sequence[WorkOrder], store: StoreWriter, progress: PartProgress) -> tuple[Timings, list[str]]:
    """Run a worker process of this machine for each order until all is done; see :func:`direct`."""
    workers = list[ProcessWorker]()

    def start(order: WorkOrder) -> Watch:
        workers.append(ProcessWorker(order))
        return workers[-1].outcome

    try:
        return direct(start, orders, store, progress, restarts=False)
    finally:
        _stop(workers)
        store.remove_attempt(f"{store.attempt}-*")


class ProcessWorker:
    """A worker in a process of this machine; its standard input is open as long as this process lives."""

    def __init__(self, order: WorkOrder) -> None:
        self._log, self._result = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (closed below)
        self.process = start_process(order, self._log, self._result)

    def outcome(self) -> Outcome | None:
        """Return what became of it, once; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if code == 0:
            self._result.seek(0)
            found: Outcome = pickle.load(self._result)
            return found
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            how += ", which the kernel sends where memory runs out"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").split("\n") if line.strip()]
        return f"{how}: {lines[-1]}" if lines else how

    def close(self) -> None:
        """Kill the process if it is still there, and close its files."""
        self.process.kill()
        self.process.wait()
        for file in (self._log, self._result, self.process.stdin):
            if file is not None:
                file.close()


def _stop(workers: Sequence[ProcessWorker]) -> None:
    """End the workers that are still there, which discard what they have not committed."""
    told_s, until_s = 0.0, time.monotonic() + _LEAVE_S
    try:
        while any(worker.process.poll() is None for worker in workers) and (now_s := time.monotonic()) < until_s:
            if now_s > told_s + _SIGNAL_EVERY_S:  # repeated: an exception that falls into a destructor is dropped
                for worker in workers:
                    worker.process.terminate()
                told_s = now_s
            time.sleep(0.02)
    finally:
        for worker in workers:
            worker.close()


def start_process(order: WorkOrder, log: BinaryIO, result: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a worker process, which writes its pickled result to a file."""
    environment = os.environ | ({"OMP_NUM_THREADS": str(order.n_threads)} if order.n_threads else {})
    arguments = [str(result.fileno()), json.dumps(sys.path)]
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, *arguments],
        stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[result.fileno()], env=environment,
    )  # fmt: skip
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(pickle.dumps(order))
        process.stdin.flush()
    return process


def main(result: int) -> int:
    """Run as a worker process: takes its order from standard input, ends when that is closed; see write_outcome."""
    # Signals of the terminal are for the command, which tells its workers to end.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    order: WorkOrder = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_input, daemon=True).start()
    return write_outcome(result, lambda: run_worker(order))


def write_outcome(result: int, work: Callable[[], Timings]) -> int:
    """Pickle what ``work`` returns or raises to a descriptor; returns the exit code of the process."""
    found: Timings | Exception
    try:
        found = work()
    except KeyboardInterrupt:  # what was not committed has been discarded
        return 128 + signal.SIGTERM
    except _DEVICE_ERRORS:
        raise  # ends this process as a kill would, and others do its parts
    except Exception as error:  # noqa: BLE001  (the command raises it)
        found = portable(error)
    with open(result, "wb", closefd=False) as file:
        pickle.dump(found, file)
    return 0


def _end_with_input() -> None:
    os.read(0, 1)  # returns when the parent has ended, however
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30.0)
    os._exit(1)


def portable(error: Exception) -> Exception:
    """Return the error as it can be sent to another process, with the lines that led to it as a note."""
    sent: Exception = MoaDataError(str(error)) if isinstance(error, MoaDataError) else RuntimeError(repr(error))
    with contextlib.suppress(Exception):  # an error's own constructor may take anything
        copied = pickle.loads(pickle.dumps(error))
        sent = copied if str(copied) == str(error) else sent
    sent.add_note("In a worker:\n" + "".join(traceback.format_exception(error)))
    return sent


def device_orders(order: WorkOrder, device: str, n_workers: int) -> list[WorkOrder]:
    """Return an order for each worker of this machine; on an accelerator (cuda, mps, cuda:1) each has its own."""
    kind = torch.device(device)
    devices = [device] * n_workers
    if kind.type != "cpu":
        n_devices = torch.cuda.device_count() if kind.type == "cuda" and kind.index is None else 1
        if n_workers > n_devices:
            raise OptionInvalid(
                f"There are {n_devices} of {device} on this machine, and each of {n_workers} workers needs one of its "
                "own. Lower --workers, or leave out --device."
            )
        if kind.index is None:
            devices = [f"{kind.type}:{index}" for index in range(n_workers)]
    return [replace(order, device=own) for own in devices]


def run_on_ray(
    order: WorkOrder, store: StoreWriter, scale: ScaleSettings, encode_threads: int | None, progress: PartProgress
) -> tuple[Timings, list[str]]:
    """Run workers with Ray until all is done; see :func:`direct`.

    Each is a task of Ray, which waits until the cluster has room for it: so machines may join and leave meanwhile.
    """
    gpus = 0.0 if order.device == "cpu" else scale.gpus_per_worker or 1.0
    needs = {"CPU": float(scale.cpus_per_worker), "GPU": gpus}
    try:
        with _connected(scale, needs["CPU"]) as ray:
            task = ray.remote(ray_task).options(
                num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_retries=0, scheduling_strategy="SPREAD"
            )

            def start(own: WorkOrder) -> Watch:
                return partial(_task_outcome, ray, task.remote(own, needs, encode_threads))

            return direct(start, [order] * scale.workers, store, progress, restarts=True)
    finally:
        until_s = time.monotonic() + _RAY_LEAVE_S
        while any(map(store.is_claimed, store.pending_parts())) and time.monotonic() < until_s:
            time.sleep(0.05)
        store.remove_attempt(f"{store.attempt}-*")


def _task_outcome(ray: Any, reference: Any) -> Outcome | None:
    if not ray.wait([reference], timeout=0)[0]:
        return None
    try:
        found: Outcome = pickle.loads(ray.get(reference))
        return found
    except ray.exceptions.RayError as error:  # what became of the worker, not what it raised
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{lines[-1] if lines else type(error).__name__}; started anew"


def ray_task(order: WorkOrder, needs: Mapping[str, float], encode_threads: int | None) -> bytes:
    """Run a worker on its share of the machine; returns what it spent or raised, pickled."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    resources: Mapping[str, float] = next((item["Resources"] for item in ray.nodes() if item["NodeID"] == node), {})
    n_here = workers_that_fit(resources, needs)
    own = replace(order, n_threads=core_share(n_here), n_encode_threads=resolve_encode_threads(encode_threads, n_here))
    try:
        return pickle.dumps(run_worker(own))
    except _DEVICE_ERRORS:
        os._exit(70)  # as a kill would: the worker is started anew, in another process
    except Exception as error:  # noqa: BLE001  (the driver raises it)
        return pickle.dumps(portable(error))


def workers_that_fit(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many workers with these needs a machine can hold, which share its cores; at least one."""
    return max(1, int(min(resources.get(name, 0.0) // need for name, need in needs.items() if need)))


@contextmanager
def _connected(scale: ScaleSettings, n_cpus: float) -> Iterator[Any]:
    """Connect this process to Ray, or start a Ray of its own; quietly, and leaving signals to the command."""
    address = scale.address or os.environ.get("RAY_ADDRESS")
    for name, value in _QUIET.items():
        if name != "RAY_AUTH_MODE" or not address:
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        raise OptionInvalid("This process is connected to Ray already. Call ray.shutdown() first.")
    n_own = max(usable_cores(), math.ceil(scale.workers * n_cpus))
    own: dict[str, Any] = {"include_dashboard": False, "num_cpus": n_own, "object_store_memory": 128 << 20}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "moa-data"}
        ray.init(address=address or "local", **quiet, **({} if address else own))
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
        yield ray
    finally:
        ray.shutdown()
