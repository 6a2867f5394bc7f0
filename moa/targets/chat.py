"""Turns rows of a dataset into chats (messages, and the tools that they may call), or rejects them with a reason."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = dict[str, Any]

ROLES = {
    "system": "system", "tool": "tool", "user": "user", "human": "user", "prompter": "user",
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}  # fmt: skip
_SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
# Keys that some datasets keep beside a message's content; few templates render them, and none says which.
_UNREAD_KEYS = ("reasoning_content", "reasoning", "thinking", "refusal")


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
    TWO_SYSTEM_TEXTS = "the system column and the system message differ"
    NO_UNICODE = "a text holds half a surrogate pair, which no tokenizer takes"
    TOO_LONG = "the chat has more characters than any context holds"
    SPECIAL_TOKEN_IN_CONTENT = "a message contains a special token of the tokenizer"
    TEMPLATE_FAILED = "the chat template refuses the chat"
    NOT_SHOWN = "the chat template leaves out the tools, a tool call or the system column"
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

    A message has a role (system, user, assistant or tool) and a content, the text unchanged; where the row has them
    also name, tool_call_id and tool_calls, whose arguments are objects.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None  # JSON schemas of those that the assistant may call
    system: str = ""  # the text of the row's system column, which is the first message's content as well


def parse_chat(row: Any) -> Chat | Rejection:
    """Read the chat of one row, which needs a message of the assistant.

    ``row``: a mapping with `messages` ([{role, content}]) or `conversations` ([{from, value}], ShareGPT), and
    optionally `tools` and `system` (a text). Messages and tools may be lists, or the JSON of lists.
    """
    chat = parse_prompt(row)
    if isinstance(chat, Chat) and not any(message["role"] == "assistant" for message in chat.messages):
        return Rejection(RejectReason.NO_RESPONSE, "roles: " + ", ".join(m["role"] for m in chat.messages[:8]))
    return chat


def parse_prompt(row: Any) -> Chat | Rejection:
    """Read the chat of one row, as ``parse_chat``, of which the assistant may have said nothing."""
    if isinstance(row, UnreadableRow):
        return Rejection(RejectReason.MALFORMED_ROW, row.detail)
    if not isinstance(row, Mapping):
        return Rejection(RejectReason.MALFORMED_ROW, f"got {type(row).__name__}")
    items = _unpacked(row.get("messages"))
    if items is None and (items := _unpacked(row.get("conversations"))) is None:
        return Rejection(RejectReason.NO_MESSAGES, "columns: " + ", ".join(map(str, list(row)[:8])))
    if not isinstance(items, (list, tuple)) or not items:
        return Rejection(RejectReason.MALFORMED_MESSAGES, f"got {type(items).__name__} {items!r:.60}")
    if row.get("documents"):
        return Rejection(RejectReason.CONTENT_NOT_READ, "documents")
    messages = []
    for index, item in enumerate(items):
        if isinstance(message := _parse_message(item, index), Rejection):
            return message
        messages.append(message)
    if isinstance(tools := _parse_tools(row.get("tools") or row.get("functions")), Rejection):
        return tools
    return _with_system(Chat(messages, tools or None), next(filter(None, map(row.get, _SYSTEM_COLUMNS)), None))


def _with_system(chat: Chat, text: Any) -> Chat | Rejection:
    """Put the text of the system column in front, unless a system message says the same."""
    if text is None or (isinstance(text, str) and not text.strip()):
        return chat
    if not isinstance(text, str):
        return Rejection(RejectReason.MALFORMED_SYSTEM, f"got {type(text).__name__}")
    others = [message["content"] for message in chat.messages if message["role"] == "system"]
    if not others:
        return Chat([{"role": "system", "content": text}, *chat.messages], chat.tools, text)
    if any(other.strip() != text.strip() for other in others):
        return Rejection(RejectReason.TWO_SYSTEM_TEXTS, f"{len(text):,} and {len(others[0]):,} characters")
    return Chat(chat.messages, chat.tools, text)


def _parse_message(item: Any, index: int) -> Message | Rejection:
    if not isinstance(item, Mapping):
        return Rejection(RejectReason.MALFORMED_MESSAGES, f"message {index} is {type(item).__name__}")
    name = item.get("role", item.get("from"))
    content = item.get("content", item.get("value"))
    if name is None:
        return Rejection(RejectReason.MALFORMED_MESSAGES, f"message {index} has no role")
    role = ROLES.get(str(name).strip().lower())
    if role is None:
        return Rejection(RejectReason.UNKNOWN_ROLE, f"message {index} has role {str(name)[:80]!r}")
    if unread := [key for key in _UNREAD_KEYS if item.get(key)]:
        return Rejection(RejectReason.CONTENT_NOT_READ, f"message {index} has {unread[0]}")
    if item.get("weight") == 0:  # an answer that is not to be trained on
        return Rejection(RejectReason.CONTENT_NOT_READ, f"message {index} has weight 0")
    if isinstance(calls := _parse_calls(item, index), Rejection):
        return calls
    if calls and role != "assistant":
        return Rejection(RejectReason.MALFORMED_TOOL_CALLS, f"message {index} ({role}) calls a tool")
    if isinstance(content, (list, tuple)) and content:
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            return Rejection(RejectReason.NON_TEXT_PART, f"message {index} ({role})")
        content = "".join(map(str, parts))
    if calls and not content:
        content = ""  # the call is the message
    elif not isinstance(content, str) or not content.strip():
        return Rejection(RejectReason.EMPTY_CONTENT, f"message {index} ({role})")
    message: Message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    return message | {key: item[key] for key in ("name", "tool_call_id") if isinstance(item.get(key), str)}


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
    if not calls and item.get("function_call"):
        calls = [_unpacked(item["function_call"])]
    if not isinstance(calls, (list, tuple)):
        return Rejection(RejectReason.MALFORMED_TOOL_CALLS, f"message {index} has {type(calls).__name__}")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = _unpacked(function.get("arguments") or {}) if isinstance(function, Mapping) else None
        if not isinstance(arguments, Mapping) or not tool_name(call) or not _is_json(arguments):
            return Rejection(RejectReason.MALFORMED_TOOL_CALLS, f"message {index} calls {_keys(function)}")
        parsed = {"type": "function", "function": {"name": tool_name(call), "arguments": dict(arguments)}}
        found.append(({"id": call["id"]} if isinstance(call.get("id"), str) else {}) | parsed)
    return found


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
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _is_json(value: Any) -> bool:
    """Whether a value is JSON: no NaN, no bytes or dates, and not nested too deeply to be written."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _keys(value: Any) -> str:
    return "with " + ", ".join(map(str, list(value)[:8])) if isinstance(value, Mapping) else f"{value!r:.60}"
