"""An environment for mathematics with a Python tool, in text: the policy calls it, sees what it printed, and answers.

    <tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>
    <tool_response>42</tool_response>
    <answer>42</answer>

The label of a data row is the gold answer. A rollout ends with the turn that gives an answer, also beside a tool call,
or that calls no tool. The reward is 1 for a correct answer and 0 otherwise, also for none; `info` says the verdict, the
answer and the grader's version. Subclasses set other limits, packages or numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import AgentError
from stages.agents.contract import Env, Result
from stages.agents.grading import Verdict, extract_answer, math_grader
from stages.agents.sandbox import Limits, SandboxResult, run_python

INSTRUCTIONS = """You can run Python. To call the tool, write
<tool_call>
{"name": "python", "arguments": {"code": "print(6 * 7)"}}
</tool_call>
and what the code prints comes back in <tool_response>. Every call starts anew, without network, and has to print what \
you want to see. When you know the answer, write it as <answer>...</answer> or \\boxed{...}."""

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
XML_FORM = re.compile(r"<function=([^>]*)>\s*(?:<parameter=code>(.*?)</parameter>\s*)?(?:</function>)?\s*", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call as the policy wrote it: `code` to run, or `error`, what to tell the policy instead."""

    code: str = ""
    error: str = ""


class PythonToolEnv(Env):
    """Answers tool calls and grades the answer. A machine that cannot isolate the code fails the rollout."""

    limits = Limits()
    packages: Sequence[str | Path] = ()
    """Folders whose packages the code may import, such as one with numpy; see `sandbox.run_python`."""
    max_calls = 4
    """Of one turn. Further ones are told so and not run."""
    max_response_characters = 2048
    """Of one call. The middle of longer ones is left out."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_errors = 0

    async def reset(self, state: dict[str, Any]) -> dict[str, Any]:
        """The prompt with instructions in its system message."""
        first, *rest = state["observation"]
        if first["role"] != "system":
            return {"observation": [{"role": "system", "content": INSTRUCTIONS}, first, *rest]}
        return {"observation": [{**first, "content": f"{first['content']}\n\n{INSTRUCTIONS}"}, *rest]}

    async def step(self, state: dict[str, Any]) -> Result:
        """Raises AgentError for a label that is no answer, SandboxError where there is no sandbox."""
        spoken = state["action_text"].rpartition("</think>")[2]
        calls = parse_tool_calls(spoken)
        answer = extract_answer(CALL.sub("", spoken))
        if answer is not None or not calls:
            return await self._judge(answer, state["label"])
        responses = [await self._respond(call, index) for index, call in enumerate(calls)]
        observation = "\n".join(f"<tool_response>\n{response}\n</tool_response>" for response in responses)
        return Result(reward=0.0, observation=observation, terminated=False, info=self._info(Verdict.UNPARSEABLE, None))

    async def _judge(self, answer: str | None, label: Any) -> Result:
        if isinstance(label, bool) or not isinstance(label, str | int | float) or not str(label).strip():
            raise AgentError(f"PythonToolEnv: the label is {label!r}; allowed: the gold answer, as text or a number")
        grade = await math_grader().grade(answer or "", str(label))
        if grade.verdict is Verdict.TIMEOUT:
            raise AgentError(
                f"PythonToolEnv: no verdict on the answer {(answer or '')[:80]!r} within the grader's limit"
            )
        correct = float(grade.verdict is Verdict.CORRECT)
        info = {**self._info(grade.verdict, answer), "grader": grade.version}
        return Result(reward=correct, score=correct, reward_components={"correct": correct}, info=info)

    async def _respond(self, call: ToolCall, index: int) -> str:
        self._num_calls += 1
        error = call.error
        if index >= self.max_calls:
            error = f"Not run: at most {self.max_calls} calls a turn."
        if error:
            self._num_errors += 1
            return error
        result = await run_python(call.code, limits=self.limits, packages=self.packages)
        self._num_errors += result.status != "ok"
        return shorten(describe(result, self.limits), self.max_response_characters)

    def _info(self, verdict: Verdict, answer: str | None) -> dict[str, Any]:
        calls = {"num_tool_calls": self._num_calls, "num_tool_errors": self._num_errors}
        return {"verdict": str(verdict), "answer": answer, **calls}


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a turn, in order: JSON, or `<function=python><parameter=code>...` inside `<tool_call>`.

    Nothing is evaluated. What is no call of the tool gives an error that tells the policy what was wrong.
    """
    return [_parse(body, closed=bool(end)) for body, end in CALL.findall(text)]


def _parse(body: str, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall(error="Not run: the call has no </tool_call>.")
    if xml := XML_FORM.fullmatch(body.strip()):
        name, code = xml[1].strip(), xml[2]
        code = None if code is None else code.removeprefix("\n").removesuffix("\n")
    else:
        try:
            call = json.loads(body, strict=False)  # line ends inside of strings are what models write
        except (ValueError, RecursionError) as failure:
            return ToolCall(error=f"Not run: the call is no valid JSON: {failure}")
        if not isinstance(call, dict):
            return ToolCall(error=f"Not run: the call is {_kind(call)}, not an object with `name` and `arguments`.")
        name, arguments = call.get("name"), call.get("arguments")
        code = arguments.get("code") if isinstance(arguments, dict) else None
    if name != "python":
        return ToolCall(error=f"Not run: there is no tool {str(name)[:100]!r}. The tools are: python.")
    if not isinstance(code, str):
        return ToolCall(error="Not run: `arguments` needs `code`, a string.")
    return ToolCall(code=code)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")


def describe(result: SandboxResult, limits: Limits) -> str:
    """What the policy is told of a run: both outputs, and why it ended if not by itself."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.status == "timeout":
        parts.append(f"(ended: it took more than {min(limits.max_wall_seconds, limits.max_cpu_seconds):g} seconds)")
    elif result.status == "output_limit":
        parts.append(f"(ended: it printed more than {limits.max_output_bytes} bytes)")
    elif result.status == "error" and not result.stderr:
        parts.append(f"(ended with exit code {result.exit_code})")
    return "\n".join(part for part in parts if part) or "(nothing was printed)"


def shorten(text: str, max_characters: int) -> str:
    """The text, or its two ends with a note in between of how much was left out."""
    if len(text) <= max_characters:
        return text
    head, tail = (max_characters + 1) // 2, max_characters // 2
    return f"{text[:head]}\n({len(text) - max_characters} characters left out)\n{text[len(text) - tail :]}"
