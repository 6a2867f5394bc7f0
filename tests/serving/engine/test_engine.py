"""The engine gives the answers of plain decoding, whatever shares its calls.

An error in one sequence does not affect the others.
"""

import itertools
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moa_data.errors import Overloaded, RequestInvalid, ServingError, TargetError
from moa_data.evaluation.run import generate
from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.nn import packed
from moa_data.moa.targets.live import Target
from moa_data.serving.config import EngineOptions
from moa_data.serving.engine import engine as engine_module
from moa_data.serving.engine import runner
from moa_data.serving.engine.engine import Engine
from moa_data.serving.engine.pool import Pool
from moa_data.serving.engine.sequence import Commit, Request, Work
from moa_data.tests.kit.drafters import build, build_drafter, contexts_of, teach
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.families import (
    DRAFTERS,
    FEATURES,
    build_family,
    varied,
    works,
)
from moa_data.tests.kit.families import SIZES as FAMILY_SIZES
from moa_data.tests.kit.models import build_model, random_prompts
from moa_data.tests.kit.serving import never_ending, wait_for
from moa_data.tests.kit.variants import QUICK_FAMILIES, quick

SAMPLED = SamplingConfig(temperature=0.9, top_p=0.95, top_k=20, repetition_penalty=1.2)
N_NEW = 12
PROMPTS = random_prompts(8, 3, longest=40)
N_DRAFTS = 4


@dataclass
class Reader:
    """Collects the commits of one sequence."""

    id: int = 0
    commits: list[Commit] = field(default_factory=list)

    @property
    def errors(self) -> list[ServingError]:
        return [commit.error for commit in self.commits if commit.error is not None]

    @property
    def tokens(self) -> list[int]:
        return [token for commit in self.commits for token in commit.tokens]

    @property
    def finish(self) -> str:
        return self.commits[-1].finish if self.commits else ""


@pytest.fixture(scope="module")
def target() -> Target:
    return never_ending(build_model(num_hidden_layers=2))


@pytest.fixture(scope="module")
def taught(target: Target) -> Any:
    """A drafter that is often right about the prompts."""
    return teach(build_drafter(target.model), target, PROMPTS[:4], 20)


@pytest.fixture(scope="module")
def taught_eagle(target: Target) -> Any:
    return teach(build("eagle", target.model), target, PROMPTS[:4], 12)


def engine_for(target: Target, drafters: Any = None, **settings: Any) -> Engine:
    return Engine(target, drafters or {}, EngineOptions(**settings))


def add(
    engine: Engine,
    tokens: Sequence[int],
    n_new: int = N_NEW,
    work: Work = Work.IDLE,
    **request: Any,
) -> Reader:
    reader = Reader()
    n_prompt = request.pop("n_prompt", len(tokens))
    asked = Request(tuple(tokens), n_prompt, n_new, **request)
    reader.id = engine.add(asked, reader.commits.append)
    if work is not Work.IDLE:
        engine.set_work(reader.id, work)
    return reader


def run(engine: Engine, most: int = 2000) -> int:
    """Step until there is nothing to do; return the number of target calls."""
    for n_calls in range(most):
        if not engine.step():
            return n_calls
    pytest.fail("the engine does not come to an end")


_longest_answers: dict[tuple[Target, tuple[int, ...]], list[int]] = {}


def all_plain(
    target: Target, prompts: Sequence[Sequence[int]], n_new: int = N_NEW
) -> list[list[int]]:
    """Return the answers of plain decoding. Shorter answers are the start of longer ones."""
    short = [
        list(prompt)
        for prompt in prompts
        if len(_longest_answers.get((target, tuple(prompt)), ())) < n_new
    ]
    written = generate_batch(target, short, max_new_tokens=n_new)
    for prompt, generation in zip(short, written, strict=True):
        _longest_answers[target, tuple(prompt)] = generation.tokens
    return [_longest_answers[target, tuple(prompt)][:n_new] for prompt in prompts]


def plain(target: Target, prompt: Sequence[int], n_new: int = N_NEW) -> list[int]:
    """Return the answer of plain decoding to one prompt."""
    return all_plain(target, [prompt], n_new)[0]


def write(
    target: Target,
    prompt: Sequence[int],
    drafters: Any = None,
    work: Work = Work.PLAIN,
    **request: Any,
) -> Any:
    """Complete a sequence alone in an engine; return its new tokens."""
    engine = engine_for(target, drafters, tree=str(N_DRAFTS))
    reader = add(engine, prompt, work=work, **request)
    run(engine)
    assert not reader.errors
    return reader.tokens


@pytest.mark.parametrize("family", QUICK_FAMILIES)
@pytest.mark.parametrize("n_texts", quick([1, 3, 8], [1, 8]))
def test_texts_are_those_of_plain_decoding(family: str, n_texts: int) -> None:
    target = Target(build_model(family))
    target.eos_token_ids = frozenset({3, 24, 28})
    engine = engine_for(target, prefill_chunk=24)
    readers = [add(engine, prompt, n_new=8, work=Work.PLAIN) for prompt in PROMPTS[:n_texts]]
    n_calls = run(engine)
    expected = all_plain(target, PROMPTS[:n_texts], 8)
    for prompt, reader, answer in zip(PROMPTS, readers, expected, strict=False):
        assert reader.tokens == answer
        assert reader.finish == ("stop" if reader.tokens[-1] in target.eos_token_ids else "length")
        starts = [commit.start for commit in reader.commits if commit.tokens]
        assert starts[0] == len(prompt)
        assert all(len(commit.tokens) == 1 for commit in reader.commits if commit.tokens)
    assert n_calls <= 8 + 20, "texts share their calls"
    assert engine.snapshot().kv_used == 0, "an answer that has ended holds no memory"


def test_layers_in_fewer_operations_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target = never_ending(build_model(num_hidden_layers=2))
    expected = all_plain(target, PROMPTS[:4])
    monkeypatch.setattr(packed, "_FEWEST_VALUES", 1)
    engine = engine_for(target, prefill_chunk=24)
    assert packed._works(torch.float32) == all(
        "fused" in vars(layer) for layer in engine._runner._body.layers
    )
    readers = [add(engine, prompt, work=Work.PLAIN) for prompt in PROMPTS[:4]]
    run(engine)
    assert [reader.tokens for reader in readers] == expected


def test_small_calls_take_one_thread(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_FEWEST_PRODUCTS", 10 * 1000)
    engine, found = engine_for(target, prefill_chunk=64), []
    engine._runner._n_values = 1000
    real = engine._runner.run

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(torch.get_num_threads())
        return real(*args, **kwargs)

    n_before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(engine._runner, "run", noted)
        add(engine, PROMPTS[0][:1] * 12, 3, Work.PLAIN)
        run(engine)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(n_before)
    assert found == [2, 1, 1]


def test_drafts_use_the_packed_lm_head_of_the_target(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed._works(torch.float32):
        pytest.skip("this machine gains nothing by the layout")
    monkeypatch.setattr(packed, "_FEWEST_VALUES", 1)
    rows: list[int] = []
    real = packed.product

    def counted(x: torch.Tensor, laid: packed.Laid) -> torch.Tensor:
        rows.append(x.shape[:-1].numel())
        return real(x, laid)

    drafter = build_drafter(target.model)
    frozen = Engine(target, {"a": drafter})._speculations["a"]._proposer.frozen
    monkeypatch.setattr(packed, "product", counted)
    with torch.inference_mode():
        frozen.logits(torch.randn(5, target.facts.hidden_size))
    assert rows == [5]


def test_the_log_says_once_when_drafts_are_given_up_and_when_they_come_back(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    speculation = Engine(target, {"a": build_drafter(target.model)})._speculations["a"]

    def judge(
        n_texts: int, n_drafts: int, n_committed: int, plain_steps: float, n_rounds: int = 40
    ) -> None:
        commit = SimpleNamespace(tokens=[0] * n_committed)
        rounds: list[Any] = [SimpleNamespace(commit=commit, n_drafts=n_drafts)] * n_texts
        for _ in range(n_rounds):
            speculation.judge(rounds, 0.01 * plain_steps)

    with caplog.at_level("INFO", logger="moa_data.serving.engine"):
        for n_texts in (1, 3):
            judge(n_texts, n_drafts=0, n_committed=1, plain_steps=1)
            judge(n_texts, n_drafts=4, n_committed=1, plain_steps=3)
        # A plain step does not show that drafts pay.
        judge(1, n_drafts=0, n_committed=1, plain_steps=1)
        judge(1, n_drafts=4, n_committed=1, plain_steps=1, n_rounds=1)
        judge(1, n_drafts=4, n_committed=5, plain_steps=2)
    assert [record.args for record in caplog.records] == [
        ("a", "1 sequence"),
        ("a", "2 to 3 sequences"),
        ("a", "1 sequence"),
    ]
    assert len({record.msg for record in caplog.records}) == 2


BLOCK: dict[str, Any] = {"block_layers": 1, "block_size": 7}
SPECULATING: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ("moa", "eagle", "eagle3", "glide", "independent")},
    **{kind: (kind, BLOCK) for kind in ("dspark", "dflash")},
    "medusa": ("medusa", {"medusa_heads": 4}),
    "moa with 1 layer": ("moa", {"target_layer_inference": 1}),
    "moa with 2 layers": ("moa", {"target_layer_inference": 2}),
    "keys and values": ("dspark", BLOCK | {"context": "kv", "fused_layers": (1,)}),
    "memory": ("dflash", BLOCK | {"context": "memory", "fused_layers": None}),
}


def assert_served(target: Target, drafter: Any, tree: str) -> None:
    """Check three sequences at once, of which two speculate, against plain decoding."""
    engine = engine_for(target, {"it": drafter}, tree=tree, prefill_chunk=24)
    readers = [add(engine, prompt, 6, drafter="it") for prompt in PROMPTS[:3]]
    for reader in readers[:2]:
        engine.set_work(reader.id, Work.SPECULATE)
    engine.set_work(readers[2].id, Work.PLAIN)
    run(engine)
    assert not any(reader.errors for reader in readers)
    assert [reader.tokens for reader in readers] == all_plain(target, PROMPTS[:3], 6)


@pytest.mark.parametrize("family", quick(FEATURES, ("gpt_oss", "deepseek_v3")))
@pytest.mark.parametrize(
    "names", quick([("moa", "medusa"), tuple(DRAFTERS)], [("moa", "medusa")]), ids=len
)
def test_families_of_targets(family: str, names: Sequence[str]) -> None:
    """The targets use their special features.

    Every drafter that the support table lists is served; the others are refused.
    """
    target = never_ending(build_family(family))
    for name in names:
        (kind, sizes), letters = DRAFTERS[name], works(family, name)
        if "S" in letters:
            assert_served(
                target, build(kind, target.model, **sizes), "2x2x6" if kind == "medusa" else "3"
            )
        elif letters:
            with pytest.raises(TargetError, match=r"carry a state|reads latents"):
                engine_for(target, {"it": build(kind, target.model, **sizes)})


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FEATURES if "S" in works(name, "medusa")])
def test_random_configurations_of_families(family: str) -> None:
    for seed in range(20):
        target = never_ending(build_family(family, seed, **varied(family, seed)))
        assert_served(target, build("medusa", target.model, seed), "2x2x6" if seed % 2 else "3")


@pytest.mark.parametrize("name", quick(SPECULATING, []))
def test_every_drafter_speculates_for_several_texts(name: str) -> None:
    target, (kind, sizes) = never_ending(build_model(num_hidden_layers=3)), SPECULATING[name]
    drafter = build(kind, target.model, **sizes)
    drafter = teach(drafter, target, PROMPTS[:4], 25)
    engine = engine_for(target, {"it": drafter}, tree=str(N_DRAFTS))
    readers = [add(engine, prompt, 16, drafter="it") for prompt in PROMPTS[:5]]
    for index, reader in enumerate(readers):
        engine.set_work(reader.id, Work.SPECULATE)
        for _ in range(index):  # so that the sequences join one after the other
            engine.step()
    run(engine)
    for prompt, reader in zip(PROMPTS, readers, strict=False):
        assert not reader.errors
        assert reader.tokens == plain(target, prompt, 16)
    counts = engine.snapshot()
    assert counts.n_accepted > 5, "drafts are accepted"
    assert counts.n_accepted == sum(
        commit.n_accepted for reader in readers for commit in reader.commits
    )
    assert counts.n_committed == 5 * 16
    assert counts.n_rounds < counts.n_committed


@pytest.mark.parametrize("shape", quick(["3x2x6", "auto"], ["auto"]))
def test_trees_and_auto(target: Target, taught: Any, shape: str) -> None:
    engine = engine_for(target, {"moa": taught}, tree=shape)
    readers = [add(engine, prompt, 16, Work.SPECULATE, drafter="moa") for prompt in PROMPTS[:3]]
    run(engine)
    assert [reader.tokens for reader in readers] == all_plain(target, PROMPTS[:3], 16)


def test_sampled_texts_do_not_depend_on_drafts_or_company(target: Target, taught: Any) -> None:
    seeds = range(3)
    alone = [write(target, PROMPTS[seed], sampling=SAMPLED, seed=seed) for seed in seeds]
    assert alone[0] != plain(target, PROMPTS[0])
    assert alone[0] != write(target, PROMPTS[0], sampling=SAMPLED, seed=99)
    assert alone[0] == write(target, PROMPTS[0], sampling=SAMPLED, seed=0), "again"
    engine = engine_for(target, {"moa": taught}, tree="5@0.05")
    drafting: dict[str, Any] = {"work": Work.SPECULATE, "drafter": "moa"}
    readers = [
        add(engine, PROMPTS[seed], sampling=SAMPLED, seed=seed, **drafting) for seed in seeds
    ]
    # This one is greedy, in the same drafting rounds.
    readers.append(add(engine, PROMPTS[7], **drafting))
    run(engine)
    assert [reader.tokens for reader in readers[:-1]] == alone
    assert readers[-1].tokens == plain(target, PROMPTS[7])
    assert engine.snapshot().n_accepted > 0


def test_a_text_that_came_complete_has_ended(target: Target) -> None:
    engine, truth = engine_for(target), plain(target, PROMPTS[0])
    ended = add(engine, [*PROMPTS[0], *truth], n_prompt=len(PROMPTS[0]))
    engine.set_work(ended.id, Work.VERIFY, answers=4)
    assert not engine.step()
    assert [(c.tokens, c.finish, c.answers) for c in ended.commits] == [((), "length", 4)]


def test_work_changes_between_kinds_without_a_trace(
    target: Target, taught: Any, taught_eagle: Any
) -> None:
    """Sequences join, leave, change their work and are held at random.

    The memory is so small that most of them are evicted.
    """
    chance = random.Random(0)
    truths = all_plain(target, PROMPTS, 30)
    engine = engine_for(
        target, {"moa": taught, "eagle": taught_eagle}, tree="3", kv_tokens=192, max_drafts=8,
        prefill_chunk=16, max_sequences=3,
    )  # fmt: skip
    readers: dict[Any, tuple[int, Reader]] = {}
    done = 0
    for _ in range(200):
        if chance.random() < 0.15 and len(readers) < 8:
            index = chance.randrange(8)
            n_known = chance.choice((0, 0, 5))
            text = [*PROMPTS[index], *truths[index][:n_known]]
            drafter = chance.choice((None, "moa", "eagle"))
            reader = add(engine, text, 30, n_prompt=len(PROMPTS[index]), drafter=drafter)
            readers[reader.id] = (index, reader)
        if not readers:
            continue
        index, reader = readers[chance.choice(list(readers))]
        sequence = engine._sequences.get(reader.id)
        if chance.random() < 0.5 and sequence is not None:
            work = chance.choice((Work.PLAIN, Work.SPECULATE, Work.VERIFY, Work.IDLE))
            behind = truths[index][len(sequence.tokens) - len(PROMPTS[index]) :][
                : chance.randrange(5)
            ]
            drafts = tuple(token if chance.random() < 0.7 else 7 for token in behind)
            engine.set_work(reader.id, work, drafts if work is Work.VERIFY else ())
        elif chance.random() < 0.1:
            engine.hold(reader.id, chance.random() < 0.5)
        elif chance.random() < 0.03:
            engine.remove(reader.id)
            del readers[reader.id]
        engine.step()
        assert engine.snapshot().kv_used <= 192
        for id_, (index, reader) in list(readers.items()):
            assert not reader.errors
            first = reader.commits[0].start - len(PROMPTS[index]) if reader.commits else 0
            assert reader.tokens == truths[index][first : first + len(reader.tokens)]
            if reader.finish:
                assert (
                    reader.commits[-1].start + len(reader.commits[-1].tokens)
                    == len(PROMPTS[index]) + 30
                )
                engine.remove(id_)
                del readers[id_]
                done += 1
    counts = engine.snapshot()
    assert done > 5
    assert counts.n_evicted > 5
    assert counts.n_accepted > 20
    assert counts.n_failed == 0


def test_idle_texts_give_up_their_memory_first(target: Target) -> None:
    engine = engine_for(target, kv_tokens=128, max_drafts=8)
    idle = [add(engine, PROMPTS[0][:20]) for _ in range(2)]
    for reader in idle:
        engine.set_work(reader.id, Work.VERIFY)
        run(engine)
    busy = add(engine, range(4, 64), 20)
    engine.set_work(busy.id, Work.PLAIN)
    for _ in range(8):  # After 8 steps it needs three of the four blocks.
        engine.step()
    held = {id_: sequence.kv.n_blocks for id_, sequence in engine._sequences.items()}
    assert held[idle[0].id] == 0, "the least recently served of the idle ones"
    assert held[idle[1].id] == 1
    assert engine.snapshot().n_evicted == 1
    engine.set_work(idle[0].id, Work.VERIFY)
    run(engine)
    assert idle[0].tokens == plain(target, PROMPTS[0][:20])[:2]
    assert busy.tokens == plain(target, range(4, 64), 20)


def test_a_long_prompt_does_not_stall_the_others(target: Target) -> None:
    engine = engine_for(target, prefill_chunk=16)
    short = add(engine, PROMPTS[0][:4], 20, Work.PLAIN)
    engine.step()
    long = add(engine, range(4, 64), 4, Work.PLAIN)
    for n_calls in itertools.count(1):
        engine.step()
        assert len(short.tokens) == 1 + n_calls, "a token with each call"
        if long.tokens:
            break
    assert n_calls == 4, "60 tokens in chunks of 16"
    assert long.tokens[0] == plain(target, range(4, 64), 1)[0]


def test_nobody_waits_while_another_is_served_twice(target: Target) -> None:
    engine = engine_for(target, max_sequences=3)
    readers = [add(engine, prompt[:6], 9, Work.PLAIN) for prompt in PROMPTS]
    while engine.step():
        served = [len(reader.tokens) for reader in readers]
        assert max(served) - min(served) <= 1
    assert served == [9] * 8


def test_too_many_texts_are_refused(target: Target) -> None:
    engine = engine_for(target, max_sequences=1, max_waiting=2)
    readers = [add(engine, [5, 6]) for _ in range(3)]
    with pytest.raises(Overloaded):
        add(engine, [5, 6])
    engine.remove(readers[0].id)
    engine.step()
    add(engine, [5, 6])
    engine.remove(readers[0].id)  # It is removed already.
    engine.set_work(readers[0].id, Work.PLAIN)
    assert not engine.step()
    assert engine.snapshot().n_open == 3


BAD_REQUESTS: dict[str, dict[str, Any]] = {
    "empty": {"tokens": ()},
    "no prompt": {"n_prompt": 0},
    "prompt longer than the text": {"n_prompt": 4},
    "too long": {"tokens": (5,) * 96, "n_prompt": 96},
    "negative token": {"tokens": (5, -1)},
    "no answer": {"max_new_tokens": 0},
    "answer beyond its bound": {"tokens": (5, 6, 7, 8), "max_new_tokens": 1},
    "more than the memory": {"max_new_tokens": 53},
    "contexts of unknown positions": {"n_context": 4},
    "unknown drafter": {"drafter": "condor"},
    "contexts without a drafter": {"wants_context": True},
    "a drafter without contexts": {"wants_context": True, "drafter": "glide"},
}


@pytest.fixture(scope="module")
def small_engine(target: Target) -> Engine:
    return engine_for(target, {"glide": build("glide", target.model)}, kv_tokens=64, max_drafts=8)


@pytest.mark.parametrize("changes", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_bad_requests_are_refused(small_engine: Engine, changes: dict[str, Any]) -> None:
    engine = small_engine
    good: dict[str, Any] = {"tokens": (5, 6), "n_prompt": 2, "max_new_tokens": 5}
    with pytest.raises(RequestInvalid):
        engine.add(Request(**good | changes), print)
    assert engine.snapshot().n_open == 0
    sequence = engine.add(Request(**good | {"max_new_tokens": 52, "drafter": "glide"}), print)
    with pytest.raises(RequestInvalid):
        engine.set_work(sequence, Work.VERIFY, (1, 67))
    engine.remove(sequence)
    engine.step()


def test_a_fault_in_one_text_ends_that_one_alone(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_for(target)
    readers = [add(engine, prompt) for prompt in PROMPTS[:4]]
    broken = Reader()

    def refuse(commit: Commit) -> None:
        broken.commits.append(commit)
        raise ValueError("the listener is gone")

    broken.id = engine.add(Request((5, 6), 2, 5), refuse)
    for reader in (*readers, broken):
        engine.set_work(reader.id, Work.PLAIN)
    engine.step()
    assert "the listener is gone" in str(broken.errors[0])
    pool = Pool(96, target.facts.sizes | {"head_dim": 1}, torch.float32, target.device)
    engine._sequences[readers[2].id].kv.pool = pool
    run(engine)
    assert len(readers[2].errors) == 1
    for index in (0, 1, 3):
        assert readers[index].tokens == plain(target, PROMPTS[index])
    counts = engine.snapshot()
    assert (counts.n_failed, counts.n_open, counts.kv_used) == (2, 3, 0)
    assert "repeated for each sequence alone" in caplog.text


class Fault(Exception):
    """An error that one sequence causes."""


@pytest.mark.parametrize(
    "stage", ["target call", "choice of tokens", "encoding of contexts", "copy of contexts"]
)
@pytest.mark.parametrize("is_lasting", [True, False])
def test_a_batch_that_fails_is_retried_for_each_sequence_alone(
    target: Target,
    stage: str,
    is_lasting: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only a sequence that also fails alone ends, and the others get the same tokens."""
    engine = engine_for(target, {"it": build_drafter(target.model)})
    settings: dict[str, Any] = {"drafter": "it", "wants_context": True, "sampling": SAMPLED}
    readers = [
        add(engine, prompt, seed=seed, **settings) for seed, prompt in enumerate(PROMPTS[:3])
    ]
    # The sequences are idle, so this step only adds them.
    engine.step()
    for reader in readers:
        engine.set_work(reader.id, Work.PLAIN)
    broken = engine._sequences[readers[1].id]
    sizes: list[int] = []

    # Stage -> the object and the name of its function, and how the broken sequence is recognised
    # among the arguments of the function: by an attribute, and by the value of this attribute.
    stages: dict[str, tuple[Any, str, str, Any]] = {
        "target call": (engine._runner, "run", "kv", broken.kv),
        "choice of tokens": (engine_module, "accept_chosen", "state.tokens", broken.tokens),
        "encoding of contexts": (engine._speculations["it"], "encode_contexts", "kv", broken.kv),
        "copy of contexts": (engine_module, "contexts_to_host", "kv", broken.kv),
    }
    owner, name, key, broken_value = stages[stage]
    identify = operator.attrgetter(key)
    real = getattr(owner, name)

    def faulty(items: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        has_broken = any(identify(item) is broken_value for item in items)
        if has_broken and (is_lasting or len(items) > 1):
            sizes.append(len(items))
            raise Fault(stage)
        return real(items, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, faulty)
        run(engine)
    if is_lasting:
        assert sizes == [3, 1]
    else:
        assert set(sizes) == {3}
    assert f"the {stage} for 3 sequences failed" in caplog.text
    assert len(readers[1].errors) == is_lasting
    for seed, (prompt, reader) in enumerate(zip(PROMPTS, readers, strict=False)):
        if reader is not readers[1] or not is_lasting:
            assert not reader.errors
            assert reader.tokens == write(target, prompt, sampling=SAMPLED, seed=seed)
    counts = engine.snapshot()
    assert counts.n_failed == is_lasting
    assert counts.kv_used == 0


@pytest.mark.parametrize("where", ["draft_root", "draft_level", "observe"])
def test_a_drafter_that_fails_costs_speed_alone(
    target: Target,
    taught_eagle: Any,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_for(
        target, {"it": taught_eagle, "other": build_drafter(target.model)}, tree=str(N_DRAFTS)
    )
    names = ("it", "it", "it", "other")
    readers = [
        add(engine, prompt, work=Work.SPECULATE, drafter=name)
        for prompt, name in zip(PROMPTS, names, strict=False)
    ]
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(taught_eagle), where, lambda *args: 1 / 0)
        engine.step()
    run(engine)
    for prompt, reader in zip(PROMPTS, readers, strict=False):
        assert not reader.errors
        assert reader.tokens == plain(target, prompt)
    assert "continue without drafts" in caplog.text
    n_before = engine.snapshot().n_drafted
    late = add(engine, PROMPTS[4], work=Work.SPECULATE, drafter="it")
    run(engine)
    assert late.tokens == plain(target, PROMPTS[4])
    assert engine.snapshot().n_drafted > n_before, "a later text is drafted for again"


@pytest.mark.parametrize(
    ("kind", "n_layers"),
    [
        ("moa", 0),
        pytest.param("moa", 1, marks=pytest.mark.slow),
        pytest.param("eagle", 0, marks=pytest.mark.slow),
        ("dspark", 0),
        pytest.param("independent", 0, marks=pytest.mark.slow),
    ],
)
def test_commits_carry_contexts_of_what_got_kv(target: Target, kind: str, n_layers: int) -> None:
    """Contexts come in order and without gaps.

    That holds with chunks, drafts, eviction and rebuilding. Known contexts are not sent again.
    """
    drafter = build(
        kind, target.model, **({"target_layer_inference": n_layers} if n_layers else {})
    )
    engine = engine_for(
        target, {"it": drafter}, tree=str(N_DRAFTS), prefill_chunk=16, kv_tokens=96, max_drafts=8
    )
    reader = add(engine, PROMPTS[0] * 2, 20, drafter="it", wants_context=True, n_context=5)
    text = [*PROMPTS[0] * 2, *plain(target, PROMPTS[0] * 2, 20)]
    for work in (Work.SPECULATE, Work.VERIFY):
        engine.set_work(
            reader.id, work, tuple(text[len(reader.tokens) :][:2]) if work is Work.VERIFY else ()
        )
        for _ in range(6):
            engine.step()
    add(engine, range(4, 64), 2, Work.PLAIN)  # This evicts the other sequence.
    run(engine)
    assert engine.snapshot().n_evicted == 1
    engine.set_work(reader.id, Work.SPECULATE)
    run(engine)
    assert reader.tokens == text[len(PROMPTS[0]) * 2 :]
    found, n_known = [], 5
    for commit in reader.commits:
        if commit.context is not None:
            assert commit.context_start == n_known
            n_known += len(commit.context)
            found.append(commit.context)
    assert n_known >= len(text) - 1 - N_DRAFTS
    expected = contexts_of(drafter, target, text[:n_known])
    torch.testing.assert_close(torch.cat(found), expected[5:], rtol=1e-4, atol=1e-4)


def test_contexts_of_layers_that_do_not_cache_alike() -> None:
    target = never_ending(build_family("gemma4_text"))
    drafter = build("moa", target.model)
    engine = engine_for(target, {"it": drafter}, tree=str(N_DRAFTS), prefill_chunk=16)
    readers = [
        add(engine, prompt, work=Work.SPECULATE, drafter="it", wants_context=True)
        for prompt in PROMPTS[:2]
    ]
    run(engine)
    for prompt, reader in zip(PROMPTS, readers, strict=False):
        assert reader.tokens == plain(target, prompt)
        found = torch.cat(
            [commit.context for commit in reader.commits if commit.context is not None]
        )
        expected = contexts_of(drafter, target, [*prompt, *reader.tokens][: len(found)])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_family_whose_attention_is_its_own_is_refused() -> None:
    """Its layers would not use the engine's attention, so the answers would be wrong."""
    sizes = {
        name: value
        for name, value in FAMILY_SIZES.items()
        if name not in ("head_dim", "num_key_value_heads")
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon", **sizes)).eval()
    with raises_naming(TargetError, "falcon", "moa-data generate"):
        engine_for(never_ending(model))


def test_a_layer_unlike_the_others_is_attended_to() -> None:
    """Rounds commit as many tokens as those of a sequence that is decoded alone."""
    target = never_ending(build_family("gemma4_text"))
    drafter = teach(build("glide", target.model), target, PROMPTS[:2], 12)
    engine = engine_for(target, {"it": drafter}, tree=str(N_DRAFTS))
    readers = [add(engine, prompt, work=Work.SPECULATE, drafter="it") for prompt in PROMPTS[:2]]
    run(engine)
    for prompt, reader in zip(PROMPTS, readers, strict=False):
        alone = generate(target, drafter, prompt, max_new_tokens=N_NEW, tree=TreeShape(N_DRAFTS))
        assert reader.tokens == alone.tokens
        # The first commit is the token after the prompt.
        _, *committed = [len(commit.tokens) for commit in reader.commits if commit.tokens]
        assert committed == alone.stats.committed_per_call
        assert max(alone.stats.committed_per_call) > 1


def test_a_thread_serves_texts_of_other_threads(
    target: Target, taught: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread survives an error of the engine."""
    engine, failed = engine_for(target, {"moa": taught}, tree=str(N_DRAFTS)), Reader()
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "schedule", lambda sequences: 1 / bool(not sequences))
        failed.id = engine.add(Request((5, 6), 2, 5), failed.commits.append)
        engine.start()
        engine.set_work(failed.id, Work.PLAIN)
        wait_for(lambda: bool(failed.errors))
    try:
        readers = [
            add(engine, prompt, work=Work.SPECULATE if index % 2 else Work.PLAIN, drafter="moa")
            for index, prompt in enumerate(PROMPTS)
        ]
        wait_for(lambda: all(reader.finish for reader in readers))
        assert [reader.tokens for reader in readers] == all_plain(target, PROMPTS)
        engine.hold(readers[0].id, True)
        for reader in readers:
            engine.remove(reader.id)
        wait_for(lambda: engine.snapshot().n_open == 0)
    finally:
        engine.stop()


def test_half_precision() -> None:
    target = Target(build_model(num_hidden_layers=2).bfloat16())
    engine = engine_for(
        target, {"moa": build_drafter(target.model).bfloat16()}, tree=str(N_DRAFTS), target_ms=2
    )
    reader = add(engine, PROMPTS[0], work=Work.SPECULATE, drafter="moa")
    run(engine)
    assert not reader.errors
    assert len(reader.tokens) == N_NEW or reader.finish == "stop"
    assert all(commit.call_s >= 0.002 for commit in reader.commits), "a slower target is emulated"
    own, other = (
        dict(engine._runner._model.named_parameters()),
        dict(target.model.named_parameters()),
    )
    assert all(own[name].data_ptr() == weight.data_ptr() for name, weight in other.items()), (
        "weights are shared"
    )
