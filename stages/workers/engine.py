"""EngineWorker: one vLLM engine in a Ray actor. Token ids in, token ids with log-probs and policy versions out.

Requests are handed over in bulk and collected in bulk, so that the number of calls between processes depends on how
busy the engine is and not on the number of rollouts:

    client                        engine
    submit([requests]) ------->   one vLLM request each
    collect() <----------------   everything finished since the last collect, at least one
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from schemas.errors import RecipeError, WorkerError
from schemas.recipe import RLRecipe
from schemas.types import GenerateRequest, Generation
from stages.workers.device import Device
from stages.workers.parsing import TurnParser


def engine_arguments(recipe: RLRecipe, device: Device, index: int, run_attempt: int) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs: the device's, then the recipe's, then `engine.args`."""
    arguments = device.engine_args | {
        "model": recipe.model.path,
        "dtype": recipe.model.dtype,
        "trust_remote_code": recipe.model.trust_remote_code,
        "max_model_len": recipe.agent.max_context_tokens,
        "max_num_seqs": recipe.engine.max_num_seqs,
        "seed": random.Random(f"{recipe.run.seed}-{index}-{run_attempt}").getrandbits(31),
        "logprobs_mode": "processed_logprobs",  # what was sampled from: temperature included
        "worker_extension_cls": "stages.workers.engine_extension.EngineExtension",
        "weight_transfer_config": {"backend": device.weight_transfer},
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if recipe.engine.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = recipe.engine.kv_cache_bytes
    return arguments | recipe.engine.args


class EngineWorker:
    def __init__(self, recipe: RLRecipe, device: Device, index: int, run_attempt: int) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(recipe, device, index, run_attempt)
        try:
            engine_args = AsyncEngineArgs(**arguments)
        except TypeError as unknown:
            raise RecipeError(f"engine.args: {unknown}; allowed: the arguments of vLLM's AsyncEngineArgs") from None
        self._llm = AsyncLLM.from_engine_args(engine_args)
        self._parser = TurnParser(self._llm.get_tokenizer(), recipe.engine.tool_parser, recipe.engine.reasoning_parser)
        self._finished: dict[str, asyncio.Queue[Generation]] = defaultdict(asyncio.Queue)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def ready(self) -> int:
        """Number of processes of this engine that receive weights. The weights it loaded are version 0."""
        await self._llm.update_weight_version("0")
        return int(self._llm.vllm_config.parallel_config.world_size_across_dp)

    # Generation

    async def submit(self, client: str, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            task = asyncio.create_task(self._generate(client, request))
            self._running |= dict.fromkeys(request.request_ids, task)

    async def collect(self, client: str) -> list[Generation]:
        """Everything that finished for `client` since the last call, at least one."""
        queue = self._finished[client]
        generations = [await queue.get()]
        while not queue.empty():
            generations.append(queue.get_nowait())
        if self._llm.errored:
            raise WorkerError(f"the engine core died: {generations[0].error}")
        return generations

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests and free their slots; a request ends when none of its samples is wanted any more."""
        tasks = {task for request_id in request_ids if (task := self._running.pop(request_id, None))}
        for task in tasks - set(self._running.values()):
            task.cancel()  # vLLM aborts a request whose consumer is cancelled

    async def _generate(self, client: str, request: GenerateRequest) -> None:
        from vllm import TokensPrompt

        try:
            final = None
            prompt = TokensPrompt(prompt_token_ids=[int(token) for token in request.token_ids])
            async for output in self._llm.generate(prompt, _sampling_params(request), request.request_ids[0]):
                final = output
            if final is None or len(final.outputs) != len(request.request_ids):
                raise WorkerError(f"request {request.request_ids[0]} ended without its samples")
            for request_id, completion in zip(request.request_ids, final.outputs, strict=True):
                self._finished[client].put_nowait(self._generation(request, request_id, completion))
        except asyncio.CancelledError:
            pass  # aborted by its client, which no longer waits for it
        except Exception as failure:  # reported to the client, which fails that one rollout
            error = f"{type(failure).__name__}: {failure}"
            for request_id in request.request_ids:
                self._finished[client].put_nowait(Generation(request_id, (), (), (), "abort", error))
        finally:
            for request_id in request.request_ids:
                self._running.pop(request_id, None)

    def _generation(self, request: GenerateRequest, request_id: str, completion: Any) -> Generation:
        token_ids = completion.token_ids
        logprobs = [at[token].logprob for at, token in zip(completion.logprobs or [], token_ids, strict=True)]
        stop = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        parsed = None
        if request.parse is not None:
            ended_itself = completion.finish_reason == "stop" and stop is None
            options = replace(request.parse, stop=stop)
            parsed = self._parser.parse(request.token_ids, token_ids, ended_itself, options)
        return Generation(
            request_id=request_id,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            versions=tuple((int(v.version), int(v.start), int(v.end)) for v in completion.weight_versions or []),
            finish_reason=completion.finish_reason or "abort",
            stop=stop,
            parsed=parsed,
        )

    # Weights: vLLM's own life cycle, driven by the refit stage

    async def connect(self, address: str, port: int, rank_offset: int, world_size: int, timeout_seconds: float) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
        }
        if self._llm.vllm_config.weight_transfer_config.backend == "gloo":
            info["timeout_seconds"] = timeout_seconds
        else:
            info["packed"] = True
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def pause(self, clear_cache: bool) -> None:
        """Freeze requests in flight; they go on after `resume`. Then open the weight update."""
        await self._llm.pause_generation(mode="keep", clear_cache=clear_cache)
        await self._llm.start_weight_update()

    async def receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def resume(self, version: int) -> None:
        """Close the weight update, label it, and let requests go on."""
        await self._llm.finish_weight_update(str(version))
        await self._llm.resume_generation()

    async def stop(self) -> None:
        self._llm.shutdown()


def _sampling_params(request: GenerateRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        n=len(request.request_ids),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop or None,
        logprobs=0,  # of the sampled token alone
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
