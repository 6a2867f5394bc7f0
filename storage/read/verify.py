"""Checks the files, chunks, counts and values of a store, or summarizes its contents.

The parts of the store are checked one after another. First, the checksums of a part's files are
computed. Then the values of the part are decoded, while the files are still in the page cache. A
summary reads only the manifest, the plan and the commits, but no shards.
"""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...errors import StoreDamaged, StoreError
from ...text import SILENT, Progress
from .. import schema
from ..backend import (
    MISSING,
    backend_of,
    check_guard,
    check_incomplete,
    file_crc32,
    open_path,
    reads_of,
    reason,
)
from ..codecs.field import FieldCodec
from ..codecs.registry import StoreCodec
from ..commit import (
    FileRecord,
    PartCommit,
    array_of,
    check_size,
    find_manifest_damage,
    read_file_records,
    read_part_commit,
)
from ..paths import StoreLike, StorePath, name_below
from ..plan import check_plan, check_plan_of, numbers, part_counts, read_plan
from .store import ActivationStore, read_manifest

MAX_THREADS = 16
SLICE_BYTES = 32 << 20  # Upper bound on the raw bytes that a thread decodes at a time.
Depth = Literal["sizes", "checksums", "values"]
"""How thoroughly files are checked.

- ``sizes`` compares only the sizes of files with their commits.
- ``checksums`` compares the sizes and the checksums of files with their commits.
- ``values`` does what ``checksums`` does, and also decodes all values.
"""


@dataclass(frozen=True)
class Finding:
    """Damage to one file, or a failure to check one file."""

    # Number of the part of the store. The value is None if the file does not belong to a part.
    part: int | None
    path: str  # Path of the file, relative to the store.
    message: str
    # The error that prevented the check of the file. If the file was checked and is damaged, the
    # value is None.
    error: OSError | MemoryError | None = None


# If a check raises an error of these classes, the error is added to the report of the check.
_REPORTED = (StoreError, OSError, MemoryError)


def _finding(part: int | None, path: str, error: StoreError | OSError | MemoryError) -> Finding:
    """Return the finding for an error that a check has raised.

    A StoreError or a missing file means damage. Any other error means that the file could not be
    checked.
    """
    if isinstance(error, StoreError | FileNotFoundError | NotADirectoryError):
        return Finding(part, path, str(error))
    return Finding(part, path, reason(error), error)


@dataclass
class VerifyReport:
    """The result of a check. ``damages`` and ``unchecked`` are sorted by part."""

    damages: list[Finding] = field(default_factory=list)
    # Files that could not be checked.
    unchecked: list[Finding] = field(default_factory=list)
    # Maps the number of a part to the commit of the part. Commits that cannot be read are left out.
    commits: dict[int, PartCommit] = field(default_factory=dict)
    # Number of committed parts.
    n_parts: int = 0
    # Number of planned parts without a commit. A store with such parts is incomplete, not damaged.
    n_pending_parts: int = 0
    # Sentence that says which parts and files of the store are not written yet. If the store is
    # complete, the text is empty.
    missing: str = ""
    n_sequences: int = 0
    n_tokens: int = 0

    @property
    def ok(self) -> bool:
        """Whether all files could be checked and no damage was found."""
        return not self.damages and not self.unchecked

    @property
    def n_bytes(self) -> int:
        """Total size in bytes of all files of committed parts."""
        return sum(commit.stored_bytes for commit in self.commits.values())

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings to ``damages`` or ``unchecked``."""
        for finding in findings:
            (self.unchecked if finding.error else self.damages).append(finding)

    def check_complete(self, store: StoreLike) -> None:
        """Raise StorageUnavailable for the first file that could not be checked."""
        for finding in self.unchecked:
            if finding.error is not None:
                raise check_incomplete(store, finding.path, finding.error)


def missing_text(store: StorePath, manifest: schema.StoreManifest, n_pending: int) -> str:
    """Describe in words which parts and files of a store are not written yet.

    If the store is complete, the result is an empty text.

    Args:
        store: the store's path.
        manifest: the store's manifest.
        n_pending: number of planned parts without a commit.
    """
    missing: list[str] = []
    if n_pending:
        missing.append(f"{n_pending} of {manifest.n_parts} parts")
    # A store that was not made by an extraction needs no target bundle (``target/``).
    needs_target = "target_layers" in manifest.extraction
    if needs_target and not backend_of(schema.target_commit_path(store)).exists():
        missing.append("the target's weights in target/")
    return f"{' and '.join(missing)} are not written yet" if missing else ""


def verify_store(
    path: StoreLike,
    progress: Progress = SILENT,
    n_threads: int | None = None,
    values: bool = True,
) -> VerifyReport:
    """Check a whole store.

    The check verifies that:

    - file sizes and checksums match the commits,
    - shard indexes and the checksums of all chunks are correct,
    - the counts in the commits match the plan,
    - response masks match the numbers of response tokens in the plan,
    - token ids are in the vocabulary,
    - every value is finite.

    Damaged files and files that cannot be checked are listed in the report. No error is raised for
    them. If store.json, plan.parquet or the codec's basis is damaged, nothing else is checked.

    Args:
        path: the store's folder, or its URL.
        progress: reports the number of bytes that have been checked. If values are decoded, half of
            a part's bytes are reported when the checksums of its files are checked, and the other
            half when its values are decoded.
        n_threads: number of threads that compute checksums and decode. The default is one per core,
            but at most 16.
        values: whether to decode every value, too. This takes several times as long as computing
            all checksums.

    Raises:
        StorageUnavailable: a file that all other checks need, such as store.json, could not be
            read.
        StoreDamaged: store.json is damaged, and the store has no commits/store.json.
    """
    store = open_path(path)
    with check_guard(store):
        if backend_of(store / schema.MANIFEST_NAME).exists() and (
            damage := find_manifest_damage(store)
        ):
            findings = [
                Finding(None, name_below(store, file), str(error)) for file, error in damage
            ]
            return VerifyReport(findings)
        manifest = read_manifest(store)
        try:
            StoreCodec.open(manifest, store)
        except StoreDamaged as error:
            return VerifyReport([Finding(None, schema.CODEC_NAME, str(error))])
        plan = read_plan(store / schema.PLAN_NAME)
        check_plan(plan, manifest.alignment_tokens)
        try:
            check_plan_of(store, manifest, plan)
        except StoreDamaged as error:
            return VerifyReport([Finding(None, schema.PLAN_NAME, str(error))])
        planned = part_counts(plan, manifest.alignment_tokens)
    report = verify_commits(
        store, planned, "values" if values else "checksums", progress, n_threads
    )
    with check_guard(store):
        report.missing = missing_text(store, manifest, report.n_pending_parts)
    return report


def verify_commits(
    store: StorePath,
    planned: Sequence[Mapping[str, int]],
    depth: Depth,
    progress: Progress = SILENT,
    n_threads: int | None = None,
) -> VerifyReport:
    """Check the committed parts and the target bundle (``target/``) of a store.

    The store's manifest, plan and codec must be undamaged.

    Args:
        store: the store's path.
        planned: the counts of each planned part (``plan.part_counts``).
        depth: how thoroughly files are checked.
        progress: reports the number of bytes that have been checked.
        n_threads: number of threads. The default is one per core, but at most 16.
    """
    n_threads = n_threads or min(os.cpu_count() or 1, MAX_THREADS)
    with check_guard(store), ThreadPoolExecutor(n_threads) as pool:
        report = _Verification(store, pool, progress, depth).run(planned)
    for findings in (report.damages, report.unchecked):
        findings.sort(key=lambda finding: (finding.part is not None, finding.part or 0))
    return report


class _Verification:
    """One call of :func:`verify_commits`: its settings, its progress and its report."""

    def __init__(self, store: StorePath, pool: Executor, progress: Progress, depth: Depth) -> None:
        self.store = store
        self.progress = progress.of("verify", "B")
        self.depth = depth
        self.map: Callable[..., Iterator[Any]] = map if depth == "sizes" else pool.map
        # Maps the names of the files of all parts to their sizes, from one listing of a remote
        # store. A listing may be out of date, so only the least thorough check (``sizes``) uses it.
        self.listed = (
            backend_of(store / schema.PARTS_NAME).listed_sizes() if depth == "sizes" else {}
        )
        self.report = VerifyReport()
        self.done_bytes = 0.0

    def run(self, planned: Sequence[Mapping[str, int]]) -> VerifyReport:
        known = {schema.commit_path(self.store, part).name for part in range(len(planned))}
        for name in backend_of(self.store / schema.COMMITS_NAME).names_in():
            if name.startswith("part-") and name.endswith(".json") and name not in known:
                with self._checking(None, self.store / schema.COMMITS_NAME / name):
                    raise StoreDamaged(
                        f"the store has only the parts 0 to {len(planned) - 1}, so this file does "
                        "not belong to it"
                    )
        target_commit = schema.target_commit_path(self.store)
        with self._checking(None, target_commit), suppress(*MISSING):
            folder = self.store / schema.TARGET_NAME
            for findings in self._check_files(None, folder, read_file_records(target_commit)):
                self.report.add(findings)
        self._read_commits(planned)
        self._check_parts()
        return self.report

    @contextmanager
    def _checking(self, part: int | None, path: StorePath) -> Iterator[None]:
        """Return a context manager that catches errors of a check, and adds them to the report.

        The errors in ``_REPORTED`` are caught.
        """
        try:
            yield
        except _REPORTED as error:
            self.report.add([_finding(part, name_below(self.store, path), error)])

    def _read_commits(self, planned: Sequence[Mapping[str, int]]) -> None:
        """Read the commits of all parts, and report commits whose counts differ from the plan."""
        reads = reads_of(schema.commit_path(self.store, part) for part in range(len(planned)))
        for part, (path, read) in enumerate(reads):
            with self._checking(part, path):
                try:
                    commit = read_part_commit(path, read)
                except MISSING:
                    self.report.n_pending_parts += 1
                    continue
                self.report.commits[part] = commit
                commit.check_counts(self.store, part, planned[part])
        self.report.n_parts = len(planned) - self.report.n_pending_parts

    def _check_parts(self) -> None:
        """Check one part after another: first its files, then its values if no file is damaged."""
        commits = self.report.commits
        folder = self.store / schema.PARTS_NAME
        self.n_bytes = self.report.n_bytes
        consistent = commits.keys() - {damage.part for damage in self.report.damages}
        reader: ActivationStore | None = None
        # Maps the number of a part to a list with one pair for each sequence of the part. A pair
        # consists of the index of the sequence in ``reader`` and the sequence's row in the plan.
        rows: dict[int, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
        if self.depth == "values":
            reader = ActivationStore(self.store, parts=consistent, cache=None, checks_sizes=False)
            for i, row in enumerate(reader.sequences.to_pylist()):
                rows[row["part"]].append((i, row))
        for part, commit in commits.items():
            end_bytes = self.done_bytes + commit.stored_bytes
            findings: list[Finding] = []
            checks = self._check_files(part, folder, commit.files)
            for file_findings, record in zip(checks, commit.files.values(), strict=True):
                findings += file_findings
                self._advance(record.bytes / (1 if reader is None else 2), part)
            self.report.add(findings)
            if not findings and part in consistent:
                self.report.n_sequences += commit.n_sequences
                self.report.n_tokens += commit.n_tokens
                if reader is not None:
                    self._check_values(reader, part, rows[part], commit.stored_bytes / 2)
            self._advance(end_bytes - self.done_bytes, part)
        if reader is not None:
            reader.close()

    def _check_files(
        self, part: int | None, folder: StorePath, files: Mapping[str, FileRecord]
    ) -> Iterator[list[Finding]]:
        listed = {} if part is None else self.listed

        def check(name: str, record: FileRecord) -> list[Finding]:
            path = folder / name
            try:
                check_size(path, record, listed.get(name))
                got = record.crc32 if self.depth == "sizes" else file_crc32(path)
                if got != record.crc32:
                    raise StoreDamaged(
                        f"the checksum of the file is {got:#010x}, but its commit says "
                        f"{record.crc32:#010x}"
                    )
            except _REPORTED as error:
                return [_finding(part, name_below(self.store, path), error)]
            return []

        return self.map(check, files.keys(), files.values())

    def _check_values(
        self,
        reader: ActivationStore,
        part: int,
        rows: list[tuple[int, dict[str, Any]]],
        n_bytes: float,
    ) -> None:
        checks = self.map(lambda row: list(_check_sequence(reader, *row)), rows)
        n_tokens = self.report.commits[part].n_tokens
        for findings, (_, row) in zip(checks, rows, strict=True):
            self.report.add(findings)
            self._advance(n_bytes * row["n_tokens"] / n_tokens, part)

    def _advance(self, n_bytes: float, part: int) -> None:
        self.done_bytes += n_bytes
        n_done = min(round(self.done_bytes), self.n_bytes)
        self.progress(n_done, self.n_bytes, f"part {part}")


def _check_sequence(reader: ActivationStore, i: int, row: dict[str, Any]) -> Iterator[Finding]:
    sequence_name = f"sequence {row['sequence_id']} (row {row['source_row']} of the dataset)"
    for name in reader.fields:
        try:
            if name == "response_mask":
                problems = _mask_problems(reader.read(i, name), row["n_response_tokens"])
            else:
                problems = _non_finite(reader, i, row["n_tokens"], reader.codec.fields[name])
        except StoreError as error:
            problems = {name: str(error)}
        except (OSError, MemoryError) as error:
            yield _finding(row["part"], f"{schema.PARTS_NAME}/{name}", error)
            continue
        for array_name, problem in problems.items():
            path = f"{schema.PARTS_NAME}/{array_name}"
            yield Finding(row["part"], path, f"{sequence_name}: {problem}")


def _mask_problems(mask: np.ndarray, n_planned: int) -> dict[str, str]:
    """Check that a response mask has only 0 and 1, and the planned number of response tokens."""
    n_masked = int(mask.sum(dtype=np.int64))
    if mask.max(initial=0) > 1:
        return {"response_mask": "the response mask has values other than 0 and 1"}
    if n_masked != n_planned:
        return {
            "response_mask": f"the response mask has {n_masked} response tokens, but the plan says "
            f"{n_planned}"
        }
    return {}


def _non_finite(
    reader: ActivationStore, i: int, n_tokens: int, codec: FieldCodec
) -> dict[str, str]:
    """Read one sequence of a field, and find stored arrays with NaN or infinite values.

    Returns:
        Name of the array -> description of its NaN and infinite values. The mapping contains only
        arrays that have such values.
    """
    spec = codec.spec
    n_bad: Counter[schema.StoredArray] = Counter()
    first_bad: dict[schema.StoredArray, str] = {}
    bad_layers: dict[schema.StoredArray, set[int]] = defaultdict(set)
    # Read the sequence in slices, to limit the memory of each thread. Slices start at multiples of
    # 64 tokens, because some codecs store one row for each block of 64 tokens.
    step = (
        max(1, SLICE_BYTES // spec.token_bytes // schema.ALIGNMENT_TOKENS) * schema.ALIGNMENT_TOKENS
    )
    for start in range(0, n_tokens, step):
        rows = reader.read_stored(i, spec.name, tokens=slice(start, start + step))
        for array in codec.arrays:
            if array.logical_dtype not in schema.FLOAT_DTYPES:
                continue
            finite = schema.is_finite(rows[array.name], array.logical_dtype)
            if finite.all():
                continue
            bad = np.argwhere(~finite)
            if array not in n_bad:
                first = bad[0].tolist()
                first[0] += start // array.block_tokens
                position = [f"{axis} {n}" for axis, n in zip(array.axes, first, strict=True)]
                first_bad[array] = ", ".join(position)
            n_bad[array] += len(bad)
            if array.layer_axis is not None:
                bad_layers[array].update(np.unique(bad[:, array.layer_axis]).tolist())
    problems: dict[str, str] = {}
    for array, n in n_bad.items():
        layers = [str(spec.layer_numbers[layer]) for layer in sorted(bad_layers[array])]
        layer_text = ""
        if layers:
            layer_text = f" in layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}"
        problems[array.name] = (
            f"{n} values are NaN or infinite{layer_text}; the first at {first_bad[array]}"
        )
    return problems


# Summaries


@dataclass(frozen=True)
class FieldSummary:
    """The size of a field, summed over all committed parts."""

    spec: schema.FieldSpec
    raw_bytes: int  # Size of the field's values before encoding, without padding.
    stored_bytes: int
    # Maps each stored array of the field to its encoded size in bytes.
    arrays: Mapping[schema.StoredArray, int]


@dataclass(frozen=True)
class StoreSummary:
    """The summary that ``moa-data inspect`` shows. Counts are summed over all committed parts."""

    path: StorePath
    manifest: schema.StoreManifest
    codec: str
    fields: tuple[FieldSummary, ...]
    n_pending_parts: int
    n_sequences: int
    n_tokens: int
    n_response_tokens: int
    raw_bytes: int
    stored_bytes: int
    # The quotient stored_bytes / raw_bytes. The value is NaN if no part is committed.
    ratio: float
    # Stored bytes per token. The value is NaN if no part is committed.
    bytes_per_token: float
    # Histogram of the lengths of sequences, as ``length_histogram`` returns it.
    lengths: tuple[list[int], list[int]]
    has_target: bool
    # Sentence that says which parts and files of the store are not written yet. If the store is
    # complete, the text is empty.
    missing: str
    # Maps the name of each field that is being added to the store to the number of parts that
    # already have this field.
    unfinished: Mapping[str, int]


def summarize_store(path: StoreLike) -> StoreSummary:
    """Summarize a store. ``path`` is the folder or the URL of the store."""
    with ActivationStore(path, cache=None, checks_sizes=False) as store:
        manifest = store.manifest
        codec = store.codec
        n_tokens = int(store.lengths.sum(dtype=np.int64))
    n_bytes: Counter[str | None] = Counter()
    for commit in store.commits.values():
        for file, record in commit.files.items():
            n_bytes[array_of(file)] += record.bytes
    fields = []
    for spec in manifest.fields:
        arrays = {array: n_bytes[array.name] for array in codec.fields[spec.name].arrays}
        fields.append(FieldSummary(spec, spec.token_bytes * n_tokens, sum(arrays.values()), arrays))
    raw = sum(summary.raw_bytes for summary in fields)
    stored = sum(summary.stored_bytes for summary in fields)
    n_pending = manifest.n_parts - len(store.commits)
    bundle = schema.target_commit_path(store.path), store.path / schema.TARGET_NAME / "config.json"
    return StoreSummary(
        path=store.path,
        manifest=manifest,
        codec=codec.name,
        fields=tuple(fields),
        n_pending_parts=n_pending,
        n_sequences=len(store),
        n_tokens=n_tokens,
        n_response_tokens=int(numbers(store.sequences, "n_response_tokens").sum(dtype=np.int64)),
        raw_bytes=raw,
        stored_bytes=stored,
        ratio=stored / raw if raw else math.nan,
        bytes_per_token=stored / n_tokens if n_tokens else math.nan,
        lengths=length_histogram(store.lengths),
        has_target=any(backend_of(path).exists() for path in bundle),
        missing=missing_text(store.path, manifest, n_pending),
        unfinished=unfinished_fields(store.commits.values(), codec),
    )


def length_histogram(lengths: np.ndarray, n_bins: int = 16) -> tuple[list[int], list[int]]:
    """Count lengths in bins of equal integer width.

    Args:
        lengths: number of tokens of each sequence, int [n_sequences]. It may be empty.
        n_bins: largest number of bins.

    Returns:
        The edges of the bins, and the number of lengths in each bin.
    """
    longest = int(lengths.max(initial=0))
    width = max(1, -(-longest // n_bins))
    edges = np.arange(0, longest + width, width) if longest else np.array([0, 1])
    counts, _ = np.histogram(lengths, edges)
    return edges.tolist(), counts.tolist()


def unfinished_fields(commits: Iterable[PartCommit], codec: StoreCodec) -> dict[str, int]:
    """Find fields that are being added to a store, and count the parts that already have them.

    If a field is being added, the commits of some parts list shards of the field, but store.json
    does not contain the field yet.

    Args:
        commits: commits of all parts.
        codec: the codec of store.json.

    Returns:
        Maps the name of each such field to the number of parts that already have the field.
    """
    n_parts: Counter[str] = Counter()
    known = {array.name for array in codec.arrays}
    for commit in commits:
        fields: set[str] = set()
        for array in map(array_of, commit.files):
            if array is None or array in known:
                continue
            steps = array.split("/")
            fields.add("/".join(steps[: 2 if steps[0] == "hidden" else 1]))
        n_parts.update(sorted(fields))
    return n_parts
