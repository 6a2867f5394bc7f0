"""Builds drafters with random or briefly trained weights, and the activations to train them on."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.drafters.registry import drafter_class
from moa_data.moa.drafters.training import Draws, LossTerms, TrainingInputs, TrainingStep
from moa_data.moa.nn.kv import cache_layers, new_cache, pack_kv
from moa_data.moa.nn.layers import no_cache
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.facts import TargetFacts
from moa_data.moa.targets.families import layer_outputs, text_model
from moa_data.moa.targets.live import Target

from .models import SIZES

NO_DRAWS = Draws(None, torch.zeros(8, dtype=torch.bool))
"""Draws without a step bound and without a staircase, for up to eight rows."""
PAPER = {"cross_attention_drafts": False, "layer_groups": 1, "unrotated_keys": False}
"""Sizes of the paper's Mixture of Attentions, for the settings whose defaults differ from it."""


def token_counts(seed: int = 0) -> Tensor:
    """Return made-up frequencies for the tokens of ``build_model``."""
    return torch.randint(
        0, 9, (SIZES["vocab_size"],), generator=torch.Generator().manual_seed(seed)
    )


def build(kind: str, model: Any, seed: int = 1, std: float = 0.15, **sizes: Any) -> Any:
    """Return a drafter of a kind for a model, with random weights."""
    drafter_type = drafter_class(kind)
    if kind in ("eagle3", "dspark", "dflash"):  # their default layers need a deeper target
        sizes = {"fused_layers": (0, 1)} | sizes
    drafter = drafter_type(
        drafter_type.config_class.from_target(TargetFacts.of_model(model), **sizes)
    )
    generator = torch.Generator().manual_seed(seed)
    drafter.initialize(generator, std=std)
    drafter.adopt(frozen_for(drafter, model), token_counts)
    if kind == "medusa":  # its heads are initialized with identities and zeros
        with torch.no_grad():
            for weight in drafter.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=std)
    return drafter.eval()


build_eagle, build_eagle3, build_glide = (
    partial(build, "eagle"),
    partial(build, "eagle3"),
    partial(build, "glide"),
)
build_medusa, build_independent = partial(build, "medusa"), partial(build, "independent")


def build_drafter(
    model: Any, n_target_layers: int = 0, seed: int = 1, std: float = 0.15, **sizes: Any
) -> MoADrafter:
    """Return a MoA drafter in the paper's form for a model, with random weights."""
    drafter: MoADrafter = build(
        "moa", model, seed, std, target_layer_inference=n_target_layers, **PAPER | sizes
    )
    return drafter


def forward_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Compute the loss by its plain definition, [..., V] -> [...].

    Tokens with probability 0 on either side contribute 0.
    """
    probability = target_logits.softmax(dim=-1)
    log_draft = draft_logits.log_softmax(dim=-1)
    log_draft = log_draft.masked_fill(torch.isinf(log_draft), 0.0)
    return -(probability * log_draft).sum(dim=-1)


def encode_layers(drafter: MoADrafter, kv: Tensor) -> Tensor:
    """Apply layer self-attention as the paper defines it: [B, T, L, D] -> [B, T, L, D].

    L counts all layers of the target's keys and values.
    """
    rotation = drafter.layer_rotary(torch.arange(kv.shape[2])[None])
    out = drafter.layer_self_attention.attend_cached(kv.flatten(0, 1), rotation, no_cache, None)
    encoded: Tensor = out.unflatten(0, kv.shape[:2])
    return encoded


def frozen_for(drafter: Drafter, model: Any) -> FrozenTarget:
    """Return the frozen target weights that a drafter needs."""
    return FrozenTarget.from_model(model, drafter.config.target_layer_inference)


@torch.no_grad()
def stored(drafter: Drafter, model: Any, tokens: Tensor, response: Tensor) -> TrainingInputs:
    """Return exactly the activations of a batch that a store would provide to this drafter."""
    facts = TargetFacts.of_model(model)
    n_layers = facts.n_layers
    reads, every = drafter.config.reads, range(n_layers)
    cache = new_cache([shape is None for shape in facts.kv_shapes]) if reads.kv else None
    with layer_outputs(model, every) as outputs:
        hidden = text_model(model)(
            tokens, past_key_values=cache, use_cache=reads.kv
        ).last_hidden_state
    states = {f"hidden/layer_{layer}": outputs[layer] for layer in every} | {"hidden/last": hidden}
    found: dict[str, Any] = {
        name: states[field] for name, field in reads.fields.items() if field != "kv"
    }
    if cache is not None:
        layers = sorted(layer for group in facts.kv_groups for layer in group.layers)
        made = [pack_kv(*cache_layers(cache, [layer])) for layer in layers]  # [B, T, 1, width]
        widest = max(one.shape[3] for one in made)
        kv = torch.cat([pad(one, (0, widest - one.shape[3])) for one in made], dim=2)
        found["kv"] = kv if reads.kv_layers is None else kv[:, :, list(reads.kv_layers)]
    found["layer_outputs"] = tuple(outputs[layer] for layer in reads.outputs)
    found = {"kv": None, "hidden": torch.full_like(hidden, torch.nan)} | found
    return TrainingInputs(tokens, response, **found)


def batch_with(
    drafter: Drafter, model: Any, shape: tuple[int, int], *responses: tuple[int, int, int]
) -> TrainingInputs:
    """Return the :func:`stored` activations of random tokens [B, T].

    Args:
        responses: (row, start, stop) of each response.
    """
    tokens = torch.randint(4, SIZES["vocab_size"], shape)
    response = torch.zeros_like(tokens, dtype=torch.bool)
    for row, start, stop in responses:
        response[row, start:stop] = True
    return stored(drafter, model, tokens, response)


def assert_loss(
    drafter: Drafter, frozen: FrozenTarget, step: TrainingStep, expected: Tensor
) -> LossTerms:
    """Compare a loss and its gradients with a plain reference, and return its terms."""
    terms, weights = drafter.objective(frozen, step), dict(drafter.named_parameters())
    torch.testing.assert_close(terms["loss"], expected, rtol=1e-5, atol=1e-6)
    goals = torch.autograd.grad(expected, list(weights.values()), materialize_grads=True)
    for name, got, goal in zip(
        weights, torch.autograd.grad(terms["loss"], list(weights.values())), goals, strict=True
    ):
        torch.testing.assert_close(got, goal, rtol=1e-4, atol=2e-6, msg=f"{name}: {{}}".format)
    return terms


def weight_of_positions(drafter: Drafter, frozen: FrozenTarget, step: TrainingStep) -> float:
    """Return the sum of the weights of loss positions.

    By default, the loss is divided by this sum plus 1e-5.
    """
    summed = drafter.objective(frozen, replace(step, denominator=1.0))["loss"]
    mean = drafter.objective(frozen, replace(step, denominator=None))["loss"]
    return float((summed / mean).detach()) - 1e-5


@torch.inference_mode()
def contexts_of(drafter: Any, target: Target, text: list[int]) -> Tensor:
    """Return the drafter's contexts [n, W] of all positions of a text, outside of decoding."""
    cache = target.new_cache()
    cache.watched_layers = drafter.observed_layers
    hidden = target.forward(torch.tensor([text]), cache)
    if drafter.observed_layers:
        hidden = cache.take_layer_outputs()
    cache.commit([range(len(text))])
    found: Tensor = drafter.encode_context(
        hidden[0], cache.packed([0], len(text))[0], torch.arange(len(text))
    )
    return found


def answers(target: Target, prompts: Sequence[list[int]], n_new: int = 24) -> tuple[Tensor, Tensor]:
    """Return prompts with the target's greedy answers.

    Returns:
        The tokens [B, T], padded on the right, and a mask of all tokens but the first of each row.
    """
    written = generate_batch(target, prompts, max_new_tokens=n_new)
    rows = [prompt + generation.tokens for prompt, generation in zip(prompts, written, strict=True)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    response = torch.zeros_like(tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        response[index, 1 : len(row)] = True
    return tokens, response


@lru_cache(maxsize=8)
def answers_once(
    target: Target, prompts: tuple[tuple[int, ...], ...], n_new: int = 24
) -> tuple[Tensor, Tensor]:
    """Return :func:`answers`, which several drafters of one target learn from."""
    return answers(target, [list(prompt) for prompt in prompts], n_new)


def teach(
    drafter: Any, target: Target, prompts: list[list[int]], n_steps: int, n_new: int = 24
) -> Any:
    """Train a drafter for a few steps on the target's own answers to some prompts."""
    answered = answers_once(target, tuple(map(tuple, prompts)), n_new)
    inputs = stored(drafter, target.model, *answered)
    frozen, rows = frozen_for(drafter, target.model), len(prompts)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=8e-3)
    for step in range(n_steps):
        optimizer.zero_grad()
        draws = Draws(
            torch.full((rows,), 5), torch.zeros(rows, dtype=torch.bool), torch.full((rows,), step)
        )
        drafter.objective(frozen, TrainingStep(inputs, draws))["loss"].backward()
        optimizer.step()
    return drafter.eval()
