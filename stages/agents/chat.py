"""What a user writes when the agent owns its loop: a `ChatAgent` that talks to the policy through a stock SDK.

    class MyAgent(ChatAgent):
        async def run(self, ctx):
            client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
            answer = await client.chat.completions.create(model=ctx.model_name, messages=ctx.messages)
            return Result(reward=grade(answer.choices[0].message.content, ctx.label))

Every request is answered by the engines that are being trained, and what they sample is recorded token by token.

Each new SDK client reads the TLS certificates, 20 ms of CPU even for plain HTTP. Agents with many short rollouts can
share one: `http_client = DefaultAsyncHttpxClient()` on the class, handed to each client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from schemas.recipe import SamplingConfig
from stages.agents.messages import is_text

MODEL_NAME = "policy"
UNRECORDED_MODEL_NAME = "policy-unrecorded"


@dataclass(frozen=True)
class ChatContext:
    """One rollout: the data row, and where the policy answers.

    `base_url` is for OpenAI's SDK (it ends in /v1), `session_url` for Anthropic's. `unrecorded_model_name` is served by
    the same engines and never recorded: for judges and side calls. `messages` and `tools` are the row's, `prompt` is
    the text of its last user message, and `images` are the addresses of all images in the messages; the policy reads
    text only and answers requests with images by an error. `sampling_params` are the recipe's. Plain agents run in a
    thread each.
    """

    base_url: str
    session_url: str
    api_key: str
    messages: list[dict[str, Any]]
    prompt: str
    label: Any
    sampling_params: SamplingConfig
    seed: int
    tools: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    model_name: str = MODEL_NAME
    unrecorded_model_name: str = UNRECORDED_MODEL_NAME


class ChatAgent:
    """Base class of agents that own their loop. Methods may be plain or async; one instance serves one rollout."""

    async def run(self, ctx: ChatContext) -> Any:
        """Attempt the task and return a `Result`."""
        raise NotImplementedError(f"{type(self).__name__} must define run(ctx) -> Result")

    async def close(self) -> Any:
        """Free what the rollout held; called once on every way out."""
        return None


def last_user_text(messages: list[dict[str, Any]]) -> str:
    """Text of the last user message: its parts joined as they are rendered, without images; "" when there is none."""
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "\n".join(part["text"] for part in content if is_text(part))
    return ""
