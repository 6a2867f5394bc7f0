"""Drafters with random weights, or taught for a moment."""

from typing import Any

import torch

from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.drafters.mixture_sizes import MoASizes
from moa_data.moa.drafters.rounds import Draws
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import Target


def build_drafter(model: Any, n_target_layers: int = 0, seed: int = 1, std: float = 0.15, **sizes: Any) -> MoADrafter:
    """A MoA drafter for a model, with random weights."""
    config = MoASizes.from_target(model.config, target_layer_inference=n_target_layers, **sizes)
    drafter = MoADrafter(config)
    drafter.initialize(torch.Generator().manual_seed(seed), std=std)
    return drafter.eval()


def teach(drafter: Any, target: Target, prompts: list[list[int]], n_steps: int) -> Any:
    """Train a drafter that reads no keys and values for a moment on what the target itself says after some prompts."""
    frozen, rows = FrozenTarget.from_model(target.model), []
    for prompt in prompts:
        rows.append(prompt + plain_generate(target, prompt, max_new_tokens=24).tokens)
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    response = torch.zeros_like(tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        response[index, 1 : len(row)] = True
    inputs = TrainingInputs(tokens, response, None, target.model.model(tokens).last_hidden_state)
    draws = Draws(None, torch.zeros(len(rows), dtype=torch.bool))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=8e-3)
    for _ in range(n_steps):
        optimizer.zero_grad()
        drafter.objective(frozen, inputs, draws).total.backward()
        optimizer.step()
    return drafter.eval()
