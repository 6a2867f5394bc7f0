"""Push stores and drafters to the Hugging Face Hub, and pull them."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from ..errors import DatasetError, MoaDataError
from ..files import PARTIAL_SUFFIX, machine_trouble, refuse_other_files
from ..storage.read.verify import summarize_store, verify_store
from ..storage.schema import (
    CARD_NAME,
    KNOWN_NAMES,
    LOCK_NAMES,
    MANIFEST_NAME,
    RUNS_NAME,
)
from ..text import SILENT, Progress, first_line, format_bytes

DRAFTER_FILE = "drafter.json"
# Files of a store that are pushed. The locks and runs/ are left out, because they name local paths
# and machines.
_PUSHED = KNOWN_NAMES - LOCK_NAMES - {RUNS_NAME}
_NOT_OURS = [".gitattributes", ".gitignore"]
_CACHE = ".cache"  # Subfolder in which the Hub's client keeps unfinished downloads.
_DRAFTER_CARD = """---
library_name: moa-data
pipeline_tag: text-generation
tags:
- speculative-decoding
- drafter
- moa-data
---

# A drafter of kind {kind}

It proposes tokens to one target, which verifies them; it cannot write text alone. Use it with \
moa-data:

```bash
moa-data pull REPO drafter
moa-data generate --model TARGET --drafter drafter --prompt "Hi"
```

## Sizes and target

```json
{facts}
```
"""
_AGAIN = "Finished files are kept. To continue, run the same command again."


def push(path: Path, repo: str, private: bool = False) -> str:
    """Push a store (as a dataset) or a drafter (as a model) with its card.

    Files that are already in the repository are not sent again.

    Args:
        path: a store, a drafter's folder, or a run of `moa-data train`.
        repo: OWNER/NAME. The repository is created if it does not exist.
        private: create a private repository, and refuse an existing public one.

    Returns:
        A text about the files that were pushed.
    """
    folder, repo_type = _what(path.expanduser())
    if not os.environ.get("HF_TOKEN"):
        raise DatasetError(
            "The environment variable HF_TOKEN is not set. Set it to a token with write access "
            "(huggingface.co/settings/tokens)."
        )
    files = _files(folder, repo_type)
    api = _connect()
    with _one_line(repo):
        url = str(api.create_repo(repo, repo_type=repo_type, private=private, exist_ok=True))
        if private and not api.repo_info(repo, repo_type=repo_type).private:
            raise DatasetError(
                f"The repository {repo} exists already and is public, although `private` was "
                "given. Make it private on the Hub, or choose another name."
            )
        if repo_type == "dataset":
            _check_same_store(api, repo, folder, files)
        operations = [CommitOperationAdd(name, folder / name) for name in files]
        if CARD_NAME not in files:
            card = drafter_card(json.loads((folder / DRAFTER_FILE).read_text(encoding="utf-8")))
            operations.append(CommitOperationAdd(CARD_NAME, card.encode()))
        # Add all files in one commit, so that an interrupted push does not change the repository.
        api.create_commit(
            repo, operations, repo_type=repo_type, commit_message="Push with moa-data"
        )
    kind = "store" if repo_type == "dataset" else "drafter"
    return (
        f"pushed       a {kind}: {len(files):,} files, {format_bytes(sum(files.values()))}\n"
        f"repository   {url}"
    )


def pull(repo: str, folder: Path, revision: str | None = None, progress: Progress = SILENT) -> str:
    """Pull a repository that :func:`push` made, and check every byte.

    Args:
        folder: the output folder. It may be missing, empty, or left by an interrupted pull.
        revision: branch, tag or commit. If the argument is None, it is the branch main.

    Returns:
        A text about the files that were pulled.

    Raises:
        DatasetError: the repository does not exist, the Hub cannot be reached, or a file is
            damaged. Damage gives exit code 1.
        OutputOccupied: the folder holds other files.
    """
    folder = folder.expanduser()
    if not (folder / _CACHE).is_dir():
        refuse_other_files(folder, "an interrupted pull")
    api = _connect()
    with _one_line(repo):
        # Look up the commit first. Somebody may push during the download, and all files must come
        # from the same commit.
        repo_type = "dataset" if api.repo_exists(repo, repo_type="dataset") else "model"
        commit = str(api.repo_info(repo, repo_type=repo_type, revision=revision).sha)
        files = _remote_files(api, repo, repo_type, commit)
        kind = "store" if MANIFEST_NAME in files else "drafter" if DRAFTER_FILE in files else ""
        if not kind:
            raise DatasetError(
                f"The repository {repo} has neither {MANIFEST_NAME} nor {DRAFTER_FILE}, so it does "
                "not contain a complete store or drafter. Check the name. If a `moa-data push` to "
                "it was interrupted, run that command again."
            )
        location: Any = {"repo_type": repo_type, "revision": commit, "local_dir": folder}
        api.snapshot_download(repo, ignore_patterns=_NOT_OURS, **location)
        mismatches = api.verify_repo_checksums(repo, **location).mismatches
    if mismatches:
        damaged = folder / mismatches[0]["path"]
        damaged.unlink()
        raise _damaged(
            f"{damaged} was deleted, because its content differed from the file on the Hub. "
            f"{_AGAIN}"
        )
    if kind == "store":
        report = verify_store(folder, progress=progress, values=False)
        if not report.ok or report.n_pending_parts:
            raise _damaged(
                f"The pulled store {folder} is damaged or incomplete. `moa-data verify {folder}` "
                "lists the damaged files. Push the store again, then pull it into an empty folder."
            )
    shutil.rmtree(folder / _CACHE)
    n_bytes = sum(file.size for file in files.values())
    contents = f"a {kind}: {len(files):,} files, {format_bytes(n_bytes)}"
    return f"pulled       {contents}\ncommit       {commit}\nfolder       {folder}"


def drafter_card(facts: dict[str, Any]) -> str:
    """Return the model card of a drafter, with its kind, its sizes and its target.

    Args:
        facts: content of ``drafter.json``.
    """
    text = json.dumps(facts, indent=2, sort_keys=True)
    return _DRAFTER_CARD.format(kind=facts.get("kind", "unknown"), facts=text)


def _damaged(message: str) -> DatasetError:
    error = DatasetError(message)
    error.exit_code = 1  # `verify` uses the same exit code for a damaged store.
    return error


def _what(path: Path) -> tuple[Path, str]:
    """Return the folder to push, and the type of its Hub repository: dataset or model.

    For a store or a drafter, the folder is the path itself. For a run of `moa-data train`, it is
    the folder of the run's drafter.
    """
    if (path / MANIFEST_NAME).is_file():
        summary = summarize_store(path)
        if unfinished := summary.missing or ", ".join(summary.unfinished):
            raise DatasetError(
                f"{path} is incomplete ({unfinished}). Run the command that made it again to "
                "complete it, then push."
            )
        return path, "dataset"
    for folder in (path, path / "drafter"):
        if (folder / DRAFTER_FILE).is_file():
            return folder, "model"
    raise DatasetError(
        f"{path} is neither a store ({MANIFEST_NAME}), nor a drafter ({DRAFTER_FILE}), nor a run "
        "of `moa-data train`. Check the path."
    )


def _files(folder: Path, repo_type: str) -> dict[str, int]:
    sizes = {}
    for path in sorted(folder.rglob("*")):
        top = path.relative_to(folder).parts[0]
        name = path.relative_to(folder).as_posix()
        is_ours = top in _PUSHED if repo_type == "dataset" else not top.startswith(".")
        if is_ours and path.is_file() and not name.endswith(PARTIAL_SUFFIX):
            sizes[name] = path.stat().st_size
    return sizes


def _check_same_store(api: HfApi, repo: str, folder: Path, files: Mapping[str, int]) -> None:
    """Refuse a repository that holds a different store, or files that the pushed store lacks."""
    remote_files = _remote_files(api, repo, "dataset")
    strange = [name for name in remote_files if name not in files]
    if MANIFEST_NAME in remote_files:
        manifest = Path(api.hf_hub_download(repo, MANIFEST_NAME, repo_type="dataset"))
        if manifest.read_bytes() != (folder / MANIFEST_NAME).read_bytes():
            strange.append(MANIFEST_NAME)
    if strange:
        raise DatasetError(
            f"The repository {repo} contains another dataset, because its file {strange[0]} does "
            "not belong to this store. Choose another repository."
        )


def _remote_files(
    api: HfApi, repo: str, repo_type: str, revision: str | None = None
) -> dict[str, RepoFile]:
    entries = api.list_repo_tree(repo, recursive=True, repo_type=repo_type, revision=revision)
    files: dict[str, RepoFile] = {}
    for entry in entries:
        if isinstance(entry, RepoFile) and entry.path not in _NOT_OURS:
            files[entry.path] = entry
    return files


def _connect() -> HfApi:
    """Return a client of the Hub. Its token comes from HF_TOKEN, and a stored login is ignored."""
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN") or False)


@contextmanager
def _one_line(repo: str) -> Iterator[None]:
    """Turn the errors of the Hub's client into :class:`DatasetError` with a message of one line."""
    try:
        yield
    except RepositoryNotFoundError as error:
        raise DatasetError(
            f"The repository {repo} does not exist on the Hub, or your token gives no access to "
            "it. Check the name, and the environment variable HF_TOKEN."
        ) from error
    except HFValidationError as error:
        raise DatasetError(
            f"{repo!r} is not the name of a repository. Give a name such as OWNER/NAME."
        ) from error
    except MoaDataError:
        raise
    # Catch everything, because the Hub's client raises many unrelated types of errors.
    except Exception as error:
        if (trouble := machine_trouble(error)) is not None:
            raise trouble from error
        # If an upload fails, the message that explains the failure is in the error's __cause__.
        reason = first_line(error.__cause__ or error).rstrip(".")
        raise DatasetError(
            f"The Hub reported an error for the repository {repo} ({reason}). {_AGAIN}"
        ) from error
