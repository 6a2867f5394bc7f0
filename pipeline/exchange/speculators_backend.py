"""A backend of speculators that reads hidden states from a store instead of speculators' own files.

``python -m moa_data.pipeline.exchange.speculators_backend train ...`` runs the command line of
speculators, and adds the backend ``moa`` to it. With ``--hidden-states-backend moa``, hidden states
are read from the store that ``--moa-store`` names.

Token ids and masks are read from speculators' Arrow dataset. The command
``moa-data export STORE --format speculators --rows-only`` writes this dataset. Row i of the dataset
is sequence i of the store.

Sources in speculators 0.9:

- ``hs_connectors/transfer.py``: the registry of backends, and the values that a backend returns.
- ``speculators/train/data.py``: the last slot of ``hidden_states`` is the last hidden state of the
  verifier (the target).
- ``train/config/resolution.py``: reads the options of all backends when it is imported. So this
  module must be imported before ``resolution.py``.

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


# speculators is not installed when mypy runs, so mypy cannot know the types of the base classes.
class StoreTransfer(HiddenStatesTransfer):  # type: ignore[misc]
    """Reads the hidden states of a store, one sequence at a time.

    Each worker process opens the files of the store for itself.

    Args:
        store: folder or URL of the store.
        layers: decoder layers, counted from 0, whose outputs are returned in addition to the output
            of the last layer. If the tuple is empty, the three default layers of speculators are
            used.

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
        """Read a sequence from the store.

        Returns:
            A dict with ``hidden_states``, [S, K + 1, E] in the store's dtype, and ``token_ids``,
            int64 [S]. If the store does not have the sequence, the result is None.
        """
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
            "The store lacks the hidden states of a sequence, and speculators asked for them to be "
            "computed. A store cannot compute hidden states. Repair the store with `moa-data "
            "repair`, and train with --on-missing raise."
        )


@HiddenStatesBackend.register("moa")
class StoreBackend(HiddenStatesBackend):  # type: ignore[misc]
    """The backend ``moa``: hidden states from a store of moa-data."""

    @staticmethod
    @override
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--moa-store",
            default=None,
            help=("Folder or URL of the store that moa-data extract has written."),
        )
        parser.add_argument(
            "--moa-layers",
            default="",
            help=(
                "Decoder layers whose outputs the drafter reads, counted from 0 and separated by "
                "commas. Default for a target of L layers: 1, L // 2 - 1 and L - 4."
            ),
        )

    @staticmethod
    @override
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Add no command-line arguments, because this backend does not launch an engine."""

    @staticmethod
    @override
    def from_train_args(args: argparse.Namespace, data_path: str) -> StoreTransfer:
        if not args.moa_store:
            raise OptionInvalid(
                "--moa-store is missing. The backend moa reads hidden states from a store of "
                "moa-data. Give the store with --moa-store STORE."
            )
        layers = [int(word) for word in args.moa_layers.split(",") if word]
        return StoreTransfer(args.moa_store, tuple(layers))

    @staticmethod
    @override
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        raise OptionInvalid(
            "The backend moa only reads stores, so it cannot be used to write hidden states with "
            "vLLM. Write a store with `moa-data extract --source vllm`."
        )


if __name__ == "__main__":
    from speculators.cli import app

    app()
