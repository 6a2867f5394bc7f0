"""What a store of made-up sequences begins with."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.plan import plan_counts, plan_parts
from moa_data.storage.schema import ALIGNMENT_TOKENS, FieldSpec, StoreManifest


def recipe(
    fields: tuple[FieldSpec, ...], lengths: Sequence[int], part_tokens: int = 1 << 40, codec: str = "lossless",
    target: dict[str, Any] | None = None,
) -> tuple[StoreManifest, pa.Table]:  # fmt: skip
    """Return manifest and plan of sequences of these lengths, of which all tokens but the first are answers."""
    columns = {
        "sequence_id": [f"ffffffff{row:056x}" for row in range(len(lengths))],
        "source_row": pa.array(range(len(lengths)), pa.int64()),
        "n_tokens": pa.array(lengths, pa.int32()),
        "n_response_tokens": pa.array([length - 1 for length in lengths], pa.int32()),
    }
    plan = plan_parts(pa.table(columns), part_tokens, ALIGNMENT_TOKENS)
    counts: dict[str, Any] = plan_counts(plan)
    manifest = StoreManifest(
        fields=fields, target=target or {}, identities={}, extraction={}, codec=StoreCodec(codec, fields).describe(),
        **counts,
    )  # fmt: skip
    return manifest, plan
