"""forks: a forked child finds no lock held and nothing changed by threads that it does not have."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flexattn
from flexattn.process.forks import cached_property

PACKAGE = Path(flexattn.__file__).parent
# What makes or holds a lock, and the modules that may use it all the same.
LOCKS = {
    "Barrier", "BoundedSemaphore", "Condition", "Event", "Lock", "LifoQueue", "PriorityQueue", "ProcessPoolExecutor",
    "Queue", "RLock", "Semaphore", "SimpleQueue", "ThreadPoolExecutor", "Timer", "cached_property", "flock", "lockf",
}  # fmt: skip
HOLDERS = {"threading", "queue", "multiprocessing", "concurrent.futures", "functools", "fcntl"}
ALLOWED = {
    "process/forks.py": {"RLock"},
    "process/progress.py": {"Timer"},  # of one block, no child uses it
    "machine/kernel_store.py": {"flock"},  # its handle is closed in a child
    "runtime/compile_processes.py": {"ThreadPoolExecutor"},  # of one call, no child uses it
    "runtime/compile_workers.py": {"Condition", "SimpleQueue"},  # of a pool that a child forgets; in a worker
    "engines/cpu_threads.py": {"ThreadPoolExecutor", "Barrier"},  # forgotten in a child
    "torch_state/lasting.py": {"ThreadPoolExecutor"},  # of one call, no child uses it
    "block_mask/captures.py": {"cached_property"},  # inspects the user's objects
    "trace/follow/attributes.py": {"cached_property"},  # the same
}

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")


def made_locks(tree: ast.AST) -> set[str]:
    """Return the names of LOCKS that come from modules of HOLDERS."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in HOLDERS:
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in HOLDERS:
            found.add(node.attr)
    return found & LOCKS


@pytest.mark.parametrize("module", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_locks_are_made_in_one_module(module: Path):
    allowed = ALLOWED.get(str(module.relative_to(PACKAGE)), set())
    assert made_locks(ast.parse(module.read_text())) <= allowed, "make it with flexattn.process.forks"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


FORKED = """
import os, sys, threading
sys.path.insert(0, sys.argv[1])
import forks

changed, undone = [], []
ours, theirs, free = forks.Lock(), forks.Lock(), forks.Lock()
ready, over = threading.Event(), threading.Event()

def other():
    with theirs, theirs, forks.temporary(lambda: changed.remove("theirs")):
        changed.append("theirs")
        ready.set()
        over.wait()

thread = threading.Thread(target=other)
thread.start()
ready.wait()
with ours, forks.temporary(lambda: changed.remove("ours")):
    changed.append("ours")
    child = os.fork()
    if child == 0:
        with theirs, free, ours:
            print(changed, flush=True)
    else:
        assert os.waitpid(child, 0)[1] == 0
        assert not theirs._lock.acquire(blocking=False), "the parent's thread still holds it"
        assert changed == ["theirs", "ours"]
if child == 0:
    print(changed, flush=True)
    taken = []
    thread = threading.Thread(target=lambda: ours.__enter__() or taken.append(1))
    thread.start()
    thread.join(10)
    os._exit(0 if taken else 1)
over.set()
thread.join()
print(changed)
"""


@needs_fork
def test_a_child_finds_what_its_only_thread_holds_and_changed():
    assert run(FORKED, str(PACKAGE / "process")) == "['ours']\n[]\n[]\n"


# Two threads trace and build masks all the time while children are forked that do the same.
TRACED = """
import os, signal, sys, threading, time
import torch
from flexattn import create_block_mask, flex_attention

torch.set_num_threads(1)  # a child of a process that used more hangs in torch itself
q = torch.randn(1, 2, 64, 16)

def work(n):
    made = {}
    exec(f"def score(s, b, h, i, j):\\n return s * {n}.5\\ndef mask(b, h, i, j):\\n return i - j > {n % 60}", made)
    mask = create_block_mask(made["mask"], None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    flex_attention(q, q, q, made["score"], mask)

def loop(n):
    while True:
        work(n)
        n += 2

work(0)
apply = torch.autograd.Function.__dict__["apply"]
for first in (1, 2):
    threading.Thread(target=loop, args=(first,), daemon=True).start()
children = []
for n in range(8):
    time.sleep(0.05)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        work(10**6 + n)
        assert torch.autograd.Function.__dict__["apply"] is apply
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children], flush=True)
os._exit(0)
"""


@needs_fork
def test_children_forked_while_threads_trace_go_on():
    assert run(TRACED) == f"{[0] * 8}\n"


HELD = """
import fcntl, os, signal, sys, threading, time
from pathlib import Path
from flexattn.machine.kernel_store import KernelStore

store = KernelStore(Path(sys.argv[1]))

def is_free():
    if not (store.root / "locks" / "abc").exists():
        return True
    with open(store.root / "locks" / "abc") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

def becomes_free():
    end = time.monotonic() + 20  # a child closes its handle when it first runs, which a busy machine delays
    while not is_free() and time.monotonic() < end:
        time.sleep(0.01)
    return is_free()

def fork():
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        time.sleep(60)
        os._exit(0)
    return child

def fork_elsewhere():
    thread = threading.Thread(target=lambda: children.append(fork()))
    thread.start()
    thread.join()

children = []
with store.lock("abc"):
    children.append(fork())  # in the thread that builds
    fork_elsewhere()
    print(is_free())
print(is_free())
builder = os.fork()
if builder == 0:  # a builder that dies while a child of its other thread lives
    with store.lock("abc"):
        fork_elsewhere()
        print(children[-1], flush=True)
        os._exit(0)
os.waitpid(builder, 0)
print(becomes_free())
with store.lock("abc"):
    leaving = os.fork()
    if leaving:
        os.waitpid(leaving, 0)  # a child leaves the block before its parent does
        print(is_free())
if leaving == 0:
    os._exit(0)
for child in children:
    os.kill(child, signal.SIGKILL)
"""


@needs_fork
def test_a_child_forked_during_a_build_keeps_no_lock(tmp_path: Path):
    out = run(HELD, str(tmp_path)).split()
    grandchild = int(next(word for word in out if word.isdigit()))
    os.kill(grandchild, 9)
    assert [word for word in out if not word.isdigit()] == ["False", "True", "True", "False"]


def test_a_cached_property_is_computed_once_and_needs_no_lock():
    class Thing:
        asked = 0

        @cached_property
        def value(self) -> int:
            """What it is."""
            self.asked += 1
            return self.asked

    thing = Thing()
    assert thing.value == thing.value == 1
    assert Thing.value.__doc__ == "What it is."
