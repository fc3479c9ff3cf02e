"""The grader: what counts as equal, the four verdicts, and answers that hang, break or attack it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from stages.agents.grading import PACKAGE_ROOT, Grader, Verdict, extract_answer

HANGS = "9**9**9**9"  # 9^(9^(9^9)): more digits than atoms
PATIENT = 120.0
"""Seconds for comparisons whose verdict does not depend on a clock, however busy the machine."""


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    grader = Grader(num_processes=2, max_seconds=PATIENT)
    yield grader
    grader.close()


@pytest.fixture
def hasty() -> Iterator[Grader]:
    """A grader whose limit a hanging answer reaches soon."""
    grader = Grader(num_processes=2, max_seconds=1.0)
    yield grader
    grader.close()


def processes() -> list[psutil.Process]:
    """The grading processes that this process started."""
    found = []
    for child in psutil.Process().children():
        try:
            if PACKAGE_ROOT in child.cmdline() and "grading_worker" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


# ---- equal and not ----

SAME = [
    ("10000", "10^4"),
    ("1024", "2^{10}"),
    ("300000", r"3\times 10^5"),
    ("2 million", "2000000"),
    ("2.5 million", r"2{,}500{,}000"),
    ("{1,2,3}", "{3,2,1}"),
    (r"\{1,2,3\}", r"\left\{3, 2, 1\right\}"),
    ("2 or 3", "3 or 2"),
    ("2 or 3", "3, 2"),
    ("x>3", "3<x"),
    (r"x \geq 3", r"3 \le x"),
    (r"1<x\le 3", r"3\ge x>1"),
    ("-x<3", "x>-3"),
    (r"\sqrt{1/n}", r"1/\sqrt n"),
    ("7 3/4", "31/4"),
    (r"7\frac{3}{4}", "7.75"),
    ("1e3", "1000"),
    (r"\$5.00", "5"),
    ("$5.00$", "5"),
    ("25 cm^2", "25"),  # a unit counts only when both sides have one
    (r"25 \text{ cm}^2", "25 square centimeters"),
    ("5 min", "5 minutes"),
    ("1 foot", "1 ft"),
    (r"50\%", "50 percent"),
    (r"50\%", "50"),
    (r"90^\circ", "90 degrees"),
    ("12_8", "12"),
    ("1,234,567", "1234567"),
    (r"\$1,234.50", "1234.5"),
    ("0.333333", "1/3"),
    ("3.14159", r"\pi"),
    (r"0.\overline{3}", r"\frac13"),
    (r"0.1\overline{6}", "1/6"),
    ("x=5", "5"),
    ("f(x)=x^2", "x^2"),
    ("x = 1 or x = 2", "2, 1"),
    (r"\pm 2", "-2, 2"),
    ("2x+2=4y", "x+1=2y"),
    ("(1,2)", r"\left( 1, \frac{4}{2} \right)"),
    ("(1,2]", r"\left(1,2\right]"),
    (r"x\in[1,2)", "[1,2)"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"2\sin x\cos x", r"\sin(2x)"),
    ("3+4i", "4i+3"),
    (r"e^{i\pi}", "-1"),
    (r"1-1/\mathrm e", r"\frac{e-1}{e}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&2^2\end{pmatrix}"),
    (r"\frac{\sqrt{2}}{2}", r"1/\sqrt{2}"),
    (r"4\sqrt(2)", r"\sqrt{32}"),
    ("2(3)", "6"),
    ("2**10", "1024"),
    (r"\log_2 8", "3"),
    ("2^3^2", "512"),
    (r"\binom52", "10"),
    (r"\boxed{42}", "42."),
    (r"\text{Tuesday}", "tuesday"),
    ("Evelyn", "evelyn"),
    (r"\emptyset", r"\emptyset"),
    ("1/2^{99}", "2^{-99}"),
]

DIFFERENT = [
    ("5 minutes", "5 hours"),
    ("12 feet", "12 inches"),
    ("5 cm", "5 m"),
    ("5 cm^2", "5 cm^3"),
    ("5 students", "5 teachers"),
    ("60 minutes", "1 hour"),  # nothing is converted
    (r"50\%", "0.5"),
    ("12_8", "12_9"),
    (r"\$5", "5 cents"),
    ("4", r"4\sqrt(2)"),
    ("1/2004!", "1/2006!"),
    ("1/2^{99}", "1/2^{98}"),
    ("x+1/2^{99}", "x+1/2^{98}"),
    (r"\pi+1/2004!", r"\pi+1/2006!"),
    (r"x+\pi+1/2004!", r"x+\pi+1/2006!"),
    (r"1-1/\mathrm e", r"1+1/\mathrm e"),
    ("(1,2)", "(2,1)"),
    ("(2,1)", "(3,1)"),
    ("(1,2)", "[1,2]"),
    ("[1,2)", "(1,2)"),
    ("(1,2)", "1,2"),
    ("{1,2}", "{1,2,3}"),
    ("1,2", "1.2"),
    ("x>3", r"x\ge 3"),
    ("x>3", "x<3"),
    ("2x+2=4y", "x+1=3y"),
    ("x=5", "y=6"),
    ("x", "y"),
    ("|x|", "x"),
    ("0.33", "1/3"),
    ("3.14", r"\pi"),
    ("0.0000001", "0.0000002"),
    ("99999.9", "100000"),
    ("2^{1000000}", "2^{1000001}"),
    (r"\infty", r"-\infty"),
    (r"\frac{1}{0}", r"\frac{2}{0}"),
    ("i", "1"),
    (r"\text{Tuesday}", r"\text{Monday}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_is_equal_is_correct_both_ways(one: str, other: str, grader: Grader) -> None:
    assert grader.grade_sync(one, other).verdict == grader.grade_sync(other, one).verdict == Verdict.CORRECT


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_differs_is_not_correct_either_way(one: str, other: str, grader: Grader) -> None:
    assert Verdict.CORRECT not in (grader.grade_sync(one, other).verdict, grader.grade_sync(other, one).verdict)


@pytest.mark.parametrize("empty", ["", " ", "$$", r"\boxed{}", ".", r"\(\)"])
def test_an_empty_answer_equals_nothing(empty: str, grader: Grader) -> None:
    for other in ("5", "", empty, r"\text{Tuesday}", "0"):
        assert grader.grade_sync(empty, other).verdict == Verdict.UNPARSEABLE


@pytest.mark.parametrize(
    "answer",
    [
        "I don't know",
        "none of these",
        "(1,",
        r"\frac{1}",
        r"\sqrt{" * 200 + "2" + "}" * 200,
        "{" * 500 + "1" + "}" * 500,
        "5" * 2001,
        "\ud800",
        "\0",
        "lambda: 5",
        r"\input{/etc/passwd}",
    ],
)
def test_what_cannot_be_read_is_told_apart_from_wrong(answer: str, grader: Grader) -> None:
    assert grader.grade_sync(answer, "5").verdict == Verdict.UNPARSEABLE
    assert grader.grade_sync("6", "5").verdict == Verdict.WRONG


def test_no_answer_is_evaluated(grader: Grader, tmp_path: Path) -> None:
    touch = f"__import__('os').system('touch {tmp_path}/x')"
    for text in (touch, f"({touch},1)", f"\\text{{{touch}}}", f"5+{touch}", f"{{{touch}}}", f"x={touch}"):
        assert grader.grade_sync(text, "5").verdict != Verdict.CORRECT
        assert grader.grade_sync("5", text).verdict != Verdict.CORRECT
    assert list(tmp_path.iterdir()) == []


async def test_every_grade_says_the_version_of_the_grader(grader: Grader) -> None:
    versions = {(await grader.grade(answer, "5")).version for answer in ("5", "6", "", "I don't know")}
    assert len(versions) == 1 and "rules 1, latex2sympy2_extended 1." in versions.pop()


# ---- where the answer is ----


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> <answer> 2\n</answer>", "2"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{1} <answer>2</answer> \boxed{3}", "2"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{\boxed{7}}", "7"),
        ("<answer></answer>", ""),
        ("The answer is 8.", None),
        ("9", None),
        ("<answer>10", None),
        ("", None),
    ],
)
def test_only_a_marked_answer_counts(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


# ---- hostile answers and limits ----


def test_a_hanging_answer_is_a_timeout_off_the_main_thread_and_leaves_the_others_alone(hasty: Grader) -> None:
    assert hasty.grade_sync("5", "5").verdict == Verdict.CORRECT
    found: dict[str, Verdict] = {}

    def grade(answer: str, gold: str, name: str) -> None:
        found[name] = hasty.grade_sync(answer, gold).verdict

    threads = [threading.Thread(target=grade, args=arguments) for arguments in ((HANGS, "5", "a"), ("5", HANGS, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT)
    assert found == {"a": Verdict.TIMEOUT, "b": Verdict.TIMEOUT}
    patient = Grader(num_processes=1, max_seconds=PATIENT)
    assert patient.grade_sync("1/2", "0.5").verdict == Verdict.CORRECT
    patient.close()


def test_the_pool_recovers_from_a_row_of_hanging_answers_without_losing_a_sample(hasty: Grader) -> None:
    answers = [HANGS, "5", HANGS, "6", HANGS, "5"]
    with ThreadPoolExecutor(6) as threads:
        verdicts = [grade.verdict for grade in threads.map(lambda answer: hasty.grade_sync(answer, "5"), answers)]
    assert [verdicts[index] for index in (0, 2, 4)] == [Verdict.TIMEOUT] * 3
    # these are certain unless the machine stands still for the second that they have
    assert {verdicts[1], verdicts[5]} <= {Verdict.CORRECT, Verdict.TIMEOUT} and verdicts[3] != Verdict.CORRECT
    assert len(processes()) <= 4


@pytest.mark.parametrize("answer", [HANGS, "9^{9^{9^9}}", "99999999!", "1" + ",1" * 900, r"\int_0^1 x^{x^x} dx"])
def test_the_limit_holds_in_python_and_in_c(answer: str, hasty: Grader) -> None:
    hasty.grade_sync("1", "1")
    start = time.monotonic()
    assert hasty.grade_sync(answer, r"\sqrt{5}").verdict != Verdict.CORRECT
    assert time.monotonic() - start < PATIENT  # and not the age of the universe


def test_memory_is_bounded(grader: Grader) -> None:
    grader.grade_sync("1", "1")
    for process in processes():
        assert process.rlimit(psutil.RLIMIT_AS)[0] == 2 << 30
        assert process.environ().keys() <= {"PATH", "LC_CTYPE"}


def test_a_process_that_is_killed_is_replaced(grader: Grader) -> None:
    grader.grade_sync("1", "1")
    for process in processes():
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert [grader.grade_sync("1", "1").verdict for _ in range(4)] == [Verdict.CORRECT] * 4


async def test_the_event_loop_goes_on_while_an_answer_hangs(hasty: Grader) -> None:
    hanging = asyncio.create_task(hasty.grade(HANGS, "5"))
    ticks = 0
    while not hanging.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert hanging.result().verdict == Verdict.TIMEOUT and ticks > 10


async def test_cancelling_leaves_a_grader_that_works(hasty: Grader) -> None:
    hanging = asyncio.create_task(hasty.grade(HANGS, "5"))
    await asyncio.sleep(0.1)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert (await hasty.grade("", "5")).verdict in (Verdict.UNPARSEABLE, Verdict.TIMEOUT)


def test_closing_ends_the_processes() -> None:
    before = {process.pid for process in processes()}
    grader = Grader(num_processes=1)
    grader.grade_sync("1", "1")
    assert {process.pid for process in processes()} != before
    grader.close()
    assert {process.pid for process in processes()} == before


def test_no_process_outlives_a_caller_that_is_killed_while_an_answer_hangs() -> None:
    code = f"""
import sys
sys.path.insert(0, {PACKAGE_ROOT!r})
from stages.agents.grading import Grader
grader = Grader(num_processes=1, max_seconds=3.0)
grader.grade_sync("1", "1")
print(grader._free.queue[0]._process.pid, flush=True)
grader.grade_sync({HANGS!r}, "5")
"""
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    worker = int(caller.stdout.readline())
    time.sleep(0.3)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{worker}"):
        assert time.monotonic() < end, "the grading process lives on"
        time.sleep(0.05)


@pytest.mark.parametrize(("num_processes", "max_seconds"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_a_grader_without_processes_or_time_is_refused(num_processes: int, max_seconds: float) -> None:
    with pytest.raises(ValueError, match=r"Grader: found .*; allowed: 1 or more processes"):
        Grader(num_processes, max_seconds)
