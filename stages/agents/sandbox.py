"""Runs Python that a model wrote, where it can neither see nor keep nor harm anything.

    result = await run_python("print(6 * 7)")          # or run_python_sync(...) from a thread
    assert result.status == "ok" and result.stdout == "42\\n"

Each run is a fresh interpreter with the standard library and nothing else: an empty environment, no network, no other
files than Python's own libraries (read-only) and an empty /tmp in memory, no new processes, another user without
privileges, and bounds on time, memory, threads, files and output. When it ends, everything of it is gone.

It fails closed. Needed: Linux 5.14 or newer on x86_64 or aarch64, and user namespaces; neither root nor any program to
install. Where a wall is missing, `SandboxError` says which one and the code does not run. In a container the seccomp
profile has to allow `unshare`, `mount` and `pivot_root` (Docker's default one does not: `--security-opt
seccomp=unconfined`, or one with these calls added; its AppArmor profile, where there is one, has to allow mounts).
Ubuntu 24.04 needs `sysctl kernel.apparmor_restrict_unprivileged_userns=0` for users that are not root. macOS and
Windows have no such namespaces and are refused.

Left out: GPUs, packages that need a device or a process of their own, and a bound on the processor's side channels.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from schemas.errors import SandboxError

MAX_CONCURRENT_RUNS = max(2, os.cpu_count() or 1)
"""Runs of this process at a time. Further ones wait for at most the limits of those before them."""
STUCK_SECONDS = 90.0
"""The launcher ends every run itself; one that has not by this much after the limit is ended from here."""
LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
CHUNK_BYTES = 65536


@dataclass(frozen=True)
class Limits:
    """What one run may use. All are positive; what goes over is ended or refused, never the caller's problem."""

    max_wall_seconds: float = 10.0
    max_cpu_seconds: float = 10.0
    """Of all threads together, rounded up to whole seconds."""
    max_memory_bytes: int = 512 << 20
    """Address space of the one process, the interpreter's own 30 MB included; files in /tmp are not."""
    max_threads: int = 16
    """Beyond the first one; two more where root starts the sandbox."""
    max_file_bytes: int = 16 << 20
    """Of all files in /tmp together. They are held in memory."""
    max_files: int = 256
    max_output_bytes: int = 64 << 10
    """Of standard output and error together. The run ends when it writes more."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"Limits.{name}: found {getattr(self, name)!r}; allowed: finite numbers above 0")


@dataclass(frozen=True)
class SandboxResult:
    """What a run gave. `status`: `ok`; `error` (an exception, a non-zero exit or a signal); `timeout` (wall or
    processor time); `output_limit`. Texts hold what was written until then, undecodable bytes replaced."""

    status: Literal["ok", "error", "timeout", "output_limit"]
    stdout: str
    stderr: str
    exit_code: int | None
    """Negative: ended by that signal. None where the run was ended from outside."""
    seconds: float
    """Wall time of the code, without the interpreter's start."""


async def run_python(code: str, *, limits: Limits = Limits(), packages: Sequence[str | Path] = ()) -> SandboxResult:
    """Run `code` as a main module. Cancelling ends the run and waits until it is gone.

    `packages`: folders that are readable and importable inside, such as one with numpy. Whatever lies in them can be
    read by the code. Raises SandboxError where the isolation is not to be had; then nothing was run.
    """
    run = _Run(code, limits, packages)
    running = asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), run)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        run.stop()
        await asyncio.wait((running,))
        raise


def run_python_sync(code: str, *, limits: Limits = Limits(), packages: Sequence[str | Path] = ()) -> SandboxResult:
    """`run_python` for code without an event loop, such as a plain `Env`, from any thread."""
    run = _Run(code, limits, packages)
    try:
        return _threads(os.getpid()).submit(run).result()
    except BaseException:
        run.stop()
        raise


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Threads of their own: the event loop's may all be waiting for a run. A forked process gets new ones."""
    return ThreadPoolExecutor(MAX_CONCURRENT_RUNS, thread_name_prefix="sandbox")


class _Run:
    """One run, which `stop` can end from another thread at any moment, also before it starts."""

    def __init__(self, code: str, limits: Limits, packages: Sequence[str | Path]) -> None:
        import_paths = [os.path.realpath(path) for path in packages]
        for path in import_paths:
            if not os.path.isdir(path) or path == "/":
                raise SandboxError(f"sandbox: packages has {path!r}; allowed: existing folders other than the root")
        self._limits = limits
        self._request = {
            **asdict(limits),
            "max_cpu_seconds": math.ceil(limits.max_cpu_seconds),
            "code": code,
            "import_paths": import_paths,
            "readable": _outermost([*_library_folders(), *import_paths]),
        }
        self._lock = threading.Lock()
        self._lifeline: int | None = None
        self._stopped = False

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._let_go()

    def _let_go(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def __call__(self) -> SandboxResult:
        with self._lock:
            if self._stopped:
                raise SandboxError("sandbox: the run was stopped before it started")
            launcher, reports = self._start()
        with launcher, os.fdopen(reports, "rb") as report:
            try:
                output = self._collect(launcher)
            finally:
                self.stop()
                launcher.kill()  # no effect on one that has ended, as all do
            return self._result(output, report.read())

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        request = os.memfd_create("request")
        reports, to_us = os.pipe()
        lifeline, self._lifeline = os.pipe()
        try:
            os.write(request, json.dumps(self._request).encode())
            os.lseek(request, 0, os.SEEK_SET)
            launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(LAUNCHER), str(request), str(to_us)],
                stdin=lifeline,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(request, to_us),
                env={"MALLOC_ARENA_MAX": "1"},  # more would take most of the address space for a few threads
                cwd="/",
                start_new_session=True,
            )
        except OSError as failure:
            self._let_go()
            os.close(reports)
            raise SandboxError(f"sandbox: cannot start {sys.executable}: {failure}") from failure
        finally:
            for descriptor in (request, to_us, lifeline):
                os.close(descriptor)
        return launcher, reports

    def _collect(self, launcher: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """Read both outputs to their ends. Over the limit the run is stopped and the rest is thrown away."""
        assert launcher.stdout is not None and launcher.stderr is not None
        texts = {launcher.stdout: bytearray(), launcher.stderr: bytearray()}
        room = self._limits.max_output_bytes + 1  # one more byte tells that there was more
        deadline = time.monotonic() + self._limits.max_wall_seconds + STUCK_SECONDS
        with selectors.DefaultSelector() as selector:
            for pipe in texts:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    piece = os.read(key.fd, CHUNK_BYTES)
                    if not piece:
                        selector.unregister(key.fileobj)
                    texts[key.fileobj] += piece[:room]  # type: ignore[index]
                    room -= min(room, len(piece))
                if room == 0:
                    self.stop()
                if time.monotonic() >= deadline:
                    break
        try:
            launcher.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as failure:
            raise SandboxError("sandbox: the run did not end in time and was ended from outside") from failure
        return bytes(texts[launcher.stdout]), bytes(texts[launcher.stderr])

    def _result(self, output: tuple[bytes, bytes], report: bytes) -> SandboxResult:
        stdout, stderr = output
        if not report:
            raise SandboxError(f"sandbox: the launcher ended without a report; its last words: {stderr[-500:]!r}")
        end: dict[str, Any] = json.loads(report)
        if "refused" in end:
            raise SandboxError(
                f"sandbox: this machine does not isolate the code, which was not run: {end['refused']}. "
                "Needed: what the docstring of stages.agents.sandbox says for this platform"
            )
        code, limit = end.get("code"), self._limits.max_output_bytes
        cpu_limit = code == -signal.SIGKILL and end["cpu_seconds"] >= self._limits.max_cpu_seconds
        status: Literal["ok", "error", "timeout", "output_limit"] = "ok" if code == 0 else "error"
        if len(stdout) + len(stderr) > limit:
            status, stdout, stderr = "output_limit", stdout[:limit], stderr[: max(0, limit - len(stdout))]
        elif end["end"] == "timeout" or code == -signal.SIGXCPU or cpu_limit:
            status = "timeout"
        elif end["end"] == "stopped":
            raise SandboxError("sandbox: the run was stopped")
        return SandboxResult(
            status, stdout.decode(errors="replace"), stderr.decode(errors="replace"), code, end["seconds"]
        )


@lru_cache(maxsize=1)
def _library_folders() -> list[str]:
    """Python's standard library and the system's shared libraries, as real paths."""
    folders = [sysconfig.get_path("stdlib")]
    folders += [f"{sys.base_exec_prefix}/{name}" for name in ("lib", sys.platlibdir)]
    folders += [path for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64") if not os.path.islink(path)]
    return [os.path.realpath(path) for path in folders if os.path.isdir(path)]


def _outermost(paths: list[str]) -> list[str]:
    """The paths that lie in none of the others, each once."""
    outer: list[str] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(f"{other}/") for other in outer):
            outer.append(path)
    return outer
