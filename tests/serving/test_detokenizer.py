"""The text grows and shrinks with its tokens, and equals the decoding of all of them."""

import random

from moa_data.serving.detokenizer import Detokenizer, StopStrings
from moa_data.tests.kit.models import build_byte_tokenizer, build_tokenizer

TEXTS = ("the cat sat on a warm mat", "naïve café — 日本語 🙂🙂 end", "  spaces\n\nand lines ", "")


def test_tokens_add_up_to_the_text() -> None:
    for tokenizer in (build_byte_tokenizer(), build_tokenizer(None)):
        for text in TEXTS:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            grown = Detokenizer(tokenizer.decode)
            parts = [grown.append(token) for token in tokens]
            assert "".join(parts) == text
            assert not any("\ufffd" in part for part in parts)


def test_tokens_are_taken_back() -> None:
    """They may end in the middle of a character."""
    tokenizer, chance = build_byte_tokenizer(), random.Random(0)
    tokens = tokenizer(TEXTS[1], add_special_tokens=False)["input_ids"]
    grown, parts = Detokenizer(tokenizer.decode), list[str]()
    for _ in range(200):
        if parts and chance.random() < 0.4:
            del parts[chance.randrange(len(parts)) :]
            grown.truncate(len(parts))
        elif len(parts) < len(tokens):
            parts.append(grown.append(tokens[len(parts)]))
        whole = tokenizer.decode(tokens[: len(parts)])
        assert "".join(parts) == whole.rstrip("\ufffd")


def test_bytes_that_are_no_text_are_shown_in_the_end() -> None:
    tokenizer = build_byte_tokenizer()
    broken = tokenizer.convert_tokens_to_ids("Ð")  # the first of two bytes of a character
    grown = Detokenizer(tokenizer.decode)
    assert "".join(grown.append(broken) for _ in range(40)).count("\ufffd") >= 16


def test_what_is_held_back_can_be_shown_at_the_end() -> None:
    pieces = {1: b"h", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"!"}
    grown = Detokenizer(
        lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")
    )
    assert [grown.append(token) for token in (1, 2)] == ["h", ""]
    assert grown.rest == "\ufffd"
    assert [grown.append(token) for token in (3, 4)] == ["é", "!"]
    assert grown.rest == ""


def test_stop_strings_do_not_depend_on_pieces() -> None:
    def passed(stops: list[str], pieces: list[str], n_before: int = 0) -> str:
        search = StopStrings(stops, n_before)
        return "".join(map(search.push, pieces)) + search.rest()

    assert passed(["abc", "b"], ["abc"]) == passed(["abc", "b"], list("abc")) == "a"
    assert passed(["aab"], ["aa", "aab", "c"]) == "aa"
    assert passed(["abc", "b"], list("bbabxab"), 4) == "bbabxa"
    assert passed(["ab"], list("abab"), 3) == "ab"
    assert passed(["a" * 255 + "b"], list("a" * 2000 + "c")) == "a" * 2000 + "c"
