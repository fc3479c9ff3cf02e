"""Reading JSONL files of prompts and conversations; errors name file and row."""

from __future__ import annotations

import json
from typing import Any

import fsspec

from schemas.errors import RecipeError


def read_jsonl(uri: str) -> list[dict[str, Any]]:
    """All rows of a local or remote JSONL file. Raises RecipeError for an unreadable file, a bad row or no rows."""
    try:
        with fsspec.open(uri, "rb") as file:
            lines = file.read().decode().split("\n")  # not splitlines: JSON text may hold U+2028 and its like
    except FileNotFoundError:
        raise RecipeError(f"{uri}: no such file; allowed: a JSONL file, local or an fsspec URI") from None
    except (OSError, ValueError, ImportError) as problem:
        raise RecipeError(f"{uri}: cannot be read ({problem}); allowed: a JSONL file in UTF-8") from None
    rows: list[dict[str, Any]] = []
    for line in filter(str.strip, lines):
        number = len(rows) + 1
        try:
            row = json.loads(line)
        except json.JSONDecodeError as problem:
            raise RecipeError(f"{uri}, row {number}: not JSON: {problem}") from None
        if not isinstance(row, dict):
            raise RecipeError(f"{uri}, row {number}: found {type(row).__name__}; allowed: a JSON object")
        rows.append(row)
    if not rows:
        raise RecipeError(f"{uri}: has no rows")
    return rows


def column(uri: str, rows: list[dict[str, Any]], name: str) -> list[Any]:
    """One column of all rows. Raises RecipeError naming the first row that lacks it."""
    for number, row in enumerate(rows, start=1):
        if name not in row:
            raise RecipeError(f"{uri}, row {number}: no column {name!r}; its columns are {sorted(row)}")
    return [row[name] for row in rows]
