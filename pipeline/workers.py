"""Extract with several workers. Each worker runs the same command in one process on its own device.

Workers coordinate through the store. The sequences of the store are divided into parts, and each
part is committed on its own. A worker chooses an uncommitted part that no other worker is writing,
runs the target over the part's sequences and commits the part. If two workers write the same part,
the first commit wins. If a worker is killed, other workers write its unfinished parts. A command on
another machine that writes to the same store is a worker too.

The command that starts the workers also watches and ends them. A worker is a process on this
machine, or a Ray task that starts a process on a machine of a cluster.
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
from ..text import Progress, counted, first_line
from .config import ExtractConfig, ScaleSettings, core_share, resolve_encode_threads
from .report import PartProgress, Timings

SETTINGS_NAME = "settings.yaml"
TIMINGS_NAME = "timings.json"
LOG_NAME = "log.txt"
# Seconds that a worker waits between two checks for commits of other workers.
_LOOK_EVERY_S = 1.0
# If all remaining parts are locked by other workers, and no part is committed for this number of
# seconds, a worker also writes locked parts. The workers that hold the locks may hang.
_PATIENCE_S = 600.0
# Seconds between two polls of the workers.
_POLL_EVERY_S = 0.5
# Seconds in which a terminated worker must discard its unfinished parts. The command itself must
# end within three seconds after an interruption, so its workers have less time.
_LEAVE_S = 2.0
# After everything is committed, the command waits at most this number of seconds for its workers to
# end. Without a limit it could wait forever, because a queued Ray task may never start.
_END_S = 10.0
# Limit for restarts with Ray. For n workers, a lost worker is started again only if fewer than
# n * _MAX_LOST workers were lost since the last commit.
_MAX_LOST = 5
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # If Ray starts the cluster itself, its default is ``token``. Setting the variable explicitly
    # avoids a warning of Ray.
    "RAY_AUTH_MODE": "token",
}

# The timings of a worker that finished, or a text that says how the worker was lost.
Outcome = Timings | str
# The sum of the workers' timings, and one text for each lost worker.
Total = tuple[Timings, list[str]]
# Function that polls a worker. It returns None while the worker is running or queued. After that,
# it returns the worker's exit code and text (see ``WorkerProcess.ended``).
Poll = Callable[[], tuple[int, str] | None]


@dataclass(frozen=True)
class Worker:
    """One of the workers that share an extraction."""

    # The settings of the command, changed so that a single process runs on this worker's device.
    config: ExtractConfig
    index: int
    n_workers: int


def is_done(store: StoreWriter) -> bool:
    """Whether all parts and the folder ``target/`` of the store are committed."""
    return store.has_target and not store.pending_parts()


def pending_in_turn(store: StoreWriter, index: int = 0, n_workers: int = 1) -> Iterator[int | None]:
    """Yield the numbers of parts that a worker should write. Committed parts are skipped.

    Each part is locked before it is yielded. The parts are divided among the workers. The worker's
    own parts come first, and then the parts of the other workers. If other workers have locked all
    remaining parts, None is yielded, and the caller should ask again.

    Args:
        store: writes the parts of the store.
        index: index of the worker.
        n_workers: number of workers.
    """
    remaining = store.pending_parts()
    if store.has_other_writers:
        # A bucket has no locks that show which parts other commands are writing. Shuffle the parts,
        # so that two commands rarely write the same part.
        random.Random(store.attempt).shuffle(remaining)
    remaining.sort(key=lambda part: part % n_workers != index)
    last_progress_s = time.monotonic()
    while remaining:
        locked = []
        for part in remaining:
            if not store.is_pending(part):
                continue
            if store.try_lock(part):
                yield part
            else:
                locked.append(part)
        if len(locked) < len(remaining):
            last_progress_s = time.monotonic()
        elif time.monotonic() > last_progress_s + _PATIENCE_S:
            yield locked.pop(0)
        remaining = locked
        if remaining:
            yield None
            time.sleep(_LOOK_EVERY_S)


def start_command(worker: Worker, folder: Path, n_threads: int) -> "subprocess.Popen[bytes]":
    """Start the command of a worker as a process.

    The process ends by itself when its standard input is closed.
    """
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
        "--worker",
        str(worker.index),
        str(worker.n_workers),
    ]
    with (folder / TIMINGS_NAME).open("wb") as timings, (folder / LOG_NAME).open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=timings, stderr=log, env=environment
        )


class WorkerProcess:
    """A worker in a process on this machine, with a share of the machine's cores.

    Args:
        worker: the worker to run.
        n_here: number of workers that share the cores of this machine.
        start: starts the process. The process writes a log and a JSON file with its timings to a
            folder.
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
        """Wait for the end of the process.

        Returns:
            The exit code and a text. The exit code is negative if a signal ended the process. The
            text contains the timings as JSON, or the reason for a failure.
        """
        code = self.process.wait()
        if code == 0:
            output = (self._folder / TIMINGS_NAME).read_text(encoding="utf-8")
            # The last line of the output contains the timings. Libraries may have printed lines
            # before it.
            return code, output.splitlines()[-1]
        log = self._folder / LOG_NAME
        text = log.read_text(encoding="utf-8", errors="replace")
        reason = _last_line(text) or f"exit code {code}"
        if code == WorkerError.exit_code:
            return code, reason
        if code < 0:
            reason = f"it was ended by signal {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            reason += ", which the kernel sends if memory runs out"
        self._keeps_log = True
        return code, f"{reason} (log: {log})"

    def close(self) -> None:
        """Kill the process if it runs, and delete its files. If the worker is lost, keep its log."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        if not self._keeps_log:
            shutil.rmtree(self._folder)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


def outcome_of(code: int, text: str) -> Outcome:
    """Interpret the exit code and the text that :meth:`WorkerProcess.ended` returns.

    Returns:
        The timings of a worker that finished, or a text that says how the worker was lost.

    Raises:
        WorkerError: the worker failed with an error that would occur in every other worker, too.
    """
    if code == 0:
        return Timings(**json.loads(text))
    # A worker that was killed, or whose accelerator failed, counts as lost. Other workers can
    # continue.
    if code < 0 or code >= 128 or "AcceleratorError" in text:
        return text
    error = WorkerError(text.removeprefix("Error: "))
    error.exit_code = code
    raise error


def direct(
    start: Callable[[Worker], Poll],
    workers: Sequence[Worker],
    store: StoreWriter,
    progress: Progress,
    restarts: bool,
) -> Total:
    """Run workers until all parts are done.

    Args:
        start: starts a worker and returns the function that polls it.
        workers: the workers to run.
        store: the store that the workers write.
        progress: reports the tokens in the phase of the caller.
        restarts: whether lost workers are started again. If false, the other workers write the
            parts of a lost worker.

    Returns:
        The sum of the workers' timings, and one text for each lost worker.

    Raises:
        WorkerError: a worker has failed with an error, and the caller must end the other workers.
            This error is also raised if parts are pending but no worker is left.
    """
    timings = Timings()
    lost = list[str]()
    n_lost_in_a_row = 0
    counter = PartProgress(progress, store)
    n_pending = counter.look()
    end_s = math.inf
    running = {worker.index: start(worker) for worker in workers}
    while running and time.monotonic() < end_s:
        # The text says "up to", because with Ray, some workers may still be queued.
        counter.report(timings, f", up to {counted(len(running), 'worker')}")
        # Sleep in Python rather than wait in Ray. If a signal interrupted a wait in Ray, this
        # process would not learn the number of the signal.
        time.sleep(_POLL_EVERY_S)
        for index, poll in list(running.items()):
            ended = poll()
            if ended is None:
                continue
            del running[index]
            outcome = outcome_of(*ended)
            if isinstance(outcome, Timings):
                timings += outcome
                continue
            lost.append(f"worker {index}: {outcome}")
            n_lost_in_a_row += 1
            if restarts and n_lost_in_a_row < _MAX_LOST * len(workers):
                running[index] = start(workers[index])
        n_left = counter.look()
        if n_left < n_pending:
            n_pending = n_left
            n_lost_in_a_row = 0
        if end_s == math.inf and is_done(store):
            end_s = time.monotonic() + _END_S
    counter.report(timings)
    if not is_done(store):
        raise WorkerError(
            f"{len(lost)} workers ended too early, and some parts are not finished. The last of "
            f"these workers was {''.join(lost[-1:])}. Finished parts are kept. Run the same "
            "command again to continue, with fewer `workers` if memory ran out."
        )
    return timings, lost


def run_processes(
    workers: Sequence[Worker],
    store: StoreWriter,
    progress: Progress,
    start: Callable[..., Any] = start_command,
) -> Total:
    """Run workers as processes on this machine until all parts are done.

    The arguments and the result are those of :func:`direct`.
    """
    processes = list[WorkerProcess]()

    def begin(worker: Worker) -> Poll:
        process = WorkerProcess(worker, len(workers), start)
        processes.append(process)
        return lambda: None if process.process.poll() is None else process.ended()

    try:
        outcome = direct(begin, workers, store, progress, restarts=False)
    except BaseException:
        _end(processes)
        store.sweep()  # Delete the unfinished parts of killed workers.
        raise
    _end(processes)
    return outcome


def _end(workers: Sequence[WorkerProcess]) -> None:
    """End the workers that are still running.

    Before a worker is killed, it gets some time to discard its unfinished parts.
    """
    for worker in workers:
        worker.process.terminate()
    until_s = time.monotonic() + _LEAVE_S
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, until_s - time.monotonic()))
        worker.close()


def run_on_ray(
    workers: Sequence[Worker], store: StoreWriter, scale: ScaleSettings, progress: Progress
) -> Total:
    """Run workers with Ray until all parts are done; see :func:`direct`.

    Each worker is a Ray task. Ray queues a task until the cluster has room for it. While the workers
    run, machines may join and leave the cluster.
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
                return lambda: _ended_task(ray, reference)

            return direct(start, workers, store, progress, restarts=True)
    except BaseException:
        # Ray kills the processes of its tasks, but does not report when they have ended. An ended
        # process releases its lock of the store, so wait for the lock.
        store.sweep(_LEAVE_S)
        raise


def _ended_task(ray: Any, reference: Any) -> tuple[int, str] | None:
    if not ray.wait([reference], timeout=0)[0]:
        return None
    try:
        ended: tuple[int, str] = ray.get(reference)
    # Ray raises a RayError if the task was lost, for example because its machine has failed.
    except ray.exceptions.RayError as error:
        return -signal.SIGKILL, _last_line(str(error)) or type(error).__name__
    return ended


def ray_task(worker: Worker, needs: Mapping[str, float]) -> tuple[int, str]:
    """Run a worker as a process on a machine of a cluster, with a share of the machine's cores.

    Args:
        worker: the worker to run.
        needs: the CPUs and GPUs that each worker needs.

    Returns:
        The exit code and the text of :meth:`WorkerProcess.ended`.
    """
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
    """Return how many workers fit on a machine. The result is never below 1.

    Args:
        resources: the CPUs and GPUs of the machine.
        needs: the CPUs and GPUs that each worker needs.
    """
    counts = [resources.get(name, 0.0) // need for name, need in needs.items() if need]
    return max(1, int(min(counts)))


@contextmanager
def _connected(scale: ScaleSettings) -> Iterator[Any]:
    """Connect to a Ray cluster, or start a cluster on this machine.

    Ray's messages are suppressed. Ray replaces the handler of SIGTERM, so this function restores
    the handler of the command.
    """
    address = scale.address or os.environ.get("RAY_ADDRESS")
    for name, value in _QUIET.items():
        if name != "RAY_AUTH_MODE" or not address:
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        raise OptionInvalid(
            "This process is already connected to Ray. Call ray.shutdown() before you extract."
        )
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
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "local", **options)
    except ConnectionError as error:
        raise OptionInvalid(
            f"No Ray cluster was found at {address} ({first_line(error)}). Start one with `ray "
            "start --head`, or leave out `address`."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield ray
    finally:
        ray.shutdown()
