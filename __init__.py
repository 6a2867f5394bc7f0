"""Activations of large language models as a dataset, and drafters for speculative decoding trained from it.

The folders are stages: ``pipeline`` writes what ``storage`` defines, ``trainer`` reads it and trains what ``moa``
defines, ``evaluation`` decodes and measures, ``serving`` answers over a network. The names below are the public ones;
each is imported when it is first used, so that reading a store needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import MoaDataError
    from .evaluation.config import EvalConfig
    from .evaluation.run import evaluate, generate
    from .moa.formats.checkpoint import load_drafter
    from .moa.targets.live import Target
    from .pipeline.config import ExtractConfig
    from .pipeline.exchange.torch_dataset import ActivationDataset, IterableActivationDataset, pad_collate
    from .pipeline.extract import extract
    from .serving.client.client import DraftingClient
    from .storage.read.store import ActivationStore
    from .trainer.config import TrainConfig
    from .trainer.fit import train

__version__ = "0.1.0"

_HOMES = {
    "ActivationStore": "storage.read.store",
    "ExtractConfig": "pipeline.config",
    "extract": "pipeline.extract",
    "ActivationDataset": "pipeline.exchange.torch_dataset",
    "IterableActivationDataset": "pipeline.exchange.torch_dataset",
    "pad_collate": "pipeline.exchange.torch_dataset",
    "TrainConfig": "trainer.config",
    "train": "trainer.fit",
    "Target": "moa.targets.live",
    "generate": "evaluation.run",
    "load_drafter": "moa.formats.checkpoint",
    "EvalConfig": "evaluation.config",
    "evaluate": "evaluation.run",
    "DraftingClient": "serving.client.client",
    "MoaDataError": "errors",
}

__all__ = [
    "ActivationDataset",
    "ActivationStore",
    "DraftingClient",
    "EvalConfig",
    "ExtractConfig",
    "IterableActivationDataset",
    "MoaDataError",
    "Target",
    "TrainConfig",
    "__version__",
    "evaluate",
    "extract",
    "generate",
    "load_drafter",
    "pad_collate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
