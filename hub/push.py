"""``push``: a store or a drafter to the Hub, commit by commit; what is there already is not sent again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi

from ..errors import InteropError
from ..text import Progress, format_bytes
from .client import RemoteFile, connect, files_of, one_line
from .contents import COMMIT_BYTES, COMMIT_FILES, Contents, Item, contents_of

_AGAIN = "Commits so far are kept: run the same command again to go on."


@dataclass(frozen=True)
class PushReport:
    """What a push did."""

    url: str
    n_files: int
    n_bytes: int
    n_sent: int
    n_sent_bytes: int

    def describe(self) -> str:
        """Return the report as lines."""
        return (
            f"pushed       {self.n_sent:,} of {self.n_files:,} files, {format_bytes(self.n_sent_bytes)} of "
            f"{format_bytes(self.n_bytes)}; the rest was there\nrepository   {self.url}"
        )


def push(
    path: Path,
    repo: str,
    private: bool = False,
    progress: Progress | None = None,
    most_files: int = COMMIT_FILES,
    most_bytes: int = COMMIT_BYTES,
) -> PushReport:
    """Push a store (as a dataset) or a drafter (as a model) with its card.

    Args:
        repo: OWNER/NAME; made where it is missing.
        private: make it private; a public repository that is there is then refused.
        progress: called with (bytes, all bytes, message) per commit.
        most_files: most files of a commit.
        most_bytes: most bytes of a commit, unless one file has more.

    Raises:
        InteropError: the path is neither a whole store nor a drafter.
        InteropError: no token, or the Hub refuses, cannot be reached, or holds another store under this name.
    """
    contents = contents_of(path, most_files, most_bytes)
    if not os.environ.get("HF_TOKEN"):
        raise InteropError(
            "No token: set HF_TOKEN in the environment to one that may write (huggingface.co/settings/tokens)."
        )
    api = connect()
    with one_line(repo, _AGAIN):
        url = str(api.create_repo(repo, repo_type=contents.repo_type, private=private, exist_ok=True))
        if private and not api.repo_info(repo, repo_type=contents.repo_type).private:
            raise InteropError(
                f"{repo} is there already and public. Make it private on the Hub, or choose another name."
            )
        there = files_of(api, repo, contents.repo_type)
        _check_free(contents, there, repo)
        n_sent, n_sent_bytes, done = 0, 0, 0
        for number, commit in enumerate(contents.commits, start=1):
            missing = [item for item in commit if not _is_there(item, there)]
            if missing:
                _send(api, repo, contents.repo_type, missing, f"{number} of {len(contents.commits)}")
            n_sent, n_sent_bytes = n_sent + len(missing), n_sent_bytes + sum(item.n_bytes for item in missing)
            done += sum(item.n_bytes for item in commit)
            if progress:
                progress(done, contents.n_bytes, "push")
    return PushReport(url, contents.n_files, contents.n_bytes, n_sent, n_sent_bytes)


def _is_there(item: Item, there: dict[str, RemoteFile]) -> bool:
    file = there.get(item.path)
    return file is not None and file.n_bytes == item.n_bytes and item.matches(file.blob_id, file.sha256)


def _check_free(contents: Contents, there: dict[str, RemoteFile], repo: str) -> None:
    """Refuse to mix a store with what another one left; a drafter replaces its predecessor file by file."""
    if contents.repo_type != "dataset":
        return
    ours = {item.path: item for commit in contents.commits for item in commit}
    strange = [name for name in there if name not in ours]
    if contents.entry in there and not _is_there(ours[contents.entry], there):
        strange.insert(0, contents.entry)
    if strange:
        raise InteropError(f"{repo} holds another dataset ({strange[0]} is not this store's). Choose another name.")


def _send(api: HfApi, repo: str, repo_type: str, items: list[Item], number: str) -> None:
    operations = [CommitOperationAdd(path_in_repo=item.path, path_or_fileobj=item.source) for item in items]
    api.create_commit(repo, operations, commit_message=f"Push with moa-data, {number}", repo_type=repo_type)
