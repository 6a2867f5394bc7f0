"""Stores and drafters go to a Hub on this machine and come back byte for byte.

Failures on the way do not change that.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moa_data.errors import DatasetError, OutputOccupied, StorageUnavailable
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.pipeline.hub import drafter_card, pull, push
from moa_data.storage.read.verify import verify_store
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.disks import check_rights
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.hub import Hub, serving
from moa_data.tests.kit.refusals import refusing
from moa_data.tests.kit.stores import read_tree

# This warning is about the Hub client's own calls.
pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")
NAME = "me/activations"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving(monkeypatch, tmp_path / "hub-cache") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def same_bytes(store: Path, other: Path) -> bool:
    return {
        name: data for name, data in read_tree(store).items() if not name.endswith(".lock")
    } == read_tree(other)


def test_a_store_goes_and_comes_back(hub: Hub, room: Path, tmp_path: Path) -> None:
    store, back = room / "store", tmp_path / "back"
    pushed = push(store, NAME)
    assert f"{hub.url}/datasets/{NAME}" in pushed
    assert pushed.splitlines()[0].replace("pushed", "pulled") in pull(NAME, back)
    assert same_bytes(store, back)
    assert not [name for name in names(back) if name.startswith("runs/") or name.endswith(".lock")]
    assert "README.md" in names(back)
    assert verify_store(back).ok
    sent = len(hub.large)
    push(store, NAME)
    assert len(hub.large) == sent
    with pytest.raises(OutputOccupied):
        pull(NAME, back)


def test_a_broken_push_is_no_store_and_continues(hub: Hub, room: Path, tmp_path: Path) -> None:
    hub.n_uploads_left = 4
    with raises_naming(DatasetError, NAME, 403):
        push(room / "store", NAME)
    assert len(hub.large) == 4
    with raises_naming(DatasetError, NAME, "store.json", "drafter.json"):
        pull(NAME, tmp_path / "half")
    hub.n_uploads_left = None
    push(room / "store", NAME)
    pull(NAME, tmp_path / "back")
    assert same_bytes(room / "store", tmp_path / "back")


def test_a_drafter_is_a_model_with_a_card(hub: Hub, room: Path, tmp_path: Path) -> None:
    private = run("push", str(room / "drafter"), "me/drafter", "--private")
    assert private.exit_code == 0, private.output
    assert hub.private == {"models/me/drafter": True}
    done = run("pull", "me/drafter", str(tmp_path / "back"))
    assert done.exit_code == 0, done.output
    assert "pulled       a drafter: 3 files" in done.stdout
    before, after = (
        load_drafter(path).state_dict() for path in (room / "drafter", tmp_path / "back")
    )
    assert all(after[name].equal(weight) for name, weight in before.items())
    card = (tmp_path / "back" / "README.md").read_text()
    assert card == drafter_card(load_drafter(room / "drafter").config.to_dict())
    assert '"weights_sha256": "' in card
    run_folder = tmp_path / "run"
    shutil.copytree(room / "drafter", run_folder / "drafter")
    assert "a drafter" in push(run_folder, "me/drafter")


def test_an_interrupted_pull_goes_on(hub: Hub, room: Path, tmp_path: Path) -> None:
    push(room / "store", NAME)
    back = tmp_path / "back"
    hub.sends["plan.parquet"] = None
    with pytest.raises(DatasetError, match=r"run the same command again"):
        pull(NAME, back)
    assert "plan.parquet" not in names(back)
    hub.sends.clear()
    n_before = len(hub.requests)
    pull(NAME, back)
    assert same_bytes(room / "store", back)
    assert any(
        path.endswith("/plan.parquet") and "/resolve/" in path for path in hub.requests[n_before:]
    )


@pytest.mark.parametrize("first", [1, pytest.param(6, marks=pytest.mark.slow), 20])
def test_a_disk_that_refuses_a_pull_is_named_and_the_pull_goes_on(
    hub: Hub, room: Path, tmp_path: Path, first: int
) -> None:
    store, back = room / "store", tmp_path / "back"
    push(store, NAME)
    with refusing(back, first, errno.ENOSPC), pytest.raises(StorageUnavailable):
        pull(NAME, back)
    before = os.umask(0o027)
    try:
        pull(NAME, back)
    finally:
        os.umask(before)
    assert same_bytes(store, back)
    if first == 1:
        check_rights(back, 0o027)


def test_bytes_that_changed_on_the_way_are_found(hub: Hub, room: Path, tmp_path: Path) -> None:
    push(room / "drafter", "me/drafter")
    weights = (room / "drafter" / "drafter.safetensors").read_bytes()
    hub.sends["drafter.safetensors"] = weights[:-1] + bytes([weights[-1] ^ 1])
    with raises_naming(DatasetError, tmp_path / "back" / "drafter.safetensors") as caught:
        pull("me/drafter", tmp_path / "back")
    assert caught.value.exit_code == 1
    hub.sends.clear()
    assert "a drafter" in pull("me/drafter", tmp_path / "back")


def test_what_cannot_be_pushed_is_refused_in_one_line(
    hub: Hub, room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises_naming(DatasetError, tmp_path, "store.json", "drafter.json"):
        push(tmp_path, NAME)
    incomplete = tmp_path / "incomplete"
    shutil.copytree(room / "store", incomplete)
    next((incomplete / "commits").glob("part-*.json")).unlink()
    with raises_naming(DatasetError, incomplete, 1, 3):
        push(incomplete, NAME)
    refused(run("push", str(room / "store"), "no name"), "OWNER/NAME")
    refused(run("pull", "me/nothing", str(tmp_path / "x")), "repository me/nothing does not exist")
    push(room / "drafter", "me/public")
    refused(
        run("push", str(room / "drafter"), "me/public", "--private"), "exists already and is public"
    )
    hub.create(NAME, "dataset", False)
    hub.commit(f"datasets/{NAME}", {"other.parquet": b"x"})
    refused(run("push", str(room / "store"), NAME), "its file other.parquet")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    refused(run("push", str(room / "drafter"), "me/third"), "401")
    monkeypatch.delenv("HF_TOKEN")
    refused(run("push", str(room / "drafter"), "me/third"), "HF_TOKEN is not set")
