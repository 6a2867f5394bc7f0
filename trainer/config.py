"""Settings of training runs and of drafter exports.

The settings of a training run are divided into groups, such as the optimizer and the schedule. For
the drafter, there is one group per kind, with its own settings and defaults. A run uses the group
of its drafter's kind. Some settings of the drafter are also written to ``drafter.json``, under the
same names, because they are sizes of the drafter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field
from typing_extensions import override

from ..config import Common, Config, Count, Natural, NonNegative, Positive, Seed, read_config_file
from ..errors import OptionInvalid

# Names of the files in the folder of a run. The folder also contains tensorboard/.
RUN_FILE = "run.yaml"  # The settings of the run, in the format of --config.
STORE_FILE = "store.json"  # The identity of the store. --resume checks it.
# The command line, the versions of packages, and the machine of the run.
PROVENANCE_FILE = "provenance.json"
REPORT_FILE = "report.json"  # The results of the finished run.
# File with the training and validation metrics of the latest invocation. The metrics of earlier
# invocations are in metrics-000.csv and so on.
METRICS_FILE = "metrics.csv"
CURVES_FILE = "curves.png"
MEMORY_FILE = "memory.json"  # The micro-batch size that trial steps have chosen.
LOCK_FILE = "run.lock"  # Lock file of the process that trains in this folder.
DRAFTER = "drafter"  # Folder with the drafter that had the best validation.
CHECKPOINTS = "checkpoints"
# Checkpoints in the folder of a run. LAST is the current state, from which --resume continues. BEST
# is the state of the best validation.
LAST, BEST = f"{CHECKPOINTS}/last.ckpt", f"{CHECKPOINTS}/best.ckpt"

CHANGE_NO_RESULT = frozenset(
    {"store", "out", "resume", "stop_after_steps", "reader_threads", "prefetch_batches",
     "prefetch_mb", "cache_dir", "cache_gb", "log_every", "checkpoint_every", "logger", "project",
     "devices", "num_nodes", "accelerator", "dry_run"}
)  # fmt: skip
"""Settings that do not affect the result of a run, so a resumed run may change them."""

_Value = TypeVar("_Value")


def known(value: _Value | None) -> _Value:
    """Return the value of a setting that was given or has been chosen, so it is not None.

    Without this function, type checkers would report that the value could be None.
    """
    assert value is not None
    return value


class DrafterSettings(Config):
    """Settings of all kinds of drafters."""

    forward_kl_weight: NonNegative = 0.1
    """Weight of the distillation loss in the total loss. The distillation loss makes the drafter's
    probabilities for the next token similar to the target's. The setting divergence chooses its
    formula, which is the KL divergence by default. 0 turns the loss off."""
    divergence: Literal["kl", "lk", "lk-hybrid", "tv"] = "kl"
    """Formula of the distillation loss, which compares the drafter's probabilities for the next
    token with the target's. kl: the KL divergence (Kullback-Leibler) from the target's
    probabilities to the drafter's. tv: 0.1 times kl plus 0.9 times the total variation distance,
    which is the probability that a sampled draft is rejected. lk: minus the logarithm of the
    probability that a sampled draft is accepted. lk-hybrid: a mixture of kl and the total variation
    distance, in which kl counts less as drafts get better (see lk_decay). tv can be better than kl
    if tokens are sampled with a temperature (docs/training.md)."""
    lk_decay: NonNegative = 3.0
    """Only with divergence lk-hybrid, a mixture of the KL divergence and the total variation
    distance: how fast the share of the KL divergence falls as drafts get better. Its share is
    exp(-lk_decay * a), where a is the probability that a sampled draft is accepted. With 0, only
    the KL divergence counts."""
    draft_vocabulary: Count | Literal["all"] | None = None
    """Number of different tokens that the drafter can propose, or all. The most frequent tokens of
    the store's responses are chosen. With fewer tokens, drafts are cheaper, because they read fewer
    rows of the LM head (the output layer), but a draft fails whenever the target chooses another
    token. Training is not affected. Default: the number with which decoding should be fastest,
    estimated from the number of weights that a draft round reads; all if the target's vocabulary
    has fewer than 16,384 tokens."""


class FeatureLossSettings(DrafterSettings):
    """Settings of drafters whose features are trained to match the target's hidden states."""

    feature_weight: NonNegative = 1.0
    """Weight of the feature loss in the total loss. The feature loss is the smooth-L1 distance
    between the hidden states that the drafter predicts and the target's hidden states. 0 turns it
    off."""


class PositionSettings(Config):
    """Settings of the loss weight of each draft of a round or block."""

    position_weights: Literal["decay", "d-pace"] = "decay"
    """How much each draft of a round counts in the loss, depending on its position in the round.
    decay: each position has a fixed weight. moa weighs all drafts equally, eagle3 multiplies the
    weight by 0.8 from each draft to the next, and dspark and dflash use the setting position_decay.
    d-pace: a draft counts as much as it currently adds to the expected acceptance length, so later
    drafts count more as the drafter gets better. With d-pace, each step reads the LM head (the
    output layer) once more."""
    d_pace_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Only with position_weights d-pace: smoothing of the probabilities that drafts are right, a
    number s from 0 to 1. A probability q is replaced by (1 - s) q + s. With a lower s, later drafts
    count less while earlier drafts are uncertain."""


class LayerSettings(Config):
    """Sizes of the drafter's own decoder layers."""

    self_attention_kv_heads: Count | None = None
    """Number of key and value heads in the drafter's self-attention. Default: the target's number
    of key and value heads. With `context=kv` of dspark or dflash, only the default
    works."""
    self_attention_mlp_width: Count | None = None
    """Width of the MLP (feed-forward network) after the drafter's self-attention. Default: the
    target's MLP width."""


class RoundSettings(Config):
    """Settings of the draft rounds in training: their lengths, and what a drafted position sees."""

    step_bound: bool = True
    """Train with draft rounds of limited length, as in decoding. A draft round is a series of
    drafts between two calls of the target. If false, a whole response is one draft round, so the
    drafter sees the target's activations only of the tokens before the response."""
    step_bound_min: Annotated[int, Field(ge=2)] = 5
    """Minimum length in tokens of a draft round (the drafts between two calls of the target) in
    training. The length is drawn at random for each sequence, from step_bound_min to
    step_bound_max."""
    step_bound_max: int = 15
    """Maximum length in tokens of a draft round (the drafts between two calls of the target) in
    training. If it equals step_bound_min, all rounds have this length."""
    on_policy: bool = True
    """Train in draft rounds, as in decoding: a draft sees the target's activations only of the
    tokens before its round. If false, a draft sees the target's activations of all tokens before
    it, as in the standard training of the MoA paper. The settings step_bound (length of the rounds)
    and staircase (curriculum) then have no effect."""
    teacher_forced_weight: NonNegative = 1.0
    """Loss weight of a second pass over each batch, in which every token is trained as the first
    draft of a round (teacher forcing). The pass takes two fifths of the time of a step, and
    improves the first draft, without which a round gains nothing. 0 turns the pass off, as in the
    MoA paper (docs/decisions/0004)."""
    staircase: bool = True
    """Use a curriculum in the first half of training: in some sequences, the drafter's
    self-attention sees only the tokens of its own draft round, and no tokens before the round. At
    the start this applies to all sequences, then to fewer and fewer, and from the middle of
    training to none."""

    @override
    def problems(self) -> list[str]:
        if self.step_bound_max >= self.step_bound_min:
            return []
        return [
            f"step_bound_max is {self.step_bound_max}, expected at least step_bound_min "
            f"({self.step_bound_min})"
        ]


class MemorySettings(Config):
    """Settings of drafters that encode the target's KV and attend to the encoded KV."""

    layer_groups: Count = 2
    """Number of groups into which the target's layers are divided when the drafter encodes the
    target's keys and values. The layers of a group are consecutive, and their keys and values are
    averaged. The averages of all groups are concatenated, and the encoded KV (the vectors that the
    drafter attends to) is computed from them. More than 1 group speeds up learning. The MoA paper,
    the MoA authors' code and vLLM use 1 group (docs/decisions/0006). dspark and dflash use this
    setting only with `context=memory`."""
    layer_stride: Count = 1
    """Encode the keys and values of every n-th layer of the target only, where n is this number.
    Layers are counted down from the last one. 1 encodes all layers, as in the MoA paper. 2 halves
    the bytes that training reads from the store, and the cost of layer self-attention (the
    attention over the target's layers). dspark and dflash use this setting only with
    `context=memory`."""
    unrotated_keys: bool | None = None
    """Undo RoPE (rotary position embedding) in the target's keys before the drafter encodes them,
    so that the same content looks the same at every position. The MoA paper and the MoA authors'
    code use keys after RoPE (docs/decisions/0006). Default: true if the target applies RoPE as
    Llama does, otherwise false. dspark and dflash use this setting only with `context=memory`."""
    layer_attention: bool = True
    """Let the drafter combine the keys and values of the target's layers by attention over the
    layers (layer self-attention). If false, only the keys and values of the last layer are read and
    encoded. dspark and dflash use this setting only with `context=memory`."""
    layer_attention_heads: Count | None = None
    """Number of query heads in layer self-attention (the attention over the target's layers). It
    must divide the KV width, which is the number of elements of the keys and values of one token in
    one layer of the target. Default: the largest divisor that is at most the target's number of
    query heads. dspark and dflash use this setting only with `context=memory`."""
    layer_attention_kv_heads: Count | None = None
    """Number of key and value heads in layer self-attention (the attention over the target's
    layers). Default: the target's number of key and value heads. dspark and dflash use this setting
    only with `context=memory`."""
    layer_attention_mlp_width: Count | None = None
    """Width of the MLP (feed-forward network) in layer self-attention (the attention over the
    target's layers). Default: 1.5 times the KV width, which is the number of elements of the keys
    and values of one token in one layer of the target. dspark and dflash use this setting only with
    `context=memory`."""


class MoASettings(RoundSettings, MemorySettings, PositionSettings, FeatureLossSettings):
    """Mixture of Attentions. ``--preset paper`` selects the published settings."""

    kind: Literal["moa"] = "moa"
    """Mixture of Attentions."""
    target_layer_inference: Natural = 0
    """Number N of the target's last decoder layers that the drafter's hidden states also pass
    through before the LM head (Target Layer Inference). This makes drafts better, but each draft
    more expensive. The store must contain the weights of these layers: extract it with
    `moa-data extract --target-layers N`."""
    self_attention_kv_heads: Count | None = None
    """Number of key and value heads in the drafter's self-attention. Default: half of the target's
    number of key and value heads."""
    self_attention_mlp_width: Count | None = None
    """Width of the MLP (feed-forward network) after the drafter's self-attention. Default: 3/7 of
    the target's MLP width."""
    cross_attention_kv_heads: Count | None = None
    """Number of key and value heads in the drafter's cross-attention. Default: half of the target's
    number of key and value heads."""
    cross_attention_mlp_width: Count | None = None
    """Width of the MLP (feed-forward network) after the drafter's cross-attention. Default: 3/7 of
    the target's MLP width."""
    cross_attention_drafts: bool = True
    """Let the drafter's cross-attention also see the earlier drafts of the same round. The last
    draft of a long chain then gets as good as the first one. The MoA paper, the MoA authors' code
    and vLLM do not do this (docs/decisions/0005)."""


class EagleSettings(LayerSettings, FeatureLossSettings):
    """EAGLE-2's drafter: decoder layers that read hidden states of the target."""

    kind: Literal["eagle"] = "eagle"
    """EAGLE."""
    feature_noise: NonNegative = 0.2
    """Width of the uniform random noise that is added to the target's hidden states in training.
    For example, 0.2 adds numbers between -0.1 and 0.1. The noise teaches the drafter to cope with
    inexact hidden states. 0 adds no noise."""
    eagle_layers: Count = 1
    """Number of decoder layers in the EAGLE drafter. More layers make drafts more expensive."""
    eagle_input_norm: bool = True
    """Normalize the input of the first layer's attention. If false, vLLM and SGLang can run the
    exported drafter without an additional layer."""
    eagle_embedding_scale: NonNegative = 0.0
    """Factor by which token embeddings are multiplied before they are combined with the target's
    hidden states. It must be a power of two. 0 chooses the factor that makes embeddings about as
    large as hidden states. 1 is EAGLE as published. In exported drafters, the weights are
    multiplied by the factor, so other programs need no change."""


class Eagle3Settings(LayerSettings, PositionSettings, DrafterSettings):
    """EAGLE-3's drafter: one layer that reads the outputs of three layers of the target."""

    kind: Literal["eagle3"] = "eagle3"
    """EAGLE-3."""
    fused_layers: tuple[int, ...] | None = None
    """The decoder layers of the target whose outputs EAGLE-3 reads, counted from 0 and separated by
    commas. Default for a target of L layers: 1, L / 2 - 1 and L - 4."""
    draft_vocabulary: Count | Literal["all"] | None = None
    """Number of different tokens that EAGLE-3 can propose, or all. The most frequent tokens of the
    store's responses are chosen. EAGLE-3 trains an LM head (output layer) of its own with one row
    for each of these tokens, so fewer tokens make drafts cheaper. Default: the number with which
    decoding should be fastest, estimated from the number of weights that a draft round reads, but
    at most 32,000."""
    test_time_steps: Count = 7
    """Number of consecutive drafts that training computes from each position. Each draft reads the
    drafter's output for the previous draft, as in decoding. More drafts take more time and
    memory."""
    fc_norm: bool = False
    """Normalize the outputs of the target's layers separately before they are concatenated, as in
    EAGLE-3.1."""
    norm_output: bool = False
    """Pass the drafter's output through the final norm before the next draft reads it, as in
    EAGLE-3.1. Without this norm, the output's magnitude may grow from draft to draft."""


class BlockSettings(LayerSettings, MemorySettings, PositionSettings, DrafterSettings):
    """Settings of block-parallel drafters: what they read, their blocks, and their losses."""

    context: Literal["hidden", "kv", "memory"] = "hidden"
    """What the drafter reads about the tokens that the target has already verified. hidden: outputs
    of some of the target's layers, as in the published DSpark and DFlash. kv: the target's keys and
    values, unchanged. memory: the encoded KV of Mixture of Attentions, which is computed from the
    keys and values of all layers."""

    forward_kl_weight: NonNegative = 1.0
    """Weight of the distillation loss in the total loss. The distillation loss makes the drafter's
    probabilities for the next token similar to the target's. The setting divergence chooses its
    formula, which is the KL divergence by default. 0 turns the loss off, as in the published
    DSpark."""
    cross_entropy_weight: NonNegative = 0.0
    """Weight of the cross-entropy loss in the total loss. The labels of this loss are the tokens of
    the training text. The published DSpark uses 0.1; 0 turns the loss off."""
    l1_weight: NonNegative = 0.0
    """Weight of the L1 loss in the total loss. This loss is the sum of the absolute differences
    between the drafter's and the target's probabilities for the next token. The published DSpark
    uses 0.9; 0 turns the loss off."""
    anchors: Count = 512
    """Maximum number of draft blocks per sequence that are trained in one step. Each step chooses
    new random positions at which the blocks start. Fewer blocks take less memory and time per step,
    but the drafter learns less from each step."""
    block_size: Count = 7
    """Number of token positions (slots) in a block. The drafter drafts a whole block in one forward
    pass, so this also limits the number of tokens drafted per target call."""
    sample_from_anchor: bool = True
    """Let every slot of a block predict the token at the next position, including the first slot
    (the anchor), which contains the last known token. If false, the anchor predicts nothing, and
    every other slot predicts the token at its own position."""
    position_decay: NonNegative | None = None
    """With `position_weights=decay`, the weight in the loss falls from draft to draft of a block.
    This setting d says how slowly: the draft with index k, counted from 0, has the weight exp(-k /
    d). The value 0 turns the decay off: all drafts have the weight 1. Default: 4 for blocks of up
    to 8 slots, 5 for up to 12 slots, 7 for longer blocks."""
    fused_layers: tuple[int, ...] | None = None
    """The decoder layers of the target that the drafter reads, counted from 0 and separated by
    commas. With `context=hidden`, the first one may be -1, which means the embedding. With
    `context=kv`, the number of layers must be a multiple of `block_layers`. With `context=memory`,
    leave this setting out. Default for a target of L layers: five evenly spaced layers from 1 to L
    - 3, or `block_layers` such layers with `context=kv`."""
    block_layers: Count = 5
    """Number of decoder layers in the drafter. More layers make drafts more expensive."""
    mask_token: Natural | None = None
    """Id of the token that fills the positions to be drafted in the drafter's input. Choose a token
    that does not occur in texts. Default: the last token of the vocabulary."""

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
                f"context is {self.context}, but {' and '.join(changed)} can be changed only if "
                "context is memory; set context to memory, or leave the others out"
            )
        if self.divergence != "kl" and not self.forward_kl_weight:
            problems.append(
                f"divergence is {self.divergence}, but the loss that it chooses is turned off, "
                "because forward_kl_weight is 0; set forward_kl_weight above 0, and l1_weight to 0"
            )
        return problems

    def decay(self) -> float:
        """Return ``position_decay``, or its default for this block size."""
        if self.position_decay is not None:
            return self.position_decay
        return 4.0 if self.block_size <= 8 else 5.0 if self.block_size <= 12 else 7.0


class DSparkSettings(BlockSettings):
    """DSpark: one forward drafts a block of tokens. Each draft depends on the previous draft."""

    kind: Literal["dspark"] = "dspark"
    """DSpark."""
    markov_head: Literal["none", "vanilla", "gated", "rnn", "product"] = "vanilla"
    """Kind of the Markov head, which makes each draft depend on the previous draft. none: no Markov
    head. vanilla, gated, rnn: the three kinds published with DSpark. product: multiplies the hidden
    state at a position by the embedding of the previous token, as in DFlash 2."""
    markov_rank: Count = 256
    """Rank of the low-rank matrices in the Markov head, which makes each draft depend on the
    previous draft. A higher rank makes the head more expressive and drafts more expensive."""
    confidence_head: bool = True
    """Train an additional head that predicts how likely each draft is to be accepted. Decoding can
    use it to end a chain of drafts early: `moa-data generate --tree 7c0.3` stops before the
    first draft whose predicted probability is below 0.3."""
    confidence_with_markov: bool = True
    """Let the confidence head, which predicts whether a draft is accepted, also read the Markov
    head's embedding of the previous token."""
    confidence_weight: NonNegative = 1.0
    """The confidence head predicts whether a draft is accepted, and learns with a binary
    cross-entropy. This is the weight of this loss in the total loss. 0 turns it off."""


class DFlashSettings(BlockSettings):
    """DFlash: one forward drafts a block of tokens. The drafts do not depend on each other."""

    kind: Literal["dflash"] = "dflash"
    """DFlash."""
    forward_kl_weight: NonNegative = 0.0
    """Weight of the distillation loss in the total loss. The distillation loss makes the drafter's
    probabilities for the next token similar to the target's. The setting divergence chooses its
    formula, which is the KL divergence by default. 0, the default, turns the loss off."""
    cross_entropy_weight: NonNegative = 1.0
    """Weight of the cross-entropy loss in the total loss. The labels of this loss are the tokens of
    the training text. 0 turns the loss off."""
    block_size: Count = 16
    """Number of token positions (slots) in a block. The drafter drafts a whole block in one forward
    pass, so this also limits the number of tokens drafted per target call."""
    sample_from_anchor: bool = False
    """Let every slot of a block predict the token at the next position, including the first slot
    (the anchor), which contains the last known token. If false, the anchor predicts nothing, and
    every other slot predicts the token at its own position."""


class GlideSettings(LayerSettings, DrafterSettings):
    """GLIDE: one layer that reads the keys and values of the target's last layer."""

    kind: Literal["glide"] = "glide"
    """GLIDE."""
    block_size: Count = 5
    """Number of tokens in a block of GLIDE's training. A block imitates a draft round: its tokens
    see the target's keys and values of earlier blocks only."""


class MedusaSettings(DrafterSettings):
    """Medusa-1: several heads on the target's hidden state. Head k predicts the k-th draft."""

    kind: Literal["medusa"] = "medusa"
    """Medusa."""
    medusa_heads: Count = 6
    """Number of Medusa heads. Head k predicts the k-th draft of a round, so this is also the
    maximum number of drafts in a row. More heads make drafts more expensive."""
    medusa_layers: Count = 1
    """Number of residual layers in each Medusa head. More layers make drafts more expensive."""


class IndependentSettings(DrafterSettings):
    """A small Llama model that reads only tokens, and no activations of the target."""

    kind: Literal["independent"] = "independent"
    """Independent: a small model of its own that reads only tokens."""
    independent_layers: Count = 2
    """Number of decoder layers in the independent drafter. More layers make drafts more
    expensive."""
    independent_width: Annotated[int, Field(ge=2)] | None = None
    """Hidden size of the independent drafter, an even number. Default: half of the target's hidden
    size."""


class ScheduleSettings(Config):
    """How long the run is, and how the learning rate changes."""

    max_steps: Common[Count | None] = None
    """Length of the run in optimizer steps. Give either this or `epochs`. Default: the length that
    `epochs` gives."""
    epochs: Common[Positive | None] = None
    """Length of the run in epochs, which are passes over the training split. Give either this or
    `max_steps`. The MoA paper uses 40. Default: as many epochs as a million tokens take, from 1 to
    10."""
    warmup_steps: Natural | None = None
    """Number of steps at the start in which the learning rate rises linearly from 0 to its peak.
    Default: a tenth of the run, at most 50."""
    peak_multiplier: Positive | None = None
    """Ratio of the peak learning rate to the final learning rate (`learning_rate`). 1 keeps the
    learning rate constant after the warm-up. Default: 10. If the target's hidden size is 2,048 or
    more and the run has at least 20 million training tokens: 20, as in the MoA paper."""
    decay_steps: Annotated[int, Field(ge=-1)] | None = None
    """Step at which the learning rate, which falls linearly from its peak, reaches its final value.
    -1 means the end of the run. Default: -1. If the target's hidden size is 2,048 or more and the
    run has at least 20 million training tokens in epochs of 1,000 steps or more: the end of the
    first epoch, as in the MoA paper."""
    stop_after_steps: Count | None = None
    """Stop after this step and save everything, so that `resume` can continue later. The learning
    rate still follows the schedule of the whole run."""

    @override
    def problems(self) -> list[str]:
        both = self.max_steps is not None and self.epochs is not None
        line = "`max_steps` and `epochs` both set the length of the run; leave out one of them"
        return [line] if both else []

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
    """The optimizer. muon: Muon for matrices and AdamW for all other weights; it needs fewer steps
    than adamw. adamw: AdamW for all weights, as in the MoA paper. auto: adamw if the target's
    hidden size is 2,048 or more and the run has at least 20 million training tokens, otherwise
    muon."""
    learning_rate: Common[Positive | None] = None
    """Learning rate at the end of the schedule. The peak is `peak_multiplier` times as high.
    Default: 1e-4. If the target's hidden size is 2,048 or more and the run has at least 20 million
    training tokens: 3e-5, as in the MoA paper."""
    matrix_learning_rate: Positive | None = None
    """Learning rate of Muon, which trains the matrices, at the end of the schedule. It rises and
    falls in proportion to `learning_rate`. Default: 2e-3."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, as in AdamW: in each step, weights shrink by this value times the
    learning rate, relative to their size. 0 turns it off."""
    gradient_clip: NonNegative = 1.0
    """Maximum norm of the gradient of all weights together. Larger gradients are scaled down to
    this norm. 0 turns this off."""


class BatchSettings(Config):
    """The sequences of a step, and how they are read."""

    batch_size: Common[Count | None] = None
    """Number of sequences per optimizer step, over all devices together. Default: from 2 to 32,
    depending on the length of the run."""
    micro_batch_size: Count | None = None
    """Number of sequences that a device processes in one forward pass. Gradients are accumulated
    until the batch is complete, so this changes results only by rounding. Lower it if memory runs
    out. Default: as many as fit into memory; on a CPU, as many as have at most 2,048 tokens
    together."""
    reader_threads: Count | None = None
    """Number of threads that read and decode activations from the store. Default: the number of CPU
    cores divided by the number of devices, at most 16."""
    prefetch_batches: Count = 4
    """Maximum number of micro-batches that are read ahead of training, so that it does not wait for
    the store. They take host memory."""
    prefetch_mb: Count = 1024
    """Maximum size in MiB of the activations that are read ahead of training. They are in host
    memory. At least one micro-batch is read ahead, even if it is larger."""
    cache_dir: str | None = None
    """Local folder for a cache of stores that are in a bucket, so that later epochs and runs do not
    download the data again. Several processes and stores can share the folder. Default: the
    environment variable MOA_DATA_CACHE_DIR; if it is not set, nothing is cached."""
    cache_gb: Positive | None = None
    """Maximum size in gigabytes of the cache in `cache_dir`. The data that was not used for the
    longest time is deleted first. Default: the environment variable MOA_DATA_CACHE_GB, or 100."""


class ValidationSettings(Config):
    """Which sequences are held out, and when the run is validated on them."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction of the sequences that are held out of training for validation. A hash of their
    content selects them. Default: 0.02. In small stores it is higher, but at most 0.2, so that 50
    sequences or 5,000 response tokens are held out."""
    validation_sequences: Natural = 64
    """Maximum number of held-out sequences that one validation uses. More sequences make its
    results more precise, and take more time."""
    validate_every: Count | None = None
    """Number of steps between two validations. Default: a tenth of the run, at most 1,000."""
    draft_length: Count = 5
    """Number of drafts per round for which validation computes the expected acceptance length
    (tokens committed per target call)."""


class RecordSettings(Config):
    """How often a run logs and saves."""

    log_every: Count | None = None
    """Number of steps between two rows of the log. Default: a twentieth of the run, at most 10."""
    checkpoint_every: Count = 100
    """Number of steps between two checkpoints, from which `resume` can continue. A crash loses at
    most this number of steps."""
    logger: Literal["wandb", "mlflow"] | None = None
    """Also log to Weights & Biases (wandb) or MLflow (mlflow). The account and the server are read
    from the environment variables of these tools. Default: neither."""
    project: str = "moa-data"
    """Name of the project in Weights & Biases, or of the experiment in MLflow."""


class MachineSettings(Config):
    """The devices that train, and their precision."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    """Kind of device that trains. auto takes an accelerator (GPU) if the machine has one, otherwise
    the CPU."""
    devices: Common[str] = "auto"
    """Number of devices to use on each machine; auto uses all accelerators."""
    num_nodes: Count = 1
    """Number of machines that train together. Start the same command on each of them with torchrun
    or SLURM."""
    precision: Literal["auto", "bf16-mixed", "32-true", "16-mixed"] = "auto"
    """Numeric precision of training. auto means bf16-mixed on an accelerator and 32-true on a CPU.
    bf16-true is not offered: in bfloat16, weights near 1, such as those of norms, would lose all
    updates below 0.002."""
    compile: bool = False
    """Compile the drafter's layers with torch.compile. This can make training faster, above all
    that of moa. Compiling takes minutes at the start, and results change by rounding errors."""

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
    """Settings of a training run.

    The default of some settings is None or "auto". ``defaults.py`` chooses their values from the
    length of the run and the size of the target.
    """

    # Callers may pass a setting of a group by its name, without the name of the group. Without this
    # signature, type checkers would refuse such names.
    if TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None: ...

    store: str
    """The activation store to train from: a folder, or the URL of a store in a bucket."""
    out: Common[str]
    """Folder of the run. The command writes checkpoints, logs, curves and the trained drafter to
    it."""
    drafter: Common[AnyDrafter] = Field(default_factory=MoASettings, discriminator="kind")
    """Kind of drafter to train: moa (Mixture of Attentions), eagle (EAGLE-2), eagle3 (EAGLE-3),
    dspark and dflash (which draft blocks of tokens), glide, medusa, or independent (a small Llama).
    moa needs a store with the target's keys and values (kv), and glide needs those of the last
    layer. By default, the others need hidden states only. docs/choosing.md helps to choose."""
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    data: BatchSettings = Field(default_factory=BatchSettings)
    validation: ValidationSettings = Field(default_factory=ValidationSettings)
    record: RecordSettings = Field(default_factory=RecordSettings)
    machine: MachineSettings = Field(default_factory=MachineSettings)
    init_from: Common[str | None] = None
    """Start from the weights of an existing drafter: a run, or a folder with a drafter in another
    format. The optimizer state and the learning rate schedule start from the beginning."""
    resume: Common[bool] = False
    """Continue the run in `out` from its last checkpoint, with its settings. To make the run
    longer, also give a larger `max_steps`."""
    dry_run: Common[bool] = False
    """Train on a few micro-batches, print how much time, memory and disk space the whole run needs,
    and write nothing."""
    seed: Seed = 0
    """Seed of all random numbers: initial weights, order of the data, and random choices in
    training."""

    @property
    def target_layer_inference(self) -> int:
        """Number of last layers of the target that the drafter's features pass through."""
        return getattr(self.drafter, "target_layer_inference", 0)


def earlier_settings(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Find the settings that a resumed run reuses from its earlier invocation.

    Args:
        given: the settings that were given for this invocation. They take precedence over the
            result.

    Returns:
        The path of the settings file of the earlier invocation, and the settings in it. Both are
        empty if no run is resumed. Both are also empty if the file cannot be read. In this case,
        the error is reported later, when the run is resumed.
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
    # Do not reuse the recorded ``stop_after_steps``, so that a resumed run does not stop early
    # again. Either ``max_steps`` or ``epochs`` sets the length of a run. If one of these two
    # settings is given now, do not reuse the recorded value of either.
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
"""Named sets of settings for ``preset``.

``paper`` is Mixture of Attentions as published. ``small`` is for short runs. With ``small``, the
optimizer is Muon, and the learning rate is higher and decays until the end of the run.
"""


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
    """Folder to write. It must be empty or not exist yet."""
    model: str | None = None
    """The drafter's target: a folder, a GGUF file, a Hub id or a store. The speculators formats
    require this option, because they record the target's folder or Hub id. Some formats include
    files or weights of the target: moa and moa-eagle its config.json, eagle and speculators-eagle3
    its embeddings, dspark its embeddings and LM head (output layer). Default: the store that the
    run was trained from."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the written weights. Inference engines convert the weights to their own data
    type when they load them."""
