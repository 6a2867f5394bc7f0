"""Muon, an optimizer that uses momentum and orthogonalizes the updates of matrices.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).

The class ``Muon`` in this module updates all matrices of the same shape together, in float32.
``torch.optim.Muon`` updates one matrix at a time, in bfloat16. For the matrices of a drafter on a
CPU, ``torch.optim.Muon`` takes 2 to 3.5 times as long as ``Muon``.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Coefficients of the polynomial that each iteration of Newton-Schulz evaluates. They are from the
# work by Jordan et al. that the docstring of this module cites.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_N_ITERATIONS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Orthogonalize N matrices approximately. They are stacked as [N, rows, columns].

    Returns:
        Matrices with the same singular vectors, and with singular values of about 0.7 to 1.2.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    # Transpose tall matrices, so that the Gram matrix ``x @ x.mT`` has the size of the shorter
    # side.
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_N_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonalized updates for matrices; AdamW for other parameters.

    Args:
        matrices: parameters that get orthogonalized updates.
        parameters: all parameters. AdamW updates those that are not in ``matrices``: norms, biases,
            embeddings.
        lr: learning rate of matrices. A step changes the entries of an n x n matrix by about
            ``lr / sqrt(n)`` (root mean square).
        others_lr: AdamW's learning rate.
        weight_decay: decoupled weight decay of all parameters.
        block_rows: matrices are divided into blocks of this number of rows, and each block is
            orthogonalized separately. If the argument is None, entire matrices are orthogonalized,
            which takes several times as long.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        parameters: Iterable[Tensor] = (),
        lr: float = 0.02,
        others_lr: float = 1e-3,
        weight_decay: float = 0.0,
        block_rows: int | None = None,
    ) -> None:
        shared = {"weight_decay": weight_decay}
        matrices = list(matrices)
        # This class does not read ``n_iterations``. It is stored in checkpoints for earlier
        # releases, which read it when they resume a run.
        groups: list[dict[str, Any]] = [
            shared | {"params": matrices, "lr": lr, "momentum": 0.95, "n_iterations": 5}
        ]
        in_matrices = set(map(id, matrices))
        if others := [weight for weight in parameters if id(weight) not in in_matrices]:
            groups.append(shared | {"params": others, "lr": others_lr, "betas": (0.9, 0.95)})
        super().__init__(groups, {})
        self._block_rows = block_rows

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter once.

        Args:
            closure: a function that is called before the update and computes the loss. If given,
                its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            step = self._step_matrices if "momentum" in group else self._step_others
            step(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape[parameter.shape].append(parameter)
        # Orthogonalize all matrices of the same shape in one batch. The matrix products of a single
        # small matrix would leave cores idle.
        for shape, parameters in by_shape.items():
            directions = torch.stack(
                [self._direction(p, group["momentum"]) for p in parameters]
            ).float()
            n_rows = min(self._block_rows or shape[0], shape[0])
            blocks = directions.split(n_rows, dim=1)
            updates = torch.cat([orthogonalize(block) for block in blocks], dim=1)
            # An orthogonalized block with more rows than columns has smaller entries than a square
            # block. Scale the update so that its entries are as large as those of a square block.
            scale = group["lr"] * max(1.0, n_rows / shape[1]) ** 0.5
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        """Update the momentum of one matrix, and return the direction of its Nesterov step."""
        grad = parameter.grad
        assert grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(grad)
        state["momentum"].lerp_(grad, 1 - momentum)
        # The momentum already contains the gradient. Nesterov's method adds the gradient once more.
        return grad.lerp(state["momentum"], momentum)

    def _step_others(self, group: dict[str, Any]) -> None:
        adamw = torch.optim.AdamW([dict(group)])
        # A new AdamW object is made for every step. Its moments must be available in the next step
        # and in checkpoints, so they are stored in the state of the Muon object.
        adamw.state = self.state
        adamw.step()
