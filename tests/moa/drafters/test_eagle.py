"""EAGLE: training, validation and decoding compute the same; decoding stays lossless and its caches stay true."""

import pytest
import torch

from moa_data.moa.decoding.loop import generate_batch, plain_generate, speculative_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.eagle import EagleDrafter, EagleSizes
from moa_data.moa.drafters.rounds import Draws
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.errors import DrafterError, TargetMismatch
from moa_data.moa.formats.checkpoint import check_drafter_matches, load_drafter, save_drafter
from moa_data.moa.nn import masks
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import Target
from moa_data.tests.kit.drafters import teach
from moa_data.tests.kit.models import FAMILIES, SIZES, build_model, random_prompts

TREES = [TreeShape(1), TreeShape(4), TreeShape(3, 3, 8), TreeShape(5, 2, 6)]


def build_eagle(model, seed=1, **sizes):
    drafter = EagleDrafter(EagleSizes.from_target(model.config, **sizes))
    drafter.initialize(torch.Generator().manual_seed(seed), std=0.15)
    return drafter.eval()


@pytest.fixture(scope="module")
def endless():
    """A target that never ends an answer, and a drafter that is often right."""
    target = Target(build_model(num_hidden_layers=2))
    target.eos_token_ids = frozenset()
    return target, teach(build_eagle(target.model), target, random_prompts(7, 7), n_steps=80)


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_validated_features_equal_draft_steps(family, n_layers):
    """What validation computes for whole batches is what a session computes round by round."""
    target = Target(build_model(family, num_hidden_layers=2))
    frozen = FrozenTarget.from_model(target.model)
    drafter = build_eagle(target.model, eagle_layers=n_layers)
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 26))
    hidden = target.model.model(tokens).last_hidden_state
    response = (torch.arange(26) >= torch.tensor([[9], [4]])) & (torch.arange(26) < torch.tensor([[26], [21]]))
    bound, offset = torch.tensor([5, 4]), torch.tensor([2, 1])
    draws = Draws(bound, torch.zeros(2, dtype=torch.bool), offset)
    validated = drafter.drafted_features(frozen, TrainingInputs(tokens, response, None, hidden), draws)
    drafted = masks.drafted_positions(response, bound, offset)
    context = masks.last_context(drafted)
    assert torch.equal(validated.valid.sum(dim=1), drafted.sum(dim=1))

    cache, n_steps, features = target.new_cache(), 0, torch.empty(0)
    for row in range(2):
        for query, position in zip(validated.features[row], validated.queries[row].tolist(), strict=True):
            if not drafted[row, position]:
                continue
            root = int(context[row, position]) + 1
            if position == root:
                state = drafter.new_state(1)
                drafter.observe(state, hidden[row : row + 1], [range(root)])
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
def test_training_features_equal_root_features():
    """Teacher forcing gives what the root of a round that starts there gets; padding changes nothing."""
    target = Target(build_model())
    frozen, drafter = FrozenTarget.from_model(target.model), build_eagle(target.model)
    tokens = torch.randint(4, SIZES["vocab_size"], (1, 18))
    hidden = target.model.model(tokens).last_hidden_state
    trained = drafter(drafter.join(frozen.embed(tokens[:, 1:]), hidden[:, :-1]))
    for root in (1, 6, 17):
        state = drafter.new_state(1)
        drafter.observe(state, hidden, [range(root)])
        features = drafter.root_features(state, frozen, [tokens[0, : root + 1].tolist()], target.new_cache())
        torch.testing.assert_close(features[:, 0], trained[:, root - 1], rtol=0, atol=2e-5)


def test_loss_lies_on_the_response_alone():
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_eagle(model)
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 20))
    response = torch.zeros_like(tokens, dtype=torch.bool)
    response[0, 6:20] = response[1, 0:12] = True
    hidden = model.model(tokens).last_hidden_state.requires_grad_(True)
    draws = Draws(None, torch.zeros(2, dtype=torch.bool))
    terms = drafter.objective(frozen, TrainingInputs(tokens, response, None, hidden), draws)
    (gradient,) = torch.autograd.grad(terms.total, hidden)
    is_used = gradient.abs().sum(dim=-1) > 0
    assert is_used[0].all()
    assert torch.equal(is_used[1], torch.arange(20) < 12), "what lies behind the response is not looked at"
    assert terms.n_positions == 14 + 11, "nothing precedes the first position"
    assert terms.n_positions == int(drafter.loss_positions(response, draws, official=False).sum())


def test_noise_is_the_rows_own():
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_eagle(model)
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 20))
    inputs = TrainingInputs(tokens, torch.ones_like(tokens), None, model.model(tokens).last_hidden_state)

    def loss(seeds, rows, width=0.2, n_tokens=20):
        part = TrainingInputs(tokens[rows, :n_tokens], inputs.response_mask[rows, :n_tokens], None, inputs.hidden[rows])
        part.hidden = part.hidden[:, :n_tokens]
        draws = Draws(None, torch.zeros(2, dtype=torch.bool), None, seeds, width)
        return float(drafter.objective(frozen, part, draws, denominator=1.0).total.detach())

    both = slice(0, 2)
    assert loss((5, 6), both) == loss((5, 6), both) != loss((5, 7), both)
    assert loss((5, 6), both) == pytest.approx(loss((5,), slice(0, 1)) + loss((6,), slice(1, 2)), rel=1e-5)
    assert loss((), both) == loss((5, 6), both, width=0.0) != loss((5, 6), both)


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", TREES[1:3], ids=str)
def test_random_drafters_alone_and_in_ragged_batches(family, tree):
    target = Target(build_model(family, num_hidden_layers=2))
    target.eos_token_ids = frozenset({3, 24, 28, 40})
    drafter = build_eagle(target.model, eagle_layers=2)
    prompts = random_prompts(8, 11)
    session = DrafterProposer(target, drafter)
    together = generate_batch(target, prompts, max_new_tokens=12, proposer=session, tree=tree)
    for prompt, got in zip(prompts, together, strict=True):
        assert got.tokens == plain_generate(target, prompt, max_new_tokens=12).tokens
        alone = speculative_generate(target, drafter, None, prompt, max_new_tokens=12, tree=tree)
        assert got.tokens == alone.tokens
        assert got.stats.committed_per_call == alone.stats.committed_per_call


@pytest.mark.parametrize("tree", TREES[1:3], ids=str)
def test_caches_after_each_round_equal_a_fresh_prefill(endless, monkeypatch, tree):
    """Slots of accepted drafts are made anew from the target's hidden states, in batches too."""
    target, drafter = endless
    real_root, frozen, lengths = drafter.root_features, FrozenTarget.from_model(target.model), []

    def root_features(state, frozen, committed, cache):
        features = real_root(state, frozen, committed, cache)
        for row, tokens in enumerate(committed):
            n_verified = len(tokens) - 1
            assert state.n_true[row] == cache.lengths[row] == n_verified
            fresh = drafter.new_state(1)
            hidden = target.forward(torch.tensor([tokens[:-1]]), target.new_cache())
            drafter.observe(fresh, hidden, [range(n_verified)])
            expected = real_root(fresh, frozen, [tokens], cache)
            torch.testing.assert_close(features[row], expected[0], rtol=1e-4, atol=2e-5)
            for got, goal in zip(state.slots[0].view(), fresh.slots[0].view(), strict=True):
                torch.testing.assert_close(got[row, :, :n_verified], goal[0], rtol=1e-4, atol=2e-5)
            lengths.append(n_verified)
        return features

    monkeypatch.setattr(drafter, "root_features", root_features)
    prompts = random_prompts(7, 7)
    runs = generate_batch(
        target, prompts, max_new_tokens=14, tree=tree,
        proposer=DrafterProposer(target, drafter, frozen),
    )  # fmt: skip
    assert len(lengths) > 20
    assert max(count for run in runs for count in run.stats.committed_per_call) > 2


@pytest.mark.parametrize("tree", TREES[1:3], ids=str)
def test_sampling_and_penalties_are_shared(endless, tree):
    target, drafter = endless
    prompts = random_prompts(3, 9)
    config = SamplingConfig(0.8, top_p=0.9)
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
    drafter = build_eagle(model, eagle_layers=2, self_attention_kv_heads=1, target={"weights_sha256": "ab" * 32})
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path)
    assert isinstance(again, EagleDrafter)
    assert again.config == drafter.config
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in drafter.state_dict().items())
    check_drafter_matches(again, Target(model))
    with pytest.raises(TargetMismatch, match="vocab_size 67, this target has 80"):
        check_drafter_matches(again, Target(build_model(vocab_size=80)))
    file = tmp_path / "drafter.json"
    file.write_text(file.read_text().replace('"eagle"', '"condor"'))
    with pytest.raises(DrafterError, match="there is no drafter 'condor'; expected one of moa, eagle"):
        load_drafter(tmp_path)


def test_unfit_sizes_are_refused():
    config = build_model().config
    with pytest.raises(DrafterError, match=r"self_attention_kv_heads \(3\) must divide the 4 query heads"):
        EagleSizes.from_target(config, self_attention_kv_heads=3)
    with pytest.raises(DrafterError, match="eagle_layers must be at least 1, got 0"):
        EagleSizes.from_target(config, eagle_layers=0)
    with pytest.raises(DrafterError, match="of a drafter of kind 'moa', expected 'eagle'"):
        EagleSizes.from_dict({"kind": "moa"})
