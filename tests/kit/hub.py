"""A simulated Hugging Face Hub in this process: repositories with commits and branches.

Repositories that clients create accept uploads like the real Hub: the upload mode of each file, the
bytes of large files through the Git LFS batch API, and commits that reference large files by their
sha256. The client must not use Xet.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import httpx2 as httpx
import pytest
from huggingface_hub import __version__, constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory

if __version__.startswith("1."):  # the version that transformers requires up to 5.17
    import httpx  # type: ignore[import-not-found,no-redef]

Files = dict[str, bytes]


class Hub:
    """Repositories by kind and name ("datasets/owner/name"), with their commits and branches.

    Attributes:
        requests: requested paths.
        token: token that uploads require.
        private: repositories that clients created -> whether they are private. Only these
            repositories accept uploads.
        large: contents of large files by their sha256.
        n_uploads_left: number of uploads of large files that still succeed. None is no limit.
        sends: contents to send in place of files. None makes a file missing.
    """

    token, url = "hf_of_the_tests", "http://hub"

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], Files] = {}
        self.branches: dict[str, str] = {}
        self.requests: list[str] = []
        self.private: dict[str, bool] = {}
        self.large: Files = {}
        self.n_uploads_left: int | None = None
        self.sends: dict[str, bytes | None] = {}

    def commit(self, repository: str, files: Files, branch: str = "main") -> str:
        """Make a branch of a repository point to these files, and return the commit."""
        sha = hashlib.sha1(repr((repository, sorted(files.items()))).encode()).hexdigest()
        self.files[repository, sha] = files
        self.branches[f"{repository}@{branch}"] = sha
        return sha

    def create(self, name: str, kind: str, private: bool) -> bool:
        """Create a repository. Returns False if it exists."""
        repository = f"{kind}s/{name}"
        if f"{repository}@main" in self.branches:
            return False
        self.private[repository] = private
        self.commit(repository, {".gitattributes": b""})
        return True

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of the Hub's client."""
        path = unquote(request.url.path).strip("/")
        self.requests.append(path)
        steps, body = path.split("/"), request.read()
        if request.method == "PUT":  # the bytes of a large file
            if self.n_uploads_left == 0:
                return httpx.Response(403)
            self.n_uploads_left = None if self.n_uploads_left is None else self.n_uploads_left - 1
            self.large[hashlib.sha256(body).hexdigest()] = body
            return httpx.Response(200)
        if steps[:2] == ["api", "validate-yaml"]:
            return httpx.Response(200, json={"errors": [], "warnings": []})
        if request.method == "POST" and (
            steps[1] == "repos" or steps[-1] == "batch" or steps[4] != "paths-info"
        ):
            if request.headers.get("authorization") != f"Bearer {self.token}":
                return httpx.Response(401, json={"error": "Invalid username or password."})
            return self._take(steps, body)
        is_file = steps[0] != "api"
        if is_file:
            owner, kind = (steps[1:], "datasets") if steps[0] == "datasets" else (steps, "models")
            repository, what, revision, rest = (
                f"{kind}/{'/'.join(owner[:2])}",
                "",
                owner[3],
                owner[4:],
            )
        else:
            repository, rest = "/".join(steps[1:4]), steps[6:]
            what, revision = (steps[4:6] + ["revision", "main"][len(steps[4:6]) :])[:2]
        sha = self.branches.get(f"{repository}@{revision}", revision)
        files = self.files.get((repository, sha))
        if files is None:
            return httpx.Response(404, headers={"X-Error-Code": "RepoNotFound"})
        if not is_file:
            is_recursive = "recursive=true" in str(request.url).lower()
            return httpx.Response(
                200, json=self._document(repository, what, rest, sha, files, body, is_recursive)
            )
        name = "/".join(rest)
        sent = self.sends.get(name, files.get(name))
        if name not in files or sent is None:
            return httpx.Response(404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_oid(files[name])}"'}
        return httpx.Response(200, content=sent, headers=headers)

    def _take(self, steps: list[str], body: bytes) -> httpx.Response:
        """Answer a request that changes a repository."""
        repository = "/".join(steps[1:4])
        if steps[1] == "repos":
            asked = json.loads(body)
            name, kind = (
                f"{asked.get('organization') or 'me'}/{asked['name']}",
                asked.get("type") or "model",
            )
            is_new = self.create(
                name, kind, asked.get("private") or asked.get("visibility") == "private"
            )
            url = f"{self.url}/{'datasets/' if kind == 'dataset' else ''}{name}"
            return httpx.Response(200 if is_new else 409, json={"url": url})
        if steps[-1] == "batch":
            objects = json.loads(body)["objects"]
            for each in objects:
                if each["oid"] not in self.large:
                    each["actions"] = {"upload": {"href": f"{self.url}/large/{each['oid']}"}}
            return httpx.Response(200, json={"objects": objects, "transfer": "basic"})
        if steps[4] == "preupload":
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = [
                {"path": name, "uploadMode": _mode(name), "shouldIgnore": False} for name in names
            ]
            return httpx.Response(200, json={"files": modes})
        files = dict(self.files[repository, self.branches[f"{repository}@main"]])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
        commit = self.commit(repository, files)
        url = f"{self.url}/{repository.removeprefix('models/')}/commit/{commit}"
        return httpx.Response(
            200, json={"commitUrl": url, "commitOid": commit, "pullRequestUrl": ""}
        )

    def _document(
        self,
        repository: str,
        what: str,
        folder: list[str],
        sha: str,
        files: Files,
        body: bytes,
        is_recursive: bool,
    ) -> Any:
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            facts = {
                "_id": "1",
                "id": repository.partition("/")[2],
                "sha": sha,
                "siblings": siblings,
                "tags": [],
            }
            return facts | {"private": self.private.get(repository, False)}
        folders = sorted(
            {"/".join(name.split("/")[:n]) for name in files for n in range(1, name.count("/") + 1)}
        )
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": name, "size": 0, "oid": sha} for name in folders
        ]
        for name, content in files.items():
            entries.append(
                {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
            )
            if repository in self.private and _mode(name) == "lfs":
                oid = hashlib.sha256(content).hexdigest()
                entries[-1]["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
        if what == "paths-info":
            wanted = (
                json.loads(body)["paths"]
                if body.startswith(b"{")
                else parse_qs(body.decode()).get("paths", [])
            )
            return [entry for entry in entries if entry["path"] in wanted]
        start = "".join(f"{step}/" for step in folder)
        below = [entry for entry in entries if entry["path"].startswith(start)]
        return [
            entry for entry in below if is_recursive or "/" not in entry["path"].removeprefix(start)
        ]


@contextmanager
def serving(patch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Yield a hub that the client connects to, with an empty cache."""
    hub = Hub()
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,  # safe, because no request leaves this process
        "HF_HUB_CACHE": str(cache),
    }.items():
        patch.setattr(constants, name, value)
    transport = httpx.MockTransport(hub.answer)
    set_client_factory(lambda: httpx.Client(transport=transport, follow_redirects=True))
    yield hub
    set_client_factory(default_client_factory)


def _oid(content: bytes) -> str:
    """Return the git blob id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _mode(path: str) -> str:
    """Return the Hub's upload mode: small text files are regular, all others are large files."""
    return (
        "regular" if path.endswith((".json", ".md", ".jinja", ".txt", ".gitattributes")) else "lfs"
    )
