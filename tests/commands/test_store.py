"""`inspect` and `verify`: output that can be searched and fits a terminal; the stores that `train` takes."""

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.stores import make_recipe


@pytest.fixture
def store(tmp_path: Path) -> Path:
    recipe = make_recipe(lengths=(40, 90, 130))
    identities = {**recipe.manifest.identities, "target.weights_sha256": "ab" * 32}
    return recipe.with_manifest(identities=identities).write(tmp_path / "store")


@pytest.fixture
def url(store: Path) -> Iterator[str]:
    """The URL of a copy in fsspec's file system in memory."""
    filesystem, bucket = fsspec.filesystem("memory"), f"memory://inspected-{os.getpid()}"
    filesystem.put(str(store), f"{bucket}/store", recursive=True)
    yield f"{bucket}/store"
    filesystem.rm(bucket, recursive=True)


def test_ids_are_whole_and_tables_fit_eighty_columns(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # narrower than any line
    lines = run("inspect", store).stdout.splitlines()
    assert f"target.weights_sha256  {'ab' * 32}" in lines
    start = lines.index("Activations")
    table = lines[start : lines.index("Their meaning")]
    assert any("hidden/last" in line for line in table)
    assert max(map(len, table)) <= 80
    assert not [line for line in table if "…" in line]


def test_a_store_is_inspected_where_it_is(store: Path, url: str) -> None:
    shown = [run("inspect", where).stdout.splitlines()[1:] for where in (str(store), f"file://{store}", url)]
    assert shown[0] == shown[1] == shown[2]
    assert any("committed" in line for line in shown[0])


def test_what_cannot_be_written_says_so(store: Path, url: str) -> None:
    assert run("verify", f"file://{store}").exit_code == 0
    assert run("repair", url).exit_code == 0
    refused(run("recode", url, "--codec", "int8", "--out", f"{url}-int8"), f"{url}-int8 can be read but not written")


def test_files_without_sizes_are_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP servers list names alone."""
    filesystem = type(fsspec.filesystem("memory"))
    real = filesystem.find

    def find(self: object, *args: object, **kwargs: object) -> object:
        return {name: item | {"size": None} for name, item in real(self, *args, **kwargs).items()}

    monkeypatch.setattr(filesystem, "find", find)
    for arguments in (("inspect", url), ("train", url, "--out", tmp_path / "run")):
        refused(run(*arguments), f"{url} lists its files without their sizes")
