"""Chain and tree decoding equal the official code on every decoding vector: logits, trees, acceptances, tokens."""

import pytest
import torch
from transformers import LlamaForCausalLM

from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape, ancestors
from moa_data.moa.formats.checkpoint import build_drafter
from moa_data.moa.formats.moa import from_official_keys, sizes_from_official
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import Target

from .test_moa import ACTIVATION, ORACLE, meta, set_prefix, target_config, tensors

CASES = sorted(file.stem for file in ORACLE.glob("*moa_infer_*.safetensors"))


def build(name):
    """Target, drafter and its frozen pieces from the weights beside a vector file, float32."""
    prefix = set_prefix(name)
    weights = dict(tensors(f"{prefix}moa_weights"))
    if "_trained_" in name:
        weights |= tensors(f"{prefix}moa_trained_drafter_weights")
    config = target_config(meta(name)["target"])
    model = LlamaForCausalLM(config).eval()
    own = {key: value for key, value in weights.items() if not key.startswith(("model.", "lm_head."))}
    model.load_state_dict({key: value for key, value in weights.items() if key not in own})
    drafter = build_drafter(sizes_from_official(own, config), from_official_keys(own))
    return Target(model), drafter, FrozenTarget.from_model(model, 0)


@pytest.mark.parametrize("name", CASES)
def test_decoding_case(name, monkeypatch):
    settings, expected = meta(name), tensors(name)
    target, drafter, frozen = build(name)
    depth, breadth = settings["depth"] - 1, settings["breadth"]
    shape = TreeShape(depth, breadth, settings["total_tokens"])
    calls, rounds = [], []
    real_root, real_level, real_propose = drafter.draft_root, drafter.draft_level, DrafterProposer.propose

    def keep(call):
        def draft(*args, **kwargs):
            features = call(*args, **kwargs)
            calls.append(frozen.logits(features)[0])
            return features

        return draft

    def propose(self, committed, shape):
        tree = real_propose(self, committed, shape)
        rounds.append((len(committed[0]) - 1, committed[0][-1], tree))
        return tree

    monkeypatch.setattr(drafter, "draft_root", keep(real_root))
    monkeypatch.setattr(drafter, "draft_level", keep(real_level))
    monkeypatch.setattr(DrafterProposer, "propose", propose)

    for run in settings["runs"]:
        case = {key.split(".", 1)[1]: v for key, v in expected.items() if key.startswith(f"p{run['prompt']}.")}
        prompt = case["prompt"].tolist()
        target.eos_token_ids = frozenset(run["eos_token_id"])
        calls.clear()
        rounds.clear()
        # Room for whole trees up to the end: the official code drafts beyond its limit and cuts afterwards.
        (generation,) = generate_batch(
            target,
            [prompt],
            max_new_tokens=run["max_new_tokens"] + depth + 2,
            proposer=DrafterProposer(target, drafter, frozen),
            tree=shape,
        )
        output = case["output"].tolist()
        assert (prompt + generation.tokens)[: len(output)] == output
        plain = plain_generate(target, prompt, max_new_tokens=run["max_new_tokens"])
        assert plain.tokens == output[len(prompt) :]

        n_rounds = len(case["accepted"])
        assert generation.stats.committed_per_call[: n_rounds - 1] == case["accepted"].tolist()[:-1]
        for index in range(n_rounds):
            n_verified, root, tree = rounds[index]
            assert n_verified == case["valid_tokens"][index]
            assert [root, *tree.tokens[0].tolist()] == case["tree_tokens"][index].tolist()
            assert (tree.parents[0] + 1).tolist() == case["tree_parent"][index][1:].tolist()
            assert torch.equal(ancestors(tree.parents)[0], case["tree_allowed"][index].bool())
        for got, wanted in zip(calls[: n_rounds * depth], case["draft_logits"], strict=True):
            torch.testing.assert_close(got, wanted[: len(got)], rtol=0, atol=ACTIVATION)
