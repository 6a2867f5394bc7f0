"""EAGLE-3: training-time test equals an unrolled drafter and what decoding does, which stays lossless."""

import pytest
import torch

from moa_data.moa.decoding.loop import generate_batch, plain_generate, speculative_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import SamplingConfig, distribution
from moa_data.moa.decoding.tree import StaticTree, TreeShape
from moa_data.moa.drafters.eagle3 import (
    STEP_DECAY,
    Eagle3Drafter,
    Eagle3Sizes,
    attend_with_own_steps,
    default_fused_layers,
)
from moa_data.moa.drafters.rounds import Draws, loss_queries
from moa_data.moa.drafters.training import LossWeights, TrainingInputs
from moa_data.moa.errors import DrafterError
from moa_data.moa.formats.checkpoint import check_drafter_matches, load_drafter, save_drafter
from moa_data.moa.nn import losses, masks
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import Target, layer_outputs
from moa_data.tests.kit.models import FAMILIES, SIZES, build_model

from .test_eagle import random_prompts

TREES = [TreeShape(1), TreeShape(4), TreeShape(3, 3, 8), StaticTree((-1, -1, 0, 0, 2), (0, 1, 0, 1, 0))]
VOCABULARY = SIZES["vocab_size"]
NO_DRAWS = Draws(None, torch.zeros(8, dtype=torch.bool))


def token_counts(seed=0):
    return torch.randint(0, 9, (VOCABULARY,), generator=torch.Generator().manual_seed(seed))


def build_eagle3(model, seed=1, adopts=True, **sizes):
    drafter = Eagle3Drafter(Eagle3Sizes.from_target(model.config, **{"fused_layers": (0, 1)} | sizes))
    drafter.initialize(torch.Generator().manual_seed(seed), std=0.15)
    if adopts:
        drafter.adopt(FrozenTarget.from_model(model), token_counts)
    return drafter.eval()


@torch.no_grad()
def inputs_of(model, tokens, response, layers=(0, 1)):
    with layer_outputs(model, layers) as outputs:
        hidden = model.model(tokens).last_hidden_state
    return TrainingInputs(tokens, response, None, hidden, layer_outputs=tuple(outputs[layer] for layer in layers))


def spread_batch(model, layers=(0, 1)):
    """Two rows of different lengths; the first has two responses."""
    torch.manual_seed(5)
    tokens, at = torch.randint(4, VOCABULARY, (2, 22)), torch.arange(22)
    response = torch.stack((((at >= 1) & (at < 4)) | (at >= 12), (at >= 3) & (at < 17)))
    return inputs_of(model, tokens, response, layers)


def trained_eagle3(target, n_steps=60, **sizes):
    """Taught for a moment on what the target itself says after the prompts of ``random_prompts(7, 7)``."""
    frozen, drafter = FrozenTarget.from_model(target.model), build_eagle3(target.model, test_time_steps=3, **sizes)
    rows = [prompt + plain_generate(target, prompt, max_new_tokens=24).tokens for prompt in random_prompts(7, 7)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    response = torch.zeros_like(tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        response[index, 1 : len(row)] = True
    inputs = inputs_of(target.model, tokens, response)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=8e-3)
    for _ in range(n_steps):
        optimizer.zero_grad()
        drafter.objective(frozen, inputs, NO_DRAWS).total.backward()
        optimizer.step()
    return drafter.eval()


@pytest.fixture(scope="module")
def endless():
    """A target that never ends an answer, and a drafter that is often right."""
    target = Target(build_model(num_hidden_layers=2))
    target.eos_token_ids = frozenset()
    return target, trained_eagle3(target)


def unrolled(drafter, frozen, inputs, row, root, n_steps):
    """Features of one round, token by token, with plain full attention over what it sees: [n_steps, E]."""
    block, features = drafter.midlayer, []
    embeddings = frozen.embed(inputs.tokens[row : row + 1])
    fused = drafter.fc(torch.cat([states[row : row + 1] for states in inputs.layer_outputs], dim=-1))
    stream = torch.cat((embeddings[:, 1 : root + 1], fused[:, :root]), dim=-1)  # slots 0..root-1
    for step in range(n_steps):
        rotation = drafter.rotary(torch.arange(root + step)[None])
        attended = block(stream, rotation, *block.keys_values(stream, rotation), _causal(root + step))
        features.append(attended[:, -1])
        if step < n_steps - 1:
            following = torch.cat((embeddings[:, root + step + 1], features[-1]), dim=-1)
            stream = torch.cat((stream, following[:, None]), dim=1)
    return torch.cat(features)


def _causal(n_slots):
    return torch.ones(1, n_slots, n_slots, dtype=torch.bool).tril()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("draft_vocabulary", [None, 20])
def test_training_time_test_equals_rounds_one_by_one(family, draft_vocabulary):
    """In value and in the gradient of every weight; rounds end with the response they are in."""
    model = build_model(family, num_hidden_layers=2)
    frozen, n_steps = FrozenTarget.from_model(model), 4
    drafter = build_eagle3(model, draft_vocabulary=draft_vocabulary, test_time_steps=n_steps)
    inputs = spread_batch(model)
    terms = drafter.objective(frozen, inputs, NO_DRAWS, LossWeights(forward_kl=0.5), denominator=3.0)
    gradients = torch.autograd.grad(terms.total, list(drafter.parameters()))

    total, first, n_rounds = torch.zeros(()), torch.zeros(()), 0
    for row in range(2):
        for root in range(1, 22):
            n_alive = 0
            while n_alive < n_steps and root + n_alive < 22 and inputs.response_mask[row, root + n_alive]:
                n_alive += 1
            if not n_alive:
                continue
            n_rounds += 1
            features = unrolled(drafter, frozen, inputs, row, root, n_alive)
            goal = frozen.logits(inputs.hidden[row, root : root + n_alive])
            kl = losses.forward_kl(drafter.draft_logits(frozen, features), goal)
            total = total + (kl * STEP_DECAY ** torch.arange(n_alive)).sum()
            first = first + kl[0].detach()
    assert (
        n_rounds == terms.n_positions == int(drafter.loss_positions(inputs.response_mask, NO_DRAWS, False).sum()) > 20
    )
    assert terms.feature is None
    torch.testing.assert_close(terms.total, 0.5 * total / 3.0, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(terms.forward_kl, first / 3.0, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(0.5 * total / 3.0, list(drafter.parameters()))
    for (name, _), got, goal in zip(drafter.named_parameters(), gradients, expected, strict=True):
        torch.testing.assert_close(got, goal, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
        assert goal.abs().max() > 1e-5, name


def test_padding_and_parts_change_nothing(monkeypatch):
    """A longer row beside it, and attention in parts of one row, give the same loss and gradient."""
    model = build_model(num_hidden_layers=2)
    frozen, drafter = FrozenTarget.from_model(model), build_eagle3(model)
    inputs = spread_batch(model)

    def gradients():
        total = drafter.objective(frozen, inputs, NO_DRAWS, denominator=1.0).total
        return total.detach(), torch.autograd.grad(total, list(drafter.parameters()))

    total, whole = gradients()
    monkeypatch.setattr("moa_data.moa.drafters.eagle3._SCORE_BYTES", 1)
    again, parts = gradients()
    torch.testing.assert_close(again, total)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    alone = 0.0
    for row, n_tokens in ((0, 22), (1, 17)):
        own = TrainingInputs(
            inputs.tokens[row : row + 1, :n_tokens], inputs.response_mask[row : row + 1, :n_tokens], None,
            inputs.hidden[row : row + 1, :n_tokens],
            layer_outputs=tuple(states[row : row + 1, :n_tokens] for states in inputs.layer_outputs),
        )  # fmt: skip
        alone += float(drafter.objective(frozen, own, NO_DRAWS, denominator=1.0).total.detach())
    assert float(total) == pytest.approx(alone, rel=1e-5)


def test_attention_to_own_steps_equals_concatenated_keys():
    torch.manual_seed(2)
    q, seen = torch.randn(2, 4, 5, 8), torch.rand(2, 5, 7) < 0.6
    seen[..., 0] = True
    keys, values = torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    own = [(torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)) for _ in range(3)]
    got = attend_with_own_steps(q, keys, values, seen, own)
    everything = [torch.cat([shared, *(pair[i] for pair in own)], dim=2) for i, shared in enumerate((keys, values))]
    mask = torch.cat([seen, *[torch.eye(5, dtype=torch.bool).expand(2, -1, -1)] * 3], dim=-1)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *everything, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_and_validation_equal_training_time_test(family):
    """Step j of a draft round has the features of step j of training, and of validation."""
    target = Target(build_model(family, num_hidden_layers=2))
    frozen, n_steps = FrozenTarget.from_model(target.model), 4
    drafter = build_eagle3(target.model, test_time_steps=n_steps, fused_layers=(0, 1))
    inputs = spread_batch(target.model)
    queries, valid = loss_queries(drafter.loss_positions(inputs.response_mask, NO_DRAWS, False))
    features, reached = drafter.test_time_features(frozen, inputs, queries, valid)
    bound, offset = torch.tensor([5, 4]), torch.tensor([2, 1])
    draws = Draws(bound, torch.zeros(2, dtype=torch.bool), offset)
    validated = drafter.drafted_features(frozen, inputs, draws)
    context = masks.last_context(masks.drafted_positions(inputs.response_mask, bound, offset))
    n_compared = 0
    for row in range(2):
        cache = target.new_cache()
        session = DrafterProposer(target, drafter, frozen)
        session.begin(cache)
        for query, position in zip(validated.features[row], validated.queries[row].tolist(), strict=True):
            step = position - int(context[row, position]) - 1
            place = queries[row].tolist().index(position)
            if position and reached[step, row, place]:
                torch.testing.assert_close(query, features[step, row, place], rtol=0, atol=2e-5)
                n_compared += 1
        for root in (12, 15) if row == 0 else (5, 11):
            tokens = inputs.tokens[row].tolist()
            hidden = target.forward(torch.tensor([tokens[cache.lengths[0] : root]]), cache)
            session.observe(hidden, [range(hidden.shape[1])])
            cache.commit([range(hidden.shape[1])])
            state, drafted = session.state, drafter.root_features(session.state, frozen, [tokens[: root + 1]], cache)
            for step in range(n_steps):
                place = queries[row].tolist().index(root + step)
                assert reached[step, row, place]
                torch.testing.assert_close(drafted[0, 0], features[step, row, place], rtol=0, atol=2e-5)
                seen = torch.ones(1, 1, step + 2, dtype=torch.bool)
                token = inputs.tokens[row, root + step + 1].reshape(1, 1)
                drafted = drafter.level_features(state, frozen, token, drafted, seen, step + 1, cache)
    assert n_compared > 15


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
@pytest.mark.parametrize("tree", TREES[2:], ids=str)
def test_random_drafters_alone_and_in_ragged_batches(family, tree):
    """A vocabulary of five tokens is smaller than what the trees ask for."""
    target = Target(build_model(family, num_hidden_layers=2))
    target.eos_token_ids = frozenset({3, 24, 28, 40})
    drafter = build_eagle3(target.model, draft_vocabulary=5 if family == "llama" else 30)
    prompts = random_prompts(4, 11)
    session = DrafterProposer(target, drafter)
    together = generate_batch(target, prompts, max_new_tokens=9, proposer=session, tree=tree)
    for prompt, got in zip(prompts, together, strict=True):
        assert got.tokens == plain_generate(target, prompt, max_new_tokens=9).tokens
        alone = speculative_generate(target, drafter, None, prompt, max_new_tokens=9, tree=tree)
        assert got.tokens == alone.tokens
        assert got.stats.committed_per_call == alone.stats.committed_per_call


def test_a_long_prompt_in_pieces_hands_over_all_layer_outputs(monkeypatch):
    target = Target(build_model("mistral", num_hidden_layers=2))
    drafter, tokens = build_eagle3(target.model), torch.randint(4, VOCABULARY, (1, 30))
    expected = inputs_of(target.model, tokens, torch.ones(1, 30), drafter.observed_layers)
    monkeypatch.setattr("moa_data.moa.target.live._CHUNK_TOKENS", 7)
    cache = target.new_cache()
    with pytest.raises(DrafterError, match="kept no layer outputs; begin with the proposer before"):
        cache.take_layer_outputs()
    DrafterProposer(target, drafter).begin(cache)
    target.forward(tokens, cache)
    torch.testing.assert_close(cache.take_layer_outputs(), torch.cat(expected.layer_outputs, dim=-1))
    assert not any(layer._forward_hooks for layer in target.model.model.layers)
    with pytest.raises(DrafterError, match="kept no layer outputs"):
        cache.take_layer_outputs()


def test_draft_vocabulary_is_the_most_frequent_tokens():
    model = build_model()
    frozen, counts = FrozenTarget.from_model(model), token_counts()
    drafter = build_eagle3(model, draft_vocabulary=20)
    tokens = drafter.draft_tokens
    assert tokens.tolist() == sorted(sorted(range(VOCABULARY), key=lambda token: (-counts[token], token))[:20])
    assert drafter.t2d.nonzero()[:, 0].tolist() == tokens.tolist()
    features = torch.randn(3, 2, SIZES["hidden_size"])
    with torch.no_grad():
        logits = drafter.draft_logits(frozen, features)
        assert torch.equal(logits[..., tokens], drafter.lm_head(drafter.norm(features)))
    assert torch.isinf(logits).sum() == 3 * 2 * (VOCABULARY - 20)
    full = build_eagle3(model)
    assert full.draft_tokens is None
    assert full.t2d.all()
    assert torch.equal(full.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("shape", [TreeShape(3), TreeShape(2, 3, 5)], ids=str)
def test_sampling_has_the_targets_distribution_also_outside_the_draft_vocabulary(endless, shape):
    """Total variation to the exact distribution of the second token, and of the first."""
    target, _ = endless
    drafter = build_eagle3(target.model, draft_vocabulary=6)
    config, prompt, n_runs = SamplingConfig(temperature=0.9, top_k=12), [5, 9, 11], 600
    runs = generate_batch(
        target, [prompt] * n_runs, max_new_tokens=3, proposer=DrafterProposer(target, drafter, None, config),
        tree=shape, sampling=config, seed=1,
    )  # fmt: skip
    first = distribution(
        target.logits(target.forward(torch.tensor([prompt]), target.new_cache()))[0, -1], prompt, config
    )
    second = torch.zeros_like(first)
    for token in first.nonzero()[:, 0].tolist():
        path = [*prompt, token]
        logits = target.logits(target.forward(torch.tensor([path]), target.new_cache()))[0, -1]
        second += first[token] * distribution(logits, path, config)
    for place, expected in enumerate((first, second)):
        found = torch.bincount(torch.tensor([run.tokens[place] for run in runs]), minlength=VOCABULARY) / n_runs
        assert 0.5 * (found - expected).abs().sum() < 0.12, place
    outside = {run.tokens[1] for run in runs} - set(drafter.draft_tokens.tolist())
    assert len(outside) > 3


def test_penalties_and_seeds_are_shared(endless):
    target, drafter = endless
    drafter = trained_eagle3(target, n_steps=1, draft_vocabulary=10)
    for config in (SamplingConfig(repetition_penalty=1.5), SamplingConfig(repetition_penalty=0.8)):
        plain = plain_generate(target, [5, 9], max_new_tokens=10, sampling=config)
        for tree in TREES[1:]:
            fast = speculative_generate(target, drafter, None, [5, 9], max_new_tokens=10, tree=tree, sampling=config)
            assert fast.tokens == plain.tokens


def test_checkpoint_and_target_check(tmp_path):
    model = build_model()
    drafter = build_eagle3(model, draft_vocabulary=20, fused_layers=(0, 1, 3), target={"weights_sha256": "ab" * 32})
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path)
    assert isinstance(again, Eagle3Drafter)
    assert again.config == drafter.config
    assert again.observed_layers == (0, 1, 3)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in drafter.state_dict().items())
    half = load_drafter(tmp_path, torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(half.d2t, drafter.d2t), "the maps are no weights"
    check_drafter_matches(again, Target(model))
    target, prompt = Target(model), [5, 6, 7]
    runs = [speculative_generate(target, one, None, prompt, max_new_tokens=12) for one in (drafter, again)]
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].stats.committed_per_call == runs[1].stats.committed_per_call
    assert set(drafter.state_dict()) == {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight",
        *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }, "the names of other projects"  # fmt: skip
    assert drafter.midlayer.self_attn.q_proj.in_features == 2 * SIZES["hidden_size"]


def test_default_layers():
    assert default_fused_layers(8) == (1, 3, 4)
    assert default_fused_layers(32) == (1, 15, 28)


def test_unfit_sizes_are_refused():
    model = build_model()
    for sizes, message in (
        ({"fused_layers": None}, "no three layers of a target with 4; choose them with --set drafter.fused_layers"),
        ({"fused_layers": (0, 4)}, "between 0 and 3, got 0,4"),
        ({"fused_layers": (1, 0)}, "ascending decoder layers between 0 and 3, got 1,0"),
        ({"fused_layers": ()}, "got none"),
        ({"draft_vocabulary": 68}, "between 1 and the target's 67 tokens, got 68"),
        ({"test_time_steps": 0}, "test_time_steps must be at least 1, got 0"),
        ({"self_attention_kv_heads": 3}, r"self_attention_kv_heads \(3\) must divide the 4 query heads"),
    ):
        with pytest.raises(DrafterError, match=message):
            build_eagle3(model, adopts=False, **sizes)
    drafter, frozen = build_eagle3(model), FrozenTarget.from_model(model)
    with pytest.raises(DrafterError, match="leave out official_quirks"):
        drafter.initialize(official=True)
    inputs = TrainingInputs(torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8), None, torch.zeros(1, 8, 48))
    with pytest.raises(DrafterError, match="needs the outputs of the target's layers 0, 1, which this batch lacks"):
        drafter.objective(frozen, inputs, NO_DRAWS)
