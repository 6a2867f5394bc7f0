"""What a terminal shows of an answer at any moment is the answer, whatever was taken back before."""

import random
import re
from dataclasses import dataclass, field

import pytest

from moa_data.commands.chat import PlainAnswer, TerminalAnswer
from moa_data.serving.client.session import Event, LinkChanged, ModeChanged, RolledBack, Stats, Tokens, Verified

STATS = Stats(9, 3, 0, 12.34, 3.0, 21.5, 8.0, 1.0, 100, 200)
_SEQUENCE = re.compile(r"\x1b\[(\d*)([ACJm])|(.|\n|\r)", re.DOTALL)


@dataclass
class Screen:
    """A terminal of some size that knows what the view writes."""

    width: int = 20
    height: int = 8
    rows: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: str = ""

    def write(self, text: str) -> None:
        for number, command, character in _SEQUENCE.findall(text):
            count = int(number or 1)
            if command == "A":
                top = max(0, len(self.rows) - self.height)
                assert self.row - count >= top, "the cursor stays on the screen"
                self.row -= count
            elif command == "C":
                self.column += count
            elif command == "J":
                del self.rows[self.row + 1 :], self.rows[self.row][self.column :]
            elif command == "m":
                self.style = {"0": "", "2": "dim", "32": "green"}[number]
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self.row += 1
                if self.row == len(self.rows):
                    self.rows.append([])
            else:
                assert character.isprintable(), repr(character)
                line = self.rows[self.row]
                line.extend([(" ", "")] * (self.column - len(line)))
                line[self.column : self.column + 1] = [(character, self.style)]
                self.column += 1
                assert self.column < self.width, "the terminal never breaks a line"

    @property
    def text(self) -> str:
        return "\n".join("".join(character for character, _ in row) for row in self.rows)

    def styles(self, text: str) -> set[str]:
        """How a text, which is there once, is shown."""
        (start,) = [match.start() for match in re.finditer(re.escape(text), self.text)]
        cells = [cell for row in self.rows for cell in [*row, ("\n", "")]]
        return {style for _, style in cells[start : start + len(text)]}


def body(screen: Screen) -> str:
    """What stands above the line of figures."""
    return screen.text.rpartition("\n\n")[0]


def view_of(screen: Screen) -> TerminalAnswer:
    return TerminalAnswer(screen.write, lambda: (screen.width, screen.height))


def tokens(start: int, texts: list[str], kind: str) -> Tokens:
    return Tokens(start, tuple(range(len(texts))), tuple(texts), (kind,) * len(texts))  # type: ignore[arg-type]


def test_kinds_have_their_looks() -> None:
    screen = Screen(60)
    view = view_of(screen)
    view.note(ModeChanged("client", "the session is open"))
    view.note(tokens(0, ["The ", "cat "], "accepted"))
    view.note(tokens(2, ["sat "], "bonus"))
    view.note(tokens(3, ["on ", "a ", "dog"], "unverified"))
    assert screen.text.splitlines()[0] == "The cat sat on a dog"
    assert screen.styles("The cat ") == {"green"}
    assert screen.styles("sat ") == {""}
    assert screen.styles("on a dog") == {"dim"}
    view.note(Verified(5))
    assert screen.styles("on a ") == {"green"}
    view.note(RolledBack(5))
    view.note(tokens(5, ["mat"], "bonus"))
    view.note(STATS)
    assert screen.text.splitlines() == [
        "The cat sat on a mat", "", "client | 12.3 tokens/s | round trip 21.5 ms | 3.00 tokens a",
    ]  # fmt: skip
    view.note(ModeChanged("offline", "nothing was heard."))
    assert screen.text.splitlines()[2].startswith("offline, nothing was heard | ")
    view.end()
    assert (screen.column, screen.row) == (0, len(screen.rows) - 1)


def test_text_of_others_cannot_move_the_cursor() -> None:
    screen = Screen(60)
    view = view_of(screen)
    view.note(tokens(0, ["a\x1b[2J", "\tb", "\r", "\x07c"], "streamed"))
    assert screen.text.splitlines()[0] == "a\\x1b[2J    b\\x0d\\x07c"


@pytest.mark.parametrize("seed", range(40))
def test_the_screen_shows_the_answer(seed: int) -> None:
    """Random events; lines break at the width, and nothing of what was taken back is left."""
    chance = random.Random(seed)
    screen = Screen(chance.choice((20, 31, 80)), 30)
    view, shown, n_verified = view_of(screen), list[str](), 0

    def word() -> str:
        return chance.choice(("a", "bird ", "", "\n", "sings, ", "x" * 25, " the\nend "))

    for _ in range(60):
        event: Event = chance.choice((STATS, ModeChanged("client", "r"), LinkChanged(False, "r")))
        action, unverified = chance.random(), len(shown) - n_verified
        texts = [word() for _ in range(chance.randint(1, 5))]
        if action < 0.3 and not unverified:
            event = tokens(len(shown), texts, chance.choice(("streamed", "accepted", "bonus")))
            shown += texts
            n_verified = len(shown)
        elif action < 0.5 and unverified < 12:
            event = tokens(len(shown), texts, "unverified")
            shown += texts
        elif action < 0.7 and unverified:
            n_verified += chance.randint(1, unverified)
            event = Verified(n_verified)
        elif action < 0.8 and unverified:
            del shown[n_verified:]
            event = RolledBack(n_verified)
        view.note(event)
        step = screen.width - 1
        lines = [line[at : at + step] for line in "".join(shown).split("\n") for at in range(0, len(line) or 1, step)]
        assert body(screen) == "\n".join(lines)
        if len(screen.rows) > 20:
            break


def test_what_left_the_screen_stays() -> None:
    screen = Screen(20, 6)
    view = view_of(screen)
    view.note(tokens(0, ["line\n"] * 20, "streamed"))
    view.note(tokens(20, ["dim\n"] * 12, "unverified"))
    view.note(RolledBack(20))
    view.note(tokens(20, ["end"], "bonus"))
    lines = body(screen).splitlines()
    assert lines[:20] == ["line"] * 20
    assert lines[-1] == "end"
    view.note(tokens(21, ["!"], "bonus"))
    assert body(screen).splitlines()[-1] == "end!"


def test_a_pipe_gets_verified_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainAnswer()
    for event, expected in (
        (tokens(0, ["The ", "cat "], "streamed"), "The cat "),
        (tokens(2, ["sat ", "on ", "a "], "unverified"), ""),
        (tokens(5, ["dog"], "unverified"), ""),
        (STATS, ""),
        (Verified(4), "sat on "),
        (Verified(5), "a "),
        (RolledBack(5), ""),
        (tokens(5, ["mat"], "bonus"), "mat"),
    ):
        view.note(event)
        assert capsys.readouterr().out == expected
