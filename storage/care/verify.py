"""Checking a whole store: every file, every chunk, every count, every value."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ...errors import StoreDamaged, StoreError
from ...text import Progress
from ..codecs.field import FieldCodec
from ..codecs.registry import StoreCodec
from ..disk.checking import MISSING, check_guard, exists
from ..disk.durable import file_crc32
from ..disk.files import names_in, open_path, reads_of, sizes_of
from ..dtypes import FLOAT_DTYPES, is_finite
from ..names import (
    CODEC_NAME,
    COMMITS_NAME,
    MANIFEST_NAME,
    PARTS_NAME,
    PLAN_NAME,
    TARGET_NAME,
    commit_path,
    part_folder,
    target_commit_path,
)
from ..parts.commit import PartCommit, find_size_damage, read_part_commit, read_target_commit
from ..parts.manifest_commit import find_manifest_damage
from ..parts.plan import check_plan, part_lengths, plan_counts, read_plan
from ..parts.shard import FileRecord
from ..paths import Stat, StorePath, name_below
from ..read.store import ActivationStore, read_manifest
from ..schema import FieldSpec, StoreManifest
from .findings import Damage, Finding, Unchecked, VerifyReport

MAX_THREADS = 16
SLICE_BYTES = 32 << 20
"""Raw bytes that one thread holds at a time."""
SLICE_TOKENS = 64
"""Slices start at multiples of this, as codecs that work on blocks of tokens want it."""


def verify_store(
    path: str | os.PathLike[str] | StorePath,
    progress: Progress | None = None,
    n_threads: int | None = None,
    values: bool = True,
    parts: Collection[int] | None = None,
) -> VerifyReport:
    """Check everything that a store promises.

    File sizes and checksums against the commits, shard indexes, the checksum of every chunk, counts against the plan,
    response masks against their counts, token ids against the vocabulary, and that every value is finite. Each part is
    read from the disk once: its values are decoded while its files are in the page cache.

    Args:
        progress: called with bytes, as files are checked (half of their bytes) and decoded (the other half).
        n_threads: threads that checksum and decode; default: one per core, at most 16.
        values: also decode every value. Without it every byte is still compared with what was written, as fast as the
            disk reads (about 1.3 GB/s a core); decoding takes several times the processor time.
        parts: check no other parts than these; None for all.

    Returns:
        The report; damage, and what the machine kept from being checked, is listed and not raised. Where store.json or
        plan.parquet is not the file that was written, nothing else is checked.

    Raises:
        StorageUnavailable: a file without which nothing else can be checked could not be read.
        StoreNotFound: not a store.
        SchemaVersionError: another schema version.
        StoreDamaged: store.json or plan.parquet cannot be read, in a store without commits/store.json.
        StoreDamaged: plan.parquet breaks a rule of the plan.
    """
    store = open_path(path)
    report = VerifyReport()
    with check_guard(store):
        _verify(store, report, _Settings(progress, n_threads, values, parts))
    for findings in (report.damages, report.unchecked):
        findings.sort(key=lambda finding: (finding.part is not None, finding.part or 0))
    return report


@dataclass(frozen=True)
class _Settings:
    """The arguments of :func:`verify_store`."""

    progress: Progress | None
    n_threads: int | None
    values: bool
    parts: Collection[int] | None


def _verify(store: StorePath, report: VerifyReport, settings: _Settings) -> None:
    if exists(store / MANIFEST_NAME):
        report.add(Damage(None, _below(store, path), str(error)) for path, error in find_manifest_damage(store))
    if report.damages:
        return  # nothing can be held against a manifest or plan that may never have been written
    manifest = read_manifest(store)
    try:
        StoreCodec.open(manifest, store)
    except StoreDamaged as error:
        report.add([Damage(None, CODEC_NAME, str(error))])
        return  # no part can be decoded
    plan = read_plan(store / PLAN_NAME)
    check_plan(plan, manifest.alignment_tokens)
    report.add(_check_plan(manifest, plan))
    report.add(_check_strays(store, plan))
    report.lacks_target = lacks_target(store, manifest)
    commits = _check_commits(store, plan, part_lengths(plan, manifest.alignment_tokens), report, settings.parts)
    with ThreadPoolExecutor(settings.n_threads or min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        report.add(_check_bundle(store, pool))
        _Check(store, manifest, commits, report, pool, settings.progress, settings.values).run()


def _below(store: StorePath, path: StorePath) -> str:
    return name_below(store, path)


def _check_plan(manifest: StoreManifest, plan: pa.Table) -> Iterator[Damage]:
    for key, counted in plan_counts(plan).items():
        expected = getattr(manifest, key)
        if counted != expected:
            yield Damage(None, PLAN_NAME, f"{PLAN_NAME} has {key} {counted}, store.json says {expected}")


def _check_strays(store: StorePath, plan: pa.Table) -> Iterator[Damage]:
    """Name commits of parts that the plan does not have."""
    known = {commit_path(store, part).name for part in range(int(plan["part"].to_numpy().max()) + 1)}
    for name in names_in(store / COMMITS_NAME):
        if name.startswith("part-") and name.endswith(".json") and name not in known:
            yield Damage(None, f"{COMMITS_NAME}/{name}", "a commit of a part that the plan does not have")


def lacks_target(store: StorePath, manifest: StoreManifest) -> bool:
    """Whether the target bundle is still to be written; stores that no extraction made need none."""
    return "target_layers" in manifest.extraction and not exists(target_commit_path(store))


def _check_bundle(store: StorePath, pool: Executor) -> Iterator[Finding]:
    path = target_commit_path(store)
    try:
        if not exists(path):
            return
        files = read_target_commit(path)
    except StoreDamaged as error:
        yield Damage(None, _below(store, path), str(error))
        return
    except (OSError, MemoryError) as error:
        yield Unchecked(None, _below(store, path), error)
        return
    for check in _file_checks(store, store / TARGET_NAME, files, None, pool):
        yield from check.result()


def _check_commits(
    store: StorePath, plan: pa.Table, lengths: np.ndarray, report: VerifyReport, wanted: Collection[int] | None
) -> dict[int, PartCommit]:
    """Return the commits that can be read, their files having the right sizes or not; count the rest."""
    parts = plan["part"].to_numpy()
    n_tokens = np.bincount(parts, plan["n_tokens"].to_numpy(), len(lengths)).astype(np.int64)
    n_sequences = np.bincount(parts, minlength=len(lengths))
    commits: dict[int, PartCommit] = {}
    chosen = [part for part in range(len(lengths)) if wanted is None or part in wanted]
    for part, (path, read) in zip(chosen, reads_of(commit_path(store, part) for part in chosen), strict=True):
        report.n_parts += 1
        try:
            commits[part] = commit = read_part_commit(path, read)
        except MISSING:
            report.n_pending_parts += 1
            report.n_parts -= 1
            continue
        except StoreDamaged as error:
            report.damages.append(Damage(part, _below(store, path), str(error)))
            continue
        except (OSError, MemoryError) as error:
            report.unchecked.append(Unchecked(part, _below(store, path), error))
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
    store: StorePath, folder: StorePath, files: Mapping[str, FileRecord], part: int | None, pool: Executor
) -> list[Future[list[Finding]]]:
    """Start to check size and checksum of each file."""

    def check(name: str, record: FileRecord) -> list[Finding]:
        path = _below(store, folder / name)
        try:
            for _, wrong in find_size_damage(folder, {name: record}):
                return [Damage(part, path, str(wrong))]
            got = file_crc32(folder / name)
        except (StoreError, *MISSING) as error:
            return [Damage(part, path, str(error))]
        except (OSError, MemoryError) as error:
            return [Unchecked(part, path, error)]
        if got == record.crc32:
            return []
        return [Damage(part, path, f"checksum is {got:#010x}, its commit says {record.crc32:#010x}")]

    return [pool.submit(check, name, record) for name, record in files.items()]


class _Check:
    """Checks part by part: all files, then, if they are whole, all values."""

    def __init__(
        self,
        store: StorePath,
        manifest: StoreManifest,
        commits: Mapping[int, PartCommit],
        report: VerifyReport,
        pool: Executor,
        progress: Progress | None,
        values: bool,
    ) -> None:
        self.store, self.manifest, self.commits, self.report, self.pool = store, manifest, commits, report, pool
        self.progress, self.values = progress, values
        self.n_bytes = sum(commit.stored_bytes for commit in commits.values())
        self.done_bytes = 0.0
        self.damaged = {damage.part for damage in report.damages}
        self.unsized: dict[int, OSError | MemoryError] = {}
        look = sizes_of(store / PARTS_NAME)
        sized = [part for part in commits if part not in self.damaged and self._has_sizes(part, look)]
        self.reader = ActivationStore(store, parts=sized, cache=None) if sized and values else None
        self.rows: dict[int, list[tuple[int, dict[str, Any]]]] = {part: [] for part in sized}
        for i, row in enumerate(self.reader.sequences.to_pylist() if self.reader else ()):
            self.rows[row["part"]].append((i, row))

    def _folder(self, part: int) -> StorePath:
        return part_folder(self.store, part, self.manifest.schema_version)

    def _has_sizes(self, part: int, look: Callable[[StorePath], Stat | os.stat_result]) -> bool:
        """Whether all files of a part are there with their sizes; if not, or if it can't be told, ``run`` says why."""
        try:
            return not find_size_damage(self._folder(part), self.commits[part].files, look)
        except (OSError, MemoryError) as error:
            self.unsized[part] = error
            return False

    def run(self) -> None:
        """Check every part."""
        for part, commit in self.commits.items():
            found: list[Finding] = []
            checks = _file_checks(self.store, self._folder(part), commit.files, part, self.pool)
            for check, record in zip(checks, commit.files.values(), strict=True):
                found += check.result()
                self._advance(record.bytes / (2 if self.values else 1), part)
            self.report.add(found)
            if not self.values:
                self.report.n_sequences += commit.n_sequences * (not found)
                self.report.n_tokens += commit.n_tokens * (not found)
            elif found or part not in self.rows:
                if not found and part not in self.damaged:  # its files are whole by now, but its values were not read
                    error = self.unsized.get(part, OSError("its files changed meanwhile"))
                    self.report.add([Unchecked(part, _below(self.store, self._folder(part)), error)])
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
            self.report.add(check.result())
            self.report.n_sequences += 1
            self.report.n_tokens += row["n_tokens"]
            self._advance(n_bytes * row["n_tokens"] / n_tokens, part)

    def _advance(self, n_bytes: float, part: int) -> None:
        self.done_bytes += n_bytes
        if self.progress:
            self.progress(min(round(self.done_bytes), self.n_bytes), self.n_bytes, f"verify part {part}")


def _check_sequence(reader: ActivationStore, i: int, row: dict[str, Any]) -> Iterator[Finding]:
    """Yield each thing that is wrong with a sequence."""
    who = f"sequence {row['sequence_id']} (source row {row['source_row']})"
    part = row["part"]
    folder = part_folder(Path(), part, reader.manifest.schema_version)
    for name, spec in reader.fields.items():
        codec = reader.codec.fields[name]
        try:
            message = _field_damage(reader, i, row, spec) if codec.is_identity else None
            found = {name: message} if message else {}
            if not codec.is_identity:
                found = _codes_damage(reader, i, row, codec)
        except StoreError as error:
            found = {name: str(error)}
        except (OSError, MemoryError) as error:
            found = {}
            yield Unchecked(part, (folder / name).as_posix(), error)
        for array, message in found.items():
            yield Damage(part, (folder / array).as_posix(), f"{who}: {message}")


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
