"""Turns chats into token ids and response masks.

A chat is rendered ONCE and encoded ONCE: encoding parts by themselves would move token borders. The assistant's
characters are found in the rendered text, and the tokenizer's offsets map those spans to tokens. The spans come from

1. the template's ``{% generation %}`` tags, where it has them: a copy of the template with markers in their place is
   rendered and the markers are looked up;
2. else prefixes: the chat up to the response, rendered with the generation prompt, must be a prefix of the rendering;
3. else the response text: rendering the chat with this one response replaced gives the text before and after it.

The end-of-turn token belongs to the response, the white space after it does not.
"""

import json
import re
from dataclasses import dataclass

import numpy as np

from ...errors import TemplateError
from ...text import first_line
from .chat import Message, Rejection, RejectReason, tool_name
from .template import CLOSE, OPEN, PLACEHOLDER, RENDER_ERRORS, ChatTemplate, Tools, texts

Span = tuple[int, int]


@dataclass(frozen=True)
class TokenizedChat:
    """The tokens and the mask of one sequence."""

    tokens: np.ndarray  # int32 [n_tokens]
    response_mask: np.ndarray  # uint8 [n_tokens], 1 on tokens that the assistant writes, its end-of-turn token included
    truncated: bool  # whether tokens beyond max_length were cut


def tokenize_chat(
    template: ChatTemplate, messages: list[Message], max_length: int, tools: Tools = None, system: str = ""
) -> TokenizedChat | Rejection:
    """Turn a chat into token ids and a response mask, cut to ``max_length``.

    Args:
        messages: roles, contents and tool calls; no system message is added.
        system: a text that the template has to show.
    """
    try:
        if unusable := template.find_unusable_text(messages, tools):
            return Rejection(*unusable)
        text = template.render(messages, tools)
        if left_out := _left_out(template, messages, tools, system, text):
            return Rejection(RejectReason.NOT_SHOWN, left_out)
        spans = _response_spans(template, messages, tools, text)
    except RENDER_ERRORS as error:
        return Rejection(RejectReason.TEMPLATE_FAILED, first_line(error))
    if isinstance(spans, Rejection):
        return spans
    text, shift = _one_bos(template, text)
    tokens, mask = _encode(template, text, [(start + shift, end + shift) for start, end in spans])
    return _cut(tokens, mask, max_length)


def prompt_tokens(
    template: ChatTemplate, messages: list[Message], tools: Tools = None, system: str = "", is_open: bool = True
) -> list[int]:
    """Encode a chat that ends where the assistant is to write, if it is open, as `tokenize_chat` does.

    Raises:
        TemplateError: the template refuses the chat, or leaves out a part of it.
        PromptUnusable: a text holds control tokens, or cannot be encoded.
    """
    try:
        template.check_prompt(messages, tools)
        text = template.render(messages, tools, add_generation_prompt=is_open)
        if left_out := _left_out(template, messages, tools, system, text):
            raise TemplateError(f"{RejectReason.NOT_SHOWN}: {left_out}. Leave it out, or use another target.")
    except TemplateError:
        raise
    except RENDER_ERRORS as error:
        raise TemplateError(
            f"The chat template refuses the prompt: {first_line(error)}. Change the messages' roles."
        ) from error
    text, _ = _one_bos(template, text)
    return list(template.tokenizer(text, add_special_tokens=False)["input_ids"])


def _one_bos(template: ChatTemplate, text: str) -> tuple[str, int]:
    """Begin a text with exactly one BOS, where the model has one; also return by how much it moved."""
    bos = template.tokenizer.bos_token
    if not bos:
        return text, 0
    shift = 0
    while text.startswith(bos + bos):
        text, shift = text[len(bos) :], shift - len(bos)
    if template.adds_bos and not text.startswith(bos):
        text, shift = bos + text, shift + len(bos)
    return text, shift


def _left_out(template: ChatTemplate, messages: list[Message], tools: Tools, system: str, text: str) -> str:
    """The first of tools, calls, results and system column that a rendering lacks; empty where it has all."""
    if system and not _shows(text, system):
        return "the system column"
    for index, message in enumerate(messages):
        if message["role"] == "tool" and not _shows(text, message["content"]):
            return f"message {index}, a tool's result"
        if not _shows_calls(text, message):
            return f"message {index}, a tool call"
    hidden = [tool_name(tool) for tool in tools or () if not _shows(text, tool_name(tool))]
    if not hidden and tools:
        try:
            hidden = [tool_name(tools[0])] if text == template.render(messages) else []
        except RENDER_ERRORS:
            return ""  # it wants tools, so it shows them
    return f"tool {hidden[0]}" if hidden else ""


def _shows(text: str, part: str) -> bool:
    """Whether a rendering holds a text, as it is, without white space around it, or as JSON writes it."""
    stripped = part.strip()
    return stripped in text or any(json.dumps(stripped, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))


def _shows_calls(text: str, message: Message) -> bool:
    """Whether a text holds the name and all arguments of each call of a message."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return all(_shows(text, part) for each in functions for part in (each["name"], *texts(each["arguments"])))


def _response_spans(template: ChatTemplate, messages: list[Message], tools: Tools, text: str) -> list[Span] | Rejection:
    """Find the character spans of the responses in the rendered text, the calls of tools included."""
    if template.marked is not None:
        tagged = _tagged_spans(template.render(messages, tools, template=template.marked), text)
        tagged_text = "".join(text[start:end] for start, end in tagged or ())
        # Tags that leave calls out would train on half a response.
        if tagged is not None and all(_shows_calls(tagged_text, message) for message in messages):
            return [_with_end_of_turn(template, text, span) for span in tagged]
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            span = _prefix_span(template, messages, tools, index, text)
            span = span or _located_span(template, messages, tools, index, text)
            found = text[slice(*span)] if span else ""
            if span is None or message["content"].strip() not in found or not _shows_calls(found, message):
                return Rejection(RejectReason.TEMPLATE_REWRITES_RESPONSE, f"message {index}")
            if _holds_results(template, messages, tools, index, text[: span[1]]):
                return Rejection(RejectReason.TEMPLATE_REWRITES_RESPONSE, f"message {index} has a tool's result inside")
            spans.append(_with_end_of_turn(template, text, span))
    return spans


def _tagged_spans(marked_text: str, text: str) -> list[Span] | None:
    """Find the spans between markers; None where the markers changed the rendering."""
    spans, length, start = [], 0, None
    for piece in re.split(f"({OPEN}|{CLOSE})", marked_text):
        if piece == OPEN:
            start = length
        elif piece == CLOSE:
            if start is None:
                return None
            spans.append((start, length))
            start = None
        else:
            if not text.startswith(piece, length):
                return None
            length += len(piece)
    return spans if length == len(text) and start is None else None


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
    if "tool_calls" not in message and text[len(before) : end].strip() != message["content"].strip():
        return None
    return len(before), end


def _holds_results(template: ChatTemplate, messages: list[Message], tools: Tools, index: int, text: str) -> bool:
    """Whether the text up to a response's end shows results of its calls, as Gemma 4's puts them before its content."""
    message = messages[index]
    if "tool_calls" not in message or not message["content"]:
        return False
    later = [one | ({"content": PLACEHOLDER} if one["role"] == "tool" else {}) for one in messages[index + 1 :]]
    return not template.render([*messages[: index + 1], *later], tools).startswith(text)


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
