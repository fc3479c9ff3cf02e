"""The calculator over the Anthropic SDK, and as an environment that reads the calls itself."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

from recipes.calculator.agent import MAX_TURNS, calculate
from stages.agents import ChatAgent, ChatContext, Env, Result


@lru_cache(maxsize=1)
def connections() -> DefaultAsyncHttpxClient:
    """One pool of connections for all rollouts of this process."""
    return DefaultAsyncHttpxClient()


class CalculatorAnthropic(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        client = AsyncAnthropic(base_url=ctx.session_url, api_key=ctx.api_key, http_client=connections())
        system = "\n\n".join(message["content"] for message in ctx.messages if message["role"] == "system")
        messages: list[Any] = [message for message in ctx.messages if message["role"] != "system"]
        asked: dict[str, Any] = {"model": ctx.model_name, "max_tokens": 64, "tools": _anthropic_tools(ctx.tools)}
        if system:
            asked["system"] = system
        for _ in range(MAX_TURNS):
            answer = await client.messages.create(messages=messages, **asked)
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                said = "".join(block.text for block in answer.content if block.type == "text")
                return Result(reward=float(said.strip() == ctx.label))
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": calculate(json.dumps(use.input))}
                for use in uses
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        return Result(reward=0.0, truncated=True)


def _anthropic_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row's tools in the form of this wire, which names the parameters otherwise."""
    functions = [dict(tool["function"]) for tool in tools]
    return [{"input_schema": function.pop("parameters"), **function} for function in functions]


class CalculatorEnv(Env):
    async def step(self, state: dict[str, Any]) -> Result:
        calls = read_calls(state["action_text"])
        if not calls:
            return Result(reward=float(state["action_text"].strip() == state["label"]))
        results = [{"role": "tool", "content": calculate(json.dumps(arguments))} for arguments in calls]
        return Result(reward=0.0, observation=results, terminated=False)


def read_calls(text: str) -> list[Any]:
    """Arguments of the calls in a turn; none if the turn is anything but calls of the calculator, behind some text."""
    text = text.replace("<tool_call>", "").replace("</tool_call>", "")
    calls, place = [], text.find('{"name"')
    while 0 <= place < len(text):
        try:
            call, place = json.JSONDecoder().raw_decode(text, place)
            calls.append(call["arguments"])
            place += len(text[place:]) - len(text[place:].lstrip())
        except (ValueError, KeyError, TypeError):
            return []
    return calls
