"""Collects where an output comes from: the command, the code, the versions, the machine and the time."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_PACKAGES = (
    "moa-data", "torch", "transformers", "tokenizers", "datasets", "lightning", "zarr", "numcodecs", "pyarrow", "numpy",
)  # fmt: skip


def collect_provenance(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Describe this run; the answer differs from run to run, so keep it out of files that must be reproducible.

    Returns:
        A JSON-serialisable dict: argv, time_utc, git_sha and git_dirty (None outside a checkout), versions, python,
        platform, machine, n_cpus.
    """
    sha, dirty = _git_state(Path(__file__).resolve().parents[1])
    return {
        "argv": list(sys.argv if argv is None else argv),
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_sha": sha,
        "git_dirty": dirty,
        "versions": _versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "n_cpus": os.cpu_count(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the checkout whose root is ``folder``, and whether tracked files differ from it."""
    # An installed package may lie inside somebody else's checkout, whose commit would say nothing about this code.
    if not (folder / ".git").exists():
        return None, None
    try:
        sha = _git(folder, "rev-parse", "HEAD")
        status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None, None
    return sha.strip(), bool(status.strip())


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True, timeout=10
    ).stdout
