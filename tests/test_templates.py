"""Chat templates of real models, read from the `trl` package: captured turns extend or open segments, and never garble.

Wherever a turn extends, the delta must be the very end of what the template makes of the whole conversation.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from schemas.chat import ChatError, ParsedTurn
from schemas.recipe import SamplingConfig
from stages.agents.rendering import ChatRenderer
from stages.capture.marks import Marks
from stages.capture.segments import Session
from stages.capture.writing import assistant_message
from tests.chats import call, generation, renderer, tool, user

SPEC = importlib.util.find_spec("trl")  # its files are read, the package is not imported
assert SPEC is not None and SPEC.origin is not None, "trl is missing: install moltflow[dev]"
TEMPLATES = {path.stem: path for path in sorted((Path(SPEC.origin).parent / "chat_templates").glob("*.jinja"))}

ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "diffusion_gemma": "<turn|>",
    "gemma4": "<turn|>",
    "gemma": "<end_of_turn>",
    "gptoss": "<|return|>",
    "idefics": "<end_of_utterance>",
    "lfm": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "muse": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
}
ENDS_OF_CALLS = {
    "diffusion_gemma": "<|tool_response>",
    "gemma4": "<|tool_response>",
    "gptoss": "<|call|>",
    "glm": "<|observation|>",
}
"""What these models sample last, by the start of the template's name; calls end like other turns if not given."""

ONE, TWO = call("call00001", a=1), call("call00002", a=2)
RESULTS = [tool("call00001", "first result"), tool("call00002", "second result")]
CASES: dict[str, tuple[ParsedTurn, list[dict[str, Any]]]] = {
    "plain": (ParsedTurn("Hello there"), [user("more")]),
    "call": (ParsedTurn("", tool_calls=(ONE,)), RESULTS[:1]),
    "parallel calls": (ParsedTurn("", tool_calls=(ONE, TWO)), RESULTS),
    "text and call": (ParsedTurn("Let me see.", tool_calls=(ONE,)), RESULTS[:1]),
    "thinking and call": (ParsedTurn("", "Deep thought", (ONE,)), RESULTS[:1]),
    "thinking": (ParsedTurn("Answer", "Deep thought"), [user("more")]),
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
EXTENDS = {
    "plain": "qwen2_5 qwen3 qwen3_8 llama3_1 gemma3 gemma4 glm4moe gptoss phi3 lfm2 cohere2 muse_glimmer",
    "call": "qwen2_5 qwen3 qwen3_5_think qwen3_6 qwen3_8 llama3_1 gemma4 glm4moe gptoss lfm2_v2 muse_glimmer",
    "parallel calls": "qwen2_5 qwen3 qwen3_5_think qwen3_6 qwen3_8 gemma4 glm4moe lfm2_v2 muse_glimmer",
    "text and call": "qwen2_5 qwen3 qwen3_5_think qwen3_6 qwen3_8 glm4moe gptoss lfm2_v2",
    "thinking and call": "qwen3 qwen3_5_think qwen3_6 qwen3_8 gemma4 glm4moe gptoss nemotron_3_ultra muse_glimmer",
    "thinking": "qwen3_8 muse_glimmer",  # others drop it
}


def of(name: str, ends: dict[str, str], default: str) -> str:
    return next((end for start, end in ends.items() if name.startswith(start)), default)


def outcome(name: str, case: str) -> str:
    """refused, rewritten or extends, for a first turn and what follows it."""
    said, new = CASES[case]
    end = of(name, ENDS, "<|end|>")
    last = of(name, ENDS_OF_CALLS, end) if said.tool_calls else end
    chat = made(TEMPLATES[name].read_text(), end, last)
    tools = TOOLS if said.tool_calls else []
    session = Session(Marks(chat), 10**6)
    try:
        turn = session.begin([user("hi")], tools)
        sampled = chat.tokenize("as it was sampled" + last)
        session.commit(turn, generation(sampled), said, SamplingConfig(), 0.1)
        echo = {key: value for key, value in assistant_message(said).items() if key != "reasoning_content"}
        second = session.begin([user("hi"), echo, *new], tools)
    except ChatError:
        return "refused"
    whole = Marks(chat).render(second.messages, tools)
    if second.place is None:
        assert second.token_ids == chat.tokenize(whole)
        return second.opened
    assert second.token_ids[: len(turn.token_ids + sampled)] == turn.token_ids + sampled
    delta = str(chat.tokenizer.decode(second.token_ids[second.place.num_tokens :]))
    assert whole.endswith(delta) and all(message["content"] in delta for message in new)
    return "extends"


def made(template: str, *special: str) -> ChatRenderer:
    chat = renderer(template)
    chat.tokenizer.add_special_tokens({"eos_token": special[0], "additional_special_tokens": list(special)})
    return chat


@pytest.mark.parametrize("case", CASES)
def test_turns_extend_under_real_templates_or_are_rendered_whole(case: str) -> None:
    assert len(TEMPLATES) == 72
    outcomes = {name: outcome(name, case) for name in TEMPLATES}
    assert set(outcomes.values()) <= {"extends", "rewritten", "refused"}
    assert {name: outcomes[name] for name in EXTENDS[case].split()} == dict.fromkeys(EXTENDS[case].split(), "extends")
