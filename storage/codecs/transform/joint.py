"""The bits of joint hidden states, of which each is predicted from the one below it.

A decoder layer adds little, so that the lowest state takes most bits. They are split so that all err alike: a component
of a Gaussian state with variance v takes ``log2(v / d) / 2`` bits at the error d, nothing where v is smaller. What is
left of a state after its prediction has, besides its own variance, the error of the state below, which is d too:
``log2((v + d) / d) / 2``. Variances and errors are shares of each state's energy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .calibration import Place, on_host

_RIDGE = 1e-4
_ROUNDS = 60


def left_variances(values: np.ndarray, known: np.ndarray | None = None, place: Place = np.asarray) -> np.ndarray:
    """Compute the variances of what a linear prediction leaves of a state, as shares of its energy.

    Args:
        values: float32 [n_tokens, width].
        known: float32 [n_tokens, n], what it is predicted from; None for nothing.
        place: where the products run.

    Returns:
        float64 [width], of the principal components.
    """
    own = place(values - values.mean(0))
    left = on_host(own.T @ own).astype(np.float64)
    energy = float(np.square(values, dtype=np.float64).sum())
    if known is not None:
        other = place(known - known.mean(0))
        gram, cross = (on_host(product).astype(np.float64) for product in (other.T @ other, other.T @ own))
        gram += _RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram)) + np.finfo(np.float64).tiny * np.eye(len(gram))
        left -= cross.T @ np.linalg.solve(gram, cross)
    return np.asarray(np.maximum(np.linalg.eigvalsh(left), 0) / max(energy, 1e-30))


def split_bits(variances: Sequence[np.ndarray], bits_per_token: float) -> list[float]:
    """Split the bits of a token among states, the lowest first, so that all err alike.

    Args:
        variances: of each state, as :func:`left_variances` gives them.

    Returns:
        Bits per token of each state, which add up to ``bits_per_token``.
    """

    def spent(error: float) -> list[float]:
        alone = [np.log2(np.maximum(variances[0] / error, 1))]
        return [float(bits.sum() / 2) for bits in alone + [np.log2(1 + own / error) for own in variances[1:]]]

    low, high = 1e-12, max(float(own.max(initial=0)) for own in variances) + 1e-9
    for _ in range(_ROUNDS):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if sum(spent(middle)) > bits_per_token else (low, middle)
    found = np.maximum(spent(high), 1e-9)
    return [float(share) for share in found / found.sum() * bits_per_token]
