"""Functions that read values from the rows of a dataset.

Rows spell the same key in different ways, encode objects as JSON texts, and nest objects.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

# Matches the start of a word inside a name such as isTrainable.
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")


def is_filled(value: Any) -> bool:
    """Whether a value has content.

    Null, empty texts and empty lists have no content. An object has content if one of its values
    has. Numbers and false count as content.
    """
    values = value.values() if isinstance(value, Mapping) else [value]
    return any(isinstance(item, (bool, int, float)) or bool(item) for item in values)


def words_in(value: Any) -> Iterator[str]:
    """Yield, as texts, all values in an object or list, at every depth.

    Any other value is yielded itself.
    """
    pending = [unpacked(value)]
    while pending:
        element = pending.pop()
        if isinstance(element, Mapping):
            pending += element.values()
        elif isinstance(element, (list, tuple)):
            pending += element
        elif element is not None:
            yield str(element).strip()


def snake_case(key: Any) -> str:
    """Write a name such as lossMask, loss-mask or LOSS.MASK as loss_mask."""
    return re.sub(r"[-. ]", "_", _CAMEL_CASE.sub("_", str(key))).lower()


def unpacked(value: Any) -> Any:
    """Decode a text that is valid JSON. Return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object from its keys and values, for ``json.loads``.

    A repeated key raises ValueError, because one of its values would be lost.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key comes twice")
    return values


def json_values(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Convert the values of a mapping to JSON values. Dates and decimals become texts.

    Null values are left out. Values that JSON cannot represent, or that are nested too deeply, are
    left out, too.
    """
    found = {}
    for key, value in values.items():
        if value is not None:
            with suppress(ValueError, TypeError, RecursionError):
                found[key] = json.loads(json.dumps(value, default=str))
    return found


def is_json(value: Any) -> bool:
    """Whether a value can be encoded as JSON.

    NaN, bytes, dates and very deep nesting cannot be encoded.
    """
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return False
    return True
