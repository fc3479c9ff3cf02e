"""The errors that moltflow raises on purpose, as one small tree. All are picklable: Ray sends them between processes.

MoltflowError
├── RecipeError      the recipe is wrong; raised before any worker starts
├── StoreError       a run folder, table or checkpoint is not what it should be
├── AgentError       user code broke the agent contract (a rollout fails, the run goes on)
├── SandboxError     this machine does not isolate model-written code, which was not run (a rollout fails)
├── WorkerError      an engine, agent host or trainer rank died, hung or refused (the run stops)
├── TrainingDiverged a gradient was not finite; the weights are those before the step (the run stops)
└── RolloutsFailed   so many groups failed that going on would be pointless (the run stops)
"""

from __future__ import annotations


class MoltflowError(Exception):
    """Root of all errors raised on purpose. The message says where, what was found, what is allowed and what to do."""


class RecipeError(MoltflowError):
    pass


class StoreError(MoltflowError):
    pass


class AgentError(MoltflowError):
    pass


class SandboxError(MoltflowError):
    pass


class WorkerError(MoltflowError):
    pass


class TrainingDiverged(MoltflowError):
    pass


class RolloutsFailed(MoltflowError):
    pass
