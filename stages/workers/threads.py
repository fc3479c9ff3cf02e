"""Blocking calls that must not be left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def to_its_end(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a blocking function in a thread. A cancellation waits for its end and is raised then."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        raise
