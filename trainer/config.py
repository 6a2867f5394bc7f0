"""Settings of a training run, in groups, and of the export of a drafter.

The drafter is a choice between groups, one for each kind, with the settings and the defaults of that kind alone; those
that its sizes have too (``drafter.json``) carry the same name there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field
from typing_extensions import override

from ..config import Common, Config, Count, Natural, NonNegative, Positive, Seed, read_config_file
from ..errors import OptionInvalid

# The folder of a run, which has tensorboard/ too.
RUN_FILE = "run.yaml"  # the settings, as --config reads them
STORE_FILE = "store.json"  # identity of the store, for --resume
PROVENANCE_FILE = "provenance.json"  # command, versions, machine
REPORT_FILE = "report.json"  # figures of the finished run
# of training and validation; metrics-000.csv and so on of earlier invocations
METRICS_FILE = "metrics.csv"
CURVES_FILE = "curves.png"
MEMORY_FILE = "memory.json"  # the micro-batch that trials chose
LOCK_FILE = "run.lock"  # held while a process trains here
DRAFTER = "drafter"  # of the best validation
CHECKPOINTS = "checkpoints"
# --resume goes on from the last one
LAST, BEST = f"{CHECKPOINTS}/last.ckpt", f"{CHECKPOINTS}/best.ckpt"

CHANGE_NO_RESULT = frozenset(
    {"store", "out", "resume", "stop_after_steps", "reader_threads", "prefetch_batches", "prefetch_mb", "cache_dir",
     "cache_gb", "log_every", "checkpoint_every", "logger", "project", "devices", "num_nodes", "accelerator", "dry_run"}
)  # fmt: skip
"""Settings that may differ between two invocations of a run, and between two runs that were trained alike."""

_Value = TypeVar("_Value")

PRECISIONS = ("auto", "bf16-mixed", "32-true", "16-mixed")


def known(value: _Value | None) -> _Value:
    """Return a setting that was given, or has been chosen by now (``defaults.py``)."""
    assert value is not None
    return value


class DrafterSettings(Config):
    """Settings of all kinds of drafters."""

    forward_kl_weight: NonNegative = 0.1
    """Weight of the forward KL to the target's next-token distribution."""
    divergence: Literal["kl", "lk", "lk-hybrid", "tv"] = "kl"
    """Distillation loss: kl; lk, the negative logarithm of the acceptance of samples; lk-hybrid, which moves from the
    KL to the share of rejected drafts as drafts get better; or tv, a tenth of the KL and nine of that share."""
    lk_decay: NonNegative = 3.0
    """Decay rate of the KL weight in lk-hybrid: exp(-this * acceptance)."""
    draft_vocabulary: Count | Literal["all"] | None = None
    """Tokens that are drafted, the most frequent ones of the store's responses, or all. Training is the same; a draft
    reads only their rows of the LM head. Default: the number with which a round commits the most tokens per weight that
    it reads; all of a vocabulary of fewer than 16,384."""


class FeatureLossSettings(DrafterSettings):
    """Settings of drafters whose features are compared with the target's hidden states."""

    feature_weight: NonNegative = 1.0
    """Weight of the smooth-L1 loss on hidden states."""


class PositionSettings(Config):
    """How drafts of a round or block weigh in the loss."""

    position_weights: Literal["decay", "d-pace"] = "decay"
    """How the drafts of a round or block weigh: as published (blocks by position_decay, EAGLE-3 0.8 a step, Mixture of
    Attentions alike), or by D-PACE: what each adds to the expected acceptance length as the drafter is now."""
    d_pace_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.5
    """How D-PACE softens a draft's probability q: (1 - this) * q + this; the less, the less later drafts weigh while
    earlier ones are unsure."""


class LayerSettings(Config):
    """Sizes of the drafter's own decoder layers."""

    self_attention_kv_heads: Count | None = None
    """KV heads of self-attention; default: the target's, which the context kv needs."""
    self_attention_mlp_width: Count | None = None
    """MLP width of self-attention; default: the target's."""


class RoundSettings(Config):
    """The draft rounds of training: which positions are drafted for, and what each of them sees."""

    step_bound: bool = True
    """Bound the draft rounds of training; without, a response is one round, which sees no target activations of the
    response."""
    step_bound_min: Annotated[int, Field(ge=2)] = 5
    """Smallest step bound: a position becomes verified context again every so many tokens."""
    step_bound_max: int = 15
    """Largest step bound, inclusive; drawn uniformly per sequence. Equal bounds give one fixed bound."""
    on_policy: bool = True
    """Train what draft rounds see; without, each position sees the target's activations up to the one before it, the
    paper's standard training (no step bound and no staircase then)."""
    teacher_forced_weight: NonNegative = 1.0
    """Weight of a second pass over each batch beside the on-policy one, in which every position is the first draft of
    its own round; 0 for the paper's training (docs/decisions/0004)."""
    staircase: bool = True
    """Curriculum: self-attention sees only the drafted block in a share of rows that falls to 0 at half of training."""

    @override
    def problems(self) -> list[str]:
        if self.step_bound_max >= self.step_bound_min:
            return []
        return [
            f"step bounds must satisfy 2 <= min <= max, got {self.step_bound_min}..{self.step_bound_max}"
        ]


class MemorySettings(Config):
    """Settings of the encoded KV, in drafters that have it."""

    layer_groups: Count = 2
    """Groups of consecutive layers; the encoded KV is made from the mean over each group, concatenated; 1 in the paper
    and in what the MoA authors' code and vLLM run (docs/decisions/0006)."""
    layer_stride: Count = 1
    """The encoded KV is made of the last layer and every so many below it: 2 halves what is read of a store and the
    work of layer self-attention; 1, as in the paper, is all."""
    unrotated_keys: bool | None = None
    """The encoded KV is made from the target's keys as they were before RoPE, which look alike at every position; in
    the paper and the MoA authors' code from those after it (docs/decisions/0006). Default: wherever the target rotates
    as Llama does."""
    layer_attention: bool = True
    """Layer self-attention over the KV of all layers; without, the KV of the last layer alone is read and encoded."""
    layer_attention_heads: Count | None = None
    """Query heads of layer self-attention; default: the most up to the target's that divide the KV width."""
    layer_attention_kv_heads: Count | None = None
    """KV heads of layer self-attention; default: the target's."""
    layer_attention_mlp_width: Count | None = None
    """MLP width of layer self-attention; default: 1.5 times the KV width."""


class MoASettings(RoundSettings, MemorySettings, PositionSettings, FeatureLossSettings):
    """Mixture of Attentions; preset paper has the paper's settings where the defaults differ."""

    kind: Literal["moa"] = "moa"
    """Mixture of Attentions."""
    target_layer_inference: Natural = 0
    """N: drafted features pass through the target's last N layers, which the store must hold (--target-layers)."""
    self_attention_kv_heads: Count | None = None
    """KV heads of self-attention; default: half of the target's."""
    self_attention_mlp_width: Count | None = None
    """MLP width of self-attention; default: 3/7 of the target's."""
    cross_attention_kv_heads: Count | None = None
    """KV heads of cross-attention; default: half of the target's."""
    cross_attention_mlp_width: Count | None = None
    """MLP width of cross-attention; default: 3/7 of the target's."""
    cross_attention_drafts: bool = True
    """Cross-attention sees the drafts of its round too, so that the last of a long chain is as good as the first; not
    so in the paper and in what the MoA authors' code and vLLM run (docs/decisions/0005)."""


class EagleSettings(LayerSettings, FeatureLossSettings):
    """EAGLE-2's drafter: decoder layers that read hidden states of the target."""

    kind: Literal["eagle"] = "eagle"
    """EAGLE."""
    feature_noise: NonNegative = 0.2
    """Width of the uniform noise on the target's hidden states that EAGLE is trained with."""
    eagle_layers: Count = 1
    """Decoder layers of EAGLE."""
    eagle_input_norm: bool = True
    """EAGLE's first layer has a norm before its attention; without it vLLM and SGLang run the drafter as it is."""
    eagle_embedding_scale: NonNegative = 0.0
    """What embeddings are multiplied with where they join hidden states, a power of two, 1 as published; 0 chooses the
    one after which they are as large. Exports multiply weights by it instead, so other programs need not know it."""


class Eagle3Settings(LayerSettings, PositionSettings, DrafterSettings):
    """EAGLE-3's drafter: one layer that reads outputs of three layers of the target."""

    kind: Literal["eagle3"] = "eagle3"
    """EAGLE-3."""
    fused_layers: tuple[int, ...] | None = None
    """Decoder layers, from 0, whose outputs EAGLE-3 fuses; default: 1, L / 2 - 1 and L - 4 of the target's L."""
    draft_vocabulary: Count | Literal["all"] | None = None
    """Tokens that EAGLE-3 can draft, the most frequent ones of the store's responses, or all. Its own LM head is of
    these alone. Default: as for the others, at most 32,000."""
    test_time_steps: Count = 7
    """Draft steps that EAGLE-3's training unrolls, each fed with the output of the one before."""
    fc_norm: bool = False
    """EAGLE-3.1: each of the fused outputs has a norm of its own before they are joined."""
    norm_output: bool = False
    """EAGLE-3.1: the drafter is fed with its outputs after the final norm, so that their scale does not grow with the
    draft steps."""


class BlockSettings(LayerSettings, MemorySettings, PositionSettings, DrafterSettings):
    """Settings of block-parallel drafters: their context, the blocks that are trained, and their losses."""

    context: Literal["hidden", "kv", "memory"] = "hidden"
    """What the drafter sees of verified positions: hidden, outputs of the target's layers, as published; kv, their keys
    and values as they are; memory, what Mixture of Attentions makes of those."""

    forward_kl_weight: NonNegative = 1.0
    """Weight of the forward KL to the target's next-token distribution; 0 as published."""
    cross_entropy_weight: NonNegative = 0.0
    """Weight of the cross-entropy to the tokens of the text; 0.1 as published for DSpark."""
    l1_weight: NonNegative = 0.0
    """Weight of the L1 distance to the target's next-token distribution, twice the total variation; 0.9 as published
    for DSpark."""
    anchors: Count = 512
    """Most blocks of a sequence that a step trains, drawn anew each time."""
    block_size: Count = 7
    """Slots of a block."""
    sample_from_anchor: bool = True
    """The slot of the anchor drafts the token behind it; without, each further slot drafts its own token."""
    position_decay: NonNegative | None = None
    """Draft k of a block, from 0, weighs exp(-k / this) in the loss; 0 for 1 each; default: 4 for blocks up to 8 slots,
    5 up to 12, 7 for longer ones."""
    fused_layers: tuple[int, ...] | None = None
    """Decoder layers of the target, from 0, that are read; hidden may begin with -1, the embedding; kv takes a multiple
    of block_layers. Default: five, with kv block_layers, 1 to L - 3; none with memory."""
    block_layers: Count = 5
    """Decoder layers of the drafter."""
    mask_token: Natural | None = None
    """Token that stands for an unknown one, best one that texts do not have; default: the last of the vocabulary."""

    @override
    def problems(self) -> list[str]:
        given = sorted(set(MemorySettings.model_fields) & self.model_fields_set)
        changed = [
            name
            for name in given
            if getattr(self, name) != MemorySettings.model_fields[name].default
        ]
        found = []
        if changed and self.context != "memory":
            found.append(
                f"the context {self.context} has no {' or '.join(changed)}, only that of memory has"
            )
        if self.divergence != "kl" and not self.forward_kl_weight:
            found.append(
                f"divergence {self.divergence} weighs nothing here; give forward_kl_weight, and l1_weight 0"
            )
        return found

    def decay(self) -> float:
        """Return the decay of a block's weights."""
        if self.position_decay is not None:
            return self.position_decay
        return 4.0 if self.block_size <= 8 else 5.0 if self.block_size <= 12 else 7.0


class DSparkSettings(BlockSettings):
    """DSpark: a block of drafts from one forward, each with a look at the one before it."""

    kind: Literal["dspark"] = "dspark"
    """DSpark."""
    markov_head: Literal["none", "vanilla", "gated", "rnn", "product"] = "vanilla"
    """How a draft follows from the one before it: vanilla, gated and rnn as published for DSpark, product as the scores
    of DFlash 2's selector."""
    markov_rank: Count = 256
    """Rank of the Markov head."""
    confidence_head: bool = True
    """Train a head that tells how likely a draft is accepted."""
    confidence_with_markov: bool = True
    """The confidence head reads the embedding of the token before too."""
    confidence_weight: NonNegative = 1.0
    """Weight of the confidence head's binary cross-entropy."""


class DFlashSettings(BlockSettings):
    """DFlash: a block of drafts from one forward, each drafted by itself."""

    kind: Literal["dflash"] = "dflash"
    """DFlash."""
    forward_kl_weight: NonNegative = 0.0
    """Weight of the forward KL to the target's next-token distribution."""
    cross_entropy_weight: NonNegative = 1.0
    """Weight of the cross-entropy to the tokens of the text."""
    block_size: Count = 16
    """Slots of a block."""
    sample_from_anchor: bool = False
    """The slot of the anchor drafts the token behind it; without, each further slot drafts its own token."""


class GlideSettings(LayerSettings, DrafterSettings):
    """GLIDE: one layer that reads the keys and values of the target's last layer."""

    kind: Literal["glide"] = "glide"
    """GLIDE."""
    block_size: Count = 5
    """Tokens of a block in GLIDE's training, which see the target's keys and values of blocks before."""


class MedusaSettings(DrafterSettings):
    """Medusa-1: heads on the target's hidden state, one for each level of drafts."""

    kind: Literal["medusa"] = "medusa"
    """Medusa."""
    medusa_heads: Count = 6
    """Heads of Medusa, the most levels of drafts."""
    medusa_layers: Count = 1
    """Residual layers of each head of Medusa."""


class IndependentSettings(DrafterSettings):
    """A small Llama that reads tokens alone."""

    kind: Literal["independent"] = "independent"
    """Independent."""
    independent_layers: Count = 2
    """Decoder layers of the independent model."""
    independent_width: Annotated[int, Field(ge=2)] | None = None
    """Width of the independent model, even; default: half of the target's."""


class ScheduleSettings(Config):
    """How long the run is, and how the learning rate changes."""

    max_steps: Common[Count | None] = None
    """Optimizer steps; alternative to --epochs."""
    epochs: Common[Positive | None] = None
    """Passes over the training split (40 in the paper); default: enough for a million tokens, from 1 to 10."""
    warmup_steps: Natural | None = None
    """Linear warm-up from 0 to the peak, in steps; default: a tenth of the run, at most 50."""
    peak_multiplier: Positive | None = None
    """The peak is this times the learning rate; 1 for warm-up and then constant; default: 10, or 20 as in the paper for
    long runs of large targets."""
    decay_steps: Annotated[int, Field(ge=-1)] | None = None
    """Step at which the linear decay to the learning rate ends; -1: the end of the run, the default; for long runs of
    large targets the default is one epoch, as in the paper."""
    stop_after_steps: Count | None = None
    """End this invocation at that step with everything saved; the schedule still spans the whole run."""

    @override
    def problems(self) -> list[str]:
        both = self.max_steps is not None and self.epochs is not None
        return ["give --max-steps or --epochs, not both"] if both else []

    def n_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of the whole run."""
        return self.max_steps or max(1, round((self.epochs or 1) * steps_per_epoch))

    def decay_end_step(self, steps_per_epoch: int) -> int:
        """Return the step at which the learning rate stops falling."""
        if self.decay_steps == -1:
            return self.n_steps(steps_per_epoch)
        return steps_per_epoch if self.decay_steps is None else self.decay_steps


class OptimizerSettings(Config):
    """The optimizer and its rates."""

    kind: Literal["auto", "adamw", "muon"] = "auto"
    """muon for the matrices and adamw for the rest, which needs fewer steps, or adamw for all as in the paper; auto
    takes adamw for long runs of large targets."""
    learning_rate: Common[Positive | None] = None
    """Learning rate at the end of the schedule; default: 1e-4, or 3e-5 as in the paper for long runs of large
    targets."""
    matrix_learning_rate: Positive | None = None
    """Muon's learning rate at the end of the schedule, which it follows as --learning-rate does; default: 2e-3."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    gradient_clip: NonNegative = 1.0
    """Bound on the gradient's global norm; 0 for none."""


class BatchSettings(Config):
    """The sequences of a step, and how they are read."""

    batch_size: Common[Count | None] = None
    """Sequences per optimizer step, over all devices and accumulation; default: 2 to 32, more for longer runs."""
    micro_batch_size: Count | None = None
    """Sequences per forward; the batch is accumulated from these. Default: as many as fit into memory, on a CPU at most
    2,048 tokens."""
    reader_threads: Count | None = None
    """Threads that read and decode shards; default: the cores, shared among the devices, at most 16."""
    prefetch_batches: Count = 4
    """Most micro-batches read ahead."""
    prefetch_mb: Count = 1024
    """Most MiB of activations read ahead; one micro-batch is read ahead however large it is."""
    cache_dir: str | None = None
    """Local folder that keeps what is read of a store in a bucket, for further epochs and runs; several processes and
    stores may share it. Default: what MOA_DATA_CACHE_DIR names, or none."""
    cache_gb: Positive | None = None
    """Most gigabytes in that folder; what was used longest ago goes first. Default: MOA_DATA_CACHE_GB, or 100."""


class ValidationSettings(Config):
    """Which sequences are held out, and when a run is validated on them."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of sequences held out, chosen by a hash of their content; default: 0.02, in small stores up to 0.2, until
    50 sequences or 5,000 response tokens are held out."""
    validation_sequences: Natural = 64
    """Most sequences per validation."""
    validate_every: Count | None = None
    """Steps between validations; default: a tenth of the run, at most 1,000."""
    draft_length: Count = 5
    """Drafts per round for the expected acceptance length in validation."""


class RecordSettings(Config):
    """How often a run logs and saves."""

    log_every: Count | None = None
    """Steps between log rows; default: a twentieth of the run, at most 10."""
    checkpoint_every: Count = 100
    """Steps between saves of the last state."""
    logger: Literal["wandb", "mlflow"] | None = None
    """Log to Weights & Biases or to MLflow too, set up by their environment variables."""
    project: str = "moa-data"
    """Project, or experiment, of the run there."""


class MachineSettings(Config):
    """The devices that train, and their precision."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    """Kind of device; auto takes an accelerator where there is one."""
    devices: Common[str] = "auto"
    """Devices of each machine to use: auto or a number."""
    num_nodes: Count = 1
    """Machines that train together, each started by torchrun or SLURM with the same command."""
    precision: str = "auto"
    """bf16-mixed, 32-true or 16-mixed; auto is bf16-mixed on an accelerator and 32-true on CPU."""
    compile: bool = False
    """Compile the drafter's layers, which takes minutes at the start; results differ by rounding."""

    @override
    def problems(self) -> list[str]:
        found = []
        if self.devices != "auto" and not (self.devices.isdecimal() and int(self.devices) > 0):
            found.append(f"devices is {self.devices!r}, expected auto or a number from 1 up")
        if self.precision == "bf16-true":
            found.append(
                "precision bf16-true would leave norms untrained: bfloat16 weights near 1 lose updates below 0.002; "
                "use bf16-mixed, which keeps float32 weights"
            )
        elif self.precision not in PRECISIONS:
            found.append(
                f"precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}"
            )
        return found


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
    """One training run; ``defaults.py`` chooses what the length of the run and the size of the target decide."""

    if TYPE_CHECKING:  # else they refuse names of settings in groups

        def __init__(self, /, **values: Any) -> None: ...

    store: str
    """Activation store to train from."""
    out: Common[str]
    """Folder of the run: checkpoints, logs, curves and the exported drafter."""
    drafter: Common[AnyDrafter] = Field(default_factory=MoASettings, discriminator="kind")
    """moa (Mixture of Attentions), glide (keys and values of the last layer alone); without any: eagle (EAGLE-2),
    eagle3, dspark and dflash (blocks of drafts), medusa, independent (a small Llama)."""
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    data: BatchSettings = Field(default_factory=BatchSettings)
    validation: ValidationSettings = Field(default_factory=ValidationSettings)
    record: RecordSettings = Field(default_factory=RecordSettings)
    machine: MachineSettings = Field(default_factory=MachineSettings)
    init_from: Common[str | None] = None
    """Start from the weights of a drafter, of a run or in another format; optimizer and schedule start afresh."""
    resume: Common[bool] = False
    """Continue from the last checkpoint in --out, with the settings of that run; a larger --max-steps lengthens it."""
    dry_run: Common[bool] = False
    """Print what the run takes, from some micro-batches that are trained on, and write nothing."""
    seed: Seed = 0
    """Random seed of the initial weights, the order of the data and all draws."""

    @property
    def target_layer_inference(self) -> int:
        """N, how many of the target's last layers drafted features pass through."""
        return getattr(self.drafter, "target_layer_inference", 0)


def earlier_settings(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the file with the settings of the run that is resumed, and those that hold unless others are given.

    There are none where no run is resumed, or its file cannot be read; resuming it then says what is wrong.
    """
    file = Path(str(given.get("out", ""))) / RUN_FILE
    if str(given.get("resume", False)).lower() != "true" or not file.is_file():
        return "", {}
    try:
        found = read_config_file(file)
    except OptionInvalid:
        return "", {}
    schedule = dict(found.get("schedule", {}))
    now = given.get("schedule", {})
    # An early stop is not repeated; of the two settings of a run's length, the one that is given
    # counts.
    replaced = {"stop_after_steps"} | (
        {"max_steps", "epochs"} if {"max_steps", "epochs"} & set(now) else set()
    )
    found["schedule"] = {name: value for name, value in schedule.items() if name not in replaced}
    return str(file), found


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
"""Named starting points: ``paper`` is Mixture of Attentions as published, ``small`` is for short runs, which need Muon
and a higher rate that decays over the whole run, whatever their length."""


class DrafterExportConfig(Config):
    """Settings of `moa-data export-drafter`: which drafter to write, in which format, and where."""

    drafter: str
    """A run of `moa-data train`, or a folder with a drafter in any format that can be loaded."""
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
    """Layout of the files; docs/interop.md says who loads which."""
    out: str
    """Folder to write; it must not exist, or be empty."""
    model: str | None = None
    """The target (a folder, a GGUF file, a hub id, or a store), of which moa and moa-eagle hold the config.json, eagle
    and speculators-eagle3 the embeddings, and dspark embeddings and LM head; speculators' formats name its folder or
    hub id, and need one. Default: the store that the run was trained from."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights; engines cast them to their own."""
