"""The plan and the texts of a store.

The plan gives each sequence its part and position. It is fixed before the first forward pass. Parts
are filled in source order, so that the first parts of a store are an unbiased sample of the
dataset. Inside a part, the sequences are sorted by length, so that batches of neighbours have
little padding.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import StoreDamaged
from ..files import MAX_WHOLE_NUMBER
from ..text import first_line
from .backend import MISSING, download, read_file
from .paths import StorePath

SEQUENCE_SCHEMA = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("source_row", pa.int64()),
        ("n_tokens", pa.int32()),
        ("n_response_tokens", pa.int32()),
    ]
)
"""Columns of the table of sequences to plan: content hash, row in the dataset, counts."""

PLAN_SCHEMA = SEQUENCE_SCHEMA.append(pa.field("part", pa.int32())).append(
    pa.field("first_token", pa.int64())
)
"""Columns of plan.parquet.

These are the columns of ``SEQUENCE_SCHEMA``, the part, and the first position of the sequence on
the token axis of the part.
"""

TEXTS_COLUMNS = ["sequence_id", "source_row", "tokens", "response_mask"]  # Columns of texts.arrow.

TEXTS_SHA256 = b"sha256"  # Key of ``texts_sha256`` in the metadata of texts.arrow.

MAX_ID_BYTES = 1024  # Readers refuse longer sequence ids.

# Readers refuse a longer plan.parquet. It has about 100 bytes for each of ten million sequences.
MAX_PLAN_BYTES = 1 << 30


def numbers(table: pa.Table, name: str) -> np.ndarray:
    """Return a numeric column without nulls, [n_rows]."""
    # This avoids to_numpy and pa.array: for both, pyarrow imports pandas, which adds half a second
    # to each command.
    chunks = [np.from_dlpack(chunk) for chunk in table[name].chunks if len(chunk)]
    return np.concatenate(chunks) if chunks else np.zeros(0, np.int64)


def rows_where(table: pa.Table, is_wanted: np.ndarray) -> pa.Table:
    """Return the rows of a table that a mask, [n_rows] bool, selects."""
    return table.take(column(np.flatnonzero(is_wanted)))


def column(values: np.ndarray) -> pa.Array:
    """Return numbers [n_rows] as a column without copying them."""
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)]
    )


def text_column(values: Iterable[str]) -> pa.Array:
    """Return texts, at most 2 GB in total, as a column."""
    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def plan_parts(table: pa.Table, part_tokens: int, alignment_tokens: int = 64) -> pa.Table:
    """Assign every sequence to a part and a position.

    Args:
        table: sequences with the columns of ``SEQUENCE_SCHEMA``.
        part_tokens: upper bound on the tokens of a part, with padding. A single sequence that is
            longer gets a part of its own.
        alignment_tokens: every sequence starts at a multiple of this number of tokens.

    Returns:
        The table with the columns of ``PLAN_SCHEMA``, ordered by part and position.
    """
    if part_tokens < 1 or alignment_tokens < 1:
        raise StoreDamaged(
            f"part_tokens ({part_tokens}) and alignment_tokens ({alignment_tokens}) must be at "
            "least 1."
        )
    _check_sequences(table)
    table = table.select(SEQUENCE_SCHEMA.names).cast(SEQUENCE_SCHEMA)
    table = table.take(pc.sort_indices(table, sort_keys=[("source_row", "ascending")]))
    lengths = numbers(table, "n_tokens").astype(np.int64)
    padded = -(-lengths // alignment_tokens) * alignment_tokens
    part_of = np.empty(len(lengths), np.int32)
    part = 0
    filled = 0
    for row, n_tokens in enumerate(padded.tolist()):
        if filled and filled + n_tokens > part_tokens:
            part = part + 1
            filled = 0
        part_of[row] = part
        filled += n_tokens
    # Sort by descending length: neighbours of similar length form batches with little padding.
    order = np.lexsort((np.arange(len(lengths)), -lengths, part_of))
    ends = np.cumsum(padded[order])
    starts = ends - padded[order]
    is_first = np.diff(part_of[order], prepend=-1) != 0
    part_starts = starts[is_first][part_of[order]]
    planned = table.take(column(order))
    planned = planned.append_column(PLAN_SCHEMA.field("part"), column(part_of[order]))
    return planned.append_column(PLAN_SCHEMA.field("first_token"), column(starts - part_starts))


def _check_sequences(table: pa.Table) -> None:
    missing = [name for name in SEQUENCE_SCHEMA.names if name not in table.column_names]
    if missing:
        raise StoreDamaged(
            f"The table of sequences lacks the columns {missing}; it has {table.column_names}."
        )
    if table.num_rows == 0:
        raise StoreDamaged(
            "The dataset gave no sequences to plan. Check the dataset and the counts of rejected "
            "rows."
        )
    if (
        any(table[name].null_count for name in table.column_names)
        or pc.min(table["n_tokens"]).as_py() < 1
    ):
        raise StoreDamaged("Every sequence needs an id, a row and counts, and at least one token.")
    if len(pc.unique(table["sequence_id"])) != table.num_rows:
        counts = pc.value_counts(table["sequence_id"].combine_chunks())
        repeated = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
        raise StoreDamaged(
            f"{len(repeated)} sequence ids appear twice, the first is {repeated[0]}. Drop "
            "duplicates before planning."
        )


def plan_counts(plan: pa.Table) -> dict[str, int]:
    """Return the counts that the manifest records of a plan.

    These are n_sequences, n_parts and n_tokens, without alignment padding.
    """
    return {
        "n_sequences": plan.num_rows,
        "n_parts": int(numbers(plan, "part").max()) + 1,
        "n_tokens": int(numbers(plan, "n_tokens").sum(dtype=np.int64)),
    }


def part_counts(plan: pa.Table, alignment_tokens: int) -> list[dict[str, int]]:
    """Return the counts that the commit of each part must contain.

    These are part, n_sequences, n_tokens and allocated_tokens; the last includes padding.
    """
    part = numbers(plan, "part")
    ends = numbers(plan, "first_token") + numbers(plan, "n_tokens")
    lengths = np.zeros(int(part.max()) + 1, np.int64)
    np.maximum.at(lengths, part, -(-ends // alignment_tokens) * alignment_tokens)
    n_sequences = np.bincount(part, minlength=len(lengths))
    n_tokens = np.bincount(part, numbers(plan, "n_tokens"), len(lengths)).astype(np.int64)
    names = ("part", "n_sequences", "n_tokens", "allocated_tokens")
    rows = zip(
        range(len(lengths)), n_sequences.tolist(), n_tokens.tolist(), lengths.tolist(), strict=True
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def check_plan(plan: pa.Table, alignment_tokens: int) -> None:
    """Check a plan.

    Its sequences must be valid and aligned, and must not overlap. Part numbers must have no gaps.

    Raises:
        StoreDamaged: the plan is not valid.
    """
    if not plan.schema.equals(PLAN_SCHEMA):
        raise StoreDamaged(
            f"The plan must have the columns {PLAN_SCHEMA.names} of plan_parts, got "
            f"{plan.schema.names}."
        )
    _check_sequences(plan)
    part = numbers(plan, "part").astype(np.int64)
    first = numbers(plan, "first_token")
    if first.min() < 0 or first.max() > MAX_WHOLE_NUMBER:
        raise StoreDamaged(
            f"first_token lies between {first.min()} and {first.max()}. Make the plan with "
            "plan_parts."
        )
    ends = first + numbers(plan, "n_tokens")
    same = part[1:] == part[:-1]
    wrong = first % alignment_tokens != 0
    wrong[0] |= part[0] != 0 or first[0] != 0
    wrong[1:] |= np.where(
        same, first[1:] < ends[:-1], (part[1:] != part[:-1] + 1) | (first[1:] != 0)
    )
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise StoreDamaged(
            f"Plan row {row} (part {part[row]}, first_token {first[row]}) overlaps its neighbour, "
            f"is not at a multiple of {alignment_tokens}, or skips a part. Make the plan with "
            "plan_parts."
        )


def plan_bytes(plan: pa.Table) -> bytes:
    """Return the content of plan.parquet.

    With one release of pyarrow, equal plans give equal bytes.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(plan.replace_schema_metadata(None).combine_chunks(), sink, compression="zstd")
    return bytes(sink.getvalue())


def read_plan(path: StorePath) -> pa.Table:
    """Read plan.parquet.

    Raises:
        StoreDamaged: the file is missing or not a valid plan.
        OSError: the file could not be read. This is not evidence of damage.
        MemoryError: there was not enough memory. This is not evidence of damage.
    """
    try:
        content = read_file(path, MAX_PLAN_BYTES)
    except MISSING as error:
        raise StoreDamaged(f"{path} is missing. Restore it.") from error
    except ValueError as error:
        raise StoreDamaged(
            f"{path} cannot be read as the plan of a store: {error}. Restore it."
        ) from error
    try:
        file = pq.ParquetFile(pa.BufferReader(content), read_dictionary=["sequence_id"])
        metadata = file.metadata
        # The sizes that the file claims are checked before anything is allocated. Ids are distinct,
        # so each row takes at least one byte of the file.
        columns = [
            metadata.row_group(i).column(k)
            for i in range(metadata.num_row_groups)
            for k in range(6)
        ]
        n_bytes = sum(
            max(column.total_uncompressed_size, column.total_compressed_size) for column in columns
        )
        if metadata.num_rows > len(content) or n_bytes > 2 * MAX_ID_BYTES * metadata.num_rows + (
            1 << 20
        ):
            raise ValueError(
                f"{metadata.num_rows} rows, {len(content)} bytes that unpack to {n_bytes}"
            )
        # A single thread is used: failing to start another one would look like a damaged file.
        plan = file.read(use_threads=False)
        if (
            max(
                pc.max(pc.binary_length(ids.dictionary)).as_py()
                for ids in plan["sequence_id"].chunks
            )
            > MAX_ID_BYTES
        ):
            raise ValueError("a sequence id is too long")
        plan = plan.set_column(0, "sequence_id", plan["sequence_id"].cast(pa.string()))
        plan.validate(full=True)
    # pyarrow's own MemoryError is also an ArrowException. It is not evidence of damage.
    except MemoryError:
        raise
    except (
        OSError,
        pa.ArrowException,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        reason = first_line(error)
        raise StoreDamaged(
            f"{path} cannot be read as the plan of a store: {reason}. Restore it."
        ) from error
    if not plan.schema.equals(PLAN_SCHEMA):
        raise StoreDamaged(
            f"{path} has the columns {plan.schema.names}, expected {PLAN_SCHEMA.names}."
        )
    return plan


def map_texts(path: StorePath) -> pa.Table:
    """Map texts.arrow into memory.

    A remote file is first copied to a temporary file. That file is deleted at once, and only the
    mapping keeps its content.
    """
    if isinstance(path, Path):
        with pa.memory_map(os.fspath(path)) as file:
            return pa.ipc.open_file(file).read_all()
    with tempfile.TemporaryDirectory(prefix="moa-data-") as folder:
        download(path.parent, Path(folder), [path.name])
        return map_texts(Path(folder) / path.name)


def texts_sha256(texts: pa.Table) -> bytes:
    """Return the sha256, in hex, of the counts, ids, rows, tokens and masks of texts.arrow.

    Raises:
        ValueError: the table is not a table of texts.
    """
    counts = json.loads((texts.schema.metadata or {}).get(b"counts", b"null"))
    if texts.column_names != TEXTS_COLUMNS or any(
        column.num_chunks != 1 for column in texts.columns
    ):
        raise ValueError(f"expected the columns {TEXTS_COLUMNS}, each in one chunk")
    digest = hashlib.sha256(json.dumps(counts, sort_keys=True).encode())
    # Each column has one chunk, as it was written. Combining chunks would copy them, and the table
    # may be as large as the memory.
    ids, rows, tokens, mask = (column.chunk(0) for column in texts.columns)
    for key in ids.to_pylist():
        digest.update(key.encode())
    for values in (rows, tokens.offsets, tokens.values, mask.values):
        digest.update(np.from_dlpack(values).data)
    return digest.hexdigest().encode()
