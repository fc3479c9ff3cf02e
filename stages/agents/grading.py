"""Grades mathematical answers in processes of their own, with a time limit that holds wherever it is called from.

    grade = await math_grader().grade("\\\\frac{1}{2}", "0.5")     # or grade_sync(...) from a thread
    assert grade.verdict is Verdict.CORRECT

A model's answer is hostile input: no text is evaluated, what goes between the processes is JSON, and the processes have
an empty environment and bounded memory. At the time limit the operating system ends the process, whatever computer
algebra it is in; the others go on and the next request gets a new one. What counts as equal is said in
`grading_worker.py`.

Needs the package latex2sympy2_extended with the runtime of its grammar (antlr4-python3-runtime).
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from schemas.errors import MoltflowError

NUM_PROCESSES = 2
MAX_SECONDS = 5.0
START_SECONDS = 120.0
"""How long a process may take to import sympy on a busy machine. It does not count towards the limit of a request."""
GRACE_SECONDS = 5.0
"""The process ends itself at the limit; after this much more it is ended from here."""
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from stages.agents.grading_worker import main; main()"


class Verdict(StrEnum):
    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSEABLE = "unparseable"
    """There is no answer, or it is no mathematics although the gold answer is."""
    TIMEOUT = "timeout"
    """The time or memory limit ended the comparison, so nothing is known."""


@dataclass(frozen=True)
class Grade:
    verdict: Verdict
    version: str
    """Of the grader: rules and libraries. To be stored with the reward."""


class Grader:
    """A pool of grading processes. They start when first needed and end with `close` or with this process."""

    def __init__(self, num_processes: int = NUM_PROCESSES, max_seconds: float = MAX_SECONDS) -> None:
        """`max_seconds`: of one comparison, without waiting for a free process."""
        if num_processes < 1 or not 0 < max_seconds <= 3600:
            found = f"{num_processes} processes and {max_seconds} seconds"
            raise ValueError(f"Grader: found {found}; allowed: 1 or more processes, above 0 to 3600 seconds")
        self._max_seconds = max_seconds
        self._free: queue.LifoQueue[_Process] = queue.LifoQueue()
        for _ in range(num_processes):
            self._free.put(_Process())
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="grading")

    async def grade(self, answer: str, gold: str) -> Grade:
        """Compare one answer with the gold answer, both as text (LaTeX or plain). An empty one is never correct.

        Raises MoltflowError where no grading process can be started.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._grade, answer, gold)

    def grade_sync(self, answer: str, gold: str) -> Grade:
        """`grade` for code without an event loop, from any thread."""
        return self._threads.submit(self._grade, answer, gold).result()

    def close(self) -> None:
        """Wait for the requests in progress and end the processes."""
        self._threads.shutdown()
        while not self._free.empty():
            self._free.get_nowait().end()

    def _grade(self, answer: str, gold: str) -> Grade:
        process = self._free.get()  # never waits: there are as many threads as processes
        try:
            return process.grade(answer, gold, self._max_seconds)
        finally:
            self._free.put(process)


@lru_cache(maxsize=1)
def math_grader() -> Grader:
    """The one grader that the environments of this process share."""
    return Grader()


def extract_answer(text: str) -> str | None:
    """The last `<answer>...</answer>` of a model's own text, else the content of its last balanced \\boxed or \\fbox.

    None without either: nothing is guessed. Give it what the model said, never the prompt.
    """
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if tagged:
        return str(tagged[-1]).strip()
    for box in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 0
        for index in range(box.end() - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[box.end() : index].strip()
    return None


class _Process:
    """One grading process, used by one thread at a time. It is started again after it ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._version = ""

    def grade(self, answer: str, gold: str, seconds: float) -> Grade:
        process = self._process
        if process is None or process.poll() is not None:  # one that ended while idle is no verdict
            self.end()
            process = self._start()
        request = {"answer": answer, "gold": gold, "seconds": seconds}
        response = self._ask(process, json.dumps(request), seconds + GRACE_SECONDS)
        if response is None:
            return Grade(Verdict.TIMEOUT, self._version)
        return Grade(Verdict(response["verdict"]), self._version)

    def _start(self) -> subprocess.Popen[str]:
        with tempfile.TemporaryFile() as words:  # a pipe that nobody reads would stop the process when it is full
            self._process = process = subprocess.Popen(
                [sys.executable, "-I", "-c", PROGRAM, PACKAGE_ROOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env={"PATH": os.defpath},
                cwd="/",
                text=True,
                start_new_session=True,
            )
            hello = self._ask(process, None, START_SECONDS)
            if hello is None:
                words.seek(0)
                raise MoltflowError(
                    f"grading: the process did not start within {START_SECONDS:g} s; needed: the packages "
                    f"latex2sympy2_extended and antlr4-python3-runtime; its last words: {words.read()[-1000:]!r}"
                )
        self._version = hello["version"]
        return process

    def _ask(self, process: subprocess.Popen[str], request: str | None, seconds: float) -> dict[str, Any] | None:
        """The answer to one line; None when the process ended without one, as at the limits of time and memory."""
        assert process.stdin is not None and process.stdout is not None
        overdue = threading.Timer(seconds, process.kill)
        overdue.start()
        try:
            if request is not None:
                print(request, file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            overdue.cancel()
        if not line.endswith("\n"):
            self.end()
            return None
        response: dict[str, Any] = json.loads(line)
        return response

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # of what it never read
                        pipe.close()
