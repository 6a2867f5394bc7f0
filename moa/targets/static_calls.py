"""Target calls of static shapes, which torch.compile and CUDA graphs need: one graph serves every round of a size.

A call is padded to one of a few sizes, attends to every slot of a cache of fixed length, and finds its place in it by
tensors alone, so that nothing in the graph depends on how long the text has become.

Shapes: B rows, n tokens of a call, P tokens of the padded call, S slots of the cache, E width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import masks
from .cache import Buffers, TargetCache

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of a padded call; a chain of 5 drafts with its root takes 8, the widest tree 64."""
_MOST_GRAPHS = 256
"""Most graphs, one for each size, number of rows and length of the cache; torch.compile's own limit of 8 is too low."""


class StaticCalls:
    """The compiled body of a target.

    Args:
        n_slots: tokens of the longest text; a longer one makes the caches grow, and costs another graph.
        device: where the body is; CUDA graphs are used where it is a CUDA device.

    Attributes:
        buffers: buffers that the caches of these calls share in turn.
    """

    def __init__(self, body: nn.Module, n_slots: int, backend: str | Callable[..., Any], device: torch.device) -> None:
        torch._dynamo.config.recompile_limit = _MOST_GRAPHS
        self.n_slots = n_slots + SIZES[-1]  # padding takes slots too
        mode = "reduce-overhead" if device.type == "cuda" and backend == "inductor" else None
        self.buffers = Buffers()
        self._model = body
        self._body: Any = torch.compile(body, dynamic=False, backend=backend, mode=mode)
        self._watched_body: Any = torch.compile(_with_layer_outputs, dynamic=False, backend=backend, mode=mode)

    def takes(self, n_tokens: int, cache: TargetCache) -> bool:
        """Whether a call can run here: it is short, and comes after a prompt."""
        return n_tokens <= SIZES[-1] and all(cache.lengths)

    def forward(
        self,
        tokens: Tensor,
        seen: Tensor | None,
        cache: TargetCache,
        as_mask: Callable[[Callable[[int | None], Tensor]], Any],
        outputs: dict[int, Tensor],
    ) -> Tensor:
        """Run tokens behind the committed part of each row.

        Args:
            tokens: [B, n] int64.
            seen: [B, n, n] bool, which of the tokens each of them sees; None for a causal run.
            as_mask: makes what the model takes from a function (window) -> [B, n, S] bool.
            outputs: where hooks put the outputs of the cache's watched layers, which the cache then keeps.

        Returns:
            Hidden states [B, n, E] after the final norm.
        """
        n_tokens, device = tokens.shape[1], tokens.device
        tokens, seen = _padded(tokens, seen)
        cache.begin_static_call(tokens.shape[1], device)
        lengths = torch.tensor(cache.lengths, device=device)[:, None]
        positions = lengths + seen.sum(dim=2) - 1  # [B, P]
        unused = cache.capacity - max(cache.lengths) - tokens.shape[1]

        def mask(window: int | None) -> Tensor:
            return nn.functional.pad(masks.tree_mask(cache.lengths, seen, window), (0, unused))  # [B, P, S]

        inputs = {
            "input_ids": tokens, "position_ids": positions, "attention_mask": as_mask(mask), "past_key_values": cache,
            "use_cache": True,
        }  # fmt: skip
        if cache.watched_layers:
            hidden, kept = self._watched_body(self._model, cache.watched_layers, outputs, inputs)
            cache.keep_layer_outputs([states[:, :n_tokens] for states in kept])
        else:
            hidden = self._body(**inputs).last_hidden_state
        # A CUDA graph's output is overwritten by its next run.
        kept_hidden: Tensor = hidden[:, :n_tokens].clone()
        return kept_hidden


def _with_layer_outputs(
    body: nn.Module, layers: tuple[int, ...], outputs: dict[int, Tensor], inputs: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """Run the body; returns its hidden states, and what the hooks of some layers have put into ``outputs``.

    This function is compiled in place of the body: its graphs depend on the layers, those of a module not on its hooks.
    """
    hidden = body(**inputs).last_hidden_state
    return hidden, [outputs[layer] for layer in layers]


def _padded(tokens: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pad a call to the next size: tokens [B, P] and what they see [B, P, P], where padding sees itself alone."""
    n_tokens = tokens.shape[1]
    size = next(size for size in SIZES if size >= n_tokens)
    filled = torch.eye(size, dtype=torch.bool, device=tokens.device).repeat(len(tokens), 1, 1)
    causal = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=tokens.device).tril()
    filled[:, :n_tokens, :n_tokens] = causal if seen is None else seen
    return nn.functional.pad(tokens, (0, size - n_tokens)), filled
