"""Training and decoding compute the same, with and without target layer inference; fast paths equal plain ones."""

import pytest
import torch

from moa_data.moa.drafters.mixture import MoADraftState, moa_objective
from moa_data.moa.drafters.mixture_sizes import MoASizes
from moa_data.moa.drafters.rounds import Draws, Rounds, loss_queries
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.errors import DrafterError
from moa_data.moa.nn import kv as kv_layout
from moa_data.moa.nn import masks
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import FAMILIES, build_model


def activations(model, tokens):
    """Packed KV, hidden state after the norm, and outputs of each decoder layer."""
    cache, states = kv_layout.new_cache(), []
    hooks = [layer.register_forward_hook(lambda _m, _a, out: states.append(out)) for layer in model.model.layers]
    hidden = model.model(tokens, past_key_values=cache, use_cache=True).last_hidden_state
    for hook in hooks:
        hook.remove()
    return kv_layout.cache_kv(cache, 0, tokens.shape[1]), hidden, states


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_target_layers", [0, 1, 3])
@pytest.mark.parametrize("step_bound", [6, 14])  # 14: a block longer than mistral's window
@torch.no_grad()
def test_teacher_forced_features_equal_draft_steps(family, n_target_layers, step_bound):
    model = build_model(family)
    drafter = build_drafter(model, n_target_layers)
    frozen = FrozenTarget.from_model(model, n_target_layers)
    tokens = torch.randint(4, 67, (1, 30))
    kv, _, _ = activations(model, tokens)
    response = (torch.arange(30) >= 11)[None]
    draws = Draws(torch.tensor([step_bound]), torch.zeros(1, dtype=torch.bool), torch.tensor([2]))
    drafted = masks.drafted_positions(response, draws.step_bound, draws.offset)
    trained = drafter(frozen, tokens, kv, Rounds.everywhere(draws, response)).features

    context = masks.last_context(drafted)[0].tolist()
    state = MoADraftState()
    layers = [
        tuple(part.clone() for part in kv_layout.unpack_kv(kv[:, :, 4 - n_target_layers + i], 2))
        for i in range(n_target_layers)
    ]

    def views(n_slots):
        return [(keys[:, :, :n_slots], values[:, :, :n_slots]) for keys, values in layers]

    n_steps = 0
    for position in range(11, 30):
        n_verified = context[position] + 1
        if not drafted[0, position]:
            continue
        if state.memory.lengths[0] < n_verified:
            state.forget_drafts(drafter.config.cross_attention_drafts)
            drafter.extend_memory(state, kv[:, state.memory.lengths[0] : n_verified])
            state.self_attention.crop([n_verified])
            for i, layer in enumerate(layers):  # what the drafter wrote is the target's again
                true = kv_layout.unpack_kv(kv[:, :, 4 - n_target_layers + i], 2)
                for ours, theirs in zip(layer, true, strict=True):
                    ours.copy_(theirs)
            fresh = tokens[:, state.self_attention.lengths[0] : position + 1]
            stepped = drafter.draft_root(state, frozen, fresh, views)
        else:
            level = position - n_verified
            seen = torch.ones(1, 1, level + 1, dtype=torch.bool)
            stepped = drafter.draft_level(state, frozen, tokens[:, position, None], seen, level, views)
        torch.testing.assert_close(stepped[:, 0], trained[:, position], rtol=0, atol=2e-5)
        n_steps += 1
    assert n_steps == int(drafted[0, 11:].sum())


def inputs_for(model, n_target_layers, lengths=(30, 22)):
    tokens = torch.randint(4, 67, (len(lengths), max(lengths)))
    kv, hidden, states = activations(model, tokens)
    response = torch.zeros_like(tokens, dtype=torch.bool)
    for row, length in enumerate(lengths):
        response[row, 7:length] = True
    entering = states[3 - n_target_layers] if n_target_layers else None
    return TrainingInputs(tokens, response, kv, hidden, entering)


@pytest.mark.parametrize("n_target_layers", [0, 2])
def test_loss_on_gathered_positions_equals_all_positions(n_target_layers):
    """The packed queries of the default objective give the loss and gradients of computing every position."""
    model = build_model()
    drafter, frozen = build_drafter(model, n_target_layers), FrozenTarget.from_model(model, n_target_layers)
    inputs = inputs_for(model, n_target_layers)
    draws = Draws(torch.tensor([5, 7]), torch.tensor([True, False]), torch.tensor([1, 0]))
    terms, _ = moa_objective(drafter, frozen, inputs, draws)
    packed = torch.autograd.grad(terms.total, list(drafter.parameters()))

    drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound, draws.offset)
    out = drafter(frozen, inputs.tokens, inputs.kv, Rounds.everywhere(draws, inputs.response_mask))
    from moa_data.moa.nn.losses import feature_loss, forward_kl

    n = drafted.sum() + 1e-5
    kl = (forward_kl(frozen.logits(out.features), frozen.logits(inputs.hidden)) * drafted).sum() / n
    feature = (feature_loss(out.features, inputs.hidden) * drafted).sum() / n
    total = 0.1 * kl + feature
    if n_target_layers:
        entering = (feature_loss(out.cross_attention, inputs.entering_hidden) * drafted).sum() / n
        total = 0.1 * kl + 0.5 * feature + 0.5 * entering
    plain = torch.autograd.grad(total, list(drafter.parameters()))
    torch.testing.assert_close(terms.total, total)
    for got, expected in zip(packed, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * expected.abs().max().item() + 1e-9)


@pytest.mark.parametrize("n_groups", [1, 2, 3])
def test_memory_in_one_go_equals_the_means_over_layers(n_groups):
    """The path that applies the down projection once per mean equals the plain one, in value and gradient."""
    drafter = build_drafter(build_model(), layer_groups=n_groups).double()
    kv = torch.randn(2, 5, 4, 48, dtype=torch.float64)
    groups = drafter.encode_layers(kv).split({1: 4, 2: 2, 3: [2, 1, 1]}[n_groups], dim=2)
    plain = drafter.kv_to_hidden(torch.cat([group.mean(dim=2) for group in groups], dim=-1))
    fast = drafter.encode_memory(kv)
    torch.testing.assert_close(fast, plain)
    used = [*drafter.layer_self_attention.parameters(), *drafter.kv_to_hidden.parameters()]
    expected = torch.autograd.grad(plain.square().sum(), used)
    for got, goal in zip(torch.autograd.grad(fast.square().sum(), used), expected, strict=True):
        torch.testing.assert_close(got, goal)


@pytest.mark.parametrize("most", [1, 4, 10])
def test_memory_in_pieces_equals_memory_in_one_go(monkeypatch, most):
    drafter = build_drafter(build_model()).double()
    kv, used = torch.randn(2, 5, 4, 48, dtype=torch.float64), list(drafter.layer_self_attention.parameters())
    whole = drafter.encode_memory(kv)
    expected = torch.autograd.grad(whole.square().sum(), used)
    sizes, attend = [], drafter.layer_self_attention.attend_self_means

    def attend_to_few(x, *args):
        sizes.append(len(x))
        return attend(x, *args)

    monkeypatch.setattr("moa_data.moa.drafters.mixture._MOST_POSITIONS", most)
    monkeypatch.setattr(drafter.layer_self_attention, "attend_self_means", attend_to_few)
    pieces = drafter.encode_memory(kv)
    assert sum(sizes) == 10
    assert max(sizes) == most
    torch.testing.assert_close(pieces, whole)
    for got, goal in zip(torch.autograd.grad(pieces.square().sum(), used), expected, strict=True):
        torch.testing.assert_close(got, goal)
    states = [MoADraftState(2), MoADraftState(2)]
    with torch.inference_mode():
        drafter.extend_memory(states[0], kv)
        monkeypatch.undo()
        drafter.extend_memory(states[1], kv)
    for got, goal in zip(states[0].memory.view(), states[1].memory.view(), strict=True):
        torch.testing.assert_close(got, goal)


def test_gradient_is_zero_exactly_off_the_loss_positions():
    model = build_model()
    drafter, frozen = build_drafter(model), FrozenTarget.from_model(model)
    inputs = inputs_for(model, 0)
    draws = Draws(torch.tensor([5, 7]), torch.zeros(2, dtype=torch.bool))
    inputs.hidden = inputs.hidden.clone().requires_grad_(True)
    terms, _ = moa_objective(drafter, frozen, inputs, draws)
    (grad,) = torch.autograd.grad(terms.feature, inputs.hidden)
    drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound)
    assert torch.equal(grad.abs().sum(-1) > 0, drafted)
    assert terms.n_positions == int(drafted.sum())


def test_padding_and_batching_change_nothing():
    model = build_model()
    drafter, frozen = build_drafter(model), FrozenTarget.from_model(model)
    inputs = inputs_for(model, 0)
    bound, offset = torch.tensor([5, 7]), torch.tensor([1, 3])
    stairs = torch.tensor([False, True])
    both, _ = moa_objective(drafter, frozen, inputs, Draws(bound, stairs, offset), denominator=1.0)
    alone = []
    for row, length in enumerate((30, 22)):
        one = slice(row, row + 1)
        cut = TrainingInputs(
            inputs.tokens[one, :length], inputs.response_mask[one, :length], inputs.kv[one, :length],
            inputs.hidden[one, :length],
        )  # fmt: skip
        terms, _ = moa_objective(drafter, frozen, cut, Draws(bound[one], stairs[one], offset[one]), denominator=1.0)
        alone.append(terms.total)
    torch.testing.assert_close(both.total, sum(alone), rtol=1e-5, atol=1e-4)


def test_official_form_puts_loss_on_context_positions_too():
    model = build_model()
    drafter, frozen = build_drafter(model), FrozenTarget.from_model(model)
    inputs, draws = inputs_for(model, 0), Draws(torch.tensor([5, 7]), torch.zeros(2, dtype=torch.bool))
    assert moa_objective(drafter, frozen, inputs, draws, official=True)[0].n_positions == (30 - 7) + (22 - 7)


def test_target_layer_inference_needs_its_hidden_state():
    model = build_model()
    drafter, frozen = build_drafter(model, 1), FrozenTarget.from_model(model, 1)
    draws = Draws(None, torch.zeros(2, dtype=torch.bool))
    with pytest.raises(DrafterError, match="hidden state after layer 2"):
        moa_objective(drafter, frozen, inputs_for(model, 0), draws)


def test_initial_norms():
    model = build_model()
    ours = build_drafter(model).self_attention.input_layernorm.weight
    assert torch.equal(ours, torch.ones_like(ours))
    drafter = build_drafter(model)
    drafter.initialize(torch.Generator().manual_seed(0), official=True)
    weight = drafter.self_attention.input_layernorm.weight
    assert abs(weight.mean().item()) < 0.02
    assert 0.01 < weight.std().item() < 0.04


def test_sizes_are_checked_together():
    config = build_model().config
    with pytest.raises(DrafterError, match=r"must divide the 4 query heads.*layer_attention_heads"):
        MoASizes.from_target(config, self_attention_kv_heads=3, layer_attention_kv_heads=7)
    with pytest.raises(DrafterError, match=r"layer_attention_heads \(5\) must divide the KV width 48; try 4"):
        MoASizes.from_target(config, layer_attention_heads=5)
    with pytest.raises(DrafterError, match="between 0 and the target's 4 layers"):
        MoASizes.from_target(config, target_layer_inference=5)
    wide = MoASizes.from_target(build_model(num_attention_heads=6, head_dim=64).config)
    assert (wide.layer_attention_heads, wide.layer_attention_head_dim) == (4, 64), "256 / 6 is no head dim"


def test_loss_queries_packs_left():
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0]]).bool()
    queries, valid = loss_queries(mask)
    assert queries.tolist() == [[1, 3], [2, 0]]
    assert valid.tolist() == [[True, True], [True, False]]


def test_groups_that_are_no_groups_of_layers_are_refused():
    for n_groups in (0, 5):
        with pytest.raises(DrafterError, match=rf"layer_groups \({n_groups}\) must be between 1 and the 4 layers"):
            build_drafter(build_model(), layer_groups=n_groups)
