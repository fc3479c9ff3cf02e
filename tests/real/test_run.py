"""Whole runs through the command, as a user starts them: bound on the lag, token identity, kill and resume."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from recipes.quickstart.prepare import build
from schemas.loading import dump_recipe
from schemas.recipe import RLRecipe
from stages.agents.rendering import ChatRenderer
from stages.workers.cluster import open_trainer
from storage.batches import Batches, Outcomes
from storage.ledger import read_ledger
from storage.metrics import read_metrics
from storage.runs import RunFolder
from storage.scores import Scores
from storage.traces import Traces
from tests.real.conftest import moltflow

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_left")]


def _write(recipe: RLRecipe) -> tuple[str, RunFolder]:
    path = Path(recipe.run.root) / f"{recipe.run.name}.yaml"
    path.write_text(dump_recipe(recipe))
    return str(path), RunFolder(f"{recipe.run.root}/{recipe.run.name}")


def _finish(recipe_path: str) -> dict[str, Any]:
    process = moltflow("train", recipe_path)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-4000:]
    return dict(json.loads(out.splitlines()[-1]))


def _ledger_adds_up(run: RunFolder) -> dict[str, Any]:
    ledger = read_ledger(Traces(run.uri), Batches(run.uri), Outcomes(run.uri))
    summary = ledger.summary()
    ended = len(ledger.trained) + len(ledger.dropped) + len(ledger.failed)
    assert ended + len(ledger.pending) == ledger.dispatched
    assert ledger.finished <= ledger.pending
    return summary


@pytest.fixture(scope="module")
def delayed_run(make_recipe: Callable[..., RLRecipe]) -> tuple[RLRecipe, RunFolder, dict[str, Any]]:
    """A finished run of 8 batches with random delays."""
    agent = {
        "entry": "tests.real.environments:Parity",
        "args": {"delay_seconds": 0.3},
        "max_context_tokens": 64,
    }
    recipe = make_recipe(
        "delays",
        agent=agent,
        rollout={
            "batch_groups": 7,
            "group_size": 3,
            "sampling": {"max_tokens": 8},
        },
        window={"max_policy_lag": 1, "groups_in_flight": 20},
        max_steps=8,
    )
    path, run = _write(recipe)
    return recipe, run, _finish(path)


def test_a_run_with_random_delays_keeps_the_bound_and_every_trained_token_is_in_the_store(
    delayed_run: tuple[RLRecipe, RunFolder, dict[str, Any]],
) -> None:
    recipe, run, result = delayed_run
    assert result["step"] == 8
    assert sum(result["shares"].values()) == pytest.approx(1)

    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(8))
    assert all("mismatch/abs_mean" in line and "correction/masked_token_share" in line for line in lines)
    assert sum(line["train/updated"] for line in lines) >= 4
    assert _ledger_adds_up(run)["trained"] == 8 * 7

    renderer = ChatRenderer(recipe.model.path)
    table = Traces(run.uri).table
    crossed = 0
    for line in lines:
        record = Batches(run.uri).read(line["step"])
        rows = table.take([row["trace_row"] for row in record], table.schema.names)
        lags = [_lags(row, line["step"]) for row in rows]
        assert min(lag for of_row in lags for lag in of_row) >= 0
        within = [lag for of_row in lags for lag in of_row if lag <= 1]
        assert line["train/trained_tokens"] == len(within), "exactly the sampled tokens within the bound are trained"
        assert line["train/lag_max"] == max(within, default=0)
        crossed += sum(len(set(of_row)) > 1 for of_row in lags)
        for row in rows:
            _is_token_exact(row, renderer)
    assert crossed > 0, "some rollouts went on under new weights"
    assert sum(line["train/stale_token_share"] for line in lines) > 0, "some tokens were past the bound"


def _lags(row: dict[str, Any], step: int) -> list[int]:
    """Refits between sampling and training, by sampled token."""
    return [step - span["version"] for span in row["spans"] for _ in range(span["start"], span["end"])]


def _is_token_exact(row: dict[str, Any], renderer: ChatRenderer) -> None:
    """ids = prompt + sampled + delta + sampled, spans exactly the sampled tokens, log-probs on spans alone."""
    ids, logprobs, spans = row["token_ids"], row["logprobs"], row["spans"]
    messages = json.loads(row["messages"])
    prompt = renderer.prompt(messages[:1])
    assert ids[: len(prompt)] == prompt
    assert spans[0]["start"] == len(prompt)
    first_turn = [span for span in spans if span["turn"] == 0]
    second_turn = [span for span in spans if span["turn"] == 1]
    end = first_turn[-1]["end"]
    if second_turn:
        delta = renderer.delta(messages[:1], messages[2:3], ids[end - 1])
        assert ids[end : end + len(delta)] == delta
        assert second_turn[0]["start"] == end + len(delta)
    for turn in (first_turn, second_turn):
        assert all(left["end"] == right["start"] for left, right in pairwise(turn))
    assert spans[-1]["end"] == len(ids) == len(logprobs)
    sampled = {position for span in spans for position in range(span["start"], span["end"])}
    assert row["num_sampled"] == len(sampled)
    assert all((logprobs[position] < 0) == (position in sampled) for position in range(len(ids)))


@pytest.mark.parametrize(("stale", "lag"), [("wait", 1), ("drop", 0)])
def test_a_run_that_waits_or_drops_keeps_the_bound_and_counts_every_group(
    make_recipe: Callable[..., RLRecipe], stale: str, lag: int
) -> None:
    agent = {"entry": "tests.real.environments:Parity", "args": {"delay_seconds": 0.3}, "max_context_tokens": 64}
    places = 10 if stale == "drop" else "auto"
    recipe = make_recipe(
        f"stale-{stale}",
        agent=agent,
        rollout={"batch_groups": 5, "group_size": 2, "sampling": {"max_tokens": 8}},
        window={"max_policy_lag": lag, "stale": stale, "straggler_wait_seconds": 0.1, "groups_in_flight": places},
        filtering={"zero_variance": "drop"},
        max_steps=5,
    )
    path, run = _write(recipe)
    assert _finish(path)["step"] == 5
    lines = read_metrics(run)
    ledger = _ledger_adds_up(run)
    assert ledger["trained"] == 25
    assert ledger["dropped"].get("zero_variance", 0) > 0
    if stale == "drop":
        assert all(line["train/stale_token_share"] == 0 for line in lines)
        assert ledger["dropped"]["stale"] > 0
    else:
        assert ledger["dropped"]["straggler"] > 0
    for line in lines:
        table = Traces(run.uri).table
        rows = table.take([row["trace_row"] for row in Batches(run.uri).read(line["step"])], table.schema.names)
        lags = [at for row in rows for at in _lags(row, line["step"])]
        assert line["train/trained_tokens"] == sum(at <= lag for at in lags), "exactly the tokens within the bound"
        assert stale == "wait" or max(lags) <= lag, "a group with a token past the bound is dropped"
        scores: dict[int, set[float]] = {}
        for row in rows:
            scores.setdefault(row["sequence"], set()).add(row["score"])
        assert len(scores) == 5 and all(len(of_group) == 2 for of_group in scores.values()), "no constant group"


async def test_two_ranks_train_the_same_stored_batches_to_the_same_losses_as_one(
    delayed_run: tuple[RLRecipe, RunFolder, dict[str, Any]],
) -> None:
    recipe, run, _ = delayed_run
    losses = {}
    for num_ranks in (1, 2):
        # small microbatches, so that the ranks have several and not equally many
        trainer_config = recipe.trainer.model_copy(update={"num_ranks": num_ranks, "max_tokens_per_microbatch": 100})
        async with open_trainer(recipe.model_copy(update={"trainer": trainer_config}), run.uri) as trainer:
            losses[num_ranks] = [(await trainer.train(step))["train/loss"] for step in range(5)]
    assert losses[1] == pytest.approx(losses[2], abs=1e-5)
    live = [line["train/loss"] for line in read_metrics(run)[:5]]
    assert losses[1] == pytest.approx(live, abs=1e-5), "training from the store is what the live run did"
    assert any(abs(loss) > 1e-3 for loss in live)


def test_a_distillation_brings_the_policy_closer_to_its_teacher(
    make_recipe: Callable[..., RLRecipe], tmp_path: Path
) -> None:
    """Through the flow: the reference scores every row before the batch is recorded; several steps train a batch."""
    build(tmp_path / "teacher", seed=1)
    recipe = make_recipe(
        "distilled",
        reference={"path": str(tmp_path / "teacher" / "model")},
        advantage={"type": "on_policy_distill"},
        loss={"type": "ppo", "minibatches": 2},
        kl={"kind": "k3"},
        trainer={"optimizer": {"type": "adamw", "lr": 3e-3}},
        max_steps=30,
    )
    path, run = _write(recipe)
    _finish(path)
    lines = read_metrics(run)
    distances = [line["kl/mean"] for line in lines]
    assert sum(distances[-3:]) < 0.75 * sum(distances[:3]), distances
    assert all(line["train/updates"] == 2 for line in lines)
    traces = Traces(run.uri)
    for step in (0, 29):
        rows = [row["trace_row"] for row in Batches(run.uri).read(step)]
        stored = traces.table.take(rows, ["num_sampled"])
        scores = Scores(run.uri).read(step, rows)
        assert [len(logprobs) for logprobs in scores] == [row["num_sampled"] for row in stored]
        assert all(logprob < 0 for logprobs in scores for logprob in logprobs)


@pytest.mark.chaos
@pytest.mark.timeout(0)
def test_a_run_that_is_stopped_and_killed_goes_on_as_if_nothing_had_happened(
    make_recipe: Callable[..., RLRecipe], runs: int
) -> None:
    """SIGTERM, then SIGKILL at a random moment, then to the end. On policy and in float32, so that engine and trainer
    must agree about every token after any refit; rollouts share requests, and the temperature is not 1.

    Long form: `.venv/bin/pytest -m chaos --runs 40`.
    """
    for index in range(runs):
        recipe = make_recipe(
            f"killed-{index}",
            agent={"entry": "tests.real.environments:Parity", "max_context_tokens": 64, "max_turns": 1},
            rollout={"batch_groups": 8, "group_size": 4, "sampling": {"max_tokens": 8, "temperature": 0.7}},
            window={"max_policy_lag": 0},
            correction={"level": "off"},
            checkpoint={"every": 3},
            max_steps=9,
        )
        path, run = _write(recipe)
        choose = random.Random(index)
        stopped = moltflow("train", path)
        _wait_for_step(run, choose.randrange(1, 3))
        stopped.terminate()
        _, err = stopped.communicate(timeout=60)
        assert stopped.returncode == 130, err[-2000:]
        killed = moltflow("train", path)
        _wait_for_step(run, choose.randrange(5, 8))
        time.sleep(choose.random())
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        assert _finish(path)["step"] == 9
        _is_one_history(run)


@pytest.mark.parametrize("moment", ["while it starts", "while it trains"])
def test_ctrl_c_in_a_terminal_ends_a_run_in_order(make_recipe: Callable[..., RLRecipe], moment: str) -> None:
    """The terminal sends SIGINT to the whole process group: the driver, and whatever it keeps in its group."""
    path, run = _write(make_recipe(f"interrupted-{moment.replace(' ', '-')}", max_steps=200))
    process = moltflow("train", path, start_new_session=True, preexec_fn=_unblock_interrupts)
    if moment == "while it trains":
        _wait_for_step(run, 1)
    else:
        _wait_for(lambda: run.has("traces.lance"))
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err[-2000:]
    assert "Traceback" not in err
    assert "moltflow: killed" not in err, "every process ended by itself"


def _unblock_interrupts() -> None:
    """A background job of a shell, such as a test-suite, hands on that it ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_one_history(run: RunFolder) -> None:
    """Every batch was trained once in the history of the weights, and the replayed ones came out bit for bit."""
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(9))
    assert len(run.read_json("provenance.json")["attempts"]) == 3
    assert _ledger_adds_up(run)["trained"] == 9 * 8
    both = [line for line in lines if "replayed/train/loss" in line and "train/loss" in line]
    assert len(both) >= 2, "batches after the last checkpoint are trained again"
    for line in both:
        for name in ("train/loss", "train/grad_norm", "mismatch/abs_max"):
            assert line[name] == line[f"replayed/{name}"], (line["step"], name)
    assert sum(line.get("train/updated", 0) for line in lines) >= 5
    for line in lines:
        prefix = "" if "train/loss" in line else "replayed/"
        assert line[f"{prefix}mismatch/abs_max"] < 1e-4, line
        assert line[f"{prefix}train/lag_max"] == 0


def _wait_for_step(run: RunFolder, step: int) -> None:
    """Until batch `step` is trained."""
    _wait_for(lambda: any(line["step"] >= step and "train/loss" in line for line in read_metrics(run)))


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.1)
