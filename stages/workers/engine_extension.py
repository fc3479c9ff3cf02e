"""Runs inside vLLM's engine processes: receives weights over gloo, and ends the process when its actor is gone.

vLLM imports this module because `EngineExtension` is its worker extension class; the import registers the backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from stages.workers.guard import die_with_parent
from stages.workers.weight_transfer import GlooGroup


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_seconds: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives the sender's tensors in order and loads them through vLLM's layer-wise reload."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_rank * parallel.world_size + parallel.rank + init_info.rank_offset
        self.group = GlooGroup(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout_seconds
        )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: Any) -> None:
        # The base method synchronises an accelerator, which a CPU engine does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self.group is None:
            raise RuntimeError("refit: this engine was not connected to the trainer before its first weight update")
        self.model.load_weights(self._received(self.group, update_info))

    @staticmethod
    def _received(group: GlooGroup, info: GlooUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast(tensor)
            yield name, tensor

    def finish_weight_update(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        # The reload leaves a tied head's packed copy as it was, without an error.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self.group = None


class EngineExtension:
    """vLLM imports this class in every engine process: that registers the backend and ties the process to its actor."""


WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
die_with_parent()
