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


# Every store has these fields, which are not activations.
TEXT_FIELDS = ("tokens", "response_mask")

DEFAULT_MAX_LENGTH = 2048
# Maximum number of encoding threads. With more threads, the single writer thread would be the
# bottleneck.
_MAX_ENCODE_THREADS = 16


class RowSettings(Config):
    """Which rows of a dataset are read, and how."""

    split: Common[str | None] = None
    """Split of the dataset to read. If the dataset is a local folder, a split is the files or
    sub-folders that are named after it, such as train.jsonl or train/. Default: train_sft, or the
    only split. If there are several splits without train_sft, give this option."""
    columns: tuple[str, ...] = ()
    """Columns of the dataset from which chats are made, as KIND=COLUMN. For one question and one
    answer per row: user=question,assistant=answer (system=COLUMN is possible too). Columns joined
    by + are concatenated, as in user=instruction+input. For rows that contain entire chats:
    messages=COLUMN, and tools=COLUMN for the tools that the chat may use. The names alpaca and
    prompt-completion stand for the columns of these two formats. Default: entire chats in the
    column messages or conversations."""
    dataset_config: str | None = None
    """Name of the configuration (subset) of a Hub dataset to read. Give it if the dataset has
    several."""
    dataset_revision: str | None = None
    """Branch, tag or commit of a dataset on the Hugging Face Hub. Default: main. The store records
    the commit, and later runs use it."""
    max_rejected_fraction: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Largest fraction of the rows that may be unusable, from 0 to 1. If more rows cannot be used,
    the command stops with an error that lists the reasons."""


class DataSettings(RowSettings):
    """Which chats are read, and how they become sequences."""

    max_sequences: Common[Count | None] = None
    """Maximum number of sequences to extract. The usable rows are taken in the order of the
    dataset. Default: all usable rows."""
    max_length: Common[Count | None] = None
    """Maximum length of a sequence in tokens. Longer sequences are truncated. Default: 2048, or the
    target's maximum number of positions if it is smaller."""
    template_kwargs: TemplateKwargs = ()
    """Arguments for the target's chat template, as NAME=VALUE or a JSON object; for example
    enable_thinking=false for Qwen3."""
    tokenize_processes: Count | None = None
    """Number of processes that tokenize the chats. Fewer processes need less memory, but take
    longer. Default: one per CPU core."""


class StorageSettings(Config):
    """Format of the stored activations."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the stored activations. On a GPU, the target also computes in this type unless
    `compute_dtype` is given."""
    codec: Common[str] = "lossless"
    """Compression of the activations. lossless: exact values. int8: 8 bits per value, with small
    errors. transform:B: about B bits per value, for example transform:1; fewer bits make the store
    smaller and the errors larger. The full form is
    transform:B[,hidden=B][,tokens][,from-kv][,joint][@all, @layer or @groupN]; docs/codecs.md
    explains it."""
    part_tokens: Count = 65_536
    """Number of tokens in a part of the store. A store is written part by part, and an interruption
    loses only the parts that are being written. Smaller parts lose less, but make more files."""
    target_license: str | None = None
    """Licence of the target as the Hugging Face Hub names it, for example apache-2.0. It is written
    to the store's card (README.md). Default: the card gets a blank to fill in."""
    dataset_license: str | None = None
    """Licence of the dataset as the Hugging Face Hub names it, for example apache-2.0. It is
    written to the store's card (README.md). Default: the card gets a blank to fill in."""

    @property
    def licences(self) -> tuple[str | None, str | None]:
        """The licences of target and dataset."""
        return self.target_license, self.dataset_license


class ForwardSettings(Config):
    """Settings of the target's forward."""

    device: Common[str] = "auto"
    """Device that runs the target: auto, cpu, cuda, or one GPU such as cuda:1. auto takes a GPU if
    the machine has one, otherwise the CPU."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type in which the target computes. auto: an existing store keeps the type that it was
    started with; otherwise the target computes in `dtype` on a GPU, and in float32 on a CPU. On
    CPUs with instructions for bfloat16 (avx512_bf16, AMX), bfloat16 is faster than float32, but it
    changes the activations by 1 to 2 percent."""
    source: Literal["transformers", "vllm"] = "transformers"
    """Inference engine that runs the target. vllm must be installed separately. Its activations
    differ from those of transformers in the last bits."""
    batch_tokens: Count | None = None
    """Maximum number of tokens per forward pass, padding included. Lower it if memory runs out.
    Default: 16384 on a GPU, 2048 on a CPU, and 65536 with vLLM, which divides them into smaller
    batches."""
    encode_threads: Count | None = None
    """Number of CPU threads that compress activations. It changes the speed, but not the stored
    bytes. Default: the number of CPU cores, at most 16."""


class ScaleSettings(Config):
    """Number of processes that extract in parallel, and the engine that schedules them."""

    workers: Count = 1
    """Number of processes that extract in parallel. With `engine=ray`, it is their maximum number.
    Each process has a GPU of its own, or a share of the CPU cores. The stored bytes do not depend
    on this number."""
    engine: Literal["processes", "ray"] = "processes"
    """How the workers are started. processes: this command starts them on this machine. ray: Ray
    starts them on the machines of a cluster. With ray, `model` and `out` must be paths that exist
    on every machine."""
    address: str | None = None
    """Only with `engine=ray`: address of the Ray cluster as HOST:PORT, or auto for the cluster that
    this machine belongs to. Default: the environment variable RAY_ADDRESS; if it is not set, the
    command starts Ray on this machine."""
    gpus_per_worker: Annotated[float, Field(ge=0, le=1)] | None = None
    """Only with `engine=ray`: number of GPUs for each worker. 1 is a whole GPU, 0.5 lets two
    workers share a GPU, and 0 computes on CPUs. Default: 1 if this machine has a GPU, otherwise
    0."""
    cpus_per_worker: Count = 1
    """Only with `engine=ray`: number of CPU cores that Ray reserves for each worker. A worker may
    use more: the cores of its machine are divided among the workers that fit on it."""

    @override
    def problems(self) -> list[str]:
        if self.engine == "ray":
            if not (self.address or "").startswith("ray://"):
                return []
            return [
                f"`address` is {self.address!r}, but Ray Client (ray://) is not supported; run the "
                "command on a machine of the cluster with `address=HOST:PORT`, or start it there "
                "with `ray job submit`"
            ]
        problems: list[str] = []
        for name in ("address", "gpus_per_worker"):
            if getattr(self, name) is not None:
                problems.append(
                    f"`{name}` has an effect only with `engine=ray`; give this setting too, or "
                    f"leave out `{name}`"
                )
        return problems

    @property
    def is_alone(self) -> bool:
        """Whether the command extracts in its own process, without workers."""
        return self.engine == "processes" and self.workers == 1

    @property
    def n_local_workers(self) -> int:
        """Number of workers that share the cores and the memory of this machine.

        With Ray, the number is assumed to be 1, because Ray chooses the machines of the workers.
        """
        return 1 if self.engine == "ray" else self.workers


class ExtractConfig(Config):
    """Settings of `moa-data extract`: target, dataset, activations and output."""

    # Type checkers use this signature. It accepts every setting as a keyword argument, including
    # the settings of the groups ``data``, ``storage``, ``forward`` and ``scale``.
    if TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None: ...

    model: Common[str]
    """The target, which is the language model whose activations are stored: a folder in Hugging
    Face layout, a GGUF file, or a Hugging Face Hub id (OWNER/NAME)."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hugging Face Hub. Default: main. The store records
    the commit, and later runs use it."""
    dataset: Common[str]
    """The chats: a Hugging Face Hub id, a jsonl, json, parquet or arrow file, or a folder of such
    files."""
    out: Common[str]
    """Folder of the store, or its URL in a bucket (s3://, gs://, az://). If the store exists but is
    incomplete, the command continues it."""
    activations: Common[Annotated[tuple[str, ...], Field(min_length=1)]] = ("kv", "hidden:last")
    """Activations to store, separated by commas. kv: keys and values of all layers. hidden:last:
    hidden states after the final norm. hidden:layer:K: outputs of decoder layer K, counted from 0.
    docs/choosing.md lists the activations that each drafter needs."""
    target_layers: Common[Natural] = 0
    """Number of the target's last decoder layers whose weights are copied to the store. The hidden
    states that enter these layers are stored as well. Only drafters that are trained with
    `moa-data train --target-layer-inference N` need these layers."""
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
                "`workers` and `engine` work only with `source=transformers`, and not with vllm; "
                "leave them out"
            )
        if self.forward.device != "auto":
            mistakes.append(
                f"`device` is {self.forward.device}, but vLLM chooses the device; leave out "
                "`device`"
            )
        if self.storage.codec.startswith("transform"):
            mistakes.append(
                "a transform codec must be fitted to activations from transformers, so "
                "`source=vllm` does not support it; extract with `codec=lossless`, then compress "
                "the store with `moa-data recode`"
            )
        return mistakes


class AddConfig(Config):
    """Settings of `moa-data add`. The store sets dtype, codec, sequence lengths and batches."""

    store: str
    """The store to which activations are added. `moa-data extract` must have written it."""
    model: str
    """The target from which the store was extracted: a folder in Hugging Face layout, a GGUF file,
    or a Hugging Face Hub id (OWNER/NAME)."""
    activations: tuple[str, ...] = ()
    """Activations to add, separated by commas. hidden:layer:K: outputs of decoder layer K, counted
    from 0. hidden:last: hidden states after the final norm. kv: keys and values of all layers. The
    activations that the store already has do not change."""
    target_layers: Natural = 0
    """Number of the target's last decoder layers whose weights are added to the store. The hidden
    states that enter these layers are added as well. Only drafters that are trained with
    `moa-data train --target-layer-inference N` need these layers."""
    device: str = "auto"
    """Device that runs the target. It must be of the same kind (CPU or GPU) as in the extraction of
    the store; auto chooses this kind."""
    encode_threads: Count | None = None
    """Number of CPU threads that compress activations. It changes the speed, but not the stored
    bytes. Default: the number of CPU cores, at most 16."""

    @override
    def problems(self) -> list[str]:
        if self.activations or self.target_layers:
            return []
        return [
            "the command has nothing to add; give `activations`, for example hidden:layer:3, or "
            "`target_layers`"
        ]


class QuestionSettings(RowSettings):
    """Which questions are answered, and which chats are left out."""

    max_rows: Count | None = None
    """Maximum number of rows to read from the start of the dataset. Default: all."""
    max_length: Count = 2048
    """Maximum length of a chat in tokens, answers included. Later, give `moa-data extract` the same
    `max_length`."""
    keep_cut: bool = True
    """Keep answers that were cut off at max_new_tokens or max_length. Their rows have the
    finish_reason length, so that `moa-data extract` does not add an end of turn after them. If
    false, a chat ends before such an answer, or is left out if it has no earlier answer."""
    question_temperature: Positive = 1.0
    """Only with `self_prompted`: sampling temperature of the questions that the target writes.
    Higher values give more varied questions."""
    question_top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Only with `self_prompted`: top-p of the questions that the target writes. Each token is
    sampled from the smallest set of most likely tokens whose probabilities add up to at least this
    value."""
    question_tokens: Count = 256
    """Only with `self_prompted`: maximum length in tokens of a question that the target writes.
    Longer questions are left out."""


class ServerSettings(Config):
    """Time limits of requests to a server."""

    answer_s: Positive = 600.0
    """Only with `server`: maximum time in seconds to wait for an answer. A chat whose answer takes
    longer ends before this answer. If it has no earlier answer, it is left out."""
    patience_s: Positive = 120.0
    """Only with `server`: time in seconds for which a request is repeated if the server is
    overloaded or cannot be reached."""


class RegenerateConfig(Config):
    """Settings of `moa-data regenerate`: the target, the questions and the output."""

    model: Common[str | None] = None
    """The target, which writes the answers: a folder, a GGUF file, or a Hugging Face Hub id
    (OWNER/NAME). With `server`, the name of the model on the server; by default the server's only
    model."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hugging Face Hub. Default: main."""
    drafter: Common[str | None] = None
    """A drafter that makes the target answer faster: a run of `moa-data train`, or a folder with a
    drafter. It does not change the answers. Default: none."""
    server: Common[str | None] = None
    """URL of a server with OpenAI's API that answers in place of a target on this machine, for
    example http://HOST:8000/v1. The API key is read from the environment variable
    OPENAI_API_KEY."""
    dataset: Common[str | None] = None
    """The chats whose questions the target answers: a Hugging Face Hub id, a jsonl, json, parquet
    or arrow file, or a folder of such files. The questions of the benchmark Spec-Bench work too."""
    self_prompted: Common[Count | None] = None
    """Number of chats that the target writes on its own, questions included. Give this or
    `dataset`. To get a question, the chat template is cut off where the user's message begins, and
    the target continues from there."""
    out: Common[str]
    """File for the answered chats (.jsonl), or a folder for this file. If the file is incomplete,
    the command continues it."""
    template_kwargs: TemplateKwargs = ()
    """Arguments for the chat template, as NAME=VALUE; for example enable_thinking=false for Qwen3.
    A server receives them as chat_template_kwargs. Default: the arguments that are recorded in the
    store that the drafter was trained from."""
    max_new_tokens: Common[Count] = 1024
    """Maximum length of an answer in tokens. A longer answer is cut off there, and its chat ends
    with it."""
    tree: str | None = None
    """Only with `drafter`: how many tokens are drafted per target call. 5: a chain of five drafts.
    LENGTH@PROBABILITY, such as 10@0.2: a chain of at most ten drafts, which ends when the
    probability that all of them are accepted falls below 0.2 (an estimate of the drafter).
    DEPTHxBREADTHxNODES, such as 6x8x62: a tree of drafts (docs/decoding.md). Default: 10@0.2, or 5
    if the temperature is above 0."""
    batch_size: Common[Count | None] = None
    """Number of chats that are answered at the same time. More chats are faster in total, but need
    more memory. Default: 8, or 32 with `server`."""
    dtype: Common[Dtype] = "float32"
    """Data type of the weights and computations of target and drafter. bfloat16 and float16 need
    half the memory of float32, but may change answers slightly."""
    device: Common[str] = "auto"
    """Device that runs the target: auto, cpu, cuda, or one GPU such as cuda:1. auto takes a GPU if
    the machine has one, otherwise the CPU."""
    questions: QuestionSettings = Field(default_factory=QuestionSettings)
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    serving: ServerSettings = Field(default_factory=ServerSettings)

    @override
    def problems(self) -> list[str]:
        if (self.dataset is None) == (self.self_prompted is None):
            return [
                "questions come from `dataset` or from `self_prompted`; give exactly one of them"
            ]
        if self.server is None:
            if self.model is None:
                return ["neither a model nor a server is given; give `model=MODEL` or `server=URL`"]
            if self.tree is not None and self.drafter is None:
                return [
                    f"`tree` is {self.tree!r}, but no drafter is given; give `drafter=RUN`, or "
                    "leave out `tree`"
                ]
            return self.refusal_of(self.shape)
        for name in ("drafter", "tree", "revision", "self_prompted"):
            if getattr(self, name) is not None:
                return [
                    f"`{name}` works only with a target that this command loads itself, and not "
                    "with `server`; leave out one of them"
                ]
        if not self.server.startswith(("http://", "https://")):
            return [f"`server` is {self.server!r}, expected a URL such as http://127.0.0.1:8000/v1"]
        return []

    def shape(self) -> "TreeShape":
        """Return the shape of the drafts.

        If the setting ``tree`` is not given, the shape is a fixed one. It is not ``auto``, because
        ``auto`` chooses the number of drafts from measured times of target and drafter. The shape
        would then depend on the speed of this machine.
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
        wanted: the value of the setting ``encode_threads``. If it is None, the workers divide the
            machine's cores, and each worker has one thread per core, but at most 16 threads.
        n_workers: number of workers on this machine.
    """
    return wanted or min(core_share(n_workers), _MAX_ENCODE_THREADS)


def core_share(n_workers: int) -> int:
    """Return the number of CPU cores per worker if ``n_workers`` workers share this machine.

    The result is never below 1.
    """
    return max(1, usable_cores() // n_workers)


@dataclass(frozen=True)
class ActivationSpec:
    """The activations that a forward of the target captures."""

    # Whether to capture the keys and values of all layers.
    kv: bool
    # Whether to capture the hidden state after the final norm.
    last: bool
    # Decoder layers whose outputs are captured. Layers are counted from 0. The order is ascending,
    # and each layer occurs once.
    layers: tuple[int, ...]
    # Names of the store's fields of keys and values. There is one field for each group of layers
    # with the same kind of attention and the same KV shape.
    kv_fields: tuple[str, ...] = (KV,)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the store's fields for these activations, in the order of the store."""
        names = self.kv_fields * self.kv + ("hidden/last",) * self.last
        return names + tuple(f"hidden/layer_{layer}" for layer in self.layers)


def parse_activations(
    names: Iterable[str], target_layers: int, n_layers: int, kv_fields: tuple[str, ...] = (KV,)
) -> ActivationSpec:
    """Parse the names of activations.

    Args:
        names: kv, hidden:last or hidden:layer:K; a negative K counts from the end.
        target_layers: number of the target's last decoder layers that are copied to the store. The
            hidden state that enters the first of these layers is added to the activations.
        n_layers: number of decoder layers of the target.
        kv_fields: names of the fields in which keys and values of this target are stored.

    Raises:
        OptionInvalid: a name is unknown, or the target lacks a layer.
    """
    names = tuple(name.strip() for name in names)
    layers = set[int]()
    for name in names:
        if name in ("kv", "hidden:last"):
            continue
        number = re.fullmatch(r"hidden:layer:(-?\d+)", name)
        layer = int(number[1]) if number else n_layers
        if not -n_layers <= layer < n_layers:
            raise OptionInvalid(
                f"`activations` contains {name!r}, expected kv, hidden:last or hidden:layer:K, "
                f"where K is a decoder layer of the target from 0 to {n_layers - 1}."
            )
        layers.add(layer % n_layers)
    if target_layers > n_layers:
        raise OptionInvalid(
            f"`target_layers` is {target_layers}, but the target has only {n_layers} decoder "
            "layers. Give a lower number."
        )
    if 0 < target_layers < n_layers:
        layers.add(n_layers - 1 - target_layers)
    return ActivationSpec(KV in names, "hidden:last" in names, tuple(sorted(layers)), kv_fields)


def parse_fields(fields: Iterable[str]) -> ActivationSpec:
    """Return the activations that a store with these fields contains.

    Raises:
        OptionInvalid: `extract` does not write one of the fields.
    """
    names = [name for name in fields if name not in TEXT_FIELDS]
    for name in names:
        if not re.fullmatch(r"kv(/\w+)?|hidden/last|hidden/layer_\d{1,9}", name):
            raise OptionInvalid(
                f"the field {name!r} contains activations that `moa-data extract` does not write, "
                "expected kv, hidden/last or hidden/layer_K."
            )
    kv_fields = tuple(name for name in names if activation_name(name) == KV)
    return parse_activations(map(activation_name, names), 0, 10**9, kv_fields or (KV,))
