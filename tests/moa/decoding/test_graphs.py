"""Chain rounds as CUDA graphs on a simulated device draft the same tokens with few launches."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moa_data.moa.decoding.loop import generate_batch, prefill
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.nn.graphs import n_recorded
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.device import Counts
from moa_data.tests.kit.drafters import build
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.variants import quick, quick_rows

DEPTH = 4
N_SLOTS = 64
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [13, 14, 15], [16]]
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 97, "eos_token_id": None}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "moa": ("moa", {}),
    "moa, a target layer": ("moa", {"target_layer_inference": 1}),
    "moa, encoded KV alone": (
        "moa",
        {"cross_attention_drafts": False, "layer_stride": 2, "layer_groups": 1},
    ),
    "eagle": ("eagle", {}),
    "eagle of two layers": ("eagle", {"eagle_layers": 2}),
    "eagle3": ("eagle3", {}),
    "eagle3 of fewer tokens": ("eagle3", {"draft_vocabulary": 40}),
    "eagle of fewer tokens": ("eagle", {"draft_vocabulary": 40}),
    "independent": ("independent", {}),
    "glide": ("glide", {}),
}
BY_DEFAULT = ["eagle3"]


def replays(counts: Counts, file: str) -> int:
    return sum(
        n
        for line, n in counts.launch_lines.items()
        if line.startswith(file) and line.endswith(" graph")
    )


def proposer_on(
    device: str, name: str, is_static: bool, family: str = "llama"
) -> tuple[Target, DrafterProposer]:
    kind, settings = DRAFTERS[name]
    target = Target(build_model(family, **SIZES).to(device))
    if is_static:
        target.use_static_calls(N_SLOTS)
    return target, DrafterProposer(
        target, build(kind, build_model(family, **SIZES), **settings).to(device)
    )


def drafts_of(
    target: Target,
    proposer: DrafterProposer,
    prompts: list[list[int]],
    around: Callable[[], Any] = lambda: None,
    n_rounds: int = 8,
) -> list[Any]:
    """Return the drafts of each round of a scripted run.

    Different numbers of tokens are accepted in each round, and a row leaves on the way.
    """
    rng, found = random.Random(0), list[Any]()
    committed, cache = (
        [[*prompt, rng.randrange(97)] for prompt in prompts],
        target.new_cache(len(prompts)),
    )
    proposer.begin(cache)
    prefill(target, cache, prompts, proposer)
    for index in range(n_rounds):
        if index == 5 and len(committed) == 3:
            committed = [committed[0], committed[2]]
            cache.select_rows([0, 2])
            proposer.select_rows([0, 2])
        around()
        drafts = proposer.propose(committed, TreeShape(DEPTH)).tokens
        around()
        found.append(drafts.tolist())
        new = [[rng.randrange(97) for _ in range(DEPTH + 1)] for _ in committed]
        calls = [[row[-1], *more[:-1]] for row, more in zip(committed, new, strict=True)]
        kept = [range(1 + (index + row) * 3 % (DEPTH + 1)) for row in range(len(committed))]
        hidden = target.forward(torch.tensor(calls).to(target.device), cache)
        cache.commit(kept)
        proposer.observe(hidden, kept)
        for row, more, own in zip(committed, new, kept, strict=True):
            row += more[: len(own)]
    cache.release()
    return found


@pytest.mark.parametrize("name", quick(DRAFTERS, BY_DEFAULT))
def test_graphs_draft_what_is_drafted_without(device: Counts, name: str) -> None:
    """Graphs draft the same tokens, with few launches and no wait.

    They do so for one row, for rows of different lengths, and for the generations that follow.
    """
    plain, graphs = (
        proposer_on("cpu", name, is_static=False),
        proposer_on("cuda", name, is_static=True),
    )
    marks: list[tuple[int, int]] = []
    several, one = PROMPTS, PROMPTS[:1]
    expected = {len(prompts): drafts_of(*plain, prompts) for prompts in (several, one)}
    for prompts in (several, one, several):
        marks.clear()
        device.reset()
        found = drafts_of(*graphs, prompts, lambda: marks.append((device.launches, device.waits)))
        assert replays(device, "moa/decoding/graphs.py") == 7
        assert replays(device, "moa/targets/live.py") == 8
        message = device.worst()
        assert found == expected[len(prompts)]
    rounds = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in zip(marks[::2], marks[1::2], strict=True)
    ]
    # Leave out the first two rounds (without a graph, and moving the caches) and the round after a
    # row left.
    rounds = [rounds[index] for index in (2, 3, 4, 6, 7)]
    assert max(launches for launches, _ in rounds) <= 8, message
    assert not any(waits for _, waits in rounds), message


@pytest.mark.parametrize("family", quick(["mistral", "qwen3"], ["mistral"]))
def test_targets_of_other_families(device: Counts, family: str) -> None:
    """Graphs also work for targets with sliding windows or with normed keys."""
    name = "moa, a target layer"
    plain, graphs = proposer_on("cpu", name, False, family), proposer_on("cuda", name, True, family)
    found, expected = (drafts_of(*pair, PROMPTS, n_rounds=6) for pair in (graphs, plain))
    assert found == expected


@pytest.mark.parametrize(
    ("drafter", "most"),
    quick_rows([(None, 11), ("moa", 20), ("eagle", 24)], [(None, 11), ("eagle", 24)]),
)
def test_a_whole_round_of_graphs(device: Counts, drafter: str | None, most: int) -> None:
    """A whole round has at most one wait.

    It makes one upload for the target's call, one for the drafter's calls, and one copy to the
    host, for which it waits.
    """
    marks: list[tuple[int, int]] = []
    target, proposer = proposer_on("cuda", drafter or "moa", is_static=True)
    tree = TreeShape(DEPTH) if drafter else None
    for _ in range(2):
        marks.clear()
        generate_batch(
            target, PROMPTS[:1], max_new_tokens=7,
            proposer=proposer if drafter else None, tree=tree,
            on_round=lambda *_: marks.append((device.launches, device.waits)),
        )  # fmt: skip
        device.launch_lines.clear()
    rounds = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in itertools.pairwise(marks[2:])
    ]
    assert max(launches for launches, _ in rounds) <= most, device.worst()
    assert max(waits for _, waits in rounds) <= 1, device.worst()


@pytest.mark.parametrize("n_tokens", [1, 6])
def test_a_static_call_launches_one_graph_and_little_else(device: Counts, n_tokens: int) -> None:
    target, _ = proposer_on("cuda", "moa", is_static=True)
    cache = target.new_cache(2)
    prefill(target, cache, PROMPTS[:2])
    tokens, seen = (
        torch.ones(2, n_tokens, dtype=torch.int64).cuda(),
        torch.eye(n_tokens, dtype=torch.bool).cuda(),
    )
    for given in (None, seen.repeat(2, 1, 1)):
        target.forward(tokens, cache, given)  # the first call records the graph
        device.reset()
        target.logits(target.forward(tokens, cache, given))
        assert device.launches <= 9, device.worst()
        assert not device.waits, device.worst()


HOST_DEPENDENT: dict[str, Callable[[Tensor], object]] = {
    "a number read": lambda tokens: tokens.max().item(),
    "a size that depends on data": lambda tokens: tokens.nonzero(),
    "a mask as index": lambda tokens: tokens[tokens > 3],
    "a tensor of the host": lambda tokens: (
        torch.tensor([1]).pin_memory().to("cuda", non_blocking=True)
    ),
    "an index of the host": lambda tokens: tokens[[0]],
}


@pytest.mark.parametrize("what", HOST_DEPENDENT)
def test_what_depends_on_the_host_cannot_be_captured(
    device: Counts, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, proposer = proposer_on("cuda", "independent", is_static=True)
    real = proposer.drafter.draft_level

    def dependent(state: Any, frozen: Any, level: Any, cache: Any) -> Tensor:
        HOST_DEPENDENT[what](level.tokens)
        return real(state, frozen, level, cache)

    monkeypatch.setattr(proposer.drafter, "draft_level", dependent)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        drafts_of(target, proposer, PROMPTS[:1])


@pytest.mark.parametrize("name", quick(["moa", "moa, a target layer"], ["moa"]))
@pytest.mark.usefixtures("device")
def test_a_graph_is_not_run_on_a_buffer_of_other_strides_at_its_address(name: str) -> None:
    """Graphs check the shape of a buffer, not only its address.

    A new buffer of fewer rows can get the address of one that was freed.
    """
    plain = proposer_on("cpu", name, is_static=False)
    target, proposer = proposer_on("cuda", name, is_static=True)
    # The last round has two rows in a buffer of three.
    drafts_of(target, proposer, PROMPTS, n_rounds=6)
    assert target._static is not None
    ((shape, (freed,)),) = target._static.buffers.items()
    fewer_rows = (*shape[:2], 2, *shape[3:])
    size = torch.Size(fewer_rows).numel()
    target._static.buffers = {fewer_rows: [freed.flatten()[:size].view(fewer_rows)]}
    assert target._static.buffers[fewer_rows][0].data_ptr() == freed.data_ptr()
    found, expected = (
        drafts_of(*pair, PROMPTS[:2], n_rounds=4) for pair in ((target, proposer), plain)
    )
    assert found == expected


@pytest.mark.parametrize("drafter", quick([None, "moa"], ["moa"]))
@pytest.mark.usefixtures("device")
def test_an_interrupted_generation_gives_its_buffer_back(drafter: str | None) -> None:
    """The next generation uses the same buffer and the same graphs."""
    target, proposer = proposer_on("cuda", drafter or "moa", is_static=True)
    settings: dict[str, Any] = {"prompts": PROMPTS[:1], "max_new_tokens": 6}
    if drafter:
        settings |= {"proposer": proposer, "tree": TreeShape(DEPTH)}
    expected = generate_batch(target, **settings)
    n_before = n_recorded()
    n_rounds = itertools.count()

    def interrupt(*_: Any) -> None:
        if next(n_rounds) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_batch(target, **settings, on_round=interrupt)
    found = generate_batch(target, **settings)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert n_recorded() == n_before


@pytest.mark.parametrize("shape", quick(["3", "4@0.000001", "2x2x4"], ["3"]))
def test_other_chains_and_longer_texts_are_plain_decoding_too(device: Counts, shape: str) -> None:
    long_prompt = [5 + token for token in range(62)]
    settings: dict[str, Any] = {"prompts": [long_prompt, *PROMPTS[1:]], "max_new_tokens": 13}
    target, proposer = proposer_on("cuda", "eagle", is_static=True)
    # Buffers have 72 slots, more than the longest prompt and fewer than the longest text.
    target.use_static_calls(8)
    expected = generate_batch(proposer_on("cpu", "eagle", is_static=False)[0], **settings)
    found = generate_batch(target, proposer=proposer, tree=TreeShape.parse(shape), **settings)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
