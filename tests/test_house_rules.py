"""The limits that `make check` puts on files and functions."""

from __future__ import annotations

from tests.tools.house_rules import breaches


def lines(count: int) -> str:
    return "    pass\n" * count


def test_what_is_within_both_limits_passes() -> None:
    function_of_60_lines = "def f():\n" + lines(59)
    assert list(breaches("a.py", function_of_60_lines + "#\n" * 340)) == []


def test_a_file_of_401_lines_is_named() -> None:
    assert list(breaches("a.py", "#\n" * 401)) == ["a.py:1: 401 lines, at most 400"]


def test_a_function_of_61_lines_is_named_wherever_it_is() -> None:
    method = "class A:\n  @decorated\n  async def f(self):\n" + lines(60)
    assert list(breaches("a.py", method)) == ["a.py:3: f has 61 lines, at most 60"]
