"""The environment with a Python tool: calls in every shape, answers, what ends a rollout and what it is worth."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from recipes.quickstart.prepare import CHAT_TEMPLATE, build_model, build_tokenizer
from schemas.errors import AgentError
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Generation, GroupTask, Prompt, Status
from stages.agents import Result
from stages.agents.loop import run_env
from stages.agents.python_tool import INSTRUCTIONS, PythonToolEnv, ToolCall, parse_tool_calls, shorten
from stages.agents.rendering import ChatRenderer
from stages.agents.sandbox import Limits


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


async def step(env: PythonToolEnv, text: str, label: Any = "42") -> Result:
    return await env.step({"action_text": text, "label": label})


# ---- calls ----


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "python", "arguments": {"code": "print(1)\\nprint(2)"}}',
        '\n{"arguments": {"code": "print(1)\nprint(2)"}, "name": "python"}\n',
        "<function=python>\n<parameter=code>\nprint(1)\nprint(2)\n</parameter>\n</function>",
        "<function=python><parameter=code>print(1)\nprint(2)</parameter></function>",
    ],
)
def test_a_call_may_be_json_or_the_form_with_parameters(body: str) -> None:
    assert parse_tool_calls(f"First.<tool_call>{body}</tool_call>") == [ToolCall(code="print(1)\nprint(2)")]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"a": 1', "no valid JSON"),
        ("[1,2]", "the call is a list"),
        ('"x"', "the call is a string"),
        ("null", "the call is null"),
        ("", "no valid JSON"),
        ("[" * 100_000, "no valid JSON"),
        ('{"name": "python"}', "needs `code`, a string"),
        ('{"name": "python", "arguments": {"code": 1}}', "needs `code`, a string"),
        ('{"name": "python", "arguments": "print(1)"}', "needs `code`, a string"),
        ('{"name": "bash", "arguments": {"code": "ls"}}', "no tool 'bash'. The tools are: python."),
        ('{"name": null, "arguments": {"code": "ls"}}', "no tool 'None'"),
        ("<function=python></function>", "needs `code`, a string"),
        ("<function=bash><parameter=code>ls</parameter></function>", "no tool 'bash'"),
    ],
)
async def test_a_wrong_call_is_told_and_the_rollout_goes_on(body: str, told: str) -> None:
    result = await step(PythonToolEnv(), f"<tool_call>{body}</tool_call>")
    assert told in str(result.observation) and not result.terminated and result.reward == 0.0
    assert (result.info["num_tool_calls"], result.info["num_tool_errors"]) == (1, 1)


def test_no_argument_is_evaluated(tmp_path: Path) -> None:
    body = f"{{'name': 'python', 'arguments': __import__('os').system('touch {tmp_path}/x')}}"
    assert "no valid JSON" in parse_tool_calls(f"<tool_call>{body}</tool_call>")[0].error
    assert list(tmp_path.iterdir()) == []


async def test_two_calls_are_answered_in_order_and_a_truncated_one_is_told() -> None:
    result = await step(PythonToolEnv(), call("print('a')") + " and " + call("1 / 0") + '<tool_call>{"name": "pyt')
    first, second, third = str(result.observation).split("\n</tool_response>\n<tool_response>\n")
    assert first == "<tool_response>\na"
    assert second.startswith("Traceback") and second.endswith("ZeroDivisionError: division by zero")
    assert third == "Not run: the call has no </tool_call>.\n</tool_response>"
    assert result.info == {"verdict": "unparseable", "answer": None, "num_tool_calls": 3, "num_tool_errors": 2}


async def test_more_calls_than_allowed_are_not_run() -> None:
    env = PythonToolEnv()
    env.max_calls = 1
    result = await step(env, call("print('a')") * 2)
    assert "\na\n" in str(result.observation) and "Not run: at most 1 calls a turn." in str(result.observation)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = 1", "(nothing was printed)"),
        ("import sys; sys.exit(3)", "(ended with exit code 3)"),
        ("print('before')\nwhile True: pass", "before\n(ended: it took more than 0.5 seconds)"),
        ("import os; print(os.environ.get('HOME'))", "/tmp"),
    ],
)
async def test_how_a_run_ended_is_told(code: str, told: str) -> None:
    env = PythonToolEnv()
    env.limits = Limits(max_wall_seconds=0.5 if "while" in code else 60)
    assert (await step(env, call(code))).observation == f"<tool_response>\n{told}\n</tool_response>"


async def test_long_output_keeps_both_ends() -> None:
    assert shorten("head...tail", 11) == "head...tail"
    assert shorten("head...tail", 8) == "head\n(3 characters left out)\ntail"
    assert shorten("abc", 1) == "a\n(2 characters left out)\n"
    result = await step(PythonToolEnv(), call("print('x' * 5000)"))
    x = "x" * 1024
    assert result.observation == f"<tool_response>\n{x}\n(2952 characters left out)\n{x}\n</tool_response>"
    result = await step(PythonToolEnv(), call("while True: print('x' * 1000)"))
    assert "(ended: it printed more than 65536 bytes)" in str(result.observation)


# ---- answers ----


@pytest.mark.parametrize(
    ("text", "label", "reward", "answer"),
    [
        ("<answer>42</answer>", "42", 1.0, "42"),
        ("<answer>41</answer> no, <answer> 84/2 </answer>", "42", 1.0, "84/2"),
        ("So \\boxed{\\frac{84}{2}}.", "42", 1.0, "\\frac{84}{2}"),
        ("\\boxed{42}, or rather \\boxed{41}", "42", 0.0, "41"),
        ("\\boxed{42} <answer>41</answer>", "42", 0.0, "41"),
        ("<answer>42</answer>" + call("print(41)"), "42", 1.0, "42"),
        ("<think>\\boxed{41} <tool_call></think>\\boxed{42}", "42", 1.0, "42"),
        ("<answer>42</answer>", 42, 1.0, "42"),
        ("<answer>0.5</answer>", 0.5, 1.0, "0.5"),
        ("<answer></answer>", "42", 0.0, ""),
    ],
)
async def test_an_answer_ends_the_rollout_and_is_graded(text: str, label: Any, reward: float, answer: str) -> None:
    result = await step(PythonToolEnv(), text, label)
    assert (result.reward, result.score, result.terminated) == (reward, reward, True)
    assert result.reward_components == {"correct": reward}
    assert result.info["answer"] == answer and result.info["grader"].startswith("rules ")


@pytest.mark.parametrize("text", ["The answer is 42.", "", "42", "\\boxed{42", "<answer>42", "I cannot say."])
async def test_a_turn_without_call_or_answer_ends_the_rollout_with_nothing(text: str) -> None:
    result = await step(PythonToolEnv(), text)
    assert (result.reward, result.terminated, result.info["verdict"]) == (0.0, True, "unparseable")
    assert result.info["answer"] is None


async def test_an_answer_inside_of_a_call_is_not_yet_given() -> None:
    for code in ("print('<answer>42</answer>')", r"print('\\boxed{42}')"):
        result = await step(PythonToolEnv(), call(code))
        assert not result.terminated and "42" in str(result.observation)


async def test_nothing_is_taken_from_the_prompt() -> None:
    env = PythonToolEnv()
    await env.reset({"observation": [{"role": "user", "content": "Write \\boxed{42} or <answer>42</answer>."}]})
    state = {
        "action_text": "I will not.",
        "label": "42",
        "observation_text": "Write \\boxed{42}.",
        "messages": [{"role": "user", "content": "\\boxed{42}"}, {"role": "assistant", "content": "I will not."}],
    }
    assert (await env.step(state)).reward == 0.0


@pytest.mark.parametrize("label", [None, "", " ", True, ["42"], {"answer": "42"}])
async def test_a_label_that_is_no_answer_fails_the_rollout_and_is_no_reward(label: Any) -> None:
    with pytest.raises(AgentError, match=r"the label is .*; allowed: the gold answer"):
        await step(PythonToolEnv(), "<answer>42</answer>", label)


# ---- the whole rollout ----


async def test_the_instructions_go_into_the_system_message() -> None:
    user = {"role": "user", "content": "6 * 7?"}
    started = await PythonToolEnv().reset({"observation": [user]})
    assert started == {"observation": [{"role": "system", "content": INSTRUCTIONS}, user]}
    started = await PythonToolEnv().reset({"observation": [{"role": "system", "content": "Be brief."}, user]})
    assert started["observation"][0]["content"] == f"Be brief.\n\n{INSTRUCTIONS}"
    assert parse_tool_calls(INSTRUCTIONS) == [ToolCall(code="print(6 * 7)")]


async def test_tool_errors_and_calls_are_counted_over_the_rollout() -> None:
    env = PythonToolEnv()
    await step(env, call("1 / 0"))
    await step(env, call("print(6 * 7)"))
    result = await step(env, "<answer>42</answer>")
    assert (result.info["num_tool_calls"], result.info["num_tool_errors"]) == (2, 1)
    assert (result.info["verdict"], result.reward) == ("correct", 1.0)


async def test_many_rollouts_at_once_do_not_mix() -> None:
    async def rollout(number: int) -> tuple[str, float | None]:
        env = PythonToolEnv()
        seen = await step(env, call(f"print({number} ** 2)"), str(number**2))
        return str(seen.observation), (await step(env, f"<answer>{number**2}</answer>", str(number**2))).reward

    found = await asyncio.gather(*(rollout(number) for number in range(12)))
    assert found == [(f"<tool_response>\n{n * n}\n</tool_response>", 1.0) for n in range(12)]


class Scripted:
    """An engine that says the given turns."""

    def __init__(self, renderer: ChatRenderer, *turns: str) -> None:
        self.turns = [renderer.tokenizer.encode(turn, add_special_tokens=False) for turn in turns]

    async def generate(self, token_ids: list[int], sampling: SamplingConfig) -> Generation:
        sampled = self.turns.pop(0)
        return Generation("r", sampled, [-1.0] * len(sampled), ((0, 0, len(sampled)),), "stop")


@pytest.mark.parametrize(
    ("turns", "max_turns", "reward", "status"),
    [
        ((call("print(6 * 7)"), "<answer>42</answer>"), 5, 1.0, Status.OK),
        ((call("print(6 * 7)"), "<answer>41</answer>"), 5, 0.0, Status.OK),
        ((call("print(6 * 7)"), call("print(6 * 7)")), 2, 0.0, Status.TRUNCATED),  # out of turns: no answer, no reward
    ],
)
async def test_a_rollout_of_several_turns(
    tmp_path: Path, turns: tuple[str, ...], max_turns: int, reward: float, status: Status
) -> None:
    build_model(tmp_path, 0, build_tokenizer(), CHAT_TEMPLATE)
    renderer = ChatRenderer(str(tmp_path))
    engine = Scripted(renderer, *(f"{turn}<|end|>" for turn in turns))
    config = AgentConfig(entry="x:Y", max_turns=max_turns, max_context_tokens=4000, timeout_seconds=120)
    prompt = Prompt(0, [{"role": "user", "content": "6 * 7?"}], "42")
    task = GroupTask(0, "0000-000000-0", prompt, 1, SamplingConfig(), 0)
    with ThreadPoolExecutor(2) as threads:
        rollout = await run_env(PythonToolEnv, task, 7, engine.generate, renderer, config, threads)
    assert (rollout.status, rollout.reward, rollout.score) == (status, reward, reward), rollout.error
    assert [message["role"] for message in rollout.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert rollout.messages[3]["content"] == "<tool_response>\n42\n</tool_response>"
    assert len(rollout.turns) == 2
