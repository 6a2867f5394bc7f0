"""Runs a server and a client process on both ends of an emulated network, and counts bytes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from benchmarks.serving.network_tunnel import Condition, Tunnel

CLIENT = ("-m", "benchmarks.serving.network_client")
HTTP_PORT, GRPC_PORT = 8000, 8001
JSON = dict[str, Any]


class World:
    """A server and a client process with a network between them. The client runs jobs.

    Args:
        model: The target's folder.
        drafters: Maps the name of each drafter to a run of ``moa-data train``. The server calls the
            drafter by the name of the run's folder.
        target_ms: Minimum time of a target call.
        folder: Folder for the logs of both processes.
    """

    def __init__(
        self,
        model: str,
        drafters: dict[str, str],
        condition: Condition,
        target_ms: float,
        folder: Path,
        seed: int = 0,
    ) -> None:
        self._tunnel = Tunnel(condition, seed)
        self._logs = [(folder / f"{side}.log").open("a") for side in ("server", "client")]
        try:
            address = self._tunnel.server_address
            self._server = self._start(
                "server", "-m", "moa_data", "serve", "--model", model, "--device", "cpu",
                "--drafter", ",".join(drafters.values()), "--target-ms", str(target_ms),
                "--host", address, "--port", str(HTTP_PORT), "--grpc-port", str(GRPC_PORT),
            )  # fmt: skip
            self._read(self._server)
            settings = {
                "http": f"http://{address}:{HTTP_PORT}", "grpc": f"{address}:{GRPC_PORT}",
                "model": Path(model).name, "runs": drafters,
                "served_names": {name: Path(run).name for name, run in drafters.items()},
            }  # fmt: skip
            self._client = self._start("client", *CLIENT, json.dumps(settings))
            self._read(self._client)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End both processes and the network."""
        self._tunnel.close()
        for log in self._logs:
            log.close()

    def run(self, job: JSON, on_request: Callable[[JSON], None] | None = None) -> JSON:
        """Let the client process run a job.

        Returns its result, with the bytes of the job's IP packets.

        Args:
            on_request: Called with each request that the client sends before its result.
        """
        counted = []
        self._say(job)
        while True:
            said: JSON = json.loads(self._read(self._client))
            if "request" not in said:
                break
            if said["request"] == "count":
                counted.append(self._tunnel.counts())
                self._say({})
            else:
                assert on_request is not None
                on_request(said)
        before, after = counted
        return said | {
            "bytes_up": after["up"].n_bytes - before["up"].n_bytes,
            "bytes_down": after["down"].n_bytes - before["down"].n_bytes,
            "packets_lost": sum(after[way].lost - before[way].lost for way in after),
        }

    def cut(self) -> float:
        """Lose all packets. Returns the time by ``time.monotonic``, which all processes share."""
        self._tunnel.cut()
        return time.monotonic()

    def restore(self) -> float:
        """Carry packets again. Returns the time."""
        self._tunnel.restore()
        return time.monotonic()

    def _start(self, side: Any, *arguments: str) -> "subprocess.Popen[str]":
        log = self._logs[side == "client"]
        return self._tunnel.start(
            [sys.executable, *arguments],
            side,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def _say(self, what: JSON) -> None:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(what) + "\n")
        self._client.stdin.flush()

    def _read(self, program: "subprocess.Popen[str]") -> str:
        assert program.stdout is not None
        line = program.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{program.args!r} has ended; its log is in the same folder as {self._logs[0].name}"
            )
        return line
