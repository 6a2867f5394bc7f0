"""What a store holds and how it lies on disk (schema version 2).

::

    STORE/
      store.json                       manifest: schema version, fields, conventions, codec, identities, counts
      plan.parquet                     one row per sequence, in the order in which sequences lie in the parts
      texts.arrow                      tokens and masks of all sequences, for `extract` to continue (may be absent)
      target/                          config, tokenizer and frozen weights that training needs
      codec/basis.safetensors          what the codec has learned (transform codecs only)
      parts/                           one Zarr v3 group; on the token axis of each array the parts follow each other
        tokens                         int32    [token]
        response_mask                  uint8    [token]                                    1 = written by the assistant
        kv                             bfloat16 [token, layer, kv_head, 2, head_dim]       0 = key after RoPE, 1 = value
        kv/full_attention              in place of kv where layers do not cache alike: the layers of one kind
        hidden/last                    bfloat16 [token, width]                             after the final norm
        hidden/layer_6                 bfloat16 [token, width]                             output of decoder layer 6
      commits/part-00000.json          written last, atomically: counts, and bytes and crc32 of every file of the part
      commits/target.json              the same for target/
      commits/store.json               the same for store.json, plan.parquet and the zarr.json files of parts/
      README.md                        dataset card: what, how made, conventions, licences, how to load it
      runs/20250131T120000.000000Z.json   one per run: command, versions, timings (nothing that shapes the data)
      store.lock                       locked (flock) by the processes that write
      publish.lock                     while several write: locked, byte by byte, while a part is renamed and committed

A part whose commit is missing does not exist for a reader. ``runs/`` and ``store.lock`` aside, equal inputs give equal
bytes in every file. ``docs/format.md`` explains the format to other programs.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from ..errors import SchemaVersionError, StoreDamaged
from ..files import MAX_WHOLE_NUMBER, PARTIAL_SUFFIX, parse_object, relative_name
from .paths import AnyPath

MANIFEST_NAME = "store.json"
PLAN_NAME = "plan.parquet"
LOCK_NAME = "store.lock"
PUBLISH_NAME = "publish.lock"
TARGET_NAME = "target"
PARTS_NAME = "parts"
ZARR_NAME = "zarr.json"
COMMITS_NAME = "commits"
RUNS_NAME = "runs"
# in a run's record: weights_sha256 of the model that wrote the chats' answers, or null
ANSWERS_BY = "answers_by"
CODEC_NAME = "codec"
CARD_NAME = "README.md"
TEXTS_NAME = "texts.arrow"
_DOCUMENTS = (MANIFEST_NAME, PLAN_NAME, LOCK_NAME, PUBLISH_NAME, CARD_NAME, TEXTS_NAME)
KNOWN_NAMES = frozenset((*_DOCUMENTS, TARGET_NAME, PARTS_NAME, COMMITS_NAME, RUNS_NAME, CODEC_NAME))
"""Every name that a store's folder may hold."""


def is_known(name: str) -> bool:
    """Whether a store's folder may hold a name, also while that file is written (``plan.parquet.5f3a9c01.partial``)."""
    if not name.endswith(PARTIAL_SUFFIX):
        return name in KNOWN_NAMES
    stem = name.removesuffix(PARTIAL_SUFFIX)
    return stem in KNOWN_NAMES or stem.rpartition(".")[0] in KNOWN_NAMES


def commit_path(store: AnyPath, part: int) -> AnyPath:
    """Return the path of a part's commit."""
    return below(store, COMMITS_NAME, f"part-{part:05d}.json")


def target_commit_path(store: AnyPath) -> AnyPath:
    """Return the path of the target bundle's commit."""
    return below(store, COMMITS_NAME, "target.json")


def manifest_commit_path(store: AnyPath) -> AnyPath:
    """Return the path of the commit of store.json and plan.parquet."""
    return below(store, COMMITS_NAME, MANIFEST_NAME)


def publication_path(commit: AnyPath) -> AnyPath:
    """Return the path of the record of what a writer is publishing in a bucket, until the commit is made."""
    return below(cast(AnyPath, commit.parent), f"{commit.name}.partial")


def below(folder: AnyPath, *names: str) -> AnyPath:
    """Return a path below a folder, of the folder's own kind."""
    return cast(AnyPath, folder / "/".join(names))


ALIGNMENT_TOKENS = 64
"""Every sequence of a new store starts at a multiple of this, so that rows of 64 tokens belong to one sequence."""

SCHEMA_VERSION = 2
FORMAT_NAME = "moa-data activation store"
"""Value of ``format`` in store.json, which tells a store from any other folder with such a file."""

CONVENTIONS: dict[str, str] = {
    "kv_keys": "after RoPE, positions counted from 0 at the first token of each sequence",
    "kv_order": "per kv head the key, then the value",
    "hidden_last": "after the final norm, the input of the LM head",
    "hidden_layer_k": "output of decoder layer k (0-based), before any final norm",
    "response_mask": "1 on tokens written by the assistant, its end-of-turn token included",
    "padding": "zero between the end of a sequence and the next multiple of alignment_tokens",
}
"""What the numbers mean in every schema version so far. Every manifest carries these; a reader refuses other values."""
ROTATED_IN_SOME: dict[str, str] = {
    "kv_keys": "after RoPE in layers that rotate keys, as they are in the others; positions counted from 0 at the "
    "first token of each sequence",
}
"""What takes the place of :data:`CONVENTIONS` where some layers of the target do without RoPE."""
LATENTS: dict[str, str] = {
    "kv_keys": "the latent after its norm, which has no positions",
    "kv_order": "the latent, then the part of the key that all heads share, after RoPE, positions counted from 0 at "
    "the first token of each sequence",
}
"""What takes the place of :data:`CONVENTIONS` where layers cache latents."""

MAX_LAYERS = 1 << 12
# most values that one token of a field may have; the largest models have about a million
MAX_TOKEN_VALUES = 1 << 26

Array = Any  # a NumPy array or a torch tensor; what takes either has one definition for both

# the field of the token ids, of which some codecs need rows to decode another field
TOKENS = "tokens"
# the field of the keys and values of all layers; where layers are not alike, those of some are
# below it
KV = "kv"
HIDDEN_LAST = "hidden/last"  # the field of the states after the final norm

TOKEN_AXIS = "token"
LAYER_AXIS = "layer"
BLOCK_AXIS = "block"  # name of axis 0 of a stored array that has one row for several tokens
# name of axis 1 of a stored array of which each index is read apart, in inner chunks of its own
PIECE_AXIS = "piece"
KV_AXES = (LAYER_AXIS, "kv_head", "key_value", "head_dim")  # axes of one token's keys and values
UNEQUAL_KV_AXES = (LAYER_AXIS, "kv_head", "width")
"""The same where keys and values are of unequal widths, and stand one after the other on the last axis."""


@dataclass(frozen=True)
class FieldSpec:
    """One field of a store."""

    name: str  # path inside ``parts/``, e.g. ``"kv"`` or ``"hidden/last"``
    dtype: str  # logical dtype, e.g. ``"bfloat16"`` (see ``STORAGE_DTYPES``)
    token_shape: tuple[int, ...]  # shape of one token's values; ``()`` for one number per token
    axes: tuple[str, ...]  # names of all axes, the first of them ``"token"``
    description: str = ""
    # of the target, on the layer axis of keys and values; None for all
    layers: tuple[int, ...] | None = None
    # How much of the last axis is the key, where the value after it is of another width; else None.
    key_width: int | None = None

    def __post_init__(self) -> None:
        relative_name(self.name)
        object.__setattr__(self, "token_shape", tuple(int(size) for size in self.token_shape))
        object.__setattr__(self, "axes", tuple(self.axes))
        storage_dtype(self.dtype)
        if (
            not self.axes
            or self.axes[0] != TOKEN_AXIS
            or len(self.axes) != 1 + len(self.token_shape)
        ):
            raise ValueError(
                f"Field {self.name!r}: axes {self.axes} must be 'token' and one name for each axis of "
                f"token_shape {self.token_shape}."
            )
        if math.prod(self.token_shape) > MAX_TOKEN_VALUES:
            raise ValueError(
                f"Field {self.name!r} has {math.prod(self.token_shape)} values per token."
            )
        if any(size < 1 for size in self.token_shape):
            raise ValueError(
                f"Field {self.name!r}: every size in token_shape {self.token_shape} must be at least 1."
            )
        fits = self.layers is None or (
            self.layer_axis == 1 and len(self.layers) == self.token_shape[0]
        )
        has_width = self.axes[1:] == UNEQUAL_KV_AXES
        fits &= has_width == (self.key_width is not None)
        if not fits or (
            self.key_width is not None and not 0 < self.key_width < self.token_shape[-1]
        ):
            raise ValueError(
                f"Field {self.name!r}: layers or key_width do not fit token_shape {self.token_shape}."
            )

    @property
    def storage_dtype(self) -> np.dtype:
        """NumPy dtype on disk (uint16 for bfloat16)."""
        return storage_dtype(self.dtype)

    @property
    def token_bytes(self) -> int:
        """Raw bytes of one token's values."""
        return int(np.prod(self.token_shape, dtype=np.int64)) * self.storage_dtype.itemsize

    @property
    def layer_axis(self) -> int | None:
        """Index of the layer axis in the whole array, or None."""
        return self.axes.index(LAYER_AXIS) if LAYER_AXIS in self.axes else None

    @property
    def layer_numbers(self) -> Sequence[int]:
        """The target's layers that the layer axis has, of a field with one."""
        return range(self.token_shape[0]) if self.layers is None else self.layers


_Count = Annotated[int, Field(ge=1, le=MAX_WHOLE_NUMBER)]
_Natural = Annotated[int, Field(ge=0, le=MAX_WHOLE_NUMBER)]
_Dtype = Literal["bfloat16", "float16", "float32"]  # of activations
_EXACT = ConfigDict(strict=True, extra="forbid")
# stores of other programs may have other keys besides
_WITH_OTHERS = ConfigDict(strict=True, extra="allow")


class _FieldDocument(BaseModel):
    """A field in store.json; see :class:`FieldSpec`."""

    model_config = _EXACT

    name: str
    dtype: str
    token_shape: Annotated[tuple[_Count, ...], Field(max_length=16)]
    axes: tuple[str, ...]
    description: str
    # Left out where they are None.
    layers: Annotated[tuple[_Natural, ...], Field(max_length=MAX_LAYERS)] | None = None
    key_width: _Count | None = None


class _Sizes(TypedDict, total=False):
    """The sizes of a target that readers compute with."""

    __pydantic_config__ = _WITH_OTHERS  # type: ignore[misc]  # mypy wants nothing but keys

    n_layers: _Count
    n_heads: _Count
    n_kv_heads: _Count
    head_dim: _Count
    hidden_size: _Count
    vocab_size: _Count
    max_position_embeddings: _Count


class _Extraction(TypedDict, total=False):
    """The settings of an extraction that are computed with."""

    __pydantic_config__ = _WITH_OTHERS  # type: ignore[misc]

    batch_tokens: _Count
    max_length: _Count
    part_tokens: _Count
    target_layers: _Natural
    compute_dtype: _Dtype
    dtype: _Dtype


class _Codec(TypedDict):
    """What every codec says of itself."""

    __pydantic_config__ = _WITH_OTHERS  # type: ignore[misc]

    name: str


class _ManifestDocument(BaseModel):
    """The content of store.json; see :class:`StoreManifest`."""

    model_config = _EXACT

    format: str
    fields: tuple[_FieldDocument, ...]
    target: _Sizes
    identities: dict[str, str]
    extraction: _Extraction
    n_sequences: _Count
    n_parts: _Count
    n_tokens: _Count
    codec: _Codec
    conventions: dict[str, str]
    alignment_tokens: _Count
    schema_version: int


@dataclass(frozen=True)
class StoredArray:
    """One Zarr array of a store. Its rows count tokens, or blocks of tokens."""

    name: str  # path inside ``parts/``, e.g. ``"kv"`` or ``"kv/key_codes"``
    dtype: str  # NumPy dtype name on disk, e.g. ``"uint16"``
    row_shape: tuple[int, ...]
    axes: tuple[str, ...]  # names of all axes, ``"token"`` or ``"block"`` first
    block_tokens: int = 1  # tokens that one row stands for; divides the alignment of sequences
    layer_axis: int | None = None  # index of the layer axis in the whole array (1), or None
    # what the numbers mean where it is not ``dtype`` (``"bfloat16"`` in uint16)
    logical_dtype: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "logical_dtype", self.logical_dtype or self.dtype)

    @property
    def storage_dtype(self) -> np.dtype:
        """NumPy dtype on disk, little endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def row_bytes(self) -> int:
        """Raw bytes of one row."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.storage_dtype.itemsize

    def n_rows(self, n_tokens: int) -> int:
        """Count the rows that cover ``n_tokens`` tokens from the start of a block on."""
        return -(-n_tokens // self.block_tokens)


def tokens_field() -> FieldSpec:
    """Return the field of the token ids, int32 [token]."""
    return FieldSpec(TOKENS, "int32", (), (TOKEN_AXIS,), "token ids of the target's tokenizer")


def response_mask_field() -> FieldSpec:
    """Return the field of the response mask, uint8 [token]."""
    return FieldSpec(
        "response_mask", "uint8", (), (TOKEN_AXIS,), "1 on tokens written by the assistant, else 0"
    )


def kv_field(
    n_layers: int, n_kv_heads: int, head_dim: int, dtype: str = "bfloat16", is_rotated: bool = True
) -> FieldSpec:
    """Return the field of keys (after RoPE) and values of all layers, [token, layer, kv_head, 2, head_dim].

    ``is_rotated``: whether all of the layers rotate their keys.
    """
    meaning = f"attention keys{' after RoPE' * is_rotated} (0) and values (1) of every layer"
    return FieldSpec(
        KV, dtype, (n_layers, n_kv_heads, 2, head_dim), (TOKEN_AXIS, *KV_AXES), meaning
    )


def kv_group_field(
    name: str,
    layers: Sequence[int],
    n_kv_heads: int,
    key_width: int,
    value_width: int,
    dtype: str = "bfloat16",
) -> FieldSpec:
    """Return the field of the keys and values of some layers, [token, layer, kv_head, 2, head_dim].

    Where they are of unequal widths it is [token, layer, kv_head, key_width + value_width].
    """
    of_layers = f"what layers {', '.join(map(str, layers))} cache"
    meaning = f"{of_layers}: the key (0) and the value (1) of each head, keys after RoPE"
    if key_width == value_width:
        equal = kv_field(len(layers), n_kv_heads, key_width, dtype)
        return replace(equal, name=name, layers=tuple(layers), description=meaning)
    meaning = (
        f"{of_layers}: {key_width} numbers as the key of each head, then {value_width} as its value"
    )
    shape = (len(layers), n_kv_heads, key_width + value_width)
    axes = (TOKEN_AXIS, *UNEQUAL_KV_AXES)
    return FieldSpec(name, dtype, shape, axes, meaning, tuple(layers), key_width)


def layer_field(layer: int) -> str:
    """Return the name of the field of a decoder layer's output."""
    return f"hidden/layer_{layer}"


def hidden_field(name: str, width: int, dtype: str = "bfloat16") -> FieldSpec:
    """Return the field ``hidden/<name>``, [token, width]; ``name`` is ``"last"`` or ``"layer_<k>"``."""
    meaning = (
        "hidden state after the final norm"
        if name == "last"
        else f"hidden state, output of decoder {name}"
    )
    return FieldSpec(f"hidden/{name}", dtype, (width,), (TOKEN_AXIS, "width"), meaning)


@dataclass(frozen=True)
class StoreManifest:
    """Everything that shapes the data of a store, as recorded in ``store.json``."""

    fields: tuple[FieldSpec, ...]
    # the target's sizes (``n_layers``, ``hidden_size``, ...) and architecture
    target: Mapping[str, Any]
    # hashes of target, tokenizer, template, dataset: ``"target.weights_sha256"``, ...
    identities: Mapping[str, str]
    # what else shapes the data, e.g. max_length, compute dtype, truncation
    extraction: Mapping[str, Any]
    n_sequences: int
    n_parts: int
    n_tokens: int  # planned tokens without alignment padding
    codec: Mapping[str, Any]  # ``StoreCodec.describe()``
    # besides those of the schema, which are added
    conventions: Mapping[str, str] = field(default_factory=dict)
    alignment_tokens: int = ALIGNMENT_TOKENS  # every sequence starts at a multiple of this
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        for key, value in CONVENTIONS.items():
            if self.conventions.get(key, value) not in (
                value,
                ROTATED_IN_SOME.get(key),
                LATENTS.get(key),
            ):
                raise StoreDamaged(
                    f"Convention {key!r} is {self.conventions[key]!r}, but schema version {self.schema_version} means "
                    f"{value!r}. Read this store with the release that wrote it."
                )
        object.__setattr__(self, "conventions", {**CONVENTIONS, **self.conventions})
        if self.n_parts > max(1, self.n_sequences):
            raise StoreDamaged(
                f"The manifest has {self.n_parts} parts for {self.n_sequences} sequences; each part holds at least one."
            )
        names = [spec.name for spec in self.fields]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise StoreDamaged(f"Fields appear twice: {', '.join(repeated)}. Name each field once.")

    def to_json(self) -> str:
        """Return the text of store.json: sorted keys, two spaces, ending in a newline."""
        document = {"format": FORMAT_NAME} | asdict(self)
        for spec in document["fields"]:  # what most stores do not have
            for name in ("layers", "key_width"):
                if spec[name] is None:
                    del spec[name]
        return (
            json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
            + "\n"
        )

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "store.json") -> "StoreManifest":
        """Read the text of store.json; raises SchemaVersionError or StoreDamaged."""
        try:
            document = parse_object(text)
        except ValueError as error:
            raise StoreDamaged(
                f"{source} is not valid JSON ({error}). Restore the file from a copy."
            ) from error
        if document.get("format") != FORMAT_NAME:
            raise StoreDamaged(
                f"{source} is not the manifest of an activation store (no format {FORMAT_NAME!r})."
            )
        version = document.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise SchemaVersionError(
                f"{source} has schema version {version!r}; this release reads version {SCHEMA_VERSION}. "
                f"Install a release of moa-data that reads version {version!r}, or extract again with this one."
            )
        try:
            checked = _ManifestDocument.model_validate_json(text)
            specs = tuple(FieldSpec(**spec.model_dump()) for spec in checked.fields)
            del document["format"]
            return cls(**(document | {"fields": specs}))
        except ValidationError as error:
            raise StoreDamaged(
                f"{source} does not fit its schema version: {first_problem(error)}."
            ) from error
        except ValueError as error:
            if isinstance(error, StoreDamaged):
                raise
            raise StoreDamaged(f"{source} holds a value of the wrong kind: {error}") from error


def first_problem(error: ValidationError) -> str:
    """Return the first thing that is wrong in a document, and where, in one line."""
    problem = error.errors()[0]
    return ": ".join([".".join(map(str, problem["loc"])), problem["msg"]]).removeprefix(": ")


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested JSON object as dotted key -> leaf; the items of ``fields`` are keyed by their names."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        path = f"{prefix}{key}"
        if key == "fields" and not prefix:
            value = {spec["name"]: spec for spec in value}
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{path}.")
        else:
            flat[path] = value
    return flat


# Logical dtypes say what the numbers mean, storage dtypes what NumPy and Zarr hold. They differ
# only for bfloat16,
# which neither has: its bits are stored as uint16, unchanged, in an array with the attribute
# "logical_dtype".

STORAGE_DTYPES = {
    "bfloat16": "uint16",
    "float16": "float16",
    "float32": "float32",
    "int32": "int32",
    "uint8": "uint8",
}
"""Logical dtype name -> NumPy dtype name on disk (always little endian)."""

# logical dtypes that can hold NaN or infinity
FLOAT_DTYPES = frozenset({"bfloat16", "float16", "float32"})

# All exponent bits set means infinity or NaN; testing the bits needs no conversion.
_BFLOAT16_EXPONENT = np.uint16(0x7F80)


def storage_dtype(logical_dtype: str) -> np.dtype:
    """Return the NumPy dtype in which a logical dtype is stored."""
    name = STORAGE_DTYPES.get(logical_dtype)
    if name is None:
        raise ValueError(
            f"Cannot store dtype {logical_dtype!r}. Use one of: {', '.join(sorted(STORAGE_DTYPES))}."
        )
    return np.dtype(name).newbyteorder("<")


def to_float32(array: np.ndarray, logical_dtype: str) -> np.ndarray:
    """Convert values in the storage dtype of a logical one to float32, exactly for bfloat16 and float16."""
    expected = storage_dtype(logical_dtype)
    if array.dtype != expected:
        raise ValueError(f"{logical_dtype} is stored as {expected}, got an array of {array.dtype}.")
    if logical_dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def from_float32(array: np.ndarray, logical_dtype: str) -> np.ndarray:
    """Round float32 values to a float dtype as it is stored."""
    if logical_dtype == "bfloat16":
        return bfloat16_bits(array)
    return array.astype(storage_dtype(logical_dtype), copy=False)


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """Round float32 values to bfloat16 (to nearest, ties to even) and return the bits, uint16.

    NaN stays NaN, values beyond the range become infinity.
    """
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(array), quiet_nan, rounded).astype(np.uint16).reshape(array.shape)


def is_finite(array: np.ndarray, logical_dtype: str) -> np.ndarray:
    """Say for each stored value whether it is neither NaN nor infinite; all true for integer dtypes."""
    if logical_dtype == "bfloat16":
        return np.asarray((array & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT)
    if logical_dtype in FLOAT_DTYPES:
        return np.asarray(np.isfinite(array))
    return np.ones(array.shape, bool)
