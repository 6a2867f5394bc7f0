"""Hashes of weights are right, and large files are read only once."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa_data.errors import TargetError
from moa_data.moa.targets import bundle
from moa_data.moa.targets.bundle import FrozenTarget, file_sha256, hash_target, save_target_bundle
from moa_data.moa.targets.loading import load_target_model
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_model, build_tokenizer, write_target


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """List the files that are read to be hashed.

    The cache of hashes is empty, and every file counts as settled.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bundle, "_SETTLED_S", -1.0)
    names: list[str] = []

    def counted(stream: Any, algorithm: str) -> Any:
        names.append(Path(stream.name).name)
        return file_digest(stream, algorithm)

    file_digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", counted)
    return names


def test_a_file_is_read_once_until_it_changes(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    for content in (b"first", b"other"):  # both have the same length
        file.write_bytes(content)
        os.utime(file, ns=(10**18, 10**18))  # and the same time, as a copy may have
        assert [file_sha256(file) for _ in range(3)] == [hashlib.sha256(content).hexdigest()] * 3
    assert reads == ["weights"] * 2
    # The next file is not settled yet: it could change again within one tick of the clock.
    monkeypatch.setattr(bundle, "_SETTLED_S", 60.0)
    file.write_bytes(b"newer")
    assert file_sha256(file) == file_sha256(file)
    assert reads == ["weights"] * 4


def test_a_damaged_or_unwritable_cache_costs_time_alone(tmp_path: Path, reads: list[str]) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a")
    right = file_sha256(file)
    (kept,) = bundle.cache_folder("sha256").iterdir()
    for content in (b"", b"\xff" * 64, right[:63].encode()):
        kept.write_bytes(content)
        assert file_sha256(file) == right
    shutil.rmtree(bundle.cache_folder("sha256"))
    bundle.cache_folder("sha256").write_text("a file where the folder should be")
    assert file_sha256(file) == right
    assert reads == ["weights"] * 5


def test_a_blob_of_the_hub_is_not_read(tmp_path: Path, reads: list[str]) -> None:
    digest = hashlib.sha256(b"content").hexdigest()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / digest).write_bytes(b"content")
    (tmp_path / "snapshots").mkdir()
    link = tmp_path / "snapshots" / "model.safetensors"
    link.symlink_to(f"../blobs/{digest}")
    assert file_sha256(link) == digest
    assert not reads
    git_blob = tmp_path / "blobs" / ("0123456789" * 4)  # the hub names small files by another hash
    git_blob.write_bytes(b"small")
    (tmp_path / "snapshots" / "small").symlink_to(git_blob)
    assert file_sha256(tmp_path / "snapshots" / "small") == hashlib.sha256(b"small").hexdigest()


def test_consolidated_weights_beside_others_are_left_alone(
    tmp_path: Path, reads: list[str]
) -> None:
    folder = write_target(tmp_path / "model")
    before = hash_target(folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()
    assert before["weights_sha256"] == hashlib.sha256(b"model.safetensors" + digest).hexdigest()
    (folder / "consolidated.safetensors").write_bytes(b"of another program, and not even read")
    assert hash_target(folder) == before
    assert reads == ["model.safetensors"]
    assert load_target_model(folder, torch.float32, "cpu").dtype == torch.float32
    (folder / "model.safetensors").unlink()
    with raises_naming(TargetError, folder / "consolidated.safetensors"):
        hash_target(folder)  # as the only file, it would be the weights


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (7e4, torch.float16)])
def test_a_bundle_with_values_that_are_not_finite_is_refused(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    save_target_bundle(build_model(), build_tokenizer(None), tmp_path, 1)
    file = tmp_path / bundle.FROZEN_FILE
    weights = load_file(file)
    weights["layers.3.mlp.up_proj.weight"][2, 3] = value
    save_file(weights, file)
    FrozenTarget.load(tmp_path, dtype=dtype)  # loads without that layer
    with raises_naming(TargetError, 1, "layers.3.mlp.up_proj.weight", [64, 48]):
        FrozenTarget.load(tmp_path, 1, dtype)
