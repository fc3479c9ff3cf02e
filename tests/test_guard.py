"""Nothing is left behind, however a run ends. Real processes: each test starts a small driver program and ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHM = Path("/dev/shm")
SLEEPER = "import time; time.sleep(600)"

# Every driver prints one line of JSON (what the test has to look at) and then waits to be ended.
PRELUDE = """
import json, os, subprocess, sys, time
from stages.workers.guard import start_guard
guard = start_guard()
def tell(**facts):
    print(json.dumps(dict(facts, guard=guard.pid)), flush=True)
"""


@pytest.fixture
def start_driver():
    """Starts a driver and returns it with what it tells. Whatever the test does, no driver outlives it."""
    drivers = []

    def start(body: str, **options) -> tuple[subprocess.Popen, dict]:
        command = [sys.executable, "-c", PRELUDE + body]
        drivers.append(
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options)
        )
        return drivers[-1], json.loads(drivers[-1].stdout.readline())

    yield start
    for driver in drivers:
        kill(driver)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """The pids that still live when the time is over."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def kill(driver: subprocess.Popen) -> None:
    driver.kill()
    driver.wait()
    driver.stdout.close()


def test_a_killed_driver_leaves_neither_processes_nor_shared_memory(start_driver):
    stranger = subprocess.Popen([sys.executable, "-c", SLEEPER])
    unrelated = SHM / f"psm_unrelated_{uuid.uuid4().hex}"
    unrelated.write_bytes(b"mine")
    driver, facts = start_driver("""
from multiprocessing import get_context, resource_tracker, shared_memory
def run(source, **options):
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, **options)
sleeper = "import time; time.sleep(600)"
child = run(sleeper)
# Without the token, in a session of its own, and an orphan before the driver ends: only its birth tells whose it is.
parent = run('''
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={}, start_new_session=True,
                       stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(1.5)
''')
orphan = int(parent.stdout.readline())
# Its resource tracker forgets the first file and the semaphore, so nobody but the guard will remove them.
holder = run('''
import time
from multiprocessing import get_context, resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
semaphore = get_context("spawn").Semaphore()
resource_tracker.unregister(semaphore._semlock.name, "semaphore")
closed = shared_memory.SharedMemory(create=True, size=4096)
closed.close()      # nobody has it mapped now: only the resource tracker knows whose it is
print(memory.name, "sem." + semaphore._semlock.name.strip("/"), closed.name, flush=True)
time.sleep(600)
''')
files = holder.stdout.readline().decode().split()
# The driver's own, and that of a process that is killed early: neither shows in /proc when the driver has ended.
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
early = run('''
import mmap, os, time, uuid
name = "torch_" + uuid.uuid4().hex
with open("/dev/shm/" + name, "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
print(name, flush=True)
time.sleep(600)
''')
files += [memory.name, early.stdout.readline().decode().strip()]
parent.wait()
early.kill()
early.wait()
tell(processes=[child.pid, orphan, holder.pid], files=files)
time.sleep(600)
""")
    try:
        assert len(facts["files"]) == 5 and all((SHM / name).exists() for name in facts["files"])
        assert all(is_alive(pid) for pid in facts["processes"])
        kill(driver)
        assert wait_until_gone([*facts["processes"], facts["guard"]], seconds=10) == []
        assert [name for name in facts["files"] if (SHM / name).exists()] == []
        assert is_alive(stranger.pid) and unrelated.read_bytes() == b"mine"
    finally:
        stranger.kill()
        stranger.wait()
        unlink(unrelated.name, *facts["files"])


def unlink(*names: str) -> None:
    for name in names:
        (SHM / name).unlink(missing_ok=True)


def test_a_file_that_another_process_still_has_mapped_is_kept(start_driver):
    name = f"psm_shared_{uuid.uuid4().hex}"
    driver, facts = start_driver(
        f"""
import mmap
with open("/dev/shm/{name}", "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
tell()
sys.stdin.readline()
""",
        stdin=subprocess.PIPE,
    )
    try:
        with open(SHM / name, "rb"):
            time.sleep(1.2)  # two looks of the guard
            kill(driver)
            assert wait_until_gone([facts["guard"]], seconds=10) == []
            assert (SHM / name).exists()
    finally:
        driver.stdin.close()
        unlink(name)


def test_an_orderly_close_needs_no_kill(start_driver):
    driver, facts = start_driver("""
from multiprocessing import get_context
semaphore = get_context("spawn").Semaphore()     # its resource tracker lives as long as the driver
ending = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.7)"])
token = os.environ["MOLTFLOW_RUN_TOKEN"]
begin = time.monotonic()
tell(token=token, done=guard.close(), seconds=time.monotonic() - begin, again=guard.close(),
     has_token="MOLTFLOW_RUN_TOKEN" in os.environ, second=start_guard().close())
""")
    assert driver.wait(timeout=10) == 0
    assert facts["done"] == [] and facts["again"] == [] and facts["second"] == [] and not facts["has_token"]
    assert 0.4 < facts["seconds"] < 3  # it waited for what was ending
    assert not is_alive(facts["guard"])


def test_close_reports_what_it_had_to_kill_and_spares_what_is_older_than_the_guard(start_driver):
    driver, facts = start_driver("""
guard.close()
older = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
guard = start_guard()
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(601)"])
done = guard.close()
tell(done=done, left=left.wait(timeout=5), pid=left.pid, older=older.poll())
older.kill()
older.wait()
""")
    assert driver.wait(timeout=10) == 0
    assert len(facts["done"]) == 1 and facts["done"][0].startswith(f"killed {facts['pid']} ")
    assert facts["done"][0].endswith("time.sleep(601)") and facts["left"] == -signal.SIGKILL
    assert facts["older"] is None


def test_ctrl_c_and_termination_do_not_end_the_guard(start_driver):
    driver, facts = start_driver(
        """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born deaf to it
deaf = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(2, signal.SIG_IGN); "
                         "print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
deaf.stdout.readline()
tell(deaf=deaf.pid)
time.sleep(600)
""",
        start_new_session=True,
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(facts["guard"], number)
    time.sleep(0.7)
    assert is_alive(facts["guard"]) and os.getpgid(facts["guard"]) != driver.pid
    os.killpg(driver.pid, signal.SIGINT)  # a session of the test's own: the driver and its child, nobody else
    driver.wait(timeout=10)
    assert wait_until_gone([facts["deaf"], facts["guard"]], seconds=10) == []


def test_a_driver_whose_forked_child_holds_the_socket_is_seen_to_end(start_driver):
    driver, facts = start_driver("""
child = os.fork()
if child == 0:
    time.sleep(600)
time.sleep(1.2)     # a fork of the driver has no token: the guard has to see it in the driver's lifetime
tell(child=child)
time.sleep(600)
""")
    kill(driver)
    assert wait_until_gone([facts["child"], facts["guard"]], seconds=10) == []


# Adopts the child of its child, as Ray's subreaper does, so that an orphan's parent need not be init.
SUBREAPER = """
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
subprocess.run([sys.executable, *sys.argv[1:]])
time.sleep(600)
"""
# Starts the child from a thread that ends at once, as an actor may start vLLM's engine core.
PARENT = """
import multiprocessing, os, signal, sys, threading, time
from stages.workers.guard import die_with_parent
def child(kills_its_parent):
    parent = os.getppid()
    if kills_its_parent:
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.01)
    print(os.getpid(), parent, flush=True)
    die_with_parent()
    time.sleep(600)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child, args=(len(sys.argv) > 1,))
    thread = threading.Thread(target=process.start)
    thread.start()
    thread.join()
    time.sleep(600)
"""


@pytest.mark.parametrize("is_gone_before_the_call", [False, True])
def test_a_child_dies_with_its_parent(tmp_path, is_gone_before_the_call):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    subreaper = subprocess.Popen(
        [sys.executable, "-c", SUBREAPER, program, *["gone"] * is_gone_before_the_call],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    child, parent = map(int, subreaper.stdout.readline().split())
    if not is_gone_before_the_call:
        time.sleep(1.2)
        assert is_alive(child)  # the end of the thread that started it is not the end of its parent
        os.kill(parent, signal.SIGKILL)
    try:
        assert wait_until_gone([child, parent], seconds=3) == []
    finally:
        kill(subreaper)


RAY = """
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
@ray.remote(num_cpus=0)
class Actor:
    def start(self):
        import multiprocessing
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        self.processes = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, env={}, start_new_session=True)]
        self.semaphore = multiprocessing.get_context("spawn").Semaphore()
        return [os.getpid(), *(process.pid for process in self.processes)], "sem." + self.semaphore._semlock.name[1:]
    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()
        del self.semaphore      # ray.shutdown() kills the actor and its resource tracker before either can remove it
actor = Actor.remote()
processes, file = ray.get(actor.start.remote())
import psutil
processes += [process.pid for process in psutil.Process().children(recursive=True)]
"""


@pytest.mark.real
def test_a_killed_driver_leaves_nothing_of_ray(start_driver):
    driver, facts = start_driver(RAY + "tell(processes=processes, file=file)\ntime.sleep(600)")
    assert (SHM / facts["file"]).exists() and all(is_alive(pid) for pid in facts["processes"])
    kill(driver)
    assert wait_until_gone([*facts["processes"], facts["guard"]], seconds=15) == []
    assert not (SHM / facts["file"]).exists()


@pytest.mark.real
def test_an_orderly_end_of_ray_needs_no_kill(start_driver):
    body = "ray.get(actor.stop.remote())\nray.shutdown()\ntell(processes=processes, file=file, done=guard.close())"
    driver, facts = start_driver(RAY + body)
    assert driver.wait(timeout=20) == 0
    assert facts["done"] == []
    assert wait_until_gone(facts["processes"], seconds=1) == [] and not (SHM / facts["file"]).exists()
