"""The connector that runs inside vLLM and copies the KV cache of each finished prompt to a file.

A block is vLLM's unit of KV cache memory, with room for ``block_size`` tokens. vLLM loads this
module by its path (``kv_connector_module_path``), once in its scheduler and once in its worker. The
blocks of a finished request stay allocated until their values have been copied::

    scheduler   request_finished_all_groups   keeps the blocks, queues their ids and the file name
                build_connector_meta          sends ids and name to the worker with the next step
    worker      get_finished                  gathers the blocks and copies them to the host, on a
                                              separate stream
                a thread                      waits for the copy, writes the file, renames it
                get_finished, later           reports the copy as done; the scheduler frees the
                                              blocks

The cache of a layer is a tensor with the shape [n_blocks, n_heads, block_size, content]. In the
target's layers, the last axis holds a key followed by a value, so its size is 2 * head_dim. vLLM's
``extract_hidden_states`` adds one more layer. The heads of this layer are the chosen hidden states,
and the last axis has the width of the hidden states. On a CPU, the cache of a target's layer has
the same shape, but another order in memory: for each block and head, the keys are stored as
[head_dim, block_size], followed by the values as [block_size, head_dim].

The connector interface of vLLM is experimental, so only two releases of vLLM are supported.
"""

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from ...files import replacing

# Key in a request's ``kv_transfer_params``. The value is the path of the file to write.
FILE_PARAMETER = "moa_data_file"

_HIDDEN = "HiddenStateCacheSpec"
_TAKEN = ("FullAttentionSpec", _HIDDEN)


@dataclass(frozen=True)
class Save:
    """A prompt whose cached values are to be written to a file.

    vLLM divides the layers into groups. ``blocks`` contains the ids of the prompt's blocks in each
    group.
    """

    request: str
    file: str
    n_tokens: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass
class Saves(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed for type checks.
    """Message from the scheduler to the worker in each step, with the prompts to save."""

    saves: list[Save] = field(default_factory=list)


def check_settings(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse a target if its KV cache in vLLM does not contain the values that a store needs.

    `VllmSource` sets most settings of the cache itself. The dtype is checked here, because a
    target's config.json can set it.
    """
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in ("auto", "bfloat16"):
        raise ValueError(
            f"kv_cache_dtype is {cache_dtype}, which would round the keys and values. Set it to "
            "auto."
        )
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in layer_specs(group).items():
            kind = type(spec).__name__
            if kind not in _TAKEN or getattr(spec, "sliding_window", None):
                raise ValueError(
                    f"Layer {name} has a KV cache of type {kind}, which drops or compresses "
                    "tokens, so its keys and values cannot be stored. Leave out `source=vllm`."
                )


def layer_specs(group: Any) -> dict[str, Any]:
    """Map the name of each layer in a KV cache group to the spec of the layer's cache.

    A group has either one spec for all layers, or one spec per layer.
    """
    # Only UniformTypeKVCacheSpecs has the attribute ``kv_cache_specs``, with a spec per layer.
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if by_layer is None:
        return dict.fromkeys(group.layer_names, group.kv_cache_spec)
    return {name: by_layer[name] for name in group.layer_names}


class MoaDataConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Writes the KV cache of each finished prompt to the file that its request names."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_settings(vllm_config, kv_cache_config)
        if (parent := multiprocessing.parent_process()) is not None:
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        self._wants_kv = bool(self._kv_transfer_config.get_from_extra_config("kv", True))
        self._waiting: list[Save] = []
        self._layers: list[tuple[int, Tensor]] = []
        self._hidden: tuple[int, Tensor] | None = None
        self._copied: dict[str, Any] = {}
        self._finished: set[str] = set()
        self._writers = ThreadPoolExecutor(4)
        self._stream: Any = None

    @classmethod
    @override
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "LBNHC"  # In vLLM's KV cache layout LBNHC, the heads of a token are contiguous.

    @override
    def get_finished_count(self) -> int | None:
        # Number of workers that must report the copy of a request as done before vLLM frees the
        # request's blocks. Only one worker copies values.
        return 1

    # Methods that run in the scheduler.

    @override
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False  # This connector only saves values. It does not load any into vLLM.

    @override
    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    @override
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Keep the blocks only if the request names a file and has computed tokens.
        file = (request.kv_transfer_params or {}).get(FILE_PARAMETER)
        if file is None or not any(block_ids):
            return False, None
        # Save the prompt only. The sampled token has never been an input, so it has no keys, values
        # or hidden states.
        n_tokens = len(request.prompt_token_ids)
        self._waiting.append(Save(request.request_id, file, n_tokens, tuple(map(tuple, block_ids))))
        return True, None

    @override
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        saves = self._waiting
        self._waiting = []
        return Saves(saves)

    # Methods that run in the worker.

    @override
    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        # Find the cache of the hidden states, and the caches of the target's layers in layer order.
        by_layer: dict[int, tuple[int, Tensor]] = {}
        for index, group in enumerate(self._kv_cache_config.kv_cache_groups):
            for name, spec in layer_specs(group).items():
                if type(spec).__name__ == _HIDDEN:
                    self._hidden = index, kv_caches[name]
                else:
                    by_layer[layer_number(name)] = index, kv_caches[name]
        if sorted(by_layer) != list(range(len(by_layer))):
            raise ValueError(
                f"vLLM numbers the layers {sorted(by_layer)}, expected each number from 0 once. "
                "Leave out `source=vllm`."
            )
        self._layers = [by_layer[layer] for layer in sorted(by_layer)]
        cache = self._layers[0][1]
        if (
            cache.device.type == "cpu"
            and cache.dtype == torch.bfloat16
            and torch.cpu._is_amx_tile_supported()
        ):
            raise ValueError(
                "vLLM stores bfloat16 keys in the AMX tile format of this CPU, which cannot be "
                "read. Use `compute_dtype=float32`."
            )

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @override
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @override
    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        # vLLM calls this method for every layer. Nothing is saved here, because the cache is
        # complete only when the request finishes.
        pass

    @override
    def wait_for_save(self) -> None:
        # vLLM need not wait for copies, because blocks stay allocated until their values are
        # copied.
        pass

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        # Start the copies that the scheduler has requested, and report the requests whose blocks
        # have been copied.
        if self.has_connector_metadata():
            for save in self._get_connector_metadata().saves:
                self._begin(save)
        self._finished |= finished_req_ids
        copied: set[str] = set()
        for name, event in self._copied.items():
            if event is None or event.query():
                copied.add(name)
        done = self._finished & copied
        self._finished -= done
        for name in done:
            del self._copied[name]
        return done or None, None

    @override
    def shutdown(self) -> None:
        self._writers.shutdown()  # This call waits for files that are being written.

    def _begin(self, save: Save) -> None:
        """Gather a prompt's values and start the copy to the host, on a separate CUDA stream.

        A thread waits for the copy and writes the file.
        """
        if self._layers[0][1].device.type != "cuda":
            values = self._gather(save)
            event = None
        else:
            self._stream = self._stream or torch.cuda.Stream()
            # The forward writes the cache on the current stream, so the copy stream must wait for
            # the current stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                on_device = self._gather(save)
                values = {}
                for name, tensor in on_device.items():
                    values[name] = torch.empty_like(tensor, device="cpu", pin_memory=True)
                    values[name].copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copied[save.request] = event
        self._writers.submit(_write, values, event, Path(save.file))

    def _gather(self, save: Save) -> dict[str, Tensor]:
        """Return the values of a prompt: ``kv`` [T, L, H_kv, 2, d] and ``hidden`` [T, n, E].

        If one of them was not requested, it is left out.

        Shapes: T tokens, L layers, H_kv key/value heads, d head dim, n hidden states, E width.
        """
        values = {}
        if self._wants_kv:
            take = kv_of_cpu if self._layers[0][1].device.type == "cpu" else kv_of
            layers: list[Tensor] = []
            for group, cache in self._layers:
                layers.append(take(cache, save.blocks[group], save.n_tokens))
            values["kv"] = torch.stack(layers, dim=1)
        if self._hidden is not None:
            group, cache = self._hidden
            values["hidden"] = tokens_of(cache, save.blocks[group], save.n_tokens).contiguous()
        return values


def tokens_of(cache: Tensor, blocks: tuple[int, ...], n_tokens: int) -> Tensor:
    """Gather the values of a sequence from the blocks of a layer's cache.

    Args:
        cache: cache of the layer, [n_blocks, n_heads, block_size, content].
        blocks: block ids of the sequence, in order.
        n_tokens: number of tokens of the sequence.

    Returns:
        The values of each token, [n_tokens, n_heads, content].
    """
    if len(blocks) * cache.shape[2] < n_tokens:
        raise ValueError(
            f"vLLM's KV cache gave {len(blocks)} blocks of {cache.shape[2]} tokens for a sequence "
            f"of {n_tokens} tokens, which are too few. Leave out `source=vllm`."
        )
    index = torch.tensor(blocks, device=cache.device)
    return cache.index_select(0, index).transpose(1, 2).flatten(0, 1)[:n_tokens]


def kv_of(cache: Tensor, blocks: tuple[int, ...], n_tokens: int) -> Tensor:
    """Gather the keys and values of a sequence from the cache of a layer.

    Args:
        cache: cache of the layer, [n_blocks, H_kv, block_size, 2 * d].
        blocks: block ids of the sequence, in order.
        n_tokens: number of tokens of the sequence.

    Returns:
        Keys and values, [n_tokens, H_kv, 2, d].
    """
    gathered: Tensor = tokens_of(cache, blocks, n_tokens).unflatten(-1, (2, -1))
    return gathered


def kv_of_cpu(cache: Tensor, blocks: tuple[int, ...], n_tokens: int) -> Tensor:
    """Gather the same keys and values as :func:`kv_of`, from a cache in vLLM's memory order on CPUs.

    The module's docstring describes this memory order.
    """
    block_size = cache.shape[2]
    head_dim = cache.shape[3] // 2
    # Split the blocks into keys and values. Both have the shape [n_blocks, H_kv, block_size * d].
    keys, values = cache[list(blocks)].flatten(2).chunk(2, dim=2)
    both = (
        keys.unflatten(2, (head_dim, block_size)).transpose(2, 3),
        values.unflatten(2, (block_size, head_dim)),
    )
    return kv_of(torch.cat(both, dim=3), tuple(range(len(blocks))), n_tokens)


def layer_number(name: str) -> int:
    """Return the number in a layer's name. Example: 3 for ``model.layers.3.self_attn.attn``."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(
            f"vLLM has a layer with the name {name}, expected a name with exactly one number in "
            "it. Leave out `source=vllm`."
        )
    return int(numbers[0])


def _end_with(parent: Any) -> None:
    """End this vLLM process as soon as its parent process has ended, for whatever reason."""
    parent.join()
    os._exit(1)


def _write(values: dict[str, Tensor], event: Any, file: Path) -> None:
    try:
        if event is not None:
            event.synchronize()
        with replacing(file) as partial:
            save_file(values, partial)
    # Nobody would see an exception of this thread, so write its message to a file. VllmSource looks
    # for this file.
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        file.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
