"""Names of a store's files and folders, and the paths of its parts and commits."""

from typing import cast

from ..files import PARTIAL_SUFFIX
from .paths import AnyPath

MANIFEST_NAME = "store.json"
PLAN_NAME = "plan.parquet"
LOCK_NAME = "store.lock"
PUBLISH_NAME = "publish.lock"
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
        PUBLISH_NAME,
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


def is_known(name: str) -> bool:
    """Whether a store's folder may hold a name, also while that file is written (``plan.parquet.5f3a9c01.partial``)."""
    if not name.endswith(PARTIAL_SUFFIX):
        return name in KNOWN_NAMES
    stem = name.removesuffix(PARTIAL_SUFFIX)
    return stem in KNOWN_NAMES or stem.rpartition(".")[0] in KNOWN_NAMES


def part_name(part: int) -> str:
    """Return a part's name, e.g. ``"part-00012"``."""
    return f"part-{part:05d}"


def commit_path(store: AnyPath, part: int) -> AnyPath:
    """Return the path of a part's commit."""
    return below(store, COMMITS_NAME, f"{part_name(part)}.json")


def target_commit_path(store: AnyPath) -> AnyPath:
    """Return the path of the target bundle's commit."""
    return below(store, COMMITS_NAME, "target.json")


def manifest_commit_path(store: AnyPath) -> AnyPath:
    """Return the path of the commit of store.json and plan.parquet."""
    return below(store, COMMITS_NAME, MANIFEST_NAME)


def publication_path(commit: AnyPath) -> AnyPath:
    """Return the path of the record of what a writer is publishing in a bucket, until the commit is made."""
    return below(cast(AnyPath, commit.parent), f"{commit.name}.partial")


def below(folder: AnyPath, *names: str) -> AnyPath:
    """Return a path below a folder, of the folder's own kind."""
    return cast(AnyPath, folder / "/".join(names))
