"""The plan: the part and position of each sequence, fixed before the first forward.

Parts are filled in source order, so that the first parts of a store are an unbiased sample of the dataset; inside a
part the sequences are sorted by length, so that batches of neighbours hold little padding.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import StoreDamaged
from ..files import MAX_WHOLE_NUMBER
from ..text import first_line
from .backend import MISSING, read_file
from .paths import StorePath

SEQUENCE_SCHEMA = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("source_row", pa.int64()),
        ("n_tokens", pa.int32()),
        ("n_response_tokens", pa.int32()),
    ]
)
"""Columns of the table that is planned: content hash, row in the dataset, counts."""

PLAN_SCHEMA = SEQUENCE_SCHEMA.append(pa.field("part", pa.int32())).append(pa.field("first_token", pa.int64()))
"""Columns of plan.parquet: the above, the part, and the sequence's first position on the part's token axis."""


MAX_ID_BYTES = 1024
"""Longest sequence id that is read."""

MAX_PLAN_BYTES = 1 << 30
"""Longest plan.parquet that is read: about 100 bytes for each of ten million sequences."""

_MAX_ROW_BYTES = MAX_ID_BYTES + 64
_PAGE_BYTES = 1 << 20
"""Bytes that columns may have beside their rows: headers, dictionaries of a few values."""


def plan_parts(table: pa.Table, part_tokens: int, alignment_tokens: int = 64) -> pa.Table:
    """Assign every sequence to a part and a position.

    Args:
        table: columns sequence_id (string), source_row (int64), n_tokens (int32), n_response_tokens (int32).
        part_tokens: aligned tokens of a part; one sequence longer than that makes a part of its own.
        alignment_tokens: every sequence starts at a multiple of this.

    Returns:
        The table with columns part (int32) and first_token (int64), ordered by them.

    Raises:
        StoreDamaged: a column is missing, there are no rows, a sequence has no tokens, or an id is repeated.
    """
    if part_tokens < 1 or alignment_tokens < 1:
        raise StoreDamaged(f"part_tokens ({part_tokens}) and alignment_tokens ({alignment_tokens}) must be at least 1.")
    _check_sequences(table)
    table = table.select(SEQUENCE_SCHEMA.names).cast(SEQUENCE_SCHEMA)
    table = table.take(pc.sort_indices(table, sort_keys=[("source_row", "ascending")]))
    lengths = table["n_tokens"].to_numpy().astype(np.int64)
    padded = -(-lengths // alignment_tokens) * alignment_tokens
    part_of = np.empty(len(lengths), np.int32)
    part, filled = 0, 0
    for row, n_tokens in enumerate(padded.tolist()):
        if filled and filled + n_tokens > part_tokens:
            part, filled = part + 1, 0
        part_of[row] = part
        filled += n_tokens
    order = np.lexsort((np.arange(len(lengths)), -lengths, part_of))
    ends = np.cumsum(padded[order])
    starts = ends - padded[order]
    is_first = np.diff(part_of[order], prepend=-1) != 0
    part_starts = starts[is_first][part_of[order]]
    planned = table.take(pa.array(order))
    planned = planned.append_column(PLAN_SCHEMA.field("part"), pa.array(part_of[order], pa.int32()))
    return planned.append_column(PLAN_SCHEMA.field("first_token"), pa.array(starts - part_starts, pa.int64()))


def _check_sequences(table: pa.Table) -> None:
    missing = [name for name in SEQUENCE_SCHEMA.names if name not in table.column_names]
    if missing:
        raise StoreDamaged(f"The table of sequences lacks the columns {missing}; it has {table.column_names}.")
    if table.num_rows == 0:
        raise StoreDamaged("There are no sequences to plan. Check the dataset and the counts of rejected rows.")
    if any(table[name].null_count for name in table.column_names) or pc.min(table["n_tokens"]).as_py() < 1:
        raise StoreDamaged("Every sequence needs an id, a row and counts, and at least one token.")
    if len(pc.unique(table["sequence_id"])) != table.num_rows:
        counts = pc.value_counts(table["sequence_id"].combine_chunks())
        repeated = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
        raise StoreDamaged(
            f"{len(repeated)} sequence ids appear twice, the first is {repeated[0]}. Drop duplicates before planning."
        )


def plan_counts(plan: pa.Table) -> dict[str, int]:
    """Count what a manifest says of a plan: n_sequences, n_parts and n_tokens (without alignment padding)."""
    return {
        "n_sequences": plan.num_rows,
        "n_parts": int(plan["part"].to_numpy().max()) + 1,
        "n_tokens": int(plan["n_tokens"].to_numpy().sum(dtype=np.int64)),
    }


def part_lengths(plan: pa.Table, alignment_tokens: int) -> np.ndarray:
    """Return the length of each part's token axis, padding included: int64 [n_parts]."""
    ends = plan["first_token"].to_numpy() + plan["n_tokens"].to_numpy()
    padded = -(-ends // alignment_tokens) * alignment_tokens
    lengths = np.zeros(int(plan["part"].to_numpy().max()) + 1, np.int64)
    np.maximum.at(lengths, plan["part"].to_numpy(), padded)
    return lengths


def part_counts(plan: pa.Table, alignment_tokens: int) -> list[dict[str, int]]:
    """Return what the commit of each part must say: part, n_sequences, n_tokens and allocated_tokens (with padding)."""
    part, lengths = plan["part"].to_numpy(), part_lengths(plan, alignment_tokens)
    n_sequences = np.bincount(part, minlength=len(lengths))
    n_tokens = np.bincount(part, plan["n_tokens"].to_numpy(), len(lengths)).astype(np.int64)
    names = ("part", "n_sequences", "n_tokens", "allocated_tokens")
    rows = zip(range(len(lengths)), n_sequences.tolist(), n_tokens.tolist(), lengths.tolist(), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def check_plan(plan: pa.Table, alignment_tokens: int) -> None:
    """Refuse a plan whose sequences overlap, are not aligned, or whose parts have holes in their numbers."""
    if not plan.schema.equals(PLAN_SCHEMA):
        raise StoreDamaged(
            f"The plan must have the columns {PLAN_SCHEMA.names} of plan_parts, got {plan.schema.names}."
        )
    _check_sequences(plan)
    part, first = plan["part"].to_numpy().astype(np.int64), plan["first_token"].to_numpy()
    if first.min() < 0 or first.max() > MAX_WHOLE_NUMBER:
        raise StoreDamaged(f"first_token lies between {first.min()} and {first.max()}. Make the plan with plan_parts.")
    ends = first + plan["n_tokens"].to_numpy()
    same = part[1:] == part[:-1]
    wrong = first % alignment_tokens != 0
    wrong[0] |= part[0] != 0 or first[0] != 0
    wrong[1:] |= np.where(same, first[1:] < ends[:-1], (part[1:] != part[:-1] + 1) | (first[1:] != 0))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise StoreDamaged(
            f"Plan row {row} (part {part[row]}, first_token {first[row]}) overlaps its neighbour, is not at a multiple "
            f"of {alignment_tokens}, or skips a part. Make the plan with plan_parts."
        )


def plan_bytes(plan: pa.Table) -> bytes:
    """Return the content of plan.parquet; equal plans give equal bytes with one release of pyarrow."""
    sink = pa.BufferOutputStream()
    pq.write_table(plan.replace_schema_metadata(None).combine_chunks(), sink, compression="zstd")
    return bytes(sink.getvalue())


def read_plan(path: StorePath) -> pa.Table:
    """Read plan.parquet; sizes that it claims are checked against the file's own before anything is allocated.

    Raises:
        StoreDamaged: it is missing, no plan, or has other columns.
        OSError: it cannot be read, which says nothing about its bytes; likewise MemoryError.
    """
    try:
        content = read_file(path, MAX_PLAN_BYTES)
    except MISSING as error:
        raise StoreDamaged(f"{path} is missing. Restore it.") from error
    except ValueError as error:
        raise StoreDamaged(f"{path} cannot be read as the plan of a store: {error}. Restore it.") from error
    try:
        file = pq.ParquetFile(pa.BufferReader(content), read_dictionary=["sequence_id"])
        # Ids differ, so that a row takes at least a byte; other columns may compress to almost nothing.
        if file.schema_arrow.names != PLAN_SCHEMA.names or file.metadata.num_rows > len(content):
            raise ValueError(f"columns {file.schema_arrow.names}, {file.metadata.num_rows} rows, {len(content)} bytes")
        if (n_bytes := _unpacked_bytes(file.metadata)) > _MAX_ROW_BYTES * file.metadata.num_rows + _PAGE_BYTES:
            raise ValueError(f"{n_bytes} bytes unpacked for {file.metadata.num_rows} rows")
        plan = file.read(use_threads=False)  # a thread that can't be started would look like a damaged file
        longest = max((_longest_text(chunk.dictionary) for chunk in plan["sequence_id"].chunks), default=0)
        if longest > MAX_ID_BYTES:
            raise ValueError(f"a sequence id has {longest} bytes")
        plan = plan.set_column(0, "sequence_id", plan["sequence_id"].cast(pa.string()))
        plan.validate(full=True)
    except MemoryError:  # of pyarrow too, whose class is also an ArrowException: it says nothing about the bytes
        raise
    except (OSError, pa.ArrowException, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = first_line(error)
        raise StoreDamaged(f"{path} cannot be read as the plan of a store: {reason}. Restore it.") from error
    if not plan.schema.equals(PLAN_SCHEMA):
        raise StoreDamaged(f"{path} has the columns {plan.schema.names}, expected {PLAN_SCHEMA.names}.")
    return plan


def _unpacked_bytes(metadata: pq.FileMetaData) -> int:
    """Sum the bytes of all pages before compression."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    return sum(max(column.total_uncompressed_size, column.total_compressed_size) for column in columns)


def _longest_text(values: pa.Array) -> int:
    return int(pc.max(pc.binary_length(values)).as_py() or 0)
