"""Whole runs through the command, as a user starts them: bound on the lag, token identity, kill and resume."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from schemas.loading import dump_recipe
from schemas.recipe import RLRecipe
from stages.agents.rendering import ChatRenderer
from stages.workers.cluster import open_trainer
from storage.batches import Batches, Outcomes
from storage.ledger import read_ledger
from storage.metrics import read_metrics
from storage.runs import RunFolder
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
        },  # 21 rows: two ranks can't halve them
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
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert max(line["train/lag_max"] for line in lines) <= 1
    assert all("mismatch/abs_mean" in line and "correction/masked_token_share" in line for line in lines)
    assert sum(line["train/updated"] for line in lines) >= 4
    assert _ledger_adds_up(run)["trained"] == 8 * 7

    renderer = ChatRenderer(recipe.model.path)
    versions = set()
    for step in Batches(run.uri).steps():
        record = Batches(run.uri).read(step)
        table = Traces(run.uri).table
        rows = table.take([row["trace_row"] for row in record], table.schema.names)
        for row in rows:
            versions |= {span["version"] for span in row["spans"]}
            assert all(span["version"] <= step for span in row["spans"])
            _is_token_exact(row, renderer)
    assert len(versions) >= 6


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


async def test_two_ranks_train_the_same_stored_batches_to_the_same_losses_as_one(
    delayed_run: tuple[RLRecipe, RunFolder, dict[str, Any]],
) -> None:
    recipe, run, _ = delayed_run
    losses = {}
    for num_ranks in (1, 2):
        trainer_config = recipe.trainer.model_copy(update={"num_ranks": num_ranks})
        async with open_trainer(recipe.model_copy(update={"trainer": trainer_config}), run.uri) as trainer:
            losses[num_ranks] = [(await trainer.train(step))["train/loss"] for step in range(5)]
    assert losses[1] == pytest.approx(losses[2], abs=1e-5)
    live = [line["train/loss"] for line in read_metrics(run)[:5]]
    assert losses[1] == live, "training from the store is what the live run did, bit for bit"
    assert any(abs(loss) > 1e-3 for loss in live)


def test_a_killed_run_resumes_from_its_checkpoint_and_engine_and_trainer_agree_after_refits(
    make_recipe: Callable[..., RLRecipe],
) -> None:
    """On policy, in float32: whatever the engine sampled, the trainer computes the same log-probs, after any refit."""
    recipe = make_recipe(
        "killed", window={"max_policy_lag": 0}, correction={"level": "off"}, checkpoint={"every": 3}, max_steps=7
    )
    path, run = _write(recipe)
    first = moltflow("train", path, start_new_session=True)
    _wait_for_step(run, 5)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    before = {line["step"]: line for line in read_metrics(run)}

    result = _finish(path)
    assert result["step"] == 7
    assert run.read_json("provenance.json")["attempts"][1]
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert {line["run_attempt"] for line in lines} == {0, 1}
    assert _ledger_adds_up(run)["trained"] == 7 * 8
    assert len(before) >= 5, "batches 4 and 5 were trained after the checkpoint, so the resume trained them again"
    assert sum(line["train/updated"] for line in lines) >= 4
    for line in lines:
        assert line["mismatch/abs_max"] < 1e-4, line
        assert line["train/lag_max"] == 0


def _wait_for_step(run: RunFolder, step: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if len(read_metrics(run)) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"the run did not reach step {step}")
