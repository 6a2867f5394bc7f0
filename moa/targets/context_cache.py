"""The KV of some of a target's layers on a machine without the target, as the contexts of one text bring it.

Shapes: n positions, N layers that are kept, H_kv key/value heads, d head dim, D = 2 * H_kv * d, S slots.
"""

from collections.abc import Sequence

from torch import Tensor

from ...errors import DrafterError
from ..nn.kv import KVBuffer, pack_kv, unpack_kv
from .cache import KVSource


class ContextCache(KVSource):
    """What has arrived of one text; a :class:`~.cache.KVSource` of one row.

    Args:
        layers: which layers of the target are kept here, ascending; without any the positions are counted, no more.

    Attributes:
        lengths: one number: positions whose context has arrived.
    """

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self.lengths = [0]
        self._kept = list(layers)
        self._layers = KVBuffer(len(self._kept))  # a layer a row

    def append(self, n_tokens: int, packed: Tensor | None, n_kv_heads: int) -> None:
        """Add the next n positions.

        Args:
            packed: [n, N, D], KV of the kept layers; None where N is 0.
        """
        if packed is not None:
            self._layers.append(*unpack_kv(packed.transpose(0, 1), n_kv_heads))
        self.lengths = [self.lengths[0] + n_tokens]

    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions, of all layers from the first on: [1, n, L - first_layer, D].

        Raises:
            DrafterError: of layers or positions that have not arrived.
        """
        start, stop = starts[0], starts[0] + n_tokens
        if stop > self.lengths[0] or first_layer not in self._kept:
            raise DrafterError(
                f"the contexts of positions {self.lengths[0]} to {stop - 1} have not arrived; begin the round at token "
                f"{self.lengths[0]}, and feed the known tokens behind it as levels."
            )
        rows = range(self._kept.index(first_layer), len(self._kept))
        views = [self._layers.row_slots(row, stop) for row in rows]
        return pack_kv([keys[:, :, start:] for keys, _ in views], [values[:, :, start:] for _, values in views])

    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """View keys and values [1, H_kv, n_slots, d] of a kept layer, which may be written to behind the length."""
        return self._layers.row_slots(self._kept.index(layer), n_slots)
