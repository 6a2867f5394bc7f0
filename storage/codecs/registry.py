"""Creates the codec of a store, and loads and saves the learned state of the codec."""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from ...errors import CodecUnknown, StoreDamaged
from ..backend import MISSING, backend_of
from ..chunk import BYTE_CHAIN
from ..paths import StorePath
from ..schema import CODEC_NAME, FLOAT_DTYPES, TOKENS, Array, FieldSpec, StoredArray, StoreManifest
from .field import FieldCodec, LosslessCodec
from .int8 import INT8, Int8Codec
from .transform import TransformCodec, TransformSettings, side_by_side

LOSSLESS = "lossless"
BASIS_NAME = "basis.safetensors"
# The basis file of a store contains the learned state of its codec. While fields are added to the
# store, the new basis file has this name. As soon as store.json contains the hash of the file, the
# file is renamed to BASIS_NAME.
NEXT_BASIS_NAME = "next-basis.safetensors"
# Upper bound on the size of a basis file. The basis of a 405B target with all options has 5 GB.
_MAX_BASIS_BYTES = 16 << 30
_LAYER = "hidden/layer_"
_LAST_LAYER = 1 << 20
_RESTORE = "Restore the file from a copy, or run `moa-data repair STORE --model MODEL`."


class StoreCodec:
    """The codecs of all fields of a store.

    Args:
        name: Name of the codec, e.g. ``"lossless"``, ``"int8"`` or ``"transform:1.0"``.
        specs: The store's fields. Every codec stores fields of integers losslessly.
        sources: Name of a predicted field -> names of its sources, the fields that predict it. If
            the argument is None, the codec's name determines the sources.

    Raises:
        CodecUnknown: No codec has this name, or the codec does not support one of the fields, or
            the codec needs a field that the store does not have.
    """

    def __init__(
        self,
        name: str,
        specs: Iterable[FieldSpec],
        sources: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.name = name
        settings = None if name in (LOSSLESS, INT8) else TransformSettings.parse(name)
        self.fields: dict[str, FieldCodec] = {}
        for spec in specs:
            self.fields[spec.name] = _field_codec(name, settings, spec)
        for field, names in (self._named_sources() if sources is None else sources).items():
            self._predict(field, names)
        tokens = self.fields.get(TOKENS)
        has_tokens = (
            tokens is not None and tokens.spec.dtype == "int32" and tokens.spec.token_shape == ()
        )
        for field, codec in self.fields.items():
            if codec.needs_tokens and not has_tokens:
                raise CodecUnknown(
                    f"Codec {name!r} predicts {field!r} from token ids, but the store has no field "
                    f"{TOKENS!r} with one int32 number per token. Leave out `,tokens` in the name "
                    "of the codec."
                )

    @classmethod
    def open(cls, manifest: StoreManifest, store: StorePath) -> "StoreCodec":
        """Create the codec of an existing store, and load its learned state."""
        try:
            codec = cls(
                str(manifest.codec.get("name")), manifest.fields, _recorded_sources(manifest)
            )
        except CodecUnknown as error:
            raise CodecUnknown(
                f"The codec of {store} cannot be used. {error} Read the store with the release of "
                "moa-data that wrote it, or extract it again."
            ) from error
        if codec.learned:
            codec._load(store / CODEC_NAME, str(manifest.codec.get("basis_sha256")))
        return codec

    def only(self, names: Iterable[str]) -> "StoreCodec":
        """Return a ``StoreCodec`` that has only the codecs of some fields of this object."""
        part = StoreCodec(self.name, ())
        part.fields = {name: self.fields[name] for name in names}
        return part

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """Name of each predicted field -> names of its sources, the fields that predict it."""
        source_names: dict[str, tuple[str, ...]] = {}
        for name, codec in self.fields.items():
            if codec.sources:
                source_names[name] = tuple(source.spec.name for source in codec.sources)
        return source_names

    def encode(
        self, values: Mapping[str, Array], tokens: Array, is_finite: bool = False
    ) -> dict[str, dict[str, Array]]:
        """Encode the values of some fields for one whole sequence.

        Args:
            values: Field name -> values. If a field is predicted from other fields, the values of
                the other fields are also required.
            tokens: The token ids of the sequence.
            is_finite: Whether the caller knows that all values are finite. If false, the values are
                checked, which synchronizes with their device.

        Returns:
            Maps each field name to another mapping: name of a stored array -> rows of this array.
        """
        encoded: dict[str, dict[str, Array]] = {}
        offered: dict[str, Array] = {}
        used = set(chain.from_iterable(self.sources.values()))
        learned = self.learned
        # A field may be predicted from other fields, its sources. The sources must be encoded
        # first, so `learned` lists them before the field.
        for name in dict.fromkeys([*learned, *self.fields]):
            if name not in values:
                continue
            codec = self.fields[name]
            if not is_finite:
                codec.check_finite(values[name])
            # If the caller did not pass the values of all sources, `features` is None. Then
            # `codec.encode` raises an error.
            known = [
                offered[source.spec.name] for source in codec.sources if source.spec.name in offered
            ]
            features = side_by_side(known) if known and len(known) == len(codec.sources) else None
            encoded[name] = codec.encode(values[name], tokens, features)
            if name in used:
                codes = encoded[name] | {TOKENS: tokens}
                offered[name] = learned[name].as_features(codes, 0, len(values[name]), features)
        return encoded

    @property
    def arrays(self) -> list[StoredArray]:
        """The stored arrays of all fields, in the order of the fields."""
        return list(chain.from_iterable(codec.arrays for codec in self.fields.values()))

    @property
    def is_lossless(self) -> bool:
        """Whether the decoded values of every field are bit-equal to the original values."""
        return all(codec.is_identity for codec in self.fields.values())

    @property
    def learned(self) -> dict[str, TransformCodec]:
        """The codecs that learn from a sample of sequences, by field name.

        If a field is predicted from other fields, the other fields come first. All of these codecs
        must have learned before ``describe`` and ``files`` are called.
        """
        ordered = chain.from_iterable(codec.with_sources() for codec in self.fields.values())
        learned: dict[str, TransformCodec] = {}
        for codec in ordered:
            if isinstance(codec, TransformCodec) and codec.spec.name in self.fields:
                learned[codec.spec.name] = codec
        return learned

    @property
    def joint(self) -> list[str]:
        """Names of the hidden states that the codec option ``joint`` predicts from one another.

        The option is part of the codec's name, for example ``transform:1.0,joint``. The names are
        ordered from the lowest layer to the last hidden state. Each hidden state is predicted from
        the previous hidden state in this list.
        """
        layers: dict[str, int] = {}
        for name, codec in self.learned.items():
            if codec.is_kv or not codec.settings.is_joint:
                continue
            is_layer = name.startswith(_LAYER)
            layers[name] = int(name.removeprefix(_LAYER)) if is_layer else _LAST_LAYER
        return sorted(layers, key=layers.__getitem__)

    def describe(self) -> dict[str, Any]:
        """Return the description of the codec that ``store.json`` contains.

        Codecs with different descriptions store different bytes.
        """
        settings: dict[str, dict[str, Any]] = {}
        for name, codec in self.fields.items():
            if not codec.is_identity:
                settings[name] = codec.describe()
        document = {
            "name": self.name,
            "transform": settings or "identity",
            "bytes": list(BYTE_CHAIN),
        }
        if self.learned and all(codec.arrays for codec in self.learned.values()):
            # Readers compute the hash of the basis file, and compare the result with this hash. If
            # both are equal, the values in the store were encoded with this basis file.
            document["basis_sha256"] = hashlib.sha256(self.files()[BASIS_NAME]).hexdigest()
        return document

    def files(self) -> dict[str, bytes]:
        """Return the files of the store's ``codec/`` folder: file name -> content.

        The files contain the learned state of the field codecs. If no field codec learns from a
        sample, the result is empty.
        """
        if not self.learned:
            return {}
        arrays: dict[str, np.ndarray] = {}
        for name, codec in self.learned.items():
            for key, array in codec.state().items():
                arrays[f"{name}:{key}"] = np.ascontiguousarray(array)
        # Sort the arrays by name, so that equal learned states give equal bytes.
        return {BASIS_NAME: safetensors.numpy.save(dict(sorted(arrays.items())))}

    def load(self, content: bytes) -> None:
        """Load the content of a basis file that :meth:`files` returned.

        Raises:
            ValueError: The content is not a basis for these fields.
        """
        try:
            arrays = safetensors.numpy.load(content)
        # safetensors raises KeyError for a dtype that NumPy does not have.
        except (safetensors.SafetensorError, KeyError) as error:
            raise ValueError(
                f"it is not a valid safetensors file ({error}). Restore it from a copy."
            ) from error
        # If a field is predicted from other fields, `learned` lists the other fields first. They
        # must be loaded first, because they provide the features for the prediction. The number of
        # features determines the shape of the regression matrices.
        for name, codec in self.learned.items():
            prefix = f"{name}:"
            state: dict[str, np.ndarray] = {}
            for key, array in arrays.items():
                if key.startswith(prefix):
                    state[key.removeprefix(prefix)] = array
            codec.load_state(state)

    def _load(self, folder: StorePath, expected_sha256: str) -> None:
        path = folder / BASIS_NAME
        got = ""
        # A process that adds fields replaces store.json, and then renames the new basis file. If
        # the process was killed in between, the basis file still has its temporary name. If the
        # process renames the basis file during this loop, the third attempt finds it under its
        # final name.
        for candidate in (path, folder / NEXT_BASIS_NAME, path):
            with contextlib.suppress(*MISSING):
                content = read_basis(candidate)
                if (got := hashlib.sha256(content).hexdigest()) == expected_sha256:
                    break
        else:
            problem = (
                f"does not fit store.json: its sha256 is {got}, expected {expected_sha256}"
                if got
                else "is missing"
            )
            raise StoreDamaged(
                f"{path} {problem}. The store cannot be decoded without this file. {_RESTORE}"
            )
        try:
            self.load(content)
        except ValueError as error:
            raise StoreDamaged(f"{path} cannot be used: {error}") from error

    def _named_sources(self) -> dict[str, list[str]]:
        """Find the sources of each hidden state in the codec's name.

        The sources are the fields that are used to predict the hidden state.

        The name may contain options, for example ``transform:1.0,from-kv,joint``. With the option
        ``from-kv``, a hidden state is predicted from keys and values. With ``joint``, it is
        predicted from the next lower hidden state of the store. With both options, it is predicted
        from all of these fields.

        Returns:
            Name of a hidden state -> names of its sources.
        """
        kv = [name for name, codec in self.learned.items() if codec.is_kv]
        sources: dict[str, list[str]] = {}
        for name, codec in self.learned.items():
            if codec.is_kv or not codec.settings.from_kv:
                continue
            if not kv:
                raise CodecUnknown(
                    f"Codec {self.name!r} predicts {name!r} from keys and values, but the store "
                    "has no field 'kv' with a transform codec. Leave out `,from-kv` in the name "
                    "of the codec, or store kv too."
                )
            sources[name] = list(kv)
        for above, below in zip(self.joint[1:], self.joint, strict=False):
            sources.setdefault(above, []).append(below)
        return sources

    def _predict(self, field: str, names: Sequence[str]) -> None:
        """Set the sources of a hidden state: the fields that are used to predict it.

        Raises:
            CodecUnknown: The hidden state cannot be predicted from these sources.
        """
        codec = self.learned.get(field)
        sources = [self.learned[name] for name in names if name in self.learned]
        if codec is None or codec.is_kv or len(sources) < len(names):
            raise CodecUnknown(
                f"Field {field!r} cannot be predicted from {' and '.join(map(repr, names))}. Only "
                "hidden states can be predicted, and only from fields with a transform codec."
            )
        if any(codec in source.with_sources() for source in sources):
            raise CodecUnknown(f"Field {field!r} cannot be predicted from itself.")
        codec.sources = tuple(sources)


def read_basis(path: StorePath) -> bytes:
    """Read a file of the store's ``codec/`` folder.

    Returns:
        The content. If the file is too large to be a basis, the result is empty. The hash of the
        empty content then differs from the expected hash.
    """
    try:
        return backend_of(path).read(_MAX_BASIS_BYTES)
    except ValueError:
        return b""


def _recorded_sources(manifest: StoreManifest) -> dict[str, list[str]]:
    settings = manifest.codec.get("transform")
    sources: dict[str, list[str]] = {}
    for name, of in settings.items() if isinstance(settings, Mapping) else ():
        if isinstance(of, Mapping) and "predicted_from" in of:
            names = of["predicted_from"]
            listed = names if isinstance(names, list) else [names]
            sources[name] = [str(source) for source in listed]
    return sources


def _field_codec(name: str, settings: TransformSettings | None, spec: FieldSpec) -> FieldCodec:
    if name == LOSSLESS or spec.dtype not in FLOAT_DTYPES:
        return LosslessCodec(spec)
    if settings is None:
        return Int8Codec(spec)
    try:
        return TransformCodec(spec, settings)
    except CodecUnknown as error:
        raise CodecUnknown(f"Codec {name!r} cannot be used. {error}") from error
