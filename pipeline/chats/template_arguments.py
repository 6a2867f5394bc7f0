"""Arguments of chat templates beside the chat, such as Qwen3's ``enable_thinking``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import OptionInvalid

RECORDED = "template_kwargs"
"""Key under which a store, and a drafter as JSON, record them."""
_TAKEN = {
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


def parse_template_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``name=value`` texts, or a JSON object that was cut at its commas.

    A value that is JSON (false, 3, "text") is parsed; any other is a text.

    Raises:
        OptionInvalid: something else, or a name that the template gets from elsewhere.
    """
    whole = ",".join(texts).strip()
    if whole.startswith("{"):
        try:
            found = json.loads(whole)
        except ValueError as error:
            raise OptionInvalid(f"template_kwargs is {whole!r}, which is no JSON object ({error})") from error
    else:
        found = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not name.strip():
                raise OptionInvalid(f"template_kwargs has {text!r}, expected NAME=VALUE such as enable_thinking=false")
            try:
                found[name.strip()] = json.loads(value)
            except ValueError:
                found[name.strip()] = value
    for name in found:
        if name in _TAKEN:
            raise OptionInvalid(f"template_kwargs has {name}, which the template gets from elsewhere; leave it out")
        if not name.isidentifier():
            raise OptionInvalid(f"template_kwargs has {name!r}, expected the name of a variable of the template")
    return dict(found)


def choose_template_arguments(given: Sequence[str], drafters: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return the given arguments, else those of the chats that all drafters were trained on.

    Args:
        drafters: name of each drafter -> what it records of its target.

    Raises:
        OptionInvalid: none were given, and drafters were trained with different ones.
    """
    if given:
        return parse_template_arguments(given)
    recorded = {name: target.get(RECORDED, "{}") for name, target in drafters.items() if target}
    if len(set(recorded.values())) > 1:
        raise OptionInvalid(
            "the drafters were trained on chats rendered with different arguments: "
            + "; ".join(f"{name} {text}" for name, text in recorded.items())
            + ". Say with which to decode: --set template_kwargs=NAME=VALUE."
        )
    return parse_template_arguments([next(iter(recorded.values()), "{}")])
