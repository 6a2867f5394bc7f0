"""The independent drafter: training and decoding compute the same Llama, which transformers computes too."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from moa_data.moa.decoding.loop import generate_batch, plain_generate, speculative_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.decoding.tree import StaticTree, TreeShape
from moa_data.moa.drafters.independent import IndependentDrafter, IndependentSizes, save_as_llama
from moa_data.moa.drafters.rounds import Draws
from moa_data.moa.drafters.training import LossWeights, TrainingInputs
from moa_data.moa.errors import DrafterError
from moa_data.moa.formats.checkpoint import check_drafter_matches, load_drafter, save_drafter
from moa_data.moa.nn import masks
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import Target
from moa_data.tests.kit.drafters import teach
from moa_data.tests.kit.models import FAMILIES, SIZES, build_model, random_prompts

SHAPES = [TreeShape(1), TreeShape(4), TreeShape(3, 3, 8), TreeShape(5, 2, 6), StaticTree.likeliest(12)]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def build_independent(model, seed=1, **sizes):
    drafter = IndependentDrafter(IndependentSizes.from_target(model.config, **sizes))
    drafter.initialize(torch.Generator().manual_seed(seed), std=0.15)
    return drafter.eval()


@pytest.fixture(scope="module")
def endless():
    """A target that never ends an answer, and a drafter that is often right."""
    target = Target(build_model(num_hidden_layers=2))
    target.eos_token_ids = frozenset()
    return target, teach(build_independent(target.model), target, random_prompts(7, 7), n_steps=80)


@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_validated_features_equal_draft_steps(family, n_layers):
    """Token by token through the caches, with drafts that were thrown away in between."""
    target = Target(build_model(family, num_hidden_layers=2))
    frozen, drafter = FrozenTarget.from_model(target.model), build_independent(
        target.model, independent_layers=n_layers
    )  # fmt: skip
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 22))
    response = (torch.arange(22) >= torch.tensor([[9], [4]])) & (torch.arange(22) < torch.tensor([[22], [17]]))
    bound, offset = torch.tensor([5, 4]), torch.tensor([2, 1])
    inputs = TrainingInputs(tokens, response, None, torch.zeros(2, 22, 48))
    validated = drafter.drafted_features(frozen, inputs, Draws(bound, torch.zeros(2, dtype=torch.bool), offset))
    drafted = masks.drafted_positions(response, bound, offset)
    context = masks.last_context(drafted)
    assert torch.equal(validated.valid.sum(dim=1), drafted.sum(dim=1))
    cache, features, n_steps = target.new_cache(), torch.empty(0), 0
    for row in range(2):
        state = drafter.new_state(1)
        for query, position in zip(validated.features[row], validated.queries[row].tolist(), strict=True):
            if not drafted[row, position]:
                continue
            level = position - int(context[row, position]) - 1
            if level == 0:
                features = drafter.root_features(state, frozen, [tokens[row, : position + 1].tolist()], cache)
            else:
                seen = torch.ones(1, 1, level + 1, dtype=torch.bool)
                token = tokens[row, position].reshape(1, 1)
                features = drafter.level_features(state, frozen, token, features, seen, level, cache)
            torch.testing.assert_close(features[0, 0], query, rtol=0, atol=2e-5)
            n_steps += 1
    assert n_steps == int(drafted.sum()) > 15


def test_loss_and_gradient_equal_a_plain_reference():
    """The loss beside the definition of the forward KL; the tied embedding gets both of its gradients."""
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_independent(model)
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 15))
    response = torch.zeros_like(tokens, dtype=torch.bool)
    response[0, 6:15] = response[1, 0:4] = True
    inputs = TrainingInputs(tokens, response, None, model.model(tokens).last_hidden_state)
    logits = drafter(tokens) @ drafter.embed_tokens.weight.T
    teacher = frozen.logits(inputs.hidden).softmax(dim=-1)
    expected = F.cross_entropy(logits[response], teacher[response], reduction="sum") / 13
    goal = torch.autograd.grad(expected, list(drafter.parameters()))
    terms = drafter.objective(frozen, inputs, Draws(None, torch.zeros(2)), LossWeights(forward_kl=1.0), denominator=13)
    torch.testing.assert_close(terms.total, expected)
    for got, want in zip(torch.autograd.grad(terms.total, list(drafter.parameters())), goal, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert terms.n_positions == 13
    assert terms.feature is None


def test_nothing_of_the_target_is_looked_at(endless):
    target, drafter = endless
    session = DrafterProposer(target, drafter)
    session.begin(target.new_cache())
    before = session.propose([[5, 6, 7, 8]], TreeShape(3, 2, 6)).tokens
    other = Target(build_model(seed=5, num_hidden_layers=2))
    session = DrafterProposer(other, drafter)
    session.begin(other.new_cache())
    session.observe(torch.randn(1, 3, 48), [range(3)])
    assert torch.equal(session.propose([[5, 6, 7, 8]], TreeShape(3, 2, 6)).tokens, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_plain_with_a_trained_drafter(endless, shape):
    target, drafter = endless
    committed = []
    for prompt in random_prompts(7, 7):
        plain = plain_generate(target, prompt, max_new_tokens=18)
        fast = speculative_generate(target, drafter, None, prompt, max_new_tokens=18, tree=shape)
        assert fast.tokens == plain.tokens
        committed += fast.stats.committed_per_call
    assert sum(committed) / len(committed) > 1.3
    assert max(committed) > min(shape.depth, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_drafters_alone_and_in_ragged_batches(family):
    target = Target(build_model(family, num_hidden_layers=2))
    target.eos_token_ids = frozenset({3, 24, 28, 40})
    drafter = build_independent(target.model)
    prompts, shape = random_prompts(5, 11), SHAPES[4] if family in ("llama", "mistral") else SHAPES[2]
    session = DrafterProposer(target, drafter)
    together = generate_batch(target, prompts, max_new_tokens=12, proposer=session, tree=shape)
    for prompt, got in zip(prompts, together, strict=True):
        assert got.tokens == plain_generate(target, prompt, max_new_tokens=12).tokens
        alone = speculative_generate(target, drafter, None, prompt, max_new_tokens=12, tree=shape)
        assert got.tokens == alone.tokens
        assert got.stats.committed_per_call == alone.stats.committed_per_call


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_caches_after_each_round_equal_a_fresh_prefill(endless, monkeypatch, shape):
    """Drafts are rolled back, and accepted ones fed again, in batches too."""
    target, drafter = endless
    real_root, lengths = drafter.root_features, []

    def root_features(state, frozen, committed, cache):
        features = real_root(state, frozen, committed, cache)
        for row, tokens in enumerate(committed):
            fresh = drafter.new_state(1)
            expected = real_root(fresh, frozen, [tokens], cache)
            torch.testing.assert_close(features[row], expected[0], rtol=1e-4, atol=2e-5)
            assert state.n_true[row] == len(tokens)
            for slots, goal in zip(state.slots, fresh.slots, strict=True):
                for got, want in zip(slots.view(), goal.view(), strict=True):
                    torch.testing.assert_close(got[row, :, : len(tokens)], want[0], rtol=1e-4, atol=2e-5)
            lengths.append(len(tokens))
        return features

    monkeypatch.setattr(drafter, "root_features", root_features)
    runs = generate_batch(
        target, random_prompts(7, 7), max_new_tokens=14, tree=shape, proposer=DrafterProposer(target, drafter)
    )
    assert len(lengths) > 20
    assert max(count for run in runs for count in run.stats.committed_per_call) > 2


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
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


@pytest.mark.parametrize("rope", [None, LLAMA3], ids=["default", "llama3"])
@torch.no_grad()
def test_transformers_computes_the_same(tmp_path, rope):
    model = build_model(**({"rope_parameters": rope} if rope else {}))
    drafter = build_independent(model, independent_width=40)
    save_as_llama(drafter, tmp_path, model.config)
    llama = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 90))
    expected = drafter.draft_logits(FrozenTarget.from_model(model), drafter(tokens))
    torch.testing.assert_close(llama(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert llama.num_parameters() == sum(weight.numel() for weight in drafter.parameters())
    assert (llama.config.eos_token_id, llama.config.bos_token_id, llama.config.pad_token_id) == (3, 1, 0)


def test_checkpoint_and_target_check(tmp_path):
    model = build_model()
    drafter = build_independent(model, independent_layers=1, independent_width=24)
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path)
    assert isinstance(again, IndependentDrafter)
    assert again.config == drafter.config
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in drafter.state_dict().items())
    check_drafter_matches(again, Target(model))
    with pytest.raises(DrafterError, match="vocab_size 67, this target has 80"):
        check_drafter_matches(again, Target(build_model(vocab_size=80)))


def test_sizes():
    config = build_model(hidden_size=384, num_attention_heads=6, intermediate_size=1024).config
    sizes = IndependentSizes.from_target(config)
    assert (sizes.independent_width, sizes.independent_mlp_width, sizes.independent_layers) == (192, 512, 2)
    assert (sizes.own_block.n_heads, sizes.own_block.head_dim) == (4, 48)
    narrow = IndependentSizes.from_target(config, independent_width=6)
    assert (narrow.own_block.n_heads, narrow.own_block.head_dim) == (3, 2)
    with pytest.raises(DrafterError, match="independent_width must be an even number from 2 up, got 33"):
        IndependentSizes.from_target(config, independent_width=33)
    with pytest.raises(DrafterError, match="independent_layers must be at least 1, got 0"):
        IndependentSizes.from_target(config, independent_layers=0)
