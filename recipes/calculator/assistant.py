"""A calculator assistant built with pydantic-ai for any model. It knows nothing of training."""

from __future__ import annotations

import json

from pydantic_ai import Agent

from recipes.calculator.agent import calculate

assistant = Agent()


@assistant.tool_plain
def calculator(expression: str) -> str:
    """Squares a number.

    Args:
        expression: a number and ^2
    """
    return calculate(json.dumps({"expression": expression}))
