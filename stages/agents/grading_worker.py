"""Compares two mathematical answers. `grading.py` runs this file as a program of its own and ends it at the time limit.

What is written is read in two steps: its outer structure (sets, tuples, intervals, lists, relations, units) here, the
expressions by latex2sympy2_extended, Math-Verify's parser, which has a grammar and evaluates no text. Math-Verify's own
comparison is not used: it drops units and compares at 15 decimals, so that 1/2^99 equals 1/2^98. Here rational numbers
are compared exactly, others to 40 significant digits, and expressions with variables at a few rational points.

Conventions, each with a test:
- A unit counts only when both sides have one; then it must be the same, whatever its spelling. Nothing is converted.
  Per cent, degrees, money and the base of a number are units as well: 50 % equals 50, not 0.5.
- A decimal is exact. With at least six significant digits it also stands for a number that is no finite decimal and
  rounds to it: 0.333333 equals 1/3, 0.33 does not.
- `a, b`, `a or b`, `\\pm a` and sets have no order, tuples and intervals have one, and brackets matter.
- `x = 5` equals 5, and another equation with the same solutions when it differs by a constant factor.
- `i` is the imaginary unit, `e` is Euler's number, a mixed number is a sum, and text equals the same text only.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import sympy

from stages.agents.answers import TEXT, Node, Unreadable, read, tidy

RULES = 1
"""To be raised with every change of what counts as equal: rewards are compared over time."""
MAX_ANSWER_CHARACTERS = 2000
MAX_MEMORY_BYTES = 2 << 30
DIGITS = 40
POINTS = ((3, 7), (5, 2), (-4, 9), (-11, 6))
"""Where expressions with variables are compared; every variable gets numbers of its own made from these."""
FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}


def equal(gold: Node, answer: Node) -> bool:
    if gold.kind != answer.kind:
        left, right = _without_name(gold), _without_name(answer)
        return (left is not gold or right is not answer) and left.kind == right.kind and equal(left, right)
    if gold.kind == "number":
        return _equal_units(gold.unit, answer.unit) and _equal_numbers(gold, answer)
    if gold.kind == "unordered":
        return _equal_unordered(_distinct(gold.parts), _distinct(answer.parts))
    if gold.kind == "relation":
        return _equal_relations(gold, answer)
    return len(gold.parts) == len(answer.parts) and all(map(equal, gold.parts, answer.parts))


def _without_name(node: Node) -> Node:
    """What `x = ...` or `f(x) = ...` says; others as they are."""
    named = node.kind == "relation" and node.text == "=" and node.parts[0].kind == "number"
    value = node.parts[0].value if named else None
    if isinstance(value, sympy.Symbol | sympy.core.function.AppliedUndef):
        return node.parts[1]
    return node


def _distinct(parts: tuple[Node, ...]) -> list[Node]:
    kept: list[Node] = []
    for part in parts:
        if not any(equal(other, part) for other in kept):
            kept.append(part)
    return kept


def _equal_unordered(gold: list[Node], answer: list[Node]) -> bool:
    rest = list(answer)
    for part in gold:
        same = next((other for other in rest if equal(part, other)), None)
        if same is None:
            return False
        rest.remove(same)
    return not rest


def _equal_relations(gold: Node, answer: Node) -> bool:
    operators, others = gold.text.split(), answer.text.split()
    if operators == others and all(map(equal, gold.parts, answer.parts)):
        return True
    if operators == [FLIPPED[o] for o in reversed(others)] and all(map(equal, gold.parts, reversed(answer.parts))):
        return True
    if len(operators) != 1 or len(others) != 1 or any(part.kind != "number" for part in (*gold.parts, *answer.parts)):
        return False
    left, right = (node.parts[0].value - node.parts[1].value for node in (gold, answer))
    if left.free_symbols != right.free_symbols or not left.free_symbols:
        return False
    ratio = _constant_ratio(left, right)
    if ratio is None:
        return False
    flipped = FLIPPED[operators[0]] if ratio.is_negative else operators[0]
    return others[0] == flipped


def _constant_ratio(left: Any, right: Any) -> Any:
    """The number by which two expressions differ at all points, None when there is none."""
    for point in _points(left, right):
        ratio = left.subs(point) / right.subs(point)
        if ratio.is_number and ratio.is_real and ratio.is_finite and not ratio.is_zero:
            return ratio if _same_everywhere(left, ratio * right) else None
    return None


def _equal_units(gold: str, answer: str) -> bool:
    return not gold or not answer or gold == answer


def _equal_numbers(gold: Node, answer: Node) -> bool:
    a, b = gold.value, answer.value
    if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
        same_shape = getattr(a, "shape", None) == getattr(b, "shape", None)
        return same_shape and all(map(_same_everywhere, a.flat(), b.flat()))
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return bool(a == b)
    if a.free_symbols != b.free_symbols:
        a, b = sympy.simplify(a), sympy.simplify(b)
        if a.free_symbols != b.free_symbols:
            return False
    return _same_everywhere(a, b) or _rounds_to(gold.text, b) or _rounds_to(answer.text, a)


def _same_everywhere(a: Any, b: Any) -> bool:
    if a == b:
        return a not in (sympy.nan, sympy.zoo)
    if not a.is_finite and a.is_number and b.is_number:
        return False  # infinities are equal only to themselves
    compared = 0
    for point in _points(a, b):
        left, right = a.subs(point), b.subs(point)
        if left.has(sympy.nan, sympy.zoo, sympy.oo) or right.has(sympy.nan, sympy.zoo, sympy.oo):
            continue
        negative = any(number < 0 for number in point.values())
        if negative and (left.is_real is False or right.is_real is False):
            continue  # roots and logarithms have several branches there
        if not _same_number(left, right):
            return False
        compared += 1
    return compared > 0


def _points(a: Any, b: Any) -> list[dict[Any, Any]]:
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return [{}]
    return [
        {symbol: sympy.Rational(top * (index + 2) + 1, bottom + index) for index, symbol in enumerate(symbols)}
        for top, bottom in POINTS
    ]


def _same_number(a: Any, b: Any) -> bool:
    difference = a - b
    if difference.is_Rational:
        return bool(difference == 0)
    left, right, rest = (number.evalf(DIGITS + 20, maxn=1000) for number in (a, b, difference))
    if not (left.is_number and right.is_number and rest.is_number):
        return bool(sympy.simplify(difference) == 0)
    return bool(abs(rest) <= sympy.Float(10) ** -DIGITS * max(abs(left), abs(right)))


def _rounds_to(decimal: str, exact: Any) -> bool:
    """Whether a decimal of at least six significant digits is the rounding of a number that is no finite decimal."""
    written = re.fullmatch(r"(-?)(\d*)\.(\d+)", decimal.replace(" ", ""))
    if not written or len((written[2] + written[3]).lstrip("0")) < 6 or not exact.is_real or exact.free_symbols:
        return False
    if exact.is_Rational and set(sympy.factorint(exact.q)) <= {2, 5}:
        return False
    half = sympy.Rational(1, 2 * 10 ** len(written[3]))
    return bool(abs(exact - sympy.Rational("".join(written.groups()[:2]) + "." + written[3])) <= half)


# ---- the program ----


def grade(answer: str, gold: str) -> str:
    """`correct`, `wrong` or `unparseable`. A gold answer that is no mathematics is text."""
    if not tidy(answer) or not tidy(gold) or len(answer) > MAX_ANSWER_CHARACTERS:
        return "unparseable"
    same_text = _letters(answer) == _letters(gold)
    try:
        right = read(gold)
    except Unreadable:
        return "correct" if same_text else "wrong"
    try:
        given = read(answer)
    except Unreadable:
        return "correct" if same_text else "unparseable"
    return "correct" if equal(right, given) else "wrong"


def _letters(text: str) -> str:
    text = re.sub(TEXT, r"\1", tidy(text))
    return " ".join(text.lower().replace("{", "").replace("}", "").split())


def serve(requests: Any, respond: Callable[[str], Any]) -> None:
    """Answer JSON lines, `{"answer", "gold", "seconds"}`, with `{"verdict"}`. The time limit ends the whole process."""
    libraries = f"latex2sympy2_extended {version('latex2sympy2_extended')}, sympy {sympy.__version__}"
    respond(json.dumps({"version": f"rules {RULES}, {libraries}"}))
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # SIGALRM's default ends even C code
        try:
            verdict = grade(request["answer"], request["gold"])
        except MemoryError:
            verdict = "timeout"
        except Exception:  # computer algebra given anything may raise anything; no answer may end the process
            verdict = "unparseable"
        signal.setitimer(signal.ITIMER_REAL, 0)
        respond(json.dumps({"verdict": verdict}))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin, lambda line: print(line, flush=True))
