"""Settings of a training run, in groups, and settings of the export of a drafter.

The settings of the drafter are one of several groups: each kind of drafter has a group with its own
settings and defaults. A setting that is also a field of the drafter's sizes (``drafter.json``) has the same
name there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field
from typing_extensions import override

from ..config import Common, Config, Count, Natural, NonNegative, Positive, Seed, read_config_file
from ..errors import OptionInvalid

# Files in the folder of a run. It also holds tensorboard/.
RUN_FILE = "run.yaml"  # The settings, in the format of --config.
STORE_FILE = "store.json"  # The identity of the store, checked by --resume.
PROVENANCE_FILE = "provenance.json"  # The command, versions and machine.
REPORT_FILE = "report.json"  # The results of the finished run.
# Training and validation metrics of this invocation. Those of earlier invocations are in
# metrics-000.csv and so on.
METRICS_FILE = "metrics.csv"
CURVES_FILE = "curves.png"
MEMORY_FILE = "memory.json"  # The micro-batch size chosen by trial steps.
LOCK_FILE = "run.lock"  # Lock file of the process that trains in this folder.
DRAFTER = "drafter"  # The drafter with the best validation.
CHECKPOINTS = "checkpoints"
# Checkpoints in the folder of a run: the current state, from which --resume continues, and the
# state of the best validation.
LAST, BEST = f"{CHECKPOINTS}/last.ckpt", f"{CHECKPOINTS}/best.ckpt"

CHANGE_NO_RESULT = frozenset(
    {"store", "out", "resume", "stop_after_steps", "reader_threads", "prefetch_batches",
     "prefetch_mb", "cache_dir", "cache_gb", "log_every", "checkpoint_every", "logger", "project",
     "devices", "num_nodes", "accelerator", "dry_run"}
)  # fmt: skip
"""Settings that may differ between two invocations of a run, or two runs with equal results."""

_Value = TypeVar("_Value")


def known(value: _Value | None) -> _Value:
    """Return the value of a setting that is not None, because it was given or has been chosen."""
    assert value is not None
    return value


class DrafterSettings(Config):
    """Settings of all kinds of drafters."""

    forward_kl_weight: NonNegative = 0.1
    """Weight of the distillation loss, which compares the drafter's next-token distribution with
    the target's. This loss is the KL divergence, unless the setting divergence names another one. 0
    turns it off."""
    divergence: Literal["kl", "lk", "lk-hybrid", "tv"] = "kl"
    """The distillation loss. kl: KL divergence (Kullback-Leibler) from the target's distribution to
    the drafter's. tv: 0.1 of kl plus 0.9 of the total variation distance, which is the probability
    that a sampled draft is rejected. lk: negative logarithm of the probability that a sampled draft
    is accepted. lk-hybrid: a mixture of kl and the total variation distance, in which the weight of
    kl falls as drafts get better."""
    lk_decay: NonNegative = 3.0
    """Only with divergence lk-hybrid: how fast the weight of the KL divergence falls. The weight is
    exp(-lk_decay * acceptance), where acceptance is the probability that a sampled draft is
    accepted."""
    draft_vocabulary: Count | Literal["all"] | None = None
    """Number of different tokens that the drafter can propose: the most frequent tokens of the
    store's responses, or all. A smaller number makes drafts cheaper, because fewer rows of the LM
    head (the output layer) are read; training stays the same. Default: the number that is expected
    to commit the most tokens per weight read, or all if the vocabulary has fewer than 16,384
    tokens."""


class FeatureLossSettings(DrafterSettings):
    """Settings of drafters whose features are trained to match the target's hidden states."""

    feature_weight: NonNegative = 1.0
    """Weight of the smooth-L1 loss between the drafter's features and the target's hidden states. 0
    turns it off."""


class PositionSettings(Config):
    """Weights of the drafts of a round or block in the loss."""

    position_weights: Literal["decay", "d-pace"] = "decay"
    """How the loss weighs the drafts of a round or block by their position. decay: the weights
    published with each kind of drafter. Blocks use position_decay, EAGLE-3 multiplies the weight by
    0.8 with each step, and Mixture of Attentions weighs all drafts equally. d-pace: each draft is
    weighed by its contribution to the current expected acceptance length."""
    d_pace_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Only with position_weights d-pace: the smoothing s, from 0 to 1. The probability q of a draft
    is replaced by (1 - s) q + s. A lower s gives later drafts less weight while earlier drafts are
    uncertain."""


class LayerSettings(Config):
    """Sizes of the drafter's own decoder layers."""

    self_attention_kv_heads: Count | None = None
    """Number of key and value heads in the drafter's self-attention. Default: as many as the target
    has. dspark and dflash with context kv require this number."""
    self_attention_mlp_width: Count | None = None
    """Width of the MLP (feed-forward network) after the drafter's self-attention. Default: the
    target's MLP width."""


class RoundSettings(Config):
    """The draft rounds of training: which positions are drafted, and what each of them sees."""

    step_bound: bool = True
    """Train with draft rounds of limited length, as in decoding. A draft round is the sequence of
    drafts between two target calls. If false, each response is one long round, in which the drafter
    sees no activations of the target for the response."""
    step_bound_min: Annotated[int, Field(ge=2)] = 5
    """Minimum length of a draft round in training, in tokens. The length is drawn at random for
    each sequence, between this minimum and step_bound_max."""
    step_bound_max: int = 15
    """Maximum length of a draft round in training, in tokens. Equal minimum and maximum give rounds
    of one fixed length."""
    on_policy: bool = True
    """Train in draft rounds: a draft sees the target's activations only up to the start of its
    round, as in decoding. If false, each position sees the target's activations of all earlier
    positions, as in the standard training of the MoA paper; step_bound (the limit on the length of
    rounds) and staircase (the curriculum) then have no effect."""
    teacher_forced_weight: NonNegative = 1.0
    """Loss weight of a second, teacher-forced pass over each batch. In this pass every position is
    trained as the first draft of a round. 0 turns it off, as in the MoA paper
    (docs/decisions/0004)."""
    staircase: bool = True
    """Begin training with a curriculum: in some sequences, self-attention sees only the tokens
    drafted in the current round. The share of these sequences falls from all to none during the
    first half of training."""

    @override
    def problems(self) -> list[str]:
        if self.step_bound_max >= self.step_bound_min:
            return []
        return [
            "step_bound_min and step_bound_max must satisfy 2 <= minimum <= maximum, got "
            f"{self.step_bound_min} and {self.step_bound_max}"
        ]


class MemorySettings(Config):
    """Settings of the encoded KV, for drafters that have one."""

    layer_groups: Count = 2
    """Number of groups into which the target's layers are divided for the encoded KV (the vectors
    that the drafter attends to, computed from the target's keys and values). The keys and values
    are averaged within each group of consecutive layers, and the averages are concatenated. The MoA
    paper, the MoA authors' code and vLLM use 1 group (docs/decisions/0006)."""
    layer_stride: Count = 1
    """Encode the keys and values of every n-th layer only, counted down from the last one. 1 uses
    all layers, as in the MoA paper. 2 halves the bytes read from the store and the cost of layer
    self-attention."""
    unrotated_keys: bool | None = None
    """Encode the target's keys as they are before RoPE (rotary position embedding), so that equal
    content looks the same at every position. The MoA paper and the MoA authors' code use keys after
    RoPE (docs/decisions/0006). Default: true if the target applies RoPE as Llama does."""
    layer_attention: bool = True
    """Combine the keys and values of all layers by attention over the layers (layer
    self-attention). If false, only the keys and values of the last layer are read and encoded."""
    layer_attention_heads: Count | None = None
    """Number of query heads in layer self-attention, the attention over the target's layers. It
    must divide the KV width, which is the number of values in the keys and values of one token in
    one target layer, over all heads. Default: the largest such number that is at most the target's
    number of heads."""
    layer_attention_kv_heads: Count | None = None
    """Number of key and value heads in layer self-attention, the attention over the target's
    layers. Default: as many as the target has."""
    layer_attention_mlp_width: Count | None = None
    """Width of the MLP (feed-forward network) in layer self-attention, the attention over the
    target's layers. Default: 1.5 times the KV width, which is the number of values in the keys and
    values of one token in one target layer, over all heads."""


class MoASettings(RoundSettings, MemorySettings, PositionSettings, FeatureLossSettings):
    """Mixture of Attentions; the preset paper has the published settings."""

    kind: Literal["moa"] = "moa"
    """Mixture of Attentions."""
    target_layer_inference: Natural = 0
    """Also run the drafter's output through the last N decoder layers of the target (Target Layer
    Inference). The store must hold these layers: extract it with --target-layers N."""
    self_attention_kv_heads: Count | None = None
    """Number of key and value heads in the drafter's self-attention. Default: half of the target's
    number."""
    self_attention_mlp_width: Count | None = None
    """Width of the MLP (feed-forward network) after the drafter's self-attention. Default: 3/7 of
    the target's MLP width."""
    cross_attention_kv_heads: Count | None = None
    """Number of key and value heads in the drafter's cross-attention. Default: half of the target's
    number."""
    cross_attention_mlp_width: Count | None = None
    """Width of the MLP (feed-forward network) after the drafter's cross-attention. Default: 3/7 of
    the target's MLP width."""
    cross_attention_drafts: bool = True
    """Let cross-attention also see the earlier drafts of the round. This makes the last draft of a
    long chain as good as the first one. The MoA paper, the MoA authors' code and vLLM do not do
    this (docs/decisions/0005)."""


class EagleSettings(LayerSettings, FeatureLossSettings):
    """EAGLE-2's drafter: decoder layers that read hidden states of the target."""

    kind: Literal["eagle"] = "eagle"
    """EAGLE."""
    feature_noise: NonNegative = 0.2
    """Width of the uniform random noise that is added to the target's hidden states in training, so
    that the drafter learns to cope with inexact states: a width of 0.2 adds numbers between -0.1
    and 0.1."""
    eagle_layers: Count = 1
    """Number of decoder layers in the EAGLE drafter."""
    eagle_input_norm: bool = True
    """Apply a norm before the attention of the first layer. If false, vLLM and SGLang can run the
    exported drafter without an additional layer."""
    eagle_embedding_scale: NonNegative = 0.0
    """Factor by which token embeddings are multiplied before they are joined with hidden states; a
    power of two. 0 chooses the factor that makes embeddings as large as hidden states. 1 is EAGLE
    as published. Exported drafters have the factor in their weights, so other programs need no
    change."""


class Eagle3Settings(LayerSettings, PositionSettings, DrafterSettings):
    """EAGLE-3's drafter: one layer that reads the outputs of three layers of the target."""

    kind: Literal["eagle3"] = "eagle3"
    """EAGLE-3."""
    fused_layers: tuple[int, ...] | None = None
    """The decoder layers of the target whose outputs EAGLE-3 reads, counted from 0. Default for a
    target of L layers: 1, L / 2 - 1 and L - 4."""
    draft_vocabulary: Count | Literal["all"] | None = None
    """Number of different tokens that EAGLE-3 can propose: the most frequent tokens of the store's
    responses, or all. EAGLE-3 has an LM head (output layer) of its own with one row for each of
    these tokens. Default: chosen as for other drafters, but at most 32,000."""
    test_time_steps: Count = 7
    """Number of draft steps that are unrolled in training. Each step reads the output of the step
    before it, as in decoding."""
    fc_norm: bool = False
    """EAGLE-3.1: normalize each of the target's layer outputs separately before they are joined."""
    norm_output: bool = False
    """EAGLE-3.1: feed the drafter's previous output back after the final norm instead of before it,
    so that its size does not grow from draft to draft."""


class BlockSettings(LayerSettings, MemorySettings, PositionSettings, DrafterSettings):
    """Settings of block-parallel drafters: context, training blocks and losses."""

    context: Literal["hidden", "kv", "memory"] = "hidden"
    """What the drafter reads of the tokens that the target has already verified. hidden: outputs of
    the target's layers, which the published DSpark and DFlash read. kv: the target's keys and
    values, unchanged. memory: the encoded KV of Mixture of Attentions."""

    forward_kl_weight: NonNegative = 1.0
    """Weight of the distillation loss, which compares the drafter's next-token distribution with
    the target's. This loss is the KL divergence, unless the setting divergence names another one. 0
    turns it off, as in the published DSpark."""
    cross_entropy_weight: NonNegative = 0.0
    """Weight of the cross-entropy loss, whose labels are the tokens of the training text. The
    published DSpark uses 0.1."""
    l1_weight: NonNegative = 0.0
    """Weight of the L1 distance between the drafter's and the target's next-token distributions,
    which is twice their total variation distance. The published DSpark uses 0.9."""
    anchors: Count = 512
    """Maximum number of blocks per sequence that are trained in one step. Each step draws new
    random positions for them. Fewer blocks take less memory and time per step."""
    block_size: Count = 7
    """Number of slots (token positions) in a block. A block is drafted in one forward pass, so this
    also limits the number of tokens drafted per target call."""
    sample_from_anchor: bool = True
    """If true, the first slot of a block (the anchor, a known token) predicts the token after it.
    If false, each later slot is masked and predicts its own token."""
    position_decay: NonNegative | None = None
    """Decay d of the loss weights within a block: the draft at index k, counted from 0, has the
    weight exp(-k / d). 0 gives all drafts the weight 1. Default: 4 for blocks of up to 8 slots, 5
    for up to 12 slots, 7 for longer blocks."""
    fused_layers: tuple[int, ...] | None = None
    """The decoder layers of the target that the drafter reads, counted from 0. With context hidden,
    the first one may be -1, which is the embedding. With context kv, the number of layers must be a
    multiple of block_layers. With context memory, leave this out. Default for a target of L layers:
    five layers from 1 to L - 3, or block_layers layers with context kv."""
    block_layers: Count = 5
    """Number of decoder layers in the drafter."""
    mask_token: Natural | None = None
    """Id of the token that marks a position to be drafted, preferably a token that does not occur
    in texts. Default: the last token of the vocabulary."""

    @override
    def problems(self) -> list[str]:
        changed = [
            name
            for name, setting in sorted(MemorySettings.model_fields.items())
            if getattr(self, name) != setting.default
        ]
        problems = []
        if changed and self.context != "memory":
            problems.append(
                f"{' and '.join(changed)} can be changed only for context memory, but the context "
                f"is {self.context}"
            )
        if self.divergence != "kl" and not self.forward_kl_weight:
            problems.append(
                f"divergence {self.divergence} has no effect with forward_kl_weight 0; set "
                "forward_kl_weight above 0, and l1_weight to 0"
            )
        return problems

    def decay(self) -> float:
        """Return the decay of the loss weights in a draft block (the setting position_decay)."""
        if self.position_decay is not None:
            return self.position_decay
        return 4.0 if self.block_size <= 8 else 5.0 if self.block_size <= 12 else 7.0


class DSparkSettings(BlockSettings):
    """DSpark: a block of drafts from one forward; each draft depends on the previous one."""

    kind: Literal["dspark"] = "dspark"
    """DSpark."""
    markov_head: Literal["none", "vanilla", "gated", "rnn", "product"] = "vanilla"
    """The head that makes each draft depend on the previous draft. none: no such head. vanilla,
    gated, rnn: the heads published with DSpark. product: the product of a slot's hidden state and
    the previous token's embedding, as in DFlash 2."""
    markov_rank: Count = 256
    """Rank of the low-rank matrices in the Markov head, the head that makes each draft depend on
    the previous one. A higher rank makes the head more expressive and drafts more expensive."""
    confidence_head: bool = True
    """Train an additional head that predicts how likely each draft is to be accepted. Decoding can
    use it to end a chain of drafts early (--tree 7c0.3)."""
    confidence_with_markov: bool = True
    """Let the confidence head also read the Markov head's embedding of the previous token."""
    confidence_weight: NonNegative = 1.0
    """Weight of the confidence head's loss, which is a binary cross-entropy."""


class DFlashSettings(BlockSettings):
    """DFlash: a block of drafts from one forward, each predicted independently."""

    kind: Literal["dflash"] = "dflash"
    """DFlash."""
    forward_kl_weight: NonNegative = 0.0
    """Weight of the distillation loss, which compares the drafter's next-token distribution with
    the target's. This loss is the KL divergence, unless the setting divergence names another one.
    0, the default, turns it off."""
    cross_entropy_weight: NonNegative = 1.0
    """Weight of the cross-entropy loss, whose labels are the tokens of the training text."""
    block_size: Count = 16
    """Number of slots (token positions) in a block. A block is drafted in one forward pass, so this
    also limits the number of tokens drafted per target call."""
    sample_from_anchor: bool = False
    """If true, the first slot of a block (the anchor, a known token) predicts the token after it.
    If false, each later slot is masked and predicts its own token."""


class GlideSettings(LayerSettings, DrafterSettings):
    """GLIDE: one layer that reads the keys and values of the target's last layer."""

    kind: Literal["glide"] = "glide"
    """GLIDE."""
    block_size: Count = 5
    """Number of tokens in a block in GLIDE's training. The tokens of a block see the target's keys
    and values of earlier blocks only."""


class MedusaSettings(DrafterSettings):
    """Medusa-1: heads on the target's hidden state, one for each draft level."""

    kind: Literal["medusa"] = "medusa"
    """Medusa."""
    medusa_heads: Count = 6
    """Number of Medusa heads. Head k predicts the k-th token of a draft, so this is also the
    maximum number of tokens that are drafted in a row."""
    medusa_layers: Count = 1
    """Number of residual layers in each Medusa head. More layers make drafts more expensive."""


class IndependentSettings(DrafterSettings):
    """A small Llama that reads tokens only."""

    kind: Literal["independent"] = "independent"
    """Independent: a small model of its own that reads only tokens."""
    independent_layers: Count = 2
    """Number of decoder layers in the independent drafter."""
    independent_width: Annotated[int, Field(ge=2)] | None = None
    """Hidden size of the independent drafter, an even number. Default: half of the target's hidden
    size."""


class ScheduleSettings(Config):
    """How long the run is, and how the learning rate changes."""

    max_steps: Common[Count | None] = None
    """Length of the run in optimizer steps. Give either this or --epochs."""
    epochs: Common[Positive | None] = None
    """Length of the run in epochs, which are passes over the training split. The MoA paper uses 40.
    Default: from 1 to 10, enough for a million tokens in total."""
    warmup_steps: Natural | None = None
    """Number of steps in which the learning rate rises linearly from 0 to its peak. Default: a
    tenth of the run, at most 50."""
    peak_multiplier: Positive | None = None
    """Ratio of the peak learning rate to the final learning rate. 1 keeps the rate constant after
    the warm-up. Default: 10. For a target of width 2,048 or more and at least 20 million training
    tokens: 20, as in the MoA paper."""
    decay_steps: Annotated[int, Field(ge=-1)] | None = None
    """Step at which the learning rate has fallen linearly to its final value. -1 means the end of
    the run, which is the default. For a target of width 2,048 or more and at least 20 million
    training tokens, the default is the end of the first epoch, as in the MoA paper."""
    stop_after_steps: Count | None = None
    """Stop after this step and save everything, so that --resume can continue. The learning rate
    schedule still covers the whole run."""

    @override
    def problems(self) -> list[str]:
        both = self.max_steps is not None and self.epochs is not None
        return ["give --max-steps or --epochs, not both"] if both else []

    def n_steps(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps of the whole run."""
        return self.max_steps or max(1, round((self.epochs or 1) * steps_per_epoch))

    def decay_end_step(self, steps_per_epoch: int) -> int:
        """Return the step at which the learning rate stops falling."""
        if self.decay_steps == -1:
            return self.n_steps(steps_per_epoch)
        return steps_per_epoch if self.decay_steps is None else self.decay_steps


class OptimizerSettings(Config):
    """The optimizer and its learning rates."""

    kind: Literal["auto", "adamw", "muon"] = "auto"
    """The optimizer. muon: Muon for matrices and AdamW for all other weights; needs fewer steps
    than adamw. adamw: AdamW for all weights, as in the MoA paper. auto: adamw for a target of width
    2,048 or more and at least 20 million training tokens, otherwise muon."""
    learning_rate: Common[Positive | None] = None
    """Final learning rate, at the end of the schedule. Default: 1e-4. For a target of width 2,048
    or more and at least 20 million training tokens: 3e-5, as in the MoA
    paper."""
    matrix_learning_rate: Positive | None = None
    """Final learning rate of Muon, which trains the matrices. It rises and falls like
    --learning-rate. Default: 2e-3."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, as in AdamW: each step shrinks the weights by the learning rate times
    this value. 0 turns it off."""
    gradient_clip: NonNegative = 1.0
    """Maximum norm of the whole gradient; larger gradients are scaled down. 0 turns this off."""


class BatchSettings(Config):
    """The sequences of a step, and how they are read."""

    batch_size: Common[Count | None] = None
    """Number of sequences per optimizer step, over all devices together. Default: from 2 to 32,
    more for longer runs."""
    micro_batch_size: Count | None = None
    """Number of sequences per forward pass of a device. Gradients are accumulated until the batch
    is complete. Default: as many as fit into memory; on a CPU at most 2,048 tokens in all."""
    reader_threads: Count | None = None
    """Number of threads that read and decode activations from the store. Default: the number of CPU
    cores divided by the number of devices, at most 16."""
    prefetch_batches: Count = 4
    """Maximum number of micro-batches that are read ahead, so that training need not wait for the
    store."""
    prefetch_mb: Count = 1024
    """Maximum size in MiB of the activations that are read ahead of training, in host memory. At
    least one micro-batch is read ahead, whatever its size."""
    cache_dir: str | None = None
    """Local folder that caches the data of a store in a bucket, so that later epochs and runs need
    not download it again. Several processes and stores can share it. Default: the environment
    variable MOA_DATA_CACHE_DIR; if it is not set, nothing is cached."""
    cache_gb: Positive | None = None
    """Maximum size of the cache in gigabytes. The least recently used blocks are evicted first.
    Default: the environment variable MOA_DATA_CACHE_GB, or 100."""


class ValidationSettings(Config):
    """Which sequences are held out, and when the run is validated on them."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction of the sequences that are held out for validation. A hash of their content selects
    them. Default: 0.02. In small stores it is higher, up to 0.2, until 50 sequences or 5,000
    response tokens are held out."""
    validation_sequences: Natural = 64
    """Maximum number of held-out sequences that a validation uses."""
    validate_every: Count | None = None
    """Number of steps between two validations. Default: a tenth of the run, at most 1,000."""
    draft_length: Count = 5
    """Number of drafts per round that is assumed for the expected acceptance length in
    validation."""


class RecordSettings(Config):
    """How often a run logs and saves."""

    log_every: Count | None = None
    """Number of steps between two rows of the log. Default: a twentieth of the run, at most 10."""
    checkpoint_every: Count = 100
    """Number of steps between two checkpoints of the current state, from which --resume
    continues."""
    logger: Literal["wandb", "mlflow"] | None = None
    """Also log to Weights & Biases (wandb) or MLflow (mlflow). Accounts and servers come from the
    environment variables of these tools. Default: neither."""
    project: str = "moa-data"
    """Name of the project in Weights & Biases, or of the experiment in MLflow."""


class MachineSettings(Config):
    """The devices that train, and their precision."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    """Kind of device that trains. auto takes an accelerator if the machine has one, and otherwise
    the CPU."""
    devices: Common[str] = "auto"
    """Number of devices to use on each machine; auto uses all accelerators."""
    num_nodes: Count = 1
    """Number of machines that train together. Start the same command on each of them, by torchrun
    or SLURM."""
    precision: Literal["auto", "bf16-mixed", "32-true", "16-mixed"] = "auto"
    """Numeric precision of training. auto means bf16-mixed on an accelerator and 32-true on a CPU.
    bf16-true cannot be chosen, because bfloat16 weights near 1 would lose updates below 0.002, so
    that norms would stay untrained."""
    compile: bool = False
    """Compile the drafter's layers with torch.compile. This takes minutes at the start, and changes
    results by rounding errors."""

    @override
    def problems(self) -> list[str]:
        if self.devices == "auto" or (self.devices.isdecimal() and int(self.devices) > 0):
            return []
        return [f"devices is {self.devices!r}, expected auto or a positive number of devices"]


AnyDrafter = (
    MoASettings
    | EagleSettings
    | Eagle3Settings
    | DSparkSettings
    | DFlashSettings
    | GlideSettings
    | MedusaSettings
    | IndependentSettings
)


class TrainConfig(Config):
    """Settings of a run; ``defaults.py`` chooses those that depend on its length and the target."""

    # Callers may pass settings of groups by name. Without this signature, type checkers would
    # refuse these names.
    if TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None: ...

    store: str
    """The activation store to train from: a folder, or the URL of a store in a bucket."""
    out: Common[str]
    """Folder of the run. It gets the checkpoints, logs, curves and the trained drafter."""
    drafter: Common[AnyDrafter] = Field(default_factory=MoASettings, discriminator="kind")
    """Kind of drafter to train. moa (Mixture of Attentions) needs a store with the target's keys
    and values, and glide needs those of the last layer. By default the others need hidden states
    only: eagle (EAGLE-2), eagle3 (EAGLE-3), dspark and dflash (which draft blocks of tokens),
    medusa, and independent (a small Llama)."""
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    data: BatchSettings = Field(default_factory=BatchSettings)
    validation: ValidationSettings = Field(default_factory=ValidationSettings)
    record: RecordSettings = Field(default_factory=RecordSettings)
    machine: MachineSettings = Field(default_factory=MachineSettings)
    init_from: Common[str | None] = None
    """Start from the weights of an existing drafter: a run, or a folder with a drafter in another
    format. Optimizer state and learning rate schedule start anew."""
    resume: Common[bool] = False
    """Continue the run in --out from its last checkpoint, with its settings. Add a larger
    --max-steps to make the run longer."""
    dry_run: Common[bool] = False
    """Train on a few micro-batches, print how much time, memory and disk the run needs, and write
    nothing."""
    seed: Seed = 0
    """Seed of all random numbers: initial weights, data order and random draws in training."""

    @property
    def target_layer_inference(self) -> int:
        """Number of the target's last layers that drafted features pass through."""
        return getattr(self.drafter, "target_layer_inference", 0)


def earlier_settings(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the settings file of the run that is resumed, and the settings to reuse from it.

    Settings that are given again replace these. Both are empty if no run is resumed, or if its file
    cannot be read; resuming then reports the error.
    """
    file = Path(str(given.get("out", ""))) / RUN_FILE
    if str(given.get("resume", False)).lower() != "true" or not file.is_file():
        return "", {}
    try:
        recorded = read_config_file(file)
    except OptionInvalid:
        return "", {}
    schedule = dict(recorded.get("schedule", {}))
    given_schedule = given.get("schedule", {})
    # Do not take over the recorded ``stop_after_steps``, so that a resumed run does not stop early
    # again. The length of a run is set by either ``max_steps`` or ``epochs``. If one of them is
    # given now, take over neither of their recorded values.
    replaced = {"stop_after_steps"} | (
        {"max_steps", "epochs"} if {"max_steps", "epochs"} & set(given_schedule) else set()
    )
    for name in replaced:
        schedule.pop(name, None)
    recorded["schedule"] = schedule
    return str(file), recorded


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "drafter": {
            "teacher_forced_weight": 0.0,
            "cross_attention_drafts": False,
            "layer_groups": 1,
            "unrotated_keys": False,
            "draft_vocabulary": "all",
        },
        "optimizer": {"kind": "adamw", "learning_rate": 3e-5},
        "schedule": {"peak_multiplier": 20.0},
        "data": {"batch_size": 32},
    },
    "small": {
        "optimizer": {"kind": "muon", "learning_rate": 1e-4, "matrix_learning_rate": 2e-3},
        "schedule": {"peak_multiplier": 10.0, "decay_steps": -1},
        "data": {"batch_size": 8},
    },
}
"""Named starting points: ``paper`` is Mixture of Attentions as published; ``small`` is for short
runs, which need Muon and a higher learning rate that decays over the whole run, whatever its
length."""


class DrafterExportConfig(Config):
    """Settings of `moa-data export-drafter`: which drafter to write, in which format, and where."""

    drafter: str
    """The drafter to export: a run of `moa-data train`, or a folder with a drafter in any format
    that can be loaded."""
    format: Literal[
        "speculators-eagle3",
        "speculators-dspark",
        "speculators-dflash",
        "moa",
        "moa-vllm",
        "dflash",
        "hf-dflash",
        "dspark",
        "vllm-dspark",
        "eagle",
        "vllm-eagle",
        "sglang-eagle",
        "moa-eagle",
        "eagle3",
        "llama",
    ]
    """File format to write. docs/interop.md lists the programs that load each format."""
    out: str
    """Folder to write. It must be empty, or it must not exist yet."""
    model: str | None = None
    """The drafter's target: a folder, a GGUF file, a Hub id or a store. Some formats include parts
    of it: moa and moa-eagle its config.json, eagle and speculators-eagle3 its embeddings, dspark
    its embeddings and LM head (output layer). The speculators formats record its folder or Hub id,
    so they require this option. Default for other formats: the store that the run was trained
    from."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the written weights. Inference engines convert them to their own data type."""
