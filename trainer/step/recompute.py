"""Makes what lies inside decoder layers again in the backward, where a step has no room to keep it.

Kept are what goes into each part of a layer and what comes out, and attention itself: of EAGLE-3's and of Mixture of
Attentions' activations less than half. It costs a second forward of those parts, and changes a result by no more than
the order of sums over positions.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...moa.drafters.base import Drafter
from ...moa.nn.layers import DecoderBlock

_PARTS = ("queries", "keys_values", "finish", "attend_self_means")
_POSITIONS = 16
"""Positions of layer self-attention that are made again at once; each has all layers, hundreds of rows together."""

Part = Callable[..., Any]
"""A method of a decoder layer."""


def recomputed_layers(drafter: Drafter) -> AbstractContextManager[None]:
    """Have the forward within this context keep less for its backward, which may come after it."""

    def recomputed(name: str, part: Part) -> Part:
        again = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
        return partial(_in_pieces, again) if name == "attend_self_means" else again

    return wrapped_layers(drafter, recomputed)


@contextmanager
def wrapped_layers(drafter: Drafter, wrap: Callable[[str, Part], Part]) -> Iterator[None]:
    """Replace the parts of all decoder layers by what ``wrap`` makes of name and part; after it they are as before."""
    blocks = [block for block in drafter.modules() if isinstance(block, DecoderBlock)]
    before = [{name: vars(block)[name] for name in _PARTS if name in vars(block)} for block in blocks]  # compiled ones
    for block in blocks:
        vars(block).update({name: wrap(name, getattr(block, name)) for name in _PARTS})
    try:
        yield
    finally:
        for block, compiled in zip(blocks, before, strict=True):
            for name in _PARTS:
                del vars(block)[name]
            vars(block).update(compiled)


def share_at_once(name: str, x: Tensor) -> float:
    """Say which share of a part's input x is made again at once."""
    return min(1.0, _POSITIONS / len(x)) if name == "attend_self_means" else 1.0


def _in_pieces(means: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    return torch.cat([means(piece, *args) for piece in x.split(_POSITIONS)])
