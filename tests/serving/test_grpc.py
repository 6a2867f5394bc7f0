"""The gRPC server over real connections: the text is that of plain decoding, whatever is asked, cut or sent again."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.targets.live import Target
from moa_data.serving import moa_v1_pb2 as pb
from moa_data.serving.wire import CODECS, decode
from moa_data.tests.kit.drafters import build, build_drafter, teach
from moa_data.tests.kit.models import build_model, random_prompts

from .drafting import PLAIN, SPECULATE, Server, Talk

PROMPTS = random_prompts(8, 3, longest=40)
PROMPT = PROMPTS[0]
N = len(PROMPT)
N_NEW = 12


@pytest.fixture(scope="module")
def target() -> Target:
    """It never ends an answer."""
    target = Target(build_model(num_hidden_layers=3))
    target.eos_token_ids = frozenset()
    return target


@pytest.fixture(scope="module")
def taught(target: Target) -> Any:
    return teach(build_drafter(target.model, 1), target, PROMPTS, 60)


@pytest.fixture(scope="module")
def server(target: Target, taught: Any) -> Iterator[Server]:
    with Server(target, {"moa": taught, "eagle": build("eagle", target.model)}, max_drafts=16, tree="4") as server:
        yield server


@pytest.fixture(scope="module")
def answer(target: Target) -> list[int]:
    """Prompt and answer of plain decoding."""
    return PROMPT + plain_generate(target, PROMPT, max_new_tokens=N_NEW).tokens


# Verify


def test_verify_chains(server: Server, answer: list[int]) -> None:
    with Talk(server.address) as talk:
        opened = talk.opened(PROMPT)
        assert (opened.n_committed, opened.max_drafts, opened.max_positions) == (N, 16, 96)
        assert not opened.was_rebuilt
        assert opened.context_width == 0
        assert len(opened.session) > 40
        first = talk.verify(N)
        assert (first.start, list(first.tokens), first.n_accepted) == (N, answer[N : N + 1], 0)
        assert first.call_us > 0
        wrong = (answer[N + 3] + 1) % 60
        second = talk.verify(N + 1, [*answer[N + 1 : N + 3], wrong, 5])
        assert (list(second.tokens), second.n_accepted) == (answer[N + 1 : N + 4], 2)
        last = talk.verify(N + 4, answer[N + 4 :])
        assert (list(last.tokens), last.finish) == (answer[N + 4 :], "length")
        assert talk.verify(N + len(answer[N:])).finish == "length", "an answer that has ended is told again"


def test_what_is_committed_answers_a_verify_that_is_sent_again(server: Server, answer: list[int]) -> None:
    """Where its drafts go on, the rest is verified, as many as one call takes."""
    truth = answer[N:]
    with Talk(server.address) as talk:
        talk.open(PROMPT)
        talk.verify(N, truth[:2])
        n_calls = server.engine.snapshot().n_calls
        for drafts, n_accepted in ((truth[:2], 2), ([7], 0), ([], 0), ([truth[0], (truth[1] + 1) % 60], 1)):
            found = talk.verify(N, drafts)
            if drafts == truth[:2]:
                assert list(found.tokens) == truth[:3]
            assert (found.start, list(found.tokens), found.n_accepted) == (N, truth[:3], n_accepted)
        assert server.engine.snapshot().n_calls == n_calls, "nothing is computed again"
        found = talk.verify(N, truth[:5])
        assert (list(found.tokens), found.n_accepted) == (truth[:6], 5)
        found = talk.verify(N + 5, [*truth[5:8], *[(truth[8] + 1) % 60] * 30])
        assert (found.start, list(found.tokens), found.n_accepted) == (N + 5, truth[5:9], 3)


# Runs


def test_a_run_is_paused_and_goes_on(server: Server, answer: list[int]) -> None:
    with Talk(server.address) as talk:
        talk.open(PROMPT)
        talk.send(run=pb.Run(start=N, mode=PLAIN))
        talk.read("committed")
        paused = talk.send(pause=pb.Pause(start=N))
        while not (found := talk.read("committed").committed).answers:
            pass
        assert found.answers == paused
        assert list(found.tokens) == answer[N : N + len(found.tokens)]
        talk.send(ping=pb.Ping(id=7))
        assert talk.read().pong.id == 7, "nothing is decoded meanwhile"
        assert talk.run(N, SPECULATE) == answer[N:]


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_requests_gives_the_plain_text(server: Server, target: Target, seed: int) -> None:
    """Right and wrong drafts, late starts, runs broken off, streams cut at any message, with sampling too."""
    chance = random.Random(seed)
    prompt = PROMPTS[seed]
    sampling: dict[str, Any] = {"temperature": 0.9, "seed": seed} if seed % 2 else {}
    truth = plain_generate(target, prompt, max_new_tokens=24).tokens
    if sampling:
        with Talk(server.address) as talk:
            talk.open(prompt, max_new_tokens=24, sampling=pb.Sampling(**sampling))
            truth = talk.run(len(prompt), PLAIN)
    text, tokens, session = prompt + truth, list(prompt), ""
    n_streams = 0
    while tokens != text:
        n_streams += 1
        with Talk(server.address) as talk:
            settings = {"session": session, "max_new_tokens": 24, "sampling": pb.Sampling(**sampling)}
            session = talk.opened(tokens, len(prompt), **settings).session
            for _ in range(chance.randint(1, 8)):
                start = chance.randint(len(prompt), len(tokens))
                drafts = [t if chance.random() < 0.8 else chance.randrange(60) for t in text[start : start + 6]]
                kind = chance.choice(("verify", "verify", "run", "pause", "ping"))
                if kind == "verify":
                    talk.send(verify=pb.Verify(start=start, tokens=drafts))
                elif kind == "run":
                    talk.send(run=pb.Run(start=start, mode=chance.choice((PLAIN, SPECULATE))))
                elif kind == "pause":
                    talk.send(pause=pb.Pause(start=start))
                else:
                    talk.send(ping=pb.Ping(id=start))
                if chance.random() < 0.7 and kind != "run":
                    talk.read({"verify": "committed", "pause": "committed", "ping": "pong"}[kind])
                for position, token in sorted(talk.text.items()):
                    assert text[position] == token
                    tokens += [token] if position == len(tokens) else []
            if chance.random() < 0.5:
                talk.hang_up()
                talk.rest()
                tokens += [token for position, token in sorted(talk.text.items()) if position >= len(tokens)]
    assert n_streams < 40
    assert not session or server.counts.n_sessions


# Contexts


def expected_contexts(target: Target, drafter: Any, text: list[int]) -> torch.Tensor:
    cache = target.new_cache()
    hidden = target.forward(torch.tensor([text]), cache)[0]
    cache.commit([range(len(text))])
    contexts: torch.Tensor = drafter.encode_context(hidden, cache.packed([0], len(text))[0], torch.arange(len(text)))
    return contexts


def received(talk: Talk, width: int, start: int = 0) -> torch.Tensor:
    """All contexts that came, which follow each other from a position on."""
    parts: list[torch.Tensor] = []
    for message in talk.got:
        if message.WhichOneof("body") == "context":
            assert message.context.start == start + sum(map(len, parts))
            context = message.context
            parts.append(decode(context.codec, context.values, context.n_positions, width))
    return torch.cat(parts) if parts else torch.zeros(0, width)


@pytest.mark.parametrize("codec", CODECS)
def test_contexts_come_behind_the_tokens(
    server: Server, target: Target, taught: Any, answer: list[int], codec: str
) -> None:
    with Talk(server.address) as talk:
        opened = talk.opened(PROMPT, codec=codec)
        assert opened.context_width == taught.context_width
        talk.verify(N, answer[N : N + 3])
        talk.run(N + 4, SPECULATE)
        known = N
        for message in talk.got:
            if message.WhichOneof("body") == "committed":
                known = max(known, message.committed.start + len(message.committed.tokens))
            elif message.WhichOneof("body") == "context":
                assert message.context.start + message.context.n_positions < known, "only of tokens that were sent"
        found = received(talk, opened.context_width)
        expected = expected_contexts(target, taught, answer)[: len(found)]
        assert len(found) >= len(answer) - 2
        steps = {"bf16": 256, "int8": 127, "int4": 7}
        assert ((found - expected).abs() <= expected.abs().amax(dim=1, keepdim=True) / steps[codec]).all()


def test_the_contexts_of_a_prompt_wait_for_the_first_token(
    target: Target, taught: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is read in chunks, whose contexts are there long before; then they come in pieces."""
    monkeypatch.setattr("moa_data.serving.sessions._CHUNK_BYTES", 200)
    prompt = random_prompts(1, 5)[0] * 40
    with Server(target, {"moa": taught}, prefill_chunk=16) as server, Talk(server.address) as talk:
        talk.open(prompt[:80], codec="bf16")
        talk.verify(80)
        assert [message.WhichOneof("body") for message in talk.got] == ["opened", "committed"]
        talk.verify(81)
        talk.hang_up()
        talk.rest()
        assert sum(message.WhichOneof("body") == "context" for message in talk.got) >= 80
        assert len(received(talk, taught.context_width)) == 81


@pytest.mark.parametrize("n_context", [0, 5, N + 3])
def test_contexts_of_a_session_taken_up_again(
    server: Server, target: Target, taught: Any, answer: list[int], n_context: int
) -> None:
    """Those that the client lacks come, also where the cut took them, without reading the text again."""
    with Talk(server.address) as talk:
        session = talk.opened(PROMPT, codec="bf16").session
        talk.verify(N, answer[N : N + 3])
    n_read = server.engine.snapshot().n_read
    with Talk(server.address) as talk:
        opened = talk.opened(answer[: N + 4], N, session=session, codec="bf16", n_context=n_context)
        assert not opened.was_rebuilt
        talk.send(pause=pb.Pause(start=N + 4))
        while n_context + len(found := received(talk, opened.context_width, n_context)) < N + 3:
            talk.read("context")  # those of the verify may still be on their way from the engine
        talk.hang_up()
        talk.rest()
        assert len(received(talk, opened.context_width, n_context)) == N + 3 - n_context
        assert server.engine.snapshot().n_read == n_read
    expected = expected_contexts(target, taught, answer)[n_context : N + 3]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_contexts_that_are_gone_are_made_again(
    target: Target, taught: Any, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moa_data.serving.sessions._MAX_KEPT", 0)
    with Server(target, {"moa": taught}) as server:
        with Talk(server.address) as talk:
            session = talk.opened(PROMPT, codec="bf16").session
            talk.verify(N, answer[N : N + 3])
            n_sent = 0
            while n_sent < N + 3:
                n_sent += talk.read("context").context.n_positions
        for n_context, codec, was_rebuilt in ((N + 3, "bf16", False), (N + 3, "", False), (2, "int8", True)):
            with Talk(server.address) as talk:
                tokens = answer[: N + 4]
                opened = talk.opened(tokens, N, session=session, codec=codec, n_context=n_context)
                assert opened.was_rebuilt == was_rebuilt
                if was_rebuilt:
                    talk.run(N + 4, PLAIN)
                    found = received(talk, taught.context_width, n_context)
                    assert n_context + len(found) == len(answer) - 1
                    assert talk.answer == answer[N + 4 :]
                    assert server.counts.n_rebuilt == 1
                else:  # one token and no more: a text that has come to its end is not read again
                    talk.verify(opened.n_committed)


# Cuts and restarts


def test_a_server_that_is_ahead_tells_what_the_client_lacks(server: Server, answer: list[int]) -> None:
    """Also that the answer has ended."""
    with Talk(server.address) as talk:
        session = talk.opened(PROMPT).session
        talk.verify(N, answer[N : N + 5])
    with Talk(server.address) as talk:
        assert talk.opened(answer[: N + 2], N, session=session).n_committed == N + 6
        found = talk.read("committed").committed
        assert (found.start, list(found.tokens), found.answers) == (N + 2, answer[N + 2 : N + 6], 0)
        talk.verify(N + 6, answer[N + 6 :])
    with Talk(server.address) as talk:
        talk.opened(answer, N, session=session)
        found = talk.read("committed").committed
        assert (found.start, list(found.tokens), found.finish) == (len(answer), [], "length")


def test_another_stream_takes_a_session_up(server: Server, answer: list[int]) -> None:
    with Talk(server.address) as first, Talk(server.address) as second:
        session = first.opened(PROMPT).session
        first.send(run=pb.Run(start=N, mode=PLAIN))
        first.read("committed")
        second.opened(PROMPT, session=session)
        assert second.run(N, PLAIN) == answer[N:]
        first.rest()
        assert (first.got[-1].failure.code, first.got[-1].failure.ends) == ("invalid", True)
        assert first.answer == answer[N : N + len(first.text)]


def test_closed_sessions_are_forgotten(server: Server) -> None:
    with Talk(server.address) as talk:
        session = talk.opened(PROMPT).session
        talk.verify(N)
        n_sessions = server.counts.n_sessions
        talk.send(close=pb.Close())
        talk.rest()
        assert talk.failure is None
        assert server.counts.n_sessions == n_sessions - 1
    with Talk(server.address) as talk:
        opened = talk.opened(PROMPT, session=session)
        assert opened.was_rebuilt
        assert opened.session != session


def test_deadlines_end_the_answer(target: Target) -> None:
    with Server(target, target_ms=30.0) as server, Talk(server.address) as talk:
        talk.open(PROMPT, deadline_ms=200, max_new_tokens=50)
        talk.run(N, PLAIN)
        commits = list(talk.committed())
        assert commits[-1].finish == "deadline"
        assert 1 < len(talk.answer) < 20
