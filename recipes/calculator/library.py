"""Trains the assistant as it is: it gets a model that is served by the engines, and its answer is judged."""

from __future__ import annotations

from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from recipes.calculator.agent import MAX_TURNS
from recipes.calculator.assistant import assistant
from stages.agents import ChatAgent, ChatContext, Result


class CalculatorLibrary(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        provider = OpenAIProvider(base_url=ctx.base_url, api_key=ctx.api_key)
        model = OpenAIChatModel(ctx.model_name, provider=provider)
        try:
            answer = await assistant.run(ctx.prompt, model=model, usage_limits=UsageLimits(request_limit=MAX_TURNS))
        except UsageLimitExceeded:
            return Result(reward=0.0, truncated=True)
        return Result(reward=float(answer.output.strip() == ctx.label))
