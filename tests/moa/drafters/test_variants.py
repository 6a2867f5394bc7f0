"""Without layer self-attention or step bound, teacher-forced, drafts in sight, other keys: training equals decoding."""

import dataclasses

import pytest
import torch

from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.mixture import MoADrafter, moa_objective
from moa_data.moa.drafters.rounds import Draws, Rounds
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.errors import CheckpointError
from moa_data.moa.formats.checkpoint import load_drafter, save_drafter
from moa_data.moa.formats.table import LAYOUTS, write_layout
from moa_data.moa.nn import kv as kv_layout
from moa_data.moa.nn import masks
from moa_data.moa.nn.layers import rotate
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import Target
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import build_model

N_TOKENS, PROMPT = 22, 9
ROUNDS = {
    "bounded": Draws(torch.tensor([5]), torch.zeros(1, dtype=torch.bool), torch.tensor([2])),
    "unbounded": Draws(None, torch.zeros(1, dtype=torch.bool)),
    "teacher-forced": Draws(torch.tensor([5]), torch.zeros(1, dtype=torch.bool), None, (), 0.0, 0.0, 1.0),
    "both": Draws(torch.tensor([5]), torch.zeros(1, dtype=torch.bool), torch.tensor([2]), (), 0.0, 1.0, 0.5),
}


def prefilled(target, tokens):
    cache = target.new_cache()
    target.forward(torch.tensor([tokens]), cache)
    cache.commit([range(len(tokens))])
    return cache


def inputs_for(model, n_layers_read):
    torch.manual_seed(3)
    tokens = torch.randint(4, 67, (1, N_TOKENS))
    cache = kv_layout.new_cache()
    states = []
    hooks = [layer.register_forward_hook(lambda _m, _a, out: states.append(out)) for layer in model.model.layers]
    hidden = model.model(tokens, past_key_values=cache, use_cache=True).last_hidden_state
    for hook in hooks:
        hook.remove()
    response = (torch.arange(N_TOKENS) >= PROMPT)[None]
    kv = kv_layout.cache_kv(cache, 0, N_TOKENS)[:, :, -n_layers_read:]
    return TrainingInputs(tokens, response, kv, hidden, states[2])


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("layer_attention", [True, False])
@pytest.mark.parametrize("unlike_paper", [True, False])
@pytest.mark.parametrize(("family", "n_target_layers"), [("llama", 0), ("llama", 1), ("mistral", 2)])
@torch.inference_mode()
def test_trained_features_equal_draft_steps(rounds, layer_attention, unlike_paper, family, n_target_layers):
    """Each loss position is reached by a decoding session that has verified what the position sees in training."""
    model = build_model(family)
    target, frozen = Target(model), FrozenTarget.from_model(model, n_target_layers)
    ours = {"cross_attention_drafts": unlike_paper, "unrotated_keys": unlike_paper}
    ours["layer_groups"] = 2 if unlike_paper else 1
    drafter = build_drafter(model, n_target_layers, layer_attention=layer_attention, **ours)
    read = MoADrafter.layers_read(n_target_layers, layer_attention)
    assert read == (None if layer_attention else ((-1,), (-1,), (-2, -1))[n_target_layers])
    inputs, draws = inputs_for(model, 4 if read is None else len(read)), ROUNDS[rounds]
    rounds = Rounds.packed(draws, inputs.response_mask)
    trained = drafter(frozen, inputs.tokens, inputs.kv, rounds).features[0]

    tokens, stepped, last_root = inputs.tokens[0].tolist(), [], None
    for query, position in enumerate(rounds.queries[0].tolist()):
        assert rounds.drafted[0, query], "one row has no padding"
        root = int(rounds.context[0, query]) + 1
        if position == root:
            state, cache = drafter.new_state(1), prefilled(target, tokens[:root])
            features = drafter.root_features(state, frozen, [tokens[: root + 1]], cache)
            last_root = root
        else:
            assert root == last_root, "a round goes on where it was left"
            level = position - root
            seen = torch.ones(1, 1, level + 1, dtype=torch.bool)
            step = torch.tensor([[tokens[position]]])
            features = drafter.level_features(state, frozen, step, features, seen, level, cache)
        stepped.append(features[0, 0])
    torch.testing.assert_close(torch.stack(stepped), trained, rtol=0, atol=2e-5)


def test_teacher_forcing_sees_the_predecessor_everywhere():
    response = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 1, 0]])
    drafted, context = masks.teacher_forced_positions(response)
    assert drafted.int().tolist() == [[0, 1, 0, 1, 1], [0, 0, 1, 1, 0]]
    assert context.tolist() == [[0, 0, 1, 2, 3]] * 2


def test_losses_are_on_the_rounds_of_the_draws():
    model = build_model()
    drafter, frozen = build_drafter(model, layer_attention=False), FrozenTarget.from_model(model)
    inputs = inputs_for(model, 1)
    n_response = N_TOKENS - PROMPT
    terms = {name: moa_objective(drafter, frozen, inputs, draws)[0] for name, draws in ROUNDS.items()}
    n_positions = {name: one.n_positions for name, one in terms.items()}
    assert n_positions["unbounded"] == n_positions["teacher-forced"] == n_response
    drafted = masks.drafted_positions(inputs.response_mask, ROUNDS["bounded"].step_bound, ROUNDS["bounded"].offset)
    assert n_positions["bounded"] == int(drafted.sum()) < n_response
    assert n_positions["both"] == n_positions["bounded"] + n_response
    for name, draws in ROUNDS.items():
        weights = MoADrafter.loss_positions(inputs.response_mask, draws, official=False)
        expected = n_positions["bounded"] + 0.5 * n_response if name == "both" else n_positions[name]
        assert float(weights.sum()) == expected
    assert len({float(one.total.detach()) for one in terms.values()}) == len(ROUNDS)


@pytest.mark.parametrize("sees_drafts", [True, False])
@pytest.mark.parametrize("n_target_layers", [0, 2])
def test_two_passes_in_one_forward_are_the_weighted_mean_of_both(n_target_layers, sees_drafts):
    """In value and in gradient; the staircase of the on-policy pass does not reach the teacher-forced one."""
    model = build_model()
    drafter = build_drafter(model, n_target_layers, cross_attention_drafts=sees_drafts)
    frozen = FrozenTarget.from_model(model, n_target_layers)
    inputs = inputs_for(model, 4)
    inputs = TrainingInputs(
        *(part.detach().repeat_interleave(2, dim=0) for part in vars(inputs).values() if isinstance(part, torch.Tensor))
    )
    inputs.response_mask[1, :12] = False
    draws = Draws(torch.tensor([5, 6]), torch.tensor([True, False]), torch.tensor([2, 1]))
    only = Draws(None, torch.zeros(2, dtype=torch.bool), on_policy_weight=0.0, teacher_forced_weight=1.0)
    both = dataclasses.replace(draws, teacher_forced_weight=0.5)
    found = []
    for one in (draws, only, both):
        terms, _ = moa_objective(drafter, frozen, inputs, one)
        gradients = torch.autograd.grad(terms.total, list(drafter.parameters()))
        found.append((terms.n_positions, terms.total, gradients))
    (n_policy, policy, policy_gradients), (n_forced, forced, forced_gradients), (n_both, total, gradients) = found
    assert n_both == n_policy + n_forced
    share = n_policy / (n_policy + 0.5 * n_forced)
    torch.testing.assert_close(total, share * policy + (1 - share) * forced)
    for got, a, b in zip(gradients, policy_gradients, forced_gradients, strict=True):
        torch.testing.assert_close(got, share * a + (1 - share) * b, rtol=1e-3, atol=1e-5 * float(a.abs().max()) + 1e-9)


@pytest.mark.parametrize(
    "sizes",
    [{"layer_attention": False}, {"cross_attention_drafts": True}, {"unrotated_keys": True, "layer_groups": 3}],
    ids=str,
)
@pytest.mark.parametrize("tree", [TreeShape(4), TreeShape(3, 2, 6)], ids=str)
def test_decoding_is_lossless(tree, sizes):
    target = Target(build_model())
    target.eos_token_ids = frozenset()
    drafter = build_drafter(target.model, 1, **sizes)
    prompts = [[5, 9, 31], [7], [11, 12, 13, 14, 15, 16]]
    session = DrafterProposer(target, drafter)
    together = generate_batch(target, prompts, max_new_tokens=12, proposer=session, tree=tree)
    for prompt, got in zip(prompts, together, strict=True):
        assert got.tokens == plain_generate(target, prompt, max_new_tokens=12).tokens
        (alone,) = generate_batch(target, [prompt], max_new_tokens=12, proposer=session, tree=tree)
        assert alone.stats.committed_per_call == got.stats.committed_per_call


@pytest.mark.parametrize("layer_attention", [True, False])
def test_equal_content_makes_equal_memory_wherever_it_stands(layer_attention):
    """With keys before RoPE; with those after it the paper's memory depends on the position."""
    model = build_model()
    for unrotated in (True, False):
        drafter = build_drafter(model, layer_attention=layer_attention, unrotated_keys=unrotated).double()
        keys, values = torch.randn(2, 4, 1, 2, 5, 12, dtype=torch.float64).unbind()
        memories = []
        for first in (0, 40):
            at = torch.arange(first, first + 5)[None]
            rotated = [rotate(layer, drafter.rotary(at)) for layer in keys]
            memories.append(drafter.encode_memory(kv_layout.pack_kv(rotated, list(values)), at))
        difference = (memories[0] - memories[1]).abs().max()
        assert (difference < 1e-5) == unrotated, difference


@torch.inference_mode()
def test_a_round_goes_on_from_verified_positions_alone():
    """Accepted drafts enter the memory as the target's own; rejected ones leave nothing, in one row as in two."""
    target = Target(build_model())
    drafter, frozen = build_drafter(target.model, cross_attention_drafts=True), FrozenTarget.from_model(target.model)
    text = list(range(4, 40))
    for rows in ([text], [text, text[3:]]):
        cache, fresh = target.new_cache(len(rows)), target.new_cache(len(rows))
        state = drafter.new_state(len(rows))
        for n_verified in (8, 9, 12):
            committed = [row[: n_verified + 1 - (len(text) - len(row))] for row in rows]
            for one in (cache, fresh):
                new = [part[length:-1] for part, length in zip(committed, one.lengths, strict=True)]
                width = max(map(len, new))
                target.forward(torch.tensor([part + [0] * (width - len(part)) for part in new]), one)
                one.commit([range(len(part)) for part in new])
            got = drafter.root_features(state, frozen, committed, cache)
            expected = drafter.root_features(drafter.new_state(len(rows)), frozen, committed, fresh)
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
            for level in (1, 2):  # drafts of which none is what comes next
                seen = torch.ones(len(rows), 1, level + 1, dtype=torch.bool)
                wrong = torch.full((len(rows), 1), 60 + level)
                drafter.level_features(state, frozen, wrong, got, seen, level, cache)
        assert state.memory.lengths == [len(part) + 2 for part in committed], "the root and two drafts behind"


def test_checkpoints(tmp_path):
    model = build_model()
    drafter = build_drafter(model, layer_attention=False)
    save_drafter(drafter, tmp_path / "own")
    again = load_drafter(tmp_path / "own")
    assert again.config == drafter.config
    assert not any(name.startswith("layer_self_attention") for name in again.state_dict())
    for name in ("moa", "moa-vllm"):
        with pytest.raises(CheckpointError, match="no layer self-attention"):
            write_layout(drafter, LAYOUTS[name], tmp_path / name, target_config=model.config)
    drafter = build_drafter(model, cross_attention_drafts=True)
    save_drafter(drafter, tmp_path / "drafts")
    assert load_drafter(tmp_path / "drafts").config.cross_attention_drafts
    for name in ("moa", "moa-vllm"):
        with pytest.raises(CheckpointError, match=r"train with --set drafter.cross_attention_drafts=false"):
            write_layout(drafter, LAYOUTS[name], tmp_path / name, target_config=model.config)
    drafter = build_drafter(model, unrotated_keys=True, layer_groups=2)
    save_drafter(drafter, tmp_path / "memory")
    again = load_drafter(tmp_path / "memory").config
    assert (again.unrotated_keys, again.layer_groups) == (True, 2)
    for name in ("moa", "moa-vllm"):
        with pytest.raises(CheckpointError, match=r"drafter.layer_groups=1.*drafter.unrotated_keys=false"):
            write_layout(drafter, LAYOUTS[name], tmp_path / name, target_config=model.config)
