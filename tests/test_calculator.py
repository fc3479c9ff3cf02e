"""One data row, four kinds of agents: those that pass the row on as it is ask the policy with the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from recipes.calculator.agent import Calculator
from recipes.calculator.prepare import CHAT_TEMPLATE, TOOL, build_tokenizer
from recipes.calculator.variants import CalculatorAnthropic, CalculatorEnv, read_calls
from schemas.chat import ParsedTurn, ToolCall
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Generation, GroupTask, ParseOptions, Prompt, Status
from stages.agents import ChatAgent
from stages.agents.loop import run_env
from stages.agents.rendering import ChatRenderer
from stages.capture.marks import Marks
from stages.capture.recorder import Recorder
from stages.capture.rollout import run_chat
from stages.capture.server import CaptureServer

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the agents keep their connections between rollouts
ASK = {"role": "user", "content": "3^2"}
CALL = '{"name": "calculator", "arguments": {"expression": "3^2"}}'
CONFIG = AgentConfig(entry="a:B", max_context_tokens=4096, max_turns=3)
FUNCTION = TOOL["function"]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    from transformers import PreTrainedTokenizerFast

    folder: Path = tmp_path_factory.mktemp("calculator")
    fast = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(), eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return ChatRenderer(str(folder))


class Engine:
    """Calls the calculator, then says its result."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self.prompts: list[list[int]] = []

    async def sample(
        self, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions | None = None
    ) -> Generation:
        self.prompts.append(list(token_ids))
        is_call = len(self.prompts) == 1
        ids = self._renderer.tokenize(f"<tool_call>{CALL}</tool_call><|end|>" if is_call else "9<|end|>")
        call = ToolCall("call_1", "calculator", '{"expression": "3^2"}')
        parsed = ParsedTurn("", "", (call,)) if is_call else ParsedTurn("9")
        return Generation("r", ids, [-1.0] * len(ids), ((0, 0, len(ids)),), "stop", parsed=parsed)


async def prompts_of(agent: Callable[..., Any], prompt: Prompt, renderer: ChatRenderer) -> list[list[int]]:
    """Token ids that the engine is asked to continue in each turn of a rollout, which must succeed."""
    engine, task = Engine(renderer), GroupTask(0, "g", prompt, 1, SamplingConfig(max_tokens=64), 0)
    with ThreadPoolExecutor(2) as threads:
        if not (isinstance(agent, type) and issubclass(agent, ChatAgent)):
            attempt: Any = await run_env(agent, task, 1, engine.sample, renderer, CONFIG, threads)
        else:
            server = CaptureServer()
            await server.start()
            recorder = Recorder(engine.sample, renderer, Marks(renderer), CONFIG, task.sampling)
            attempt = await run_chat(agent, task, 1, server, recorder, CONFIG, threads)
            await server.close()
    assert (attempt.status, attempt.reward, attempt.error) == (Status.OK, 1.0, None)
    (segment,) = attempt.segments
    assert segment.token_ids == engine.prompts[-1] + renderer.tokenize("9<|end|>")
    return engine.prompts


ROWS = {
    "a tool": Prompt(0, [ASK], "9", [TOOL]),
    "system text": Prompt(0, [{"role": "system", "content": "Add."}, ASK], "9", [TOOL]),
    "two system texts": Prompt(
        0, [{"role": "system", "content": "Add."}, {"role": "system", "content": "Now."}, ASK], "9", [TOOL]
    ),
    "keys in another order": Prompt(
        0, [ASK], "9", [{"function": dict(reversed(FUNCTION.items())), "type": "function"}]
    ),
    "fields that not all wires have": Prompt(
        0, [ASK], "9", [{"type": "function", "function": FUNCTION | {"strict": True}}]
    ),
    "no description": Prompt(0, [ASK], "9", [{"type": "function", "function": FUNCTION | {"description": None}}]),
    "text in parts": Prompt(
        0,
        [{"role": "user", "content": [{"type": "text", "text": text} for text in ("3^2", "now")]}],
        "9",
        [TOOL],
    ),
    "nested and unusual parameters": Prompt(
        0,
        [ASK],
        "9",
        [
            {
                "type": "function",
                "function": FUNCTION
                | {
                    "description": 'Zwölf "Sätze"\n<b> & \\',
                    "parameters": {
                        "required": ["expression"],
                        "properties": {
                            "expression": {"enum": ["1^2", None], "default": 1.0, "type": ["string", "null"]}
                        },
                        "type": "object",
                        "$defs": {"z": {"minimum": 0}, "a": {}},
                        "additionalProperties": False,
                    },
                },
            }
        ],
    ),
}


@pytest.mark.parametrize("row", ROWS)
async def test_a_row_has_the_same_tokens_as_env_over_openai_and_over_anthropic(
    renderer: ChatRenderer, row: str
) -> None:
    as_env, over_openai, over_anthropic = [
        await prompts_of(agent, ROWS[row], renderer) for agent in (CalculatorEnv, Calculator, CalculatorAnthropic)
    ]
    assert len(as_env) == 2
    assert as_env == over_openai
    assert as_env == over_anthropic


async def test_a_row_is_shown_with_its_system_text_and_tool(renderer: ChatRenderer) -> None:
    first, second = await prompts_of(CalculatorEnv, ROWS["system text"], renderer)
    shown = f"<|system|>{json.dumps(FUNCTION)}<|end|><|system|>Add.<|end|><|user|>3^2<|end|><|assistant|>"
    assert renderer.tokenizer.decode(first) == shown
    call = f"<tool_call>{CALL}</tool_call><|end|>"
    assert renderer.tokenizer.decode(second) == f"{shown}{call}<|tool|>9<|end|><|assistant|>"


async def test_an_agent_of_a_library_trains_as_it_is(renderer: ChatRenderer) -> None:
    pytest.importorskip("pydantic_ai.models.openai", reason="pydantic-ai is missing: install moltflow[dev]")
    from recipes.calculator.library import CalculatorLibrary

    asked, answered = await prompts_of(CalculatorLibrary, ROWS["a tool"], renderer)
    assert "3^2<|end|><|assistant|>" in str(renderer.tokenizer.decode(asked))
    assert "<|tool|>9<|end|><|assistant|>" in str(renderer.tokenizer.decode(answered))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>{CALL}</tool_call>", [{"expression": "3^2"}]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [{"expression": "3^2"}] * 2),
        (f"so {CALL}{CALL}", [{"expression": "3^2"}] * 2),
        ("9", []),
        ('{"name": "calculator"}', []),
        ('{"name": "calculator", "arguments": {', []),
    ],
)
async def test_an_environment_reads_the_calls_of_a_turn(text: str, calls: list[Any]) -> None:
    assert read_calls(text) == calls
