"""The gRPC server gives the answer of plain decoding, whatever clients ask, cut or send again.

It survives their faults.
"""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.targets.live import Target
from moa_data.serving import moa_v1_pb2 as pb
from moa_data.serving.engine.runner import Runner
from moa_data.serving.grpc import Identities
from moa_data.serving.wire import CODECS, STATUSES, decode
from moa_data.tests.kit.attackers import HTTP2_PREFACE, connect, wait_for_end
from moa_data.tests.kit.drafters import build, build_drafter, contexts_of, teach
from moa_data.tests.kit.models import build_model, random_prompts
from moa_data.tests.kit.proxy import Proxy
from moa_data.tests.kit.serving import never_ending, wait_for

from .drafting import PLAIN, SPECULATE, Server, Talk

PROMPTS = random_prompts(4, 3, longest=40)
PROMPT = PROMPTS[0]
N = len(PROMPT)
N_NEW = 12
IDENTITIES = Identities("aa" * 32, "bb" * 32, {"moa": "cc" * 32})


@pytest.fixture(scope="module")
def target() -> Target:
    return never_ending(build_model(num_hidden_layers=2))


@pytest.fixture(scope="module")
def drafter(target: Target) -> Any:
    """A drafter that is often right about the prompts."""
    return teach(build_drafter(target.model, 1), target, PROMPTS, 15)


@pytest.fixture(scope="module")
def answer(target: Target) -> list[int]:
    """The prompt and the answer of plain decoding."""
    return PROMPT + plain_generate(target, PROMPT, max_new_tokens=N_NEW).tokens


@pytest.fixture(scope="module")
def server(target: Target, drafter: Any) -> Iterator[Server]:
    limits: dict[str, Any] = {"messages_per_s": 1e6, "max_body_bytes": 4096, "max_drafts": 6}
    with Server(target, {"moa": drafter}, IDENTITIES, tree="4", **limits) as server:
        yield server


@pytest.fixture
def talk(server: Server) -> Iterator[Talk]:
    with Talk(server.grpc_address) as talk:
        yield talk


# Verify


def test_verify_chains(talk: Talk, answer: list[int]) -> None:
    opened = talk.opened(PROMPT)
    assert (opened.n_committed, opened.max_drafts, opened.max_positions) == (N, 6, 96)
    assert not opened.was_rebuilt
    assert opened.context_width == 0
    assert len(opened.session) > 40
    first = talk.verify(N)
    assert (first.start, list(first.tokens), first.n_accepted) == (N, answer[N : N + 1], 0)
    assert first.call_us > 0
    wrong = (answer[N + 3] + 1) % 60
    second = talk.verify(N + 1, [*answer[N + 1 : N + 3], wrong, 5])
    assert (list(second.tokens), second.n_accepted) == (answer[N + 1 : N + 4], 2)
    third = talk.verify(N + 4, answer[N + 4 :])
    assert (list(third.tokens), third.n_accepted) == (answer[N + 4 : N + 11], 6), (
        "as many as one call takes"
    )
    last = talk.verify(N + 11)
    assert (list(last.tokens), last.finish) == (answer[N + 11 :], "length")
    assert talk.verify(N + len(answer[N:])).finish == "length", (
        "an answer that has ended is told again"
    )


def test_what_is_committed_answers_a_verify_that_is_sent_again(
    talk: Talk, server: Server, answer: list[int]
) -> None:
    """If its drafts go beyond the committed tokens, the rest is verified, up to a call's limit."""
    truth = answer[N:]
    talk.open(PROMPT)
    talk.verify(N, truth[:2])
    n_calls = server.engine.snapshot().n_calls
    for drafts, n_accepted in (
        (truth[:2], 2),
        ([7], 0),
        ([], 0),
        ([truth[0], (truth[1] + 1) % 60], 1),
    ):
        found = talk.verify(N, drafts)
        assert (found.start, list(found.tokens), found.n_accepted) == (N, truth[:3], n_accepted)
    assert server.engine.snapshot().n_calls == n_calls, "nothing is computed again"
    found = talk.verify(N, truth[:5])
    assert (list(found.tokens), found.n_accepted) == (truth[:6], 5)
    found = talk.verify(N + 5, [*truth[5:8], (truth[8] + 1) % 60, 5, 5])
    assert (found.start, list(found.tokens), found.n_accepted) == (N + 5, truth[5:9], 3)


# Runs


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_requests_gives_the_plain_text(
    server: Server, target: Target, seed: int
) -> None:
    """Drafts are right or wrong, requests start late, and runs and streams end anywhere.

    Some answers are sampled.
    """
    chance = random.Random(seed)
    prompt = PROMPTS[seed]
    sampling: dict[str, Any] = {"temperature": 0.9, "seed": seed} if seed % 2 else {}
    truth = plain_generate(target, prompt, max_new_tokens=16).tokens
    if sampling:
        with Talk(server.grpc_address) as talk:
            talk.open(prompt, max_new_tokens=16, sampling=pb.Sampling(**sampling))
            truth = talk.run(len(prompt), PLAIN)
    text, tokens, session = prompt + truth, list(prompt), ""
    n_streams = 0
    while tokens != text:
        n_streams += 1
        with Talk(server.grpc_address) as talk:
            settings = {
                "session": session,
                "max_new_tokens": 16,
                "sampling": pb.Sampling(**sampling),
            }
            session = talk.opened(tokens, len(prompt), **settings).session
            for _ in range(chance.randint(1, 8)):
                start = chance.randint(len(prompt), len(tokens))
                drafts = [
                    t if chance.random() < 0.8 else chance.randrange(60)
                    for t in text[start : start + 6]
                ]
                kind = chance.choice(("verify", "verify", "run", "ping"))
                bodies: dict[str, Any] = {
                    "verify": pb.Verify(start=start, tokens=drafts), "ping": pb.Ping(id=start),
                    "run": pb.Run(start=start, mode=chance.choice((PLAIN, SPECULATE))),
                }  # fmt: skip
                talk.send(**{kind: bodies[kind]})
                if chance.random() < 0.7 and kind != "run":
                    talk.read({"verify": "committed", "ping": "pong"}[kind])
                for position, token in sorted(talk.text.items()):
                    assert text[position] == token
                    tokens += [token] if position == len(tokens) else []
            if chance.random() < 0.5:
                talk.hang_up()
                talk.rest()
                tokens += [
                    token
                    for position, token in sorted(talk.text.items())
                    if position >= len(tokens)
                ]
    assert n_streams < 40
    assert not session or server.counts.n_sessions


# Contexts


def received(talk: Talk, width: int, start: int = 0) -> torch.Tensor:
    """Return all contexts that came. They must follow each other from a position on."""
    parts: list[torch.Tensor] = []
    for message in talk.got:
        if message.WhichOneof("body") == "context":
            assert message.context.start == start + sum(map(len, parts))
            context = message.context
            parts.append(decode(context.codec, context.values, context.n_positions, width))
    return torch.cat(parts) if parts else torch.zeros(0, width)


@pytest.mark.parametrize("codec", CODECS)
def test_contexts_come_behind_the_tokens(
    talk: Talk, target: Target, drafter: Any, answer: list[int], codec: str
) -> None:
    opened = talk.opened(PROMPT, codec=codec)
    assert opened.context_width == drafter.context_width
    talk.verify(N, answer[N : N + 3])
    talk.run(N + 4, SPECULATE)
    known = N
    for message in talk.got:
        if message.WhichOneof("body") == "committed":
            known = max(known, message.committed.start + len(message.committed.tokens))
        elif message.WhichOneof("body") == "context":
            assert message.context.start + message.context.n_positions < known, (
                "only of tokens that were sent"
            )
    found = received(talk, opened.context_width)
    expected = contexts_of(drafter, target, answer)[: len(found)]
    assert len(found) >= len(answer) - 2
    steps = {"bf16": 256, "int8": 127, "int4": 7}
    assert (
        (found - expected).abs() <= expected.abs().amax(dim=1, keepdim=True) / steps[codec]
    ).all()


def test_the_contexts_of_a_prompt_wait_for_the_first_token(
    target: Target, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of a long prompt are ready chunk by chunk.

    They are sent after the first token, in pieces.
    """
    monkeypatch.setattr("moa_data.serving.sessions._CHUNK_BYTES", 200)
    prompt = random_prompts(1, 5)[0] * 40
    with (
        Server(target, {"moa": drafter}, prefill_chunk=16) as server,
        Talk(server.grpc_address) as talk,
    ):
        talk.open(prompt[:80], codec="bf16")
        talk.verify(80)
        assert [message.WhichOneof("body") for message in talk.got] == ["opened", "committed"]
        talk.verify(81)
        talk.hang_up()
        talk.rest()
        assert sum(message.WhichOneof("body") == "context" for message in talk.got) >= 80
        assert len(received(talk, drafter.context_width)) == 81


@pytest.mark.parametrize("n_context", [0, 5, N + 3])
def test_contexts_of_a_session_taken_up_again(
    server: Server, target: Target, drafter: Any, answer: list[int], n_context: int
) -> None:
    """The client gets the contexts that it lacks, also those that the cut lost.

    The server does not read the sequence again for that.
    """
    with Talk(server.grpc_address) as talk:
        session = talk.opened(PROMPT, codec="bf16").session
        talk.verify(N, answer[N : N + 3])
    n_read = server.engine.snapshot().n_read
    with Talk(server.grpc_address) as talk:
        opened = talk.opened(answer[: N + 4], N, session=session, codec="bf16", n_context=n_context)
        assert not opened.was_rebuilt
        while n_context + len(found := received(talk, opened.context_width, n_context)) < N + 3:
            talk.read("context")  # The contexts of the verify may not have left the engine yet.
        talk.hang_up()
        talk.rest()
        assert len(received(talk, opened.context_width, n_context)) == N + 3 - n_context
        assert server.engine.snapshot().n_read == n_read
    expected = contexts_of(drafter, target, answer)[n_context : N + 3]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_contexts_that_are_gone_are_made_again(
    target: Target, drafter: Any, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moa_data.serving.sessions._MAX_KEPT", 0)
    with Server(target, {"moa": drafter}) as server:
        with Talk(server.grpc_address) as talk:
            session = talk.opened(PROMPT, codec="bf16").session
            talk.verify(N, answer[N : N + 3])
            n_sent = 0
            while n_sent < N + 3:
                n_sent += talk.read("context").context.n_positions
        for n_context, codec, was_rebuilt in (
            (N + 3, "bf16", False),
            (N + 3, "", False),
            (2, "int8", True),
        ):
            with Talk(server.grpc_address) as talk:
                tokens = answer[: N + 4]
                opened = talk.opened(tokens, N, session=session, codec=codec, n_context=n_context)
                assert opened.was_rebuilt == was_rebuilt
                if was_rebuilt:
                    talk.run(N + 4, PLAIN)
                    found = received(talk, drafter.context_width, n_context)
                    assert n_context + len(found) == len(answer) - 1
                    assert talk.answer == answer[N + 4 :]
                    assert server.counts.n_rebuilt == 1
                else:  # Ask for one token only, since a finished sequence is not read again.
                    talk.verify(opened.n_committed)


# Cuts and restarts


def test_a_server_that_is_ahead_tells_what_the_client_lacks(
    server: Server, answer: list[int]
) -> None:
    """The server also reports that the answer has ended."""
    with Talk(server.grpc_address) as talk:
        session = talk.opened(PROMPT).session
        talk.verify(N, answer[N : N + 5])
    with Talk(server.grpc_address) as talk:
        assert talk.opened(answer[: N + 2], N, session=session).n_committed == N + 6
        found = talk.read("committed").committed
        assert (found.start, list(found.tokens), found.answers) == (N + 2, answer[N + 2 : N + 6], 0)
        talk.verify(N + 6, answer[N + 6 :])
    with Talk(server.grpc_address) as talk:
        talk.opened(answer, N, session=session)
        found = talk.read("committed").committed
        assert (found.start, list(found.tokens), found.finish) == (len(answer), [], "length")


def test_another_stream_takes_a_session_up(server: Server, answer: list[int]) -> None:
    with Talk(server.grpc_address) as first, Talk(server.grpc_address) as second:
        session = first.opened(PROMPT).session
        first.send(run=pb.Run(start=N, mode=PLAIN))
        first.read("committed")
        second.opened(PROMPT, session=session)
        assert second.run(N, PLAIN) == answer[N:]
        first.rest()
        assert (first.got[-1].failure.code, first.got[-1].failure.ends) == ("invalid", True)
        assert first.answer == answer[N : N + len(first.text)]


def test_closed_sessions_are_forgotten(server: Server) -> None:
    with Talk(server.grpc_address) as talk:
        session = talk.opened(PROMPT).session
        talk.send(close=pb.Close())
        talk.rest()
        assert talk.failure is None
    with Talk(server.grpc_address) as talk:
        opened = talk.opened(PROMPT, session=session)
        assert opened.was_rebuilt
        assert opened.session != session


def check_health(server: Server, answer: list[int]) -> None:
    """Check that a new client gets the plain answer."""
    with Talk(server.grpc_address) as talk:
        talk.open(PROMPT, codec="int4")
        talk.run(N, SPECULATE)
        assert talk.failure is None
        assert talk.answer == answer[N:]


def failure_of(talk: Talk) -> pb.Failure:
    """Return the failure that ends a stream; the status must agree with it."""
    talk.rest()
    failure = talk.got[-1].failure
    assert failure.ends
    assert (talk.call.code(), talk.call.details()) == (STATUSES[failure.code], failure.message)
    assert "\n" not in failure.message
    return failure


def refused(server: Server, *opened: Any, metadata: Any = (), **settings: Any) -> pb.Failure:
    """Open a session, and return the failure that ends its stream."""
    with Talk(server.grpc_address, metadata) as talk:
        talk.open(*opened, **settings)
        return failure_of(talk)


# The handshake


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": 2}, "mismatch"),
        ({"identities": pb.Identities(target="dd")}, "mismatch"),
        ({"identities": pb.Identities(tokenizer="dd")}, "mismatch"),
        ({"identities": pb.Identities(drafter="dd"), "codec": "bf16"}, "mismatch"),
        ({"codec": "int2"}, "invalid"),
        ({"tokens": [5, 66, 67]}, "invalid"),
        ({"max_new_tokens": 0}, "invalid"),
        ({"n_context": N + 1}, "invalid"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, "invalid"),
        ({"sampling": pb.Sampling(top_p=2)}, "invalid"),
        ({"sampling": pb.Sampling(repetition_penalty=float("inf"))}, "invalid"),
    ],
)
def test_an_open_that_does_not_fit_is_refused(
    server: Server, changes: dict[str, Any], code: str
) -> None:
    assert refused(server, **{"tokens": PROMPT} | changes).code == code


def test_what_fits_or_is_not_said_is_taken(target: Target, drafter: Any) -> None:
    names, narrow = (
        Identities("aa", "bb", {"moa": "cc", "narrow": "ee"}),
        build("moa", target.model, layer_groups=1),
    )
    with Server(target, {"moa": drafter, "narrow": narrow}, names) as server:
        for drafts_with, codec, width in (
            ("cc", "bf16", drafter.context_width), ("", "int8", drafter.context_width),
            ("dd", "", 0),
            ("ee", "int8", narrow.context_width),
        ):  # fmt: skip
            with Talk(server.grpc_address) as talk:
                asked = pb.Identities(
                    target="aa", tokenizer="bb" if codec else "", drafter=drafts_with
                )
                opened = talk.opened(PROMPT, identities=asked, codec=codec)
                assert opened.context_width == width, (
                    "without contexts the client's drafter is its own affair"
                )
                own = "ee" if drafts_with == "ee" else "cc"
                assert opened.identities == pb.Identities(target="aa", tokenizer="bb", drafter=own)


@pytest.mark.parametrize(
    ("kind", "word"), [("glide", "'glide'"), (None, "--drafter"), ("independent", "")]
)
def test_drafters_without_contexts(target: Target, kind: str | None, word: str) -> None:
    drafters = {kind: build(kind, target.model)} if kind else {}
    with Server(target, drafters) as server, Talk(server.grpc_address) as talk:
        if word:
            assert word in refused(server, PROMPT, codec="bf16").message
        else:  # This drafter needs no contexts.
            assert talk.opened(PROMPT, codec="bf16").context_width == 0
            assert talk.verify(N).tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"n_prompt": N - 1}, {"tokens": [6, *PROMPT[1:]]}, {"max_new_tokens": 13},
        {"sampling": pb.Sampling(temperature=0.5)}, {"sampling": pb.Sampling(seed=3)},
        {"more": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_session_goes_on_with_its_own_text_alone(
    server: Server, answer: list[int], changes: dict[str, Any]
) -> None:
    with Talk(server.grpc_address) as first, Talk(server.grpc_address) as second:
        session = first.opened(PROMPT).session
        first.verify(N, answer[N : N + 2])
        tokens = changes.pop("tokens", PROMPT) + [
            (t + answer[N]) % 60 for t in changes.pop("more", [])
        ]
        second.open(tokens, changes.pop("n_prompt", N), session=session, **changes)
        assert failure_of(second).code == "invalid"
        assert list(first.verify(N + 3).tokens) == answer[N + 3 : N + 4], (
            "the first stream is unharmed"
        )


def test_a_client_may_know_more_than_the_server(server: Server, answer: list[int]) -> None:
    """The client's tokens are used, unless they are invalid: then the session is unchanged."""
    with Talk(server.grpc_address) as talk:
        session = talk.opened(PROMPT).session
        talk.verify(N)
    assert refused(server, [*answer[: N + 1], 67], N, session=session).code == "invalid"
    with Talk(server.grpc_address) as talk:
        opened = talk.opened(answer[: N + 1], N, session=session)
        assert (opened.session, opened.was_rebuilt, opened.n_committed) == (session, False, N + 1)
    with Talk(server.grpc_address) as talk:
        opened = talk.opened(answer[: N + 5], N, session=session)
        assert (opened.session, opened.was_rebuilt, opened.n_committed) == (session, True, N + 5)
        assert list(talk.verify(N + 5, answer[N + 5 : N + 7]).tokens) == answer[N + 5 : N + 8]


# Access


def test_bearer_tokens(target: Target, answer: list[int]) -> None:
    with Server(target, tokens=["secret", "other"]) as server:
        right, wrong = (("authorization", f"Bearer {token}") for token in ("secret", "wrong"))
        for metadata in ((), (wrong,), (right, wrong), (wrong, right)):
            assert refused(server, PROMPT, metadata=metadata).code == "not_allowed"
        assert server.counts.n_sessions == 0
        with Talk(server.grpc_address, (right,)) as talk:
            session = talk.opened(PROMPT).session
            assert list(talk.verify(N).tokens) == answer[N : N + 1]
        for token, is_new in (("other", True), ("secret", False)):
            with Talk(server.grpc_address, (("authorization", f"bearer {token}"),)) as talk:
                opened = talk.opened(PROMPT, session=session)
                assert opened.was_rebuilt == is_new == (opened.session != session), (
                    "sessions are their owner's"
                )


# Invalid messages


@pytest.mark.parametrize(
    "body",
    [
        {"verify": pb.Verify(start=N + 1)},
        {"verify": pb.Verify(start=N - 1)},
        {"run": pb.Run(start=1 << 31, mode=PLAIN)},
        {"run": pb.Run(start=N)},
        {"run": pb.Run(start=N, mode=cast(Any, 9))},
        {"verify": pb.Verify(start=N, tokens=[67])},
        {"open": pb.Open(protocol=1, tokens=PROMPT)},
        {},
    ],
    ids=str,
)
def test_a_message_that_makes_no_sense_harms_nobody(
    talk: Talk, answer: list[int], body: dict[str, Any]
) -> None:
    talk.open(PROMPT)
    sequence = talk.send(**body)
    failure = talk.read("failure").failure
    assert (failure.code, failure.answers, failure.ends) == ("invalid", sequence, False)
    found = talk.verify(N, answer[N : N + 3])
    assert (list(found.tokens), found.n_accepted) == (answer[N : N + 4], 3), "the session continues"


def test_messages_that_were_sent_before_are_ignored(talk: Talk, answer: list[int]) -> None:
    """They are repeated, replayed, or overtaken by later ones."""
    talk.open(PROMPT)
    talk.verify(N)
    for sequence in (0, 1, 2):
        talk.send(sequence, run=pb.Run(start=N, mode=PLAIN))
        talk.send(sequence, open=pb.Open(protocol=1, tokens=PROMPT))
    talk.send(9, verify=pb.Verify(start=N + 1, tokens=answer[N + 1 : N + 3]))
    talk.send(8, close=pb.Close())
    talk.send(9, verify=pb.Verify(start=N + 1, tokens=[1]))
    talk.send(1 << 63, verify=pb.Verify(start=N, tokens=answer[N : N + 3]))
    talk.hang_up()
    talk.rest()
    assert talk.failure is None
    assert [one.answers for one in talk.committed()] == [2, 9, 1 << 63]
    assert talk.text == dict(enumerate(answer[N : N + 4], N))


def test_garbage_ends_its_own_stream(server: Server, answer: list[int]) -> None:
    with Talk(server.grpc_address) as other:
        session = other.opened(PROMPT).session
        for data in (b"\xff", b"\x00" * 100):
            with Talk(server.grpc_address) as talk:
                talk.open(PROMPT)
                talk.send_bytes(data)
                assert failure_of(talk).code == "invalid"
        noise = random.Random(1).randbytes(5000)
        for data in (b"GET / HTTP/1.1\r\n\r\n", noise, HTTP2_PREFACE + noise[:99]):
            with connect(("127.0.0.1", server.port)) as connection:
                connection.sendall(data)
                wait_for_end(connection)
        assert list(other.verify(N).tokens) == answer[N : N + 1]
        other.send(verify=pb.Verify(start=N, tokens=[1] * 5000))  # This message is too large.
        assert other.status() == grpc.StatusCode.RESOURCE_EXHAUSTED
    with Talk(server.grpc_address) as talk:
        assert not talk.opened(PROMPT, session=session).was_rebuilt, "the session is unharmed"
    check_health(server, answer)


any32 = st.integers(0, (1 << 32) - 1)
small = st.integers(0, 20) | st.just(N) | any32
tokens = st.lists(st.integers(0, 66) | any32, max_size=20)
sampling = st.builds(
    pb.Sampling,
    temperature=st.floats(),
    top_p=st.floats(),
    top_k=any32,
    repetition_penalty=st.floats(),
)
opens = st.builds(
    pb.Open, protocol=st.just(1) | any32, session=st.text(max_size=5), tokens=tokens,
    n_prompt=small, sampling=sampling,
    identities=st.builds(pb.Identities, target=st.text(max_size=5), drafter=st.text(max_size=5)),
    max_new_tokens=small,
    codec=st.sampled_from(["", "int4", "bf16", "x"]), n_context=small,
)  # fmt: skip
numbers = {"sequence": st.integers(0, 9) | st.integers(0, (1 << 64) - 1)}
messages = st.one_of(
    st.builds(pb.ClientMessage, open=opens, **numbers),
    st.builds(
        pb.ClientMessage, run=st.builds(pb.Run, start=small, mode=st.integers(0, 5)), **numbers
    ),
    st.builds(pb.ClientMessage, verify=st.builds(pb.Verify, start=small, tokens=tokens), **numbers),
    st.builds(pb.ClientMessage, ping=st.builds(pb.Ping, id=any32), **numbers),
).map(lambda message: message.SerializeToString())


def test_fuzzed_messages(
    server: Server, answer: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Any frames lead to answers, failures or a typed status, never to an internal error."""
    expected = (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
    )

    @settings(max_examples=35)
    @given(st.integers(0, 9).map(bool), st.lists(messages | st.binary(max_size=60), max_size=8))
    def fuzz(is_opened: bool, frames: list[bytes]) -> None:
        with Talk(server.grpc_address) as talk:
            if is_opened:
                talk.open(PROMPT, codec="int4")
            for frame in frames:
                talk.send_bytes(frame)
            talk.hang_up()
            assert talk.status() in expected, talk.call.details()
            assert all(message.failure.code != "internal" for message in talk.got)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        wait_for(lambda: server.counts.n_streams == 0)

    fuzz()
    check_health(server, answer)


# Limits


def test_sessions_of_a_client_and_of_all(target: Target) -> None:
    """Sessions without a stream give way, first the one that is unused for longest."""
    one, other = ((("authorization", f"Bearer {name}"),) for name in ("one", "other"))
    with Server(target, tokens=["one", "other"], max_sessions=4, max_sessions_each=2) as server:
        with Talk(server.grpc_address, one) as first, Talk(server.grpc_address, one) as second:
            name = first.opened(PROMPT).session
            second.opened(PROMPT)
            assert refused(server, PROMPT, metadata=one).code == "overloaded"
            with Talk(server.grpc_address, other) as third:
                third.opened(PROMPT)
        wait_for(lambda: server.counts.n_streams == 0)
        with Talk(server.grpc_address, one) as third:
            third.opened(PROMPT)
            assert server.counts.n_sessions == 3
            with Talk(server.grpc_address, one) as again:
                assert again.opened(PROMPT, session=name).was_rebuilt, "it gave way"


def test_an_engine_that_is_full(target: Target) -> None:
    with Server(target, max_sequences=1, max_waiting=1) as full:

        def is_taken() -> bool:
            with Talk(full.grpc_address) as talk:
                talk.open(PROMPT)
                is_opened: bool = talk.read().WhichOneof("body") == "opened"
                return is_opened

        with Talk(full.grpc_address) as first, Talk(full.grpc_address) as second:
            first.opened(PROMPT)
            second.opened(PROMPT)
            assert not is_taken()
            assert first.verify(N).tokens
        wait_for(lambda: full.counts.n_streams == 0)
        wait_for(is_taken)


def test_too_many_messages_in_flight(
    target: Target, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first messages are answered, those beyond the limit are refused one by one."""
    may_step = threading.Event()
    with Server(target) as server, Talk(server.grpc_address) as talk:
        talk.opened(PROMPT)
        step = server.engine.step
        monkeypatch.setattr(server.engine, "step", lambda: may_step.wait(60) and step())
        sent = [talk.send(verify=pb.Verify(start=N)) for _ in range(25)]
        for _ in range(7):
            talk.read("failure")
        may_step.set()
        talk.hang_up()
        talk.rest()
        refused = [
            message.failure for message in talk.got if message.WhichOneof("body") == "failure"
        ]
        answered = [one.answers for one in talk.committed()]
        assert [failure.code for failure in refused] == ["overloaded"] * len(refused)
        assert sorted(answered + [failure.answers for failure in refused]) == sent
        assert len(refused) >= 7
        assert talk.failure is None
        assert talk.text == dict(enumerate(answer[N : N + len(talk.text)], N))


def test_messages_beyond_the_rate_wait(target: Target) -> None:
    with Server(target, messages_per_s=20) as server, Talk(server.grpc_address) as talk:
        talk.opened(PROMPT)
        began = time.monotonic()
        for number in range(30):
            talk.send(ping=pb.Ping(id=number))
        for number in range(30):
            assert talk.read("pong").pong.id == number
        assert time.monotonic() - began > 10 / 20 * 0.9


def test_a_slow_reader_holds_its_own_text_alone(drafter: Any) -> None:
    """No data pile up: the engine waits for the reader, and the other sequences continue."""
    target = never_ending(build_model(num_hidden_layers=2, max_position_embeddings=600))
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with (
        Server(target, {"moa": drafter}, kv_tokens=1000) as server,
        Talk(server.grpc_address, options=window) as talk,
    ):
        talk.open(PROMPT, codec="bf16", max_new_tokens=240)
        talk.send(run=pb.Run(start=N, mode=PLAIN))
        talk.hang_up()
        wait_for(lambda: server.engine.snapshot().n_calls >= 64)
        n_calls = [-1, 0]
        while n_calls[-1] != n_calls[-2]:
            time.sleep(0.5)
            n_calls.append(server.engine.snapshot().n_calls)
        assert 64 <= n_calls[-1] < 180, "it is held"
        with Talk(server.grpc_address) as other:
            other.open(PROMPT)
            assert other.verify(N).tokens
        talk.rest()
        assert talk.failure is None
        assert sorted(talk.text) == list(range(N, N + 240)), "it goes on when it is read"


@pytest.mark.parametrize(
    "n_new", [400, pytest.param(20, marks=pytest.mark.slow)], ids=["running", "done"]
)
def test_who_reads_nothing_is_sent_away(
    drafter: Any, caplog: pytest.LogCaptureFixture, n_new: int
) -> None:
    target = never_ending(build_model(num_hidden_layers=2, max_position_embeddings=600))
    window = [("grpc.http2.lookahead_bytes", 1024)]
    with (
        Server(target, {"moa": drafter}, idle_s=1.0, write_s=1.0) as server,
        Talk(server.grpc_address, options=window) as talk,
    ):
        talk.opened([5] * 100, codec="bf16", max_new_tokens=n_new)
        talk.send(run=pb.Run(start=100, mode=PLAIN))
        wait_for(lambda: server.engine.snapshot().n_committed > 10)
        wait_for(lambda: server.counts.n_streams == server.counts.n_sessions == 0)
        wait_for(lambda: server.engine.snapshot().n_open == 0)
        assert talk.status() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# Time


def test_who_opens_nothing_is_sent_away(target: Target) -> None:
    with Server(target, head_s=1.0) as server:
        with Talk(server.grpc_address) as talk:
            assert failure_of(talk).code == "idle"
        with Talk(server.grpc_address) as talk:
            talk.send(ping=pb.Ping(id=3))
            assert talk.read().pong.id == 3, "a ping needs no session"
            talk.send(verify=pb.Verify(start=N))
            assert failure_of(talk).code == "invalid"


def test_idle_sessions_are_forgotten(target: Target) -> None:
    with Server(target, idle_s=1.0) as server:
        with Talk(server.grpc_address) as idle, Talk(server.grpc_address) as busy:
            session = idle.opened(PROMPT).session
            busy.opened(PROMPT)
            while server.counts.n_sessions == 2:
                busy.send(ping=pb.Ping())
                busy.read("pong")
                time.sleep(0.05)
            assert failure_of(idle).code == "idle"
            assert busy.verify(N).tokens
            assert server.counts.n_sessions == 1
        wait_for(lambda: server.counts.n_sessions == 0)
        wait_for(lambda: server.engine.snapshot().n_open == 0)
        with Talk(server.grpc_address) as talk:
            assert talk.opened(PROMPT, session=session).was_rebuilt


@pytest.mark.parametrize("is_silent", [True, False], ids=["half-open", "reset"])
def test_connections_that_are_gone_end(target: Target, answer: list[int], is_silent: bool) -> None:
    """A client that vanishes silently is detected by keepalive, and its session is kept."""
    with (
        Server(target, keepalive_s=0.5, target_ms=5.0) as server,
        Proxy(server.port) as proxy,
        Talk(proxy.address) as talk,
    ):
        session = talk.opened(PROMPT, max_new_tokens=80).session
        talk.send(run=pb.Run(start=N, mode=PLAIN))
        talk.read("committed")
        proxy.cut(reset=not is_silent)
        wait_for(lambda: server.counts.n_streams == server.engine.snapshot().n_working == 0)
        n_committed = server.engine.snapshot().n_committed
        time.sleep(0.1)
        assert server.engine.snapshot().n_committed == n_committed, "nothing is decoded for nobody"
        with Talk(server.grpc_address) as again:
            opened = again.opened(PROMPT, session=session, max_new_tokens=80)
            assert not opened.was_rebuilt
            assert opened.n_committed == N + n_committed


def test_the_server_drains(target: Target, answer: list[int]) -> None:
    """Running requests are finished. Idle streams and new ones are refused."""
    with (
        Server(target, target_ms=40.0, grace_s=2) as server,
        Talk(server.grpc_address) as running,
        Talk(server.grpc_address) as idle,
        Talk(server.grpc_address) as endless,
    ):
        for talk, n_new in ((running, N_NEW), (idle, N_NEW), (endless, 90)):
            talk.opened(PROMPT, max_new_tokens=n_new)
        running.send(run=pb.Run(start=N, mode=PLAIN))
        endless.send(run=pb.Run(start=N, mode=PLAIN))
        running.read("committed")
        server.end()
        assert failure_of(idle).code == "unavailable"
        assert refused(server, PROMPT).code == "unavailable"
        assert failure_of(running).code == "unavailable"
        assert running.answer == answer[N:]
        assert failure_of(endless).code == "unavailable"
        assert 5 < len(endless.text) < 90


# Errors of the engine


def test_a_text_that_fails_is_opened_again(
    target: Target,
    answer: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The cause is logged, but not sent to the client."""
    real, is_broken = Runner.run, threading.Event()

    def run(*arguments: Any, **named: Any) -> Any:
        if is_broken.is_set():
            raise RuntimeError("CUDA error: at /secret/path.cu\nTraceback")
        return real(*arguments, **named)

    monkeypatch.setattr(Runner, "run", run)
    with Server(target) as server:
        with Talk(server.grpc_address) as talk:
            session = talk.opened(PROMPT).session
            talk.verify(N)
            is_broken.set()
            talk.send(verify=pb.Verify(start=N + 1))
            failure = failure_of(talk)
            assert failure.code == "internal"
            assert "/secret/path.cu" not in failure.message
            assert "/secret/path.cu" in caplog.text
        is_broken.clear()
        with Talk(server.grpc_address) as talk:
            assert talk.opened(answer[: N + 1], N, session=session).was_rebuilt
            assert list(talk.verify(N + 1).tokens) == answer[N + 1 : N + 2]


def test_a_fault_of_the_server_ends_one_stream(
    server: Server,
    answer: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("moa_data.serving.grpc.DraftingServer._request", lambda *_: 1 / 0)
        assert refused(server, PROMPT).code == "internal"
    assert "ZeroDivisionError" in caplog.text
    check_health(server, answer)
