"""Reads from a row of a dataset which of its answers were cut off, mostly at a token limit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .row_values import snake_case, unpacked, words_in

# Keys that say why an answer ended, in the APIs of OpenAI, Anthropic, Google, Ollama, OpenRouter
# and llama.cpp.
_FINISH_KEYS = (
    "finish_reason", "stop_reason", "done_reason", "finish_reasons", "stop_reasons", "stop_type",
    "native_finish_reason", "incomplete_details", "finish_details", "completion_reason",
)  # fmt: skip
# An object that is the value of such a key has the reason under one of these keys.
_REASON_KEYS = ("type", "reason")
# Reasons of complete answers.
_END_REASONS = {
    "stop", "stop_sequence", "eos", "eos_token", "end_turn", "tool_use", "tool_calls", "tool_call",
    "function_call", "word", "complete", "completed",
}  # fmt: skip
# Reasons of answers that were cut off.
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
# Names of enums may stand before the reason.
_REASON_PREFIXES = ("finish_reason_", "reason_")
# Keys whose value true says that an answer was cut off. Those in the second tuple count only as
# keys of a row or message, because objects in a row use the same names for other things.
_LIMIT_FLAGS = ("stopped_limit",)
_FLAGS = ("truncated", "is_truncated")
_TRUE = {"true", "1", "1.0", "yes"}
_FALSE = {"false", "0", "0.0", "no"}
# Keys under which rows and messages keep the response of an API, or facts about it. Under keys of
# the second tuple, there may be one response for each answer. Under all others, several objects are
# alternatives, of which the chat has only one.
_RESPONSE_KEYS = (
    "response_metadata", "generation_info", "generation_metadata", "meta_info", "meta", "metadata",
    "llm_output", "raw", "raw_response", "response", "choices", "candidates", "details",
    "generations",
)  # fmt: skip
_RESPONSES_KEYS = ("responses", "raw_responses")
# A text under one of these keys may be the answer itself, which is not searched.
_ANSWER_KEYS = ("response", "responses")

# Of a response: the answers to which it belongs, as indices.
_Response = tuple[Mapping[Any, Any], Sequence[int]]


def find_cuts(item: Mapping[Any, Any], n_answers: int = 1) -> list[str]:
    """Find the answers of a row or message that were cut off.

    A key such as ``finish_reason`` says whether an answer was cut off. The keys of the item itself
    are read first. For answers about which they say nothing, the responses of an API inside the
    item are read. If two keys of the same depth disagree, the answer counts as cut off.

    Args:
        item: the row or message.
        n_answers: how many answers it has, at least 1.

    Returns:
        For each answer the key and the reason, or an empty text if the answer was not cut off.
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
    """Whether a key says why answers ended, and only with values that :func:`find_cuts` knows.

    Args:
        key: a key of a row, in any spelling such as ``finishReason``.
        value: its value.
        is_cut_known: False if the end of the answer cannot be left out, as after a tool call.
            Reasons of answers that were cut off are then not understood.
    """
    name = snake_case(key)
    if name in _FINISH_KEYS:
        known = _END_REASONS | _CUT_REASONS if is_cut_known else _END_REASONS
    elif name in (*_LIMIT_FLAGS, *_FLAGS):
        known = _TRUE | _FALSE if is_cut_known else _FALSE
    else:
        return False
    return all(known.issuperset(_reasons(reason)) for reason in _listed(value))


def _stated_ends(
    response: Mapping[Any, Any], answers: Sequence[int], is_item: bool
) -> Iterator[tuple[int, str]]:
    """Yield what the keys of a response say about its answers.

    Each item is the index of an answer, and the key with the reason if the answer was cut off. A
    single reason belongs to the last answer. Reasons of which the number differs from the number of
    answers are ambiguous: those of a single answer belong to several generations, of which the chat
    has one, and some of those of several answers are about an earlier answer.
    """
    for key, value in response.items():
        name = snake_case(key)
        is_flag = name in _LIMIT_FLAGS or (is_item and name in _FLAGS)
        if not (is_flag or name in _FINISH_KEYS):
            continue
        cut_reasons = _TRUE if is_flag else _CUT_REASONS
        cuts: list[str] = []
        for listed in _listed(value):
            reason = next((word for word in _reasons(listed) if word in cut_reasons), "")
            cuts.append(f"{key} {reason!r}" if reason else "")
        if is_flag and not any(cuts):
            continue  # Whether another limit was reached is not known.
        if len(cuts) == 1:
            yield answers[-1], cuts[0]
        elif len(cuts) == len(answers):
            yield from zip(answers, cuts, strict=True)
        elif cuts and (all(cuts) or (any(cuts) and len(answers) > 1)):
            cut = next(filter(None, cuts))
            for answer in answers:
                yield answer, cut


def _listed(value: Any) -> list[Any]:
    """Return the reasons in the value of a key: one for each item of a list that is not empty."""
    decoded = unpacked(value)
    values = decoded if isinstance(decoded, (list, tuple)) else [decoded]
    stated: list[Any] = []
    for item in values:
        words = {word.lower() for word in words_in(item)}
        if not words <= _NO_REASON:
            stated.append(item)
    return stated


def _reasons(value: Any) -> Iterator[str]:
    """Yield the words of a reason in snake case.

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
    """Yield the responses inside a response or row, each with the answers to which it belongs."""
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
    """Whether a value is the list of keys and values that Arrow makes from an object."""
    if not value or not isinstance(value, (list, tuple)):
        return False
    for pair in value:
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str)
        if not is_pair:
            return False
    return True
