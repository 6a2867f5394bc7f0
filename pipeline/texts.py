"""Keep tokens and masks beside a store's plan, so that chats are tokenised once and not at every start.

``texts.arrow`` is an Arrow file with a row for each sequence (sequence_id, source_row, tokens, response_mask), which
readers map into memory. Its metadata holds the origin of the tokens, the counts of rejected rows, and a sha256 of all
of it. A file of another origin, or a damaged one, is made again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..files import replacing
from ..moa.targets.template import parse_template_arguments
from ..storage.paths import StorePath
from ..storage.plan import TEXTS_SHA256, map_texts, texts_sha256
from ..storage.schema import TEXTS_NAME
from .config import ExtractConfig
from .dataset import ChatSource, Columns
from .sequences import Sequences

_ORIGIN = b"origin"
# Part of the origin; raise it when a change of the code makes equal chats give other tokens.
_VERSION = 1


def texts_origin(
    source: ChatSource, identities: Mapping[str, str], config: ExtractConfig, sizes: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return everything that decides the tokens of a dataset; None where only its rows tell."""
    dataset = source.origin()
    if dataset is None:
        return None
    return {
        "version": _VERSION,
        "dataset": dataset,
        "tokenizer": identities["tokenizer.sha256"],
        "template": identities["template.sha256"],
        "columns": Columns.parse(config.data.columns).describe(),
        "template_kwargs": parse_template_arguments(config.data.template_kwargs),
        "max_length": config.data.max_length,
        "max_sequences": config.data.max_sequences,
        "max_position_embeddings": sizes["max_position_embeddings"],
        "vocab_size": sizes["vocab_size"],
    }


def read_texts(store: StorePath, origin: Mapping[str, Any] | None) -> Sequences | None:
    """Return the sequences that a store keeps; None where there are none, or not those of this origin."""
    if origin is None:
        return None
    try:
        path = store / TEXTS_NAME
        if isinstance(path, Path) and (path.is_symlink() or not path.is_file()):
            return None
        table = map_texts(path)
        metadata = table.schema.metadata or {}
        if json.loads(metadata.get(_ORIGIN, b"null")) != origin:
            return None
        table.validate(full=True)
        return Sequences.from_arrow(table) if texts_sha256(table) == metadata.get(TEXTS_SHA256) else None
    except (pa.ArrowException, ValueError, OSError):
        return None


def keep_texts(store: StorePath, sequences: Sequences, origin: Mapping[str, Any] | None) -> Sequences:
    """Write sequences beside a store's plan; returns them mapped from that file, which frees this process's memory."""
    if origin is None:
        return sequences
    path = store / TEXTS_NAME
    if isinstance(path, Path):
        return write_texts(path, sequences, origin)
    with tempfile.TemporaryDirectory(prefix="moa-data-") as folder:
        kept = write_texts(Path(folder) / TEXTS_NAME, sequences, origin)
        path.backend.put(path.key, Path(folder) / TEXTS_NAME)
    return kept


def write_texts(path: Path, sequences: Sequences, origin: Mapping[str, Any] | None) -> Sequences:
    """Write sequences to an Arrow file; returns them mapped from it."""
    table = sequences.to_arrow()
    added = {_ORIGIN: json.dumps(origin, sort_keys=True), TEXTS_SHA256: texts_sha256(table)}
    table = table.replace_schema_metadata({**table.schema.metadata, **added})
    with replacing(path) as partial:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        with open(partial, "rb") as written:
            os.fsync(written.fileno())
    return Sequences.from_arrow(map_texts(path))
