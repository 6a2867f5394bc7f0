"""Lightning's side of ``--strategy fsdp``: checkpoints of one file from weights and moments that devices share."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ..step.sharding import shared_like, whole


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
        """Gather the weights; empty but on the first device, which alone writes."""
        assert self.lightning_module is not None
        return self._gathered(self.lightning_module.state_dict())

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Gather moments, numbered as without sharding; empty but on the first device."""
        found = getattr(optimizer, "_optimizer", optimizer).state_dict()  # Lightning wraps it
        state = {index: self._gathered(moments) for index, moments in found["state"].items()}
        return {"state": state, "param_groups": found["param_groups"]} if self.is_global_zero else {}

    def _gathered(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        # One after the other, so that a device holds one whole tensor at a time.
        gathered = {}
        for name, tensor in tensors.items():
            full = whole(tensor.detach())
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
            state = {
                index: {
                    name: shared_like(moment, weights[index]) if moment.ndim else moment
                    for name, moment in moments.items()
                }
                for index, moments in found["state"].items()
            }
            optimizer.load_state_dict({"state": state, "param_groups": found["param_groups"]})
