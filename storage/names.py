"""Names of a store's files and folders, and the paths of its parts and commits."""

from pathlib import Path

MANIFEST_NAME = "store.json"
PLAN_NAME = "plan.parquet"
LOCK_NAME = "store.lock"
TARGET_NAME = "target"
PARTS_NAME = "parts"
ZARR_NAME = "zarr.json"
COMMITS_NAME = "commits"
RUNS_NAME = "runs"
CODEC_NAME = "codec"
CARD_NAME = "README.md"
TEXTS_NAME = "texts.arrow"
KNOWN_NAMES = frozenset(
    {
        MANIFEST_NAME,
        PLAN_NAME,
        LOCK_NAME,
        TARGET_NAME,
        PARTS_NAME,
        COMMITS_NAME,
        RUNS_NAME,
        CODEC_NAME,
        CARD_NAME,
        TEXTS_NAME,
    }
)
"""Every name that a store's folder may hold."""


def part_name(part: int) -> str:
    """Return a part's name, e.g. ``"part-00012"``."""
    return f"part-{part:05d}"


def part_folder(store: Path, part: int, schema_version: int) -> Path:
    """Return the folder that the names in a part's commit start from: of all parts, in version 1 of the part's own."""
    folder = store / PARTS_NAME
    return folder / f"{part_name(part)}.zarr" if schema_version == 1 else folder


def commit_path(store: Path, part: int) -> Path:
    """Return the path of a part's commit."""
    return store / COMMITS_NAME / f"{part_name(part)}.json"


def target_commit_path(store: Path) -> Path:
    """Return the path of the target bundle's commit."""
    return store / COMMITS_NAME / "target.json"


def manifest_commit_path(store: Path) -> Path:
    """Return the path of the commit of store.json and plan.parquet."""
    return store / COMMITS_NAME / MANIFEST_NAME
