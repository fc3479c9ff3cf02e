"""Retry or re-ask: which requests of a session are answered with a reply that is there already, or under way."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Reply = TypeVar("Reply")


@dataclass(slots=True)
class _Answer(Generic[Reply]):
    """A reply under way or done, how many handlers wait for it or write it, and whether one has written it whole."""

    task: asyncio.Task[Reply]
    readers: int = 0
    delivered: bool = False


class Retries(Generic[Reply]):
    """The replies of one session by the fingerprint of their request.

    An equal request is a retry only with evidence: its own header says so, or the reply to the earlier one was not
    written whole. Without evidence it is a new sample.
    """

    def __init__(self) -> None:
        self._answers: defaultdict[Hashable, list[_Answer[Reply]]] = defaultdict(list)

    @asynccontextmanager
    async def once(
        self, fingerprint: Hashable, is_retry: bool, produce: Callable[[], Awaitable[Reply]]
    ) -> AsyncIterator[Reply]:
        """The reply to a request, for as long as it takes to write it: leaving the block by an error, or being
        cancelled before, tells that it was not written whole.

        A reply under way goes on without its reader, so that a retry finds it; an error of `produce` is raised to all
        who wait for it and then forgotten.
        """
        answer = self._retried(fingerprint, is_retry)
        if answer is None:
            answer = _Answer(asyncio.ensure_future(_run(produce)))
            self._answers[fingerprint].append(answer)
            answer.task.add_done_callback(lambda task: self._forget_failed(fingerprint, task))
        answer.readers += 1
        try:
            yield await asyncio.shield(answer.task)
            answer.delivered = True
        finally:
            answer.readers -= 1

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = [answer.task for answers in self._answers.values() for answer in answers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _retried(self, fingerprint: Hashable, is_retry: bool) -> _Answer[Reply] | None:
        """The newest answer that lost its reader, else, if the request calls itself a retry, the newest of all."""
        newest_first = self._answers.get(fingerprint, [])[::-1]
        lost = [answer for answer in newest_first if not answer.readers and not answer.delivered]
        return next(iter(lost or (newest_first if is_retry else [])), None)

    def _forget_failed(self, fingerprint: Hashable, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._answers[fingerprint] = [answer for answer in self._answers[fingerprint] if answer.task is not task]


async def _run(produce: Callable[[], Awaitable[Reply]]) -> Reply:
    return await produce()
