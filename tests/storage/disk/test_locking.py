"""A lock that is held is told from one that the file system cannot give."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from moa_data.errors import StorageUnavailable, StoreDamaged, StoreLocked
from moa_data.storage.disk.locking import LockHeld, lock_file
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.stores import Recipe


def refuse_with(monkeypatch: pytest.MonkeyPatch, *codes: int) -> None:
    """Let flock fail with each of the codes in turn, then work."""
    left, real = list(codes), fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if left:
            code = left.pop(0)
            raise OSError(code, os.strerror(code))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("name", ["ENOLCK", "EOPNOTSUPP", "ENOSYS", "EINVAL", "EIO", "ESTALE"])
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    code = getattr(errno, name)
    n_open = len(os.listdir("/dev/fd"))
    for attempt in (
        lambda: StoreWriter.create_or_resume(tmp_path / "store", recipe.manifest, recipe.plan),
        lambda: lock_file(tmp_path / "run.lock"),
    ):
        refuse_with(monkeypatch, code)
        with pytest.raises(
            StorageUnavailable, match=r"cannot be locked \(.*with locks, or mount this one with"
        ) as caught:
            attempt()
        assert os.strerror(code) in str(caught.value)
        assert "another process" not in str(caught.value)
    assert len(os.listdir("/dev/fd")) == n_open
    recipe.write(tmp_path / "store")


@pytest.mark.parametrize("name", ["EWOULDBLOCK", "EAGAIN", "EACCES"])
def test_a_held_lock_names_its_holder(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store = recipe.write(tmp_path / "store")
    refuse_with(monkeypatch, *[getattr(errno, name)] * 2)
    with pytest.raises(StoreLocked, match=f"is being written by process {os.getpid()} on "):
        StoreWriter.create_or_resume(store, recipe.manifest, recipe.plan)
    with pytest.raises(LockHeld, match="another process"):
        lock_file(tmp_path / "new.lock")


def test_a_signal_does_not_end_the_locking(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_with(monkeypatch, errno.EINTR, errno.EINTR)
    recipe.write(tmp_path / "store")


def test_a_lock_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "run.lock").symlink_to("mine.txt")
    with pytest.raises(StoreDamaged, match=r"run.lock is a symbolic link"):
        lock_file(tmp_path / "run.lock")
    assert (tmp_path / "mine.txt").read_text() == "mine"
