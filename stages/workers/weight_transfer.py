"""How trained weights leave the trainer: one broadcast from its rank 0 to every engine process.

On GPUs this is vLLM's own NCCL backend; on CPUs the same life cycle runs over gloo. `engine_extension.py` is the
receiving end.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import ProcessGroupGloo


class GlooGroup:
    """A gloo group beside the default one. Rank 0 is the sender."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout_seconds: float) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self._store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
        self._group = ProcessGroupGloo(PrefixStore("refit", self._store), rank, world_size, timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()


class GlooSender:
    """Trainer rank 0's end on CPU."""

    def __init__(self, address: str, port: int, world_size: int, timeout_seconds: float) -> None:
        self._group = GlooGroup(address, port, 0, world_size, timeout_seconds)

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self._group.broadcast(tensor.contiguous())


class NcclSender:
    """Trainer rank 0's end on GPUs: the producer of vLLM's packed NCCL broadcast."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self._group = trainer_init(
            NCCLTrainerInitInfo(rank=0, master_address=address, master_port=port, world_size=world_size)
        )

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(weights), group=self._group, src=0, post_iter_func=lambda pair: pair[1]
        )
