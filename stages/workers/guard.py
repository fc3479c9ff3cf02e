"""Ends what a run leaves behind, processes and /dev/shm files, however the driver ends (SIGKILL included). Linux only.

    driver --socket--> guard: own session, deaf to signals; the end of the socket is the end of the driver
       \\-- MOLTFLOW_RUN_TOKEN in the environment of all that it starts (Ray daemons, actors, servers, user tools)

A process is the run's if its environment holds the token or its parent was the run's when it was first seen. The guard
looks every half second while the driver lives, since afterwards it is too late: setproctitle wipes /proc/PID/environ
(vLLM's engine core does that), orphans lose their parent, and a dead process no longer shows its shared memory.

Left out: other machines; containers, whose parent is their own daemon; workers of a Ray cluster that was there before
the driver, unless it passes the token on in `runtime_env["env_vars"]`; a process without the token (a cleaned
environment, a fork of the driver without exec) whose parent ended within half a second of its birth.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from typing import NamedTuple

TOKEN_VARIABLE = "MOLTFLOW_RUN_TOKEN"
SHM = "/dev/shm"
POLL_SECONDS = 0.5
GRACE_SECONDS = 3.0  # from the driver's end (or `close`) to the first kill: an orderly close may still be going on
KILL_SECONDS = 10.0  # a process in an uninterruptible wait is given up, and reported, after this
_running: Guard | None = None  # held here, since a garbage-collected socket would end the run


def start_guard() -> Guard:
    """Call it before anything else is started: only what starts later is watched. One at a time in a process."""
    from schemas.errors import WorkerError  # here, because the guard process runs this file on its own

    global _running
    if _running is not None:
        raise WorkerError(f"start_guard: guard {_running.pid} of this process is still running; close() it first")
    token, ours, theirs = uuid.uuid4().hex, *socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), token, str(os.getpid())]
    with theirs:  # the process that is started forks the guard and ends: the guard is in nobody's process tree
        stdin, stdout = theirs.fileno(), subprocess.DEVNULL
        subprocess.call(command, stdin=stdin, stdout=stdout, env=environment, cwd="/", start_new_session=True)
    ours.settimeout(30)
    pid = ours.recv(16)
    if not pid:
        raise WorkerError(f"start_guard: the guard process ended before it was ready; its error is above: {command}")
    os.environ[TOKEN_VARIABLE] = token
    _running = Guard(int(pid), ours)
    return _running


class Guard:
    """The driver's end. A driver that never calls `close` is cleaned up after too, but nobody waits for it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection

    def close(self) -> list[str]:
        """The orderly end, called last: what had to be killed or removed, empty if everything had ended by itself.

        Waits up to `GRACE_SECONDS` for what is still ending; multiprocessing's resource tracker of the driver may stay.
        """
        global _running
        if _running is not self:
            return []
        _running = None
        os.environ.pop(TOKEN_VARIABLE, None)
        answer = b""
        with self._connection, contextlib.suppress(OSError):
            self._connection.settimeout(GRACE_SECONDS + 2 * KILL_SECONDS + 10)
            self._connection.sendall(b"close")
            while part := self._connection.recv(1 << 16):
                answer += part
        if not answer:
            return [f"guard {self.pid} did not answer; the run may have left something behind"]
        return json.loads(answer)


def die_with_parent(parent_pid: int | None = None) -> None:
    """End the calling process within half a second of its parent's end, also if the parent is gone already.

    The parent is `parent_pid`, or what multiprocessing recorded when it started this process (which outlives the
    parent), or the present parent, unless that is init. A thread compares process ids, because PR_SET_PDEATHSIG fires
    when the *thread* that forked ends, and a thread that starts vLLM's engine core need not last. The thread needs the
    interpreter lock: a process that is stuck with it is left to the guard.
    """
    from multiprocessing import parent_process

    recorded, present = parent_process(), os.getppid()
    expected = parent_pid or (recorded.pid if recorded else present)
    if present != expected or (present == 1 and not parent_pid and not recorded):
        os._exit(1)

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="die_with_parent", daemon=True).start()


class _Seen(NamedTuple):
    start: int  # clock ticks since boot; with the pid, the identity of a process
    parent: int
    state: str
    is_ours: bool


class _Run:
    """What the guard knows of the run's processes and shared-memory files."""

    def __init__(self, token: str, driver: int) -> None:
        self._mark, self._driver = f"{TOKEN_VARIABLE}={token}".encode(), driver
        self._seen: dict[int, _Seen] = {}
        self._looks = dict.fromkeys(os.listdir(SHM), sys.maxsize)  # how often we asked whose file it is
        self._strangers = {_identity(f"{SHM}/{name}") for name in self._looks}
        self._files: dict[str, tuple[int, int]] = {}  # the run's: name -> (device, inode)
        self.look()  # what is there already is not ours, the driver's older children included
        if driver in self._seen:
            self._seen[driver] = self._seen[driver]._replace(is_ours=True)

    def driver_is_alive(self) -> bool:
        stat, seen = _stat(self._driver), self._seen.get(self._driver)
        return stat is not None and seen is not None and stat.start == seen.start and stat.state not in "ZX"

    def look(self, again: bool = False) -> None:
        """Judge the processes that are new; `again`: the others too (a pid was reused, an exec brought the token)."""
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._seen = {pid: seen for pid, seen in self._seen.items() if pid in pids}
        new = []
        for pid in pids if again else pids - self._seen.keys():
            before, now = self._seen.pop(pid, None), _stat(pid)
            if now is None:
                continue  # ended while we looked
            if before is None or before.start != now.start:
                new.append(pid)
            was_ours = before is not None and before.start == now.start and before.is_ours
            self._seen[pid] = now._replace(is_ours=was_ours or self._mark in _read(f"/proc/{pid}/environ"))
        while adopted := [pid for pid in new if not self._is_ours(pid) and self._is_ours(self._seen[pid].parent)]:
            for pid in adopted:
                self._seen[pid] = self._seen[pid]._replace(is_ours=True)

    def _is_ours(self, pid: int) -> bool:
        return pid in self._seen and self._seen[pid].is_ours

    def look_for_files(self, again: bool = False) -> None:
        """Note which files the run has mapped or open. Maps are long, so they are read only while a file is new."""
        names = os.listdir(SHM)
        self._looks = {name: self._looks.get(name, 0) + 1 for name in names}
        wanted = {_identity(f"{SHM}/{name}"): name for name in names if again or self._looks[name] <= 4}
        for stranger in self._strangers | {None}:
            wanted.pop(stranger, None)
        for pid in [pid for pid in self._seen if wanted and self._is_ours(pid)]:
            self._files.update({wanted[identity]: identity for identity in _held(pid) & wanted.keys()})

    def left(self, trackers: bool) -> dict[int, str]:
        """The run's living processes without the driver, pid -> description; resource trackers only if asked for."""
        self.look(again=True)
        self.look_for_files(again=True)
        found = {}
        for pid, seen in self._seen.items():
            command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").strip() or _read(f"/proc/{pid}/comm").strip()
            # A tracker ends with the last process that uses it; the driver's own must outlive `close`.
            is_spared = b"resource_tracker import main" in command and (not trackers or seen.parent == self._driver)
            if seen.is_ours and seen.state not in "ZX" and pid != self._driver and not is_spared:
                found[pid] = f"{pid} {command.decode(errors='replace')[:100]}"
        return found

    def sweep(self) -> list[str]:
        """Wait, kill, remove. Trackers come last: they unlink by name what no process maps any more."""
        done: dict[int, str] = {}
        for trackers, patience in ((False, GRACE_SECONDS), (True, 1.0)):
            begin = time.monotonic()
            while (left := self.left(trackers)) and (waited := time.monotonic() - begin) < patience + KILL_SECONDS:
                for pid, command in left.items() if waited > patience else ():
                    stat = _stat(pid)
                    if stat is not None and stat.start == self._seen[pid].start:  # never a reused pid
                        done[pid] = f"killed {command}"
                        with contextlib.suppress(OSError):
                            os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)
        return [*done.values(), *(f"could not kill {command}" for command in left.values()), *self._remove_files()]

    def _remove_files(self) -> list[str]:
        held = set().union(*(_held(int(name)) for name in os.listdir("/proc") if name.isdigit()))
        removed = []
        for name, identity in self._files.items():
            if identity not in held and _identity(f"{SHM}/{name}") == identity:
                with contextlib.suppress(OSError):
                    os.unlink(f"{SHM}/{name}")
                    removed.append(f"removed {SHM}/{name}")
        return removed


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # the process ended, or belongs to someone else
        return b""


def _stat(pid: int) -> _Seen | None:
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()  # the name before it may hold spaces
    return _Seen(int(fields[19]), int(fields[1]), fields[0].decode(), False) if fields else None


def _identity(path: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _held(pid: int) -> set[tuple[int, int]]:
    """(device, inode) of the shared memory that a process has mapped or open. Not by name: the maker of a semaphore has
    it mapped under the name of a temporary file."""
    held = set()
    for line in _read(f"/proc/{pid}/maps").splitlines():
        if SHM.encode() in line:
            major, minor = line.split()[3].split(b":")
            held.add((os.makedev(int(major, 16), int(minor, 16)), int(line.split()[4])))
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith(SHM):
                    file = os.stat(f"/proc/{pid}/fd/{number}")
                    held.add((file.st_dev, file.st_ino))
    return held


def _guard(token: str, driver: int) -> None:
    """The guard process: standard input is the socket to the driver."""
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run, connection = _Run(token, driver), socket.socket(fileno=0)
    connection.sendall(str(os.getpid()).encode())
    # The socket alone does not do: a child that the driver forked without exec holds a copy of its end.
    while run.driver_is_alive() and not select.select([connection], [], [], POLL_SECONDS)[0]:
        run.look()
        run.look_for_files()
    done = run.sweep()
    with contextlib.suppress(OSError):  # the driver is gone: then the terminal, if there still is one
        connection.sendall(json.dumps(done).encode())
        return
    with contextlib.suppress(OSError):
        if done:
            print(f"moltflow guard: driver {driver} ended and left:", *done, sep="\n  ", file=sys.stderr, flush=True)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]))
