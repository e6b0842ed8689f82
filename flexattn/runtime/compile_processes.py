"""compile_processes: compile kernels in parallel, each in its own process, into the cache folder that `build` reads."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from flexattn.compile.kernel_source import KernelSource
from flexattn.machine.kernel_store import KernelStore, open_store
from flexattn.machine.target import Target
from flexattn.process.config import settings
from flexattn.runtime.build import build, digest

_CHILD = [sys.executable, "-c", "from flexattn.runtime.compile_processes import main; main()"]
_QUIET = {
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "FLEXATTN_DEBUG": "0", "FLEXATTN_DUMP": "0",
    "FLEXATTN_PROGRESS": "0",
}  # fmt: skip


def build_apart(
    sources: Sequence[KernelSource], target: Target, processes: int, seconds: float
) -> dict[KernelSource, str]:
    """Compile sources in parallel processes. Return the reason for each that failed or was not ready in time.

    A compiler that crashes or does not terminate does not affect the other kernels.
    """
    store = open_store(settings().cache_dir)
    if store is None or target.is_interpreter:  # no shared folder, or nothing to compile
        return {}
    until = time.monotonic() + seconds
    wanted = list(dict.fromkeys(sources))
    with ThreadPoolExecutor(max(1, processes)) as threads:
        notes = threads.map(lambda source: _build_one(source, target, store, until), wanted)
        return {source: note for source, note in zip(wanted, notes, strict=True) if note}


def main() -> None:
    """Compile the kernel that the parent process sends on stdin."""
    source, target = pickle.load(sys.stdin.buffer)
    build(source, target)


def _build_one(source: KernelSource, target: Target, store: KernelStore, until: float) -> str:
    left = until - time.monotonic()
    if store.find(digest(source, target)) is not None:
        return ""
    if left <= 0:
        return "not compiled: no time left"
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    environment = {**os.environ, **_QUIET, "PYTHONPATH": path, "FLEXATTN_CACHE_DIR": str(store.root)}
    # Files, not pipes: a pipe stays open while any process holds it, and another thread may fork a long-lived child.
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as told:
        pickle.dump((source, target), request)
        request.seek(0)
        try:
            done = subprocess.run(_CHILD, stdin=request, stdout=told, stderr=told, env=environment, timeout=left)
        except subprocess.TimeoutExpired:
            return f"not compiled after {left:.0f} s"
        if done.returncode == 0:
            return ""
        told.seek(0)
        lines = told.read().decode(errors="replace").strip().splitlines()
    return f"does not compile: {lines[-1] if lines else f'exit {done.returncode}'}"[:160]
