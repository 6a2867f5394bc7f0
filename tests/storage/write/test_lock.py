"""Several writers of one store: each part is committed once, by any of them.

No writer deletes files that another one still needs.
"""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moa_data.errors import StorageUnavailable, StoreDamaged, StoreLocked
from moa_data.files import LockHeld, lock_file
from moa_data.storage.write import lock as lock_module
from moa_data.storage.write.lock import StoreLock
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.stores import Recipe, read_tree


def attempts(path: Path) -> set[str]:
    """Return the ids of the writers that have unfinished files in a store."""
    return {file.name.split(".")[-2] for file in path.rglob("*.partial")}


def test_who_joins_deletes_nothing_and_the_last_one_sweeps(
    store: Path, tmp_path: Path, recipe: Recipe
) -> None:
    path = tmp_path / "shared"
    first = recipe.open(path, shares=True)
    dead = recipe.open(path, shares=True)
    recipe.fill(dead.part(1))  # A kill leaves a part like this: neither committed nor discarded.
    recipe.fill(first.part(1))
    with recipe.open(path, shares=True) as second:
        assert attempts(path) == {dead.attempt, first.attempt}
        recipe.write_part(second, 0)
        dead.close()
        assert not first.sweep()
        for part in second.pending_parts():
            recipe.write_part(second, part)
        assert second.sweep()
    assert read_tree(path) == read_tree(store)


def test_who_wants_a_store_alone_and_who_shares_keep_each_other_out(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_GRACE_S", 0.01)
    path = tmp_path / "shared"
    with (
        recipe.open(path, shares=True),
        raises_naming(StoreLocked, path, os.getpid()),
    ):
        recipe.open(path)
    with recipe.open(path), raises_naming(StoreLocked, path, os.getpid()):
        recipe.open(path, shares=True)


@pytest.mark.parametrize("n_waiting", [1, 5])
def test_who_shares_waits_for_the_one_who_opens(tmp_path: Path, n_waiting: int) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    opening, taken = StoreLock(path, shares=True), list[StoreLock]()
    threads: list[threading.Thread] = []
    for _ in range(n_waiting):
        waiting = threading.Thread(target=lambda: taken.append(StoreLock(path, shares=True)))
        waiting.start()
        threads.append(waiting)
    time.sleep(0.05)
    assert not taken
    opening.share()
    for waiting in threads:
        waiting.join(60)
    assert [lock.is_alone for lock in taken] == [False] * n_waiting
    assert [file.name for file in path.iterdir()] == ["store.lock"]
    for lock in taken:
        lock.close()
    assert opening.try_alone()
    opening.close()


def test_who_wants_a_store_alone_is_refused_after_another_has_opened_it(tmp_path: Path) -> None:
    opening, refused = StoreLock(tmp_path, shares=True), list[StoreLocked]()

    def want_alone() -> None:
        try:
            StoreLock(tmp_path)
        except StoreLocked as error:
            refused.append(error)

    waiting = threading.Thread(target=want_alone)
    waiting.start()
    time.sleep(0.05)
    assert not refused
    opening.share()
    waiting.join(60)
    assert len(refused) == 1
    opening.close()
    StoreLock(tmp_path).close()


def test_a_lock_file_that_was_deleted_meanwhile_is_locked_again(tmp_path: Path) -> None:
    path, taken = tmp_path / "some.lock", list[int]()
    first = lock_file(path)
    waiting = threading.Thread(target=lambda: taken.append(lock_file(path, waits=True)))
    waiting.start()
    time.sleep(0.05)
    path.unlink()
    os.close(first)
    waiting.join(60)
    # Otherwise the thread would hold the deleted file, and this process could lock another file.
    with pytest.raises(LockHeld):
        lock_file(path)
    os.close(taken[0])


def test_a_part_that_is_written_is_locked_until_it_is_closed(
    tmp_path: Path, recipe: Recipe
) -> None:
    path = tmp_path / "shared"
    with recipe.open(path, shares=True) as first, recipe.open(path, shares=True) as second:
        assert first.try_lock(0)
        one = first.part(0)
        assert not second.try_lock(0)
        assert second.try_lock(1)
        assert not first.try_lock(1)
        again = second.part(0)  # The lock is a hint and does not keep others from the part.
        again.discard()
        assert not second.try_lock(0)
        recipe.fill(one)
        one.commit()
        assert second.try_lock(0)
        second.close()
        assert first.try_lock(1)
        with first.part(1):
            pass
        assert {file.name for file in (path / "locks").iterdir()} == {
            "part-00000.lock", "part-00001.lock", "publish-00000.lock"
        }  # fmt: skip
        assert first.sweep()
    assert not (path / "locks").exists()
    with recipe.open(path) as alone:
        assert alone.try_lock(1)
        with alone.part(1):
            assert not (path / "locks").exists()


def test_who_has_left_a_store_sweeps_nothing(tmp_path: Path, recipe: Recipe) -> None:
    path = tmp_path / "shared"
    with recipe.open(path, shares=True) as first, recipe.open(path, shares=True) as second:
        assert not first.sweep()
        assert not first.sweep()
        threading.Timer(0.05, second.close).start()
        third = recipe.open(path, shares=True)
        assert third.sweep(waits_s=60)
        third.close()


def test_a_store_that_an_earlier_release_began_is_continued(
    store: Path, tmp_path: Path, recipe: Recipe
) -> None:
    path = tmp_path / "earlier"
    with recipe.open(path) as writer:
        recipe.write_part(writer, 0)
    # Earlier releases locked bytes of this file, and wrote a second line to store.lock.
    (path / "publish.lock").touch()
    (path / "store.lock").write_text("process 1 on host\nopens or cleans the store\n")
    with recipe.open(path, shares=True) as writer:
        for part in writer.pending_parts():
            recipe.write_part(writer, part)
        assert writer.sweep()
    assert read_tree(path) == read_tree(store)


def test_a_killed_writer_frees_its_part_at_once(tmp_path: Path, recipe: Recipe) -> None:
    path = tmp_path / "shared"
    with recipe.open(path, shares=True) as writer:
        script = "import sys, time; from pathlib import Path\n"
        script += "from moa_data.storage.write.lock import StoreLock\n"
        script += "lock = StoreLock(Path(sys.argv[1]), shares=True)\n"
        script += "part = lock.hold('part-00000'); print(flush=True); time.sleep(60)"
        other = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE)
        assert other.stdout is not None
        other.stdout.readline()
        assert not writer.try_lock(0)
        other.kill()
        other.communicate()
        assert writer.try_lock(0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, StorageUnavailable) for name in ("ENOLCK", "EOPNOTSUPP", "EIO")]
    + [(name, StoreLocked) for name in ("EWOULDBLOCK", "EACCES")],
)
def test_a_refused_lock_is_named(
    store: Path,
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: type[Exception],
) -> None:
    left, real = [OSError(getattr(errno, name), "")], fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if left and operation & fcntl.LOCK_NB:
            raise left.pop()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    facts = (store, os.getpid()) if kind is StoreLocked else (store / "store.lock",)
    with raises_naming(kind, *facts):
        recipe.write(store)
    recipe.write(store)


def test_a_lock_is_no_link_and_is_free_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "run.lock").symlink_to("mine.txt")
    with pytest.raises(StoreDamaged):
        lock_file(tmp_path / "run.lock")
    assert (tmp_path / "mine.txt").read_text() == "mine"
    script = "import sys, time; from pathlib import Path; from moa_data.files import lock_file\n"
    script += "lock_file(Path(sys.argv[1])); print(flush=True); time.sleep(60)"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "held"], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(LockHeld) as caught:
        lock_file(tmp_path / "held")
    assert f"process {holder.pid} on" in caught.value.holder
    holder.kill()
    holder.communicate()
    os.close(lock_file(tmp_path / "held"))


# Three forks write the parts of one store, each in an order of its own. They are killed at random
# moments, again and again. Then two more finish the store.
KILLED_WRITERS = """
import os, random, signal, sys, time
from pathlib import Path

from moa_data.tests.kit import stores as kit
recipe = kit.make_recipe((70, 3, 130, 64, 100, 33), kit.FIELDS[:3], part_tokens=192)
folder, n_kills = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(0)
whole = kit.read_tree(recipe.write(folder / "whole"))

def write(store, seed):
    with recipe.open(store, shares=True) as writer:
        parts = writer.pending_parts()
        random.Random(seed).shuffle(parts)
        for part in parts:
            if writer.is_pending(part):
                recipe.write_part(writer, part)
        writer.sweep()

def start(store, seed):
    child = os.fork()
    if child == 0:
        write(store, seed)
        os._exit(0)
    return child

begin = time.perf_counter()
os.waitpid(start(folder / "first", 0), 0)
seconds = time.perf_counter() - begin
n_struck = n_stores = 0
while n_struck < n_kills:
    store = folder / f"killed-{n_stores}"
    for _ in range(2):
        children = [start(store, rng.random()) for _ in range(3)]
        for child in children:
            time.sleep(rng.uniform(0, seconds / 2))
            os.kill(child, signal.SIGKILL)
        n_struck += sum(os.WIFSIGNALED(os.waitpid(child, 0)[1]) for child in children)
    children = [start(store, rng.random()) for _ in range(2)]
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert kit.read_tree(store) == whole, store
    n_stores += 1
print(n_struck)
"""


@pytest.mark.parametrize("n_kills", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_writers_that_are_killed_beside_each_other(tmp_path: Path, n_kills: int) -> None:
    command = [sys.executable, "-c", KILLED_WRITERS, str(tmp_path), str(n_kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= n_kills
