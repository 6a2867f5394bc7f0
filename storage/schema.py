"""Files, fields, manifest and dtypes of a store (schema version 2).

::

    STORE/
      store.json                  manifest: schema version, fields, conventions, codec, identities,
                                  counts
      plan.parquet                one row per sequence, in the order of the sequences in the parts
      texts.arrow                 tokens and masks of all sequences, read when `extract` resumes
                                  (may be absent)
      target/                     config, tokenizer and frozen weights that training needs
      codec/basis.safetensors     parameters that the codec has learned (transform codecs only)
      parts/                      one Zarr v3 group of arrays that all parts share; on the token
                                  axis of each array, part 1 follows part 0, and so on
        tokens                    int32    [token]
        response_mask             uint8    [token]
                                  1 = written by the assistant
        kv                        bfloat16 [token, layer, kv_head, 2, head_dim]
                                  0 = key after RoPE, 1 = value
        kv/full_attention         if the layers cache different shapes, one array like this one for
                                  each shape replaces kv
        hidden/last               bfloat16 [token, width]
                                  after the final norm
        hidden/layer_6            bfloat16 [token, width]
                                  output of decoder layer 6
      commits/part-00000.json     written last, atomically: counts, and size in bytes and crc32 of
                                  every file of the part
      commits/target.json         sizes and crc32 of the files of target/
      commits/store.json          sizes and crc32 of store.json, plan.parquet and the zarr.json
                                  files of parts/
      README.md                   dataset card: contents, origin, conventions, licences, how to load
      runs/20250131T120000.000000Z.json
                                  one per run: command, versions, timings (nothing that shapes the
                                  data)
      store.lock                  locked (flock) by the processes that write
      opening.lock                locked while a process takes store.lock; deleted afterwards
      locks/                      lock files of parts and documents, while several processes write;
                                  deleted by the last of these processes

A store is divided into parts. Each part is a range of sequences. The commit of a part is a JSON
file that lists the files of the part. Readers ignore a part that has no commit. Equal inputs give
equal bytes in every file except ``runs/`` and the lock files. ``docs/format.md`` explains the
format to authors of other programs.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from ..errors import SchemaVersionError, StoreDamaged
from ..files import MAX_WHOLE_NUMBER, PARTIAL_SUFFIX, parse_object, relative_name
from .paths import StorePath

MANIFEST_NAME = "store.json"
PLAN_NAME = "plan.parquet"
LOCK_NAME = "store.lock"
OPENING_NAME = "opening.lock"
LOCKS_NAME = "locks"
# Lock file of earlier releases. Writers delete it.
PUBLISH_NAME = "publish.lock"
# Names in a store's folder: the lock files, and the folder that contains all other lock files.
LOCK_NAMES = frozenset((LOCK_NAME, OPENING_NAME, LOCKS_NAME, PUBLISH_NAME))
TARGET_NAME = "target"
PARTS_NAME = "parts"
ZARR_NAME = "zarr.json"
COMMITS_NAME = "commits"
RUNS_NAME = "runs"
# Key in the JSON files of ``runs/``. The value of this key is the weights_sha256 of the model that
# wrote the answers of the chats, or null if this model is not known.
ANSWERS_BY = "answers_by"
CODEC_NAME = "codec"
CARD_NAME = "README.md"
TEXTS_NAME = "texts.arrow"
# A speed test writes to a temporary folder whose name has this prefix.
SPEED_TEST_PREFIX = ".moa-data-speed-"
_DOCUMENTS = (MANIFEST_NAME, PLAN_NAME, CARD_NAME, TEXTS_NAME)
_FOLDERS = (TARGET_NAME, PARTS_NAME, COMMITS_NAME, RUNS_NAME, CODEC_NAME)
KNOWN_NAMES = LOCK_NAMES.union(_DOCUMENTS, _FOLDERS)
"""Every name that may occur in a store's folder."""


def is_known(name: str) -> bool:
    """Whether a name may occur in a store's folder.

    This includes the names of partially written files (``plan.parquet.5f3a9c01.partial``).
    """
    if not name.endswith(PARTIAL_SUFFIX):
        return name in KNOWN_NAMES
    stem = name.removesuffix(PARTIAL_SUFFIX)
    return stem in KNOWN_NAMES or stem.rpartition(".")[0] in KNOWN_NAMES


def commit_path(store: StorePath, part: int) -> StorePath:
    """Return the path of a part's commit."""
    return store / COMMITS_NAME / f"part-{part:05d}.json"


def target_commit_path(store: StorePath) -> StorePath:
    """Return the path of the commit that lists the files of ``target/``."""
    return store / COMMITS_NAME / "target.json"


def manifest_commit_path(store: StorePath) -> StorePath:
    """Return the path of the commit that lists store.json, plan.parquet and the zarr.json files."""
    return store / COMMITS_NAME / MANIFEST_NAME


def publication_path(commit: StorePath) -> StorePath:
    """Return the path of the publication record of a commit.

    The record is a JSON file in a bucket. It contains a new commit and lists the uploaded files. A
    writer creates the record before the files get their final names, and deletes the record when
    the commit exists (see ``write.publish``).
    """
    return commit.parent / f"{commit.name}.partial"


ALIGNMENT_TOKENS = 64
"""Every sequence of a new store starts at a multiple of this number of tokens.

A block of 64 tokens that starts at such a multiple therefore never contains tokens of two
sequences.
"""

SCHEMA_VERSION = 2
FORMAT_NAME = "moa-data activation store"
"""Value of the key ``format`` in store.json.

It distinguishes a store from a folder of another program that also contains a store.json.
"""

CONVENTIONS: dict[str, str] = {
    "kv_keys": "after RoPE, positions counted from 0 at the first token of each sequence",
    "kv_order": "per kv head the key, then the value",
    "hidden_last": "after the final norm, the input of the LM head",
    "hidden_layer_k": "output of decoder layer k (0-based), before any final norm",
    "response_mask": "1 on tokens written by the assistant, its end-of-turn token included",
    "padding": "zero between the end of a sequence and the next multiple of alignment_tokens",
}
"""Meaning of the stored numbers. The meaning has been the same in every schema version so far.

Every manifest contains these entries under ``conventions``. A few stores have the values of
:data:`ROTATED_IN_SOME` or :data:`LATENTS` instead. A reader refuses a store with any other value.
"""
ROTATED_IN_SOME: dict[str, str] = {
    "kv_keys": "after RoPE in layers that rotate keys, as they are in the others; positions "
    "counted from 0 at the first token of each sequence",
}
"""Meaning of the stored keys if some layers of the target lack RoPE.

These entries replace the entries of :data:`CONVENTIONS` with the same key.
"""
LATENTS: dict[str, str] = {
    "kv_keys": "the latent after its norm, which has no positions",
    "kv_order": "the latent, then the part of the key that all heads share, after RoPE, positions "
    "counted from 0 at the first token of each sequence",
}
"""Meaning of the stored keys and values if the target's layers cache latents.

A latent is a compressed form of a token's keys and values (multi-head latent attention). These
entries replace the entries of :data:`CONVENTIONS` with the same key.
"""

MAX_LAYERS = 1 << 12
# Upper bound on the number of values per token in a field. The largest models have about a million.
MAX_TOKEN_VALUES = 1 << 26

Array = Any  # Type of a NumPy array or a torch tensor, for functions that accept both.

# Name of the field of token ids. Some codecs need the token ids to decode another field.
TOKENS = "tokens"
# Name of the field with the keys and values of all layers. If the layers cache different shapes,
# several fields such as ``kv/full_attention`` replace this one.
KV = "kv"
HIDDEN_LAST = "hidden/last"  # Name of the field with hidden states after the final norm.

TOKEN_AXIS = "token"
LAYER_AXIS = "layer"
# Name of axis 0 of a stored array that has one row for each block of consecutive tokens.
BLOCK_AXIS = "block"
# Name of axis 1 of a stored array of pieces. A transform codec encodes a token to bytes. A piece
# contains some of these bytes (see ``codecs.coding``). A piece has separate inner chunks, so it can
# be read without the other pieces.
PIECE_AXIS = "piece"
# Names of the axes of one token's keys and values. Index 0 of the axis "key_value" is the key, and
# index 1 is the value.
KV_AXES = (LAYER_AXIS, "kv_head", "key_value", "head_dim")
UNEQUAL_KV_AXES = (LAYER_AXIS, "kv_head", "width")
"""Names of the axes of one token's keys and values if a key and a value have different widths.

The last axis contains the key, followed by the value.
"""


_Count = Annotated[int, Field(ge=1, le=MAX_WHOLE_NUMBER)]
Natural = Annotated[int, Field(ge=0, le=MAX_WHOLE_NUMBER)]
_Dtype = Literal["bfloat16", "float16", "float32"]  # Dtypes of activations.
_EXACT = ConfigDict(strict=True, extra="forbid")
# pydantic settings of a class that describes a JSON object. The object may also contain keys that
# the class does not declare.
_WITH_OTHERS = ConfigDict(strict=True, extra="allow")


@dataclass(frozen=True)
class FieldSpec:
    """One field of a store: values of one kind for every token, such as keys and values.

    A codec stores each field in one or more arrays (:class:`StoredArray`). The manifest describes
    each field by a JSON object. pydantic checks that the object fits the types of these attributes.
    """

    __pydantic_config__ = _EXACT

    # Path inside ``parts/``, e.g. ``"kv"`` or ``"hidden/last"``.
    name: str
    # Logical dtype, e.g. ``"bfloat16"`` (see ``STORAGE_DTYPES``).
    dtype: str
    # Shape of one token's values. It is ``()`` if a token has one number.
    token_shape: Annotated[tuple[_Count, ...], Field(max_length=16)]
    axes: tuple[str, ...]  # Names of all axes; the first one is ``"token"``.
    description: str
    # For each index of the layer axis, the number of the target's layer. The value is None if the
    # field has no layer axis, or contains all layers in order. The JSON object of such a field has
    # no entry ``layers``.
    layers: Annotated[tuple[Natural, ...], Field(max_length=MAX_LAYERS)] | None = None
    # Width of a key, if the last axis holds a key followed by a value of another width. For all
    # other fields, the value is None, and their JSON objects have no entry ``key_width``.
    key_width: _Count | None = None

    def __post_init__(self) -> None:
        relative_name(self.name)
        storage_dtype(self.dtype)
        if (
            not self.axes
            or self.axes[0] != TOKEN_AXIS
            or len(self.axes) != 1 + len(self.token_shape)
        ):
            raise ValueError(
                f"Field {self.name!r} has the axes {self.axes}, but they must be 'token' and one "
                f"name for each axis of token_shape {self.token_shape}."
            )
        if math.prod(self.token_shape) > MAX_TOKEN_VALUES:
            raise ValueError(
                f"Field {self.name!r} has {math.prod(self.token_shape)} values per token, but the "
                f"limit is {MAX_TOKEN_VALUES}."
            )
        fits = self.layers is None or (
            self.layer_axis == 1 and len(self.layers) == self.token_shape[0]
        )
        if self.axes[1:] == UNEQUAL_KV_AXES:
            fits &= self.key_width is not None and self.key_width < self.token_shape[-1]
        else:
            fits &= self.key_width is None
        if not fits:
            raise ValueError(
                f"Field {self.name!r} has layers {self.layers} and key_width {self.key_width}, "
                f"which do not fit its token_shape {self.token_shape} and axes {self.axes}. layers "
                "must be None, or a list with one number for each index of axis 1, which must be "
                "'layer'. key_width must be None, or smaller than the size of the axis 'width' "
                "behind the axes 'layer' and 'kv_head'."
            )

    @property
    def storage_dtype(self) -> np.dtype:
        """NumPy dtype on disk (uint16 for bfloat16)."""
        return storage_dtype(self.dtype)

    @property
    def token_bytes(self) -> int:
        """Size in bytes of one token's values before encoding."""
        return int(np.prod(self.token_shape, dtype=np.int64)) * self.storage_dtype.itemsize

    @property
    def layer_axis(self) -> int | None:
        """Index of the layer axis in ``axes``, or None if the field has no layer axis."""
        return self.axes.index(LAYER_AXIS) if LAYER_AXIS in self.axes else None

    @property
    def layer_numbers(self) -> Sequence[int]:
        """For each index of the layer axis, the number of the target's layer.

        The field must have a layer axis.
        """
        return range(self.token_shape[0]) if self.layers is None else self.layers


class _Sizes(TypedDict, total=False):
    """The object ``target`` in store.json. Only the sizes that readers need are declared here."""

    __pydantic_config__ = _WITH_OTHERS  # type: ignore[misc]  # mypy allows only keys here

    n_layers: _Count
    n_heads: _Count
    n_kv_heads: _Count
    head_dim: _Count
    hidden_size: _Count
    vocab_size: _Count
    max_position_embeddings: _Count


class _Extraction(TypedDict, total=False):
    """The object ``extraction`` in store.json. Only settings that readers need are declared here."""

    __pydantic_config__ = _WITH_OTHERS  # type: ignore[misc]

    batch_tokens: _Count
    max_length: _Count
    part_tokens: _Count
    target_layers: Natural
    compute_dtype: _Dtype
    dtype: _Dtype


class _Codec(TypedDict):
    """The object ``codec`` in store.json. Only the key that all codecs have is declared here."""

    __pydantic_config__ = _WITH_OTHERS  # type: ignore[misc]

    name: str


class _ManifestDocument(BaseModel):
    """The JSON object in store.json. A :class:`StoreManifest` is made from this object."""

    model_config = _EXACT

    format: str
    fields: tuple[FieldSpec, ...]
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
    """One Zarr array of a store. Each row along axis 0 is for one token or one block of tokens."""

    # Path inside ``parts/``, e.g. ``"kv"`` or ``"kv/key_codes"``.
    name: str
    # Name of the NumPy dtype on disk, e.g. ``"uint16"``.
    dtype: str
    row_shape: tuple[int, ...]
    # Names of all axes; the first one is ``"token"`` or ``"block"``.
    axes: tuple[str, ...]
    # Number of tokens per row. Every sequence starts at a multiple of this number.
    block_tokens: int = 1
    # Index of the layer axis in ``axes``. It is 1, or None if the array does not have a layer axis.
    layer_axis: int | None = None
    # Logical dtype of the values, by default ``dtype``. For bfloat16 values, it is ``"bfloat16"``,
    # and ``dtype`` is ``"uint16"``.
    logical_dtype: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "logical_dtype", self.logical_dtype or self.dtype)

    @property
    def storage_dtype(self) -> np.dtype:
        """NumPy dtype on disk, little endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def row_bytes(self) -> int:
        """Size in bytes of one row before encoding."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.storage_dtype.itemsize

    def n_rows(self, n_tokens: int) -> int:
        """Return the number of rows for ``n_tokens`` tokens if the first token starts a new row."""
        return -(-n_tokens // self.block_tokens)


def tokens_field() -> FieldSpec:
    """Return the field of token ids, int32 [token]."""
    return FieldSpec(TOKENS, "int32", (), (TOKEN_AXIS,), "token ids of the target's tokenizer")


def response_mask_field() -> FieldSpec:
    """Return the field of the response mask, uint8 [token]. 1 marks tokens of the assistant."""
    return FieldSpec(
        "response_mask", "uint8", (), (TOKEN_AXIS,), "1 on tokens written by the assistant, else 0"
    )


def kv_field(
    n_layers: int, n_kv_heads: int, head_dim: int, dtype: str = "bfloat16", is_rotated: bool = True
) -> FieldSpec:
    """Return the field of keys and values of all layers, [token, layer, kv_head, 2, head_dim].

    Args:
        n_layers: number of layers of the target.
        n_kv_heads: number of KV heads of each layer.
        head_dim: width of one key and of one value.
        dtype: logical dtype of the values.
        is_rotated: whether all layers rotate their keys (RoPE).
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
    """Return the field of the keys and values of some layers.

    Its shape is [token, layer, kv_head, 2, head_dim], or [token, layer, kv_head, key_width +
    value_width] if the widths of keys and values differ.
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
    """Return the field ``hidden/<name>``, [token, width].

    ``name`` is ``"last"`` or ``"layer_<k>"``.
    """
    meaning = (
        "hidden state after the final norm"
        if name == "last"
        else f"hidden state, output of decoder {name}"
    )
    return FieldSpec(f"hidden/{name}", dtype, (width,), (TOKEN_AXIS, "width"), meaning)


@dataclass(frozen=True)
class StoreManifest:
    """The content of ``store.json``: everything that determines the data of a store."""

    fields: tuple[FieldSpec, ...]
    # Sizes (``n_layers``, ``hidden_size``, ...) and architecture of the target.
    target: Mapping[str, Any]
    # Hashes of target, tokenizer, template and dataset, under keys such as
    # ``"target.weights_sha256"``.
    identities: Mapping[str, str]
    # Other settings that determine the data, e.g. max_length, compute dtype, truncation.
    extraction: Mapping[str, Any]
    n_sequences: int
    n_parts: int
    # Number of planned tokens without alignment padding.
    n_tokens: int
    # The result of ``StoreCodec.describe``.
    codec: Mapping[str, Any]
    # What the stored numbers mean. Pass only entries that differ from ``CONVENTIONS`` or are
    # missing there. All other entries of ``CONVENTIONS`` are added automatically.
    conventions: Mapping[str, str] = field(default_factory=dict)
    # Every sequence starts at a multiple of this number of tokens.
    alignment_tokens: int = ALIGNMENT_TOKENS
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
                    f"The convention {key!r} of the store (store.json) is "
                    f"{self.conventions[key]!r}, but in schema version {self.schema_version} it "
                    f"must be {value!r}. Read this store with the release of moa-data that wrote "
                    "it."
                )
        object.__setattr__(self, "conventions", {**CONVENTIONS, **self.conventions})
        if self.n_parts > max(1, self.n_sequences):
            raise StoreDamaged(
                f"n_parts is {self.n_parts} and n_sequences is {self.n_sequences} in store.json, "
                "but each part has at least one sequence. Restore the file from a copy."
            )
        names = [spec.name for spec in self.fields]
        if repeated := sorted(Counter(names) - Counter(set(names))):
            raise StoreDamaged(
                f"store.json lists these fields more than once: {', '.join(repeated)}. Each field "
                "may be listed only once. Restore the file from a copy."
            )

    def to_json(self) -> str:
        """Return the text of store.json: sorted keys, indent of two spaces, final newline."""
        document = {"format": FORMAT_NAME} | asdict(self)
        # Most fields have no ``layers`` and no ``key_width``. Omit the keys whose value is None.
        for spec in document["fields"]:
            for name in ("layers", "key_width"):
                if spec[name] is None:
                    del spec[name]
        return (
            json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
            + "\n"
        )

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "store.json") -> "StoreManifest":
        """Parse the text of store.json.

        Args:
            text: content of the file.
            source: name of the file in error messages.

        Raises:
            SchemaVersionError: this release does not read the schema version.
            StoreDamaged: the text is not a valid manifest.
        """
        try:
            document = parse_object(text)
        except ValueError as error:
            raise StoreDamaged(
                f"{source} is not valid JSON ({error}). Restore the file from a copy."
            ) from error
        if document.get("format") != FORMAT_NAME:
            raise StoreDamaged(
                f"{source} is not the manifest of an activation store, because its entry 'format' "
                f"is not {FORMAT_NAME!r}. Check the path, or restore the file from a copy."
            )
        version = document.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise SchemaVersionError(
                f"{source} has schema version {version!r}, but this release reads only version "
                f"{SCHEMA_VERSION}. Install a release of moa-data that reads version {version!r}, "
                "or extract again with this one."
            )
        try:
            checked = _ManifestDocument.model_validate_json(text)
        except ValidationError as error:
            raise StoreDamaged(
                f"{source} has an invalid entry ({first_problem(error)}). Restore the file from a "
                "copy."
            ) from error
        del document["format"]
        return cls(**(document | {"fields": checked.fields}))


def first_problem(error: ValidationError) -> str:
    """Describe the first problem that pydantic has found, and its location, in one line."""
    problem = error.errors()[0]
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return ": ".join([".".join(map(str, problem["loc"])), message]).removeprefix(": ")


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested JSON object to a mapping from dotted keys to values that are not objects.

    The top-level list ``fields`` is treated as an object that maps the name of each item to the
    item.
    """
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


# A logical dtype is the dtype of the values. A storage dtype is the dtype of the array in NumPy and
# Zarr. The two differ only for bfloat16, because NumPy and Zarr do not have this dtype. The bits of
# bfloat16 values are stored unchanged as uint16, and the attribute "logical_dtype" of the array is
# "bfloat16".

STORAGE_DTYPES = {
    "bfloat16": "uint16",
    "float16": "float16",
    "float32": "float32",
    "int32": "int32",
    "uint8": "uint8",
}
"""Logical dtype -> name of the NumPy dtype on disk (always little endian)."""

# Logical dtypes whose values can be NaN or infinite.
FLOAT_DTYPES = frozenset({"bfloat16", "float16", "float32"})

# A bfloat16 value is infinite or NaN if all its exponent bits are set. Testing the bits avoids a
# conversion to float32.
_BFLOAT16_EXPONENT = np.uint16(0x7F80)


def storage_dtype(logical_dtype: str) -> np.dtype:
    """Return the NumPy dtype that values of a logical dtype have on disk."""
    name = STORAGE_DTYPES.get(logical_dtype)
    if name is None:
        raise ValueError(
            f"Values of dtype {logical_dtype!r} cannot be stored. Use one of: "
            f"{', '.join(sorted(STORAGE_DTYPES))}."
        )
    return np.dtype(name).newbyteorder("<")


def to_float32(array: np.ndarray, logical_dtype: str) -> np.ndarray:
    """Convert stored values to float32.

    The values have the storage dtype that belongs to the logical dtype, for example uint16 for
    bfloat16. The conversion of bfloat16 and float16 is exact.
    """
    expected = storage_dtype(logical_dtype)
    if array.dtype != expected:
        raise ValueError(
            f"Values of {logical_dtype} are stored as {expected}, but the array has dtype "
            f"{array.dtype}."
        )
    if logical_dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def from_float32(array: np.ndarray, logical_dtype: str) -> np.ndarray:
    """Round float32 values to a logical float dtype, and return them in the storage dtype."""
    if logical_dtype == "bfloat16":
        return bfloat16_bits(array)
    return array.astype(storage_dtype(logical_dtype), copy=False)


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """Round float32 values to bfloat16 (to nearest, ties to even) and return their bits as uint16.

    NaN stays NaN. Values beyond the range of bfloat16 become infinity.
    """
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(array), quiet_nan, rounded).astype(np.uint16).reshape(array.shape)


def is_finite(array: np.ndarray, logical_dtype: str) -> np.ndarray:
    """Return for each value whether it is finite: not NaN and not infinite.

    The values are given in their storage dtype. Every value of an integer dtype is finite.
    """
    if logical_dtype == "bfloat16":
        return np.asarray((array & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT)
    if logical_dtype in FLOAT_DTYPES:
        return np.asarray(np.isfinite(array))
    return np.ones(array.shape, bool)
