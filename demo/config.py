"""What the demo can be told; the defaults fit two CPU cores and a few minutes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoConfig:
    """Settings of `moa-data demo`."""

    out: str = "runs/demo"
    """Folder of the demo: corpus, target, store, drafter run and report. Running again goes on from what is there."""
    seed: int = 0
    """Seed of the corpus, of the target's and of the drafter's initial weights and batches."""
    n_chats: int = 4000
    """Generated training chats; the target learns from all of them."""
    n_store_chats: int = 1600
    """How many of the training chats are extracted to the store that the drafter learns from."""
    n_held_out: int = 200
    """Generated held-out chats: the target's validation set and the pool of evaluation prompts."""
    vocab_size: int = 1024
    """Size of the byte-level BPE vocabulary, special tokens included."""
    hidden_size: int = 192
    """Width of the target."""
    n_layers: int = 6
    """Decoder layers of the target."""
    n_heads: int = 6
    """Attention heads of the target."""
    n_kv_heads: int = 2
    """Key/value heads of the target (grouped-query attention)."""
    target_steps: int = 500
    """Optimiser steps of the target."""
    target_batch_tokens: int = 2048
    """Padded tokens in one training batch of the target."""
    target_learning_rate: float = 3e-3
    """Peak learning rate of the target (AdamW, warm-up, then a cosine)."""
