"""Bearer tokens are compared as wholes, and rate limits are kept."""

from pathlib import Path

import pytest

from moa_data.errors import NotAllowed, RequestInvalid
from moa_data.serving.access import BearerTokens, read_tokens


def test_tokens() -> None:
    tokens = BearerTokens(["one", "two"])
    owners = {tokens.check([given]) for given in ("Bearer one", "bearer one", "BEARER two")}
    assert len(owners) == 2
    assert not any("one" in owner or "two" in owner for owner in owners)
    wrong = (
        "",
        "one",
        "Basic one",
        "Bearer",
        "Bearer ",
        "Bearer on",
        "Bearer one two",
        "Bearer \udcff",
    )
    for given in ([], *([each] for each in wrong), ["Bearer one", "Bearer one"]):
        with pytest.raises(NotAllowed):
            tokens.check(given)
    assert BearerTokens().check([]) == BearerTokens().check(["Bearer one"]) == ""


def test_every_token_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time reveals neither which token matched nor how much of one was right."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    tokens = BearerTokens(["one", "two", "three"])
    tokens.check(["Bearer one"])
    with pytest.raises(NotAllowed):
        tokens.check(["Bearer wrong"])
    assert len(compared) == 6
    assert {len(digest) for pair in compared for digest in pair} == {32}


def test_a_file_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# of the lab\n\n one \ntwo\n")
    tokens = BearerTokens(read_tokens(file))
    assert tokens.check(["Bearer one"]) != tokens.check(["Bearer two"])
    (tmp_path / "none").write_text("# none\n\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("none", "bytes", "absent"):
        with pytest.raises(RequestInvalid):
            read_tokens(tmp_path / name)
