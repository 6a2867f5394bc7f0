"""Checking a whole store: every file, every chunk, every count, every value."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .commit import (
    COMMITS_NAME,
    PLAN_NAME,
    PartCommit,
    commit_path,
    find_size_damage,
    part_path,
    read_part_commit,
    read_target_commit,
    target_commit_path,
)
from .dtypes import FLOAT_DTYPES, is_finite
from .durable import file_crc32
from .errors import ManifestInvalid, StoreError
from .plan import part_lengths, read_plan
from .reader import ActivationStore, read_manifest
from .schema import FieldSpec, StoreManifest
from .shard import FileRecord

Progress = Callable[[int, int, str], None]
"""Called as ``progress(done, total, message)``."""


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong.

    Attributes:
        part: number of the part, or None for what belongs to the whole store.
        path: the damaged file, relative to the store.
        message: what is wrong, and where.
    """

    part: int | None
    path: str
    message: str


@dataclass
class VerifyReport:
    """Outcome of :func:`verify_store`.

    Attributes:
        damages: everything found, in order of parts.
        n_parts: committed parts.
        n_pending_parts: planned parts without a commit; the store is incomplete, which is no damage.
        n_sequences: sequences checked.
        n_tokens: their tokens.
        n_bytes: bytes of all committed files.
    """

    damages: list[Damage] = field(default_factory=list)
    n_parts: int = 0
    n_pending_parts: int = 0
    n_sequences: int = 0
    n_tokens: int = 0
    n_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether no damage was found."""
        return not self.damages


def verify_store(path: str | os.PathLike[str], progress: Progress | None = None) -> VerifyReport:
    """Check everything that a store promises.

    File sizes and checksums against the commits, shard indexes, the checksum of every chunk, counts against the plan,
    response masks against their counts, token ids against the vocabulary, and that every value is finite.

    Args:
        path: the store's folder.
        progress: called after each part.

    Returns:
        The report; damage of parts is listed, never raised.

    Raises:
        StoreNotFound: not a store.
        SchemaVersionError: another schema version.
        ManifestInvalid: store.json or plan.parquet cannot be read, so that nothing else can be checked.
    """
    store = Path(path)
    manifest = read_manifest(store)
    plan = read_plan(store / PLAN_NAME)
    report = VerifyReport()
    report.damages += _check_plan(manifest, plan.num_rows, int(plan["n_tokens"].to_numpy().sum(dtype=np.int64)))
    report.damages += _check_strays(store, manifest)
    report.damages += _check_target(store)
    lengths = part_lengths(plan, manifest.alignment_tokens)
    whole: list[int] = []
    for part in range(manifest.n_parts):
        if not commit_path(store, part).exists():
            report.n_pending_parts += 1
            continue
        report.n_parts += 1
        rows = plan["part"].to_numpy() == part
        expected = (int(rows.sum()), int(plan["n_tokens"].to_numpy()[rows].sum()), int(lengths[part]))
        damages, n_bytes = _check_part_files(store, part, expected)
        report.n_bytes += n_bytes
        if damages:
            report.damages += damages
        else:
            whole.append(part)
        if progress:
            progress(report.n_parts, manifest.n_parts, f"part {part}: {len(damages)} damaged files")
    _check_values(store, whole, report, progress)
    report.damages.sort(key=lambda damage: (damage.part is not None, damage.part or 0))
    return report


def _check_plan(manifest: StoreManifest, n_sequences: int, n_tokens: int) -> Iterator[Damage]:
    for key, counted in (("n_sequences", n_sequences), ("n_tokens", n_tokens)):
        expected = getattr(manifest, key)
        if counted != expected:
            yield Damage(None, PLAN_NAME, f"{PLAN_NAME} has {key} {counted}, store.json says {expected}")


def _check_strays(store: Path, manifest: StoreManifest) -> Iterator[Damage]:
    """Name commits of parts that the plan does not have."""
    known = {commit_path(store, part).name for part in range(manifest.n_parts)} | {target_commit_path(store).name}
    folder = store / COMMITS_NAME
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.suffix == ".json" and entry.name not in known:
            yield Damage(None, f"{COMMITS_NAME}/{entry.name}", "a commit of a part that the plan does not have")


def _check_target(store: Path) -> Iterator[Damage]:
    path = target_commit_path(store)
    if not path.exists():
        return
    try:
        files = read_target_commit(path)
    except ManifestInvalid as error:
        yield Damage(None, path.relative_to(store).as_posix(), str(error))
        return
    yield from _check_files(store, store / "target", files, None)


def _check_part_files(store: Path, part: int, expected: tuple[int, int, int]) -> tuple[list[Damage], int]:
    """Return the damage of a part's files and their committed bytes."""
    path = commit_path(store, part)
    name = path.relative_to(store).as_posix()
    try:
        commit = read_part_commit(path)
    except ManifestInvalid as error:
        return [Damage(part, name, str(error))], 0
    damages = [
        Damage(part, name, f"the commit says {key} {got}, the plan has {planned}")
        for key, got, planned in zip(
            ("n_sequences", "n_tokens", "allocated_tokens"), _counts(commit), expected, strict=True
        )
        if got != planned
    ]
    if commit.part != part:
        damages.append(Damage(part, name, f"the commit belongs to part {commit.part}"))
    damages += _check_files(store, part_path(store, part), commit.files, part)
    return damages, commit.stored_bytes


def _counts(commit: PartCommit) -> tuple[int, int, int]:
    return commit.n_sequences, commit.n_tokens, commit.allocated_tokens


def _check_files(store: Path, folder: Path, files: Mapping[str, FileRecord], part: int | None) -> list[Damage]:
    missized = find_size_damage(folder, files)
    damages = [Damage(part, path.relative_to(store).as_posix(), str(error)) for path, error in missized]
    skip = {path for path, _ in missized}
    for name, record in files.items():
        path = folder / name
        if path not in skip and (got := file_crc32(path)) != record.crc32:
            message = f"checksum is {got:#010x}, its commit says {record.crc32:#010x}"
            damages.append(Damage(part, path.relative_to(store).as_posix(), message))
    return damages


def _check_values(store: Path, parts: list[int], report: VerifyReport, progress: Progress | None) -> None:
    """Read every sequence of the parts whose files are whole."""
    if not parts:
        return
    with ActivationStore(store, parts=parts) as reader:
        total = len(reader)
        for i, row in enumerate(reader.sequences.to_pylist()):
            for path, message in _check_sequence(reader, i, row):
                report.damages.append(Damage(row["part"], path, message))
            report.n_sequences += 1
            report.n_tokens += row["n_tokens"]
            if progress and (i % 64 == 63 or i + 1 == total):
                progress(i + 1, total, "values")


def _check_sequence(reader: ActivationStore, i: int, row: dict) -> Iterator[tuple[str, str]]:
    """Yield (path, message) for each thing wrong with a sequence."""
    who = f"sequence {row['sequence_id']} (source row {row['source_row']})"
    folder = part_path(Path(), row["part"])
    for name, spec in reader.fields.items():
        path = (folder / name).as_posix()
        try:
            values = reader.read(i, name)
        except StoreError as error:
            yield path, f"{who}: {error}"
            continue
        if spec.dtype in FLOAT_DTYPES:
            if message := _non_finite(values, spec):
                yield path, f"{who}: {message}"
        elif name == "response_mask":
            if values.max(initial=0) > 1 or int(values.sum(dtype=np.int64)) != row["n_response_tokens"]:
                found = int(values.sum(dtype=np.int64))
                yield path, f"{who}: response mask counts {found} tokens, the plan says {row['n_response_tokens']}"
        elif name == "tokens":
            vocab_size = int(reader.manifest.target.get("vocab_size", np.iinfo(np.int32).max))
            if values.min(initial=0) < 0 or values.max(initial=0) >= vocab_size:
                low, high = values.min(), values.max()
                yield path, f"{who}: token ids {low} to {high} lie outside the vocabulary of {vocab_size}"


def _non_finite(values: np.ndarray, spec: FieldSpec) -> str | None:
    """Say how many values are NaN or infinite and where the first one is."""
    finite = is_finite(values, spec.dtype)
    if finite.all():
        return None
    first = np.argwhere(~finite)[0]
    where = ", ".join(f"{axis} {index}" for axis, index in zip(spec.axes, first.tolist(), strict=True))
    layers = ""
    if spec.layer_axis is not None:
        bad = np.unique(np.argwhere(~finite)[:, spec.layer_axis]).tolist()
        layers = f" in layer{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}"
    return f"{int((~finite).sum())} values are NaN or infinite{layers}; the first at {where}"
