"""Medusa: heads read the last verified hidden state alone, train one step ahead each, and decode without loss."""

import pytest
import torch
import torch.nn.functional as F

from moa_data.moa.decoding.loop import generate_batch, plain_generate, speculative_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.decoding.tree import StaticTree, TreeShape
from moa_data.moa.drafters.medusa import HEAD_DECAY, MedusaDrafter, MedusaSizes
from moa_data.moa.drafters.rounds import Draws
from moa_data.moa.drafters.training import LossWeights, TrainingInputs
from moa_data.moa.errors import DrafterError
from moa_data.moa.formats.checkpoint import load_drafter, save_drafter
from moa_data.moa.nn import masks
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import Target
from moa_data.tests.kit.drafters import teach
from moa_data.tests.kit.models import FAMILIES, SIZES, build_model, random_prompts

SHAPES = [TreeShape(1), TreeShape(4), TreeShape(3, 3, 8), TreeShape(6, 2, 9), StaticTree.likeliest(12)]
NO_DRAWS = Draws(None, torch.zeros(2, dtype=torch.bool))


def build_medusa(model, seed=1, **sizes):
    drafter = MedusaDrafter(MedusaSizes.from_target(model.config, **sizes))
    drafter.initialize()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.15)
    return drafter.eval()


@pytest.fixture(scope="module")
def endless():
    """A target that never ends an answer, and a drafter that is often right."""
    target = Target(build_model(num_hidden_layers=2))
    target.eos_token_ids = frozenset()
    drafter = MedusaDrafter(MedusaSizes.from_target(target.config))
    drafter.initialize()
    return target, teach(drafter, target, random_prompts(7, 7), n_steps=60)


@torch.no_grad()
def test_untrained_heads_say_what_the_target_says():
    model = build_model()
    drafter, hidden = MedusaDrafter(MedusaSizes.from_target(model.config, medusa_layers=2)), torch.randn(3, 48)
    drafter.initialize()
    assert len(drafter.heads) == 6
    for head in drafter.heads:
        torch.testing.assert_close(head(hidden), hidden)


@pytest.mark.parametrize("n_layers", [1, 2])
@torch.no_grad()
def test_validated_features_equal_draft_steps(n_layers):
    target = Target(build_model(num_hidden_layers=2))
    frozen, drafter = FrozenTarget.from_model(target.model), build_medusa(target.model, medusa_layers=n_layers)
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 26))
    hidden = target.model.model(tokens).last_hidden_state
    response = (torch.arange(26) >= torch.tensor([[9], [0]])) & (torch.arange(26) < torch.tensor([[26], [21]]))
    bound, offset = torch.tensor([5, 4]), torch.tensor([2, 1])
    validated = drafter.drafted_features(
        frozen, TrainingInputs(tokens, response, None, hidden), Draws(bound, NO_DRAWS.staircase_rows, offset)
    )
    drafted = masks.drafted_positions(response, bound, offset)
    drafted[:, 0] = False
    context, n_steps = masks.last_context(drafted), 0
    assert torch.equal(validated.valid.sum(dim=1), drafted.sum(dim=1))
    for row in range(2):
        for query, position, is_valid in zip(
            validated.features[row], validated.queries[row].tolist(), validated.valid[row], strict=True
        ):
            if not is_valid:
                continue
            root = int(context[row, position]) + 1
            state = drafter.new_state(1)
            drafter.observe(state, hidden[row : row + 1, :root], [range(root)])
            features = drafter.root_features(state, frozen, [], target.new_cache())
            if position > root:
                features = drafter.level_features(
                    state, frozen, tokens[:1, :3], features, torch.empty(0), position - root, target.new_cache()
                )
            for node in features[0]:
                torch.testing.assert_close(node, query)
            n_steps += 1
    assert n_steps == int(drafted.sum()) > 20


def plain_loss(drafter, frozen, inputs):
    """The definition, position by position: head k at t learns what the target says at t + k, inside one response."""
    response, n_heads = inputs.response_mask.bool(), len(drafter.heads)
    total, share = torch.zeros(()), sum(HEAD_DECAY**k for k in range(1, n_heads + 1))
    n_positions = int(response[:, 1:].sum())
    for row in range(len(response)):
        for k, head in enumerate(drafter.heads, start=1):
            for t in range(response.shape[1] - k):
                if response[row, t + 1 : t + k + 1].all():
                    teacher = frozen.logits(inputs.hidden[row, t + k]).softmax(dim=-1)
                    learned = frozen.logits(head(inputs.hidden[row, t]))
                    total = total + HEAD_DECAY**k * F.cross_entropy(learned, teacher)
    return total / share / (n_positions + 1e-5)


def test_loss_and_gradient_equal_a_plain_reference():
    """Two responses in one row, a row shorter than the heads reach, and padding."""
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_medusa(model, medusa_heads=4)
    tokens = torch.randint(4, SIZES["vocab_size"], (3, 14))
    response = torch.zeros_like(tokens, dtype=torch.bool)
    response[0, 2:6] = response[0, 9:14] = response[1, 0:3] = response[2, 3] = True
    inputs = TrainingInputs(tokens, response, None, model.model(tokens).last_hidden_state)
    expected = plain_loss(drafter, frozen, inputs)
    goal = torch.autograd.grad(expected, list(drafter.parameters()))
    terms = drafter.objective(frozen, inputs, NO_DRAWS, LossWeights(forward_kl=1.0))
    torch.testing.assert_close(terms.total, expected, rtol=1e-5, atol=1e-6)
    for got, want in zip(torch.autograd.grad(terms.total, list(drafter.parameters())), goal, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert terms.n_positions == int(drafter.loss_positions(response, NO_DRAWS, False).sum()) == 4 + 5 + 2 + 1


def test_a_sequence_shorter_than_the_heads_reach():
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_medusa(model)
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 3))
    inputs = TrainingInputs(tokens, torch.ones_like(tokens), None, model.model(tokens).last_hidden_state)
    terms = drafter.objective(frozen, inputs, NO_DRAWS)
    terms.total.backward()
    assert terms.n_positions == 4
    torch.testing.assert_close(terms.forward_kl, plain_loss(drafter, frozen, inputs))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_plain_with_a_trained_drafter(endless, shape):
    target, drafter = endless
    committed = []
    for prompt in random_prompts(7, 7):
        plain = plain_generate(target, prompt, max_new_tokens=18)
        fast = speculative_generate(target, drafter, None, prompt, max_new_tokens=18, tree=shape)
        assert fast.tokens == plain.tokens
        committed += fast.stats.committed_per_call
    assert sum(committed) / len(committed) > 1.2
    assert max(committed) > min(shape.depth, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_drafters_alone_and_in_ragged_batches(family):
    target = Target(build_model(family, num_hidden_layers=2))
    target.eos_token_ids = frozenset({3, 24, 28, 40})
    drafter = build_medusa(target.model)
    prompts, shape = random_prompts(5, 11), SHAPES[4] if family in ("llama", "mistral") else SHAPES[2]
    session = DrafterProposer(target, drafter)
    together = generate_batch(target, prompts, max_new_tokens=12, proposer=session, tree=shape)
    for prompt, got in zip(prompts, together, strict=True):
        assert got.tokens == plain_generate(target, prompt, max_new_tokens=12).tokens
        alone = speculative_generate(target, drafter, None, prompt, max_new_tokens=12, tree=shape)
        assert got.tokens == alone.tokens
        assert got.stats.committed_per_call == alone.stats.committed_per_call


def test_the_state_of_each_round_is_that_of_a_fresh_prefill(endless, monkeypatch):
    """After acceptance and rollback, in a batch whose rows leave one by one."""
    target, drafter = endless
    real_root, n_rounds = drafter.root_features, 0

    def root_features(state, frozen, committed, cache):
        nonlocal n_rounds
        for row, tokens in enumerate(committed):
            hidden = target.forward(torch.tensor([tokens[:-1]]), target.new_cache())
            torch.testing.assert_close(state.hidden[row], hidden[0, -1], rtol=1e-4, atol=2e-5)
            n_rounds += 1
        return real_root(state, frozen, committed, cache)

    monkeypatch.setattr(drafter, "root_features", root_features)
    monkeypatch.setattr(target, "eos_token_ids", frozenset({24, 28, 40}))
    runs = generate_batch(
        target, random_prompts(7, 7), max_new_tokens=14, tree=SHAPES[2], proposer=DrafterProposer(target, drafter)
    )
    assert n_rounds > 20
    assert max(count for run in runs for count in run.stats.committed_per_call) > 2


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[4]], ids=str)
def test_sampling_and_penalties_are_shared(endless, shape):
    target, drafter = endless
    prompts = random_prompts(3, 9)
    config = SamplingConfig(0.8, top_p=0.9)
    together = generate_batch(
        target, prompts, max_new_tokens=8, proposer=DrafterProposer(target, drafter, None, config), tree=shape,
        sampling=config, seed=3,
    )  # fmt: skip
    for row, prompt in enumerate(prompts):
        alone = speculative_generate(
            target, drafter, None, prompt, max_new_tokens=8, tree=shape, sampling=config, seed=3 + row
        )
        assert alone.tokens == together[row].tokens
    penalty = SamplingConfig(repetition_penalty=1.5)
    plain = plain_generate(target, prompts[0], max_new_tokens=10, sampling=penalty)
    fast = speculative_generate(target, drafter, None, prompts[0], max_new_tokens=10, tree=shape, sampling=penalty)
    assert fast.tokens == plain.tokens


@torch.no_grad()
def test_one_distribution_serves_a_level(endless):
    """The shared logits of a level are those of its nodes one by one."""
    target, drafter = endless
    frozen = FrozenTarget.from_model(target.model)
    shared = torch.randn(2, 1, 48).expand(-1, 5, -1)
    torch.testing.assert_close(drafter.draft_logits(frozen, shared), frozen.logits(shared.contiguous()))
    apart = torch.randn(2, 5, 48)
    torch.testing.assert_close(drafter.draft_logits(frozen, apart), frozen.logits(apart))


def test_checkpoint(tmp_path):
    drafter = build_medusa(build_model(), medusa_heads=3, medusa_layers=2, target={"weights_sha256": "ab" * 32})
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path)
    assert isinstance(again, MedusaDrafter)
    assert again.config == drafter.config
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in drafter.state_dict().items())


def test_refusals(endless):
    target, drafter = endless
    with pytest.raises(DrafterError, match="medusa_heads must be at least 1, got 0"):
        MedusaSizes.from_target(target.config, medusa_heads=0)
    for shape in (TreeShape(7), TreeShape(8, 2, 9), StaticTree.likeliest(40, max_depth=9, rank_acceptance=(0.9, 0.1))):
        with pytest.raises(DrafterError, match=f"drafts 6 levels, drafts of {shape.depth} levels were asked for; give"):
            speculative_generate(target, drafter, None, [5, 6], max_new_tokens=20, tree=shape)
    tokens = torch.randint(4, 60, (1, 20))
    inputs = TrainingInputs(tokens, torch.ones_like(tokens), None, torch.randn(1, 20, 48))
    with pytest.raises(DrafterError, match="drafts 6 levels, drafts of 7 levels were asked for"):
        drafter.drafted_features(
            FrozenTarget.from_model(target.model), inputs, Draws(torch.tensor([8]), torch.zeros(1, dtype=torch.bool))
        )
