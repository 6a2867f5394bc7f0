"""What every drafter guarantees, as tests that the test class of each drafter inherits.

::

    class TestMine(DrafterContract):
        kind = "mine"

The registry builds a drafter of ``kind`` with ``sizes``. The tests check everything from outside,
through the interface of ``drafters.base``, on random targets of every supported family.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from moa_data.errors import DrafterError, TargetError
from moa_data.evaluation.run import generate
from moa_data.moa.decoding.loop import Generation, generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import GREEDY, SamplingConfig, distribution
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.base import Drafter, DraftLevel
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.moa.drafters.training import (
    BlockDraws,
    Draws,
    LossTerms,
    LossWeights,
    TrainingInputs,
    TrainingStep,
)
from moa_data.moa.formats.checkpoint import check_drafter_matches, load_drafter, save_drafter
from moa_data.moa.nn import losses, masks, packed
from moa_data.moa.nn.layers import DecoderBlock
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import (
    answers_once,
    build,
    frozen_for,
    stored,
    teach,
    weight_of_positions,
)
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import FAMILIES, SIZES, build_model, random_prompts
from moa_data.tests.kit.variants import quick

ONE, CHAIN, STOPPING, TREE = (
    TreeShape(1), TreeShape(4), TreeShape(6, stop_below=0.2), TreeShape(3, 3, 8)
)  # fmt: skip
SHAPES = ONE, CHAIN, STOPPING, TREE
ROUNDS = {
    "bounded": Draws(torch.tensor([5, 4]), torch.zeros(2, dtype=torch.bool), torch.tensor([2, 1])),
    # These rounds are longer than the windows of families that have windows.
    "long": Draws(torch.tensor([13, 14]), torch.zeros(2, dtype=torch.bool), torch.tensor([0, 3])),
}
UNBOUNDED = Draws(None, torch.zeros(2, dtype=torch.bool))
PROMPTS = random_prompts(5, 7)
N_TAUGHT = 16
ENDING_PROMPTS = random_prompts(3, 19)
N_ENDING = 6
VOCABULARY = SIZES["vocab_size"]
CLOSE = 2e-5
"""Largest absolute difference of features in float32."""
PLAIN, WINDOW = "llama", "qwen2-mixed"
"""The target families that run by default: a plain one, and one with biases and a window."""


@cache
def model_of(family: str = PLAIN) -> Any:
    """Build a model once for all tests, which only read it."""
    return build_model(family)


@cache
def target_that_ends(family: str) -> Target:
    """Build a target of two layers that ends some answers early."""
    target = Target(build_model(family, num_hidden_layers=2))
    target.eos_token_ids = frozenset({3, 24, 28, 40})
    return target


@cache
def plain_rows(family: str) -> list[list[int]]:
    """Return the answers of that target to ``ENDING_PROMPTS`` without drafts."""
    target = target_that_ends(family)
    return [
        plain_generate(target, prompt, max_new_tokens=N_ENDING).tokens for prompt in ENDING_PROMPTS
    ]


@cache
def endless_target() -> Target:
    """Build the target of all taught drafters. It never ends an answer."""
    target = Target(build_model(num_hidden_layers=3))
    target.eos_token_ids = frozenset()
    return target


def plain_answers(n_new: int) -> list[list[int]]:
    """Return the first tokens of the endless target's greedy answers to ``PROMPTS``."""
    tokens, _ = answers_once(endless_target(), tuple(map(tuple, PROMPTS)), N_TAUGHT)
    rows = zip(PROMPTS, tokens.tolist(), strict=True)
    return [row[len(prompt) : len(prompt) + n_new] for prompt, row in rows]


class ForcedDrafting:
    """Draft along a given text, for one row or for several rows of different lengths at once."""

    def __init__(self, drafter: Drafter, target: Target, n_rows: int = 1) -> None:
        self.drafter, self.target, self.frozen = drafter, target, frozen_for(drafter, target.model)
        self.cache = target.new_cache(n_rows)
        self.proposer = DrafterProposer(self.frozen, drafter)
        self.proposer.begin(self.cache)

    @torch.inference_mode()
    def commit(self, texts: Sequence[list[int]]) -> None:
        """Let the target verify the new tokens of each row in one call."""
        new = [text[n:] for text, n in zip(texts, self.cache.lengths, strict=True)]
        width = max(map(len, new))
        if width:
            padded = torch.tensor([text + [0] * (width - len(text)) for text in new])
            hidden = self.target.forward(padded, self.cache)
            kept = [range(len(text)) for text in new]
            self.cache.commit(kept)
            self.proposer.observe(hidden, kept)

    @torch.inference_mode()
    def root(self, texts: Sequence[list[int]]) -> Tensor:
        """Commit all but each row's last token; return the last token's features [B, 1, E]."""
        self.commit([text[:-1] for text in texts])
        return self.drafter.draft_root(self.proposer.state, self.frozen, texts, self.cache)

    @torch.inference_mode()
    def level(self, tokens: Tensor, parents: Tensor, seen: Tensor, depth: int) -> Tensor:
        level = DraftLevel(tokens, parents, seen, depth)
        return self.drafter.draft_level(self.proposer.state, self.frozen, level, self.cache)

    def chain(self, text: list[int], root: int, n_levels: int, is_last: bool = False) -> Tensor:
        """Draft the text itself in one round of one row; return the features [1 + levels, E].

        These are the features of the root and of each level. Then one more draft is fed that
        differs from the text. The next round has to roll it back.
        """
        features = [self.root([text[: root + 1]])]
        most = self.drafter.config.max_depth
        for depth in range(1, n_levels + 2):
            if depth > n_levels and most is not None and depth >= most:
                break
            token = text[root + depth] if depth <= n_levels else 4 + text[root] % 7
            seen = torch.ones(1, 1, depth + 1, dtype=torch.bool)
            features.append(self.level(torch.tensor([[token]]), features[-1], seen, depth))
        return torch.cat(features, dim=1)[0, : n_levels + 1]


class Receiver:
    """Draft one text on a machine without the target, from contexts only."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.frozen = drafter, frozen_for(drafter, target.model)
        self.state, self.cache = drafter.new_state(1), drafter.new_context_cache()

    def take(self, contexts: Tensor, n_positions: int, piece: int) -> None:
        """Take the missing contexts [T, W] of the first ``n_positions`` positions, in pieces."""
        while (start := self.cache.lengths[0]) < n_positions:
            stop = min(start + piece, n_positions)
            self.drafter.take_context(self.state, self.cache, contexts[start:stop], start)

    @torch.inference_mode()
    def chain(self, text: list[int], root: int, n_levels: int) -> tuple[Tensor, list[int]]:
        """Draft from a root; return the features [1 + n_levels, E] and the tokens that were fed.

        The tokens of the text are fed as far as the text goes, and drafts after its end.
        """
        features = [
            self.drafter.draft_root(self.state, self.frozen, [text[: root + 1]], self.cache)
        ]
        fed: list[int] = []
        for depth in range(1, n_levels + 1):
            drafted = int(self.drafter.draft_logits(self.frozen, features[-1][:, 0]).argmax())
            fed.append(text[root + depth] if root + depth < len(text) else drafted)
            seen = torch.ones(1, 1, depth + 1, dtype=torch.bool)
            level = DraftLevel(torch.tensor([[fed[-1]]]), features[-1], seen, depth)
            features.append(self.drafter.draft_level(self.state, self.frozen, level, self.cache))
        return torch.cat(features, dim=1)[0], fed


@torch.inference_mode()
def check_contexts(
    drafter: Drafter,
    target: Target,
    close: float,
    n_alone: int = 2,
    roots_by_piece: dict[int, tuple[int, ...]] | None = None,
) -> None:
    """Compare drafts from contexts with drafts at the target, for different pieces and lags.

    Args:
        n_alone: Levels that are drafted after the end of the text.
        roots_by_piece: Size of the pieces in which contexts arrive -> roots of successive rounds.
    """
    text = torch.randint(4, VOCABULARY, (12,), generator=torch.Generator().manual_seed(8)).tolist()
    sender = ForcedDrafting(drafter, target)
    hidden = target.forward(torch.tensor([text]), sender.cache)[0]
    if drafter.observed_layers:
        hidden = sender.cache.take_layer_outputs()[0]
    sender.cache.commit([range(len(text))])
    kv = sender.cache.packed([0], len(text))[0] if drafter.context_needs_kv else None
    pieces = [(0, 5), (5, 6), (6, len(text))]
    made = [
        drafter.encode_context(hidden[a:b], None if kv is None else kv[a:b], torch.arange(a, b))
        for a, b in pieces
    ]
    contexts = torch.cat(made)
    assert contexts.shape == (len(text), drafter.context_width)
    assert contexts.dtype == drafter.dtype
    last = len(text) - 1
    roots_by_piece = roots_by_piece or {1: (1, 4, 4, 5), 3: (2, 7, last), last: (last,)}
    for piece, roots in roots_by_piece.items():
        receiver, beside = Receiver(drafter, target), ForcedDrafting(drafter, target)
        for root in roots:
            receiver.take(contexts, root, piece)
            n_levels = last - root + n_alone
            if (most := drafter.config.max_depth) is not None:
                n_levels = min(n_levels, most - 1)
            got, fed = receiver.chain(text, root, n_levels)
            # The same tokens are fed at the target. Contexts that lag are like a longer round, as
            # in training.
            expected = beside.chain(text[: root + 1] + fed, root, n_levels)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=close)
            logits = [drafter.draft_logits(sender.frozen, features) for features in (got, expected)]
            assert torch.equal(logits[0].argmax(dim=-1), logits[1].argmax(dim=-1))
    # At the target, contexts that continue the known positions need not be computed again. Other
    # contexts change nothing.
    reusing, plain = ForcedDrafting(drafter, target), ForcedDrafting(drafter, target)
    for root, start in ((6, 0), (last - 2, 6), (last - 1, 3)):
        reusing.commit([text[:root]])
        plain.commit([text[:root]])
        drafter.reuse_context(
            reusing.proposer.state, contexts[None, start:root], [start], [root - start]
        )
        torch.testing.assert_close(
            reusing.chain(text, root, 1), plain.chain(text, root, 1), rtol=1e-5, atol=close
        )


def check_samples(target: Target, drafter: Any, shape: TreeShape) -> int:
    """Bound the total variation of two sampled tokens; return the number of drafts of 600 runs.

    The two tokens are compared with their exact distributions.
    """
    config, prompt, n_runs = SamplingConfig(temperature=0.9, top_k=12), [5, 9, 11], 600
    proposer = DrafterProposer(target, drafter, config)
    runs = generate_batch(
        target,
        [prompt] * n_runs,
        max_new_tokens=2,
        proposer=proposer,
        tree=shape,
        sampling=config,
        seed=1,
    )

    def next_token(path: list[int]) -> Tensor:
        logits = target.logits(target.forward(torch.tensor([path]), target.new_cache()))[0, -1]
        return distribution(logits, path, config)

    first = next_token(prompt)
    second = sum(
        first[token] * next_token([*prompt, token]) for token in first.nonzero()[:, 0].tolist()
    )
    for index, expected in enumerate((first, second)):
        found = (
            torch.bincount(torch.tensor([run.tokens[index] for run in runs]), minlength=VOCABULARY)
            / n_runs
        )
        assert 0.5 * (found - expected).abs().sum() < 0.12, index
    return sum(run.stats.n_drafted for run in runs)


def check_batch(
    target: Target,
    drafter: Any,
    prompts: list[list[int]],
    shape: TreeShape,
    max_new_tokens: int,
    sampling: SamplingConfig = GREEDY,
) -> list[Generation]:
    """Compare each row of a batch with the row alone, in tokens and in calls; return the rows."""
    proposer = DrafterProposer(target, drafter, sampling)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "tree": shape,
        "sampling": sampling,
    }
    together = generate_batch(target, prompts, proposer=proposer, seed=3, **options)
    for row, (prompt, got) in enumerate(zip(prompts, together, strict=True)):
        alone = generate(target, drafter, prompt, seed=3 + row, **options)
        assert got.tokens == alone.tokens
        assert got.stats.committed_per_call == alone.stats.committed_per_call
    return together


def weights_times(factor: float) -> LossWeights:
    """Return the default weights of all terms, times a factor."""
    usual = vars(LossWeights())
    scaled: dict[str, Any] = {
        name: factor * usual[name] for name in usual if isinstance(usual[name], float)
    }
    return LossWeights(**scaled)


def batch_of(drafter: Drafter, model: Any, n_tokens: int = 30) -> TrainingInputs:
    """Make two rows of different lengths. The first row has two responses."""
    torch.manual_seed(5)
    tokens, at = torch.randint(4, VOCABULARY, (2, n_tokens)), torch.arange(n_tokens)
    response = torch.stack((((at >= 1) & (at < 4)) | (at >= 12), (at >= 3) & (at < n_tokens - 5)))
    return stored(drafter, model, tokens, response)


def one_row(inputs: TrainingInputs, row: int, n_tokens: int) -> TrainingInputs:
    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(part) for part in value)
        return None if value is None else value[row : row + 1, :n_tokens]

    return TrainingInputs(**{item.name: cut(getattr(inputs, item.name)) for item in fields(inputs)})


class Case:
    """A drafter, a batch that it trains on, and the parts of the target that it needs."""

    def __init__(self, drafter: Drafter, model: Any) -> None:
        self.drafter, self.model = drafter, model
        self.inputs, self.frozen = batch_of(drafter, model), frozen_for(drafter, model)

    def terms(
        self, draws: Draws = ROUNDS["bounded"], weights: LossWeights | None = None,
        denominator: float | None = None, **changes: Any,
    ) -> LossTerms:  # fmt: skip
        step = TrainingStep(
            replace(self.inputs, **changes), draws, weights or LossWeights(), denominator
        )
        return self.drafter.objective(self.frozen, step)


def assert_steps_equal_training(
    target: Target, drafter: Any, draws: Draws, close: float = CLOSE
) -> None:
    """Compare the features of decoding, with rejected drafts in between, with those of batches."""
    inputs = batch_of(drafter, target.model)
    drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound, draws.offset)
    if draws is ROUNDS["long"] and drafter.config.max_depth is not None:
        with pytest.raises(DrafterError):
            drafter.drafted_features(frozen_for(drafter, target.model), inputs, draws)
        return
    with torch.no_grad():
        found = drafter.drafted_features(frozen_for(drafter, target.model), inputs, draws)
    context, n_compared = masks.last_context(drafted), 0
    for row in range(2):
        queries = found.queries[row][found.valid[row]].tolist()
        assert sorted(queries) == drafted[row].nonzero()[:, 0].tolist(), (
            "every drafted position, once"
        )
        features = dict(zip(queries, found.features[row][found.valid[row]], strict=True))
        rows, text = ForcedDrafting(drafter, target), inputs.tokens[row].tolist()
        by_root: dict[int, list[int]] = {}
        for position in sorted(queries):
            by_root.setdefault(int(context[row, position]) + 1, []).append(position)
        for root, positions in by_root.items():
            stepped = rows.chain(text, root, positions[-1] - root)
            for position in positions:
                got = stepped[position - root]
                torch.testing.assert_close(got, features[position].detach(), rtol=1e-5, atol=close)
                n_compared += 1
    assert n_compared == int(drafted.sum()) > 20


class DrafterContract:
    """Inherit this class for a drafter and override what is specific to it."""

    kind: ClassVar[str]
    sizes: ClassVar[dict[str, Any]] = {}
    """Drafter sizes by field name that differ from the defaults."""
    draws_weights: ClassVar[bool] = True
    """Whether the starting weights depend on the seed."""
    close: ClassVar[float] = CLOSE
    """Largest absolute difference of features.

    It is larger for drafters that feed themselves, because differences add up.
    """
    learns_in: ClassVar[int] = 20
    """Steps after which the drafter is often right about 80 tokens of the tests' tiny target."""

    # What runs by default. All other families and shapes are slow variants. The classes differ, so
    # that together they cover all of these.
    family: ClassVar[str] = PLAIN
    speed_shape: ClassVar[TreeShape] = TREE
    """The shape in which a taught drafter's answers and speed are tested."""
    shape: ClassVar[TreeShape | None] = None
    """The shape in which each round is compared with a fresh one, if any by default."""
    sampled_shape: ClassVar[TreeShape | None] = None
    """The shape of drafts for sampled tokens, if any by default."""
    tied_shape: ClassVar[TreeShape | None] = None
    """The shape of drafts of equal probability, if any by default."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give tests their families and shapes."""
        for name, values, own in (
            ("family", FAMILIES, self.family),
            ("speed_shape", SHAPES, self.speed_shape),
            ("shape", (CHAIN, TREE), self.shape),
            ("sampled_shape", (CHAIN, TREE), self.sampled_shape),
            ("tied_shape", (TREE,), self.tied_shape),
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, quick(values, [own] if own else []), ids=str)

    @classmethod
    def build(cls, model: Any, seed: int = 1, **sizes: Any) -> Any:
        return build(cls.kind, model, seed, **(cls.sizes | sizes))

    @pytest.fixture(scope="class")
    @classmethod
    def taught(cls) -> tuple[Target, Any]:
        """Build a target that never ends an answer, and a drafter that is often right."""
        target = endless_target()
        return target, teach(cls.build(target.model), target, PROMPTS, cls.learns_in, N_TAUGHT)

    @pytest.fixture
    def case(self) -> Case:
        model = model_of()
        return Case(self.build(model), model)

    # Training and decoding compute the same features

    @pytest.mark.parametrize("rounds", ROUNDS)
    def test_draft_steps_equal_what_is_validated(self, family: str, rounds: str) -> None:
        """Validation of whole batches computes decoding's features, also after rejected drafts."""
        target = Target(model_of(family))
        assert_steps_equal_training(target, self.build(target.model), ROUNDS[rounds], self.close)

    def test_once_prepared_it_drafts_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Drafts stay the same for weights that float16 represents; others may be rounded."""
        monkeypatch.setattr(packed, "_FEWEST_VALUES", 1)
        target = Target(build_model())
        drafter = self.build(target.model)
        with torch.no_grad():
            for weight in drafter.parameters():
                weight.copy_(weight.bfloat16())
        text = batch_of(drafter, target.model).tokens[0].tolist()

        def drafts() -> list[Tensor]:
            rows, roots = ForcedDrafting(drafter, target), (5, 9, 10)
            return [
                rows.chain(text, root, 3 if drafter.config.max_depth is None else 1)
                for root in roots
            ]

        plain = drafts()
        drafter.prepare()
        blocks = [module for module in drafter.modules() if isinstance(module, DecoderBlock)]
        # Layer self-attention and layers of other callers have no fused products.
        are_fusable = [
            block in drafter.blocks
            and not hasattr(block.self_attn, "q_norm")
            and bool(block.input_layernorm._parameters)
            for block in blocks
        ]
        assert [vars(block).get("fused") is not None for block in blocks] == are_fusable
        for own, other in zip(drafts(), plain, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=10 * self.close)

    def test_nodes_of_a_tree_equal_their_paths(self, family: str) -> None:
        """Rows have different lengths, and a node sees only its ancestors."""
        target = Target(model_of(family))
        drafter = self.build(target.model)
        texts = [list(range(5, 19)), [30, 41, 52]]
        rows = ForcedDrafting(drafter, target, 2)
        # A round before this one makes the rows begin with different caches.
        rows.root([text[:2] for text in texts])
        root = rows.root(texts)
        first = torch.tensor([[20, 21], [22, 23]])
        seen = torch.tensor([[1, 1, 0], [1, 0, 1]]).bool().expand(2, -1, -1)
        level_1 = rows.level(first, root.expand(-1, 2, -1), seen, 1)
        second = torch.tensor([[24, 25, 26], [27, 28, 29]])
        parents = [0, 0, 1]
        seen = (
            torch.tensor([[1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 1]])
            .bool()
            .expand(2, -1, -1)
        )
        level_2 = rows.level(second, level_1[:, parents], seen, 2)
        for row, text in enumerate(texts):
            for node, parent in enumerate(parents):
                path = [*text, int(first[row, parent]), int(second[row, node])]
                alone = ForcedDrafting(drafter, target).chain(path, len(text) - 1, 2)
                got = torch.stack((root[row, 0], level_1[row, parent], level_2[row, node]))
                torch.testing.assert_close(got, alone, rtol=1e-5, atol=self.close)

    def test_rows_join_and_leave(self, family: str) -> None:
        """Rows of two states draft in one state as they do separately.

        Their rounds before had different lengths.
        """
        target = Target(model_of(family))
        drafter = self.build(target.model)
        texts = [list(range(5, 19)), [30, 41, 52], list(range(50, 57))]
        longer = [[*text, 60, 61] for text in texts]
        pair, single, merged = (
            ForcedDrafting(drafter, target, 2),
            ForcedDrafting(drafter, target),
            ForcedDrafting(drafter, target, 3),
        )
        pair.root([text[:2] for text in texts[:2]])
        root = single.root([texts[2][:4]])
        single.level(
            torch.tensor([[7, 8]]),
            root.expand(-1, 2, -1),
            torch.tensor([[[1, 1, 0], [1, 0, 1]]]).bool(),
            1,
        )
        order = [1, 0, 2]
        merged.commit([texts[row][:-1] for row in order])
        pair.commit([text[:-1] for text in texts[:2]])
        single.commit([texts[2][:-1]])
        merged.proposer.state = pair.proposer.state.take_rows([1, 0])
        merged.proposer.state.add_rows(single.proposer.state.take_rows([0]))
        tokens, seen = torch.tensor([[20], [21], [22]]), torch.ones(3, 1, 2, dtype=torch.bool)

        def two_levels(rows: ForcedDrafting, texts: list[list[int]], tokens: Tensor) -> Tensor:
            root = rows.root(texts)
            return torch.cat((root, rows.level(tokens, root, seen[: len(texts)], 1)), dim=1)

        together = two_levels(merged, [texts[row] for row in order], tokens[order])
        apart = torch.cat(
            (two_levels(pair, texts[:2], tokens[:2]), two_levels(single, texts[2:], tokens[2:]))
        )
        torch.testing.assert_close(together, apart[order], rtol=1e-5, atol=self.close)
        merged.commit([longer[row][:-1] for row in order])
        expected = two_levels(pair, longer[:2], tokens[:2])
        taken = merged.proposer.state.take_rows([1])
        merged.proposer.state.select_rows([0])
        for row, state in ((0, taken), (1, merged.proposer.state)):
            own, alone = slice(row, row + 1), ForcedDrafting(drafter, target)
            alone.commit([longer[row][:-1]])
            alone.proposer.state = state
            got = two_levels(alone, longer[own], tokens[own])
            torch.testing.assert_close(got, expected[own], rtol=1e-5, atol=self.close)

    # Decoding

    def test_a_taught_drafter_changes_speed_alone(
        self, taught: tuple[Target, Any], speed_shape: TreeShape
    ) -> None:
        target, drafter = taught
        committed: list[int] = []
        for prompt, plain in zip(PROMPTS[:3], plain_answers(14), strict=False):
            fast = generate(target, drafter, prompt, max_new_tokens=14, tree=speed_shape)
            assert fast.tokens == plain
            committed += fast.stats.committed_per_call
        assert sum(committed) / len(committed) > 1.2, "it has learned something"
        assert max(committed) > 1

    def test_rows_of_a_batch_are_each_alone(self, family: str) -> None:
        """Answers end at different times, and most drafts of a random drafter are rejected."""
        target, plain = target_that_ends(family), plain_rows(family)
        drafter = self.build(target.model)
        together = check_batch(target, drafter, ENDING_PROMPTS, TREE, N_ENDING)
        assert [got.tokens for got in together] == plain
        assert len({*map(len, plain)}) > 1

    def test_each_round_begins_as_a_fresh_one(
        self, taught: tuple[Target, Any], monkeypatch: pytest.MonkeyPatch, shape: TreeShape
    ) -> None:
        """Rejected drafts are rolled back, and accepted drafts leave the state of verified tokens.

        Rows also leave the batch on the way.
        """
        target, drafter = taught
        real_root, frozen, n_rows = drafter.draft_root, frozen_for(drafter, target.model), []

        def draft_root(state: Any, _: Any, committed: Sequence[list[int]], cache: Any) -> Tensor:
            features: Tensor = real_root(state, frozen, committed, cache)
            n_rows.append(len(committed))
            for row, tokens in enumerate(committed):
                fresh = ForcedDrafting(drafter, target)
                fresh.commit([tokens[:-1]])
                expected = real_root(fresh.proposer.state, frozen, [tokens], fresh.cache)
                torch.testing.assert_close(features[row], expected[0], rtol=1e-4, atol=self.close)
            return features

        monkeypatch.setattr(drafter, "draft_root", draft_root)
        monkeypatch.setattr(target, "eos_token_ids", frozenset({24, 28, 40}))
        proposer = DrafterProposer(target, drafter)
        runs = generate_batch(target, PROMPTS[:5], max_new_tokens=7, proposer=proposer, tree=shape)
        assert sum(n_rows) > 10
        assert len(set(n_rows)) > 1, "rows leave"
        assert max(count for run in runs for count in run.stats.committed_per_call) > 1, (
            "drafts are accepted"
        )

    def test_samples_have_the_targets_distribution(
        self, taught: tuple[Target, Any], sampled_shape: TreeShape
    ) -> None:
        check_samples(*taught, sampled_shape)

    def test_seeds_and_penalties_are_shared(
        self, taught: tuple[Target, Any], sampled_shape: TreeShape
    ) -> None:
        target, drafter = taught
        config, penalty = SamplingConfig(0.8, top_p=0.9), SamplingConfig(repetition_penalty=1.5)
        check_batch(target, drafter, PROMPTS[:3], sampled_shape, 6, config)
        plain = plain_generate(target, PROMPTS[0], max_new_tokens=10, sampling=penalty)
        fast = generate(
            target, drafter, PROMPTS[0], max_new_tokens=10, tree=sampled_shape, sampling=penalty
        )
        assert fast.tokens == plain.tokens

    def test_ties_are_broken_alike_in_a_batch_and_alone(
        self, taught: tuple[Target, Any], monkeypatch: pytest.MonkeyPatch, tied_shape: TreeShape
    ) -> None:
        """Many tokens have the same probability in bfloat16.

        The order of drafts decides which random number belongs to which draft.
        """
        target, drafter = taught
        real, config = drafter.draft_logits, SamplingConfig(0.9)
        monkeypatch.setattr(drafter, "draft_logits", lambda *inputs: real(*inputs).div(4).round())
        check_batch(target, drafter, PROMPTS[:3], tied_shape, 6, config)

    # Drafting on another machine than the target's

    def test_contexts_stand_for_the_target(self, family: str) -> None:
        target = Target(model_of(family))
        drafter = self.build(target.model)
        if drafter.context_width is None:
            with pytest.raises(DrafterError):
                drafter.new_context_cache()
            return
        check_contexts(drafter, target, 10 * self.close)
        if family == PLAIN:
            # Long chains are compared in float64, because a drafter that feeds itself adds up
            # differences over many levels.
            in_double = Target(build_model().double())
            check_contexts(drafter.double(), in_double, 1e-6, 20, roots_by_piece={3: (2, 11)})

    def test_contexts_come_in_order(self) -> None:
        target = Target(model_of())
        drafter = self.build(target.model)
        if drafter.context_width is None:
            return
        receiver, width = Receiver(drafter, target), drafter.context_width
        receiver.take(torch.randn(3, width), 3, 2)
        for shape, start in (((2, width), 2), ((2, width), 4), ((2, width + 1), 3), ((width,), 3)):
            with pytest.raises(DrafterError):
                drafter.take_context(receiver.state, receiver.cache, torch.zeros(shape), start)
        assert receiver.cache.lengths == [3]
        if drafter.context_needs_kv:
            with pytest.raises(DrafterError):
                receiver.chain(list(range(6)), 5, 0)

    def test_it_drafts_no_deeper_than_it_says(self, taught: tuple[Target, Any]) -> None:
        target, drafter = taught
        most = drafter.config.max_depth
        if most is None:
            return
        for shape in (TreeShape(most + 1), TreeShape(most + 2, 2, most + 3)):
            with pytest.raises(DrafterError):
                generate(target, drafter, [5, 6], max_new_tokens=20, tree=shape)
        generate(target, drafter, [5, 6], max_new_tokens=9, tree=TreeShape(most))

    # Training

    def test_loss_and_gradients_are_finite(self, case: Case) -> None:
        terms = case.terms()
        # Training draws blocks of the drafter's size.
        blocks = BlockDraws(getattr(case.drafter.config, "n_drafts", 1))
        draws = replace(ROUNDS["bounded"], blocks=blocks)
        positions = case.drafter.loss_positions(case.inputs.response_mask, draws)
        step = TrainingStep(case.inputs, draws)
        total_weight = weight_of_positions(case.drafter, case.frozen, step)
        assert total_weight == pytest.approx(float(positions.sum()), rel=1e-4)
        assert int((positions > 0).sum()) > 20
        assert terms["loss"] > 0
        assert terms["forward_kl"] > 0
        terms["loss"].backward()
        for name, weight in case.drafter.named_parameters():
            assert weight.grad is not None, name
            assert weight.grad.isfinite().all(), name
            assert weight.grad.any(), f"{name} learns nothing"
        assert case.terms(UNBOUNDED, weights_times(0.0))["loss"].item() == 0.0
        torch.testing.assert_close(
            case.terms(weights=weights_times(2.0))["loss"], 2 * terms["loss"]
        )

    def test_an_lk_loss_replaces_the_forward_kl(self, case: Case) -> None:
        kinds = map(losses.Divergence, ("kl", "lk", "lk-hybrid", "tv"))
        weights = [LossWeights(1.0, 0.0, 0.0, 0.0, 0.0, kind) for kind in kinds]
        found = {case.terms(weights=one)["loss"].item() for one in weights}
        assert len(found) == 4
        assert min(found) > 0

    def test_rows_and_padding_do_not_mix(self, case: Case) -> None:
        """The loss of a batch is the sum of the losses of its rows without padding."""
        both, alone, draws = case.terms(denominator=1.0), [], ROUNDS["bounded"]
        for row, n_tokens in ((0, 30), (1, 25)):
            inputs = one_row(case.inputs, row, n_tokens)
            own = [
                None if value is None else value[row : row + 1]
                for value in (draws.step_bound, draws.offset)
            ]
            step = TrainingStep(
                inputs, Draws(own[0], draws.staircase_rows[:1], own[1]), denominator=1.0
            )
            alone.append(case.drafter.objective(case.frozen, step)["loss"])
        torch.testing.assert_close(both["loss"], sum(alone), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(both["loss"], 2 * case.terms(denominator=2.0)["loss"])

    @pytest.mark.parametrize("response", [[], [0]], ids=str)
    def test_a_batch_without_a_loss_position_adds_nothing(
        self, case: Case, response: list[int]
    ) -> None:
        mask = torch.zeros(1, 12, dtype=torch.bool)
        mask[0, response] = True
        draws, drafter = (
            Draws(torch.tensor([5]), torch.zeros(1, dtype=torch.bool), torch.tensor([0])),
            case.drafter,
        )
        if drafter.loss_positions(mask, draws).any():
            assert response, "a drafter that reads tokens alone drafts from the first one"
            return
        inputs = stored(drafter, case.model, torch.randint(4, VOCABULARY, (1, 12)), mask)
        terms = drafter.objective(case.frozen, TrainingStep(inputs, draws))
        terms["loss"].backward()
        assert terms["loss"].item() == terms["forward_kl"].item() == 0
        assert all(weight.grad is None or not weight.grad.any() for weight in drafter.parameters())
        assert not drafter.drafted_features(case.frozen, inputs, draws).valid.any()

    def test_it_reads_what_it_says(self, case: Case) -> None:
        """Every field that a drafter reads changes the loss; other fields are absent."""
        usual, inputs = case.terms(UNBOUNDED)["loss"], case.inputs
        for name in case.drafter.config.reads.fields:
            value = getattr(inputs, name)
            parts = range(value.shape[2]) if name == "kv" else [slice(None)]
            for part in parts:  # layers of the KV, or the whole field
                other = value.clone()
                other[:, :, part] += torch.randn_like(other[:, :, part])
                assert case.terms(UNBOUNDED, **{name: other})["loss"] != usual, f"{part} of {name}"
        assert len(inputs.layer_outputs) == len(case.drafter.observed_layers)
        for index, states in enumerate(inputs.layer_outputs):
            others = list(inputs.layer_outputs)
            others[index] = states + torch.randn_like(states)
            assert case.terms(UNBOUNDED, layer_outputs=tuple(others))["loss"] != usual, index
        without: dict[str, Any] = {"kv": None, "entering_hidden": None, "layer_outputs": ()}
        for name, nothing in without.items():
            if getattr(inputs, name) != nothing:
                with pytest.raises((AssertionError, DrafterError, ValueError)):
                    case.terms(UNBOUNDED, **{name: nothing})

    def test_the_seed_decides_the_starting_weights(self) -> None:
        model = model_of()
        states = []
        for seed in (1, 1, 2):
            drafter = self.build(model)
            drafter.initialize(torch.Generator().manual_seed(seed))
            states.append(torch.cat([weight.detach().flatten() for weight in drafter.parameters()]))
            norms = [
                weight
                for name, weight in drafter.named_parameters()
                if name.endswith("norm.weight")
            ]
            assert all(torch.equal(weight, torch.ones_like(weight)) for weight in norms)
        assert torch.equal(states[0], states[1])
        assert torch.equal(states[0], states[2]) != self.draws_weights

    def test_bfloat16(self) -> None:
        """Training and a decoding round run; a frozen target of another dtype is refused."""
        model = build_model(num_hidden_layers=3)
        drafter = self.build(model)
        with pytest.raises(DrafterError):
            DrafterProposer(frozen_for(drafter, model), drafter.bfloat16())
        target = Target(model.bfloat16())
        inputs = batch_of(drafter, target.model)
        terms = drafter.objective(
            frozen_for(drafter, target.model), TrainingStep(inputs, UNBOUNDED)
        )
        terms["loss"].backward()
        assert all(weight.grad.isfinite().all() for weight in drafter.parameters())
        rows = ForcedDrafting(drafter, target, 2)
        root = rows.root([[5, 6, 7], [8, 9]])
        assert root.dtype == torch.bfloat16
        level = rows.level(
            torch.tensor([[10], [11]]), root, torch.ones(2, 1, 2, dtype=torch.bool), 1
        )
        assert level.dtype == torch.bfloat16
        with torch.inference_mode():
            assert drafter.draft_logits(rows.frozen, level).shape == (2, 1, VOCABULARY)

    # Checkpoints

    def test_checkpoint(self, tmp_path: Path) -> None:
        model = model_of()
        drafter = self.build(model, target={"weights_sha256": "ab" * 32})
        save_drafter(drafter, tmp_path)
        again = load_drafter(tmp_path)
        assert type(again) is DRAFTERS[self.kind]
        assert again.config == drafter.config
        assert again.state_dict().keys() == drafter.state_dict().keys()
        assert all(
            torch.equal(weight, again.state_dict()[name])
            for name, weight in drafter.state_dict().items()
        )
        check_drafter_matches(again, Target(model))
        with raises_naming(TargetError, "vocab_size", 80):
            check_drafter_matches(again, Target(build_model(vocab_size=80)))
        file = tmp_path / "drafter.json"
        file.write_text(file.read_text().replace(f'"{self.kind}"', '"condor"'))
        with raises_naming(DrafterError, "condor"):
            load_drafter(tmp_path)
