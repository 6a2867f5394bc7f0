"""GLIDE: training, validation and decoding compute the same; decoding stays lossless and its caches stay true."""

import pytest
import torch

from moa_data.moa.decoding.loop import generate_batch, plain_generate, speculative_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.decoding.tree import StaticTree, TreeShape
from moa_data.moa.drafters.glide import GlideDrafter, GlideSizes, block_context
from moa_data.moa.drafters.rounds import Draws
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.errors import DrafterError, TargetMismatch
from moa_data.moa.formats.checkpoint import check_drafter_matches, load_drafter, save_drafter
from moa_data.moa.nn import masks
from moa_data.moa.nn.kv import cache_kv, new_cache
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import Target
from moa_data.tests.kit.models import FAMILIES, SIZES, build_model, random_prompts

TREES = [TreeShape(1), TreeShape(4), TreeShape(3, 3, 8), TreeShape(5, 2, 6)]


def build_glide(model, seed=1, official=False, **sizes):
    drafter = GlideDrafter(GlideSizes.from_target(model.config, **sizes))
    drafter.initialize(torch.Generator().manual_seed(seed), std=0.15, official=official)
    return drafter.eval()


@torch.no_grad()
def activations(model, tokens, n_layers_read=1):
    """KV of the last layers [B, T, n, D] and the last hidden state [B, T, E] of whole sequences."""
    cache = new_cache()
    hidden = model.model(tokens, past_key_values=cache).last_hidden_state
    return cache_kv(cache, 0, tokens.shape[1])[:, :, -n_layers_read:], hidden


def inputs_of(model, tokens, response):
    kv, hidden = activations(model, tokens)
    return TrainingInputs(tokens, response, kv, hidden)


def prefilled(target, tokens):
    """The target's cache with these tokens of one row committed."""
    cache = target.new_cache()
    target.forward(torch.tensor([tokens]), cache)
    cache.commit([range(len(tokens))])
    return cache


def trained_glide(target):
    """Taught for a moment on what the target itself says after the prompts of ``random_prompts(7, 7)``."""
    frozen, drafter = FrozenTarget.from_model(target.model), build_glide(target.model)
    rows = [prompt + plain_generate(target, prompt, max_new_tokens=24).tokens for prompt in random_prompts(7, 7)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    response = torch.zeros_like(tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        response[index, : len(row)] = True
    inputs = inputs_of(target.model, tokens, response)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=8e-3)
    for step in range(80):
        optimizer.zero_grad()
        offset = torch.full((len(rows),), step)
        drafter.objective(frozen, inputs, Draws(None, torch.zeros(len(rows)).bool(), offset)).total.backward()
        optimizer.step()
    return drafter.eval()


@pytest.fixture(scope="module")
def endless():
    """A target that never ends an answer, and a drafter that is often right."""
    target = Target(build_model(num_hidden_layers=2))
    target.eos_token_ids = frozenset()
    return target, trained_glide(target)


def test_blocks_begin_at_the_offset():
    positions = torch.arange(9).expand(3, -1)
    got = block_context(positions, 3, torch.tensor([1, 0, 7]))
    assert got[0].tolist() == [-3, 0, 0, 0, 3, 3, 3, 6, 6]
    assert got[1].tolist() == [-1, -1, -1, 2, 2, 2, 5, 5, 5]
    assert torch.equal(got[2], got[0]), "an offset counts modulo the size of a block"
    assert torch.equal(block_context(positions, 3), got[1].expand(3, -1))


@pytest.mark.parametrize(("family", "official"), [*((family, False) for family in FAMILIES), ("llama", True)])
@torch.no_grad()
def test_validated_features_equal_draft_steps(family, official):
    """What validation computes for whole batches is what a session computes round by round."""
    target = Target(build_model(family, num_hidden_layers=3))
    frozen = FrozenTarget.from_model(target.model)
    drafter = build_glide(target.model, official=official)
    assert drafter.config.official_rotation == official
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 26))
    response = (torch.arange(26) >= torch.tensor([[9], [4]])) & (torch.arange(26) < torch.tensor([[26], [21]]))
    bound, offset = torch.tensor([5, 4]), torch.tensor([2, 1])
    draws = Draws(bound, torch.zeros(2, dtype=torch.bool), offset)
    validated = drafter.drafted_features(frozen, inputs_of(target.model, tokens, response), draws)
    drafted = masks.drafted_positions(response, bound, offset)
    context = masks.last_context(drafted)
    assert torch.equal(validated.valid.sum(dim=1), drafted.sum(dim=1))

    n_steps = 0
    for row in range(2):
        for query, position in zip(validated.features[row], validated.queries[row].tolist(), strict=True):
            if not drafted[row, position]:
                continue
            root = int(context[row, position]) + 1
            if position == root:
                state, cache = drafter.new_state(1), prefilled(target, tokens[row, :root].tolist())
                features = drafter.root_features(state, frozen, [tokens[row, : root + 1].tolist()], cache)
            else:
                level = position - root
                seen = torch.ones(1, 1, level + 1, dtype=torch.bool)
                token = tokens[row, position].reshape(1, 1)
                features = drafter.level_features(state, frozen, token, features, seen, level, cache)
            torch.testing.assert_close(features[0, 0], query, rtol=0, atol=2e-5)
            n_steps += 1
    assert n_steps == int(drafted.sum()) > 20


@torch.no_grad()
def test_a_block_of_training_is_a_draft_round():
    """Teacher forcing gives each position of a block what the rounds that begin there give; padding changes nothing."""
    target = Target(build_model())
    frozen, drafter = FrozenTarget.from_model(target.model), build_glide(target.model, block_size=4)
    tokens = torch.randint(4, SIZES["vocab_size"], (1, 18))
    padded = torch.cat((tokens, torch.zeros(1, 5, dtype=torch.int64)), dim=1)
    kv, _ = activations(target.model, padded, n_layers_read=3)
    positions = torch.arange(23)[None]
    trained = drafter(frozen, padded, kv, block_context(positions, 4, torch.tensor([2])).clamp(min=0))
    for root in (1, 2, 6, 14):
        state, cache = drafter.new_state(1), prefilled(target, tokens[0, :root].tolist())
        features = drafter.root_features(state, frozen, [tokens[0, : root + 1].tolist()], cache)
        torch.testing.assert_close(features[:, 0], trained[:, root], rtol=0, atol=2e-5)
        for level in range(1, 1 if root == 1 else 4):
            token, seen = tokens[:, root + level, None], torch.ones(1, 1, level + 1, dtype=torch.bool)
            features = drafter.level_features(state, frozen, token, features, seen, level, cache)
            torch.testing.assert_close(features[:, 0], trained[:, root + level], rtol=0, atol=2e-5)


def test_a_position_learns_from_the_blocks_before_it_alone():
    """Of the target's KV the loss sees no more than decoding; the feature loss is reported, not learned."""
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_glide(model, block_size=4)
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 20))
    response = torch.zeros_like(tokens, dtype=torch.bool)
    response[0, 0:3] = response[1, 13:16] = True
    inputs = inputs_of(model, tokens, response)
    inputs.kv.requires_grad_(True)
    draws = Draws(None, torch.zeros(2, dtype=torch.bool), torch.tensor([0, 3]))
    terms = drafter.objective(frozen, inputs, draws)
    (gradient,) = torch.autograd.grad(terms.total, inputs.kv)
    is_used = gradient.abs().sum(dim=(-1, -2)) > 0
    assert torch.equal(is_used[0], torch.arange(20) == 0), "behind position 0 begins the first round"
    assert torch.equal(is_used[1], torch.arange(20) < 15), "15 begins a block of its own"
    assert terms.n_positions == 2 + 3 == int(drafter.loss_positions(response, draws, official=False).sum())
    assert terms.total.item() == pytest.approx(0.1 * terms.forward_kl.item())
    assert terms.feature.item() > 0
    official = drafter.objective(frozen, inputs, draws, official=True)
    assert official.n_positions == int(drafter.loss_positions(response, draws, official=True).sum()) == 6
    (gradient,) = torch.autograd.grad(official.total, inputs.kv)
    assert (gradient[0].abs().sum(dim=(-1, -2)) > 0).all(), "a query without a key attends to all, padding included"


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_equals_plain_with_a_trained_drafter(endless, tree):
    target, drafter = endless
    committed = []
    for prompt in random_prompts(7, 7):
        plain = plain_generate(target, prompt, max_new_tokens=18)
        fast = speculative_generate(target, drafter, None, prompt, max_new_tokens=18, tree=tree)
        assert fast.tokens == plain.tokens
        committed += fast.stats.committed_per_call
    assert sum(committed) / len(committed) > 1.3
    assert max(committed) > min(tree.depth, 2)


STATIC = StaticTree((-1, -1, 0, 2), (0, 1, 0, 0))


@pytest.mark.parametrize(
    ("family", "tree"),
    [("llama", TREES[1]), ("llama", STATIC), ("qwen2", TREES[2]), ("qwen3", TREES[1]), ("mistral", TREES[2])],
    ids=str,
)
def test_random_drafters_alone_and_in_ragged_batches(family, tree):
    target = Target(build_model(family, num_hidden_layers=2))
    target.eos_token_ids = frozenset({3, 24, 28, 40})
    drafter = build_glide(target.model, official=family == "llama")
    prompts = random_prompts(5, 11)
    session = DrafterProposer(target, drafter)
    together = generate_batch(target, prompts, max_new_tokens=10, proposer=session, tree=tree)
    for prompt, got in zip(prompts, together, strict=True):
        assert got.tokens == plain_generate(target, prompt, max_new_tokens=10).tokens
        alone = speculative_generate(target, drafter, None, prompt, max_new_tokens=10, tree=tree)
        assert got.tokens == alone.tokens
        assert got.stats.committed_per_call == alone.stats.committed_per_call


@pytest.mark.parametrize("tree", TREES[1:3], ids=str)
def test_caches_after_each_round_equal_a_fresh_prefill(endless, monkeypatch, tree):
    """Entries of rejected drafts are gone and the root sees verified positions alone, in batches too."""
    target, drafter = endless
    real_root, frozen, lengths = drafter.root_features, FrozenTarget.from_model(target.model), []

    def root_features(state, frozen, committed, cache):
        features = real_root(state, frozen, committed, cache)
        for row, tokens in enumerate(committed):
            fresh, own_cache = drafter.new_state(1), prefilled(target, tokens[:-1])
            assert cache.lengths[row] == own_cache.lengths[0] == len(tokens) - 1
            expected = real_root(fresh, frozen, [tokens], own_cache)
            torch.testing.assert_close(features[row], expected[0], rtol=1e-4, atol=2e-5)
            assert state.self_attention.lengths[row] == len(tokens)
            for got, goal in zip(state.self_attention.view(), fresh.self_attention.view(), strict=True):
                torch.testing.assert_close(got[row, :, : len(tokens)], goal[0], rtol=1e-4, atol=2e-5)
            lengths.append(len(tokens))
        return features

    monkeypatch.setattr(drafter, "root_features", root_features)
    prompts = random_prompts(7, 7)
    runs = generate_batch(
        target, prompts, max_new_tokens=14, tree=tree,
        proposer=DrafterProposer(target, drafter, frozen),
    )  # fmt: skip
    assert len(lengths) > 20
    assert max(count for run in runs for count in run.stats.committed_per_call) > 2


def test_sampling_and_penalties_are_shared(endless):
    target, drafter = endless
    prompts, config, tree = random_prompts(3, 9), SamplingConfig(0.8, top_p=0.9), TreeShape(4)
    together = generate_batch(
        target, prompts, max_new_tokens=8, proposer=DrafterProposer(target, drafter, None, config), tree=tree,
        sampling=config, seed=3,
    )  # fmt: skip
    for row, prompt in enumerate(prompts):
        alone = speculative_generate(
            target, drafter, None, prompt, max_new_tokens=8, tree=tree, sampling=config, seed=3 + row
        )
        assert alone.tokens == together[row].tokens
    penalty = SamplingConfig(repetition_penalty=1.5)
    plain = plain_generate(target, prompts[0], max_new_tokens=10, sampling=penalty)
    fast = speculative_generate(target, drafter, None, prompts[0], max_new_tokens=10, tree=tree, sampling=penalty)
    assert fast.tokens == plain.tokens


def test_checkpoint_and_target_check(tmp_path):
    model = build_model()
    drafter = build_glide(model, official=True, self_attention_kv_heads=1, target={"weights_sha256": "ab" * 32})
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path)
    assert isinstance(again, GlideDrafter)
    assert again.config == drafter.config
    assert again.config.official_rotation
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in drafter.state_dict().items())
    assert sorted(name for name in again.state_dict() if name.startswith("cross_attention")) == [
        "cross_attention.o_proj.weight",
        "cross_attention.q_proj.weight",
    ]
    check_drafter_matches(again, Target(model))
    with pytest.raises(TargetMismatch, match="kv_width 48, this target has 96"):
        check_drafter_matches(again, Target(build_model(num_key_value_heads=4)))


def test_unfit_sizes_and_inputs_are_refused():
    model = build_model()
    with pytest.raises(DrafterError, match=r"self_attention_kv_heads \(3\) must divide the 4 query heads"):
        GlideSizes.from_target(model.config, self_attention_kv_heads=3)
    with pytest.raises(DrafterError, match="block_size must be at least 1, got 0"):
        GlideSizes.from_target(model.config, block_size=0)
    tokens = torch.randint(4, SIZES["vocab_size"], (1, 8))
    inputs = TrainingInputs(tokens, torch.ones_like(tokens), None, torch.zeros(1, 8, 48))
    with pytest.raises(DrafterError, match="needs the target's keys and values of the last layer"):
        build_glide(model).objective(
            FrozenTarget.from_model(model), inputs, Draws(None, torch.zeros(1, dtype=torch.bool))
        )
