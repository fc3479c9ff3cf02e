"""The wire of `GET /v1/models` and `GET /v1/models/NAME`, in the shape of OpenAI or of Anthropic.

Both are served under one path; clients of Anthropic send the header `anthropic-version`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from schemas.chat import ChatError
from stages.capture.reading import Json


def listed(names: Sequence[str], created: int, is_anthropic: bool) -> Json:
    """All models; `created` is in seconds since 1970."""
    data = [_model(name, created, is_anthropic) for name in names]
    if not is_anthropic:
        return {"object": "list", "data": data}
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def retrieved(name: str, names: Sequence[str], created: int, is_anthropic: bool) -> Json:
    """One model. Raises ChatError when it is not served."""
    if name not in names:
        raise ChatError(404, "not_found", f"model: found {name[:80]!r}; allowed: {', '.join(names)}", "model")
    return _model(name, created, is_anthropic)


def _model(name: str, created: int, is_anthropic: bool) -> Json:
    if not is_anthropic:
        return {"id": name, "object": "model", "created": created, "owned_by": "moltflow"}
    created_at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": created_at, "lifecycle": "active"}
