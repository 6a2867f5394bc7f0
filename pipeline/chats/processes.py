"""Tokenise rows in several processes, through `datasets`: the results are those of one process, in the same order.

Rows go in blocks, so that memory is bounded and reading can stop early. A block is a temporary Arrow file that
`Dataset.map` divides among the processes; these are forks, which have tokenizer and template already.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...errors import DatasetError, StorageUnavailable, WorkerError
from ...moa.targets.chat import Rejection
from ...moa.targets.chat_tokens import TokenizedChat

MIN_ROWS = 2000
"""With fewer rows, one process is done before others have started."""
ROWS_PER_PROCESS = 16_384
"""Rows of a block for each process: some seconds of work, long against the start of the processes."""

_BLOCK_BYTES = 1 << 28
_WRITE_ROWS = 256
_WATCH_S = 0.5

Tokenised = tuple[TokenizedChat | Rejection, bool]
"""The sequence of a row or its rejection, and whether the chat template asked for the time."""
Tokenise = Callable[[Any], Tokenised]

_tokenise: Tokenise | None = None
_parent: int | None = None
"""The process whose forks are workers, while it starts any."""


def tokenise_rows(
    rows: Iterator[tuple[int, Any]], tokenise: Tokenise, n_processes: int, n_left: Callable[[], int | None]
) -> Iterator[tuple[int, Tokenised]]:
    """Yield (row number, its result) for each row, in their order.

    Args:
        rows: number and content of each row.
        tokenise: called for each content, here or in a process that was forked from this one.
        n_left: called before rows are read ahead; gives how many sequences are still wanted, None for all.

    Raises:
        WorkerError: a process was killed, or there is no room for the rows that are passed between processes.
    """
    while n_processes > 1:
        block = _Block.read(rows, n_processes * ROWS_PER_PROCESS, n_left())
        if len(block.packed) >= MIN_ROWS:
            results = _in_processes(block, tokenise, n_processes)
        else:
            results = (tokenise(pickle.loads(row)) for row in block.packed if row is not None)
        for number, packed in zip(block.numbers, block.packed, strict=True):
            yield number, tokenise(block.unpacked[number]) if packed is None else next(results)
        if block.error is not None:
            raise block.error
        if block.is_last:
            return
    for number, content in rows:
        yield number, tokenise(content)


@dataclass
class _Block:
    """Rows that are tokenised together.

    Attributes:
        packed: each row pickled; None for one that is nested too deeply for that, which is in ``unpacked``.
        is_last: whether no row follows.
        error: what kept the next row from being read; the rows before it come first.
    """

    numbers: list[int] = field(default_factory=list)
    packed: list[bytes | None] = field(default_factory=list)
    unpacked: dict[int, Any] = field(default_factory=dict)
    is_last: bool = False
    error: DatasetError | None = None

    @classmethod
    def read(cls, rows: Iterator[tuple[int, Any]], most: int, n_left: int | None) -> _Block:
        """Read the next rows, some more than are wanted, as a few may be rejected."""
        if n_left is not None:
            most = min(most, n_left + n_left // 16 + 64)
        block, n_bytes = cls(), 0
        while len(block.numbers) < most and n_bytes < _BLOCK_BYTES:
            try:
                number, content = next(rows)
            except StopIteration:
                block.is_last = True
                break
            except DatasetError as error:
                block.error = error
                break
            block.numbers.append(number)
            try:
                packed = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
                block.packed.append(packed)
                n_bytes += len(packed)
            except RecursionError:
                block.packed.append(None)
                block.unpacked[number] = content
        return block


def _in_processes(block: _Block, tokenise: Tokenise, n_processes: int) -> Iterator[Tokenised]:
    """Yield the result of each packed row."""
    import datasets  # slow to import, and few rows need none

    with _temporary_folder() as folder, _forking(tokenise):
        table = pa.table({"row": pa.array([row for row in block.packed if row is not None], pa.binary())})
        with pa.OSFile(f"{folder}/rows.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, _WRITE_ROWS)
        mapped = datasets.Dataset.from_file(f"{folder}/rows.arrow").map(
            _tokenise_batch,
            batched=True,
            batch_size=_WRITE_ROWS,
            writer_batch_size=_WRITE_ROWS,
            remove_columns=["row"],
            features=datasets.Features({"result": datasets.Value("binary")}),
            fn_kwargs={"tokenise": None if _forks() else tokenise},
            num_proc=min(n_processes, table.num_rows),
            cache_file_name=f"{folder}/results.arrow",
            load_from_cache_file=False,
            new_fingerprint="tokenised",  # else the tokenizer would be hashed, which takes longer than a block
        )
        results = mapped.data.column("result")
    for chunk in results.chunks:  # mapped files outlive their names
        for value in chunk:
            yield pickle.loads(value.as_buffer())


def _tokenise_batch(batch: dict[str, list[bytes]], tokenise: Tokenise | None) -> dict[str, list[bytes]]:
    run = tokenise or _tokenise
    assert run is not None
    return {"result": [pickle.dumps(run(pickle.loads(row)), pickle.HIGHEST_PROTOCOL) for row in batch["row"]]}


def _forks() -> bool:
    """Whether `datasets` forks this process; else its processes start empty and are sent the tokenizer."""
    import multiprocess  # type: ignore[import-untyped]

    return str(multiprocess.get_start_method()) == "fork"


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="moa-data-") as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno is None:
            raise
        raise StorageUnavailable(
            f"{tempfile.gettempdir()} cannot hold the rows that are tokenised ({os.strerror(error.errno)}). Set TMPDIR "
            "to a folder with some room."
        ) from error


@contextmanager
def _forking(tokenise: Tokenise) -> Iterator[None]:
    """Make the forks of this process workers with the function to run, and keep `datasets` quiet meanwhile."""
    global _tokenise, _parent
    import datasets

    were_disabled, environ = datasets.are_progress_bars_disabled(), os.environ
    parallelism = environ.get("TOKENIZERS_PARALLELISM")
    datasets.disable_progress_bars()
    _tokenise, _parent = tokenise, os.getpid()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks of a process with threads. Ours need no lock that another thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except Exception as error:
        if isinstance(behind := error.__context__, KeyboardInterrupt):
            raise behind from None  # `datasets` answers a signal with a time-out of its own
        if not isinstance(error, RuntimeError) or "abruptly died" not in str(error):
            raise
        raise WorkerError(
            "A process that tokenises was killed, most likely because memory ran out. Use fewer processes, such as "
            "`--set data.tokenize_processes=1`, or free some memory."
        ) from error
    finally:
        _tokenise = _parent = None
        os.environ = environ  # noqa: B003  # `datasets` puts a copy in its place
        if parallelism is None:
            environ.pop("TOKENIZERS_PARALLELISM", None)
        if not were_disabled:
            datasets.enable_progress_bars()


def _become_worker() -> None:
    """Leave signals to the parent, write nothing, and exit when the parent does."""
    if _parent is None:
        return
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the terminal sends them to all its processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how the parent ends its workers
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the parent's may be locked by a thread that is not here
    threading.Thread(target=_end_with, args=(_parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_become_worker)
