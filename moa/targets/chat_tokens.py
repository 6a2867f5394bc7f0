"""Turns chats into token ids and response masks.

A chat is rendered ONCE and encoded ONCE: encoding parts by themselves would move token borders. The assistant's
characters are found in the rendered text, and the tokenizer's offsets map those spans to tokens. The spans come from

1. prefixes: the chat up to the response, rendered with the generation prompt, must be a prefix of the rendering;
2. else the response text: rendering the chat with this one response replaced gives the text before and after it.

A template's ``{% generation %}`` tags are not used: some surround headers or questions as well.
The end-of-turn token belongs to the response, the white space after it does not.

The tokens are those that ``apply_chat_template`` of transformers gives. Before they are used it is checked that the
rendering shows each piece of the chat exactly once; see :func:`find_hidden_piece`.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import TemplateError
from ...text import first_line
from .chat import Message, Rejection, RejectReason, content_texts, tool_name, with_arguments
from .template import PLACEHOLDER, RENDER_ERRORS, ChatTemplate, Tools, texts

Span = tuple[int, int]


@dataclass(frozen=True)
class TokenizedChat:
    """The tokens and the mask of one sequence."""

    tokens: np.ndarray  # int32 [n_tokens]
    response_mask: np.ndarray  # uint8 [n_tokens], 1 on tokens that the assistant writes, its end-of-turn token included
    truncated: bool  # whether tokens beyond max_length were cut


@dataclass(frozen=True)
class _Piece:
    """A text of a chat that the rendering has to show."""

    message: int  # index of its message
    where: str  # name of the piece, for people
    text: str  # without white space around it, which templates may trim
    placeholder: str
    is_response: bool  # whether the assistant says it


def tokenize_chat(
    template: ChatTemplate, messages: list[Message], max_length: int, tools: Tools = None
) -> TokenizedChat | Rejection:
    """Turn a chat into token ids and a response mask, cut to ``max_length``.

    ``messages``: roles, contents and tool calls, as :class:`.chat.Chat` has them; no system message is added.
    """
    template = template.for_tools(tools)
    messages = template.shape(messages)
    try:
        if unusable := template.find_unusable_text(messages, tools):
            return Rejection(*unusable)
        text = template.render(messages, tools)
        if hidden := find_hidden_piece(template, messages, tools, text):
            return hidden
        spans = _response_spans(template, messages, tools, text)
    except RENDER_ERRORS as error:
        return Rejection(RejectReason.TEMPLATE_FAILED, first_line(error))
    if isinstance(spans, Rejection):
        return spans
    tokens, mask = _encode(template, text, spans)
    return _cut(tokens, mask, max_length)


def prompt_tokens(
    template: ChatTemplate, messages: list[Message], tools: Tools = None, is_open: bool = True
) -> list[int]:
    """Encode a chat that ends where the assistant is to write, if it is open, as `tokenize_chat` does.

    Raises:
        TemplateError: the template refuses the chat, or leaves out a part of it other than an earlier response. Some
            templates leave out the reasoning of earlier responses.
        PromptUnusable: a text holds control tokens, or cannot be encoded.
    """
    template = template.for_tools(tools)
    messages = template.shape(messages)
    try:
        template.check_prompt(messages, tools)
        text = template.render(messages, tools, add_generation_prompt=is_open)
        hidden = find_hidden_piece(template, messages, tools, text)
    except TemplateError:
        raise
    except RENDER_ERRORS as error:
        raise TemplateError(
            f"The chat template refuses the prompt: {first_line(error)}. Change the messages' roles."
        ) from error
    if hidden and hidden.reason is RejectReason.NOT_SHOWN:
        raise TemplateError(f"{hidden.reason}: {hidden.detail}. Leave it out, or use another target.")
    return list(template.tokenizer(text, add_special_tokens=False)["input_ids"])


def find_hidden_piece(template: ChatTemplate, messages: list[Message], tools: Tools, text: str) -> Rejection | None:
    """Find a piece of a chat that its rendering does not show, or shows twice; a hidden response comes last.

    The pieces are the texts of contents, the arguments of calls, and the names of tools. The chat is rendered once more
    with a placeholder for each text. That tells how often and in which order the template shows them. Then each text is
    looked for in the rendering, after the one before it.
    """
    pieces: list[_Piece] = []
    marked = [_with_placeholders(index, message, pieces) for index, message in enumerate(messages)]
    try:
        marked_text = template.render(marked, tools)
    except RENDER_ERRORS:
        marked_text = "".join(piece.placeholder for piece in pieces)  # It wants other texts. Expect them in order.
    end = 0
    last_result = 0
    rewritten = None
    for piece in sorted(pieces, key=lambda piece: marked_text.find(piece.placeholder)):
        n_shown = marked_text.count(piece.placeholder)
        start, length = _find(text, piece.text, end)
        is_hidden = n_shown != 1 or start < 0
        if piece.is_response and (is_hidden or last_result > piece.message):  # Gemma 4 writes results before it.
            rewritten = Rejection(RejectReason.TEMPLATE_REWRITES_RESPONSE, piece.where)
        elif is_hidden:
            return Rejection(RejectReason.NOT_SHOWN, piece.where + (", twice" if n_shown > 1 else ""))
        if not is_hidden:
            end = start + length
        if messages[piece.message]["role"] == "tool":
            last_result = piece.message
    for index, message in enumerate(messages):
        if not _shows_calls(text, message):
            return Rejection(RejectReason.NOT_SHOWN, f"message {index}, a tool call")
    return _find_hidden_tool(template, messages, tools, text) or rewritten


def _with_placeholders(index: int, message: Message, pieces: list[_Piece]) -> Message:
    """Replace the texts of a message's content and of the arguments of its calls; adds them to ``pieces``."""

    def replace(text: str, where: str = "a tool call", is_response: bool = False) -> str:
        if not text.strip():
            return text
        placeholder = f"moaPiece{len(pieces):06d}end"
        pieces.append(_Piece(index, f"message {index}, {where}", text.strip(), placeholder, is_response))
        return placeholder

    role = message["role"]
    where = {"tool": "a tool's result", "system": "a system message"}.get(role, str(role))
    content = [replace(text, where, role == "assistant") for text in content_texts(message)]
    is_text = isinstance(message["content"], str)
    marked = message | {"content": content[0] if is_text else [{"type": "text", "text": text} for text in content]}
    return with_arguments(marked, lambda arguments: _map_texts(arguments, replace))


def _map_texts(value: Any, replace: Callable[[str], str]) -> Any:
    """Replace every text in a value of JSON, but not the keys of objects."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, replace) for item in value]
    return value


def _find_hidden_tool(template: ChatTemplate, messages: list[Message], tools: Tools, text: str) -> Rejection | None:
    names = [tool_name(tool) for tool in tools or ()]
    hidden = [name for name in names if not _shows(text, name)]
    if names and not hidden:
        with contextlib.suppress(*RENDER_ERRORS):  # A template that wants tools shows them.
            hidden = names if text == template.render(messages) else []
    return Rejection(RejectReason.NOT_SHOWN, f"tool {hidden[0]}") if hidden else None


def _find(text: str, piece: str, start: int) -> tuple[int, int]:
    """Find a piece in a rendering, as it is or as JSON writes it; returns its place, -1 for none, and its length."""
    forms = dict.fromkeys([piece, *(json.dumps(piece, ensure_ascii=ascii)[1:-1] for ascii in (False, True))])
    places = [(text.find(form, start), len(form)) for form in forms]
    return min((place for place in places if place[0] >= 0), default=(-1, 0))


def _shows(text: str, piece: str) -> bool:
    return _find(text, piece.strip(), 0)[0] >= 0


def _shows_calls(text: str, message: Message) -> bool:
    """Whether a text holds the name and all arguments of each call of a message."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return all(_shows(text, part) for each in functions for part in (each["name"], *texts(each["arguments"])))


def _shows_message(text: str, message: Message) -> bool:
    """Whether a text holds the content and the calls of a message of the assistant."""
    return all(part.strip() in text for part in content_texts(message)) and _shows_calls(text, message)


def _response_spans(template: ChatTemplate, messages: list[Message], tools: Tools, text: str) -> list[Span] | Rejection:
    """Find the character spans of the responses in the rendered text, the calls of tools included."""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            span = _prefix_span(template, messages, tools, index, text)
            span = span or _located_span(template, messages, tools, index, text)
            found = text[slice(*span)] if span else ""
            if span is None or not _shows_message(found, message):
                return Rejection(RejectReason.TEMPLATE_REWRITES_RESPONSE, f"message {index}")
            spans.append(_with_end_of_turn(template, text, span))
    return spans


def _prefix_span(template: ChatTemplate, messages: list[Message], tools: Tools, index: int, text: str) -> Span | None:
    """Find a response by rendering the chat before it and up to it; None where these are not prefixes of the text."""
    before = messages[:index]
    if not before:
        return None
    prompt = template.render(before, tools, add_generation_prompt=True)
    if not template.has_generation_prompt and prompt == template.render(before, tools):
        return None  # no generation prompt: the header of the response would count as response
    turn = template.render(messages[: index + 1], tools).rstrip()
    end = len(turn)
    if not text.startswith(turn):  # Harmony ends a last response by <|return|>, and one with a turn after it by <|end|>
        turn = turn.removesuffix(template.end_of_turn)
        found = template.control_tokens.everywhere.match(text, len(turn))
        end = found.end() if found else 0
    if not (text.startswith(prompt) and text.startswith(turn) and end > len(prompt)):
        return None
    return len(prompt), end


def _located_span(template: ChatTemplate, messages: list[Message], tools: Tools, index: int, text: str) -> Span | None:
    """Find a response as the rendering without the text before and after it; None where unclear."""
    message = messages[index]
    other = [*messages[:index], {"role": "assistant", "content": PLACEHOLDER}, *messages[index + 1 :]]
    before, found, after = template.render(other, tools).partition(PLACEHOLDER)
    end = len(text) - len(after)
    if not found or not text.startswith(before) or not text.endswith(after) or end <= len(before):
        return None
    content = "".join(content_texts(message))
    if "tool_calls" not in message and text[len(before) : end].strip() != content.strip():
        return None
    return len(before), end


def _with_end_of_turn(template: ChatTemplate, text: str, span: Span) -> Span:
    """Extend a span to its end-of-turn token, without the white space that follows it."""
    start, end = span
    eot = template.end_of_turn
    if not eot:
        return span
    trimmed = text[start:end].rstrip()
    if trimmed.endswith(eot.lstrip()):
        return start, start + len(trimmed)
    if text.startswith(eot, end):
        return start, end + len(eot)
    return span


def _encode(template: ChatTemplate, text: str, spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Encode a rendered chat and mark the tokens of the spans."""
    # Byte-level tokenizers report white space outside their tokens, or empty ranges; so a token is taken to begin where
    # the one before it ended. A token that begins before a span counts if only white space lies before the span.
    encoded = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = np.asarray(encoded["input_ids"], np.int32)
    mask = np.zeros(len(tokens), np.uint8)
    offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    ends = offsets[:, 1]
    reached = np.concatenate([[0], np.maximum.accumulate(ends)])[:-1]
    starts = np.minimum(offsets[:, 0], reached)
    for start, end in spans:
        for index in np.flatnonzero((ends > start) & (starts < end)):
            if starts[index] >= start or not text[starts[index] : start].strip():
                mask[index] = 1
    return tokens, mask


def _cut(tokens: np.ndarray, mask: np.ndarray, max_length: int) -> TokenizedChat | Rejection:
    if not mask.any():
        return Rejection(RejectReason.NO_RESPONSE_TOKENS, f"{len(tokens)} tokens")
    if mask.all():
        return Rejection(RejectReason.NO_PROMPT_TOKENS, f"{len(tokens)} tokens")
    if not mask[:max_length].any():
        return Rejection(RejectReason.TRUNCATED_AWAY, f"first response token at {int(mask.argmax())}")
    return TokenizedChat(tokens[:max_length].copy(), mask[:max_length].copy(), len(tokens) > max_length)
