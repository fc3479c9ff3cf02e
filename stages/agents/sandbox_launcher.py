"""The walls of the Python sandbox. `sandbox.py` starts this file as a program of its own.

    launcher      in new user, mount, network, IPC and host-name namespaces; keeps the wall clock, ends what is inside
    └── init      process 1 of a new process namespace, waits for the code's end; when it dies, the kernel ends the rest
        └── code  another user without capabilities, under limits and a list of allowed system calls; runs the code

The walls are tested from inside before the first line of the code runs; when one is missing the code does not run. It
has no descriptors but an empty standard input and two pipes, and no files but Python's libraries, /dev/null and /tmp.

Only the standard library is used, since it runs without site-packages. Arguments: the descriptor of the request
(JSON: `code`, `readable`, `import_paths`, and the limits of `sandbox.Limits`) and the descriptor of the report (JSON).
Standard input is a lifeline: when its other end closes, everything ends.
"""

from __future__ import annotations

import ctypes
import errno
import json
import linecache
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
import traceback
from types import ModuleType
from typing import Any, NoReturn

SETUP_SECONDS = 60.0  # for building the walls on a busy machine; the code's own clock starts when they stand
INSIDE_ID, UNUSED_ID = 1000, 65534
"""The code's user and group inside, and outside when root starts it: root is exempt from the limit on threads."""
OWN_PROCESSES = 3  # launcher, init and the code's first thread count against the limit on threads
MAX_OPEN_FILES = 64
READY, ENDED = b"ready", '{"end": "exited", "code": -9, "cpu_seconds": 0}'

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_OF_A_THREAD = 0x10F00  # VM, FS, FILES, SIGHAND, THREAD: what every thread library asks for
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
SECCOMP_SET_MODE_FILTER, SECCOMP_KILL, SECCOMP_ERRNO, SECCOMP_ALLOW = 1, 0x80000000, 0x50000, 0x7FFF0000

MACHINES = {"x86_64": (0, 0xC000003E, 155, 317, 126), "aarch64": (1, 0xC00000B7, 41, 277, 91)}
"""Column in ALLOWED_CALLS, architecture in a filter, and the numbers of pivot_root, seccomp and capset."""
MOUNT_SETATTR = 442
CLONE3 = 435

ALLOWED_CALLS = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 open:2:-
openat:257:56 close:3:57 close_range:436:436 lseek:8:62 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291
access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:- readlinkat:267:78 getdents:78:- getdents64:217:61
getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83:- mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:-
renameat:264:38 renameat2:316:276 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36 truncate:76:45 ftruncate:77:46
fallocate:285:47 chmod:90:- fchmod:91:52 fchmodat:268:53 utimensat:280:88 dup:32:23 dup2:33:- dup3:292:24 pipe:22:-
pipe2:293:59 fcntl:72:25 flock:73:32 fsync:74:82 fdatasync:75:83 umask:95:166 statfs:137:43 fstatfs:138:44
copy_file_range:326:285 sendfile:40:71 fadvise64:221:223 mmap:9:222 munmap:11:215 mremap:25:216 mprotect:10:226
madvise:28:233 brk:12:214 msync:26:227 membarrier:324:283 clone:56:220 futex:202:98 set_robust_list:273:99
get_robust_list:274:100 rseq:334:293 sched_yield:24:124 sched_getaffinity:204:123 set_tid_address:218:96 exit:60:93
exit_group:231:94 gettid:186:178 arch_prctl:158:- rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 kill:62:129 tgkill:234:131
tkill:200:130 pause:34:- alarm:37:- setitimer:38:103 getitimer:36:102 restart_syscall:219:128 clock_gettime:228:113
clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201:- times:100:153
getrusage:98:165 getpid:39:172 getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
getresuid:118:148 getresgid:120:150 getgroups:115:158 getpgrp:111:- getpgid:121:155 getsid:124:156 uname:63:160
sysinfo:99:179 getrandom:318:278 getrlimit:97:163 prlimit64:302:261 poll:7:- ppoll:271:73 select:23:- pselect6:270:72
epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 eventfd2:290:19 wait4:61:260 waitid:247:95
"""
"""`name:x86_64:aarch64`. No sockets, processes, programs, namespaces, mounts, tracing, keys, memory outside the address
space, or device control."""


class Refused(Exception):
    """A wall cannot be built or does not hold."""


libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
libc.syscall.restype = ctypes.c_long


def check(what: str, result: int) -> None:
    if result < 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")


def prctl(option: int, value: int) -> None:
    check(f"prctl {option}", libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def report(descriptor: int, content: dict[str, Any]) -> NoReturn:
    os.write(descriptor, json.dumps(content).encode())
    os._exit(0)


# ---- namespaces and files ----


def enter_namespaces() -> None:
    """Move this process into namespaces of its own; the next process it forks is process 1 of a new one.

    Started by root, the namespace gets a second, unused user: a helper outside has to write that map.
    """
    user, group, launcher = os.geteuid(), os.getegid(), os.getpid()
    entered, enter = os.pipe()
    helper = os.fork()  # waits for `enter` to be closed
    if helper == 0:
        os.close(enter)
        os.read(entered, 1)
        os._exit(_write_maps(launcher, user, group))
    os.close(entered)
    result = libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID)
    failure = os.strerror(ctypes.get_errno())
    os.close(enter)
    _, status = os.waitpid(helper, 0)
    if result < 0:
        raise Refused(f"new namespaces: {failure}")
    if status != 0:
        raise Refused(f"user map of the namespace: {os.strerror(abs(os.waitstatus_to_exitcode(status)))}")
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # only now: changing user or capabilities clears it


def _write_maps(launcher: int, user: int, group: int) -> int:
    """Returns 0, or the errno of what failed. Others than root may map only themselves, and only without groups."""
    root = user == 0
    maps = {
        "setgroups": "allow" if root else "deny",
        "uid_map": f"0 {user} 1\n{INSIDE_ID} {UNUSED_ID} 1" if root else f"{INSIDE_ID} {user} 1",
        "gid_map": f"0 {group} 1\n{INSIDE_ID} {UNUSED_ID} 1" if root else f"{INSIDE_ID} {group} 1",
    }
    try:
        for name, text in maps.items():
            with open(f"/proc/{launcher}/{name}", "w") as file:
                file.write(text)
    except OSError as failure:
        return failure.errno or errno.EIO
    return 0


def build_root(readable: list[str], max_file_bytes: int, max_files: int) -> None:
    """Make a new root that holds `readable` (real paths) read-only at their own places and an empty /tmp."""
    pivot_root = MACHINES[platform.machine()][2]
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("sandbox", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    check("pivot_root", libc.syscall(pivot_root, b"/tmp", b"/tmp/old"))
    os.chdir("/")
    os.mkdir("/tmp")
    max_inodes = max_files + 1 + sum(path.count("/") for path in readable)  # what is readable may lie in /tmp as well
    mount("sandbox", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={max_file_bytes},nr_inodes={max_inodes}")
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        if os.path.islink(f"/old{path}"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(f"/old{path}"), path)
    for path in readable:
        os.makedirs(path, exist_ok=True)
        mount(f"/old{path}", path, "", MS_BIND | MS_REC)
        _set_attributes(path, MS_RDONLY | MS_NOSUID | MS_NODEV, recursive=True)
    os.mkdir("/dev")
    os.close(os.open("/dev/null", os.O_CREAT | os.O_WRONLY, 0o666))
    mount("/old/dev/null", "/dev/null", "", MS_BIND)
    _set_attributes("/dev/null", MS_RDONLY | MS_NOSUID, recursive=False)
    check("umount of the old root", libc.umount2(b"/old", MNT_DETACH))
    os.rmdir("/old")
    _set_attributes("/", MS_RDONLY | MS_NOSUID | MS_NODEV, recursive=False)
    os.chdir("/tmp")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)
    check(f"mount of {source} on {target}", result)


def _set_attributes(path: str, attributes: int, recursive: bool) -> None:
    """`attributes` are MS_RDONLY, MS_NOSUID, MS_NODEV, which have the same bits as mount_setattr's."""
    wanted, flags = struct.pack("QQQQ", attributes, 0, 0, 0), AT_RECURSIVE if recursive else 0
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, wanted, ctypes.c_size_t(len(wanted)))
    check(f"read-only mount of {path}", result)


# ---- the walls of the code's process ----


def drop_privileges() -> None:
    """Become the inside user for good: no groups, no capabilities, no way to new ones, no core dumps, no tracing."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
        os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    capset = MACHINES[platform.machine()][4]
    check("capset", libc.syscall(capset, struct.pack("Ii", 0x20080522, 0), bytes(24)))  # none at all
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)


def set_limits(request: dict[str, Any]) -> None:
    """Set the limits of the process and see that the one on threads holds, which it does not for every user."""
    cpu = request["max_cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))  # the first can be caught, the second cannot
    for limit, value in (
        (resource.RLIMIT_AS, request["max_memory_bytes"]),
        (resource.RLIMIT_FSIZE, request["max_file_bytes"]),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(limit, (value, value))
    max_processes = request["max_threads"] + OWN_PROCESSES
    resource.setrlimit(resource.RLIMIT_NPROC, (1, max_processes))
    if _can_fork():
        raise Refused("the limit on threads does not hold for this user")
    resource.setrlimit(resource.RLIMIT_NPROC, (max_processes, max_processes))


def filter_calls() -> None:
    """Refuse (EPERM) every system call that is not listed, and `clone` of anything but a thread."""
    column, architecture, _, seccomp, _ = MACHINES[platform.machine()]
    calls = [call.split(":") for call in ALLOWED_CALLS.split()]
    numbers = [int(call[1 + column]) for call in calls if call[1 + column] != "-"]
    clone = next(int(call[1 + column]) for call in calls if call[0] == "clone")
    load, jump, give, mask = 0x20, 0x15, 0x06, 0x54
    program = [
        (load, 0, 0, 4),  # the architecture: a call in another one's numbers ends the process
        (jump, 1, 0, architecture),
        (give, 0, 0, SECCOMP_KILL),
        (load, 0, 0, 0),  # the call's number
        (jump, 0, 1, CLONE3),
        (give, 0, 0, SECCOMP_ERRNO | errno.ENOSYS),  # its flags are in memory; libraries fall back to clone
        (jump, 0, 5, clone),
        (load, 0, 0, 16),  # the flags of clone
        (mask, 0, 0, 0x7E02_0000 | CLONE_OF_A_THREAD),  # a thread's flags, and those of new namespaces
        (jump, 0, 1, CLONE_OF_A_THREAD),
        (give, 0, 0, SECCOMP_ALLOW),
        (give, 0, 0, SECCOMP_ERRNO | errno.EPERM),
    ]
    for number in numbers:
        program += [(jump, 0, 1, number), (give, 0, 0, SECCOMP_ALLOW)]
    program.append((give, 0, 0, SECCOMP_ERRNO | errno.EPERM))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = struct.pack("HP", len(program), ctypes.addressof(code))
    check("seccomp", libc.syscall(seccomp, SECCOMP_SET_MODE_FILTER, 0, header))


def check_walls(readable: list[str]) -> None:
    """Try from inside what must not work. Raises Refused for the first wall that does not stand."""
    if os.getpid() != 2 or os.getppid() != 1:
        raise Refused(f"the process namespace is not new: the code is process {os.getpid()}")
    if _may_read_what_nobody_may():
        raise Refused("the code's process has privileges")
    roots = {"dev", "lib", "lib64", "tmp", "usr", *(path.split("/")[1] for path in readable)}
    if not set(os.listdir("/")) <= roots:
        raise Refused(f"the file system holds more than it should: {sorted(set(os.listdir('/')) - roots)}")
    if writable := [path for path in ("/", *readable) if not os.statvfs(path).f_flag & os.ST_RDONLY]:
        raise Refused(f"{writable[0]} is not read-only")
    if _can_fork() or libc.unshare(CLONE_NEWUSER) == 0 or libc.socket(2, 1, 0) >= 0:
        raise Refused("the list of allowed system calls does not hold")


def _may_read_what_nobody_may() -> bool:
    os.close(os.open("/tmp/probe", os.O_CREAT | os.O_WRONLY, 0))
    try:
        os.close(os.open("/tmp/probe", os.O_RDONLY))
    except PermissionError:
        return False
    finally:
        os.unlink("/tmp/probe")
    return True


def _can_fork() -> bool:
    try:
        child = os.fork()
    except OSError:
        return False
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


# ---- the three processes ----


def supervise(init: int, reports: int, max_wall_seconds: float) -> dict[str, Any]:
    """Wait for the end, the limit or the lifeline, then end everything. Returns what `sandbox.py` reads.

    `reports` gives READY or why the walls do not stand, then `init`'s status; nothing when the code ended `init`.
    """
    start, ready, text = time.monotonic(), False, b""
    poller = select.poll()
    poller.register(reports, select.POLLIN)
    poller.register(0, 0)  # hang-up only
    outcome: dict[str, Any] = {}
    while not outcome:
        limit = max_wall_seconds if ready else SETUP_SECONDS
        events = dict(poller.poll(max(0.0, start + limit - time.monotonic()) * 1000))
        if not events:
            outcome = {"end": "timeout"} if ready else {"refused": f"the walls took more than {SETUP_SECONDS:g} s"}
        elif 0 in events:
            outcome = {"end": "stopped"}
        else:
            piece = os.read(reports, 65536)
            text += piece
            if not ready and text.startswith(READY):
                ready, start, text = True, time.monotonic(), text[len(READY) :]
            if not piece:
                outcome, _ = json.JSONDecoder().raw_decode(
                    text.decode() or '{"end": "exited", "code": -9, "cpu_seconds": 0}'
                )
                if not ready and "refused" not in outcome:
                    outcome = {"refused": f"the code's process ended before its walls stood: {outcome}"}
    seconds = time.monotonic() - start
    os.kill(init, signal.SIGKILL)
    os.waitpid(init, 0)  # returns when every process inside is gone
    return {**outcome, "seconds": seconds}


def become_init(reports: int) -> None:
    """Fork the code's process and return in it; the caller stays here as process 1 and reports the end."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    code = os.fork()
    if code == 0:
        return
    os.closerange(0, 3)
    _, status, used = os.wait4(code, 0)
    end = {"end": "exited", "code": os.waitstatus_to_exitcode(status), "cpu_seconds": used.ru_utime + used.ru_stime}
    report(reports, end)


def prepare_code(request: dict[str, Any], reports: int) -> None:
    """Build the walls around this process; returns when they stand, else reports why not and ends."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(reports, 3)
    os.closerange(4, 1024)
    try:
        drop_privileges()
        set_limits(request)
        filter_calls()
        check_walls(request["readable"])
        os.write(3, READY)
        os.close(3)
    except Exception as failure:
        report(3, {"refused": f"{type(failure).__name__}: {failure}"})


def run_code(code: str, import_paths: list[str]) -> NoReturn:
    """Run the code as the main module. Its traceback names its own lines only."""
    sys.path[:] = [*(os.path.realpath(path) for path in sys.path), *import_paths]
    sys.argv = ["<python>"]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what is printed before a limit is kept
    os.environ.clear()
    os.environ.update(HOME="/tmp", LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache["<python>"] = (len(code), None, code.splitlines(keepends=True), "<python>")
    try:
        exec(compile(code, "<python>", "exec", dont_inherit=True), main.__dict__)
    except BaseException as failure:
        if isinstance(failure, SystemExit):
            raise
        traceback.print_exception(type(failure), failure, failure.__traceback__ and failure.__traceback__.tb_next)
        sys.exit(1)
    sys.exit(0)


def main() -> None:
    request_descriptor, report_descriptor = (int(argument) for argument in sys.argv[1:])
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 is immune only to signals it does not handle
    with os.fdopen(request_descriptor) as file:
        request = json.load(file)
    try:
        enter_namespaces()
        reports, to_launcher = os.pipe()
        init = os.fork()
    except (Refused, OSError) as failure:
        report(report_descriptor, {"refused": str(failure)})
    if init == 0:
        os.close(report_descriptor)
        os.close(reports)
        try:
            build_root(request["readable"], request["max_file_bytes"], request["max_files"])
        except (Refused, OSError) as failure:
            report(to_launcher, {"refused": str(failure)})
        become_init(to_launcher)
        prepare_code(request, to_launcher)
        run_code(request["code"], request["import_paths"])
    os.close(to_launcher)
    os.closerange(1, 3)
    report(report_descriptor, supervise(init, reports, request["max_wall_seconds"]))


if __name__ == "__main__":
    if platform.machine() not in MACHINES or sys.platform != "linux":
        report(int(sys.argv[2]), {"refused": f"{sys.platform} on {platform.machine()}"})
    main()
