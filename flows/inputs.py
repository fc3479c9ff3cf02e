"""What a recipe names beside itself. Read by every flow first, so that a wrong name costs a second, not a start-up."""

from __future__ import annotations

from typing import NamedTuple

from schemas.errors import RecipeError
from schemas.recipe import RLRecipe, SFTRecipe
from schemas.types import Prompt
from stages.agents.contract import Env, check_arguments, load_agent
from stages.agents.messages import unreadable
from stages.prompts import read_prompts
from storage.jsonl import column, read_jsonl
from storage.runs import check_model


class Inputs(NamedTuple):
    prompts: list[Prompt]
    held_out: list[Prompt]


_checked: dict[str, Inputs] = {}


def check_inputs(recipe: RLRecipe | SFTRecipe) -> None:
    """`read_inputs` ahead of a flow in the same process, which then takes what was read: agents' files run once."""
    _checked[recipe.model_dump_json()] = _read(recipe)


def read_inputs(recipe: RLRecipe | SFTRecipe) -> Inputs:
    """The prompts of an RL recipe. Raises RecipeError for a model, agent or data file that is missing or wrong.

    Conversations are only looked at here: the training ranks read them for themselves.
    """
    return _checked.pop(recipe.model_dump_json(), None) or _read(recipe)


def _read(recipe: RLRecipe | SFTRecipe) -> Inputs:
    check_model(recipe.model.path)
    if isinstance(recipe, SFTRecipe):
        column(recipe.data.path, read_jsonl(recipe.data.path), recipe.data.messages)
        return Inputs([], [])
    if recipe.reference is not None:
        check_model(recipe.reference.path, "reference.path")
    agent, config = load_agent(recipe.agent.entry), recipe.evaluate
    check_arguments(recipe.agent.entry, agent, recipe.agent.args)
    held_out = read_prompts(recipe.prompts, config.path)[: config.num_prompts] if config else []
    inputs = Inputs(read_prompts(recipe.prompts), held_out)
    if issubclass(agent, Env):  # other agents may leave parts of a row out of what they ask
        _check_text(recipe.prompts.path, inputs.prompts)
        _check_text(config.path if config else "", held_out)
    return inputs


def _check_text(uri: str, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        if (kind := unreadable(prompt.messages)) is not None:
            found = f"{uri}, row {prompt.index + 1}: the prompt has a part of type {kind}"
            raise RecipeError(f"{found}; allowed: text, as the model reads nothing else")
