"""The command ``chat``, and the display of an answer while it is generated.

On a terminal, drafted tokens are shown before the server has verified them, and wrong tokens are
overwritten later. To a pipe or a file, only verified text is written.
"""

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
from pydantic import Field
from rich.cells import cell_len

from ..config import (
    Common,
    Config,
    Count,
    Dtype,
    Natural,
    Positive,
    SamplingSettings,
    TemplateKwargs,
)
from ..errors import MoaDataError
from ..text import printable
from .console import out, tell
from .options import stage_command

if TYPE_CHECKING:
    from ..serving.client.client import Answer, DraftingClient
    from ..serving.client.session import Event, OnEvent, SavedAnswer, Stats

# Colours of tokens: accepted drafts are green, the target's own tokens are plain, and unverified
# tokens are dim.
_STYLES = {"accepted": "\x1b[32m", "bonus": "", "streamed": "", "unverified": "\x1b[2m"}
_RESET = "\x1b[0m"
_ERASE_BELOW = "\x1b[J"
_TAB = "    "
# Position of a character on the terminal: row and column, relative to the start of the answer.
_Position = tuple[int, int]


class ChatConfig(Config):
    """Settings of `moa-data chat`."""

    server: Common[str]
    """Address of the server's gRPC port: HOST:PORT, or https://HOST:PORT for TLS. The server's
    certificate is checked with the certificates of this system."""
    token_file: Common[str | None] = None
    """File with the bearer token for the server in its first line. Default: no token."""
    ca: str | None = None
    """File with the certificate of your own certificate authority (PEM), with which the server's
    TLS certificate is checked. Default: the certificates of this system."""
    drafter: Common[str]
    """The drafter: a run of `moa-data train`, or a folder with a drafter. Its kind must be moa,
    eagle, dspark, dflash or independent."""
    bundle: Common[str | None] = None
    """The store that the drafter was trained from, or the store's folder target/. It contains the
    target's tokenizer and the target's weights that the drafter needs. Default: the store that is
    recorded in the drafter's run."""
    mode: Common[Literal["server", "client"]] = "server"
    """Which machine drafts while the server can be reached. server: the server drafts and sends
    text. client: this machine drafts, which is faster only if drafts are expensive for the server
    and the network is fast. If the network fails, this machine drafts in both modes."""
    max_new_tokens: Common[Count] = 512
    """Maximum length of an answer in tokens."""
    codec: Literal["bf16", "int8", "int4"] = "int8"
    """Data type in which the server sends the target's activations to the drafter. Fewer bits mean
    less network traffic; with int4, drafts are slightly worse. The text of the answer does not
    change."""
    max_offline: Natural = 64
    """Maximum number of tokens that the drafter writes on its own while the network is down. 0
    turns this off."""
    offline_below: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Probability at which the drafter stops writing on its own while the network is down. It stops
    when it estimates that all its tokens are right with a lower probability."""
    connect_s: Positive = 10.0
    """Maximum time in seconds to wait for the first response of the server."""
    template_kwargs: TemplateKwargs = ()
    """Arguments for the chat template, as NAME=VALUE; for example enable_thinking=false for Qwen3.
    Default: the arguments that are recorded in the store that the drafter was trained from."""
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    dtype: Dtype = "float32"
    """Data type of the drafter's weights and computations. It does not change the text of the
    answer."""
    device: str = "cpu"
    """Device that runs the drafter: cpu, cuda, or one GPU such as cuda:1."""


@stage_command(ChatConfig)
@click.option(
    "--prompt", metavar="TEXT",
    help="Answer this prompt and exit. Without it, the command asks for prompts, or reads one prompt "
    "per line from standard input.",
)  # fmt: skip
@click.option(
    "--session", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Save the conversation to this file. --resume FILE continues it.",
)  # fmt: skip
@click.option(
    "--resume", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help=(
        "Continue the conversation in a file written by --session. An unfinished answer is "
        "completed first."
    ),
)  # fmt: skip
@click.option(
    "--web", "port", type=click.IntRange(0, 65535), metavar="PORT",
    help="Chat on a web page at http://127.0.0.1:PORT. The page shows which tokens were drafted, and "
    "has a switch that cuts the network.",
)  # fmt: skip
def chat(
    config: ChatConfig,
    prompt: str | None,
    session: Path | None,
    resume: Path | None,
    port: int | None,
) -> None:
    """Chat with a target on a server. If the network fails, a drafter on this machine continues.

    The server runs the target (`moa-data serve`), and this machine runs only a drafter. With --mode
    client, this machine drafts all the time. Green text was drafted on this machine and verified by
    the server. Plain text comes from the server. If the network fails, the drafter continues alone,
    and its text is dim. When the network is back, the server verifies this text in one call, wrong
    tokens are removed, and the answer continues. The final answer is exactly the target's own. If
    the output is a pipe or a file, only verified text is written.

    \b
    Examples:
      moa-data chat --server gpu-box:8001 --drafter runs/moa
      moa-data chat --server gpu-box:8001 --drafter runs/moa --bundle store \\
          --prompt "Why is the sky blue?" > sky.txt
      moa-data chat --server https://gpu-box:8001 --ca ca.pem --token-file token \\
          --drafter runs/moa --session chat.json
      moa-data chat --server gpu-box:8001 --drafter runs/moa --web 8080
    """
    if prompt is not None and (resume or port is not None):
        raise click.UsageError(
            "--prompt answers a single prompt, so it cannot be combined with --resume or --web. "
            "Leave out --prompt, or the other option."
        )
    import torch

    from ..moa.targets.live import pick_device
    from ..serving.access import read_tokens
    from ..serving.client.client import DraftingClient, Timeouts
    from ..serving.client.drafting import DraftingModel
    from ..serving.client.session import SavedAnswer

    saved = None if resume is None else SavedAnswer.load(resume)
    token = read_tokens(config.token_file)[0] if config.token_file else ""
    model = DraftingModel.load(
        config.drafter,
        config.bundle,
        getattr(torch, config.dtype),
        pick_device(config.device),
        config.template_kwargs,
    )
    with DraftingClient(
        config.server, model, token=token, ca=config.ca, mode=config.mode, codec=config.codec,
        max_offline=config.max_offline, offline_below=config.offline_below,
        timeouts=Timeouts(connect_s=config.connect_s), session_file=resume or session,
    ) as client:  # fmt: skip
        conversation = _Conversation(client, config, saved)
        if port is not None:
            _serve_page(conversation, port)
            return
        if saved is not None and not saved.finish:
            _show(partial(conversation.resume, saved))
        for text in [prompt] if prompt is not None else _prompts():
            _show(partial(conversation.ask, text))


class _Conversation:
    """Stores the messages of a conversation with the target.

    An answer is added when it is complete.
    """

    def __init__(
        self, client: "DraftingClient", config: ChatConfig, saved: "SavedAnswer | None"
    ) -> None:
        self.client = client
        self._config = config
        self._messages: list[dict[str, str]] = []
        if saved is not None:
            self._messages += saved.messages
        if saved is not None and saved.finish:
            self._add("assistant", client.text_of(saved.tokens[saved.n_prompt :]))

    def ask(self, text: str, note: "OnEvent") -> "Answer":
        """Let the target answer a prompt, and add the prompt and the answer to the conversation.

        If an error of this package occurs, the conversation stays unchanged.

        Args:
            text: the prompt.
            note: function that is called with each event of the answer.
        """
        from ..moa.decoding.sampling import SamplingConfig

        config = self._config
        sampling = SamplingConfig(**config.sampling.arguments())
        self._add("user", text)
        try:
            answer = self.client.chat(
                self._messages, max_new_tokens=config.max_new_tokens, sampling=sampling,
                seed=config.sampling.seed, on_event=note,
            )  # fmt: skip
        except MoaDataError:
            self._messages.pop()
            raise
        self._add("assistant", answer.text)
        return answer

    def resume(self, saved: "SavedAnswer", note: "OnEvent") -> "Answer":
        answer = self.client.resume(saved, note)
        self._add("assistant", answer.text)
        return answer

    def _add(self, role: str, text: str) -> None:
        self._messages.append({"role": role, "content": text})


def _show(answer_to: "Callable[[OnEvent], Answer]") -> None:
    can_rewrite = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    view = TerminalView() if can_rewrite else PlainView()
    try:
        stats = answer_to(view.note).stats
    finally:
        view.end()
    # A TerminalView shows the statistics in its status line. A PlainView does not show them, so
    # print them here.
    if isinstance(view, PlainView):
        tell(", ".join((f"{stats.n_tokens} tokens", *_figures(stats))))


def _figures(stats: "Stats") -> list[str]:
    figures = [f"{stats.tokens_per_s:.1f} tokens/s"]
    if stats.round_trip_ms is not None:
        figures.append(f"round trip {stats.round_trip_ms:.1f} ms")
    if stats.acceptance_length is not None:
        figures.append(f"{stats.acceptance_length:.2f} tokens/call")
    return figures


def _serve_page(conversation: _Conversation, port: int) -> None:
    from ..serving.client.web import ChatPage

    def set_network(is_up: bool) -> None:
        conversation.client.restore() if is_up else conversation.client.cut()

    with ChatPage(conversation.ask, set_network, port) as page:
        out.print(f"The chat page is {page.url}. Ctrl-C ends it.")
        sys.stdout.flush()
        threading.Event().wait()


def _prompts() -> Iterator[str]:
    is_asked = sys.stdin.isatty()
    lines: Iterable[str] = iter(partial(input, "> "), None) if is_asked else sys.stdin
    with contextlib.suppress(EOFError, UnicodeDecodeError):
        for line in lines:
            text = line if is_asked else line.rstrip("\n")
            if text.strip():
                yield text
    if is_asked:
        out.print()


class PlainView:
    """Writes an answer to a pipe or file. Only verified text is written, since it cannot change."""

    def __init__(self) -> None:
        self._unverified: list[str] = []
        self._n_verified = 0

    def note(self, event: "Event") -> None:
        """Handle an event of the chat client. Write text as soon as the server has verified it."""
        from ..serving.client.session import RolledBack, Tokens, Verified

        if isinstance(event, Tokens):
            self._unverified += event.texts
            if "unverified" not in event.kinds:
                self._write(len(self._unverified))
        elif isinstance(event, Verified):
            self._write(event.stop - self._n_verified)
        elif isinstance(event, RolledBack):
            del self._unverified[event.stop - self._n_verified :]

    def end(self) -> None:
        """End the last line of the answer."""
        out.print()

    def _write(self, n_tokens: int) -> None:
        out.print("".join(self._unverified[:n_tokens]), end="")
        sys.stdout.flush()
        del self._unverified[:n_tokens]
        self._n_verified += n_tokens


class TerminalView:
    """Writes an answer to a terminal, above a status line.

    If tokens change, the first changed token and all text after it are overwritten.
    """

    # To overwrite a token, this class must know where the token is on the screen, but a terminal
    # does not report that. So the class breaks the lines itself and computes the row and column of
    # each token, relative to the start of the answer. The cursor is moved by the difference of two
    # positions, which stays the same if the terminal scrolls.

    def __init__(self) -> None:
        self._write = out.write
        self._size = _terminal_size
        self._texts: list[str] = []
        self._kinds: list[str] = []
        # The start position of each token. The last entry is the position of the text's end.
        self._starts: list[_Position] = [(0, 0)]
        self._mode = "connecting"
        self._stats: Stats | None = None
        self._status = ""

    def note(self, event: "Event") -> None:
        """Update the shown answer or the status line after an event of the chat client."""
        from ..serving.client.session import ModeChanged, RolledBack, Stats, Tokens, Verified

        if isinstance(event, Tokens):
            self._texts += event.texts
            self._kinds += event.kinds
            self._rewrite(event.start)
        elif isinstance(event, Verified):
            first = self._kinds.index("unverified")
            self._kinds[first : event.stop] = ["accepted"] * (event.stop - first)
            self._rewrite(first)
        elif isinstance(event, RolledBack):
            del self._texts[event.stop :], self._kinds[event.stop :]
            self._rewrite(event.stop)
        elif isinstance(event, Stats):
            self._stats = event
            self._show_status()
        elif isinstance(event, ModeChanged):
            self._mode = event.mode
            if event.mode == "offline":
                self._mode += f", {event.reason.rstrip('.')}"
            self._show_status()

    def end(self) -> None:
        """Keep the answer and the status line, and move the cursor below them."""
        self._write(f"{_ERASE_BELOW}\r\n{self._status}\r\n")

    def _rewrite(self, first: int) -> None:
        _, height = self._size()
        end = self._starts[-1]
        # Rows that have scrolled off the screen cannot be overwritten. So overwrite only from the
        # first token on that is still on the screen.
        top = end[0] - (height - 4)
        while first < len(self._texts) and self._starts[first][0] < top:
            first += 1
        start = max(self._starts[first], (top, 0))
        parts = [self._move(end, start), _ERASE_BELOW]
        self._starts[first:] = [start]
        for text, kind in zip(self._texts[first:], self._kinds[first:], strict=True):
            shown, end = self._broken(text, self._starts[-1])
            self._starts.append(end)
            style = _STYLES[kind]
            parts.append(f"{style}{shown}{_RESET}" if style and shown else shown)
        self._write("".join(parts))
        self._show_status()

    def _broken(self, text: str, start: _Position) -> tuple[str, _Position]:
        """Break a text into lines at the terminal's width.

        Args:
            text: the text.
            start: position of the text's start.

        Returns:
            The text with line breaks, and the position of its end.
        """
        width, _ = self._size()
        row, column = start
        parts = list[str]()
        for character in printable(text).replace("\t", _TAB):
            n_cells = cell_len(character)
            if character == "\n" or column + n_cells >= width:
                row = row + 1
                column = 0
                parts.append("\r\n")
                if character == "\n":
                    continue
            parts.append(character)
            column += n_cells
        return "".join(parts), (row, column)

    def _move(self, at: _Position, to: _Position) -> str:
        up = f"\x1b[{at[0] - to[0]}A" if at[0] > to[0] else ""
        right = f"\x1b[{to[1]}C" if to[1] else ""
        return f"\r{up}{right}"

    def _show_status(self) -> None:
        """Write the status line two rows below the text, then move the cursor to the text's end."""
        parts = [self._mode]
        if (stats := self._stats) is not None and stats.n_tokens:
            parts += _figures(stats)
            if stats.n_rolled_back:
                parts.append(f"{stats.n_rolled_back} wrong tokens taken back")
        width, _ = self._size()
        status = printable(" | ".join(parts))[: width - 1].rstrip()
        self._status = f"{_STYLES['unverified']}{status}{_RESET}"
        row, column = self._starts[-1]
        back = self._move((row + 2, 0), (row, column))
        self._write(f"{_ERASE_BELOW}\r\n\r\n{self._status}{back}")


def _terminal_size() -> tuple[int, int]:
    columns, rows = shutil.get_terminal_size()
    return max(columns, 20), max(rows, 4)
