"""Launches and waits of a serving step on a simulated CUDA device.

The sequences and values are those of the CPU.
"""

from typing import Any

import pytest
import torch

from moa_data.moa.decoding.sampling import GREEDY, SamplingConfig
from moa_data.moa.targets.live import Target
from moa_data.serving.config import EngineOptions
from moa_data.serving.engine import attention
from moa_data.serving.engine.attention import Segment
from moa_data.serving.engine.engine import Engine
from moa_data.serving.engine.pool import Pool, PooledKV
from moa_data.serving.engine.runner import Runner
from moa_data.serving.engine.sequence import Commit, Request, Work
from moa_data.tests.kit.device import Counts
from moa_data.tests.kit.drafters import build
from moa_data.tests.kit.families import build_family
from moa_data.tests.kit.models import build_model, random_prompts
from moa_data.tests.kit.serving import never_ending

N_NEW = 12
N_LAYERS = 8  # Each further layer launches 40 kernels more.
SAMPLED = SamplingConfig(temperature=0.9, top_k=20)
CONTEXTS = {"wants_context": True}
BUDGETS: list[Any] = [
    pytest.param("", {}, 380, 1, marks=pytest.mark.slow),
    pytest.param("eagle", {}, 610, 2, marks=pytest.mark.slow),
    pytest.param("moa", {}, 790, 2, marks=pytest.mark.slow),
    pytest.param("moa", CONTEXTS, 820, 2, marks=pytest.mark.slow),
    pytest.param("moa", {"tree": "3x2x6"}, 790, 2, marks=pytest.mark.slow),
    ("eagle3", {"tree": "4@0.3"}, 660, 3),  # checks once whether the drafter is sure enough
    pytest.param("", {"sampling": SAMPLED}, 470, 2, marks=pytest.mark.slow),
    # It waits once per level of drafts and of accepted ones.
    pytest.param("moa", {"sampling": SAMPLED}, 1170, 10, marks=pytest.mark.slow),
]
"""Drafter, settings, and the most launches and waits of a step with 8 sequences.

The default is a chain of 4.
"""
MAX_MORE = 160
"""Launches of a step with 8 sequences beyond those of a step with one."""
MAX_MORE_SAMPLED = 480  # Each sequence has a distribution of its own.


def engine_on(
    device: str,
    n_texts: int,
    kind: str = "",
    n_layers: int = 2,
    n_new: int = N_NEW,
    sampling: SamplingConfig = GREEDY,
    wants_context: bool = False,
    **options: Any,
) -> tuple[Engine, list[list[int]]]:
    """Return an engine with sequences, and their new tokens.

    The sequences speculate if there is a drafter.
    """
    model = build_model(num_hidden_layers=n_layers)
    drafters = {"it": build(kind, model).to(device)} if kind else {}
    engine = Engine(
        never_ending(model.to(device)), drafters, EngineOptions(**{"tree": "4"} | options)
    )
    texts: list[list[int]] = []
    for seed, prompt in enumerate(random_prompts(n_texts, 3, longest=40)):
        texts.append([])
        asked = Request(
            tuple(prompt), len(prompt), n_new, sampling, seed, "it" if kind else None, wants_context
        )
        own = engine.add(asked, lambda commit, text=texts[-1]: text.extend(commit.tokens))  # type: ignore[misc]
        engine.set_work(own, Work.SPECULATE if kind else Work.PLAIN)
    return engine, texts


def step_counts(
    counts: Counts, n_texts: int, kind: str, options: dict[str, Any]
) -> tuple[int, int, str]:
    """Return launches and waits of a step, and the lines that launch and wait most."""
    engine, _ = engine_on("cuda", n_texts, kind, N_LAYERS, **options)
    for _ in range(4):
        counts.reset()
        engine.step()
    return counts.launches, counts.waits, counts.worst()


@pytest.mark.parametrize(("kind", "options", "max_launches", "max_waits"), BUDGETS)
def test_a_step_launches_and_waits_little_however_many_texts_share_it(
    device: Counts, kind: str, options: dict[str, Any], max_launches: int, max_waits: int
) -> None:
    alone, _, _ = step_counts(device, 1, kind, options)
    launches, waits, lines = step_counts(device, 8, kind, options)
    assert launches <= max_launches, lines
    assert launches - alone <= (MAX_MORE_SAMPLED if "sampling" in options else MAX_MORE), lines
    assert waits <= max_waits, lines


def test_families_whose_attention_goes_text_by_text_wait_once(device: Counts) -> None:
    """Launches grow with the sequences if scores are bounded, or with sinks or unlike layers."""
    engine = Engine(never_ending(build_family("gemma2").to("cuda")))
    for seed, prompt in enumerate(random_prompts(2, 3, longest=40)):
        own = engine.add(Request(tuple(prompt), len(prompt), 20, GREEDY, seed), lambda commit: None)
        engine.set_work(own, Work.PLAIN)
    for _ in range(4):
        device.reset()
        engine.step()
    assert device.waits <= 1, device.worst()


@pytest.mark.parametrize("n_texts", [1, 4])
def test_contexts_of_all_texts_come_to_the_host_together(device: Counts, n_texts: int) -> None:
    """Clients draft here. Each call sends its contexts at once, and a session copies its own."""
    model = build_model(num_hidden_layers=2)
    drafter = build("moa", model).to("cuda")
    engine = Engine(never_ending(model.to("cuda")), {"it": drafter})
    contexts: list[torch.Tensor] = []

    def take(commit: Commit) -> None:
        if commit.context is not None:
            contexts.append(commit.context.to("cpu"))

    for prompt in random_prompts(n_texts, 3, longest=40):
        own = engine.add(
            Request(tuple(prompt), len(prompt), 20, GREEDY, 0, "it", wants_context=True), take
        )
        engine.set_work(own, Work.VERIFY)
    while engine.step():
        pass
    contexts.clear()
    for own in list(engine._sequences):
        engine.set_work(own, Work.VERIFY, (7,))
    device.reset()
    assert engine.step()
    assert len(contexts) == n_texts
    assert device.waits <= 2, device.worst()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("", {}, marks=pytest.mark.slow),
        # This has chunks, evictions and moves.
        ("", {"prefill_chunk": 24, "kv_tokens": 128, "max_drafts": 8}),
        pytest.param("eagle", {}, marks=pytest.mark.slow),
        pytest.param("moa", {}, marks=pytest.mark.slow),
        pytest.param("moa", {"wants_context": True}, marks=pytest.mark.slow),
        ("moa", {"tree": "3x2x6"}),
        pytest.param("moa", {"sampling": SAMPLED}, marks=pytest.mark.slow),
        pytest.param("eagle3", {"tree": "4@0.3"}, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_the_cpu(device: Counts, kind: str, options: dict[str, Any]) -> None:
    found = []
    for where in ("cpu", "cuda"):
        engine, texts = engine_on(where, 4, kind, n_new=5, **options)
        while engine.step():
            pass
        found.append(texts)
        assert all(len(text) == 5 for text in texts)
    assert found[0] == found[1]


# Per part: number of committed tokens, number of tokens before the drafts, parents of the drafts.
CHAINS: Any = [(0, 30, ()), (11, 1, ()), (7, 1, (-1, 0, 1)), (9, 18, (-1, 0)), (1, 1, ())]
TREES: Any = [(20, 3, (-1, -1, 0, 1, 1))]


@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        pytest.param(torch.float32, "llama", marks=pytest.mark.slow),
        pytest.param(torch.float32, "mistral", marks=pytest.mark.slow),
        pytest.param(torch.float32, "qwen2-mixed", marks=pytest.mark.slow),
        (torch.bfloat16, "llama"),
        pytest.param(torch.bfloat16, "mistral", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "qwen2-mixed", marks=pytest.mark.slow),
    ],
)
def test_one_call_gives_what_segments_give_one_by_one(
    device: Counts, dtype: torch.dtype, family: str
) -> None:
    """Chunks of prompts share calls with steps, chains and trees, and each also runs alone.

    The families have sliding windows or none.
    """
    tokens = torch.randint(4, 67, (120,), generator=torch.Generator().manual_seed(0)).tolist()
    targets = [Target(build_model(family).to(where, dtype)) for where in ("cpu", "cuda")]
    for kinds in (CHAINS + TREES, CHAINS, CHAINS[:1], CHAINS[1:2], TREES, CHAINS[1:3]):
        found = []
        for target in targets:
            pool, runner = Pool(640, target.facts.sizes, dtype, target.device), Runner(target)
            pool.buffer.fill_(torch.nan)  # Reading an unwritten value gives NaN.
            kvs = [PooledKV(pool) for _ in kinds]
            for kv in kvs:
                pool.reserve(kv, 2)
            segments = []
            for kv, (n_committed, n_known, parents) in zip(kvs, kinds, strict=True):
                if n_committed:
                    runner.run([Segment(kv, tokens[:n_committed])])
                    kv.commit(range(n_committed))
                segments.append(
                    Segment(kv, tokens[n_committed : n_committed + n_known + len(parents)], parents)
                )
            segments.sort(key=lambda segment: segment.first_slot)
            device.kernels.clear()
            outputs = zip(runner.run(segments), segments, strict=True)
            found.append(
                [
                    (out.hidden.cpu(), p.kv.view(0, p.start + len(p.tokens)).cpu())
                    for out, p in outputs
                ]
            )
        is_ragged = dtype == torch.bfloat16 and kinds[-1] is not TREES[0]
        assert ("flash for rows of any lengths" in device.kernels) == is_ragged
        for own, expected in zip(*found, strict=True):
            if dtype == torch.float32:
                torch.testing.assert_close(own, expected)
            else:
                torch.testing.assert_close(own, expected, rtol=0.1, atol=0.1)


def test_texts_are_padded_where_flash_attention_gives_other_values(
    device: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, *_, **__: q)
    arguments = torch.device("cuda", 0), torch.float16, 4, 2, 8
    attention._ragged_works.cache_clear()
    with pytest.warns(UserWarning, match="pads the sequences"):
        assert not attention._ragged_works(*arguments)
    attention._ragged_works.cache_clear()
