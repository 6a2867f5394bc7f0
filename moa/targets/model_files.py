"""Readers for the files of model folders.

A model folder may come from an untrusted source. So no code of the folder is run when its files are
read. All errors have messages of one line.
"""

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...errors import DrafterError, TargetError
from ...files import open_regular, parse_object, parsing, read_bounded

# The dtypes that weights in files may have. The weights are cast to the dtype of the computation.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Maximum size of tokenizer.json, vocab.json, merges.txt and similar files. Real files have up to 35
# MB.
_MAX_VOCABULARY_BYTES = 256 << 20
# Model types for which transformers itself has a causal LM class, so that code in the model folder
# is not needed.
_NATIVE = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
_KERNELS = (
    "overrides the attention that moa-data asks for and records, and may name code on the Hub"
)
# Keys of config.json that describe quantised weights -> quantisation method. This method is
# reported if the value of the key does not name a method.
_QUANTISATION_KEYS = {
    "quantization_config": "unknown",
    "compression_config": "compressed-tensors",
    "quantization": "mlx",
}
# Older quantisation programs write a file with one of these names next to config.json. Name of the
# file -> quantisation method.
_QUANTISED_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
# Keys of ``*config.json`` that make transformers run code or read other files -> the reason for
# refusing the key, as it is shown to the user.
_CODE_KEYS = {
    "auto_map": "names Python code of the folder, and moa-data runs no code of a model folder. "
    "Use the model's native transformers class",
    "gguf_file": "names another file to read",
    "tokenizer_object": "names an object of a Python program",
} | dict.fromkeys(
    ("_attn_implementation", "_experts_implementation", "experts_implementation"), _KERNELS
)

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorHeader(NamedTuple):
    """Shape and dtype of a tensor, read from the header of a safetensors file."""

    shape: tuple[int, ...]
    # The dtype as an object of PyTorch. If PyTorch has no such dtype, this is the dtype's name in
    # the file.
    dtype: Any


def check_regular(file: Path, max_bytes: int | None = None) -> int:
    """Check that a file is a regular file, and return its size in bytes.

    Raises:
        StoreDamaged: the file is not a regular file. Reading a FIFO, for example, would block.
        PermissionError: the current user has no permission to read the file. Without this check,
            safetensors would report that the file is missing.
        ValueError: the file is larger than ``max_bytes``.
    """
    fd = open_regular(file)
    n_bytes = os.fstat(fd).st_size
    os.close(fd)
    if max_bytes is not None and n_bytes > max_bytes:
        raise ValueError(
            f"it is too large: it has {n_bytes:,} bytes, but at most {max_bytes:,} are allowed"
        )
    return n_bytes


def read_json(
    file: Path, error_class: type[DrafterError], allows_infinity: bool = False
) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises ``error_class`` if it holds anything else."""
    with parsing(f"cannot read {file}", error_class):
        return parse_object(read_bounded(file), allows_infinity)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model folder. Raises TargetError if this is not possible."""
    if not (file := folder / "config.json").is_file():
        raise TargetError(f"{folder} has no config.json; give the folder of a transformers model.")
    # Allow infinity, because in configs of Mamba 2 the largest time step is infinite.
    return read_json(file, TargetError, allows_infinity=True)


def check_model_folder(folder: Path) -> None:
    """Refuse a model folder that would make transformers run code, or that has huge files.

    Call this function before transformers reads the folder.

    Raises:
        TargetError: the folder is refused.
    """
    has_config = (folder / "config.json").is_file()
    # In a damaged config, the model type may be a list, which is not hashable. So convert the model
    # type to a text.
    is_native = has_config and str(read_config(folder).get("model_type")) in _NATIVE
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".json", ".jinja", ".model", ".txt", ".tiktoken") or file.is_dir():
            continue
        with parsing(f"cannot read {file}", TargetError):
            check_regular(file, _MAX_VOCABULARY_BYTES)
        if file.name == "adapter_config.json":
            raise TargetError(
                f"{file}: the folder contains an adapter, which would change the weights "
                "silently. Merge it into the weights, or remove the file."
            )
        if file.name.endswith("config.json"):
            for key in (
                _CODE_KEYS.keys() & read_json(file, TargetError, allows_infinity=True).keys()
            ):
                if key == "auto_map" and is_native:
                    # Accept auto_map here. transformers has its own class for this model type, and
                    # ignores auto_map without trust_remote_code.
                    continue
                raise TargetError(f"{file}: {key} {_CODE_KEYS[key]}. Take {key} out of the file.")


def quantised_by(values: Mapping[str, Any], folder: Path | None = None) -> str:
    """Return the quantisation method of a target's weights, as its config.json states it.

    The result is empty if the weights are not quantised.
    """
    text = values.get("text_config")
    for config in (values, text if isinstance(text, dict) else {}):
        for key, default in _QUANTISATION_KEYS.items():
            if (entry := config.get(key)) is None:
                continue
            known = entry if isinstance(entry, dict) else {"quant_method": entry}
            # The first release of transformers with quantisation supported only bitsandbytes, and
            # wrote configs without quant_method. Such configs have keys such as load_in_8bit.
            is_old = any(name.startswith("load_in_") for name in known)
            return str(known.get("quant_method") or ("bitsandbytes" if is_old else default))[:60]
    if folder:
        for name, method in _QUANTISED_FILES.items():
            if (folder / name).is_file():
                return method
    return ""


def read_header(
    file: Path, error_class: type[Exception], advice: str = "Restore or download it again."
) -> dict[str, TensorHeader]:
    """Read the shapes and dtypes of a safetensors file.

    Raises:
        error_class: the file is missing, damaged or truncated.
    """
    with parsing(f"{file} is damaged or cut short", error_class, advice):
        try:
            check_regular(file)
        except FileNotFoundError as error:
            raise error_class(f"{file} is missing. Restore or download it again.") from error
        with safe_open(file, framework="pt") as tensors:
            headers: dict[str, TensorHeader] = {}
            # `tensors` is not a dict and supports no iteration, so `keys()` is necessary.
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_slice(name)
                dtype = tensor.get_dtype()
                headers[name] = TensorHeader(tuple(tensor.get_shape()), _DTYPES.get(dtype, dtype))
            return headers


def load_pickled_tensors(file: Path | io.BytesIO) -> dict[str, Any]:
    """Load a dictionary from a file of ``torch.save``, without running code from the file.

    Call this function within :func:`parsing`, because a damaged file raises errors of many types.
    """
    if isinstance(file, Path):
        check_regular(file)
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))
    if not isinstance(loaded, dict):
        raise ValueError(
            f"it holds a {type(loaded).__name__}, expected a dictionary of tensors (a state dict)"
        )
    return loaded


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Create a safetensors file and sync it to disk.

    If the program is interrupted, an incomplete file remains. Use ``files.replacing`` to prevent
    this.
    """
    # The package safetensors is not used for writing. Only the owner could read a file that the
    # package wrote, and its errors have no errno. Tensors of wide dtypes are written first, so that
    # each tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, tensor in ordered:
        begin = end
        end = end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
        file.flush()
        os.fsync(file.fileno())


def check_finite(
    weights: Mapping[str, Tensor], source: object, error_class: type[DrafterError]
) -> None:
    """Refuse weights with NaN or infinity.

    A cast to another dtype may give infinity, so the weights must have the dtype in which they are
    used.
    """
    for name, values in weights.items():
        # Check only the minimum and the maximum of a tensor. If any value is NaN, both are NaN. An
        # infinite value is itself the minimum or the maximum. This check takes a twentieth of the
        # time of ``isfinite`` over all values.
        if (
            values.is_floating_point()
            and values.numel()
            and not torch.stack(values.aminmax()).isfinite().all()
        ):
            n_bad = int((~values.isfinite()).sum())
            dtype = str(values.dtype).removeprefix("torch.")
            raise error_class(
                f"{source}: {n_bad:,} values of {name} {list(values.shape)} are NaN or infinity in "
                f"{dtype}. Restore the file. Numbers that are too large for float16 need "
                "`dtype=bfloat16` or float32."
            )


def find_problems(
    weights: Mapping[str, Tensor] | Mapping[str, TensorHeader], expected: Mapping[str, Tensor]
) -> str:
    """Describe the first tensor that is missing or unexpected, or has a wrong shape or dtype.

    The result is empty if all tensors fit.
    """
    problems: list[str] = []
    for name in expected:
        if name not in weights:
            problems.append(f"missing tensor {name} {list(expected[name].shape)}")
    for name in weights:
        if name not in expected:
            problems.append(f"unexpected tensor {name} {list(weights[name].shape)}")
    for name, wanted in expected.items():
        if name not in weights:
            continue
        shape = tuple(weights[name].shape)
        dtype = weights[name].dtype
        # A floating-point tensor may be stored in any floating-point dtype.
        dtypes = FLOATS if wanted.is_floating_point() else (wanted.dtype,)
        if shape != wanted.shape:
            problems.append(f"{name} has shape {list(shape)}, expected {list(wanted.shape)}")
        elif dtype not in dtypes:
            known = " or ".join(str(choice).removeprefix("torch.") for choice in dtypes)
            is_dtype = str(dtype).removeprefix("torch.")
            problems.append(f"{name} {list(shape)} is {is_dtype}, expected {known}")
    return f"{problems[0]} ({len(problems)} problems in all)" if problems else ""
