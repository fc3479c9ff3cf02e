"""Chat messages to token ids by the model's own template, without ever rendering what the policy said."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any
from uuid import uuid4

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from schemas.errors import RecipeError
from stages.agents.messages import canonical_messages, canonical_tools, readable_calls

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where templates look for the reasoning of an assistant's message; ours have the first."""


class ChatRenderer:
    """Renders prompts whole and later turns as deltas, so that sampled token ids stay exactly as sampled."""

    def __init__(self, model_path: str, trust_remote_code: bool = False) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_path, trust_remote_code=trust_remote_code
        )
        if not self.tokenizer.chat_template:
            raise RecipeError(f"model.path: the tokenizer of {model_path} has no chat template, which prompts need")
        template = str(self.tokenizer.chat_template)
        mentioned = (key for key in REASONING_KEYS if re.search(rf"\.{key}\b|['\"]{key}['\"]", template))
        self._reasoning_key = next(mentioned, REASONING_KEYS[0])
        # Stands for a sampled turn in a render; what follows it is the delta. Nobody can guess and say it.
        self._sentinel = f"\u2402{uuid4().hex}\u2402"
        self._spoken = {"role": "assistant", "content": self._sentinel}
        self._prompt = lru_cache(maxsize=256)(lambda text: tuple(self.tokenize(self.render(*json.loads(text)))))

    def prompt(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation up to where the policy speaks."""
        messages = readable_calls(messages)
        return list(self._prompt(json.dumps([messages, list(tools)])))  # all rollouts of a group ask for the same one

    def delta(
        self,
        messages: list[dict[str, Any]],
        new: list[dict[str, Any]],
        last_token: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Token ids between the policy's last turn and its next one.

        `messages` ends before the policy's turn, `new` follows it. What the template puts up to the end of the turn is
        left out when the policy sampled that end itself (`last_token`); a turn that was cut off gets it.
        """
        spoken = readable_calls([*messages, self._spoken, *new])
        _, *after = self.render(spoken, tools).split(self._sentinel)
        if len(after) != 1:
            raise RecipeError(
                "the chat template drops, changes or repeats the assistant's text; several turns need it once, as it is"
            )
        return self.tokenize(after[0][self._sampled_end(after[0], last_token) :])

    def _sampled_end(self, after: str, last_token: int) -> int:
        """Up to where the text behind a turn is an end that the policy sampled. Looked for in what the template puts
        behind any turn, since later text may hold anything."""
        if last_token not in (self.tokenizer.eos_token_id, *self.tokenizer.all_special_ids):
            return 0
        end = str(self.tokenizer.decode([last_token]))
        for closing in (self._closing, end):
            if end in closing and after.startswith(found := closing[: closing.index(end) + len(end)]):
                return len(found)
        return 0

    @cached_property
    def _closing(self) -> str:
        """What the template puts behind a turn that comes last."""
        try:
            text = self.render([{"role": "user", "content": "x"}, self._spoken], (), {"add_generation_prompt": False})
        except Exception:  # templates raise what they like
            return ""
        return text.partition(self._sentinel)[2]

    def answer(
        self, messages: list[dict[str, Any]], reply: dict[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of an assistant's reply as the policy would have to sample them, end of turn included."""
        history = self.render(readable_calls(messages), tools)
        whole = self.render(readable_calls([*messages, reply]), tools, {"add_generation_prompt": False})
        if not whole.startswith(history):
            raise RecipeError("the chat template renders the prompt differently once it is answered")
        token_ids = self.tokenize(whole[len(history) :])
        ends = [index for index, token in enumerate(token_ids) if token == self.tokenizer.eos_token_id]
        if not ends:
            raise RecipeError(f"the chat template ends no turn with the end token {self.tokenizer.eos_token!r}")
        return token_ids[: ends[-1] + 1]

    def text(self, token_ids: list[int]) -> str:
        """What the policy said, special tokens removed."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation up to where the policy speaks. Templates raise what they like."""
        options = {"tokenize": False, "add_generation_prompt": True, **(template_args or {})}
        shown, offered = [self._renamed(m) for m in canonical_messages(messages)], canonical_tools(tools) or None
        return str(self.tokenizer.apply_chat_template(shown, tools=offered, **options))

    def _renamed(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its reasoning where this template looks for it."""
        given = next((key for key in REASONING_KEYS if key in message), None)
        if given in (None, self._reasoning_key):
            return message
        return {self._reasoning_key if name == given else name: value for name, value in message.items()}

    def tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
