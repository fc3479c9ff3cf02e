"""The public contract of user code: what a recipe's agent module imports."""

from stages.agents.chat import ChatAgent, ChatContext
from stages.agents.contract import Env, Result
from stages.agents.runners import ChatAgentRunner, StepEnvRunner

__all__ = ["ChatAgent", "ChatAgentRunner", "ChatContext", "Env", "Result", "StepEnvRunner"]
