"""What the chat server costs: tokens a second through it and straight to the engine, and its own time over many turns.

    make bench BENCH=capture

64 sessions at once have four turns each over the OpenAI SDK; the same token requests (prompts and observations of the
same tokens, each continuing its own samples) go to the same engine directly, in turn with them. The engine core has one
CPU core, everything else another. Every turn samples exactly as many tokens as it is allowed to. All sessions share one
HTTP client, since each new one of the SDK reads the TLS certificates for 20 ms, server or not. The last line is one
JSON object: `server_over_direct` is the median over rounds, `last_turn_over_first` the server's own time in turn 32
over that in turn 1 with an engine that answers at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.quickstart.prepare import CHAT_TEMPLATE, build_model, build_tokenizer
from schemas.chat import ParsedTurn
from schemas.recipe import AgentConfig, RLRecipe, SamplingConfig
from schemas.types import Generation, ParseOptions
from stages.agents.rendering import ChatRenderer
from stages.capture.marks import Marks
from stages.capture.recorder import Recorder
from stages.capture.server import CaptureServer
from stages.workers.agent import EngineClient
from stages.workers.cluster import open_cluster
from storage.runs import RunFolder

NUM_SESSIONS, NUM_TURNS, NUM_ROUNDS, NUM_LONG_TURNS = 64, 4, 5, 32
LETTERS = "abcdefghijklmnopqrstuvwxyz "
OBSERVATION = "what the tool said about it"
CONFIG = AgentConfig(entry="a:B", max_context_tokens=32_768, max_turns=1000)


def build_endless_model(folder: Path) -> None:
    """A tiny model that says letters and never ends a turn: one feature is always on, and the head reads it."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

    build_model(folder, 0, build_tokenizer(), CHAT_TEMPLATE, max_tokens=2048)
    letters = AutoTokenizer.from_pretrained(folder).encode(LETTERS, add_special_tokens=False)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = -1.0
        model.lm_head.weight[letters, 0] = 1.0
    model.save_pretrained(folder)


def make_recipe(folder: Path) -> RLRecipe:
    return RLRecipe.model_validate(
        {
            "kind": "rl",
            "run": {"name": "bench", "root": str(folder / "runs")},
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "prompts": {"path": str(folder / "prompts.jsonl")},
            "agent": {"entry": "tests.real.environments:Parity", "max_context_tokens": 2048},
            "engine": {"kv_cache_bytes": 256 << 20, "max_num_seqs": NUM_SESSIONS},
            "max_steps": 1,
            "device": "cpu",
        }
    )


# ---- against the real engine ----


class Sessions:
    """Rounds of all sessions, through the server or direct. `requests` are the prompts of the last round through it."""

    def __init__(self, server: CaptureServer, client: EngineClient, renderer: ChatRenderer) -> None:
        self._server = server
        self._client = client
        self._renderer = renderer
        self._marks = Marks(renderer)
        self._http: httpx.AsyncClient | None = openai.DefaultAsyncHttpxClient()
        self._requests: list[list[list[int]]] = []

    async def through_server(self, num_sampled: int, seed: int) -> float:
        """Tokens a second over the SDK."""
        self._requests = [[] for _ in range(NUM_SESSIONS)]
        start = time.perf_counter()
        await asyncio.gather(*(self._chat(index, num_sampled, seed) for index in range(NUM_SESSIONS)))
        return NUM_SESSIONS * NUM_TURNS * num_sampled / (time.perf_counter() - start)

    async def _chat(self, index: int, num_sampled: int, seed: int) -> None:
        async def sample(token_ids: list[int], sampling: SamplingConfig, parse: ParseOptions) -> Generation:
            self._requests[index].append(token_ids)
            return await self._client.generate(token_ids, sampling, parse)

        sampling = SamplingConfig(max_tokens=num_sampled)
        recorder = Recorder(sample, self._renderer, self._marks, CONFIG, sampling)
        async with self._server.open(recorder) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=recorder.key, http_client=self._http)
            messages: list[Any] = [{"role": "user", "content": f"question {seed} of session {index}"}]
            for _ in range(NUM_TURNS):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                said = answer.choices[0].message
                messages = [*messages, said, {"role": "user", "content": OBSERVATION}]
        (segment,) = recorder.session.segments()
        lengths = [span["end"] - span["start"] for span in segment.spans]
        assert lengths == [num_sampled] * NUM_TURNS, f"the engine sampled {lengths}"

    async def direct(self, num_sampled: int) -> float:
        """Tokens a second without the server."""
        start = time.perf_counter()
        await asyncio.gather(*(self._sample(prompts, num_sampled) for prompts in self._requests))
        return NUM_SESSIONS * NUM_TURNS * num_sampled / (time.perf_counter() - start)

    async def _sample(self, prompts: Sequence[list[int]], num_sampled: int) -> None:
        sampling = SamplingConfig(max_tokens=num_sampled)
        token_ids: list[int] = []
        for prompt in prompts:
            token_ids = token_ids + prompt[len(token_ids) :]
            generation = await self._client.generate(token_ids, sampling)
            token_ids = token_ids + [int(token) for token in generation.token_ids]


async def compare(sessions: Sessions, num_sampled: int) -> dict[str, float]:
    await sessions.through_server(num_sampled, seed=0)
    await sessions.direct(num_sampled)
    pairs = []
    for seed in range(1, NUM_ROUNDS + 1):
        pairs.append((await sessions.through_server(num_sampled, seed), await sessions.direct(num_sampled)))
        print(f"{num_sampled} tokens a turn: {pairs[-1][0]:.0f} tokens/s through the server, {pairs[-1][1]:.0f} direct")
    ratios = sorted(server / direct for server, direct in pairs)
    return {
        "server_tokens_per_second": round(statistics.median(server for server, _ in pairs)),
        "direct_tokens_per_second": round(statistics.median(direct for _, direct in pairs)),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(ratios[0], 3),
        "ratio_max": round(ratios[-1], 3),
    }


def pin(engine_pid: int) -> None:
    """The engine core on one CPU core, this process and all others that it started on another."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    others = [psutil.Process(), *psutil.Process().children(recursive=True)]
    cores = psutil.Process(engine_pid).children(recursive=True)
    assert cores, "the engine core is a child of the engine actor"
    for process in others:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {first if process in cores else second})


async def engine_figures(folder: Path) -> dict[str, dict[str, float]]:
    recipe = make_recipe(folder)
    run = RunFolder.start(recipe)
    async with open_cluster(recipe, run.uri, run.attempt) as cluster:
        pin(await cluster.engines.actors[0].__ray_call__.remote(lambda _: os.getpid()))
        client = EngineClient("bench", cluster.engines.actors[0], merge=False)
        server = CaptureServer()
        await server.start()
        sessions = Sessions(server, client, ChatRenderer(recipe.model.path))
        figures = {f"turns_of_{num}": await compare(sessions, num) for num in (256, 16)}
        await server.close()
    run.close()
    return figures


# ---- the server's own time ----


async def own_seconds(folder: Path, num_sampled: int = 256, num_sessions: int = 20) -> list[float]:
    """Median seconds of each turn of a long conversation, its body written beforehand, the engine's answer at once."""
    renderer = ChatRenderer(str(folder / "model"))
    text = (LETTERS * num_sampled)[:num_sampled]
    sampled = np.asarray(renderer.tokenize(text), dtype=np.int32)
    logprobs = np.full(num_sampled, -1.0, dtype=np.float32)
    answer = Generation("", sampled, logprobs, ((0, 0, num_sampled),), "length", parsed=ParsedTurn(text))

    async def sample(token_ids: list[int], sampling: SamplingConfig, parse: ParseOptions) -> Generation:
        return answer

    server, marks = CaptureServer(), Marks(renderer)
    await server.start()
    seconds: list[list[float]] = [[] for _ in range(NUM_LONG_TURNS)]
    for index in range(num_sessions + 1):
        await _long_chat(server, Recorder(sample, renderer, marks, CONFIG, SamplingConfig()), text, seconds)
        if index == 0:
            seconds = [[] for _ in range(NUM_LONG_TURNS)]
    await server.close()
    return [statistics.median(turn) for turn in seconds]


async def _long_chat(server: CaptureServer, recorder: Recorder, text: str, seconds: list[list[float]]) -> None:
    messages = [{"role": "user", "content": OBSERVATION}]
    headers = {"authorization": f"Bearer {recorder.key}"}
    async with server.open(recorder) as url, httpx.AsyncClient(headers=headers) as client:
        await client.get(f"{url}/v1/models")  # the connection is there
        for turn in seconds:
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            start = time.perf_counter()
            answer = await client.post(f"{url}/v1/chat/completions", content=body)
            turn.append(time.perf_counter() - start)
            assert answer.status_code == 200
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": OBSERVATION}]
    assert len(recorder.session.segments()) == 1


def run(coroutine: Any) -> Any:
    """On the kind of loop that agent hosts have."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def main() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this benchmark needs two CPU cores")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_endless_model(folder / "model")
        (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
        own = run(own_seconds(folder))
        print("the server's own milliseconds by turn:", " ".join(f"{turn * 1000:.2f}" for turn in own))
        figures = run(engine_figures(folder))
    result = {
        "bench": "capture",
        "server_over_direct": figures["turns_of_256"]["ratio"],
        "last_turn_over_first": round(own[-1] / own[0], 3),
        **figures,
        "first_turn_ms": round(own[0] * 1000, 3),
        "last_turn_ms": round(own[-1] * 1000, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
