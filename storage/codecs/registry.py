"""Codecs by name: the field codec of each field of a store, what it has learned, and its record in ``store.json``."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from ..chunks.chunk import BYTE_CHAIN
from ..chunks.field import TOKENS, FieldCodec, LearnedCodec, StoredArray
from ..disk.checking import MISSING, exists
from ..documents import read_bounded
from ..dtypes import FLOAT_DTYPES
from ..errors import CodecUnknown, ManifestInvalid, ShardCorrupt, ShardMissing
from ..names import CODEC_NAME
from ..paths import StorePath
from ..schema import SCHEMA_VERSION, FieldSpec, StoreManifest, tokens_field
from .lossless import LosslessCodec
from .quantised import SCHEMES, QuantisedCodec
from .transform.codec import TransformCodec
from .transform.settings import TRANSFORM_GRAMMAR, TransformSettings

LOSSLESS = "lossless"
TRANSFORM = "transform"
BASIS_NAME = "basis.safetensors"
NEXT_BASIS_NAME = "next-basis.safetensors"
"""The basis with further fields while they are added; it is renamed to the former once store.json holds its hash."""
_BASIS_HEADER_BYTES = 16 << 20

_RESTORE = "Restore it from a copy, or run `moa-data repair` with --model."


_GONE = ("fp8", "int4")
_LAST_WITH_GONE = "d02d314"
"""The last commit with the codecs above, which transform codes beat on bytes and on error."""


def codec_names() -> tuple[str, ...]:
    """Return the names that ``StoreCodec`` takes, for messages and help."""
    return (LOSSLESS, *SCHEMES, TRANSFORM_GRAMMAR)


class StoreCodec:
    """The codecs of all fields of a store.

    Args:
        name: e.g. ``"lossless"``, ``"int8"`` or ``"transform:1.0"``.
        specs: the store's fields. Fields of integers are lossless in every codec.
        schema_version: of the store, which decides how codes lie in arrays.

    Attributes:
        fields: field name -> its codec.

    Raises:
        CodecUnknown: there is no codec of that name, or none for a field, or it needs tokens that the store lacks.
    """

    def __init__(self, name: str, specs: Iterable[FieldSpec], schema_version: int = SCHEMA_VERSION) -> None:
        self.name, self.schema_version = name, schema_version
        _check_name(name)
        self.fields: dict[str, FieldCodec] = {spec.name: _field_codec(name, spec, schema_version) for spec in specs}
        for field, codec in self.fields.items():
            if codec.needs_tokens and not self._has_tokens():
                raise CodecUnknown(
                    f"Codec {name!r} predicts {field!r} from tokens, but the store has no field {TOKENS!r} of int32 "
                    f"[token]. Leave out `,tokens`."
                )

    @classmethod
    def open(cls, manifest: StoreManifest, store: StorePath) -> StoreCodec:
        """Return the codec of a store, with what it has learned.

        Raises:
            ManifestInvalid: the manifest names a codec that this release does not have.
            ShardMissing: the learned basis is missing.
            ShardCorrupt: the basis is not the one that the parts were written with.
        """
        name = str(manifest.codec.get("name"))
        if name in _GONE:
            raise ManifestInvalid(
                f"{store} has codec {name!r}, which this release does not read; commit {_LAST_WITH_GONE} of moa-data "
                "is the last that does. Read it with that, or extract again with another --codec."
            )
        try:
            codec = cls(name, manifest.fields, manifest.schema_version)
        except CodecUnknown as error:
            raise ManifestInvalid(f"{store}: {error} Install a release of moa-data that knows it.") from error
        if codec.learned:
            codec._load(store / CODEC_NAME, str(manifest.codec.get("basis_sha256")))
        return codec

    def only(self, names: Iterable[str]) -> StoreCodec:
        """Return the codec of some of the fields; what they have learned is shared."""
        part = StoreCodec(self.name, (), self.schema_version)
        part.fields = {name: self.fields[name] for name in names}
        return part

    @property
    def arrays(self) -> Iterator[StoredArray]:
        """All stored arrays, field by field."""
        for codec in self.fields.values():
            yield from codec.arrays

    @property
    def is_lossless(self) -> bool:
        """Whether every field comes back bit for bit."""
        return all(codec.is_identity for codec in self.fields.values())

    @property
    def learned(self) -> dict[str, LearnedCodec]:
        """The field codecs that learn from a sample: ``calibrate`` them before ``describe`` and ``files``."""
        return {name: codec for name, codec in self.fields.items() if isinstance(codec, LearnedCodec)}

    def describe(self) -> dict[str, Any]:
        """Return the record of the codec in ``store.json``; a change of any value changes the bytes."""
        settings = {name: codec.describe() for name, codec in self.fields.items() if not codec.is_identity}
        document = {"name": self.name, "transform": settings or "identity", "bytes": list(BYTE_CHAIN)}
        if self.learned and all(codec.arrays for codec in self.learned.values()):
            document["basis_sha256"] = hashlib.sha256(self.files()[BASIS_NAME]).hexdigest()
        return document

    def files(self) -> dict[str, bytes]:
        """Return the content of the store's ``codec/``; empty where nothing is learned."""
        if not self.learned:
            return {}
        arrays = {
            f"{name}:{key}": np.ascontiguousarray(value)
            for name, codec in self.learned.items()
            for key, value in codec.state().items()
        }
        return {BASIS_NAME: safetensors.numpy.save(dict(sorted(arrays.items())))}

    def load(self, content: bytes) -> None:
        """Load a basis that :meth:`files` gave; raises ValueError for any other content."""
        try:
            arrays = safetensors.numpy.load(content)
        except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that numpy does not have
            raise ValueError(f"not a safetensors file: {error}") from error
        for name, codec in self.learned.items():
            prefix = f"{name}:"
            codec.load_state({key[len(prefix) :]: arrays[key] for key in arrays if key.startswith(prefix)})

    def read_basis(self, path: StorePath) -> bytes:
        """Return the content of a file of ``codec/``; no bytes where it is too long for these fields."""
        n_bytes = _BASIS_HEADER_BYTES + sum(codec.max_state_bytes for codec in self.learned.values())
        try:
            return read_bounded(path, n_bytes)
        except ValueError:
            return b""

    def _has_tokens(self) -> bool:
        expected = tokens_field()
        spec = self.fields[TOKENS].spec if TOKENS in self.fields else None
        return spec is not None and (spec.dtype, spec.token_shape) == (expected.dtype, expected.token_shape)

    def _load(self, folder: StorePath, expected_sha256: str) -> None:
        path = folder / BASIS_NAME
        try:
            content = self.read_basis(path)
        except MISSING as error:
            raise ShardMissing(f"{path} is missing: nothing can be decoded without it. {_RESTORE}") from error
        got = hashlib.sha256(content).hexdigest()
        following = folder / NEXT_BASIS_NAME
        if got != expected_sha256 and exists(following):
            # Fields were added: a kill came before the new basis was renamed, or it is being renamed meanwhile.
            for candidate in (following, path):
                with contextlib.suppress(*MISSING):
                    content = self.read_basis(candidate)
                if (got := hashlib.sha256(content).hexdigest()) == expected_sha256:
                    break
        if got != expected_sha256:
            raise ShardCorrupt(f"{path} has sha256 {got}, store.json says {expected_sha256}. {_RESTORE}")
        try:
            self.load(content)
        except ValueError as error:
            raise ShardCorrupt(f"{path}: {error}") from error


def _check_name(name: str) -> None:
    if name == LOSSLESS or name in SCHEMES:
        return
    if name.split(":")[0] != TRANSFORM:
        raise CodecUnknown(f"Unknown codec {name!r}. Use one of: {', '.join(codec_names())}.")
    try:
        TransformSettings.parse(name)
    except ValueError as error:
        raise CodecUnknown(str(error)) from error


def _field_codec(name: str, spec: FieldSpec, schema_version: int) -> FieldCodec:
    if name == LOSSLESS or spec.dtype not in FLOAT_DTYPES:
        return LosslessCodec(spec)
    if name in SCHEMES:
        return QuantisedCodec(spec, SCHEMES[name])
    try:
        return TransformCodec(spec, TransformSettings.parse(name), joins_runs=schema_version > 1)
    except ValueError as error:
        raise CodecUnknown(f"Codec {name!r}: {error}") from error
