"""Codecs by name: the field codec of each field of a store, what it has learned, and its record in ``store.json``."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from ...errors import CodecUnknown, StoreDamaged
from ..chunks.chunk import BYTE_CHAIN
from ..chunks.field import TOKENS, Array, FieldCodec, LearnedCodec, StoredArray
from ..disk.checking import MISSING, exists
from ..documents import read_bounded
from ..dtypes import FLOAT_DTYPES
from ..names import CODEC_NAME
from ..paths import StorePath
from ..schema import SCHEMA_VERSION, FieldSpec, StoreManifest, tokens_field
from .lossless import LosslessCodec
from .quantised import SCHEMES, QuantisedCodec
from .transform.codec import TransformCodec, side_by_side
from .transform.settings import TRANSFORM_GRAMMAR, TransformSettings

LOSSLESS = "lossless"
TRANSFORM = "transform"
BASIS_NAME = "basis.safetensors"
NEXT_BASIS_NAME = "next-basis.safetensors"
"""The basis with further fields while they are added; it is renamed to the former once store.json holds its hash."""
_BASIS_HEADER_BYTES = 16 << 20

_LAYER, _LAST_LAYER = "hidden/layer_", 1 << 20

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
        sources: field -> the fields that it is predicted from; None to predict what the name calls for.

    Attributes:
        fields: field name -> its codec.

    Raises:
        CodecUnknown: there is no codec of that name, or none for a field, or it needs a field that the store lacks.
    """

    def __init__(
        self,
        name: str,
        specs: Iterable[FieldSpec],
        schema_version: int = SCHEMA_VERSION,
        sources: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.name, self.schema_version = name, schema_version
        _check_name(name)
        self.fields: dict[str, FieldCodec] = {spec.name: _field_codec(name, spec, schema_version) for spec in specs}
        for field, names in (_named_sources(self) if sources is None else sources).items():
            _predict(self.fields, field, names)
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
            StoreDamaged: the manifest names a codec that this release does not have.
            StoreDamaged: the learned basis is missing.
            StoreDamaged: the basis is not the one that the parts were written with.
        """
        name = str(manifest.codec.get("name"))
        if name in _GONE:
            raise StoreDamaged(
                f"{store} has codec {name!r}, which this release does not read; commit {_LAST_WITH_GONE} of moa-data "
                "is the last that does. Read it with that, or extract again with another --codec."
            )
        try:
            codec = cls(name, manifest.fields, manifest.schema_version, _recorded_sources(manifest))
        except CodecUnknown as error:
            raise StoreDamaged(f"{store}: {error} Install a release of moa-data that knows it.") from error
        if codec.learned:
            codec._load(store / CODEC_NAME, str(manifest.codec.get("basis_sha256")))
        return codec

    def only(self, names: Iterable[str]) -> StoreCodec:
        """Return the codec of some of the fields; what they have learned is shared."""
        part = StoreCodec(self.name, (), self.schema_version)
        part.fields = {name: self.fields[name] for name in names}
        return part

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """Field -> the fields that it is predicted from, of those that are."""
        found = {name: tuple(one.spec.name for one in codec.sources) for name, codec in self.fields.items()}
        return {name: names for name, names in found.items() if names}

    def with_sources(self, name: str) -> list[str]:
        """List a field behind all that decoding it takes: what it is predicted from, those fields' own, and so on."""
        return [codec.spec.name for codec in _with_sources(self.fields[name])]

    @property
    def in_order(self) -> list[str]:
        """All fields, each behind those that it is predicted from."""
        return list(dict.fromkeys(one for name in self.fields for one in self.with_sources(name) if one in self.fields))

    def features(self, name: str, offered: Mapping[str, Array]) -> Array | None:
        """Join what a field is predicted from, of the ``as_features`` of other fields; None where something lacks."""
        names = self.sources.get(name, ())
        return side_by_side([offered[one] for one in names]) if names and set(names) <= offered.keys() else None

    def encode(self, values: Mapping[str, Array], tokens: Array) -> dict[str, dict[str, Array]]:
        """Encode fields of one whole sequence, position 0 first.

        Args:
            values: field -> [n_tokens, *token_shape], as ``FieldCodec.encode`` takes them; with a field that is
                predicted from others, these too.
            tokens: int [n_tokens], its token ids.

        Returns:
            Field -> array name -> rows.

        Raises:
            StoreError: a value is NaN or infinite.
        """
        encoded: dict[str, dict[str, Array]] = {}
        offered: dict[str, Array] = {}
        used = {name for names in self.sources.values() for name in names}
        for name in (name for name in self.in_order if name in values):
            features = self.features(name, offered)
            encoded[name] = self.fields[name].encode(values[name], tokens, features)
            if name in used:
                codes = encoded[name] | {TOKENS: tokens}
                offered[name] = self.learned[name].as_features(codes, 0, len(values[name]), features)
        return encoded

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
        for name in (name for name in self.in_order if name in self.learned):
            prefix = f"{name}:"
            self.learned[name].load_state({key[len(prefix) :]: arrays[key] for key in arrays if key.startswith(prefix)})

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
            raise StoreDamaged(f"{path} is missing: nothing can be decoded without it. {_RESTORE}") from error
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
            raise StoreDamaged(f"{path} has sha256 {got}, store.json says {expected_sha256}. {_RESTORE}")
        try:
            self.load(content)
        except ValueError as error:
            raise StoreDamaged(f"{path}: {error}") from error


def joint_order(fields: Iterable[FieldCodec]) -> list[str]:
    """List the joint hidden states as they are predicted from each other: from the lowest layer to the last state."""
    joint = [field.spec.name for field in _hidden(fields) if field.settings.is_joint]
    return sorted(joint, key=lambda name: int(name.removeprefix(_LAYER)) if name.startswith(_LAYER) else _LAST_LAYER)


def _hidden(fields: Iterable[FieldCodec]) -> list[TransformCodec]:
    return [field for field in fields if isinstance(field, TransformCodec) and not field.is_kv]


def _named_sources(codec: StoreCodec) -> dict[str, list[str]]:
    """Choose what hidden states are predicted from, as a codec's name says: keys and values, then the state below."""
    fields = codec.fields.values()
    sources: dict[str, list[str]] = {}
    for field in _hidden(fields):
        sources[field.spec.name] = []
        if field.settings.from_kv:
            keys_and_values = [one.spec.name for one in fields if isinstance(one, TransformCodec) and one.is_kv]
            if not keys_and_values:
                raise CodecUnknown(
                    f"Codec {codec.name!r} predicts {field.spec.name!r} from keys and values, but the store has no "
                    "field 'kv' that is transform coded. Leave out `,from-kv`, or store kv too."
                )
            sources[field.spec.name] += keys_and_values
    order = joint_order(fields)
    for above, below in zip(order[1:], order, strict=False):
        sources[above].append(below)
    return {name: names for name, names in sources.items() if names}


def _with_sources(codec: FieldCodec) -> list[FieldCodec]:
    """List a field's codec behind those of all that it is predicted from."""
    return list(dict.fromkeys([*(one for source in codec.sources for one in _with_sources(source)), codec]))


def _predict(fields: Mapping[str, FieldCodec], field: str, names: Sequence[str]) -> None:
    """Let a hidden state be predicted from other fields; raises CodecUnknown where that cannot be."""
    own, sources = fields.get(field), [fields.get(name) for name in names]
    known = [source for source in sources if isinstance(source, TransformCodec)]
    if not isinstance(own, TransformCodec) or own.is_kv or len(known) < len(sources):
        raise CodecUnknown(f"Field {field!r} cannot be predicted from {' and '.join(map(repr, names))}.")
    if any(own in _with_sources(source) for source in known):
        raise CodecUnknown(f"Field {field!r} would be predicted from itself.")
    own.sources = tuple(known)


def _recorded_sources(manifest: StoreManifest) -> dict[str, list[str]]:
    """Read which fields of a store are predicted from which."""
    settings = manifest.codec.get("transform")
    if not isinstance(settings, Mapping):
        return {}
    found = {
        str(name): of["predicted_from"]
        for name, of in settings.items()
        if isinstance(of, Mapping) and "predicted_from" in of
    }
    return {name: list(map(str, of)) if isinstance(of, list) else [str(of)] for name, of in found.items()}


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
