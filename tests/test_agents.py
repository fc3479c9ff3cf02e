"""The turn loop: exact tokens over several turns, budgets, and user code that breaks the contract in every way."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError as ThreadCancelled
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.quickstart.prepare import CHAT_TEMPLATE, build_model, build_tokenizer
from schemas.errors import AgentError, MoltflowError, RecipeError, WorkerError
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Generation, GroupTask, Prompt, Status
from stages.agents import Env, Result
from stages.agents.contract import as_messages, load_agent
from stages.agents.loop import Rollout, run_env
from stages.agents.rendering import ChatRenderer

PROMPT = [{"role": "user", "content": "21"}]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_model(folder, 0, build_tokenizer(), CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def renderer(model_folder: Path) -> ChatRenderer:
    return ChatRenderer(str(model_folder))


@pytest.fixture(scope="session")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Engine:
    """Says the scripted turns one after another, the last one for ever. Token i of a turn has log-prob -(i + 1) / 8.

    A turn is text, or text with finish reason, or a whole generation; versions are those of the script's place.
    """

    def __init__(self, renderer: ChatRenderer, *turns: Any) -> None:
        self._renderer = renderer
        self._turns = turns
        self.prompts: list[list[int]] = []
        self.samplings: list[SamplingConfig] = []

    async def generate(self, token_ids: list[int], sampling: SamplingConfig) -> Generation:
        turn = self._turns[min(len(self.prompts), len(self._turns) - 1)]
        self.prompts.append(list(token_ids))
        self.samplings.append(sampling)
        if isinstance(turn, Exception):
            raise turn
        if isinstance(turn, Generation):
            return turn
        text, finish_reason = turn if isinstance(turn, tuple) else (turn, "stop")
        sampled = encode(self._renderer, text)
        logprobs = [-(i + 1) / 8 for i in range(len(sampled))]
        return Generation("r", sampled, logprobs, ((0, 0, len(sampled)),), finish_reason)


def encode(renderer: ChatRenderer, text: str) -> list[int]:
    return list(renderer.tokenizer.encode(text, add_special_tokens=False))


class Answering(Env):
    """Gives one scripted result a turn and notes what it was shown."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)
        self.states: list[dict[str, Any]] = []
        self.closed = 0

    async def step(self, state: dict[str, Any]) -> Any:
        self.states.append(state)
        return self.results.pop(0)

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def run(renderer: ChatRenderer, threads: ThreadPoolExecutor) -> Callable[..., Rollout]:
    """One rollout of an environment against scripted turns."""

    def run_one(
        env: Any,
        *turns: Any,
        sampling: SamplingConfig | None = None,
        engine: Engine | None = None,
        prompt: list[dict[str, Any]] | None = None,
        label: Any = None,
        **config: Any,
    ) -> Rollout:
        make_env = env if callable(env) else lambda: env
        engine = engine or Engine(renderer, *(turns or ("12<|end|>",)))
        task = GroupTask(0, "0000-000000-0", Prompt(0, prompt or PROMPT, label), 1, sampling or SamplingConfig(), 0)
        agent = AgentConfig(entry="x:Y", **config)
        return asyncio.run(run_env(make_env, task, 7, engine.generate, renderer, agent, threads))

    return run_one


Run = Callable[..., Rollout]

# ---- exact tokens ----


def test_a_rollout_is_the_prompt_then_sampled_and_observed_tokens_in_turn(run: Run, renderer: ChatRenderer) -> None:
    env = Answering(
        Result(observation="wrong", terminated=False),
        Result(observation=[{"role": "tool", "content": "no"}], terminated=False),
        Result(reward=1.0),
    )
    rollout = run(env, "21<|end|>", "1 2<|end|>", "12<|end|>")
    parts = [
        "<|user|>21<|end|><|assistant|>",  # prompt
        "21<|end|>",  # sampled
        "<|user|>wrong<|end|><|assistant|>",  # what the template puts in between, without a second <|end|>
        "1 2<|end|>",
        "<|user|>no<|end|><|assistant|>",
        "12<|end|>",
    ]
    assert rollout.token_ids == [token for part in parts for token in encode(renderer, part)]
    # one token a character and a tag: 5 + 3 + 8 + 4 + 5 + 3
    assert [(s["start"], s["end"], s["turn"]) for s in rollout.spans] == [(5, 8, 0), (16, 20, 1), (25, 28, 2)]
    first, second = [-1 / 8, -2 / 8, -3 / 8], [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert rollout.logprobs == [0] * 5 + first + [0] * 8 + second + [0] * 5 + first
    assert rollout.status == Status.OK and rollout.reward == 1.0


def test_every_request_is_exactly_what_was_sampled_and_observed_so_far(run: Run, renderer: ChatRenderer) -> None:
    engine = Engine(renderer, "21<|end|>", "12<|end|>")
    rollout = run(Answering(Result(observation="no", terminated=False), Result(reward=1.0)), engine=engine)
    starts = [span["start"] for span in rollout.spans]
    assert engine.prompts == [rollout.token_ids[:start] for start in starts]


def test_ids_that_no_tokenizer_would_give_stay_as_sampled(run: Run, renderer: ChatRenderer) -> None:
    # two halves of a character that is no character: decoding loses them, the ids must not
    sampled = encode(renderer, "é")[:1] + encode(renderer, "<|pad|>") + encode(renderer, "1<|end|>")
    turn = Generation("r", sampled, [-1.0] * 4, ((0, 0, 4),), "stop")
    rollout = run(Answering(Result(observation="x", terminated=False), Result(reward=0.0)), turn, "2<|end|>")
    assert rollout.token_ids[5:9] == sampled


def test_a_turn_that_a_refit_crossed_has_a_span_for_each_version(run: Run, renderer: ChatRenderer) -> None:
    sampled = encode(renderer, "12345<|end|>")
    turn = Generation("r", sampled, [-1.0] * 6, ((2, 0, 2), (3, 2, 2), (5, 2, 6)), "stop")
    assert run(Answering(Result(reward=1.0)), turn).spans == [
        {"start": 5, "end": 7, "turn": 0, "version": 2},
        {"start": 7, "end": 11, "turn": 0, "version": 5},
    ]


def test_a_turn_that_was_cut_off_gets_its_end_from_the_template(run: Run, renderer: ChatRenderer) -> None:
    env = Answering(Result(observation="go", terminated=False), Result(reward=1.0))
    rollout = run(env, ("12", "length"), "3<|end|>")
    whole = "<|user|>21<|end|><|assistant|>" + "12" + "<|end|><|user|>go<|end|><|assistant|>" + "3<|end|>"
    assert rollout.token_ids == encode(renderer, whole)
    assert [(span["start"], span["end"]) for span in rollout.spans] == [(5, 7), (13, 15)]  # the supplied end is context


def test_what_the_environment_is_shown_is_a_copy(run: Run) -> None:
    class Scribbling(Env):
        def reset(self, state: dict[str, Any]) -> None:
            state["observation"][0]["content"] = "99"
            state["label"].clear()

        def step(self, state: dict[str, Any]) -> Result:
            state["messages"][0]["content"] = "98"
            state["messages"].append({"role": "user", "content": "more"})
            return Result(reward=1.0, observation="no", terminated=len(state["messages"]) > 4)

    prompt, label = [{"role": "user", "content": "21"}], ["12"]
    rollout = run(Scribbling(), "1<|end|>", prompt=prompt, label=label)
    assert prompt == [{"role": "user", "content": "21"}] and label == ["12"]
    assert [message["content"] for message in rollout.messages] == ["21", "1", "no", "1"]


def test_an_environment_sees_the_conversation_the_action_and_the_label(run: Run) -> None:
    env = Answering(Result(observation="again", terminated=False), Result(reward=1.0))
    run(env, "21<|end|>", "12<|end|>", label={"answer": "12"})
    assert isinstance(env.states[1].pop("sampling_params"), SamplingConfig)
    assert env.states[1] == {
        "observation_text": "21\n21\nagain",
        "action_text": "12",
        "messages": [
            {"role": "user", "content": "21"},
            {"role": "assistant", "content": "21"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "12"},
        ],
        "label": {"answer": "12"},
    }


def test_reset_can_replace_the_prompt_and_gets_the_seed(run: Run, renderer: ChatRenderer) -> None:
    class Resetting(Answering):
        def reset(self, state: dict[str, Any]) -> dict[str, Any]:
            assert state == {"observation": PROMPT, "label": "x", "seed": 7}
            return {"observation": "54"}

    rollout = run(Resetting(Result(reward=1.0)), label="x")
    assert rollout.token_ids[:5] == encode(renderer, "<|user|>54<|end|><|assistant|>")


@pytest.mark.parametrize("returned", ["54", ["54"], {"obs": "54"}, ({"observation": "54"}, {})])
def test_reset_that_returns_anything_else_is_refused(run: Run, returned: Any) -> None:
    class Resetting(Answering):
        async def reset(self, state: dict[str, Any]) -> Any:
            return returned

    rollout = run(Resetting())
    assert rollout.status == Status.AGENT_ERROR
    assert rollout.error == (
        f"reset returned {type(returned).__name__}; allowed: None, or a mapping with `observation`"
    )


# ---- rewards ----


def test_rewards_of_the_steps_add_up_and_the_last_score_info_and_components_count(run: Run) -> None:
    info = {"tests": ("a", 1)}
    rollout = run(
        Answering(
            Result(reward=0.25, terminated=False, score=0.0, info={"x": 1}),
            Result(terminated=False),
            Result(reward=0.5, score=1, info=info, reward_components={"style": 1}),
        )
    )
    assert (rollout.reward, rollout.score) == (0.75, 1.0)
    assert rollout.info == {"tests": ["a", 1]} and rollout.reward_components == {"style": 1.0}


def test_without_a_score_the_reward_is_the_score(run: Run) -> None:
    rollout = run(Answering(Result(reward=0.25, terminated=False), Result(reward=0.5)))
    assert (rollout.reward, rollout.score) == (0.75, 0.75)


def test_a_rollout_without_a_reward_is_not_worth_zero(run: Run) -> None:
    rollout = run(Answering(Result()))
    assert (rollout.status, rollout.reward, rollout.score) == (Status.NO_REWARD, None, None)
    assert rollout.error == "the rollout ended and no step returned a reward"
    assert len(rollout.spans) == 1  # its tokens are kept to look at


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -1e31])
def test_a_reward_that_cannot_be_trained_is_refused(run: Run, reward: float) -> None:
    rollout = run(Answering(Result(reward=reward)))
    assert (rollout.status, rollout.reward) == (Status.AGENT_ERROR, None)
    assert rollout.error == f"the agent made the reward {reward}; allowed: numbers up to 1e+30 in size, None for none"


@pytest.mark.parametrize(
    ("reward", "trained"), [(True, 1.0), (False, 0.0), (1, 1.0), (np.float32(0.25), 0.25), (-3, -3.0)]
)
def test_a_reward_may_be_any_number(run: Run, reward: Any, trained: float) -> None:
    rollout = run(Answering(Result(reward=reward, score=reward, reward_components={"all": reward})))
    assert (rollout.reward, rollout.score, rollout.reward_components) == (trained, trained, {"all": trained})
    assert {type(rollout.reward), type(rollout.score)} == {float}


def test_what_is_trained_is_the_weighted_reward_and_not_its_components(run: Run) -> None:
    # 0.75 of a correct answer and 0.25 of one without style; the mean of the components would be 0.5
    components = {"correct": 1.0, "style": 0.0}
    rollout = run(Answering(Result(reward=0.75 * 1.0 + 0.25 * 0.0, reward_components=components)))
    assert (rollout.reward, rollout.score, rollout.reward_components) == (0.75, 0.75, components)


# ---- sampling of later turns, images ----


def test_a_result_decides_how_the_following_turns_are_sampled(run: Run, renderer: ChatRenderer) -> None:
    engine, going_on = Engine(renderer, "1<|end|>"), {"reward": 0.0, "observation": "go", "terminated": False}
    env = Answering(
        Result(**going_on, sampling_params={"temperature": 0.5}),
        Result(**going_on),
        Result(**going_on, sampling_params=SamplingConfig(max_tokens=9, stop=["x"])),
        Result(reward=1.0),
    )
    first = SamplingConfig(temperature=0.75, max_tokens=20)
    rollout = run(env, engine=engine, sampling=first)
    second = SamplingConfig(temperature=0.5, max_tokens=20)
    assert engine.samplings == [first, second, second, SamplingConfig(max_tokens=9, stop=["x"])]
    assert [state["sampling_params"] for state in env.states] == engine.samplings
    assert [turn["temperature"] for turn in rollout.turns] == [0.75, 0.5, 0.5, 1.0], "each is trained at its own"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"top_p": 0.9}, "sampling_params.top_p: found 0.9; allowed: 1, as what is sampled is trained"),
        ({"top_k": 5}, "sampling_params.top_k: found 5; allowed: -1, as what is sampled is trained"),
        ({"temperature": 0}, "sampling_params.temperature: found 0.0; allowed: 0.01 and more, as what is sampled"),
        ({"temperature": -1}, "sampling_params.temperature: found -1; allowed: Input should be greater than or equal"),
        ({"max_tokens": 0}, "sampling_params.max_tokens: found 0; allowed: Input should be greater than 0"),
        (
            {"temprature": 1},
            "sampling_params.temprature: found 1; allowed: temperature, top_p, top_k, max_tokens, stop",
        ),
        ({"stop": "x"}, "sampling_params.stop: found x; allowed: Input should be a valid list"),
        (SamplingConfig(top_k=3), "sampling_params.top_k: found 3; allowed: -1"),
        (SamplingConfig().model_copy(update={"max_tokens": "all"}), "sampling_params.max_tokens: found all; allowed:"),
        (0.5, "sampling_params: found a float; allowed: a mapping with some of temperature, top_p"),
    ],
)
@pytest.mark.parametrize("terminated", [False, True])
def test_sampling_that_cannot_be_or_cannot_be_trained_is_refused(
    run: Run, given: Any, says: str, terminated: bool
) -> None:
    rollout = run(Answering(Result(reward=1.0, observation="go", terminated=terminated, sampling_params=given)))
    assert (rollout.status, rollout.reward) == (Status.AGENT_ERROR, None)
    assert rollout.error is not None and rollout.error.startswith(says)


def test_an_evaluation_may_keep_the_sampling_that_could_not_be_trained(run: Run, renderer: ChatRenderer) -> None:
    engine, greedy = Engine(renderer, "1<|end|>"), SamplingConfig(temperature=0, top_p=0.5)
    env = Answering(
        Result(reward=0.0, observation="go", terminated=False, sampling_params={"temperature": 0.5}),
        Result(reward=0.0, observation="go", terminated=False, sampling_params=greedy),
        Result(reward=1.0),
    )
    assert run(env, engine=engine, sampling=greedy).status == Status.OK
    assert [sampling.temperature for sampling in engine.samplings] == [0, 0.5, 0]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.mark.parametrize("part", [IMAGE, {"type": "image", "image": "cat.png"}, {"type": "input_audio"}, "cat"])
@pytest.mark.parametrize("where", ["prompt", "reset", "observation"])
def test_what_is_no_text_is_refused_and_never_rendered_as_its_python_form(run: Run, where: str, part: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]

    class Showing(Env):
        def reset(self, state: dict[str, Any]) -> Any:
            return {"observation": messages} if where == "reset" else None

        def step(self, state: dict[str, Any]) -> Result:
            assert where == "observation"
            return Result(reward=1.0, observation=messages, terminated=False)

    rollout = run(Showing, prompt=messages if where == "prompt" else None)
    kind = part["type"] if isinstance(part, dict) else "str"
    assert rollout.status == Status.AGENT_ERROR
    assert rollout.error == f"the messages for the policy have a part of type {kind}; allowed: text, as the model"


def test_images_of_a_result_are_refused(run: Run) -> None:
    rollout = run(Answering(Result(reward=1.0, images=["a", "b"])))
    assert rollout.status == Status.AGENT_ERROR
    assert rollout.error == "the agent returned 2 images; allowed: none, as the model reads text only"
    assert run(Answering(Result(reward=1.0, images=[]))).status == Status.OK


# ---- budgets ----


def test_the_turn_cap_truncates(run: Run, renderer: ChatRenderer) -> None:
    results = [Result(reward=0.5, observation="go on", terminated=False) for _ in range(3)]
    rollout = run(Answering(*results), "1<|end|>", max_turns=2)
    assert (rollout.status, rollout.reward, len(rollout.turns)) == (Status.TRUNCATED, 1.0, 2)
    # nothing answers the last turn
    assert rollout.token_ids[-2:] == encode(renderer, "1<|end|>") and rollout.spans[-1]["end"] == len(rollout.token_ids)


def test_the_context_cap_truncates_before_an_observation_that_leaves_no_room(run: Run) -> None:
    # 5 prompt + 3 sampled + 4 for <|user|>go<|end|> + 1 for <|assistant|> = 13 tokens before the second turn
    env = Answering(Result(reward=1.0, observation="go", terminated=False), Result(reward=1.0))
    rollout = run(env, "12<|end|>", max_context_tokens=13)
    assert (rollout.status, len(rollout.token_ids), rollout.reward) == (Status.TRUNCATED, 8, 1.0)
    env = Answering(Result(reward=1.0, observation="go", terminated=False), Result(reward=1.0))
    rollout = run(env, "12<|end|>", ("3", "length"), max_context_tokens=14)
    assert (rollout.status, len(rollout.token_ids), rollout.reward) == (Status.TRUNCATED, 14, 2.0)


def test_a_turn_may_sample_no_more_than_the_context_has_room_for(run: Run, renderer: ChatRenderer) -> None:
    engine = Engine(renderer, "12<|end|>", "1<|end|>")
    env = Answering(Result(observation="go", terminated=False), Result(reward=1.0))
    rollout = run(env, engine=engine, sampling=SamplingConfig(max_tokens=10), max_context_tokens=16)
    assert [sampling.max_tokens for sampling in engine.samplings] == [10, 16 - 13]
    assert [turn["max_tokens"] for turn in rollout.turns] == [10, 3]


@pytest.mark.parametrize(("room", "status"), [(5, Status.PROMPT_TOO_LONG), (6, Status.TRUNCATED)])
def test_a_prompt_must_leave_room_for_a_token(run: Run, room: int, status: Status) -> None:
    rollout = run(Answering(Result(reward=1.0)), ("1", "length"), max_context_tokens=room)
    assert rollout.status == status
    if status == Status.PROMPT_TOO_LONG:
        assert rollout.error == "prompt of 5 tokens; allowed: below 5" and rollout.reward is None


def test_a_rollout_is_truncated_when_its_last_turn_was_cut_off(run: Run) -> None:
    assert run(Answering(Result(reward=1.0)), ("12", "length")).status == Status.TRUNCATED
    earlier = Answering(Result(terminated=False), Result(reward=1.0))
    assert run(earlier, ("12", "length"), "12<|end|>").status == Status.OK


def test_the_environment_can_truncate(run: Run) -> None:
    rollout = run(Answering(Result(reward=1.0, terminated=False, truncated=True)))
    assert (rollout.status, rollout.reward) == (Status.TRUNCATED, 1.0)


# ---- the engine ----


@pytest.mark.parametrize(
    ("generation", "error"),
    [
        (Generation("r", (), (), (), "abort", "the prompt is too long"), "the prompt is too long"),
        (Generation("r", [1, 2], [-1, -1], ((0, 0, 2),), "abort"), "the engine returned 2 tokens: abort"),
        (Generation("r", (), (), (), "stop"), "the engine returned 0 tokens: stop"),
        (Generation("r", [1, 2], [-1], ((0, 0, 2),), "stop"), "engine gave 2 tokens and 1 log-probs"),
        (Generation("r", [1, 2], [-1, -1], ((0, 0, 1),), "stop"), "do not cover its 2 tokens"),
        (Generation("r", [1, 2], [-1, -1], ((0, 0, 1), (1, 0, 2)), "stop"), "do not cover its 2 tokens"),
        (Generation("r", [1, 2], [-1, -1], ((0, 0, 3),), "stop"), "do not cover its 2 tokens"),
        (Generation("r", [1, 2], [-1, -1], (), "stop"), "do not cover its 2 tokens"),
    ],
)
def test_what_the_engine_got_wrong_is_not_the_agents_fault(run: Run, generation: Generation, error: str) -> None:
    env = Answering(Result(reward=1.0))
    rollout = run(env, generation)
    assert rollout.status == Status.INFRASTRUCTURE_ERROR and rollout.error is not None and error in rollout.error
    assert (rollout.spans, rollout.reward, env.closed) == ([], None, 1)


def test_a_dead_engine_is_raised_after_the_environment_was_closed(run: Run) -> None:
    env = Answering()
    with pytest.raises(WorkerError, match="engine 0 died"):
        run(env, WorkerError("engine 0 died"))
    assert env.closed == 1


# ---- user code that breaks the contract ----


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("method", ["constructor", "reset", "step"])
@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (ValueError("no such file"), "ValueError: no such file"),
        (KeyError("x"), "KeyError: 'x'"),
        (StopIteration(), ""),
        (TimeoutError("the tool is slow"), "TimeoutError: the tool is slow"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (asyncio.CancelledError(), ""),
        (ThreadCancelled(), "CancelledError: "),
        (UnreadableError(), "UnreadableError: (its message cannot be read)"),
        (OSError("bad name \udcff"), "OSError: bad name ?"),
        (ValueError("x" * 10**6), "ValueError: " + "x" * 1988),
    ],
)
def test_whatever_user_code_raises_is_the_outcome_of_its_rollout(
    run: Run, method: str, failure: BaseException, error: str, is_async: bool
) -> None:
    closed = []

    def fail() -> None:
        raise failure

    class Raising(Env):
        def __init__(self) -> None:
            if method == "constructor":
                fail()

        def close(self) -> None:
            closed.append(True)

    async def fail_async(self: Env, state: dict[str, Any]) -> None:
        fail()

    if method != "constructor":
        setattr(Raising, method, fail_async if is_async else lambda self, state: fail())
    rollout = run(Raising, timeout_seconds=20)
    assert rollout.status == Status.AGENT_ERROR and rollout.seconds < 10
    assert rollout.error is not None and rollout.error.startswith(error) and len(rollout.error) <= 2000
    rollout.error.encode()
    assert closed == ([] if method == "constructor" else [True])


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (None, "the agent returned NoneType; allowed: stages.agents.Result"),
        (1.0, "the agent returned float"),
        ((1.0, True), "the agent returned tuple"),
        ({"reward": 1.0}, "the agent returned dict"),
        (Result(reward="high"), "ValueError: could not convert string to float"),  # type: ignore[arg-type]
        (Result(reward=1.0, score=float("nan")), "the agent made the score nan"),
        (Result(observation=7, terminated=False), "the observation is a int; allowed: text, or"),  # type: ignore[arg-type]
        (Result(observation={"role": "user"}, terminated=False), "the observation is a dict"),  # type: ignore[arg-type]
        (Result(observation=["a"], terminated=False), "the observation is a list; allowed: text, or"),  # type: ignore[list-item]
        (Result(observation=[{"role": "user", "content": b"a"}], terminated=False), "TypeError: Object of type bytes"),
        (Result(reward=1.0, info={("a", 1): 2}), "TypeError: keys must be str"),
        (Result(reward=1.0, info=None), "TypeError"),  # type: ignore[arg-type]
        (Result(reward=1.0, reward_components={"style": "good"}), "ValueError"),  # type: ignore[dict-item]
    ],
)
def test_a_result_that_cannot_be_is_an_agent_error(run: Run, result: Any, error: str) -> None:
    env = Answering(result)
    rollout = run(env)
    assert rollout.status == Status.AGENT_ERROR and rollout.error is not None and rollout.error.startswith(error)
    assert (rollout.reward, rollout.score, env.closed) == (None, None, 1)
    assert rollout.messages[-1] == {"role": "assistant", "content": "12"}  # what it failed on


def test_an_environment_without_step_says_so(run: Run) -> None:
    rollout = run(Env)
    assert rollout.error == "NotImplementedError: Env must define step(state) -> Result"


def test_methods_that_return_an_awaitable_are_awaited(run: Run) -> None:
    class Decorated(Env):
        def step(self, state: dict[str, Any]) -> Any:
            async def later() -> Result:
                await asyncio.sleep(0)
                return Result(reward=1.0)

            return later()

    assert run(Decorated()).reward == 1.0


def test_a_method_may_be_any_callable_also_one_without_a_name(run: Run) -> None:
    class Judge:
        def __call__(self, state: dict[str, Any]) -> Result:
            return Result(reward=float(state["action_text"] == "12"))

    class AsyncJudge(Judge):
        async def __call__(self, state: dict[str, Any]) -> Result:  # type: ignore[override]
            return super().__call__(state)

    for judge in (Judge(), AsyncJudge(), partial(Judge.__call__, None), partial(AsyncJudge().__call__)):
        env = Env()
        env.step = judge  # type: ignore[method-assign,assignment]
        assert not hasattr(judge, "__name__") and run(lambda made=env: made).reward == 1.0


def test_plain_methods_run_in_threads_and_async_ones_on_the_loop(run: Run) -> None:
    seen = {}

    class Mixed(Env):
        def reset(self, state: dict[str, Any]) -> None:
            seen["reset"] = threading.current_thread() is threading.main_thread()

        async def step(self, state: dict[str, Any]) -> Result:
            seen["step"] = threading.current_thread() is threading.main_thread()
            return Result(reward=1.0)

    assert run(Mixed()).reward == 1.0
    assert seen == {"reset": False, "step": True}


# ---- user code that never ends ----

NEVER = {"timeout_seconds": 0.2}


def timed_out(rollout: Rollout, closed: Sequence[Any]) -> None:
    assert (rollout.status, rollout.error) == (Status.TIMEOUT, "no end within 0.2 s")
    assert rollout.reward is None and len(closed) == 1 and rollout.seconds < 5


def test_an_async_step_that_never_ends_is_cut_off(run: Run) -> None:
    closed: list[bool] = []
    cleaned: list[int] = []

    class Endless(Env):
        async def step(self, state: dict[str, Any]) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                cleaned.append(len(closed))

        async def close(self) -> None:
            closed.append(True)

    timed_out(run(Endless(), **NEVER), closed)
    assert cleaned == [0]  # by itself, before it was closed


def test_an_async_step_that_catches_its_cancellation_is_left_behind(run: Run) -> None:
    closed: list[bool] = []

    class Stubborn(Env):
        async def step(self, state: dict[str, Any]) -> Result:
            for _ in range(100):
                try:
                    await asyncio.sleep(0 if closed else 0.05)
                except asyncio.CancelledError:  # as careless retry loops do
                    continue
            return Result(reward=1.0)

        async def close(self) -> None:
            closed.append(True)

    timed_out(run(Stubborn(), **NEVER), closed)


def test_a_blocking_step_that_never_ends_is_left_behind(run: Run) -> None:
    closed: list[bool] = []
    released = threading.Event()

    class Blocking(Env):
        def step(self, state: dict[str, Any]) -> None:
            released.wait(30)

        def close(self) -> None:
            closed.append(True)
            released.set()

    timed_out(run(Blocking(), **NEVER), closed)


def test_a_conversation_that_goes_on_for_ever_ends_at_the_deadline(run: Run) -> None:
    class Talkative(Env):
        def __init__(self) -> None:
            self.closed: list[bool] = []

        async def step(self, state: dict[str, Any]) -> Result:
            await asyncio.sleep(0.01)
            return Result(reward=1.0, observation="go on", terminated=False)

        async def close(self) -> None:
            self.closed.append(True)

    env = Talkative()
    timed_out(run(env, max_turns=10**6, max_context_tokens=10**6, **NEVER), env.closed)


def test_an_engine_that_never_answers_is_cut_off_too(run: Run, renderer: ChatRenderer) -> None:
    class Silent(Engine):
        async def generate(self, token_ids: list[int], sampling: SamplingConfig) -> Generation:
            await asyncio.Event().wait()
            raise AssertionError

    env = Answering()
    rollout = run(env, engine=Silent(renderer), **NEVER)
    assert (rollout.status, env.closed) == (Status.TIMEOUT, 1)


# ---- closing ----


@pytest.mark.parametrize("failure", [ValueError("still busy"), SystemExit(1)])
def test_a_close_that_raises_does_not_change_the_outcome(run: Run, failure: BaseException) -> None:
    class Closing(Answering):
        def close(self) -> None:
            raise failure

    rollout = run(Closing(Result(reward=1.0, info={"a": 1})))
    assert (rollout.status, rollout.reward) == (Status.OK, 1.0)
    assert rollout.info == {"a": 1, "close_error": f"{type(failure).__name__}: {failure}"}


def test_a_close_that_never_ends_is_left_behind(run: Run) -> None:
    class Closing(Answering):
        async def close(self) -> None:
            await asyncio.Event().wait()

    rollout = run(Closing(Result(reward=1.0)), timeout_seconds=0.2)
    assert (rollout.status, rollout.reward) == (Status.OK, 1.0)
    assert rollout.info["close_error"].startswith("TimeoutError") and rollout.seconds < 5


@pytest.mark.parametrize("during", ["step", "generate"])
async def test_a_cancelled_rollout_closes_its_environment_once(
    renderer: ChatRenderer, threads: ThreadPoolExecutor, during: str
) -> None:
    reached = asyncio.Event()

    class Waiting(Answering):
        async def step(self, state: dict[str, Any]) -> None:
            reached.set()
            await asyncio.Event().wait()

    async def generate(token_ids: list[int], sampling: SamplingConfig) -> Generation:
        if during == "generate":
            reached.set()
            await asyncio.Event().wait()
        return Generation("r", [1], [-1.0], ((0, 0, 1),), "stop")

    env = Waiting()
    task = GroupTask(0, "g", Prompt(0, PROMPT), 1, SamplingConfig(), 0)
    rollout = asyncio.create_task(run_env(lambda: env, task, 0, generate, renderer, AgentConfig(entry="x:Y"), threads))
    await asyncio.wait_for(reached.wait(), 10)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(rollout, 10)
    assert env.closed == 1


# ---- templates ----


def with_template(model_folder: Path, template: str) -> ChatRenderer:
    renderer = ChatRenderer(str(model_folder))
    renderer.tokenizer.chat_template = template
    return renderer


ASSISTANT = "{% if m.role == 'assistant' %}<|assistant|>X{% else %}<|user|>{{ m.content }}{% endif %}<|end|>"


@pytest.mark.parametrize("said", ["", "{{ m.content | upper }}", "{{ m.content }} or {{ m.content }}"])
def test_a_template_that_alters_what_the_assistant_said_is_refused_for_several_turns(
    model_folder: Path, said: str
) -> None:
    template = "{% for m in messages %}" + ASSISTANT.replace("X", said) + "{% endfor %}<|assistant|>"
    with pytest.raises(RecipeError, match="drops, changes or repeats the assistant's text"):
        with_template(model_folder, template).delta(PROMPT, PROMPT, 0)


def test_a_template_that_drops_earlier_thoughts_does_not_touch_what_was_sampled(model_folder: Path) -> None:
    said = "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
    template = "{% for m in messages %}" + ASSISTANT.replace("X", said) + "{% endfor %}<|assistant|>"
    renderer = with_template(model_folder, template)
    messages = [*PROMPT, {"role": "assistant", "content": "<think>a</think>1"}, {"role": "user", "content": "no"}]
    end = renderer.tokenizer.eos_token_id
    assert renderer.delta(messages, PROMPT, end) == encode(renderer, "<|user|>21<|end|><|assistant|>")


def test_an_observation_that_repeats_the_conversation_is_not_mistaken_for_the_policy(renderer: ChatRenderer) -> None:
    said = "\u2402moltflow-action\u2402"
    echo = [{"role": "user", "content": f"you said {said}"}]
    assert renderer.delta(PROMPT, echo, renderer.tokenizer.eos_token_id) == encode(
        renderer, f"<|user|>you said {said}<|end|><|assistant|>"
    )


def test_what_a_template_puts_before_the_end_of_a_turn_is_left_out_when_the_end_was_sampled(model_folder: Path) -> None:
    said = "{{ m.content }}{{ '\n' }}"  # between the text and <|end|>
    template = "{% for m in messages %}" + ASSISTANT.replace("X", said) + "{{ '\n' }}{% endfor %}<|assistant|>"
    renderer, new = with_template(model_folder, template), [{"role": "user", "content": "no\n<|end|>"}]
    end, letter = renderer.tokenizer.eos_token_id, encode(renderer, "\n")[0]
    after = "\n<|user|>no\n<|end|><|end|>\n<|assistant|>"
    assert renderer.delta(PROMPT, new, end) == encode(renderer, after)
    for cut_off in (letter, encode(renderer, "1")[0]):
        assert renderer.delta(PROMPT, new, cut_off) == encode(renderer, "\n<|end|>" + after)


def test_a_call_of_a_data_row_is_rendered_as_that_of_a_request(model_folder: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    template = "{% for m in messages %}<|user|>{{ m.content }}" + calls + "<|end|>{% endfor %}<|assistant|>"
    renderer, shown = with_template(model_folder, template), "<|user|>21<|end|><|user|>"
    for content in ("", None):
        for given, written in (('{"a":  1}', '{"a": 1}'), ({"a": 1}, '{"a": 1}'), ("", "{}"), ('{"a"', '"{\\"a\\""')):
            call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": given}}
            said = {"role": "assistant", "content": content, "tool_calls": [call]}
            expected = encode(renderer, f"{shown}add{written}<|end|><|assistant|>")
            assert renderer.prompt([*PROMPT, said]) == expected
            before = encode(
                renderer, f"<|end|>{shown.removeprefix('<|user|>21<|end|>')}add{written}<|end|><|assistant|>"
            )
            assert renderer.delta(PROMPT, [said], 0) == before


def test_a_token_that_only_looks_like_the_end_of_a_turn_is_not_dropped_twice(renderer: ChatRenderer) -> None:
    end = renderer.tokenizer.eos_token_id
    assert renderer.delta(PROMPT, PROMPT, end)[0] != end
    assert renderer.delta(PROMPT, PROMPT, end + 1)[0] == end


def test_a_tokenizer_without_a_template_is_refused(model_folder: Path, tmp_path: Path) -> None:
    for file in model_folder.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(RecipeError, match="has no chat template, which prompts need"):
        ChatRenderer(str(tmp_path))


# ---- naming the class ----


def test_an_agent_is_named_by_module_or_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from stages.agents import Env\nclass Mine(Env):\n    def step(self, state): pass\nclass Other: pass\n"
    )
    assert load_agent("recipes.quickstart.agent:SortDigits").__name__ == "SortDigits"
    assert load_agent(f"{file}:Mine").__name__ == "Mine"
    for entry, error in {
        f"{file}:Nine": r"has no 'Nine'; its agents are \['Mine'\]",
        f"{file}:Other": "allowed: a subclass of stages.agents' Env or ChatAgent",
        f"{tmp_path}/no.py:Mine": "no file",
        "no.such.module:Mine": "cannot import 'no.such.module'",
        "Mine": "allowed: module:Class or path/to/file.py:Class",
    }.items():
        with pytest.raises(RecipeError, match=error):
            load_agent(entry)


def test_user_code_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, stages.agents; print(sorted({'torch', 'transformers', 'ray', 'lance'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_messages_are_copied_and_must_be_plain_json() -> None:
    given = [{"role": "user", "content": ["a"]}]
    copied = as_messages(given)
    copied[0]["content"].append("b")
    assert given == [{"role": "user", "content": ["a"]}]
    assert json.dumps(as_messages("x")) == '[{"role": "user", "content": "x"}]'
    assert issubclass(AgentError, MoltflowError)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def broken(:", "SyntaxError"),
        ("import a_module_that_is_not_there", "ModuleNotFoundError"),
        ("import sys; sys.exit(7)", "SystemExit: 7"),
        ("from stages.agents import Env\nclass Agent(Env): pass", "defines no step"),
        ("Agent = 3", "allowed: a subclass of stages.agents' Env or ChatAgent"),
    ],
)
def test_an_agent_file_that_cannot_be_used_is_refused_by_its_key(tmp_path: Path, source: str, says: str) -> None:
    path = tmp_path / "agent.py"
    path.write_text(source)
    with pytest.raises(RecipeError, match=rf"^agent\.entry: .*{says}"):
        load_agent(f"{path}:Agent")
