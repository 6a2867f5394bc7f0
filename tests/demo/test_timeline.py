"""The course of an answer as the events tell it."""

from moa_data.demo.timeline import Timeline
from moa_data.serving.client.events import RolledBack, Tokens, Verified


def tokens(start: int, kind: str, n: int) -> Tokens:
    return Tokens(start, tuple(range(n)), ("x",) * n, (kind,) * n)  # type: ignore[arg-type]


def test_what_is_shown_and_what_is_verified() -> None:
    timeline = Timeline()
    timeline.note(tokens(0, "streamed", 2))
    timeline.mark_cut()
    timeline.note(tokens(2, "unverified", 3))
    timeline.mark_mended()
    for event in (Verified(3), RolledBack(3), tokens(3, "bonus", 1)):
        timeline.note(event)
    assert [(point.n_shown, point.n_verified) for point in timeline.points] == [
        (0, 0), (2, 2), (5, 2), (5, 3), (3, 3), (4, 4),
    ]  # fmt: skip
    assert timeline.n_rolled_back == 2
    [(went, came)] = timeline.cuts
    assert came is not None
    assert 0 < went <= came
    seconds = [point.seconds for point in timeline.points]
    assert seconds == sorted(seconds)
