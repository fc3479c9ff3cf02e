"""Chat messages to token ids by the model's own template, without ever rendering what the policy said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from uuid import uuid4

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from schemas.errors import RecipeError
from stages.agents.messages import canonical_messages, canonical_tools


class ChatRenderer:
    """Renders prompts whole and later turns as deltas, so that sampled token ids stay exactly as sampled."""

    def __init__(self, model_path: str, trust_remote_code: bool = False) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_path, trust_remote_code=trust_remote_code
        )
        if not self.tokenizer.chat_template:
            raise RecipeError(f"model.path: the tokenizer of {model_path} has no chat template, which prompts need")
        # Stands for a sampled turn in a render; what follows it is the delta. Nobody can guess and say it.
        self._sentinel = f"\u2402{uuid4().hex}\u2402"
        self._prompt = lru_cache(maxsize=256)(lambda text: tuple(self.tokenize(self.render(*json.loads(text)))))

    def prompt(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation up to where the policy speaks."""
        return list(self._prompt(json.dumps([messages, list(tools)])))  # all rollouts of a group ask for the same one

    def delta(
        self,
        messages: list[dict[str, Any]],
        new: list[dict[str, Any]],
        last_token: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Token ids between the policy's last turn and its next one.

        `messages` ends before the policy's turn, `new` follows it. A leading end-of-turn token is left out when the
        policy sampled it itself (`last_token`); a turn that was cut off gets it from the template.
        """
        spoken = [*messages, {"role": "assistant", "content": self._sentinel}, *new]
        _, *after = self.render(spoken, tools).split(self._sentinel)
        if len(after) != 1:
            raise RecipeError(
                "the chat template drops, changes or repeats the assistant's text; several turns need it once, as it is"
            )
        token_ids = self.tokenize(after[0])
        return token_ids[1:] if token_ids and token_ids[0] == last_token else token_ids

    def answer(
        self, messages: list[dict[str, Any]], reply: dict[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of an assistant's reply as the policy would have to sample them, end of turn included."""
        history = self.render(messages, tools)
        whole = self.render([*messages, reply], tools, {"add_generation_prompt": False})
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
        shown, offered = canonical_messages(messages), canonical_tools(tools) or None
        return str(self.tokenizer.apply_chat_template(shown, tools=offered, **options))

    def tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
