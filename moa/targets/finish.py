"""Reads from a row of a dataset which of its answers were cut off, mostly at a token limit."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .row_values import is_filled, snake_case, unpacked, words_in

# Keys that say why an answer ended, in the APIs of OpenAI, Anthropic, Google, Ollama, OpenRouter
# and llama.cpp. Then their values: the first ones say that the answer is complete, the second ones
# that it was cut off.
_FINISH_KEYS = (
    "finish_reason", "stop_reason", "done_reason", "finish_reasons", "stop_reasons", "stop_type",
    "native_finish_reason", "incomplete_details", "finish_details", "completion_reason",
)  # fmt: skip
_END_REASONS = (
    "stop", "stop_sequence", "eos", "eos_token", "end_turn", "tool_use", "tool_calls",
    "tool_call", "function_call", "word", "complete", "completed",
)  # fmt: skip
_CUT_REASON = re.compile(
    r"(?:.*_)?(?:length|limit|exceeded|safety|recitation|filter|blocklist|prohibited_content|abort"
    r"|aborted|cancelled|timeout|error|incomplete)(?:_.*)?|max_(?:\w+_)?(?:tokens|length)"
)
# An object that describes an end has its reason under one of these keys.
_REASON_KEYS = {"type", "reason"}
# Keys whose value true says that an answer was cut off. Those in the second tuple count only as keys
# of a row or message, because objects in a row use the same names for other things.
_LIMIT_FLAGS = ("stopped_limit",)
_FLAGS = ("truncated", "is_truncated")
_FLAG_REASONS = {
    "true": "length", "yes": "length", "1": "length", "1.0": "length",
    "false": "stop", "no": "stop", "0": "stop", "0.0": "stop",
}  # fmt: skip
# Keys under which rows and messages keep the response of an API, or facts about it.
_RESPONSE_KEYS = (
    "response_metadata", "generation_info", "meta_info", "metadata", "raw", "raw_response",
    "response", "responses", "choices", "candidates", "details", "generations",
)  # fmt: skip


def find_cuts(item: Mapping[Any, Any], n_answers: int = 1) -> list[str]:
    """Find the answers of a row or message that were cut off.

    A key such as ``finish_reason`` says so. If its value is a list with one reason for each answer,
    each reason is read. A single reason belongs to the last answer. A list of another length has
    reasons of other generations, so it counts only if all of them were cut off.

    A reason in the item itself decides alone. Without one, the responses of an API in the item are
    searched: a single response, or as many responses as there are answers.

    Args:
        item: the row or message.
        n_answers: how many answers it has, at least 1.

    Returns:
        For each answer the key with its value, or an empty text if the answer was not cut off.
    """
    cuts = [""] * n_answers
    decided: set[int] = set()
    pending: list[tuple[Mapping[Any, Any], range]] = [(item, range(n_answers))]
    for response, answers in pending:
        if not decided.isdisjoint(answers):
            continue
        for key, value in response.items():
            name = snake_case(key)
            if name in (*_FINISH_KEYS, *_LIMIT_FLAGS) or (name in _FLAGS and response is item):
                if is_filled(value):
                    decided.update(answers)
                found = _read_cuts(name, value, len(answers))
                # A single value is about the last answer.
                for answer, is_cut in zip(answers[-len(found) :], found, strict=True):
                    if is_cut:
                        cuts[answer] = f"{key} {value!r:.40}"
            elif name in _RESPONSE_KEYS:
                pending += _responses(value, answers)
    return cuts


def _read_cuts(name: str, value: Any, n_answers: int) -> list[bool]:
    """Read from the value of a key whether each answer was cut off, or only the last answer."""
    reasons = unpacked(value)
    if not isinstance(reasons, (list, tuple)):
        reasons = [reasons]
    found: list[bool] = []
    for reason in reasons:
        found.append(any(map(_is_cut, _reasons(name, reason))))
    return found if len(found) == n_answers else [bool(found) and all(found)]


def _reasons(name: str, value: Any) -> Iterator[str]:
    """Yield the reasons in the value of a key, in lower case.

    A text such as ``FinishReason.STOP``, which Python writes for an enum, gives ``stop``.
    """
    value = unpacked(value)
    if isinstance(value, Mapping) and not _REASON_KEYS.isdisjoint(value):
        value = [value.get(key) for key in _REASON_KEYS]
    for word in words_in(value):
        if name in (*_LIMIT_FLAGS, *_FLAGS):
            yield _FLAG_REASONS.get(word, "")
        else:
            yield word.rpartition(".")[2].replace("-", "_")


def _is_cut(reason: str) -> bool:
    return reason not in _END_REASONS and bool(_CUT_REASON.fullmatch(reason))


def _responses(value: Any, answers: range) -> Iterator[tuple[Mapping[Any, Any], range]]:
    """Yield the responses in the value of a key, each with the answers to which it belongs."""
    if isinstance(value, (list, tuple)) and len(value) == len(answers) > 1:
        for answer, response in zip(answers, value, strict=True):
            yield from _responses(response, range(answer, answer + 1))
        return
    while not _is_map(value) and isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if _is_map(value):
        yield dict(value), answers


def _is_map(value: Any) -> bool:
    """Whether a value is an object, or the list of its keys and values that Arrow makes from it."""
    if isinstance(value, Mapping):
        return True
    if not value or not isinstance(value, (list, tuple)):
        return False
    return all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str)
        for pair in value
    )


def is_understood(key: Any, value: Any, is_cut_known: bool = True) -> bool:
    """Whether a key says why answers ended, and only with values that :func:`find_cuts` knows.

    Args:
        key: a key of a row, in any spelling such as ``finishReason``.
        value: its value.
        is_cut_known: False if no value may say that an answer was cut off.
    """
    name = snake_case(key)
    if name not in (*_FINISH_KEYS, *_LIMIT_FLAGS, *_FLAGS):
        return False
    for reason in _reasons(name, value):
        is_known = reason in _END_REASONS or (is_cut_known and _is_cut(reason))
        if not is_known:
            return False
    return True
