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
        assert first.is_shared
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


def test_who_shares_waits_for_the_one_who_opens(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    monkeypatch.setattr(lock_module, "_RETRY_S", 0.01)
    opening, found = StoreLock(path, shares=True), list[bool]()
    waiting = threading.Thread(target=lambda: found.append(StoreLock(path, shares=True).is_alone))
    waiting.start()
    time.sleep(0.05)
    assert not found
    opening.share()
    waiting.join(60)
    assert found == [False]


def test_a_part_that_is_written_is_claimed_until_it_is_closed(
    tmp_path: Path, recipe: Recipe
) -> None:
    path = tmp_path / "shared"
    with recipe.open(path, shares=True) as first, recipe.open(path, shares=True) as second:
        one, two = first.part(0), first.part(1)
        again = second.part(0)  # A claim is only a hint and does not keep others from the part.
        assert [second.is_claimed(part) for part in range(3)] == [True, True, False]
        again.discard()
        assert second.is_claimed(0)
        recipe.fill(one)
        one.commit()
        two.discard()
        assert [second.is_claimed(part) for part in range(3)] == [False] * 3
    with recipe.open(path) as alone:
        with alone.part(1):
            assert not alone.is_claimed(1)
        assert not (path / "publish.lock").exists()


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
        if left:
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

from moa_data.storage.write import lock
from moa_data.tests.kit import stores as kit
lock._RETRY_S = 0.01
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
