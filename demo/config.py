"""What the demo can be told; the defaults fit two CPU cores and a few minutes."""

from __future__ import annotations

from dataclasses import dataclass

MIN_VOCAB_SIZE = 262


@dataclass(frozen=True)
class DemoConfig:
    """Settings of `moa-data demo`."""

    out: str = "runs/demo"
    """Folder of the demo: corpus, target, store, drafter run and report. Running again goes on from what is there."""
    seed: int = 0
    """Seed of the corpus, of the target's and of the drafter's initial weights and batches."""
    n_chats: int = 4000
    """Generated training chats; the target learns from all of them."""
    n_store_chats: int = 2400
    """How many of the training chats are extracted to the store that the drafter learns from."""
    n_held_out: int = 200
    """Generated held-out chats: the target's validation set and the pool of evaluation prompts."""
    vocab_size: int = 1024
    """Size of the byte-level BPE vocabulary, special tokens included."""
    hidden_size: int = 128
    """Width of the target."""
    n_layers: int = 6
    """Decoder layers of the target."""
    n_heads: int = 4
    """Attention heads of the target."""
    n_kv_heads: int = 2
    """Key/value heads of the target (grouped-query attention)."""
    target_steps: int = 640
    """Optimiser steps of the target."""
    target_batch_tokens: int = 1024
    """Padded tokens in one training batch of the target."""
    target_matrix_learning_rate: float = 0.02
    """Peak learning rate of Muon, for the matrices of the target's decoder layers."""
    target_learning_rate: float = 6e-3
    """Peak learning rate of AdamW, for the target's embeddings, norms and head."""
    activations: tuple[str, ...] = ("kv", "hidden:last")
    """Activations that are extracted."""
    drafter_steps: int = 400
    """Optimiser steps of the drafter."""
    drafter_batch_size: int = 16
    """Sequences in one training batch of the drafter."""
    drafter_learning_rate: float = 4e-4
    """Learning rate at the end of the drafter's schedule; the peak is ten times as much."""
    n_eval_prompts: int = 40
    """Held-out prompts that are decoded with and without the drafter."""
    max_new_tokens: int = 128
    """Longest answer in the evaluation, in tokens."""
    draft_length: int = 5
    """Drafted tokens per round in the evaluation."""

    def problems(self) -> list[str]:
        """Every value that cannot be used, one line each; empty when all are good."""
        found = [
            f"{name} is {getattr(self, name)}, expected at least 1"
            for name in (
                "n_chats", "n_store_chats", "n_held_out", "n_layers", "n_heads", "n_kv_heads", "target_steps",
                "target_batch_tokens", "drafter_steps", "drafter_batch_size", "n_eval_prompts", "max_new_tokens",
                "draft_length",
            )
            if getattr(self, name) < 1
        ]  # fmt: skip
        if not found and (self.hidden_size % (2 * self.n_heads) or self.n_heads % self.n_kv_heads):
            found.append(
                f"hidden_size {self.hidden_size}, n_heads {self.n_heads} and n_kv_heads {self.n_kv_heads} do not fit: "
                "each must divide the one before, and the head dim must be even"
            )
        if not 0 <= self.seed < 2**32:
            found.append(f"seed is {self.seed}, expected 0 to 2^32 - 1")
        if self.vocab_size < MIN_VOCAB_SIZE:
            found.append(
                f"vocab_size is {self.vocab_size}, expected at least {MIN_VOCAB_SIZE} (bytes and special tokens)"
            )
        if self.n_store_chats > self.n_chats:
            found.append(f"n_store_chats is {self.n_store_chats}, expected at most n_chats ({self.n_chats})")
        if self.n_eval_prompts > self.n_held_out:
            found.append(f"n_eval_prompts is {self.n_eval_prompts}, expected at most n_held_out ({self.n_held_out})")
        return found
