"""What a run keeps: tables, traces, batches, outcomes, the ledger over them, checkpoints, run folders, metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.arrow import OUTCOMES, SCHEMA_VERSION, TRACES
from schemas.errors import RecipeError, StoreError
from schemas.recipe import RLRecipe
from schemas.types import Batch, Outcome, Shard, Status, TrainableSegment
from stages.checkpoint import checkpoint, load_checkpoint, restore
from stages.train_step import train_step
from storage.batches import Batches, Outcomes
from storage.checkpoints import MARKER, Checkpoints, CheckpointState
from storage.ledger import read_ledger
from storage.metrics import append_metrics, read_metrics
from storage.runs import RunFolder, check_model, find_runs, write_atomically
from storage.tables import Table
from storage.traces import Traces
from tests import builders
from tests.builders import trace_row

ROOT = Path(__file__).parent.parent


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path)


def store(uri: str, *sequences: int, rollouts: int = 2) -> list[int]:
    """Commits groups one by one; their row ids in order."""
    traces = Traces(uri)
    groups = [
        stored
        for sequence in sequences
        for stored in traces.commit([traces.write([trace_row(sequence, rollout) for rollout in range(rollouts)])])
    ]
    return [segment.row for group in groups for segment in group.segments]


def batch(step: int, *sequences: int) -> Batch:
    segments = [TrainableSegment(s, f"0000-{s:06d}-0", 0, 0, row=s, num_tokens=4, advantage=0.5) for s in sequences]
    return Batch(step, tuple(segments))


def record(batches: Batches, step: int, *sequences: int) -> None:
    batches.record(batch(step, *sequences), [(0, 0, 0)] * len(sequences), num_ranks=1)


# ---- tables ----


def test_a_table_is_created_with_its_schema_and_opened_again(uri: str) -> None:
    Table(f"{uri}/a.lance", OUTCOMES)
    opened = Table(f"{uri}/a.lance", OUTCOMES).read()
    assert opened.num_rows == 0 and opened.schema.names == [*OUTCOMES.names, "_rowid"]


def test_a_table_of_another_version_or_kind_is_refused(uri: str) -> None:
    Table(f"{uri}/a.lance", OUTCOMES.with_metadata({"moltflow.table": "outcomes", "moltflow.version": "99"}))
    with pytest.raises(
        StoreError,
        match=rf"found a table of schema outcomes 99; .* reads and writes outcomes {SCHEMA_VERSION}; use the",
    ):
        Table(f"{uri}/a.lance", OUTCOMES)
    Table(f"{uri}/b.lance", OUTCOMES)
    with pytest.raises(
        StoreError, match=rf"found a table of schema outcomes {SCHEMA_VERSION}; .* traces {SCHEMA_VERSION}"
    ):
        Table(f"{uri}/b.lance", TRACES)
    foreign = pa.schema([pa.field("x", pa.int64())], metadata={"by": "someone else"})
    Table(f"{uri}/c.lance", foreign)
    with pytest.raises(StoreError, match="found a table of schema unknown unknown"):
        Table(f"{uri}/c.lance", OUTCOMES)


def test_what_is_no_table_is_refused_and_not_overwritten(uri: str) -> None:
    Path(uri, "file.lance").write_text("x")
    with pytest.raises(StoreError, match="not a readable Lance table"):
        Table(f"{uri}/file.lance", OUTCOMES)
    Table(f"{uri}/broken.lance", OUTCOMES)
    (manifest,) = Path(uri, "broken.lance", "_versions").glob("*.manifest")
    manifest.write_bytes(b"junk")
    with pytest.raises(StoreError, match="not a readable Lance table"):
        Table(f"{uri}/broken.lance", OUTCOMES)


def test_a_creation_that_was_interrupted_is_done_again(uri: str) -> None:
    Path(uri, "a.lance", "data").mkdir(parents=True)
    Path(uri, "a.lance", "data", "x.lance").write_text("half")
    assert Table(f"{uri}/a.lance", OUTCOMES).read().num_rows == 0


def test_a_filter_that_cannot_be_read_is_a_clear_error(uri: str) -> None:
    store(uri, 0)
    with pytest.raises(StoreError, match=r"traces.lance: cannot be read where rewards = 1: .*No field named rewards"):
        Traces(uri).table.read(where="rewards = 1")


def test_a_data_file_that_is_gone_is_a_clear_error(uri: str) -> None:
    store(uri, 0)
    (file,) = Path(uri, "traces.lance", "data").iterdir()
    file.unlink()
    with pytest.raises(StoreError, match=r"traces.lance: cannot be read: .*Not found"):
        Traces(uri).groups()


def test_rows_that_break_the_schema_are_not_written(uri: str) -> None:
    traces = Traces(uri)
    with pytest.raises(OSError, match="'status' is declared as non-nullable"):
        traces.write([trace_row(0) | {"status": None}])
    assert traces.commit([]) == [] and Traces(uri).groups() == []


# ---- traces ----


def test_fragments_of_another_process_appear_when_they_are_committed_here(uri: str) -> None:
    traces = Traces(uri)
    code = (
        "import json, sys; from storage.traces import Traces; from tests.builders import trace_row\n"
        "shard = Traces(sys.argv[1]).write([trace_row(s, r) for s in (3, 1) for r in range(2)])\n"
        "print(json.dumps([shard.fragments, shard.group_ids]))"
    )
    command = [sys.executable, "-c", code, uri]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    fragments, group_ids = json.loads(done.stdout)
    assert group_ids == ["0000-000003-0", "0000-000001-0"]
    assert Traces(uri).groups() == []
    groups = traces.commit([Shard(tuple(fragments), tuple(group_ids))])
    assert [(g.sequence, len(g.segments)) for g in groups] == [(1, 2), (3, 2)]  # in dispatch order
    assert Traces(uri).groups() == groups


def test_a_commit_returns_the_groups_of_its_shards_and_no_others(uri: str) -> None:
    traces = Traces(uri)
    store(uri, 0, 1)
    traces.table.refresh()
    shards = [traces.write([trace_row(sequence)]) for sequence in (7, 5)]
    assert [group.sequence for group in traces.commit(shards)] == [5, 7]


def test_a_stored_group_has_the_light_columns_of_its_segments_in_order(uri: str) -> None:
    rows = [
        trace_row(4, 1, reward=0.0, version=3),
        trace_row(4, 0, segment=1, reward=1.0),
        trace_row(4, 0, segment=0, reward=1.0),
        trace_row(4, 2, reward=None, status="timeout", error="no end within 5 s"),
    ]
    traces = Traces(uri)
    (group,) = traces.commit([traces.write(rows)])
    assert [(s.rollout, s.segment, s.reward, s.oldest_version) for s in group.segments] == [
        (0, 0, 1.0, 0),
        (0, 1, 1.0, 0),
        (1, 0, 0.0, 3),
        (2, 0, None, 0),
    ]
    assert group.segments[3].status is Status.TIMEOUT and group.segments[3].error == "no end within 5 s"
    assert group.rewards() == {0: 1.0, 1: 0.0} and group.num_failed == 1


def test_tokens_come_back_as_they_were_in_the_order_asked_for(uri: str) -> None:
    rows = store(uri, 0, 1, 2)
    taken = Traces(uri).tokens([rows[5], rows[0], rows[3], rows[0]])
    assert [row["token_ids"] for row in taken] == [[1, 2, 31, 40], [1, 2, 30, 40], [1, 2, 31, 40], [1, 2, 30, 40]]
    assert taken[0]["logprobs"] == [0.0, 0.0, -0.25, -0.5]
    assert taken[0]["spans"] == [{"start": 2, "end": 4, "turn": 0, "version": 0}]
    assert Traces(uri).tokens([]) == []


def test_a_row_that_is_not_there_is_refused(uri: str) -> None:
    rows = store(uri, 0)
    with pytest.raises(StoreError, match=r"traces.lance: rows \[99\] are not in version 2 of the table"):
        Traces(uri).tokens([rows[0], 99])


def test_row_ids_stay_the_same_when_the_table_is_compacted(uri: str) -> None:
    rows = store(uri, *range(12))
    reader = Traces(uri)
    before = reader.tokens(rows)
    groups = reader.groups()
    writer = Traces(uri)
    pending = writer.write([trace_row(12)])  # written before, committed after
    writer.table.compact()
    assert len(list(Path(uri, "traces.lance", "data").iterdir())) > 12  # 13 old files and the merged one
    assert reader.tokens(rows) == before
    assert Traces(uri).groups() == groups
    (late,) = writer.commit([pending])
    assert late.segments[0].row not in rows
    assert Traces(uri).tokens([late.segments[0].row, rows[0]])[1] == before[0]


def test_traces_of_training_and_of_evaluation_are_apart(uri: str) -> None:
    store(uri, 0)
    assert Traces(uri, "evaluations").groups() == []


# ---- batches and outcomes ----


def test_a_batch_comes_back_in_its_order_with_its_plan(uri: str) -> None:
    Batches(uri, run_attempt=3).record(batch(7, 5, 2, 9), [(0, 1, 0), (0, 0, 0), (0, 0, 1)], num_ranks=2)
    rows = Batches(uri).read(7)
    columns = (
        "step",
        "position",
        "sequence",
        "trace_row",
        "advantage",
        "num_ranks",
        "rank",
        "microbatch",
        "run_attempt",
    )
    assert [tuple(row[column] for column in columns) for row in rows] == [
        (7, 0, 5, 5, 0.5, 2, 1, 0, 3),
        (7, 1, 2, 2, 0.5, 2, 0, 0, 3),
        (7, 2, 9, 9, 0.5, 2, 0, 1, 3),
    ]


def test_a_reader_sees_a_batch_as_soon_as_it_is_recorded(uri: str) -> None:
    writer, reader = Batches(uri), Batches(uri)
    assert reader.read(0) == []
    record(writer, 0, 1)
    assert len(reader.read(0)) == 1


def test_steps_are_listed_from_where_one_asks(uri: str) -> None:
    batches = Batches(uri)
    for step in (0, 1, 2):
        record(batches, step, 2 * step, 2 * step + 1)
    assert batches.steps() == [0, 1, 2] and batches.steps(start=2) == [2] and batches.steps(start=3) == []


def test_a_plan_must_name_a_place_for_every_row(uri: str) -> None:
    with pytest.raises(ValueError, match="zip"):
        Batches(uri).record(batch(0, 1, 2), [(0, 0, 0)], num_ranks=1)


def test_a_batch_that_was_recorded_twice_is_not_trained(uri: str) -> None:
    record(Batches(uri, run_attempt=0), 4, 1, 2)
    record(Batches(uri, run_attempt=1), 4, 1, 2)
    with pytest.raises(StoreError, match=r"batch 4 was recorded more than once, by run attempts \[0, 1\]"):
        Batches(uri).read(4)


def test_outcomes_are_recorded_with_their_reason(uri: str) -> None:
    outcomes = Outcomes(uri, run_attempt=1)
    outcomes.record([Outcome(3, "g", "failed", "timeout", 12, "no end within 5 s")], step=6)
    (row,) = Outcomes(uri).table.read().to_pylist()
    del row["_rowid"]
    assert row == {
        "sequence": 3,
        "group_id": "g",
        "outcome": "failed",
        "reason": "timeout",
        "step": 6,
        "num_tokens": 12,
        "detail": "no end within 5 s",
        "run_attempt": 1,
    }


async def test_a_batch_is_in_the_store_before_it_is_trained(uri: str) -> None:
    class Reading(RecordingTrainer):
        async def train(self, step: int) -> dict[str, float]:
            rows = Batches(uri).read(step)
            return {"train/rows": len(rows)} | {
                f"train/{column}": len({row[column] for row in rows}) for column in ("rank", "minibatch")
            }

    of_two = builders.recipe(trainer={"num_ranks": 2}, loss={"type": "ppo", "minibatches": 2})
    result = await train_step(batch(3, 0, 1, 2), Batches(uri), Reading(), of_two)
    assert [result.metrics[f"train/{name}"] for name in ("rows", "rank", "minibatch")] == [3, 2, 2]


# ---- ledger ----


def tables(uri: str) -> tuple[Traces, Batches, Outcomes]:
    return Traces(uri), Batches(uri), Outcomes(uri)


def ended(uri: str, sequence: int, kind: Any, reason: str) -> None:
    Outcomes(uri).record([Outcome(sequence, f"0000-{sequence:06d}-0", kind, reason)], 0)


def test_the_ledger_says_what_became_of_every_group(uri: str) -> None:
    store(uri, 0, 1, 2, 3, 5, 8)  # 4, 6 and 7 were dispatched and never stored
    record(Batches(uri), 0, 0, 1)
    record(Batches(uri), 1, 5)
    ended(uri, 2, "dropped", "zero_variance")
    ended(uri, 4, "dropped", "straggler")
    ended(uri, 3, "failed", "timeout")
    ledger = read_ledger(*tables(uri))
    assert ledger.dispatched == 9
    assert ledger.trained == {0: 0, 1: 0, 5: 1}
    assert ledger.dropped == {2: "zero_variance", 4: "straggler"} and ledger.failed == {3: "timeout"}
    assert ledger.pending == {6, 7, 8} and ledger.finished == {8} and ledger.lost == [6, 7]
    assert ledger.summary() == {
        "dispatched": 9,
        "trained": 3,
        "dropped": {"zero_variance": 1, "straggler": 1},
        "failed": {"timeout": 1},
        "pending": 3,
        "finished": 1,
    }


def test_an_empty_run_has_an_empty_ledger(uri: str) -> None:
    ledger = read_ledger(*tables(uri))
    assert (ledger.dispatched, ledger.pending, ledger.lost) == (0, frozenset(), [])


def test_the_driver_may_know_of_more_dispatched_groups_than_the_tables(uri: str) -> None:
    store(uri, 0)
    assert read_ledger(*tables(uri), dispatched=3).lost == [1, 2]


@pytest.mark.parametrize(
    ("steps", "outcomes", "error"),
    [
        ([(0, 5), (1, 5)], [], "group 5 is in batch 0 and again in batch 1"),
        ([(0, 5)], [(5, "dropped")], r"groups \[5\] are both trained and dropped"),
        ([(0, 5)], [(5, "failed")], r"groups \[5\] are both trained and failed"),
        ([], [(5, "dropped"), (5, "failed")], r"groups \[5\] are both dropped and failed"),
    ],
)
def test_a_group_with_two_fates_is_refused(
    uri: str, steps: list[tuple[int, int]], outcomes: list[tuple[int, str]], error: str
) -> None:
    for step, sequence in steps:
        record(Batches(uri), step, sequence)
    for sequence, kind in outcomes:
        ended(uri, sequence, kind, "x")
    with pytest.raises(StoreError, match=error):
        read_ledger(*tables(uri))


@settings(deadline=None, max_examples=15)
@given(fates=st.lists(st.sampled_from(["trained", "dropped", "failed", "stored", "lost"]), max_size=12))
def test_the_sums_of_the_ledger_agree(tmp_path_factory: pytest.TempPathFactory, fates: list[str]) -> None:
    uri = str(tmp_path_factory.mktemp("ledger"))
    expected = {fate: {i for i, other in enumerate(fates) if other == fate} for fate in fates}
    store(uri, *expected.get("stored", ()), *expected.get("trained", ()), rollouts=1)
    if "trained" in expected:
        record(Batches(uri), 0, *expected["trained"])
    for kind in ("dropped", "failed"):
        Outcomes(uri).record([Outcome(i, "g", kind, "x") for i in expected.get(kind, ())], 0)  # type: ignore[arg-type]
    ledger = read_ledger(*tables(uri), dispatched=len(fates))
    assert ledger.trained.keys() == expected.get("trained", set())
    assert ledger.finished == expected.get("stored", set()) and set(ledger.lost) == expected.get("lost", set())
    parts = [ledger.trained.keys(), ledger.dropped.keys(), ledger.failed.keys(), ledger.finished, ledger.lost]
    assert sorted(sequence for part in parts for sequence in part) == list(range(ledger.dispatched))


# ---- run folders ----


def recipe(root: Path, name: str = "tiny", **values: Any) -> RLRecipe:
    return RLRecipe.model_validate(
        {
            "kind": "rl",
            "run": {"name": name, "root": str(root)},
            "model": {"path": str(root / "model")},
            "prompts": {"path": "prompts.jsonl"},
            "agent": {"entry": "agent.py:Agent"},
            "max_steps": 3,
        }
        | values
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.start(recipe(tmp_path))
    yield folder
    folder.close()


def test_a_start_writes_recipe_and_provenance(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    run = RunFolder.start(recipe(tmp_path))
    (attempt,) = run.read_json("provenance.json")["attempts"]
    assert run.attempt == 0 and run.name == "tiny" and run.uri == f"{tmp_path}/tiny"
    sha256_of_braces = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert attempt["hashes"] == {f"{tmp_path}/model/config.json": sha256_of_braces}
    assert attempt["recipe"]["max_steps"] == 3 and "pyarrow" in attempt["versions"]
    assert "max_steps: 3" in Path(run.uri, "recipe.yaml").read_text()
    run.close()


def test_another_start_of_the_same_name_is_another_attempt_with_the_newer_recipe(tmp_path: Path) -> None:
    RunFolder.start(recipe(tmp_path)).close()
    run = RunFolder.start(recipe(tmp_path, max_steps=9))
    assert run.attempt == 1
    assert [attempt["recipe"]["max_steps"] for attempt in run.read_json("provenance.json")["attempts"]] == [3, 9]
    assert "max_steps: 9" in Path(run.uri, "recipe.yaml").read_text()
    run.close()


def start_and_record(tmp_path: Path, **values: Any) -> None:
    run = RunFolder.start(recipe(tmp_path, **values))
    append_metrics(run, {"step": 0})
    run.close()


def resume_error(tmp_path: Path, **values: Any) -> list[str]:
    with pytest.raises(StoreError) as refused:
        RunFolder.start(recipe(tmp_path, **values))
    first, *changes, last = str(refused.value).split("\n")
    assert first == f"run {tmp_path}/tiny was started with other values, and going on with these would mix two runs:"
    assert last == "choose another run.name, or remove the folder to start again"
    return [change.strip() for change in changes]


def test_a_resume_with_values_that_decide_the_weights_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    start_and_record(tmp_path)
    agent = {"entry": "agent.py:Agent", "args": {"a": 1}}
    assert resume_error(tmp_path, rollout={"group_size": 4}, advantage={"type": "rloo"}, agent=agent) == [
        "advantage.type: grpo -> rloo",
        "agent.args.a: None -> 1",
        "rollout.group_size: 8 -> 4",
    ]
    run = RunFolder.start(recipe(tmp_path))
    assert run.attempt == 1
    run.close()


def test_a_resume_with_other_data_under_the_same_name_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "1"}\n')
    prompts = {"path": str(data)}
    start_and_record(tmp_path, prompts=prompts)
    data.write_text('{"prompt": "2"}\n')
    assert resume_error(tmp_path, prompts=prompts) == [f"{data}: the file is another one now"]
    data.write_text('{"prompt": "1"}\n')
    RunFolder.start(recipe(tmp_path, prompts=prompts)).close()


def test_a_resume_may_run_longer_and_elsewhere(tmp_path: Path) -> None:
    start_and_record(tmp_path)
    changed = {"trainer": {"num_ranks": 2}, "engine": {"num_engines": 3}, "checkpoint": {"every": 1}, "max_steps": 9}
    RunFolder.start(recipe(tmp_path, **changed, evaluate={"path": "held_out.jsonl"})).close()


def test_a_start_that_recorded_nothing_does_not_claim_the_name(tmp_path: Path) -> None:
    RunFolder.start(recipe(tmp_path)).close()
    run = RunFolder.start(recipe(tmp_path, rollout={"group_size": 4}))
    assert run.attempt == 1
    run.close()
    RunFolder.start(recipe(tmp_path)).close()
    store(f"{tmp_path}/tiny", 0)  # finished groups that the next start would train
    assert resume_error(tmp_path, rollout={"group_size": 4}) == ["rollout.group_size: 8 -> 4"]


HOLDER = """
import sys, time
from pathlib import Path
from storage.runs import RunFolder
from tests.test_storage import recipe
run = RunFolder.start(recipe(Path(sys.argv[1])))
print("started", flush=True)
time.sleep(600)
"""


def test_a_run_is_held_by_one_process_until_that_one_is_gone(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "started\n"
        with pytest.raises(StoreError) as held:
            RunFolder.start(recipe(tmp_path))
        assert str(held.value) == (
            f"run {tmp_path}/tiny: another process is running it; wait for it, stop it, or choose another run.name"
        )
        RunFolder.start(recipe(tmp_path, "other")).close()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(timeout=20)
        run = RunFolder.start(recipe(tmp_path))
        assert run.attempt == 1  # the refused start left no trace
        run.close()
    finally:
        holder.kill()
        holder.wait()


def test_looking_at_a_run_does_not_hold_it(run: RunFolder, tmp_path: Path) -> None:
    assert RunFolder(f"{tmp_path}/tiny").read_json("provenance.json")["attempts"]
    with pytest.raises(StoreError, match="another process is running it"):
        RunFolder.start(recipe(tmp_path))
    run.close()
    RunFolder.start(recipe(tmp_path)).close()


def test_runs_are_found_by_their_provenance(tmp_path: Path) -> None:
    assert find_runs(str(tmp_path / "none")) == []
    for name in ("b", "a"):
        RunFolder.start(recipe(tmp_path, name)).close()
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("x")
    assert [run.name for run in find_runs(f"{tmp_path}/")] == ["a", "b"]


def test_a_file_is_replaced_as_a_whole(run: RunFolder) -> None:
    path = f"{run.path}/a.json"
    write_atomically(run.fs, path, '{"a": 1}')
    Path(f"{path}.partial").write_text('{"a": ')  # an interrupted writer
    assert run.read_json("a.json") == {"a": 1}
    write_atomically(run.fs, path, '{"a": 2}')
    assert run.read_json("a.json") == {"a": 2} and not run.has("a.json.partial")
    assert run.read_json("missing.json") is None


def test_a_model_path_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    check_model("org/name")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text("{}")
    check_model(str(tmp_path / "whole"))
    (tmp_path / "empty").mkdir()
    for path, error in {
        str(tmp_path / "empty"): "has no config.json; allowed: a folder in Hugging Face layout",
        str(tmp_path / "none"): "which does not exist; allowed: an existing folder",
        "build/my/model": "which does not exist",
        "./model": "which does not exist",
        "model": "which does not exist",
        "models/mine": "which does not exist",
    }.items():
        with pytest.raises(RecipeError, match=f"model.path: .*{error}"):
            check_model(path)


# ---- checkpoints ----


def complete(checkpoints: Checkpoints, step: int) -> None:
    Path(checkpoints.begin(step), "weights").write_text(f"weights {step}")
    checkpoints.complete(CheckpointState(step, {"traces": step}))


def test_a_checkpoint_counts_once_its_marker_is_there(run: RunFolder) -> None:
    checkpoints = Checkpoints(run, keep=2)
    assert checkpoints.newest() is None
    complete(checkpoints, 5)
    Path(checkpoints.begin(10), "weights").write_text("half")
    assert checkpoints.steps() == [5]
    assert checkpoints.newest() == CheckpointState(5, {"traces": 5})
    assert checkpoints.folder(5) == f"{run.path}/checkpoints/batch-000005"


def test_the_newest_complete_ones_are_kept(run: RunFolder) -> None:
    checkpoints = Checkpoints(run, keep=2)
    for step in (5, 10, 1_000_000, 15):
        complete(checkpoints, step)
    assert checkpoints.steps() == [15, 1_000_000]
    assert sorted(path.name for path in Path(run.path, "checkpoints").iterdir()) == ["batch-000015", "batch-1000000"]


def test_beginning_again_clears_what_an_interrupted_attempt_left(run: RunFolder) -> None:
    checkpoints = Checkpoints(run, keep=1)
    Path(checkpoints.begin(5), "weights-rank-7").write_text("of a larger attempt")
    assert list(Path(checkpoints.begin(5)).iterdir()) == []


def test_beginning_again_on_a_complete_checkpoint_makes_it_incomplete(run: RunFolder) -> None:
    checkpoints = Checkpoints(run, keep=1)
    complete(checkpoints, 5)
    checkpoints.begin(5)
    assert checkpoints.newest() is None


def test_what_else_lies_in_the_folder_is_left_alone(run: RunFolder) -> None:
    checkpoints = Checkpoints(run, keep=1)
    for name in ("batch-000005-copy", "best", "000007", "batch-"):
        Path(run.path, "checkpoints", name).mkdir(parents=True)
        Path(run.path, "checkpoints", name, MARKER).write_text("{}")
    complete(checkpoints, 9)
    assert checkpoints.steps() == [9] and Path(run.path, "checkpoints", "batch-000005-copy").is_dir()


class RecordingTrainer:
    """The edge: notes what it is told, and can die while it saves."""

    def __init__(self, dies_in_save: bool = False) -> None:
        self.told: list[tuple[str, Any]] = []
        self._dies_in_save = dies_in_save

    async def train(self, step: int) -> dict[str, float]:
        self.told.append(("train", step))
        return {}

    async def save(self, folder: str) -> None:
        Path(folder, "weights").write_text("half")
        if self._dies_in_save:
            raise OSError("no space left")

    async def load(self, folder: str) -> None:
        self.told.append(("load", Path(folder).name))

    async def weight_names(self) -> tuple[list[str], list[str], list[list[int]]]:
        return [], [], []

    async def send_weights(self, timeout_seconds: float) -> None:
        return None


async def test_a_save_that_fails_leaves_the_older_checkpoint_the_newest(run: RunFolder) -> None:
    checkpoints = Checkpoints(run, keep=1)
    table = Outcomes(run.uri).table
    await checkpoint(5, RecordingTrainer(), checkpoints, {"outcomes": table})
    assert checkpoints.newest() == CheckpointState(5, {"outcomes": table.version})
    with pytest.raises(OSError, match="no space left"):
        await checkpoint(10, RecordingTrainer(dies_in_save=True), checkpoints, {})
    state = checkpoints.newest()
    assert state is not None and state.step == 5


async def test_restore_loads_the_newest_checkpoint_and_trains_the_batches_after_it(run: RunFolder) -> None:
    batches, checkpoints, trainer = Batches(run.uri), Checkpoints(run, keep=2), RecordingTrainer()
    reported: list[int] = []
    assert await restore(trainer, checkpoints, batches, {}, lambda step, _: reported.append(step)) == 0
    for step in range(7):
        record(batches, step, step)
    complete(checkpoints, 3)
    complete(checkpoints, 5)
    assert await restore(trainer, checkpoints, batches, {}, lambda step, _: reported.append(step)) == 7
    assert reported == [5, 6]
    assert trainer.told == [("load", "batch-000005"), ("train", 5), ("train", 6)]
    assert checkpoints.steps() == [5, 7], "what was trained again is saved"


async def test_restore_without_a_checkpoint_trains_everything_again(run: RunFolder) -> None:
    batches, trainer = Batches(run.uri), RecordingTrainer()
    record(batches, 0, 0)
    record(batches, 1, 1)
    assert await restore(trainer, Checkpoints(run, keep=1), batches, {}, lambda *_: None) == 2
    assert trainer.told == [("train", 0), ("train", 1)]


async def test_a_batch_that_is_missing_stops_the_restore(run: RunFolder) -> None:
    batches, trainer = Batches(run.uri), RecordingTrainer()
    record(batches, 0, 0)
    record(batches, 2, 2)
    with pytest.raises(StoreError, match="batch 1 is missing from the store, but batch 2 is there"):
        await restore(trainer, Checkpoints(run, keep=1), batches, {}, lambda *_: None)


async def test_a_supervised_run_restores_from_its_checkpoint_alone(run: RunFolder) -> None:
    checkpoints, trainer = Checkpoints(run, keep=1), RecordingTrainer()
    complete(checkpoints, 4)
    assert await load_checkpoint(trainer, checkpoints) == 4
    assert trainer.told == [("load", "batch-000004")]


# ---- metrics ----


def test_metrics_come_back_in_step_order_and_the_last_line_of_a_step_counts(run: RunFolder) -> None:
    assert read_metrics(run) == []
    for line in ({"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}, {"step": 3, "x": 3.0}, {"step": 2, "x": 2.5}):
        append_metrics(run, line)
    assert read_metrics(run) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.5}, {"step": 3, "x": 3.0}]


@pytest.mark.parametrize("cut", [1, 8, 15])
def test_a_line_that_a_kill_cut_short_spoils_no_other(run: RunFolder, cut: int) -> None:
    append_metrics(run, {"step": 1})
    append_metrics(run, {"step": 2, "x": 5})
    path = Path(run.path, "metrics.jsonl")
    path.write_bytes(path.read_bytes()[:-cut])
    append_metrics(run, {"step": 3})
    assert [line["step"] for line in read_metrics(run)] == [1, 3]


def test_a_number_that_is_none_survives(run: RunFolder) -> None:
    append_metrics(run, {"step": 1, "x": float("nan")})
    (line,) = read_metrics(run)
    assert line["x"] != line["x"]
