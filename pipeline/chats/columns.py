"""Makes chats of rows whose questions and answers have columns of their own.

``--columns`` names them, a role at a time and in the order of the chat, or by a format::

    alpaca              {"instruction": "Add.", "input": "1, 2", "output": "3"}  user=instruction+input,assistant=output
    prompt-completion   {"prompt": "Add 1 and 2.", "completion": "3"}            user=prompt,assistant=completion
    messages=chat       {"chat": [{"role": "user", "content": "Add 1 and 2."}, ...]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import OptionInvalid
from ...moa.targets.chat import ROLES, Rejection, RejectReason

FORMATS = {
    "alpaca": ("user=instruction+input", "assistant=output"),
    "prompt-completion": ("user=prompt", "assistant=completion"),
}
_WHOLE = ("messages", "tools")


@dataclass(frozen=True)
class Columns:
    """Which columns of a row make its chat.

    Attributes:
        turns: role of each message and its columns, whose texts are joined by an empty line; empty ones are left out.
        renamed: messages, tools or system -> the column that holds it.
    """

    turns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Columns:
        """Read ``role=column[+column]`` texts, or the name of a format; nothing for rows that are chats.

        Raises:
            OptionInvalid: something else, or neither messages nor both a user and an assistant are named.
        """
        turns: list[tuple[str, tuple[str, ...]]] = []
        renamed: dict[str, str] = {}
        for text in [part for item in texts for part in FORMATS.get(item, (item,))]:
            role, equals, names = text.partition("=")
            role, columns = ROLES.get(role.strip(), role.strip()), tuple(name.strip() for name in names.split("+"))
            if not equals or not all(columns) or role not in (*_WHOLE, *ROLES.values()) or role == "tool":
                raise OptionInvalid(
                    f"columns has {text!r}, expected ROLE=COLUMN such as user=instruction+input,assistant=output with "
                    f"the roles messages, tools, system, user and assistant, or one of {', '.join(FORMATS)}"
                )
            if role in ("user", "assistant"):
                turns.append((role, columns))
            elif len(columns) > 1 or role in renamed:
                raise OptionInvalid(f"columns has {text!r}, but {role} can only be one column")
            else:
                renamed[role] = columns[0]
        roles = {role for role, _ in turns}
        if texts and (bool(roles) == ("messages" in renamed) or (roles and roles != {"user", "assistant"})):
            raise OptionInvalid(
                f"columns is {','.join(texts)}, expected either messages=COLUMN, or columns for both user and assistant"
            )
        return cls(tuple(turns), tuple(renamed.items()))

    def describe(self) -> dict[str, str]:
        """Return role -> columns, joined by +, as store.json records them; empty for rows that are chats."""
        # Roles may come twice; their order is that of the chat.
        turns = {f"{index}.{role}": "+".join(columns) for index, (role, columns) in enumerate(self.turns)}
        return turns | dict(self.renamed)

    def apply(self, row: Any) -> Any | Rejection:
        """Return a row with the columns of a chat; one that lacks a column is rejected, anything else as it is."""
        if not (self.turns or self.renamed) or not isinstance(row, Mapping):
            return row
        wanted = [name for _, columns in self.turns for name in columns] + [name for _, name in self.renamed]
        if missing := [name for name in wanted if name not in row]:
            return Rejection(RejectReason.NO_COLUMN, f"{missing[0]}; columns: " + ", ".join(map(str, list(row)[:8])))
        chat = {key: value for key, value in row.items() if key not in ("messages", "conversations")}
        chat |= {name: row[column] for name, column in self.renamed}
        if self.turns:
            chat["messages"] = [message for turn in self.turns for message in _messages(*turn, row)]
        return chat


def _messages(role: str, columns: Sequence[str], row: Mapping[str, Any]) -> list[Any]:
    """Return the message of one turn, or the messages that its column holds, as in TRL's conversational prompts."""
    values = [row[name] for name in columns if row[name] not in (None, "")]
    if len(values) == 1 and not isinstance(values[0], str):
        is_chat = isinstance(values[0], list | tuple) and all(isinstance(item, Mapping) for item in values[0])
        return list(values[0]) if is_chat else [{"role": role, "content": values[0]}]
    texts = [value if isinstance(value, str) else None for value in values]
    return [{"role": role, "content": None if None in texts else "\n\n".join(map(str, texts))}]
