"""The quickstart's environment: sort the digits of a number."""

from __future__ import annotations

from typing import Any

from stages.agents import Env, Result


class SortDigits(Env):
    """One turn; reward 1 for exactly the sorted digits, else 0."""

    async def step(self, state: dict[str, Any]) -> Result:
        return Result(reward=float(state["action_text"] == state["label"]))
