"""The public contract of user code: what a recipe's agent module imports."""

from stages.agents.contract import Env, Result

__all__ = ["Env", "Result"]
