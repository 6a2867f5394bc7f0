"""A Hub on this machine: repositories with commits and branches that move, behind a small HTTP server."""

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
    """

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.requests: list[str] = []
        self.url = ""

    def commit(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Let a branch of a repository hold these files; returns the commit."""
        sha = hashlib.sha1(repr((repository, sorted(files.items()))).encode()).hexdigest()
        self.files[repository, sha] = files
        self.branches[f"{repository}@{branch}"] = sha
        return sha

    def find(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit of a revision and its files."""
        sha = self.branches.get(f"{repository}@{revision}", revision)
        files = self.files.get((repository, sha))
        return None if files is None else (sha, files)


@contextmanager
def serving() -> Iterator[Hub]:
    """Yield a hub that answers at ``hub.url``."""
    hub = Hub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _answer(self, body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.served.requests.append(path)
        steps = path.split("/")
        if steps[0] == "api":
            repository = "/".join(steps[1:4])
            what, revision = (steps[4:6] + ["revision", "main"][len(steps[4:6]) :])[:2]
            found = self.served.find(repository, revision)
            if found is not None:
                self._send_json(self._document(repository, what, "/".join(steps[6:]), *found, body))
                return
        elif "resolve" in steps:
            at = steps.index("resolve")
            repository = "/".join(steps[:at] if steps[0] == "datasets" else ["models", *steps[:at]])
            found = self.served.find(repository, steps[at + 1])
            name = "/".join(steps[at + 2 :])
            if found is not None and name in found[1]:
                self._send(found[1][name], {"X-Repo-Commit": found[0], "ETag": f'"{_oid(found[1][name])}"'})
                return
            if found is not None:
                self._send(b"", {"X-Error-Code": "EntryNotFound"}, 404)
                return
        self._send(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    def _document(self, repository: str, what: str, folder: str, sha: str, files: dict[str, bytes], body: bytes) -> Any:
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            name = repository.partition("/")[2]
            return {"_id": "1", "id": name, "sha": sha, "siblings": siblings, "private": False, "tags": []}
        folders = sorted({"/".join(name.split("/")[:n]) for name in files for n in range(1, name.count("/") + 1)})
        entries: list[dict[str, Any]] = [{"type": "directory", "path": name, "size": 0, "oid": sha} for name in folders]
        for name, content in files.items():
            entries.append({"type": "file", "path": name, "size": len(content), "oid": _oid(content)})
        if what == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
            return [entry for entry in entries if entry["path"] in wanted]
        start = folder + "/" if folder else ""
        below = [entry for entry in entries if entry["path"].startswith(start)]
        if "recursive=true" in self.path.lower():
            return below
        return [entry for entry in below if "/" not in entry["path"].removeprefix(start)]

    def _send_json(self, document: Any) -> None:
        self._send(json.dumps(document).encode(), {"Content-Type": "application/json"})

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
