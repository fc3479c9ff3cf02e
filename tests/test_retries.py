"""Which equal requests share a reply: retries do, re-asks do not."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import MoltflowError
from stages.capture.retries import Retries


class Server:
    """Answers 0, 1, 2, ... each when told to, and writes it whole or not."""

    def __init__(self) -> None:
        self.retries: Retries[int] = Retries()
        self.numbers = itertools.count()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.fails = False

    async def produce(self) -> int:
        number = next(self.numbers)
        await self.may_answer.wait()
        if self.fails:
            raise MoltflowError("engine died")
        return number

    async def request(self, body: Any = "x", *, is_retry: bool = False, whole: bool = True) -> int:
        reply = -1
        try:
            async with self.retries.once(body, is_retry, self.produce) as reply:
                if not whole:
                    raise ConnectionResetError
        except ConnectionResetError:
            pass
        return reply


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_equal_request_without_evidence_is_a_new_sample() -> None:
    server = Server()
    assert [await server.request() for _ in range(3)] == [0, 1, 2]
    server.may_answer.clear()
    together = asyncio.gather(server.request(), server.request())
    await settle()
    server.may_answer.set()
    assert await together == [3, 4]


async def test_a_retry_is_answered_with_the_reply_that_is_there() -> None:
    server = Server()
    assert await server.request() == 0
    assert [await server.request(is_retry=True) for _ in range(2)] == [0, 0]
    assert await server.request("another", is_retry=True) == 1
    assert await server.request() == 2


async def test_a_reply_that_was_not_written_whole_is_written_again_until_it_is() -> None:
    server = Server()
    assert [await server.request(whole=whole) for whole in (False, False, True, True)] == [0, 0, 0, 1]


async def test_a_retry_joins_the_request_under_way() -> None:
    server = Server()
    server.may_answer.clear()
    first = asyncio.create_task(server.request())
    await settle()
    second = asyncio.create_task(server.request(is_retry=True))
    await settle()
    server.may_answer.set()
    assert await asyncio.gather(first, second) == [0, 0]


async def test_a_request_whose_client_went_away_goes_on_and_is_joined_by_the_next() -> None:
    server = Server()
    server.may_answer.clear()
    other, gone = asyncio.create_task(server.request()), asyncio.create_task(server.request())
    await settle()
    gone.cancel()
    await settle()
    again = asyncio.create_task(server.request())
    await settle()
    server.may_answer.set()
    assert await asyncio.gather(other, again) == [0, 1] and gone.cancelled()


async def test_a_failure_is_raised_to_all_who_wait_and_forgotten() -> None:
    server = Server()
    server.may_answer.clear()
    server.fails = True
    waiting = [asyncio.create_task(server.request(is_retry=is_retry)) for is_retry in (False, True)]
    await settle()
    server.may_answer.set()
    for each in waiting:
        with pytest.raises(MoltflowError, match="engine died"):
            await each
    server.fails = False
    assert await server.request(is_retry=True) == 1


async def test_closing_cancels_what_is_under_way() -> None:
    server = Server()
    server.may_answer.clear()
    request = asyncio.create_task(server.request())
    await settle()
    await server.retries.close()
    with pytest.raises(asyncio.CancelledError):
        await request


@given(st.lists(st.tuples(st.sampled_from("xy"), st.booleans(), st.booleans())))
def test_one_after_another_a_reply_is_repeated_only_with_evidence(requests: list[tuple[str, bool, bool]]) -> None:
    async def run() -> None:
        server, expected = Server(), itertools.count()
        last: dict[str, tuple[int, bool]] = {}
        for body, is_retry, whole in requests:
            repeats = body in last and (is_retry or not last[body][1])
            number = last[body][0] if repeats else next(expected)
            assert await server.request(body, is_retry=is_retry, whole=whole) == number
            last[body] = (number, whole or (repeats and last[body][1]))

    asyncio.run(run())
