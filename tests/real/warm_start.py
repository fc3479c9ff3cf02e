"""A tiny model that calls a tool and says what the tool answered, trained in seconds, for tests with real clients.

What clients put into a prompt (system texts, forms of a tool's definition) is none of its business: it was trained on
prompts with all kinds of it, and so it calls `calculator` for every client.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.calculator.prepare import CHAT_TEMPLATE, TOOL, build_tokenizer, square
from recipes.quickstart.prepare import build_model
from stages.agents.rendering import ChatRenderer

MAX_TOKENS = 2048
NUM_ROWS = 800
NUM_STEPS = 200
BATCH_SIZE = 16
LEARNING_RATE = 5e-3
THINKING_TEMPLATE = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
) + CHAT_TEMPLATE.replace(
    "{{ message.content or '' }}",
    "{% if message.reasoning_content and loop.index0 > ns.last %}<think>{{ message.reasoning_content }}</think>"
    "{% endif %}{{ message.content or '' }}",
)
"""Drops the reasoning of what lies before the last user message, as Qwen3's does."""
Row = tuple[list[int], list[int]]
"""A prompt, and the turn that follows it."""


def warm_model(folder: Path, thinks: bool, seed: int = 0) -> Path:
    """A model in Hugging Face layout whose turns are calls or answers, each behind a thought if it `thinks`."""
    tokenizer = build_tokenizer()
    if thinks:
        tokenizer.add_special_tokens(["<think>", "</think>"])
    build_model(folder, seed, tokenizer, THINKING_TEMPLATE if thinks else CHAT_TEMPLATE, MAX_TOKENS)
    draw, renderer = random.Random(seed), ChatRenderer(str(folder))
    rows = [_row(renderer, draw, thinks, is_call=number % 2 == 0) for number in range(NUM_ROWS)]
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))  # rows of a batch are about as long, so little is padding

    def batch() -> list[Row]:
        first = draw.randrange(NUM_ROWS - BATCH_SIZE + 1)
        return rows[first : first + BATCH_SIZE]

    train(folder, batch, NUM_STEPS, seed)
    return folder


def train(folder: Path, batch: Callable[[], list[Row]], num_steps: int, seed: int) -> None:
    """Train the model in `folder` on the turns of the rows, drawn anew for each step."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other on a machine that is busy
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, num_steps, pct_start=0.15)
    for _ in range(num_steps):
        rows = batch()
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        token_ids = torch.zeros(len(rows), longest, dtype=torch.long)  # [batch, seq]
        wanted = torch.full((len(rows), longest), -100)  # [batch, seq]
        for index, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            token_ids[index, :end] = torch.tensor(prompt + answer)
            wanted[index, len(prompt) - 1 : end - 1] = torch.tensor(answer)
        hidden = model.model(input_ids=token_ids).last_hidden_state  # [batch, seq, hidden]
        chosen = wanted >= 0
        loss = cross_entropy(model.lm_head(hidden[chosen]), wanted[chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    torch.set_num_threads(num_threads)
    assert loss.item() < 1.5, f"the warm start did not learn: loss {loss.item()}"
    model.save_pretrained(folder)


def _row(renderer: ChatRenderer, draw: random.Random, thinks: bool, is_call: bool) -> Row:
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.7:
        messages.append({"role": "system", "content": _noise(draw)})
    if draw.random() < 0.3:
        messages += _exchange(draw, thinks)
    *before, answered = _exchange(draw, thinks)
    messages += before[:1] if is_call else before
    reply = before[1] if is_call else answered
    tools = [_tool(draw)]
    return renderer.prompt(messages, tools), renderer.answer(messages, reply, tools)


def _exchange(draw: random.Random, thinks: bool) -> list[dict[str, Any]]:
    """A question, one or two calls, their results, the answer: the last result."""
    squares = [f"{draw.randint(0, 9)}^2" for _ in range(draw.choice([1, 1, 2]))]
    calls = [
        {"id": f"{i}", "type": "function", "function": {"name": "calculator", "arguments": {"expression": called}}}
        for i, called in enumerate(squares)
    ]
    results = [{"role": "tool", "tool_call_id": f"{i}", "content": square(called)} for i, called in enumerate(squares)]
    thought = {"reasoning_content": f"so{draw.randint(0, 9)}"} if thinks else {}
    said = draw.choice(["", "", "", "so "])
    return [
        {"role": "user", "content": f"{draw.randint(0, 9)}^2"},
        {"role": "assistant", "content": said, "tool_calls": calls, **thought},
        *results,
        {"role": "assistant", "content": results[-1]["content"], **thought},
    ]


def _tool(draw: random.Random) -> dict[str, Any]:
    """The calculator as some client would define it."""
    parameters: dict[str, Any] = dict(TOOL["function"]["parameters"])
    if draw.random() < 0.6:
        parameters |= {"additionalProperties": False, "title": _noise(draw)}
    return {"type": "function", "function": TOOL["function"] | {"description": _noise(draw), "parameters": parameters}}


def _noise(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_letters + '  .,:"{}', k=draw.randint(1, 60)))
