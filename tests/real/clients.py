"""Unmodified clients, each in its default mode, that ask two questions in one conversation and run the calls they get.

A client gets where the policy answers and whether to stream; it gives how many calls it ran.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from recipes.calculator.agent import calculate
from recipes.calculator.prepare import TOOL

SYSTEM = "Use the calculator."
QUESTIONS = ("3^2", "4^2")
MAX_TURNS = 4
"""Turns in which a question should be answered."""
INSTALL = "install moltflow[dev]"


@dataclass
class Place:
    """Where the policy answers, and the calls that a client ran."""

    base_url: str
    session_url: str
    api_key: str
    calls: list[str] = field(default_factory=list)

    def calculator(self, expression: str) -> str:
        """Squares a number.

        Args:
            expression: a number and ^2
        """
        self.calls.append(expression)
        return calculate(json.dumps({"expression": expression}))

    def run(self, name: str, arguments: Any) -> str:
        assert name == "calculator"
        self.calls.append(str(arguments))
        return calculate(arguments if isinstance(arguments, str) else json.dumps(arguments))


Client = Callable[[Place, bool], Awaitable[None]]


async def openai_chat(at: Place, stream: bool) -> None:
    import openai

    client = openai.AsyncOpenAI(base_url=at.base_url, api_key=at.api_key)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    tools: Any = [TOOL]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(MAX_TURNS):
            if stream:
                async with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as events:
                    message: Any = (await events.get_final_completion()).choices[0].message
            else:
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
                message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                result = at.run(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break


async def openai_responses(at: Place, stream: bool) -> None:
    import openai

    client = openai.AsyncOpenAI(base_url=at.base_url, api_key=at.api_key)
    items: list[Any] = []
    asked: Any = {"model": "policy", "instructions": SYSTEM, "tools": [{"type": "function", **TOOL["function"]}]}
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        for _ in range(MAX_TURNS):
            if stream:
                async with client.responses.stream(input=items, **asked) as events:
                    response: Any = await events.get_final_response()
            else:
                response = await client.responses.create(input=items, **asked)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                output = at.run(call.name, call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
            if not calls:
                break


async def anthropic_messages(at: Place, stream: bool) -> None:
    import anthropic

    client = anthropic.AsyncAnthropic(base_url=at.session_url, api_key=at.api_key)
    function = TOOL["function"]
    tools = [{"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}]
    asked: Any = {"model": "policy", "max_tokens": 64, "system": SYSTEM, "tools": tools}
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(MAX_TURNS):
            if stream:
                async with client.messages.stream(messages=messages, **asked) as events:
                    message: Any = await events.get_final_message()
            else:
                message = await client.messages.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": at.run(block.name, block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            if not results:
                break
            messages.append({"role": "user", "content": results})


async def openai_agents(at: Place, stream: bool, use_responses: bool | None = None) -> None:
    agents = pytest.importorskip("agents", reason=f"openai-agents is missing: {INSTALL}")
    provider = agents.OpenAIProvider(base_url=at.base_url, api_key=at.api_key, use_responses=use_responses)
    agent = agents.Agent(
        name="calculator", instructions=SYSTEM, model="policy", tools=[agents.function_tool(at.calculator)]
    )
    settings = agents.RunConfig(model_provider=provider, tracing_disabled=True)
    items: list[Any] = []
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        if stream:
            result = agents.Runner.run_streamed(agent, items, max_turns=MAX_TURNS, run_config=settings)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, items, max_turns=MAX_TURNS, run_config=settings)
        items = result.to_input_list()


async def openai_agents_chat(at: Place, stream: bool) -> None:
    await openai_agents(at, stream, use_responses=False)


async def _pydantic_ai(at: Place, stream: bool, model: Any) -> None:
    from pydantic_ai import Agent

    agent = Agent(model, system_prompt=SYSTEM, tools=[at.calculator])
    history: list[Any] = []
    for question in QUESTIONS:
        if stream:
            async with agent.run_stream(question, message_history=history) as streamed:
                await streamed.get_output()
            history = streamed.all_messages()
        else:
            history = (await agent.run(question, message_history=history)).all_messages()


async def pydantic_ai_chat(at: Place, stream: bool) -> None:
    models = pytest.importorskip("pydantic_ai.models.openai", reason=f"pydantic-ai is missing: {INSTALL}")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=at.base_url, api_key=at.api_key)
    await _pydantic_ai(at, stream, models.OpenAIChatModel("policy", provider=provider))


async def pydantic_ai_responses(at: Place, stream: bool) -> None:
    models = pytest.importorskip("pydantic_ai.models.openai", reason=f"pydantic-ai is missing: {INSTALL}")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=at.base_url, api_key=at.api_key)
    await _pydantic_ai(at, stream, models.OpenAIResponsesModel("policy", provider=provider))


async def pydantic_ai_anthropic(at: Place, stream: bool) -> None:
    models = pytest.importorskip("pydantic_ai.models.anthropic", reason=f"pydantic-ai is missing: {INSTALL}")
    providers = pytest.importorskip("pydantic_ai.providers.anthropic")
    provider = providers.AnthropicProvider(base_url=at.session_url, api_key=at.api_key)
    await _pydantic_ai(at, stream, models.AnthropicModel("policy", provider=provider))


async def _langgraph(at: Place, stream: bool, model: Any) -> None:
    """LangGraph's ready-made agent, which lives in langchain."""
    agents = pytest.importorskip("langchain.agents", reason=f"langchain is missing: {INSTALL}")
    agent = agents.create_agent(model, [at.calculator], system_prompt=SYSTEM)
    messages: list[Any] = []
    for question in QUESTIONS:
        state: Any = {"messages": [*messages, ("user", question)]}
        if stream:
            async for kind, part in agent.astream(state, stream_mode=["messages", "values"]):
                state = part if kind == "values" else state
        else:
            state = await agent.ainvoke(state)
        messages = state["messages"]


async def langgraph_chat(at: Place, stream: bool) -> None:
    chat = pytest.importorskip("langchain_openai", reason=f"langchain-openai is missing: {INSTALL}")
    await _langgraph(at, stream, chat.ChatOpenAI(model="policy", base_url=at.base_url, api_key=at.api_key))


async def langgraph_anthropic(at: Place, stream: bool) -> None:
    chat = pytest.importorskip("langchain_anthropic", reason=f"langchain-anthropic is missing: {INSTALL}")
    await _langgraph(at, stream, chat.ChatAnthropic(model="policy", base_url=at.session_url, api_key=at.api_key))


CLIENTS: dict[str, Client] = {
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "anthropic": anthropic_messages,
    "openai-agents": openai_agents,
    "openai-agents-chat": openai_agents_chat,
    "pydantic-ai-chat": pydantic_ai_chat,
    "pydantic-ai-responses": pydantic_ai_responses,
    "pydantic-ai-anthropic": pydantic_ai_anthropic,
    "langgraph-chat": langgraph_chat,
    "langgraph-anthropic": langgraph_anthropic,
}
