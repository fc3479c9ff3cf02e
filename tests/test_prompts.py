"""The prompt stream, and the files it is read from."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import RecipeError
from schemas.recipe import PromptsConfig, RolloutConfig, SamplingConfig
from schemas.types import GroupTask, Prompt
from stages.prompts import prompt_stream, read_prompts

PROMPTS = [Prompt(index, [{"role": "user", "content": str(index)}]) for index in range(5)]
ROLLOUT = RolloutConfig(group_size=4, sampling=SamplingConfig(max_tokens=7))


def stream(count: int, *, shuffle: bool = True, seed: int = 1, **options: Any) -> list[GroupTask]:
    return list(islice(prompt_stream(PROMPTS, ROLLOUT, shuffle=shuffle, seed=seed, **options), count))


def indices(tasks: list[GroupTask]) -> list[int]:
    return [task.prompt.index for task in tasks]


# ---- order ----


def test_without_shuffling_the_file_is_repeated_in_its_order() -> None:
    assert indices(stream(12, shuffle=False)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_a_task_says_what_to_sample_and_under_which_name() -> None:
    task = stream(8, shuffle=False, attempt=2)[7]
    assert task == GroupTask(7, "0001-000002-2", PROMPTS[2], 4, SamplingConfig(max_tokens=7), seed=1)


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own() -> None:
    order = indices(stream(200))
    epochs = [tuple(order[start : start + 5]) for start in range(0, 200, 5)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {(0, 1, 2, 3, 4)}
    assert len(set(epochs)) > 20


def test_the_seed_decides_the_order() -> None:
    assert indices(stream(50)) == indices(stream(50))
    assert indices(stream(50)) != indices(stream(50, seed=2))


@pytest.mark.parametrize("start", [0, 1, 4, 5, 7, 23])
def test_a_stream_that_starts_anywhere_goes_on_as_the_whole_one_would(start: int) -> None:
    assert stream(10, start=start) == stream(start + 10)[start:]


def test_what_was_lost_comes_first_under_its_old_sequence_and_a_new_name() -> None:
    whole = stream(12)
    resumed = stream(4, start=10, again=[3, 8], attempt=1)
    assert [task.sequence for task in resumed] == [3, 8, 10, 11]
    assert indices(resumed) == indices([whole[3], whole[8], whole[10], whole[11]])
    assert resumed[0].group_id == whole[3].group_id.removesuffix("0") + "1"


def test_group_names_never_repeat() -> None:
    assert len({task.group_id for task in stream(500)}) == 500


# ---- files ----


def read(tmp_path: Path, content: str | bytes | list[Any], **columns: str) -> list[Prompt]:
    path = tmp_path / "prompts.jsonl"
    if isinstance(content, list):
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_prompts(PromptsConfig(path=str(path), **columns))


def error(tmp_path: Path, content: str | bytes | list[Any], **columns: str) -> str:
    with pytest.raises(RecipeError) as refused:
        read(tmp_path, content, **columns)
    return str(refused.value).replace(f"{tmp_path}/", "")


def test_text_is_a_user_message_and_messages_stay_as_they_are(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "sort"}, {"role": "user", "content": "21"}]
    rows = [{"prompt": "43", "label": "34"}, {"prompt": messages, "label": ["12", 5]}, {"prompt": "1"}]
    assert read(tmp_path, rows) == [
        Prompt(0, [{"role": "user", "content": "43"}], "34"),
        Prompt(1, messages, ["12", 5]),
        Prompt(2, [{"role": "user", "content": "1"}], None),
    ]


def test_rows_may_say_that_they_have_no_images(tmp_path: Path) -> None:
    prompts = read(tmp_path, [{"prompt": "a", "images": []}, {"prompt": "b", "images": None}])
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["a", "b"]


def test_columns_can_have_other_names(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, [{"question": "1+1", "answer": 2}], prompt="question", label="answer")
    assert prompt == Prompt(0, [{"role": "user", "content": "1+1"}], 2)


def test_line_separators_inside_text_do_not_end_a_row(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, [{"prompt": "a\u2028b\x85c\x1ed"}])
    assert prompt.messages == [{"role": "user", "content": "a\u2028b\x85c\x1ed"}]


def test_blank_lines_and_windows_line_ends_are_no_rows(tmp_path: Path) -> None:
    prompts = read(tmp_path, b'{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "columns", "expected"),
    [
        ("", {}, "prompts.jsonl: has no rows"),
        ('{"prompt": "a"}\n{"prompt": \n', {}, "prompts.jsonl, row 2: not JSON: Expecting value"),
        ('\n{"prompt": "a"}\n["b"]\n', {}, "prompts.jsonl, row 2: found list; allowed: a JSON object"),
        ('{"prompt": "a"}\n\n{"text": "b"}', {}, "prompts.jsonl, row 2: no column 'prompt'; its columns are ['text']"),
        ('{"prompt": "a"}', {"label": "lable"}, "prompts.jsonl, row 1: no column 'lable'; its columns are ['prompt']"),
        ('{"prompt": 7}', {}, "prompts.jsonl, row 1: column 'prompt' has 7; allowed: text, or a list of chat messages"),
        ('{"prompt": []}', {}, "prompts.jsonl, row 1: column 'prompt' has []; allowed: text"),
        ('{"prompt": [{"content": "a"}]}', {}, 'row 1: column \'prompt\' has [{"content": "a"}]; allowed: text'),
        ('{"prompt": "a", "images": ["x.png"]}', {}, "row 1: column 'images' has [\"x.png\"]; allowed: rows without"),
        (b'{"prompt": "\xff"}', {}, "prompts.jsonl: cannot be read ('utf-8' codec can't decode byte 0xff"),
    ],
)
def test_an_error_names_the_file_and_the_row(
    tmp_path: Path, content: str | bytes, columns: dict[str, str], expected: str
) -> None:
    assert expected in error(tmp_path, content, **columns)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no.jsonl: no such file; allowed: a JSONL file"):
        read_prompts(PromptsConfig(path=str(tmp_path / "no.jsonl")))
    with pytest.raises(RecipeError, match="cannot be read"):
        read_prompts(PromptsConfig(path=str(tmp_path)))
