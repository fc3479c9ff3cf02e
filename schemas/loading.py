"""Reads recipes: YAML files and overrides in, a frozen recipe out, or one `RecipeError` that lists every problem.

    defaults  <  files left to right, each above its own `base`  <  overrides `a.b.c=value`

Mappings merge, everything else replaces; a mapping whose `type` differs from the one below replaces it whole, so that
no key of another variant lingers. Scalars are read as in YAML 1.2 (`off` is text, 5e-4 a number); aliases and tags are
refused. Rules across the fields of a model are checked once each of its fields is right.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from schemas.describe import FieldText, Keys, Schema, describe, find, models_in, type_text
from schemas.errors import RecipeError
from schemas.recipe import Recipe, RLRecipe, SFTRecipe

KINDS: dict[str, type[RLRecipe] | type[SFTRecipe]] = {"rl": RLRecipe, "sft": SFTRecipe}
MAX_DEPTH = 24


def load_recipe(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> RLRecipe | SFTRecipe:
    """The recipe that the layers make together. A `RecipeError` has a line per problem: key, place, found, allowed."""
    sources = _Sources(", ".join(map(str, files)) or "no file")
    for file in files:
        sources.add_file(Path(file))
    for override in overrides:
        sources.add_override(override)
    # A layer that cannot be read would make its keys look missing.
    recipe = sources.recipe() if sources.is_whole else None
    if recipe is None or sources.problems:
        count = f"{len(sources.problems)} problem{'s' if len(sources.problems) > 1 else ''}"
        raise RecipeError("\n  ".join([f"the recipe has {count}:", *sources.problems]))
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The whole recipe, defaults too, as YAML in the order of the fields; `load_recipe` makes an equal one of it."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            found = "an alias (*x)" if isinstance(event, yaml.AliasEvent) else f"the tag {event.tag}"
            problem = f"found {found}; allowed: plain YAML, and `base` to share"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes text that version 1.1 or 1.2 of YAML would read as something else."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # PyYAML writes these line breaks as they are and reads them as "\n".
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


_FLOAT = r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", lambda text: None),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "tag:yaml.org,2002:int": (r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)", int),
    "tag:yaml.org,2002:float": (_FLOAT, _finite),
    "tag:yaml.org,2002:str": (r"(?!)", lambda text: text.encode("utf-16", "surrogatepass").decode("utf-16")),
}
for _tag, (_pattern, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), None)
    _Dumper.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), None)


class _Sources:
    """What was read so far: layers from low to high, the place that each key comes from, and what was wrong."""

    def __init__(self, name: str) -> None:
        self.layers: list[tuple[dict[str, Any], dict[Keys, str], Keys]] = []
        self.places: dict[Keys, str] = {(): name}
        self.problems: list[str] = []
        self.is_whole = True

    def problem(self, keys: Keys, place: str, text: str) -> None:
        self.problems.append(f"{_dotted(keys)} ({place}): {text}" if keys else f"{place}: {text}")

    def add_file(self, path: Path, asked: str = "", readers: Keys = ()) -> None:
        """Adds the bases of the file, then the file. `asked` names the line with `base`, `readers` the files above."""

        def at(mark: yaml.Mark | None) -> str:
            return f"{path}:{mark.line + 1}" if mark else f"{path}{asked}"

        try:
            if (real := os.path.realpath(path)) in readers:
                raise ValueError("is being read already; allowed: a `base` that does not lead back to the file itself")
            data, places = self._parse(path.read_bytes(), at)
            if not isinstance(data, dict):
                found = "nothing" if data is None else _show(data)
                raise ValueError(f"found {found}; allowed: a mapping of recipe keys")
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            return self._refuse(error, at)
        bases = data.pop("base", [])
        for base in bases if isinstance(bases, list) else [bases]:
            if isinstance(base, str):
                self.add_file(path.parent / base, f" (base, {places['base',]})", (*readers, real))
            else:
                self.problem(("base",), places["base",], f"found {_show(base)}; allowed: a file name or a list of them")
        self.layers.append((data, places, ()))

    def add_override(self, override: str) -> None:
        place = f"override {override!r}"
        path, equals, text = override.partition("=")
        keys = tuple(path.split("."))
        try:
            if not equals or len(keys) > MAX_DEPTH or not all(re.fullmatch(r"[\w-]+", key) for key in keys):
                raise ValueError("found no dotted key before a `=`; allowed: a.b.c=value")
            data, places = self._parse(text, lambda mark: place)
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            return self._refuse(error, lambda mark: place)
        for key in reversed(keys):
            data = {key: data}
        above = {keys[:end]: place for end in range(1, len(keys))}
        self.layers.append((data, above | {(*keys, *inner): place for inner in places}, keys))

    def _refuse(self, error: Exception, at: Callable[[yaml.Mark | None], str]) -> None:
        self.is_whole = False
        if isinstance(error, OSError):
            text = f"cannot be read ({error.strerror}); allowed: a YAML file"
        elif isinstance(error, RecursionError):
            text = f"nested too deeply; allowed: {MAX_DEPTH} levels"
        else:
            text = getattr(error, "problem", None) or str(error)
            text += "" if "allowed" in text else "; allowed: valid YAML"
        self.problem((), at(getattr(error, "problem_mark", None)), " ".join(text.split()))

    def _parse(self, text: bytes | str, at: Callable[[yaml.Mark | None], str]) -> tuple[Any, dict[Keys, str]]:
        places: dict[Keys, str] = {(): at(None)}

        def plain(node: yaml.Node, keys: Keys) -> Any:
            if len(keys) > MAX_DEPTH:
                raise RecursionError
            if isinstance(node, yaml.ScalarNode):
                try:
                    return _SCALARS[node.tag][1](node.value)
                except ValueError:
                    found = _show(node.value).strip('"')
                    problem = f"found {found}; allowed: finite numbers, valid Unicode"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
            if isinstance(node, yaml.SequenceNode):
                return [plain(item, (*keys, str(index))) for index, item in enumerate(node.value)]
            mapping: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = plain(key_node, (*keys, "?"))
                here, place = (*keys, str(key)), at(key_node.start_mark)
                if not isinstance(key, str):
                    self.problem(here, place, f"found the key {_show(key)}; allowed: text (put it in quotes)")
                elif key in mapping:
                    self.problem(here, place, f"found twice, first at {places[here]}; allowed: once")
                else:
                    places[here] = place
                    mapping[key] = plain(value_node, here)
            return mapping

        node = yaml.compose(text, Loader=_Loader)
        return (None if node is None else plain(node, ())), places

    def recipe(self) -> RLRecipe | SFTRecipe | None:
        """The valid recipe, or None and at least one problem more."""
        kind, place = None, self.places[()]
        for data, places, _ in self.layers:
            kind, place = data.get("kind", kind), places.get(("kind",), place)
        model = KINDS.get(kind) if isinstance(kind, str) else None
        if model is None:
            self.problem(("kind",), place, f"found {_show(kind)}; allowed: {' | '.join(KINDS)}")
            return None
        schema = model.model_json_schema()
        fields = schema["properties"].items()
        tree = self._merged({name: field["default"] for name, field in fields if "default" in field})
        try:
            return model.model_validate_json(json.dumps(tree), strict=True)
        except ValidationError as error:
            self._explain(error, model, schema, tree)
        return None

    def _merged(self, tree: dict[str, Any]) -> dict[str, Any]:
        for data, places, override in self.layers:
            for end in range(1, len(override)):
                below = _value(tree, override[:end])
                if below is not None and not isinstance(below, dict):
                    text = f"found {_show(below)} ({self.places.get(override[:end], 'default')}), which has no keys"
                    self.problem(override[:end], places[override], f"{text}; allowed: to override it as a whole")
                    break
            else:
                tree = _merge(tree, data)
                self.places |= {keys: place for keys, place in places.items() if keys}
        return tree

    def _explain(self, error: ValidationError, model: type[Recipe], schema: Schema, tree: dict[str, Any]) -> None:
        explained = set()
        for item in error.errors(include_url=False):
            keys, node, siblings = find(schema, item["loc"])
            if item["type"].startswith("union_tag") and node:
                keys, node = (*keys, "type"), {"enum": list(models_in(schema, node))}
            place = next(self.places[keys[:end]] for end in range(len(keys), -1, -1) if keys[:end] in self.places)
            if item["type"] == "value_error":  # a validator of ours: "key, key: found ...; allowed: ..."
                for problem in str(item["ctx"]["error"]).splitlines():
                    names, _, text = problem.partition(": ")
                    named = [(*keys, *name.split(".")) for name in names.split(", ")]
                    places = dict.fromkeys(self.places.get(name, "default") for name in named)
                    self.problems.append(f"{', '.join(map(_dotted, named))} ({', '.join(places)}): {text}")
            elif keys in explained:  # one error for each member of a union
                continue
            elif node is None:
                near = _nearest(keys, siblings, describe(model))
                self.problem(keys, place, f"unknown key{near}; allowed: {', '.join(siblings)}")
            elif item["type"] == "missing" and item["loc"][-1] == keys[-1]:
                self.problem(keys, place, f"missing; allowed: {type_text(schema, node)}")
            else:
                found, allowed = _value(tree, keys), type_text(schema, node)
                quoted = allowed.startswith("string") and isinstance(found, int | float)
                hint = f' (write "{_show(found)}")' if quoted else ""
                self.problem(keys, place, f"found {_show(found)}; allowed: {allowed}{hint}")
            explained.add(keys)


def _merge(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if "type" in above and above["type"] != below.get("type", above["type"]):
        return above
    return below | {key: _merge(below[key], value) if key in below else value for key, value in above.items()}


def _value(tree: Any, keys: Keys) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _dotted(keys: Keys) -> str:
    return ".".join(key if re.fullmatch(r"[\w-]+", key) else json.dumps(key) for key in keys)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _nearest(keys: Keys, siblings: list[str], rows: Iterator[FieldText]) -> str:
    """Names that may have been meant: a sibling that is spelled alike, and any key of the recipe that ends alike."""
    near = [_dotted((*keys[:-1], sibling)) for sibling in difflib.get_close_matches(keys[-1], siblings, 1)]
    ends: dict[str, list[str]] = {}
    for row in rows:
        ends.setdefault(row.key.rpartition(".")[2], []).append(f"{row.key} (if {row.when})" if row.when else row.key)
    for end in difflib.get_close_matches(keys[-1].rpartition(".")[2], ends, 1, 1.0 if near else 0.8):
        near += ends[end]
    return f", did you mean {' or '.join(dict.fromkeys(near))}" if near else ""
