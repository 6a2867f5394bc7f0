"""Writes constraints.txt from pip's resolution of all extras.

`make lock` lets pip resolve the versions of all packages and write them to the file REPORT, with
`pip install --dry-run --ignore-installed --report REPORT`. This program reads names and versions
from REPORT.

    python .ci/lock.py REPORT
"""

import json
import platform
import re
import sys
from pathlib import Path

HEADER = (
    "# The versions that the tests pass with (python {}). `make setup` installs these, "
    "`make lock` renews them.\n"
)

# Packages that constraints.txt leaves out: build tools, the project itself, and packages that only
# the CUDA build of torch needs. The file must work with the CPU build of torch, too.
SKIPPED = re.compile(r"(pip|setuptools|wheel|moa-data|triton|nvidia-.*|cuda-.*)$")


def main() -> None:
    """Write constraints.txt to the folder of the project's pyproject.toml."""
    report = json.loads(Path(sys.argv[1]).read_text())
    found = {
        item["metadata"]["name"]: item["metadata"]["version"].split("+")[0]
        for item in report["install"]
    }
    kept = sorted((name for name in found if not SKIPPED.match(name.lower())), key=str.lower)
    header = HEADER.format(".".join(platform.python_version_tuple()[:2]))
    target = Path(__file__).parents[1] / "constraints.txt"
    target.write_text(header + "".join(f"{name}=={found[name]}\n" for name in kept))
    sys.stdout.write(f"{target.name}: {len(kept)} packages\n")


if __name__ == "__main__":
    main()
