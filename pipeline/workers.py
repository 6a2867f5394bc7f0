"""Extract with several workers: each is the same command, for one process, on a device of its own.

The commits in the store tell which parts are done, so workers do not need to know each other: each takes a part that
has no commit and that no other worker is writing, runs the target over it and commits it. Of two that wrote the same
part the first commit stays, and the others take what a killed worker had in flight. Commands on other machines that
write to the same store are workers like any other.

The command that starts the workers watches them and ends them. They are processes of this machine, or tasks of Ray on
the machines of a cluster, each of which starts such a process there.
"""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionInvalid, WorkerError
from ..machine import usable_cores
from ..storage.write.store import StoreWriter
from ..text import counted, first_line
from .config import ExtractConfig, ScaleSettings, core_share, resolve_encode_threads
from .report import PartProgress, Timings

SETTINGS_NAME = "settings.yaml"
TIMINGS_NAME = "timings.json"
LOG_NAME = "log.txt"
_LOOK_EVERY_S = 1.0  # seconds between two looks at the commits of other workers
# seconds without any commit after which a part that another worker has begun is done here too
_PATIENCE_S = 600.0
_POLL_EVERY_S = 0.5  # seconds between two looks at the workers
_LEAVE_S = 2.0  # seconds that a worker has to discard its parts; an interrupted command has three
# seconds that workers have to end once everything is committed; tasks of Ray may never have started
_END_S = 10.0
_MAX_LOST = 5  # times that each worker of Ray may be lost, on average, before anything is committed
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # as Ray does by itself for one that it starts, but then with a warning
    "RAY_AUTH_MODE": "token",
}

Outcome = Timings | str  # what a worker spent, or how it was lost
# None while the worker runs or waits for room; raises the error of a worker
Poll = Callable[[], Outcome | None]


@dataclass(frozen=True)
class Worker:
    """One of the workers of a command."""

    # the settings of the command, for one process and with the worker's device
    config: ExtractConfig
    index: int
    n_workers: int


def is_done(store: StoreWriter) -> bool:
    """Whether every part and the target bundle have their commits."""
    return store.has_target and not store.pending_parts()


def pending_in_turn(store: StoreWriter, index: int = 0, n_workers: int = 1) -> Iterator[int | None]:
    """Yield parts that have no commit when their turn comes; None while others are writing all that are left.

    Each of several workers begins with its own share of the parts, and then takes those of the others.
    """
    left = store.pending_parts()
    if store.joined:
        # Another order than other workers have: a bucket has no locks that tell what they are
        # writing.
        random.Random(store.attempt).shuffle(left)
    left.sort(key=lambda part: part % n_workers != index)
    moved_s = time.monotonic()
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
        left = claimed
        if left:
            yield None
            time.sleep(_LOOK_EVERY_S)


def start_command(worker: Worker, folder: Path, n_threads: int) -> "subprocess.Popen[bytes]":
    """Start the command of a worker in a process, which ends when its standard input is closed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(n_threads),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [
        sys.executable,
        "-P",
        "-m",
        "moa_data",
        "extract",
        "--config",
        str(folder / SETTINGS_NAME),
    ]
    share = ["--worker", str(worker.index), str(worker.n_workers)]
    with (folder / TIMINGS_NAME).open("wb") as timings, (folder / LOG_NAME).open("wb") as log:
        return subprocess.Popen(
            [*command, *share], stdin=subprocess.PIPE, stdout=timings, stderr=log, env=environment
        )


class WorkerProcess:
    """A worker in a process of this machine, on its share of the cores.

    Args:
        n_here: workers that share the cores of this machine.
        start: starts a process that writes a log, and its timings as JSON, to files of a folder.
    """

    def __init__(
        self, worker: Worker, n_here: int, start: Callable[..., Any] = start_command
    ) -> None:
        n_encode_threads = resolve_encode_threads(worker.config.forward.encode_threads, n_here)
        settings = worker.config.replaced(encode_threads=n_encode_threads).to_yaml()
        self._folder = Path(tempfile.mkdtemp(prefix=f"moa-data-worker-{worker.index}-"))
        self._keeps_log = False
        try:
            (self._folder / SETTINGS_NAME).write_text(settings, encoding="utf-8")
            self.process = start(worker, self._folder, core_share(n_here))
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def ended(self) -> tuple[int, str]:
        """Wait for its end; returns the exit code, negative for a signal, and its timings or why it ended."""
        code = self.process.wait()
        if code == 0:
            output = (self._folder / TIMINGS_NAME).read_text(encoding="utf-8")
            return code, output.splitlines()[-1]  # Libraries may print before it.
        log = self._folder / LOG_NAME
        lines = [
            line
            for line in log.read_text(encoding="utf-8", errors="replace").split("\n")
            if line.strip()
        ]
        reason = lines[-1].strip() if lines else f"exit code {code}"
        if code == WorkerError.exit_code:
            return code, reason
        if code < 0:
            reason = f"signal {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            reason += ", which the kernel sends if memory runs out"
        self._keeps_log = True
        return code, f"{reason} (log: {log})"

    def close(self) -> None:
        """Kill the process if it still runs, and delete its files, but not the log of a worker that was lost."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        if not self._keeps_log:
            shutil.rmtree(self._folder)


def outcome_of(code: int, text: str) -> Outcome:
    """Read what :meth:`WorkerProcess.ended` returned; raises WorkerError for an error that every worker would have."""
    if code == 0:
        return Timings(**json.loads(text))
    # A process whose accelerator has failed cannot go on, but others can.
    if code < 0 or code >= 128 or "AcceleratorError" in text:
        return text
    error = WorkerError(text.removeprefix("Error: "))
    error.exit_code = code
    raise error


def direct(
    start: Callable[[Worker], Poll],
    workers: Sequence[Worker],
    store: StoreWriter,
    progress: PartProgress,
    restarts: bool,  # whether a lost worker is started again; otherwise the others do its parts
) -> tuple[Timings, list[str]]:
    """Run workers until all is done.

    Returns:
        What the workers spent, together; how each worker that was lost has ended.

    Raises:
        WorkerError: one of them has failed, in which case the caller ends the others; or none is left and there is
            work to do.
    """
    timings = Timings()
    lost = list[str]()
    n_lost_in_a_row = 0
    n_pending = len(store.pending_parts())
    end_s = math.inf
    running = {worker.index: start(worker) for worker in workers}
    while running and time.monotonic() < end_s:
        most = "up to " if restarts else ""  # a task of Ray may still wait for room
        progress.tell(timings, f", {most}{counted(len(running), 'worker')}")
        # Python sleeps here and not Ray, which would forget which signal has come.
        time.sleep(_POLL_EVERY_S)
        for index, poll in list(running.items()):
            outcome = poll()
            if outcome is None:
                continue
            del running[index]
            if isinstance(outcome, Timings):
                timings += outcome
                continue
            lost.append(f"worker {index}: {outcome}")
            n_lost_in_a_row += 1
            if restarts and n_lost_in_a_row < _MAX_LOST * len(workers):
                running[index] = start(workers[index])
        n_left = len(store.pending_parts())
        if n_left < n_pending:
            n_pending = n_left
            n_lost_in_a_row = 0
        if end_s == math.inf and is_done(store):
            end_s = time.monotonic() + _END_S
    if not is_done(store):
        raise WorkerError(
            f"{len(lost)} workers ended with work left, at last {''.join(lost[-1:])}. What was "
            "committed is kept: run the same command again to continue, with fewer --workers if "
            "memory ran out."
        )
    return timings, lost


def run_processes(
    workers: Sequence[Worker],
    store: StoreWriter,
    progress: PartProgress,
    start: Callable[..., Any] = start_command,
) -> tuple[Timings, list[str]]:
    """Run a process of this machine for each worker until all is done; see :func:`direct`."""
    processes = list[WorkerProcess]()

    def begin(worker: Worker) -> Poll:
        process = WorkerProcess(worker, len(workers), start)
        processes.append(process)
        return lambda: None if process.process.poll() is None else outcome_of(*process.ended())

    try:
        outcome = direct(begin, workers, store, progress, restarts=False)
    except BaseException:
        _end(processes)
        store.sweep()  # A worker that had to be killed has not discarded its part.
        raise
    _end(processes)
    return outcome


def _end(workers: Sequence[WorkerProcess]) -> None:
    """End the workers that still run; they discard what they have not committed, if they do so in time."""
    for worker in workers:
        worker.process.terminate()
    until_s = time.monotonic() + _LEAVE_S
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, until_s - time.monotonic()))
        worker.close()


def run_on_ray(
    workers: Sequence[Worker], store: StoreWriter, scale: ScaleSettings, progress: PartProgress
) -> tuple[Timings, list[str]]:
    """Run workers with Ray until all is done; see :func:`direct`.

    Each is a task of Ray, which waits until the cluster has room for it: so machines may join and leave meanwhile.
    """
    n_gpus = 0.0 if workers[0].config.forward.device == "cpu" else scale.gpus_per_worker or 1.0
    needs = {"CPU": float(scale.cpus_per_worker), "GPU": n_gpus}
    try:
        with _connected(scale) as ray:
            task = ray.remote(ray_task).options(
                num_cpus=needs["CPU"],
                num_gpus=needs["GPU"],
                max_retries=0,
                scheduling_strategy="SPREAD",
            )

            def start(worker: Worker) -> Poll:
                reference = task.remote(worker, needs)
                return lambda: _outcome_of_task(ray, reference)

            return direct(start, workers, store, progress, restarts=True)
    finally:
        until_s = time.monotonic() + _LEAVE_S
        while any(map(store.is_claimed, store.pending_parts())) and time.monotonic() < until_s:
            time.sleep(0.05)


def _outcome_of_task(ray: Any, reference: Any) -> Outcome | None:
    if not ray.wait([reference], timeout=0)[0]:
        return None
    try:
        code, text = ray.get(reference)
    except ray.exceptions.RayError as error:  # the task was lost
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1] if lines else type(error).__name__
    return outcome_of(code, text)


def ray_task(worker: Worker, needs: Mapping[str, float]) -> tuple[int, str]:
    """Run a worker on its share of the machine; returns what :meth:`WorkerProcess.ended` does."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    resources: Mapping[str, float] = next(
        item["Resources"] for item in ray.nodes() if item["NodeID"] == node
    )
    process = WorkerProcess(worker, workers_that_fit(resources, needs))
    try:
        return process.ended()
    finally:
        process.close()


def workers_that_fit(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many workers with these needs a machine can hold, which share its cores; at least one."""
    return max(
        1, int(min(resources.get(name, 0.0) // need for name, need in needs.items() if need))
    )


@contextmanager
def _connected(scale: ScaleSettings) -> Iterator[Any]:
    """Connect this process to Ray, or start a Ray of its own; quietly, and leaving signals to the command."""
    address = scale.address or os.environ.get("RAY_ADDRESS")
    for name, value in _QUIET.items():
        if name != "RAY_AUTH_MODE" or not address:
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        raise OptionInvalid("This process is connected to Ray already. Call ray.shutdown() first.")
    options: dict[str, Any] = {
        "log_to_driver": False,
        "configure_logging": False,
        "namespace": "moa-data",
    }
    if not address:
        n_cpus = max(usable_cores(), scale.workers * scale.cpus_per_worker)
        options |= {
            "include_dashboard": False,
            "num_cpus": n_cpus,
            "object_store_memory": 128 << 20,
        }
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        ray.init(address=address or "local", **options)
    except ConnectionError as error:
        raise OptionInvalid(
            f"No Ray cluster is found at {address}: {first_line(error)}. Start one with `ray start "
            "--head`, or leave out --address."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    try:
        yield ray
    finally:
        ray.shutdown()
