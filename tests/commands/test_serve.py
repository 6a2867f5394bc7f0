"""The command `serve`: it prints its address, answers, and obeys signals."""

import contextlib
import json
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
from openai import OpenAI

from moa_data.cli import main
from moa_data.commands import serve as serve_module
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.live import Target
from moa_data.serving import run as run_module
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


def hear_an_answer_out(line: str, authority: Path, send_signal: Callable[[], object]) -> str:
    """Fail handshakes, and begin an answer. Send a signal, and read the answer to its end.

    Args:
        line: the first line of the server.
        authority: file of the authority of the server's certificate.
        send_signal: sends the server a signal.

    Returns:
        The reason for which the answer ended.
    """
    assert line.startswith("serving tiny on https://127.0.0.1:")
    assert re.search(r" and gRPC 127\.0\.0\.1:\d+ \(drafters: run\)\n", line)
    address = line.split()[3]
    trusted = ssl.create_default_context(cafile=authority)
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
        send_signal()
        check_draining(address, trusted)
        time.sleep(0.5)
        check_draining(address, trusted)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
    return str(reasons[-1])


def check_log(stderr: str) -> set[str]:
    """Check the log of a server that answered one request; return its lines that are not JSON."""
    *rest, last = stderr.splitlines()
    assert last == "stopped; all answers had ended."
    lines = [json.loads(line) for line in rest if line.startswith("{")]
    (request,) = [line for line in lines if "new_tokens" in line]
    assert (request["status"], request["new_tokens"], request["finish"]) == (200, 30, "length")
    return {line for line in rest if not line.startswith("{")}


DRAFTING = ("--drafter", "run", "--target-ms", "100", "--tree", "3")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("heeded_signals")
def test_signals_let_answers_of_a_process_end(
    model: Path,
    tls: tuple[Path, list[str]],
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The libraries below write nothing into the log, whose lines are JSON, after garbage."""
    authority, options = tls
    monkeypatch.chdir(model.parent)
    with serving(model, *DRAFTING, *options) as (process, line, _):
        reason = hear_an_answer_out(line, authority, lambda: process.send_signal(number))
        _, stderr = process.communicate(timeout=60)
    assert reason == "length"
    assert process.returncode == 128 + number
    finishing = "Finishing what has started; press Ctrl-C again to stop at once."
    assert check_log(stderr) <= {"", finishing}


@pytest.fixture
def _unchanged_by_a_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the command `serve` run in this process without changing the process for later tests."""
    monkeypatch.setattr(serve_module, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(serve_module, "use_huge_pages", lambda: None)
    monkeypatch.setattr(run_module, "raise_file_limit", lambda: None)
    root, ours = logging.getLogger(), logging.getLogger("moa_data")
    handlers, level = [*root.handlers], ours.level
    # A signal before the server's start or after its end must not end the tests.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)
    root.handlers[:] = handlers
    ours.setLevel(level)


@pytest.mark.usefixtures("_unchanged_by_a_server")
def test_a_signal_lets_answers_end(
    model: Path,
    tls: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The command runs in this process, since a signal goes to the main thread anyway."""
    authority, options = tls
    monkeypatch.chdir(model.parent)
    read_end, write_end = os.pipe()

    def send_signal() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def be_a_client() -> str:
        try:
            with open(read_end, encoding="utf-8") as output:
                return hear_an_answer_out(output.readline(), authority, send_signal)
        except BaseException:
            # The server must end too. A second signal does not wait for answers.
            send_signal()
            time.sleep(0.1)
            send_signal()
            raise

    words = ["serve", "--model", str(model), "--port", "0", "--grpc-port", "0", "--device", "cpu"]
    with ThreadPoolExecutor(1) as threads, open(write_end, "w", encoding="utf-8") as output:
        reason = threads.submit(be_a_client)
        with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as end:
            main([*words, *DRAFTING, *options])
        output.close()
        assert reason.result() == "length"
    assert end.value.code == 128 + signal.SIGTERM
    check_log(capfd.readouterr().err)


SILENT_SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from moa_data.cli import main
main.callback(debug=False)
import grpc
cert, key = (Path(name).read_bytes() for name in sys.argv[1:])
server = grpc.server(ThreadPoolExecutor(1))
print(server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)])), flush=True)
server.start()
sys.stdin.read()
server.stop(0)
"""


def test_grpc_writes_nothing_into_the_log_of_a_command(tls: tuple[Path, list[str]]) -> None:
    """The C library of gRPC is silent after garbage, as the command line has asked it to be."""
    authority, (_, cert, _, key) = tls
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SILENT_SERVER, cert, key],
        stdin=pipe, stdout=pipe, stderr=pipe, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        port = int(process.stdout.readline())
        fail_handshakes([port])
        send_goaway(port, authority)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")


@pytest.mark.slow
def test_a_second_signal_does_not_wait(model: Path) -> None:
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
    assert stderr.splitlines()[-1] == "stopped; 1 answers were broken off."
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
    assert last == "stopped; all answers had ended."
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
            f"--model {tmp_path / 'none'}": "neither a folder nor a Hub id",
            f"--port {port}": "cannot listen on 127.0.0.1",
            f"--grpc-port {port}": "cannot listen on 127.0.0.1",
        }.items():
            refused(run("serve", "--model", model, "--port", "0", *options.split()), text)


def test_all_addresses_of_ipv6_are_those_of_ipv4_too() -> None:
    with bind("::", 0) as listener:
        listener.listen()
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=10).close()
