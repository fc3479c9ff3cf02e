"""The `moltflow` command: what it prints, its exit codes, and that looking at recipes stays light."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from flows.cli import main
from flows.inputs import check_inputs, read_inputs
from schemas.loading import load_recipe
from schemas.types import Batch, Outcome, TrainableSegment
from storage.batches import Batches, Outcomes
from storage.checkpoints import Checkpoints, CheckpointState
from storage.metrics import append_metrics
from storage.runs import RunFolder
from storage.traces import Traces
from tests.builders import trace_row

ROOT = Path(__file__).parent.parent
RECIPE = """\
kind: rl
run: {name: tiny, root: ROOT}
model: {path: org/model}
prompts: {path: prompts.jsonl}
agent: {entry: agent.py:Agent}
max_steps: 3
"""


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Answer]


@pytest.fixture
def moltflow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["moltflow", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return Answer(int(end.value.code or 0), out, err)

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("ROOT", str(tmp_path / "runs")))
    return str(path)


# ---- recipes ----


def test_a_valid_recipe_whose_files_are_there_is_called_so(moltflow: Command, recipe: str, tmp_path: Path) -> None:
    prompts, agent = tmp_path / "prompts.jsonl", tmp_path / "agent.py"
    overrides = (f"prompts.path={prompts}", f"agent.entry={agent}:Agent")
    answer = moltflow("recipe", "check", recipe, *overrides)
    assert answer == Answer(1, "", f"RecipeError: agent.entry: no file {agent}\n")
    agent.write_text("from stages.agents import Env\nclass Agent(Env):\n    def step(self, state): ...\n")
    answer = moltflow("recipe", "check", recipe, *overrides)
    assert answer.status == 1 and f"{prompts}: no such file" in answer.err
    prompts.write_text('{"prompt": "1"}\n')
    answer = moltflow("recipe", "check", recipe, *overrides, "agent.args={difficulty: 3}")
    assert answer.status == 1
    assert "agent.args: got an unexpected keyword argument 'difficulty'; allowed: what " in answer.err
    assert moltflow("recipe", "check", recipe, *overrides) == Answer(0, "tiny: a valid rl recipe\n", "")


def test_images_in_prompts_are_refused_where_the_framework_renders_them(
    moltflow: Command, recipe: str, tmp_path: Path
) -> None:
    prompts, agent = tmp_path / "prompts.jsonl", tmp_path / "agent.py"
    overrides = (f"prompts.path={prompts}", f"agent.entry={agent}:Agent")
    image = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}'
    prompts.write_text('{"prompt": "1"}\n{"prompt": [{"role": "user", "content": [' + image + "]}]}\n")
    agent.write_text("from stages.agents import Env\nclass Agent(Env):\n    def step(self, state): ...\n")
    answer = moltflow("recipe", "check", recipe, *overrides)
    assert answer.status == 1
    assert f"{prompts}, row 2: the prompt has a part of type image_url; allowed: text" in answer.err
    agent.write_text("from stages.agents import ChatAgent\nclass Agent(ChatAgent):\n    def run(self, ctx): ...\n")
    assert moltflow("recipe", "check", recipe, *overrides).status == 0, "it decides itself what it asks with"


def test_what_a_command_has_checked_is_not_read_again_by_its_flow_but_by_the_next(recipe: str, tmp_path: Path) -> None:
    prompts, agent, runs = tmp_path / "prompts.jsonl", tmp_path / "agent.py", tmp_path / "runs.txt"
    prompts.write_text('{"prompt": "1"}\n')
    agent.write_text(
        f"open({str(runs)!r}, 'a').write('x')\n"
        "from stages.agents import Env\nclass Agent(Env):\n    def step(self, state): ...\n"
    )
    loaded = load_recipe([recipe], [f"prompts.path={prompts}", f"agent.entry={agent}:Agent"])
    check_inputs(loaded)
    prompts.write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    same = type(loaded).model_validate(loaded.model_dump())
    assert len(read_inputs(same).prompts) == 1 and runs.read_text() == "x"
    assert len(read_inputs(same).prompts) == 2 and runs.read_text() == "xx"


def test_an_invalid_recipe_is_refused_with_all_that_is_wrong(moltflow: Command, recipe: str) -> None:
    answer = moltflow("recipe", "check", recipe, "rollout.group_sise=4", "max_steps=none")
    assert answer.status == 1 and answer.out == ""
    lines = answer.err.splitlines()
    assert lines[0] == "RecipeError: the recipe has 2 problems:"
    text = " ".join(answer.err.split())
    assert "rollout.group_sise (override 'rollout.group_sise=4'): unknown key, did you mean rollout.group_size" in text
    assert "max_steps (override 'max_steps=none'): found \"none\"; allowed: integer, above 0" in text
    assert "Traceback" not in answer.err


def test_a_missing_recipe_is_refused(moltflow: Command) -> None:
    answer = moltflow("recipe", "check", "no.yaml")
    assert answer.status == 1 and "no.yaml: cannot be read (No such file or directory)" in answer.err


def test_show_prints_the_whole_recipe_as_it_would_run(moltflow: Command, recipe: str, tmp_path: Path) -> None:
    answer = moltflow("recipe", "show", recipe, "rollout.group_size=4")
    assert answer.status == 0
    shown = yaml.safe_load(answer.out)
    assert shown["rollout"]["group_size"] == 4 and shown["window"]["stale"] == "mask"
    (tmp_path / "shown.yaml").write_text(answer.out)
    assert load_recipe([tmp_path / "shown.yaml"]) == load_recipe([recipe], ["rollout.group_size=4"])


def test_show_can_explain_every_key(moltflow: Command, recipe: str) -> None:
    answer = moltflow("recipe", "show", recipe, "--explain")
    assert answer.status == 0
    assert "window.max_policy_lag" in answer.out and "Refits that a trained token may be behind" in answer.out


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("rollout.sampling.temperature=0", "rollout.sampling.temperature OVERRIDE: found 0; allowed: 0.01 and more"),
        ("rollout.sampling.temperature=0.001", "rollout.sampling.temperature OVERRIDE: found 0.001; allowed: 0.01 and"),
        (
            "engine.args.max_model_len=9",
            "engine.args.max_model_len OVERRIDE: found 9; allowed: any other argument, this",
        ),
        (
            "engine.args.logprobs_mode=raw_logprobs",
            "this one is fixed: the log-probs must be those of what was sampled",
        ),
    ],
)
def test_training_checks_the_recipe_before_anything_starts(
    moltflow: Command, recipe: str, override: str, error: str
) -> None:
    answer = moltflow("train", recipe, override)
    assert answer.status == 1
    assert error.replace("OVERRIDE", f"(override {override!r})") in " ".join(answer.err.split())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["recipe", "show", "recipes/quickstart/rl.yaml"], ["recipe", "show", "--help"]]
)
def test_looking_at_recipes_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from flows.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'vllm', 'ray', 'prefect', 'lance', 'transformers', 'nemo_automodel', 'pyarrow'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == "[]\n"


# ---- runs and traces ----


@pytest.fixture
def run(recipe: str) -> RunFolder:
    """A run of two batches: groups 0 and 1 trained, 2 dropped, 3 finished, 4 lost; one checkpoint."""
    folder = RunFolder.start(load_recipe([recipe]))
    traces, batches = Traces(folder.uri), Batches(folder.uri)
    for sequence in (0, 1, 2, 3, 5):
        traces.commit([traces.write([trace_row(sequence, r, reward=float(r), version=sequence) for r in range(2)])])
    for step in range(2):
        (group,) = traces.groups(f"sequence = {step}")
        segments = tuple(
            TrainableSegment(step, group.group_id, s.rollout, 0, s.row, s.num_tokens, 0.5) for s in group.segments
        )
        batches.record(Batch(step, segments), [(0, 0, 0)] * 2, num_ranks=1)
        line = {"step": step, "train/loss": 0.5, "rollout/reward_mean": 0.25 + step / 2, "step/seconds": 1.5}
        append_metrics(folder, line)
    Outcomes(folder.uri).record([Outcome(2, "0000-000002-0", "dropped", "zero_variance")], 1)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.begin(2)
    checkpoints.complete(CheckpointState(2, {}))
    folder.close()
    return folder


def root(run: RunFolder) -> tuple[str, str]:
    return "--root", run.uri.rpartition("/")[0]


def test_runs_are_listed_with_their_last_numbers(moltflow: Command, run: RunFolder) -> None:
    answer = moltflow("runs", "ls", *root(run))
    (row,) = [line for line in answer.out.splitlines() if "tiny" in line]
    assert row.replace("│", " ").split() == ["tiny", "1", "2", "0.75", "1.5"]


def test_a_root_without_runs_is_an_empty_list(moltflow: Command, tmp_path: Path) -> None:
    answer = moltflow("runs", "ls", "--root", str(tmp_path / "none"))
    assert answer.status == 0 and "run" in answer.out


def test_a_run_is_shown_with_its_metrics_ledger_and_checkpoints(moltflow: Command, run: RunFolder) -> None:
    answer = moltflow("runs", "show", "tiny", *root(run))
    text = " ".join(answer.out.split())
    assert answer.status == 0
    assert "rollout/reward_mean │ 0.75" in text and "checkpoints: [2]" in text
    for part in ("'dispatched': 6", "'trained': 2", "'dropped': {'zero_variance': 1}", "'pending': 3", "'finished': 2"):
        assert part in text


def test_a_run_can_be_named_by_its_path(moltflow: Command, run: RunFolder) -> None:
    assert moltflow("runs", "show", run.uri).status == 0


@pytest.mark.parametrize("command", [("runs", "show"), ("traces", "show")])
def test_a_run_that_is_not_there_is_refused_with_the_nearest_name(
    moltflow: Command, run: RunFolder, command: tuple[str, str]
) -> None:
    answer = moltflow(*command, "tinny", *root(run))
    assert answer.status == 1
    assert "no run 'tinny'" in answer.err and "did you mean tiny?" in answer.err and "Traceback" not in answer.err


def test_traces_show_the_conversation_and_how_each_token_was_sampled(moltflow: Command, run: RunFolder) -> None:
    answer = moltflow("traces", "show", "tiny", *root(run), "--where", "sequence = 3", "--limit", "1")
    assert answer.out.splitlines() == [
        "0000-000003-0 rollout 0 segment 0 (new)  ok  reward 0  versions 3-3  2 of 4 tokens",
        "  user: sort 21",
        "  assistant: 12",
        "  turn 0 at version 3: log-probs -0.25 -0.50",
        "",
    ]


def test_traces_of_one_batch_are_those_that_it_trained(moltflow: Command, run: RunFolder) -> None:
    answer = moltflow("traces", "show", "tiny", *root(run), "--step", "1")
    heads = [line.split("  ")[0] for line in answer.out.splitlines() if line.startswith("0000")]
    assert heads == [f"0000-000001-0 rollout {rollout} segment 0 (new)" for rollout in range(2)]
    assert moltflow("traces", "show", "tiny", *root(run), "--step", "9").out == "no rollouts of tiny match\n"


def test_a_filter_that_cannot_be_read_is_a_message_and_not_a_traceback(moltflow: Command, run: RunFolder) -> None:
    answer = moltflow("traces", "show", "tiny", *root(run), "--where", "rewards = 1")
    assert answer.status == 1 and "StoreError" in answer.err and "No field named rewards" in answer.err
    assert "Traceback" not in answer.err


def test_a_run_without_traces_says_so(moltflow: Command, recipe: str, run: RunFolder) -> None:
    RunFolder.start(load_recipe([recipe], ["run.name=empty"])).close()
    answer = moltflow("traces", "show", "empty", *root(run))
    assert answer.status == 1 and "has no traces; only RL runs do" in answer.err


def test_looking_at_a_run_changes_nothing_of_it(moltflow: Command, run: RunFolder) -> None:
    def files() -> dict[str, Any]:
        return {str(path): path.stat().st_mtime_ns for path in Path(run.uri).rglob("*") if path.is_file()}

    before = files()
    for command in (("runs", "ls"), ("runs", "show", "tiny"), ("traces", "show", "tiny", "--step", "0")):
        assert moltflow(*command, *root(run)).status == 0
    assert files() == before
