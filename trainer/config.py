"""Settings of a training run, in groups, and settings of the export of a drafter.

The drafter is a union of groups, one for each kind of drafter, with the settings and defaults of
that kind. A setting that is also a field of the drafter's sizes (``drafter.json``) has the same
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
LOCK_FILE = "run.lock"  # Locked while a process trains in this folder.
DRAFTER = "drafter"  # The drafter with the best validation.
CHECKPOINTS = "checkpoints"
# --resume continues from ``LAST``.
LAST, BEST = f"{CHECKPOINTS}/last.ckpt", f"{CHECKPOINTS}/best.ckpt"

CHANGE_NO_RESULT = frozenset(
    {"store", "out", "resume", "stop_after_steps", "reader_threads", "prefetch_batches",
     "prefetch_mb", "cache_dir", "cache_gb", "log_every", "checkpoint_every", "logger", "project",
     "devices", "num_nodes", "accelerator", "dry_run"}
)  # fmt: skip
"""Settings that may differ between two invocations of a run, or two runs with equal results."""

_Value = TypeVar("_Value")

PRECISIONS = ("auto", "bf16-mixed", "32-true", "16-mixed")


def known(value: _Value | None) -> _Value:
    """Return a setting that was given or has been chosen by ``defaults.py``, as not None."""
    assert value is not None
    return value


class DrafterSettings(Config):
    """Settings of all kinds of drafters."""

    forward_kl_weight: NonNegative = 0.1
    """Weight of the forward KL to the target's next-token distribution."""
    divergence: Literal["kl", "lk", "lk-hybrid", "tv"] = "kl"
    """Distillation loss. kl: KL divergence; lk: negative logarithm of the acceptance probability of
    samples; lk-hybrid: moves from the KL to the share of rejected drafts as drafts get better; tv:
    a tenth of the KL plus nine tenths of that share."""
    lk_decay: NonNegative = 3.0
    """Decay rate d of the KL weight in lk-hybrid, which is exp(-d * acceptance)."""
    draft_vocabulary: Count | Literal["all"] | None = None
    """Number of tokens that can be drafted: the most frequent ones of the store's responses, or
    all. Training is the same; a draft reads only the rows of the LM head for these tokens. Default:
    the number with which a round commits the most tokens per weight read; all for a vocabulary of
    fewer than 16,384."""


class FeatureLossSettings(DrafterSettings):
    """Settings of drafters whose features are trained to match the target's hidden states."""

    feature_weight: NonNegative = 1.0
    """Weight of the smooth-L1 loss on hidden states."""


class PositionSettings(Config):
    """Weights of the drafts of a round or block in the loss."""

    position_weights: Literal["decay", "d-pace"] = "decay"
    """Weights of the drafts of a round or block. decay: as published (blocks by position_decay,
    EAGLE-3 by 0.8 per step, Mixture of Attentions equally). d-pace: by how much each draft adds to
    the current expected acceptance length."""
    d_pace_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.5
    """D-PACE smoothing s: a draft's probability q becomes (1 - s) q + s. A lower s gives later
    drafts less weight while earlier ones are uncertain."""


class LayerSettings(Config):
    """Sizes of the drafter's own decoder layers."""

    self_attention_kv_heads: Count | None = None
    """KV heads of self-attention; default: the target's, which context kv requires."""
    self_attention_mlp_width: Count | None = None
    """MLP width of self-attention; default: the target's."""


class RoundSettings(Config):
    """The draft rounds of training: which positions are drafted, and what each of them sees."""

    step_bound: bool = True
    """Limit the length of draft rounds in training. If false, a response is one round, which sees
    no target activations of the response."""
    step_bound_min: Annotated[int, Field(ge=2)] = 5
    """Smallest step bound. After that many tokens a position is verified context again."""
    step_bound_max: int = 15
    """Largest step bound, inclusive. The bound is drawn uniformly per sequence; equal limits give
    one fixed bound."""
    on_policy: bool = True
    """Train with what draft rounds see. If false, each position sees the target's activations up to
    the previous position, which is the paper's standard training (without step bound and
    staircase)."""
    teacher_forced_weight: NonNegative = 1.0
    """Weight of a second pass over each batch, in addition to the on-policy one, in which every
    position is the first draft of its own round; 0 for the paper's training
    (docs/decisions/0004)."""
    staircase: bool = True
    """Curriculum: in a share of rows, self-attention sees only the drafted block. The share falls
    to 0 at half of training."""

    @override
    def problems(self) -> list[str]:
        if self.step_bound_max >= self.step_bound_min:
            return []
        return [
            "step bounds must satisfy 2 <= min <= max, got "
            f"{self.step_bound_min}..{self.step_bound_max}"
        ]


class MemorySettings(Config):
    """Settings of the encoded KV, for drafters that have one."""

    layer_groups: Count = 2
    """Number of groups of consecutive layers. The encoded KV is made from the means over each
    group, concatenated; 1 in the paper and in what the MoA authors' code and vLLM run
    (docs/decisions/0006)."""
    layer_stride: Count = 1
    """The encoded KV is made from the last layer and every n-th layer below it. 2 halves the bytes
    read from a store and the work of layer self-attention; 1, as in the paper, uses all layers."""
    unrotated_keys: bool | None = None
    """Make the encoded KV from the target's keys before RoPE, which look alike at every position;
    the paper and the MoA authors' code use keys after RoPE (docs/decisions/0006). Default: true if
    the target rotates as Llama does."""
    layer_attention: bool = True
    """Use layer self-attention over the KV of all layers. If false, only the KV of the last layer
    is read and encoded."""
    layer_attention_heads: Count | None = None
    """Query heads of layer self-attention; default: the largest number, up to the target's, that
    divides the KV width."""
    layer_attention_kv_heads: Count | None = None
    """KV heads of layer self-attention; default: the target's."""
    layer_attention_mlp_width: Count | None = None
    """MLP width of layer self-attention; default: 1.5 times the KV width."""


class MoASettings(RoundSettings, MemorySettings, PositionSettings, FeatureLossSettings):
    """Mixture of Attentions; the preset paper has the published settings."""

    kind: Literal["moa"] = "moa"
    """Mixture of Attentions."""
    target_layer_inference: Natural = 0
    """N: drafted features pass through the target's last N layers, which the store must hold
    (--target-layers)."""
    self_attention_kv_heads: Count | None = None
    """KV heads of self-attention; default: half of the target's."""
    self_attention_mlp_width: Count | None = None
    """MLP width of self-attention; default: 3/7 of the target's."""
    cross_attention_kv_heads: Count | None = None
    """KV heads of cross-attention; default: half of the target's."""
    cross_attention_mlp_width: Count | None = None
    """MLP width of cross-attention; default: 3/7 of the target's."""
    cross_attention_drafts: bool = True
    """Cross-attention also sees the drafts of its round, so that the last draft of a long chain is
    as good as the first; not so in the paper and in what the MoA authors' code and vLLM run
    (docs/decisions/0005)."""


class EagleSettings(LayerSettings, FeatureLossSettings):
    """EAGLE-2's drafter: decoder layers that read hidden states of the target."""

    kind: Literal["eagle"] = "eagle"
    """EAGLE."""
    feature_noise: NonNegative = 0.2
    """Width of the uniform noise added to the target's hidden states in training."""
    eagle_layers: Count = 1
    """Decoder layers of the drafter."""
    eagle_input_norm: bool = True
    """The first layer has a norm before its attention. Without it, vLLM and SGLang can run the
    drafter unchanged."""
    eagle_embedding_scale: NonNegative = 0.0
    """Factor for embeddings before they are joined with hidden states, a power of two; 1 as
    published. 0 chooses the factor that makes them as large as the hidden states. Exports fold the
    factor into the weights, so other programs need not know it."""


class Eagle3Settings(LayerSettings, PositionSettings, DrafterSettings):
    """EAGLE-3's drafter: one layer that reads the outputs of three layers of the target."""

    kind: Literal["eagle3"] = "eagle3"
    """EAGLE-3."""
    fused_layers: tuple[int, ...] | None = None
    """Decoder layers, from 0, whose outputs EAGLE-3 fuses; default: 1, L / 2 - 1 and L - 4 of the
    target's L."""
    draft_vocabulary: Count | Literal["all"] | None = None
    """Number of tokens that EAGLE-3 can draft: the most frequent ones of the store's responses, or
    all. Its own LM head has only these rows. Default: as for other drafters, at most 32,000."""
    test_time_steps: Count = 7
    """Draft steps unrolled in EAGLE-3's training; each reads the output of the previous one."""
    fc_norm: bool = False
    """EAGLE-3.1: each fused output has its own norm before they are joined."""
    norm_output: bool = False
    """EAGLE-3.1: the drafter reads its previous output after the final norm, so that the scale does
    not grow with the draft steps."""


class BlockSettings(LayerSettings, MemorySettings, PositionSettings, DrafterSettings):
    """Settings of block-parallel drafters: context, training blocks and losses."""

    context: Literal["hidden", "kv", "memory"] = "hidden"
    """What the drafter sees of verified positions. hidden: outputs of the target's layers, as
    published; kv: the target's keys and values, unchanged; memory: the encoded KV of Mixture of
    Attentions."""

    forward_kl_weight: NonNegative = 1.0
    """Weight of the forward KL to the target's next-token distribution; 0 as published."""
    cross_entropy_weight: NonNegative = 0.0
    """Weight of the cross-entropy to the tokens of the text; 0.1 as published for DSpark."""
    l1_weight: NonNegative = 0.0
    """Weight of the L1 distance to the target's next-token distribution, twice the total variation;
    0.9 as published for DSpark."""
    anchors: Count = 512
    """Maximum number of blocks of a sequence that a step trains; their positions are drawn again
    for each step."""
    block_size: Count = 7
    """Slots of a block."""
    sample_from_anchor: bool = True
    """If true, the anchor slot predicts the next token. If false, each masked slot predicts the
    token at its own position."""
    position_decay: NonNegative | None = None
    """Decay d of the loss weights: draft k of a block, from 0, has the weight exp(-k / d); with d =
    0 all weights are 1. Default: 4 for blocks of up to 8 slots, 5 up to 12, 7 for longer ones."""
    fused_layers: tuple[int, ...] | None = None
    """Decoder layers of the target, from 0, that the drafter reads. With context hidden, the list
    may begin with -1, the embedding; with kv, its length is a multiple of block_layers. Default:
    five layers, or block_layers with kv, from 1 to L - 3; none with memory."""
    block_layers: Count = 5
    """Decoder layers of the drafter."""
    mask_token: Natural | None = None
    """Token that marks a position to draft, preferably one that texts do not contain; default: the
    last of the vocabulary."""

    @override
    def problems(self) -> list[str]:
        given_names = sorted(set(MemorySettings.model_fields) & self.model_fields_set)
        changed = [
            name
            for name in given_names
            if getattr(self, name) != MemorySettings.model_fields[name].default
        ]
        problems = []
        if changed and self.context != "memory":
            problems.append(
                f"the context {self.context} has no {' or '.join(changed)}; only the context "
                "memory has"
            )
        if self.divergence != "kl" and not self.forward_kl_weight:
            problems.append(
                f"divergence {self.divergence} has the weight 0; set forward_kl_weight, and "
                "l1_weight to 0"
            )
        return problems

    def decay(self) -> float:
        """Return the decay of the loss weights within a block."""
        if self.position_decay is not None:
            return self.position_decay
        return 4.0 if self.block_size <= 8 else 5.0 if self.block_size <= 12 else 7.0


class DSparkSettings(BlockSettings):
    """DSpark: a block of drafts from one forward; each draft depends on the previous one."""

    kind: Literal["dspark"] = "dspark"
    """DSpark."""
    markov_head: Literal["none", "vanilla", "gated", "rnn", "product"] = "vanilla"
    """How a draft depends on the previous one. vanilla, gated and rnn: as published for DSpark;
    product: as in the scores of DFlash 2's selector."""
    markov_rank: Count = 256
    """Rank of the Markov head."""
    confidence_head: bool = True
    """Train a head that predicts the probability that a draft is accepted."""
    confidence_with_markov: bool = True
    """The confidence head also reads the embedding of the previous token."""
    confidence_weight: NonNegative = 1.0
    """Weight of the confidence head's binary cross-entropy."""


class DFlashSettings(BlockSettings):
    """DFlash: a block of drafts from one forward, each predicted independently."""

    kind: Literal["dflash"] = "dflash"
    """DFlash."""
    forward_kl_weight: NonNegative = 0.0
    """Weight of the forward KL to the target's next-token distribution."""
    cross_entropy_weight: NonNegative = 1.0
    """Weight of the cross-entropy to the tokens of the text."""
    block_size: Count = 16
    """Slots of a block."""
    sample_from_anchor: bool = False
    """If true, the anchor slot predicts the next token. If false, each masked slot predicts the
    token at its own position."""


class GlideSettings(LayerSettings, DrafterSettings):
    """GLIDE: one layer that reads the keys and values of the target's last layer."""

    kind: Literal["glide"] = "glide"
    """GLIDE."""
    block_size: Count = 5
    """Tokens of a block in GLIDE's training; they see the target's keys and values of earlier
    blocks."""


class MedusaSettings(DrafterSettings):
    """Medusa-1: heads on the target's hidden state, one for each draft level."""

    kind: Literal["medusa"] = "medusa"
    """Medusa."""
    medusa_heads: Count = 6
    """Number of Medusa heads, which is the maximum number of draft levels."""
    medusa_layers: Count = 1
    """Residual layers of each Medusa head."""


class IndependentSettings(DrafterSettings):
    """A small Llama that reads tokens only."""

    kind: Literal["independent"] = "independent"
    """Independent."""
    independent_layers: Count = 2
    """Decoder layers of the independent model."""
    independent_width: Annotated[int, Field(ge=2)] | None = None
    """Width of the independent model, even; default: half of the target's."""


class ScheduleSettings(Config):
    """How long the run is, and how the learning rate changes."""

    max_steps: Common[Count | None] = None
    """Optimizer steps; an alternative to --epochs."""
    epochs: Common[Positive | None] = None
    """Passes over the training split (40 in the paper); default: from 1 to 10, enough for a million
    tokens."""
    warmup_steps: Natural | None = None
    """Linear warm-up from 0 to the peak, in steps; default: a tenth of the run, at most 50."""
    peak_multiplier: Positive | None = None
    """Peak learning rate as a multiple of the final learning rate; 1 for warm-up and then a
    constant rate. Default: 10, or 20 as in the paper for long runs of large targets."""
    decay_steps: Annotated[int, Field(ge=-1)] | None = None
    """Step at which the linear decay to the final learning rate ends; -1 is the end of the run, the
    default. For long runs of large targets the default is one epoch, as in the paper."""
    stop_after_steps: Count | None = None
    """Stop this invocation at that step with everything saved; the schedule still spans the whole
    run."""

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
    """muon: Muon for matrices and AdamW for the rest, which needs fewer steps; adamw: AdamW for all
    weights, as in the paper; auto: adamw for long runs of large targets, otherwise muon."""
    learning_rate: Common[Positive | None] = None
    """Learning rate at the end of the schedule; default: 1e-4, or 3e-5 as in the paper for long
    runs of large targets."""
    matrix_learning_rate: Positive | None = None
    """Muon's learning rate at the end of the schedule; it follows the same schedule as
    --learning-rate. Default: 2e-3."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    gradient_clip: NonNegative = 1.0
    """Maximum global norm of the gradient; 0 for no clipping."""


class BatchSettings(Config):
    """The sequences of a step, and how they are read."""

    batch_size: Common[Count | None] = None
    """Sequences per optimizer step, over all devices and micro-batches; default: 2 to 32, more for
    longer runs."""
    micro_batch_size: Count | None = None
    """Sequences per forward; gradients are accumulated over the batch. Default: as many as fit into
    memory, on a CPU at most 2,048 tokens."""
    reader_threads: Count | None = None
    """Threads that read and decode shards; default: the cores divided by the devices, at most
    16."""
    prefetch_batches: Count = 4
    """Maximum number of micro-batches read ahead."""
    prefetch_mb: Count = 1024
    """Maximum MiB of activations read ahead; one micro-batch is always read ahead, however
    large."""
    cache_dir: str | None = None
    """Local folder that caches data read from a store in a bucket, for later epochs and runs;
    several processes and stores may share it. Default: MOA_DATA_CACHE_DIR if it is set, otherwise
    no cache."""
    cache_gb: Positive | None = None
    """Maximum gigabytes in that folder; the least recently used blocks are evicted first. Default:
    MOA_DATA_CACHE_GB, or 100."""


class ValidationSettings(Config):
    """Which sequences are held out, and when the run is validated on them."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of sequences held out, chosen by a hash of their content. Default: 0.02; more in small
    stores, up to 0.2, until 50 sequences or 5,000 response tokens are held out."""
    validation_sequences: Natural = 64
    """Maximum number of sequences per validation."""
    validate_every: Count | None = None
    """Steps between validations; default: a tenth of the run, at most 1,000."""
    draft_length: Count = 5
    """Drafts per round for the expected acceptance length in validation."""


class RecordSettings(Config):
    """How often a run logs and saves."""

    log_every: Count | None = None
    """Steps between logged rows; default: a twentieth of the run, at most 10."""
    checkpoint_every: Count = 100
    """Steps between saves of the last state."""
    logger: Literal["wandb", "mlflow"] | None = None
    """Also log to Weights & Biases or MLflow, which are configured by their environment
    variables."""
    project: str = "moa-data"
    """Project (Weights & Biases) or experiment (MLflow) of the run."""


class MachineSettings(Config):
    """The devices that train, and their precision."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    """Kind of device; auto uses an accelerator if there is one."""
    devices: Common[str] = "auto"
    """Devices to use on each machine: auto or a number."""
    num_nodes: Count = 1
    """Machines that train together, each started by torchrun or SLURM with the same command."""
    precision: str = "auto"
    """bf16-mixed, 32-true or 16-mixed; auto is bf16-mixed on an accelerator and 32-true on CPU."""
    compile: bool = False
    """Compile the drafter's layers, which takes minutes at the start; results differ by rounding
    errors."""

    @override
    def problems(self) -> list[str]:
        problems = []
        if self.devices != "auto" and not (self.devices.isdecimal() and int(self.devices) > 0):
            problems.append(f"devices is {self.devices!r}, expected auto or a positive number")
        if self.precision == "bf16-true":
            problems.append(
                "precision bf16-true would leave norms untrained: bfloat16 weights near 1 lose "
                "updates below 0.002; use bf16-mixed, which keeps float32 weights"
            )
        elif self.precision not in PRECISIONS:
            problems.append(
                f"precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}"
            )
        return problems


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

    # Type checkers would otherwise refuse the names of settings that are in groups.
    if TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None: ...

    store: str
    """Activation store to train from."""
    out: Common[str]
    """Folder of the run: checkpoints, logs, curves and the exported drafter."""
    drafter: Common[AnyDrafter] = Field(default_factory=MoASettings, discriminator="kind")
    """Kind of drafter. moa (Mixture of Attentions) and glide (keys and values of the last layer
    only) read the target's keys and values; eagle (EAGLE-2), eagle3, dspark and dflash (blocks of
    drafts), medusa and independent (a small Llama) need none by default."""
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    data: BatchSettings = Field(default_factory=BatchSettings)
    validation: ValidationSettings = Field(default_factory=ValidationSettings)
    record: RecordSettings = Field(default_factory=RecordSettings)
    machine: MachineSettings = Field(default_factory=MachineSettings)
    init_from: Common[str | None] = None
    """Start from the weights of another drafter: a run, or a folder in another format. Optimizer
    and schedule start from scratch."""
    resume: Common[bool] = False
    """Continue from the last checkpoint in --out, with the settings of that run. A larger
    --max-steps makes the run longer."""
    dry_run: Common[bool] = False
    """Print the time, memory and disk that the run needs, measured by training on a few
    micro-batches, and write nothing."""
    seed: Seed = 0
    """Random seed of the initial weights, the data order and all random draws."""

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
    # An early stop is not repeated. The length of a run is either max_steps or epochs: if one is
    # given now, neither recorded value counts.
    replaced = {"stop_after_steps"} | (
        {"max_steps", "epochs"} if {"max_steps", "epochs"} & set(given_schedule) else set()
    )
    recorded["schedule"] = {name: value for name, value in schedule.items() if name not in replaced}
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
    """Layout of the files; docs/interop.md lists the programs that load each."""
    out: str
    """Folder to write; it must be empty or not exist."""
    model: str | None = None
    """The target: a folder, a GGUF file, a hub id or a store. Formats moa and moa-eagle include its
    config.json, eagle and speculators-eagle3 its embeddings, dspark its embeddings and LM head. The
    speculators formats also store its folder or hub id, and require it. Default: the store that the
    run was trained from."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights; inference engines cast them to their own dtype."""
