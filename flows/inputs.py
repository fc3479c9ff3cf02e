"""What a recipe names beside itself. Read by every flow first, so that a wrong name costs a second, not a start-up."""

from __future__ import annotations

from typing import NamedTuple

from schemas.recipe import RLRecipe, SFTRecipe
from schemas.types import Prompt
from stages.agents.contract import check_arguments, load_agent
from stages.prompts import read_prompts
from storage.jsonl import column, read_jsonl
from storage.runs import check_model


class Inputs(NamedTuple):
    prompts: list[Prompt]
    held_out: list[Prompt]


def read_inputs(recipe: RLRecipe | SFTRecipe) -> Inputs:
    """The prompts of an RL recipe. Raises RecipeError for a model, agent or data file that is missing or wrong.

    Conversations are only looked at here: the training ranks read them for themselves.
    """
    check_model(recipe.model.path)
    if isinstance(recipe, SFTRecipe):
        column(recipe.data.path, read_jsonl(recipe.data.path), recipe.data.messages)
        return Inputs([], [])
    check_arguments(recipe.agent.entry, load_agent(recipe.agent.entry), recipe.agent.args)
    config = recipe.evaluate
    held_out = read_prompts(recipe.prompts, config.path)[: config.num_prompts] if config else []
    return Inputs(read_prompts(recipe.prompts), held_out)
