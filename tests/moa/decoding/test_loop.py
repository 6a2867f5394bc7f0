"""Speculative greedy decoding gives the exact tokens of plain greedy decoding for any drafts.

Read the scripted drafters first: they are never right, always right, or right now and then, and the
tests count what each call of the target commits. After them comes a real drafter with silenced
blocks. It repeats a bigram that the target often follows. The contract of drafters tests every
drafter in every shape.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch

from moa_data.errors import DrafterError
from moa_data.evaluation.run import generate
from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import GREEDY, SamplingConfig
from moa_data.moa.decoding.tree import DraftTree, TreeShape
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.targets.cache import TargetCache
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import SIZES, build_model, random_prompts, written_by_transformers
from moa_data.tests.kit.variants import QUICK_FAMILIES

VOCABULARY, EOS, N_POSITIONS = (
    SIZES["vocab_size"],
    SIZES["eos_token_id"],
    SIZES["max_position_embeddings"],
)
Script = Callable[[list[int], list[int]], list[int]]
"""Function of the target's next tokens and of a wrong token for each that returns the drafts."""


@lru_cache(maxsize=512)
def next_token(target: Target, tokens: tuple[int, ...]) -> int:
    """Return the target's greedy choice after some tokens, computed without a cache of KV."""
    hidden = target.forward(torch.tensor([tokens]), target.new_cache())
    return int(target.logits(hidden[0, -1]).argmax())


@contextmanager
def scripted(monkeypatch: pytest.MonkeyPatch, target: Target, script: Script) -> Iterator[None]:
    """Replace the drafts of chains. The drafter still runs, so that its caches are real."""
    real_propose = DrafterProposer.propose

    def propose(self: DrafterProposer, committed: list[list[int]], shape: TreeShape) -> DraftTree:
        real_propose(self, committed, shape)
        drafts = []
        for row in committed:
            tokens, future = list(row), []
            for _ in range(shape.depth):
                future.append(next_token(target, tuple(tokens)))
                tokens.append(future[-1])
            drafts.append(script(future, [(token + 1) % VOCABULARY for token in future]))
        return DraftTree.chain(torch.tensor(drafts))

    with monkeypatch.context() as patch:
        patch.setattr(DrafterProposer, "propose", propose)
        yield


# Each script, and the tokens that each target call commits for an answer of 13 tokens with four
# drafts at a time.
SCRIPTS: dict[str, tuple[Script, list[int]]] = {
    "never right": (lambda future, wrong: wrong, [1] * 12),
    "always right": (lambda future, wrong: future, [5, 5, 2]),
    "first two right": (lambda future, wrong: future[:2] + wrong[2:], [3] * 4),
    "only later ones right": (lambda future, wrong: wrong[:1] + future[1:], [1] * 12),
}
ALWAYS, FIRST_TWO = SCRIPTS["always right"][0], SCRIPTS["first two right"][0]


@pytest.fixture(scope="module")
def fluent() -> Target:
    """Build a target without EOS that writes token 0, which must not be taken for padding."""
    model = build_model(num_hidden_layers=2)
    target = Target(model)
    target.eos_token_ids = frozenset()
    frequent = plain_generate(target, [5], max_new_tokens=8).tokens[3]
    order = list(range(VOCABULARY))
    order[0], order[frequent] = frequent, 0
    for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
        weight.copy_(weight[order].clone())
    return target


@pytest.mark.parametrize(("script", "expected"), SCRIPTS.values(), ids=SCRIPTS)
def test_scripted_drafts_are_counted(
    fluent: Target, monkeypatch: pytest.MonkeyPatch, script: Script, expected: list[int]
) -> None:
    drafter, said = build_drafter(fluent.model), set[int]()
    for prompt in ([5], [60, 9, 31, 8]):
        plain = plain_generate(fluent, prompt, max_new_tokens=13)
        assert plain.stats.committed_per_call == [1] * 12
        with scripted(monkeypatch, fluent, script):
            fast = generate(fluent, drafter, prompt, max_new_tokens=13, tree=TreeShape(4))
        assert fast.tokens == plain.tokens
        assert fast.stats.committed_per_call == expected
        said |= {*plain.tokens}
    assert 0 in said


def silence(drafter: MoADrafter) -> MoADrafter:
    """Let every block add nothing.

    The drafter then proposes argmax head(embedding of the last token).
    """
    with torch.no_grad():
        for block in (drafter.self_attention, drafter.cross_attention):
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    return drafter


def bigram_target(eos_token_ids: frozenset[int], scale: float = 0.06) -> Target:
    """Build a target whose residual stream is mostly the last token's embedding.

    A silenced drafter is often right about it.
    """
    model = build_model(num_hidden_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    target = Target(model)
    target.eos_token_ids = eos_token_ids
    return target


def test_equals_plain_with_a_drafter_that_is_often_right() -> None:
    eos = frozenset({3, 24, 28})
    target = bigram_target(eos)
    drafter, committed, n_ended_in_accepted = silence(build_drafter(target.model)), list[int](), 0
    for index, prompt in enumerate(
        [[token] for token in range(4, 12)] + random_prompts(16, seed=5)
    ):
        limit, draft_length = 1 + index % 16, 2 + index % 5
        runs: list[tuple[list[int], list[bool]]] = []
        plain = plain_generate(target, prompt, max_new_tokens=limit)
        fast = generate(
            target, drafter, prompt, max_new_tokens=limit, tree=TreeShape(draft_length),
            on_tokens=lambda tokens, drafted, runs=runs: runs.append((tokens, drafted)),  # type: ignore[misc]
        )  # fmt: skip
        assert fast.tokens == plain.tokens == [token for tokens, _ in runs for token in tokens], (
            index,
            prompt,
        )
        assert len(plain.tokens) == limit or plain.tokens[-1] in eos
        stats = fast.stats
        assert stats.n_tokens == len(fast.tokens)
        assert [len(tokens) for tokens, _ in runs] == [1, *stats.committed_per_call]
        assert all(1 <= count <= draft_length + 1 for count in stats.committed_per_call)
        assert stats.draft_s + stats.verify_s + stats.prefill_s <= stats.total_s
        committed += stats.committed_per_call
        n_ended_in_accepted += fast.tokens[-1] in eos and runs[-1][1][-1]
    assert all(committed.count(k) > 0.02 * len(committed) for k in (1, 2, 3, 4))
    assert n_ended_in_accepted > 1


@pytest.mark.parametrize("index", [1, 4, 7])
def test_eos_inside_an_accepted_span_ends_the_answer(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    target = Target(build_model(num_hidden_layers=2))
    target.eos_token_ids = frozenset()
    prompt, drafter = [9, 4, 31], build_drafter(target.model)
    full = plain_generate(target, prompt, max_new_tokens=12).tokens
    target.eos_token_ids = frozenset({full[index]})
    expected = full[: full.index(full[index]) + 1]
    plain = plain_generate(target, prompt, max_new_tokens=12)
    with scripted(monkeypatch, target, ALWAYS):
        fast = generate(target, drafter, prompt, max_new_tokens=12, tree=TreeShape(6))
    assert plain.tokens == fast.tokens == expected
    assert sum(fast.stats.committed_per_call) == len(expected) - 1


@pytest.mark.parametrize("script", [None, ALWAYS, FIRST_TWO])
@pytest.mark.parametrize("n_free", [1, 3, 7])
def test_stops_at_the_last_position(
    monkeypatch: pytest.MonkeyPatch, script: Script | None, n_free: int
) -> None:
    target = Target(build_model(num_hidden_layers=2))
    target.eos_token_ids = frozenset()
    largest = 0
    real_forward = target.forward

    def forward(
        tokens: torch.Tensor, cache: TargetCache, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        nonlocal largest
        hidden = real_forward(tokens, cache, seen)
        largest = max(largest, cache.n_slots)
        return hidden

    monkeypatch.setattr(target, "forward", forward)
    prompt = [4 + index % 60 for index in range(N_POSITIONS - n_free)]
    drafter = build_drafter(target.model)
    plain = plain_generate(target, prompt, max_new_tokens=50)
    with scripted(monkeypatch, target, script) if script else nullcontext():
        fast = generate(target, drafter, prompt, max_new_tokens=50, tree=TreeShape(4))
    assert len(plain.tokens) == n_free
    assert fast.tokens == plain.tokens
    assert largest <= N_POSITIONS


@pytest.mark.parametrize(
    "case", [*QUICK_FAMILIES, "mistral, a window of one token", "llama, a penalty"]
)
def test_plain_equals_transformers_generate(case: str) -> None:
    family, _, more = case.partition(", ")
    sizes, settings, sampling = dict[str, Any](), dict[str, Any](), GREEDY
    # With a window of one token, transformers' cache keeps its last 0 tokens by the slice [-0:],
    # which is all of them. Without a cache it computes what we do.
    if "window" in more:
        sizes, settings = {"sliding_window": 1}, {"use_cache": False}
    elif more:
        settings, sampling = {"repetition_penalty": 1.6}, SamplingConfig(repetition_penalty=1.6)
    target = Target(build_model(family, num_hidden_layers=2, **sizes))
    prompts = [[50, 7], *random_prompts(1, seed=6)]
    n_ended = 0
    for prompt in prompts:
        expected = written_by_transformers(target.model, prompt, max_new_tokens=10, **settings)
        assert (
            plain_generate(target, prompt, max_new_tokens=10, sampling=sampling).tokens == expected
        )
        n_ended += expected[-1] == EOS
    assert n_ended < len(prompts)


def test_stop_tokens_end_an_answer_as_an_end_of_sequence_token_does() -> None:
    target = Target(build_model())
    target.eos_token_ids = frozenset()
    prompt = random_prompts(1, seed=3)[0]
    whole = plain_generate(target, prompt, max_new_tokens=8).tokens
    stopped = plain_generate(target, prompt, max_new_tokens=8, stop_token_ids=[whole[3]]).tokens
    assert stopped == whole[: whole.index(whole[3]) + 1]


def test_bad_requests_are_refused() -> None:
    target = Target(build_model())
    drafter = build_drafter(target.model)
    bad: list[tuple[list[int], dict[str, Any], tuple[object, ...]]] = [
        ([], {}, ("prompt",)),
        ([5] * N_POSITIONS, {}, (N_POSITIONS,)),
        ([5], {"max_new_tokens": 0}, ("max_new_tokens", 0)),
        ([5, VOCABULARY], {}, (VOCABULARY,)),
        ([5, -1], {}, (-1,)),
        ([5], {"sampling": SamplingConfig(1.0), "tree": TreeShape(6, stop_below=0.1)}, ("6@0.1",)),
    ]
    for prompt, settings, facts in bad:
        with raises_naming(DrafterError, *facts):
            generate(target, drafter, prompt, **settings)
    with raises_naming(DrafterError, "drafter", None):
        generate(target, None, [5])  # type: ignore[arg-type]
