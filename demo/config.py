"""Settings of the demo; the defaults fit two CPU cores and a few minutes."""

from typing import Annotated

from pydantic import Field
from typing_extensions import override

from ..config import Common, Config, Count, Positive, Seed

MIN_VOCAB_SIZE = 262  # the 256 bytes and the special tokens


class DemoConfig(Config):
    """Settings of `moa-data demo`."""

    out: Common[str] = "demo-output"
    """Folder of the demo: corpus, target, store, drafter run and figures. Running again uses what is finished."""
    seed: Common[Seed] = 0
    """Seed of the corpus, of the target's and of the drafter's initial weights and batches."""
    n_chats: Common[Count] = 4000
    """Generated training chats; the target learns from all of them."""
    n_store_chats: Common[Count] = 2400
    """How many of the training chats are extracted to the store that the drafter learns from."""
    n_held_out: Count = 200
    """Generated held-out chats, the pool of evaluation prompts."""
    activations: tuple[str, ...] = ("kv", "hidden:last")
    """Activations that are extracted."""
    vocab_size: Annotated[int, Field(ge=MIN_VOCAB_SIZE)] = 1024
    """Size of the target's byte-level BPE vocabulary, special tokens included."""
    hidden_size: Count = 128
    """Width of the target."""
    n_layers: Count = 6
    """Decoder layers of the target."""
    n_heads: Count = 4
    """Attention heads of the target."""
    n_kv_heads: Count = 2
    """Key/value heads of the target (grouped-query attention)."""
    target_steps: Common[Count] = 640
    """Optimizer steps of the target."""
    target_batch_tokens: Count = 1024
    """Padded tokens in one training batch of the target."""
    target_matrix_learning_rate: Positive = 0.02
    """Peak learning rate of Muon, for the matrices of the target's decoder layers."""
    target_learning_rate: Positive = 6e-3
    """Peak learning rate of AdamW, for the target's embeddings, norms and head."""
    drafter_steps: Common[Count] = 400
    """Optimizer steps of the drafter."""
    drafter_batch_size: Count = 16
    """Sequences in one training batch of the drafter."""
    drafter_learning_rate: Positive = 4e-4
    """Learning rate at the end of the drafter's schedule; the peak is ten times as much."""
    n_eval_prompts: Common[Count] = 40
    """Held-out prompts that are decoded with and without the drafter."""
    max_new_tokens: Common[Count] = 128
    """Longest answer in the evaluation, in tokens."""
    draft_length: Count = 5
    """Drafted tokens per round in the evaluation."""

    @override
    def problems(self) -> list[str]:
        found = []
        if self.n_store_chats > self.n_chats:
            found.append(f"n_store_chats is {self.n_store_chats}, expected at most n_chats ({self.n_chats})")
        if self.hidden_size % (2 * self.n_heads) or self.n_heads % self.n_kv_heads:
            found.append(
                f"hidden_size {self.hidden_size}, n_heads {self.n_heads} and n_kv_heads {self.n_kv_heads} do not fit: "
                "each must divide the one before, and the head dim must be even"
            )
        if self.n_eval_prompts > self.n_held_out:
            found.append(f"n_eval_prompts is {self.n_eval_prompts}, expected at most n_held_out ({self.n_held_out})")
        return found
