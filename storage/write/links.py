"""Refuses symbolic links inside a store, as files behind them do not belong to it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import PurePosixPath

from ...errors import StoreDamaged
from ..disk.durable import PARTIAL_SUFFIX
from ..names import KNOWN_NAMES
from ..paths import RemotePath, StorePath


def refuse_links(store: StorePath, folders: Iterable[StorePath] | None = None) -> None:
    """Refuse symbolic links among the names in a store's folder, and below some of them.

    Names that no store has are passed over, as no writer touches them; the store's folder itself may be a link.

    Args:
        folders: folders of the store below which to look; None for all.
    """
    if isinstance(store, RemotePath):  # buckets have no links
        return
    inside: list[str] = []
    with os.scandir(store) as entries:
        for entry in entries:
            if entry.name.removesuffix(PARTIAL_SUFFIX) in KNOWN_NAMES:
                _refuse_link(entry.path, entry.is_symlink())
                inside += [entry.path] if entry.is_dir(follow_symlinks=False) else []
    if folders is not None:
        inside = [str(folder) for folder in folders if os.path.lexists(str(folder))]
        for path in inside:
            _refuse_link(path, os.path.islink(path))
    while inside:
        with os.scandir(inside.pop()) as entries:
            for entry in entries:
                _refuse_link(entry.path, entry.is_symlink())
                if entry.is_dir(follow_symlinks=False):
                    inside.append(entry.path)


def refuse_linked_folders(store: StorePath, folder: StorePath, names: Iterable[str]) -> None:
    """Refuse symbolic links among the names in a store's folder, and on the paths to folders in one of its folders.

    Unlike :func:`refuse_links` it does not look at the files in these folders, which are tens of thousands: a writer
    makes new files there, and replaces or deletes names, never the files behind them.
    """
    refuse_links(store, folders=())
    if isinstance(folder, RemotePath):
        return
    ways = {parent for name in names for parent in (PurePosixPath(name), *PurePosixPath(name).parents)}
    for way in sorted(ways):
        path = os.fspath(folder / way)
        _refuse_link(path, os.path.islink(path))


def _refuse_link(path: str, is_link: bool) -> None:
    if is_link:
        raise StoreDamaged(
            f"{path} is a symbolic link to {os.readlink(path)!r}, and nothing inside a store is written or deleted "
            "through a link. Put the files themselves in its place, or move the whole store and link its folder."
        )
