"""Random sequences of writing, killing, damaging, repairing, recoding and reading a store.

They are checked against a model: the recipe's values of the committed parts. After any history, a
reader sees a set of complete parts, damage is named, and a repair followed by a plain run gives the
bytes of an undisturbed store.
"""

import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moa_data.errors import StoreDamaged, StoreError, StoreNotFound
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import hidden_field, to_float32, tokens_field
from moa_data.storage.write.repair import drop_damage
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.kills import killed_at
from moa_data.tests.kit.stores import make_recipe, read_tree

FIELDS = (tokens_field(), hidden_field("last", 16))
RECIPE = make_recipe((70, 3, 130, 64, 1), FIELDS, part_tokens=192)
N_PARTS = RECIPE.manifest.n_parts
NEVER = 1 << 30  # No run changes the disk as often as this.


def damage(path: Path, how: str, at: float) -> None:
    """Flip a bit of a file, cut it, or delete it."""
    content = path.read_bytes()
    offset = int(at * (len(content) - 1))
    if how == "delete":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:offset])
    else:
        path.write_bytes(
            content[:offset] + bytes([content[offset] ^ (1 << offset % 8)]) + content[offset + 1 :]
        )


class StoreMachine(RuleBasedStateMachine):
    """One folder; writers work on it one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Path(tempfile.mkdtemp())
        self.store = self.room / "store"
        self.is_damaged = False
        self.committed: set[int] = set()
        self.n_recodings = 0

    def teardown(self) -> None:
        """Finish the store; it must equal the one of an undisturbed run."""
        try:
            self.finish()
        finally:
            shutil.rmtree(self.room)

    @initialize(parts=st.sets(st.integers(0, N_PARTS - 1)))
    def begin(self, parts: set[int]) -> None:
        """Write some of the parts."""
        with RECIPE.open(self.store) as writer:
            for part in sorted(parts):
                RECIPE.write_part(writer, part)
        self.committed = parts

    @rule(shares=st.booleans(), chosen=st.integers(0, 99))
    def write_a_part(self, shares: bool, chosen: int) -> None:
        """Opening a store finds damage that changes sizes, so damaged parts may be pending here."""
        with RECIPE.open(self.store, shares) as writer:
            pending = writer.pending_parts()
            self.look(set(range(N_PARTS)) - set(pending))
            if pending:
                part = pending[chosen % len(pending)]
                RECIPE.write_part(writer, part)
                self.committed.add(part)
            assert writer.pending_parts() == sorted(set(range(N_PARTS)) - self.committed)

    @rule(chosen=st.integers(0, 99))
    def leave_a_part_unfinished(self, chosen: int) -> None:
        """A writer that gives up a part leaves it pending."""
        with RECIPE.open(self.store) as writer:
            self.look(set(writer.committed_parts()))
            if pending := writer.pending_parts():
                with writer.part(pending[chosen % len(pending)]) as out:
                    RECIPE.fill(out)
            assert set(writer.committed_parts()) == self.committed

    @rule(at=st.integers(1, 60), shares=st.booleans())
    def kill_a_writer(self, at: int, shares: bool) -> None:
        """A kill at any operation leaves each part complete or pending."""
        writer: StoreWriter | None = None
        with killed_at(at):
            writer = RECIPE.open(self.store, shares)
            for part in writer.pending_parts():
                RECIPE.write_part(writer, part)
        if writer is not None:
            writer.close()  # The kernel does the same for a killed process.
        self.look(None)

    @precondition(lambda self: not self.is_damaged)
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "delete"]), at=st.floats(0, 1))
    def damage_a_file(self, data: st.DataObject, how: str, at: float) -> None:
        """Damage any file but the lock. A part without a commit is pending, not damaged."""
        name = data.draw(st.sampled_from(sorted(read_tree(self.store))))
        if name == "store.json" and how == "delete":
            return
        damage(self.store / name, how, at)
        self.is_damaged = True

    @precondition(lambda self: self.is_damaged)
    @rule(at=st.integers(1, 20) | st.just(NEVER))
    def repair(self, at: int) -> None:
        """Drop damaged files; the run that made the store restores manifest and plan."""
        with suppress(StoreDamaged), killed_at(at):
            drop_damage(self.store)
        RECIPE.open(self.store, depth="values").close()
        report = verify_store(self.store)
        assert report.ok
        before = self.committed
        self.look(None)
        assert len(before - self.committed) <= 1
        self.is_damaged = False

    @precondition(lambda self: not self.is_damaged)
    @rule()
    def recode(self) -> None:
        """Recoding a complete store gives a sound one within the codec's error.

        An incomplete store is refused.
        """
        out = self.room / f"int8-{self.n_recodings}"
        if len(self.committed) < N_PARTS:
            with pytest.raises(StoreError):
                recode(self.store, "int8", out)
            return
        self.n_recodings += 1
        recode(self.store, "int8", out)
        assert verify_store(out).ok
        with ActivationStore(out, require_complete=True) as reader:
            row = RECIPE.plan.slice(0, 1).to_pylist()[0]
            wanted = to_float32(RECIPE.values(FIELDS[1], row), "bfloat16")
            np.testing.assert_allclose(
                to_float32(reader.read(0, "hidden/last"), "bfloat16"), wanted, atol=0.05
            )

    @invariant()
    def verify(self) -> None:
        """Verification reports no damage in a store that was not damaged."""
        if not self.store.exists():
            return
        try:
            report = verify_store(self.store, n_threads=1)
        except StoreNotFound:
            return
        if not self.is_damaged:
            assert report.ok
            assert report.n_parts == len(self.committed)

    @invariant()
    def read(self) -> None:
        """A reader sees the right values or raises an error of the store."""
        if not self.store.exists():
            return
        try:
            self.read_all(range(N_PARTS))
        except StoreError:
            assert self.is_damaged or not (self.store / "store.json").exists()

    def read_all(self, parts: Any) -> set[int]:
        with ActivationStore(self.store, parts=parts) as reader:
            for i, row in enumerate(reader.sequences.to_pylist()):
                for spec in FIELDS:
                    np.testing.assert_array_equal(
                        reader.read(i, spec.name), RECIPE.values(spec, row)
                    )
            return set(reader.commits)

    def look(self, found: set[int] | None) -> None:
        """Update the committed parts from the store. Only damage may lose parts."""
        if found is None:
            try:
                found = self.read_all(range(N_PARTS))
            except StoreError:
                if not (self.store / "store.json").exists():
                    assert not self.committed
                    return
                assert self.is_damaged
                return
        if not self.is_damaged:
            assert found >= self.committed
        self.committed = set(found)

    def finish(self) -> None:
        if self.is_damaged:
            self.repair(NEVER)
        RECIPE.write(self.store)
        assert read_tree(self.store) == whole()


@cache
def whole() -> dict[str, bytes]:
    """Return the files of an undisturbed store."""
    with tempfile.TemporaryDirectory() as folder:
        return read_tree(RECIPE.write(Path(folder) / "store"))


_ANY_TIME = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class TestStore(StoreMachine.TestCase):  # type: ignore[valid-type,misc]
    settings = settings(_ANY_TIME, max_examples=6, stateful_step_count=8)


@pytest.mark.slow
class TestStoreAtLength(StoreMachine.TestCase):  # type: ignore[valid-type,misc]
    settings = settings(_ANY_TIME, max_examples=200, stateful_step_count=25)
