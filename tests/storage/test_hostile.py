"""Hostile files: whatever stands in a store, readers raise the store's own errors and allocate no absurd sizes."""

import copy
import json
import os
import resource
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moa_data.storage.commit import PartCommit, read_part_commit
from moa_data.storage.durable import crc32c
from moa_data.storage.errors import CheckIncomplete, ManifestInvalid, ShardCorrupt, StoreError
from moa_data.storage.plan import PLAN_SCHEMA, read_plan
from moa_data.storage.reader import ActivationStore
from moa_data.storage.shard import FileRecord
from moa_data.storage.summary import summarize_store
from moa_data.storage.verify import verify_store

HEADROOM_BYTES = 3 << 29
FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
QUICK = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=FIXTURE)
LONG = settings(max_examples=2000, deadline=None, suppress_health_check=FIXTURE)

HOSTILE = st.sampled_from(
    [None, True, -1, 0, 1, 2, 3, 64, 2**31, 2**40, 2**63, 2**64, 10**30, 0.5, 1e308, "", "x", "/etc", "../..", "a\0b",
     "\ud800", "n" * 5000, [], {}, [0], [-1], [2**40], [[1]], [None], {"a": 1}, ["token"], ["token", "token"]]
)  # fmt: skip


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the process grow by so much and no more: what allocates absurd sizes gets a MemoryError."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    n_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * page_bytes
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes + HEADROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def use(store: Path) -> None:
    """Do all that readers do; only the store's own errors may come of it."""
    with bounded_memory():
        for action in (summarize_store, verify_everything, read_everything):
            try:
                action(store)
            except CheckIncomplete:
                raise  # what allocates absurd sizes ends in it
            except StoreError:
                continue


def verify_everything(store: Path) -> None:
    verify_store(store).check_complete(store)


def read_everything(store: Path) -> None:
    with ActivationStore(store) as reader:
        for i in range(len(reader)):
            for name in reader.fields:
                reader.read(i, name)


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    good = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(good)


@pytest.fixture(scope="module")
def unsealed(tmp_path_factory: pytest.TempPathFactory, recipe_of) -> Path:
    """A small store without checksums of store.json and plan.parquet, so that what they say is believed so far."""
    store = recipe_of((70, 3, 130, 64), part_tokens=256).write(tmp_path_factory.mktemp("hostile") / "store")
    (store / "commits/store.json").unlink()
    return store


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value in a JSON document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@dataclass(frozen=True)
class Change:
    """One change of a JSON document, chosen without knowing the document."""

    place: int
    kind: str
    key: str
    value: Any

    def apply(self, document: Any) -> None:
        """Change the value at a place, counted around all there are."""
        ways = [way for way in places(document) if way]
        if not ways:
            return
        *way, last = ways[self.place % len(ways)]
        owner = document
        for key in way:
            owner = owner[key]
        if self.kind == "remove":
            del owner[last]
        elif self.kind == "add" and isinstance(owner, dict):
            owner[self.key] = copy.deepcopy(self.value)  # the next change may go into it
        else:
            owner[last] = copy.deepcopy(self.value)


CHANGES = st.lists(
    st.builds(
        Change,
        st.integers(0, 2**16),
        st.sampled_from(["replace", "replace", "replace", "remove", "add"]),
        st.text(max_size=3),
        HOSTILE,
    ),
    min_size=1,
    max_size=2,
)


def changed_document(text: bytes) -> st.SearchStrategy[bytes]:
    """A JSON document with a few values replaced, removed or added."""

    def change(changes: list[Change]) -> bytes:
        document = json.loads(text)
        for one in changes:
            one.apply(document)
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()

    return CHANGES.map(change)


@st.composite
def changed_bytes(draw: Callable[..., Any], content: bytes) -> bytes:
    """A file with bytes overwritten, inserted or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        piece = draw(st.binary(max_size=8) | st.sampled_from([b"[" * 100_000, b"\xff" * 8, b"1" * 5000, b"NaN"]))
        kind = draw(st.sampled_from(["overwrite", "insert", "cut"]))
        if kind == "cut":
            del data[at:]
        else:
            data[at : at + len(piece) * (kind == "overwrite")] = piece
    return bytes(data)


DOCUMENTS = ("store.json", "commits/part-00000.json", "parts/part-00000.zarr/kv/zarr.json")


def check_documents(store: Path, data: Any) -> None:
    path = store / data.draw(st.sampled_from(DOCUMENTS))
    good = path.read_bytes()
    content = data.draw(changed_document(good) | changed_bytes(good))
    with replaced(path, content):
        if path.name == "zarr.json":  # or the commit's size would give it away
            commit_path = store / "commits/part-00000.json"
            commit = read_part_commit(commit_path)
            files = {**commit.files, "kv/zarr.json": FileRecord(len(content), zlib.crc32(content))}
            counts = (commit.part, commit.n_sequences, commit.n_tokens, commit.allocated_tokens)
            with replaced(commit_path, PartCommit(*counts, files).to_json()):
                use(store)
        else:
            use(store)


@QUICK
@given(data=st.data())
def test_documents(unsealed: Path, data: Any) -> None:
    check_documents(unsealed, data)


@pytest.mark.slow
@LONG
@given(data=st.data())
def test_many_documents(unsealed: Path, data: Any) -> None:
    check_documents(unsealed, data)


def check_plan_bytes(store: Path, data: Any) -> None:
    path = store / "plan.parquet"
    with replaced(path, data.draw(changed_bytes(path.read_bytes()))):
        use(store)


@QUICK
@given(data=st.data())
def test_plan_bytes(unsealed: Path, data: Any) -> None:
    check_plan_bytes(unsealed, data)


@pytest.mark.slow
@LONG
@given(data=st.data())
def test_many_plan_bytes(unsealed: Path, data: Any) -> None:
    check_plan_bytes(unsealed, data)


@QUICK
@given(data=st.data())
def test_plan_values(unsealed: Path, data: Any) -> None:
    """A plan whose file is whole and whose numbers are not."""
    path = unsealed / "plan.parquet"
    plan = read_plan(path)
    name = data.draw(st.sampled_from(["source_row", "n_tokens", "n_response_tokens", "part", "first_token"]))
    values = plan[name].to_pylist()
    high = 2**31 - 1 if plan.schema.field(name).type == pa.int32() else 2**63 - 1
    at = data.draw(st.integers(0, len(values) - 1))
    values[at] = data.draw(st.sampled_from([None, -1, 0, 1, 63, 64, 2**20, high, -high - 1]))
    column = plan.schema.get_field_index(name)
    changed = plan.set_column(column, PLAN_SCHEMA.field(name), pa.array(values, PLAN_SCHEMA.field(name).type))
    sink = pa.BufferOutputStream()
    pq.write_table(changed, sink)
    with replaced(path, sink.getvalue().to_pybytes()):
        use(unsealed)


def test_a_plan_that_unpacks_to_gigabytes_is_not_read(tmp_path: Path) -> None:
    n = 1 << 22
    columns = {field.name: pa.array(np.zeros(n), field.type) for field in list(PLAN_SCHEMA)[1:]}
    ids = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array(["x" * 10_000])).cast(
        pa.dictionary(pa.int32(), pa.string())
    )
    table = pa.table({"sequence_id": ids, **columns}).replace_schema_metadata(None)
    pq.write_table(table, tmp_path / "plan.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "plan.parquet").stat().st_size < 100_000
    with bounded_memory(), pytest.raises(ManifestInvalid, match="4194304 rows"):
        read_plan(tmp_path / "plan.parquet")


@QUICK
@given(data=st.data())
def test_shard_indexes_and_chunks(unsealed: Path, data: Any) -> None:
    """Index entries and chunk headers that lie, under checksums that hold."""
    path = unsealed / "parts/part-00000.zarr/kv/c/0/0/0/0/0"
    content = bytearray(path.read_bytes())
    offset = data.draw(st.integers(1, 30)) * 8 + 4
    number = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]) | st.integers(0, len(content)))
    if data.draw(st.booleans()):
        content[-offset : len(content) - offset + 8] = number.to_bytes(8, "little")
        with ActivationStore(unsealed) as reader:
            n_index_bytes = 16 * reader._arrays.shard(0, reader.codec.fields["kv"].arrays[0], 0).index[..., 0].size
        content[-4:] = crc32c(bytes(content[-4 - n_index_bytes : -4])).to_bytes(4, "little")
    else:
        with ActivationStore(unsealed) as reader:
            index = reader._arrays.shard(0, reader.codec.fields["kv"].arrays[0], 0).index
        start, n_bytes = (int(value) for value in index[0, 0])
        at = start + data.draw(st.integers(0, min(40, n_bytes - 12)))
        content[at : at + 4] = (number % 2**32).to_bytes(4, "little")
        stop = start + n_bytes
        content[stop - 4 : stop] = crc32c(bytes(content[start : stop - 4])).to_bytes(4, "little")
    with replaced(path, bytes(content)):
        use(unsealed)
        with bounded_memory(), suppress(ShardCorrupt):
            read_everything(unsealed)
