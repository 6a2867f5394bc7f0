"""Activations of large language models as a dataset, and drafters trained from this dataset.

The drafters are for speculative decoding. ``pipeline`` writes the activations of a model to stores,
in the format that ``storage`` defines. ``trainer`` reads stores and trains drafters, which ``moa``
defines. ``evaluation`` decodes with drafters and measures the speed. ``serving`` decodes for
clients over a network.

The names in this module are the public API. When a name is first used, the module that defines the
name is imported. So a program that only reads stores does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # ``import X as X`` tells type checkers that this module exports X.
    from .errors import MoaDataError as MoaDataError
    from .evaluation.config import EvalConfig as EvalConfig
    from .evaluation.run import evaluate as evaluate
    from .evaluation.run import generate as generate
    from .moa.formats.checkpoint import load_drafter as load_drafter
    from .moa.targets.live import Target as Target
    from .pipeline.config import ExtractConfig as ExtractConfig
    from .pipeline.exchange.torch_dataset import ActivationDataset as ActivationDataset
    from .pipeline.exchange.torch_dataset import (
        IterableActivationDataset as IterableActivationDataset,
    )
    from .pipeline.exchange.torch_dataset import pad_collate as pad_collate
    from .pipeline.extract import extract as extract
    from .serving.client.client import DraftingClient as DraftingClient
    from .storage.read.store import ActivationStore as ActivationStore
    from .trainer.config import TrainConfig as TrainConfig
    from .trainer.fit import train as train

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

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
