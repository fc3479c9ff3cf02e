"""Supervised rows: the tokens that a rollout of the same conversation has, and which of them are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import RecipeError
from schemas.recipe import ModelConfig, SFTDataConfig
from stages.capture import openai_chat
from stages.workers.collate import TrainRow
from stages.workers.conversations import read_conversations
from tests.chats import KEEPS_THOUGHTS, PLAIN, Chat, renderer, user

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}


def read(folder: Path, *rows: dict[str, Any], template: str = PLAIN, max_tokens: int = 2048) -> list[TrainRow]:
    renderer(template).tokenizer.save_pretrained(folder)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_conversations(SFTDataConfig(path=str(data), max_tokens=max_tokens), ModelConfig(path=str(folder)))


def parts(row: TrainRow) -> tuple[str, str]:
    """What is context and what is trained, which comes last."""
    start = row.mask.trained.tolist().index(True)
    assert row.mask.trained.tolist() == [False] * start + [True] * (len(row.token_ids) - start)
    decode = renderer().tokenizer.decode
    return str(decode(row.token_ids[:start])), str(decode(row.token_ids[start:]))


@pytest.mark.parametrize("content", ["", None])
def test_a_call_without_text_has_the_same_tokens_as_in_a_rollout(tmp_path: Path, content: str | None) -> None:
    history = [
        user("x"),
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    (row,) = read(tmp_path, {"messages": [*history, {"role": "assistant", "content": "A"}], "tools": [TOOL]})
    asked = openai_chat.decode({"model": "policy", "messages": history, "tools": [TOOL]})
    in_rollout = Chat().session.begin(asked.messages, asked.tools).token_ids
    assert row.token_ids == in_rollout + renderer().tokenize("A<e>")
    assert parts(row)[0].endswith('<u>x<e><a><c>add{"a": 1}<e><t>2<e><a>') and parts(row)[1] == "A<e>"


def test_a_call_that_is_trained_is_written_as_in_a_history(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [user("x"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]})
    assert parts(row) == ("<u>x<e><a>", '<c>add{"a": 1}<e>')


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_trained_wherever_the_template_looks_for_it(tmp_path: Path, key: str) -> None:
    reply = {"role": "assistant", "content": "A", "reasoning_content": "why"}
    (row,) = read(tmp_path, {"messages": [user("x"), reply]}, template=KEEPS_THOUGHTS.replace("reasoning_content", key))
    assert parts(row) == ("<u>x<e><a>", "[why]A<e>")


@pytest.mark.parametrize("system", ["I", "I am a model"])
def test_the_mask_starts_behind_the_prompt_however_long_its_system_text_is(tmp_path: Path, system: str) -> None:
    messages = [{"role": "system", "content": system}, user("x"), {"role": "assistant", "content": "A"}]
    (row,) = read(tmp_path, {"messages": messages})
    assert parts(row) == (f"<s>{system}<e><u>x<e><a>", "A<e>")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [user("x")]}, "row 2: the last message must be the assistant's"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
                    {"role": "assistant", "content": "A"},
                ]
            },
            "row 2: found image_url; allowed: text",
        ),
        (
            {"messages": [user("x"), {"role": "assistant", "content": "A"}], "images": ["cat.png"]},
            "row 2: found column 'images'; allowed: text",
        ),
        ({"messages": [user("x" * 20), {"role": "assistant", "content": "A"}]}, "row 2: 25 tokens; allowed: data"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused_by_their_number(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    good = {"messages": [user("x"), {"role": "assistant", "content": "A"}]}
    with pytest.raises(RecipeError, match=says):
        read(tmp_path, good, row, max_tokens=20)
