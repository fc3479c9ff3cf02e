"""User code named by a recipe: `module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from schemas.errors import RecipeError


def load_module(where: str, key: str) -> ModuleType:
    """The module, imported by its name or run from its file. Raises RecipeError that names `key`."""
    return _run_file(Path(where), key) if where.endswith(".py") else _import(where, key)


@lru_cache
def load_object(entry: str, key: str) -> Any:
    """What an entry names. Raises RecipeError that names `key`."""
    where, _, name = entry.rpartition(":")
    module = load_module(where, key)
    if not hasattr(module, name):
        raise RecipeError(f"{key}: {where} has no {name!r}")
    return getattr(module, name)


def _import(module: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as failure:  # user code may do anything at import
        raise RecipeError(f"{key}: cannot import {module!r}: {type(failure).__name__}: {failure}") from failure


def _run_file(path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise RecipeError(f"{key}: no file {path}")
    name = f"moltflow_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{key}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as failure:  # user code may do anything at import
        raise RecipeError(f"{key}: cannot run {path}: {type(failure).__name__}: {failure}") from failure
    return module
