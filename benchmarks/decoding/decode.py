"""Measures a round of speculative decoding (drafts, verification, the rest) against a plain step.

    python -m benchmarks.decoding.decode --model MODEL --drafter RUN [--prompt-tokens 200]
        [--device cpu] [--dtype float32]
    # Random weights:
    python -m benchmarks.decoding.decode --shape llama-3-8b --device cuda --dtype bfloat16
    # Another drafter:
    python -m benchmarks.decoding.decode --shape llama-3-8b --kind eagle
    # One launch per call:
    python -m benchmarks.decoding.decode --shape llama-3-8b --device cuda --cuda-graphs
    # In 10 GB of memory:
    python -m benchmarks.decoding.decode --shape llama-3-8b --share-weights --parts-only

Drafts and target calls are timed separately and in turns, and the minimum over all repeats counts.
Rounds are timed while decoding. They take turns with transformers' own greedy ``generate``. With
random weights no draft is accepted, which does not change the costs.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.kit.accelerator import device_name, synchronize
from benchmarks.kit.harness import medians, run
from benchmarks.kit.shapes import SHAPES, shape_config
from moa_data.moa.decoding.loop import OnRound, generate_batch
from moa_data.moa.decoding.proposer import DrafterProposer, Proposer
from moa_data.moa.decoding.tree import DraftTree, TreeShape
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.drafters.block import CONTEXTS
from moa_data.moa.drafters.registry import DRAFTERS, drafter_class
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.live import Target
from moa_data.trainer.batches import drafter_sizes
from moa_data.trainer.config import AnyDrafter, MoASettings

FORM = ("cross_attention_drafts", "layer_groups", "layer_stride", "unrotated_keys")
"""Settings of Mixture of Attentions that are not sizes, but change the cost of a draft."""
ROUNDS = (
    TreeShape(1),
    TreeShape(3),
    TreeShape(5),
    TreeShape(4, 4, 16),
    TreeShape(6, 8, 24),
    TreeShape(6, 8, 62),
)

N_VERIFIED = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 63)
BREADTHS = (1, 2, 4, 8)


class _Text:
    """A prompt in the target's KV cache, and a proposer that drafts the tokens after the prompt."""

    def __init__(self, target: Target, proposer: Proposer, prompt: list[int]) -> None:
        self._target, self._cache, self._proposer = target, target.new_cache(), proposer
        self._committed = list(prompt)
        proposer.begin(self._cache)
        self.commit(prompt)

    def verify(self, n_tokens: int) -> Tensor:
        tokens = torch.zeros(1, n_tokens, dtype=torch.int64, device=self._target.device)
        return self._target.logits(self._target.forward(tokens, self._cache))

    def propose(self, shape: TreeShape) -> DraftTree:
        return self._proposer.propose([self._committed], shape)

    def commit(self, tokens: list[int]) -> None:
        hidden = self._target.forward(
            torch.tensor([tokens], device=self._target.device), self._cache
        )
        kept = [range(len(tokens))]
        self._cache.commit(kept)
        self._proposer.observe(hidden, kept)
        self._committed.append(int(self._target.logits(hidden[:, -1]).argmax()))

    def step(self) -> None:
        """Decode one token. A drafter proposes once per target call."""
        self.commit(self._committed[-1:])


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    # The CPU time of a single thread does not include the time that other programs take.
    clock = (
        time.process_time
        if device.type == "cpu" and torch.get_num_threads() == 1
        else time.perf_counter
    )
    synchronize(device)
    began = clock()
    call()
    synchronize(device)
    return clock() - began


@torch.inference_mode()
def part_costs(
    target: Target, proposer: Proposer, prompt: list[int], n_repeats: int, n_verified: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Measure the cost of target calls and of levels of drafts.

    Returns three dicts with milliseconds. The first maps the number of tokens of a target call to
    its cost. The others map the number of drafts in a level to its cost: the cost of the first
    level of a tree, and that of each further level.
    """
    depth = min(3, proposer.max_depth or 3)
    shapes = [TreeShape(levels, breadth) for breadth in BREADTHS for levels in (1, depth)]
    verify_s: dict[int, list[float]] = {
        n: [] for n in n_verified if len(prompt) + n < target.max_positions
    }
    draft_s: dict[TreeShape, list[float]] = {shape: [] for shape in shapes}
    for _ in range(n_repeats):
        text = _Text(target, proposer, prompt)
        text.propose(TreeShape(1))  # The first proposal reads the prompt.
        for n_tokens, found in verify_s.items():
            found.append(_seconds(target.device, partial(text.verify, n_tokens)))
        for shape, found in draft_s.items():
            text.step()
            found.append(_seconds(target.device, partial(text.propose, shape)))
    # Other work on the machine can only add time, so the minimum over all repeats is closest to the
    # cost. A call with fewer tokens cannot cost more than a call with more tokens.
    least = np.minimum.accumulate([min(found) for found in verify_s.values()][::-1])[::-1]
    first, last = (
        {b: min(draft_s[TreeShape(levels, b)]) for b in BREADTHS} for levels in (1, depth)
    )
    return {
        "verify_ms": {n: 1e3 * s for n, s in zip(verify_s, least.tolist(), strict=True)},
        "draft_root_ms": {b: 1e3 * s for b, s in first.items()},
        "draft_level_ms": {
            b: 1e3 * max(0.0, last[b] - first[b]) / max(1, depth - 1) for b in BREADTHS
        },
    }


def random_target(
    shape: str, n_layers: int | None, dtype: torch.dtype, device: str, shares_weights: bool = False
) -> Target:
    """Make a Llama with random weights on the device.

    Args:
        shares_weights: give all layers the weights of the first layer. A model that is too large
            for this machine then needs the memory of one layer only. A call takes as long as with
            separate weights, because a layer is far larger than any cache of the processor.
    """
    build = partial(
        AutoModelForCausalLM.from_config, dtype=dtype, attn_implementation="sdpa",
        trust_remote_code=False
    )  # fmt: skip
    with torch.device(device):
        model = build(shape_config(shape, 1 if shares_weights else n_layers, eos_token_id=None))
    if shares_weights:
        first, config = model, shape_config(shape, n_layers, eos_token_id=None)
        with torch.device("meta"):
            model = build(config)
        for name in ("embed_tokens", "norm", "rotary_emb"):
            setattr(model.model, name, getattr(first.model, name))
        model.lm_head = first.lm_head
        for layer in model.model.layers:
            layer.load_state_dict(first.model.layers[0].state_dict(), assign=True)
    return Target(model.eval().requires_grad_(False))


def random_drafter(
    target: Target, kind: str, n_target_layers: int, context: str | None = None
) -> Drafter:
    """Make a drafter of a kind with random weights.

    Its sizes have the proportions that the authors of this kind published. All other settings are
    the defaults of `train`.
    """
    build = drafter_class(kind)
    form = {name: MoASettings.model_fields[name].default for name in FORM}
    own = {item.name for item in dataclasses.fields(build.config_class)}
    sizes = {name: form[name] for name in FORM if name in own}
    if context is not None:
        sizes["context"] = context
    if n_target_layers:
        sizes["target_layer_inference"] = n_target_layers
    drafter = build(build.config_class.from_target(target.facts, **sizes))
    drafter.initialize(torch.Generator().manual_seed(0))
    return drafter.to(device=target.device, dtype=target.model.dtype).eval()


def read_bytes(target: Target, options: argparse.Namespace) -> int:
    """Return the bytes of activations that training reads per token, before any codec.

    The settings are the defaults of the drafter's kind, with the given context and target layers.
    """
    (settings,) = [
        one for one in (each() for each in get_args(AnyDrafter)) if one.kind == options.kind
    ]
    changes = {"context": options.context, "target_layer_inference": options.target_layers or None}
    settings = settings.model_copy(
        update={key: value for key, value in changes.items() if value is not None}
    )
    facts = target.facts
    reads = drafter_sizes(facts, settings).reads
    n_layers = facts.n_layers if reads.kv_layers is None else len(reads.kv_layers)
    kv = n_layers * 2 * facts.n_kv_heads * facts.head_dim if reads.kv else 0
    n_states = len(reads.fields) - reads.kv + len(reads.outputs)
    return 2 * int(kv + n_states * facts.hidden_size)


def rounds(
    target: Target, drafter: Drafter, prompt: list[int], shape: TreeShape | None, n_tokens: int
) -> dict[str, Any]:
    """Measure the rounds of one generation, in milliseconds.

    Returns the time of a whole round, and of the parts that decoding itself reports.
    """
    ends: list[float] = []
    on_round: OnRound = lambda drafts, accepted: ends.append(time.perf_counter())  # noqa: E731
    proposer = DrafterProposer(target, drafter) if shape else None
    (generation,) = generate_batch(
        target, [prompt], max_new_tokens=n_tokens, proposer=proposer, tree=shape, on_round=on_round
    )
    stats, between = generation.stats, [1e3 * (b - a) for a, b in pairwise(ends)]
    n_calls = stats.n_target_calls
    round_ms = statistics.median(between)
    draft_ms, verify_ms = 1e3 * stats.draft_s / n_calls, 1e3 * stats.verify_s / n_calls
    return {
        "round_ms": round_ms,
        "draft_ms": draft_ms,
        "verify_ms": verify_ms,
        "rest_ms": 1e3
        * (stats.total_s - stats.prefill_s - stats.draft_s - stats.verify_s)
        / n_calls,
        "tokens_per_call": stats.acceptance_length,
        "tokens_per_s": 1e3 * stats.acceptance_length / round_ms,
    }


def transformers_steps(
    target: Target, prompt: list[int], n_tokens: int, is_compiled: bool
) -> dict[str, float]:
    """Measure a step of transformers' greedy ``generate``, in milliseconds.

    Two answers are timed: one with ``n_tokens`` tokens, and one with a single token. The difference
    is divided by the number of additional tokens.

    Args:
        is_compiled: use a static cache, so that transformers compiles its steps on a GPU. This
            takes a minute for a model of 8B.
    """
    model: Any = target.model
    tokens = torch.tensor([prompt], device=target.device)
    own: dict[str, Any] = {"cache_implementation": "static"} if is_compiled else {}
    seconds = [
        _seconds(
            target.device,
            partial(
                model.generate, tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                min_new_tokens=n, max_new_tokens=n, **own,
            ),
        )
        for n in (1, n_tokens)
    ]  # fmt: skip
    step_ms = 1e3 * (seconds[1] - seconds[0]) / (n_tokens - 1)
    return {"round_ms": step_ms, "tokens_per_call": 1.0, "tokens_per_s": 1e3 / step_ms}


def load(options: argparse.Namespace) -> tuple[Target, Drafter]:
    """Load target and drafter, or make them with random weights."""
    dtype = getattr(torch, options.dtype)
    if options.model:
        target = Target.load(options.model, dtype, options.device)
        return target, load_drafter(options.drafter, dtype, target.device)
    target = random_target(
        options.shape, options.layers, dtype, options.device, options.share_weights
    )
    return target, random_drafter(target, options.kind, options.target_layers, options.context)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures."""
    if bool(options.model) != bool(options.drafter):
        raise SystemExit("Give --model and --drafter together, or neither of them.")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    target, drafter = load(options)
    shapes = (None, *options.drafts)
    if options.cuda_graphs:
        target.use_static_calls(options.prompt_tokens + options.max_new_tokens + 128)
    if options.cuda_graphs or options.rounds_only:
        # Warm up with whole generations, so that every size of a target call occurs once. The last
        # rounds of a generation have other sizes than the rounds before them.
        for shape in shapes:
            rounds(target, drafter, [5] * options.prompt_tokens, shape, options.max_new_tokens)
        transformers_steps(
            target,
            [5] * options.prompt_tokens,
            options.max_new_tokens,
            options.transformers_compiled,
        )
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(
        5, target.facts.vocab_size, (options.prompt_tokens,), generator=generator
    ).tolist()
    found: dict[str, Any] = {
        "device": device_name(target.device),
        "n_threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "target": options.model or options.shape,
        "n_layers": target.facts.n_layers,
        "cuda_graphs": options.cuda_graphs,
        "transformers_compiled": options.transformers_compiled,
        "drafter": drafter.kind,
        "context": options.context,
        "target_layers": options.target_layers if not options.model else None,
        "drafter_parameters": sum(weight.numel() for weight in drafter.parameters()),
        "prompt_tokens": options.prompt_tokens,
        "read_bytes_per_token": None if options.model else read_bytes(target, options),
    }
    if not options.rounds_only:
        found |= part_costs(
            target, DrafterProposer(target, drafter), prompt, options.repeats, options.verify
        )
    repeats: dict[str, list[dict[str, float]]] = {}
    for _ in range(0 if options.parts_only else options.repeats):
        for shape in shapes:
            one = rounds(target, drafter, prompt, shape, options.max_new_tokens)
            repeats.setdefault(str(shape or "plain"), []).append(one)
        other = transformers_steps(
            target, prompt, options.max_new_tokens, options.transformers_compiled
        )
        repeats.setdefault("transformers", []).append(other)
    found["rounds"] = {name: medians(runs) for name, runs in repeats.items()}
    return {"figures": found}


if __name__ == "__main__":
    run(
        lambda options: "decode-graphs" if options.cuda_graphs else "decode", measure,
        model=str, drafter=str, layers=int, target_layers=0, device="auto", prompt_tokens=200,
        max_new_tokens=32, repeats=5, verify=N_VERIFIED, share_weights=False, parts_only=False,
        rounds_only=False, shape={"choices": SHAPES, "default": "tiny"},
        kind={"choices": DRAFTERS, "default": "moa"}, context={"choices": CONTEXTS},
        dtype={"choices": ["float32", "bfloat16", "float16"], "default": "float32"},
        cuda_graphs=False, transformers_compiled=False,
        drafts={"nargs": "+", "type": TreeShape.parse, "default": ROUNDS},
    )  # fmt: skip
