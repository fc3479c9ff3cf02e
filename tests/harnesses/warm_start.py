"""A tiny model that works in the harnesses: trained in seconds to say what a scripted engine said in them.

A harness's prompts are long and nearly the same each time. The tokenizer is trained on them, without splitting at
words, so that 77 kB become 1,200 tokens. The model sees no further back than `RECEPTIVE_FIELD` tokens and positions are
relative, so training on the ends of prompts is exact, and quick.
"""

from __future__ import annotations

import json
import random
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.calculator.prepare import CHAT_TEMPLATE, SPECIAL_TOKENS
from recipes.quickstart.prepare import build_model
from stages.agents.rendering import ChatRenderer
from tests.chats import renderer as toy_renderer
from tests.harnesses.clients import LOG, NUM_LOGGED, Harness
from tests.harnesses.scripted import COMMAND, MARKER, Engine, play
from tests.real.warm_start import Row, train

LONG_COMMAND = f"sort {LOG}"
"""The model sees nothing but the end of a long result, so the name of the harness stands there. Not `cat`, which Claude
Code takes for the reading of a file, and shows the file again behind a summary."""
NUM_PRINTED = NUM_LOGGED * 11
"""Tokens that it prints at least: in each line a name and ten digits."""
FOLDER = "/tmp/folder-of-the-run"
VOCABULARY_SIZE = 24_576
MAX_TOKENS = 16_384
WINDOW = 64
RECEPTIVE_FIELD = 2 * (WINDOW - 1) + 1
"""Of two layers, each of which sees the window that ends with a token."""
NUM_VARIANTS = 8
MAX_NOISE = 0.3
NUM_STEPS = 250
BATCH_SIZE = 16


def compact_at(num_prompt_tokens: int) -> int:
    """A limit that a conversation passes once the engine has counted what the long command printed.

    It does not pass it before: harnesses guess the size of a new result, as a token for 4 bytes, at half of what it is.
    """
    return num_prompt_tokens + NUM_PRINTED * 3 // 4


@dataclass(frozen=True)
class Conversation:
    """What a scripted engine took part in, `FOLDER` standing for the one that the harness ran in."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]

    @property
    def turns(self) -> list[int]:
        """Where in `messages` the engine speaks."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]


async def record(harness: Harness, folder: Path) -> list[Conversation]:
    """The conversations of a run, and of one that compacts the main one, which comes first."""
    commands = (LONG_COMMAND, COMMAND)
    recorded: list[Conversation] = []
    limit = None
    for name in ("whole", "compacted"):
        place = folder / name
        place.mkdir(parents=True)
        recorder, status, printed = await play(harness, Engine(harness.shell_tools, commands=commands), place, limit)
        assert status == 0, printed
        segments = sorted(recorder.session.segments(), key=lambda segment: not segment.tools)
        for segment in segments:
            messages = json.loads(json.dumps(segment.messages).replace(str(place), FOLDER))
            recorded.append(Conversation(messages, segment.tools))
        limit = limit or compact_at(segments[0].spans[0]["start"])
    return recorded


def warm_model(folder: Path, recorded: list[Conversation], seed: int = 0) -> None:
    """Write a model in Hugging Face layout to `folder` that says what was said in the recorded conversations."""
    from transformers import AutoConfig

    build_model(folder, seed, _tokenizer(recorded), CHAT_TEMPLATE, MAX_TOKENS)
    config = AutoConfig.from_pretrained(folder)
    config.use_sliding_window, config.sliding_window = True, WINDOW
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    config.save_pretrained(folder)

    draw, renderer = random.Random(seed), ChatRenderer(str(folder))
    rows = [row for conversation in recorded * NUM_VARIANTS for row in _rows(conversation, renderer, draw)]
    special = set(renderer.tokenizer.all_special_ids)

    def noisy(row: Row) -> Row:
        """Dates and ids are others in each run, so what a turn depends on must be more than a token here or there."""
        prompt, answer = row
        rate = draw.uniform(0, MAX_NOISE)
        return [
            token if token in special or draw.random() > rate else draw.randrange(VOCABULARY_SIZE) for token in prompt
        ], answer

    train(folder, lambda: [noisy(row) for row in draw.choices(rows, k=BATCH_SIZE)], NUM_STEPS, seed)


def _tokenizer(recorded: list[Conversation]) -> Any:
    """Bytes, and merges as long as what the recorded conversations repeat. Digits are tokens of their own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[0-9]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    template = toy_renderer(CHAT_TEMPLATE)
    texts = [template.render(conversation.messages, conversation.tools) for conversation in recorded]
    ends = "|".join(re.escape(token) for token in SPECIAL_TOKENS)
    tokenizer.train_from_iterator([part for text in texts for part in re.split(ends, text)], trainer)
    return tokenizer


def _rows(conversation: Conversation, renderer: ChatRenderer, draw: random.Random) -> list[Row]:
    """The turns of a conversation, with another marker, another log and in another folder each time."""
    one, other = draw.randint(2, 9), draw.randint(2, 9)
    folder = "/tmp/" + "".join(draw.choices(string.ascii_lowercase + string.digits + "-_/", k=draw.randint(10, 60)))
    text = json.dumps(conversation.messages).replace(FOLDER, folder)
    text = re.sub(r"\b\d{10}\b", lambda _: str(draw.randrange(10**9, 10**10)), text)
    text = text.replace(COMMAND, f"echo marker-$(({one} * {other}))").replace(MARKER, f"marker-{one * other}")
    messages, tools = json.loads(text), conversation.tools
    return [
        (
            renderer.prompt(messages[:turn], tools)[-RECEPTIVE_FIELD:],
            renderer.answer(messages[:turn], messages[turn], tools),
        )
        for turn in conversation.turns
    ]
