"""What a store holds, in numbers, from its manifest, plan and commits alone; no shard is opened."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..backend import exists, open_path
from ..codecs.registry import StoreCodec
from ..commit import PartCommit, array_of, check_manifest, read_commits
from ..paths import StorePath
from ..plan import check_plan, read_plan
from ..schema import PLAN_NAME, TARGET_NAME, StoreManifest, target_commit_path
from .store import read_manifest
from .verify import lacks_target, missing_text


def _ratio(stored: float, n: float) -> float:
    return stored / n if n else float("nan")  # while nothing is committed


class ArraySummary(NamedTuple):
    """The size of a stored array over all committed parts; ``dtype`` is what its numbers mean."""

    name: str
    dtype: str
    stored_bytes: int


@dataclass(frozen=True)
class FieldSummary:
    """The sizes of a field over all committed parts; raw bytes and values are those of the tokens, without padding."""

    name: str
    dtype: str
    token_shape: tuple[int, ...]
    description: str
    raw_bytes: int
    n_values: int
    arrays: tuple[ArraySummary, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(array.stored_bytes for array in self.arrays)

    @property
    def ratio(self) -> float:
        """Stored over raw."""
        return _ratio(self.stored_bytes, self.raw_bytes)


class LengthHistogram(NamedTuple):
    """The lengths of the committed sequences: ``counts[k]`` have ``edges[k]`` to ``edges[k + 1] - 1`` tokens."""

    edges: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class StoreSummary:
    """What ``inspect`` shows; counts are of committed parts.

    Attributes:
        missing: what of the plan is still to be written, in words; empty for a complete store.
        unfinished: fields that an addition has written to some parts only -> how many parts.
    """

    path: StorePath
    manifest: StoreManifest
    fields: tuple[FieldSummary, ...]
    n_pending_parts: int
    n_sequences: int
    n_tokens: int
    n_response_tokens: int
    lengths: LengthHistogram
    has_target: bool
    missing: str
    unfinished: Mapping[str, int]

    @property
    def codec(self) -> str:
        """The codec's name."""
        return str(self.manifest.codec["name"])

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of all fields."""
        return sum(item.raw_bytes for item in self.fields)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all committed files of all fields."""
        return sum(item.stored_bytes for item in self.fields)

    @property
    def ratio(self) -> float:
        """Stored over raw."""
        return _ratio(self.stored_bytes, self.raw_bytes)

    @property
    def bytes_per_token(self) -> float:
        """Stored bytes per token."""
        return _ratio(self.stored_bytes, self.n_tokens)


def summarize_store(path: str | os.PathLike[str] | StorePath) -> StoreSummary:
    """Summarise a store: its folder, or its URL."""
    store = open_path(path)
    manifest = read_manifest(store)
    check_manifest(store)
    plan = read_plan(store / PLAN_NAME)
    check_plan(plan, manifest.alignment_tokens)
    commits = read_commits(store, range(manifest.n_parts))
    committed = np.isin(plan["part"].to_numpy(), np.fromiter(commits, np.int32, len(commits)))
    lengths = plan["n_tokens"].to_numpy()[committed]
    n_tokens = int(lengths.sum(dtype=np.int64))
    codec = StoreCodec.open(manifest, store)
    n_pending = manifest.n_parts - len(commits)
    n_bytes: Counter[str | None] = Counter()
    for commit in commits.values():
        for file, record in commit.files.items():
            n_bytes[array_of(file)] += record.bytes
    fields = tuple(
        FieldSummary(
            name=spec.name,
            dtype=spec.dtype,
            token_shape=spec.token_shape,
            description=spec.description,
            raw_bytes=spec.token_bytes * n_tokens,
            n_values=math.prod(spec.token_shape) * n_tokens,
            arrays=tuple(
                ArraySummary(stored.name, stored.logical_dtype, n_bytes[stored.name])
                for stored in codec.fields[spec.name].arrays
            ),
        )
        for spec in manifest.fields
    )
    return StoreSummary(
        path=store,
        manifest=manifest,
        fields=fields,
        n_pending_parts=n_pending,
        n_sequences=len(lengths),
        n_tokens=n_tokens,
        n_response_tokens=int(plan["n_response_tokens"].to_numpy()[committed].sum(dtype=np.int64)),
        lengths=length_histogram(lengths),
        has_target=any(exists(path) for path in (target_commit_path(store), store / TARGET_NAME / "config.json")),
        missing=missing_text(n_pending, manifest.n_parts, lacks_target(store, manifest)),
        unfinished=unfinished_fields(commits.values(), codec),
    )


def length_histogram(lengths: np.ndarray, n_bins: int = 16) -> LengthHistogram:
    """Count lengths (int [n_sequences], may be empty) in bins of equal, whole width."""
    longest = int(lengths.max(initial=0))
    width = max(1, -(-longest // n_bins))
    edges = np.arange(0, longest + width, width) if longest else np.array([0, 1])
    counts, _ = np.histogram(lengths, edges)
    return LengthHistogram(tuple(edges.tolist()), tuple(counts.tolist()))


def unfinished_fields(commits: Iterable[PartCommit], codec: StoreCodec) -> dict[str, int]:
    """Count the parts that have fields which store.json does not name yet: field -> parts."""
    found: Counter[str] = Counter()
    for commit in commits:
        arrays = {array for array in map(array_of, commit.files) if array is not None}
        steps = [name.split("/") for name in arrays - {array.name for array in codec.arrays}]
        found.update(sorted({"/".join(names[: 2 if names[0] == "hidden" else 1]) for names in steps}))
    return found
