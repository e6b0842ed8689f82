"""cache_size: the kernel cache stays below its limit, even if processes that evict entries fail."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flexattn.machine import cache_size
from flexattn.machine.cache_size import items, prune, report
from flexattn.machine.kernel_store import KernelStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    (tmp_path / "kernels").mkdir(mode=0o700)
    return KernelStore(tmp_path / "kernels")


def digest(n: int) -> str:
    return f"{n:032x}"


def add(store: KernelStore, n: int, size: int = 1000, used: float | None = None) -> None:
    folder = store.add(digest(n), {"k.py": b"x" * size})
    for file in (folder / "k.py", folder / "manifest.json"):
        with contextlib.suppress(FileNotFoundError):  # other processes remove files
            os.utime(file, (used or 1000.0 + n, used or 1000.0 + n))


def kept(store: KernelStore) -> list[int]:
    return sorted(int(item.name, 16) for item in items(store) if item.is_kernel)


def taken(store: KernelStore) -> int:
    return sum(item.bytes for item in items(store))


def test_what_was_not_used_for_longest_goes_first(store: KernelStore):
    for n in range(10):
        add(store, n)
    assert store.find(digest(0)) is not None  # used now
    size = taken(store)
    prune(store, size)
    assert len(kept(store)) == 10, "nothing goes while there is room"
    prune(store, size // 2)
    assert kept(store) == [0, 8, 9]  # three quarters of the limit
    assert all(store.find(digest(n)) for n in kept(store))
    assert not list(store.root.glob(".new-*"))


def test_the_last_kernel_stays_whatever_the_limit(store: KernelStore):
    for n in range(3):
        add(store, n)
    prune(store, 1)
    assert kept(store) == [2]


def test_tiles_and_locks_stay_and_large_stubs_go(store: KernelStore):
    for n in range(4):
        add(store, n)
        with store.lock(digest(n)):
            pass
    store.write("tiles.json", "{}")
    (store.folder("triton") / "stub.so").write_bytes(b"x" * 3000)
    prune(store, 4500)
    assert {item.name for item in items(store) if not item.is_kernel} == {"locks", "tiles.json"}
    assert len(kept(store)) == 2, "what the stubs took counts"
    (store.folder("triton") / "stub.so").write_bytes(b"x" * 300)
    add(store, 9, 5000)
    prune(store, 4500)
    assert (store.root / "triton" / "stub.so").exists(), "small ones stay"


def test_new_kernels_make_room(store: KernelStore):
    for n in range(40):
        add(store, n)
        cache_size.added(store, 5000)
    assert taken(store) < 5000 + 16 * 1200
    assert kept(store)[-1] == 39
    before = kept(store)
    add(store, 40)
    cache_size.added(store, None)
    assert len(kept(store)) == len(before) + 1, "no limit"


PRUNER = """
import sys
from pathlib import Path
from flexattn.machine.cache_size import prune
from flexattn.machine.kernel_store import KernelStore
store = KernelStore(Path(sys.argv[1]))
print("ready", flush=True)
for limit in range(60_000, 0, -100):
    prune(store, limit)
"""


def start(store: KernelStore) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRUNER, str(store.root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_pruners_that_race_and_one_that_is_killed(store: KernelStore):
    for n in range(60):
        add(store, n)
    processes = [start(store) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    processes[0].kill()
    for n in range(60, 90):  # others go on adding meanwhile
        add(store, n, used=10.0**9 + n)
        store.find(digest(n))
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process is processes[0] or process.returncode == 0, errors
    prune(store, 10_000)
    assert len(kept(store)) >= 1
    assert all(store.find(digest(n)) for n in kept(store)), "an entry is whole or absent"
    assert sum(item.bytes for item in items(store) if item.is_kernel) <= 10_000


def test_what_a_killed_pruner_leaves_is_deleted_a_day_later(store: KernelStore):
    left = store.root / ".new-killed"
    (left / "old").mkdir(parents=True)
    (left / "old" / "k.py").write_text("x")
    open_store.cache_clear()
    open_store(store.root)
    assert left.exists()
    os.utime(left, (0, 0))
    open_store.cache_clear()
    open_store(store.root)
    assert not left.exists()


def test_a_folder_that_is_gone_takes_nothing(store: KernelStore):
    shutil.rmtree(store.root)
    assert items(store) == []
    prune(store, 0)


def test_it_tells_what_it_takes(store: KernelStore, monkeypatch):
    add(store, 1, 3 * 2**20)
    assert (
        report(store, 2**30) == f"{store.root}: 1 kernels, 3.0 MiB in total, at most 1,024.0 MiB (FLEXATTN_CACHE_SIZE)"
    )
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(store.root))
    monkeypatch.setenv("FLEXATTN_CACHE_SIZE", "0")
    done = subprocess.run([sys.executable, "-m", "flexattn"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{store.root}: 1 kernels, 3.0 MiB in total, no limit (FLEXATTN_CACHE_SIZE)\n"
