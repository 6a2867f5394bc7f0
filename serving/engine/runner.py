"""One target call over tokens of several sequences.

Shapes: n tokens of one segment, T tokens of all segments, E hidden size, V vocabulary size.

A segment is the tokens of one sequence in the target call. The tokens of all segments are
concatenated without padding, [1, T]. So the linear layers process prompt chunks, plain steps (one
token without drafts) and verifications of any size at once. Only attention separates the segments::

    segment     prompt chunk   plain step   root and drafts
    tokens      a b c d e      k            r x y z             T = 10
    positions   0 1 2 3 4      17           9 10 11 12
    attends to  its own KV     its own KV   its own KV and ancestors among r x y z

Everything except attention is computed by the modules of the target. The runner copies these
modules, so that it does not change the target itself. The copy shares the target's weights, but has
another attention function (see ``attention``).
"""

import contextlib
import copy
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ...moa.nn.masks import to_device
from ...moa.targets.bundle import FrozenTarget
from ...moa.targets.families import layer_outputs, text_model
from ...moa.targets.fused import FusedBody, fuse
from ...moa.targets.live import Target, limited_threads
from .attention import ATTENTION, BatchedAttention, Segment, SegmentAttention

# A target call uses several threads only if a linear layer of average size needs at least this many
# multiplications. One core takes about 0.3 ms for this many. For fewer multiplications, one thread
# is faster than several.
_FEWEST_PRODUCTS = 1 << 23


@dataclass
class Output:
    """Results of a target call for one segment (n tokens of one sequence)."""

    # [n, E]: the output of the final norm for each token. The tensor has zero rows if the caller
    # did not request hidden states.
    hidden: Tensor
    # [1 + drafts, V]. Row 0 has the logits of the last token before the drafts, and the next rows
    # have the logits of the drafts. None if the segment needs no logits.
    logits: Tensor | None
    # The most likely token of each row of ``logits``. Empty if the segment needs no logits.
    best: list[int]
    # Index of a target layer that a drafter reads -> the output of this layer, [n, E].
    layers: dict[int, Tensor]


class Runner:
    """Runs target calls.

    Args:
        target: the target. Its modules are copied, but its weights are shared with the copies.
        min_s: minimum duration of a call in seconds, to simulate a slower target.
    """

    def __init__(self, target: Target, min_s: float = 0.0) -> None:
        # Copy the modules but share the weights.
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
                # Turn off the scaling of queries by position. transformers uses a token's index in
                # the input as its position, which is wrong for concatenated segments. The scaling
                # has no effect at positions below ``Target.max_positions``, so the results do not
                # change if it is turned off.
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
        facts = target.facts
        self._can_batch = facts.has_uniform_kv and facts.family.attention == "sdpa"
        self._windows = facts.layer_windows
        self._n_heads = facts.n_heads

    def frozen(self, n_layers: int) -> FrozenTarget:
        """Return the target weights that drafters need.

        On a CPU, the LM head is packed into a layout for fast matrix products.
        """
        return FrozenTarget.from_model(self._model, n_layers)

    def threads(self, n_tokens: int) -> contextlib.AbstractContextManager[None]:
        """Limit PyTorch to one thread if several threads do not pay off for ``n_tokens``."""
        return limited_threads(n_tokens * self._n_values < _FEWEST_PRODUCTS)

    def run(
        self,
        segments: Sequence[Segment],
        watched_layers: Sequence[int] = (),
        needs_hidden: bool = True,
    ) -> list[Output]:
        """Run the target over the tokens of all segments.

        The KV of the tokens is written after the committed KV of each sequence.
        :meth:`.PooledKV.commit` later decides which KV is kept.

        Args:
            segments: the tokens of each sequence.
            watched_layers: indices of the layers whose outputs are returned.
            needs_hidden: whether the hidden states of all tokens are needed.

        Returns:
            The results of each segment.
        """
        began = time.perf_counter()
        attention: SegmentAttention | BatchedAttention
        if self._device.type == "cuda" and self._can_batch:
            attention = BatchedAttention(segments, self._windows, self._n_heads, self._device)
        else:
            attention = SegmentAttention(segments, self._windows, self._device)
        tokens = to_device(
            [list(itertools.chain.from_iterable(segment.tokens for segment in segments))],
            self._device,
        )
        sizes = [len(segment.tokens) for segment in segments]
        # Find the tokens whose logits are needed. ``n_wanted`` has their number per segment.
        # ``wanted`` has their indices among all tokens of the target call.
        n_wanted = [1 + len(segment.parents) if segment.is_read else 0 for segment in segments]
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
            # If the logits of a token are not needed, compute only the token's keys and values in
            # the last layer. If no logits are needed at all, compute token 0 completely, because a
            # matrix product needs at least one row.
            positions = attention.positions[None]
            rows = to_device(wanted or [0], self._device)
            hidden, outputs = self._fused(
                tokens, positions, wanted=rows, segment_attention=attention
            )
            wanted_hidden = hidden[0, : len(wanted)]
            by_segment = (hidden[0, :0],) * len(segments)
        else:
            # The shape of ``hidden`` is [T, E].
            hidden, outputs = self._forward(tokens, attention, watched_layers)
            by_segment = hidden.split(sizes)
            wanted_hidden = hidden if len(wanted) == len(hidden) else hidden[wanted]
        wanted_hidden = self._logits(self._head, wanted_hidden)
        logits = wanted_hidden.split(n_wanted)
        # Converting the tensor to a list waits for the GPU. The target call waits only here.
        best = iter(wanted_hidden.argmax(dim=-1).tolist())
        watched = {layer: outputs[layer][0].split(sizes) for layer in watched_layers}
        results = []
        for index, (segment, segment_hidden, rows) in enumerate(
            zip(segments, by_segment, logits, strict=True)
        ):
            layers = {layer: by_segment[index] for layer, by_segment in watched.items()}
            results.append(
                Output(
                    segment_hidden,
                    rows if segment.is_read else None,
                    [next(best) for _ in rows],
                    layers,
                )
            )
        if self._min_s:
            time.sleep(max(0.0, self._min_s - (time.perf_counter() - began)))
        return results

    def _forward(
        self,
        tokens: Tensor,
        attention: SegmentAttention | BatchedAttention,
        watched_layers: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run tokens [1, T]. Return hidden states [T, E] and watched layers' outputs [1, T, E]."""
        positions = attention.positions[None]
        if self._fused is not None:
            run_layers = None
            if self._fused.heads is not None and isinstance(attention, SegmentAttention):
                run_layers = attention.run_layers(self._n_heads, *self._fused.heads)
            hidden, outputs = self._fused(
                tokens,
                positions,
                watched_layers,
                run_layers=run_layers,
                segment_attention=attention,
            )
            return hidden[0], outputs
        with layer_outputs(self._model, watched_layers) as outputs:
            options = {"use_cache": False, "segment_attention": attention}
            hidden = self._body(
                input_ids=tokens, position_ids=positions, **options
            ).last_hidden_state
        return hidden[0], outputs
