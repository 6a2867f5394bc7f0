"""Makes a store from the files of another project: `moa-data import`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ...errors import InteropError
from ...moa.targets.bundle import FrozenTarget, hash_target, load_target_config, save_target_bundle, target_sizes
from ...moa.targets.live import load_target_model, load_target_tokenizer, resolve_model_folder
from ...storage.codecs.registry import LOSSLESS, StoreCodec
from ...storage.paths import StorePath
from ...storage.plan import plan_parts
from ...storage.schema import (
    ALIGNMENT_TOKENS,
    FieldSpec,
    StoreManifest,
    hidden_field,
    response_mask_field,
    tokens_field,
)
from ...storage.write.store import StoreWriter
from ...text import Progress, counted
from ..card import CardOrigin, public_name, write_card
from ..recode import write_parts
from .config import ImportConfig
from .formats import LAST, FileFormat, make_format

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass
class Texts:
    """The sequences of a folder, each text once.

    Attributes:
        paths: the files.
        rows: sha256 of tokens and mask -> index of the file, tokens, tokens with mask 1.
    """

    paths: list[Path]
    rows: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest one."""
        return max(n_tokens for _, n_tokens, _ in self.rows.values())

    def table(self) -> pa.Table:
        """Make the table for ``plan_parts``."""
        rows, n_tokens, n_response = zip(*self.rows.values(), strict=True)
        return pa.table(
            {
                "sequence_id": pa.array(list(self.rows), pa.string()),
                "source_row": pa.array(rows, pa.int64()),
                "n_tokens": pa.array(n_tokens, pa.int32()),
                "n_response_tokens": pa.array(n_response, pa.int32()),
            }
        )

    @property
    def sha256(self) -> str:
        """The hash of all texts in their order."""
        return hashlib.sha256("\n".join(self.rows).encode()).hexdigest()


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        n_duplicates: files that were left out, as their text was there already.
        n_parts_done: parts written by this run.
    """

    store: StorePath
    format: str
    fields: tuple[str, ...]
    n_sequences: int
    n_tokens: int
    n_duplicates: int
    n_parts_done: int

    def describe(self) -> str:
        """Return the report as text."""
        return (
            f"{self.store}: {counted(self.n_sequences, 'sequence')}, {self.n_tokens:,} tokens from {self.format} with "
            f"{', '.join(self.fields)}; {counted(self.n_parts_done, 'part')} written, "
            f"{self.n_duplicates:,} duplicates left out"
        )


def import_folder(
    config: ImportConfig, progress: Progress | None = None, provenance: Mapping[str, Any] | None = None
) -> ImportReport:
    """Read another project's files into a store, or continue where an earlier run stopped.

    Where the files hold the last state before the final norm only (speculators), ``hidden/last`` is made from it with
    the norm of the target's bundle, in float32 and rounded once to the stored dtype.

    Raises:
        InteropError: an option or a file cannot be used.
        StoreError: the output folder cannot be used, or the store was made from other inputs.
        TargetError: the target cannot be loaded.
    """
    folder = Path(config.folder).expanduser()
    if not folder.is_dir():
        raise InteropError(f"{folder} is no folder. Point to the folder with the files of {config.format}.")
    target_folder = resolve_model_folder(config.model)
    sizes = target_sizes(load_target_config(target_folder))
    file_format = make_format(config.format, config.layers, sizes["n_layers"])
    file_format.bound_files(sizes["hidden_size"], sizes["max_position_embeddings"])
    texts = read_texts(file_format, folder, config.max_sequences, sizes["vocab_size"], progress)
    plan = plan_parts(texts.table(), config.part_tokens, ALIGNMENT_TOKENS)
    specs = _field_specs(file_format, texts.paths[0], sizes)
    manifest = _manifest(config, file_format, texts, plan, specs, sizes, target_folder)
    with StoreWriter.create_or_resume(config.out, manifest, plan) as store:
        if not store.has_target:
            _save_bundle(config, store, target_folder)
        norm = None if file_format.gives_last else FrozenTarget.load(store.target_path, sizes=sizes).norm
        n_done = write_parts(
            store,
            lambda row: _read_sequence(file_format, texts.paths[row["source_row"]], row["n_tokens"], specs, norm),
            f"import from {file_format.name}",
            progress,
        )
        names = public_name(config.model), public_name(config.folder), f"moa-data import --format {file_format.name}"
        write_card(store.path, CardOrigin(*names, config.target_license, config.dataset_license))
        report = ImportReport(
            store.path, file_format.name, tuple(spec.name for spec in specs), manifest.n_sequences, manifest.n_tokens,
            len(texts.paths) - len(texts.rows), n_done,
        )  # fmt: skip
        store.record_run({"import": config.named(), "provenance": dict(provenance or {})})
    return report


def read_texts(
    file_format: FileFormat, folder: Path, max_sequences: int | None, vocab_size: int, progress: Progress | None = None
) -> Texts:
    """Read tokens and masks of all files, in the order of their numbers.

    Returns:
        At least one text.
    """
    paths = file_format.files(folder)[:max_sequences]
    texts = Texts(paths)
    for row, path in enumerate(paths):
        tokens, mask = file_format.read_tokens(path), file_format.read_mask(path)
        _check_text(path, tokens, mask, vocab_size)
        digest = hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes())
        digest.update(np.ascontiguousarray(mask, np.uint8).tobytes())
        texts.rows.setdefault(digest.hexdigest(), (row, len(tokens), int(mask.sum())))
        if progress:
            progress(row + 1, len(paths), "read tokens")
    return texts


def _check_text(path: Path, tokens: np.ndarray, mask: np.ndarray, vocab_size: int) -> None:
    if not len(tokens) or len(tokens) != len(mask):
        raise InteropError(f"{path} has {len(tokens)} token ids and a loss mask of {len(mask)}. Make the file again.")
    if not np.isin(mask, (0, 1)).all():
        raise InteropError(f"{path}: the loss mask holds {mask.max()}, expected 0 and 1 only. Make the file again.")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise InteropError(
            f"{path} has token ids {tokens.min()} to {tokens.max()}, the vocabulary of the target has {vocab_size:,}. "
            "Give the --model that the files were made with."
        )


def _field_specs(file_format: FileFormat, first: Path, sizes: Mapping[str, Any]) -> tuple[FieldSpec, ...]:
    """Make the store's fields, in the dtype of the first file."""
    values = next(iter(file_format.read_hidden(first).values()))
    if values.dtype not in _DTYPES or values.shape[1] != sizes["hidden_size"]:
        raise InteropError(
            f"{first} holds hidden states of {values.dtype} and width {values.shape[1]}, expected one of "
            f"{', '.join(_DTYPES.values())} and the target's width {sizes['hidden_size']}. Check --model."
        )
    names = dict.fromkeys((LAST, *file_format.fields))
    hidden = [hidden_field(name.removeprefix("hidden/"), values.shape[1], _DTYPES[values.dtype]) for name in names]
    return (tokens_field(), response_mask_field(), *hidden)


def _manifest(
    config: ImportConfig,
    file_format: FileFormat,
    texts: Texts,
    plan: pa.Table,
    specs: tuple[FieldSpec, ...],
    sizes: Mapping[str, Any],
    target_folder: Path,
) -> StoreManifest:
    identities = {f"target.{key}": value for key, value in hash_target(target_folder).items()}
    last = "as in the files" if file_format.gives_last else "final norm applied in float32 to the files"
    return StoreManifest(
        fields=specs,
        target=sizes,
        identities=identities | {"dataset.sha256": texts.sha256},
        extraction={
            "activations": [spec.name for spec in specs[2:]],
            "dtype": specs[-1].dtype,
            "hidden_last": last,
            "imported_from": file_format.name,
            "max_length": texts.longest,
            "max_sequences": config.max_sequences,
            "part_tokens": config.part_tokens,
            "target_layers": config.target_layers,
        },
        n_sequences=plan.num_rows,
        n_parts=int(plan["part"].to_numpy().max()) + 1,
        n_tokens=int(plan["n_tokens"].to_numpy().sum()),
        codec=StoreCodec(LOSSLESS, specs).describe(),
        alignment_tokens=ALIGNMENT_TOKENS,
    )


def _save_bundle(config: ImportConfig, store: StoreWriter, folder: Path) -> None:
    dtype = getattr(load_target_config(folder), "dtype", None) or torch.float32
    model = load_target_model(folder, dtype, "cpu")
    with store.target() as bundle:
        save_target_bundle(model, load_target_tokenizer(folder), bundle, config.target_layers)


def _read_sequence(
    file_format: FileFormat,
    path: Path,
    n_tokens: int,
    specs: tuple[FieldSpec, ...],
    norm: Callable[[Tensor], Tensor] | None,
) -> dict[str, np.ndarray]:
    """Return the store's fields of one file."""
    tokens, mask, hidden = file_format.read_tokens(path), file_format.read_mask(path), file_format.read_hidden(path)
    if norm is not None:
        last = hidden[file_format.fields[-1]]
        with torch.inference_mode():
            hidden[LAST] = norm(last.float()).to(last.dtype)
    fields: dict[str, np.ndarray] = {"tokens": tokens.astype(np.int32), "response_mask": mask.astype(np.uint8)}
    for spec in specs[2:]:
        values = hidden[spec.name]
        if _DTYPES.get(values.dtype) != spec.dtype or values.shape != (n_tokens, *spec.token_shape):
            raise InteropError(
                f"{path}: {spec.name} is {values.dtype} {list(values.shape)}, expected {spec.dtype} "
                f"{[n_tokens, *spec.token_shape]} as in the first file. Make the file again."
            )
        if not bool(torch.isfinite(values).all()):
            raise InteropError(f"{path}: {spec.name} holds NaN or infinity. Make the file again, or delete it.")
        bits = values.contiguous().view(torch.uint16) if values.dtype == torch.bfloat16 else values.contiguous()
        fields[spec.name] = bits.numpy()
    return fields
