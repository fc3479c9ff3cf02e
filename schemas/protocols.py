"""What stages need of the things that flows hand to them. `stages.workers` has the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from schemas.types import GroupTask, Shard, StoredGroup


class Agents(Protocol):
    async def submit(self, table: str, tasks: Sequence[GroupTask]) -> None: ...

    async def collect(self, table: str) -> list[Shard]: ...

    async def cancel(self, group_ids: Sequence[str]) -> None: ...


class Engines(Protocol):
    async def pause(self, clear_cache: bool) -> None: ...

    async def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None: ...

    async def resume(self, version: int) -> None: ...


class Trainer(Protocol):
    async def train(self, step: int) -> dict[str, float]: ...

    async def weight_names(self) -> tuple[list[str], list[str], list[list[int]]]: ...

    async def send_weights(self, timeout_seconds: float) -> None: ...

    async def save(self, folder: str) -> None: ...

    async def load(self, folder: str) -> None: ...


class ConversationTrainer(Protocol):
    async def train_conversations(self, step: int) -> dict[str, float]: ...


class GroupSource(Protocol):
    """The train side of the window: finished groups in the order in which they may be trained."""

    async def take(self) -> StoredGroup | None: ...

    def release(self, group: StoredGroup) -> None: ...


class GroupSink(Protocol):
    """The rollout side of the window."""

    version: int

    @property
    def has_place(self) -> bool: ...

    async def admit(self, sequence: int) -> bool: ...

    def finish(self, group: StoredGroup) -> None: ...

    def fail(self, sequence: int) -> None: ...

    async def straggler(self) -> int | None: ...

    def end(self) -> None: ...
