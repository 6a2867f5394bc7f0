"""Lists the files of the checkout."""

import os
from collections.abc import Iterator
from pathlib import Path


def visible_files(root: Path) -> Iterator[Path]:
    """Yield the files below a folder, except those in hidden folders such as .venv.

    Other tests may create and delete folders at the same time. ``Path.rglob`` fails if a folder
    vanishes.
    """
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            yield Path(folder, name)
