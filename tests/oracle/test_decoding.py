"""Chain and tree decoding equal the official code on every decoding vector.

Compared are logits, trees, acceptances and tokens.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import DraftTree, TreeShape, ancestors
from moa_data.moa.targets.live import Target

from .vectors import Vectors, load_official, meta, names, set_of, target_config, tensors, weights_of

UNREAD = {"draft_cross_len", "draft_position", "scores", "selected", "tree_depth", "verify_logits"}


@pytest.mark.parametrize("name", names("moa_infer_"))
def test_decoding(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, config = meta(name), target_config(name)
    expected = Vectors(
        tensors(name), unread=(key for key in tensors(name) if key.split(".")[1] in UNREAD)
    )
    own = weights_of(
        f"{set_of(name)}moa_{'trained_drafter_' if '_trained_' in name else ''}weights",
        of_target=False,
    )
    model, drafter = LlamaForCausalLM(config).eval(), load_official(tmp_path, own, config)
    model.load_state_dict(weights_of(f"{set_of(name)}moa_weights", of_target=True))
    target = Target(model)
    depth = settings["depth"] - 1
    shape = TreeShape(depth, settings["breadth"], settings["total_tokens"])
    calls: list[Tensor] = []
    rounds: list[tuple[int, int, DraftTree]] = []
    real_propose = DrafterProposer.propose

    def keep(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draft(*args: Any) -> Tensor:
            features = call(*args)
            calls.append(target.logits(features)[0])
            return features

        return draft

    def propose(
        self: DrafterProposer, committed: Sequence[list[int]], shape: TreeShape
    ) -> DraftTree:
        tree = real_propose(self, committed, shape)
        rounds.append((len(committed[0]) - 1, committed[0][-1], tree))
        return tree

    monkeypatch.setattr(drafter, "draft_root", keep(drafter.draft_root))
    monkeypatch.setattr(drafter, "draft_level", keep(drafter.draft_level))
    monkeypatch.setattr(DrafterProposer, "propose", propose)

    for run in settings["runs"]:
        case = expected.starting_with(f"p{run['prompt']}.")
        prompt, output = case["prompt"].tolist(), case["output"].tolist()
        target.eos_token_ids = frozenset(run["eos_token_id"])
        calls.clear()
        rounds.clear()
        # Leaves room for whole trees up to the end: the official code drafts beyond its limit and
        # truncates afterwards.
        (generation,) = generate_batch(
            target,
            [prompt],
            max_new_tokens=run["max_new_tokens"] + depth + 2,
            proposer=DrafterProposer(target, drafter),
            tree=shape,
        )
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
        if "draft_logits" in case:
            for got, wanted in zip(calls[: n_rounds * depth], case["draft_logits"], strict=True):
                torch.testing.assert_close(got, wanted[: len(got)], rtol=0, atol=2e-5)
    expected.all_read()
