"""Rotary position embedding (RoPE) as a codec needs it: undoing the rotation of keys, and redoing it.

The rotation is the one of Llama and its relatives in ``transformers``: dimension ``i`` turns with dimension
``i + rotary_dim / 2`` by ``position * inv_freq[i]``, and the result is multiplied by an attention scaling (1 except for
YaRN and LongRoPE). Dimensions beyond ``rotary_dim`` are left alone (partial rotary embedding).

Keys without it spread over far fewer directions: the same content at two positions is then the same vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

Array = Any
"""A NumPy array or a torch tensor."""


@dataclass(frozen=True, eq=False)
class Rope:
    """A target's rotation, as arrays.

    Attributes:
        inv_freq: radians per position, float32 [rotary_dim / 2], or [n_layers, rotary_dim / 2] where layers differ.
        scaling: factor on rotated dimensions, float32 [] or [n_layers].

    Raises:
        ValueError: an array has another number of axes, or a value is not finite, or a scaling is not positive.
    """

    inv_freq: np.ndarray
    scaling: np.ndarray

    def __post_init__(self) -> None:
        """Convert to float32 and check."""
        object.__setattr__(self, "inv_freq", np.asarray(self.inv_freq, np.float32))
        object.__setattr__(self, "scaling", np.asarray(self.scaling, np.float32))
        if self.inv_freq.ndim not in (1, 2) or self.scaling.ndim > 1:
            raise ValueError(
                f"inv_freq must be [rotary_dim / 2] or [n_layers, rotary_dim / 2] and scaling [] or [n_layers], got "
                f"{list(self.inv_freq.shape)} and {list(self.scaling.shape)}."
            )
        if not np.isfinite(self.inv_freq).all() or not (np.isfinite(self.scaling) & (self.scaling > 0)).all():
            raise ValueError("inv_freq must be finite, and scaling finite and positive. Read both from the target.")

    def unrotate(self, keys: Array, first_position: int = 0, layers: list[int] | None = None) -> Array:
        """Undo the rotation of keys.

        Args:
            keys: [n_tokens, n_layers, n_kv_heads, head_dim], rotated, at consecutive positions.
            first_position: position of the first token in its sequence.
            layers: the target's layer of each index of axis 1; None for all in order.

        Returns:
            Array of the same shape, dtype and device.
        """
        return self._turn(keys, first_position, layers, -1.0)

    def rotate(self, keys: Array, first_position: int = 0, layers: list[int] | None = None) -> Array:
        """Rotate keys: the inverse of :meth:`unrotate`."""
        return self._turn(keys, first_position, layers, 1.0)

    def _turn(self, keys: Array, first_position: int, layers: list[int] | None, sign: float) -> Array:
        xp = array_namespace(keys)
        cosine, sine = (
            xp.astype(xp.asarray(table, device=device(keys)), keys.dtype)
            for table in self._tables(first_position, keys.shape[0], layers, sign)
        )
        half = self.inv_freq.shape[-1]
        low, high = keys[..., :half], keys[..., half : 2 * half]
        turned = [low * cosine - high * sine, high * cosine + low * sine]
        return xp.concat([*turned, keys[..., 2 * half :]], axis=-1)

    def _tables(
        self, first_position: int, n_tokens: int, layers: list[int] | None, sign: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute cosines and sines times the scaling, float32 [n_tokens, n_layers or 1, 1, rotary_dim / 2]."""
        frequencies, scaling = self.inv_freq, self.scaling
        if layers is not None:
            frequencies = frequencies[layers] if frequencies.ndim == 2 else frequencies
            scaling = scaling[layers] if scaling.ndim == 1 else scaling
        positions = np.arange(first_position, first_position + n_tokens, dtype=np.float64)
        angles = positions[:, None, None] * np.atleast_2d(frequencies).astype(np.float64)
        factor = scaling.astype(np.float64).reshape(-1, 1) ** sign
        cosine, sine = np.cos(angles) * factor, sign * np.sin(angles) * factor
        return cosine[:, :, None].astype(np.float32), sine[:, :, None].astype(np.float32)
