"""``pull``: a store or a drafter from the Hub, with every file compared with the hashes of its commit."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from ..errors import InteropError, OutputOccupied
from ..storage.care.verify import verify_store
from ..storage.disk.durable import walk
from ..storage.names import MANIFEST_NAME
from ..text import Progress, format_bytes
from .client import RemoteFile, connect, files_of, one_line
from .contents import DRAFTER_FILE, Item

_CACHE = ".cache"
"""Where the Hub's client keeps what it has begun to download, below the folder."""
_AGAIN = "What was downloaded is kept: run the same command again to go on."


@dataclass(frozen=True)
class PullReport:
    """What a pull gave."""

    folder: Path
    kind: str
    commit: str
    n_files: int
    n_bytes: int

    def describe(self) -> str:
        """Return the report as lines."""
        return (
            f"pulled       a {self.kind}: {self.n_files:,} files, {format_bytes(self.n_bytes)}, all checksums right\n"
            f"commit       {self.commit}\nfolder       {self.folder}"
        )


def pull(repo: str, folder: Path, revision: str | None = None, progress: Progress | None = None) -> PullReport:
    """Pull a repository that :func:`push` made.

    Args:
        folder: new, empty, or of a pull that was interrupted.
        revision: branch, tag or commit; None for main.
        progress: called with (bytes, all bytes, message) while bytes are checked.

    Raises:
        InteropError: the Hub has no such repository, cannot be reached, or holds neither a store nor a drafter.
        OutputOccupied: the folder holds something else.
    """
    folder = folder.expanduser()
    if folder.exists() and not (folder.is_dir() and ((folder / _CACHE).is_dir() or not any(folder.iterdir()))):
        raise OutputOccupied(f"{folder} is there already. Choose another folder, or delete it.")
    api = connect()
    with one_line(repo, _AGAIN):
        repo_type, commit = _find(api, repo, revision)
        files = files_of(api, repo, repo_type, commit)
        kind = "store" if MANIFEST_NAME in files else "drafter" if DRAFTER_FILE in files else ""
        if not kind:
            raise InteropError(
                f"{repo} has neither {MANIFEST_NAME} nor {DRAFTER_FILE}: nothing that `push` has finished."
            )
        snapshot_download(
            repo, repo_type=repo_type, revision=commit, local_dir=folder, allow_patterns=list(files),
            token=os.environ.get("HF_TOKEN") or False, endpoint=os.environ.get("HF_ENDPOINT"),
        )  # fmt: skip
    _check_files(folder, files, progress)
    if kind == "store":
        report = verify_store(folder, progress=progress, values=False)
        report.check_complete(folder)
        if not report.ok or report.n_pending_parts:
            raise _damaged(
                f"{folder} is not whole: `moa-data verify {folder}` says why. Push it again from its source."
            )
    shutil.rmtree(folder / _CACHE)
    return PullReport(folder, kind, commit, len(files), sum(file.n_bytes for file in files.values()))


def _find(api: HfApi, repo: str, revision: str | None) -> tuple[str, str]:
    """Return type and commit of a repository: a dataset's where there is one, else a model's."""
    try:
        return "dataset", str(api.repo_info(repo, repo_type="dataset", revision=revision).sha)
    except RepositoryNotFoundError:
        return "model", str(api.repo_info(repo, repo_type="model", revision=revision).sha)


def _check_files(folder: Path, files: dict[str, RemoteFile], progress: Progress | None) -> None:
    total, done = sum(file.n_bytes for file in files.values()), 0
    for name, file in sorted(files.items()):
        item = Item(name, folder / name, (folder / name).stat().st_size)
        if item.n_bytes != file.n_bytes or not item.matches(file.blob_id, file.sha256):
            item.source.unlink()  # type: ignore[union-attr]  # a path: it was made a line above
            raise _damaged(f"{folder / name} is not the file of its commit, and was deleted. {_AGAIN}")
        done += file.n_bytes
        if progress:
            progress(done, total, "check")
    for root, folders, names in walk(folder):
        if root == folder and _CACHE in folders:
            folders.remove(_CACHE)
        for name in names:
            if str((root / name).relative_to(folder)) not in files:
                raise _damaged(f"{root / name} is not in this commit. Delete {folder} and pull again.")


def _damaged(message: str) -> InteropError:
    error = InteropError(message)
    error.exit_code = 1  # as `verify` ends for a damaged store
    return error
