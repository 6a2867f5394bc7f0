"""Extract the pending parts of a store, in this process or in several.

The commits in the store tell which parts are done, so workers do not need to know each other: each takes a part that
has no commit and that nobody else is writing, runs the target over it and commits it. Of two that wrote the same part
the first commit stays, and what a killed worker had in flight is taken by the others. Commands on other machines that
write to the same store are workers like any other.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

import torch

from ..errors import MoaDataError, OptionInvalid, WorkerError
from ..machine import fix_sums
from ..moa.targets.live import Target, resolve_model_folder
from ..storage.codecs.registry import StoreCodec
from ..storage.schema import TEXTS_NAME, StoreManifest
from ..storage.write.store import StoreWriter
from .config import parse_fields
from .forwards.parts import Forwards, load_target, run_parts, save_bundle
from .report import PartProgress, Timings
from .sequences import Sequences
from .sources import check_identities, weight_identities
from .texts import map_texts

_LOOK_EVERY_S = 1.0
_PATIENCE_S = 600.0
"""Seconds without any commit after which parts that other workers have begun are done here too."""
_LEAVE_S = 2.0
"""Seconds that a worker has to discard its part when it is told to end; an interrupted command has three in all."""
_SIGNAL_EVERY_S = 1.0
_MAX_LOST = 5
"""Workers in a row that may be lost before anything is committed; machines are seldom lost so often."""
_END_S = 10.0
"""Seconds that workers have to report what they spent once everything is committed."""
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from moa_data.pipeline.workers import main
sys.exit(main(int(sys.argv[1])))
"""


@dataclass(frozen=True)
class WorkOrder:
    """What a worker is told; what shapes the data is in the store itself, so that workers cannot differ in it.

    Attributes:
        store: folder or URL of the store, which was begun.
        texts: Arrow file of its sequences; None for the store's own.
        model: the target, a folder or a Hub id, as this worker's machine sees it.
        revision: commit of a Hub id.
        device: device of the forward.
        n_threads: threads that torch may use on the CPU; None for its own choice.
        n_encode_threads: threads that encode.
        attempt: name of its unfinished files; begins with that of the command's own.
        index: number of this worker among ``n_workers``, which decides the parts it begins with.
    """

    store: str
    texts: str | None
    model: str
    revision: str | None
    device: str
    n_threads: int | None
    n_encode_threads: int
    attempt: str
    index: int = 0
    n_workers: int = 1

    def numbered(self, index: int, n_workers: int) -> WorkOrder:
        """Return the order for one of several workers."""
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
    own, others = parts[index::n_workers], list[int]()
    if n_workers > 1:
        others = [part for part in parts if part not in set(own)]
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
    """Write and commit what has no commit: the target bundle, and parts until there are none left.

    Args:
        folder: folder of the target.
        timings: updated.
        tell: called with the timings after each batch.
    """
    n_layers = int(store.manifest.extraction["target_layers"])
    # The first worker writes the bundle; the last one to end finds out whether it was killed.
    if index == 0 and not store.has_target:
        save_bundle(store, forwards.target, folder, n_layers)
    run_parts(forwards, store, pending_in_turn(store, index, n_workers), timings, tell)
    if not store.has_target:
        save_bundle(store, forwards.target, folder, n_layers)


def forwards_of(
    manifest: StoreManifest, target: Target, codec: StoreCodec, sequences: Sequences, n_encode_threads: int
) -> Forwards:
    """Return the forwards that a store's manifest asks for."""
    spec, extraction = parse_fields(item.name for item in manifest.fields), manifest.extraction
    return Forwards(
        target=target,
        spec=spec,
        codec=codec,
        dtype=getattr(torch, str(extraction["dtype"])),
        batch_tokens=int(extraction["batch_tokens"]),
        uses_cache=spec.kv,
        text=lambda key: (sequences.tokens(key), sequences.response_mask(key)),
        n_encode_threads=n_encode_threads,
    )


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
        target = load_target(folder, str(store.manifest.extraction["compute_dtype"]), order.device)
        sequences = Sequences.from_arrow(map_texts(Path(order.texts) if order.texts else store.path / TEXTS_NAME))
        forwards = forwards_of(store.manifest, target, store.codec, sequences, order.n_encode_threads)
        work_until_done(store, forwards, folder, timings, index=order.index, n_workers=order.n_workers)
    return timings


class Crew(Protocol):
    """Workers that one command directs: processes of this machine, or tasks of Ray."""

    n_workers: int
    restarts: bool
    """Whether a worker that is lost is started anew; else the others do its parts."""
    look_every_s: float

    @property
    def n_running(self) -> int:
        """Workers that have not ended."""
        ...

    def start(self, index: int) -> None:
        """Start a worker."""
        ...

    def ended(self) -> list[tuple[int, Timings | Exception | str]]:
        """Return the workers that have ended: index, and what it spent, what it raised, or how it was lost."""
        ...

    def stop(self) -> None:
        """End the workers that are still there, which discard what they have not committed."""
        ...


def direct(crew: Crew, store: StoreWriter, progress: PartProgress) -> tuple[Timings, list[str]]:
    """Run workers until all is done.

    Returns:
        What the workers spent, together; how each worker that was lost has ended.

    Raises:
        WorkerError: none is left and there is work to do, or several in a row were lost before anything was committed.
        Exception: what one of them raised; the others were told to end.
    """
    timings, lost, n_in_a_row, n_committed, done_s = Timings(), list[str](), 0, -1, math.inf
    try:
        for index in range(crew.n_workers):
            crew.start(index)
        # Once all is done, workers of Ray for which there was no room are left where they wait.
        while crew.n_running and time.monotonic() < done_s + _END_S:
            n_lost = 0 if crew.restarts else len(lost)
            of_all = f" of {crew.n_workers} workers left" if n_lost else " workers"
            progress.tell(timings, f", {crew.n_workers - n_lost}{of_all}")
            time.sleep(crew.look_every_s)
            for index, outcome in crew.ended():
                if isinstance(outcome, Exception):
                    raise outcome
                if isinstance(outcome, Timings):
                    timings += outcome
                    continue
                lost.append(outcome)
                store.remove_attempt(f"{store.attempt}-{index}-*")
                before, n_committed = n_committed, len(store.committed_parts())
                n_in_a_row = 1 if n_committed > before else n_in_a_row + 1
                if crew.restarts and n_in_a_row < _MAX_LOST:
                    crew.start(index)
            if done_s == math.inf and is_done(store):
                done_s = time.monotonic()
            elif crew.restarts and n_in_a_row >= _MAX_LOST:
                break
        if not is_done(store):
            raise WorkerError(
                f"{len(lost)} workers ended with work left, the last one by {''.join(lost[-1:])}. What was committed "
                "is kept: run the same command again to continue, with fewer --workers if memory ran out."
            )
    finally:
        crew.stop()
        store.remove_attempt(f"{store.attempt}-*")
    return timings, lost


class ProcessCrew:
    """Worker processes of this machine; the standard input of each is open as long as this process lives.

    Args:
        orders: an order for each worker.
    """

    restarts = False
    look_every_s = 0.05

    def __init__(self, orders: Sequence[WorkOrder]) -> None:
        self._orders = orders
        self.n_workers = len(orders)
        self._running: dict[int, tuple[subprocess.Popen[bytes], BinaryIO, BinaryIO]] = {}

    @property
    def n_running(self) -> int:
        """Processes that have not been found ended."""
        return len(self._running)

    def start(self, index: int) -> None:
        """Start a process."""
        log, result = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (closed by `_end`)
        self._running[index] = start_process(self._orders[index], log, result), log, result

    def ended(self) -> list[tuple[int, Timings | Exception | str]]:
        """Return the processes that have ended, and what became of each."""
        return [(i, self._end(i)) for i, (process, _, _) in list(self._running.items()) if process.poll() is not None]

    def _end(self, index: int) -> Timings | Exception | str:
        process, log, result = self._running.pop(index)
        process.kill()
        process.wait()
        outcome: Timings | Exception | str = _describe_end(process.returncode, log)
        if process.returncode == 0:
            result.seek(0)
            outcome = pickle.load(result)
        for file in (log, result, process.stdin):
            if file is not None:
                file.close()
        return outcome

    def stop(self) -> None:
        """End the processes that are still there."""
        told_s, began_s = 0.0, time.monotonic()
        try:
            while any(process.poll() is None for process, _, _ in self._running.values()):
                if (now_s := time.monotonic()) > began_s + _LEAVE_S:
                    break
                if now_s > told_s + _SIGNAL_EVERY_S:  # repeated: an exception that falls into a destructor is dropped
                    for process, _, _ in self._running.values():
                        process.terminate()
                    told_s = now_s
                time.sleep(0.02)
        finally:
            for index in list(self._running):
                self._end(index)


def _describe_end(code: int, log: BinaryIO) -> str:
    """Say how a process ended, with the last line that it wrote."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if code == -signal.SIGKILL:
        how += ", which the kernel sends where memory runs out"
    log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
    lines = log.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return how + (f": {last}" if last else "")


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
    """Run as a worker process: reads its order from standard input, and ends when that is closed.

    Args:
        result: descriptor of the file that takes what :func:`run_worker` returns or raises, pickled.

    Returns:
        The exit code.
    """
    # Signals of the terminal are for the command, which tells its workers to end.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    order: WorkOrder = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_input, daemon=True).start()
    return report(result, lambda: run_worker(order))


def report(result: int, work: Callable[[], Timings]) -> int:
    """Write what ``work`` returns or raises to a descriptor; returns the exit code of the process."""
    found: Timings | Exception
    try:
        found = work()
    except KeyboardInterrupt:  # what was not committed has been discarded
        return 128 + signal.SIGTERM
    except Exception as error:
        if is_of_device(error):
            raise  # ends this process as a kill would, and others do its parts
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


def is_of_device(error: BaseException) -> bool:
    """Whether an accelerator failed: then its process cannot continue, but others can."""
    kind = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)


def device_orders(order: WorkOrder, device: str, n_workers: int) -> list[WorkOrder]:
    """Return an order for each worker of this machine: on an accelerator each has a device of its own.

    Args:
        device: what ``--device`` gave, resolved: cpu, cuda, mps, or one of several such as cuda:1.
    """
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
    return [replace(order.numbered(index, n_workers), device=own) for index, own in enumerate(devices)]
