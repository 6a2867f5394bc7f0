"""Safe reading of untrusted files: they run no code, allocate nothing absurd, and fail with a one-line error.

A model folder, a store's ``target/`` and a drafter's folder may come from anywhere. These functions check the type and
size of a file before reading it, and turn whatever a library raises while parsing it into an error of the caller.
"""

import errno
import io
import json
import pickletools
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...errors import DrafterError, TargetError
from ...text import first_line
from .tensor_list import TensorHeader

MAX_CONFIG_BYTES = 16 << 20
"""Size limit of config.json and similar files; real ones have kilobytes, tokenizer_config.json a few hundred."""
MAX_VOCABULARY_BYTES = 256 << 20
"""Size limit of tokenizer.json, vocab.json, merges.txt, ...; real ones have up to about 35 MB."""
MAX_HEADER_BYTES = 16 << 20
"""Size limit of the header of a safetensors file; real ones have about 100 bytes per tensor."""

_CODE_KEYS = {
    "auto_map": "names Python code of the folder, and moa-data runs no code of a model folder. Use the model's native "
    "transformers class: take auto_map out of the file",
    "gguf_file": "names another file to read. Take gguf_file out of the file",
    "tokenizer_object": "stands for an object of a program. Take tokenizer_object out of the file",
} | {
    key: "overrides the attention that moa-data asks for and records, and may name a kernel on the Hub, which is "
    f"code. Take {key} out of the file"
    for key in ("_attn_implementation", "_experts_implementation", "experts_implementation")
}
"""Keys of ``*config.json`` that make transformers run code or read other files -> why they are refused."""

_PICKLED_NAMES = frozenset(
    {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
    | {f"torch {kind}Storage" for kind in ("BFloat16", "Half", "Float", "Double")}
    | {f"torch {kind}Storage" for kind in ("Bool", "Byte", "Char", "Short", "Int", "Long")}
)
"""The only globals that a pickle of plain tensors refers to."""

_DTYPES: dict[str, Any] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@contextmanager
def parsing(trouble: str, error_class: type[Exception], advice: str = "Restore the file.") -> Iterator[None]:
    """Turn whatever a library raises while it parses a file into ``error_class``, in one line.

    Wrap the library's own call and nothing else: for a malformed file transformers raises nearly every builtin type,
    tokenizers a plain ``Exception``.

    Args:
        trouble: what went wrong if it raises, such as "cannot read FILE".

    Raises:
        OSError: the system failed, which says nothing about the file.
        MemoryError: likewise.
    """
    try:
        yield
    except (MemoryError, DrafterError, error_class):
        raise
    except Exception as error:
        if (cause := _system_error(error)) is not None:
            raise cause from error
        reason = first_line(error)
        if isinstance(error, KeyError):
            reason = f"it lacks {reason}"
        raise error_class(f"{trouble} ({reason.rstrip('.')}). {advice}") from error


def _system_error(error: BaseException | None) -> OSError | None:
    """Find the system error among the causes of an error, if any: transformers wraps it in its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            return error
        error = error.__cause__ or error.__context__
    return None


def check_regular(file: Path, max_bytes: int | None = None) -> int:
    """Refuse a file that is not regular or exceeds its size limit, before it is read; returns its size in bytes.

    Raises:
        ValueError: saying which of the two.
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    if max_bytes is not None and found.st_size > max_bytes:
        raise ValueError(f"it has {found.st_size:,} bytes, at most {max_bytes:,} are read")
    return found.st_size


def read_json(file: Path, error_class: type[DrafterError]) -> dict[str, Any]:
    """Read the JSON object of a file; raises ``error_class`` if it holds something else."""
    with parsing(f"cannot read {file}", error_class):
        check_regular(file, MAX_CONFIG_BYTES)
        values = json.loads(file.read_bytes())
    if not isinstance(values, dict):
        raise error_class(f"{file} holds a {type(values).__name__}, expected names and values. Restore the file.")
    return values


def check_model_folder(folder: Path) -> None:
    """Refuse a model folder that would run code, or holds absurd files, before transformers looks at it."""
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".json", ".jinja", ".model", ".txt", ".tiktoken") or file.is_dir():
            continue
        with parsing(f"cannot read {file}", TargetError):
            check_regular(file, MAX_VOCABULARY_BYTES)
        if file.name == "adapter_config.json":
            raise TargetError(
                f"{file}: an adapter would change the weights silently. Merge it into the weights, or remove the file."
            )
        if file.name.endswith("config.json"):
            values = read_json(file, TargetError)
            for key in _CODE_KEYS.keys() & values.keys():
                raise TargetError(f"{file}: {key} {_CODE_KEYS[key]}.")


def read_header(file: Path, error_class: type[Exception]) -> dict[str, TensorHeader]:
    """Read shapes and dtypes of a safetensors file; raises ``error_class`` if it is missing, damaged or cut short."""
    with parsing(f"{file} is damaged or cut short", error_class, "Restore or download it again."):
        n_bytes = check_regular(file)
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, n_bytes - 8):
            raise ValueError(f"its header would have {header_bytes:,} bytes, the file has {n_bytes:,}")
        with safe_open(file, framework="pt") as tensors:
            pieces = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (no dict)
            return {
                name: TensorHeader(tuple(piece.get_shape()), _DTYPES.get(piece.get_dtype(), piece.get_dtype()))
                for name, piece in pieces.items()
            }


def load_pickled_tensors(file: Path | io.BytesIO) -> dict[str, Any]:
    """Load what ``torch.save`` wrote if it is tensors and plain values only; files given by path are memory-mapped.

    ``weights_only`` alone would still let a small file ask for any amount of memory: deflated records, empty tensors
    of any size, views that repeat one number.

    Raises:
        ValueError: it holds something else.
        RuntimeError: it is damaged; also UnpicklingError, EOFError, KeyError, zlib.error and others from its readers.
    """
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("it holds compressed records, which torch.save does not write")
        n_bytes = check_regular(file) if isinstance(file, Path) else file.getbuffer().nbytes
        if sum(record.file_size for record in records) > n_bytes:
            raise ValueError("its records are larger than the file")
        pickles = [record for record in records if record.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_CONFIG_BYTES:
            raise ValueError("torch.save writes no such file")
        for code, name, _ in pickletools.genops(archive.read(pickles[0])):
            if code.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4") or (
                code.name in ("GLOBAL", "INST") and name not in _PICKLED_NAMES
            ):
                raise ValueError(f"it holds {name or 'objects'}, expected tensors and plain values alone")
    if not isinstance(file, Path):
        file.seek(0)
    found = torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, expected a state dict of tensors")
    for name, value in found.items():
        if isinstance(value, Tensor) and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"{name} repeats its values")
    return found
