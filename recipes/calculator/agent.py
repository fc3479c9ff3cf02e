"""A calculator agent over the OpenAI SDK: asks, runs the calls that come back, asks again, until there is an answer."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from stages.agents import ChatAgent, ChatContext, Result

MAX_TURNS = 3


def calculate(arguments: str) -> str:
    """The square that a call asks for; `error`, as text for the policy, where it asks for anything else."""
    try:
        expression = re.fullmatch(r"(\d{1,6})\^2", json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return "error"
    return str(int(expression[1]) ** 2) if expression else "error"


@lru_cache(maxsize=1)
def connections() -> DefaultAsyncHttpxClient:
    """One pool of connections for all rollouts of this process: making one takes longer than a short rollout."""
    return DefaultAsyncHttpxClient()


class Calculator(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key, http_client=connections())
        messages: list[Any] = list(ctx.messages)
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(model=ctx.model_name, messages=messages, tools=ctx.tools)  # type: ignore[call-overload]
            message = answer.choices[0].message
            if not message.tool_calls:
                return Result(reward=float(message.content.strip() == ctx.label))
            messages.append(message)
            for call in message.tool_calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return Result(reward=0.0, truncated=True)
