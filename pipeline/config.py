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
_MAX_ENCODE_THREADS = 16  # with more, the one thread that writes is the slowest stage


class RowSettings(Config):
    """Which rows of a dataset are read, and how."""

    split: Common[str | None] = None
    """Split of the dataset, in a local folder the files or sub-folders named after it; default: train_sft, or the only
    split. A folder with several others is refused."""
    columns: tuple[str, ...] = ()
    """Columns of rows that are not chats: user, assistant, system, messages or tools, as in user=instruction+input; or
    alpaca, or prompt-completion. Default: messages or conversations."""
    dataset_config: str | None = None
    """Configuration of a Hub dataset that has several."""
    dataset_revision: str | None = None
    """Branch, tag or commit of a Hub dataset; default: main. A store records its commit, and later starts use that."""
    max_rejected_fraction: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Fail when more than this fraction of the rows cannot be used."""


class DataSettings(RowSettings):
    """Which chats are read, and how they become sequences."""

    max_sequences: Common[Count | None] = None
    """Stop after this many usable sequences, in the dataset's order; default: all."""
    max_length: Common[Count | None] = None
    """Longest sequence in tokens; longer ones are cut, tokens and mask together; default: 2048, or the target's
    positions where it has fewer."""
    template_kwargs: TemplateKwargs = ()
    """Arguments of the chat template, as NAME=VALUE or a JSON object, such as enable_thinking=false of Qwen3."""
    tokenize_processes: Count | None = None
    """Processes that tokenise the chats; default: one for each core."""


class StorageSettings(Config):
    """How the store holds the activations."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype in which activations are stored, and computed on an accelerator."""
    codec: Common[str] = "lossless"
    """Codec of the activations: lossless, int8, or transform:B[,hidden=B][,tokens][,from-kv][,joint][@all,
    @layer or @groupN] with B bits per value, such as transform:1 (docs/codecs.md)."""
    part_tokens: Count = 65_536
    """Tokens per part, the unit of work, resume and loss."""
    target_license: str | None = None
    """Licence of the target, as the Hub names licences, for the store's card; default: left to fill in."""
    dataset_license: str | None = None
    """Licence of the dataset, for the card too; default: left to fill in."""

    @property
    def licences(self) -> tuple[str | None, str | None]:
        """Those of target and dataset."""
        return self.target_license, self.dataset_license


class ForwardSettings(Config):
    """How the target runs."""

    device: Common[str] = "auto"
    """Device of the forward: auto, cpu, cuda, cuda:1, ..."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the forward. auto: what the store was begun with; for a new store `dtype` on an accelerator, bfloat16 on
    a CPU that computes in it (avx512_bf16, AMX) if `dtype` and the target's weights are bfloat16, else float32."""
    source: Literal["transformers", "vllm"] = "transformers"
    """Engine that runs the target: transformers, or vLLM, which has to be installed beside this package."""
    batch_tokens: Count | None = None
    """Tokens per forward, padding included; default: 16384 on an accelerator, 2048 on a CPU, where caches are small,
    and 65536 with vLLM, which makes its own batches of them."""
    encode_threads: Count | None = None
    """Threads that compress activations; default: the machine's cores, up to 16. Any number gives the same bytes."""


class ScaleSettings(Config):
    """How many processes extract at once, and what directs them."""

    workers: Count = 1
    """Processes that extract parts at once, each on a device of its own, on a CPU with its share of the cores; with Ray
    at most that many. The bytes are the same."""
    engine: Literal["processes", "ray"] = "processes"
    """What directs the workers: this command, processes of this machine; or Ray, on every machine of a cluster that
    sees --model and --out under the same paths."""
    address: str | None = None
    """The Ray cluster: auto for the one that this machine belongs to, or HOST:PORT; default: the one that RAY_ADDRESS
    names, else one that is started on this machine for as long as the command runs."""
    gpus_per_worker: Annotated[float, Field(ge=0, le=1)] | None = None
    """GPUs of each Ray worker: 1, a part of one such as 0.5, or 0 to compute on CPUs; default: 1 where this machine has
    a GPU, else 0."""
    cpus_per_worker: Count = 1
    """Cores that Ray sets aside for each worker, which on a GPU uses those of the GPU's share of the machine too."""

    @override
    def problems(self) -> list[str]:
        if self.engine == "ray":
            if not (self.address or "").startswith("ray://"):
                return []
            return [
                f"address is {self.address!r}, but Ray Client is not supported; give HOST:PORT on a machine of the "
                "cluster, or start the command there with `ray job submit`"
            ]
        given = {"address": self.address, "gpus_per_worker": self.gpus_per_worker}
        return [
            f"{name} is for Ray; add --engine ray"
            for name, value in given.items()
            if value is not None
        ]

    @property
    def is_alone(self) -> bool:
        """Whether the command does the work itself."""
        return self.engine == "processes" and self.workers == 1

    @property
    def n_local_workers(self) -> int:
        """Most processes at once that this command starts on this machine itself."""
        return 1 if self.engine == "ray" else self.workers


class ExtractConfig(Config):
    """Settings of `moa-data extract`: what to extract, from which target and dataset, and where to."""

    if TYPE_CHECKING:  # else they refuse names of settings in groups

        def __init__(self, /, **values: Any) -> None: ...

    model: Common[str]
    """The target: a folder in Hugging Face layout, a GGUF file, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; default: main. Its commit is recorded, and used by every later start."""
    dataset: Common[str]
    """Chats: a hub id, a jsonl, json, parquet or arrow file, or a folder of them."""
    out: Common[str]
    """Folder of the store, or its URL (s3://, gs://, az://); the same command run again continues where it stopped."""
    activations: Common[Annotated[tuple[str, ...], Field(min_length=1)]] = ("kv", "hidden:last")
    """What to store: kv, hidden:last (after the final norm), hidden:layer:K (output of decoder layer K, from 0)."""
    target_layers: Common[Natural] = 0
    """Decoder layers kept for Target Layer Inference; the hidden state that enters them is stored too."""
    data: DataSettings = Field(default_factory=DataSettings)
    storage: StorageSettings = Field(default_factory=StorageSettings)
    forward: ForwardSettings = Field(default_factory=ForwardSettings)
    scale: ScaleSettings = Field(default_factory=ScaleSettings)

    @override
    def problems(self) -> list[str]:
        if self.forward.source != "vllm":
            return []
        found = []
        if not self.scale.is_alone:
            found.append(
                "workers and engine are of transformers; vLLM is one engine, so leave them out"
            )
        if self.forward.device != "auto":
            found.append(f"device is {self.forward.device}, but vLLM chooses its own; leave it out")
        if self.storage.codec.startswith("transform"):
            found.append(
                "codec is learned from forwards of transformers; extract lossless with vLLM, then `recode`"
            )
        return found


class AddConfig(Config):
    """Settings of `moa-data add`: what to add to a store, which keeps its lengths, dtype, codec and batches."""

    store: str
    """The store, made by `extract`."""
    model: str
    """The target that the store was made with: a folder in Hugging Face layout, a GGUF file, or a hub id."""
    activations: tuple[str, ...] = ()
    """What to add: hidden:layer:K (output of decoder layer K, from 0), hidden:last, kv; stored fields are kept."""
    target_layers: Natural = 0
    """Decoder layers to keep for Target Layer Inference; the hidden state that enters them is added too."""
    device: str = "auto"
    """Device of the forward, of the kind that the store was extracted on; auto is that kind."""
    encode_threads: Count | None = None
    """Threads that compress the new fields; default: the machine's cores, up to 16. Any number gives the same bytes."""

    @override
    def problems(self) -> list[str]:
        if self.activations or self.target_layers:
            return []
        return ["There is nothing to add. Give --activations, for example hidden:layer:3"]


class QuestionSettings(RowSettings):
    """Which questions are answered, and what keeps a chat out."""

    max_rows: Count | None = None
    """Read this many rows, the first ones; default: all."""
    max_length: Count = 2048
    """Longest chat in tokens, answers included; as the --max-length of the extraction to come."""
    keep_cut: bool = True
    """Keep answers that reached max_new_tokens or max_length. Their rows have the finish_reason length, by which
    `extract` knows that no end of turn follows."""
    question_temperature: Positive = 1.0
    """Temperature of questions that the target writes itself (--self-prompted)."""
    question_top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Sample such questions from the most likely tokens up to this cumulative probability."""
    question_tokens: Count = 256
    """Most tokens of such a question; one that has not ended by then is left out."""


class ServerSettings(Config):
    """How a server is asked."""

    answer_s: Positive = 600.0
    """Seconds after which a request is given up, and its row rejected."""
    patience_s: Positive = 120.0
    """Seconds for which a server that is overloaded or out of reach is asked again."""


class RegenerateConfig(Config):
    """Settings of `moa-data regenerate`: who answers which questions, and where to."""

    model: Common[str | None] = None
    """The target: a folder, a GGUF file, or a hub id. With --server its name there; default: the only model that the
    server has."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; default: main."""
    drafter: Common[str | None] = None
    """A run of `moa-data train`, or a folder with a drafter, whose drafts speed up the target."""
    server: Common[str | None] = None
    """Ask a server that speaks OpenAI's API instead, such as http://HOST:8000/v1. A key is taken from the environment
    (OPENAI_API_KEY)."""
    dataset: Common[str | None] = None
    """Chats or questions of Spec-Bench: a hub id, a jsonl, json, parquet or arrow file, or a folder of them."""
    self_prompted: Common[Count | None] = None
    """Without a dataset: let the target write the questions of this many chats too, after its chat template's empty
    user turn."""
    out: Common[str]
    """File of the answered chats (.jsonl), or a folder for it; the same command run again continues it."""
    template_kwargs: TemplateKwargs = ()
    """Arguments of the chat template, as NAME=VALUE, such as enable_thinking=false of Qwen3; default: those that the
    drafter's store records. A server is sent them as chat_template_kwargs."""
    max_new_tokens: Common[Count] = 1024
    """Most tokens of an answer; one that has not ended by then is cut there, and ends its chat."""
    tree: str | None = None
    """Drafts per target call: a chain's length such as 5, LENGTH@PROBABILITY for one that stops early, a tree's
    DEPTHxBREADTHxNODES. Default: 10@0.2, and 5 where tokens are sampled."""
    batch_size: Common[Count | None] = None
    """Chats that are answered together; default: 8, and 32 requests at once with --server."""
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
        given = [name for name, value in local.items() if value is not None]
        if given:
            return [f"{given[0]} is of a target that is loaded here; leave it out with --server"]
        if not self.server.startswith(("http://", "https://")):
            return [f"server is {self.server!r}, expected a URL such as http://127.0.0.1:8000/v1"]
        return []

    def shape(self) -> "TreeShape":
        """Return the shape of the drafts, which is fixed: that of ``auto`` follows the machine's timing."""
        from ..moa.decoding.sampling import SamplingConfig
        from ..moa.decoding.tree import TreeShape

        shape = TreeShape.parse(self.tree or ("5" if self.sampling.temperature else "10@0.2"))
        SamplingConfig(**self.sampling.arguments()).check_shape(shape)
        return shape

    @property
    def n_together(self) -> int:
        """Chats that are answered together."""
        return self.batch_size or (8 if self.server is None else 32)


def resolve_encode_threads(wanted: int | None, n_workers: int = 1) -> int:
    """Choose a worker's encoding threads: the wanted number, or one for each core of its share, at most 16."""
    return wanted or min(core_share(n_workers), _MAX_ENCODE_THREADS)


def core_share(n_workers: int) -> int:
    """Return how many of the machine's cores each of its workers has to itself, at least one."""
    return max(1, usable_cores() // n_workers)


@dataclass(frozen=True)
class ActivationSpec:
    """Which activations a forward gives."""

    kv: bool  # the keys and values of all layers
    last: bool  # the hidden state after the final norm
    # decoder layers whose output is stored, from 0, ascending, without repeats
    layers: tuple[int, ...]
    # fields of the keys and values; several where the target's layers are not alike
    kv_fields: tuple[str, ...] = (KV,)

    @property
    def fields(self) -> tuple[str, ...]:
        """All store fields, in their order in the store."""
        names = self.kv_fields * self.kv + ("hidden/last",) * self.last
        return names + tuple(f"hidden/layer_{layer}" for layer in self.layers)


def parse_activations(
    names: Iterable[str], target_layers: int, n_layers: int, kv_fields: tuple[str, ...] = (KV,)
) -> ActivationSpec:
    """Read names of activations of a target with `n_layers` decoder layers.

    Args:
        names: kv, hidden:last or hidden:layer:K; a negative K counts from the end.
        target_layers: decoder layers kept in the bundle; the state that enters them is added.
        kv_fields: the fields that kv makes of this target.

    Raises:
        OptionInvalid: unknown name, or a layer that the target does not have.
    """
    names = tuple(name.strip() for name in names)
    layers = set[int]()
    for name in names:
        number = re.fullmatch(r"hidden:layer:(-?\d+)", name)
        if not number and name not in ("kv", "hidden:last"):
            raise OptionInvalid(
                f"Unknown activation {name!r}: expected kv, hidden:last or hidden:layer:K. Change --activations."
            )
        if number and not -n_layers <= int(number[1]) < n_layers:
            raise OptionInvalid(
                f"Activation {name!r}: the target has {n_layers} decoder layers, 0 to {n_layers - 1}. Choose one of "
                "them."
            )
        layers |= {int(number[1]) % n_layers} if number else set()
    if target_layers > n_layers:
        raise OptionInvalid(
            f"target_layers is {target_layers}, but the target has {n_layers} decoder layers. Lower --target-layers."
        )
    if 0 < target_layers < n_layers:
        layers.add(n_layers - 1 - target_layers)
    return ActivationSpec(KV in names, "hidden:last" in names, tuple(sorted(layers)), kv_fields)


def parse_fields(fields: Iterable[str]) -> ActivationSpec:
    """Return the activations that are stored as these fields; raises OptionInvalid for any other field."""
    names = [name for name in fields if name not in TEXT_FIELDS]
    if unknown := [
        name
        for name in names
        if not re.fullmatch(r"kv(/\w+)?|hidden/last|hidden/layer_\d{1,9}", name)
    ]:
        raise OptionInvalid(
            f"Field {unknown[0]!r} is none that `extract` writes: kv, hidden/last or hidden/layer_<k>."
        )
    kv_fields = tuple(name for name in names if activation_name(name) == KV)
    return parse_activations(map(activation_name, names), 0, 10**9, kv_fields or (KV,))
