"""A store as the hidden states that speculators trains from, in place of its own files.

``python -m moa_data.pipeline.exchange.speculators_backend train ...`` is speculators' own command line, with one more
``--hidden-states-backend``: moa, which reads ``--moa-store``. Rows of ids and masks come from its Arrow dataset, which
``moa-data export STORE --format speculators --rows-only`` writes; row i is sequence i of the store.

Source: speculators 0.9 ``hs_connectors/transfer.py`` (the registry and what a backend gives),
``speculators/train/data.py`` (the last slot is the verifier's last state), ``train/config/resolution.py`` (options of
backends are read when it is imported, so that this module has to be there before).

Shapes: S tokens of a sequence, K chosen layers, E width.
"""

import argparse
from typing import Any

import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from torch import Tensor
from typing_extensions import override

from ...errors import DatasetError, OptionInvalid
from ...storage.read.store import ActivationStore
from .formats import make_format
from .torch_dataset import ActivationDataset, check_fields


class StoreTransfer(HiddenStatesTransfer):  # type: ignore[misc]  # not installed where types are checked
    """Hidden states of a store, a sequence at a time; opens its files anew in each worker.

    Args:
        layers: decoder layers, from 0, beside the last one; none for the three that speculators takes.

    Raises:
        SelectionInvalid: the store lacks one of the layers.
    """

    def __init__(self, store: str, layers: tuple[int, ...] = ()) -> None:
        opened = ActivationStore(store, require_complete=True)
        self._states = make_format(
            "speculators", layers, int(opened.manifest.target["n_layers"])
        ).fields
        check_fields(opened, self._states, "speculators")
        self._dataset = ActivationDataset(opened, ("tokens", *self._states))

    @override
    def get_cached(self, file_idx: int) -> dict[str, Tensor] | None:
        """Read a sequence: hidden_states [S, K + 1, E] in the store's dtype, token_ids int64 [S]."""
        if not 0 <= file_idx < len(self._dataset):
            return None
        item = self._dataset[file_idx]
        return {
            "hidden_states": torch.stack([item[name] for name in self._states], dim=1),
            "token_ids": item["tokens"],
        }

    @override
    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, Tensor] | None:
        raise DatasetError(
            "a store holds what it holds, and generates nothing; train with --on-missing raise."
        )


@HiddenStatesBackend.register("moa")
class StoreBackend(HiddenStatesBackend):  # type: ignore[misc]
    """Reads a store of moa-data."""

    @staticmethod
    @override
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--moa-store", default=None, help="Folder or URL of the store of moa-data."
        )
        parser.add_argument(
            "--moa-layers",
            default="",
            help="Decoder layers, from 0; default: 1, L // 2 - 1, L - 4.",
        )

    @staticmethod
    @override
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Add nothing: no engine is launched."""

    @staticmethod
    @override
    def from_train_args(args: argparse.Namespace, data_path: str) -> StoreTransfer:
        if not args.moa_store:
            raise OptionInvalid("the backend moa needs --moa-store STORE.")
        return StoreTransfer(
            args.moa_store, tuple(int(word) for word in args.moa_layers.split(",") if word)
        )

    @staticmethod
    @override
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        raise OptionInvalid(
            "vLLM does not write stores by a connector of speculators; use extract --source vllm."
        )


if __name__ == "__main__":
    from speculators.cli import app

    app()
