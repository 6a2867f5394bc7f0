"""Every job that writes or reads a store treats one in a bucket like one on a disk."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moa_data.errors import StoreLocked
from moa_data.pipeline.add import add
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.exchange.config import ExportConfig
from moa_data.pipeline.exchange.transfer import export_store
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.plan import build_plan
from moa_data.pipeline.recode import recode
from moa_data.storage.backend import open_path
from moa_data.storage.paths import RemotePath
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import summarize_store, verify_store
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.object_stores import copy_up, empty_prefix, read_remote_tree, use
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.stores import read_tree


@pytest.fixture(scope="module")
def endpoint(moto_server: str) -> Iterator[str]:
    with use(moto_server):
        yield moto_server


@pytest.fixture(scope="module")
def config(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ExtractConfig:
    folder = tmp_path_factory.mktemp("buckets")
    return ExtractConfig.of(
        model=str(target_folder),
        dataset=str(write_jsonl(folder / "chats.jsonl", random_chats(5))),
        out=str(folder / "store"), max_length=64, device="cpu", target_layers=1, part_tokens=128,
        batch_tokens=128,
        activations=("hidden:last",),
    )  # fmt: skip


@pytest.fixture(scope="module")
def local(config: ExtractConfig) -> Path:
    extract(config)
    return Path(config.out)


@pytest.fixture(scope="module")
def remote(config: ExtractConfig, endpoint: str) -> RemotePath:
    """The same store in a bucket. Its extraction was interrupted once and resumed."""
    config = config.replaced(out=f"{empty_prefix(endpoint)}/store")

    def interrupt(done: int, total: int, message: str) -> None:
        if message.startswith("extract, 1/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(config, progress=progress_to(interrupt))
    report = extract(config)
    assert report.n_parts_done < report.n_parts
    store = open_path(config.out)
    assert isinstance(store, RemotePath)
    return store


def test_extract_gives_the_bytes_of_a_disk(
    config: ExtractConfig, local: Path, remote: RemotePath
) -> None:
    assert read_remote_tree(remote) == read_tree(local)
    again = extract(config.replaced(out=str(remote)))
    assert "wrote no part" in again.describe()
    plan = build_plan(config.replaced(out=str(remote)))
    assert plan.texts_origin is None
    assert "for shards that are being uploaded" in plan.describe()
    plan.check_disk()


def test_readers_of_a_bucket(
    config: ExtractConfig, local: Path, remote: RemotePath, tmp_path: Path
) -> None:
    assert verify_store(remote).ok
    one, other = summarize_store(local), summarize_store(remote)
    assert (one.has_target, one.stored_bytes, one.lengths) == (
        other.has_target,
        other.stored_bytes,
        other.lengths,
    )
    assert audit(remote, config.model, samples=2, device="cpu").ok
    for store, name in ((local, "one"), (remote, "other")):
        export_store(ExportConfig.of(store=str(store), format="eagle", out=str(tmp_path / name)))
    trees = (read_tree(tmp_path / name) for name in ("one", "other"))
    exported, same = (
        {file: data for file, data in tree.items() if file.endswith(".ckpt")} for tree in trees
    )
    assert exported == same != {}


@pytest.mark.slow
def test_recode_writes_to_a_bucket(local: Path, remote: RemotePath, tmp_path: Path) -> None:
    recode(local, "int8", tmp_path / "int8")
    out = remote.bucket.url + "-int8"
    report = recode(remote, "int8", out)
    assert report.n_parts_done == report.n_parts
    written = open_path(out)
    assert isinstance(written, RemotePath)
    assert read_remote_tree(written) == read_tree(tmp_path / "int8")
    assert recode(remote, "int8", out).n_parts_done == 0


def test_add_writes_to_a_bucket(
    config: ExtractConfig, local: Path, endpoint: str, tmp_path: Path
) -> None:
    # The addition changes copies, since other tests compare with the stores as extracted.
    on_disk = shutil.copytree(local, tmp_path / "store", ignore=shutil.ignore_patterns("*.lock"))
    in_bucket = copy_up(on_disk, f"{empty_prefix(endpoint)}/store")
    for location in (str(on_disk), str(in_bucket)):
        report = add(
            AddConfig.of(
                store=location, model=config.model, activations=("hidden:layer:0",), target_layers=2
            )
        )
        assert report.n_parts_done == report.n_parts
    assert read_remote_tree(in_bucket) == read_tree(on_disk)
    assert verify_store(in_bucket).ok


@pytest.mark.slow
def test_another_addition_to_a_bucket_is_refused_before_it_changes_the_store(
    config: ExtractConfig, endpoint: str
) -> None:
    out = f"{empty_prefix(endpoint)}/store"
    extract(config.replaced(out=out, codec="transform:3"))
    store = open_path(out)
    assert isinstance(store, RemotePath)
    first = AddConfig.of(
        store=out, model=config.model, activations=("hidden:layer:0",), target_layers=1
    )

    def interrupt(done: int, total: int, message: str) -> None:
        if message.startswith("add, 1/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add(first, progress=progress_to(interrupt))
    before = read_remote_tree(store)
    with pytest.raises(StoreLocked):
        add(first.replaced(activations=("hidden:layer:2",)))
    assert read_remote_tree(store) == before
    assert add(first).n_parts_done > 0
    assert verify_store(store).ok


@pytest.mark.slow
def test_repair_mends_a_bucket(config: ExtractConfig, local: Path, remote: RemotePath) -> None:
    shard = next(path for path in remote.names_below() if path.startswith("parts/hidden/last/c.1."))
    content = (remote / shard).read_bytes()
    remote.bucket.put(shard, content[:30] + bytes([content[30] ^ 1]) + content[31:])
    assert [damage.part for damage in verify_store(remote).damages] == [1]
    repair(remote, config.model, device="cpu")
    assert verify_store(remote).ok
    assert read_remote_tree(remote) == read_tree(local)


@pytest.mark.slow
def test_workers_write_to_a_bucket(config: ExtractConfig, local: Path, endpoint: str) -> None:
    out = open_path(f"{empty_prefix(endpoint)}/workers")
    assert isinstance(out, RemotePath)
    assert "workers      2" in extract(config.replaced(out=str(out), workers=2)).describe()
    assert verify_store(out).ok
    with ActivationStore(out) as one, ActivationStore(local) as other:
        found, expected = (
            store.read_batch(range(len(store)), "hidden/last") for store in (one, other)
        )
        np.testing.assert_array_equal(found["hidden/last"], expected["hidden/last"])
