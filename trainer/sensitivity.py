"""Measure how errors of stored keys and values affect a drafter.

Codecs use the result to spend bits on the values that matter.

An error ``e`` of a token's keys or values changes a drafter's next-token distributions by about ``e
@ M @ e / 2`` nats (the KL, summed over the positions that see the token). ``M`` is the drafter's
Gauss-Newton matrix: with ``J`` the derivative of its logits and ``p`` its distribution, the sum of
``J^T (diag(p) - p p^T) J`` over positions. It is the mean of outer products of gradients of the
log-probability of tokens drawn from the drafter itself (Martens 2020, "New insights and
perspectives on the natural gradient method", section 5). So one backward samples all positions.

Shapes: T tokens, L target layers, D packed KV width, W width of a part, P drafted positions, E
width of a feature.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import SelectionInvalid, TrainingError
from ..moa.drafters.base import Drafter
from ..moa.drafters.sizes import check_target_fits
from ..moa.drafters.training import Draws, Reads, TrainingInputs
from ..moa.targets.bundle import FrozenTarget
from ..storage.codecs.transform import TransformCodec
from ..storage.read.store import ActivationStore
from ..storage.schema import TOKENS, to_float32
from ..text import Progress, add_command
from .data import read_fields

# Drafts of a round; fewer if the drafter makes fewer.
DRAFT_LENGTH = 5
_LOGITS_BYTES = 1 << 26


def check_measurable(drafter: Drafter, store: ActivationStore) -> Reads:
    """Return what a drafter reads from a store, or refuse a drafter that does not fit the store."""
    store.refuse_groups("--drafter")
    identity = {"weights_sha256": store.manifest.identities.get("target.weights_sha256", "")}
    check_target_fits(drafter.config, store.manifest.target, identity)
    reads = type(drafter).reads(int(store.manifest.target["n_layers"]), drafter.config)
    if not reads.kv:
        raise TrainingError(
            f"a drafter of kind {drafter.kind} with these settings reads no keys and values; "
            "choose one that does."
        )
    if missing := [name for name in read_fields(reads).values() if name not in store.fields]:
        raise SelectionInvalid(
            f"{store.path} lacks {', '.join(missing)}, which the drafter reads; add with "
            f"{add_command(str(store.path), missing)}, or choose a drafter that was trained from "
            "this store."
        )
    return reads


@dataclass(frozen=True)
class DrafterMetrics:
    """Measures the cost of errors of a token's keys and values, on average over tokens."""

    drafter: Drafter  # In evaluation mode, in float32.
    progress: Progress | None = None  # Called with (sequences done, all sequences, message).

    @property
    def identity(self) -> str:
        """The SHA-256 of the names and values of the drafter's weights."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.drafter.state_dict().items()):
            digest.update(name.encode() + weight.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def __call__(
        self, store: ActivationStore, codec: TransformCodec, sequences: Sequence[int]
    ) -> list[list[np.ndarray]]:
        """Measure the metric of each part of each group, float64 [W, W].

        The result is the input of ``TransformCodec.metrics``.

        Args:
            store: holds the exact values.
            codec: the codec of ``kv``. It splits keys before RoPE and values into groups of layers,
                and these into parts.
            sequences: indices of sequences with responses that are long enough for draft rounds.
        """
        drafter = self.drafter
        reads = check_measurable(drafter, store)
        n_last = drafter.config.target_layer_inference
        frozen = FrozenTarget.load(store.target_path, n_last, sizes=store.manifest.target)
        generator = torch.Generator().manual_seed(0)
        n_steps = 1 + min(DRAFT_LENGTH, drafter.config.max_depth or DRAFT_LENGTH)
        sums: list[list[Tensor]] = []
        n_tokens = 0
        for done, index in enumerate(sequences):
            if self.progress:
                self.progress(
                    done,
                    len(sequences),
                    f"measure: drafter on sequence {done + 1}/{len(sequences)}",
                )
            inputs = _read(store, reads, index)
            draws = Draws(
                torch.tensor([n_steps]),
                torch.zeros(1, dtype=torch.bool),
                torch.tensor([done % n_steps]),
            )
            gradients = drawn_gradients(
                drafter, frozen, inputs, draws, codec, reads.kv_layers, generator
            )
            # Add in place and part by part: at the width of an 8B model all metrics together take
            # gigabytes.
            sums = sums or [
                [part.new_zeros(2 * part.shape[1:], dtype=torch.float64) for part in p]
                for p in gradients
            ]
            for totals, parts in zip(sums, gradients, strict=True):
                for total, part in zip(totals, parts, strict=True):
                    total += part.T @ part
            n_tokens += len(inputs.tokens[0])
        return [[total.div_(n_tokens).numpy() for total in parts] for parts in sums]


def _read(store: ActivationStore, reads: Reads, index: int) -> TrainingInputs:
    def states(field: str) -> Tensor:
        return torch.from_numpy(to_float32(store.read(index, field), store.fields[field].dtype))[
            None
        ]

    read = {attribute: states(field) for attribute, field in reads.fields.items()}
    if not read["kv"].isfinite().all():
        raise TrainingError(
            f"sequence {index} of {store.path} has keys or values that are NaN or infinite, which "
            "a transform codec cannot hold. Choose another codec, or extract without that chat."
        )
    return TrainingInputs(
        tokens=torch.from_numpy(store.read(index, TOKENS).astype(np.int64))[None],
        response_mask=torch.from_numpy(store.read(index, "response_mask").astype(bool))[None],
        **read,
        layer_outputs=tuple(states(f"hidden/layer_{layer}") for layer in reads.outputs),
    )


def drawn_gradients(
    drafter: Drafter,
    frozen: FrozenTarget,
    inputs: TrainingInputs,
    draws: Draws,
    codec: TransformCodec,
    kv_layers: Sequence[int] | None,
    generator: torch.Generator,
) -> list[list[Tensor]]:
    """Draw gradients, [T, W] for each part of each group.

    The mean of their outer products is the Gauss-Newton matrix.

    Args:
        inputs: one sequence; its ``kv`` is [1, T, L, H, 2, d] of all layers.
    """
    # These are gradients of the log-probability of tokens drawn from the drafter, one for each
    # drafted position. The draws are independent and their gradients have mean zero, so products
    # between positions cancel on average.
    assert inputs.kv is not None
    parts = [
        [part.detach().requires_grad_() for part in group] for group in codec.parts(inputs.kv[0])
    ]
    kv = codec.whole(parts).flatten(2)[None]  # [1, T, L, D]
    inputs = replace(inputs, kv=kv if kv_layers is None else kv[:, :, list(kv_layers)])
    outputs = drafter.drafted_features(frozen, inputs, draws)
    features = outputs.features[outputs.valid]
    leaves = [part for group in parts for part in group]
    by_feature = _drawn_feature_gradients(drafter, frozen, features.detach(), generator)
    gradients = iter(torch.autograd.grad(features, leaves, by_feature, materialize_grads=True))
    return [[next(gradients) for _ in group] for group in parts]


def _drawn_feature_gradients(
    drafter: Drafter, frozen: FrozenTarget, features: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the gradients of log-probabilities with respect to the features: both [P, E].

    The log-probability is that of a token drawn from the drafter at each position.
    """
    gradients = []
    n_rows = max(1, _LOGITS_BYTES // (4 * len(frozen.lm_head_weight)))
    for chunk in features.split(n_rows):  # The logits of a long sequence take gigabytes.
        rows = chunk.clone().requires_grad_()
        log_p = drafter.draft_logits(frozen, rows).float().log_softmax(dim=-1)
        if log_p.isnan().any():
            raise TrainingError(
                "the drafter computes NaN on this store. Choose one whose training succeeded."
            )
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        gradients += torch.autograd.grad(log_p.gather(-1, drawn).sum(), rows)
    return torch.cat(gradients)
