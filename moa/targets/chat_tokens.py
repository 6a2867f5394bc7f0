"""Turns chats into token ids and response masks.

The whole chat is rendered and encoded at once, because a text is split into other tokens if its
messages are encoded one by one. The assistant's responses are located in the rendered text as spans
of characters. The tokenizer's offsets map these spans to tokens. There are two ways to locate a
response:

1. By prefixes. The beginning of the chat is rendered twice: up to the response, with the generation
   prompt; and up to the end of the response. Both renderings must be prefixes of the rendering of
   the whole chat. The response is the text between their ends. If this fails for a response with
   tool calls, it is tried again without the generation prompt.
2. By a placeholder, if the first way fails. The chat is rendered with a placeholder in place of the
   response. This shows the text before and the text after the response. In the rendering of the
   whole chat, the response is the text between these two.

The end-of-turn token belongs to the response. White space after this token does not belong to the
response. Some templates mark responses by ``{% generation %}`` tags. This module does not use these
tags, because in some templates they also enclose headers or questions.

The tokens are the same as from ``apply_chat_template`` of transformers. Before the tokens are used,
:func:`_check_pieces` checks that the rendering shows each piece of the chat exactly once.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, NamedTuple

import numpy as np

from ...errors import TemplateError
from ...text import first_line
from .chat import (
    WRITTEN_KEYS,
    Message,
    Rejection,
    RejectReason,
    additional_keys,
    content_texts,
    tool_name,
    with_functions,
    without_keys,
)
from .template import ANSWER, PLACEHOLDER, RENDER_ERRORS, ChatTemplate, Tools

Span = tuple[int, int]
_CALL_NAME = "a tool call's name"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
# Finds placeholders in a rendering. A number is replaced by a number such as 7300001. A text is
# replaced by a text such as moaPiece7300001end, of which this pattern matches only 7300001end. So
# all matches start with 73, which makes the search fast.
_PLACEHOLDER = re.compile(
    r"73(?:(?<=moaPiece73)\d{5,}end|(?<![\d.-]73)\d{5,}(?:\.\d+)?(?!\d|\.\d|[eE][+-]?\d))"
)


@dataclass(frozen=True)
class TokenizedChat:
    """The tokens and the response mask of one chat."""

    tokens: np.ndarray  # token ids, [n_tokens] int32
    # [n_tokens] uint8. It is 1 for tokens of the assistant, which include the end-of-turn token. It
    # is 0 for other tokens.
    response_mask: np.ndarray
    # Whether tokens beyond max_length were cut off.
    truncated: bool
    # Columns of the row, and keys of its messages, that do not affect the tokens.
    beside: tuple[str, ...] = ()
    # Names of message keys, as :func:`.chat.additional_keys` writes them. The template shows each
    # of these keys in every message that has the key.
    shown_keys: tuple[str, ...] = ()


class _Piece(NamedTuple):
    """A text, number or key of a chat. The rendering must show each piece."""

    # Index of the message to which this piece belongs. -1 if the piece belongs to a tool.
    message: int
    # The origin of the piece, for error messages: the role of its message, "a tool call", "a tool
    # call's name", or "tool" followed by the name of the tool.
    kind: str
    # All forms in which a template may write this piece. They have no white space at their ends,
    # because templates may strip such white space.
    forms: Collection[str]
    is_number: bool


class _MarkedChat:
    """A chat in which each piece is replaced by a placeholder.

    The pieces of a chat are:

    - the texts of contents,
    - the names of tool calls, and the keys and values of their arguments,
    - the names, descriptions and parameters of tools.

    Blank texts are not pieces.
    """

    def __init__(self, messages: list[Message], tools: Tools) -> None:
        # Placeholder -> the piece that it replaces. The keys are written as `_PLACEHOLDER` matches
        # them, such as 7300001end.
        self.pieces: dict[str, _Piece] = {}
        self.messages = [
            self._mark_message(index, message) for index, message in enumerate(messages)
        ]
        self.tools = tools and [
            self._mark(tool, -1, f"tool {tool_name(tool)}", "tool") for tool in tools
        ]

    def _mark_message(self, index: int, message: Message) -> Message:
        if "content" in message:
            message = message | {
                "content": self._mark(message["content"], index, message["role"], "text")
            }

        def mark_function(function: dict[str, Any]) -> dict[str, Any]:
            name = self._mark(function["name"], index, _CALL_NAME, "name")
            return function | {
                "name": name,
                "arguments": self._mark(function["arguments"], index, "a tool call", None),
            }

        return with_functions(message, mark_function)

    def _mark(self, value: Any, message: int, kind: str, key: str | None) -> Any:
        """Replace the pieces in a value by placeholders.

        Args:
            value: a JSON value.
            message: index of the message that contains the value. -1 if the value belongs to a
                tool.
            kind: the origin of the value, for error messages. Each piece stores it.
            key: the key under which an object has this value. The key decides whether the value is
                a piece. Inside the arguments of a tool call, ``key`` is None, because there each
                key and each value is a piece.
        """
        if isinstance(value, (list, tuple)):
            return [self._mark(item, message, kind, key) for item in value]
        if isinstance(value, dict):
            marked = {}
            for name, item in value.items():
                inner = None if key is None else name
                if key in (None, "properties"):
                    # Append the placeholder to the name of a parameter or argument. A template that
                    # sorts the names then produces the same order as without placeholders.
                    name = f"{name}\t{self._add(name, message, kind)}"
                    inner = key and ""
                marked[name] = self._mark(item, message, kind, inner)
            return marked
        return (
            self._add(value, message, kind)
            if key in (None, "text", "name", "description")
            else value
        )

    def _add(self, value: Any, message: int, kind: str) -> Any:
        """Add a piece and return its placeholder.

        The placeholder is a number if the piece is a number, otherwise a text. A blank text is not
        a piece, and is returned unchanged.
        """
        text = value.strip() if isinstance(value, str) else json.dumps(value)
        if not text:
            return value
        forms = {text}
        # A template must show the text of a response unchanged. A template may show any other piece
        # as JSON or as a Python literal.
        if kind != "assistant":
            forms |= {
                str(value).strip(),
                encode_basestring(text)[1:-1],
                encode_basestring_ascii(text)[1:-1],
            }
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        number = int(f"73{len(self.pieces):05d}")
        placeholder: Any = f"{number}end"
        if is_number:
            placeholder = number if isinstance(value, int) else number + 0.1484375
        self.pieces[str(placeholder)] = _Piece(message, kind, forms, is_number)
        return placeholder if is_number else f"moaPiece{placeholder}"


def tokenize_chat(
    template: ChatTemplate,
    messages: list[Message],
    max_length: int,
    tools: Tools = None,
    is_cut: bool = False,
    is_generated: bool = True,
) -> TokenizedChat | Rejection:
    """Turn a chat into token ids and a response mask, cut to ``max_length``.

    Args:
        template: the chat template with its tokenizer.
        messages: roles, contents and tool calls as in :class:`.chat.Chat`. No system message is
            added.
        max_length: maximum number of tokens. Further tokens are cut off.
        tools: JSON schemas of the tools.
        is_cut: True if the last response was cut off before its end. If this response has no tool
            calls, the text then ends with the response, without an end-of-turn token.
        is_generated: True if the target has written the last response, after the generation prompt.
            If false, the text before a cut response may be uncertain: some templates write other
            text before a response in a prompt than in a whole chat. Such a chat is rejected.
    """
    template = template.for_tools(tools)
    messages = template.shape(messages)
    try:
        names = set(itertools.chain.from_iterable(map(additional_keys, messages)))
        bare = [without_keys(message, names) for message in messages]
        template.check_texts(bare, tools)
        text = template.render(messages, tools)
        shown_keys = _find_shown_keys(template, messages, tools, text)
        # Remove the keys that the template does not show. They may hold any text, such as the raw
        # output of a model, so they are not checked.
        hidden_keys = names.difference(shown_keys)
        messages = [without_keys(message, hidden_keys) for message in messages]
        if shown_keys:
            template.check_texts(messages, tools)
        marked = _MarkedChat(messages, tools)
        _check_pieces(template, marked, text)
        spans = _response_spans(template, messages, tools, text, marked)
        responses = [text[slice(*span)] for span in spans]
        if foreign := _find_foreign_key(template, messages, tools, shown_keys, responses):
            detail = f"the chat template writes the {foreign} into a response, or fails without it"
            raise Rejection(RejectReason.CONTENT_NOT_READ, detail)
        is_cut = is_cut and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        if is_cut:
            text, spans[-1] = _cut_response(template, messages, tools, text, spans, is_generated)
    except Rejection as rejection:
        return Rejection(rejection.reason, rejection.detail)
    except RENDER_ERRORS as error:
        return Rejection(RejectReason.TEMPLATE_FAILED, first_line(error))
    shown_names = tuple(name for name in shown_keys if shown_keys[name])
    return _encode(template, text, spans, max_length, shown_names)


def _cut_response(
    template: ChatTemplate,
    messages: list[Message],
    tools: Tools,
    text: str,
    spans: list[Span],
    is_generated: bool,
) -> tuple[str, Span]:
    """Return the text of a chat whose last response was cut off, and the span of this response.

    The text is made of the rendering of the prompt, and the response. The rendering of the whole
    chat cannot be used: after the response, it has an end-of-turn token, and maybe more text.

    Args:
        template: the chat template.
        messages: the messages of the chat. The last message is the response.
        tools: JSON schemas of the tools.
        text: the rendering of the chat.
        spans: the spans of the responses in the rendering.
        is_generated: whether the target has written the response after the generation prompt.
    """
    prompt = template.render(messages[:-1], tools, add_generation_prompt=True)
    _check_pieces(template, _MarkedChat(messages[:-1], tools), prompt)
    # Reject the chat if the template writes earlier responses differently in a prompt than in the
    # rendering of the whole chat.
    end = spans[-2][1] if len(spans) > 1 else 0
    if prompt[:end] != text[:end]:
        raise Rejection(
            RejectReason.TEMPLATE_REWRITES_RESPONSE,
            "the last response was cut off, and the template writes earlier responses differently "
            "in a prompt",
        )
    # The prompt may already end with the first words of the response, such as <think>. The response
    # then starts before the end of the prompt.
    start = min(spans[-1][0], len(prompt)) if text.startswith(prompt) else len(prompt)
    # Templates without a generation prompt may write white space before a response. This white
    # space is missing in the prompt, so take the text before the response from ``text``.
    before = text[: spans[-1][0]]
    if template.has_generation_prompt or before.rstrip() != prompt.rstrip():
        before = prompt[:start]
    content = "".join(content_texts(messages[-1]))
    # Many templates strip white space around a content, so also try the stripped content.
    for form in (content, content.lstrip(), content.rstrip(), content.strip()):
        cut_text = before + form
        if is_generated or text.startswith(cut_text):
            return cut_text, (len(before), len(cut_text))
    detail = (
        "the last response was cut off, and the template writes other text before it than in a "
        "prompt"
    )
    raise Rejection(RejectReason.TEMPLATE_REWRITES_RESPONSE, detail)


def _find_shown_keys(
    template: ChatTemplate, messages: list[Message], tools: Tools, text: str
) -> dict[str, bool]:
    """Find which of the keys in :func:`.chat.additional_keys` the chat template shows.

    A key is shown if the rendering of the chat changes when the key is removed.

    Args:
        template: the chat template.
        messages: the messages of the chat.
        tools: JSON schemas of the tools.
        text: the rendering of the chat.

    Returns:
        Name of each shown key -> whether the template shows the key in every message that has the
        key.
    """
    keys_of_messages = [additional_keys(message) for message in messages]
    names = dict.fromkeys(itertools.chain.from_iterable(keys_of_messages))

    def is_shown(removed: Collection[str], first: int = 0, end: int = len(messages)) -> bool:
        stripped = [without_keys(message, removed) for message in messages[first:end]]
        try:
            return template.render([*messages[:first], *stripped, *messages[end:]], tools) != text
        except RENDER_ERRORS:
            return True  # The template fails without the removed keys, so it uses one of them.

    shown_keys: dict[str, bool] = {}
    # Usually the template shows none of the keys. So first remove all keys at once. If the
    # rendering does not change, no key is shown.
    if not names or not is_shown(names):
        return shown_keys
    # Once a key is found not to be shown, it stays removed while the next keys are tried. Otherwise
    # a template could show this key in place of a removed one.
    removed: list[str] = []
    for name in names:
        removed.append(name)
        if is_shown(removed):
            indices = [index for index, keys in enumerate(keys_of_messages) if name in keys]
            shown_keys[name] = all(is_shown(removed, index, index + 1) for index in indices)
            removed.pop()
    return shown_keys


def _find_foreign_key(
    template: ChatTemplate,
    messages: list[Message],
    tools: Tools,
    shown_keys: Collection[str],
    responses: list[str],
) -> str:
    """Return a key whose text is part of a response, although the model has not written this text.

    For example, the message that calls a tool may have a key with the result of the tool. To find
    such a key, keys are removed one by one. If a response changes or the template fails without the
    key, this key is returned. If such a key is not found, the result is empty.
    """
    for name in shown_keys:
        stripped = [
            without_keys(message, [name]) if message["role"] == "assistant" else message
            for message in messages
        ]
        if name in WRITTEN_KEYS or stripped == messages:
            continue
        try:
            text = template.render(stripped, tools)
            spans = _response_spans(template, stripped, tools, text, _MarkedChat(stripped, tools))
        except (Rejection, *RENDER_ERRORS):
            return name
        if responses != [text[slice(*span)] for span in spans]:
            return name
    return ""


def prompt_tokens(
    template: ChatTemplate, messages: list[Message], tools: Tools = None, is_open: bool = True
) -> list[int]:
    """Encode a chat as a prompt, with the same checks as in :func:`tokenize_chat`.

    Args:
        template: the chat template with its tokenizer.
        messages: roles, contents and tool calls.
        tools: JSON schemas of the tools.
        is_open: whether to add the generation prompt, which starts the assistant's response.

    Raises:
        TemplateError: the template refuses the chat, or does not show one of its pieces. Pieces of
            earlier responses are an exception: they may be missing or changed, because some
            templates omit the reasoning of earlier responses.
        PromptUnusable: a text contains control tokens, or cannot be encoded.
    """
    template = template.for_tools(tools)
    messages = template.shape(messages)
    try:
        template.check_prompt(messages, tools)
        text = template.render(messages, tools, add_generation_prompt=is_open)
        _check_pieces(template, _MarkedChat(messages, tools), text)
    except TemplateError:
        raise
    except Rejection as rejection:
        if rejection.reason is RejectReason.NOT_SHOWN:
            raise TemplateError(
                f"{rejection.reason} ({rejection.detail}). Leave this part out of the chat, or use "
                "another target."
            ) from rejection
    except RENDER_ERRORS as error:
        raise TemplateError(
            f"The chat template refuses the prompt ({first_line(error)}). Correct the messages, "
            "for example their roles."
        ) from error
    return list(template.tokenizer(text, add_special_tokens=False)["input_ids"])


def _check_pieces(template: ChatTemplate, marked: _MarkedChat, text: str) -> None:
    """Reject a chat if its rendering does not show a piece, or shows a piece more than once.

    The chat is rendered once more with placeholders. This shows how often and in which order the
    template writes the pieces. Then the pieces are searched for in this order in the rendering
    ``text``. Each piece must come after the previous piece.

    Pieces of tools may be anywhere in ``text``, and more than once, because some templates describe
    a tool both in words and by its schema. If both a response and a piece of another kind are
    missing, the rejection names the piece of the other kind.
    """
    try:
        shown = _PLACEHOLDER.findall(template.render(marked.messages, marked.tools))
    except RENDER_ERRORS:
        # The template refuses the chat with placeholders, so the order of the pieces is unknown.
        # Expect them in the order of the chat.
        shown = list(marked.pieces)
    counts = Counter(shown)
    order = {placeholder: position for position, placeholder in enumerate(counts)}
    end = 0
    last_result = 0
    rewritten = ""
    for placeholder in sorted(marked.pieces, key=lambda placeholder: order.get(placeholder, -1)):
        piece = marked.pieces[placeholder]
        n_shown = counts[placeholder]
        piece_end = _find(text, piece, end)
        if piece.message < 0:
            n_shown = min(n_shown, 1)
            piece_end = piece_end if piece_end >= 0 else _find(text, piece, 0)
        # Some templates repeat the name of a tool call next to the result of the tool. This is
        # allowed. So count only how often the template writes the name in the messages up to the
        # tool call.
        elif piece.kind == _CALL_NAME and n_shown > 1:
            n_shown = template.render(marked.messages[: piece.message + 1], marked.tools).count(
                placeholder
            )
        is_hidden = n_shown != 1 or piece_end < 0
        where = piece.kind if piece.message < 0 else f"message {piece.message} ({piece.kind})"
        # In a chat, the results of tools come after the response that calls the tools. Gemma 4's
        # template writes the results before the text of this response. So reject such a response as
        # rewritten, like a response whose text is hidden or changed.
        if piece.kind == "assistant" and (is_hidden or last_result > piece.message):
            rewritten = where
        elif is_hidden:
            raise Rejection(
                RejectReason.NOT_SHOWN, where + (", which is written twice" if n_shown > 1 else "")
            )
        if not is_hidden:
            end = max(end, piece_end)
        if piece.kind == "tool":
            last_result = piece.message
    if rewritten:
        raise Rejection(RejectReason.TEMPLATE_REWRITES_RESPONSE, rewritten)


def _find(text: str, piece: _Piece, start: int) -> int:
    """Find a piece in a rendering. Returns the index after the piece, or -1 if it is missing."""
    if piece.is_number:
        for number in _NUMBER.finditer(text, start):
            if number.group() in piece.forms:
                return number.end()
        return -1
    ends: list[int] = []
    for form in piece.forms:
        begin = text.find(form, start)
        if begin >= 0:
            ends.append(begin + len(form))
    return min(ends, default=-1)


def _response_spans(
    template: ChatTemplate, messages: list[Message], tools: Tools, text: str, marked: _MarkedChat
) -> list[Span]:
    """Find the character spans of the responses, with their tool calls, in the rendered text."""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            span = None
            ways = [(tools, True)]
            if "tool_calls" in message:
                # Mistral's templates write the tools before the last question. In the rendering of
                # the whole chat, the text up to an earlier response is then the same as in a chat
                # without tools. So also try to render this part without tools.
                ways += [(tools, False), (None, False)]
            # A template may accept a whole chat, but refuse a part of it. Then try the next way.
            for shown_tools, is_open in ways:
                with suppress(*RENDER_ERRORS):
                    span = span or _prefix_span(
                        template, messages, shown_tools, index, text, is_open
                    )
            # Locate the response by a placeholder only if the other ways fail. If the same text
            # occurs twice in the chat, this way may find the wrong occurrence.
            with suppress(*RENDER_ERRORS):
                span = span or _located_span(template, messages, tools, index, text, marked)
            pieces = [piece for piece in marked.pieces.values() if piece.message == index]
            span = span and _with_opening(text, span, pieces)
            response = text[slice(*span)] if span else ""
            if span is None or any(_find(response, piece, 0) < 0 for piece in pieces):
                raise Rejection(RejectReason.TEMPLATE_REWRITES_RESPONSE, f"message {index}")
            span = _with_end_of_turn(template, text, span)
            is_ended = text[slice(*span)].endswith(template.end_of_turn)
            if index == 0 and template.text_after_last and not is_ended:
                raise Rejection(
                    RejectReason.TEMPLATE_REWRITES_RESPONSE,
                    "message 0, after which the template writes no end-of-turn token",
                )
            spans.append(span)
    return spans


def _with_opening(text: str, span: Span, pieces: list[_Piece]) -> Span:
    """Extend the span of a response so that it begins with the response's first piece.

    Some generation prompts already end with the first words of the response, such as ``<think>``. A
    span that begins after the generation prompt lacks these words.
    """
    start, end = span
    if not pieces or _find(text[start:end], pieces[0], 0) >= 0:
        return span
    for form in pieces[0].forms:
        begin = text.rfind(form, 0, end)
        if 0 <= begin < start < begin + len(form):
            return begin, end
    return span


def _prefix_span(
    template: ChatTemplate,
    messages: list[Message],
    tools: Tools,
    index: int,
    text: str,
    is_open: bool = True,
) -> Span | None:
    """Locate a response by two renderings of the beginning of the chat.

    The first rendering ends before the response. The second rendering ends with the response. Both
    must be prefixes of the rendering of the whole chat. The response is then the text between their
    ends. Otherwise the result is None.

    Args:
        template: the chat template.
        messages: the messages of the chat.
        tools: JSON schemas of the tools.
        index: index of the response.
        text: the rendering of the chat.
        is_open: whether the first rendering has a generation prompt. If not, the header of the
            response must follow it in the text. This is for templates such as Gemma 4's, which
            writes an empty thought into a generation prompt but not into a chat, and for templates
            without a generation prompt.
    """
    before = messages[:index]
    if not before:
        return None
    prompt = template.render(before, tools, add_generation_prompt=is_open)
    if not template.header and prompt == template.render(before, tools):
        # Without a generation prompt, a header that is not known would be counted as part of the
        # response.
        if is_open or template.has_generation_prompt:
            return None
        # The header is the same before all responses. So render a placeholder in place of the
        # response, and take the text up to the placeholder.
        prompt = template.render([*before, ANSWER], tools).partition(PLACEHOLDER)[0]
        if not text.startswith(prompt):
            prompt = prompt.rstrip()
    up_to_response = messages[: index + 1]
    turn = text if up_to_response == messages else template.render(up_to_response, tools)
    # If the template writes no text after the response, remove only the template's own white space.
    # The response may end in white space, which belongs to the response.
    if template.text_after_last or "tool_calls" in messages[index]:
        turn = turn.rstrip()
    else:
        turn = turn.removesuffix(template.space_after_last)
    end = len(turn)
    if template.text_after_last and turn.endswith(template.text_after_last):
        end += len(template.end_of_turn) - len(template.text_after_last)
    elif template.text_after_last and not (is_open or template.header):
        return None
    # ``turn`` is the rendering up to the end of the response, and ``text`` is the rendering of the
    # whole chat. In the Harmony format, a response ends with <|return|> if it is the last one of a
    # rendering, and otherwise with <|end|>. So if ``turn`` is not a prefix of ``text``, remove the
    # end-of-turn token from ``turn``, and take the token that ``text`` has there.
    if not text.startswith(turn):
        turn = turn.removesuffix(template.text_after_last or template.end_of_turn)
        end_token = template.control_tokens.everywhere.match(text, len(turn))
        end = end_token.end() if end_token else 0
    start = len(prompt)
    # Some templates do not write a generation prompt after a response, so the header of the next
    # response is missing in ``prompt``. In ``text``, the header is there, so skip it.
    if not prompt.rstrip().endswith(template.header):
        start = _skip_header(template, text, start)
    if not is_open and template.header and start == len(prompt):
        return None
    if not (text.startswith(prompt) and text.startswith(turn) and end > start):
        return None
    return start, end


def _skip_header(template: ChatTemplate, text: str, start: int) -> int:
    """Return the index after the header at ``start``, or ``start`` if the header is missing.

    If the end-of-turn token of the previous turn precedes the header, it is skipped, too. Some
    templates write this token only if another turn follows.
    """
    rest = text[start:].lstrip().removeprefix(template.end_of_turn.lstrip()).lstrip()
    if not rest.startswith(template.header):
        return start
    after_header = rest.removeprefix(template.header).lstrip()
    return len(text) - len(after_header)


def _located_span(
    template: ChatTemplate,
    messages: list[Message],
    tools: Tools,
    index: int,
    text: str,
    marked: _MarkedChat,
) -> Span | None:
    """Locate a response by a rendering in which a placeholder replaces it.

    The rendering of the whole chat must start with the text before the placeholder, and must end
    with the text after the placeholder. The response is the text between the two. The result is
    None if this fails, or if the found text may not be the response.

    A placeholder has no tool calls. If it replaces a response with tool calls, some templates leave
    out the results of the tools. So the text after the placeholder must contain each piece of the
    messages that follow.
    """
    message = messages[index]
    other = [*messages[:index], ANSWER, *messages[index + 1 :]]
    before, placeholder, after = template.render(other, tools).partition(PLACEHOLDER)
    end = len(text) - len(after)
    if (
        not placeholder
        or not text.startswith(before)
        or not text.endswith(after)
        or end <= len(before)
    ):
        return None
    if "tool_calls" in message:
        later = [piece for piece in marked.pieces.values() if piece.message > index]
        is_certain = all(_find(after, piece, 0) >= 0 for piece in later)
    else:
        content = "".join(content_texts(message))
        is_certain = text[len(before) : end].strip() == content.strip()
    return (len(before), end) if is_certain else None


def _with_end_of_turn(template: ChatTemplate, text: str, span: Span) -> Span:
    """Extend a span to the end of the end-of-turn token. White space after it is not included."""
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


def _encode(
    template: ChatTemplate,
    text: str,
    spans: list[Span],
    max_length: int,
    shown_keys: tuple[str, ...],
) -> TokenizedChat | Rejection:
    """Encode a rendered chat, and mark the tokens that belong to the spans."""
    # The offsets of byte-level tokenizers may be empty, or leave out white space. So assume that
    # each token begins at the end of the previous token. If a token begins before a span and ends
    # in the span, it belongs to the response only if its characters before the span are white
    # space.
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
    if not mask.any():
        return Rejection(RejectReason.NO_RESPONSE_TOKENS, f"{len(tokens)} tokens")
    if mask.all():
        return Rejection(RejectReason.NO_PROMPT_TOKENS, f"{len(tokens)} tokens")
    if not mask[:max_length].any():
        return Rejection(
            RejectReason.TRUNCATED_AWAY,
            f"the first response token has the index {int(mask.argmax())}",
        )
    return TokenizedChat(
        tokens[:max_length].copy(),
        mask[:max_length].copy(),
        truncated=len(tokens) > max_length,
        shown_keys=shown_keys,
    )
