"""Runners name the class of their agent. An entry may be one, for modules that export an `AgentRunner`:

class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(MathEnv)
"""

from __future__ import annotations

from typing import Any


class StepEnvRunner:
    """Names an `Env`."""

    def __init__(self, agent: type[Any]) -> None:
        self.agent = agent


class ChatAgentRunner(StepEnvRunner):
    """Names a `ChatAgent`."""
