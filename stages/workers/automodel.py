"""Building a policy with NeMo AutoModel and FSDP2, on GPUs and, through one import hook, on CPUs."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch

from schemas.errors import RecipeError
from schemas.recipe import ModelConfig
from stages.workers.device import Device


@dataclass
class Sharded:
    """A model sharded over the training ranks, and the mesh that says how."""

    model: torch.nn.Module
    setup: Any


def build_policy(config: ModelConfig, device: Device) -> Sharded:
    """Load `config.path` with float32 master weights, sharded by FSDP2 over all ranks of the default process group."""
    if device.kind == "cpu":
        _use_cpu_as_current_device()
    _shard_over_one_rank_too(when=config.dtype != "float32")
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from torch.distributed.fsdp import MixedPrecisionPolicy

    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    setup = DistributedSetup.build(
        strategy=FSDP2Config(
            mp_policy=precision,
            defer_fsdp_grad_sync=False,
            activation_checkpointing=config.activation_checkpointing,
        ),
        parallelism_sizes=ParallelismSizes(),
        activation_checkpointing=config.activation_checkpointing,
    )
    model = NeMoAutoModelForCausalLM.from_pretrained(
        config.path,
        torch_dtype=torch.float32,
        attn_implementation=config.attention,
        use_liger_kernel=False,
        trust_remote_code=config.trust_remote_code,
        distributed_setup=setup,
    )
    if getattr(model, "state_dict_adapter", None) is not None:
        raise RecipeError(
            f"model.path: {config.path} keeps its weights under other names than its checkpoint, which refits cannot "
            "translate yet; allowed: dense models such as Qwen3"
        )
    model.train()
    _switch_off_dropout(model)
    return Sharded(model, setup)


def _shard_over_one_rank_too(when: bool) -> None:
    """FSDP is what casts weights to the compute precision, and AutoModel leaves it out when there is one rank."""
    from nemo_automodel.components.distributed import fsdp2

    fsdp2.fsdp2_sharding_enabled = lambda mesh: when or mesh.size() > 1


def _switch_off_dropout(model: torch.nn.Module) -> None:
    """The engine samples without dropout, so the trainer's log-probs must be without it too."""
    for owner in (model.config, *model.modules()):
        for name in [name for name in vars(owner) if name.endswith("dropout") and isinstance(vars(owner)[name], float)]:
            setattr(owner, name, 0.0)
        if isinstance(owner, torch.nn.Dropout):
            owner.p = 0.0


def clip_gradients(sharded: Sharded, max_norm: float, num_ranks: int) -> float:
    """Scale gradients to a global norm of at most `max_norm`; returns the norm before."""
    from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

    norm = scale_grads_and_clip_grad_norm(
        max_norm,
        [sharded.model],
        pp_enabled=False,
        foreach=False,
        device_mesh=sharded.setup.mesh_context.device_mesh,
        moe_mesh=sharded.setup.mesh_context.moe_mesh,
        num_label_tokens=None,
        dp_group_size=num_ranks,
    )
    return float(norm)


class _CpuTorch(types.ModuleType):
    """`torch` as AutoModel sees it on a machine without CUDA: its current CUDA device is the CPU."""

    class _Cuda:
        @staticmethod
        def current_device() -> torch.device:
            return torch.device("cpu")

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.cuda, name)

    class _DeviceType(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, torch.device)

        def __call__(cls, *arguments: Any, **options: Any) -> torch.device:
            if arguments and isinstance(arguments[0], torch.device):
                return arguments[0]
            if arguments and isinstance(arguments[0], str) and arguments[0].startswith("cuda"):
                return torch.device("cpu")
            return torch.device(*arguments, **options)

    cuda = _Cuda()
    device = _DeviceType("device", (), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _CpuFinder(importlib.abc.MetaPathFinder):
    """Gives the AutoModel modules that hard-code `torch.cuda.current_device()` the view above as their `torch`."""

    def __init__(self) -> None:
        self._torch = _CpuTorch("torch")

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("nemo_automodel."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: types.ModuleType) -> None:
            execute(module)
            if vars(module).get("torch") is torch and _names_current_device(module):
                vars(module)["torch"] = self._torch

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _names_current_device(module: types.ModuleType) -> bool:
    with open(str(module.__file__), encoding="utf-8") as source:
        return "torch.cuda.current_device()" in source.read()


def _use_cpu_as_current_device() -> None:
    if not any(isinstance(finder, _CpuFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CpuFinder())
