"""Builds tiny stores with known content, without a target and without torch.

Equal recipes give equal bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import zarr

from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.paths import StorePath
from moa_data.storage.plan import plan_parts
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import Depth
from moa_data.storage.schema import (
    TOKENS,
    FieldSpec,
    StoreManifest,
    bfloat16_bits,
    hidden_field,
    kv_field,
    response_mask_field,
    to_float32,
    tokens_field,
)
from moa_data.storage.write.addition import StoreAddition
from moa_data.storage.write.part import PartWriter
from moa_data.storage.write.store import StoreWriter

AnyPath = TypeVar("AnyPath", bound=StorePath)
FIELDS = (tokens_field(), response_mask_field(), kv_field(4, 2, 8), hidden_field("last", 16))
LENGTHS = (70, 3, 200, 64, 1, 129, 90, 33, 150, 64, 65, 12)
Change = Callable[[str, dict[str, Any], np.ndarray], Any]
"""Changes what is written of a field for a row of the plan.

(field's name, row of the plan, the recipe's values) -> values or codes.
"""


def _as_they_are(name: str, row: dict[str, Any], values: np.ndarray) -> Any:
    return values


@dataclass(frozen=True)
class Recipe:
    """The inputs of a store. Equal recipes give equal bytes."""

    manifest: StoreManifest
    plan: pa.Table

    def values(self, field: FieldSpec, row: dict[str, Any]) -> np.ndarray:
        """Return a field's content for a row: [n_tokens, *token_shape] in the storage dtype."""
        seed = [row["source_row"], [spec.name for spec in self.manifest.fields].index(field.name)]
        rng = np.random.default_rng(seed)
        shape = (row["n_tokens"], *field.token_shape)
        if field.name == "response_mask":
            mask: np.ndarray = np.arange(row["n_tokens"]) < row["n_response_tokens"]
            return mask.astype(np.uint8)
        if field.dtype == "int32":
            return rng.integers(0, 100, shape, dtype=np.int32)
        return bfloat16_bits(rng.normal(size=shape).astype(np.float32))

    def fill(self, out: PartWriter, change: Change = _as_they_are) -> None:
        """Write the fields of a part without committing it."""
        for row in out.sequences.to_pylist():
            values = {
                spec.name: change(spec.name, row, self.values(spec, row))
                for spec in self.manifest.fields
            }
            for name, codec in out.codec.fields.items():
                given = values[name]
                if not codec.is_identity and isinstance(given, np.ndarray):
                    given = codec.encode(to_float32(given, codec.spec.dtype), values[TOKENS])
                out.write(name, row["first_token"], given)

    def write_part(
        self, writer: StoreWriter | StoreAddition, part: int, change: Change = _as_they_are
    ) -> None:
        """Write and commit one part."""
        with writer.part(part) as out:
            self.fill(out, change)
            out.commit()

    def write(
        self,
        path: AnyPath,
        change: Change = _as_they_are,
        files: Mapping[str, bytes] | None = None,
        shares: bool = False,
    ) -> AnyPath:
        """Write all missing parts of the store, alone or together with other writers."""
        with StoreWriter.create_or_resume(path, self.manifest, self.plan, files, shares) as writer:
            for part in writer.pending_parts():
                if writer.is_pending(part):
                    self.write_part(writer, part, change)
        return path

    def open(
        self, path: str | StorePath, shares: bool = False, depth: Depth = "sizes"
    ) -> StoreWriter:
        """Open a store for writing."""
        return StoreWriter.create_or_resume(
            path, self.manifest, self.plan, shares=shares, depth=depth
        )

    def write_bundled(self, path: Path) -> Path:
        """Write all missing parts, and a target bundle of one file."""
        self.write(path)
        with self.open(path) as writer:
            if not writer.has_target:
                with writer.target() as folder:
                    (folder / "config.json").write_text("{}" * 100)
        return path

    def with_manifest(self, **changes: Any) -> "Recipe":
        """Return a recipe with a changed manifest."""
        return replace(self, manifest=replace(self.manifest, **changes))


def make_recipe(
    lengths: tuple[int, ...] = LENGTHS,
    fields: tuple[FieldSpec, ...] = FIELDS,
    part_tokens: int = 400,
) -> Recipe:
    """Return a recipe for sequences with these lengths."""
    n = len(lengths)
    table = pa.table(
        {
            "sequence_id": [f"id-{row}" for row in range(n)],
            "source_row": pa.array(range(n), pa.int64()),
            "n_tokens": pa.array(lengths, pa.int32()),
            "n_response_tokens": pa.array([length // 2 for length in lengths], pa.int32()),
        }
    )
    plan = plan_parts(table, part_tokens, 64)
    manifest = StoreManifest(
        fields=fields,
        target={
            "n_layers": 4,
            "n_kv_heads": 2,
            "head_dim": 8,
            "vocab_size": 100,
            "architecture": "Tiny",
        },
        identities={
            "target.weights_sha256": "aa",
            "dataset.sha256": "bb",
            "tokenizer.sha256": "cc",
        },
        extraction={"max_length": 256, "dtype": "bfloat16"},
        n_sequences=n,
        n_parts=int(plan["part"].to_numpy().max()) + 1,
        n_tokens=sum(lengths),
        codec=StoreCodec("lossless", ()).describe(),
    )
    return Recipe(manifest, plan)


def read_tree(store: str | Path) -> dict[str, bytes]:
    """Return all files whose content is determined by equal inputs: relative path -> content."""
    path = Path(store)
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.name != "store.lock"
        and "runs" not in file.relative_to(path).parts
    }


def check_reads_equal(one: StorePath, other: StorePath) -> None:
    """Check that everything in two complete stores reads the same."""
    with ActivationStore(one, require_complete=True) as first, ActivationStore(other) as second:
        found, expected = (
            reader.read_batch(range(len(reader)), list(reader.fields)) for reader in (first, second)
        )
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def flip(path: Path, at: int | None = None) -> None:
    """Flip one bit of a file, by default in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def zarr_array(group: Path, name: str) -> zarr.Array[Any]:
    """Open an array of a group, such as a part, with zarr-python."""
    array = zarr.open_group(group, mode="r")[name]
    assert isinstance(array, zarr.Array)
    return array


def read_by_zarr(group: Path, name: str, first: int = 0, end: int | None = None) -> np.ndarray:
    """Read rows of an array of a group, such as a part, with zarr-python."""
    return np.asarray(zarr_array(group, name)[first:end])


def rows_in_store(store: Path, name: str, row: dict[str, Any]) -> tuple[int, int]:
    """Return the first row and the end of a sequence on axis 0 of a token array over all parts.

    Args:
        row: the sequence's row of the plan.
    """
    room = zarr_array(store / "parts", name).attrs["part_rows"]
    assert isinstance(room, int)
    first = row["part"] * room + int(row["first_token"])
    return first, first + int(row["n_tokens"])
