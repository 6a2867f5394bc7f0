"""Checks that text files end in one newline and have no trailing whitespace. ``--fix`` fixes them.

# Without files, it checks all files that git tracks.
python .ci/whitespace.py [--fix] [FILE ...]
"""

import re
import subprocess
import sys
from pathlib import Path

BINARY = {".zip", ".png", ".safetensors", ".npz", ".pt"}


def mended(text: str) -> str:
    """Return the text without trailing whitespace, and with one newline at its end."""
    stripped = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).rstrip("\n")
    return stripped + "\n" if stripped else ""


def main() -> int:
    """Check the files. Returns 1 if at least one of them was wrong."""
    fix = "--fix" in sys.argv
    tracked = subprocess.run(
        ["git", "ls-files"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    names = [name for name in sys.argv[1:] if name != "--fix"] or tracked
    wrong = []
    for path in map(Path, names):
        if path.suffix in BINARY or not path.is_file():
            continue
        text = path.read_bytes().decode()
        if text != mended(text):
            wrong.append(str(path))
            if fix:
                path.write_bytes(mended(text).encode())
    for name in wrong:
        sys.stderr.write(
            f"{name} "
            + (
                "was corrected.\n"
                if fix
                else "has trailing whitespace, or does not end with exactly one newline. `python "
                ".ci/whitespace.py --fix` corrects it.\n"
            )
        )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
