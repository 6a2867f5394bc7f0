"""Reads and writes files in buckets with obstore: S3 and compatible servers, Google Cloud, Azure.

All settings are environment variables. They have the same names as in each provider's own tools:
``AWS_ACCESS_KEY_ID``, ``AWS_REGION``, ``AWS_ENDPOINT_URL`` (any server with the S3 API),
``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME`` and so on. In addition, failed
requests are retried for ``MOA_DATA_REMOTE_TIMEOUT_S`` seconds.

A server may execute a request although its response is lost. So after an error, the client does not
know whether the request was executed, and sends the request again. Executing a request twice does
no harm. A repeated upload writes the same bytes again. A repeated conditional write (create or
replace) fails if the first one was executed. In that case, the client reads the file. If the file
has the new content, the write was successful.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from .requests import REQUEST_BYTES, Entry, requests

GAP_BYTES = 256 << 10
"""If two ranges of a file have at most this many bytes between them, one request reads both.

Reading the bytes between the ranges costs less than a second request.
"""
# Size of the largest file that S3 copies with one request. To copy a larger file, the client
# downloads and uploads it.
COPY_BYTES = 5 << 30
# Number of blocks of one file that are uploaded in parallel. All these blocks are in memory at the
# same time.
UPLOADS_AT_ONCE = 8
# If a request gets no response for this number of seconds, the process logs a message, at most once
# for each bucket.
NOTICE_S = 5.0
SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})
_TIMEOUT_VARIABLE = "MOA_DATA_REMOTE_TIMEOUT_S"
_TIMEOUT_S = 180.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")

# After these errors, a retry would fail, too. Either the credentials are wrong (refusals), or the
# request itself is wrong (mistakes).
_REFUSALS = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_MISTAKES = (
    exceptions.InvalidPathError,
    exceptions.NotSupportedError,
    exceptions.UnknownConfigurationKeyError,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Torn(Exception):
    """A response has fewer bytes than the server announced or the client requested."""


class ObjectStore:
    """The files below a prefix of a bucket.

    Object stores cannot rename files. So the server copies a file to its new name instead. Every
    method raises FileNotFoundError if a file does not exist, and StorageUnavailable if its
    existence cannot be determined.

    Several threads may share an object of this class. A pickled object contains only the URL, so
    each process opens its own connection.
    """

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme.lower() not in SCHEMES:
            raise StoreNotFound(
                f"{url} cannot be opened as a store. Expected a folder, or an s3://, gs:// or "
                "az:// URL. Download stores from the Hub first, with `moa-data pull`."
            )
        self.url = url.rstrip("/")
        self._connected: Connection | None = None

    def __reduce__(self) -> "tuple[type[ObjectStore], tuple[str]]":
        return (ObjectStore, (self.url,))

    @property
    def connection(self) -> Connection:
        """The connection to the bucket: an object of the library obstore.

        ``zarr.storage.ObjectStore`` accepts the object, too.
        """
        _refuse_fork(self.url)
        if self._connected is None:
            self._connected = _connect(self.url)
        return self._connected

    def list_files(self, folder: str) -> dict[str, Entry]:
        """Return the size and modification time of every file below a folder, by file name.

        If ``folder`` is a file, only this file is returned. The listing may be out of date.
        """
        items = self._asked(folder, lambda: obstore.list(self.connection, folder or None).collect())
        return {item["path"]: Entry(item["size"], item["last_modified"]) for item in items}

    def size(self, name: str) -> int:
        """Return the current size of a file in bytes."""
        return int(self._asked(name, lambda: obstore.head(self.connection, name)["size"]))

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return the content of a file.

        Raises:
            ValueError: the file is longer than ``max_bytes``. Nothing was read.
        """
        return self._asked(name, lambda: self._get(name, max_bytes))

    def _get(self, name: str, max_bytes: int | None = None) -> bytes:
        response = obstore.get(self.connection, name)
        n_bytes = response.meta["size"]
        check_length(n_bytes, max_bytes)
        content = response.bytes().to_bytes()
        if len(content) != n_bytes:
            raise _Torn(f"the server sent only {len(content)} of {n_bytes} bytes")
        return content

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[memoryview]:
        """Read byte ranges.

        The range (name, start, stop) consists of bytes [start, stop) of the file ``name``.

        If a file ends before ``stop``, the result for this range has fewer bytes.
        """
        contents: list[memoryview] = [memoryview(b"")] * len(ranges)

        def fetch(group: Sequence[int]) -> None:
            name, first, _ = ranges[group[0]]
            last = max(ranges[i][2] for i in group)
            data = self._asked(name, lambda: self._get_range(name, first, last))
            for i in group:
                contents[i] = data[ranges[i][1] - first : ranges[i][2] - first]

        for _ in requests().map(fetch, _grouped(ranges)):
            pass
        return contents

    def _get_range(self, name: str, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a file with one request.

        ``obstore.get_ranges`` is not used, because this function panics if the server returns fewer
        bytes.
        """
        try:
            data = memoryview(obstore.get_range(self.connection, name, start=start, end=stop))
            if len(data) == stop - start:
                return data
            failure: Exception = _Torn("the server sent fewer bytes than requested")
        except exceptions.BaseError as error:
            failure = error
        n_bytes = obstore.head(self.connection, name)["size"]
        if n_bytes >= stop:
            raise failure
        # The file ends before `stop`. Servers respond to such a range in different ways, so request
        # only bytes that exist.
        if start >= n_bytes:
            return memoryview(b"")
        return memoryview(obstore.get_range(self.connection, name, start=start, end=n_bytes))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a file only if it does not exist yet.

        Returns:
            Whether the content of the file is now ``data``. This is also true if another writer has
            written the same content.
        """
        return self._settled(name, data, "create")

    def replace(self, name: str, old: bytes, new: bytes) -> bool:
        """Replace a file if its content is ``old``. Return whether the content is now ``new``."""

        def found() -> tuple[bytes, Any]:
            response = obstore.get(self.connection, name)
            meta: Any = response.meta
            version = {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}
            return response.bytes().to_bytes(), version

        content, version = self._asked(name, found)
        return content == old and self._settled(name, new, version)

    def _settled(self, name: str, data: bytes, mode: Any) -> bool:
        """Write a file under a condition. Return whether the content of the file is now ``data``.

        If the response does not show whether the file was written, the content of the file is read
        and compared with ``data``.

        Args:
            name: name of the file.
            data: new content of the file.
            mode: the condition: ``"create"`` if the file must not exist, or the version of the file
                that may be replaced.
        """

        def write() -> bool:
            try:
                obstore.put(self.connection, name, data, mode=mode)
            except (*_REFUSALS, *_MISTAKES):
                raise
            except (exceptions.BaseError, OSError) as error:
                try:
                    current = self._get(name)
                except FileNotFoundError:
                    current = None
                if current == data:
                    return True
                is_conflict = isinstance(
                    error, exceptions.AlreadyExistsError | exceptions.PreconditionError
                )
                if current is not None and (is_conflict or mode == "create"):
                    return False
                # If two writers send a request at the same time, S3 may respond with 409 to both of
                # them, although neither request has written the file. So raise the error. The
                # caller then tries again.
                raise
            return True

        return self._asked(name, write)

    def put(self, name: str, data: bytes | Path) -> None:
        """Write or replace a file atomically. If ``data`` is a local path, upload that file."""
        self._repeated(name, lambda: self._upload(name, data))

    def _upload(self, name: str, data: Any) -> None:
        obstore.put(
            self.connection,
            name,
            data,
            chunk_size=REQUEST_BYTES,
            max_concurrency=UPLOADS_AT_ONCE,
        )

    def copy(self, source: str, target: str, n_bytes: int) -> None:
        """Copy ``source``, a file of ``n_bytes``, atomically to ``target``."""

        def copy() -> None:
            if n_bytes <= COPY_BYTES:
                obstore.copy(self.connection, source, target)
                return
            # obstore takes the blocks of the upload from an iterator. If the iterator calls obstore
            # on the same thread, obstore panics. So read the blocks on another thread.
            with ThreadPoolExecutor(1) as reader:

                def read(start: int) -> memoryview:
                    stop = min(start + REQUEST_BYTES, n_bytes)
                    return reader.submit(self._get_range, source, start, stop).result()

                # A block is read only when obstore asks for it.
                pieces = (read(start) for start in range(0, n_bytes, REQUEST_BYTES))
                self._upload(target, pieces)

        self._repeated(source, copy)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files. Files that do not exist are skipped."""

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
        """Make a short request with retries. If the request takes a long time, log a message."""
        global _watcher
        if _watcher is None:
            # One thread watches all requests, because a timer per request would nearly double the
            # CPU time of a short request.
            _watcher = threading.Thread(target=_watch, name="object-store-watch", daemon=True)
            _watcher.start()
        key = object()
        _waiting[key] = time.monotonic(), self.url
        try:
            return self._repeated(name, request)
        finally:
            del _waiting[key]

    def _repeated(self, name: str, request: Callable[[], T]) -> T:
        """Make a request. If the server fails, retry the request for a limited time."""
        until_s = time.monotonic() + timeout_s()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return request()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise StorageUnavailable(
                        f"The bucket of {self.url} does not exist. Check the URL, or create the "
                        "bucket."
                    ) from error
                raise FileNotFoundError(f"{self.url}/{name}") from None
            except MoaDataError:
                raise
            except _REFUSALS as error:
                raise StorageUnavailable(
                    f"The server refuses access to {self.url}/{name} ({_line(error)}). Set "
                    "credentials with the needed permissions as environment variables, such as "
                    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
                ) from error
            except (exceptions.BaseError, OSError, _Torn) as error:
                if isinstance(error, _MISTAKES) or time.monotonic() + pause_s > until_s:
                    raise StorageUnavailable(
                        f"{self.url}/{name} could not be reached for {timeout_s():.0f} s "
                        f"({_line(error)}). Check the network, AWS_ENDPOINT_URL and the "
                        "credentials in the environment, then run the same command again."
                    ) from error
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _connect(url: str) -> Connection:
    timeout = timedelta(seconds=timeout_s())
    is_plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    try:
        return from_url(
            url,
            # The read timeout aborts transfers that have stalled, but not slow transfers. The
            # timeout of a whole request is long, so that requests also succeed on slow links.
            client_options={
                "timeout": timedelta(minutes=20), "read_timeout": timedelta(seconds=30),
                "connect_timeout": timedelta(seconds=5),
                **({"allow_http": True} if is_plain else {}),
            },
            retry_config={
                "max_retries": 10, "retry_timeout": timeout,
                "backoff": {
                    "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
                    "max_backoff": timedelta(seconds=5),
                },
            },
        )  # fmt: skip
    except (exceptions.BaseError, ValueError) as error:
        raise StoreNotFound(
            f"{url} cannot be opened as a store ({first_line(error)}). Check the URL, and the "
            "environment variables for the bucket, such as AWS_ENDPOINT_URL."
        ) from error


def timeout_s() -> float:
    """Return how long a failed request is retried, in seconds."""
    try:
        return max(0.0, float(os.environ.get(_TIMEOUT_VARIABLE, _TIMEOUT_S)))
    except ValueError:
        return _TIMEOUT_S


def _grouped(ranges: Sequence[tuple[str, int, int]]) -> Iterator[list[int]]:
    """Group ranges so that one request reads each group. Yield a group as indices of ``ranges``.

    The ranges of a group are in the same file, have gaps of at most GAP_BYTES, and span at most
    REQUEST_BYTES. A range that is longer than REQUEST_BYTES is the only range of its group.
    """
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


def _line(error: Exception) -> str:
    return first_line(error)[:300]


_runtime_pid: int | None = None


def _refuse_fork(url: str) -> None:
    """Raise an error in a forked process if its parent had used obstore before the fork.

    obstore runs requests on threads. These threads do not exist in the child process, so requests
    of the child process would hang.
    """
    global _runtime_pid
    if _runtime_pid is None:
        _runtime_pid = os.getpid()
    if _runtime_pid != os.getpid():
        raise StorageUnavailable(
            f"{url} was opened before this process was forked, and the object store client does "
            "not work after a fork. Start processes with the method 'spawn' or 'forkserver', or "
            "use threads."
        )


# Maps each running request to its start time in seconds and the URL of its bucket.
_waiting: dict[object, tuple[float, str]] = {}
_watcher: threading.Thread | None = None


def _watch() -> None:
    """If a bucket does not answer for a long time, log a message, at most once for each bucket."""
    reported: set[str] = set()
    while True:
        time.sleep(NOTICE_S / 10)
        for began_s, url in list(_waiting.values()):
            if time.monotonic() - began_s > NOTICE_S and url not in reported:
                reported.add(url)
                _log.warning(
                    "still waiting for the bucket %s, which has not answered for %.0f s",
                    url,
                    NOTICE_S,
                )
