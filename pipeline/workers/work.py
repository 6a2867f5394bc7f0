"""What a worker does, whoever directs it: it joins a store that was begun, loads the target, and writes parts.

A worker is told little: which store, which target, which device. What shapes the data is in the store itself, so that
workers can't differ in it.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from ...errors import StoreMismatch
from ...machine import fix_sums
from ...moa.targets.bundle import hash_target
from ...moa.targets.live import Target, pick_device, resolve_model_folder
from ...storage.codecs.registry import StoreCodec
from ...storage.disk.files import download
from ...storage.names import TEXTS_NAME
from ...storage.paths import StorePath
from ...storage.schema import StoreManifest
from ...storage.write.store import StoreWriter
from ...text import Progress
from ..chats.sequences import Sequences
from ..config import parse_fields
from ..forwards.parts import Forwards, OnDone, Outcome, Timings, load_target, run_parts, save_bundle

BUNDLE = -1
"""The target bundle among the pieces of work; the others are the numbers of parts."""


@dataclass(frozen=True)
class WorkOrder:
    """What a worker is told.

    Attributes:
        store: the store, begun by whoever directs the workers.
        texts: the Arrow file of its sequences; None for the store's own, wherever that lies.
        model: the target: a folder or a hub id, as this worker's machine sees it.
        revision: commit of a hub id.
        n_weight_bytes: bytes of the target's weights, for progress.
        device: device of the forward.
        n_threads: threads that torch may use on the CPU; None for its own choice.
        n_encode_threads: threads that encode.
    """

    store: str
    texts: str | None
    model: str
    revision: str | None
    n_weight_bytes: int
    device: str
    n_threads: int | None
    n_encode_threads: int


def pieces_of(store: StoreWriter) -> list[int]:
    """Return the pieces of work that no commit says to be done.

    Who was first on a store has them in order, others in one of their own, so that they seldom do the same at once.
    """
    parts = store.pending_parts()
    if store.joined:
        random.Random(store.attempt).shuffle(parts)
    return [BUNDLE] * (not store.has_target) + parts


def is_pending(store: StoreWriter, piece: int) -> bool:
    """Whether a piece of work is still to be done, as far as commits tell."""
    return not store.has_target if piece == BUNDLE else store.is_pending(piece)


def unclaimed_first(store: StoreWriter, pieces: Iterable[int]) -> Iterator[int]:
    """Yield pieces of work, last those that were being written by others when it was their turn."""
    claimed = []
    for piece in pieces:
        if piece != BUNDLE and store.is_claimed(piece):
            claimed.append(piece)
        else:
            yield piece
    yield from claimed


def map_texts(path: StorePath) -> pa.Table:
    """Map the Arrow file of a store's sequences into memory; of a remote one a copy, which the mapping alone holds.

    Raises:
        FileNotFoundError: there is none.
    """
    if isinstance(path, Path):
        with pa.memory_map(os.fspath(path)) as file:
            return pa.ipc.open_file(file).read_all()
    with tempfile.TemporaryDirectory(prefix="moa-data-") as folder:
        download(path.parent, Path(folder), [path.name])
        return map_texts(Path(folder) / path.name)


def forwards_of(
    manifest: StoreManifest, target: Target, codec: StoreCodec, sequences: Sequences, n_encode_threads: int
) -> Forwards:
    """Return the forwards that a store's manifest asks for."""
    spec, extraction = parse_fields(item.name for item in manifest.fields), manifest.extraction
    return Forwards(
        target=target,
        spec=spec,
        codec=codec,
        dtype=getattr(torch, str(extraction["dtype"])),
        batch_tokens=int(extraction["batch_tokens"]),
        uses_cache=spec.kv,
        text=lambda key: (sequences.tokens(key), sequences.response_mask(key)),
        n_encode_threads=n_encode_threads,
    )


@dataclass
class Worker:
    """A store that was joined and a target that was loaded; use it in ``with``.

    Attributes:
        folder: folder of the target.
        timings: what :meth:`run` has spent.
    """

    store: StoreWriter
    target: Target
    folder: Path
    forwards: Forwards
    timings: Timings = field(default_factory=Timings)

    @classmethod
    def start(cls, order: WorkOrder, attempt: str, progress: Progress | None = None) -> Worker:
        """Join the store, and load the target after a check that it is the store's own.

        Args:
            attempt: names this worker's unfinished files.

        Raises:
            StoreMismatch: the target has other weights or another config on this machine.
        """
        fix_sums()
        if order.n_threads:
            torch.set_num_threads(order.n_threads)
        store = StoreWriter.join(order.store, attempt)
        try:
            folder = resolve_model_folder(order.model, revision=order.revision)
            _check_target(store, folder)
            extraction = store.manifest.extraction
            device = pick_device(order.device)
            target = load_target(folder, str(extraction["compute_dtype"]), device, order.n_weight_bytes, progress)
            sequences = Sequences.from_arrow(map_texts(Path(order.texts) if order.texts else store.path / TEXTS_NAME))
            forwards = forwards_of(store.manifest, target, store.codec, sequences, order.n_encode_threads)
        except BaseException:
            store.close()
            raise
        return cls(store, target, folder, forwards)

    def run(self, pieces: Iterable[int | None], tell: Callable[[], None], on_done: OnDone) -> None:
        """Do pieces of work, each asked for when the forwards of the one before are done; None for none yet.

        Args:
            tell: called after each batch.
            on_done: called with each piece once it has a commit, on another thread too.
        """
        run_parts(self.forwards, self.store, self.parts(pieces, on_done), self.timings, tell, on_done)

    def parts(self, pieces: Iterable[int | None], on_done: OnDone) -> Iterator[int | None]:
        """Yield the parts among the pieces that are still to be done, and write the bundle where it is one of them."""
        for piece in pieces:
            if piece is None:
                yield None
            elif not is_pending(self.store, piece):
                on_done(piece, Outcome.FOUND)
            elif piece == BUNDLE:
                n_layers = int(self.store.manifest.extraction["target_layers"])
                save_bundle(self.store, self.target, self.folder, n_layers)
                on_done(piece, Outcome.WRITTEN)
            else:
                yield piece

    def close(self) -> None:
        """Let go of the store."""
        self.store.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _check_target(store: StoreWriter, folder: Path) -> None:
    """Refuse a target that is not the store's, as another machine's folder of the same name may hold."""
    stored = store.manifest.identities
    found = {f"target.{key}": value for key, value in hash_target(folder).items()}
    changes: Mapping[str, tuple[Any, Any]] = {
        f"identities.{key}": (stored.get(key), value) for key, value in found.items() if stored.get(key) != value
    }
    if changes:
        raise StoreMismatch(str(store.path), changes)
