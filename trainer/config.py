"""What a training run is made of; ``moa-data train`` turns each field into an option."""

from dataclasses import dataclass
from typing import Any

from ..errors import OptionInvalid

OPTIMIZERS = ("adamw", "muon")
PRECISIONS = ("auto", "bf16-mixed", "32-true", "16-mixed")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
_LEAST = {
    "max_steps": 1,
    "batch_size": 1,
    "micro_batch_size": 1,
    "warmup_steps": 0,
    "decay_steps": -1,
    "target_layer_inference": 0,
    "self_attention_kv_heads": 1,
    "self_attention_mlp_width": 1,
    "cross_attention_kv_heads": 1,
    "cross_attention_mlp_width": 1,
    "layer_groups": 1,
    "layer_attention_heads": 1,
    "layer_attention_kv_heads": 1,
    "layer_attention_mlp_width": 1,
    "eagle_layers": 1,
    "medusa_heads": 1,
    "medusa_layers": 1,
    "independent_layers": 1,
    "independent_width": 2,
    "block_size": 1,
    "draft_vocabulary": 1,
    "test_time_steps": 1,
    "validation_sequences": 0,
    "validate_every": 1,
    "draft_length": 1,
    "log_every": 1,
    "checkpoint_every": 1,
    "stop_after_steps": 1,
    "reader_threads": 1,
    "prefetch_batches": 1,
    "prefetch_mb": 1,
    "seed": 0,
}
"""Smallest value of each whole number."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run.

    The defaults are the paper's (Table 6 and the released schedule), but for ``teacher_forced_weight``, 0 in the paper,
    and ``cross_attention_drafts``, ``layer_groups`` and ``unrotated_keys``, which the paper has not.
    """

    store: str
    """Activation store to train from."""
    out: str
    """Folder of the run: checkpoints, logs, curves and the exported drafter."""
    drafter: str = "moa"
    """moa (Mixture of Attentions), glide (GLIDE), which reads the keys and values of the target's last layer alone, or
    one that needs none: eagle (EAGLE-2), eagle3 (EAGLE-3), medusa (Medusa-1), independent (a small Llama that reads
    tokens)."""
    max_steps: int | None = None
    """Optimizer steps; alternative to --epochs."""
    epochs: float | None = None
    """Passes over the training split (40 in the paper); default 1 when --max-steps is not given."""
    batch_size: int = 32
    """Sequences per optimizer step, over all devices and accumulation."""
    micro_batch_size: int | None = None
    """Sequences per forward; the batch is accumulated from these. Default: as many as keep activations below 1 GiB."""
    learning_rate: float = 3e-5
    """Learning rate at the end of the schedule."""
    peak_multiplier: float = 20.0
    """The peak is this times the learning rate (20 x 3e-5 = 6e-4); 1 for warm-up and then constant."""
    warmup_steps: int = 50
    """Linear warm-up from 0 to the peak, in steps."""
    decay_steps: int | None = None
    """Step at which the linear decay to the learning rate ends; default: one epoch; -1: the end of the run."""
    optimizer: str = "adamw"
    """adamw as in the paper, or muon for the matrices and adamw for the rest, which needs fewer steps."""
    matrix_learning_rate: float = 2e-3
    """Muon's learning rate at the end of the schedule; it has the same shape as that of --learning-rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    gradient_clip: float = 1.0
    """Bound on the gradient's global norm."""
    forward_kl_weight: float = 0.1
    """Weight of the forward KL to the target's next-token distribution."""
    feature_weight: float = 1.0
    """Weight of the smooth-L1 loss on hidden states."""
    step_bound: bool = True
    """Bound the draft rounds of training; without, a response is one round, which sees the target's activations of what
    comes before it alone."""
    step_bound_min: int = 5
    """Smallest step bound: a position becomes verified context again every so many tokens."""
    step_bound_max: int = 15
    """Largest step bound, inclusive; drawn uniformly per sequence. Equal bounds give one fixed bound."""
    on_policy: bool = True
    """Train what draft rounds see; without, each position sees the target's activations up to the one before it, the
    paper's standard training (no step bound and no staircase then)."""
    teacher_forced_weight: float = 1.0
    """Weight of a second pass over each batch beside the on-policy one, in which every position is the first draft of
    its own round; 0 for the paper's training (docs/decisions/0004). Official quirks go without."""
    staircase: bool = True
    """Curriculum: self-attention sees only the drafted block in a share of rows that falls to 0 at half of training."""
    feature_noise: float = 0.2
    """Width of the uniform noise on the target's hidden states that EAGLE is trained with."""
    target_layer_inference: int = 0
    """N: drafted features pass through the target's last N layers, which the store must hold (--target-layers)."""
    official_quirks: bool = False
    """Repeat the released code where it differs from what decoding sees (docs/decisions/0001)."""
    self_attention_kv_heads: int | None = None
    """KV heads of self-attention; default: half of the target's (moa), or as many (others)."""
    self_attention_mlp_width: int | None = None
    """MLP width of self-attention; default: 3/7 of the target's (moa), or the same (others)."""
    cross_attention_kv_heads: int | None = None
    """KV heads of cross-attention; default: half of the target's."""
    cross_attention_mlp_width: int | None = None
    """MLP width of cross-attention; default: 3/7 of the target's."""
    cross_attention_drafts: bool = True
    """Cross-attention sees the drafts of its round too, so that the last of a long chain is as good as the first; not
    so in the paper and in what the MoA authors' code and vLLM run (docs/decisions/0005). Official quirks go without."""
    layer_groups: int = 2
    """Groups of consecutive layers, whose means after layer self-attention make the memory side by side; 1 in the paper
    and in what the MoA authors' code and vLLM run (docs/decisions/0006)."""
    unrotated_keys: bool = True
    """The memory is made from the target's keys as they were before RoPE, which look alike at every position; in the
    paper, and in what the MoA authors' code and vLLM run, from those after (docs/decisions/0006)."""
    layer_attention: bool = True
    """Layer self-attention over the KV of all layers; without, the KV of the last layer alone is read and encoded."""
    layer_attention_heads: int | None = None
    """Query heads of layer self-attention; default: the most up to the target's that divide the KV width."""
    layer_attention_kv_heads: int | None = None
    """KV heads of layer self-attention; default: the target's."""
    layer_attention_mlp_width: int | None = None
    """MLP width of layer self-attention; default: 1.5 times the KV width."""
    eagle_layers: int | None = None
    """Decoder layers of EAGLE; default: 1."""
    eagle_input_norm: bool = True
    """EAGLE's first layer has a norm before its attention; without it vLLM and SGLang run the drafter as it is."""
    medusa_heads: int | None = None
    """Heads of Medusa, the most levels of drafts; default: 6."""
    medusa_layers: int | None = None
    """Residual layers of each head of Medusa; default: 1."""
    independent_layers: int | None = None
    """Decoder layers of the independent model; default: 2."""
    independent_width: int | None = None
    """Width of the independent model, even; default: half of the target's."""
    block_size: int | None = None
    """Tokens of a block in GLIDE's training, which see the target's keys and values of blocks before; default: 5."""
    fused_layers: tuple[int, ...] | None = None
    """Decoder layers, from 0, whose outputs EAGLE-3 fuses; default: 1, L / 2 - 1 and L - 4 of the target's L."""
    draft_vocabulary: int | None = None
    """Tokens that EAGLE-3 can draft, the most frequent ones of the store's responses; default: all."""
    test_time_steps: int | None = None
    """Draft steps that EAGLE-3's training unrolls, each fed with the output of the one before; default: 7."""
    precision: str = "auto"
    """bf16-mixed, 32-true or 16-mixed; auto is bf16-mixed on an accelerator and 32-true on CPU."""
    devices: str = "auto"
    """Devices of this machine to use: auto or a number."""
    accelerator: str = "auto"
    """auto, cpu, gpu, cuda or mps."""
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
    """Most micro-batches read ahead."""
    prefetch_mb: int = 1024
    """Most MiB of activations read ahead; one micro-batch is read ahead however large it is."""
    seed: int = 0
    """Of the initial weights, the order of the data and all draws."""

    def problems(self) -> list[str]:
        """Every value that cannot be used, one line each; empty when all are good."""
        found = []
        if self.max_steps is not None and self.epochs is not None:
            found.append("give --max-steps or --epochs, not both")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                found.append(f"{name} must be at least {least}, got {value}")
        if self.seed >= 2**32:
            found.append(f"seed must be below 2^32, got {self.seed}")
        if self.optimizer not in OPTIMIZERS:
            found.append(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        for name in ("learning_rate", "matrix_learning_rate", "peak_multiplier", "epochs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                found.append(f"{name} must be a number above 0, got {value}")
        weights = ("forward_kl_weight", "feature_weight", "teacher_forced_weight")
        for name in (*weights, "weight_decay", "gradient_clip", "feature_noise"):
            if not 0 <= getattr(self, name) < float("inf"):
                found.append(f"{name} must be a number from 0 up, got {getattr(self, name)}")
        if self.official_quirks and not self.on_policy:
            found.append("official_quirks needs on_policy: the released code has no other training")
        if not 2 <= self.step_bound_min <= self.step_bound_max:
            found.append(f"step bounds must satisfy 2 <= min <= max, got {self.step_bound_min}..{self.step_bound_max}")
        if not 0 <= self.validation_fraction < 1:
            found.append(f"validation_fraction must be in [0, 1), got {self.validation_fraction}")
        if self.precision == "bf16-true":
            found.append(
                "precision bf16-true would leave norms untrained: bfloat16 weights near 1 lose updates below 0.002; "
                "use bf16-mixed, which keeps float32 weights"
            )
        elif self.precision not in PRECISIONS:
            found.append(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.accelerator not in ACCELERATORS:
            found.append(f"accelerator must be one of {', '.join(ACCELERATORS)}, got {self.accelerator!r}")
        if self.devices != "auto" and not (self.devices.isdecimal() and int(self.devices) > 0):
            found.append(f"devices must be auto or a number from 1 up, got {self.devices!r}")
        return found


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "teacher_forced_weight": 0.0,
        "cross_attention_drafts": False,
        "layer_groups": 1,
        "unrotated_keys": False,
    },
    "small": {
        "optimizer": "muon",
        "learning_rate": 1e-4,
        "matrix_learning_rate": 2e-3,
        "peak_multiplier": 10.0,
        "decay_steps": -1,
        "batch_size": 8,
        "validate_every": 100,
    },
}
"""Named starting points: ``paper`` is Mixture of Attentions as published, ``small`` is for targets of some million
weights, whose short runs need Muon and a higher rate that decays over the whole run. The defaults suit 7B and more."""


DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that a drafter can be exported in."""


@dataclass(frozen=True)
class DrafterExportConfig:
    """Which drafter to write for which program, to where."""

    drafter: str
    """A run of `moa-data train`, or a folder with a drafter in any format that can be loaded."""
    format: str
    """moa, moa-vllm, eagle, vllm-eagle, sglang-eagle, moa-eagle or eagle3; docs/interop.md says who loads which."""
    out: str
    """Folder to write; it must not exist, or be empty."""
    model: str | None = None
    """The target (a folder, a hub id, or a store), of which moa and moa-eagle hold the config.json and eagle the
    embeddings; default: the store that the run was trained from."""
    dtype: str = "float32"
    """Dtype of the weights: float32, bfloat16 or float16; engines cast them to their own."""

    def check(self) -> None:
        """Refuse values that cannot be used.

        Raises:
            OptionInvalid: naming all of them.
        """
        if self.dtype not in DTYPES:
            raise OptionInvalid(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}. Mend the options.")
