"""The live target: a loaded causal LM of transformers, with the calls that decoding needs.

Shapes: B rows, n tokens of a target call, P tokens of a target call with padding, S slots of the
cache, E width.
"""

import importlib.metadata
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from ...errors import TargetError
from ...files import machine_trouble, parsing
from ...text import first_line
from ..nn import masks
from ..nn.graphs import recorded
from ..nn.losses import capped
from ..nn.masks import to_device
from . import bundle, gguf, proof
from .cache import Buffers, TargetCache
from .facts import TargetFacts, load_facts
from .families import layer_outputs, text_model, transformers_config
from .fused import fuse
from .loading import load_target_model
from .model_files import check_model_folder, read_config
from .template import ChatTemplate

# Names of files that are not downloaded from the Hub. They contain the target's weights once more,
# in layouts of other programs.
_FOREIGN = ["consolidated*", "original/*"]
# If a target call with causal attention needs a mask, the call runs in chunks of this many tokens.
# Each chunk has its own mask. So the memory for masks grows linearly with the length of the
# sequence. A single mask for the whole sequence would grow quadratically.
_CHUNK_TOKENS = 1024
# A static call (:class:`StaticCalls`) is padded to the smallest of these numbers of tokens that is
# large enough. For example, a call that verifies a chain of 5 drafts has 6 tokens, and is padded to
# 8.
STATIC_SIZES = (1, 2, 4, 8, 16, 32, 64)
# In decoding, the matrix products of linear layers have only a few rows as input. If each linear
# layer of a target has fewer weights than this number, several threads do not make these products
# faster.
_FEWEST_SHARED = 1 << 21
# At first, CUDA graphs are recorded for sequences of at most this length. If a sequence is longer,
# this length is doubled, and the graphs are recorded again.
_GRAPH_SLOTS = 1024


def resolve_model_folder(
    path_or_id: str, with_weights: bool = True, revision: str | None = None
) -> Path:
    """Return a local model folder. Convert a GGUF file or download a Hub snapshot if necessary.

    The name of a snapshot's folder is the snapshot's commit.
    """
    folder = Path(path_or_id).expanduser()
    if folder.exists():
        if revision:
            raise TargetError(
                f"{path_or_id} is a local path, which has no revisions, so `revision={revision}` "
                "cannot be used. Leave out `revision`."
            )
        return gguf.model_folder(folder)
    if path_or_id.startswith((".", "/", "~")) or path_or_id.count("/") != 1:
        raise TargetError(
            f"{path_or_id} is neither an existing file or folder nor a Hub id of the form "
            "OWNER/NAME. Check the path."
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.model", "*.txt"] + (
        ["*.safetensors"] if with_weights else []
    )
    try:
        return Path(
            snapshot_download(
                path_or_id, revision=revision, allow_patterns=patterns, ignore_patterns=_FOREIGN
            )
        )
    # If the Hub cannot be reached, its client raises errors of many unrelated types. So catch all.
    except Exception as error:
        if (trouble := machine_trouble(error)) is not None:
            raise trouble from error
        raise TargetError(
            f"the folder {path_or_id} does not exist, and a model of this name could not be loaded "
            f"from the Hub ({first_line(error).rstrip('.')}). Check the path or the name."
        ) from error


def load_target_tokenizer(folder: Path) -> Any:
    """Load the fast tokenizer of a model folder, without running code that is in this folder."""
    if not any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        raise TargetError(
            f"{folder} has no tokenizer. Put the model's tokenizer.json into the folder."
        )
    check_model_folder(folder)
    config = None
    # Load the model's config, because transformers may use it to choose the tokenizer's class.
    if (folder / "config.json").is_file():
        load_facts(folder, with_weights=False)
        config = transformers_config(read_config(folder), folder)
    if packages := _missing_packages(folder):
        raise TargetError(
            f"{folder} has no tokenizer.json, and reading its tokenizer.model requires "
            f"{' and '.join(packages)}. Run `pip install {' '.join(packages)}`, or put the model's "
            "tokenizer.json into the folder."
        )
    with parsing(f"{folder} has no usable tokenizer", TargetError, "Restore its tokenizer files."):
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        # Use the tokenizer once here, because transformers validates some settings only on first
        # use.
        tokenizer.decode(tokenizer("a")["input_ids"])
        # A saved tokenizer must not name code (auto_map), and must not record from where it was
        # loaded. So remove these settings.
        for name in ("auto_map", "is_local", "local_files_only"):
            tokenizer.init_kwargs.pop(name, None)
    if not tokenizer.is_fast:
        raise TargetError(
            f"{folder} has no fast tokenizer. Only a fast tokenizer tells which characters each "
            "token covers, which is needed to find the tokens of responses. Save it as a fast "
            "tokenizer (tokenizer.json)."
        )
    return tokenizer


def _missing_packages(folder: Path) -> list[str]:
    """Return the packages that must still be installed to read a model folder's tokenizer.model.

    The result is empty if the folder has a tokenizer.json. This file is then read in place of
    tokenizer.model, and needs none of the packages.
    """
    file = folder / "tokenizer.model"
    if (folder / "tokenizer.json").is_file() or not file.is_file():
        return []
    with file.open("rb") as content:
        # A tokenizer.model is in the format of SentencePiece or of tiktoken. The first byte of a
        # SentencePiece file is 0x0a, because the file is a protobuf message. A tiktoken file is
        # text.
        needed = ["sentencepiece", "protobuf"] if content.read(1) == b"\n" else ["tiktoken"]
    installed = {package.name for package in importlib.metadata.distributions()}
    return [package for package in needed if package not in installed]


def pick_device(device: str) -> str:
    """Replace ``auto`` by cuda, mps or cpu. Raise TargetError if PyTorch cannot use the device."""
    if device != "auto":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise TargetError(
                f"device {device!r} cannot be used ({first_line(error)}). Try `device=cpu`."
            ) from error
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


class Target:
    """A loaded target with its optional tokenizer."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, folder: Path | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.folder = folder
        # The text model without the LM head.
        self.body: Any = text_model(model)
        self._head = model.get_output_embeddings()
        self.facts = TargetFacts.of(self.body.config)
        config = self.facts.config
        # From the position ``floor_scale`` on, Llama 4 multiplies queries by a factor that depends
        # on the position. Its layers do not read the position ids, but take the number of tokens in
        # the cache as the position. For a draft in a tree, this number is wrong, because the cache
        # also contains other branches. So sequences must end before the position ``floor_scale``.
        bound = (
            getattr(config, "floor_scale", None)
            if getattr(config, "attn_temperature_tuning", 0)
            else None
        )
        n_positions = self.facts.max_position_embeddings
        self.max_positions: int = min(n_positions, bound - 1) if bound else n_positions
        self.eos_token_ids = bundle.find_eos_token_ids(
            getattr(source, "eos_token_id", None)
            for source in (model.generation_config, model.config, config)
        )
        # Kind of layer -> size of the sliding window of such layers, in tokens. The size is None
        # for layers with full attention.
        self._windows = dict(zip(self.facts.layer_kinds, self.facts.layer_windows, strict=True))
        # The size of the smallest sliding window in tokens. Without sliding windows it is infinite.
        windows = [window for window in self._windows.values() if window is not None]
        self._shortest_window: float = min(windows, default=math.inf)
        self._takes_bool_masks = getattr(config, "_attn_implementation", "sdpa") == "sdpa"
        self._static: StaticCalls | None = None
        self._decodes_with_one_thread = False

    @classmethod
    def load(
        cls,
        path_or_id: str,
        dtype: torch.dtype = torch.float32,
        device: str = "auto",
        revision: str | None = None,
    ) -> "Target":
        """Load a target with its tokenizer from a folder, a GGUF file or the Hub."""
        folder = resolve_model_folder(path_or_id, revision=revision)
        model = load_target_model(folder, dtype, pick_device(device))
        target = cls(model, load_target_tokenizer(folder), folder)
        proof.prove_logits(target)
        return target

    @property
    def device(self) -> torch.device:
        """The device on which the weights are."""
        return self.model.device

    @cached_property
    def identity(self) -> dict[str, str]:
        """The hashes of the target's files, as :func:`.bundle.hash_target` computes them.

        The dict is empty if the target was not loaded from a folder.
        """
        return bundle.hash_target(self.folder) if self.folder else {}

    @cached_property
    def template(self) -> ChatTemplate:
        """The target's chat template without extra arguments.

        A caller may replace this template by one with arguments.
        """
        return ChatTemplate(self.tokenizer)

    @cached_property
    def decoding_problem(self) -> str:
        """The reason why the target cannot verify drafts, or an empty text if it can."""
        # Targets of families with Llama's layers can always verify drafts, so do not test them.
        is_llama = self.facts.family.has_llama_layers
        return "" if is_llama else proof.decoding_problem(self)

    def prepare(self, uses_graphs: bool = True) -> None:
        """Optimize decoding for the device. The weights must not change afterwards.

        On a CPU, the weights are packed (:func:`.fused.fuse`), and a small target decodes with one
        thread (:meth:`threads`). On a CUDA device, if the target has Llama's layers, target calls
        after a prefill run as CUDA graphs. Calling this method again has no effect.
        """
        fuse(self.model)
        largest = 0
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                largest = max(largest, module.weight.numel())
        self._decodes_with_one_thread = self.device.type == "cpu" and largest < _FEWEST_SHARED
        # A CUDA graph always repeats the same kernels. But some layers, such as those with experts,
        # decide on the host which kernels to run. Such layers cannot be recorded, so record only
        # targets with Llama's layers.
        is_plain = self.facts.family.has_llama_layers and self.facts.has_uniform_kv
        takes_graphs = self.device.type == "cuda" and is_plain
        if uses_graphs and takes_graphs and self._static is None:
            self.use_static_calls(_GRAPH_SLOTS)

    def threads(self) -> AbstractContextManager[None]:
        """Return a context manager that limits a prepared, small target to one thread."""
        return limited_threads(self._decodes_with_one_thread)

    def use_static_calls(self, n_slots: int) -> None:
        """Run short target calls after a prefill as :class:`StaticCalls` from now on.

        The cache has room for ``n_slots`` tokens. If a sequence is longer, the cache grows, and new
        graphs are recorded.
        """
        self._static = StaticCalls(n_slots)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: TargetCache, seen: Tensor | None = None) -> Tensor:
        """Run the target over tokens [B, n] that follow the committed tokens of each row.

        The new tokens stay pending until ``cache.commit``.

        Args:
            tokens: [B, n] token ids.
            cache: the KV cache of the rows.
            seen: [B, n, n] bool. ``seen[b, i, j]`` says whether new token i of row b attends to new
                token j. Each token attends to itself. If ``seen`` is None, attention is causal.

        Returns:
            Hidden states [B, n, E] after the final norm.
        """
        # For causal attention, never build a mask from all tokens to all tokens, because such a
        # mask would be large. A prefill with full attention needs no mask. If another call with
        # causal attention needs a mask, the call runs in chunks.
        n_given = tokens.shape[1]
        tokens = cache.take_up(tokens)
        n_tokens = tokens.shape[1]
        device = tokens.device
        # A short call after a prefill runs as a static call.
        if self._static is not None and n_tokens <= STATIC_SIZES[-1] and all(cache.lengths):
            return self._static.forward(self, tokens, seen, cache)
        if seen is not None:
            if self.facts.has_states:
                raise TargetError(
                    f"the layers of {self.facts.model_type} carry a state from token to token, so "
                    "they cannot verify a tree of drafts. Draft a chain: give `tree=5`, or "
                    "`moa-data eval --method chain`."
                )
            cache.begin_call(n_tokens, device)
            positions = to_device(cache.lengths, device)[:, None] + seen.sum(dim=2) - 1
            mask = self.attention_mask(lambda window: masks.tree_mask(cache.lengths, seen, window))
            return self._call(tokens, positions, mask, cache)
        # Rows of equal length have the same positions, so one row of positions suffices.
        lengths = cache.lengths if len(set(cache.lengths)) > 1 else cache.lengths[:1]
        # The padding of a prefill is on the right. In causal attention, tokens attend only to
        # tokens on their left, so they do not attend to the padding. The kernel's causal mode
        # suffices, and no mask is needed.
        is_prefill = not any(cache.lengths) and n_tokens > 1
        # If each row has one new token and all rows have the same length, the new tokens attend to
        # all slots, so no mask is needed. This allows flash kernels, which do not support masks.
        is_step = n_tokens == 1 and len(lengths) == 1
        window = self._shortest_window
        is_short = lengths[0] + n_tokens <= window if is_step else n_tokens < window
        needs_mask = not ((is_prefill or is_step) and is_short and self._takes_bool_masks)
        step = _CHUNK_TOKENS if needs_mask else n_tokens
        hidden = []
        for first in range(0, n_tokens, step):
            part = tokens[:, first : first + step]
            cache.begin_call(part.shape[1], device, goes_on=first > 0)
            offsets = torch.arange(first, first + part.shape[1], device=device)
            # The positions are [B or 1, n].
            positions = to_device(lengths, device)[:, None] + offsets
            build = partial(masks.causal_mask, positions, cache.n_slots)
            mask = self.attention_mask(build) if needs_mask else None
            hidden.append(self._call(part, positions, mask, cache))
        together = hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1)
        return together[:, n_tokens - n_given :]

    def _call(self, tokens: Tensor, positions: Tensor, mask: Any, cache: TargetCache) -> Tensor:
        hidden, layer_states = self.run(tokens, positions, mask, cache)
        if layer_states:
            cache.keep_layer_outputs(layer_states)
        return hidden

    def run(
        self, tokens: Tensor, positions: Tensor, mask: Any, cache: TargetCache
    ) -> tuple[Tensor, list[Tensor]]:
        """Run one forward pass of the text model.

        Returns:
            The hidden states [B, n, E], and a list of the outputs of the watched layers. Each
            output is [B, n, E].
        """
        with layer_outputs(self.model, cache.watched_layers) as outputs:
            hidden: Tensor = self.body(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        return hidden, [outputs[layer] for layer in cache.watched_layers]

    def attention_mask(self, build: Callable[[int | None], Tensor]) -> Any:
        """Build attention masks in the format that the model expects.

        If all layers are of one kind, the result is one mask [B, 1, n, S]. Otherwise the result is
        a dict from a kind of layers to the mask of these layers.

        Args:
            build: a function that takes the size of a sliding window, or None for full attention.
                It returns the mask [B, n, S].
        """
        by_kind: dict[str, Tensor | None] = {}
        dtype = self.model.dtype
        for kind, window in self._windows.items():
            if kind == "linear_attention":
                # Linear attention is a recurrence over tokens, so it is always causal and takes no
                # mask.
                by_kind[kind] = None
                continue
            mask = build(window)[:, None]  # The mask is [B, 1, n, S].
            if not self._takes_bool_masks:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(
                    ~mask, torch.finfo(dtype).min
                )
            by_kind[kind] = mask
        return by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the LM head to hidden states [..., E] and return logits [..., V]."""
        return self.logits_by(self._head, hidden)

    def logits_by(self, head: Any, hidden: Tensor) -> Tensor:
        """Apply an LM head to hidden states [..., E], with the model's scale and soft cap."""
        logits: Tensor = head(hidden)
        scale = self.facts.logit_scale
        return capped(logits if scale == 1 else logits * scale, self.facts.logit_cap)

    def new_cache(self, n_rows: int = 1) -> TargetCache:
        """Make an empty cache for :meth:`forward`.

        Raises TargetError if the target cannot be used for decoding.
        """
        shared = (
            {}
            if self._static is None
            else {"n_slots": self._static.n_slots, "buffers": self._static.buffers}
        )
        if self.decoding_problem:
            raise TargetError(f"{self.decoding_problem}.")
        if self.facts.has_states and n_rows > 1:
            raise TargetError(
                f"the layers of {self.facts.model_type} carry a state from token to token, so "
                "prompts cannot be padded to a batch. Decode one prompt at a time."
            )
        return self.make_cache(n_rows, **shared)

    def make_cache(self, n_rows: int = 1, **shared: Any) -> TargetCache:
        """Make an empty cache, without a check that the target can be used for decoding."""
        facts = self.facts
        if not facts.has_uniform_kv:
            shared |= {"shapes": facts.kv_shapes, "groups": facts.kv_groups}
        return TargetCache(facts.n_layers, n_rows, **shared)


@contextmanager
def limited_threads(uses_one_thread: bool) -> Iterator[None]:
    """Limit PyTorch to one thread if ``uses_one_thread`` is true.

    Several threads must wait for each other after each matrix product. A thread that waits either
    occupies a core, or has to be woken up. For small matrices, this costs more time than several
    threads save. At the end of the ``with`` block, the previous number of threads is restored.
    """
    n_before = torch.get_num_threads()
    if uses_one_thread:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_before)


Inputs = tuple[Tensor, Tensor | None, Tensor]
"""The inputs of a static call: the tokens [B, P], the tree mask [B, P, P], and a tensor [B, 2].

Row b of the last tensor has two numbers for row b of the batch: how many committed tokens it has,
and how many tokens of the call are not padding. The tree mask is None if attention is causal.
"""


class _StaticGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    # The hidden states [B, P, E]. Each replay of the graph overwrites this tensor.
    hidden: Tensor
    # The outputs of the watched layers, one tensor [B, P, E] per layer. Each replay of the graph
    # overwrites these tensors.
    kept: list[Tensor]


class StaticCalls:
    """Target calls with static shapes, so that CUDA graphs can replay them.

    A CUDA graph repeats the same kernels with the same shapes and addresses. But the number of
    tokens in a call, and the length of the sequence, change from call to call. So each call is
    padded to one of :data:`STATIC_SIZES`. The tokens of the call attend to all slots of a cache of
    fixed length, under a mask. A tensor with the lengths of the rows says to which slots the call
    writes. This tensor is overwritten before each replay.

    On a CUDA device, a graph is recorded for each size of calls, and is replayed for all calls of
    this size. If a sequence has more than ``n_slots`` tokens, the cache grows, and graphs are
    recorded again.
    """

    def __init__(self, n_slots: int) -> None:
        # The padding of a call is written to slots, too. So add slots for the padding of the
        # largest call.
        self.n_slots = n_slots + STATIC_SIZES[-1]
        # CUDA graphs need keys and values at fixed addresses. So caches give their buffers back to
        # this dict, and new caches take them from it.
        self.buffers: Buffers = {}
        self._graphs: dict[tuple[Any, ...], _StaticGraph] = {}

    def forward(
        self, target: Target, tokens: Tensor, seen: Tensor | None, cache: TargetCache
    ) -> Tensor:
        """Run the target over tokens as :meth:`Target.forward` does, but as a static call."""
        n_tokens = tokens.shape[1]
        device = tokens.device
        padding = next(size for size in STATIC_SIZES if size >= n_tokens) - n_tokens
        numbers = to_device([[length, n_tokens] for length in cache.lengths], device)
        tokens = nn.functional.pad(tokens, (0, padding))
        seen = None if seen is None else nn.functional.pad(seen, (0, padding, 0, padding))

        def call(
            tokens: Tensor, seen: Tensor | None, numbers: Tensor
        ) -> tuple[Tensor, list[Tensor]]:
            # The shapes are [B, 1] and [B, 1, 1].
            lengths, n_real = numbers[:, :1], numbers[:, 1:, None]
            index = torch.arange(tokens.shape[1], device=device)
            if seen is None:
                seen = (index <= index[:, None]) & (index[:, None] < n_real)
            # Each token attends to itself. A padding token attends only to itself among the tokens
            # of this call.
            seen = seen | (index == index[:, None])
            build = partial(masks.tree_mask_after, lengths, seen, cache.capacity)
            return target.run(
                tokens, lengths + seen.sum(dim=2) - 1, target.attention_mask(build), cache
            )

        cache.begin_static_call(n_tokens + padding, numbers[:, :1])
        inputs = tokens, seen, numbers
        hidden, layer_states = (
            call(*inputs) if device.type == "cpu" else self._replayed(call, cache, inputs)
        )
        if layer_states:
            cache.keep_layer_outputs([states[:, :n_tokens] for states in layer_states])
        # Clone the result, because the next replay overwrites the graph's output.
        return hidden[:, :n_tokens].clone()

    def _replayed(
        self, call: Callable[..., tuple[Tensor, list[Tensor]]], cache: TargetCache, given: Inputs
    ) -> tuple[Tensor, list[Tensor]]:
        """Replay the CUDA graph of a static call. If no graph fits the call, record one first."""
        key = given[0].shape, given[1] is None, cache.watched_layers, cache.home
        if key not in self._graphs:
            static_inputs = (
                given[0].clone(),
                None if given[1] is None else given[1].clone(),
                given[2].clone(),
            )
            cache.begin_static_call(static_inputs[0].shape[1], static_inputs[2][:, :1])
            graph, (hidden, layer_states) = recorded(lambda: call(*static_inputs), given[0].device)
            self._graphs[key] = _StaticGraph(graph, static_inputs, hidden, layer_states)
        static_graph = self._graphs[key]
        for static_input, value in zip(static_graph.inputs, given, strict=True):
            if static_input is not None and value is not None:
                static_input.copy_(value)
        static_graph.graph.replay()
        return static_graph.hidden, static_graph.kept


# A moment in time. If a CPU computes, a mark is the time of the CPU's clock in seconds. If a CUDA
# device computes, a mark is an event in the device's stream, because the CPU's clock would give
# wrong times: the CPU launches the kernels of drafting without waiting for them, and waits only
# during verification. So the clock would count most of the drafting time as verification time.
Mark = float | torch.cuda.Event


def mark_moment(device: torch.device) -> Mark:
    """Mark the present moment without waiting for the device.

    For a CUDA device, the mark is the moment at which the device has finished all work that is
    queued now.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """Return the seconds between two marks of the same device.

    If a CUDA device has not reached the second mark yet, the function waits until it has.
    """
    if isinstance(ended, float):
        return float(ended - began)
    if not ended.query():
        ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
