"""The data-free baseline of codecs: a random rotation of each vector, then one scalar quantiser for all its numbers.

So quantises TurboQuant (Zandieh et al., 2025) for the least squared error: after a random rotation every number of a
vector is nearly Gaussian with the vector's own mean square, whatever the data, so that nothing need be learned. A code
is one of 2^b levels of the Lloyd-Max quantiser of a Gaussian; the vector's norm takes 16 bits more. Nothing is entropy
coded: the codes of an optimal quantiser have little less than b bits of entropy (1.91 of 2, 3.77 of 4).
"""

import math

import numpy as np

NORM_BITS = 16
_N_DRAWS, _ROUNDS = 200_001, 200


def gaussian_levels(bits: int) -> np.ndarray:
    """The 2^bits levels with the least squared error for a standard Gaussian, ascending."""
    at = np.linspace(-6, 6, _N_DRAWS)
    density = np.exp(-(at**2) / 2)
    levels = np.linspace(-2, 2, 2**bits) if bits else np.zeros(1)
    for _ in range(_ROUNDS):
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, at)
        mass = np.bincount(nearest, density, len(levels))
        levels = np.bincount(nearest, density * at, len(levels)) / mass
    return levels.astype(np.float32)


def random_rotation(width: int) -> np.ndarray:
    """A random orthogonal matrix, float32 [width, width]."""
    return np.linalg.qr(np.random.default_rng(width).standard_normal((width, width)))[0].astype(np.float32)


def stored_bits(width: int, bits: int) -> float:
    """Bits per value of vectors of this width."""
    return bits + NORM_BITS / width


def rotated_and_back(values: np.ndarray, bits: int) -> np.ndarray:
    """What quantised vectors decode to: float32 [..., width] each."""
    width = values.shape[-1]
    rotation, levels = random_rotation(width), gaussian_levels(bits)
    scale = np.linalg.norm(values, axis=-1, keepdims=True).astype(np.float16).astype(np.float32) / math.sqrt(width)
    unit = values @ rotation / np.maximum(scale, 1e-12)
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, unit)
    decoded: np.ndarray = (levels[codes] * scale) @ rotation.T
    return decoded
