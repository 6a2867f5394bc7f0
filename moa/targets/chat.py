"""Turns rows of a dataset into chats (messages, and the tools that they may call), or rejects them with a reason.

This file decides what becomes of every key of a row, of a message and of a part. A piece of the chat is kept, or the
row is rejected; it never disappears. Whether the chat template then shows each piece is checked in chat_tokens.py.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = dict[str, Any]

ROLES = {
    "system": "system", "tool": "tool", "user": "user", "human": "user", "prompter": "user",
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}  # fmt: skip
_MESSAGE_COLUMNS = ("messages", "conversations")
_SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
# Columns that hold more of the chat than its messages: other turns, arguments of the template, documents, media.
_UNREAD_COLUMN = re.compile(
    r"history|chat_template_kwargs|documents|(?:image|video|audio)s?(?:_urls?|_paths?|_files?)?"
)
# Keys that some datasets keep beside a message's content. Few templates render them, and none says which it does.
_UNREAD_KEY = re.compile(
    r"(?:image|video|audio)s?|refusal|train_detail|cot|chain_of_thought|rationale|think"
    r"|(?:reasoning|thinking|thoughts?)(?:_content|_text|_details|_blocks)?"
)
# Marks of a message that say whether it is trained on, as OpenAI, axolotl, ms-swift, xtuner and others name them: the
# first kind trains where it is true, the second where it is false.
_TRAIN_MARK = re.compile(
    r"(?:.+_)?(?:train|trainable|training|learn|learnable|supervised|loss|weights?)(?:_.+)?|.+_mask"
)
_SKIP_MARK = re.compile(
    r"mask|masked|is_masked|mask_loss|(?:no|not|do_not)_(?:train|loss|learn).*|(?:ignored?|excluded?|skip)(?:_.+)?"
)
# Columns that mark a row as a whole; many other columns have names like marks.
_ROW_MARKS = {
    "train",
    "trainable",
    "loss",
    "loss_mask",
    "train_mask",
    "weight",
    "weights",
    "masked",
    "ignore",
    "exclude",
    "skip_loss",
}
_NO = ("0", "0.0", "false", "no")
_UNTRAINED_ROLES = ("user", "system")  # roles that the `mask` column of NeMo's chats may name
_MESSAGE_KEYS = {"role", "from", "content", "value", "tool_calls", "function_call"}
_OTHER_ARGUMENTS = ("parameters", "input", "args", "kwargs")  # keys of a call that would hold its arguments
_PART_KEYS = {"type", "text", "index", "id", "annotations", "cache_control"}
_TEXT_TYPES = ("text", "input_text", "output_text", None)


class RejectReason(StrEnum):
    """Why a row gives no sequence; the values are shown to the user."""

    MALFORMED_ROW = "the row is no JSON object"
    NO_COLUMN = "the row lacks a column that --columns names"
    NO_MESSAGES = "the row has neither messages nor conversations"
    MALFORMED_MESSAGES = "messages is no list of objects with a role and a content"
    UNKNOWN_ROLE = "a message has an unknown role"
    EMPTY_CONTENT = "a message is empty or no text"
    NON_TEXT_PART = "a message has a part that is no text"
    NO_RESPONSE = "the chat has no assistant message"
    MALFORMED_TOOLS = "tools is no list of objects with a name"
    MALFORMED_TOOL_CALLS = "tool_calls is no list of calls with a name and an object of arguments"
    MALFORMED_SYSTEM = "the system column is no text"
    CONTENT_NOT_READ = "the chat has content that is not read, such as reasoning beside an answer"
    MARKED_UNTRAINED = "an answer is marked as not to be trained on"
    TWO_SYSTEM_TEXTS = "the system column and the system message differ"
    NO_UNICODE = "a text holds half a surrogate pair, which no tokenizer takes"
    TOO_LONG = "the chat has more characters than any context holds"
    SPECIAL_TOKEN_IN_CONTENT = "a message contains a special token of the tokenizer"
    TEMPLATE_FAILED = "the chat template refuses the chat"
    NOT_SHOWN = "the chat template leaves out a part of the chat, or writes it twice"
    TEMPLATE_REWRITES_RESPONSE = "the chat template rewrites the response"
    NO_RESPONSE_TOKENS = "no response token"
    TRUNCATED_AWAY = "every response lies beyond max_length"
    NO_PROMPT_TOKENS = "every token would be a response"


@dataclass(frozen=True)
class Rejection:
    """The reason why a row gives no sequence, for counting, and what was found, for the example that is shown."""

    reason: RejectReason
    detail: str = ""


@dataclass(frozen=True)
class UnreadableRow:
    """A row of a file that cannot be read."""

    detail: str


@dataclass(frozen=True)
class Chat:
    """The chat of one row.

    A message has a role (system, user, assistant or tool) and a content: the text unchanged, or the list of its text
    parts. Where the row has them it also has tool_calls, whose arguments are objects or the JSON of objects, and any
    other keys.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None  # JSON schemas of those that the assistant may call


def parse_chat(row: Any) -> Chat | Rejection:
    """Read the chat of one row as training data, which needs a message of the assistant.

    Keys of a message that are not known here are kept, because the chat template may show them. Contents in parts stay
    in parts.

    Args:
        row: a mapping with `messages` ([{role, content}]) or `conversations` ([{from, value}], ShareGPT), and
            optionally `tools` and `system` (a text). Messages and tools may be lists, or the JSON of lists.
    """
    if isinstance(marked := _read_row_marks(row), Rejection):
        return marked
    chat = _parse(row, _parse_trained_message)
    if isinstance(chat, Chat) and not any(message["role"] == "assistant" for message in chat.messages):
        return Rejection(RejectReason.NO_RESPONSE, "roles: " + ", ".join(m["role"] for m in chat.messages[:8]))
    return chat


def parse_prompt(row: Any) -> Chat | Rejection:
    """Read the chat of one row as a prompt.

    It may lack messages of the assistant. Contents are texts, and messages have no other keys than name, tool_call_id
    and tool_calls, because they may be sent to a server.
    """
    return _parse(row, _parse_message)


def content_texts(message: Message) -> list[str]:
    """Return the texts of a message's content, one for each part."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """Return a message with other arguments of its calls, if it has any."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    changed = [function | {"arguments": change(function["arguments"])} for function in functions]
    calls = zip(message["tool_calls"], changed, strict=True)
    return message | {"tool_calls": [call | {"function": function} for call, function in calls]}


def _parse(row: Any, parse_message: Callable[[Mapping[Any, Any], int], Message | Rejection]) -> Chat | Rejection:
    if isinstance(row, UnreadableRow):
        return Rejection(RejectReason.MALFORMED_ROW, row.detail)
    if not isinstance(row, Mapping):
        return Rejection(RejectReason.MALFORMED_ROW, f"got {type(row).__name__}")
    columns = [_unpacked(row[name]) for name in _MESSAGE_COLUMNS if row.get(name) is not None]
    if not columns:
        return Rejection(RejectReason.NO_MESSAGES, "columns: " + ", ".join(map(str, list(row)[:8])))
    if unread := [name for name in row if row[name] and _UNREAD_COLUMN.fullmatch(str(name).lower())]:
        return Rejection(RejectReason.CONTENT_NOT_READ, f"the column {unread[0]}")
    columns = [items for items in columns if items] or columns[:1]
    chats = [_parse_messages(items, parse_message) for items in columns]
    if isinstance(chats[0], Rejection):
        return chats[0]
    if chats[-1] != chats[0]:
        return Rejection(RejectReason.CONTENT_NOT_READ, " and ".join(_MESSAGE_COLUMNS) + " differ")
    if isinstance(tools := _parse_tools(row.get("tools") or row.get("functions")), Rejection):
        return tools
    return _with_system(Chat(chats[0], tools or None), row)


def _parse_messages(
    items: Any, parse_message: Callable[[Mapping[Any, Any], int], Message | Rejection]
) -> list[Message] | Rejection:
    if not isinstance(items, (list, tuple)) or not items:
        return Rejection(RejectReason.MALFORMED_MESSAGES, f"got {type(items).__name__} {items!r:.60}")
    messages = []
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            return Rejection(RejectReason.MALFORMED_MESSAGES, f"message {index} is {type(item).__name__}")
        if isinstance(message := parse_message(item, index), Rejection):
            return message
        messages.append(message)
    return messages


def _with_system(chat: Chat, row: Mapping[Any, Any]) -> Chat | Rejection:
    """Put the text of the system column in front, unless a system message says the same."""
    system_texts = [row[name] for name in _SYSTEM_COLUMNS if row.get(name)]
    if wrong := [value for value in system_texts if not isinstance(value, str)]:
        return Rejection(RejectReason.MALFORMED_SYSTEM, f"got {type(wrong[0]).__name__}")
    system_texts = [text for text in system_texts if text.strip()]
    if not system_texts:
        return chat
    shown = ["".join(content_texts(message)) for message in chat.messages if message["role"] == "system"]
    if len({text.strip() for text in [*system_texts, *shown]}) > 1:
        lengths = " and ".join(f"{len(text):,}" for text in [*system_texts, *shown])
        return Rejection(RejectReason.TWO_SYSTEM_TEXTS, f"{lengths} characters")
    if shown:
        return chat
    return Chat([{"role": "system", "content": system_texts[0]}, *chat.messages], chat.tools)


def _parse_trained_message(item: Mapping[Any, Any], index: int) -> Message | Rejection:
    """Read a message with all of its keys; one of the assistant is rejected if it is marked as not to be trained on."""
    message = _parse_message(item, index)
    if isinstance(message, Rejection):
        return message
    if message["role"] == "assistant" and (mark := _find_skip_mark(item)):
        return Rejection(RejectReason.MARKED_UNTRAINED, f"message {index} has {mark}")
    others = {key: value for key, value in item.items() if key not in _MESSAGE_KEYS and value is not None}
    message = {key: value for key, value in others.items() if _is_json(value)} | message
    content = item.get("content") or item.get("value")
    if isinstance(content, (list, tuple)) and message["content"]:
        message["content"] = [_as_text_part(part) for part in content]
    return message


def _as_text_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the type of a part, if it has one: some templates show parts of type ``text`` alone."""
    return {"type": "text", "text": part["text"]} if part.get("type") else {"text": part["text"]}


def _parse_message(item: Mapping[Any, Any], index: int) -> Message | Rejection:
    role = _read_role(item, index)
    if isinstance(role, Rejection):
        return role
    if unread := [key for key in item if item[key] and _UNREAD_KEY.fullmatch(str(key).lower())]:
        return Rejection(RejectReason.CONTENT_NOT_READ, f"message {index} has {unread[0]}")
    calls = _parse_calls(item, index)
    if isinstance(calls, Rejection):
        return calls
    if calls and role != "assistant":
        return Rejection(RejectReason.MALFORMED_TOOL_CALLS, f"message {index} ({role}) calls a tool")
    content = _read_content(item, f"message {index} ({role})")
    if isinstance(content, Rejection):
        return content
    if not content.strip() and not calls:
        return Rejection(RejectReason.EMPTY_CONTENT, f"message {index} ({role})")
    message: Message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    return message | {key: item[key] for key in ("name", "tool_call_id") if isinstance(item.get(key), str)}


def _read_role(item: Mapping[Any, Any], index: int) -> str | Rejection:
    names = {str(item[key]).strip().lower() for key in ("role", "from") if item.get(key) is not None}
    if not names:
        return Rejection(RejectReason.MALFORMED_MESSAGES, f"message {index} has no role")
    roles = {ROLES.get(name) for name in names}
    role = roles.pop()
    if role is None or roles:
        shown = " and ".join(repr(name[:80]) for name in sorted(names))
        return Rejection(RejectReason.UNKNOWN_ROLE, f"message {index} has role {shown}")
    return role


def _read_content(item: Mapping[Any, Any], where: str) -> str | Rejection:
    """Read the content of a message as one text, empty for none."""
    contents = [item[key] for key in ("content", "value") if item.get(key)]
    if len(contents) == 2 and contents[0] != contents[1]:
        return Rejection(RejectReason.CONTENT_NOT_READ, f"{where} has both content and value")
    content = contents[0] if contents else ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return Rejection(RejectReason.EMPTY_CONTENT, f"{where} has {type(content).__name__}")
    for part in content:
        if not _is_text_part(part):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            return Rejection(RejectReason.NON_TEXT_PART, f"{where} has {str(kind)[:40]!r}")
    return "".join(part["text"] for part in content)


def _is_text_part(part: Any) -> bool:
    """Whether a part of a content is a text and nothing else, such as an image or reasoning."""
    if not isinstance(part, Mapping) or part.get("type") not in _TEXT_TYPES:
        return False
    filled = {key for key, value in part.items() if _is_filled(value)}
    return isinstance(part.get("text"), str) and filled <= _PART_KEYS


def _is_filled(value: Any) -> bool:
    """Whether a value holds anything: an object whose values are all null does not."""
    return any(map(_is_filled, value.values())) if isinstance(value, Mapping) else bool(value)


def _find_skip_mark(item: Mapping[Any, Any], is_row: bool = False) -> str:
    """Return the mark of a message, or of a row, that says that it is not to be trained on; empty without one."""
    for key, value in item.items():
        name = str(key).lower()
        is_plain = isinstance(value, (bool, int)) or (isinstance(value, float) and not is_row)  # else a row's loss
        is_mark = (is_plain or isinstance(value, (str, list, tuple))) and (name in _ROW_MARKS or not is_row)
        if not is_mark:
            continue
        values = [str(one).strip().lower() for one in (value if isinstance(value, (list, tuple)) else [value])]
        if _SKIP_MARK.fullmatch(name):
            is_skipped = any(one in ("1", "1.0", "true", "yes") for one in values)
        else:
            is_skipped = bool(_TRAIN_MARK.fullmatch(name)) and any(one in _NO for one in values)
        if is_skipped:
            return f"{key} {value!r:.40}"
    return ""


def _read_row_marks(row: Any) -> Rejection | None:
    """Reject a row that is marked as a whole, or message by message, as not to be trained on."""
    if not isinstance(row, Mapping):
        return None
    if mark := _find_skip_mark(row, is_row=True):
        return Rejection(RejectReason.MARKED_UNTRAINED, f"the column {mark}")
    role = row.get("mask")  # In NeMo's chats: the role whose messages are not trained on.
    if isinstance(role, str) and ROLES.get(role.strip().lower(), "user") not in _UNTRAINED_ROLES:
        return Rejection(RejectReason.MARKED_UNTRAINED, f"the column mask is {role!r:.40}")
    return None


def _parse_tools(value: Any) -> list[dict[str, Any]] | Rejection:
    # A list of JSON schemas, or the JSON of one, whose items may be JSON themselves.
    tools = _unpacked(value or [])
    if not isinstance(tools, (list, tuple)):
        return Rejection(RejectReason.MALFORMED_TOOLS, f"got {type(tools).__name__}")
    found = []
    for index, item in enumerate(tools):
        tool = _unpacked(item)
        if not isinstance(tool, Mapping) or not tool_name(tool) or not _is_json(tool):
            return Rejection(RejectReason.MALFORMED_TOOLS, f"tool {index} is {type(tool).__name__} {_keys(tool)}")
        found.append(dict(tool))
    return found


def _parse_calls(item: Mapping[Any, Any], index: int) -> list[dict[str, Any]] | Rejection:
    """Read the tool calls of a message, or the one call of OpenAI's earlier format."""
    calls = _unpacked(item.get("tool_calls") or [])
    old_call = _unpacked(item.get("function_call"))
    is_empty = isinstance(old_call, Mapping) and not any(old_call.values())  # what some libraries write for null
    if old_call and not is_empty:
        if calls:
            return Rejection(RejectReason.MALFORMED_TOOL_CALLS, f"message {index} has tool_calls and function_call")
        calls = [old_call]
    if not isinstance(calls, (list, tuple)):
        return Rejection(RejectReason.MALFORMED_TOOL_CALLS, f"message {index} has {type(calls).__name__}")
    parsed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        function = function if isinstance(function, Mapping) else {}
        arguments = function.get("arguments")
        arguments = {} if arguments in (None, "") else arguments
        known = _unpacked(arguments)
        is_call = isinstance(known, Mapping) and tool_name(function) and _is_json(known)
        if not is_call or any(function.get(key) for key in _OTHER_ARGUMENTS):
            return Rejection(RejectReason.MALFORMED_TOOL_CALLS, f"message {index} calls {_keys(function)}")
        others = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
        parsed.append(
            {key: value for key, value in others.items() if value is not None and _is_json(value)}
            | {
                "type": call.get("type") or "function",
                "function": {"name": tool_name(function), "arguments": arguments},
            }
        )
    return parsed


def tool_name(value: Mapping[str, Any]) -> str:
    """The name of a tool or a called tool, whether `function` wraps it or not; empty where it has none."""
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _unpacked(value: Any) -> Any:
    """Parse a text that is JSON; anything else is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; raises ValueError if a key comes twice, since one of its values would disappear."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key comes twice")
    return values


def _is_json(value: Any) -> bool:
    """Whether a value is JSON: no NaN, no bytes or dates, and not nested too deeply to be written."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _keys(value: Any) -> str:
    return "with " + ", ".join(map(str, list(value)[:8])) if isinstance(value, Mapping) else f"{value!r:.60}"
