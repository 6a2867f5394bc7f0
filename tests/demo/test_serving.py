"""The timeline of an answer, recorded from events while the network is cut once."""

import socket
import threading
import time
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from moa_data.demo import serving
from moa_data.demo.serving import CutProxy, Timeline
from moa_data.serving.client.session import RolledBack, Tokens, Verified


def tokens(start: int, kind: str, n: int) -> Tokens:
    return Tokens(start, tuple(range(n)), ("x",) * n, (kind,) * n)  # type: ignore[arg-type]


@pytest.mark.draws
def test_what_is_shown_and_what_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CUT_S", 0.01)
    proxy = Mock()
    timeline = Timeline(proxy, 2)
    timeline.note(tokens(0, "streamed", 2))
    timeline.note(tokens(2, "unverified", 3))
    while len(timeline.cut) < 2:
        time.sleep(0.005)
    for event in (Verified(3), RolledBack(3), tokens(3, "bonus", 1)):
        timeline.note(event)
    assert [point[1:] for point in timeline.points] == [
        (0, 0),
        (2, 2),
        (5, 2),
        (5, 3),
        (3, 3),
        (4, 4),
    ]
    assert timeline.n_rolled_back == 2
    assert proxy.method_calls == [call.cut(), call.restore()]
    assert 0 < timeline.cut[0] <= timeline.cut[1]
    seconds = [point[0] for point in timeline.points]
    assert seconds == sorted(seconds)
    timeline.draw(tmp_path / "serving.png")
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_passes_while_the_network_is_cut() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        CutProxy(server.getsockname()[1], 0.01) as proxy,
    ):
        host, port = proxy.address.split(":")
        with (
            socket.create_connection((host, int(port)), timeout=60) as near,
            server.accept()[0] as far,
        ):
            near.sendall(b"one")
            assert far.recv(8) == b"one"
            proxy.cut()
            time.sleep(0.05)
            far.sendall(b"two")
            near.settimeout(0.2)
            with pytest.raises(TimeoutError):
                near.recv(8)
            threading.Timer(0.05, proxy.restore).start()
            near.settimeout(60)
            assert near.recv(8) == b"two"


def test_a_network_may_come_back_after_its_end() -> None:
    """The demo's timer does this if the demo is interrupted while the network is cut."""
    with CutProxy(1, 0.01) as proxy:
        proxy.cut()
    proxy.restore()
