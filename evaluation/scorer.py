"""Loads the user's function that scores answers, for targets that can do tasks."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ..errors import OptionInvalid

Scorer = Callable[[str, str], float]
"""(the prompt's messages as text, the answer's text) -> a number; greater is better."""


def load_scorer(name: str) -> Scorer:
    """Find a scorer.

    Args:
        name: ``module:function`` of a module that Python can import, or ``file.py:function``.

    Raises:
        OptionInvalid: no such module, file or function, or the module raises something.
    """
    where, _, function = name.rpartition(":")
    try:
        module = _from_file(Path(where).expanduser()) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # the user's module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise OptionInvalid(f"--scorer {name}: {where} cannot be imported ({reason}); check the name.") from error
    scorer: Scorer | None = getattr(module, function, None)
    if not callable(scorer):
        raise OptionInvalid(f"--scorer {name}: {where} has no function {function!r}; check the name.")
    return scorer


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
