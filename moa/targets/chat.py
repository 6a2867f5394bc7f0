"""Parses rows of a dataset into chats (messages and tools), or rejects rows with a reason.

This module looks at every key of a row, of a message and of a content part, so that no text is
dropped silently. There are three cases: the value of the key becomes a piece of the chat, or the
row is rejected, or the key is listed as one that does not affect the tokens. The module
chat_tokens.py then checks that the chat template shows each piece.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any, TypeVar

from .finish import find_cuts, is_understood
from .row_values import (
    is_filled,
    is_json,
    json_values,
    snake_case,
    unpacked,
    words_in,
)

Message = dict[str, Any]
_T = TypeVar("_T")
# A function that parses an item of a list. Its first argument is the item. Its second argument is
# the name of the item in error messages, such as "message 3".
_Parse = Callable[[Any, str], _T]

ROLES = {
    "system": "system", "developer": "developer", "tool": "tool",
    "user": "user", "human": "user", "prompter": "user",
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}  # fmt: skip
# Messages with these roles may have an empty text. For example, many tools return nothing.
_MAY_BE_EMPTY = ("system", "developer", "tool")
_MESSAGE_COLUMNS = ("messages", "conversations")
_TOOL_COLUMNS = ("tools", "functions")
_SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
_TEMPLATE_ARGUMENTS = "chat_template_kwargs"
# Keys that belong to a chat, but that moa-data does not read. They hold earlier turns, template
# arguments, documents, media, results and schemas of tools, or annotations of an answer such as its
# reasoning. Only few templates render such keys, and templates do not declare which keys they
# render. So a row is rejected if such a key has content.
_UNREAD = re.compile(
    rf"history|{_TEMPLATE_ARGUMENTS}|documents|attachments?"
    r"|(?:images?|imgs?|videos?|audios?|media|screenshots?|pixel_values)"
    r"(?:_urls?|_paths?|_files?|_\d+)?"
    r"|tool_call|function_calls|tool_results?|tool_schemas|available_(?:tools|functions)"
    r"|refusal|train_detail|scratch_?pad|inner_monologue"
    r"|(?:.+_)?(?:reasoning|think|thinking|thoughts?|cot|chain_?of_?thoughts?|rationales?)"
    r"(?:_?(?:content|text|details|blocks|traces?|steps?|process|summary|summaries"
    r"|trajector(?:y|ies)))?",
)
# Further keys that belong to a chat, but that moa-data does not read. Unlike the keys of `_UNREAD`,
# they count only if they are keys of the row, the message or the tool call itself. In a nested
# object, such as `metadata`, the same name may have another meaning.
_UNREAD_DIRECTLY = re.compile(
    r"observations?"
    r"|(?:images?|imgs?|pictures?|photos?|videos?|(?:video_)?frames|audios?|media|screenshots?"
    r"|pixel_values)(?:_(?:urls?|uris?|paths?|files?|bytes|base64|b64|data|lists?|\d+))*"
    r"|(?:tool|function)_(?:results?|responses?|outputs?|schemas?|definitions?|lists?)|apis"
    r"|system(?:_instructions?|prompt|message)|sys_?(?:prompt|message|instructions?)",
)
# A key such as ``reasoning`` is ignored if it has one of these values. Such a value only switches
# thinking on or off, or sets how much the assistant thinks.
_SWITCHES = {
    "on", "off", "yes", "no", "true", "false", "none", "enabled", "disabled", "adaptive", "auto",
    "minimal", "low", "medium", "high", "xhigh", "max", "summarized", "detailed", "concise",
}  # fmt: skip
# In requests to Anthropic, OpenAI and OpenRouter, an object with these keys switches thinking on or
# off, or limits its length. A key such as ``reasoning`` is ignored if its value is such an object.
_THINKING_SETTINGS = {
    "type", "budget_tokens", "display", "effort", "enabled", "exclude", "max_tokens", "summary",
}  # fmt: skip
# Keys that say whether to train on a message, as OpenAI, axolotl, ms-swift, xtuner and others name
# them. If a key matches `_TRAIN_MARK`, the value true means that a model is trained on the message.
# If a key matches `_SKIP_MARK`, the value true means that the message is left out of training.
_TRAIN_MARK = re.compile(
    r"(?:.+_)?(?:train|trained|trainable|training|learn|learnable|supervised?|loss|weights?)(?:_.+)?"
    r"|.+_masks?|lossmask|requires_grad",
)
_SKIP_MARK = re.compile(
    r"(?:is_|should_|to_)?mask(?:ed)?(?:_(?:out|loss|from_.+|labels?))?|loss_masked(?:_out)?"
    r"|untrained|(?:no|not|non|do_not|dont)_(?:train|loss|learn).*"
    r"|(?:is_)?(?:ignored?|excluded?|skip)(?:_.*(?:train|loss|learn|turn|message).*)?"
    r"|(?:train|loss|learn)_(?:on_|only_)?last(?:_.+)?|mask_history",
)
# Columns that say whether to train on a whole row. This pattern matches fewer names than the
# patterns for keys of messages, because many columns with such names have other purposes.
_ROW_MARK = re.compile(
    r"(?:is_|no_|do_not_|skip_|ignore_|mask_)?(?:train|trained|trainable|loss|masked)"
    r"|(?:.+_)?(?:train|loss)_(?:masks?|weights?)|assistant_masks?|train(?:able|_on)?_turns"
    r"|(?:sample_|turn_|message_)?weights?|ignored?|excluded?|mask"
    r"|(?:train|loss|learn)_(?:on_|only_)?last(?:_.+)?|mask_history",
)
# In datasets for KTO and LLaMA-Factory, the value false in these columns marks an answer that a
# model should not write. The number 0 in such a column does not count as false, because it may be
# the number of a class.
_DESIRABLE_COLUMNS = ("label", "kto_tag")
# In some datasets, the last answer is not part of the messages, but is in one of these columns.
_LAST_ANSWER_COLUMNS = ("chosen", "completion", "response")
# Values of the keys that say whether to train on a message -> whether the value means true. Numbers
# are not listed: a number above 0 means true, and any other number means false. In NeMo's chats,
# the value of the key `mask` is a role, so the role assistant is listed as true.
_MEANINGS = {
    "false": False, "no": False, "n": False, "off": False,
    "true": True, "yes": True, "y": True, "on": True, "assistant": True,
}  # fmt: skip
_MESSAGE_KEYS = ("role", "from", "content", "value", "tool_calls", "function_call")
_PLAIN_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
_READ_KEYS = {*_MESSAGE_KEYS, *_PLAIN_KEYS}
# Keys of messages that most templates show, so :func:`additional_keys` does not list these keys.
# The key ``name``, the name of a speaker, is not one of them, because few templates show it.
_USUAL_KEYS = _READ_KEYS - {"name"}
_CALL_KEYS = {"id", "type", "index", "function"}
_FUNCTION_KEYS = {"name", "arguments"}
# `additional_keys` writes the first of these texts before keys of messages, and the second one
# before keys of tool calls.
_MESSAGE_KEY = "message key"
_CALL_KEY = "tool call key"
NEEDED_KEYS = tuple(f"{_MESSAGE_KEY} {key}" for key in (*_TOOL_COLUMNS, "tool_plan"))
"""Keys of messages that the template must show.

They are the keys with JSON schemas of tools, and the key with the model's plan for using the tools.
"""
WRITTEN_KEYS = tuple(f"{_MESSAGE_KEY} {key}" for key in ("tool_plan", "channel", "recipient"))
"""Keys of messages whose values the model wrote, in addition to contents and tool calls."""
_READ_COLUMNS = {*_MESSAGE_COLUMNS, *_TOOL_COLUMNS, *_SYSTEM_COLUMNS}
CHAT_COLUMNS = {*_READ_COLUMNS, "instruction", "history"}
"""Names of columns that hold the messages, the tools, or another part of a chat."""
# Keys whose values are the chat itself. Inside these values, a name such as "weight" is part of the
# chat, and does not say whether to train on a message.
_CHAT_KEYS = {
    *_MESSAGE_COLUMNS,
    *_TOOL_COLUMNS,
    "content",
    "value",
    "arguments",
}
_NESTED = (Mapping, list, tuple)
# Keys under which some datasets store the arguments of a tool call.
_OTHER_ARGUMENTS = ("parameters", "input", "args", "kwargs")
_PART_KEYS = {"type", "text", "index", "id", "annotations", "cache_control"}
_TEXT_TYPES = ("text", "input_text", "output_text", None)


class RejectReason(StrEnum):
    """Reasons for rejecting a row. The values are shown to the user."""

    MALFORMED_ROW = "the row is not a JSON object"
    NO_COLUMN = "the row lacks a column that `columns` names"
    NO_MESSAGES = "the row has neither messages nor conversations"
    MALFORMED_MESSAGES = "messages is not a list of objects with a role and a content"
    UNKNOWN_ROLE = "a message has an unknown role"
    EMPTY_CONTENT = "a message is empty or no text"
    NON_TEXT_PART = "a message has a part that is not text"
    NO_RESPONSE = "the chat has no assistant message"
    MALFORMED_TURNS = "turns is not a list of questions"
    MALFORMED_TOOLS = "tools is not a list of objects with a name"
    MALFORMED_TOOL_CALLS = (
        "tool_calls is not a list of calls with a name and an object of arguments"
    )
    MALFORMED_SYSTEM = "the system column is not text"
    CONTENT_NOT_READ = (
        "the chat has content that moa-data does not read, such as reasoning next to an answer"
    )
    MARKED_UNTRAINED = "an answer is marked as not to be trained on"
    TWO_SYSTEM_TEXTS = "the system column and the system message differ"
    NO_UNICODE = "a text holds half a surrogate pair, which is not valid Unicode"
    TOO_LONG = "the chat has more characters than fit into any context"
    SPECIAL_TOKEN_IN_CONTENT = "a message contains a special token of the tokenizer"
    TEMPLATE_FAILED = "the chat template refuses to render the chat"
    NOT_SHOWN = "the chat template leaves out a part of the chat, or writes it twice"
    TEMPLATE_REWRITES_RESPONSE = "the chat template rewrites the response"
    NO_RESPONSE_TOKENS = "no token of the chat belongs to a response"
    TRUNCATED_AWAY = "every response begins after the first max_length tokens"
    NO_PROMPT_TOKENS = "every token of the chat belongs to a response, so the chat has no prompt"


@dataclass(unsafe_hash=True)
class Rejection(Exception):
    """A rejected row. The reason is counted, and the detail is shown with an example.

    The functions that check a row raise a Rejection. :func:`parse_chat`, :func:`parse_prompt` and
    :func:`.chat_tokens.tokenize_chat` catch it, and return a copy. They do not return the error
    itself, because an error that was raised keeps the local variables of the functions that it
    passed through, such as the whole chat, in memory.
    """

    reason: RejectReason
    detail: str = ""


@dataclass(frozen=True)
class Chat:
    """The chat of one row.

    A message has a role (system, developer, user, assistant or tool) and a content. The content is
    either the unchanged text, or a list of text parts. A message that calls tools may have no
    content. ``tool_calls`` lists its tool calls. The arguments of each tool call are an object, or
    an object encoded as JSON. A message also keeps all other keys that it has in the row.
    """

    messages: list[Message]
    # JSON schemas of the tools that the assistant may call. None if the row names no tools. This is
    # not the same as an empty list, because some templates render the two differently.
    tools: list[dict[str, Any]] | None = None
    # Whether each message is a separate question. Then each question is answered before the next
    # one is asked.
    asks_each: bool = False


def parse_chat(row: Any) -> Chat | Rejection:
    """Parse the chat of one row as training data. The assistant must have at least one message.

    Unknown keys of a message are kept, because the chat template may show them. A content that is a
    list of parts stays a list.

    Args:
        row: a mapping with `messages` ([{role, content}]) or `conversations` ([{from, value}],
            ShareGPT), and optionally `tools` and `system` (a text). Messages and tools may be
            lists, or lists encoded as JSON. If the row could not be read, this argument is a
            Rejection, which is returned.
    """
    try:
        chat = _parse(row)
        _check_trainable(row, chat)
    except Rejection as rejection:
        return Rejection(rejection.reason, rejection.detail)
    return chat


def _check_trainable(row: Mapping[Any, Any], chat: Chat) -> None:
    """Reject a chat without an answer, or with an answer that is marked as not to be trained on."""
    roles = [message["role"] for message in chat.messages]
    if "assistant" not in roles:
        raise Rejection(
            RejectReason.NO_RESPONSE, "its messages have the roles " + ", ".join(roles[:8])
        )
    if mark := _find_skip_mark(row, is_row=True):
        raise Rejection(RejectReason.MARKED_UNTRAINED, f"the row has {mark}")
    answers = [message for message in chat.messages if message["role"] == "assistant"]
    cuts = find_cuts(row, len(answers))
    for index, answer in enumerate(answers):
        if mark := _find_skip_mark(answer):
            raise Rejection(RejectReason.MARKED_UNTRAINED, f"an answer has {mark}")
        cut = cuts[index] or find_cuts(answer)[0]
        if cut and answer is not chat.messages[-1]:
            raise Rejection(
                RejectReason.MARKED_UNTRAINED, f"an earlier answer was cut off: it has {cut}"
            )
    for column in _LAST_ANSWER_COLUMNS:
        if roles[-1] != "assistant" and _is_answer(row.get(column)):
            detail = f"the messages end before their last answer, which is in the column {column}"
            raise Rejection(RejectReason.CONTENT_NOT_READ, detail)


def _is_answer(value: Any) -> bool:
    """Whether a value contains an answer: a text, a message, or a list of these."""
    if isinstance(value, Mapping):
        return any(_values(value, ("role", "from")))
    if isinstance(value, (list, tuple)):
        return any(map(_is_answer, value))
    return isinstance(value, str) and bool(value.strip())


def parse_prompt(row: Any) -> Chat | Rejection:
    """Parse the chat of one row as a prompt.

    A row of Spec-Bench, ``{"turns": ["...", ...]}``, gives one user message for each question. A
    prompt does not need a message of the assistant. A content that is a list of parts becomes one
    text. Because a prompt may be sent to a server, a message keeps only the keys role, content,
    name, tool_call_id and tool_calls.
    """
    try:
        if isinstance(row, Mapping) and "turns" in row and not any(_values(row, _MESSAGE_COLUMNS)):
            return _parse_questions(row["turns"])
        chat = _parse(row)
        for index, message in enumerate(chat.messages):
            for key in _TOOL_COLUMNS:
                if message.get(key):
                    detail = f"message {index} ({message['role']}) has the key {key}"
                    raise Rejection(RejectReason.CONTENT_NOT_READ, detail)
    except Rejection as rejection:
        return Rejection(rejection.reason, rejection.detail)
    return Chat([_plain(message) for message in chat.messages], chat.tools)


def _parse_questions(turns: Any) -> Chat:
    questions = turns if isinstance(turns, list) else []
    messages: list[Message] = []
    for text in questions:
        if isinstance(text, str) and text.strip():
            messages.append({"role": "user", "content": text})
    if not messages or len(messages) < len(questions):
        raise Rejection(RejectReason.MALFORMED_TURNS, f"turns is {turns!r:.60}")
    return Chat(messages, asks_each=True)


def _plain(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if key in _PLAIN_KEYS}
    if "content" in message:
        plain["content"] = content_text(message)
    return plain


def content_texts(message: Message) -> list[str]:
    """Return the texts of a message's content, one text per content part."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def content_text(message: Message) -> str:
    """Return a message's content as one text.

    The texts of content parts are joined by line breaks, as in vLLM and llama.cpp.
    """
    return "\n".join(filter(None, content_texts(message)))


def with_functions(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """Return a copy of a message with ``change`` applied to the function of each tool call.

    The function of a tool call is an object with a name and arguments.
    """
    if "tool_calls" not in message:
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        calls.append(call | {"function": change(call["function"])})
    return message | {"tool_calls": calls}


def _parse(row: Any) -> Chat:
    if isinstance(row, Rejection):
        raise row
    if not isinstance(row, Mapping):
        raise Rejection(RejectReason.MALFORMED_ROW, f"it has the type {type(row).__name__}")
    lists = _lists(row, _MESSAGE_COLUMNS)
    if not lists:
        raise Rejection(
            RejectReason.NO_MESSAGES, "its columns are " + ", ".join(map(str, list(row)[:8]))
        )
    if unread := _find_unread(row) or find_key(row, _READ_COLUMNS, ignored=_READ_COLUMNS):
        raise Rejection(RejectReason.CONTENT_NOT_READ, f"the row has the column {unread}")
    messages = _parse_lists(
        lists, _MESSAGE_COLUMNS, _parse_message, RejectReason.MALFORMED_MESSAGES
    )
    if not messages:
        raise Rejection(RejectReason.MALFORMED_MESSAGES, "the list of messages is empty")
    tools = _parse_lists(
        _lists(row, _TOOL_COLUMNS), _TOOL_COLUMNS, _parse_tool, RejectReason.MALFORMED_TOOLS
    )
    return _with_system(Chat(messages, tools), row)


def _values(item: Mapping[Any, Any], names: Sequence[str]) -> list[Any]:
    """Return the values that an item has under several names of the same key.

    The item is a row, a message or a tool call. Empty values are left out. If all values are empty,
    only the first value is returned.
    """
    values: list[Any] = []
    for name in names:
        if item.get(name) is not None:
            values.append(item[name])
    return [value for value in values if value] or values[:1]


def _without(item: Mapping[Any, Any], keys: Collection[str]) -> dict[Any, Any]:
    """Return a copy of a row, a message or a tool call without the given keys."""
    return {key: value for key, value in item.items() if key not in keys}


def _lists(row: Mapping[Any, Any], names: Sequence[str]) -> list[Any]:
    """Return the lists that a row has under several names of the same column.

    Values that are null, an empty text or an empty object are left out.
    """
    lists = map(unpacked, _values(row, names))
    return [items for items in lists if items not in (None, "", {})]


def _parse_lists(
    lists: Sequence[Any], columns: Sequence[str], parse: _Parse[_T], malformed: RejectReason
) -> list[_T] | None:
    """Parse the lists that a row has under several names of the same column.

    The lists must be equal, and one of them is returned. The result is None if there are no lists.
    """
    item_name = columns[0].removesuffix("s")
    parsed = [_parse_list(items, parse, item_name, malformed) for items in lists]
    if parsed and parsed[-1] != parsed[0]:
        raise Rejection(
            RejectReason.CONTENT_NOT_READ, f"the columns {' and '.join(columns)} differ"
        )
    return parsed[0] if parsed else None


def _parse_list(items: Any, parse: _Parse[_T], item_name: str, malformed: RejectReason) -> list[_T]:
    if not isinstance(items, (list, tuple)):
        raise Rejection(
            malformed,
            f"{item_name}s has the type {type(items).__name__} ({items!r:.60}), expected a list",
        )
    return [parse(item, f"{item_name} {index}") for index, item in enumerate(items)]


def _with_system(chat: Chat, row: Mapping[Any, Any]) -> Chat:
    """Add the text of the system column as the first message of the chat.

    If the chat already has a system message with this text, the chat stays the same.
    """
    column_texts: list[str] = []
    for name in _SYSTEM_COLUMNS:
        value = row.get(name)
        if value and not isinstance(value, str):
            raise Rejection(
                RejectReason.MALFORMED_SYSTEM,
                f"the column {name} has the type {type(value).__name__}",
            )
        if value and value.strip():
            column_texts.append(value)
    message_texts: list[str] = []
    for message in chat.messages:
        if message["role"] == "system":
            message_texts.append(content_text(message))
    system_texts = [text.strip() for text in column_texts + message_texts]
    if not column_texts:
        return chat
    if len(set(system_texts)) > 1:
        raise Rejection(
            RejectReason.TWO_SYSTEM_TEXTS, " and ".join(f"{text!r:.40}" for text in system_texts)
        )
    if message_texts:
        return chat
    return Chat([{"role": "system", "content": column_texts[0]}, *chat.messages], chat.tools)


def _parse_message(item: Any, where: str) -> Message:
    """Parse a message of a row. The parsed message keeps all keys that are not read here."""
    if not isinstance(item, Mapping):
        raise Rejection(
            RejectReason.MALFORMED_MESSAGES,
            f"{where} has the type {type(item).__name__}, expected an object",
        )
    names = sorted({str(name).strip().lower() for name in _values(item, ("role", "from"))})
    if not names:
        raise Rejection(RejectReason.MALFORMED_MESSAGES, f"{where} has no role")
    role = ROLES.get(names[0])
    if role is None or ROLES.get(names[-1]) != role:
        raise Rejection(
            RejectReason.UNKNOWN_ROLE,
            f"{where} has the role " + " and ".join(f"{n!r:.80}" for n in names),
        )
    where = f"{where} ({role})"
    unread = (
        _find_unread(item) or find_key(item, _READ_KEYS, ignored=_READ_KEYS) or _find_channel(item)
    )
    if unread:
        raise Rejection(RejectReason.CONTENT_NOT_READ, f"{where} has {unread}")
    calls = _parse_calls(item, where)
    if calls and role != "assistant":
        raise Rejection(
            RejectReason.MALFORMED_TOOL_CALLS,
            f"{where} calls a tool, but only the assistant may call tools",
        )
    contents = _values(item, ("content", "value"))
    if len(contents) == 2 and contents[0] != contents[1]:
        raise Rejection(
            RejectReason.CONTENT_NOT_READ, f"{where} has different texts in content and value"
        )
    message = json_values(_without(item, _MESSAGE_KEYS)) | {"role": role}
    if contents:
        message["content"] = _read_content(contents[0], where)
    if calls:
        message["tool_calls"] = calls
    elif not "".join(content_texts(message)).strip():
        may_be_empty = role in _MAY_BE_EMPTY and isinstance(message.get("content"), str)
        if not may_be_empty:
            raise Rejection(RejectReason.EMPTY_CONTENT, where)
    return message


def _read_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Parse the content of a message: a text, or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise Rejection(
            RejectReason.EMPTY_CONTENT, f"{where} has a content of type {type(content).__name__}"
        )
    parts = []
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") not in _TEXT_TYPES
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Rejection(
                RejectReason.NON_TEXT_PART, f"{where} has a part of type {str(kind)[:40]!r}"
            )
        for key, value in part.items():
            if key not in _PART_KEYS and is_filled(value):
                raise Rejection(
                    RejectReason.NON_TEXT_PART, f"{where} has a part with the key {key}"
                )
        # Keep the type of the content part, because some templates show only parts of the type
        # ``text``.
        parts.append(
            {"type": "text", "text": part["text"]} if part.get("type") else {"text": part["text"]}
        )
    return parts


def _fields(item: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a row or message, also from nested objects and lists.

    Values that are the chat itself, such as contents, are not searched.
    """
    pending: list[Any] = [item]
    while pending:
        value = pending.pop()
        if isinstance(value, (list, tuple)):
            pending += [element for element in value if isinstance(element, _NESTED)]
            continue
        for key, inner in value.items():
            yield str(key), inner
            if isinstance(inner, _NESTED) and key not in _CHAT_KEYS:
                pending.append(inner)


def _find_unread(item: Mapping[Any, Any]) -> str:
    """Return the first key of a row or message that has content which moa-data does not read.

    The result is empty if moa-data reads all keys.
    """
    calls = {key: item[key] for key in ("tool_calls", "function_call") if key in item}
    keys_of_item = chain(item.items(), _fields(calls))
    for pattern, fields in ((_UNREAD, _fields(item)), (_UNREAD_DIRECTLY, keys_of_item)):
        for key, value in fields:
            name = snake_case(key)
            if not pattern.fullmatch(name):
                continue
            if name == _TEMPLATE_ARGUMENTS:
                # Ignore the template arguments only if they are empty, because any value may change
                # what the template writes.
                is_ignored = not any(words_in(value))
            else:
                is_ignored = not is_filled(value) or _is_switch(value)
            if not is_ignored:
                return str(key)
    return ""


def _is_switch(value: Any) -> bool:
    """Whether a value only turns reasoning on or off, or limits it."""
    if isinstance(value, Mapping):
        return all(
            (key in _THINKING_SETTINGS and _is_switch(inner)) or not is_filled(inner)
            for key, inner in value.items()
        )
    return isinstance(value, (bool, int, float)) or str(value).strip().lower() in _SWITCHES


def _find_channel(message: Mapping[Any, Any]) -> str:
    """Return the key that marks a message's content as something other than the answer.

    In the Harmony format, the answer has the channel ``final``. Reasoning and tool calls have other
    channels. The result is empty if the message has no such key.
    """
    if message.get("channel") not in (None, "", "final"):
        return f"channel {message['channel']!r:.40}"
    return "analysis" if is_filled(message.get("analysis")) else ""


def find_key(item: Mapping[Any, Any], names: Collection[str], ignored: Collection[str] = ()) -> str:
    """Return the first key of a row or message that has content and is one of ``names``.

    The key may be spelled in another way: ``systemPrompt`` counts as ``system_prompt``. The result
    is empty if the item has none of these keys.

    Args:
        item: the row or message.
        names: the names, in snake case.
        ignored: keys of the item that do not count.
    """
    for key, value in item.items():
        if snake_case(key) in names and key not in ignored and is_filled(value):
            return str(key)
    return ""


def names_beside_chat(row: Any, shown_keys: Collection[str], ends_in_call: bool) -> list[str]:
    """List the columns of a row, and the keys of its messages, that do not affect the tokens.

    Keys of tool calls are listed too. Columns and keys without content are left out.

    Args:
        row: the row, as given to :func:`parse_chat`.
        shown_keys: the keys that the chat template shows, as :func:`additional_keys` names them.
        ends_in_call: whether the last message calls a tool. Such a message keeps its end-of-turn
            token even if a column says that the answer was cut off. So this column does not affect
            the tokens, and is listed.
    """
    names: list[str] = []
    for column in _additional(row, _READ_COLUMNS):
        if not is_understood(column, row[column], is_cut_known=not ends_in_call):
            names.append(f"column {column}")
    for column in _MESSAGE_COLUMNS:
        for message in unpacked(row.get(column)) or ():
            names += [name for name in additional_keys(message) if name not in shown_keys]
    return list(dict.fromkeys(names))


def additional_keys(message: Mapping[Any, Any]) -> list[str]:
    """List those keys of a message, and of its tool calls, that only some templates show.

    Keys without content are left out. Each name in the list says whether the key belongs to the
    message or to a tool call.
    """
    names = [f"{_MESSAGE_KEY} {key}" for key in _additional(message, _USUAL_KEYS)]
    old_call = unpacked(message.get("function_call")) or {}
    for call in unpacked(message.get("tool_calls")) or [old_call]:
        function = call.get("function", call)
        is_bare = function is call
        keys = _additional(call, _CALL_KEYS | _FUNCTION_KEYS if is_bare else _CALL_KEYS)
        if not is_bare:
            keys += _additional(function, _FUNCTION_KEYS)
        names += [f"{_CALL_KEY} {key}" for key in keys]
    return names


def without_keys(message: Message, names: Collection[str]) -> Message:
    """Return a copy of a message without some keys.

    ``names`` are the names of the keys, as :func:`additional_keys` lists them.
    """

    def strip(item: dict[str, Any], known: Collection[str], kind: str) -> dict[str, Any]:
        keys = [key for key in _additional(item, known) if f"{kind} {key}" in names]
        return _without(item, keys)

    stripped = strip(message, _USUAL_KEYS, _MESSAGE_KEY)
    stripped = with_functions(stripped, lambda call: strip(call, _FUNCTION_KEYS, _CALL_KEY))
    if "tool_calls" in stripped:
        calls = [strip(call, _CALL_KEYS, _CALL_KEY) for call in stripped["tool_calls"]]
        stripped["tool_calls"] = calls
    return stripped


def _additional(item: Mapping[Any, Any], known: Collection[str]) -> list[str]:
    """List those keys of a row, message or tool call that have content and are not ``known``."""
    return [key for key, value in item.items() if key not in known and is_filled(value)]


def _find_skip_mark(item: Mapping[Any, Any], is_row: bool = False) -> str:
    """Find a key that excludes a message or a row from training.

    The result is a text with the key and its value. It is empty if there is not such a key.
    """
    for key in _DESIRABLE_COLUMNS:
        if is_row and str(item.get(key)).strip().lower() == "false":
            return f"{key} {item[key]!r:.40}"
    for key, value in _fields(item):
        name = snake_case(key)
        # A column "loss" with a float does not say whether to train on the row. It has the loss of
        # some model on the row, so skip the column.
        is_loss = is_row and isinstance(value, float) and key.lower() == "loss"
        if is_loss or (is_row and not _ROW_MARK.fullmatch(name)):
            continue
        if _SKIP_MARK.fullmatch(name):
            excluding = True
        elif _TRAIN_MARK.fullmatch(name):
            excluding = False
        else:
            continue
        if excluding in map(_meaning, words_in(value)):
            return f"{key} {value!r:.40}"
    return ""


def _meaning(word: str) -> bool | None:
    """Return whether a text means true or false. None if the text means neither."""
    try:
        return float(word) > 0  # NaN means false.
    except ValueError:
        return _MEANINGS.get(word.lower())


def _parse_tool(item: Any, where: str) -> dict[str, Any]:
    """Parse the JSON schema of a tool. The schema is an object, or an object encoded as JSON."""
    tool = unpacked(item)
    if not isinstance(tool, Mapping) or not tool_name(tool) or not is_json(tool):
        raise Rejection(
            RejectReason.MALFORMED_TOOLS,
            f"{where} has the type {type(tool).__name__} {_keys(tool)}",
        )
    return dict(tool)


def _parse_calls(item: Mapping[Any, Any], where: str) -> list[dict[str, Any]]:
    """Parse the tool calls of a message. In OpenAI's earlier format, a message has one call."""
    calls = unpacked(item.get("tool_calls")) or []
    old_call = unpacked(item.get("function_call"))
    # If a message has no call, some libraries write an object of null values instead of null.
    # Ignore such an object.
    is_empty = isinstance(old_call, Mapping) and not any(old_call.values())
    if old_call and not is_empty:
        if calls:
            raise Rejection(
                RejectReason.MALFORMED_TOOL_CALLS,
                f"{where} has both tool_calls and function_call, expected one of them",
            )
        calls = [old_call]
    return _parse_list(calls, _parse_call, f"{where}, tool call", RejectReason.MALFORMED_TOOL_CALLS)


def _parse_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments")
    arguments = {} if arguments in (None, "") else arguments
    known = unpacked(arguments)
    is_call = isinstance(known, Mapping) and tool_name(function) and is_json(known)
    others = _values(function, _OTHER_ARGUMENTS)
    if function is not call and isinstance(call, Mapping):
        # The tool call has an inner function, and templates read only this function. Arguments
        # outside the function would be lost, so a call with such arguments is rejected.
        others += _values(call, ("arguments", *_OTHER_ARGUMENTS))
    if not is_call or any(others):
        raise Rejection(
            RejectReason.MALFORMED_TOOL_CALLS,
            f"{where} has the type {type(call).__name__} {_keys(function or call)}",
        )
    # Some datasets write the function itself as the tool call, without an object around the
    # function.
    outer = _without(call, ("function", "name", "arguments"))
    inner = {} if function is call else function
    return json_values(outer) | {
        "type": call.get("type") or "function",
        "function": json_values(inner) | {"name": tool_name(function), "arguments": arguments},
    }


def tool_name(value: Mapping[str, Any]) -> str:
    """Return the name of a tool or of a tool call. The result is empty if the name is missing.

    The name is directly in the tool or call, or in the object `function` inside.
    """
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _keys(value: Any) -> str:
    return (
        "with the keys " + ", ".join(map(str, list(value)[:8]))
        if isinstance(value, Mapping)
        else f"with the value {value!r:.60}"
    )
