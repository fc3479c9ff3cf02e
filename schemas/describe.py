"""The documentation of a recipe, read from its JSON schema, where pydantic states types, bounds, defaults and docs.

`moltflow recipe show --explain` prints the rows of `describe`; `loading` takes from here what an error says is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

Keys = tuple[str, ...]
Schema = dict[str, Any]

_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "pattern": "matching",
    "minLength": "not shorter than",
}
_NAMES = {"object": "mapping", "boolean": "true | false"}
_UNITS = ("seconds", "bytes", "tokens", "steps", "groups", "turns", "prompts")


class FieldText(NamedTuple):
    """A row of the documentation. `when` says what makes the key exist, e.g. `evaluate is set`; else empty."""

    key: str
    type: str
    default: str
    doc: str
    unit: str
    when: str


def describe(model: type[BaseModel]) -> Iterator[FieldText]:
    """A row for each value that `model` takes, in the order of its fields, with those of all variants."""
    schema = model.model_json_schema()
    return _rows(schema, schema, {}, (), "")


def _rows(schema: Schema, model: Schema, given: Any, keys: Keys, when: str) -> Iterator[FieldText]:
    """`given` is the default of the model as a whole; it goes before the defaults of its fields."""
    for name, child in model["properties"].items():
        key, node = ".".join((*keys, name)), _resolved(schema, child)
        default = given.get(name, node.get("default", ...))
        models = models_in(schema, node)
        tags = [tag for tag in models if tag]
        if tags:
            docs = [f"`{tag}`: {models[tag]['properties']['type'].get('description', '')}" for tag in tags]
            node = {"enum": tags, "description": " ".join([node.get("description", ""), *docs])}
        if tags or not models or default is None:
            yield FieldText(
                key=f"{key}.type" if tags else key,
                type=type_text(schema, node),
                default="required" if default is ... else json.dumps(default["type"] if tags and default else default),
                doc=" ".join(node.get("description", "").split()),
                unit=next((unit for unit in _UNITS if unit in name.split("_")), ""),
                when=when,
            )
        inside = f"{key} is set" if default is None else when
        variants: dict[str, list[FieldText]] = {}
        for tag, inner in models.items():
            below = default if isinstance(default, dict) and default.get("type") == (tag or default.get("type")) else {}
            if tag:
                inside = f"{key}.type = {tag}"
                inner = {"properties": {name: child for name, child in inner["properties"].items() if name != "type"}}
            variants[inside] = list(_rows(schema, inner, below, (*keys, name), inside))
        yield from _said_once(variants, when)


def _said_once(variants: dict[str, list[FieldText]], when: str) -> Iterator[FieldText]:
    """The rows of variants, by what chooses each; what all of them have comes once, under `when` alone."""
    general = {
        inside: {row: row._replace(when=when) if row.when == inside else row for row in rows}
        for inside, rows in variants.items()
    }
    shared = set.intersection(*(set(rows.values()) for rows in general.values())) if len(general) > 1 else set()
    rows = (row if wide not in shared else wide for of_variant in general.values() for row, wide in of_variant.items())
    yield from dict.fromkeys(rows)


def _resolved(schema: Schema, node: Schema) -> Schema:
    return schema["$defs"][node["$ref"].rpartition("/")[2]] | node if "$ref" in node else node


def models_in(schema: Schema, node: Schema) -> dict[str, Schema]:
    """The models that a node may hold: the variants of a union by their `type`, any other model under ''."""
    for part in (_resolved(schema, part) for part in node.get("anyOf", [node])):
        if "discriminator" in part:
            mapping = part["discriminator"]["mapping"]
            return {tag: _resolved(schema, {"$ref": ref}) for tag, ref in mapping.items()}
        if "properties" in part:
            return {"": part}
    return {}


def find(schema: Schema, location: tuple[int | str, ...]) -> tuple[Keys, Schema | None, list[str]]:
    """What pydantic's location means: the keys in the YAML, the schema there (None if unknown), the names allowed."""
    keys: Keys = ()
    node: Schema = schema
    siblings: list[str] = []
    for part in location:
        models = models_in(schema, node)
        if part in models and part:  # pydantic names the variant between two keys
            node = models[part]
        elif "" in models:
            siblings = list(models[""]["properties"])
            keys = (*keys, str(part))
            if part not in siblings:
                return keys, None, siblings
            node = _resolved(schema, models[""]["properties"][part])
    return keys, node, siblings


def type_text(schema: Schema, node: Schema) -> str:
    node = _resolved(schema, node)
    models = models_in(schema, node)
    if "anyOf" in node:
        return " or ".join(type_text(schema, part) for part in node["anyOf"])
    if "enum" in node or "const" in node:
        return " | ".join(map(str, node.get("enum", [node.get("const")])))
    if "" in models:
        return f"mapping with {', '.join(models['']['properties'])}"
    if models:
        return f"mapping with type: {' | '.join(models)}"
    if node.get("type") == "array":
        items = node.get("prefixItems", [node.get("items", {})])
        return f"list of {f'{len(items)} x ' if 'prefixItems' in node else ''}{type_text(schema, items[0])}"
    name = str(node.get("type", "anything"))
    bounds = [f"{word} {node[bound]}" for bound, word in _BOUNDS.items() if bound in node]
    return ", ".join([_NAMES.get(name, name), *bounds])
