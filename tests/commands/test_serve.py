"""The command `serve` as a process: it prints its address, answers, and obeys signals."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.live import Target
from moa_data.serving.run import bind
from moa_data.tests.kit.attackers import HTTP2_PREFACE, connect, wait_for_end
from moa_data.tests.kit.certificates import make_certificates
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import write_target
from moa_data.tests.kit.serving import wait_for


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target whose texts do not end."""
    folder = write_target(tmp_path_factory.mktemp("serve") / "tiny", eos_token_id=399)
    target = Target.load(str(folder))
    save_drafter(build_drafter(target.model, target=target.identity), folder.parent / "run")
    return folder


@pytest.fixture
def tls(tmp_path: Path) -> tuple[Path, list[str]]:
    """Return the file of an authority, and the options of a server with its certificate."""
    authority, settings = make_certificates(tmp_path)
    return authority, ["--tls-cert", settings["tls_cert"], "--tls-key", settings["tls_key"]]


@contextmanager
def serving(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run the command, and yield the process, its first line and the address in that line."""
    words = f"-m moa_data serve --model {model} --port 0 --grpc-port 0".split()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *words, *options], stdout=pipe, stderr=pipe, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"https?://\S+/v1", line)
        if address is None:
            pytest.fail(f"no address: {line} {process.communicate()}")
        yield process, line, address[0]
    finally:
        process.kill()
        process.communicate()


def ports_of(line: str) -> list[int]:
    ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", line)]
    assert len(ports) == 2
    return ports


GOAWAY = b"\x00\x00\x0c\x07\x00" + bytes(8) + b"\xff\xff\xff\xffwhat"
"""An HTTP/2 frame with a text that gRPC's C library would log."""


def fail_handshakes(ports: Sequence[int]) -> None:
    """Send bytes that are no handshake. The libraries of the ports would log that themselves."""
    for port in ports:
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x28", bytes(1000)):
            with connect(("127.0.0.1", port)) as connection:
                connection.sendall(said)
                wait_for_end(connection)


def send_goaway(port: int, authority: Path) -> None:
    trusted = ssl.create_default_context(cafile=authority)
    trusted.set_alpn_protocols(["h2"])
    with connect(("127.0.0.1", port), trusted) as connection:
        connection.sendall(HTTP2_PREFACE + GOAWAY)
        # The server answers, and would close the connection after most of a minute.
        assert connection.recv(1)


def check_draining(address: str, trusted: ssl.SSLContext) -> None:
    """Check that new connections are accepted and told that the server is draining."""
    health = address.removesuffix("/v1") + "/health"
    wait_for(lambda: httpx.get(health, verify=trusted).status_code == 503, seconds=60)
    assert httpx.get(health, verify=trusted).json() == {"status": "draining"}
    body = {"model": "tiny", "prompt": "a"}
    answer = httpx.post(f"{address}/completions", json=body, verify=trusted)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "draining"
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("heeded_signals")
def test_signals_let_answers_end(
    model: Path, tls: tuple[Path, list[str]], number: signal.Signals
) -> None:
    """The libraries below write nothing into the log, whose lines are JSON, after garbage."""
    from openai import OpenAI

    authority, options = tls
    trusted = ssl.create_default_context(cafile=authority)
    drafting = ("--drafter", str(model.parent / "run"), "--target-ms", "100", "--tree", "3")
    with serving(model, *drafting, *options) as (process, line, address):
        assert line.startswith("serving tiny on https://127.0.0.1:")
        assert re.search(r" and gRPC 127\.0\.0\.1:\d+ \(drafters: run\)\n", line)
        fail_handshakes(ports_of(line))
        send_goaway(ports_of(line)[1], authority)
        with (
            httpx.Client(verify=trusted) as http,
            OpenAI(
                base_url=address, api_key="none", max_retries=0, timeout=60, http_client=http
            ) as client,
        ):
            stream = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=30,
                temperature=0,
                stream=True,
            )
            next(stream)
            process.send_signal(number)
            check_draining(address, trusted)
            time.sleep(0.5)
            check_draining(address, trusted)
            reasons = [chunk.choices[0].finish_reason for chunk in stream]
        _, stderr = process.communicate(timeout=60)
    assert reasons[-1] == "length"
    assert process.returncode == 128 + number
    *rest, last = stderr.splitlines()
    assert last == "The server has stopped. All answers were complete."
    lines = [json.loads(line) for line in rest if line.startswith("{")]
    others = {line for line in rest if not line.startswith("{")}
    assert others <= {
        "", "The command finishes what it has started; press Ctrl-C again to stop at once."
    }  # fmt: skip
    assert any(line.get("message", "").startswith("memory: up to ") for line in lines)
    (request,) = [line for line in lines if "new_tokens" in line]
    assert (request["status"], request["new_tokens"], request["finish"]) == (200, 30, "length")


@pytest.mark.slow
def test_a_second_signal_does_not_wait(model: Path) -> None:
    from openai import OpenAI

    with (
        serving(model, "--target-ms", "500") as (process, _, address),
        OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60) as client,
    ):
        stream = client.completions.create(
            model="tiny", prompt="Hello", max_tokens=200, stream=True
        )
        next(stream)
        process.send_signal(signal.SIGTERM)
        next(stream)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        stream.close()
    assert process.returncode == 143
    assert stderr.splitlines()[-1] == "The server has stopped. It cut off 1 answer before the end."
    assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.usefixtures("heeded_signals")
def test_garbage_on_both_ports_leaves_few_lines(model: Path, tls: tuple[Path, list[str]]) -> None:
    authority, options = tls
    trusted = ssl.create_default_context(cafile=authority)
    with serving(model, *options) as (process, line, _):
        ports = ports_of(line)
        assert process.stderr is not None
        # A thread writes this line at any time after the start.
        first = json.loads(process.stderr.readline())
        assert first["message"].startswith("memory: ")
        for _ in range(2):
            fail_handshakes(ports)
        for _ in range(24):
            with connect(("127.0.0.1", ports[0]), trusted) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert wait_for_end(connection).startswith(b"HTTP/1.1 400 ")
        send_goaway(ports[1], authority)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    *lines, last = stderr.splitlines()
    assert last == "The server has stopped. All answers were complete."
    messages = Counter(json.loads(line)["message"].partition(":")[0] for line in lines)
    assert messages == {"127.0.0.1 sent bytes that are not HTTP": 20, "shutting down": 1}


def test_what_cannot_be_served_is_one_line(model: Path, tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        for options, text in {
            "--tls-cert cert.pem": "--tls-cert and --tls-key must be given together",
            "--tls-cert cert.pem --tls-key key.pem": "cannot be used for TLS",
            f"--token-file {tmp_path / 'none'}": "cannot be read",
            "--tree nonsense": "is not a shape of drafts",
            f"--drafter {tmp_path}": "drafter",
            f"--model {tmp_path / 'none'}": "neither an existing file or folder nor a Hub id",
            f"--port {port}": "cannot listen on 127.0.0.1",
            f"--grpc-port {port}": "cannot listen on 127.0.0.1",
        }.items():
            refused(run("serve", "--model", model, "--port", "0", *options.split()), text)


def test_all_addresses_of_ipv6_are_those_of_ipv4_too() -> None:
    with bind("::", 0) as listener:
        listener.listen()
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=10).close()
