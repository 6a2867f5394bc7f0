"""Measure how errors in stored keys and values change the output of a drafter.

Codecs use the result to give more bits to the values that matter.

An error ``e`` in a token's keys or values changes the drafter's next-token distributions at all
positions that attend to the token. The KL divergence caused by the error, summed over these
positions, is about ``e @ M @ e / 2`` nats. ``M`` is the Gauss-Newton matrix, the sum of ``J^T
(diag(p) - p p^T) J`` over these positions. In this formula, ``p`` is the drafter's distribution at
a position, and ``J`` is the derivative of the drafter's logits with respect to the keys or values
of the token.

``M`` is estimated by sampling. At each position, a token is drawn from the drafter's own
distribution, and the gradient of the token's log-probability is computed. The mean outer product of
such gradients is ``M`` (Martens 2020, "New insights and perspectives on the natural gradient
method", section 5). One backward computes the gradients for all positions of a sequence.

A transform codec divides the target's layers into groups. Each group has two parts: its keys and
its values.

Shapes: T tokens, L target layers, D elements of the KV of one token in one layer, W elements of one
token in a part, P drafted positions, E width of a feature.
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
from ..text import SILENT, Progress, add_command

# Number of drafts per round. If a drafter supports fewer drafts, its maximum is used instead.
DRAFT_LENGTH = 5
_LOGITS_BYTES = 1 << 26


def check_measurable(drafter: Drafter, store: ActivationStore) -> Reads:
    """Return the fields and layers that a drafter reads from a store.

    Raises:
        MoaDataError: the drafter does not fit the store, or reads no keys and values.
    """
    store.refuse_groups("`drafter`")
    identity = {"weights_sha256": store.manifest.identities.get("target.weights_sha256", "")}
    check_target_fits(drafter.config, store.manifest.target, identity)
    reads: Reads = drafter.config.reads
    if not reads.kv:
        raise TrainingError(
            f"this {drafter.kind} drafter reads no keys and values, so it cannot show which of "
            "them matter. Choose a `drafter` that reads them."
        )
    names = [*reads.fields.values(), *(f"hidden/layer_{layer}" for layer in reads.outputs)]
    if missing := [name for name in names if name not in store.fields]:
        raise SelectionInvalid(
            f"{store.path} lacks the fields {', '.join(missing)}, which the drafter reads. Add "
            f"them with {add_command(str(store.path), missing)}, or choose a drafter that was "
            "trained from this store."
        )
    return reads


@dataclass(frozen=True)
class DrafterMetrics:
    """Measures how much errors in keys and values change a drafter's output.

    The results are matrices ``M``, averaged over tokens. For a small error ``e``, the KL divergence
    between the drafter's distributions with and without the error is about ``e @ M @ e / 2`` nats.
    """

    drafter: Drafter  # The drafter to measure, in evaluation mode and float32.
    progress: Progress = SILENT  # Reports how many sequences have been measured.

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
        """Measure two matrices ``M`` for each group of layers: for its keys and for its values.

        A matrix is float64 [W, W]. W is the number of elements of the keys of one token in all
        layers of the group, or of the values.

        Args:
            store: a lossless store.
            codec: the codec of ``kv``. It defines the groups of layers. It encodes keys before
                RoPE.
            sequences: indices of sequences with responses that are long enough for draft rounds.

        Returns:
            For each group, a list of its two matrices. ``TransformCodec.metrics`` has the same form.
        """
        drafter = self.drafter
        reads = check_measurable(drafter, store)
        n_last = drafter.config.target_layer_inference
        frozen = FrozenTarget.load(store.target_path, n_last, sizes=store.manifest.target)
        generator = torch.Generator().manual_seed(0)
        n_steps = 1 + min(DRAFT_LENGTH, drafter.config.max_depth or DRAFT_LENGTH)
        sums: list[Tensor] = []
        n_tokens = 0
        measuring = self.progress.of("measure", "sequence")
        for done, index in enumerate(sequences):
            measuring(done, len(sequences), f"drafter on sequence {done + 1}/{len(sequences)}")
            inputs = _read(store, reads, index)
            draws = Draws(
                torch.tensor([n_steps]),
                torch.zeros(1, dtype=torch.bool),
                torch.tensor([done % n_steps]),
            )
            gradients = drawn_gradients(
                drafter, frozen, inputs, draws, codec, reads.kv_layers, generator
            )
            # Update the sums in place, one matrix at a time. A second copy of all matrices would
            # take gigabytes for an 8B model.
            if not sums:
                sums = [
                    part.new_zeros(2 * part.shape[1:], dtype=torch.float64) for part in gradients
                ]
            for total, part in zip(sums, gradients, strict=True):
                total += part.T @ part
            n_tokens += len(inputs.tokens[0])
        metrics = [total.div_(n_tokens).numpy() for total in sums]
        # The list alternates: the matrix for the keys of a group, then the matrix for its values.
        return [list(parts) for parts in zip(metrics[::2], metrics[1::2], strict=True)]


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
) -> list[Tensor]:
    """Compute random gradients of the drafter's log-probabilities with respect to keys and values.

    At each drafted position, a token is drawn from the drafter's distribution. The
    log-probabilities of these tokens are summed, and the gradient of the sum is computed. The mean
    outer product of many such gradients is the matrix ``M`` (see the docstring of this module).

    Args:
        drafter: the drafter.
        frozen: the target's frozen weights.
        inputs: one sequence. Its ``kv`` is [1, T, L, H, 2, d], with all layers.
        draws: the positions at which draft rounds start.
        codec: defines the groups of layers and their parts.
        kv_layers: layers whose KV the drafter reads. If the argument is None, the drafter reads all
            layers.
        generator: random generator for the tokens.

    Returns:
        Two gradients per group, for its keys and for its values. Each of them is [n_tokens, width
        of the part].
    """
    # ``M`` is a sum over drafted positions. The term of a position is the mean outer product of the
    # gradient at this position. To estimate ``M``, one backward through the sum of all
    # log-probabilities is sufficient. The outer product of the summed gradient also contains
    # products of gradients from two different positions. But these products are zero on average,
    # because the tokens are drawn independently and each gradient has mean zero.
    assert inputs.kv is not None
    parts: list[list[Tensor]] = []
    leaves: list[Tensor] = []
    for group in codec.parts(inputs.kv[0]):
        group_leaves = [part.detach().requires_grad_() for part in group]
        parts.append(group_leaves)
        leaves += group_leaves
    kv = codec.whole(parts).flatten(2)[None]  # shape [1, T, L, D]
    inputs = replace(inputs, kv=kv if kv_layers is None else kv[:, :, list(kv_layers)])
    outputs = drafter.drafted_features(frozen, inputs, draws)
    features = outputs.features[outputs.valid]
    by_feature = _drawn_feature_gradients(drafter, frozen, features.detach(), generator)
    return list(torch.autograd.grad(features, leaves, by_feature, materialize_grads=True))


def _drawn_feature_gradients(
    drafter: Drafter, frozen: FrozenTarget, features: Tensor, generator: torch.Generator
) -> Tensor:
    """Draw a token from the drafter's distribution at each position, and compute its gradient.

    Returns:
        The gradients of the log-probabilities of the tokens with respect to ``features``, in the
        shape of ``features``.
    """
    gradients = []
    n_rows = max(1, _LOGITS_BYTES // (4 * len(frozen.lm_head_weight)))
    # Process few positions at a time, because all logits of a long sequence take gigabytes.
    for chunk in features.split(n_rows):
        rows = chunk.clone().requires_grad_()
        log_p = drafter.draft_logits(frozen, rows).float().log_softmax(dim=-1)
        if log_p.isnan().any():
            raise TrainingError(
                "the drafter computes NaN on the activations of this store. Choose a drafter "
                "whose training succeeded."
            )
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        gradients += torch.autograd.grad(log_p.gather(-1, drawn).sum(), rows)
    return torch.cat(gradients)
