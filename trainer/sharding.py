"""``--strategy fsdp``: each device of N holds 1/N of gradients and moments, and of the weights between forwards.

Checkpoints are those of any other strategy, so a run may be resumed with another one, on another number of devices.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override


def shard_weights(drafter: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each device of a mesh its share of a drafter's weights; all must hold the same ones before."""
    # Cut along the first dimension, and gathered for a forward all at once: a drafter is one or two layers, whose parts
    # are called by name and not as modules, so there is little to win by gathering them one after the other.
    if not isinstance(drafter, FSDPModule):
        fully_shard(drafter, mesh=mesh)
        register_fsdp_forward_method(drafter, "objective")


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded; all devices must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shared_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Take this device's share of a tensor that all devices hold, where ``like`` is sharded."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(like.device, like.dtype)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for modules that shard themselves, over all devices, with checkpoints of one file."""

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self._gathered(self.lightning_module.state_dict())

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        found = getattr(optimizer, "_optimizer", optimizer).state_dict()  # Lightning wraps it
        state = {index: self._gathered(moments) for index, moments in found["state"].items()}
        return {"state": state, "param_groups": found["param_groups"]} if self.is_global_zero else {}

    def _gathered(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        gathered = {}  # on the first device, which alone writes
        for name, tensor in tensors.items():
            full = whole(tensor.detach())  # one after the other, so that a device holds one whole tensor at a time
            if self.is_global_zero:
                gathered[name] = full.cpu() if isinstance(tensor, DTensor) else full
        return gathered

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    @torch.no_grad()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        for name, weight in self.lightning_module.state_dict().items():
            weight.copy_(shared_like(checkpoint["state_dict"][name], weight))

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, found in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            state: dict[int, dict[str, Tensor]] = {}
            for index, moments in found["state"].items():
                like = weights[index]
                state[index] = {name: shared_like(one, like) if one.ndim else one for name, one in moments.items()}
            optimizer.load_state_dict({"state": state, "param_groups": found["param_groups"]})
