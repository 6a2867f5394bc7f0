"""Checking a whole store: every file, every chunk, every count, every value."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .codecs.field import FieldCodec
from .codecs.registry import StoreCodec
from .commit import (
    CODEC_NAME,
    COMMITS_NAME,
    MANIFEST_NAME,
    PLAN_NAME,
    TARGET_NAME,
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
from .errors import ManifestInvalid, ShardCorrupt, ShardMissing, StoreError
from .plan import check_plan, part_lengths, read_plan
from .reader import ActivationStore, read_manifest
from .schema import FieldSpec, StoreManifest
from .seal import find_seal_damage
from .shard import FileRecord

MAX_THREADS = 16
SLICE_BYTES = 32 << 20
"""Raw bytes that one thread holds at a time."""
SLICE_TOKENS = 64
"""Slices start at multiples of this, as codecs that work on blocks of tokens want it."""

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


def verify_store(
    path: str | os.PathLike[str],
    progress: Progress | None = None,
    n_threads: int | None = None,
    values: bool = True,
) -> VerifyReport:
    """Check everything that a store promises.

    File sizes and checksums against the commits, shard indexes, the checksum of every chunk, counts against the plan,
    response masks against their counts, token ids against the vocabulary, and that every value is finite. Each part is
    read from the disk once: its values are decoded while its files are in the page cache.

    Args:
        path: the store's folder.
        progress: called with bytes, as files are checked (half of their bytes) and decoded (the other half).
        n_threads: threads that checksum and decode; default: one per core, at most 16.
        values: also decode every value. Without it every byte is still compared with what was written, as fast as the
            disk reads (about 1.3 GB/s a core); decoding takes several times the processor time.

    Returns:
        The report; damage is listed, never raised. Where store.json or plan.parquet is not the file that was written,
        nothing else is checked.

    Raises:
        StoreNotFound: not a store.
        SchemaVersionError: another schema version.
        ManifestInvalid: store.json or plan.parquet cannot be read, in a store without a seal.
        PlanInvalid: plan.parquet breaks a rule of the plan.
    """
    store = Path(path)
    sealed = find_seal_damage(store) if (store / MANIFEST_NAME).exists() else []
    report = VerifyReport([Damage(None, _below(store, damaged), str(error)) for damaged, error in sealed])
    if sealed:
        return report  # nothing can be held against a manifest or plan that may never have been written
    manifest = read_manifest(store)
    try:
        StoreCodec.open(manifest, store)
    except (ShardMissing, ShardCorrupt) as error:
        report.damages.append(Damage(None, CODEC_NAME, str(error)))
        return report  # no part can be decoded
    plan = read_plan(store / PLAN_NAME)
    check_plan(plan, manifest.alignment_tokens)
    report.damages += _check_plan(manifest, plan)
    report.damages += _check_strays(store, plan)
    commits = _check_commits(store, plan, part_lengths(plan, manifest.alignment_tokens), report)
    with ThreadPoolExecutor(n_threads or min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        report.damages += _check_bundle(store, pool)
        _Check(store, commits, report, pool, progress, values).run()
    report.damages.sort(key=lambda damage: (damage.part is not None, damage.part or 0))
    return report


def _below(store: Path, path: Path) -> str:
    return path.relative_to(store).as_posix()


def _check_plan(manifest: StoreManifest, plan: pa.Table) -> Iterator[Damage]:
    counts = {
        "n_sequences": plan.num_rows,
        "n_parts": int(plan["part"].to_numpy().max()) + 1,
        "n_tokens": int(plan["n_tokens"].to_numpy().sum(dtype=np.int64)),
    }
    for key, counted in counts.items():
        expected = getattr(manifest, key)
        if counted != expected:
            yield Damage(None, PLAN_NAME, f"{PLAN_NAME} has {key} {counted}, store.json says {expected}")


def _check_strays(store: Path, plan: pa.Table) -> Iterator[Damage]:
    """Name commits of parts that the plan does not have."""
    known = {commit_path(store, part).name for part in range(int(plan["part"].to_numpy().max()) + 1)}
    folder = store / COMMITS_NAME
    for entry in sorted(folder.glob("part-*.json")):
        if entry.name not in known:
            yield Damage(None, f"{COMMITS_NAME}/{entry.name}", "a commit of a part that the plan does not have")


def _check_bundle(store: Path, pool: Executor) -> list[Damage]:
    path = target_commit_path(store)
    if not path.exists():
        return []
    try:
        files = read_target_commit(path)
    except ManifestInvalid as error:
        return [Damage(None, _below(store, path), str(error))]
    return [
        damage for check in _file_checks(store, store / TARGET_NAME, files, None, pool) for damage in check.result()
    ]


def _check_commits(store: Path, plan: pa.Table, lengths: np.ndarray, report: VerifyReport) -> dict[int, PartCommit]:
    """Return the commits that can be read, their files having the right sizes or not; count the rest."""
    parts = plan["part"].to_numpy()
    n_tokens = np.bincount(parts, plan["n_tokens"].to_numpy(), len(lengths)).astype(np.int64)
    n_sequences = np.bincount(parts, minlength=len(lengths))
    commits: dict[int, PartCommit] = {}
    for part in range(len(lengths)):
        path = commit_path(store, part)
        if not path.exists():
            report.n_pending_parts += 1
            continue
        report.n_parts += 1
        try:
            commits[part] = commit = read_part_commit(path)
        except ManifestInvalid as error:
            report.damages.append(Damage(part, _below(store, path), str(error)))
            continue
        report.n_bytes += commit.stored_bytes
        planned = {
            "n_sequences": int(n_sequences[part]),
            "n_tokens": int(n_tokens[part]),
            "allocated_tokens": int(lengths[part]),
        }
        for key, expected in planned.items():
            if (got := getattr(commit, key)) != expected:
                message = f"the commit says {key} {got}, the plan has {expected}"
                report.damages.append(Damage(part, _below(store, path), message))
        if commit.part != part:
            report.damages.append(Damage(part, _below(store, path), f"the commit belongs to part {commit.part}"))
    return commits


def _file_checks(
    store: Path, folder: Path, files: Mapping[str, FileRecord], part: int | None, pool: Executor
) -> list[Future[list[Damage]]]:
    """Start to check size and checksum of each file."""

    def check(name: str, record: FileRecord) -> list[Damage]:
        path = folder / name
        for _, error in find_size_damage(folder, {name: record}):
            return [Damage(part, _below(store, path), str(error))]
        try:
            got = file_crc32(path)
        except OSError as error:
            return [Damage(part, _below(store, path), f"it cannot be read: {error}")]
        if got == record.crc32:
            return []
        message = f"checksum is {got:#010x}, its commit says {record.crc32:#010x}"
        return [Damage(part, _below(store, path), message)]

    return [pool.submit(check, name, record) for name, record in files.items()]


class _Check:
    """Checks part by part: all files, then, if they are whole, all values."""

    def __init__(
        self,
        store: Path,
        commits: Mapping[int, PartCommit],
        report: VerifyReport,
        pool: Executor,
        progress: Progress | None,
        values: bool,
    ) -> None:
        self.store, self.commits, self.report, self.pool = store, commits, report, pool
        self.progress, self.values = progress, values
        self.n_bytes = sum(commit.stored_bytes for commit in commits.values())
        self.done_bytes = 0.0
        damaged = {damage.part for damage in report.damages}
        sized = [
            part
            for part, commit in commits.items()
            if part not in damaged and not find_size_damage(part_path(store, part), commit.files)
        ]
        self.reader = ActivationStore(store, parts=sized) if sized and values else None
        self.rows: dict[int, list[tuple[int, dict[str, Any]]]] = {part: [] for part in sized}
        for i, row in enumerate(self.reader.sequences.to_pylist() if self.reader else ()):
            self.rows[row["part"]].append((i, row))

    def run(self) -> None:
        """Check every part."""
        for part, commit in self.commits.items():
            damages: list[Damage] = []
            checks = _file_checks(self.store, part_path(self.store, part), commit.files, part, self.pool)
            for check, record in zip(checks, commit.files.values(), strict=True):
                damages += check.result()
                self._advance(record.bytes / (2 if self.values else 1), part)
            self.report.damages += damages
            if not self.values:
                self.report.n_sequences += commit.n_sequences * (not damages)
                self.report.n_tokens += commit.n_tokens * (not damages)
            elif damages or part not in self.rows:
                self._advance(commit.stored_bytes / 2, part)
            else:
                self._check_values(part, commit.stored_bytes / 2)
        if self.reader is not None:
            self.reader.close()

    def _check_values(self, part: int, n_bytes: float) -> None:
        assert self.reader is not None
        reader, rows = self.reader, self.rows[part]
        checks = [self.pool.submit(lambda i, row: list(_check_sequence(reader, i, row)), i, row) for i, row in rows]
        n_tokens = sum(row["n_tokens"] for _, row in rows)
        for check, (_, row) in zip(checks, rows, strict=True):
            self.report.damages += [Damage(part, path, message) for path, message in check.result()]
            self.report.n_sequences += 1
            self.report.n_tokens += row["n_tokens"]
            self._advance(n_bytes * row["n_tokens"] / n_tokens, part)

    def _advance(self, n_bytes: float, part: int) -> None:
        self.done_bytes += n_bytes
        if self.progress:
            self.progress(min(round(self.done_bytes), self.n_bytes), self.n_bytes, f"verify part {part}")


def _check_sequence(reader: ActivationStore, i: int, row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, message) for each thing wrong with a sequence."""
    who = f"sequence {row['sequence_id']} (source row {row['source_row']})"
    folder = part_path(Path(), row["part"])
    for name, spec in reader.fields.items():
        codec = reader.codec.fields[name]
        try:
            message = _field_damage(reader, i, row, spec) if codec.is_identity else None
            found = {name: message} if message else {}
            if not codec.is_identity:
                found = _codes_damage(reader, i, row, codec)
        except StoreError as error:
            found = {name: str(error)}
        for array, message in found.items():
            yield (folder / array).as_posix(), f"{who}: {message}"


def _slices(row: dict[str, Any], spec: FieldSpec) -> Iterator[slice]:
    """Cut a sequence so that threads stay small; every slice begins at a multiple of ``SLICE_TOKENS``."""
    step = max(1, SLICE_BYTES // spec.token_bytes // SLICE_TOKENS) * SLICE_TOKENS
    return (slice(start, start + step) for start in range(0, row["n_tokens"], step))


def _codes_damage(reader: ActivationStore, i: int, row: dict[str, Any], codec: FieldCodec) -> dict[str, str]:
    """Read what is stored for a field of a sequence; say for each stored array of floats what is not finite."""
    found: dict[str, str] = {}
    for tokens in _slices(row, codec.spec):
        codes = reader.read(i, codec.spec.name, tokens=tokens, decoded=False)
        for array in codec.arrays:
            if array.logical_dtype not in FLOAT_DTYPES or array.name in found:
                continue
            finite = is_finite(codes[array.name], array.logical_dtype)
            if not finite.all():
                bad = np.argwhere(~finite)
                first = [int(bad[0][0]) + tokens.start // array.block_tokens, *bad[0][1:].tolist()]
                found[array.name] = _non_finite(len(bad), first, [], array.axes)
    return found


def _field_damage(reader: ActivationStore, i: int, row: dict[str, Any], spec: FieldSpec) -> str | None:
    """Read a field of a sequence, a slice of its tokens at a time; say what is wrong."""
    n_bad, n_masked, first, layers = 0, 0, None, set[int]()
    for tokens in _slices(row, spec):
        values = reader.read(i, spec.name, tokens=tokens)
        if spec.dtype in FLOAT_DTYPES:
            finite = is_finite(values, spec.dtype)
            if finite.all():
                continue
            bad = np.argwhere(~finite)
            n_bad += len(bad)
            first = first or [int(bad[0][0]) + tokens.start, *bad[0][1:].tolist()]
            layers |= set() if spec.layer_axis is None else set(np.unique(bad[:, spec.layer_axis]).tolist())
        elif spec.name == "response_mask":
            if values.max(initial=0) > 1:
                return "the response mask has values above 1"
            n_masked += int(values.sum(dtype=np.int64))
    if spec.name == "response_mask" and n_masked != row["n_response_tokens"]:
        return f"response mask counts {n_masked} tokens, the plan says {row['n_response_tokens']}"
    return None if first is None else _non_finite(n_bad, first, sorted(layers), spec.axes)


def _non_finite(n_bad: int, first: list[int], layers: list[int], axes: tuple[str, ...]) -> str:
    """Say how many values are NaN or infinite and where the first one is."""
    where = ", ".join(f"{axis} {index}" for axis, index in zip(axes, first, strict=True))
    shown = f" in layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}" if layers else ""
    return f"{n_bad} values are NaN or infinite{shown}; the first at {where}"
