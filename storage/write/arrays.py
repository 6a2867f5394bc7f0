"""Writes the Zarr metadata of a store's arrays, which all parts share, before the first part."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import StoreDamaged
from ..disk.checking import check_guard, exists
from ..disk.durable import disk_full_guard, fsync_directory, make_folder, write_new
from ..documents import read_bounded
from ..names import PARTS_NAME, ZARR_NAME, manifest_commit_path
from ..parts.grid import ArrayGrid, array_grid, grid_from_metadata, zarr_metadata
from ..parts.manifest_commit import find_manifest_damage, restore_files
from ..paths import StorePath
from ..schema import StoredArray


def lay_out(store: StorePath, arrays: Iterable[StoredArray], n_parts: int, longest_part: int) -> dict[str, ArrayGrid]:
    """Write the metadata of arrays where it is missing, and return the grid of each by its name.

    Existing metadata stays, also where another release chose another grid: later parts follow it.

    Args:
        longest_part: tokens of the longest part, padding included.

    Raises:
        StoreDamaged: metadata that is there is damaged, and not what this release would write.
        StorageUnavailable: no room.
    """
    wanted = {array.name: array for array in arrays}
    documents = zarr_metadata((array, array_grid(array, n_parts, longest_part)) for array in wanted.values())
    contents = {f"{PARTS_NAME}/{name}": content for name, content in documents.items()}
    with check_guard(store):
        if all(path != manifest_commit_path(store) for path, _ in find_manifest_damage(store)):
            restore_files(store, contents)  # else no commit tells the original bytes, and readable metadata is taken
    for name, content in sorted(contents.items(), key=lambda item: item[0].count("/")):  # groups before their members
        path = store / name
        with check_guard(store):
            is_there = exists(path)
        if not is_there:
            with disk_full_guard(path):
                make_folder(path.parent)
                write_new(path, content)
                fsync_directory(path.parent.parent)
    grids = {}
    for name, array in wanted.items():
        path = store / PARTS_NAME / name / ZARR_NAME
        try:
            with check_guard(store):
                grids[name] = grid = grid_from_metadata(read_bounded(path), array, str(path))
        except (ValueError, StoreDamaged) as error:
            raise StoreDamaged(f"{error} Restore the file from a copy.") from error
        if grid.shape[0] != n_parts * grid.part_rows or grid.part_rows < array.n_rows(longest_part):
            raise StoreDamaged(
                f"{path} has {grid.shape[0]} rows and {grid.part_rows} for each part, which is not what the plan's "
                f"{n_parts} parts of up to {longest_part} tokens need. Restore the file from a copy."
            )
    return grids
