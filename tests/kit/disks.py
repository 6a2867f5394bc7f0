"""Checks file permissions, and mounts in-memory file systems that are small or read-only.

Mounting needs root.
"""

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


def check_rights(folder: Path, mask: int) -> None:
    """Check that every file and folder of a tree has all the permissions that a umask allows."""
    for path in (folder, *folder.rglob("*")):
        given = 0o777 if path.is_dir() else 0o666
        found = path.stat().st_mode & 0o777
        assert found == given & ~mask, f"{path} has {found:o}, expected {given & ~mask:o}"


def tmpfs(path: Path, options: str) -> AbstractContextManager[Path]:
    """Mount a tmpfs at a new folder. Skips the test if mounting is not allowed."""
    return mounted(path, "-t", "tmpfs", "-o", options, "tmpfs")


@contextmanager
def mounted(path: Path, *arguments: str) -> Iterator[Path]:
    """Call ``mount`` with a new folder. Skips the test if mounting is not allowed."""
    path.mkdir()
    try:
        subprocess.run(["mount", *arguments, str(path)], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("mounting needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
