"""Reads a mathematical answer that a model wrote: structure and units here, expressions by latex2sympy2_extended.

That is Math-Verify's parser, which has a grammar and evaluates no text. What means the same gets one spelling first.
`grading_worker.py` has the conventions. Imports sympy, so only the grader's own processes import it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig

PARSING = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
READING = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc log ln exp sqrt gcd lcm pi det infty"
PLAIN = {  # what means the same, in order
    **dict.fromkeys(("\\!", "\\,", "\\;", "\\:", "\\quad", "\\displaystyle", "\\left", "\\right", "{,}"), ""),
    **dict.fromkeys(("\\ ", "~", "\u00a0"), " "),
    **dict.fromkeys(("\u2212", "\u2013"), "-"),
    **dict.fromkeys(("\u2264", "<=", "\\leq", "\\leslant"), "\\le "),
    **dict.fromkeys(("\u2265", ">=", "\\geq"), "\\ge "),
    **dict.fromkeys(("\u2260", "!=", "\\neq"), "\\ne "),
    **dict.fromkeys(("\\dfrac", "\\tfrac"), "\\frac"),
    "\\lt ": "<",
    "\\gt ": ">",
    "\\langle": "(",
    "\\rangle": ")",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "**": "^",
    "\u00b2": "^2",
    "\u00b3": "^3",
    "\u00b0": "^\\circ",
    "\u00d7": "\\times ",
    "\u00b7": "\\cdot ",
    "\u00f7": "/",
    "\u03c0": "\\pi ",
    "\u221e": "\\infty ",
    "\u221a": "\\sqrt ",
    "\u222a": "\\cup ",
    "\u00b1": "\\pm ",
    "\u2208": "\\in ",
}
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
UNITS = """
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|foot ft feet|
yard yd|mile mi|second s sec|minute min|hour h hr|day|week|month|year yr|gram g|kg kilogram|mg milligram|lb pound|
oz ounce|ton|
l liter litre|ml milliliter|gallon gal|dollar usd|cent|percent percentage|degree deg|mph|km/h kmh|m/s|cm/s|ft/s|
radian rad|newton n|joule j|watt w|volt v|unit
"""
UNIT_NAMES = {alias: names.split()[0] for names in UNITS.split("|") for alias in names.split()}
TEXT = r"\\(?:text|mathrm|textrm|mbox|textbf|mathbf|operatorname)\s*\{([^{}]*)\}"
POWER = r"\s*(?:\^\{?([23])\}?)?"
SEPARATOR = re.compile(r",|;|\\text\{\s*(?:,\s*)?(?:or|and)\s*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])")
UNION = re.compile(r"\\cup(?![a-z])")
RELATION = re.compile(r"\\(?:le|ge|ne)(?![a-z])|[<>=]")
MEMBER = re.compile(r"^\s*[A-Za-z](?:_\{?\w\}?)?\s*\\in(?![a-z])")


class Unreadable(Exception):
    """No mathematics, or none that is understood."""


@dataclass(frozen=True)
class Node:
    """`kind`: `number` (`value`, `unit`, the `text` it was read from), `unordered`, a pair of brackets such as `(]`, or
    `relation` (its operators are in `text`). The last three have `parts`."""

    kind: str
    parts: tuple[Node, ...] = ()
    value: Any = None
    unit: str = ""
    text: str = ""


def read(text: str) -> Node:
    """The structure of an answer. Raises Unreadable."""
    text = MEMBER.sub("", tidy(text))
    if not text:
        raise Unreadable("empty")
    if re.fullmatch(r"(?:\\?\$\s*)?-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:\s*\D.*)?", text) and not SEPARATOR.search(
        re.sub(r"(?<=\d),(?=\d{3})", "", text)
    ):
        return read(re.sub(r"(?<=\d),(?=\d{3})", "", text))  # thousands
    for separator in (UNION, SEPARATOR):
        pieces, _ = split(text, separator)
        if len(pieces) > 1:
            return Node("unordered", tuple(read(piece) for piece in pieces if piece.strip()))
    if "\\pm" in text:
        return Node("unordered", tuple(read(text.replace("\\pm", sign, 1)) for sign in ("+", "-")))
    bracketed = _read_brackets(text)
    if bracketed is not None:
        return bracketed
    pieces, operators = split(text, RELATION)
    if len(pieces) > 1:
        if set(operators) == {"="}:
            pieces = [pieces[0], pieces[-1]]
            operators = ["="]
        return Node("relation", tuple(read(piece) for piece in pieces), text=" ".join(operators))
    return _read_number(text)


def tidy(text: str) -> str:
    """Without delimiters and layout, and with one spelling for what has several."""
    text = text.strip().rstrip(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing):
            text = text[len(opening) : -len(closing)]
    boxed = re.match(r"\\(?:boxed|fbox)\s*\{", text)
    if boxed and closing_bracket(text, boxed.end() - 1) == len(text) - 1:
        text = text[boxed.end() : -1]
    for written, plain in PLAIN.items():
        text = text.replace(written, plain)
    text = re.sub(r"\\(?:mathrm|text|rm)\s*(?:\{\s*([ei])\s*\}|([ei])(?![A-Za-z]))", r"{\1\2}", text)
    text = re.sub(rf"(?<![\\A-Za-z])({'|'.join(FUNCTIONS.split())})(?![A-Za-z])", r"\\\1", text)
    text = re.sub(r"(?<![\\A-Za-z])(max|min)\s*(?=[({\\])", r"\\\1", text)
    text = re.sub(r"(?<![A-Za-z\\])inf(?:inity)?(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(r"(\d*)\.(\d*)\\overline\{(\d+)\}", _repeating, text)
    while (root := re.search(r"\\sqrt\s*\(", text)) and (end := closing_bracket(text, root.end() - 1)) is not None:
        text = f"{text[: root.start()]}\\sqrt{{{text[root.end() : end]}}}{text[end + 1 :]}"
    text = re.sub(r"\\sqrt\s+([A-Za-z0-9])", r"\\sqrt{\1}", text)
    return text.strip()


def _repeating(match: re.Match[str]) -> str:
    whole, start, period = match.groups()
    top = int(f"{whole or 0}{start}{period}") - int(f"{whole or 0}{start}")
    return f"\\frac{{{top}}}{{{'9' * len(period)}{'0' * len(start)}}}"


def closing_bracket(text: str, opening: int) -> int | None:
    """Where the bracket at `opening` is closed; round and square ones may close each other, as in intervals."""
    depth = {"{": 0, "(": 0}
    for index in range(opening, len(text)):
        character = text[index]
        if character in "{}([)]":
            kind = "{" if character in "{}" else "("
            depth[kind] += 1 if character in "{([" else -1
            if depth["{"] <= 0 and depth["("] <= 0:
                return index
    return None


def split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The pieces between separators that are in no bracket, and these separators."""
    pieces, found, start, index = [], [], 0, 0
    while index < len(text):
        if text.startswith("\\begin", index):
            index = max(index, text.rfind("\\end")) + 1
        elif match := separator.match(text, index):
            pieces.append(text[start:index])
            found.append(match.group())
            start = index = match.end()
        elif text[index] in "{([":
            end = closing_bracket(text, index)
            index = len(text) if end is None else end + 1
        else:
            index += 1
    return [*pieces, text[start:]], found


def _read_brackets(text: str) -> Node | None:
    body = re.sub(r"\\([{}])", r"\1", text)
    if body[0] not in "{([" or closing_bracket(body, 0) != len(body) - 1:
        return None
    pieces, _ = split(body[1:-1], SEPARATOR)
    if body[0] == "{":
        if len(pieces) == 1 and "\\{" not in text:
            return read(body[1:-1])
        return Node("unordered", tuple(read(piece) for piece in pieces if piece.strip()))
    if len(pieces) == 1:
        return read(body[1:-1]) if body[0] + body[-1] == "()" else None
    return Node(body[0] + body[-1], tuple(read(piece) for piece in pieces))


def _read_number(text: str) -> Node:
    text, unit = take_unit(text)
    scale = re.fullmatch(rf"(.*\d)\s*(?:\\text\{{)?\s*({'|'.join(SCALES)})s?\s*\}}?", text, re.IGNORECASE)
    if scale:
        text = f"{scale[1]}\\times 10^{{{SCALES[scale[2].lower()]}}}"
    text = re.sub(r"(\d)[eE]([+-]?\d+)(?![\d.])", r"\1\\times 10^{\2}", text)
    text = re.sub(r"(?<![\d.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"(\1+\2/\3)", text)
    text = re.sub(r"(?<![\d.}\w])(\d+)\s*(\\frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d+))", r"(\1+\2)", text)
    while tower := re.search(r"\^([A-Za-z0-9.]+)\^([A-Za-z0-9.]+|\{.*\})(?!\^)", text):  # the upper power comes first
        text = f"{text[: tower.start()]}^{{{tower[1]}^{tower[2]}}}{text[tower.end() :]}"
    text = re.sub(r"\\binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}", text)
    text = re.sub(r"(?<=\d)\s*\(", r"\\cdot(", text)  # the grammar would read a mixed number
    words = re.sub(r"\\(?:begin|end)\{\w+\}|\\[A-Za-z]+", " ", text)
    if "\\text" in text or re.search(r"[A-Za-z]{4,}|\b(?:yes|no|not|the|true|none|is|it)\b", words):
        raise Unreadable(text)
    try:
        value = latex2sympy(text, is_real=True, normalization_config=PARSING, conversion_config=READING)
    except MemoryError:
        raise
    except Exception as failure:  # a parser given anything may raise anything
        raise Unreadable(str(failure)) from failure
    return Node("number", value=_exact(value), unit=unit, text=text.strip())


def take_unit(text: str) -> tuple[str, str]:
    """The number and its unit's one name, "" without one. Only what has a digit before it can be a unit."""
    text = text.strip()
    money = re.fullmatch(r"(-?)\s*(?:\\?\$|€|£)\s*(.*\d.*)", text)
    if money:
        return money[1] + money[2], "dollar" if "$" in text else text.strip("-")[0]
    for pattern, name in ((r"(.*\d.*?)\s*\\?%", "percent"), (r"(.*\d.*?)\s*\^\s*\{?\s*\\circ\s*\}?", "degree")):
        if found := re.fullmatch(pattern, text):
            return found[1], name
    if base := re.fullmatch(r"([0-9A-Fa-f]*\d[0-9A-Fa-f]*)_\{?(\d+)\}?", text):
        return base[1], f"base {int(base[2])}"
    found = re.fullmatch(rf"(.*?\d.*?)\s*{TEXT}{POWER}", text)
    found = found or re.fullmatch(rf"(.*[\d}})!])\s+([A-Za-z]+(?:[ /][A-Za-z]+)*){POWER}", text)
    found = found or re.fullmatch(rf"(.*\d)([A-Za-z]{{2,}}){POWER}", text)
    if not found:
        return text, ""
    unit = " ".join(found[2].split())
    known = unit_name(unit)
    sure = found[0].endswith("}") or "\\" in text[found.end(1) : found.start(2)] or known in UNIT_NAMES.values()
    if unit.lower().rstrip("s") in SCALES or not (sure or len(unit) > 2):
        return text, ""
    words = unit.lower().split()
    if words and words[0].rstrip("s") in SCALES:
        return f"{found[1]} {words[0]}", unit_name(" ".join(words[1:])) + (f"^{found[3]}" if found[3] else "")
    return found[1], known + (f"^{found[3]}" if found[3] else "")


def unit_name(unit: str) -> str:
    """One name for all spellings of a unit. Unknown ones are their own name without the plural's s."""
    power = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
    first, _, rest = unit.lower().strip(" .").partition(" ")
    if first in power and rest:
        return unit_name(rest) + power[first]
    if unit in UNIT_NAMES or unit.lower() in UNIT_NAMES:
        return UNIT_NAMES.get(unit) or UNIT_NAMES[unit.lower()]
    single = re.sub(r"(?<=..)s$", "", unit.lower().strip(" ."))
    return UNIT_NAMES.get(single, single)


def _exact(value: Any) -> Any:
    """Evaluated, with decimals as fractions and `i` as the imaginary unit."""
    imaginary = {symbol: sympy.I for symbol in getattr(value, "free_symbols", ()) if symbol.name == "i"}
    value = value.subs(imaginary) if imaginary else value
    value = value.replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part)))
    return value.doit()
