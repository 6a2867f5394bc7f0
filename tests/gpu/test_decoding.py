"""Decoding on a GPU in float32 writes the tokens of plain decoding, also on a simulated GPU.

Needs only torch, transformers and pytest: `benchmarks/gpu/gpu.sh --part decode` runs it.
"""

import itertools
from typing import Any

import pytest
import torch

from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.moa.targets.live import Target
from moa_data.serving.config import EngineOptions
from moa_data.serving.engine.engine import Engine
from moa_data.serving.engine.sequence import Commit, Request, Work
from moa_data.tests.kit.drafters import build
from moa_data.tests.kit.models import build_model, random_prompts
from moa_data.tests.kit.variants import quick, quick_rows
from moa_data.tests.moa.decoding import test_graphs

PROMPTS = random_prompts(3, 3)
N_NEW = 8
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(0.9, top_k=20)
CHAIN, TREE = TreeShape(4), TreeShape(2, 3, 6)


@pytest.fixture(
    params=[
        pytest.param("simulated", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def gpu(request: pytest.FixtureRequest) -> str:
    """Return "cuda", which is either a simulated or a real device."""
    if request.param == "simulated":
        request.getfixturevalue("device")
    return "cuda"


def target_on(device: str, n_layers: int = 2) -> Target:
    target = Target(build_model(num_hidden_layers=n_layers).to(device))
    target.eos_token_ids = frozenset()
    return target


def drafter_on(device: str, kind: str) -> Any:
    return build(kind, build_model(num_hidden_layers=2)).to(device)


def plain(target: Target) -> list[list[int]]:
    return [plain_generate(target, prompt, max_new_tokens=N_NEW).tokens for prompt in PROMPTS]


@pytest.mark.parametrize("kind", quick(DRAFTERS, ["moa"]))
def test_chains_and_trees_are_plain_decoding(gpu: str, kind: str) -> None:
    """Drafts change no token, for one row and for a batch of several rows."""
    target = target_on(gpu)
    proposer, expected = DrafterProposer(target, drafter_on(gpu, kind)), plain(target)
    for shape in (CHAIN, TREE):
        for prompts, wanted in ((PROMPTS[:1], expected[:1]), (PROMPTS, expected)):
            found = generate_batch(
                target, prompts, max_new_tokens=N_NEW, proposer=proposer, tree=shape
            )
            assert [one.tokens for one in found] == wanted, shape


def test_tokens_are_those_of_the_cpu(gpu: str) -> None:
    assert plain(target_on(gpu)) == plain(target_on("cpu"))


@pytest.mark.parametrize(
    ("kind", "shape"),
    quick_rows(
        itertools.product(test_graphs.DRAFTERS, (None, CHAIN, TREE)),
        [("moa", TREE)],
    ),
    ids=str,
)
def test_graphs_give_the_same_tokens(gpu: str, kind: str, shape: TreeShape | None) -> None:
    """CUDA graphs of target calls and of greedy chains change no token.

    One row, several rows, and one row again are decoded with the same graphs.
    """
    name, settings = test_graphs.DRAFTERS[kind]
    target = target_on(gpu, 4)
    expected = plain(target)
    target.use_static_calls(32)
    drafter: Any = build(name, build_model(num_hidden_layers=4), **settings).to(gpu)
    proposer = DrafterProposer(target, drafter) if shape else None
    for prompts, wanted in (
        (PROMPTS[:1], expected[:1]),
        (PROMPTS, expected),
        (PROMPTS[:1], expected[:1]),
    ):
        found = generate_batch(target, prompts, max_new_tokens=N_NEW, proposer=proposer, tree=shape)
        assert [one.tokens for one in found] == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("name", test_graphs.DRAFTERS)
def test_graphs_draft_what_is_drafted_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs draft the same tokens. Only a real device captures them."""
    n_replays, replay = 0, torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal n_replays
        n_replays += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    plain, graphs = (
        test_graphs.proposer_on("cuda", name, is_static) for is_static in (False, True)
    )
    for prompts in (test_graphs.PROMPTS[:1], test_graphs.PROMPTS, test_graphs.PROMPTS[:1]):
        found = test_graphs.drafts_of(*graphs, prompts)
        assert found == test_graphs.drafts_of(*plain, prompts)
    # Each of the 3 generations replays a draft graph in each round but the first, and a target
    # graph in each round.
    assert n_replays == 3 * (len(found) - 1) + 3 * len(found)


@pytest.mark.parametrize(
    ("kind", "sampling"),
    quick_rows(
        itertools.product((None, "moa", "eagle"), (GREEDY, SAMPLED)),
        [("moa", GREEDY), ("eagle", SAMPLED)],
    ),
    ids=str,
)
def test_a_served_text_is_that_of_the_cpu(
    gpu: str, kind: str | None, sampling: SamplingConfig
) -> None:
    """Concurrent requests write the CPU's tokens: with and without drafts, greedy and seeded."""
    written = []
    for device in ("cpu", gpu):
        name = "it" if kind else None
        drafters = {"it": drafter_on(device, kind)} if kind else {}
        engine, commits = (
            Engine(target_on(device), drafters, EngineOptions(tree="3")),
            list[list[Commit]](),
        )
        for seed, prompt in enumerate(PROMPTS):
            heard = list[Commit]()
            request = Request(
                tuple(prompt), len(prompt), N_NEW, sampling=sampling, seed=seed, drafter=name
            )
            engine.set_work(
                engine.add(request, heard.append), Work.SPECULATE if kind else Work.PLAIN
            )
            commits.append(heard)
        while engine.step():
            pass
        assert not [commit.error for heard in commits for commit in heard if commit.error]
        written.append(
            [[token for commit in heard for token in commit.tokens] for heard in commits]
        )
    assert written[0] == written[1]
    assert all(len(tokens) == N_NEW for tokens in written[0])
