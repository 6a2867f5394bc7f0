"""Stores and drafters to and from the Hugging Face Hub.

The file by which a reader knows the whole (``store.json``, ``drafter.json``) is pushed last, so that half a push is
neither. Locks and ``runs/`` stay here: they tell of paths and machines.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from ..errors import InteropError, MoaDataError, OutputOccupied
from ..files import PARTIAL_SUFFIX
from ..storage.read.summary import summarize_store
from ..storage.read.verify import verify_store
from ..storage.schema import CARD_NAME, KNOWN_NAMES, LOCK_NAME, MANIFEST_NAME, PUBLISH_NAME, RUNS_NAME
from ..text import Progress, first_line, format_bytes

DRAFTER_FILE = "drafter.json"
_STAY_HERE = frozenset({LOCK_NAME, PUBLISH_NAME, RUNS_NAME})
_NOT_OURS = (".gitattributes", ".gitignore")
_CACHE = ".cache"
"""Where the Hub's client keeps what it has begun to download, below the folder."""
_AGAIN = "What is there is kept: run the same command again to continue."


@dataclass(frozen=True)
class HubReport:
    """What a push or a pull moved.

    Attributes:
        verb: pushed or pulled.
        kind: store or drafter.
        where: address of the repository, or its commit and the folder.
    """

    verb: str
    kind: str
    where: str
    n_files: int
    n_bytes: int

    def describe(self) -> str:
        """Return the report as text."""
        return f"{self.verb}       a {self.kind}: {self.n_files:,} files, {format_bytes(self.n_bytes)}\n{self.where}"


def push(path: Path, repo: str, private: bool = False) -> HubReport:
    """Push a store (as a dataset) or a drafter (as a model) with its card; what is there already is not sent again.

    Args:
        path: a store, a drafter's folder, or a run of `moa-data train`.
        repo: OWNER/NAME; made where it is missing.
        private: make it private; a public repository that is there is then refused.

    Raises:
        InteropError: nothing that can be pushed, no token, or the Hub refuses, cannot be reached, or holds another
            store.
    """
    folder, entry, repo_type = _what(path.expanduser())
    if not os.environ.get("HF_TOKEN"):
        raise InteropError("No token: set HF_TOKEN to one that may write (huggingface.co/settings/tokens).")
    files = _files(folder, entry)
    api = _connect()
    with _one_line(repo):
        url = str(api.create_repo(repo, repo_type=repo_type, private=private, exist_ok=True))
        if private and not api.repo_info(repo, repo_type=repo_type).private:
            raise InteropError(
                f"{repo} is there already and public. Make it private on the Hub, or choose another name."
            )
        there = _remote_files(api, repo, repo_type)
        if repo_type == "dataset" and (strange := _strange(there, folder, files)):
            raise InteropError(f"{repo} holds another dataset ({strange} is not this store's). Choose another name.")
        # A pattern for each file would be compared with each file: name the folders instead.
        tops = {name.split("/")[0] for name in files} - {entry, CARD_NAME}
        first = [*tops, *(f"{top}/*" for top in tops)]
        if CARD_NAME not in files:
            card = drafter_card(json.loads((folder / entry).read_text(encoding="utf-8"))).encode()
            api.upload_file(repo_id=repo, repo_type=repo_type, path_in_repo=CARD_NAME, path_or_fileobj=card)
        for patterns, message in ((first, "Push with moa-data"), ([entry, CARD_NAME], "Finish the push")):
            api.upload_folder(
                repo_id=repo, folder_path=folder, repo_type=repo_type, commit_message=message,
                allow_patterns=patterns, ignore_patterns=[f"*{PARTIAL_SUFFIX}"],
            )  # fmt: skip
    kind = "store" if repo_type == "dataset" else "drafter"
    return HubReport("pushed", kind, f"repository   {url}", len(files), sum(files.values()))


def pull(repo: str, folder: Path, revision: str | None = None, progress: Progress | None = None) -> HubReport:
    """Pull a repository that :func:`push` made, and check every byte.

    Args:
        folder: new, empty, or of a pull that was interrupted.
        revision: branch, tag or commit; None for main.
        progress: called with (bytes, all bytes, message) while a store is verified.

    Raises:
        InteropError: the Hub has no such repository, cannot be reached, holds neither a store nor a drafter, or what
            came is damaged.
        OutputOccupied: the folder holds something else.
    """
    folder = folder.expanduser()
    if folder.exists() and not (folder.is_dir() and ((folder / _CACHE).is_dir() or not any(folder.iterdir()))):
        raise OutputOccupied(f"{folder} is there already. Choose another folder, or delete it.")
    api = _connect()
    with _one_line(repo):
        try:
            repo_type, commit = "dataset", str(api.repo_info(repo, repo_type="dataset", revision=revision).sha)
        except RepositoryNotFoundError:
            repo_type, commit = "model", str(api.repo_info(repo, repo_type="model", revision=revision).sha)
        files = _remote_files(api, repo, repo_type, commit)
        kind = "store" if MANIFEST_NAME in files else "drafter" if DRAFTER_FILE in files else ""
        if not kind:
            raise InteropError(
                f"{repo} has neither {MANIFEST_NAME} nor {DRAFTER_FILE}: nothing that `push` has finished."
            )
        snapshot_download(
            repo, repo_type=repo_type, revision=commit, local_dir=folder, ignore_patterns=list(_NOT_OURS),
            token=os.environ.get("HF_TOKEN") or False, endpoint=os.environ.get("HF_ENDPOINT"),
        )  # fmt: skip
    for name, file in files.items():
        if not _is_same(folder / name, file):
            (folder / name).unlink()
            raise _damaged(f"{folder / name} is not the file of its commit, and was deleted. {_AGAIN}")
    if kind == "store":
        report = verify_store(folder, progress=progress, values=False)
        if not report.ok or report.n_pending_parts:
            raise _damaged(f"{folder} is not whole: `moa-data verify {folder}` says why. Push it again.")
    shutil.rmtree(folder / _CACHE)
    where = f"commit       {commit}\nfolder       {folder}"
    return HubReport("pulled", kind, where, len(files), sum(file.size for file in files.values()))


def drafter_card(facts: dict[str, Any]) -> str:
    """Write the model card of a drafter from its ``drafter.json``: kind, sizes, and the target that it belongs to."""
    target = facts.get("target") or {}
    sizes = {key: value for key, value in facts.items() if key != "target" and isinstance(value, int | float | str)}
    lines = [
        "---", "library_name: moa-data", "pipeline_tag: text-generation", "tags:", "- speculative-decoding",
        "- drafter", "- moa-data", "---", "", f"# A drafter of kind {facts.get('kind', 'unknown')}", "",
        "It proposes tokens to one target, which verifies them; it writes nothing by itself. Use it with moa-data:", "",
        "```bash", "moa-data pull REPO drafter", 'moa-data generate --model TARGET --drafter drafter --prompt "Hi"',
        "```", "", "## Target", "", *(f"- {key}: `{value}`" for key, value in target.items()), "", "## Sizes", "",
        *(f"- {key}: {value}" for key, value in sizes.items()), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _damaged(message: str) -> InteropError:
    error = InteropError(message)
    error.exit_code = 1  # as `verify` ends for a damaged store
    return error


def _what(path: Path) -> tuple[Path, str, str]:
    """Return the folder to push, the file that makes it a whole, and the kind of its repository."""
    if (path / MANIFEST_NAME).is_file():
        summary = summarize_store(path)
        if what := summary.missing or ", ".join(summary.unfinished):
            raise InteropError(f"{path} is incomplete: {what}. Finish it with the command that began it, then push.")
        return path, MANIFEST_NAME, "dataset"
    for folder in (path, path / "drafter"):
        if (folder / DRAFTER_FILE).is_file():
            return folder, DRAFTER_FILE, "model"
    raise InteropError(
        f"{path} is neither a store ({MANIFEST_NAME}), a drafter ({DRAFTER_FILE}) nor a run of `moa-data train`."
    )


def _files(folder: Path, entry: str) -> dict[str, int]:
    """Return the files to push, by their path below the folder, and their bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        top = name.split("/")[0]
        if (top not in KNOWN_NAMES - _STAY_HERE) if entry == MANIFEST_NAME else top.startswith("."):
            continue
        if name.endswith(PARTIAL_SUFFIX):
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InteropError(f"{path} is no plain file. Replace it by the file that it stands for.")
        if path.is_file():
            found[name] = path.stat().st_size
    return found


def _strange(there: dict[str, RepoFile], folder: Path, files: dict[str, int]) -> str:
    """Return the name of a file of the repository that is not of this store; empty if there is none."""
    if MANIFEST_NAME in there and not _is_same(folder / MANIFEST_NAME, there[MANIFEST_NAME]):
        return MANIFEST_NAME
    return next((name for name in there if name not in files), "")


def _remote_files(api: HfApi, repo: str, repo_type: str, revision: str | None = None) -> dict[str, RepoFile]:
    entries = api.list_repo_tree(repo, recursive=True, repo_type=repo_type, revision=revision)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile) and entry.path not in _NOT_OURS}


def _is_same(path: Path, file: RepoFile) -> bool:
    """Whether a file here has the size and the hash that the Hub has of it: of large files sha256, else git's."""
    n_bytes = path.stat().st_size
    digest = hashlib.sha256() if file.lfs else hashlib.sha1(b"blob %d\0" % n_bytes)
    with path.open("rb") as stream:
        while block := stream.read(8 << 20):
            digest.update(block)
    return n_bytes == file.size and digest.hexdigest() == (file.lfs.sha256 if file.lfs else file.blob_id)


def _connect() -> HfApi:
    """Return a client that takes endpoint and token from the environment alone (HF_ENDPOINT, HF_TOKEN)."""
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN") or False)


@contextmanager
def _one_line(repo: str) -> Iterator[None]:
    """Turn the many errors of the client into :class:`InteropError`."""
    try:
        yield
    except RepositoryNotFoundError as error:
        raise InteropError(
            f"The Hub has no repository {repo} that may be seen here. Check the name, and HF_TOKEN in the environment."
        ) from error
    except HFValidationError as error:
        raise InteropError(f"{repo!r} is no name of a repository, expected OWNER/NAME.") from error
    except MoaDataError:
        raise
    except Exception as error:  # of many unrelated types
        reason = first_line(error.__cause__ or error).rstrip(".")  # a failed upload's cause says why
        raise InteropError(f"{repo} on the Hub: {reason}. {_AGAIN}") from error
