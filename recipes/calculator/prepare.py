"""Builds what the calculator recipe needs, from a seed and without a network.

python -m recipes.calculator.prepare [SEED]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from recipes.quickstart.prepare import build_model, write_rows

FOLDER = Path(__file__).parent / "build"
SPECIAL_TOKENS = [
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    "<tool_call>",
    "</tool_call>",
]
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Squares a number.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "a number and ^2"}},
            "required": ["expression"],
        },
    },
}
NUM_CONVERSATIONS = 8192


def build_tokenizer() -> Any:
    """Digits and bytes, and merges that make one token of what every prompt and call repeats."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[0-9]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    call = json.dumps({"name": "calculator", "arguments": {"expression": "1^2"}})
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator([json.dumps(TOOL["function"]), call, "error"] * 8, trainer)
    return tokenizer


def build_data(folder: Path, seed: int) -> None:
    """Squares of digits. Conversations call with digits of their own, so that they teach the form of a call alone."""
    draw = random.Random(seed)
    questions = [f"{digit}^2" for digit in range(10)]
    rows = [{"prompt": question, "label": square(question), "tools": [TOOL]} for question in questions]
    write_rows(folder / "prompts.jsonl", rows)
    conversations = []
    for _ in range(NUM_CONVERSATIONS // 2):
        called = draw.choice(questions)
        asked = [{"role": "user", "content": draw.choice(questions)}, _call(called)]
        result = square(called)
        answered = [
            *asked,
            {"role": "tool", "tool_call_id": "call", "content": result},
            {"role": "assistant", "content": result},
        ]
        conversations += [{"messages": asked, "tools": [TOOL]}, {"messages": answered, "tools": [TOOL]}]
    write_rows(folder / "conversations.jsonl", conversations)


def square(question: str) -> str:
    return str(int(question.removesuffix("^2")) ** 2)


def _call(expression: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call", "type": "function", "function": function}],
    }


def build(folder: Path = FOLDER, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    build_model(folder / "model", seed, build_tokenizer(), CHAT_TEMPLATE)
    build_data(folder, seed)


if __name__ == "__main__":
    build(seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
