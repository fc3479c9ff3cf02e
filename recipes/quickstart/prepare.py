"""Builds what the quickstart needs, from a seed and without a network: a tiny Qwen3, a byte-level tokenizer with a chat
template, conversations for the warm start, prompts for training and evaluation.

    python -m recipes.quickstart.prepare [SEED]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "build"
SPECIAL_TOKENS = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_CONVERSATIONS = 11520
NUM_PROMPTS = 8192
NUM_HELD_OUT = 400


def build_tokenizer() -> Any:
    """One token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def build_model(folder: Path, seed: int, tokenizer: Any, chat_template: str, max_tokens: int = 512) -> None:
    """A Qwen3 of 0.14 million random parameters, with its tokenizer, in Hugging Face layout."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def build_data(folder: Path, seed: int) -> None:
    """Numbers of five digits. Held-out ones are in neither the conversations nor the prompts."""
    numbers = [f"{number:05d}" for number in range(100_000)]
    random.Random(seed).shuffle(numbers)
    held_out, rest = numbers[:NUM_HELD_OUT], numbers[NUM_HELD_OUT:]
    prompts, taught = rest[:NUM_PROMPTS], rest[NUM_PROMPTS : NUM_PROMPTS + NUM_CONVERSATIONS]
    write_rows(folder / "held_out.jsonl", [{"prompt": number, "label": _sorted(number)} for number in held_out])
    write_rows(folder / "prompts.jsonl", [{"prompt": number, "label": _sorted(number)} for number in prompts])
    write_rows(folder / "conversations.jsonl", [{"messages": _conversation(number)} for number in taught])


def _sorted(number: str) -> str:
    return "".join(sorted(number))


def _conversation(number: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": number}, {"role": "assistant", "content": _sorted(number)}]


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build(folder: Path = FOLDER, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    build_model(folder / "model", seed, build_tokenizer(), CHAT_TEMPLATE)
    build_data(folder, seed)


if __name__ == "__main__":
    build(seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
