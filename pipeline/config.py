"""Settings of `extract`, `add` and `regenerate`, and the names of activations."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from typing_extensions import override

from ..config import (
    Common,
    Config,
    Count,
    Dtype,
    Natural,
    Positive,
    SamplingSettings,
    TemplateKwargs,
)
from ..errors import OptionInvalid
from ..machine import usable_cores
from ..storage.schema import KV
from ..text import activation_name

if TYPE_CHECKING:
    from ..moa.decoding.tree import TreeShape


TEXT_FIELDS = ("tokens", "response_mask")  # fields of every store that are not activations

DEFAULT_MAX_LENGTH = 2048
_MAX_ENCODE_THREADS = 16  # with more threads, the single writer thread is the bottleneck


class RowSettings(Config):
    """Which rows of a dataset are read, and how."""

    split: Common[str | None] = None
    """Split of the dataset; in a local folder, the files or sub-folders named after it. Default:
    train_sft, or the only split. A folder with several other splits is refused."""
    columns: tuple[str, ...] = ()
    """Columns of the roles user, assistant, system, messages or tools, as in
    user=instruction+input; or the format alpaca or prompt-completion. Default: the rows are chats,
    under messages or conversations."""
    dataset_config: str | None = None
    """Configuration of a Hub dataset that has several."""
    dataset_revision: str | None = None
    """Branch, tag or commit of a Hub dataset; default: main. The store records the commit, and
    later runs use it."""
    max_rejected_fraction: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Fail when more than this fraction of the rows cannot be used."""


class DataSettings(RowSettings):
    """Which chats are read, and how they become sequences."""

    max_sequences: Common[Count | None] = None
    """Stop after this many usable sequences, in the dataset's order; default: all."""
    max_length: Common[Count | None] = None
    """Longest sequence in tokens; longer ones are truncated, tokens and mask together. Default:
    2048, or the target's number of positions if that is lower."""
    template_kwargs: TemplateKwargs = ()
    """Arguments of the chat template, as NAME=VALUE or a JSON object, such as enable_thinking=false
    for Qwen3."""
    tokenize_processes: Count | None = None
    """Processes that tokenise the chats; default: one per core."""


class StorageSettings(Config):
    """Format of the stored activations."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the stored activations, and of the forward on an accelerator."""
    codec: Common[str] = "lossless"
    """Codec of the activations: lossless, int8, or
    transform:B[,hidden=B][,tokens][,from-kv][,joint][@all, @layer or @groupN] with B bits per
    value, such as transform:1 (docs/codecs.md)."""
    part_tokens: Count = 65_536
    """Tokens per part. A part is the unit of work and of resume; an interruption loses at most one
    part."""
    target_license: str | None = None
    """Licence of the target for the store's card, under its name on the Hub; default: left blank to
    fill in."""
    dataset_license: str | None = None
    """Licence of the dataset for the store's card; default: left blank to fill in."""

    @property
    def licences(self) -> tuple[str | None, str | None]:
        """The licences of target and dataset."""
        return self.target_license, self.dataset_license


class ForwardSettings(Config):
    """Settings of the target's forward."""

    device: Common[str] = "auto"
    """Device of the forward: auto, cpu, cuda, cuda:1, ..."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the forward. With auto, a store keeps the dtype of its first run. For a new store,
    auto is `dtype` on an accelerator. On a CPU it is bfloat16 if the CPU supports it (avx512_bf16,
    AMX) and both `dtype` and the target's weights are bfloat16, else float32."""
    source: Literal["transformers", "vllm"] = "transformers"
    """Engine that runs the target: transformers, or vLLM, which must be installed separately."""
    batch_tokens: Count | None = None
    """Tokens per forward, padding included. Default: 16384 on an accelerator; 2048 on a CPU, whose
    caches are small; 65536 with vLLM, which splits them into its own batches."""
    encode_threads: Count | None = None
    """Threads that compress activations; default: the machine's cores, up to 16. Any number gives
    the same bytes."""


class ScaleSettings(Config):
    """Number of processes that extract in parallel, and the engine that schedules them."""

    workers: Count = 1
    """Processes that extract parts in parallel. Each has its own device, or its share of the cores
    on a CPU; with Ray this is the maximum. Any number gives the same bytes."""
    engine: Literal["processes", "ray"] = "processes"
    """Scheduler of the workers. processes: this command starts them on this machine. ray: Ray runs
    them on all machines of a cluster, which must see --model and --out under the same paths."""
    address: str | None = None
    """The Ray cluster: HOST:PORT, or auto for the cluster of this machine. Default: the cluster in
    RAY_ADDRESS, or a local one that runs only as long as the command."""
    gpus_per_worker: Annotated[float, Field(ge=0, le=1)] | None = None
    """GPUs per Ray worker: 1, a fraction such as 0.5, or 0 to compute on CPUs; default: 1 if this
    machine has a GPU, else 0."""
    cpus_per_worker: Count = 1
    """Cores that Ray reserves per worker. A worker on a GPU also uses the cores of its GPU's share
    of the machine."""

    @override
    def problems(self) -> list[str]:
        if self.engine == "ray":
            if not (self.address or "").startswith("ray://"):
                return []
            return [
                f"address is {self.address!r}, but Ray Client is not supported; give HOST:PORT on "
                "a machine of the cluster, or start the command there with `ray job submit`"
            ]
        ray_settings = {"address": self.address, "gpus_per_worker": self.gpus_per_worker}
        return [
            f"{name} is for Ray; add --engine ray"
            for name, value in ray_settings.items()
            if value is not None
        ]

    @property
    def is_alone(self) -> bool:
        """Whether the command extracts in its own process, without workers."""
        return self.engine == "processes" and self.workers == 1

    @property
    def n_local_workers(self) -> int:
        """Number of workers that this command itself starts on this machine; 1 with Ray."""
        return 1 if self.engine == "ray" else self.workers


class ExtractConfig(Config):
    """Settings of `moa-data extract`: target, dataset, activations and output."""

    # Type checkers would otherwise refuse the names of settings that are in groups.
    if TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None: ...

    model: Common[str]
    """The target: a folder in Hugging Face layout, a GGUF file, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; default: main. The store records the commit, and later
    runs use it."""
    dataset: Common[str]
    """Chats: a hub id, a jsonl, json, parquet or arrow file, or a folder of them."""
    out: Common[str]
    """Folder of the store, or its URL (s3://, gs://, az://). Run the same command again to
    resume."""
    activations: Common[Annotated[tuple[str, ...], Field(min_length=1)]] = ("kv", "hidden:last")
    """What to store: kv, hidden:last (after the final norm), hidden:layer:K (output of decoder
    layer K, from 0)."""
    target_layers: Common[Natural] = 0
    """Last decoder layers to keep for Target Layer Inference. Their input hidden state is stored
    too."""
    data: DataSettings = Field(default_factory=DataSettings)
    storage: StorageSettings = Field(default_factory=StorageSettings)
    forward: ForwardSettings = Field(default_factory=ForwardSettings)
    scale: ScaleSettings = Field(default_factory=ScaleSettings)

    @override
    def problems(self) -> list[str]:
        if self.forward.source != "vllm":
            return []
        mistakes = []
        if not self.scale.is_alone:
            mistakes.append(
                "workers and engine need transformers as source; leave them out with vLLM"
            )
        if self.forward.device != "auto":
            mistakes.append(
                f"device is {self.forward.device}, but vLLM chooses its own; leave it out"
            )
        if self.storage.codec.startswith("transform"):
            mistakes.append(
                "codec transform learns from forwards of transformers; extract lossless with vLLM, "
                "then `recode`"
            )
        return mistakes


class AddConfig(Config):
    """Settings of `moa-data add`. Dtype, codec, sequence lengths and batches are the store's."""

    store: str
    """The store, made by `extract`."""
    model: str
    """The target that the store was made with: a folder in Hugging Face layout, a GGUF file, or a
    hub id."""
    activations: tuple[str, ...] = ()
    """What to add: hidden:layer:K (output of decoder layer K, from 0), hidden:last, kv. Stored
    fields are kept."""
    target_layers: Natural = 0
    """Last decoder layers to keep for Target Layer Inference. Their input hidden state is added
    too."""
    device: str = "auto"
    """Device of the forward. It must be of the same kind as in the extraction; auto chooses that
    kind."""
    encode_threads: Count | None = None
    """Threads that compress the new fields; default: the machine's cores, up to 16. Any number
    gives the same bytes."""

    @override
    def problems(self) -> list[str]:
        if self.activations or self.target_layers:
            return []
        return ["There is nothing to add. Give --activations, for example hidden:layer:3"]


class QuestionSettings(RowSettings):
    """Which questions are answered, and which chats are left out."""

    max_rows: Count | None = None
    """Read only this many rows, from the start of the dataset; default: all."""
    max_length: Count = 2048
    """Longest chat in tokens, answers included. Use the --max-length of the later extraction."""
    keep_cut: bool = True
    """Keep answers that were cut at max_new_tokens or max_length. Their rows have finish_reason
    length, so `extract` knows that the end of turn is missing."""
    question_temperature: Positive = 1.0
    """Sampling temperature of questions that the target writes (--self-prompted)."""
    question_top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Top-p of questions that the target writes: sample from the most likely tokens up to this
    probability."""
    question_tokens: Count = 256
    """Maximum tokens of a question that the target writes. A question that has not ended by then is
    left out."""


class ServerSettings(Config):
    """Time limits of requests to a server."""

    answer_s: Positive = 600.0
    """Timeout of a request in seconds; its row is then rejected."""
    patience_s: Positive = 120.0
    """Seconds during which requests to an overloaded or unreachable server are retried."""


class RegenerateConfig(Config):
    """Settings of `moa-data regenerate`: the target, the questions and the output."""

    model: Common[str | None] = None
    """The target: a folder, a GGUF file, or a hub id. With --server, the model's name on the
    server; default: the server's only model."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; default: main."""
    drafter: Common[str | None] = None
    """A run of `moa-data train`, or a folder with a drafter, to speed up the target."""
    server: Common[str | None] = None
    """Send the questions to a server with OpenAI's API instead, such as http://HOST:8000/v1. The
    key is read from OPENAI_API_KEY."""
    dataset: Common[str | None] = None
    """Chats or questions of Spec-Bench: a hub id, a jsonl, json, parquet or arrow file, or a folder
    of them."""
    self_prompted: Common[Count | None] = None
    """Use no dataset, and write this many chats: the target writes the questions too, as
    continuations of the chat template's empty user turn."""
    out: Common[str]
    """File of the answered chats (.jsonl), or a folder for it. Run the same command again to
    resume."""
    template_kwargs: TemplateKwargs = ()
    """Arguments of the chat template, as NAME=VALUE, such as enable_thinking=false for Qwen3.
    Default: those that the drafter's store records. They are sent to a server as
    chat_template_kwargs."""
    max_new_tokens: Common[Count] = 1024
    """Maximum tokens of an answer. A longer answer is cut there, and its chat ends."""
    tree: str | None = None
    """Drafts per target call: the length of a chain such as 5, LENGTH@PROBABILITY for a chain that
    stops early, or DEPTHxBREADTHxNODES for a tree. Default: 10@0.2, or 5 if tokens are sampled."""
    batch_size: Common[Count | None] = None
    """Chats that are answered at once; default: 8, or 32 with --server."""
    dtype: Common[Dtype] = "float32"
    """Dtype of target and drafter."""
    device: Common[str] = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    questions: QuestionSettings = Field(default_factory=QuestionSettings)
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    serving: ServerSettings = Field(default_factory=ServerSettings)

    @override
    def problems(self) -> list[str]:
        if (self.dataset is None) == (self.self_prompted is None):
            return ["give either --dataset or --self-prompted"]
        if self.server is None:
            if self.model is None:
                return ["neither a model nor a server is given: give --model MODEL or --server URL"]
            if self.tree is not None and self.drafter is None:
                return [f"tree is {self.tree!r}, but no drafter is given; give --drafter RUN"]
            return self.refusal_of(self.shape)
        local = {
            "drafter": self.drafter, "tree": self.tree, "revision": self.revision, "self_prompted": self.self_prompted,
        }  # fmt: skip
        unusable = [name for name, value in local.items() if value is not None]
        if unusable:
            return [
                f"{unusable[0]} is for a target that is loaded here; leave it out with --server"
            ]
        if not self.server.startswith(("http://", "https://")):
            return [f"server is {self.server!r}, expected a URL such as http://127.0.0.1:8000/v1"]
        return []

    def shape(self) -> "TreeShape":
        """Return the shape of the drafts.

        The default is a fixed shape. The shape ``auto`` would depend on the machine's timing.
        """
        from ..moa.decoding.sampling import SamplingConfig
        from ..moa.decoding.tree import TreeShape

        shape = TreeShape.parse(self.tree or ("5" if self.sampling.temperature else "10@0.2"))
        SamplingConfig(**self.sampling.arguments()).check_shape(shape)
        return shape

    @property
    def n_together(self) -> int:
        """Number of chats that are answered at once."""
        return self.batch_size or (8 if self.server is None else 32)


def resolve_encode_threads(wanted: int | None, n_workers: int = 1) -> int:
    """Return the number of encoding threads of a worker.

    Args:
        wanted: the setting; None for one thread per core of the worker's share, at most 16.
        n_workers: workers on this machine.
    """
    return wanted or min(core_share(n_workers), _MAX_ENCODE_THREADS)


def core_share(n_workers: int) -> int:
    """Return the number of cores per worker if the workers share the machine; at least 1."""
    return max(1, usable_cores() // n_workers)


@dataclass(frozen=True)
class ActivationSpec:
    """Which activations a forward captures."""

    kv: bool  # whether to capture the keys and values of all layers
    last: bool  # whether to capture the hidden state after the final norm
    # Decoder layers whose output is stored: counted from 0, ascending, without duplicates.
    layers: tuple[int, ...]
    # Fields of the keys and values. Layers that cache in different ways have different fields.
    kv_fields: tuple[str, ...] = (KV,)

    @property
    def fields(self) -> tuple[str, ...]:
        """All store fields, in their order in the store."""
        names = self.kv_fields * self.kv + ("hidden/last",) * self.last
        return names + tuple(f"hidden/layer_{layer}" for layer in self.layers)


def parse_activations(
    names: Iterable[str], target_layers: int, n_layers: int, kv_fields: tuple[str, ...] = (KV,)
) -> ActivationSpec:
    """Parse the names of activations.

    Args:
        names: kv, hidden:last or hidden:layer:K; a negative K counts from the end.
        target_layers: number of last decoder layers in the bundle. Their input hidden state is
            added to the activations.
        n_layers: number of decoder layers of the target.
        kv_fields: the fields in which this target's keys and values are stored.

    Raises:
        OptionInvalid: a name is unknown, or the target lacks a layer.
    """
    names = tuple(name.strip() for name in names)
    layers = set[int]()
    for name in names:
        number = re.fullmatch(r"hidden:layer:(-?\d+)", name)
        if not number and name not in ("kv", "hidden:last"):
            raise OptionInvalid(
                f"Unknown activation {name!r}: expected kv, hidden:last or hidden:layer:K. Change "
                "--activations."
            )
        if number and not -n_layers <= int(number[1]) < n_layers:
            raise OptionInvalid(
                f"Activation {name!r}: the target has {n_layers} decoder layers, 0 to "
                f"{n_layers - 1}. Choose one of them."
            )
        layers |= {int(number[1]) % n_layers} if number else set()
    if target_layers > n_layers:
        raise OptionInvalid(
            f"target_layers is {target_layers}, but the target has {n_layers} decoder layers. "
            "Lower --target-layers."
        )
    if 0 < target_layers < n_layers:
        layers.add(n_layers - 1 - target_layers)
    return ActivationSpec(KV in names, "hidden:last" in names, tuple(sorted(layers)), kv_fields)


def parse_fields(fields: Iterable[str]) -> ActivationSpec:
    """Return the activations that are stored in these fields.

    Raises:
        OptionInvalid: `extract` writes no field of that name.
    """
    names = [name for name in fields if name not in TEXT_FIELDS]
    if unknown := [
        name
        for name in names
        if not re.fullmatch(r"kv(/\w+)?|hidden/last|hidden/layer_\d{1,9}", name)
    ]:
        raise OptionInvalid(
            f"Field {unknown[0]!r} is not one that `extract` writes: kv, hidden/last or "
            "hidden/layer_<k>."
        )
    kv_fields = tuple(name for name in names if activation_name(name) == KV)
    return parse_activations(map(activation_name, names), 0, 10**9, kv_fields or (KV,))
