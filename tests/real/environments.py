"""Environments of the tests that run the real stack."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai

from stages.agents import ChatAgent, ChatContext, Env, Result


class Parity(Env):
    """Two turns with random delays; a reward that varies whatever an untrained model says."""

    def __init__(self, delay_seconds: float = 0.0) -> None:
        self._delay_seconds = delay_seconds
        self._turns = 0

    async def step(self, state: dict[str, Any]) -> Result:
        self._turns += 1
        await asyncio.sleep(self._delay_seconds * random.lognormvariate(-0.5, 1.0))
        reward = float(sum(state["action_text"].encode()) % 2)
        return Result(reward=reward, observation="again", terminated=self._turns == 2)


class TwoTemperatures(ChatAgent):
    """Asks a second question at a temperature of its own; the reward varies whatever an untrained model says."""

    async def run(self, ctx: ChatContext) -> Result:
        client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        messages: list[Any] = ctx.messages
        for temperature in (0.5, 1.7):
            answer = await client.chat.completions.create(
                model=ctx.model_name, messages=messages, temperature=temperature
            )
            said = answer.choices[0].message.content or ""
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
        await client.close()
        return Result(reward=float(sum(said.encode()) % 2))


class Broken(Env):
    """Fails in the way that it is told to."""

    def __init__(self, how: str) -> None:
        self._how = how

    async def step(self, state: dict[str, Any]) -> Result:
        if self._how == "raises":
            raise ValueError("this environment is broken")
        if self._how == "never_ends":
            return Result(reward=1.0, observation="go on", terminated=False)
        if self._how == "hangs":
            await asyncio.sleep(3600)
        return Result()
