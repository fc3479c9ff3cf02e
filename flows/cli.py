"""The `moltflow` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from schemas.errors import MoltflowError

app = typer.Typer(no_args_is_help=True, add_completion=True, help="Asynchronous RL of language-model agents.")
recipe_app = typer.Typer(no_args_is_help=True, help="Look at recipes without running them.")
runs_app = typer.Typer(no_args_is_help=True, help="Look at runs.")
traces_app = typer.Typer(no_args_is_help=True, help="Look at stored token traces.")
app.add_typer(recipe_app, name="recipe")
app.add_typer(runs_app, name="runs")
app.add_typer(traces_app, name="traces")

RecipeArguments = Annotated[
    list[str], typer.Argument(metavar="RECIPE... [key=value ...]", help="YAML files, left to right, then overrides.")
]
Root = Annotated[str, typer.Option(help="Folder or URI that holds the run folders.")]


def main() -> None:
    """Entry point of `moltflow`."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # recipes name agents by module, as seen from where the command is given
    reporting(app)


def reporting(command: Callable[[], None]) -> None:
    """Run a command: errors that moltflow raises on purpose are messages, not tracebacks, and Ctrl-C ends with 130."""
    try:
        command()
    except MoltflowError as error:
        Console(stderr=True).print(Text(f"{type(error).__name__}: {error}", style="red"), soft_wrap=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@app.command()
def train(arguments: RecipeArguments) -> None:
    """Run a recipe; the same run.name resumes. Example: moltflow train recipes/quickstart/rl.yaml max_steps=50"""
    from flows.launch import run_recipes

    recipe = _load(arguments)
    (result,) = run_recipes([recipe])
    typer.echo(json.dumps(result, default=str))


@recipe_app.command("show")
def recipe_show(
    arguments: RecipeArguments,
    explain: Annotated[bool, typer.Option(help="Every key with its type, default and meaning.")] = False,
) -> None:
    """Print the resolved recipe as YAML."""
    from schemas.loading import describe, dump_recipe

    recipe = _load(arguments)
    if not explain:
        typer.echo(dump_recipe(recipe), nl=False)
        return
    table = Table(Column("key", overflow="fold", min_width=36), "type", "default", "meaning")
    for field in describe(type(recipe)):
        table.add_row(field.key, field.type, field.default, field.doc)
    Console().print(table)


@recipe_app.command("check")
def recipe_check(arguments: RecipeArguments) -> None:
    """Say whether a recipe is right, and everything that is wrong with it; then whether what it names is there."""
    from flows.inputs import read_inputs

    recipe = _load(arguments)
    read_inputs(recipe)
    typer.echo(f"{recipe.run.name}: a valid {recipe.kind} recipe")


def _load(arguments: list[str]) -> Any:
    from schemas.loading import load_recipe

    files = [argument for argument in arguments if "=" not in argument]
    return load_recipe(files, [argument for argument in arguments if "=" in argument])


@runs_app.command("ls")
def runs_ls(root: Root = "runs") -> None:
    """List runs with their steps and last reward."""
    from storage.metrics import read_metrics
    from storage.runs import find_runs

    table = Table("run", "starts", "steps", "reward", "s/step")
    for run in find_runs(root):
        lines = [line for line in read_metrics(run) if "train/loss" in line]
        last = lines[-1] if lines else {}
        starts = len((run.read_json("provenance.json") or {})["attempts"])
        table.add_row(
            run.name,
            str(starts),
            str(len(lines)),
            _number(last.get("rollout/reward_mean")),
            _number(last.get("step/seconds")),
        )
    Console().print(table)


@runs_app.command("show")
def runs_show(name: str, root: Root = "runs") -> None:
    """One run: its last metrics, its ledger, its checkpoints."""
    from storage.batches import Batches, Outcomes
    from storage.checkpoints import Checkpoints
    from storage.ledger import read_ledger
    from storage.metrics import read_metrics
    from storage.traces import Traces

    run = _find(root, name)
    console = Console()
    console.print(f"[bold]{run.uri}[/]", soft_wrap=True)
    lines = [line for line in read_metrics(run) if "train/loss" in line]
    if lines:
        table = Table("metric", f"batch {lines[-1]['step']}")
        for key in sorted(set(lines[-1]) - {"time"}):
            table.add_row(key, _number(lines[-1][key]))
        console.print(table)
    if run.has("traces.lance"):
        ledger = read_ledger(Traces(run.uri), Batches(run.uri), Outcomes(run.uri))
        console.print("ledger:", ledger.summary())
    console.print("checkpoints:", Checkpoints(run, keep=1).steps())


@traces_app.command("show")
def traces_show(
    name: str,
    root: Root = "runs",
    step: Annotated[int | None, typer.Option(help="Only rollouts trained in this batch step.")] = None,
    where: Annotated[str | None, typer.Option(help='SQL filter over the columns, e.g. "reward = 1".')] = None,
    limit: Annotated[int, typer.Option(help="Rollouts shown.")] = 5,
) -> None:
    """Print stored rollouts: the conversation, the reward, how each token was sampled."""
    from storage.batches import Batches
    from storage.traces import Traces

    run = _find(root, name)
    if not run.has("traces.lance"):
        raise MoltflowError(f"{run.uri}: has no traces; only RL runs do")
    conditions = [where] if where else []
    if step is not None:
        rows = [str(row["trace_row"]) for row in Batches(run.uri).read(step)]
        conditions.append(f"_rowid IN ({', '.join(rows)})" if rows else "false")
    table = Traces(run.uri).table.read(where=" AND ".join(f"({c})" for c in conditions) or None, limit=limit)
    console = Console()
    for row in table.to_pylist():
        console.print(_rollout_text(row), soft_wrap=True)
    if table.num_rows == 0:
        console.print(f"no rollouts of {name} match")


def _rollout_text(row: dict[str, Any]) -> Text:
    text = Text()
    text.append(f"{row['group_id']} rollout {row['rollout']} segment {row['segment']} ({row['opened']})", style="bold")
    text.append(f"  {row['status']}  reward {_number(row['reward'])}  versions ")
    text.append(
        f"{row['oldest_version']}-{row['newest_version']}  {row['num_sampled']} of {row['num_tokens']} tokens\n"
    )
    if row["error"]:
        text.append(f"  {_printable(row['error'])}\n", style="red")
    for message in json.loads(row["messages"]):
        text.append(f"  {message['role']}: ", style="cyan")
        if message.get("reasoning_content"):
            text.append(f"[{_printable(str(message['reasoning_content']))}] ", style="dim")
        text.append(f"{_printable(str(message.get('content')))}\n")
        for call in message.get("tool_calls") or []:
            text.append(f"    calls {_printable(json.dumps(call.get('function')))}\n")
    if row["info"] != "{}":
        text.append(f"  info: {_printable(row['info'])}\n", style="dim")
    for span in row["spans"]:
        logprobs = " ".join(f"{value:.2f}" for value in row["logprobs"][span["start"] : span["end"]])
        text.append(f"  turn {span['turn']} at version {span['version']}: log-probs {logprobs}\n", style="dim")
    return text


def _printable(text: str) -> str:
    """Without control characters: what a model said must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _find(root: str, name: str) -> Any:
    from difflib import get_close_matches

    from storage.runs import RunFolder, find_runs

    run = RunFolder(name if "/" in name else f"{root.rstrip('/')}/{name}")
    if run.has("provenance.json"):
        return run
    names = [found.name for found in find_runs(root)]
    nearest = get_close_matches(name, names, 1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise MoltflowError(f"no run {name!r} under {root}; there are {names or 'none'}{hint}")


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
