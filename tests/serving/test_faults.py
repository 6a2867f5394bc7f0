"""Server and client as processes and over a network that fails: nothing is lost, nothing comes twice, nothing stays."""

import json
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.bundle import save_target_bundle
from moa_data.moa.targets.live import Target
from moa_data.serving.client.client import DraftingClient, SavedAnswer, Timeouts
from moa_data.serving.client.drafting import DraftingModel
from moa_data.serving.client.session import Event
from moa_data.tests.kit.drafters import build, teach
from moa_data.tests.kit.models import build_text_model, build_tokenizer, random_prompts
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE

from .client.world import Display

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(5, 4)
N_POSITIONS = 4096
TIMEOUTS = Timeouts(connect_s=60.0, silence_s=0.2, dead_s=1.0)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def target() -> Target:
    """It never ends an answer, and has room for a long one."""
    model = build_text_model(max_position_embeddings=N_POSITIONS)
    model.lm_head.weight[1] = 0.0  # the end of the text, which is less likely than any token that is likely
    found = Target(model, build_tokenizer(LLAMA3_TEMPLATE))
    found.eos_token_ids = frozenset()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    """What the processes load: model/, drafter/ and store/target/."""
    folder = tmp_path_factory.mktemp("served")
    target.model.save_pretrained(folder / "model")
    target.tokenizer.save_pretrained(folder / "model")
    served = Target.load(str(folder / "model"), device="cpu")
    save_target_bundle(served.model, served.tokenizer, folder / "store" / "target", 0)
    save_drafter(teach(build("moa", served.model), served, PROMPTS, 20), folder / "drafter")
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class ServerProcess:
    """``moa-data serve`` on ports that stay the same when it is started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port, self.grpc_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.grpc_port}"
        self._command = [
            sys.executable, "-m", "moa_data", "serve", "--model", str(folder / "model"), "--drafter",
            str(folder / "drafter"), "--device", "cpu", "--port", str(self.port), "--grpc-port", str(self.grpc_port),
            *options,
        ]  # fmt: skip
        self._log = (folder / "server.log").open("a")
        self.start()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        assert "serving" in self._process.stdout.readline()

    def kill(self) -> None:
        """End it as kill -9 does."""
        with self._process as process:
            process.kill()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._log.close()


def plain(address: str, model: DraftingModel, tokens: list[int], n: int) -> list[int]:
    """What the server streams without faults and without drafts."""
    with DraftingClient(address, model, mode="server", timeouts=TIMEOUTS) as client:
        return list(client.complete(tokens, max_new_tokens=n).tokens)


def test_the_server_is_killed_again_and_again(folder: Path) -> None:
    """With kill -9; the client has the tokens, and what comes after each start is the same text."""
    model = DraftingModel.load(folder / "drafter", folder / "store")
    n, n_kills = 120, 3
    with ServerProcess(folder, "--target-ms", "20") as server:
        wanted = plain(server.address, model, PROMPTS[1], n)
        places = [n * (k + 1) // (n_kills + 1) for k in range(n_kills)]
        restarts: list[threading.Thread] = []

        def restart() -> None:
            server.kill()
            server.start()

        display = Display()

        def note(event: Event) -> None:
            display.show(event)
            if places and display.n_verified >= places[0] and not (restarts and restarts[-1].is_alive()):
                places.pop(0)
                restarts.append(threading.Thread(target=restart))
                restarts[-1].start()

        with DraftingClient(server.address, model, timeouts=TIMEOUTS) as client:
            answer = client.complete(PROMPTS[1], max_new_tokens=n, on_event=note)
        for thread in restarts:
            thread.join()
    assert list(answer.tokens) == wanted == display.tokens
    assert len(restarts) == n_kills


CLIENT = """
import json, sys
from pathlib import Path
from moa_data.serving.client.client import DraftingClient
from moa_data.serving.client.client import SavedAnswer
address, folder, file, prompt, n = sys.argv[1:]
with DraftingClient(address, f"{folder}/drafter", f"{folder}/store", session_file=file, mode="client") as client:
    print("ready", flush=True)
    if Path(file).exists():
        answer = client.resume(SavedAnswer.load(file))
    else:
        answer = client.complete(json.loads(prompt), max_new_tokens=int(n))
print(json.dumps(answer.tokens))
"""


def test_the_client_is_killed_again_and_again(folder: Path, tmp_path: Path) -> None:
    """With kill -9 at any moment; the next one takes the answer up from the file."""
    chance, n, file = random.Random(1), 150, tmp_path / "session.json"
    model = DraftingModel.load(folder / "drafter", folder / "store")
    with ServerProcess(folder, "--target-ms", "30") as server:
        wanted = plain(server.address, model, PROMPTS[2], n)
        command = [sys.executable, "-c", CLIENT, server.address, str(folder), str(file), json.dumps(PROMPTS[2]), str(n)]
        lengths = []
        for number in range(6):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
                assert client.stdout is not None
                assert client.stdout.readline() == "ready\n"
                if number < 5:
                    time.sleep(chance.uniform(0.1, 1.0))
                    client.kill()
                tokens = client.stdout.read()
            if file.exists():
                lengths.append(len(SavedAnswer.load(file).tokens))
    assert json.loads(tokens) == wanted
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == len(PROMPTS[2]) + n


def test_a_short_load_of_good_and_bad_clients(folder: Path, tmp_path: Path) -> None:
    """The script that loads a server for ten minutes, for a few seconds; memory is not flat yet."""
    command = [
        sys.executable, "-m", "benchmarks.serving.serving_load", "--model", str(folder / "model"), "--drafter",
        str(folder / "drafter"), "--bundle", str(folder / "store"), "--minutes", "0.3", "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    figures = json.loads(done.stdout.splitlines()[0])
    assert figures["n_wrong"] == figures["n_refused"] == figures["n_held_at_the_end"] == 0, figures
    assert figures["answers_afterwards"]
    assert figures["memory"]["after_mib"] < figures["memory"]["before_mib"] + 64
    assert min(figures["counts"][role] for role in ("draft", "stream", "ask", "ask_health", "leave_in_body")) > 0
