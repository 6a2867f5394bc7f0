"""Makes, checks, writes and reads plan.parquet, and reads texts.arrow.

A store is divided into parts, which are written and committed one by one. The plan assigns each
sequence to a part, and to a position in this part. The plan is made before the first forward pass
of the target. Parts are filled in the order of the rows of the dataset, so that the first parts of
a store are not biased towards short or long sequences. In a part, the sequences are sorted by
length, so that batches of consecutive sequences have little padding.

texts.arrow is a table of the tokens and response masks of all sequences. A response mask marks the
tokens that the assistant wrote.
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
from .backend import MISSING, backend_of, download
from .paths import StorePath
from .schema import MANIFEST_NAME, PLAN_NAME, StoreManifest

SEQUENCE_SCHEMA = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("source_row", pa.int64()),
        ("n_tokens", pa.int32()),
        ("n_response_tokens", pa.int32()),
    ]
)
"""Columns of the table from which a plan is made. The table has one row per sequence.

``sequence_id`` is a hash of the sequence's content. ``source_row`` is the index of the sequence's
row in the dataset. ``n_tokens`` is the sequence's number of tokens, and ``n_response_tokens`` is
its number of response tokens.
"""

PLAN_SCHEMA = SEQUENCE_SCHEMA.append(pa.field("part", pa.int32())).append(
    pa.field("first_token", pa.int64())
)
"""Columns of plan.parquet: the columns of ``SEQUENCE_SCHEMA`` and two more columns.

``part`` is the number of the part that contains the sequence. ``first_token`` is the position of
the sequence's first token on the token axis of this part.
"""

# Columns of the file texts.arrow, which has one row per sequence.
TEXTS_COLUMNS = ["sequence_id", "source_row", "tokens", "response_mask"]

# Key in the metadata of texts.arrow. Its value is the result of ``texts_sha256``.
TEXTS_SHA256 = b"sha256"

MAX_ID_BYTES = 1024  # Largest size of a sequence id in bytes. Readers refuse a longer id.

# Largest size of plan.parquet in bytes. Readers refuse a larger file. The limit is enough for ten
# million sequences with 100 bytes each.
MAX_PLAN_BYTES = 1 << 30


def numbers(table: pa.Table, name: str) -> np.ndarray:
    """Return a numeric column without nulls as a NumPy array [n_rows]."""
    # Do not use to_numpy or pa.array. Both make pyarrow import pandas, which takes half a second in
    # every command.
    chunks = [np.from_dlpack(chunk) for chunk in table[name].chunks if len(chunk)]
    return np.concatenate(chunks) if chunks else np.zeros(0, np.int64)


def row_numbers(table: pa.Table) -> dict[str, int]:
    """Return a mapping from the id of each sequence to the index of its row in the table."""
    return {key: row for row, key in enumerate(table["sequence_id"].to_pylist())}


def rows_where(table: pa.Table, is_wanted: np.ndarray) -> pa.Table:
    """Return the rows i of a table for which ``is_wanted[i]`` is true."""
    return table.take(column(np.flatnonzero(is_wanted)))


def column(values: np.ndarray) -> pa.Array:
    """Convert a NumPy array of numbers, [n_rows], to a pyarrow column without copying it."""
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)]
    )


def text_column(values: Iterable[str]) -> pa.Array:
    """Convert strings to a pyarrow column. All strings together must not exceed 2 GB."""
    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def plan_parts(table: pa.Table, part_tokens: int, alignment_tokens: int = 64) -> pa.Table:
    """Assign every sequence to a part and a position.

    Args:
        table: sequences with the columns of ``SEQUENCE_SCHEMA``.
        part_tokens: upper bound on the number of tokens of a part, including padding. If a sequence
            is longer than this bound, it is the only sequence of its part.
        alignment_tokens: the position of every sequence is a multiple of this number.

    Returns:
        The table with the columns of ``PLAN_SCHEMA``, ordered by part and position.
    """
    if part_tokens < 1 or alignment_tokens < 1:
        raise StoreDamaged(
            f"part_tokens is {part_tokens}, and alignment_tokens is {alignment_tokens}. Expected "
            "at least 1 for both."
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
    # Sort the sequences of each part by descending length, so that batches of consecutive sequences
    # have little padding.
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
            f"The table of sequences lacks the columns {missing}; it has only {table.column_names}."
        )
    if table.num_rows == 0:
        raise StoreDamaged(
            "No row of the dataset can be used, so there are no sequences to plan. Check the "
            "dataset and the counts of rejected rows."
        )
    if (
        any(table[name].null_count for name in table.column_names)
        or pc.min(table["n_tokens"]).as_py() < 1
    ):
        raise StoreDamaged(
            "The table of sequences has empty values, or sequences without tokens. Every sequence "
            "needs an id, a source row, its numbers of tokens, and at least one token."
        )
    if len(pc.unique(table["sequence_id"])) != table.num_rows:
        counts = pc.value_counts(table["sequence_id"].combine_chunks())
        repeated = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
        raise StoreDamaged(
            f"{len(repeated)} sequence ids appear more than once, the first is {repeated[0]}. Drop "
            "duplicate sequences before planning."
        )


def plan_counts(plan: pa.Table) -> dict[str, int]:
    """Return the counts of a plan. The manifest (store.json) must contain the same counts.

    The counts are n_sequences, n_parts and n_tokens (without alignment padding).
    """
    return {
        "n_sequences": plan.num_rows,
        "n_parts": int(numbers(plan, "part").max()) + 1,
        "n_tokens": int(numbers(plan, "n_tokens").sum(dtype=np.int64)),
    }


def part_counts(plan: pa.Table, alignment_tokens: int) -> list[dict[str, int]]:
    """Count the sequences and tokens of each part. The part's commit must contain the same counts.

    Returns:
        One item for each part, with the keys ``part`` (the number of the part), ``n_sequences``,
        ``n_tokens`` and ``allocated_tokens`` (the number of tokens including padding).
    """
    part = numbers(plan, "part")
    ends = numbers(plan, "first_token") + numbers(plan, "n_tokens")
    lengths = np.zeros(int(part.max()) + 1, np.int64)
    np.maximum.at(lengths, part, -(-ends // alignment_tokens) * alignment_tokens)
    n_sequences = np.bincount(part, minlength=len(lengths))
    n_tokens = np.bincount(part, numbers(plan, "n_tokens"), len(lengths)).astype(np.int64)
    counts = {
        "part": column(np.arange(len(lengths))),
        "n_sequences": column(n_sequences),
        "n_tokens": column(n_tokens),
        "allocated_tokens": column(lengths),
    }
    rows: list[dict[str, int]] = pa.table(counts).to_pylist()
    return rows


def check_plan(plan: pa.Table, alignment_tokens: int) -> None:
    """Check that a plan is valid.

    The sequences must not overlap, and must start at multiples of ``alignment_tokens``. The numbers
    of the parts must start at 0 and have no gaps. Every sequence must have a unique id and at least
    one token.

    Raises:
        StoreDamaged: the plan is not valid.
    """
    if not plan.schema.equals(PLAN_SCHEMA):
        raise StoreDamaged(
            f"The plan must have the columns {PLAN_SCHEMA.names}, but it has {plan.schema.names}. "
            "Make the plan with plan_parts."
        )
    _check_sequences(plan)
    part = numbers(plan, "part").astype(np.int64)
    first = numbers(plan, "first_token")
    if first.min() < 0 or first.max() > MAX_WHOLE_NUMBER:
        raise StoreDamaged(
            f"The plan has values of first_token from {first.min()} to {first.max()}, expected 0 "
            f"to {MAX_WHOLE_NUMBER}. Make the plan with plan_parts, or restore plan.parquet from a "
            "copy."
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
            f"Plan row {row} (part {part[row]}, first_token {first[row]}) has a wrong position: it "
            f"overlaps the row before it, does not start at a multiple of {alignment_tokens} "
            "tokens, or skips a part. Make the plan with plan_parts, or restore plan.parquet from "
            "a copy."
        )


def check_plan_of(store: StorePath, manifest: StoreManifest, plan: pa.Table) -> None:
    """Check that the plan of a store is valid and has the counts that the manifest contains.

    Raises:
        StoreDamaged: the plan is not valid, or a count differs.
    """
    check_plan(plan, manifest.alignment_tokens)
    differences: list[str] = []
    for name, counted in plan_counts(plan).items():
        if (expected := getattr(manifest, name)) != counted:
            differences.append(f"has {name} {counted}, but {MANIFEST_NAME} says {expected}")
    if differences:
        raise StoreDamaged(
            f"{store / PLAN_NAME} {'; it '.join(differences)}. Restore both files from the same "
            "copy."
        )


def plan_bytes(plan: pa.Table) -> bytes:
    """Return the content of plan.parquet for a plan.

    Equal plans give equal bytes, if the release of pyarrow is also the same.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(plan.replace_schema_metadata(None).combine_chunks(), sink, compression="zstd")
    return bytes(sink.getvalue())


def _declared_bytes(metadata: pq.FileMetaData) -> int:
    """Return the total size of the columns of a plan.parquet in bytes, from its metadata."""
    n_bytes = 0
    for group in range(metadata.num_row_groups):
        for index in range(6):
            column = metadata.row_group(group).column(index)
            n_bytes += max(column.total_uncompressed_size, column.total_compressed_size)
    return n_bytes


def read_plan(path: StorePath) -> pa.Table:
    """Read plan.parquet.

    Raises:
        StoreDamaged: the file is missing or not a valid plan.
        OSError: the file could not be read. It may be undamaged.
        MemoryError: there was not enough memory. The file may be undamaged.
    """
    try:
        content = backend_of(path).read(MAX_PLAN_BYTES)
    except MISSING as error:
        raise StoreDamaged(f"{path} is missing. Restore it from a copy.") from error
    except ValueError as error:
        raise StoreDamaged(
            f"{path} cannot be read as the plan of a store ({error}). Restore the file from a copy."
        ) from error
    try:
        file = pq.ParquetFile(pa.BufferReader(content), read_dictionary=["sequence_id"])
        metadata = file.metadata
        # Check the sizes in the file's metadata before memory is allocated. A valid file has at
        # least one byte per row, because each row has a different sequence id.
        n_bytes = _declared_bytes(metadata)
        if metadata.num_rows > len(content) or n_bytes > 2 * MAX_ID_BYTES * metadata.num_rows + (
            1 << 20
        ):
            raise ValueError(
                f"it declares {metadata.num_rows} rows and {n_bytes} decompressed bytes, which is "
                f"too much for a file of {len(content)} bytes"
            )
        # Read on one thread. If pyarrow could not start another thread, the error would look like
        # a damaged file.
        plan = file.read(use_threads=False)
        longest_ids: list[int] = []
        for ids in plan["sequence_id"].chunks:
            longest_ids.append(pc.max(pc.binary_length(ids.dictionary)).as_py())
        if max(longest_ids) > MAX_ID_BYTES:
            raise ValueError(f"it has a sequence id of more than {MAX_ID_BYTES} bytes")
        plan = plan.set_column(0, "sequence_id", plan["sequence_id"].cast(pa.string()))
        plan.validate(full=True)
    # Too little memory does not mean that the file is damaged. pyarrow's memory error is both a
    # MemoryError and an ArrowException, so handle it before ArrowException.
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
            f"{path} cannot be read as the plan of a store ({reason}). Restore the file from a "
            "copy."
        ) from error
    if not plan.schema.equals(PLAN_SCHEMA):
        raise StoreDamaged(
            f"{path} has the columns {plan.schema.names}, expected {PLAN_SCHEMA.names}. Restore "
            "the file from a copy."
        )
    return plan


def map_texts(path: StorePath) -> pa.Table:
    """Map texts.arrow into memory.

    A remote file is first downloaded to a temporary file. The temporary file is mapped and then
    deleted. Its content stays available until the mapping is freed.
    """
    if isinstance(path, Path):
        with pa.memory_map(os.fspath(path)) as file:
            return pa.ipc.open_file(file).read_all()
    with tempfile.TemporaryDirectory(prefix="moa-data-") as folder:
        download(path.parent, Path(folder), [path.name])
        return map_texts(Path(folder) / path.name)


def texts_sha256(texts: pa.Table) -> bytes:
    """Return the sha256, in hex, of all columns of texts.arrow and of the counts in its metadata.

    Raises:
        ValueError: the table does not have the columns of texts.arrow.
    """
    counts = json.loads((texts.schema.metadata or {}).get(b"counts", b"null"))
    if texts.column_names != TEXTS_COLUMNS or any(
        column.num_chunks != 1 for column in texts.columns
    ):
        raise ValueError(f"expected the columns {TEXTS_COLUMNS}, each in one chunk")
    digest = hashlib.sha256(json.dumps(counts, sort_keys=True).encode())
    # Each column has one chunk. Use this chunk directly. `combine_chunks` would copy the table,
    # which may be as large as the memory.
    ids, rows, tokens, mask = (column.chunk(0) for column in texts.columns)
    for key in ids.to_pylist():
        digest.update(key.encode())
    for values in (rows, tokens.offsets, tokens.values, mask.values):
        digest.update(np.from_dlpack(values).data)
    return digest.hexdigest().encode()
