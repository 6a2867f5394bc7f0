"""Client and server over real sockets.

The answer is that of plain decoding, whatever the network does.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from moa_data.errors import Disconnected, ProtocolMismatch, RequestInvalid
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.bundle import save_target_bundle
from moa_data.moa.targets.live import Target
from moa_data.serving.client.client import MODES, DraftingClient, Timeouts
from moa_data.serving.client.session import (
    LinkChanged,
    ModeChanged,
    RolledBack,
    SavedAnswer,
    Tokens,
    Verified,
)
from moa_data.serving.grpc import Identities
from moa_data.serving.wire import drafter_identity, tokenizer_identity
from moa_data.tests.kit.drafters import build
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_text_model, build_tokenizer
from moa_data.tests.kit.proxy import Proxy
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE
from moa_data.tests.kit.variants import quick

from ..drafting import Server
from .room import DRAFTERS, HASTY, PROMPTS, Watched, model, plain, restored, target

SAMPLED = SamplingConfig(temperature=0.8, top_p=0.95, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(target(), {"moa": model().drafter}) as running:
        yield running


def client(address: str, name: str = "moa", **settings: Any) -> DraftingClient:
    return DraftingClient(address, model(name), **{"timeouts": HASTY} | settings)


# Modes, drafters, sampling, codecs


@pytest.mark.parametrize("name", quick(DRAFTERS, ["moa"]))
def test_every_mode_gives_the_plain_answer(name: str) -> None:
    """A trained drafter is often right, also on the client's side."""
    # A busy machine must not count as a cut network.
    patient = Timeouts(connect_s=60.0, silence_s=10.0, dead_s=60.0)
    with Server(target(), {"d": model(name).drafter}) as own:
        for mode in MODES:
            with client(own.grpc_address, name, mode=mode, timeouts=patient) as connected:
                watched, lengths = Watched(connected), list[float]()
                for prompt in PROMPTS[:2]:
                    answer = watched.complete(prompt, 20)
                    assert list(answer.tokens) == plain(prompt, 20)
                    assert watched.kinds().count("Done") == 1
                    assert watched.kinds()[-2:] == ["Stats", "Done"]
                    assert "RolledBack" not in watched.kinds(), (
                        "without a cut nothing unverified is shown"
                    )
                    assert answer.stats.n_tokens == 20
                    assert min(answer.stats.bytes_up, answer.stats.bytes_down) > 0
                    lengths.append(answer.stats.acceptance_length or 0.0)
        assert sum(lengths) / len(lengths) > 1.4, (
            "those of the last mode, in which the client drafts"
        )


@pytest.mark.parametrize("mode", MODES)
def test_sampled_answers_are_those_of_the_seed(mode: Any, server: Server) -> None:
    with client(server.grpc_address, mode=mode) as connected:
        watched = Watched(connected)
        for seed in (1, -5):
            wanted = plain(PROMPTS[1], 10, SAMPLED, seed)
            assert (
                list(watched.complete(PROMPTS[1], 10, sampling=SAMPLED, seed=seed).tokens) == wanted
            )
        assert plain(PROMPTS[1], 10, SAMPLED, 1) != wanted


def test_a_conversation_sends_known_contexts_once(server: Server) -> None:
    """The second prompt starts with the first sequence, whose contexts the client still has."""
    with client(server.grpc_address, mode="client") as connected:
        first = connected.complete(PROMPTS[0], max_new_tokens=30)
        longer = [*PROMPTS[0], *first.tokens, 5, 6]
        again = connected.complete(longer, max_new_tokens=4)
        assert list(again.tokens) == plain(longer, 4)
        with client(server.grpc_address, mode="client") as other:
            assert (
                other.complete(longer, max_new_tokens=4).stats.bytes_down
                > 1.2 * again.stats.bytes_down
            )


# Without a network


def test_writes_offline_and_takes_back(server: Server) -> None:
    """The network is switched off on the client's side.

    The client continues at once, up to a limit. After the return, wrong tokens are rolled back.
    """
    with client(server.grpc_address, mode="server", max_offline=10, offline_below=0.0) as connected:
        watched = Watched(connected)
        unverified: list[int] = []

        def note(event: Any) -> None:
            watched.note(event)
            if isinstance(event, Tokens) and event.start >= 20 and not unverified:
                connected.cut()
            if isinstance(event, Tokens) and event.kinds[0] == "unverified":
                unverified.extend(event.tokens)
                if len(unverified) == 10:
                    threading.Timer(0.3, connected.restore).start()

        answer = connected.complete(PROMPTS[0], max_new_tokens=40, on_event=note)
    assert list(answer.tokens) == plain(PROMPTS[0], 40) == watched.display.tokens
    assert watched.display.max_unverified == 10
    assert len(unverified) == 10
    changes = [event.up for event in watched.events if isinstance(event, LinkChanged)]
    assert changes == [True, False, True]
    # While offline, a second event may give the reason for a pause.
    modes = [
        mode
        for mode, _ in groupby(
            event.mode for event in watched.events if isinstance(event, ModeChanged)
        )
    ]
    assert modes == ["server", "offline", "server"]
    assert any(isinstance(event, Verified | RolledBack) for event in watched.events)


CUTS = [(mode, way, reset) for mode in MODES for way in ("up", "down") for reset in (True, False)]
QUICK_CUTS = {("server", "down", False), ("client", "up", True)}


@pytest.mark.parametrize(
    ("mode", "way", "reset"),
    [pytest.param(*cut, marks=[] if cut in QUICK_CUTS else pytest.mark.slow) for cut in CUTS],
)
@pytest.mark.parametrize(
    "is_complete", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_cut_after_any_byte(
    mode: Any, way: Any, reset: bool, is_complete: bool, server: Server
) -> None:
    """Record an exchange. Then repeat it with a cut after every few bytes of one direction."""
    timeouts = Timeouts(connect_s=120.0, silence_s=0.05, dead_s=0.3)
    wanted, step = plain(PROMPTS[3], 12), 1 if is_complete else 2999 if way == "down" else 397
    with Proxy(server.port) as proxy:
        with client(proxy.address, mode=mode) as connected:
            assert list(connected.complete(PROMPTS[3], max_new_tokens=12).tokens) == wanted
        n_bytes = proxy.n_bytes[way]
    assert n_bytes > 300
    for n in range(0, n_bytes + step, step):
        with Proxy(server.port) as proxy, restored(proxy):
            proxy.cut_after(n, way, reset)
            with client(proxy.address, mode=mode, timeouts=timeouts) as connected:
                assert list(Watched(connected).complete(PROMPTS[3], 12).tokens) == wanted, n


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(SamplingConfig(), marks=pytest.mark.slow), SAMPLED],
    ids=["greedy", "sampled"],
)
def test_the_server_is_started_again(sampling: SamplingConfig) -> None:
    """The server has lost the session.

    The client opens it again with the committed tokens, and writes offline meanwhile.
    """
    drafters = {"moa": model().drafter}
    first = Server(target(), drafters, target_ms=10.0).__enter__()
    second = Server(target(), drafters, grpc_port=first.port)

    def restart() -> None:
        first.__exit__()
        time.sleep(0.2)
        second.__enter__()

    with client(first.grpc_address, mode="server") as connected:
        watched, thread = Watched(connected), threading.Thread(target=restart)

        def note(event: Any) -> None:
            watched.note(event)
            if isinstance(event, Tokens) and event.start >= 12 and thread.ident is None:
                thread.start()

        answer = connected.complete(
            PROMPTS[5], max_new_tokens=40, sampling=sampling, seed=3, on_event=note
        )
        thread.join()
        n_opened = second.counts.n_opened
        second.__exit__()
    assert list(answer.tokens) == plain(PROMPTS[5], 40, sampling, 3)
    assert "offline" in [event.mode for event in watched.events if isinstance(event, ModeChanged)]
    assert n_opened == 1


def test_another_client_takes_the_answer_up(server: Server, tmp_path: Path) -> None:
    """After a kill, the second client has only the file."""
    file = tmp_path / "session.json"

    class Killed(BaseException):
        """Stands in for the end of the process."""

    def die(event: Any) -> None:
        if isinstance(event, Tokens) and event.start >= 14:
            raise Killed

    with (
        client(server.grpc_address, session_file=file, mode="client") as connected,
        pytest.raises(Killed),
    ):
        connected.complete(PROMPTS[6], max_new_tokens=28, sampling=SAMPLED, seed=9, on_event=die)
    saved = SavedAnswer.load(file)
    assert not saved.finish
    assert saved.session
    assert len(saved.tokens) > len(PROMPTS[6])
    with client(server.grpc_address, session_file=file, mode="client") as connected:
        watched = Watched(connected)
        answer = connected.resume(saved, watched.note)
    assert list(answer.tokens) == plain(PROMPTS[6], 28, SAMPLED, 9) == watched.display.tokens
    assert SavedAnswer.load(file).finish == "length"
    with client(server.grpc_address) as connected:
        assert connected.resume(SavedAnswer.load(file)).tokens == answer.tokens, (
            "what has ended stays as it is"
        )


# Refusals


@pytest.mark.parametrize("is_silent", [True, False], ids=["accepts and is silent", "nobody"])
def test_nobody_answers(is_silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if not is_silent:
            listener.close()
        began = time.monotonic()
        with (
            client(address, timeouts=Timeouts(connect_s=0.3)) as connected,
            pytest.raises(Disconnected),
        ):
            connected.complete([5, 6])
        assert time.monotonic() - began < Timeouts().connect_s


def test_requests_that_make_no_sense(server: Server) -> None:
    with client(server.grpc_address) as connected:
        for tokens, n_most in (([], 5), ([5], 0), ([99999], 5)):
            with pytest.raises(RequestInvalid):
                connected.complete(tokens, max_new_tokens=n_most)
        with raises_naming(RequestInvalid, "temperature", "top_p", "top_k", "repetition_penalty"):
            connected.complete([5], sampling=SamplingConfig(1.0, min_p=0.1))
        assert list(connected.complete(PROMPTS[0], max_new_tokens=5).tokens) == plain(PROMPTS[0], 5)


BAD_ADDRESSES = ("", "localhost", "localhost:0", "localhost:99999", "ftp://localhost:80", ":80")
BAD_SETTINGS: list[dict[str, Any]] = [
    {"mode": "fast"}, {"codec": "fp1"}, {"max_offline": -1}, {"offline_below": 1.0},
    {"ca": "/nowhere"}
]  # fmt: skip


def test_settings_that_make_no_sense() -> None:
    for address, settings in (
        *((address, {}) for address in BAD_ADDRESSES),
        *(("localhost:1", settings) for settings in BAD_SETTINGS)
    ):  # fmt: skip
        with pytest.raises(RequestInvalid):
            client(address, **settings)


def test_never_loads_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat with drafter and bundle from disk works although the target cannot be loaded.

    A server with another drafter is refused.
    """
    text_model, tokenizer = build_text_model(), build_tokenizer(LLAMA3_TEMPLATE)
    save_target_bundle(text_model, tokenizer, tmp_path / "store" / "target", 1)
    drafter = build("moa", text_model, target_layer_inference=1)
    save_drafter(drafter, tmp_path / "drafter")
    live = Target(text_model, tokenizer)
    identities = Identities("", tokenizer_identity(tokenizer), {"moa": drafter_identity(drafter)})

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the client loads the target")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(Target, "load", refuse)
    chat = [{"role": "user", "content": "the cat sat"}]
    with (
        Server(live, {"moa": drafter}, identities) as own,
        DraftingClient(
            own.grpc_address, tmp_path / "drafter", tmp_path / "store", timeouts=HASTY
        ) as connected,
    ):
        answer = connected.chat(chat, max_new_tokens=12)
        assert len(answer.tokens) == 12 or answer.finish == "stop"
        assert answer.text == tokenizer.decode(answer.tokens, skip_special_tokens=True)
    with (
        Server(live, {"moa": drafter}, Identities("", "", {"moa": "another"})) as other,
        DraftingClient(
            other.grpc_address, tmp_path / "drafter", tmp_path / "store", timeouts=HASTY
        ) as connected,
        pytest.raises(ProtocolMismatch),
    ):
        connected.chat(chat)


# Saved answers

SAVED = SavedAnswer(
    "s", (5, 6, 7), 2, 40, SamplingConfig(0.5, 0.9), 3, "", ({"role": "user", "content": "🙂"},)
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 2), ("tokens", []), ("tokens", [1.5, 2, 3]), ("tokens", [-1, 2]),
        ("n_prompt", 4), ("n_prompt", 0),
        ("max_new_tokens", 0), ("seed", "3"), ("session", None), ("sampling", {"temperature": -1}),
        ("sampling", 3),
        ("messages", [3]), ("messages", [{"role": 1}]), ("unknown", 1),
    ],
)  # fmt: skip
def test_other_contents_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    SAVED.save(tmp_path / "a")
    assert SavedAnswer.load(tmp_path / "a") == SAVED
    values = json.loads((tmp_path / "a").read_text())
    (tmp_path / "a").write_text(json.dumps(values | {key: value}))
    with pytest.raises(RequestInvalid):
        SavedAnswer.load(tmp_path / "a")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("deep", "bytes", "missing", "."):
        with pytest.raises(RequestInvalid):
            SavedAnswer.load(tmp_path / name)
    with pytest.raises(RequestInvalid):
        SAVED.save(tmp_path / "nowhere" / "a")
