"""The command chat."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
from pydantic import Field

from ..config import Common, Config, Count, Natural, Positive, SamplingSettings, TemplateKwargs
from ..errors import MoaDataError
from ..evaluation.config import Dtype
from .answer_view import PlainAnswer, TerminalAnswer, moves_cursor
from .console import StageFailure, out, tell
from .options import StageCommand, config_options

if TYPE_CHECKING:
    from ..serving.client.client import Answer, DraftingClient, SavedAnswer
    from ..serving.client.session import OnEvent


class ChatConfig(Config):
    """Settings of `moa-data chat`."""

    server: Common[str]
    """HOST:PORT of the server's gRPC port; https://HOST:PORT for TLS with the certificates that the system trusts."""
    token_file: Common[str | None] = None
    """File whose first line is the server's bearer token."""
    ca: str | None = None
    """Certificate authority in PEM, for TLS with a server of your own."""
    drafter: Common[str]
    """A run of `moa-data train`, or a folder with a drafter: moa, eagle, dspark, dflash or independent."""
    bundle: Common[str | None] = None
    """The store that the drafter was trained from, or its folder target/, which has the tokenizer and the pieces of the
    target that the drafter needs; default: the store that the run recorded."""
    mode: Common[Literal["server", "client"]] = "server"
    """Where drafts are made. server: there, and text is streamed; client: here, before its answers, which pays where
    the server's own drafts are dear and the network is fast. Offline both draft here."""
    max_new_tokens: Common[Count] = 512
    """Stop an answer after this many tokens."""
    codec: Literal["bf16", "int8", "int4"] = "int8"
    """What crosses the network for the drafter: fewer bits are fewer bytes and, at int4, somewhat worse drafts. The
    text is the same."""
    max_offline: Natural = 64
    """Without a network, go on for at most this many tokens."""
    offline_below: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Without a network, stop where all that was drafted since is less likely than this to be right."""
    connect_s: Positive = 10.0
    """Seconds to wait for a server that does not answer, at the start."""
    template_kwargs: TemplateKwargs = ()
    """Arguments of the chat template, as NAME=VALUE, such as enable_thinking=false; default: those of the store that
    the drafter was trained from."""
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    dtype: Dtype = "float32"
    """Dtype of the drafter; the text does not depend on it."""
    device: str = "cpu"
    """Where the drafter runs: cpu, cuda, cuda:1, ..."""


@click.command(cls=StageCommand)
@click.option(
    "--prompt", metavar="TEXT",
    help="Answer this alone, and end; by default prompts are asked for, or read from standard input, one a line.",
)  # fmt: skip
@click.option(
    "--session", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Keep the conversation here, for --resume, should this process end.",
)  # fmt: skip
@click.option(
    "--resume", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Go on with the conversation of a file that --session wrote, first with an answer that had not ended.",
)  # fmt: skip
@click.option(
    "--web", type=click.IntRange(0, 65535), metavar="PORT",
    help="Chat on a page at http://127.0.0.1:PORT, which also shows the course of an answer and can cut the network.",
)  # fmt: skip
@config_options(ChatConfig)
def chat(config: ChatConfig, prompt: str | None, session: Path | None, resume: Path | None, web: int | None) -> None:
    """Chat with a target on a server; drafts are made here, where they go on without a network.

    The server runs the target (`moa-data serve`), this machine a drafter and no more. Green text was drafted here and
    verified there, plain text is the server's own. When the network goes, dim text is the drafter's alone; when it
    returns, the server verifies it in one call, what was wrong is taken back, and the answer goes on. It is always the
    target's own, token for token. In a pipe only verified text is written.

    \b
    Examples:
      moa-data chat --server gpu-box:8001 --drafter runs/moa
      moa-data chat --server gpu-box:8001 --drafter runs/moa --bundle store --prompt "Why is the sky blue?" > sky.txt
      moa-data chat --server https://gpu-box:8001 --ca ca.pem --token-file token --drafter runs/moa --session chat.json
      moa-data chat --server gpu-box:8001 --drafter runs/moa --web 8080
    """
    if prompt is not None and (resume or web is not None):
        raise click.UsageError("--prompt answers one prompt; leave it out with --resume and --web.")
    saved = _saved(resume)
    with _client(config, resume or session) as client:
        if web is not None:
            _serve_page(_Conversation(client, config, saved), web)
            return
        conversation = _Conversation(client, config, saved)
        if saved is not None and not saved.finish:
            conversation.go_on(saved)
        for text in [prompt] if prompt is not None else _prompts():
            conversation.ask(text)


class _Conversation:
    """The messages so far, and how answers are shown."""

    def __init__(self, client: "DraftingClient", config: ChatConfig, saved: "SavedAnswer | None") -> None:
        self.client, self.config = client, config
        self.messages: list[dict[str, str]] = [dict(message) for message in saved.messages] if saved else []
        if saved is not None and saved.finish:
            self._add_answer(client.text_of(saved.tokens[saved.n_prompt :]))

    def ask(self, text: str) -> None:
        """Answer a prompt on standard output."""
        self.messages.append({"role": "user", "content": text})
        try:
            self._show(lambda note: self.answer(note))
        except MoaDataError:
            self.messages.pop()
            raise

    def go_on(self, saved: "SavedAnswer") -> None:
        """Go on with an answer that had not ended."""
        self._show(lambda note: self.client.resume(saved, note))

    def answer(self, note: "OnEvent") -> "Answer":
        """Answer the last message."""
        from ..moa.decoding.sampling import SamplingConfig

        config, sampling = self.config, SamplingConfig(**self.config.sampling.arguments())
        return self.client.chat(
            self.messages, max_new_tokens=config.max_new_tokens, sampling=sampling, seed=config.sampling.seed,
            on_event=note,
        )  # fmt: skip

    def _show(self, run: Any) -> None:
        view = TerminalAnswer() if moves_cursor() else PlainAnswer()
        try:
            answer = run(view.note)
        finally:
            view.end()
        self._add_answer(answer.text)
        if isinstance(view, PlainAnswer):
            tell(_summary(answer))

    def _add_answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def _serve_page(conversation: _Conversation, port: int) -> None:
    from ..serving.client.web import ChatPage

    def answer(prompt: str, note: "OnEvent") -> None:
        """Answer a prompt of the page, in its thread; the page shows why it cannot be."""
        conversation.messages.append({"role": "user", "content": prompt})
        try:
            text = conversation.answer(note).text
        except MoaDataError:
            conversation.messages.pop()
            raise
        conversation.messages.append({"role": "assistant", "content": text})

    def set_network(is_up: bool) -> None:
        conversation.client.restore() if is_up else conversation.client.cut()

    with ChatPage(answer, set_network, port) as page:
        out.print(f"chat on {page.url} until Ctrl-C")
        sys.stdout.flush()
        threading.Event().wait()


def _client(config: ChatConfig, session_file: Path | None) -> "DraftingClient":
    import torch

    from ..moa.targets.live import pick_device
    from ..serving.client.client import DraftingClient, Timeouts
    from ..serving.client.drafting import DraftingModel

    token = _token(config.token_file)
    model = DraftingModel.load(
        config.drafter, config.bundle, getattr(torch, config.dtype), pick_device(config.device), config.template_kwargs
    )
    return DraftingClient(
        config.server, model, token=token, ca=config.ca, mode=config.mode, codec=config.codec,
        max_offline=config.max_offline, offline_below=config.offline_below,
        timeouts=Timeouts(connect_s=config.connect_s), session_file=session_file,
    )  # fmt: skip


def _saved(file: Path | None) -> "SavedAnswer | None":
    if file is None:
        return None
    from ..serving.client.client import SavedAnswer

    return SavedAnswer.load(file)


def _token(file: str | None) -> str:
    """Read the first line of a file of tokens that is neither empty nor a comment."""
    if file is None:
        return ""
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StageFailure(f"--token-file {file} cannot be read: {error}. Give a text file.") from error
    for line in lines:
        if (text := line.strip()) and not text.startswith("#"):
            return text
    raise StageFailure(f"--token-file {file} holds no token; write it into the first line.")


def _prompts() -> Iterator[str]:
    """Yield what the user says, until the end of the input."""
    is_asked = sys.stdin.isatty()
    with contextlib.suppress(EOFError, UnicodeDecodeError):
        while True:
            text = input("> ") if is_asked else _line()
            if text.strip():
                yield text
    if is_asked:
        out.print()


def _line() -> str:
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.rstrip("\n")


def _summary(answer: "Answer") -> str:
    stats = answer.stats
    length = "" if stats.acceptance_length is None else f", {stats.acceptance_length:.2f} tokens a call"
    trip = "" if stats.round_trip_ms is None else f", round trip {stats.round_trip_ms:.1f} ms"
    return f"{stats.n_tokens} tokens, {stats.tokens_per_s:.1f} tokens/s{length}{trip}"
