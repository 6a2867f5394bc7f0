"""Prepare a target and its drafters for decoding."""

from collections.abc import Iterable

from torch import nn

from ..drafters.base import Drafter
from ..nn.layers import DecoderBlock
from ..nn.packed import pack, rows_of
from ..targets.bundle import FrozenTarget
from ..targets.fused import fuse
from ..targets.live import Target


def prepare_for_inference(
    target: Target | FrozenTarget | nn.Module,
    drafters: Iterable[Drafter] = (),
    uses_graphs: bool = True,
) -> None:
    """Optimize a target and its drafters for decoding. Their weights must not change afterwards.

    The weights are packed for a CPU (:func:`..nn.packed.pack`). The target's tokens stay the same,
    but drafts may change slightly. A second call has no effect.

    Args:
        target: a live target, its model alone, or a frozen target that is only used for drafts.
        drafters: the drafters.
        uses_graphs: whether a live target may use CUDA graphs.
    """
    if isinstance(target, FrozenTarget):
        pack(target.lm_head, is_exact=False)
    elif isinstance(target, Target):
        fuse(target.model)
        target.prepare_calls(uses_graphs)
    else:
        fuse(target)
    for drafter in drafters:
        pack(drafter, is_exact=False)
        for module in drafter.modules():
            if isinstance(module, DecoderBlock):
                module.fuse()
        if drafter.config.draft_tokens and drafter.own_head is not None:
            drafter.own_rows = [rows_of(drafter.own_head, drafter.draft_ids, is_packed=True)]
