"""The object-store backend, by obstore: S3 and whatever speaks it, Google Cloud Storage, Azure.

Settings come from the environment alone, under the names that each provider's own tools have: ``AWS_ACCESS_KEY_ID``,
``AWS_REGION``, ``AWS_ENDPOINT_URL`` (any server that speaks S3), ``GOOGLE_APPLICATION_CREDENTIALS``,
``AZURE_STORAGE_ACCOUNT_NAME`` and so on; and ``MOA_DATA_REMOTE_TIMEOUT_S``, how long a server may fail before a command
gives up.

A server may answer late, twice, or not at all, and what it did is then unknown. So every request may be made again: a
read returns what the file holds, an upload writes the same bytes, and of a create or replace that got no clear answer
the file itself tells the outcome.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import ObjectStore as Connection
from obstore.store import from_url

from ..errors import MoaDataError, StorageUnavailable, StoreNotFound
from ..files import check_length
from ..text import first_line
from .paths import REQUEST_BYTES, Entry, requests

GAP_BYTES = 256 << 10
"""Ranges that lie at most so far apart are read by one request: fetching the gap costs less than asking twice."""
# longest file that S3 copies by one request; a longer one is read and written again
COPY_BYTES = 5 << 30
UPLOADS_AT_ONCE = 8  # pieces of one file that are uploaded at the same time; each is held in memory
NOTICE_S = 5.0  # time without an answer after which a process logs, once, that it waits
SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})
_TIMEOUT_VARIABLE = "MOA_DATA_REMOTE_TIMEOUT_S"
_TIMEOUT_S = 180.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Torn(Exception):
    """A file or range came with another length than was announced."""


class ObjectStore:
    """A prefix of a bucket, by obstore: connected anew in each process, pickled as its URL, safe in threads."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme.lower() not in SCHEMES:
            raise StoreNotFound(
                f"{url} cannot be opened as a store: expected a folder, or an s3://, gs:// or az:// URL. Stores of the "
                "Hub are downloaded first, by `moa-data pull`."
            )
        self.url = url.rstrip("/")
        self._connected: Connection | None = None

    def __reduce__(self) -> "tuple[type[ObjectStore], tuple[str]]":
        return (ObjectStore, (self.url,))

    @property
    def connection(self) -> Connection:
        """The object of obstore, which zarr takes too (``zarr.storage.ObjectStore``)."""
        _refuse_fork(self.url)
        if self._connected is None:
            self._connected = _connect(self.url)
        return self._connected

    def list_files(self, folder: str) -> dict[str, Entry]:  # noqa: D102  (Backend)
        def list_all() -> dict[str, Entry]:
            pages = obstore.list(self.connection, folder or None, chunk_size=1000)
            return {
                item["path"]: Entry(item["size"], item["last_modified"])
                for page in pages
                for item in page
            }

        return self._asked(folder, list_all)

    def size(self, name: str) -> int:  # noqa: D102
        return int(self._asked(name, lambda: obstore.head(self.connection, name)["size"]))

    def read(self, name: str, max_bytes: int | None = None) -> bytes:  # noqa: D102
        return self._asked(name, lambda: self._get(name, max_bytes))

    def _get(self, name: str, max_bytes: int | None = None) -> bytes:
        found = obstore.get(self.connection, name)
        n_bytes = found.meta["size"]
        check_length(n_bytes, max_bytes)
        content = found.bytes().to_bytes()
        if len(content) != n_bytes:
            raise _Torn(f"{len(content)} bytes came of {n_bytes}")
        return content

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[memoryview]:  # noqa: D102
        found: list[memoryview] = [memoryview(b"")] * len(ranges)

        def fetch(group: Sequence[int]) -> None:
            name, first, _ = ranges[group[0]]
            last = max(ranges[i][2] for i in group)
            data = self._asked(name, lambda: self._get_range(name, first, last))
            for i in group:
                found[i] = data[ranges[i][1] - first : ranges[i][2] - first]

        for _ in requests().map(fetch, _grouped(ranges)):
            pass
        return found

    def _get_range(self, name: str, start: int, stop: int) -> memoryview:
        """Return bytes of a file by one request; not by ``obstore.get_ranges``, which panics where fewer come."""
        try:
            data = memoryview(obstore.get_range(self.connection, name, start=start, end=stop))
            if len(data) == stop - start:
                return data
            failure: Exception = _Torn("fewer bytes came than were asked for")
        except exceptions.BaseError as error:
            failure = error
        n_bytes = obstore.head(self.connection, name)["size"]
        if n_bytes >= stop:
            raise failure
        # The file is shorter than the caller believes, for which servers have answers of many
        # kinds.
        if start >= n_bytes:
            return memoryview(b"")
        return memoryview(obstore.get_range(self.connection, name, start=start, end=n_bytes))

    def put_if_absent(self, name: str, data: bytes) -> bool:  # noqa: D102
        return self._settled(name, data, "create")

    def replace(self, name: str, old: bytes, new: bytes) -> bool:  # noqa: D102
        def found() -> tuple[bytes, Any]:
            answer = obstore.get(self.connection, name)
            versions = {"e_tag": answer.meta["e_tag"], "version": answer.meta["version"]}
            return answer.bytes().to_bytes(), {
                key: value for key, value in versions.items() if value is not None
            }

        content, version = self._asked(name, found)
        return content == old and self._settled(name, new, version)

    def _settled(self, name: str, data: bytes, mode: Any) -> bool:
        """Put a file under a condition; where the answer leaves it open who won, ask the file."""
        pauses = _pauses()
        while True:
            try:
                with _answering(self.url):
                    obstore.put(self.connection, name, data, mode=mode)
                return True
            except (exceptions.BaseError, OSError) as error:
                _refuse_hopeless(self.url, name, error)
                try:
                    found = self._asked(name, lambda: self._get(name))
                except FileNotFoundError:
                    found = None
                # S3 answers 409 to both of two that meet, and then neither may have won: then ask
                # once more.
                if found == data:
                    return True
                is_conflict = isinstance(
                    error, exceptions.AlreadyExistsError | exceptions.PreconditionError
                )
                if found is not None and (is_conflict or mode == "create"):
                    return False
                if not next(pauses):
                    raise _unavailable(self.url, name, error) from error

    def put(self, name: str, data: bytes | Path) -> None:  # noqa: D102
        def upload() -> None:
            obstore.put(
                self.connection,
                name,
                data,
                chunk_size=REQUEST_BYTES,
                max_concurrency=UPLOADS_AT_ONCE,
            )

        self._repeated(name, upload)

    def copy(self, source: str, target: str, n_bytes: int) -> None:  # noqa: D102
        def copy() -> None:
            if n_bytes <= COPY_BYTES:
                obstore.copy(self.connection, source, target)
                return
            # On a thread: obstore panics where a call of it is made while it takes the pieces of
            # another one.
            with ThreadPoolExecutor(1) as reader:
                ranges = (
                    (at, min(at + REQUEST_BYTES, n_bytes))
                    for at in range(0, n_bytes, REQUEST_BYTES)
                )
                pieces = (reader.submit(self._get_range, source, *each).result() for each in ranges)
                obstore.put(
                    self.connection,
                    target,
                    pieces,
                    chunk_size=REQUEST_BYTES,
                    max_concurrency=UPLOADS_AT_ONCE,
                )

        self._repeated(source, copy)

    def delete(self, names: Iterable[str]) -> None:  # noqa: D102
        def delete(several: list[str]) -> None:
            try:
                obstore.delete(self.connection, several)
            except FileNotFoundError:
                for name in several if len(several) > 1 else ():
                    delete([name])

        wanted = list(names)
        for start in range(0, len(wanted), 1000):
            self._asked(wanted[start], partial(delete, wanted[start : start + 1000]))

    def _asked(self, name: str, request: Callable[[], T]) -> T:
        """Make a short request, which a server that is there answers soon."""
        with _answering(self.url):
            return self._repeated(name, request)

    def _repeated(self, name: str, request: Callable[[], T]) -> T:
        """Make a request, again and again while the server fails, for a while."""
        pauses = _pauses()
        while True:
            try:
                return request()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise StorageUnavailable(
                        f"{self.url}: the bucket does not exist. Make it first."
                    ) from error
                raise FileNotFoundError(f"{self.url}/{name}") from None
            except MoaDataError:
                raise
            except (exceptions.BaseError, OSError, _Torn) as error:
                _refuse_hopeless(self.url, name, error)
                if not next(pauses):
                    raise _unavailable(self.url, name, error) from error


def _connect(url: str) -> Connection:
    timeout = timedelta(seconds=timeout_s())
    is_plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    try:
        return from_url(
            url,
            # A stalled transfer ends, a slow one does not: the time of a whole request says nothing
            # where links differ.
            client_options={
                "timeout": timedelta(minutes=20), "read_timeout": timedelta(seconds=30),
                "connect_timeout": timedelta(seconds=5), **({"allow_http": True} if is_plain else {}),
            },
            retry_config={
                "max_retries": 10, "retry_timeout": timeout,
                "backoff": {"init_backoff": timedelta(seconds=_FIRST_PAUSE_S), "max_backoff": timedelta(seconds=5)},
            },
        )  # fmt: skip
    except (exceptions.BaseError, ValueError) as error:
        raise StoreNotFound(f"{url} cannot be opened as a store: {first_line(error)}") from error


def timeout_s() -> float:
    """Return how long a server may fail before a request is given up."""
    try:
        return max(0.0, float(os.environ.get(_TIMEOUT_VARIABLE, _TIMEOUT_S)))
    except ValueError:
        return _TIMEOUT_S


def _pauses() -> Iterator[bool]:
    """Wait at each step, longer and longer and by chance; yield whether there is time for one more try."""
    until = time.monotonic() + timeout_s()
    pause_s = _FIRST_PAUSE_S
    while True:
        if time.monotonic() + pause_s > until:
            yield False
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        yield True


def _grouped(ranges: Sequence[tuple[str, int, int]]) -> Iterator[list[int]]:
    """Yield the positions of ranges that one request reads: of one file, close together, and not too many bytes."""
    group: list[int] = []
    for i in sorted(range(len(ranges)), key=lambda i: ranges[i]):
        name, start, stop = ranges[i]
        if group:
            first = ranges[group[0]]
            last = ranges[group[-1]]
            fits = (
                name == first[0]
                and start - last[2] <= GAP_BYTES
                and stop - first[1] <= REQUEST_BYTES
            )
            if not fits:
                yield group
                group = []
        group.append(i)
    if group:
        yield group


def _refuse_hopeless(url: str, name: str, error: Exception) -> None:
    """Raise for what another try cannot change."""
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        raise StorageUnavailable(
            f"{url}/{name}: the server refuses ({_line(error)}). Put credentials that may do this into the "
            "environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        ) from error
    if isinstance(
        error,
        exceptions.InvalidPathError
        | exceptions.NotSupportedError
        | exceptions.UnknownConfigurationKeyError,
    ):
        raise _unavailable(url, name, error) from error


def _unavailable(url: str, name: str, error: Exception) -> StorageUnavailable:
    return StorageUnavailable(
        f"{url}/{name} could not be reached for {timeout_s():.0f} s ({_line(error)}). Check the network, "
        "AWS_ENDPOINT_URL and the credentials in the environment, then run the same command again."
    )


def _line(error: Exception) -> str:
    return first_line(error)[:300]


_runtime_pid: int | None = None


def _refuse_fork(url: str) -> None:
    """Refuse a process whose parent has used obstore before the fork: its threads are gone, and calls would hang."""
    global _runtime_pid
    if _runtime_pid is None:
        _runtime_pid = os.getpid()
    if _runtime_pid != os.getpid():
        raise StorageUnavailable(
            f"{url} was opened before this process was forked, which the client of object stores does not survive. "
            "Start processes with the method 'spawn' or 'forkserver', or use threads."
        )


_waiting: dict[object, tuple[float, str]] = {}
_watcher: threading.Thread | None = None


@contextmanager
def _answering(url: str) -> Iterator[None]:
    """Log that the bucket is waited for where the block, a short request and its repetitions, takes long."""
    global _watcher
    if _watcher is None:
        # One thread for all requests: a timer for each would cost as much as some of them.
        _watcher = threading.Thread(target=_watch, name="object-store-watch", daemon=True)
        _watcher.start()
    request = object()
    _waiting[request] = time.monotonic(), url
    try:
        yield
    finally:
        del _waiting[request]


def _watch() -> None:
    while True:
        time.sleep(NOTICE_S / 10)
        for began_s, url in list(_waiting.values()):
            if time.monotonic() - began_s > NOTICE_S:
                _log.warning("waiting for the bucket %s: no answer for %.0f s", url, NOTICE_S)
                return
