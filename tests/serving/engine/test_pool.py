"""The KV of all sequences is in one tensor.

Moving loses none of it, and running out of memory affects one sequence at most.
"""

import contextlib
import ctypes
import gc
import mmap
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moa_data.errors import NotEnoughMemory
from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.decoding.sampling import GREEDY, SamplingConfig
from moa_data.moa.targets.live import Target
from moa_data.serving.config import EngineOptions
from moa_data.serving.engine import engine as engine_module
from moa_data.serving.engine.engine import Engine
from moa_data.serving.engine.pool import BLOCK_TOKENS, Pool, PooledKV, blocks_for
from moa_data.serving.engine.sequence import Commit, Request, Work
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import build_model, random_prompts
from moa_data.tests.kit.serving import never_ending

SIZES = {"n_layers": 2, "n_kv_heads": 2, "head_dim": 3}
PROMPTS = random_prompts(4, 3, longest=40)
N_NEW = 7


@pytest.fixture(scope="module")
def target() -> Target:
    return never_ending(build_model(num_hidden_layers=2))


def test_sequences_keep_their_values_wherever_they_move() -> None:
    """Sequences come, grow and go at random until all blocks are held.

    Each one reads the values that it has written.
    """
    chance, pool = (
        random.Random(0),
        Pool(24 * BLOCK_TOKENS, SIZES, torch.float32, torch.device("cpu")),
    )
    written: dict[PooledKV, torch.Tensor] = {}  # [2, L, H_kv, length, d]
    address, n_full = pool.buffer.data_ptr(), 0
    for _ in range(600):
        if len(written) < 7 and chance.random() < 0.3:
            written[PooledKV(pool)] = torch.empty(2, 2, 2, 0, 3)
        elif written and chance.random() < 0.08:
            kv = chance.choice(list(written))
            del written[kv]
            pool.free(kv)
        elif written:
            kv = chance.choice(list(written))
            n_more = chance.randrange(1, 70)
            n_blocks = max(kv.n_blocks, blocks_for(kv.length + n_more))
            n_full += n_blocks - kv.n_blocks == pool.n_blocks - pool.n_used
            if n_blocks - kv.n_blocks > pool.n_blocks - pool.n_used:
                continue
            pool.reserve(kv, n_blocks)
            new = torch.rand(2, 2, 2, n_more, 3)
            kv.view(kv.length, kv.length + n_more).copy_(new)
            kept = sorted(chance.sample(range(n_more), chance.randrange(n_more)))
            kv.commit(kept)
            written[kv] = torch.cat((written[kv], new[:, :, :, kept]), dim=3)
        assert pool.n_used == sum(kv.n_blocks for kv in written)
        for kv, own in written.items():
            assert torch.equal(kv.view(0, kv.length), own)
    assert n_full > 5, "all blocks were held"
    assert pool.buffer.data_ptr() == address


def test_too_large_a_pool_is_refused_at_the_start(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotEnoughMemory):
        Engine(target, options=EngineOptions(kv_tokens=1 << 50))
    monkeypatch.setattr("moa_data.serving.engine.pool.free_memory", lambda: 1000)
    # The system would grant the memory, and kill the process later.
    with pytest.raises(NotEnoughMemory):
        Engine(target, options=EngineOptions(kv_tokens=1024))


def n_resident_pages(tensor: torch.Tensor) -> tuple[int, int]:
    """Count the pages of a tensor that are in memory, and all of its pages."""
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    n_pages = (tensor.data_ptr() + tensor.nbytes - first) // page
    pages = (ctypes.c_ubyte * n_pages)()
    assert (
        ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(n_pages * page), pages)
        == 0
    )
    return sum(byte & 1 for byte in pages), n_pages


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_pool_takes_its_memory_at_the_start(target: Target) -> None:
    pool = Engine(target, options=EngineOptions(kv_tokens=1 << 17))._pool
    n_resident, n_pages = n_resident_pages(pool.buffer)
    assert n_resident == n_pages > 1000


def test_memory_is_estimated_by_the_settings(target: Target) -> None:
    small, large = (
        Engine(target, options=EngineOptions(kv_tokens=n, max_sequences=n // 128))
        for n in (1024, 4096)
    )
    assert small.kv_bytes == small._pool.buffer.nbytes
    assert large.kv_bytes == 4 * small.kv_bytes
    assert large.working_bytes > small.working_bytes > 0


class FullMemory(TorchDispatchMode):
    """Fails in the n-th operation, or in all that return hidden states of ``n_tokens`` or more."""

    def __init__(self, n: int = -1, n_tokens: int = 1 << 30) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n, self.n_tokens = n, n_tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n -= 1
        out = func(*args, **(kwargs or {}))
        is_states = isinstance(out, torch.Tensor) and out.shape[:1] + out.shape[2:] == (1, 48)
        if self.n == 0 or (is_states and out.shape[1] >= self.n_tokens):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out


@pytest.fixture(scope="module")
def drafter(target: Target) -> Any:
    return build_drafter(target.model)


@contextlib.contextmanager
def engine_of(
    target: Target, drafter: Any, sampling: SamplingConfig = GREEDY, **options: Any
) -> Iterator[tuple[Engine, list[list[Commit]]]]:
    """Yield an engine with four sequences, of which two speculate, and their commits."""
    engine = Engine(target, {"moa": drafter}, EngineOptions(tree="3", **options))
    told: list[list[Commit]] = [[] for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        speculates = index % 2 == 0
        asked: dict[str, Any] = {"drafter": "moa", "wants_context": True} if speculates else {}
        own = engine.add(
            Request(tuple(prompt), len(prompt), N_NEW, sampling, **asked), told[index].append
        )
        engine.set_work(own, Work.SPECULATE if speculates else Work.PLAIN)
    yield engine, told


def text_of(commits: list[Commit]) -> list[int]:
    return [token for commit in commits for token in commit.tokens]


def test_one_failed_allocation_ends_one_text_at_most(target: Target, drafter: Any) -> None:
    truths = [plain_generate(target, prompt, max_new_tokens=N_NEW).tokens for prompt in PROMPTS]
    n_unharmed, chance = 0, random.Random(1)
    for _ in range(10):
        with engine_of(target, drafter) as (engine, told):
            for _ in range(chance.randrange(6)):
                engine.step()
            with FullMemory(n := chance.randrange(1, 900)) as memory:
                while memory.n > 0 and engine.step():
                    pass
            while engine.step():
                pass
        failed = [any(commit.error for commit in commits) for commits in told]
        assert sum(failed) <= 1, n
        n_unharmed += not any(failed)
        for commits, truth, has_failed in zip(told, truths, failed, strict=True):
            assert (
                text_of(commits) == truth[: len(text_of(commits))]
                if has_failed
                else text_of(commits) == truth
            )
    assert n_unharmed > 2


@pytest.mark.parametrize("name", ["contexts_to_host", "accept_chosen"])
def test_what_is_done_for_all_texts_is_done_for_each_where_it_fails(
    target: Target, drafter: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(engine_module, name)

    def for_one(rows: Any) -> Any:
        if len(rows) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(rows)

    sampling = SamplingConfig(temperature=0.9) if name == "accept_chosen" else GREEDY
    texts = []
    for patched in (False, True):
        with (
            monkeypatch.context() as patch,
            engine_of(target, drafter, sampling=sampling) as (engine, told),
        ):
            if patched:
                patch.setattr(engine_module, name, for_one)
            while engine.step():
                pass
        assert not any(commit.error for commits in told for commit in commits)
        texts.append([text_of(commits) for commits in told])
    assert texts[0] == texts[1]


def test_a_text_that_is_too_large_ends_alone(target: Target, drafter: Any) -> None:
    """A long prompt needs more memory than there is.

    The other sequences continue, and later ones are accepted.
    """
    with engine_of(target, drafter) as (engine, told):
        large: list[Commit] = []
        engine.set_work(engine.add(Request(tuple(range(4, 60)), 56, 5), large.append), Work.PLAIN)
        with FullMemory(n_tokens=50):
            while engine.step():
                pass
    assert [commit.error is not None for commit in large] == [True]
    for prompt, commits in zip(PROMPTS, told, strict=True):
        assert text_of(commits) == plain_generate(target, prompt, max_new_tokens=N_NEW).tokens


def live_bytes() -> int:
    """Return the bytes of all living tensors."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            # Other tests may leave tensors without storage.
            with contextlib.suppress(NotImplementedError):
                found[one.untyped_storage()._cdata] = one.untyped_storage().nbytes()
    return sum(found.values())


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Hide the objects of other tests from the garbage collector."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_memory_after_many_texts_is_what_it_was(target: Target, drafter: Any) -> None:
    engine = Engine(target, {"moa": drafter}, EngineOptions(tree="2", kv_tokens=512))

    def serve(n_texts: int) -> None:
        for index in range(n_texts):
            speculates = index % 2 == 0
            tokens = (4 + index % 50,) * (1 + index % 40)
            commits: list[Commit] = []
            own = engine.add(
                Request(tokens, len(tokens), 3, drafter="moa" if speculates else None),
                commits.append,
            )
            engine.set_work(own, Work.SPECULATE if speculates else Work.PLAIN)
            if index % 10 == 9:
                while engine.step():
                    pass
                assert len(text_of(commits)) == 3
                for id_ in list(engine._sequences):
                    engine.remove(id_)
        engine.step()

    serve(10)
    before, address = live_bytes(), engine._pool.buffer.data_ptr()
    serve(30)
    assert engine.snapshot().kv_used == 0
    assert engine._pool.buffer.data_ptr() == address
    assert live_bytes() <= before
