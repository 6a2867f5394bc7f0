"""DSpark and DFlash equal the official code on every vector.

Compared are blocks, activations, losses, gradients and decoding. A file is named after its config
and case, such as ``a_train_vanilla_conf``; its config has ``a_weights`` and ``a_train_inputs`` in
the same folder. data_block/README.md describes the layout.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import DraftTree, TreeShape
from moa_data.moa.drafters import training as blocks
from moa_data.moa.drafters.block import BlockDrafter
from moa_data.moa.drafters.registry import drafter_class
from moa_data.moa.drafters.training import (
    BlockDraws,
    Draws,
    LossWeights,
    TrainingInputs,
    TrainingStep,
)
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.facts import TargetFacts
from moa_data.moa.targets.live import Target

from . import vectors as common

COMMITTED = Path(__file__).parent / "data_block"
FOLDER = Path(os.environ.get("MOA_BLOCK_ORACLE") or COMMITTED).resolve()
ACTIVATION = 1e-5
"""Largest absolute difference in float32, relative to a tensor's largest value."""
tensors, meta = partial(common.tensors, folder=FOLDER), partial(common.meta, folder=FOLDER)
Vectors = partial(common.Vectors, activation=ACTIVATION, is_relative=True)


def names(case: str) -> list[str]:
    """List the stems of a case's files: ``train`` or ``infer``."""
    stems = sorted(file.stem for file in FOLDER.glob("*.safetensors"))
    return [
        stem
        for stem in stems
        if stem[1:].startswith(f"_{case}_") and not stem.endswith("_train_inputs")
    ]


def under(config: str, prefix: str) -> dict[str, Tensor]:
    """Return the weights of a config whose names begin with a prefix, without the prefix."""
    return common.Vectors(tensors(f"{config}_weights")).starting_with(prefix)


def target_config(config: str) -> Any:
    """Build the transformers config of a config's target."""
    sizes = meta(f"{config}_weights")["sizes"]
    own = (
        "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "intermediate_size", "rms_norm_eps",
    )  # fmt: skip
    return {"qwen3": Qwen3Config, "llama": LlamaConfig}[sizes["target_family"]](
        **{name: sizes[name] for name in own},
        num_hidden_layers=sizes["num_target_layers"],
        rope_parameters={"rope_theta": sizes["rope_theta"], "rope_type": sizes["rope_type"]},
        tie_word_embeddings=False,
    )


def live_target(config: str) -> Target:
    """Build the target of a config with its weights."""
    model: Any = (
        AutoModelForCausalLM.from_config(target_config(config)).eval().requires_grad_(False)
    )
    model.load_state_dict(under(config, "target."))
    return Target(model.float())


def build(name: str) -> tuple[BlockDrafter, FrozenTarget]:
    """Build the drafter of a file and its frozen target."""
    config, sizes, flags = name[0], meta(name)["sizes"], meta(name)["flags"]
    of_target = {
        key.removeprefix("model."): value for key, value in under(config, "target.").items()
    }
    own = {
        "fused_layers": tuple(sizes["target_layer_ids"]),
        "mask_token": sizes["mask_token_id"],
        "block_size": sizes["block_size"],
        "block_layers": sizes["num_draft_layers"],
        "self_attention_mlp_width": sizes["intermediate_size"],
    }
    kind, weights = "dflash", under(config, "zlab.")
    if "markov_head_type" in flags:
        kind, head, has_confidence = "dspark", flags["markov_head_type"], flags["confidence_head"]
        own |= {
            "sample_from_anchor": True,
            "markov_head": head,
            "markov_rank": sizes["markov_rank"],
        }
        own |= {
            "confidence_head": has_confidence,
            "confidence_with_markov": flags["confidence_head_with_markov"],
        }
        heads = under(config, f"head.{head}.").items()
        weights = under(config, "draft.")
        weights |= {
            key: value
            for key, value in heads
            if has_confidence or not key.startswith("confidence_head.")
        }
    facts = TargetFacts.of(target_config(config))
    drafter: Any = drafter_class(kind)(drafter_class(kind).config_class.from_target(facts, **own))
    drafter.load_state_dict(weights)
    return drafter, FrozenTarget(facts, of_target, 0)


def inputs_of(config: str, drafter: BlockDrafter, loss_mask: Tensor, rows: slice) -> TrainingInputs:
    """Return rows of a config's batch as a store gives them.

    The embedding is left out, because it follows from the tokens.
    """
    found = tensors(f"{config}_train_inputs")
    states = found["H"][rows].split(drafter.config.hidden_size, dim=-1)
    layers = tuple(
        part for part, layer in zip(states, drafter.config.fused_layers, strict=True) if layer >= 0
    )
    hidden = found["h_last"][rows]
    return TrainingInputs(
        found["input_ids"][rows], loss_mask[rows], None, hidden, layer_outputs=layers
    )


def check_blocks(
    vectors: common.Vectors, drafter: BlockDrafter, frozen: FrozenTarget, inputs: TrainingInputs
) -> Draws:
    """Compare blocks: inputs, positions, masks, labels, weights; return draws of these blocks."""
    size, n_tokens = drafter.config.block_size, inputs.tokens.shape[1]
    keep, given = vectors["block_keep_mask"], vectors["anchor_positions"]
    draws = Draws(None, torch.zeros(len(keep), dtype=torch.bool))
    every, is_candidate = blocks.draw_anchors(inputs.response_mask, draws)
    for row, own in enumerate(keep):
        assert set(given[row][own].tolist()) <= set(every[row][is_candidate[row]].tolist())
    draws.blocks = BlockDraws(drafter.config.n_drafts, anchors=torch.where(keep, given, -1))
    anchors, valid = blocks.draw_anchors(inputs.response_mask, draws)
    vectors.equal("anchor_positions", anchors)
    vectors.equal("block_keep_mask", valid)
    of_queries = keep.repeat_interleave(size, dim=1)
    slots = drafter.slots(frozen, inputs.tokens.gather(1, anchors))
    if "block_input_ids" in vectors.tensors:
        assert torch.equal(slots[of_queries], frozen.embed(vectors["block_input_ids"])[of_queries])
    vectors.equal("block_inputs", slots, of_queries)
    positions = blocks.draft_positions(anchors, size).flatten(1)
    vectors.equal(
        "position_ids", torch.cat((torch.arange(n_tokens).expand(len(keep), -1), positions), dim=1)
    )
    mask = blocks.block_mask(anchors, valid, size, n_tokens).dense
    vectors.equal("attention_mask", mask & of_queries[..., None])
    labels = (blocks.draft_positions(anchors, size) + 1).clamp(max=n_tokens - 1)
    vectors.equal("target_ids", inputs.tokens.gather(1, labels.flatten(1)).view_as(labels), keep)
    vectors.equal("prev_token_ids", drafter.tokens_before(inputs.tokens, anchors), keep)
    return draws


def check_forward(
    vectors: common.Vectors, drafter: BlockDrafter, frozen: FrozenTarget, inputs: TrainingInputs
) -> Tensor:
    """Compare activations from the context to the confidence; return each slot's acceptance."""
    keep, anchors = vectors["block_keep_mask"], vectors["anchor_positions"]
    of_queries = keep.repeat_interleave(drafter.config.block_size, dim=1)
    outputs: list[Tensor] = []
    for block in drafter.blocks:

        def finish(x: Tensor, attended: Tensor, own: Any = block.finish) -> Tensor:
            outputs.append(own(x, attended))
            return outputs[-1]

        vars(block)["finish"] = finish
    hidden = drafter.hidden_at_anchors(frozen, inputs, anchors, keep)
    for block in drafter.blocks:
        del vars(block)["finish"]
    is_text = inputs.hidden.any(dim=-1)
    context = drafter.context(
        frozen, inputs.tokens, drafter.project(torch.cat(inputs.layer_outputs, dim=-1))
    )
    vectors.close("H_ctx", context, is_text)
    for index, output in enumerate(outputs):
        vectors.close(f"layer_out.{index}", output, of_queries)
    vectors.close("final_hidden", hidden, keep)
    vectors.close("base_logits", frozen.logits(hidden), keep)
    features = drafter.make_features(hidden, drafter.tokens_before(inputs.tokens, anchors))
    logits = drafter.draft_logits(frozen, features)
    vectors.close("draft_logits", logits, keep)
    taught = blocks.draft_positions(anchors, drafter.config.n_drafts).clamp(
        max=inputs.tokens.shape[1] - 2
    )
    rows = torch.arange(len(keep))[:, None, None]
    target = frozen.logits(inputs.hidden[rows, taught])
    vectors.close("target_logits", target, keep)
    accepted = 1 - 0.5 * (logits.softmax(dim=-1) - target.softmax(dim=-1)).abs().sum(dim=-1)
    vectors.close("accept_rate", accepted.clamp(0, 1), keep)
    if (guess := drafter.confidence_logits(features)) is not None:
        vectors.close("confidence_logits", guess, keep)
    return accepted.detach()


def check_losses(
    vectors: common.Vectors, drafter: BlockDrafter, frozen: FrozenTarget,
    inputs: TrainingInputs, draws: Draws,
    flags: Any, total_weight: float | None = None,
) -> Tensor:  # fmt: skip
    """Compare the weights and sums of each loss term, and the loss; return the loss.

    ``total_weight`` is the sum over all ranks, if there are several.
    """
    anchors, valid = blocks.draw_anchors(inputs.response_mask, draws)
    chosen = BlockDraws(
        draws.blocks.n_drafts, None, flags["loss_decay_gamma"] or 0.0, draws.blocks.anchors
    )
    shares = blocks.draft_weights(inputs.response_mask, anchors, valid, chosen)
    vectors.equal("eval_mask", shares > 0)
    vectors.close("loss_weights", shares)
    own = Draws(None, draws.staircase_rows, blocks=chosen)
    torch.testing.assert_close(
        drafter.loss_positions(inputs.response_mask, own).sum(), shares.sum()
    )
    own_weights = {"cross_entropy": flags["ce_loss_alpha"], "l1": flags["l1_loss_alpha"]}
    weights = LossWeights(forward_kl=0.0, **own_weights, confidence=flags["confidence_head_alpha"])
    sums = drafter.objective(frozen, TrainingStep(inputs, own, weights, denominator=1.0))
    for name, key in (("cross_entropy", "ce"), ("l1", "l1"), ("confidence", "confidence")):
        is_used = getattr(weights, name) > 0
        vectors.close(f"{key}_den", shares.sum() if is_used else torch.zeros(()))
        vectors.close(f"{key}_num", sums[f"{name}_loss"] if is_used else torch.zeros(()))
    denominator = None if total_weight is None else (total_weight + 1e-6) / flags["world_size"]
    terms = drafter.objective(frozen, TrainingStep(inputs, own, weights, denominator))
    vectors.close("loss", terms["loss"])
    return terms["loss"]


@pytest.mark.parametrize("name", names("train"))
def test_training(name: str) -> None:
    """Training equals the official code, on one rank and on several.

    Denominators are sums over ranks, so that the mean of the ranks' gradients is the gradient of
    the pooled loss.
    """
    flags, found, (drafter, frozen) = meta(name)["flags"], tensors(name), build(name)
    n_ranks, whole = (
        flags["world_size"],
        Vectors(found, unread=[key for key in found if key.startswith("rank")]),
    )
    loss_mask, total_weight, ranks = whole["loss_mask"], None, [whole]
    if n_ranks > 1:
        ranks = [
            Vectors(common.Vectors(found).starting_with(f"rank{rank}.")) for rank in range(n_ranks)
        ]
        total_weight = sum(vectors["loss_weights"].sum().item() for vectors in ranks)
    losses = []
    for rank, vectors in enumerate(ranks):
        inputs = inputs_of(
            name[0], drafter, loss_mask, slice(rank, rank + 1) if n_ranks > 1 else slice(None)
        )
        draws = check_blocks(vectors, drafter, frozen, inputs)
        accepted = check_forward(vectors, drafter, frozen, inputs)
        losses.append(check_losses(vectors, drafter, frozen, inputs, draws, flags, total_weight))
    torch.stack(losses).mean().backward()
    assert whole.gradients(drafter) in (set(), set(dict(drafter.named_parameters())))
    for vectors in (*ranks, whole):
        vectors.all_read()
    if n_ranks == 1:
        supervised, metrics = whole["eval_mask"].bool(), meta(name)["metrics"]
        reached = (accepted.clamp(0, 1) * supervised).cumprod(dim=-1)
        length = (1 + reached.sum(dim=-1)[supervised.any(dim=-1)]).mean().item()
        assert length == pytest.approx(metrics["train/tau_probabilistic"], rel=1e-5)
        _, is_candidate = blocks.draw_anchors(
            inputs.response_mask, Draws(None, draws.staircase_rows)
        )
        assert is_candidate.sum().item() / len(is_candidate) == metrics["train/valid_anchors_abs"]


class Rounds(DrafterProposer):
    """Record what each round drafts, first without and then with the cut by confidence."""

    def __init__(self, target: Target, drafter: BlockDrafter, cut_below: float) -> None:
        super().__init__(target, drafter)
        self.block_drafter, self._cut_below = drafter, cut_below
        self.found: list[dict[str, Any]] = []

    def propose(self, committed: Sequence[list[int]], shape: TreeShape) -> DraftTree:
        state = self.state
        facts = {
            "start": len(committed[0]) - 1,
            "cached": state.n_true[0],
            "new": sum(map(len, state.fresh[0])),
        }
        drafted = (
            super().propose(committed, TreeShape(self.block_drafter.config.n_drafts)).tokens[0]
        )
        hidden = state.hidden[0].clone()
        before = torch.cat((torch.tensor(committed[0][-1:]), drafted[:-1]))
        features = self.block_drafter.make_features(hidden, before)
        best = self.block_drafter.draft_logits(self.frozen, features).topk(2).values
        cut = super().propose(committed, TreeShape(shape.depth, cut_below=self._cut_below))
        facts |= {
            "drafted": drafted, "hidden": hidden, "kept": cut.n_nodes,
            "gap": best[:, 0] - best[:, 1],
            "confidence": self.block_drafter.confidence_logits(features),
        }  # fmt: skip
        self.found.append(facts)
        return cut


class Decoded:
    """Decode a prompt so far that the length limit cuts no round of the official loop."""

    def __init__(
        self, target: Target, drafter: BlockDrafter, prompt: list[int], flags: dict[str, Any]
    ) -> None:
        depth = drafter.config.n_drafts
        self.proposer = Rounds(target, drafter, flags.get("confidence_threshold", 0.0))
        self.committed: list[list[int]] = []
        self.accepted: list[int] = []
        self.tokens = generate_batch(
            target,
            [prompt],
            max_new_tokens=flags["max_new_tokens"] + 2 * depth + 2,
            proposer=self.proposer,
            tree=TreeShape(depth),
            on_tokens=self._note,
        )[0].tokens

    def _note(self, tokens: list[int], drafted: list[bool]) -> None:
        self.committed.append(tokens)
        self.accepted.append(sum(drafted))

    def compare(self, vectors: common.Vectors, number: int, round_: int) -> None:
        """Compare round ``number`` of ours with round ``round_`` of the file."""
        facts = self.proposer.found[number]
        for key, fact in (
            ("round_start", "start"),
            ("round_cached", "cached"),
            ("round_ctx_new", "new"),
        ):
            assert int(vectors[key][round_]) == facts[fact], key
        assert torch.equal(vectors["drafted"][round_], facts["drafted"])
        if "kept" in vectors.tensors:
            assert int(vectors["kept"][round_]) == facts["kept"]
        committed = vectors["committed"][round_]
        assert self.committed[1 + number] == committed[committed >= 0].tolist()
        assert self.accepted[1 + number] == int(vectors["accepted"][round_])
        own = {
            "draft_hidden": facts["hidden"],
            "draft_gap": facts["gap"],
            "confidence_logits": facts["confidence"],
        }
        for key, got in own.items():
            if key in vectors.tensors:
                goal = vectors[key][round_]
                # The first slot drafts nothing.
                goal = goal[1:] if len(goal) > len(got) else goal
                atol = ACTIVATION * max(1.0, goal.abs().max().item())
                torch.testing.assert_close(got, goal, rtol=0, atol=atol)


@pytest.mark.parametrize("name", names("infer"))
@torch.no_grad()
def test_decoding(name: str) -> None:
    """Each round equals the official loop's, and so does the text."""
    # Not read are facts about the target's logits, and a statistic.
    vectors = Vectors(tensors(name), unread=["verify_gap", "effective"])
    flags, target, (drafter, _), n_done = meta(name)["flags"], live_target(name[0]), build(name), 0
    for index, n_prompt in enumerate(vectors["prompt_lengths"].tolist()):
        prompt = vectors["prompts"][index, :n_prompt].tolist()
        stops = vectors["stop_ids"][index].tolist() if "stop_ids" in vectors.tensors else []
        target.eos_token_ids = frozenset(stop for stop in stops if stop >= 0)
        decoded = Decoded(target, drafter, prompt, flags)
        output = vectors["output_ids"][index]
        expected = output[output >= 0].tolist()
        assert prompt + decoded.tokens[: len(expected) - n_prompt] == expected
        target.eos_token_ids = frozenset()
        plain = plain_generate(target, prompt, max_new_tokens=flags["max_new_tokens"]).tokens
        greedy = vectors["greedy_ids"][index]
        assert prompt + plain == greedy[greedy >= 0].tolist()
        rounds = (vectors["round_prompt"] == index).nonzero()[:, 0].tolist()
        for number, round_ in enumerate(rounds):
            decoded.compare(vectors, number, round_)
        n_done += len(rounds)
    assert n_done == len(vectors["round_prompt"])
    vectors.all_read()


def test_every_file_is_read() -> None:
    stems = {file.stem for file in FOLDER.iterdir() if file.name != "README.md"}
    known = {*names("train"), *names("infer")}
    known |= {f"{name[0]}_{rest}" for name in known for rest in ("weights", "train_inputs")}
    assert stems == known
    assert any("train" in name for name in stems)
    assert any("infer" in name for name in stems)
    assert sum(file.stat().st_size for file in COMMITTED.iterdir()) < 1.4e6
