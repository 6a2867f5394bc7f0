"""The answer is that of plain decoding, whatever the network does.

Nothing is lost, nothing comes twice, and the number of unverified tokens is bounded.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.errors import Disconnected, NotAllowed, Overloaded, ProtocolMismatch, RequestInvalid
from moa_data.moa.decoding.tree import TreeShape
from moa_data.serving import moa_v1_pb2 as pb
from moa_data.serving.client.session import (
    AnswerSettings,
    ChosenMode,
    ClientSession,
    Done,
    LinkChanged,
    ModeChanged,
    RolledBack,
    SavedAnswer,
    Tokens,
    Verified,
)

from .world import FAULTS, STEPS, World, texts


@settings(max_examples=80)
@given(
    seed=st.integers(0, 1 << 30),
    mode=st.sampled_from(["server", "client"]),
    actions=st.lists(st.sampled_from(STEPS) | st.sampled_from(STEPS + FAULTS), max_size=150),
)
def test_nothing_is_lost_and_nothing_comes_twice(
    seed: int, mode: ChosenMode, actions: list[str]
) -> None:
    World(seed, mode).live(actions)


def opened(mode: ChosenMode = "client", **changes: object) -> ClientSession:
    """Return a session with the prompt 1, 2 after its first token, 3.

    The server takes four drafts per call.
    """
    settings = AnswerSettings(mode=mode, shape=TreeShape(3), **changes)  # type: ignore[arg-type]
    session = ClientSession(SavedAnswer("", (1, 2), 2, 20), settings, texts())
    session.link_up()
    session.receive(
        pb.ServerMessage(opened=pb.Opened(session="s", max_drafts=4, max_positions=100))
    )
    session.no_draft()
    commit(session, 2, [3])
    session.take_events()
    session.take_messages()
    return session


def commit(session: ClientSession, start: int, tokens: Sequence[int], n_accepted: int = 0) -> None:
    """Answer the last request."""
    found = pb.Committed(
        start=start, tokens=tokens, n_accepted=n_accepted, answers=session._awaited
    )
    session.receive(pb.ServerMessage(committed=found))


def asked(session: ClientSession) -> list[pb.Verify]:
    return [
        message.verify
        for message in session.take_messages()
        if message.WhichOneof("body") == "verify"
    ]


def test_a_chain_is_verified_and_shown() -> None:
    session = opened()
    for token in (4, 5, 6):
        assert session.wants_draft
        session.add_draft(token, 0.9)
    assert asked(session) == [pb.Verify(start=3, tokens=[4, 5, 6])]
    for token in (7, 8, 9, 10):
        assert session.wants_draft, "while the server verifies"
        session.add_draft(token, 0.9)
    assert not session.wants_draft
    commit(session, 3, [4, 5, 6, 7], n_accepted=3)
    assert asked(session) == [pb.Verify(start=7, tokens=[8, 9, 10])], (
        "at once: what was guessed ahead is right"
    )
    commit(session, 7, [8, 11], n_accepted=1)
    assert session.take_events() == [
        Tokens(1, (4, 5, 6, 7), ("4 ", "5 ", "6 ", "7 "), ("accepted",) * 3 + ("bonus",)),
        Tokens(5, (8, 11), ("8 ", "11 "), ("accepted", "bonus")),
    ]
    assert session.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 11]
    assert session.wants_draft


def test_a_cut_and_the_return() -> None:
    """Tokens in flight are shown at once.

    After the return, all of them are verified, and wrong ones are rolled back.
    """
    session = opened(max_offline=6)
    for token in (4, 5, 6):
        session.add_draft(token, 0.9)
    session.take_messages()
    session.link_down("the network is gone.")
    assert session.take_events() == [
        LinkChanged(False, "the network is gone."),
        ModeChanged("offline", "the network is gone."),
        Tokens(1, (4, 5, 6), ("4 ", "5 ", "6 "), ("unverified",) * 3),
    ]
    for token in (7, 8, 9):
        assert session.wants_draft
        session.add_draft(token, 0.9)
    assert not session.wants_draft, "six are the most"
    session.take_events()
    session.link_up()
    open_, verify = session.take_messages()
    assert (open_.open.session, list(open_.open.tokens), open_.open.n_prompt) == ("s", [1, 2, 3], 2)
    assert verify.verify == pb.Verify(start=3, tokens=[4, 5, 6, 7]), "as many as the server takes"
    session.receive(pb.ServerMessage(opened=pb.Opened(session="s", max_drafts=4)))
    assert session.take_events() == [
        LinkChanged(True),
        ModeChanged("client", "the server answers again"),
    ]
    commit(session, 3, [4, 5, 6, 7, 8], n_accepted=4)
    assert session.take_events() == [Verified(6)]
    assert asked(session) == [pb.Verify(start=8, tokens=[9])], "the rest"
    commit(session, 8, [10])
    assert session.take_events() == [RolledBack(6), Tokens(6, (10,), ("10 ",), ("bonus",))]
    assert session.n_rolled_back == 1


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("overloaded", Overloaded), ("invalid", RequestInvalid), ("not_allowed", NotAllowed),
        ("mismatch", ProtocolMismatch), ("internal", Disconnected),
    ],
)  # fmt: skip
def test_failures_are_errors(code: str, error: type[Exception]) -> None:
    session = opened()
    with pytest.raises(error):
        session.receive(
            pb.ServerMessage(failure=pb.Failure(code=code, message="Do that.", ends=True))
        )
    session.link_down("over")
    session.link_up()
    assert session.take_messages()[0].open.session == "s"


@pytest.mark.parametrize(
    "message",
    [
        pb.ServerMessage(committed=pb.Committed(start=5, tokens=[9])),
        pb.ServerMessage(committed=pb.Committed(start=2, tokens=[9])),
        pb.ServerMessage(committed=pb.Committed(start=0, tokens=[2])),
        pb.ServerMessage(context=pb.Context(start=1, n_positions=1)),
        pb.ServerMessage(context=pb.Context(start=0, n_positions=9)),
    ],
    ids=["gap", "other token", "other prompt", "gap in contexts", "contexts of unknown tokens"],
)
def test_messages_that_make_no_sense_end_the_connection(message: pb.ServerMessage) -> None:
    session = opened()
    with pytest.raises(Disconnected):
        session.receive(message)
    assert session.tokens == [1, 2, 3]
    assert session.n_context == 0
    session.link_up()
    with pytest.raises(Disconnected):  # the server opens the session first
        session.receive(pb.ServerMessage(committed=pb.Committed(start=3, tokens=[4])))


@pytest.mark.parametrize(("answer", "reason"), [([3, 9], "stop"), ([3, 4, 5, 6], "length")])
def test_an_answer_that_was_complete_ends_at_once(answer: list[int], reason: str) -> None:
    settings = AnswerSettings(eos_token_ids=frozenset({9}))
    session = ClientSession(SavedAnswer("", (1, 2, *answer), 2, 4), settings, texts())
    assert session.finish == reason
    assert session.take_events()[-1] == Done(reason)
    session.link_up()
    assert [message.WhichOneof("body") for message in session.take_messages()] == ["open"]


def test_writes_offline_while_it_is_sure_and_says_once_why_no_further() -> None:
    session = opened(offline_below=0.5)
    session.link_down("the network is gone.")
    session.take_events()
    for probability in (0.9, 0.9, 0.9, 0.6):
        assert session.wants_draft
        session.add_draft(4, probability)
    assert not session.wants_draft
    session.no_draft()
    told = [event for event in session.take_events() if isinstance(event, ModeChanged)]
    assert [event.mode for event in told] == ["offline"]
    assert "unsure" in told[0].reason
