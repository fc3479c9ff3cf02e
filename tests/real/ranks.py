"""Runs a function on training ranks without Ray: processes with gloo between them, each with AutoModel and FSDP2."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> None:
    """`function(*arguments)` in `num_ranks` processes, whose default process group has all of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (num_ranks, port, function, arguments), nprocs=num_ranks)


def _rank(rank: int, num_ranks: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0", "TORCHDYNAMO_DISABLE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120))
    function(*arguments)
    dist.destroy_process_group()
