"""`inspect` prints searchable output that fits a terminal, for stores on disks and in buckets."""

from pathlib import Path

import pytest

from moa_data.tests.kit.command import run
from moa_data.tests.kit.object_stores import copy_up
from moa_data.tests.kit.stores import make_recipe


@pytest.fixture
def store(tmp_path: Path) -> Path:
    recipe = make_recipe(lengths=(40, 90, 130))
    identities = {**recipe.manifest.identities, "target.weights_sha256": "ab" * 32}
    return recipe.with_manifest(identities=identities).write(tmp_path / "store")


def test_ids_are_whole_and_tables_fit_eighty_columns(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # narrower than all lines
    lines = run("inspect", store).stdout.splitlines()
    assert f"target.weights_sha256  {'ab' * 32}" in lines
    start = lines.index("Activations")
    table = lines[start : lines.index("Meaning of the fields")]
    assert any("hidden/last" in line for line in table)
    assert max(map(len, table)) <= 80
    assert not [line for line in table if "…" in line]


def test_a_store_is_inspected_where_it_is(store: Path, s3: str) -> None:
    url = str(copy_up(store, f"{s3}/store"))
    shown = [
        run("inspect", where).stdout.splitlines()[1:]
        for where in (str(store), f"file://{store}", url)
    ]
    assert shown[0] == shown[1] == shown[2]
    assert any("finished" in line for line in shown[0])
