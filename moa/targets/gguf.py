"""Lets GGUF files serve as targets.

transformers dequantises each GGUF file once, into a model folder in the user's cache.

The name of this folder is the SHA-256 of the GGUF file. The folder gets this name only when it is
complete. All other code reads it like any other model folder.
"""

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...errors import NotEnoughMemory, TargetError
from ...files import PARTIAL_SUFFIX, check_room, fsync_directory, kind_of, lock_file, parsing
from ...machine import free_memory
from ...text import format_bytes, format_hours
from .bundle import cache_folder, file_sha256
from .model_files import check_regular

_LOG = logging.getLogger(__name__)
_ADVICE = (
    "Give a complete GGUF file (llama-gguf-split --merge joins the files of a split one), or the "
    "model's folder in Hugging Face layout."
)


def model_folder(path: Path) -> Path:
    """Return the model folder for a path: a model folder, a GGUF file, or a folder with one.

    A GGUF file is converted into a model folder in the user's cache. A folder that already is a
    model folder is returned unchanged.
    """
    files = sorted(path.glob("*.gguf"))
    if not path.is_dir():
        if path.suffix != ".gguf":
            raise TargetError(
                f"{path} is {kind_of(path)}, expected a model folder or a file named *.gguf."
            )
        files = [path]
    if not files or any(path.glob("*.safetensors")):
        return path
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise TargetError(
            f"{path} holds several GGUF files ({names}). Give the path of one of them."
        )
    check_regular(files[0])
    folder = cache_folder("gguf") / file_sha256(files[0])
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Only one process may convert at a time, because two conversions might not fit into memory.
        with open(lock_file(folder.parent / "lock", waits=True)):
            # Delete the incomplete folders of processes that were killed while they converted.
            for leftover in folder.parent.glob(f"*{PARTIAL_SUFFIX}"):
                shutil.rmtree(leftover)
            # Another process may have converted the file while this process waited for the lock.
            if not folder.is_dir():
                _convert(files[0], folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a model folder.

    Raises TargetError if transformers reads only a part of the file.
    """
    import accelerate  # noqa: F401  # transformers needs accelerate to load a GGUF file.
    import gguf
    from transformers import GgufConfig

    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(PARTIAL_SUFFIX, dir=folder.parent) as scratch,
        parsing(f"{file} cannot be converted", TargetError, _ADVICE),
    ):
        reader = gguf.GGUFReader(file)
        types: set[str] = set()
        n_values = 0
        for tensor in reader.tensors:
            types.add(tensor.tensor_type.name)
            n_values += tensor.n_elements
        dtype = torch.float16 if "F16" in types else torch.float32
        if types - {"F16", "F32"}:
            # Use bfloat16, because its rounding error is smaller than the error of the
            # quantisation.
            dtype = torch.bfloat16
        n_bytes = n_values * dtype.itemsize
        n_free = free_memory()
        # While transformers loads the file, it holds one tensor after another in float32 for a
        # moment. So require a quarter more memory than the weights take.
        if n_free is not None and n_free < 1.25 * n_bytes:
            raise NotEnoughMemory(
                f"converting {file} to weights that are not quantised takes "
                f"{format_bytes(1.25 * n_bytes)} of memory, but only {format_bytes(n_free)} are "
                "free. Free some memory."
            )
        check_room(
            folder, n_bytes, "Free some space, or set XDG_CACHE_HOME to a folder on a larger disk."
        )
        _LOG.warning(
            "converting %s to weights that are not quantised, %s in %s; this is done only once",
            file.name,
            format_bytes(n_bytes),
            folder,
        )
        # transformers also reads other files next to the GGUF file. So make a link to the GGUF file
        # in an empty folder.
        link = Path(scratch) / "model.gguf"
        link.symlink_to(file.resolve())
        tokenizer = AutoTokenizer.from_pretrained(
            scratch, gguf_file=link.name, trust_remote_code=False
        )
        model = AutoModelForCausalLM.from_pretrained(
            scratch,
            gguf_file=link.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
            use_safetensors=True,
        )
        unread = [key for key in reader.fields if key.endswith(".rope.scaling.type")]
        if unread or model.num_parameters() != n_values:
            raise TargetError(
                f"transformers does not read {unread or 'all weights'} from {file}, so the model "
                f"would be wrong (it has read {model.num_parameters():,} of {n_values:,} weights). "
                f"{_ADVICE}"
            )
        converted = Path(scratch) / "model"
        model.save_pretrained(converted)
        tokenizer.save_pretrained(converted)
        for written in (*converted.iterdir(), converted):
            fsync_directory(written)
        os.replace(converted, folder)
    _LOG.warning("converted %s in %s", file, format_hours(time.monotonic() - began))
