"""Codecs by name: which field codec each field of a store gets, and what ``store.json`` says about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..dtypes import FLOAT_DTYPES
from ..errors import CodecUnknown
from ..schema import FieldSpec
from .chunk import BYTE_CHAIN
from .field import FieldCodec, StoredArray
from .lossless import LosslessCodec

LOSSLESS = "lossless"


def codec_names() -> tuple[str, ...]:
    """Return the names that ``StoreCodec`` takes, for messages and help."""
    return (LOSSLESS,)


class StoreCodec:
    """The codecs of all fields of a store.

    Args:
        name: e.g. ``"lossless"``.
        specs: the store's fields. Fields of integers are lossless in every codec.
        target: the target's sizes (``StoreManifest.target``), for codecs that need more than the field's shape.

    Attributes:
        name: the codec's name.
        fields: field name -> its codec.

    Raises:
        CodecUnknown: no codec of that name.
    """

    def __init__(self, name: str, specs: Iterable[FieldSpec], target: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.fields: dict[str, FieldCodec] = {spec.name: _field_codec(name, spec, target or {}) for spec in specs}

    @property
    def arrays(self) -> Iterator[StoredArray]:
        """All stored arrays, field by field."""
        for codec in self.fields.values():
            yield from codec.arrays

    def describe(self) -> dict[str, Any]:
        """Return what ``store.json`` records about the codec; a change of any value changes the bytes."""
        settings = {name: codec.describe() for name, codec in self.fields.items() if not codec.is_identity}
        return {"name": self.name, "transform": settings or "identity", "bytes": list(BYTE_CHAIN)}


def _field_codec(name: str, spec: FieldSpec, target: Mapping[str, Any]) -> FieldCodec:
    if name != LOSSLESS and name.split(":")[0] not in codec_names():
        raise CodecUnknown(f"Unknown codec {name!r}. Use one of: {', '.join(codec_names())}.")
    if name == LOSSLESS or spec.dtype not in FLOAT_DTYPES:
        return LosslessCodec(spec)
    raise CodecUnknown(f"Codec {name!r} does not know fields like {spec.name!r}.")
