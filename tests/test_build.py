"""build: kernels are compiled once, cached on disk and rebuilt if damaged. Also Triton's output, and launches."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
import torch

from flexattn.compile.kernel_source import KernelSource
from flexattn.errors import ArgumentError, CompileError
from flexattn.machine import kernel_store
from flexattn.machine.kernel_store import KernelStore, open_store
from flexattn.machine.target import INTERPRETER, Target, target_of
from flexattn.process import config, progress
from flexattn.runtime import build as build_module
from flexattn.runtime.build import OutOfResources, build, clear_memory, digest, stats

pytest.importorskip("triton")

from sm90 import SM90, report

TEXT = '''\
import triton
import triton.language as tl


@triton.jit
def mod(score, bias):
    return score + bias


@triton.jit
def product(a_ptr, b_ptr, c_ptr, K, bias, stride):
    """c = a @ b + bias: a [64, K] and b [K, 64] dense, c [64 x programs, 64] with rows `stride` apart."""
    m = tl.arange(0, 64)
    c = tl.zeros([64, 64], tl.float32)
    for start in range(0, K, 64):
        k = start + tl.arange(0, 64)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * 64 + m[None, :])
        c = tl.dot(a, b, c)
    rows = tl.program_id(0).to(tl.int64) * 64 + m
    tl.store(c_ptr + rows[:, None] * stride + m[None, :], mod(c, bias))
'''
PRODUCT = KernelSource(
    name="product",
    text=TEXT,
    header=("mod bias, user.py:3",),
    signature=(
        ("a_ptr", "*fp16"), ("b_ptr", "*fp16"), ("c_ptr", "*fp32"), ("K", "i32"), ("bias", "fp32"), ("stride", "i64"),
    ),
    divisible=("a_ptr", "b_ptr", "c_ptr", "K", "stride"),
)  # fmt: skip
SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_build import PRODUCT, SM90
from flexattn.runtime.build import build, stats
kernel = build(PRODUCT, SM90)
print(json.dumps(stats() | {{"triton": "triton.compiler.code_generator" in sys.modules}}))
"""
no_gpu = pytest.mark.skipif(torch.version.cuda is not None, reason="a GPU machine launches for real")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch):
    """Give each test an empty cache folder and no kernels in memory."""
    folder = tmp_path / "cache"
    _use(monkeypatch, FLEXATTN_CACHE_DIR=str(folder))
    yield folder
    monkeypatch.undo()
    _use(monkeypatch)


def _use(monkeypatch, **environment: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config.settings.cache_clear()
    clear_memory()


def _start(script: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script.format(tests=str(Path(__file__).parent))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | environment)


def _result(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


# What is compiled


def test_sm90_without_a_gpu(cache: Path):
    kernel = build(PRODUCT, SM90)
    found = report(kernel)
    assert found.sass["HGMMA"] > 0 and found.sass["LDGSTS"] > 0
    assert (found.spill_bytes, kernel.spills, found.warnings) == (0, 0, ())
    assert kernel.registers == found.registers > 0
    assert kernel.shared == found.shared_bytes > 0
    assert ".visible .entry product(" in kernel.ptx
    assert kernel.path == cache / kernel.digest / "product.py"
    assert str(kernel.path) in kernel.ptx, "debuggers and profilers find the source"
    assert repr(kernel) == f"Kernel(product, sm_90, {kernel.digest[:12]})"


def test_alignment_is_what_divisible_says():
    unaligned = dataclasses.replace(PRODUCT, divisible=())
    assert report(unaligned).sass["LDGSTS"] == 0


def test_register_limit():
    assert ".maxnreg 200" in build(dataclasses.replace(PRODUCT, maxnreg=200), SM90).ptx
    with pytest.raises(CompileError, match="product cannot be compiled") as failure:  # the accumulators alone need more
        build(dataclasses.replace(PRODUCT, maxnreg=24), SM90)
    assert len(str(failure.value)) < 3000, "the assembler's complaint without the whole PTX"


def test_source_is_a_readable_file():
    lines = build(PRODUCT, SM90).path.read_text().splitlines()
    assert lines[0] == "# mod bias, user.py:3"
    assert lines[1] == f"# key {digest(PRODUCT, SM90)}"
    assert lines[2].startswith("# flexattn ") and lines[2].endswith(", sm_90")
    assert "\n".join(lines).endswith(TEXT.rstrip())


def test_the_users_triton_cache_is_left_alone(monkeypatch):
    from triton import knobs

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    before = knobs.cache.dir
    build(PRODUCT, SM90)
    assert knobs.cache.dir == before
    assert "TRITON_CACHE_DIR" not in os.environ


# The caches


def test_memory(cache: Path):
    kernel = build(PRODUCT, SM90)
    assert build(dataclasses.replace(PRODUCT, header=("another",)), SM90) is kernel
    assert stats() == {"compiles": 1, "disk_hits": 0, "memory_hits": 1}
    assert len(list(cache.rglob("*.cubin"))) == 1, "Triton keeps no copy"


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(build_module, "_MEMORY", 2)
    monkeypatch.setattr(build_module, "_kernel", lambda source, target, key, loader: object())
    first, second, _ = (build(dataclasses.replace(PRODUCT, num_stages=n), SM90) for n in (1, 2, 3))
    assert build(dataclasses.replace(PRODUCT, num_stages=2), SM90) is second
    assert build(dataclasses.replace(PRODUCT, num_stages=1), SM90) is not first


@pytest.mark.parametrize(
    "change",
    [
        {"text": TEXT + "\n"},
        {"name": "other"},
        {"signature": (("a_ptr", "*bf16"), *PRODUCT.signature[1:])},
        {"divisible": ("a_ptr",)},
        {"num_warps": 8},
        {"num_stages": 1},
        {"maxnreg": 128},
    ],
    ids=lambda change: next(iter(change)),
)
def test_digest_depends_on(change):
    assert digest(dataclasses.replace(PRODUCT, **change), SM90) != digest(PRODUCT, SM90)


@pytest.mark.parametrize("target", [Target("cuda", 80, 32), INTERPRETER], ids=str)
def test_digest_depends_on_the_target(target):
    assert digest(PRODUCT, target) != digest(PRODUCT, SM90)


def test_digest_depends_on_versions_and_settings(monkeypatch):
    seen = {digest(PRODUCT, SM90)}
    monkeypatch.setenv("PTXAS_OPTIONS", "-O1")
    seen.add(digest(PRODUCT, SM90))
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    seen.add(digest(PRODUCT, SM90))
    monkeypatch.setattr("triton.__version__", "9.9.9")
    seen.add(digest(PRODUCT, SM90))
    monkeypatch.setattr(build_module, "_package_version", lambda: "9.9.9")
    seen.add(digest(PRODUCT, SM90))
    assert len(seen) == 5


def test_digest_does_not_depend_on_the_header_or_the_order_of_divisible():
    same = dataclasses.replace(PRODUCT, header=(), divisible=PRODUCT.divisible[::-1])
    assert digest(same, SM90) == digest(PRODUCT, SM90)


def test_second_process_compiles_nothing():
    build(PRODUCT, SM90)
    found = json.loads(_result(_start(SCRIPT)))
    assert found == {"compiles": 0, "disk_hits": 1, "memory_hits": 0, "triton": False}


@pytest.mark.slow
def test_processes_at_once_compile_once(cache: Path):
    found = [json.loads(_result(process)) for process in [_start(SCRIPT) for _ in range(4)]]
    assert sum(f["compiles"] for f in found) == 1
    assert sum(f["disk_hits"] for f in found) == 3
    assert not list(cache.glob(".new-*"))


HOLDER = """
import os, signal, time
from pathlib import Path
from flexattn.machine.kernel_store import KernelStore
with KernelStore(Path({cache!r})).lock({key!r}):
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def holder(cache: Path):
    """Start a process that holds the lock of PRODUCT and hangs."""
    cache.mkdir(mode=0o700)
    script = HOLDER.format(cache=str(cache), key=digest(PRODUCT, SM90))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_process_waits_for_the_one_that_compiles(cache: Path, holder: subprocess.Popen[str], monkeypatch, capsys):
    """A killed holder leaves no lock. The progress line says what is waited for."""
    monkeypatch.setattr(progress, "_PATIENCE", 0.05)
    monkeypatch.setattr(build_module._compiling, "end", 0.0)
    threading.Timer(1.0, holder.kill).start()
    start = time.monotonic()
    build(PRODUCT, SM90)
    assert time.monotonic() - start > 0.9
    assert "waiting for another process that compiles product for sm_90" in capsys.readouterr().err
    assert stats()["compiles"] == 1
    assert list((cache / "locks").iterdir()) == [], "a lock is removed when its kernel is written"


def test_a_process_that_hangs_blocks_until_the_limit(cache: Path, holder: subprocess.Popen[str], monkeypatch):
    monkeypatch.setattr(kernel_store, "LONGEST_WAIT", 0.3)
    kernel = build(PRODUCT, SM90)
    assert holder.poll() is None
    assert kernel.path.is_relative_to(cache), "it is stored although another process has the lock"
    clear_memory()
    monkeypatch.setattr(kernel_store, "LONGEST_WAIT", 60.0)
    assert build(PRODUCT, SM90).path == kernel.path, "what is on disk needs no lock"


def test_a_file_system_without_locks(cache: Path, holder: subprocess.Popen[str], monkeypatch):
    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    start = time.monotonic()
    with KernelStore(cache).lock(digest(PRODUCT, SM90)):
        pass
    assert time.monotonic() - start < 0.5


def test_an_entry_that_another_process_has_written_is_kept(cache: Path):
    folder = build(PRODUCT, SM90).path.parent
    before = folder.stat().st_ino
    KernelStore(cache).add(folder.name, {"product.py": b""})
    assert folder.stat().st_ino == before


def test_kernels_on_disk_need_no_lock(cache: Path, monkeypatch):
    build(PRODUCT, SM90)
    clear_memory()
    monkeypatch.setattr(KernelStore, "lock", None)
    build(PRODUCT, SM90)


def test_one_process_is_the_first(cache: Path):
    store = open_store(cache)
    assert store is not None
    assert [store.begin(), store.begin()] == [True, False]


# A shared directory


def _shared(cache: Path, monkeypatch, mode: int = 0o755) -> Path:
    """Build PRODUCT in a directory that is then the shared one."""
    kernel = build(PRODUCT, SM90)
    shared = cache.rename(cache.with_name("shared"))
    shared.chmod(mode)
    _use(monkeypatch, FLEXATTN_SHARED_CACHE_DIR=str(shared))
    return shared / kernel.digest


def test_kernels_of_the_shared_folder_are_used(cache: Path, monkeypatch):
    folder = _shared(cache, monkeypatch)
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert build_module._is_built(digest(PRODUCT, SM90))
    assert build(PRODUCT, SM90).path.parent == folder
    assert stats() == {"compiles": 0, "disk_hits": 1, "memory_hits": 0}
    other = build(dataclasses.replace(PRODUCT, num_stages=1), SM90)
    assert other.path.is_relative_to(cache), "new kernels are written to the user's own folder"
    assert (folder / "manifest.json").stat().st_mtime_ns == before, "nothing is written to it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_shared_folder_of_another_user(cache: Path, monkeypatch):
    folder = _shared(cache, monkeypatch)
    for path in (folder.parent, *folder.parent.rglob("*")):
        os.chown(path, 1234, 1234)
    assert build(PRODUCT, SM90).path.parent == folder
    os.chown(folder, 1235, 1235)
    clear_memory()
    assert build(PRODUCT, SM90).path.is_relative_to(cache), "an entry of a third user"


def test_shared_folder_that_others_can_write(cache: Path, monkeypatch):
    _shared(cache, monkeypatch, 0o777)
    with pytest.warns(RuntimeWarning, match="FLEXATTN_SHARED_CACHE_DIR"):
        assert build(PRODUCT, SM90).path.is_relative_to(cache)


def test_shared_folder_that_is_missing(cache: Path, monkeypatch):
    _use(monkeypatch, FLEXATTN_SHARED_CACHE_DIR=str(cache.with_name("nothing")))
    assert build(PRODUCT, SM90).path.is_relative_to(cache)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["product.cubin", "product.json", "product.py", "manifest.json"])
@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, Path.unlink, lambda file: file.write_text("{}")])
def test_damaged_entry_is_not_found(cache: Path, name, damage):
    store = KernelStore(cache)
    cache.mkdir(mode=0o700)
    content = os.urandom(3000)
    folder = store.add("0" * 32, {"product.cubin": content, "product.json": content, "product.py": content})
    assert store.find("0" * 32) == folder
    damage(folder / name)
    assert store.find("0" * 32) is None


def test_damaged_entry_is_rebuilt():
    kernel = build(PRODUCT, SM90)
    binary = kernel.path.with_suffix(".cubin")
    _truncate(binary)
    clear_memory()
    assert build(PRODUCT, SM90).path == kernel.path
    assert stats()["compiles"] == 1
    assert report(kernel).sass["HGMMA"] > 0


def test_folders_are_private(cache: Path):
    kernel = build(PRODUCT, SM90)
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (cache, kernel.path.parent))


def test_folder_that_others_may_write_to_is_closed(cache: Path):
    cache.mkdir()
    cache.chmod(0o777)
    assert build(PRODUCT, SM90).path.is_relative_to(cache)
    assert cache.stat().st_mode & 0o777 == 0o700


def test_entry_that_others_may_write_to_is_not_trusted(cache: Path):
    folder = build(PRODUCT, SM90).path.parent
    folder.chmod(0o777)
    assert KernelStore(cache).find(folder.name) is None


def test_folder_of_another_user_is_not_trusted(cache: Path, monkeypatch):
    folder = build(PRODUCT, SM90).path.parent
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    open_store.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"stores no kernels in {cache}.* {cache} belongs to another user"):
        assert open_store(cache) is None
    assert KernelStore(cache).find(folder.name) is None
    open_store.cache_clear()


def planted(folder: Path) -> Path:
    """Create a file that Triton would load unchecked, and return it."""
    stub = folder / "a" / "__triton_launcher.so"
    stub.parent.mkdir(parents=True)
    stub.write_bytes(b"planted")
    return stub


def test_stubs_behind_a_link_are_not_used(cache: Path, tmp_path: Path):
    stub = planted(tmp_path / "elsewhere")
    cache.mkdir(mode=0o700)
    (cache / "triton").symlink_to(tmp_path / "elsewhere")
    folder = build_module._triton_folder()
    assert folder == cache / "triton" and not folder.is_symlink() and not list(folder.iterdir())
    assert stub.exists(), "what the link led to is left alone"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("inside", [False, True], ids=["the folder", "a folder in it"])
def test_stubs_of_another_user_are_not_used(cache: Path, inside: bool):
    stub = planted(cache / "triton")
    cache.chmod(0o700)
    os.chown(stub.parent if inside else stub.parent.parent, 12345, 12345)
    assert build_module._triton_folder() == cache / "triton"
    assert not stub.exists()


def test_stubs_that_others_could_write_are_not_used(cache: Path):
    stub = planted(cache / "triton")
    cache.chmod(0o700)
    (cache / "triton").chmod(0o777)
    assert build_module._triton_folder() == cache / "triton"
    assert not stub.exists() and (cache / "triton").stat().st_mode & 0o777 == 0o700


def test_a_link_among_the_stubs_is_not_followed(cache: Path, tmp_path: Path):
    stub = planted(cache / "triton")
    cache.chmod(0o700)
    stub.unlink()
    stub.symlink_to(planted(tmp_path / "elsewhere"))
    assert not list(build_module._triton_folder().iterdir())


def test_stubs_of_ours_are_kept(cache: Path):
    stub = planted(cache / "triton")
    for folder in (cache, cache / "triton"):
        folder.chmod(0o700)
    stub.parent.chmod(0o775)  # as Triton creates it with umask 002; others cannot reach it
    assert build_module._triton_folder() == cache / "triton"
    assert stub.exists()


@pytest.mark.parametrize("others", [0o777, 0o770], ids=oct)
def test_folder_that_others_can_rename_is_not_used(tmp_path: Path, monkeypatch, others: int):
    shared = tmp_path / "shared"
    (shared / "cache").mkdir(parents=True, mode=0o700)
    (shared / "cache").chmod(0o700)
    monkeypatch.setattr("flexattn.machine.kernel_store._is_own_group", lambda gid: False)
    shared.chmod(others)
    with pytest.warns(RuntimeWarning, match=f"{shared} belongs to another user, or others can write there"):
        assert open_store(shared / "cache") is None
    open_store.cache_clear()
    shared.chmod(others | 0o1000)  # sticky, as /tmp: each may rename only what is theirs
    assert open_store(shared / "cache") is not None


def test_the_users_own_group_is_no_other(tmp_path: Path):
    shared = tmp_path / "home"
    shared.mkdir()
    shared.chmod(0o770)  # under umask 002, where each user has a group
    assert open_store(shared / "cache") is not None


def test_folder_made_by_another_user_after_ours_was_deleted_is_not_written(cache: Path):
    build(PRODUCT, SM90)
    shutil.rmtree(cache)
    cache.mkdir()
    cache.chmod(0o777)
    kernel = build(dataclasses.replace(PRODUCT, num_stages=1), SM90)
    assert not kernel.path.is_relative_to(cache) and not list(cache.iterdir())


@pytest.mark.parametrize("name", ['a"b', "a'b", "a\\b", "a b$x;", "\udcff", "[x]*"])
def test_folder_with_a_name_that_is_not_plain(tmp_path: Path, monkeypatch, name: str):
    _use(monkeypatch, FLEXATTN_CACHE_DIR=str(tmp_path / name))
    kernel = build(PRODUCT, SM90)
    assert kernel.path.is_relative_to(tmp_path / name) and kernel.path.exists() and kernel.registers > 0


@pytest.mark.parametrize("text", ["[" * 100_000, '{"digest": ' * 100_000], ids=["lists", "objects"])
def test_nested_manifest_is_damage(cache: Path, text: str):
    folder = build(PRODUCT, SM90).path.parent
    (folder / "manifest.json").write_text(text)
    assert KernelStore(cache).find(folder.name) is None


def test_folder_that_cannot_be_made(monkeypatch, capsys):
    _use(monkeypatch, FLEXATTN_CACHE_DIR="/proc/flexattn", FLEXATTN_DEBUG="1")
    kernel = build(PRODUCT, SM90)
    assert report(kernel).sass["HGMMA"] > 0
    assert "flexattn-" in str(kernel.path), "a temporary folder"
    assert "no kernels are stored in /proc/flexattn" in capsys.readouterr().err


def test_read_only_folder(cache: Path, monkeypatch, capsys):
    kept = build(PRODUCT, SM90).path

    lock = KernelStore.lock

    def refuse(self: KernelStore, digest: str, *waits):
        if self.root == cache:
            raise PermissionError("Read-only file system")
        return lock(self, digest, *waits)

    monkeypatch.setattr(KernelStore, "lock", refuse)
    _use(monkeypatch, FLEXATTN_DEBUG="1")
    assert build(PRODUCT, SM90).path == kept, "what is there is used"
    others = [build(dataclasses.replace(PRODUCT, num_stages=n), SM90) for n in (1, 2)]
    assert not any(kernel.path.is_relative_to(cache) for kernel in others)
    assert capsys.readouterr().err.count("is not writable (Read-only file system)") == 1


def test_user_without_a_home(monkeypatch):
    monkeypatch.setattr(config, "_cache_dir", lambda environment: None)
    config.settings.cache_clear()
    assert build(PRODUCT, SM90).path.exists()


def test_folder_deleted_in_between(cache: Path):
    build(PRODUCT, SM90)
    shutil.rmtree(cache)
    clear_memory()
    assert build(PRODUCT, SM90).path.is_relative_to(cache)


@pytest.mark.parametrize("delete", [lambda cache: shutil.rmtree(cache), lambda cache: cache.rename(f"{cache}.old")])
def test_folder_deleted_under_a_kernel(cache: Path, delete):
    kernel = build(PRODUCT, SM90)
    ptx = kernel.ptx
    delete(cache)
    assert kernel.registers > 0 and kernel.ptx == ptx and kernel.path.exists()
    assert build(PRODUCT, SM90) is kernel


def test_temporary_folder_deleted_in_between(monkeypatch):
    monkeypatch.setattr(config, "_cache_dir", lambda environment: None)
    config.settings.cache_clear()
    gone = build(PRODUCT, SM90).path.parent.parent
    shutil.rmtree(gone)
    gone.mkdir()
    gone.chmod(0o777)  # by another user, in the same place
    kernel = build(dataclasses.replace(PRODUCT, num_stages=1), SM90)
    assert kernel.path.exists() and not kernel.path.is_relative_to(gone)


def test_files_that_are_deleted_again_and_again(cache: Path, monkeypatch):
    find = build_module._find_or_compile

    def find_and_delete(*arguments) -> Path:
        folder = find(*arguments)
        shutil.rmtree(folder)
        return folder

    monkeypatch.setattr(build_module, "_find_or_compile", find_and_delete)
    with pytest.raises(CompileError, match="kernel product: found its files deleted repeatedly"):
        build(PRODUCT, SM90)
    assert stats()["compiles"] == 3


# What is shown


def test_dump_to_a_folder(tmp_path: Path, monkeypatch):
    _use(monkeypatch, FLEXATTN_DUMP=str(tmp_path / "dump"))
    kernel = build(PRODUCT, SM90)
    names = {file.name for file in (tmp_path / "dump").iterdir()}
    assert names == {f"product-{kernel.digest[:12]}.py", f"product-{kernel.digest[:12]}.ptx"}


def test_dump_to_a_folder_that_cannot_be(monkeypatch):
    _use(monkeypatch, FLEXATTN_DUMP="/proc/flexattn/dump")
    with pytest.raises(ArgumentError, match=r"FLEXATTN_DUMP: found '/proc/flexattn/dump' \(.*\), expected a folder to"):
        build(PRODUCT, SM90)


def test_dump_prints(monkeypatch, capsys):
    _use(monkeypatch, FLEXATTN_DUMP="1")
    build(PRODUCT, SM90)
    assert "def product(a_ptr, b_ptr, c_ptr, K, bias, stride):" in capsys.readouterr().err


# What cannot be built


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"text": TEXT.replace("mod(c, bias)", "mod(c, nothing)")},
            r"(?s)product cannot be compiled for sm_90: .*NameError.*nothing",
        ),
        ({"text": TEXT + "1 / 0"}, "source does not run: ZeroDivisionError"),
        ({"text": TEXT.replace(" bias, stride", " stride, bias")}, r"found \['a_ptr', .*'stride', 'bias'\], expected"),
        ({"divisible": ("missing",)}, r"divisible arguments \['missing'\] are not in its signature"),
    ],
)
def test_wrong_source(cache: Path, change, text):
    with pytest.raises(CompileError, match=text):
        build(dataclasses.replace(PRODUCT, **change), SM90)
    assert not list(cache.rglob("*.cubin")) and not list(cache.glob(".new-*"))


def test_interpreter_must_be_asked_for():
    with pytest.raises(CompileError, match="target interpreter: found no TRITON_INTERPRET"):
        build(PRODUCT, INTERPRETER)


def test_a_loader_launches_the_kernel_and_runs_once():
    loaded, launched = [], []

    def loader(request, files):
        loaded.append((request.name, {"ptx", "json"} <= files.keys()))
        return lambda *launch: launched.append(launch)

    kernel = build(PRODUCT, SM90, loader)
    assert build(PRODUCT, SM90, loader) is kernel
    assert build(PRODUCT, SM90) is not kernel
    for programs in (7, 8):
        kernel.launch(programs, (1, 2), stream=9)
    assert loaded == [("product", True)]
    assert launched == [(7, 9, (1, 2)), (8, 9, (1, 2))]


@no_gpu
def test_launch_without_a_gpu():
    with pytest.raises(CompileError, match="kernel product: found no GPU"):
        build(PRODUCT, SM90).launch(1, (None, None, None, 0, 0.0, 64))


# What is launched

INTERPRETED = """
import sys
sys.path.insert(0, {tests!r})
import torch
from test_build import PRODUCT
from flexattn.runtime.build import build, stats
from flexattn.machine.target import INTERPRETER
a, b, c = torch.randn(64, 128).half(), torch.randn(128, 64).half(), torch.zeros(64, 80)
kernel = build(PRODUCT, INTERPRETER)
kernel.load()
kernel.launch(1, (a, b, c, 128, 0.5, 80))
torch.testing.assert_close(c[:, :64], (a @ b).float() + 0.5, atol=2e-2, rtol=1e-2)
assert not c[:, 64:].any() and kernel.path.exists() and build(PRODUCT, INTERPRETER) is kernel
print(stats())
"""


def test_interpreter():
    out = _result(_start(INTERPRETED, TRITON_INTERPRET="1"))
    assert out == "{'compiles': 1, 'disk_hits': 0, 'memory_hits': 1}\n"


LAUNCHED = """
import sys
sys.path.insert(0, {tests!r})
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.driver import driver
from test_build import PRODUCT, SM90
from flexattn.runtime import build as build_module
from flexattn.machine import triton_versions

def load_without_c_launcher(request, files):
    return triton_versions.launcher(triton_versions.load_kernel(request, files), direct=False)

torch.cuda.is_available = lambda: True
kernel = build_module.build(PRODUCT, SM90)
by_run = build_module.build(PRODUCT, SM90, load_without_c_launcher)
with triton_versions.cache_folder(build_module._triton_folder()):
    fake = CudaDriver()
fake.get_current_device, fake.get_current_target = lambda: 0, lambda: GPUTarget("cuda", 90, 32)
driver.set_active(fake)
try:
    a = torch.zeros(1)
    arguments = (a, a.data_ptr(), None, -5, 0.5, 1 << 40)
    kernel.launch(7, arguments, stream=9)  # the C launcher
    by_run.launch(7, arguments, stream=9)  # CompiledKernel.run
    seen = []
    knobs.runtime.launch_enter_hook.add(lambda metadata: seen.append(metadata.get()["name"]))
    by_run.launch(7, arguments, stream=9)  # with a profiler
    knobs.runtime.launch_enter_hook.calls.clear()
    for wrong in (arguments[:-1], (*arguments, 0)):
        try:
            kernel.launch(7, wrong, stream=9)
        except TypeError as error:
            seen.append("TypeError")
    print(a.data_ptr(), seen)
except build_module.OutOfResources as error:
    print(error, error.asked, error.available)
"""


def test_triton_does_not_hash_itself(cache: Path, monkeypatch: pytest.MonkeyPatch):
    from triton.compiler import compiler
    from triton.runtime import cache as triton_cache

    def hash_everything() -> str:
        raise AssertionError("Triton's own key was computed")

    monkeypatch.setattr(triton_cache, "triton_key", hash_everything)
    kernels = [build(PRODUCT, SM90), build(dataclasses.replace(PRODUCT, num_warps=8), SM90)]
    hashes = {json.loads(k.path.with_suffix(".json").read_text())["hash"] for k in kernels}
    assert len(hashes) == 2
    assert compiler.get_cache_key is triton_cache.get_cache_key


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory) -> dict[str, str]:
    """Compile a libcuda.so.1 that only records launches."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        pytest.skip("Triton's launcher needs a C compiler and Python's headers")
    import triton

    folder = tmp_path_factory.mktemp("driver")
    headers = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "include"
    source = Path(__file__).parent / "fake_driver.c"
    library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([compiler, f"-I{headers}", str(source), *library], check=True)
    return {
        "TRITON_LIBCUDA_PATH": str(folder),
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_DRIVER_LOG": str(folder / "log"),
        "FAKE_DRIVER_SHARED": "232448",
    }


@pytest.mark.slow
@no_gpu
def test_launch_reaches_the_driver(cache: Path, fake_driver: dict[str, str]):
    kernel = build(PRODUCT, SM90)
    address, seen = _result(_start(LAUNCHED, **fake_driver)).split(maxsplit=1)
    assert seen == "['product', 'TypeError', 'TypeError']\n"
    launches = Path(fake_driver["FAKE_DRIVER_LOG"]).read_text().splitlines()
    shape = f"grid 7 1 1 threads 128 shared {kernel.shared} stream 9 function 66"
    assert launches == [f"{shape} {address} {address} 0 -5 0.5 {1 << 40} scratch 0 0"] * 3
    stubs = {file: file.stat().st_mtime_ns for file in (cache / "triton").rglob("*.so")}
    assert stubs
    _result(_start(LAUNCHED, **fake_driver))
    assert {file: file.stat().st_mtime_ns for file in (cache / "triton").rglob("*.so")} == stubs, "stubs are kept"


STUBS = """
import sys
sys.path.insert(0, {tests!r})
from test_build import PRODUCT, SM90
from flexattn.runtime import build
from flexattn.runtime.compiler import run_job
for source in (None, PRODUCT):
    build._build_stub(source, SM90, run_job)
"""


@pytest.mark.slow
@no_gpu
def test_c_code_is_built_without_the_kernel(cache: Path, fake_driver: dict[str, str]):
    _result(_start(STUBS, **fake_driver))
    stubs = {file: file.stat().st_mtime_ns for file in (cache / "triton").rglob("*.so")}
    assert stubs
    _result(_start(LAUNCHED, **fake_driver))
    assert {file: file.stat().st_mtime_ns for file in (cache / "triton").rglob("*.so")} == stubs


# A second GPU loads a kernel from its files again.
DELETED = LAUNCHED.replace(
    "    by_run.launch(7, arguments, stream=9)  # CompiledKernel.run",
    """    import shutil
    shutil.rmtree(kernel.path.parent.parent)
    build_module.current_device = lambda: 1
    kernel.launch(7, arguments, stream=9)""",
)


@no_gpu
def test_launch_on_a_second_gpu_after_the_folder_was_deleted(cache: Path, fake_driver: dict[str, str]):
    build(PRODUCT, SM90)
    assert DELETED != LAUNCHED
    _, seen = _result(_start(DELETED, **fake_driver)).split(maxsplit=1)
    assert seen == "['product', 'TypeError', 'TypeError']\n"


@no_gpu
def test_out_of_shared_memory(fake_driver: dict[str, str]):
    asked = build(PRODUCT, SM90).shared
    text = _result(_start(LAUNCHED, **fake_driver | {"FAKE_DRIVER_SHARED": "20000"}))
    assert text == (
        f"kernel product: found {asked} of shared memory, expected at most 20000. "
        f"Use smaller tiles or fewer stages. {asked} 20000\n"
    )


@pytest.mark.gpu
def test_launch_on_the_gpu():
    a, b = torch.randn(64, 128, device="cuda").half(), torch.randn(128, 64, device="cuda").half()
    expected = (a.float() @ b.float() + 0.5).repeat(3, 1)
    kernel = build(PRODUCT, target_of(a.device))
    for pointers in (lambda *tensors: tensors, lambda *tensors: tuple(t.data_ptr() for t in tensors)):
        c = torch.zeros(192, 80, device="cuda")
        kernel.launch(3, (*pointers(a, b, c), 128, 0.5, 80))
        torch.testing.assert_close(c[:, :64], expected, atol=1e-3, rtol=1e-3)
        assert not c[:, 64:].any()


@pytest.mark.gpu
def test_streams_and_graphs_on_the_gpu():
    a, b = torch.ones(64, 64, device="cuda").half(), torch.ones(64, 64, device="cuda").half()
    c = torch.zeros(64, 64, device="cuda")
    kernel = build(PRODUCT, target_of(a.device))
    kernel.load()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # captured only if the launch goes to the current stream
        kernel.launch(1, (a, b, c, 64, 1.0, 64))
    torch.cuda.synchronize()
    assert not c.any()
    graph.replay()
    torch.cuda.synchronize()
    assert (c == 65).all()
    stream = torch.cuda.Stream()
    kernel.launch(1, (a, b, c, 64, 2.0, 64), stream=stream.cuda_stream)
    stream.synchronize()
    assert (c == 66).all()


@pytest.mark.gpu
def test_out_of_shared_memory_on_the_gpu():
    text = re.sub(r"\b64\b", "256", TEXT)
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = build(dataclasses.replace(PRODUCT, text=text, num_warps=8), target_of(device))
    with pytest.raises(OutOfResources, match="of shared memory"):
        kernel.load()
