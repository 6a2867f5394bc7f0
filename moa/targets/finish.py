"""Finds out which answers in a row of a dataset were cut off, mostly at a token limit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .row_values import snake_case, unpacked, words_in

# In responses of OpenAI, Anthropic, Google, Ollama, OpenRouter and llama.cpp, these keys say why an
# answer ended.
_FINISH_KEYS = (
    "finish_reason", "stop_reason", "done_reason", "finish_reasons", "stop_reasons", "stop_type",
    "native_finish_reason", "incomplete_details", "finish_details", "completion_reason",
)  # fmt: skip
# A key such as ``finish_reason`` may have an object as its value. Then the object has the reason
# under one of these keys.
_REASON_KEYS = ("type", "reason")
# If ``finish_reason``, or a similar key, has one of these values, the answer is complete.
_END_REASONS = {
    "stop", "stop_sequence", "eos", "eos_token", "end_turn", "tool_use", "tool_calls", "tool_call",
    "function_call", "word", "complete", "completed",
}  # fmt: skip
# If ``finish_reason``, or a similar key, has one of these values, the answer was cut off.
_CUT_REASONS = {
    "length", "limit", "max_tokens", "max_output_tokens", "max_new_tokens", "max_tokens_reached",
    "max_length", "max_len", "model_length", "token_limit", "error_limit", "truncated",
    "context_length_exceeded", "model_context_window_exceeded", "incomplete", "interrupted",
    "abort", "aborted", "cancelled", "canceled", "user_cancel", "timeout", "error", "network_error",
    "insufficient_system_resource", "malformed_function_call", "content_filter", "content_filtered",
    "guardrail_intervened", "safety", "sensitive", "recitation", "blocklist", "prohibited_content",
    "spii", "error_toxic",
}  # fmt: skip
# Texts that Python and pandas write for a missing value.
_NO_REASON = {"", "none", "null", "nan"}
# Some APIs write the name of an enum before the reason, as in FINISH_REASON_STOP.
_REASON_PREFIXES = ("finish_reason_", "reason_")
# A key in `_LIMIT_FLAGS` or `_FLAGS` with the value true means that an answer was cut off. A key in
# `_FLAGS` counts only if it is a key of the row or the message itself. In a nested object, the same
# name may have another meaning.
_LIMIT_FLAGS = ("stopped_limit",)
_FLAGS = ("truncated", "is_truncated")
_TRUE = {"true", "1", "1.0", "yes"}
_FALSE = {"false", "0", "0.0", "no"}
# Under these keys, rows and messages keep the response of an API, or facts about this response. If
# there are several objects under one key, they are alternatives. The row does not say which
# alternative the chat contains, so all of them are ignored.
_RESPONSE_KEYS = (
    "response_metadata", "generation_info", "generation_metadata", "meta_info", "meta", "metadata",
    "llm_output", "raw", "raw_response", "response", "choices", "candidates", "details",
    "generations",
)  # fmt: skip
# Under these keys, a row may have a list with one response of an API for each answer.
_RESPONSES_KEYS = ("responses", "raw_responses")
# Under these keys, a text may be the answer itself, so such a text is not decoded as JSON.
_ANSWER_KEYS = ("response", "responses")

# A response of an API, and the indices of the answers to which it belongs.
_Response = tuple[Mapping[Any, Any], Sequence[int]]


def find_cuts(item: Mapping[Any, Any], n_answers: int = 1) -> list[str]:
    """Find the answers of a row or message that were cut off.

    A key such as ``finish_reason`` says whether an answer was cut off. Keys that are directly in
    the item are read first. If these keys say nothing about an answer, the responses of APIs inside
    the item are read. If two keys at the same depth disagree about an answer, the answer counts as
    cut off.

    Args:
        item: the row or message.
        n_answers: the number of answers in the row or message, at least 1.

    Returns:
        One text for each answer. If the answer was cut off, the text names the key and the reason.
        Otherwise the text is empty.
    """
    cuts = [""] * n_answers
    unknown = set(range(n_answers))
    level: list[_Response] = [(item, range(n_answers))]
    while level and unknown:
        stated: set[int] = set()
        for response, answers in level:
            for answer, cut in _stated_ends(response, answers, is_item=response is item):
                if answer in unknown:
                    stated.add(answer)
                    cuts[answer] = cuts[answer] or cut
        unknown -= stated
        inner: list[_Response] = []
        for response, answers in level:
            inner += _inner_responses(response, answers)
        level = inner
    return cuts


def is_understood(key: Any, value: Any, is_cut_known: bool = True) -> bool:
    """Whether a key says why answers ended, and :func:`find_cuts` knows all reasons in the value.

    Args:
        key: a key of a row, in any spelling such as ``finishReason``.
        value: the value of the key.
        is_cut_known: whether a reason that means "cut off" counts as known. If the last message
            calls a tool, pass false: this message keeps its end-of-turn token in any case, so the
            reason has no effect.
    """
    name = snake_case(key)
    if name in _FINISH_KEYS:
        known = _END_REASONS | _CUT_REASONS if is_cut_known else _END_REASONS
    elif name in (*_LIMIT_FLAGS, *_FLAGS):
        known = _TRUE | _FALSE if is_cut_known else _FALSE
    else:
        return False
    stated = filter(_is_stated, _listed(value))
    return all(known.issuperset(_reasons(reason)) for reason in stated)


def _stated_ends(
    response: Mapping[Any, Any], answers: Sequence[int], is_item: bool
) -> Iterator[tuple[int, str]]:
    """Read from the keys of a response which of its answers were cut off.

    Yields pairs of the index of an answer and a text. If the answer was cut off, the text names the
    key and the reason. Otherwise the text is empty.

    A key may have several reasons. If a key has one reason, this reason belongs to the last answer.
    If a key has one reason for each answer, the reasons are assigned in order. Other numbers are
    ambiguous:

    - If a single answer has several reasons, the API has generated several answers, and the chat
      contains one of them. The answer in the chat counts as cut off only if all generated answers
      were cut off.
    - If there are several answers, but more or fewer reasons than answers, the reasons cannot be
      assigned to answers. If one of the reasons means "cut off", all answers count as cut off.
    """
    for key, value in response.items():
        name = snake_case(key)
        is_flag = name in _LIMIT_FLAGS or (is_item and name in _FLAGS)
        if not (is_flag or name in _FINISH_KEYS):
            continue
        cut_reasons = _TRUE if is_flag else _CUT_REASONS
        cuts: list[str] = []
        listed = _listed(value)
        if len(listed) != len(answers):
            # Missing reasons keep their places only in a list with one item for each answer.
            listed = [item for item in listed if _is_stated(item)]
        for item in listed:
            reason = next((word for word in _reasons(item) if word in cut_reasons), "")
            cuts.append(f"{key} {reason!r}" if reason else "")
        if is_flag and not any(cuts):
            # A flag that is false does not say that the answer is complete, because the answer may
            # have reached another limit.
            continue
        if len(cuts) == len(answers):
            for answer, item, cut in zip(answers, listed, cuts, strict=True):
                if _is_stated(item):
                    yield answer, cut
        elif len(cuts) == 1:
            yield answers[-1], cuts[0]
        elif cuts and (all(cuts) or (any(cuts) and len(answers) > 1)):
            cut = next(filter(None, cuts))
            for answer in answers:
                yield answer, cut


def _listed(value: Any) -> list[Any]:
    """Return the reasons in the value of a key. If the value is a list, each item is a reason."""
    decoded = unpacked(value)
    return list(decoded) if isinstance(decoded, (list, tuple)) else [decoded]


def _is_stated(reason: Any) -> bool:
    """Whether a reason has a text that is not the name of a missing value, such as "None"."""
    return any(word.lower() not in _NO_REASON for word in words_in(reason))


def _reasons(value: Any) -> Iterator[str]:
    """Yield the words of a reason, written in snake case.

    A text such as ``FinishReason.STOP``, which Python writes for an enum, gives ``stop``.
    """
    value = unpacked(value)
    if isinstance(value, Mapping):
        stated = [value[key] for key in _REASON_KEYS if value.get(key) is not None]
        value = stated or value
    for word in words_in(value):
        if word.lower() in _TRUE | _FALSE:
            yield word.lower()
            continue
        name = word.rpartition(".")[2].partition(":")[0]
        reason = snake_case(name.strip("<>'\" "))
        for prefix in _REASON_PREFIXES:
            reason = reason.removeprefix(prefix)
        yield reason


def _inner_responses(response: Mapping[Any, Any], answers: Sequence[int]) -> Iterator[_Response]:
    """Yield the API responses inside a row or response, with the indices of their answers."""
    for key, value in response.items():
        name = snake_case(key)
        if name not in (*_RESPONSE_KEYS, *_RESPONSES_KEYS):
            continue
        value = value if name in _ANSWER_KEYS else unpacked(value)
        is_list = isinstance(value, (list, tuple)) and not _is_pairs(value)
        if is_list and name in _RESPONSES_KEYS and len(value) == len(answers):
            for answer, inner in zip(answers, value, strict=True):
                if isinstance(inner, Mapping):
                    yield inner, [answer]
            continue
        while isinstance(value, (list, tuple)) and len(value) == 1 and not _is_pairs(value):
            value = value[0]
        if _is_pairs(value):
            value = dict(value)
        if isinstance(value, Mapping):
            yield value, answers


def _is_pairs(value: Any) -> bool:
    """Whether a value is a list of pairs (key, value). Arrow returns an object in this form."""
    if not value or not isinstance(value, (list, tuple)):
        return False
    for pair in value:
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str)
        if not is_pair:
            return False
    return True
