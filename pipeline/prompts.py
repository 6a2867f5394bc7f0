"""Chats to token ids and response masks: all knowledge of chat templates is here.

A chat is rendered ONCE and encoded ONCE. Which characters are the assistant's is found on the rendered text, and the
tokenizer's offsets carry those spans to tokens: encoding pieces by themselves would move token borders.

The spans come from

1. the template's ``{% generation %}`` tags, where it has them: a copy of the template with markers in their place is
   rendered and the markers are looked up;
2. else prefixes: the chat up to the response, rendered with the generation prompt, must be a prefix of the rendering;
3. else the response text: the same chat with this one response replaced tells what stands before and behind it.

The end-of-turn token belongs to the response, the white space behind it does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jinja2.exceptions import TemplateError as JinjaError

from .chats import Message, Rejection, RejectReason
from .errors import TemplateError

Span = tuple[int, int]

TEMPLATE_ARGUMENTS = {"date_string": "26 Jul 2024"}
"""Passed to every template: some write today's date into the prompt, and equal inputs must give equal tokens."""

_OPEN, _CLOSE = "\ue0f0moa-open\ue0f1", "\ue0f0moa-close\ue0f1"
_PLACEHOLDER = "\ue0f0moa-response\ue0f1"
_TAG = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")


@dataclass(frozen=True)
class TokenizedChat:
    """One sequence.

    Attributes:
        tokens: int32 [n_tokens].
        response_mask: uint8 [n_tokens], 1 on tokens that the assistant writes, its end-of-turn token included.
        truncated: whether tokens beyond max_length were cut.
    """

    tokens: np.ndarray
    response_mask: np.ndarray
    truncated: bool


@dataclass(frozen=True)
class _Template:
    """What is found out once per tokenizer and template.

    Attributes:
        text: the chat template.
        marked: the template with markers in place of its generation tags; None where it has none.
        has_generation_prompt: whether it is known to render one after a user message.
        end_of_turn: what the template writes behind a last response, trailing white space removed.
        adds_bos: whether the tokenizer itself puts a BOS before plain text.
        special_tokens: matches any special token of the tokenizer.
    """

    text: str
    marked: str | None
    has_generation_prompt: bool
    end_of_turn: str
    adds_bos: bool
    special_tokens: re.Pattern[str]


_TEMPLATES: WeakKeyDictionary[Any, _Template] = WeakKeyDictionary()


def tokenize_chat(tokenizer: Any, messages: list[Message], max_length: int) -> TokenizedChat | Rejection:
    """Turn a chat into token ids and a response mask.

    Args:
        tokenizer: a fast transformers tokenizer with a chat template.
        messages: roles and contents; no system message is added.
        max_length: tokens and mask are cut to this length.

    Returns:
        The sequence, or why the chat gives none.

    Raises:
        TemplateError: the tokenizer has no chat template or gives no offsets.
    """
    template = _template(tokenizer)
    for index, message in enumerate(messages):
        if special := template.special_tokens.search(message["content"]):
            detail = f"message {index} contains {special.group()!r}"
            return Rejection(RejectReason.SPECIAL_TOKEN_IN_CONTENT, detail)
    try:
        text = _render(tokenizer, messages)
        spans = _response_spans(tokenizer, template, messages, text)
    except (JinjaError, ValueError, TypeError, KeyError) as error:
        return Rejection(RejectReason.TEMPLATE_FAILED, str(error).strip().split("\n")[0])
    if isinstance(spans, Rejection):
        return spans
    text, shift = _one_bos(tokenizer, template, text)
    tokens, mask = _encode(tokenizer, text, [(start + shift, end + shift) for start, end in spans])
    return _cut(tokens, mask, max_length)


def prompt_tokens(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Token ids of a chat that ends where the assistant is to write.

    Args:
        tokenizer: a fast transformers tokenizer with a chat template.
        messages: the chat so far, usually ending in a user message.

    Returns:
        Ids with exactly one BOS where the model has one, encoded as `tokenize_chat` encodes them.

    Raises:
        TemplateError: no chat template, or the template refuses the chat.
    """
    template = _template(tokenizer)
    try:
        text = _render(tokenizer, messages, add_generation_prompt=True)
    except (JinjaError, ValueError, TypeError, KeyError) as error:
        raise TemplateError(f"The chat template refuses the prompt: {error}. Change the messages' roles.") from error
    text, _ = _one_bos(tokenizer, template, text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_template(tokenizer: Any, where: str) -> None:
    """Refuse a tokenizer that cannot turn chats into masked tokens.

    Args:
        tokenizer: transformers tokenizer.
        where: the model, for the message.

    Raises:
        TemplateError: no chat template, or no offsets.
    """
    try:
        _template(tokenizer)
    except TemplateError as error:
        raise TemplateError(f"{where}: {error}") from error


def template_text(tokenizer: Any) -> str:
    """The chat template that is used.

    Raises:
        TemplateError: the tokenizer has none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            "the tokenizer has no chat template, so chats cannot be turned into tokens. "
            "Use an instruction-tuned model, or put its chat_template.jinja into the model folder."
        )
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise TemplateError(f"the tokenizer has several chat templates and none is the default: {error}") from error


def _template(tokenizer: Any) -> _Template:
    text = template_text(tokenizer)
    known = _TEMPLATES.get(tokenizer)
    if known is None or known.text != text:
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError("the tokenizer gives no offsets. Save it as a fast tokenizer (tokenizer.json).")
        marked = _mark_generation_tags(text) if _TAG.search(text) else None
        special = re.compile("|".join(map(re.escape, filter(None, tokenizer.all_special_tokens))) or "(?!)")
        known = _Template(
            text, marked, _has_generation_prompt(tokenizer), _end_of_turn(tokenizer), _adds_bos(tokenizer), special
        )
        _TEMPLATES[tokenizer] = known
    return known


def _mark_generation_tags(template: str) -> str:
    """Write each tag as a pair of `if` tags around a marker: white-space control at both ends stays what it was."""

    def replace(match: re.Match[str]) -> str:
        left, name, right = match.groups()
        if name == "generation":
            return f"{{%{left} if true %}}{{{{ '{_OPEN}' }}}}{{% if true {right}%}}"
        return f"{{%{left} endif %}}{{{{ '{_CLOSE}' }}}}{{% endif {right}%}}"

    return _TAG.sub(replace, template)


def _has_generation_prompt(tokenizer: Any) -> bool:
    probe = [{"role": "user", "content": "a"}]
    try:
        return _render(tokenizer, probe, add_generation_prompt=True) != _render(tokenizer, probe)
    except (JinjaError, ValueError, TypeError, KeyError):
        return False


def _end_of_turn(tokenizer: Any) -> str:
    probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PLACEHOLDER}]
    try:
        return _render(tokenizer, probe).partition(_PLACEHOLDER)[2].rstrip()
    except (JinjaError, ValueError, TypeError, KeyError):
        return ""  # the template wants other chats; each is looked at by itself


def _adds_bos(tokenizer: Any) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]


def _render(
    tokenizer: Any, messages: list[Message], add_generation_prompt: bool = False, template: str | None = None
) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **TEMPLATE_ARGUMENTS,
        )
    except (ArithmeticError, AttributeError, LookupError, RecursionError) as error:  # a template is a program
        raise ValueError(f"the template fails ({type(error).__name__}: {error})") from error


def _one_bos(tokenizer: Any, template: _Template, text: str) -> tuple[str, int]:
    """The text with exactly one BOS at its start, where the model has one, and by how much it moved."""
    bos = tokenizer.bos_token
    if not bos:
        return text, 0
    shift = 0
    while text.startswith(bos + bos):
        text, shift = text[len(bos) :], shift - len(bos)
    if template.adds_bos and not text.startswith(bos):
        text, shift = bos + text, shift + len(bos)
    return text, shift


def _response_spans(tokenizer: Any, template: _Template, messages: list[Message], text: str) -> list[Span] | Rejection:
    """Character spans of the responses in the rendered text."""
    if template.marked is not None:
        tagged = _tagged_spans(_render(tokenizer, messages, template=template.marked), text)
        if tagged is not None:
            return [_with_end_of_turn(template, text, span) for span in tagged]
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            span = _prefix_span(tokenizer, template, messages, index, text) or _located_span(
                tokenizer, messages, index, text
            )
            if span is None or message["content"].strip() not in text[slice(*span)]:
                return Rejection(RejectReason.TEMPLATE_REWRITES_RESPONSE, f"message {index}")
            spans.append(_with_end_of_turn(template, text, span))
    return spans


def _tagged_spans(marked_text: str, text: str) -> list[Span] | None:
    """Spans between markers; None where the markers changed the rendering."""
    spans, length, start = [], 0, None
    for piece in re.split(f"({_OPEN}|{_CLOSE})", marked_text):
        if piece == _OPEN:
            start = length
        elif piece == _CLOSE:
            if start is None:
                return None
            spans.append((start, length))
            start = None
        else:
            if not text.startswith(piece, length):
                return None
            length += len(piece)
    return spans if length == len(text) and start is None else None


def _prefix_span(tokenizer: Any, template: _Template, messages: list[Message], index: int, text: str) -> Span | None:
    """Span of a response from what the template renders before it and with it; None where these are no prefixes."""
    before = messages[:index]
    if not before:
        return None
    prompt = _render(tokenizer, before, add_generation_prompt=True)
    if not template.has_generation_prompt and prompt == _render(tokenizer, before):
        return None  # no generation prompt: the header of the response would count as response
    turn = _render(tokenizer, messages[: index + 1]).rstrip()
    if not (text.startswith(prompt) and text.startswith(turn) and len(turn) > len(prompt)):
        return None
    return len(prompt), len(turn)


def _located_span(tokenizer: Any, messages: list[Message], index: int, text: str) -> Span | None:
    """Span of a response's own text: what is left of the rendering when everything around it is taken away."""
    content = messages[index]["content"]
    other = [*messages[:index], {"role": "assistant", "content": _PLACEHOLDER}, *messages[index + 1 :]]
    before, found, behind = _render(tokenizer, other).partition(_PLACEHOLDER)
    end = len(text) - len(behind)
    if not found or not text.startswith(before) or not text.endswith(behind) or end <= len(before):
        return None
    if text[len(before) : end].strip() != content.strip():
        return None
    return len(before), end


def _with_end_of_turn(template: _Template, text: str, span: Span) -> Span:
    """Let a span end behind its end-of-turn token and before the white space that follows it."""
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


def _encode(tokenizer: Any, text: str, spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Encode a rendered chat and mark the tokens of the spans.

    Byte-level tokenizers report white space outside their tokens, or empty ranges; so a token is taken to begin where
    the one before it ended. A token that begins before a span counts when only white space hangs over.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
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
