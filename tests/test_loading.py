"""The recipe loader: what wins over what, and that an error says where, what was found and what is allowed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.describe import FieldText, describe
from schemas.errors import RecipeError
from schemas.loading import dump_recipe, load_recipe
from schemas.recipe import RLRecipe, SFTRecipe

ROOT = Path(__file__).parent.parent
RL = """\
kind: rl
run: {name: tiny}
model: {path: model}
prompts: {path: prompts.jsonl}
agent: {entry: agent.py:Agent}
max_steps: 3
"""


def load(*texts: str | bytes, overrides: list[str] | None = None) -> RLRecipe | SFTRecipe:
    """Loads the texts as files `1.yaml`, `2.yaml`, ... of one folder, whose name is taken out of the errors."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.yaml") for number in range(1, len(texts) + 1)]
        for file, text in zip(files, texts, strict=True):
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            return load_recipe(files, overrides or [])
        except RecipeError as error:
            raise RecipeError(str(error).replace(f"{folder}/", "")) from None


def rl(*texts: str, overrides: list[str] | None = None) -> RLRecipe:
    recipe = load(*texts, overrides=overrides)
    assert isinstance(recipe, RLRecipe)
    return recipe


def problems(*texts: str | bytes, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(RecipeError) as error:
        load(*texts, overrides=overrides)
    first, *lines = str(error.value).split("\n  ")
    assert first == f"the recipe has {len(lines)} problem{'s' if len(lines) > 1 else ''}:"
    return lines


# ---- what wins over what ----


def test_later_files_go_before_earlier_ones_and_overrides_before_all() -> None:
    recipe = rl(RL + "window: {stale: wait, max_policy_lag: 2}", "window: {max_policy_lag: 3}\nmax_steps: 4")
    assert (recipe.window.stale, recipe.window.max_policy_lag, recipe.max_steps) == ("wait", 3, 4)
    assert rl(RL, "max_steps: 4", overrides=["max_steps=5", "max_steps=6"]).max_steps == 6


def test_lists_replace_lists() -> None:
    stop = "rollout: {sampling: {stop: [a, b]}}"
    assert rl(RL + stop, "rollout: {sampling: {stop: [c]}}").rollout.sampling.stop == ["c"]


def test_keys_of_a_variant_do_not_outlive_a_change_of_its_type() -> None:
    cosine = RL + "trainer: {optimizer: {lr: 1, schedule: {type: cosine, warmup_steps: 7, floor: 0.5}}}"
    kept = rl(cosine, "trainer: {optimizer: {schedule: {type: cosine, floor: 0.2}}}").trainer.optimizer
    assert kept.schedule.model_dump() == {"type": "cosine", "warmup_steps": 7, "floor": 0.2}
    changed = rl(cosine, overrides=["trainer.optimizer.schedule.type=constant"]).trainer.optimizer
    assert (changed.lr, changed.schedule.model_dump()) == (1.0, {"type": "constant", "warmup_steps": 0})


def test_a_key_of_the_default_variant_needs_no_type() -> None:
    schedule = rl(RL, overrides=["trainer.optimizer.schedule.warmup_steps=5"]).trainer.optimizer.schedule
    assert schedule.model_dump() == {"type": "constant", "warmup_steps": 5}


def test_bases_lie_beneath_their_file_from_left_to_right() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "below").mkdir()
        Path(folder, "below/first.yaml").write_text(RL + "device: cpu\nexport: first")
        Path(folder, "below/second.yaml").write_text("base: first.yaml\nexport: second\nmax_steps: 7")
        Path(folder, "third.yaml").write_text("base: [below/first.yaml, below/second.yaml]\nmax_steps: 8")
        recipe = load_recipe([Path(folder, "third.yaml")])
    assert (recipe.device, recipe.export, recipe.max_steps) == ("cpu", "second", 8)


def test_the_kind_chooses_the_recipe() -> None:
    sft = "kind: sft\nrun: {name: a}\nmodel: {path: m}\nmax_steps: 1\ndata: {path: d.jsonl}"
    assert type(load(sft)) is SFTRecipe
    assert type(load(RL)) is RLRecipe


# ---- values ----


@pytest.mark.parametrize("text", ["5e-4", "5E-4", "0.0005", "5.0e-04", "+.5e-3", "50e-5"])
def test_floats_with_exponents_are_numbers_in_files_and_overrides(text: str) -> None:
    assert rl(RL, overrides=[f"trainer.optimizer.lr={text}"]).trainer.optimizer.lr == 0.0005
    assert rl(RL + f"trainer: {{optimizer: {{lr: {text}}}}}").trainer.optimizer.lr == 0.0005


def test_words_are_words_and_only_true_and_false_are_booleans() -> None:
    assert rl(RL + "correction: {level: off}\nwindow: {max_policy_lag: 0}").correction.level == "off"
    args = rl(RL + "engine:\n  args:\n    {a: yes, b: 010, c: 2024-01-01, d: true, e: 1_000}").engine.args
    assert args == {"a": "yes", "b": "010", "c": "2024-01-01", "d": True, "e": 1000}


def test_overrides_are_parsed_as_yaml() -> None:
    overrides = ["evaluate.path=e.jsonl", "evaluate.every=", "evaluate.num_prompts=1_000", 'run.name="2024"']
    overrides += ["rollout.sampling.stop=['a=b', \"\\n\"]", "trainer.optimizer.betas=[0, 0.5]", "export=null"]
    recipe = rl(RL, overrides=overrides)
    assert recipe.evaluate is not None
    assert (recipe.evaluate.every, recipe.evaluate.num_prompts, recipe.run.name) == (None, 1000, "2024")
    assert (recipe.rollout.sampling.stop, recipe.trainer.optimizer.betas, recipe.export) == (
        ["a=b", "\n"],
        (0, 0.5),
        None,
    )


@pytest.mark.parametrize(
    ("key", "text", "shown", "allowed"),
    [
        ("max_steps", '"8"', '"8"', "integer, above 0"),
        ("max_steps", "8.0", "8.0", "integer, above 0"),
        ("max_steps", "true", "true", "integer, above 0"),
        ("max_steps", "0", "0", "integer, above 0"),
        ("export", "5", "5", 'string or null (write "5")'),
        ("device", "gpu", '"gpu"', "auto | cpu | cuda"),
        ("prompts.shuffle", "1", "1", "true | false"),
        ("prompts.shuffle", "yes", '"yes"', "true | false"),
        ("window.groups_in_flight", "true", "true", "auto or integer, above 0"),
        ("rollout.sampling.top_p", "1.5", "1.5", "number, above 0, at most 1"),
        ("rollout.sampling.stop", "a", '"a"', "list of string, not shorter than 1"),
        ("trainer.optimizer.betas", "[0, 2]", "[0, 2]", "list of 2 x number, at least 0, below 1"),
        ("trainer.optimizer.betas", "[0]", "[0]", "list of 2 x number, at least 0, below 1"),
        ("agent.args", "[]", "[]", "mapping"),
        ("refit", "null", "null", "mapping with cache, timeout_seconds"),
        ("trainer.optimizer.schedule", "cosine", '"cosine"', "mapping with type: constant | cosine | linear | wsd"),
        ("trainer.optimizer.schedule.type", "cosin", '"cosin"', "constant | cosine | linear | wsd"),
        ("trainer.optimizer.schedule.type", "[1]", "[1]", "constant | cosine | linear | wsd"),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_allowed(key: str, text: str, shown: str, allowed: str) -> None:
    place = f"override {f'{key}={text}'!r}"
    assert problems(RL, overrides=[f"{key}={text}"]) == [f"{key} ({place}): found {shown}; allowed: {allowed}"]


@pytest.mark.parametrize("text", [".inf", ".nan", "1e999", "9" * 5000, '"\\ud800"'])
def test_what_no_recipe_can_hold_is_refused_wherever_it_stands(text: str) -> None:
    [problem] = problems(RL, f"\nagent: {{args: {{a: {text}}}}}")
    assert problem.startswith("2.yaml:2: found ")
    assert problem.endswith("; allowed: finite numbers, valid Unicode")


# ---- names ----


def test_an_unknown_key_is_answered_with_the_nearest_ones() -> None:
    first, second, third = problems(RL + "window: {max_policy_lags: 2}\nlr: 5e-4\nevalute: {path: a}")
    allowed = "max_policy_lag, stale, groups_in_flight, straggler_wait_seconds"
    assert (
        first
        == f"window.max_policy_lags (1.yaml:7): unknown key, did you mean window.max_policy_lag; allowed: {allowed}"
    )
    assert second.startswith("lr (1.yaml:8): unknown key, did you mean trainer.optimizer.lr; allowed: run, model, ")
    assert third.startswith("evalute (1.yaml:9): unknown key, did you mean evaluate; allowed: run, model, ")


def test_a_key_of_another_variant_is_answered_with_that_variant() -> None:
    key = "trainer.optimizer.schedule.shape"
    assert problems(RL, overrides=[f"{key}=sqrt"]) == [
        f"{key} (override '{key}=sqrt'): unknown key, did you mean {key} (if trainer.optimizer.schedule.type = wsd); "
        "allowed: type, warmup_steps"
    ]


def test_an_unknown_override_is_named_at_its_first_unknown_key() -> None:
    [problem] = problems(RL, overrides=["rolout.group_size=4"])
    assert problem.startswith("rolout (override 'rolout.group_size=4'): unknown key, did you mean rollout; allowed: ")


def test_a_missing_key_is_named_with_the_place_of_its_parent() -> None:
    assert problems("kind: sft\n\ndata:\n  batch_size: 3\nrun: {name: a}\nmax_steps: 1", "data: {}") == [
        "model (1.yaml, 2.yaml): missing; allowed: mapping with path, dtype, attention, activation_checkpointing, "
        "trust_remote_code",
        "data.path (2.yaml:1): missing; allowed: string, not shorter than 1",
    ]


def test_all_problems_are_listed_at_once() -> None:
    text = RL.replace("max_steps: 3", "max_steps: x\nmax_step: 3\nmax_steps: 4")
    found = problems(text + "correction: {high: 0.5}", overrides=["device=gpu", "run.name.a=1"])
    assert [line.partition(":")[0] for line in found] == [
        "max_steps (1.yaml",  # twice in the file
        "run.name (override 'run.name.a=1')",
        "max_steps (1.yaml",  # not an integer
        "device (override 'device=gpu')",
        "correction.low, correction.high (default, 1.yaml",
        "max_step (1.yaml",
    ]


def test_rules_across_fields_name_their_keys_and_where_these_come_from() -> None:
    assert problems(RL + "window:\n  max_policy_lag: 1", overrides=["correction.level=off"]) == [
        "correction.level (override 'correction.level=off'): found off with window.max_policy_lag = 1; "
        "allowed: token, or max_policy_lag = 0"
    ]
    assert problems(RL + "rollout: {min_group_size: 9}") == [
        "rollout.min_group_size (1.yaml:7): found 9; allowed: at most group_size = 8"
    ]


# ---- files and overrides that cannot be read ----


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1.yaml: found nothing; allowed: a mapping of recipe keys"),
        ("# nothing\n", "1.yaml: found nothing; allowed: a mapping of recipe keys"),
        ("- 1\n- 2", "1.yaml: found [1, 2]; allowed: a mapping of recipe keys"),
        ("a: [1,\nb: 2", "1.yaml:2: expected ',' or ']', but got '<stream end>'; allowed: valid YAML"),
        ("a: 1\n\tb: 2", "1.yaml:2: found character '\\t' that cannot start any token; allowed: valid YAML"),
        ("a: 1\nb: &x 2\nc: *x", "1.yaml:3: found an alias (*x); allowed: plain YAML, and `base` to share"),
        ("a: 1\nb: !!int 3", "1.yaml:2: found the tag tag:yaml.org,2002:int; allowed: plain YAML, and `base` to share"),
        ("a: 1\n---\nb: 1", "1.yaml:2: but found another document; allowed: valid YAML"),
        ("a: " + "[" * 25 + "]" * 25, "1.yaml: nested too deeply; allowed: 24 levels"),
        ("a: " + "[" * 9999, "1.yaml: nested too deeply; allowed: 24 levels"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_the_line(text: str, problem: str) -> None:
    assert problems(text) == [problem]


def test_a_file_that_is_missing_is_named_with_who_asked_for_it() -> None:
    assert problems("base: [no.yaml, 3]") == [
        "no.yaml (base, 1.yaml:1): cannot be read (No such file or directory); allowed: a YAML file",
        "base (1.yaml:1): found 3; allowed: a file name or a list of them",
    ]


def test_bases_that_go_round_are_refused() -> None:
    assert problems(RL + "base: 2.yaml", "base: ./1.yaml") == [
        "1.yaml (base, 2.yaml:1): is being read already; allowed: a `base` that does not lead back to the file itself",
        "2.yaml (base, 1.yaml:7): is being read already; allowed: a `base` that does not lead back to the file itself",
    ]


def test_a_key_that_is_given_twice_is_refused() -> None:
    assert problems(RL + "window: {stale: mask,\n  stale: drop}") == [
        "window.stale (1.yaml:8): found twice, first at 1.yaml:7; allowed: once"
    ]


def test_keys_are_text() -> None:
    assert problems(RL + "window: {1: a}\n[]: 3") == [
        "window.1 (1.yaml:7): found the key 1; allowed: text (put it in quotes)",
        '"[]" (1.yaml:8): found the key []; allowed: text (put it in quotes)',
    ]


@pytest.mark.parametrize("override", ["max_steps", "=3", "a..b=3", ".a=3", "a b=3", ".".join("a" * 25) + "=1"])
def test_an_override_needs_a_dotted_key(override: str) -> None:
    assert problems(RL, overrides=[override]) == [
        f"override {override!r}: found no dotted key before a `=`; allowed: a.b.c=value"
    ]


def test_an_override_is_valid_yaml() -> None:
    assert problems(RL, overrides=["max_steps=[1"]) == [
        "override 'max_steps=[1': expected ',' or ']', but got '<stream end>'; allowed: valid YAML"
    ]


def test_an_override_does_not_turn_a_value_into_a_mapping() -> None:
    assert problems(RL + "engine: {args: {a: 1}}", overrides=["engine.args.a.b=2"]) == [
        "engine.args.a (override 'engine.args.a.b=2'): found 1 (1.yaml:7), which has no keys; "
        "allowed: to override it as a whole"
    ]


@pytest.mark.parametrize(("kind", "shown"), [("kind: ppo", '"ppo"'), ("kind: [rl]", '["rl"]'), ("kind:", "null")])
def test_an_unknown_kind_is_refused_with_the_known_ones(kind: str, shown: str) -> None:
    assert problems(kind) == [f"kind (1.yaml:1): found {shown}; allowed: rl | sft"]


# ---- whole recipes ----


def as_yaml(value: Any) -> str:
    return json.dumps(value).replace("\x7f", "\\x7f")


NAMES = st.text(max_size=80)  # YAML wants a key to end within 1024 characters
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
DECAY, SHARE, COUNT, POSITIVE = (
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1),
    st.integers(1, 10**20),
    st.floats(1e-300, 1e300),
)
VALID: dict[str, st.SearchStrategy[Any]] = {
    "run.root": st.text(),
    "run.seed": st.integers(min_value=0),
    "model.dtype": st.sampled_from(["float32", "bfloat16"]),
    "prompts.shuffle": st.booleans(),
    "prompts.label": st.text(),
    "agent.args": st.dictionaries(NAMES, ANYTHING, max_size=3),
    "agent.timeout_seconds": POSITIVE,
    "engine.args.any-thing.b": ANYTHING,
    "engine.kv_cache_bytes": st.none() | COUNT,
    "evaluate": st.none()
    | st.fixed_dictionaries({"path": st.text(min_size=1)}, optional={"every": COUNT, "sampling": st.none()}),
    "export": st.none() | st.text(),
    "correction.low": SHARE,
    "correction.high": st.floats(1, 1e300),
    "rollout.sampling.stop": st.lists(st.text(min_size=1)),
    "rollout.sampling.temperature": st.floats(0.01, 1e300) | COUNT,
    "trainer.optimizer": st.fixed_dictionaries(
        {}, optional={"lr": POSITIVE, "betas": st.tuples(DECAY, DECAY).map(list)}
    ),
    "trainer.optimizer.schedule": st.just({"type": "constant"})
    | st.fixed_dictionaries({"type": st.just("cosine"), "floor": SHARE}),
    "window.groups_in_flight": st.just("auto") | st.integers(64, 999),
}


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=VALID))
@example({"export": "\x85\u2028\u2029"})
@example({"run.root": "5e-4", "export": "off", "prompts.label": "0o7"})
def test_a_dumped_recipe_loads_back_to_an_equal_one(values: dict[str, Any]) -> None:
    recipe = rl(RL, overrides=[f"{key}={as_yaml(value)}" for key, value in values.items()])
    for key in values.keys() & {"run.root", "run.seed", "agent.args", "export"}:
        part: Any = recipe
        for name in key.split("."):
            part = getattr(part, name)
        assert part == values[key]
    dumped = dump_recipe(recipe)
    assert load(dumped) == recipe
    assert dump_recipe(load(dumped)) == dumped


def test_a_dumped_recipe_has_every_key_and_reads_the_same_in_older_yaml() -> None:
    recipe = rl(RL, overrides=["correction.level=off", "window.max_policy_lag=0", "export=5e-4x", "run.root='5e-4'"])
    read = yaml.safe_load(dump_recipe(recipe))
    assert read == recipe.model_dump(mode="json")
    assert list(read) == list(RLRecipe.model_fields)


GARBAGE = (
    st.text()
    | st.binary()
    | st.text(st.sampled_from("{}[]:,-&*!|>'\"#%@`?\n \tab1.~\\"))
    | ANYTHING.map(yaml.safe_dump)
)
KEYS = st.sampled_from([row.key for row in describe(RLRecipe)]) | st.sampled_from(
    ["run", "evaluate", "loss", "base", "kind"]
)


@settings(deadline=None, max_examples=200)
@given(GARBAGE, st.lists(st.text() | st.builds(lambda key, value: f"{key}={value}", KEYS, st.text())))
def test_garbage_raises_recipe_errors_only(text: str | bytes, overrides: list[str]) -> None:
    assert problems(text, overrides=overrides)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(KEYS | NAMES, ANYTHING, max_size=4), st.lists(st.tuples(KEYS, ANYTHING), max_size=4))
def test_recipes_with_garbage_inside_load_or_raise_recipe_errors(
    top: dict[str, Any], inside: list[tuple[str, Any]]
) -> None:
    with contextlib.suppress(RecipeError):
        load(RL, as_yaml(top), overrides=[f"{key}={as_yaml(value)}" for key, value in inside])


def test_every_recipe_of_the_repository_loads() -> None:
    for file in sorted(ROOT.glob("recipes/**/*.yaml")):
        if {"kind", "base"} & set(yaml.safe_load(file.read_text()) or {}):
            load_recipe([file])


# ---- documentation ----


@pytest.mark.parametrize("model", [RLRecipe, SFTRecipe])
def test_every_field_of_every_variant_is_documented(model: type[RLRecipe] | type[SFTRecipe]) -> None:
    assert [row.key for row in describe(model) if not row.doc] == []


def test_the_documentation_says_type_default_and_unit() -> None:
    rows = {(row.key, row.when): row for row in describe(RLRecipe)}
    assert rows["agent.timeout_seconds", ""] == FieldText(
        key="agent.timeout_seconds",
        type="number, above 0",
        default="600.0",
        doc="Deadline of one rollout, tools included; past it the rollout is recorded as `timeout`.",
        unit="seconds",
        when="",
    )
    assert rows["run.name", ""].default == "required"
    assert rows["trainer.optimizer.schedule.type", ""][1:3] == ("constant | cosine | linear | wsd", '"constant"')
    assert rows["trainer.optimizer.schedule.floor", "trainer.optimizer.schedule.type = cosine"].default == "0.1"
    assert rows["evaluate.path", "evaluate is set"].default == "required"


def test_what_all_variants_have_is_documented_once() -> None:
    when = {
        key: [row.when for row in describe(RLRecipe) if row.key == f"trainer.optimizer.{key}"]
        for key in ("lr", "momentum", "schedule.warmup_steps", "schedule.floor")
    }
    of_schedule = "trainer.optimizer.schedule.type = "
    assert when == {
        "lr": [""],
        "momentum": ["trainer.optimizer.type = muon"],
        "schedule.warmup_steps": [""],
        "schedule.floor": [of_schedule + "cosine", of_schedule + "linear", of_schedule + "wsd"],  # defaults differ
    }


def test_every_value_of_a_recipe_is_in_the_documentation() -> None:
    def leaves(value: Any, key: str) -> set[str]:
        if isinstance(value, dict) and value:
            return {leaf for name, inner in value.items() for leaf in leaves(inner, f"{key}.{name}" if key else name)}
        return {key}

    recipe = rl(RL, overrides=["evaluate={path: e, sampling: {top_k: 3}}"])
    assert leaves(recipe.model_dump(mode="json"), "") - {row.key for row in describe(RLRecipe)} == set()


def test_reading_a_recipe_needs_neither_torch_nor_pyarrow() -> None:
    code = "import sys, schemas.loading; print({'torch', 'pyarrow', 'ray', 'prefect'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"
