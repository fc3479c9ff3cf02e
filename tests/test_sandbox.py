"""The sandbox against code that wants out: what it may read, write, reach, start, use up and leave behind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas.errors import SandboxError
from stages.agents.sandbox import (
    LAUNCHER,
    MAX_CONCURRENT_RUNS,
    Limits,
    SandboxResult,
    _Run,
    run_python,
    run_python_sync,
)
from stages.agents.sandbox_launcher import ALLOWED_CALLS, CLONE3, MACHINES, MOUNT_SETATTR

ROOT = Path(__file__).resolve().parents[1]
PATIENT = 120.0
"""Wall and processor seconds of runs whose end does not depend on a clock, however busy the machine."""


def run(code: str, **limits: Any) -> SandboxResult:
    return run_python_sync(code, limits=Limits(**{"max_wall_seconds": PATIENT, "max_cpu_seconds": PATIENT, **limits}))


def refused(statement: str) -> str:
    """Code that says `no` when the statement raises an OSError or ImportError, and `yes` when it works."""
    return f"try:\n    {statement}\n    print('yes')\nexcept (OSError, ImportError) as error:\n    print('no')\n"


def inside(launcher: Path = LAUNCHER) -> list[psutil.Process]:
    """Every process of any run of this checkout: all are forks of the launcher and have its command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(launcher) in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen within a minute"
        time.sleep(0.02)


# ---- what a run gives ----


def test_output_error_output_and_exit_code_are_those_of_the_code() -> None:
    result = run("import sys\nprint(6 * 7)\nprint('oh', file=sys.stderr)\nsys.exit(3)")
    assert (result.status, result.stdout, result.stderr, result.exit_code) == ("error", "42\n", "oh\n", 3)
    result = run("print('ünï', end='')")
    assert (result.status, result.stdout, result.stderr, result.exit_code) == ("ok", "ünï", "", 0)
    assert 0 < result.seconds < PATIENT


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("raise SystemExit", 0),
        ("import os; os._exit(7)", 7),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("assert __name__ == '__main__'; __builtins__; import sys; assert sys.stdin.read() == ''", 0),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", 0),
    ],
)
def test_every_way_to_end_is_told(code: str, exit_code: int) -> None:
    result = run(code)
    assert (result.exit_code, result.status) == (exit_code, "ok" if exit_code == 0 else "error")
    assert result.stdout == ("late\n" if "late" in code else "")


def test_a_traceback_names_the_lines_of_the_code_and_nothing_of_the_sandbox() -> None:
    result = run("def f():\n    return 1 / 0\n\nf()")
    assert result.stderr == (
        "Traceback (most recent call last):\n"
        '  File "<python>", line 4, in <module>\n    f()\n'
        '  File "<python>", line 2, in f\n    return 1 / 0\n           ~~^~~\n'
        "ZeroDivisionError: division by zero\n"
    )
    assert (result.status, result.exit_code) == ("error", 1)


@pytest.mark.parametrize("code", ["def", "x = '\ud800'", "\0", "(" * 10_000, "-" * 10_000 + "1", "print('\udcff')"])
def test_code_that_is_no_code_is_an_error_of_the_run(code: str) -> None:
    assert run(code).status == "error"


def test_what_was_written_before_a_limit_is_kept() -> None:
    result = run("print('before')\nwhile True: pass", max_wall_seconds=1.0)
    assert (result.status, result.stdout, result.exit_code) == ("timeout", "before\n", None)


# ---- secrets and files ----


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "sesame")
    code = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
print(sorted(os.environ), libc.getenv(b"API_KEY"))
"""
    assert run(code).stdout == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'] None\n"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/proc/self/environ",
        "/proc/1/environ",
        "/proc/1/mem",
        "/proc/self/mem",
        f"/proc/{os.getpid()}/environ",
        "/sys",
        "/dev/mem",
        "/dev/shm",
        "/dev/urandom",
        "/old",
        "/var",
        "/home",
        "/tmp/../etc/passwd",
        str(ROOT / "pyproject.toml"),
        str(Path.home() / ".bashrc"),
        str(Path.home() / ".ssh"),
        os.getcwd(),
        sys.executable,
        "/proc/self/fd/../../../../etc/passwd",
    ],
)
def test_nothing_but_the_libraries_can_be_seen(path: str) -> None:
    assert run(refused(f"__import__('os').stat({path!r})")).stdout == "no\n"


def test_a_link_leads_nowhere_new(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sesame")
    code = "import os\nos.symlink({!r}, 'link')\n" + refused("open('link').read()")
    assert run(code.format(str(tmp_path / "secret"))).stdout == "no\n"
    assert run(code.format("../" * 20 + str(tmp_path / "secret"))).stdout == "no\n"


@pytest.mark.parametrize(
    "statement",
    [
        "open('/new', 'w')",
        "os.mkdir('/new')",
        "os.mkdir('/usr/new')",
        "open(os.__file__, 'a')",
        "os.unlink(os.__file__)",
        "os.chmod(os.__file__, 0o777)",
        "os.utime(os.__file__)",
        "os.utime('/dev/null')",
        "os.rename(os.__file__, '/tmp/os.py')",
        "os.link(os.__file__, '/tmp/os.py')",
        "open('/dev/zero', 'w')",
        "os.mknod('/tmp/sda', 0o60600, os.makedev(8, 0))",
        "os.chroot('/tmp')",
        "os.rmdir('/tmp')",
        "os.setuid(0)",
        "os.setgroups([0])",
        "os.sethostname if False else os.nice(-1)",
    ],
)
def test_nothing_outside_its_folder_can_be_changed(statement: str) -> None:
    assert run("import os\n" + refused(statement)).stdout == "no\n"


def test_its_own_folder_is_empty_at_the_start_and_gone_at_the_end(tmp_path: Path) -> None:
    code = """
import os, tempfile
print(os.getcwd(), os.path.expanduser('~'), os.listdir('.'), os.listdir('/tmp'))
with open('note', 'w') as file:
    file.write('kept')
print(open('/tmp/note').read(), len(tempfile.mkdtemp()) > 4, file=open('/tmp/out', 'w'))
print(open('/tmp/out').read(), end='')
print(open('/dev/null').read(), end='')
"""
    before = set(os.listdir("/tmp"))
    for _ in range(2):
        assert run(code).stdout == "/tmp /tmp [] []\nkept True\n"
    assert not {"note", "out"} & (set(os.listdir("/tmp")) - before)


def test_packages_are_importable_and_read_only(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text("answer = 42")
    os.chmod(tmp_path, 0o755)
    code = "import given\nprint(given.answer)\n" + refused("open(given.__file__, 'a')")
    assert run_python_sync(code, packages=(tmp_path,)).stdout == "42\nno\n"
    assert "ModuleNotFoundError" in run("import given").stderr
    for wrong in (tmp_path / "missing", "/"):
        with pytest.raises(SandboxError, match="packages has '/"):
            run_python_sync("", packages=(wrong,))


# ---- network ----


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_VSOCK", "AF_PACKET"])
def test_there_are_no_sockets(family: str) -> None:
    assert run(f"import socket\n{refused(f'socket.socket(socket.{family}, socket.SOCK_STREAM)')}").stdout == "no\n"


def test_loopback_is_not_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        code = "import urllib.request\n" + refused(f"urllib.request.urlopen('http://127.0.0.1:{port}', timeout=5)")
        assert run(code).stdout == "no\n"
        with pytest.raises(TimeoutError):
            server.accept()


# ---- processes, threads and system calls ----


@pytest.mark.parametrize(
    "statement",
    [
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/bin/sh', ['sh'], {})",
        "os.execv('/bin/sh', ['sh'])",
        "os.setsid()",
        "os.setpgid(0, 0)",
        "os.memfd_create('x')",
        "os.pidfd_open(1)",
        "subprocess.run(['sh', '-c', 'true'])",
        "multiprocessing.get_context('fork').Process(target=print).start()",
        "multiprocessing.get_context('spawn').Process(target=print).start()",
        "multiprocessing.shared_memory.SharedMemory(create=True, size=10)",
    ],
)
def test_no_process_or_program_can_be_started(statement: str) -> None:
    code = "import os, subprocess, multiprocessing, multiprocessing.shared_memory\n"
    assert run(code + refused(statement)).stdout == "no\n"


DANGEROUS = """
fork:57 vfork:58 execve:59 ptrace:101 setsid:112 pivot_root:155 prctl:157 mount:165 umount2:166 reboot:169
init_module:175 shmget:29 semget:64 msgget:68 socketpair:53 ioctl:16 mq_open:240 keyctl:250 add_key:248 kexec_load:246
unshare:272 perf_event_open:298 open_by_handle_at:304 setns:308 process_vm_readv:310 seccomp:317 memfd_create:319
bpf:321 execveat:322 userfaultfd:323 io_uring_setup:425 setuid:105 pidfd_getfd:438 mount_setattr:442 chroot:161
sethostname:170 personality:135 iopl:172
"""  # of x86_64


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_dangerous_system_calls_are_refused_whatever_their_arguments() -> None:
    code = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {[call.split(":") for call in DANGEROUS.split()]}:
    for argument in (0, -1, 1 << 40):
        if libc.syscall(int(number), *[ctypes.c_long(argument)] * 6) != -1 or ctypes.get_errno() != errno.EPERM:
            print(name)
for flags in (0, 17, 0x4111, 0x10000000 | 17, 0x10F00 | 0x20000, 0x10F00 | 0x10000000):  # fork, vfork, namespaces
    if libc.syscall(56, ctypes.c_long(flags), 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        print('clone', hex(flags))
assert libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS
print('end')
"""
    assert run(code).stdout == "end\n"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code of x86_64")
def test_the_calls_of_another_architecture_end_the_process() -> None:
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\\xb8\\x02\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 2 (fork); int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print('ran')
"""
    result = run(code)
    assert (result.status, result.stdout, result.exit_code) == ("error", "", -signal.SIGSYS)


@pytest.mark.parametrize(
    ("column", "header"),
    [(1, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (2, "/usr/include/asm-generic/unistd.h")],
)
def test_the_numbers_of_the_allowed_calls_are_those_of_the_kernel(column: int, header: str) -> None:
    if not os.path.exists(header):
        pytest.skip(f"no {header}")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    numbers.setdefault("newfstatat", numbers["fstatat" if column == 2 else "newfstatat"])
    listed = {call.split(":")[0]: call.split(":")[column] for call in ALLOWED_CALLS.split()}
    assert {name: numbers.get(name, "-") for name in listed} == listed
    _, _, *own = MACHINES[("x86_64", "aarch64")[column - 1]]
    names = ("pivot_root", "seccomp", "capset", "mount_setattr", "clone3")
    assert [int(numbers[name]) for name in names] == [*own, MOUNT_SETATTR, CLONE3]


def test_threads_work_up_to_their_limit() -> None:
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(int, range(5))))
stop, started = threading.Event(), 0
try:
    for _ in range(100):
        threading.Thread(target=stop.wait).start()
        started += 1
except RuntimeError:
    pass
stop.set()
print(started)
"""
    total, started = run(code, max_threads=8).stdout.split()
    assert total == "10" and 8 <= int(started) <= 10


def test_signals_reach_nobody_else() -> None:
    code = f"""
import os, signal
for pid in (1, {os.getpid()}, {os.getppid()}, -1, -{os.getpgrp()}):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        try:
            os.kill(pid, number)
        except OSError:
            pass
print('alive')
"""
    result = run(code)
    assert (result.status, result.stdout) == ("ok", "alive\n")


def test_code_that_attacks_the_process_that_waits_for_it_ends_only_itself() -> None:
    code = """
import resource
for limit in range(16):
    try:
        resource.prlimit(1, limit, (0, 0))
    except (OSError, ValueError):
        pass
print('tried')
while True: pass
"""
    result = run(code, max_wall_seconds=3.0)
    assert result.status in ("timeout", "error") and result.stdout == "tried\n"
    assert inside() == []


# ---- limits ----


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "from signal import *\nfor n in {*Signals} - {SIGKILL, SIGSTOP}: signal(n, SIG_IGN)\nwhile True: pass",
        "import os; os.close(0); os.close(1); os.close(2)\nwhile True: pass",
        "import os\nr, w = os.pipe(); os.read(r, 1)",
        "import threading\nfor _ in range(4): threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()",
        "import atexit, time; atexit.register(time.sleep, 1000)",
        "10 ** 10 ** 10",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import sys; sys.setrecursionlimit(10**9); sys.settrace(lambda *a: None); [0 for _ in iter(int, 1)]",
    ],
)
def test_no_code_outlives_the_wall_clock(code: str) -> None:
    result = run(code, max_wall_seconds=0.5)
    assert (result.status, result.exit_code) == ("timeout", None)
    assert inside() == []


@pytest.mark.parametrize("code", ["", "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"])
def test_processor_time_is_bounded_also_for_code_that_ignores_the_warning(code: str) -> None:
    result = run(code + "while True: pass", max_cpu_seconds=0.5)
    assert (result.status, result.exit_code) == ("timeout", -signal.SIGKILL if code else -signal.SIGXCPU)


@pytest.mark.parametrize(
    "statement",
    [
        "x = bytearray(200 << 20)",
        "x = [bytes(1 << 20) for _ in range(200)]",
        "import mmap; x = mmap.mmap(-1, 200 << 20)",
    ],
)
def test_memory_is_bounded(statement: str) -> None:
    code = f"try:\n    {statement}\n    print('yes')\nexcept (MemoryError, OSError):\n    print('no')"
    assert run(code, max_memory_bytes=150 << 20).stdout == "no\n"
    assert run(code, max_memory_bytes=400 << 20).stdout == "yes\n"


def test_files_are_bounded_in_size_sum_and_number() -> None:
    one = refused("f = open('a', 'wb'); f.write(bytes(3 << 20)); f.flush()")
    many = "\n".join(refused(f"open('{name}', 'wb').write(bytes(700 << 10))") for name in "ab")
    number = "n = 0\ntry:\n    for n in range(1000): open(str(n), 'w').close()\nexcept OSError: print(n)\n"
    assert run(one, max_file_bytes=1 << 20).stdout == "no\n"
    assert run(one, max_file_bytes=4 << 20).stdout == "yes\n"
    assert run(many, max_file_bytes=1 << 20).stdout == "yes\nno\n"
    assert 20 <= int(run(number, max_files=20).stdout) <= 60  # the way to libraries below /tmp counts as well
    opened = "x = []\ntry:\n    while True: x.append(open('/dev/null'))\nexcept OSError: print(len(x))"
    assert int(run(opened).stdout) == 61  # of 64; three are standard


def test_output_is_bounded_on_both_pipes_together() -> None:
    flood = "import sys\nwhile True: sys.std{}.write('x' * 10000)"
    result = run(flood.format("out"), max_output_bytes=1000)
    assert (result.status, result.stdout, result.stderr) == ("output_limit", "x" * 1000, "")
    result = run(flood.format("err"), max_output_bytes=1000)
    assert (result.status, result.stdout, result.stderr) == ("output_limit", "", "x" * 1000)
    result = run("import sys\nsys.stdout.write('o' * 600)\nsys.stdout.flush()\nsys.stderr.write('e' * 400)",
                 max_output_bytes=1000)  # fmt: skip
    assert (result.status, len(result.stdout), len(result.stderr)) == ("ok", 600, 400)
    assert inside() == []


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert run("import os; os.write(1, b'a\\xff\\n')").stdout == "a\ufffd\n"


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_a_limit_is_a_finite_positive_number(value: float) -> None:
    for name in Limits.__dataclass_fields__:
        with pytest.raises(ValueError, match=rf"Limits\.{name}: found .*; allowed: finite numbers above 0"):
            Limits(**{name: value})


# ---- the walls behind the list of system calls, and missing walls ----


def without(tmp_path: Path, *removed: tuple[str, str]) -> Path:
    """A copy of the launcher in which a wall is missing."""
    text = LAUNCHER.read_text()
    for old, new in removed:
        assert text.count(old) == 1
        text = text.replace(old, new)
    copy = tmp_path / "weakened_launcher.py"
    copy.write_text(text)
    return copy


def run_weakened(launcher: Path, code: str, **limits: Any) -> tuple[dict[str, Any], str]:
    """The report and the standard output of a run of another launcher."""
    bounds = {"max_wall_seconds": PATIENT, "max_cpu_seconds": PATIENT, **limits}
    request = {**_Run(code, Limits(**bounds), ())._request, "code": code}
    descriptor, (reports, to_us) = os.memfd_create("request"), os.pipe()
    os.write(descriptor, json.dumps(request).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    done = subprocess.Popen(
        [sys.executable, "-I", "-S", str(launcher), str(descriptor), str(to_us)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(descriptor, to_us),
        env={},
    )
    os.close(to_us)
    os.close(descriptor)
    assert done.stdout is not None
    text = done.stdout.read().decode()
    done.wait()
    with os.fdopen(reports, "rb") as file:
        return json.loads(file.read()), text


NO_FILTER = (
    ("        filter_calls()\n", ""),
    ("if _can_fork() or libc.unshare(CLONE_NEWUSER) == 0 or libc.socket(2, 1, 0) >= 0:", "if False:"),
)

ESCAPES = {
    "a grandchild in a session of its own that holds the pipes": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
print('done')
""",
    "zombies": "import os\nfor _ in range(5):\n    if os.fork() == 0: os._exit(0)\nprint('done')",
    "a fork bomb": """
import os
try:
    while True: os.fork()
except OSError:
    pass
print('done')
""",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_processes_would_end_with_the_run_even_if_they_could_be_started(name: str, tmp_path: Path) -> None:
    launcher = without(tmp_path, *NO_FILTER)
    report, text = run_weakened(launcher, ESCAPES[name])
    assert report["end"] == "exited" and "done\n" in text  # and not at the limit of two minutes
    assert text.count("done") <= 20
    assert inside(launcher) == []


def test_the_network_would_be_empty_even_if_there_were_sockets(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = "import socket\n" + refused(f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)")
        report, text = run_weakened(without(tmp_path, *NO_FILTER), code)
    assert (report["end"], text) == ("exited", "no\n")


@pytest.mark.parametrize(
    ("removed", "wall"),
    [
        (("        filter_calls()\n", ""), "the list of allowed system calls does not hold"),
        (("        drop_privileges()\n", ""), "seccomp|has privileges|limit on threads"),
        ((" | CLONE_NEWPID", ""), "process"),
        ((" | CLONE_NEWNS", ""), "mount|pivot_root"),
        (('MNT_DETACH))\n    os.rmdir("/old")', "MNT_DETACH)) if False else None"), "more than it should: .'old'"),
        (('    _set_attributes("/", MS_RDONLY | MS_NOSUID | MS_NODEV, recursive=False)\n', ""), "/ is not read-only"),
        (("        _set_attributes(path, MS_RDONLY | MS_NOSUID | MS_NODEV, recursive=True)\n", ""), "is not read-only"),
        (("(1, max_processes))", "(9, max_processes))"), "the limit on threads does not hold"),
    ],
)
def test_with_any_wall_missing_the_code_does_not_run(removed: tuple[str, str], wall: str, tmp_path: Path) -> None:
    report, text = run_weakened(without(tmp_path, removed), "print('ran')")
    assert re.search(wall, report["refused"]) and text == ""


NO_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces && exec "


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (["unshare", "-r", "sh", "-c", NO_NAMESPACES + '"$@"', "sh"], "new namespaces: "),
        (["unshare", "--user", "--keep-caps"], "user map|new namespaces"),
    ],
)
def test_a_machine_that_cannot_isolate_is_refused_with_the_reason(machine: list[str], reason: str) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from stages.agents.sandbox import run_python_sync
from schemas.errors import SandboxError
try:
    print(run_python_sync("print('ran')"))
except SandboxError as error:
    print("refused", error)
"""
    done = subprocess.run([*machine, sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot make such a machine here: {done.stderr[-200:]}")
    assert done.stdout.startswith("refused sandbox: this machine does not isolate the code, which was not run: ")
    assert re.search(reason, done.stdout) and "docstring of stages.agents.sandbox" in done.stdout


# ---- many at once, cancellation, leftovers ----


async def test_a_hundred_runs_at_once_all_end_and_the_event_loop_goes_on() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticker = asyncio.create_task(tick())
    limits = Limits(max_wall_seconds=PATIENT, max_cpu_seconds=PATIENT)
    results = await asyncio.gather(*(run_python(f"print({i})", limits=limits) for i in range(100)))
    ticker.cancel()
    assert [int(result.stdout) for result in results] == list(range(100))
    assert ticks > 20  # 100 runs take far more than the 0.2 s of 20 ticks
    assert inside() == []


async def test_a_run_is_async_even_when_all_threads_of_the_loop_wait() -> None:
    asyncio.get_running_loop().set_default_executor(pool := ThreadPoolExecutor(1))
    release = threading.Event()
    blocked = asyncio.create_task(asyncio.to_thread(release.wait))
    assert (await run_python("print(1)")).stdout == "1\n"
    release.set()
    await blocked
    pool.shutdown()


async def test_cancelling_ends_the_run_before_it_returns() -> None:
    forever = asyncio.create_task(run_python("while True: pass", limits=Limits(max_wall_seconds=PATIENT)))
    while len(inside()) < 3:
        await asyncio.sleep(0.02)
    forever.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forever
    assert inside() == []


async def test_a_cancelled_run_that_still_waited_never_starts() -> None:
    limits = Limits(max_wall_seconds=PATIENT)
    running = [asyncio.create_task(run_python("while True: pass", limits=limits)) for _ in range(MAX_CONCURRENT_RUNS)]
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(run_python("while True: pass", limits=limits))
    await asyncio.sleep(0.1)
    for task in (*running, waiting):
        task.cancel()
    ends = await asyncio.gather(*running, waiting, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert inside() == []


async def test_a_timeout_of_the_caller_ends_the_run() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await run_python("while True: pass", limits=Limits(max_wall_seconds=PATIENT))
    assert inside() == []


def test_nothing_outlives_a_caller_that_is_killed() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from stages.agents.sandbox import Limits, run_python_sync
run_python_sync("while True: pass", limits=Limits(max_wall_seconds={PATIENT}))
"""
    caller = subprocess.Popen([sys.executable, "-c", code])
    eventually(lambda: len(inside()) >= 3)
    caller.kill()
    caller.wait()
    eventually(lambda: inside() == [])


def test_runs_from_many_threads_leave_no_process_descriptor_or_shared_memory() -> None:
    run("")
    before = set(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as threads:
        codes = ["print(1)", "1 / 0", "while True: print('x' * 1000)", "import os; os._exit(1)"] * 4
        results = list(threads.map(lambda code: run(code, max_output_bytes=5000), codes))
    assert [result.status for result in results] == ["ok", "error", "output_limit", "error"] * 4
    assert set(os.listdir("/proc/self/fd")) == before
    assert inside() == []
    assert [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE] == []
