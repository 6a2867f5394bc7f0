"""What of a store or a drafter goes to the Hub, and in which commits.

The file by which a reader knows the whole (``store.json``, ``drafter.json``) comes with the last commit, so that what
was pushed halfway is neither. Left out are locks and ``runs/``, which tell of paths and machines here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import InteropError
from ..storage.care.summary import summarize_store
from ..storage.disk.durable import PARTIAL_SUFFIX, walk
from ..storage.names import CARD_NAME, KNOWN_NAMES, LOCK_NAME, MANIFEST_NAME, PUBLISH_NAME, RUNS_NAME

DRAFTER_FILE = "drafter.json"
COMMIT_FILES, COMMIT_BYTES = 200, 4 << 30
"""Most files and bytes of a commit: what an interruption loses at most, and well below what the Hub takes at once."""

_STAY_HERE = frozenset({LOCK_NAME, PUBLISH_NAME, RUNS_NAME})
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Item:
    """A file of a repository.

    Attributes:
        path: in the repository.
        source: the file here, or its bytes.
    """

    path: str
    source: Path | bytes
    n_bytes: int

    def matches(self, blob_id: str, sha256: str | None) -> bool:
        """Whether a file of the Hub has these bytes, by the hash that the Hub has of it."""
        return self.sha256() == sha256 if sha256 else self.blob_id() == blob_id

    def sha256(self) -> str:
        """The hash by which the Hub knows a large file."""
        return self._digest(hashlib.sha256())

    def blob_id(self) -> str:
        """The hash by which git knows a file."""
        return self._digest(hashlib.sha1(b"blob %d\0" % self.n_bytes))

    def _digest(self, digest: Any) -> str:
        for block in self._blocks():
            digest.update(block)
        found: str = digest.hexdigest()
        return found

    def _blocks(self) -> Iterator[bytes]:
        if isinstance(self.source, bytes):
            yield self.source
            return
        with self.source.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block


@dataclass(frozen=True)
class Contents:
    """What is pushed.

    Attributes:
        repo_type: ``dataset`` for a store, ``model`` for a drafter.
        entry: the file that makes a whole of it.
        commits: the files, commit by commit; the last one has the entry.
    """

    repo_type: str
    entry: str
    commits: tuple[tuple[Item, ...], ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(item.n_bytes for commit in self.commits for item in commit)

    @property
    def n_files(self) -> int:
        """Number of all files."""
        return sum(map(len, self.commits))


def contents_of(path: Path, most_files: int = COMMIT_FILES, most_bytes: int = COMMIT_BYTES) -> Contents:
    """List what a store, a drafter's folder or a training run gives to the Hub.

    Raises:
        InteropError: it is none of these, or a store that is not whole.
        StoreError: it is a store that cannot be read.
    """
    path = path.expanduser()
    if (path / MANIFEST_NAME).is_file() and not (path / "drafter" / DRAFTER_FILE).is_file():
        return _store(path, most_files, most_bytes)
    folder = path if (path / DRAFTER_FILE).is_file() else path / "drafter"
    if (folder / DRAFTER_FILE).is_file():
        return _drafter(folder, most_files, most_bytes)
    raise InteropError(
        f"{path} is neither a store ({MANIFEST_NAME}), a drafter ({DRAFTER_FILE}) nor a run of `moa-data train`. Name "
        "one of them."
    )


def _store(path: Path, most_files: int, most_bytes: int) -> Contents:
    summary = summarize_store(path)
    if what := summary.missing or ", ".join(summary.unfinished):
        raise InteropError(f"{path} is incomplete: {what}. Finish it with the command that began it, then push.")
    items = [item for item in _files(path) if item.path.split("/")[0] in KNOWN_NAMES - _STAY_HERE]
    last = [item for item in items if item.path in (MANIFEST_NAME, CARD_NAME)]
    first = [item for item in items if item not in last]
    return Contents("dataset", MANIFEST_NAME, (*_in_commits(first, most_files, most_bytes), tuple(last)))


def _drafter(folder: Path, most_files: int, most_bytes: int) -> Contents:
    items = [item for item in _files(folder) if not item.path.startswith(".")]
    if not any(item.path == CARD_NAME for item in items):
        card = drafter_card(json.loads((folder / DRAFTER_FILE).read_text(encoding="utf-8"))).encode()
        items.append(Item(CARD_NAME, card, len(card)))
    last = [item for item in items if item.path in (DRAFTER_FILE, CARD_NAME)]
    first = [item for item in items if item not in last]
    return Contents("model", DRAFTER_FILE, (*_in_commits(first, most_files, most_bytes), tuple(last)))


def _files(folder: Path) -> list[Item]:
    found = []
    for root, folders, names in walk(folder):
        folders.sort()
        for name in sorted(names):
            file = root / name
            if file.is_symlink() or not file.is_file():
                raise InteropError(f"{file} is no plain file. Replace it by the file that it stands for.")
            if not name.endswith(PARTIAL_SUFFIX):
                found.append(Item(str(PurePosixPath(file.relative_to(folder))), file, file.stat().st_size))
    return sorted(found, key=lambda item: item.path)


def _in_commits(items: Sequence[Item], most_files: int, most_bytes: int) -> Iterator[tuple[Item, ...]]:
    commit: list[Item] = []
    for item in items:
        if commit and (len(commit) == most_files or sum(one.n_bytes for one in commit) + item.n_bytes > most_bytes):
            yield tuple(commit)
            commit = []
        commit.append(item)
    if commit:
        yield tuple(commit)


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
