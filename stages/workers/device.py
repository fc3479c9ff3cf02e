"""What CPU and GPU runs do differently: one object decides it, so that no other code asks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.errors import RecipeError

CODE_ROOT = Path(__file__).resolve().parents[2]

COMMON_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": os.pathsep.join([str(CODE_ROOT), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


@dataclass(frozen=True)
class Device:
    """`process_group` and `weight_transfer` name the collective backends; `env` is set in every worker process;
    `engine_args` go to vLLM; actors ask Ray for `num_cpus` and `num_gpus` each."""

    kind: str
    process_group: str
    weight_transfer: str
    num_cpus: float
    num_gpus: float
    env: dict[str, str] = field(default_factory=dict)
    engine_args: dict[str, Any] = field(default_factory=dict)


CPU = Device(
    kind="cpu",
    process_group="gloo",
    weight_transfer="gloo",
    num_cpus=0,
    num_gpus=0,
    env=COMMON_ENV
    | {
        "OMP_NUM_THREADS": "1",  # two processes share few cores; more threads only wait for each other
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    },
    engine_args={
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": 1 << 30,
    },
)
CUDA = Device(
    kind="cuda",
    process_group="nccl",
    weight_transfer="nccl",
    num_cpus=1,
    num_gpus=1,
    env=COMMON_ENV,
)


def select_device(kind: str) -> Device:
    """The device of a recipe's `device` value. `auto` counts GPUs without initialising CUDA in this process."""
    has_gpu = os.path.exists("/dev/nvidia0") and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if kind == "cuda" and not has_gpu:
        raise RecipeError("device: found cuda, but this machine shows no NVIDIA GPU; allowed here: auto, cpu")
    return CUDA if kind == "cuda" or (kind == "auto" and has_gpu) else CPU
