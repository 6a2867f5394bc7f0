"""Runs functions of test modules in processes of their own, which import nothing again.

Importing the package takes seconds. So one process imports it once, and each function runs in a
fork of that process. pytest itself has threads and must not fork.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["moa_data.tests.kit.apart", "moa_data.pipeline.add", "moa_data.pipeline.regenerate",
     "moa_data.pipeline.recode", "transformers.models.llama.modeling_llama"]
)  # fmt: skip


def _call(
    module: str, name: str, arguments: tuple[Any, ...], environment: dict[str, str], log: str
) -> None:
    with open(log, "w", encoding="utf-8") as stream:
        os.dup2(stream.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    getattr(import_module(module), name)(*arguments)


class Apart:
    """A function of a test module that runs in its own process."""

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the function.

        Args:
            log: file for what the process writes to stderr.
            environment: changes of the environment, made before the function's module is imported.
        """
        module = f"moa_data.{function.__module__.removeprefix('moa_data.')}"
        given = (module, function.__name__, arguments, dict(environment or {}), str(log))
        self._log, self._process = log, _CONTEXT.Process(target=_call, args=given)
        self._process.start()

    def wait(self, timeout_s: float = 3600) -> str:
        """Wait for the end. Return nothing after a success, otherwise the text of the log."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        return "" if code == 0 else f"status {code}: {self._log.read_text(encoding='utf-8')}"
