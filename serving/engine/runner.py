"""One target call over tokens of many sequences at once.

Shapes: n tokens of one sequence's part, T tokens of all parts, E width, V vocabulary, H query heads, H_kv key/value
heads, d head dim, S slots, K watched layers.

The tokens of all parts stand in one row [1, T], without padding: a chunk of a prompt, plain steps and verifications of
any size go through the linear layers together. Only attention keeps the parts apart::

    part        prompt chunk   plain step   root and drafts
    tokens      a b c d e      k            r x y z             T = 10
    positions   0 1 2 3 4      17           9 10 11 12
    attends to  its own KV     its own KV   its own KV and ancestors among r x y z

The target's own modules compute everything, in a copy that shares the weights and differs in its attention function;
the target itself stays as it is.
"""

import copy
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ...moa.decoding.tree import ancestors
from ...moa.nn import masks
from ...moa.nn.attention import attend
from ...moa.targets.bundle import layer_windows
from ...moa.targets.live import Target, layer_outputs
from .pool import PooledKV

_ATTENTION = "moa_data_parts"


@dataclass(frozen=True)
class Part:
    """The tokens of one sequence in a call."""

    kv: PooledKV
    tokens: list[int]  # those after its committed KV, then the drafts
    parents: tuple[int, ...] = ()  # of each draft, an index into the drafts, -1 for the token before them
    is_read: bool = True  # whether logits are wanted, of the last token before the drafts and of each draft

    @property
    def start(self) -> int:
        """The position of the first token."""
        return self.kv.length

    @property
    def n_known(self) -> int:
        """Tokens before the drafts."""
        return len(self.tokens) - len(self.parents)

    def slots(self, start: int) -> tuple[Tensor, ...]:
        """View the KV from a position up to the last token of this part: of each layer [2, H_kv, slots, d]."""
        return self.kv.view(start, self.start + len(self.tokens)).unbind(1)

    def positions(self) -> list[int]:
        """List the positions of the tokens; a draft stands one after its parent."""
        root = self.start + self.n_known - 1
        depths = {-1: 0}
        for node, parent in enumerate(self.parents):
            depths[node] = depths[parent] + 1
        return [*range(self.start, root + 1), *(root + depths[node] for node in range(len(self.parents)))]

    def mask(self, positions: list[int], window: int | None, device: torch.device) -> Tensor | None:
        """Say what each token sees, [1, n, S] bool; None where each sees everything."""
        n_tokens, n_known = len(self.tokens), self.n_known
        if n_tokens == 1 and (window is None or self.start < window):
            return None
        if list(self.parents) == list(range(-1, len(self.parents) - 1)):  # a chain, or no drafts
            return masks.causal_mask(torch.tensor([positions], device=device), self.start + n_tokens, window)
        seen = torch.zeros(1, n_tokens, n_tokens, dtype=torch.bool, device=device)
        seen[0, :n_known, :n_known] = torch.ones(n_known, n_known, dtype=torch.bool, device=device).tril()
        seen[0, n_known:, :n_known] = True
        seen[0, n_known - 1 :, n_known - 1 :] = ancestors(torch.tensor([self.parents], device=device))[0]
        return masks.tree_mask([self.start], seen, window)


@dataclass
class Output:
    """What a call gave for one part."""

    hidden: Tensor  # [n, E], after the final norm
    logits: Tensor | None  # [1 + drafts, V]; None where the part is not read
    best: list[int]  # the argmax of each row of the logits
    layers: dict[int, Tensor]  # watched layer -> its outputs [n, E]


class Runner:
    """Calls a target; a call takes at least ``min_s`` seconds, to stand for a slower one."""

    def __init__(self, target: Target, min_s: float = 0.0) -> None:
        # A copy of the model's modules, not of its weights.
        weights = {id(tensor): tensor for tensor in itertools.chain(target.model.parameters(), target.model.buffers())}
        self._model = copy.deepcopy(target.model, weights)
        self._model.set_attn_implementation(_ATTENTION)
        self._device, self._min_s = target.device, min_s
        self._windows = layer_windows(target.config)

    def run(self, parts: Sequence[Part], watched_layers: Sequence[int] = ()) -> list[Output]:
        """Run the tokens of all parts; their KV stays pending until it is committed."""
        began = time.perf_counter()
        attention = _PartsAttention(parts, self._windows, self._device)
        tokens = torch.tensor([list(itertools.chain.from_iterable(part.tokens for part in parts))])
        with layer_outputs(self._model, watched_layers) as outputs:
            hidden = self._model.model(
                input_ids=tokens.to(self._device),
                position_ids=attention.positions[None],
                use_cache=False,
                parts_attention=attention,
            ).last_hidden_state[0]  # [T, E]
        sizes = [len(part.tokens) for part in parts]
        by_part = hidden.split(sizes)
        # Rows of the hidden states that logits are wanted of, and how many of each part.
        wanted = [
            own[part.n_known - 1 :] if part.is_read else own[:0] for own, part in zip(by_part, parts, strict=True)
        ]
        together = self._model.lm_head(torch.cat(wanted))
        logits = together.split([len(rows) for rows in wanted])
        best = iter(together.argmax(dim=-1).tolist())  # one wait for the device
        watched = {layer: outputs[layer][0].split(sizes) for layer in watched_layers}
        results = []
        for index, (part, own, rows) in enumerate(zip(parts, by_part, logits, strict=True)):
            layers = {layer: by_part[index] for layer, by_part in watched.items()}
            results.append(Output(own, rows if part.is_read else None, [next(best) for _ in rows], layers))
        if self._min_s:
            time.sleep(max(0.0, self._min_s - (time.perf_counter() - began)))
        return results


class _PartsAttention:
    """Writes keys and values of a call to each part's own KV, and attends within each part."""

    def __init__(self, parts: Sequence[Part], windows: Sequence[int | None], device: torch.device) -> None:
        self._sizes = [len(part.tokens) for part in parts]
        self._pending = list(zip(*(part.slots(part.start) for part in parts), strict=True))  # by layer
        self._seen = list(zip(*(part.slots(0) for part in parts), strict=True))
        positions = [part.positions() for part in parts]
        self.positions = torch.tensor(list(itertools.chain.from_iterable(positions)), device=device)  # [T] int64
        by_window = {
            window: [part.mask(own, window, device) for part, own in zip(parts, positions, strict=True)]
            for window in set(windows)
        }
        self._masks = [by_window[window] for window in windows]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in one layer: q [1, H, T, d], k and v [1, H_kv, T, d] -> [1, T, H, d]."""
        new = torch.cat((k, v)).split(self._sizes, dim=2)  # of each part [2, H_kv, n, d]
        attended = []
        for pending, pair, seen, own_q, mask in zip(
            self._pending[layer], new, self._seen[layer], q.split(self._sizes, dim=2), self._masks[layer], strict=True
        ):
            pending.copy_(pair)
            attended.append(attend(own_q, seen[:1], seen[1:], mask))
        together = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
        return together.transpose(1, 2).contiguous()


def _parts_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as transformers asks for it; the call's :class:`_PartsAttention` comes with the keyword arguments."""
    attention: _PartsAttention = kwargs["parts_attention"]
    return attention.attend(module.layer_idx, query, key, value), None


AttentionInterface.register(_ATTENTION, _parts_attention)
