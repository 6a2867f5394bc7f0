"""Runs S3 servers on loopback: moto's, and SeaweedFS.

moto keeps objects in memory. SeaweedFS persists the writes that it has acknowledged.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moa_data.storage.backend import open_path
from moa_data.storage.paths import RemotePath

ACCESS_KEY, SECRET_KEY = "tester", "secret-of-tester"


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(endpoint: str) -> dict[str, str]:
    """Return the environment variables that let a process find a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def use(endpoint: str) -> Iterator[None]:
    """Let this process find a server. Paths that exist already stay connected to their servers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield


def wait_for(url: str, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    """Wait until a server answers at this URL."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=1.0).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.05)


@contextmanager
def moto() -> Iterator[str]:
    """Run moto's server in its own process, and yield its endpoint."""
    port = free_port()
    command = [
        sys.executable,
        str(Path(__file__).with_name("moto_server.py")),
        "127.0.0.1",
        str(port),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/moto-api/data.json", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class Seaweed:
    """SeaweedFS as one process with the master, the volume server, the filer and the S3 gateway."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        key = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        users = {"identities": [{"name": "tester", "credentials": [key], "actions": actions}]}
        (folder / "ids.json").write_text(json.dumps(users))
        self._ports = [free_port() for _ in range(7)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        master, volume, filer, *internal = self._ports
        weed = shutil.which("weed") or str(Path(sys.executable).with_name("weed"))
        options = {
            "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "dir": self.folder,
            "s3.config": self.folder / "ids.json", "s3.port": self.port,
            "s3.port.grpc": internal[0], "s3.port.iceberg": 0, "s3.port.lance": 0,
            "master.port": master, "master.port.grpc": internal[1], "volume.port": volume,
            "volume.port.grpc": internal[2], "filer.port": filer, "filer.port.grpc": internal[3],
            "volume.max": 8, "master.volumeSizeLimitMB": 64, "master.telemetry": "false",
        }  # fmt: skip
        command = [weed, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_for(self.endpoint, self.process)

    def kill(self) -> None:
        """End the server as a crash would."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def empty_prefix(endpoint: str) -> str:
    """Return the URL of an empty prefix in a bucket, which is created if it is missing.

    SeaweedFS gives each bucket its own volumes, so all tests share one bucket. obstore does not
    create buckets.
    """
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY, region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 20}),
    )  # fmt: skip
    with contextlib.suppress(
        client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists
    ):
        client.create_bucket(Bucket="tests")
    client.close()
    return f"s3://tests/{uuid.uuid4().hex[:12]}"


def read_remote_tree(store: RemotePath) -> dict[str, bytes]:
    """Return what ``stores.read_tree`` returns for the same store on a disk."""
    return {
        name: (store / name).read_bytes()
        for name in store.names_below()
        if not name.startswith("runs/")
    }


def copy_up(folder: Path, url: str) -> RemotePath:
    """Copy a folder to a bucket file by file, like other tools do."""
    target = open_path(url)
    assert isinstance(target, RemotePath)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            target.bucket.put(path.relative_to(folder).as_posix(), path.read_bytes())
    return target
