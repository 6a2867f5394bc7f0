"""The command `chat` with a real server.

It continues after kills, and a terminal shows the right text of an answer at any moment.
"""

import contextlib
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moa_data.commands.chat import PlainView, TerminalView
from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.bundle import save_target_bundle
from moa_data.moa.targets.chat_tokens import prompt_tokens
from moa_data.moa.targets.live import Target
from moa_data.serving.client.session import (
    Event,
    LinkChanged,
    ModeChanged,
    RolledBack,
    SavedAnswer,
    Stats,
    Tokens,
    Verified,
)
from moa_data.tests.kit.chats import chat
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.drafters import build
from moa_data.tests.kit.models import build_text_model, build_tokenizer
from moa_data.tests.kit.proxy import Proxy
from moa_data.tests.kit.serving import wait_for
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE

from ..serving.drafting import Server

QUESTION = "the cat sat on"
N_NEW = 8


@pytest.fixture(scope="module")
def live() -> Target:
    """Return a target whose texts do not end."""
    return Target(
        build_text_model(eos_token_id=399, num_hidden_layers=2), build_tokenizer(LLAMA3_TEMPLATE)
    )


@pytest.fixture(scope="module")
def folder(live: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a training run and its store, which has the target bundle."""
    folder = tmp_path_factory.mktemp("chat")
    save_target_bundle(live.model, live.tokenizer, folder / "store" / "target", 0)
    save_drafter(build("moa", live.model), folder / "run" / "drafter")
    (folder / "run" / "run.yaml").write_text(f"store: {folder / 'store'}\n")
    return folder


@pytest.fixture(scope="module")
def server(live: Target) -> Iterator[Server]:
    with Server(live, {"moa": build("moa", live.model)}, target_ms=5.0) as running:
        yield running


def answer(live: Target, *turns: str) -> str:
    """Return the target's answer to the last of some turns."""
    messages = chat(*turns)["messages"]
    tokens = plain_generate(
        live, prompt_tokens(live.template, messages), max_new_tokens=N_NEW
    ).tokens
    return str(live.tokenizer.decode(tokens, skip_special_tokens=True))


def shown(text: str) -> str:
    """Return the target's text as a pipe shows it, without an incomplete last character."""
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text
    ).rstrip("\ufffd")


def options(server: str, folder: Path, *more: str) -> list[str]:
    return [
        "--server",
        server,
        "--drafter",
        str(folder / "run"),
        "--max-new-tokens",
        str(N_NEW),
        *more,
    ]


@pytest.mark.parametrize("mode", [pytest.param("server", marks=pytest.mark.slow), "client"])
def test_a_conversation_is_read_line_by_line(
    mode: str, live: Target, server: Server, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chat.json"
    arguments = options(server.grpc_address, folder, "--mode", mode, "--session", str(file))
    done = run("chat", *arguments, input=f"{QUESTION}\n\na mat\n")
    assert done.exit_code == 0, done.output
    assert re.search(rf"^{N_NEW} tokens, [\d.]+ tokens/s", done.stderr, re.MULTILINE)
    first = answer(live, QUESTION)
    second = answer(live, QUESTION, first, "a mat")
    assert shown(second) in done.stdout
    assert [message["content"] for message in SavedAnswer.load(file).messages] == [
        QUESTION,
        first,
        "a mat",
    ]
    again = run("chat", *arguments[:-2], "--resume", str(file), input="and a dog\n")
    assert again.exit_code == 0, again.output
    third = answer(live, QUESTION, first, "a mat", second, "and a dog")
    assert again.stdout.rstrip("\n").rstrip("\ufffd") == shown(third)

    # This is the file after kill -9 in the middle of the answer.
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"tokens": document["tokens"][:-5], "finish": ""}))
    rest = run("chat", *arguments[:-2], "--resume", str(file), input="")
    assert rest.stdout.rstrip("\n").rstrip("\ufffd") == shown(third)
    assert SavedAnswer.load(file).finish


def test_refusals_are_one_line(server: Server, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for words, text in {
        "--prompt a --web 0": "--prompt answers a single prompt",
        f"--resume {tmp_path}/none": "none cannot be read",
        f"--token-file {tmp_path}/empty": "contains no access token",
        f"--token-file {tmp_path}/none": "cannot be read",
        "--mode fast": "--mode is 'fast'",
        "--set offline_below=1": "offline_below",
        "--prompt <|eot_id|>": "<|eot_id|>",
        "--server nowhere --prompt a": "is not the address of a server",
        f"--drafter {tmp_path} --prompt a": "drafter",
        "--server 127.0.0.1:1 --set connect_s=0.3 --prompt a": "127.0.0.1:1 cannot be reached",
    }.items():
        refused(run("chat", *options(server.grpc_address, folder), *words.split()), text)


@contextlib.contextmanager
def terminal(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the command on a terminal, and yield the process and the other end of the terminal."""
    ours, theirs = pty.openpty()
    environment = os.environ | {
        "TERM": "xterm",
        "COLUMNS": "80",
        "LINES": "40",
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "moa_data", "chat", *arguments], stdin=theirs, stdout=theirs,
        stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(end: int, pattern: str, timeout_s: float = 60.0) -> str:
    """Read from a terminal until its output matches a pattern."""
    came, stop = "", time.monotonic() + timeout_s
    while not re.search(pattern, came):
        ready, _, _ = select.select([end], [], [], max(0.0, stop - time.monotonic()))
        assert ready, f"{pattern!r} did not come: {came!r}"
        try:
            came += os.read(end, 65536).decode(errors="replace")
        except OSError:  # the process has ended
            pytest.fail(f"{pattern!r} did not come: {came}")
    return came


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.usefixtures("heeded_signals")
def test_another_process_goes_on(
    number: signal.Signals, live: Target, folder: Path, tmp_path: Path
) -> None:
    """Another process continues an answer that kill -9 or Ctrl-C has interrupted.

    After Ctrl-C, the command explains how to continue.
    """
    file, n_new = tmp_path / "chat.json", 80
    with Server(live, {"moa": build("moa", live.model)}, target_ms=30.0) as slow:
        arguments = [
            "--server",
            slow.grpc_address,
            "--drafter",
            str(folder / "run"),
            "--max-new-tokens",
            str(n_new),
        ]
        process = subprocess.Popen(
            [
                sys.executable, "-m", "moa_data", "chat", *arguments, "--prompt", QUESTION,
                "--session", str(file),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_for(lambda: file.exists() and len(json.loads(file.read_text())["tokens"]) >= 40)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == (-number if number is signal.SIGKILL else 128 + number)
        if number is signal.SIGINT:
            assert "--resume FILE continues the answer" in stderr
        assert not SavedAnswer.load(file).finish
        done = run("chat", *arguments, "--resume", str(file), input="")
    tokens = plain_generate(
        live,
        prompt_tokens(live.template, [{"role": "user", "content": QUESTION}]),
        max_new_tokens=n_new,
    ).tokens
    whole = shown(str(live.tokenizer.decode(tokens, skip_special_tokens=True)))
    assert done.exit_code == 0, done.output
    assert done.stdout.rstrip("\n").rstrip("\ufffd") == whole
    assert whole.startswith(stdout.rstrip("\n").rstrip("\ufffd")[:10])


@pytest.mark.slow
def test_on_a_terminal_text_is_rewritten(live: Target, folder: Path) -> None:
    """The network is cut. Dim text appears, and is removed when the network returns."""
    with (
        Server(live, {"moa": build("moa", live.model)}, target_ms=30.0) as slow,
        Proxy(slow.port) as proxy,
    ):
        arguments = ["--max-new-tokens", "80", "--set", "offline_below=0", "--max-offline", "6"]
        with terminal(
            ["--server", proxy.address, "--drafter", str(folder / "run"), *arguments]
        ) as (process, end):
            read_until(end, "> $")
            os.write(end, QUESTION.encode() + b"\n")
            read_until(end, r"[1-9][\d.]* tokens/s")
            proxy.cut(reset=True)
            offline = read_until(end, r"offline, ")
            assert "\x1b[2m" in offline
            proxy.restore()
            rest = read_until(end, "> $")
            assert "\x1b[J" in rest, "a random drafter is wrong, and what it wrote is taken back"
            assert "taken back" in rest
            os.write(end, b"\x04")  # end of input
            assert process.wait(30) == 0


STATS = Stats(9, 3, 0, 12.34, 3.0, 21.5, 8.0, 1.0, 100, 200)
_SEQUENCE = re.compile(r"\x1b\[(\d*)([ACJm])|(.|\n|\r)", re.DOTALL)


@dataclass
class Screen:
    """A terminal with the control sequences that the view uses."""

    width: int = 20
    height: int = 8
    rows: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: str = ""

    def write(self, text: str) -> None:
        for number, command, character in _SEQUENCE.findall(text):
            count = int(number or 1)
            if command == "A":
                top = max(0, len(self.rows) - self.height)
                assert self.row - count >= top, "the cursor stays on the screen"
                self.row -= count
            elif command == "C":
                self.column += count
            elif command == "J":
                del self.rows[self.row + 1 :], self.rows[self.row][self.column :]
            elif command == "m":
                self.style = {"0": "", "2": "dim", "32": "green"}[number]
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self.row += 1
                if self.row == len(self.rows):
                    self.rows.append([])
            else:
                assert character.isprintable(), repr(character)
                line = self.rows[self.row]
                line.extend([(" ", "")] * (self.column - len(line)))
                line[self.column : self.column + 1] = [(character, self.style)]
                self.column += 1
                assert self.column < self.width, "the terminal never breaks a line"

    @property
    def text(self) -> str:
        return "\n".join("".join(character for character, _ in row) for row in self.rows)

    def styles(self, text: str) -> set[str]:
        """Return the styles of a text that occurs exactly once."""
        (start,) = [match.start() for match in re.finditer(re.escape(text), self.text)]
        cells = [cell for row in self.rows for cell in [*row, ("\n", "")]]
        return {style for _, style in cells[start : start + len(text)]}


def body(screen: Screen) -> str:
    """Return the text above the line of figures."""
    return screen.text.rpartition("\n\n")[0]


def view_of(screen: Screen) -> TerminalView:
    view = TerminalView()
    view._write, view._size = screen.write, lambda: (screen.width, screen.height)
    return view


def tokens(start: int, texts: list[str], kind: str) -> Tokens:
    return Tokens(start, tuple(range(len(texts))), tuple(texts), (kind,) * len(texts))  # type: ignore[arg-type]


def test_kinds_have_their_looks() -> None:
    screen = Screen(60)
    view = view_of(screen)
    view.note(ModeChanged("client", "the session is open"))
    view.note(tokens(0, ["The ", "cat "], "accepted"))
    view.note(tokens(2, ["sat "], "bonus"))
    view.note(tokens(3, ["on ", "a ", "dog"], "unverified"))
    assert screen.text.splitlines()[0] == "The cat sat on a dog"
    assert screen.styles("The cat ") == {"green"}
    assert screen.styles("sat ") == {""}
    assert screen.styles("on a dog") == {"dim"}
    view.note(Verified(5))
    assert screen.styles("on a ") == {"green"}
    view.note(RolledBack(5))
    view.note(tokens(5, ["mat"], "bonus"))
    view.note(STATS)
    assert screen.text.splitlines() == [
        "The cat sat on a mat", "", "client | 12.3 tokens/s | round trip 21.5 ms | 3.00 tokens/c",
    ]  # fmt: skip
    view.note(ModeChanged("offline", "nothing was heard."))
    assert screen.text.splitlines()[2].startswith("offline, nothing was heard | ")
    view.end()
    assert (screen.column, screen.row) == (0, len(screen.rows) - 1)


def test_text_of_others_cannot_move_the_cursor() -> None:
    screen = Screen(60)
    view = view_of(screen)
    view.note(tokens(0, ["a\x1b[2J", "\tb", "\r", "\x07c"], "streamed"))
    assert screen.text.splitlines()[0] == "a\\x1b[2J    b\\x0d\\x07c"


@pytest.mark.parametrize("seed", range(40))
def test_the_screen_shows_the_answer(seed: int) -> None:
    """Draw random events. Lines break at the width, and no text that was taken back remains."""
    chance = random.Random(seed)
    screen = Screen(chance.choice((20, 31, 80)), 30)
    view, shown, n_verified = view_of(screen), list[str](), 0

    def word() -> str:
        return chance.choice(("a", "bird ", "", "\n", "sings, ", "x" * 25, " the\nend "))

    for _ in range(60):
        event: Event = chance.choice((STATS, ModeChanged("client", "r"), LinkChanged(False, "r")))
        action, unverified = chance.random(), len(shown) - n_verified
        texts = [word() for _ in range(chance.randint(1, 5))]
        if action < 0.3 and not unverified:
            event = tokens(len(shown), texts, chance.choice(("streamed", "accepted", "bonus")))
            shown += texts
            n_verified = len(shown)
        elif action < 0.5 and unverified < 12:
            event = tokens(len(shown), texts, "unverified")
            shown += texts
        elif action < 0.7 and unverified:
            n_verified += chance.randint(1, unverified)
            event = Verified(n_verified)
        elif action < 0.8 and unverified:
            del shown[n_verified:]
            event = RolledBack(n_verified)
        view.note(event)
        step = screen.width - 1
        lines = [
            line[at : at + step]
            for line in "".join(shown).split("\n")
            for at in range(0, len(line) or 1, step)
        ]
        assert body(screen) == "\n".join(lines)
        if len(screen.rows) > 20:
            break


def test_what_left_the_screen_stays() -> None:
    screen = Screen(20, 6)
    view = view_of(screen)
    view.note(tokens(0, ["line\n"] * 20, "streamed"))
    view.note(tokens(20, ["dim\n"] * 12, "unverified"))
    view.note(RolledBack(20))
    view.note(tokens(20, ["end"], "bonus"))
    lines = body(screen).splitlines()
    assert lines[:20] == ["line"] * 20
    assert lines[-1] == "end"
    view.note(tokens(21, ["!"], "bonus"))
    assert body(screen).splitlines()[-1] == "end!"


def test_a_pipe_gets_verified_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView()
    for event, expected in (
        (tokens(0, ["The ", "cat "], "streamed"), "The cat "),
        (tokens(2, ["sat ", "on ", "a "], "unverified"), ""),
        (tokens(5, ["dog"], "unverified"), ""),
        (STATS, ""),
        (Verified(4), "sat on "),
        (Verified(5), "a "),
        (RolledBack(5), ""),
        (tokens(5, ["mat"], "bonus"), "mat"),
    ):
        view.note(event)
        assert capsys.readouterr().out == expected
