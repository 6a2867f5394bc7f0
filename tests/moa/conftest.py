"""Tiny targets of every supported family, and drafters for them; everything random and in memory."""

import random

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.drafters.mixture_sizes import MoASizes
from moa_data.moa.drafters.rounds import Draws
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import Target

SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "vocab_size": 67,
    "max_position_embeddings": 96,
    "initializer_range": 0.15,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8, "head_dim": 12}),
    # The last layer has a window, those before it see everything.
    "qwen2-mixed": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3},
    ),
}


def build_model(family="llama", seed=0, **overrides):
    """A random causal LM in float32; biases and norms are random too, so that none is forgotten unseen."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(SIZES | extra | overrides))).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def build_drafter(model, n_target_layers=0, seed=1, **sizes):
    config = MoASizes.from_target(model.config, target_layer_inference=n_target_layers, **sizes)
    drafter = MoADrafter(config)
    drafter.initialize(torch.Generator().manual_seed(seed), std=0.15)
    return drafter.eval()


def random_prompts(n, seed, longest=20):
    draw = random.Random(seed)
    return [[draw.randrange(4, SIZES["vocab_size"]) for _ in range(draw.randint(1, longest))] for _ in range(n)]


def teach(drafter, target, prompts, n_steps):
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


@pytest.fixture
def target():
    return Target(build_model())
