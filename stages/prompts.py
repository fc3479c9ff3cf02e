"""Prompts: the rows to attempt, in an order that the seed decides, forever.

The order is a function of the sequence number alone, so a resumed run continues it exactly and dispatches what was lost
again under the same sequence number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from schemas.errors import RecipeError
from schemas.recipe import PromptsConfig, RolloutConfig
from schemas.types import GroupTask, Prompt
from storage.jsonl import column, read_jsonl


def read_prompts(config: PromptsConfig, path: str | None = None) -> list[Prompt]:
    """All rows of `config.path` (or of `path`, with the same columns). Raises RecipeError naming file and row."""
    uri = path or config.path
    rows = read_jsonl(uri)
    if config.label != PromptsConfig.model_fields["label"].default and all(config.label not in row for row in rows):
        column(uri, rows, config.label)  # raises: a misspelt name would grade every rollout against null
    prompts = []
    for index, value in enumerate(column(uri, rows, config.prompt)):
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if not _are_messages(messages):
            raise RecipeError(
                f"{uri}, row {index + 1}: column {config.prompt!r} has {json.dumps(value)[:80]}; "
                "allowed: text, or a list of chat messages, each with a role"
            )
        tools = rows[index].get(config.tools) or []
        if not _are_tools(tools):
            raise RecipeError(
                f"{uri}, row {index + 1}: column {config.tools!r} has {json.dumps(tools)[:80]}; allowed: a list of "
                '{"type": "function", "function": {"name": ...}}, or nothing'
            )
        if found := rows[index].get("images"):
            raise RecipeError(
                f"{uri}, row {index + 1}: column 'images' has {json.dumps(found)[:80]}; allowed: rows without, as the "
                "model reads text only"
            )
        prompts.append(Prompt(index, messages, rows[index].get(config.label), tools))
    return prompts


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _are_tools(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in value
    )


def prompt_stream(
    prompts: Sequence[Prompt],
    config: RolloutConfig,
    *,
    shuffle: bool,
    seed: int,
    start: int = 0,
    again: Sequence[int] = (),
    attempt: int = 0,
) -> Iterator[GroupTask]:
    """Group tasks `again` (lost by an earlier attempt), then `start`, `start` + 1, ... without end."""

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        indices = list(range(len(prompts)))
        if shuffle:
            random.Random(f"{seed}-{epoch}").shuffle(indices)
        return indices

    def task(sequence: int) -> GroupTask:
        epoch, position = divmod(sequence, len(prompts))
        prompt = prompts[order(epoch)[position]]
        group_id = f"{epoch:04d}-{prompt.index:06d}-{attempt}"
        return GroupTask(sequence, group_id, prompt, config.group_size, config.sampling, seed)

    for sequence in again:
        yield task(sequence)
    while True:
        yield task(start)
        start += 1
