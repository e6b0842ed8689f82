"""compile_workers: what is compiled ahead is what this process would compile; failures are left to this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from flexattn.compile.kernel_source import KernelSource
from flexattn.errors import CompileError
from flexattn.machine import triton_versions
from flexattn.machine.target import Target
from flexattn.mask_build.kernels import list_sources
from flexattn.process.config import settings
from flexattn.runtime import build as build_module
from flexattn.runtime import compile_workers
from flexattn.runtime.build import build, build_ahead, digest, expect_kernels

SM90 = Target("cuda", 90, 32)
COUNT, SCAN, FILL = list_sources()


@pytest.fixture
def workers(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give an empty kernel folder and at most two workers, which end with the test."""
    monkeypatch.setattr(compile_workers, "processes", lambda: 2)
    build_module.clear_memory()
    for once in (build_module.expect_kernels, build_module._build_driver_ahead):
        once.cache_clear()
    yield machine
    compile_workers.end_workers()
    build_module.clear_memory()


def compiled(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("*/*.cubin")}


def wait_until_started(count: int) -> None:
    """Wait until workers have begun with all kernels that were given to them."""
    until = time.monotonic() + 60
    while compile_workers.started() < count and time.monotonic() < until:
        time.sleep(0.01)


def broken() -> KernelSource:
    return replace(COUNT, text=COUNT.text.replace("tl.program_id(0)", "tl.no_such_function(0)"))


def test_a_worker_compiles_what_this_process_compiles(workers: Path) -> None:
    before = compile_workers.started()
    build_ahead([SCAN], SM90)
    wait_until_started(before + 1)
    kernel = build(SCAN, SM90)
    assert compile_workers.started() == before + 1
    assert build_module.stats()["compiles"] == 1
    ahead = compiled(workers)
    assert list(ahead) == [f"{SCAN.name}.cubin"]
    for file in kernel.path.parent.iterdir():
        file.unlink()
    kernel.path.parent.rmdir()
    build_module.clear_memory()
    build(SCAN, SM90)
    assert compiled(workers) == ahead
    assert compile_workers.started() == before + 1


def test_kernels_on_disk_start_no_worker(workers: Path) -> None:
    build(SCAN, SM90)
    before = compile_workers.started()
    build_ahead([SCAN], SM90)
    build_module.clear_memory()
    build_ahead([SCAN], SM90)
    assert compile_workers.started() == before


def test_a_kernel_that_does_not_compile_raises_where_it_is_needed(workers: Path) -> None:
    before = compile_workers.started()
    build_ahead([broken()], SM90)
    wait_until_started(before + 1)
    with pytest.raises(CompileError, match="cannot be compiled for sm_90"):
        build(broken(), SM90)


def test_a_worker_that_dies_leaves_the_kernel_to_this_process(workers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_START", "import os; os._exit(3)")
    before = compile_workers.started()
    build_ahead([SCAN, FILL], SM90)
    wait_until_started(before + 2)
    for source in (SCAN, FILL):
        build(source, SM90)
    assert len(compiled(workers)) == 2


def test_workers_of_other_settings_leave_the_kernel_to_this_process(
    workers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compile_workers.started()
    compile_workers.warm_up()
    wait_until_started(before + 2)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    build_ahead([SCAN], SM90)
    key = digest(SCAN, SM90)
    while compile_workers._pool is not None and compile_workers._pool.waiting:
        time.sleep(0.01)
    assert compile_workers.take(key) is None
    assert not compiled(workers)
    build(SCAN, SM90)


def test_workers_start_before_the_first_kernel_is_known(workers: Path) -> None:
    before = compile_workers.started()
    expect_kernels()
    wait_until_started(before + 2)
    build_ahead([SCAN], SM90)
    build(SCAN, SM90)
    assert compile_workers.started() == before + 2


def test_workers_are_not_expected_once_a_kernel_is_on_disk(workers: Path) -> None:
    build(SCAN, SM90)
    expect_kernels()
    assert compile_workers._pool is None


def test_c_code_is_built_apart_from_the_kernels(workers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(compile_workers, "submit", lambda key, task: asked.append(key))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    build_ahead([SCAN, FILL, COUNT], SM90, here=[FILL])
    scan, fill, count = (digest(source, SM90) for source in (SCAN, FILL, COUNT))
    stubs = [f"stub {key}" for key in (fill, scan, count)] if triton_versions.builds_launchers() else []
    assert asked == [scan, count, "driver", *stubs]
    asked.clear()
    build(FILL, SM90)
    build_ahead([], SM90, here=[FILL])
    build_ahead([COUNT], SM90, here=[FILL])
    assert asked == [count, *stubs[2:]], "once per process, and not for kernels on disk"


def test_no_executable_means_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("executable", ""), ("executable", None), ("executable", "/opt/app/server")):
        monkeypatch.setattr(sys, name, value)
        assert compile_workers.processes() == 0
    monkeypatch.undo()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert compile_workers.processes() == 0


def test_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert compile_workers.processes() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert compile_workers.processes() == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setenv("FLEXATTN_COMPILE_PROCESSES", "0")
    settings.cache_clear()
    try:
        assert compile_workers.processes() == 0
    finally:
        monkeypatch.undo()
        settings.cache_clear()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_a_forked_child_has_no_workers(workers: Path) -> None:
    before = compile_workers.started()
    build_ahead([SCAN], SM90)
    wait_until_started(before + 1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            pool = compile_workers._pool
            status = int(pool is not None or compile_workers.take(digest(SCAN, SM90)) is not None)
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    build(SCAN, SM90)  # the parent's worker still works


SCRIPT = """
import sys
from flexattn.machine.target import Target
from flexattn.mask_build.kernels import list_sources
from flexattn.runtime import build, compile_workers
compile_workers.processes = lambda: 1
build.build_ahead(list_sources()[1:2], Target("cuda", 90, 32))
while compile_workers._pool is None or not compile_workers._pool.workers:
    pass
print(*[worker.process.pid for worker in compile_workers._pool.workers], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file without a guard", "-c", "stdin", "killed"])
def test_workers_end_with_their_process(way: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    script = SCRIPT + ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)" if way == "killed" else "")
    file.write_text(f"print('main')\n{script}")
    command = {"-c": ["-c", f"print('main')\n{script}"], "stdin": ["-"]}.get(way, [str(file)])
    done = subprocess.run(
        [sys.executable, *command], input=file.read_text() if way == "stdin" else "", capture_output=True, text=True,
        env={**os.environ, "FLEXATTN_CACHE_DIR": str(tmp_path / "kernels")},
    )  # fmt: skip
    main, *pids = done.stdout.split()
    assert main == "main"  # once: no worker ran the script
    assert len(pids) == 1
    until = time.monotonic() + 20
    while Path(f"/proc/{pids[0]}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pids[0]}").exists()
    assert way == "killed" or not list((tmp_path / "kernels").glob(".new-*"))
