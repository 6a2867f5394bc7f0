"""A Hub on this machine: repositories with commits and branches that move, behind a small HTTP server.

Repositories that clients make take uploads as the Hub does: the mode of each file, the bytes of large ones through its
batch API of git LFS, and commits that name them by their sha256. The client has to leave Xet out (HF_HUB_DISABLE_XET).
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    """Repositories by kind and name ("datasets/owner/name"): what each commit holds, and where branches point.

    Attributes:
        requests: the paths that were asked for.
        token: the token that uploads need.
        private: repositories that clients made -> whether they are private; only these take uploads.
        large: the bytes of large files by their sha256.
        n_uploads_left: uploads of large files that still succeed; None for all.
        sends: what is sent in place of a file, None for nothing.
    """

    token = "hf_of_the_tests"

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.requests: list[str] = []
        self.url = ""
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.n_uploads_left: int | None = None
        self.sends: dict[str, bytes | None] = {}

    def commit(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Let a branch of a repository hold these files; returns the commit."""
        sha = hashlib.sha1(repr((repository, sorted(files.items()))).encode()).hexdigest()
        self.files[repository, sha] = files
        self.branches[f"{repository}@{branch}"] = sha
        return sha

    def create(self, name: str, kind: str, private: bool) -> bool:
        """Make a repository; returns False where it is there."""
        repository = f"{kind}s/{name}"
        if f"{repository}@main" in self.branches:
            return False
        self.private[repository] = private
        self.commit(repository, {".gitattributes": b""})
        return True

    def find(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit of a revision and its files."""
        sha = self.branches.get(f"{repository}@{revision}", revision)
        files = self.files.get((repository, sha))
        return None if files is None else (sha, files)


@contextmanager
def serving() -> Iterator[Hub]:
    """Yield a hub that answers at ``hub.url``."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        """Take the bytes of a large file."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.hub.n_uploads_left == 0:
            self._send(b"", {}, 403)
            return
        self.hub.n_uploads_left = None if self.hub.n_uploads_left is None else self.hub.n_uploads_left - 1
        self.hub.large[hashlib.sha256(content).hexdigest()] = content
        self._send(b"", {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        steps = unquote(urlsplit(self.path).path).strip("/").split("/")
        if steps[:2] == ["api", "validate-yaml"]:
            self._send_json({"errors": [], "warnings": []})
        elif steps[1] != "repos" and steps[4] not in ("commit", "preupload", "info") and steps[-1] != "batch":
            self._answer(body)
        elif self.headers.get("authorization") != f"Bearer {self.hub.token}":
            self._send(b'{"error": "Invalid username or password."}', {}, 401)
        else:
            self._take(steps, body)

    def _take(self, steps: list[str], body: bytes) -> None:
        """Answer what changes a repository."""
        hub, repository = self.hub, "/".join(steps[1:4])
        hub.requests.append("/".join(steps))
        if steps[1] == "repos":
            asked = json.loads(body)
            name, kind = f"{asked.get('organization') or 'me'}/{asked['name']}", asked.get("type") or "model"
            is_new = hub.create(name, kind, asked.get("private") or asked.get("visibility") == "private")
            place = f"{hub.url}/{'datasets/' if kind == 'dataset' else ''}{name}"
            self._send_json({"url": place}, 200 if is_new else 409)
        elif steps[-1] == "batch":
            objects = json.loads(body)["objects"]
            for each in objects:
                if each["oid"] not in hub.large:
                    each["actions"] = {"upload": {"href": f"{hub.url}/large/{each['oid']}"}}
            self._send_json({"objects": objects, "transfer": "basic"})
        elif steps[4] == "preupload":
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": _mode(name), "shouldIgnore": False} for name in names]
            self._send_json({"files": modes})
        else:
            _, before = hub.find(repository, "main") or ("", {})
            files = dict(before)
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
            commit, place = hub.commit(repository, files), repository.removeprefix("models/")
            url = f"{hub.url}/{place}/commit/{commit}"
            self._send_json({"commitUrl": url, "commitOid": commit, "pullRequestUrl": ""})

    def _answer(self, body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(path)
        steps = path.split("/")
        if steps[0] == "api":
            what, revision = (steps[4:6] + ["revision", "main"][len(steps[4:6]) :])[:2]
            if (found := self.hub.find("/".join(steps[1:4]), revision)) is not None:
                self._send_json(self._document("/".join(steps[1:4]), what, "/".join(steps[6:]), *found, body))
                return
        elif "resolve" in steps:
            at = steps.index("resolve")
            repository = "/".join(steps[:at] if steps[0] == "datasets" else ["models", *steps[:at]])
            if (found := self.hub.find(repository, steps[at + 1])) is not None:
                name = "/".join(steps[at + 2 :])
                true = found[1].get(name)
                sent = self.hub.sends.get(name, true)
                if true is None or sent is None:
                    self._send(b"", {"X-Error-Code": "EntryNotFound"}, 404)
                else:
                    self._send(sent, {"X-Repo-Commit": found[0], "ETag": f'"{_oid(true)}"'})
                return
        self._send(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    def _document(self, repository: str, what: str, folder: str, sha: str, files: dict[str, bytes], body: bytes) -> Any:
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            facts = {"_id": "1", "id": repository.partition("/")[2], "sha": sha, "siblings": siblings, "tags": []}
            return facts | {"private": self.hub.private.get(repository, False)}
        folders = sorted({"/".join(name.split("/")[:n]) for name in files for n in range(1, name.count("/") + 1)})
        entries: list[dict[str, Any]] = [{"type": "directory", "path": name, "size": 0, "oid": sha} for name in folders]
        for name, content in files.items():
            entries.append({"type": "file", "path": name, "size": len(content), "oid": _oid(content)})
            if repository in self.hub.private and _mode(name) == "lfs":
                oid = hashlib.sha256(content).hexdigest()
                entries[-1]["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
        if what == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
            return [entry for entry in entries if entry["path"] in wanted]
        start = folder + "/" if folder else ""
        is_recursive = "recursive=true" in self.path.lower()
        below = [entry for entry in entries if entry["path"].startswith(start)]
        return [entry for entry in below if is_recursive or "/" not in entry["path"].removeprefix(start)]

    def _send_json(self, document: Any, status: int = 200) -> None:
        self._send(json.dumps(document).encode(), {"Content-Type": "application/json"}, status)

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    """The name that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _mode(path: str) -> str:
    """How the Hub wants a file: small texts as they are, all else as large files."""
    return "regular" if path.endswith((".json", ".md", ".jinja", ".txt", ".gitattributes")) else "lfs"
