"""One target call over tokens of many sequences at once.

Shapes: n tokens of one sequence's part, T tokens of all parts, E width, V vocabulary, K watched layers.

The tokens of all parts stand in one row [1, T], without padding: a chunk of a prompt, plain steps and verifications of
any size go through the linear layers together. Only attention keeps the parts apart::

    part        prompt chunk   plain step   root and drafts
    tokens      a b c d e      k            r x y z             T = 10
    positions   0 1 2 3 4      17           9 10 11 12
    attends to  its own KV     its own KV   its own KV and ancestors among r x y z

The target's own modules compute everything, in a copy that shares the weights and differs in its attention function
(``attention``); the target itself stays as it is.
"""

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ...moa.nn.masks import to_device
from ...moa.targets.bundle import FrozenTarget
from ...moa.targets.families import family_of, layer_windows, text_model
from ...moa.targets.fused import FusedBody, fuse
from ...moa.targets.live import Target, layer_outputs
from .attention import ATTENTION, JoinedAttention, Part, PartsAttention

# Multiplications of a mean linear layer that are shared among cores: some 0.3 ms of one.
_FEWEST_PRODUCTS = 1 << 23


@dataclass
class Output:
    """What a call gave for one part."""

    hidden: Tensor  # [n, E], after the final norm; empty where it was not asked for
    logits: Tensor | None  # [1 + drafts, V]; None where the part is not read
    best: list[int]  # the argmax of each row of the logits
    layers: dict[int, Tensor]  # watched layer -> its outputs [n, E]


class Runner:
    """Calls a target; a call takes at least ``min_s`` seconds, to stand for a slower one."""

    def __init__(self, target: Target, min_s: float = 0.0) -> None:
        # A copy of the model's modules, not of its weights.
        weights = {
            id(tensor): tensor
            for tensor in itertools.chain(target.model.parameters(), target.model.buffers())
        }
        self._model = copy.deepcopy(target.model, weights)
        fuse(self._model)
        self._fused = FusedBody.of(self._model)
        self._model.set_attn_implementation(ATTENTION)
        for module in self._model.modules():
            if hasattr(module, "attn_temperature_tuning"):
                # It counts positions by itself; within ``Target.max_positions`` it does nothing.
                cast(Any, module).attn_temperature_tuning = False
        matrices = [
            module.weight.numel()
            for module in self._model.modules()
            if isinstance(module, torch.nn.Linear)
        ]
        self._n_values = sum(matrices) // max(1, len(matrices))
        self._device = target.device
        self._min_s = min_s
        self._logits = target.logits_by
        self._body, self._head = text_model(self._model), self._model.get_output_embeddings()
        self._is_joined = target.has_uniform_kv and family_of(target.config).attention == "sdpa"
        self._windows = layer_windows(target.config)
        self._n_heads = target.sizes["n_heads"]

    def frozen(self, n_layers: int) -> FrozenTarget:
        """Make the weights that drafters need of the target, with the LM head as it is packed here."""
        return FrozenTarget.from_model(self._model, n_layers)

    @contextlib.contextmanager
    def threads(self, n_tokens: int) -> Iterator[None]:
        """Compute with one thread where so few tokens, or so small a target, gain nothing by several."""
        # Threads meet after every product, and who waits keeps others from the core, or has to be
        # woken.
        n_before = torch.get_num_threads()
        torch.set_num_threads(n_before if n_tokens * self._n_values >= _FEWEST_PRODUCTS else 1)
        try:
            yield
        finally:
            torch.set_num_threads(n_before)

    def run(
        self, parts: Sequence[Part], watched_layers: Sequence[int] = (), needs_hidden: bool = True
    ) -> list[Output]:
        """Run the tokens of all parts; their KV stays pending until it is committed."""
        began = time.perf_counter()
        attention: PartsAttention | JoinedAttention
        if self._device.type == "cuda" and self._is_joined:
            attention = JoinedAttention(parts, self._windows, self._n_heads, self._device)
        else:
            attention = PartsAttention(parts, self._windows, self._device)
        tokens = to_device(
            [list(itertools.chain.from_iterable(part.tokens for part in parts))], self._device
        )
        sizes = [len(part.tokens) for part in parts]
        # Tokens that logits are wanted of, and how many of each part.
        n_wanted = [1 + len(part.parents) if part.is_read else 0 for part in parts]
        stops = itertools.accumulate(sizes)
        wanted = [
            index
            for n, stop in zip(n_wanted, stops, strict=True)
            for index in range(stop - n, stop)
        ]
        if (
            self._fused is not None
            and not needs_hidden
            and not watched_layers
            and len(wanted) < sum(sizes)
        ):
            # Of most tokens of a prompt the last layer gives keys and values alone. No product
            # takes no rows.
            positions = attention.positions[None]
            rows = to_device(wanted or [0], self._device)
            hidden, outputs = self._fused(tokens, positions, wanted=rows, parts_attention=attention)
            together = hidden[0, : len(wanted)]
            by_part = (hidden[0, :0],) * len(parts)
        else:
            hidden, outputs = self._forward(tokens, attention, watched_layers)  # [T, E]
            by_part = hidden.split(sizes)
            together = hidden if len(wanted) == len(hidden) else hidden[wanted]
        together = self._logits(self._head, together)
        logits = together.split(n_wanted)
        best = iter(together.argmax(dim=-1).tolist())  # one wait for the device
        watched = {layer: outputs[layer][0].split(sizes) for layer in watched_layers}
        results = []
        for index, (part, own, rows) in enumerate(zip(parts, by_part, logits, strict=True)):
            layers = {layer: by_part[index] for layer, by_part in watched.items()}
            results.append(
                Output(own, rows if part.is_read else None, [next(best) for _ in rows], layers)
            )
        if self._min_s:
            time.sleep(max(0.0, self._min_s - (time.perf_counter() - began)))
        return results

    def _forward(
        self,
        tokens: Tensor,
        attention: PartsAttention | JoinedAttention,
        watched_layers: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run tokens [1, T]: hidden states [T, E], and the outputs of watched layers [1, T, E]."""
        positions = attention.positions[None]
        if self._fused is not None:
            run_layers = None
            if self._fused.heads is not None and isinstance(attention, PartsAttention):
                run_layers = attention.run_layers(self._n_heads, *self._fused.heads)
            hidden, outputs = self._fused(
                tokens, positions, watched_layers, run_layers=run_layers, parts_attention=attention
            )
            return hidden[0], outputs
        with layer_outputs(self._model, watched_layers) as outputs:
            own = {"use_cache": False, "parts_attention": attention}
            hidden = self._body(input_ids=tokens, position_ids=positions, **own).last_hidden_state
        return hidden[0], outputs
