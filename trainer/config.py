"""What a training run is made of; ``moa-data train`` turns each field into an option."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run. The defaults are the paper's (Table 6 and the released schedule)."""

    store: str
    """Activation store to train from."""
    out: str
    """Folder of the run: checkpoints, logs, curves and the exported drafter."""
    max_steps: int | None = None
    """Optimizer steps; alternative to --epochs."""
    epochs: float | None = None
    """Passes over the training split (40 in the paper); default 1 when --max-steps is not given."""
    batch_size: int = 32
    """Sequences per optimizer step, over all devices and accumulation."""
    micro_batch_size: int | None = None
    """Sequences per forward; the batch is accumulated from these. Default: the whole batch."""
    learning_rate: float = 3e-5
    """Learning rate at the end of the schedule."""
    peak_multiplier: float = 20.0
    """The peak is this times the learning rate (20 x 3e-5 = 6e-4); 1 for warm-up and then constant."""
    warmup_steps: int = 50
    """Linear warm-up from 0 to the peak, in steps."""
    decay_steps: int | None = None
    """Step at which the linear decay to the learning rate ends; default: one epoch; -1: the end of the run."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    gradient_clip: float = 1.0
    """Bound on the gradient's global norm."""
    forward_kl_weight: float = 0.1
    """Weight of the forward KL to the target's next-token distribution."""
    feature_weight: float = 1.0
    """Weight of the smooth-L1 loss on hidden states."""
    step_bound_min: int = 5
    """Smallest step bound: a position becomes verified context again every so many tokens."""
    step_bound_max: int = 15
    """Largest step bound, inclusive; drawn uniformly per sequence."""
    staircase: bool = True
    """Curriculum: self-attention sees only the drafted block in a share of rows that falls to 0 at half of training."""
    target_layer_inference: int = 0
    """N: drafted features pass through the target's last N layers, which the store must hold (--target-layers)."""
    official_quirks: bool = False
    """Repeat the released code where it differs from what decoding sees (docs/decisions/0001)."""
    self_attention_kv_heads: int | None = None
    """KV heads of self-attention; default: half of the target's."""
    self_attention_mlp_width: int | None = None
    """MLP width of self-attention; default: 3/7 of the target's."""
    cross_attention_kv_heads: int | None = None
    """KV heads of cross-attention; default: half of the target's."""
    cross_attention_mlp_width: int | None = None
    """MLP width of cross-attention; default: 3/7 of the target's."""
    layer_attention_heads: int | None = None
    """Query heads of layer self-attention; default: the most up to the target's that divide the KV width."""
    layer_attention_kv_heads: int | None = None
    """KV heads of layer self-attention; default: the target's."""
    layer_attention_mlp_width: int | None = None
    """MLP width of layer self-attention; default: 1.5 times the KV width."""
    precision: str = "auto"
    """bf16-mixed, 32-true, 16-mixed or bf16-true; auto is bf16-mixed on an accelerator and 32-true on CPU."""
    devices: str = "auto"
    """Devices of this machine to use: auto or a number."""
    accelerator: str = "auto"
    """auto, cpu, gpu or mps."""
    validation_fraction: float = 0.02
    """Share of sequences held out, chosen by a hash of their content."""
    validation_sequences: int = 64
    """Most sequences per validation."""
    validate_every: int = 100
    """Steps between validations."""
    draft_length: int = 5
    """Drafts per round for the expected acceptance length in validation."""
    log_every: int = 10
    """Steps between log rows."""
    checkpoint_every: int = 100
    """Steps between saves of the last state."""
    stop_after_steps: int | None = None
    """End this invocation at that step with everything saved; the schedule still spans the whole run."""
    resume: bool = False
    """Go on from the last checkpoint in --out."""
    reader_threads: int = 2
    """Threads that read and decode shards."""
    prefetch_batches: int = 4
    """Batches read ahead."""
    seed: int = 0
    """Of the initial weights, the order of the data and all draws."""


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "small": {
        "learning_rate": 1e-4,
        "peak_multiplier": 10.0,
        "decay_steps": -1,
        "batch_size": 8,
        "validate_every": 100,
    },
}
"""Named starting points: ``paper`` for 7B-class targets (Table 6), ``small`` for targets of some million parameters,
whose short runs need a higher rate that decays over the whole run."""
