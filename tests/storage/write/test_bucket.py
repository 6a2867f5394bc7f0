"""Writers on unlike machines, and kills at every step of a publication, end in a store that plain libraries read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.storage.backend import open_path, put_if_absent
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.object_store import ObjectStore
from moa_data.storage.paths import RemotePath
from moa_data.storage.schema import commit_path, hidden_field, publication_path, tokens_field
from moa_data.storage.write.publish import Publication
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.object_stores import empty_place, read_remote_tree, use
from moa_data.tests.kit.stores import Recipe, make_recipe, read_tree


class _Killed(BaseException):
    """What ends a writer of these tests at once."""


def rounded(n: int) -> Callable[[str, dict[str, Any], np.ndarray], np.ndarray]:
    """What the n-th of several unlike machines computes."""

    def change(name: str, row: dict[str, Any], values: np.ndarray) -> np.ndarray:
        return values ^ np.uint16(n) if name == "kv" or name.startswith("hidden") else values

    return change


@pytest.fixture
def recipe() -> Recipe:
    """A store of one part, of codes with scales, which decode to wrong values where they come from unlike machines."""
    fields = (tokens_field(), hidden_field("last", 16))
    return make_recipe((70, 3), fields).with_manifest(codec=StoreCodec("int8", ()).describe())


@pytest.fixture
def place(moto_server: str) -> Iterator[RemotePath]:
    with use(moto_server):
        place = open_path(f"{empty_place(moto_server)}/a store")
        assert isinstance(place, RemotePath)
        yield place


def shared(place: RemotePath, recipe: Recipe) -> StoreWriter:
    return StoreWriter.create_or_resume(place, recipe.manifest, recipe.plan, shares=True)


def trees(recipe: Recipe, folder: Path, n: int) -> list[dict[str, bytes]]:
    """The bytes that each of n unlike machines gives a folder."""
    return [read_tree(recipe.write(folder / str(i), rounded(i))) for i in range(n)]


def kill_after(monkeypatch: pytest.MonkeyPatch, n_calls: int) -> None:
    """End the writer after so many requests that change a bucket."""
    calls = iter(range(10_000))

    def dies(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if next(calls) >= n_calls:
                raise _Killed
            return method(*args)

        return call

    for name in ("put_if_absent", "replace", "put", "copy", "delete"):
        monkeypatch.setattr(ObjectStore, name, dies(getattr(ObjectStore, name)))


N_PUTS = 3
"""Uploads of the part of the tests' store, and as many copies."""
STEPS = {
    "an upload": (1, False), "the record": (N_PUTS, False), "a copy": (N_PUTS + 1, True), "half": (N_PUTS + 2, True),
    "the commit": (2 * N_PUTS + 1, True), "the deletion": (2 * N_PUTS + 2, True), "the end": (2 * N_PUTS + 3, True),
}  # fmt: skip
FAST = ("the record", "half")


@pytest.mark.parametrize("step", [pytest.param(s, marks=() if s in FAST else pytest.mark.slow) for s in STEPS])
def test_a_kill_before_any_step_of_a_publication(
    place: RemotePath, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The next writer, on an unlike machine, finishes the whole part of the first or makes all of it anew."""
    n_calls, is_first = STEPS[step]
    with StoreWriter.create_or_resume(place, recipe.manifest, recipe.plan) as writer, monkeypatch.context() as patch:
        kill_after(patch, n_calls)
        with suppress(_Killed) if step == "the end" else pytest.raises(_Killed):
            recipe.write_part(writer, 0, rounded(0))
    recipe.write(place, rounded(1))
    found = {
        name: data
        for name, data in read_remote_tree(place).items()
        if not name.startswith("parts/") or ".partial" not in name
    }
    assert found == trees(recipe, tmp_path, 2)[0 if is_first else 1]


def test_a_record_that_comes_late_changes_nothing(place: RemotePath, recipe: Recipe, tmp_path: Path) -> None:
    with shared(place, recipe) as first, shared(place, recipe) as second:
        early, late = first.part(0), second.part(0)
        recipe.fill(early, rounded(0))
        recipe.fill(late, rounded(1))
        commit = early.commit()
        assert late.commit() == commit
        assert not late.was_first
    assert read_remote_tree(place) == trees(recipe, tmp_path, 1)[0]


def test_a_record_whose_uploads_are_gone_comes_to_nothing(place: RemotePath, recipe: Recipe, tmp_path: Path) -> None:
    with shared(place, recipe) as writer:
        record = Publication(commit_path(place, 0), "5f3a9c01", {"parts/kv/c.0": 10}, None, b"{}")
        put_if_absent(publication_path(record.commit), record.to_json())
        recipe.write_part(writer, 0, rounded(0))
    assert read_remote_tree(place) == trees(recipe, tmp_path, 1)[0]


def test_plain_libraries_read_a_bucket_as_a_folder(
    place: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snippet of docs/object-stores.md, with zarr-python and with tensorstore."""
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    recipe = make_recipe((70, 3, 200))
    local = recipe.write(tmp_path / "local")
    recipe.write(place)
    assert read_remote_tree(place) == read_tree(local)
    bucket, _, prefix = place.backend.url.removeprefix("s3://").partition("/")
    page = (Path(__file__).parents[3] / "docs" / "object-stores.md").read_text()
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    program = found[1].replace('"bucket", "llama3-8b"', f"{bucket!r}, {prefix!r}")
    exec(compile(program, "docs/object-stores.md", "exec"), names)
    row = recipe.plan.slice(0, 1).to_pylist()[0]
    np.testing.assert_array_equal(names["by_zarr"], recipe.values(recipe.manifest.fields[3], row))
    np.testing.assert_array_equal(names["by_tensorstore"], names["by_zarr"])
