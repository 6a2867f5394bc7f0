"""Hostile files: readers raise only the store's own errors and allocate no absurd sizes."""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from hypothesis import settings
from hypothesis import strategies as st

from moa_data.errors import StoreDamaged, StoreError
from moa_data.storage.backend import crc32c
from moa_data.storage.commit import write_manifest_commit
from moa_data.storage.plan import PLAN_SCHEMA, read_plan
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import summarize_store, verify_store
from moa_data.storage.schema import StoreManifest
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.hostile import (
    QUICK_AND_LONG,
    bounded_memory,
    changed,
    changed_bytes,
    endless,
    only_own_errors,
    replaced,
    try_examples,
)
from moa_data.tests.kit.stores import make_recipe
from moa_data.tests.kit.variants import quick
from moa_data.tests.storage.codecs import contract


def use(store: Path) -> None:
    """Do everything that readers do; only the store's own errors may be raised."""
    only_own_errors(
        *(
            partial(action, store)
            for action in (summarize_store, verify_everything, read_everything)
        )
    )


def verify_everything(store: Path) -> None:
    verify_store(store).check_complete(store)


def read_everything(store: Path) -> None:
    with ActivationStore(store) as reader:
        for i in range(len(reader)):
            for name in reader.fields:
                reader.read(i, name)


@pytest.fixture(scope="module")
def believed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store whose store.json and plan.parquet have no checksums, so readers trust them."""
    store = make_recipe((70, 3, 64), part_tokens=192).write(
        tmp_path_factory.mktemp("hostile") / "store"
    )
    (store / "commits/store.json").unlink()
    return store


DOCUMENTS = ("store.json", "plan.parquet", "commits/part-00000.json", "parts/kv/zarr.json")


def check_documents(store: Path, data: Any) -> None:
    path = store / data.draw(st.sampled_from(DOCUMENTS))
    good = path.read_bytes()
    content = data.draw(changed_bytes(good) if path.suffix == ".parquet" else changed(good))
    with replaced(path, content):
        use(store)


def check_plan_values(store: Path, data: Any) -> None:
    """Draw a plan whose file is intact but whose numbers are wrong."""
    path = store / "plan.parquet"
    plan = read_plan(path)
    name = data.draw(
        st.sampled_from(["source_row", "n_tokens", "n_response_tokens", "part", "first_token"])
    )
    values = plan[name].to_pylist()
    high = 2**31 - 1 if plan.schema.field(name).type == pa.int32() else 2**63 - 1
    at = data.draw(st.integers(0, len(values) - 1))
    values[at] = data.draw(st.sampled_from([None, -1, 0, 1, 63, 64, 2**20, high, -high - 1]))
    column = plan.schema.get_field_index(name)
    changed = plan.set_column(
        column, PLAN_SCHEMA.field(name), pa.array(values, PLAN_SCHEMA.field(name).type)
    )
    sink = pa.BufferOutputStream()
    pq.write_table(changed, sink)
    with replaced(path, sink.getvalue().to_pybytes()):
        use(store)


def check_shard_indexes_and_chunks(store: Path, data: Any) -> None:
    """Draw wrong index entries and chunk headers, with checksums that match them."""
    path = store / "parts/kv/c.0.0.0.0.0"
    content = bytearray(path.read_bytes())
    number = data.draw(
        st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]) | st.integers(0, len(content))
    )
    with ActivationStore(store) as reader:
        shard = reader._shards.shard(0, reader.codec.fields["kv"].arrays[0], 0)
    if data.draw(st.booleans()):
        n_index_bytes = 16 * shard.grid.rows_per_shard * shard.grid.chunks_per_row
        at = len(content) - 4 - n_index_bytes + 8 * data.draw(st.integers(0, shard.index.size - 1))
        content[at : at + 8] = number.to_bytes(8, "little")
        content[-4:] = crc32c(bytes(content[-4 - n_index_bytes : -4])).to_bytes(4, "little")
    else:
        start, n_bytes = (int(value) for value in shard.index[0, 0])
        at = start + data.draw(st.integers(0, min(40, n_bytes - 12)))
        content[at : at + 4] = (number % 2**32).to_bytes(4, "little")
        stop = start + n_bytes
        content[stop - 4 : stop] = crc32c(bytes(content[start : stop - 4])).to_bytes(4, "little")
    with replaced(path, bytes(content)):
        use(store)
        with bounded_memory(), suppress(StoreDamaged):
            read_everything(store)


def expect_refusal(store: Path) -> None:
    """The store's own error comes at once: verify lists it, and readers of the file raise it."""
    use(store)
    with bounded_memory():
        with suppress(StoreError):
            assert verify_store(store).damages
        with pytest.raises(StoreError):
            read_everything(store)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store. Tests put its files back."""
    return make_recipe((70, 3)).write(tmp_path_factory.mktemp("sealed") / "store")


@pytest.fixture(scope="module")
def unsealed(sealed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same store without the checksums of store.json and plan.parquet."""
    store = Path(shutil.copytree(sealed, tmp_path_factory.mktemp("unsealed") / "store"))
    (store / "commits/store.json").unlink()
    return store


ENDLESS = ("fifo", "device", "folder", "sparse")
ENDING = (
    "store.json", "plan.parquet", "commits/part-00000.json", "parts/kv/zarr.json",
    "parts/kv/c.0.0.0.0.0",
)  # fmt: skip


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("name", [*ENDING, "commits/store.json"])
def test_files_that_never_end_are_not_read(sealed: Path, name: str, kind: str) -> None:
    with endless(sealed / name, kind):
        expect_refusal(sealed)


@pytest.mark.parametrize("kind", quick(ENDLESS, ("fifo", "sparse")))
@pytest.mark.parametrize("name", ENDING)
def test_files_without_checksums_that_never_end_are_not_read(
    unsealed: Path, name: str, kind: str
) -> None:
    with endless(unsealed / name, kind):
        expect_refusal(unsealed)


def test_pages_that_unpack_to_gigabytes_are_not_read(tmp_path: Path) -> None:
    """One long id compresses to some kilobytes.

    The metadata gives its size before the page is decompressed.
    """
    ids = pa.array(["x" * (1 << 24)], pa.string())
    numbers = [pa.array(np.zeros(1), field.type) for field in list(PLAN_SCHEMA)[1:]]
    pq.write_table(
        pa.table([ids, *numbers], schema=PLAN_SCHEMA), tmp_path / "plan.parquet", compression="zstd"
    )
    assert (tmp_path / "plan.parquet").stat().st_size < 1 << 20
    with bounded_memory(), raises_naming(StoreDamaged, tmp_path / "plan.parquet", "1 rows"):
        read_plan(tmp_path / "plan.parquet")


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store whose codec has learned a basis.

    It predicts from tokens and from other fields.
    """
    codec = contract.learned("transform:2,tokens,from-kv")
    return contract.CodecContract.write(tmp_path_factory.mktemp("learned") / "store", codec)


def use_believing(store: Path, basis: bytes) -> None:
    """Use a store with this basis. store.json has its hash, the commit that of store.json."""
    manifest = json.loads((store / "store.json").read_text())
    manifest["codec"]["basis_sha256"] = hashlib.sha256(basis).hexdigest()
    with (
        replaced(store / "codec/basis.safetensors", basis),
        replaced(
            store / "store.json", StoreManifest.from_json(json.dumps(manifest)).to_json().encode()
        ),
        replaced(store / "commits/store.json", (store / "commits/store.json").read_bytes()),
    ):
        write_manifest_commit(store)
        use(store)


@st.composite
def changed_basis(draw: Callable[..., Any], content: bytes) -> bytes:
    """Draw a basis whose file is intact.

    Arrays are removed, have another shape or dtype, or hold other numbers.
    """
    arrays = safetensors.numpy.load(content)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(arrays)))
        array = arrays[name].copy()
        kind = draw(
            st.sampled_from(
                ["remove", "cut", "flatten", "widen", "dtype", "fill", "number", "empty"]
            )
        )
        number = draw(st.sampled_from([np.nan, np.inf, -np.inf, -1.0, 0.0, 1.0, 3.0, 7e4, 1e30]))
        if kind == "remove":
            arrays.pop(name)
            continue
        if kind == "number" and array.size:
            array.reshape(-1)[draw(st.integers(0, array.size - 1))] = number
        arrays[name] = {
            "cut": array[: len(array) // 2] if array.ndim else array,
            "flatten": array.reshape(-1),
            "widen": array[None],
            "dtype": array.astype(
                draw(st.sampled_from([np.int8, np.float64, np.int64, np.float16]))
            ),
            "fill": np.full_like(array, number),
            "number": array,
            "empty": np.zeros((0, *array.shape[1:]), array.dtype),
        }[kind]
    return bytes(
        safetensors.numpy.save(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        )
    )


def check_basis(store: Path, data: Any) -> None:
    good = (store / "codec/basis.safetensors").read_bytes()
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numbers that are not finite
        use_believing(store, data.draw(changed_basis(good) | changed_bytes(good)))


@QUICK_AND_LONG
@pytest.mark.parametrize(
    ("store", "check"),
    [
        ("believed", check_documents), ("believed", check_plan_values),
        ("believed", check_shard_indexes_and_chunks), ("learned", check_basis),
    ],
)  # fmt: skip
def test_changed_files(
    request: pytest.FixtureRequest, store: str, check: Callable[[Path, Any], None], how: settings
) -> None:
    path = request.getfixturevalue(store)
    try_examples(how, lambda data: check(path, data))
