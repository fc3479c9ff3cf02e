"""Lines of code by folder, and the two limits of the house: lines of a file and lines of a function.

Tests are counted but not limited.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS = ("flows", "stages", "storage", "schemas")
OTHERS = ("recipes", "tests")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def breaches(name: str, text: str) -> Iterator[str]:
    """What of one file is over a limit, as `file:line: message`."""
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{name}:1: {num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text, filename=name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"


def main(root: Path) -> int:
    """Print the counts and the breaches; the exit status is 1 when there are any."""
    totals: dict[str, int] = {}
    found: list[str] = []
    for folder in LAYERS + OTHERS:
        files = sorted((root / folder).rglob("*.py"))
        texts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in files}
        totals[folder] = sum(len(text.splitlines()) for text in texts.values())
        print(f"{folder:<8} {len(files):>4} files {totals[folder]:>7,} lines")
        if folder != "tests":
            found += [breach for name, text in texts.items() for breach in breaches(name, text)]
    print(f"the four layers {sum(totals[layer] for layer in LAYERS):>12,} lines")
    for breach in found:
        print(breach, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2]))
