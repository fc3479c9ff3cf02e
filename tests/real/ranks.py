"""Runs a function in the processes of training ranks, without Ray."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stages.workers.device import CPU


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> None:
    """`function(*arguments)` in `num_ranks` processes, whose environment says how `torch.distributed` brings them
    together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (num_ranks, port, function, arguments), nprocs=num_ranks)


def _rank(rank: int, num_ranks: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= CPU.env
    torch.set_num_threads(1)
    function(*arguments)
    dist.destroy_process_group()
