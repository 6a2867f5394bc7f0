"""Shares of weights, gradients and optimizer state on each device: ``--strategy fsdp``.

torch's ``fully_shard`` cuts every tensor of the drafter along its first dimension. The forward gathers all of them at
once and the backward scatters the gradients: a drafter is one or two layers, whose parts are called by name and not as
modules, so there is little to win by gathering them one after the other. What is saved is the rest: between forwards a
device of N holds 1/N of the weights, and 1/N of gradients and moments always.

Checkpoints are those of any other strategy, so a run may go on with another one, and on another number of devices.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor


def shard_weights(drafter: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each device of a mesh its share of a drafter's weights; all must hold the same ones before."""
    if not isinstance(drafter, FSDPModule):
        fully_shard(drafter, mesh=mesh)
        register_fsdp_forward_method(drafter, "objective")


def gather_weights(drafter: nn.Module) -> None:
    """Give each device all weights until :func:`release_weights`, for forwards without a backward."""
    if isinstance(drafter, FSDPModule):
        drafter.unshard()


def release_weights(drafter: nn.Module) -> None:
    """Leave each device its share of the weights again."""
    if isinstance(drafter, FSDPModule):
        drafter.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded; all devices must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shared_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Take this device's share of a tensor that all devices hold, where ``like`` is sharded."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(like.device, like.dtype)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
