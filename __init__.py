"""Activations of large language models as a dataset, and drafters for speculative decoding trained from it.

The folders are stages: ``pipeline`` writes what ``storage`` defines, ``trainer`` reads it and trains what ``moa``
defines, ``evaluation`` decodes and measures, ``serving`` answers over a network. The names below are the public ones;
each is imported when it is first used, so that reading a store needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names that stand for themselves are exported
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
