"""Measure, over several sequences, how much approximate values differ from exact values."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

# Number of positions whose logits are in memory at once. The logits of a whole long sequence would
# take gigabytes.
_POSITIONS_AT_ONCE = 64


@dataclass
class Difference:
    """Measures the difference between approximate and exact values.

    Each call of :meth:`add` adds some of the values, so they need not all be in memory at once.
    """

    squared_error: float = 0.0
    squared_norm: float = 0.0  # sum of the squared exact values
    largest: float = 0.0  # largest absolute difference; infinite if a value is not finite

    def add(self, exact: Tensor, values: Tensor) -> None:
        """Add exact values and their approximations. Both have the same shape."""
        difference = (values - exact).double()
        squared_error = float(difference.square().sum())
        is_finite = math.isfinite(squared_error)
        self.squared_error += squared_error
        self.squared_norm += float(exact.double().square().sum())
        self.largest = max(self.largest, float(difference.abs().max()) if is_finite else math.inf)

    @property
    def relative(self) -> float:
        """Relative error: L2 norm of the differences, divided by the L2 norm of the exact values.

        The result is infinite if any value is not finite.
        """
        if math.isinf(self.largest):
            return math.inf
        return math.sqrt(self.squared_error / (self.squared_norm or 1.0))


@dataclass
class LayerDifferences:
    """Differences between exact and approximate values, by layer and for all layers together."""

    total: Difference = field(default_factory=Difference)
    by_layer: dict[int, Difference] = field(default_factory=dict)

    def add(self, layer: int, exact: Tensor, values: Tensor) -> None:
        """Add exact values and their approximations of one layer."""
        self.total.add(exact, values)
        self.by_layer.setdefault(layer, Difference()).add(exact, values)

    @property
    def worst_layer(self) -> int:
        """The layer with the largest relative error."""
        return max(self.by_layer, key=lambda layer: self.by_layer[layer].relative)

    @property
    def worst(self) -> float:
        """The relative error of the worst layer."""
        return self.by_layer[self.worst_layer].relative

    @property
    def median(self) -> float:
        """The median of the layers' relative errors."""
        return median(difference.relative for difference in self.by_layer.values())

    def describe(self) -> str:
        """Return a text with the relative error of each layer in percent."""
        numbers = " ".join(
            f"{100 * difference.relative:.1f}" for difference in self.by_layer.values()
        )
        return (
            f"median of the layers {self.median:.1%}, largest {self.worst:.1%} (layer "
            f"{self.worst_layer}); percent by layer: {numbers}"
        )


@dataclass
class Divergence(Difference):
    """Differences between exact and approximate logits, and between their distributions.

    The distribution of a position is the softmax of its logits.
    """

    n_positions: int = 0
    n_agreeing: int = 0
    kl_sum: float = 0.0

    def add(self, exact: Tensor, values: Tensor) -> None:
        """Add exact and approximate logits of n positions. Both have the shape [n, V]."""
        super().add(exact, values)
        log_p = exact.double().log_softmax(-1)
        log_q = values.double().log_softmax(-1)
        # A logit of -inf gives the probability 0, and the product 0 * inf = NaN. By the definition
        # of the KL divergence, the product counts as 0.
        self.kl_sum += float((log_p.exp() * (log_p - log_q)).nan_to_num(0.0, 0.0, 0.0).sum())
        self.n_agreeing += int((exact.argmax(-1) == values.argmax(-1)).sum())
        self.n_positions += len(exact)

    def add_states(
        self,
        exact: Tensor,
        values: Tensor,
        exact_head: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        """Compute logits from exact and from approximate last hidden states, and compare them.

        Args:
            exact: the exact states, [n, E].
            values: the approximate states, [n, E].
            exact_head: maps the exact states to logits.
            head: maps the approximate states to logits.
        """
        pairs = zip(exact.split(_POSITIONS_AT_ONCE), values.split(_POSITIONS_AT_ONCE), strict=True)
        for exact_chunk, chunk in pairs:
            self.add(exact_head(exact_chunk), head(chunk))

    @property
    def kl(self) -> float:
        """Mean of ``KL(exact || approximate)`` over all positions, in nats."""
        return self.kl_sum / self.n_positions

    @property
    def top1_agreement(self) -> float:
        """Fraction of positions at which both distributions have the same most likely token."""
        return self.n_agreeing / self.n_positions

    def describe(self) -> str:
        """Return the KL divergence and the agreement as text."""
        return (
            f"KL {self.kl:.4f} nats, same most likely token at {self.top1_agreement:.1%} of "
            f"{self.n_positions:,}"
        )
