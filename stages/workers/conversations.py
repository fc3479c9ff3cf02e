"""Supervised rows: conversations rendered by the model's template, the last assistant turn trained."""

from __future__ import annotations

import torch

from schemas.errors import RecipeError
from schemas.recipe import ModelConfig, SFTDataConfig
from stages.agents.messages import unreadable
from stages.agents.rendering import ChatRenderer
from stages.algorithms.masks import ActionMask
from stages.workers.collate import TrainRow
from storage.jsonl import column, read_jsonl


def read_conversations(data: SFTDataConfig, model: ModelConfig) -> list[TrainRow]:
    """Rows of `data.path`, trained on the last message: its text and the token that ends the turn.

    Raises RecipeError naming the row that does not end with the assistant or is too long.
    """
    renderer = ChatRenderer(model.path, model.trust_remote_code)
    rows = []
    table = read_jsonl(data.path)
    for number, messages in enumerate(column(data.path, table, data.messages), start=1):
        tools = table[number - 1].get(data.tools) or []
        if not messages or messages[-1].get("role") != "assistant":
            raise RecipeError(f"{data.path}, row {number}: the last message must be the assistant's")
        found = "column 'images'" if table[number - 1].get("images") else unreadable(messages)
        if found is not None:
            raise RecipeError(
                f"{data.path}, row {number}: found {found}; allowed: text, as the model reads nothing else"
            )
        prompt = renderer.prompt(messages[:-1], tools)
        answer = renderer.answer(messages[:-1], messages[-1], tools)
        if len(prompt) + len(answer) > data.max_tokens:
            raise RecipeError(
                f"{data.path}, row {number}: {len(prompt) + len(answer)} tokens; allowed: data.max_tokens = "
                f"{data.max_tokens}"
            )
        trained = torch.tensor([False] * len(prompt) + [True] * len(answer))
        token_ids = prompt + answer
        mask = ActionMask(trained, trained, torch.zeros(len(token_ids), dtype=torch.int64))
        count = len(token_ids)
        rows.append(TrainRow(token_ids, [0.0] * count, torch.ones(count), mask, outcome=1.0))
    return rows
