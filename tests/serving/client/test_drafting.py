"""The client's drafter gives the drafts of one next to the target, given the same contexts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moa_data.errors import DrafterError, RequestInvalid
from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import GREEDY, SamplingConfig, choose
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.bundle import save_target_bundle
from moa_data.moa.targets.live import Target
from moa_data.serving.client.drafting import DraftingModel, SequenceDrafter, find_bundle
from moa_data.tests.kit.drafters import build, contexts_of, frozen_for
from moa_data.tests.kit.models import build_model, build_text_model, build_tokenizer
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE
from moa_data.tests.kit.variants import quick

DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "moa": ("moa", {}),
    "moa of the paper": (
        "moa",
        {"cross_attention_drafts": False, "layer_groups": 1, "unrotated_keys": False},
    ),
    "moa with 1 layer": ("moa", {"target_layer_inference": 1}),
    "moa with 2 layers": ("moa", {"target_layer_inference": 2}),
    "eagle": ("eagle", {}),
    "independent": ("independent", {}),
    "dspark": ("dspark", {"fused_layers": (-1, 1), "block_layers": 1, "block_size": 16}),
    "dflash of a memory": (
        "dflash",
        {"context": "memory", "fused_layers": None, "block_layers": 1},
    ),
    "dspark of keys and values": ("dspark", {"context": "kv", "block_layers": 2, "block_size": 16}),
}
TEXT = [5, 17, 42, 8, 30, 11, 25, 60, 9, 14, 33, 21, 7, 52]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build_model(num_hidden_layers=3))


class Beside:
    """A drafter next to its target. It also computes the contexts for a client's drafter."""

    def __init__(self, target: Target, name: str) -> None:
        kind, sizes = DRAFTERS[name]
        self.target, self.drafter = target, build(kind, target.model, **sizes)
        self.frozen = frozen_for(self.drafter, target.model)
        self.model = DraftingModel(self.drafter, self.frozen, None, target.eos_token_ids)
        self._contexts: Tensor | None = None
        self._chains: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def drafter_of(self, text: list[int], n_contexts: int = -1) -> SequenceDrafter:
        """Return a client's drafter that has begun a sequence.

        If it needs contexts, it gets those of the first positions.
        """
        drafter = SequenceDrafter(self.model)
        drafter.begin(text)
        self.give(drafter, n_contexts)
        return drafter

    def give(self, drafter: SequenceDrafter, stop: int) -> None:
        """Give the drafter the contexts of TEXT up to a position."""
        if drafter.width and stop > drafter.n_context:
            if self._contexts is None:
                self._contexts = contexts_of(self.drafter, self.target, TEXT)
            drafter.receive(self._contexts[drafter.n_context : stop])

    def chain(self, text: list[int], depth: int) -> list[int]:
        """Return the drafts after a sequence whose last token is the root."""
        key = (tuple(text), depth)
        if key not in self._chains:
            self._chains[key] = self._draft_chain(text, depth)
        return self._chains[key]

    @torch.inference_mode()
    def _draft_chain(self, text: list[int], depth: int) -> list[int]:
        cache = self.target.new_cache()
        proposer = DrafterProposer(self.frozen, self.drafter)
        proposer.begin(cache)
        hidden = self.target.forward(torch.tensor([text[:-1]]), cache)
        cache.commit([range(len(text) - 1)])
        proposer.observe(hidden, [range(len(text) - 1)])
        return proposer.propose([text], TreeShape(depth)).tokens[0].tolist()


def drafted(
    drafter: SequenceDrafter, text: list[int], n: int, before: tuple[int, ...] = ()
) -> list[int]:
    drafts = list(before)
    for _ in range(n):
        draft = drafter.next(text, drafts)
        while draft is None:
            assert drafter.is_catching_up
            draft = drafter.next(text, drafts)
        assert 0 < draft.probability <= 1
        drafts.append(draft.token)
    return drafts[len(before) :]


QUICK_DRAFTERS = ("moa with 1 layer", "eagle", "independent", "dspark of keys and values")


@pytest.fixture(scope="module", params=quick(DRAFTERS, QUICK_DRAFTERS))
def beside(request: pytest.FixtureRequest, target: Target) -> Beside:
    return Beside(target, request.param)


def test_drafts_are_those_beside_the_target(beside: Beside) -> None:
    """Draft several rounds, with the contexts of all tokens committed before the root."""
    drafter = beside.drafter_of(TEXT[:4])
    for n_committed in (4, 5, 8, 12):
        if n_committed != 5:
            drafter.warm(TEXT[:n_committed])  # Warming changes nothing, with or without contexts.
        beside.give(drafter, n_committed - 1)
        drafter.warm(TEXT[:n_committed])
        text = TEXT[:n_committed]
        assert drafted(drafter, text, 6) == beside.chain(text, 6)
        assert drafted(drafter, text, 6) == beside.chain(text, 6), "a round may be drafted again"


def test_contexts_that_lag(beside: Beside) -> None:
    """Known tokens without contexts are fed as levels of drafts.

    The result is that of one long chain from the first of them.
    """
    text, n_context = TEXT[:9], 5 if beside.drafter.context_width else 8
    drafter, other = beside.drafter_of(text, 2), beside.drafter_of(text, 5)
    beside.give(drafter, 5)
    expected = drafted(other, text[: n_context + 1], 9, tuple(text[n_context + 1 :]))
    assert drafted(drafter, text, 9) == expected
    beside.give(drafter, 8)
    assert drafted(drafter, text, 6) == beside.chain(text, 6), (
        "newer contexts are used where nothing is drafted"
    )


def test_a_chain_goes_on_and_goes_back(beside: Beside) -> None:
    """If the target disagrees, the chain continues after the last accepted token.

    The drafts are those of a chain without the rejected tokens.
    """
    text = TEXT[:6]
    drafter = beside.drafter_of(text, 5)
    chain = drafted(drafter, text, 8)
    assert drafted(drafter, text, 6, tuple(chain[:2])) == chain[2:], (
        "back to what was drafted before"
    )
    # Three drafts are accepted, the fourth is rejected. Without newer contexts the round continues.
    other = next(token for token in range(4, 60) if token != chain[3])
    longer = text + chain[:3] + [other]
    assert drafted(drafter, longer, 6) == drafted(beside.drafter_of(longer, 5), longer, 6)


def test_a_conversation_keeps_its_contexts(beside: Beside) -> None:
    drafter = beside.drafter_of(TEXT[:6], 5)
    drafted(drafter, TEXT[:6], 3)
    assert drafter.begin(TEXT[:10]) == 5, "the text goes on"
    beside.give(drafter, 9)
    assert drafted(drafter, TEXT[:10], 4) == beside.chain(TEXT[:10], 4)
    other = [*TEXT[:3], 40, *TEXT[4:10]]
    assert drafter.begin(other) == 0, "another text"
    if drafter.width:
        drafter.receive(contexts_of(beside.drafter, beside.target, other)[:9])
    assert drafted(drafter, other, 4) == beside.chain(other, 4)


def test_a_long_gap_is_fed_in_pieces(target: Target) -> None:
    beside = Beside(target, "moa")
    text = plain_generate(target, TEXT, max_new_tokens=60).tokens
    drafter = SequenceDrafter(beside.model)
    drafter.begin(text)
    assert drafter.next(text, []) is None, "without any context nothing can be drafted"
    assert not drafter.is_catching_up
    drafter.receive(contexts_of(beside.drafter, target, text)[:2])
    n_calls = 1
    while drafter.next(text, []) is None:
        assert drafter.is_catching_up
        n_calls += 1
    assert n_calls == -(-(len(text) - 3) // 16)


def test_sampled_drafts_share_the_noise_of_the_target(target: Target) -> None:
    """A drafter with the target's logits drafts exactly the tokens that the target will choose."""
    sampling = SamplingConfig(temperature=0.9, top_p=0.95, repetition_penalty=1.3)
    beside = Beside(target, "independent")

    class Copy(SequenceDrafter):
        """Uses the target's logits instead of its own."""

        def _choose(self, logits: Tensor, tokens: Any, drafts: Any) -> Any:
            with torch.inference_mode():
                hidden = target.forward(torch.tensor([[*tokens, *drafts]]), target.new_cache())
            return super()._choose(target.logits(hidden[0, -1]), tokens, drafts)

    drafter, text = Copy(beside.model), list(TEXT)
    drafter.begin(text, sampling, seed=11)
    found = drafted(drafter, text, 12)
    for token in found:
        hidden = target.forward(torch.tensor([text]), target.new_cache())
        assert token == choose(target.logits(hidden[0, -1]), text, sampling, 11, len(text))
        text.append(token)
    drafter.begin(TEXT, sampling, seed=12)
    assert drafted(drafter, TEXT, 12) != found, "another seed, another text"
    drafter.begin(TEXT, GREEDY)
    assert drafted(drafter, TEXT, 12) == plain_generate(target, TEXT, max_new_tokens=12).tokens


def test_a_block_ends(target: Target) -> None:
    """Without newer contexts, a drafter of blocks stops at the end of a block.

    Known tokens count as part of the block. Newer contexts begin another one.
    """
    beside = Beside(target, "dspark")
    drafter = beside.drafter_of(TEXT[:9], 5)
    drafts = drafted(drafter, TEXT[:9], 13)
    assert drafter.next(TEXT[:9], drafts) is None
    assert not drafter.is_catching_up
    beside.give(drafter, 8)
    assert drafted(drafter, TEXT[:9], 16) == beside.chain(TEXT[:9], 16)
    assert drafter.next([*TEXT[:9], *range(30, 47)], []) is None, "its context is too far behind"


@pytest.mark.parametrize("kind", ["eagle3", "glide", "medusa"])
def test_drafters_that_need_their_target_are_refused(
    kind: str, target: Target, tmp_path: Path
) -> None:
    save_drafter(build(kind, target.model), tmp_path)
    with pytest.raises(DrafterError):
        DraftingModel.load(tmp_path, tmp_path)


def test_loads_from_a_run_and_its_store(tmp_path: Path) -> None:
    """The run's store has the bundle, with the target's end-of-sequence ids and chat template."""
    model = build_text_model()
    save_target_bundle(model, build_tokenizer(LLAMA3_TEMPLATE), tmp_path / "store" / "target", 1)
    save_drafter(build("moa", model, target_layer_inference=1), tmp_path / "run" / "drafter")
    (tmp_path / "run" / "run.yaml").write_text(f"store: {tmp_path / 'store'}\n")
    loaded = DraftingModel.load(tmp_path / "run")
    assert loaded.eos_token_ids == Target(model).eos_token_ids == {1}
    assert loaded.frozen.n_layers == 1
    for folder in (tmp_path / "run", tmp_path / "run" / "drafter"):
        assert find_bundle(folder) == tmp_path / "store" / "target"
    assert find_bundle("x", tmp_path / "store") == find_bundle("x", tmp_path / "store" / "target")
    (tmp_path / "run" / "run.yaml").write_text("store: /nowhere\n")
    with pytest.raises(RequestInvalid):
        find_bundle(tmp_path / "run")
    with pytest.raises(RequestInvalid):
        find_bundle(tmp_path)
    with pytest.raises(RequestInvalid):
        find_bundle(tmp_path, tmp_path)
