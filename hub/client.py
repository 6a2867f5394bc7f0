"""The Hub's client with the settings of this package, and its many errors as one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from ..errors import InteropError, MoaDataError
from ..text import first_line

_NOT_OURS = (".gitattributes", ".gitignore")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its size in bytes and the hashes that the Hub has of it."""

    path: str
    n_bytes: int
    blob_id: str
    sha256: str | None


def connect() -> HfApi:
    """Return a client that takes endpoint and token from the environment alone (HF_ENDPOINT, HF_TOKEN)."""
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN") or False)


def files_of(api: HfApi, repo: str, repo_type: str, revision: str | None = None) -> dict[str, RemoteFile]:
    """List the files of a revision by their path, those of git itself left out."""
    entries = api.list_repo_tree(repo, recursive=True, repo_type=repo_type, revision=revision)
    files = [entry for entry in entries if isinstance(entry, RepoFile) and entry.path not in _NOT_OURS]
    return {
        file.path: RemoteFile(file.path, file.size, file.blob_id, file.lfs.sha256 if file.lfs else None)
        for file in files
    }


@contextmanager
def one_line(repo: str, advice: str) -> Iterator[None]:
    """Turn what the client raises into :class:`InteropError` with advice."""
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
    except Exception as error:  # the client raises many unrelated types
        # A failed upload is a RuntimeError whose cause says why.
        reason = first_line(error.__cause__ or error).rstrip(".")
        raise InteropError(f"{repo} on the Hub: {reason}. {advice}") from error
