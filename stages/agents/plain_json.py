"""JSON that is safe to render and to encode again, and arguments of tool calls, by one rule for all who read them."""

from __future__ import annotations

import json
import math
from reprlib import Repr
from typing import Any

Json = dict[str, Any]

MAX_DEPTH = 128
_repr = Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def clean(value: Any, depth: int = MAX_DEPTH) -> Any:
    """A copy of JSON without what tokenizers and encoders choke on.

    Halves of surrogate pairs, which clients that cut text in the middle of an emoji send, become U+FFFD. Numbers that
    are not JSON and nesting beyond `MAX_DEPTH` raise ValueError.
    """
    if isinstance(value, str):
        return value if value.isascii() else _clean_text(value)
    if isinstance(value, dict | list) and depth == 0:
        raise ValueError(f"nested too deep; allowed: {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {key if key.isascii() else _clean_text(key): clean(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item, depth - 1) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() <= 256:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError(f"found {_repr.repr(value)}; allowed: JSON with numbers of at most 256 bits")


def _clean_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def arguments(value: object) -> Json | str:
    """Arguments of a tool call as a mapping where they are a JSON object, else as text. Never raises."""
    if value is None or isinstance(value, dict):
        return value or {}
    text = value if isinstance(value, str) else json.dumps(value)
    parsed = json_object(text)
    return text if parsed is None else parsed


def json_object(text: str) -> Json | None:
    """A JSON object that any client can parse, else None; no text at all is the empty object."""
    if not text or text.isspace():
        return {}
    try:
        value = clean(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
