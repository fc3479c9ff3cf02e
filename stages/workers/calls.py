"""Awaiting actors: every wait has a timeout, and every failure names the peer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from schemas.errors import MoltflowError, WorkerError


async def call(peer: str, reference: Any, timeout_seconds: float | None = None) -> Any:
    """The result of one actor call. Raises WorkerError naming `peer` when it died, hung or failed."""
    try:
        return await asyncio.wait_for(_await(reference), timeout_seconds)
    except TimeoutError:
        raise WorkerError(f"{peer}: no answer within {timeout_seconds:g} s; it hangs or is overloaded") from None
    except RayActorError as death:
        raise WorkerError(f"{peer}: its process died: {_last_words(death)}") from None
    except RayTaskError as failure:
        cause = failure.cause
        if isinstance(cause, MoltflowError):
            raise cause from None
        raise WorkerError(f"{peer}: {type(cause).__name__}: {cause}\n{failure}") from None


async def call_all(peers: Sequence[str], references: Sequence[Any], timeout_seconds: float | None = None) -> list[Any]:
    """The results of the same call on several actors; the first failure is raised at once."""
    return await asyncio.gather(
        *(call(peer, reference, timeout_seconds) for peer, reference in zip(peers, references, strict=True))
    )


async def _await(reference: Any) -> Any:
    return await reference


def _last_words(error: BaseException) -> str:
    """The end of the message: Ray puts the traceback first and what went wrong last."""
    words = " ".join(str(error).split())
    return words if len(words) <= 800 else "... " + words[-800:].partition(" ")[2]


def kill(actor: Any) -> None:
    """End an actor's process at once; harmless when it is gone."""
    ray.kill(actor, no_restart=True)
