"""compile_workers: processes that compile, ahead of their use, the kernels that a call will need.

Triton holds the GIL for about half of a compile, so threads gain little: on 2 cores, 4 kernels take 3.3 s one after the
other and 2.6 s in threads. A worker is a new Python process (a fork would copy locks and the CUDA context). It runs no
code of the user and imports Triton but neither torch nor the user's main module. It gets one job at a time on stdin.
If no kernel is on disk yet, all workers start as soon as one will be needed (`build.expect_kernels`).

A thread of this process serves each worker. Both end after 10 s without work. A worker also ends when this process
does. Whatever goes wrong in a worker, `build` compiles the kernel itself, and reports the error if there is one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from flexattn.machine import triton_versions
from flexattn.process.config import settings
from flexattn.process.events import debug
from flexattn.process.forks import Lock, in_child
from flexattn.runtime.compiler import Job, StubJob, run_job

_IDLE = 10.0  # seconds without work after which a worker ends
_LAST = 1.0  # seconds that the end of this process waits for its threads
_ROOT = Path(__file__).parents[1]
# The package is a bare module here: its __init__ would import torch.
_START = (
    "import sys, types; package = types.ModuleType('flexattn'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['flexattn'] = package; from flexattn.runtime.compile_workers import main; main()"
)
_QUIET = {"CUDA_VISIBLE_DEVICES": "", "FLEXATTN_DEBUG": "0", "FLEXATTN_DUMP": "0"}

Work = Callable[[Job | StubJob], dict[str, bytes]]
Task = Callable[[Work], Any]  # does its jobs with the given function and stores the result


class WorkerLost(Exception):
    """A worker died, or could not compile a kernel."""


class _Worker:
    """One compile process."""

    def __init__(self) -> None:
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(_ROOT)], env={**os.environ, **_QUIET, "PYTHONPATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, close_fds=True,
        )  # fmt: skip

    def run(self, job: Job | StubJob) -> dict[str, bytes]:
        """Do a job there. Raise WorkerLost if that fails, for whatever reason."""
        to, back = self.process.stdin, self.process.stdout
        assert to is not None
        assert back is not None
        try:
            pickle.dump(job, to)
            to.flush()
            found = pickle.load(back)
        except (OSError, EOFError, pickle.PickleError) as error:
            raise WorkerLost(f"the compile process ended: {error!r}") from None
        if isinstance(found, str):
            raise WorkerLost(found)
        return found

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process and wait for it, so that no zombie is left."""
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process and close its pipes. Only the thread that uses the pipes calls this."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def abandon(self) -> None:
        """Forget the parent's worker in a forked child: an open pipe would keep it alive after the parent."""
        self.process.returncode = 0  # it is no child of this process
        with open(os.devnull, "r+b") as nothing:
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None and not pipe.closed:
                    os.dup2(nothing.fileno(), pipe.fileno(), inheritable=False)


class _Pool:
    """The workers of this process and the kernels that wait for one."""

    def __init__(self) -> None:
        self.arrived = threading.Condition()  # a forked child has no pool, so it is no `forks.Lock`
        self.waiting: deque[tuple[str, Task, Future[Any]]] = deque()
        self.pending: dict[str, Future[Any]] = {}
        self.workers: set[_Worker] = set()
        self.threads: set[threading.Thread] = set()
        self.idle = 0
        self.ending = False

    def submit(self, key: str, task: Task) -> None:
        with self.arrived:
            if key in self.pending or self.ending:
                return
            self.pending[key] = future = Future[Any]()
            self.waiting.append((key, task, future))
            self.arrived.notify()
            if self.idle < len(self.waiting) and len(self.threads) < processes():
                self._add_thread()

    def warm_up(self) -> None:
        """Start all workers before there is work."""
        with self.arrived:
            while not self.ending and len(self.threads) < processes():
                self._add_thread(warm=True)

    def _add_thread(self, warm: bool = False) -> None:
        thread = threading.Thread(target=self._serve, args=(warm,), name="flexattn compile", daemon=True)
        self.threads.add(thread)
        thread.start()

    def take(self, key: str) -> Any:
        """Return the result of a task, and wait for it if a worker has begun it. None: the caller compiles."""
        with self.arrived:
            future = self.pending.pop(key, None)
        if future is None or future.cancel():
            return None
        return future.result()

    def _serve(self, warm: bool) -> None:
        """Do tasks in one worker until there are none for some time. `warm`: start it before the first.

        Otherwise it starts when a task has a job, and not if another process has compiled the kernel meanwhile.
        """
        worker: _Worker | None = None

        def work(job: Job | StubJob) -> dict[str, bytes]:
            nonlocal worker
            if worker is None or not worker.is_alive():
                self._close(worker)
                worker = self._start()
            return worker.run(job)

        try:
            if warm:
                with contextlib.suppress(OSError):  # the first task tries again
                    worker = self._start()
            while (found := self._next()) is not None:
                key, task, future = found
                if not future.set_running_or_notify_cancel():
                    continue
                result = None
                try:
                    result = task(work)
                except Exception as error:  # the caller compiles the kernel itself, and reports what is wrong with it
                    debug("compile", f"kernel {key[:12]} was not compiled ahead: {error}")
                future.set_result(result)
                with self.arrived:  # a result is found on disk from now on
                    self.pending.pop(key, None)
        finally:
            self._close(worker)

    def _next(self) -> tuple[str, Task, Future[Any]] | None:
        with self.arrived:
            self.idle += 1
            try:
                self.arrived.wait_for(lambda: self.waiting or self.ending, _IDLE)
            finally:
                self.idle -= 1
            if self.waiting and not self.ending:
                return self.waiting.popleft()
            self.threads.discard(threading.current_thread())
            return None

    def _start(self) -> _Worker:
        worker = _Worker()
        with self.arrived:
            self.workers.add(worker)
            _counts["started"] += 1
        if self.ending:
            worker.kill()
        return worker

    def _close(self, worker: _Worker | None) -> None:
        if worker is not None:
            self.workers.discard(worker)
            worker.close()

    def end(self) -> None:
        """End all workers, and let their threads remove unfinished files."""
        with self.arrived:
            self.ending = True
            self.arrived.notify_all()
        threads = list(self.threads)
        for worker in list(self.workers):
            worker.kill()
        until = time.monotonic() + _LAST
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def abandon(self) -> None:
        """Forget the parent's workers in a forked child."""
        for worker in self.workers:
            worker.abandon()


_counts = {"started": 0}
_most: int | None = None  # set by `at_most`
_pool: _Pool | None = None
_abandoned: list[_Pool] = []  # of the parent; kept, so that their pipes are not closed twice
_starting = Lock()


def started() -> int:
    """Return the number of compile processes that this process has started."""
    return _counts["started"]


def processes() -> int:
    """Return how many compile processes may run. 0: kernels are compiled in this process, one after the other."""
    wanted = settings().compile_processes if _most is None else _most
    if not wanted or getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python"):
        return 0  # the executable of an application that embeds Python would run that application
    return max(0, min(wanted, cores() - 1))


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def at_most(wanted: int) -> Iterator[None]:
    """Let so many processes run in the block, instead of FLEXATTN_COMPILE_PROCESSES. Then they end."""
    global _most
    before, _most = _most, wanted
    try:
        yield
    finally:
        _most = before
        end_workers()


def submit(key: str, task: Task) -> None:
    """Let a worker do a task soon. It is forgotten if none can be started."""
    if processes():
        with contextlib.suppress(RuntimeError):  # no thread can be started, as at the interpreter's end
            _opened().submit(key, task)


def warm_up() -> None:
    """Start all workers now, because kernels will be compiled soon."""
    if processes():
        with contextlib.suppress(RuntimeError):
            _opened().warm_up()


def _opened() -> _Pool:
    global _pool
    with _starting:
        if _pool is None:
            _pool = _Pool()
            atexit.register(_pool.end)
        return _pool


def take(key: str) -> Any:
    """Return the result of the task of a key, or None if there is none."""
    return None if _pool is None else _pool.take(key)


def end_workers() -> None:
    """End all workers. A later `submit` starts others."""
    global _pool
    with _starting:
        if _pool is not None:
            _pool.end()
            atexit.unregister(_pool.end)
            _pool = None


def _in_child() -> None:
    global _pool
    if _pool is not None:
        atexit.unregister(_pool.end)
        _pool.abandon()
        _abandoned.append(_pool)
        _pool = None
    _counts.update(started=0)


in_child(_in_child)


def main() -> None:
    """Compile the jobs that arrive on stdin, until it is closed."""
    jobs, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Triton and ptxas print must not mix with the results
    if hasattr(os, "nice"):
        os.nice(10)  # on busy cores, the kernel that the parent compiles is needed first
    arrived: SimpleQueue[Job | StubJob] = SimpleQueue()

    def read() -> None:
        while True:
            try:
                arrived.put(pickle.load(jobs))
            except Exception:
                os._exit(0)  # the parent is gone, or does not wait for a result any more

    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(Exception):  # a job reports it
        triton_versions.import_compiler()
    while True:
        try:
            found: Any = run_job(arrived.get())
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        pickle.dump(found, results)
        results.flush()
