"""build: KernelSource -> Kernel. A kernel is compiled once per machine and loaded once per process and device."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from flexattn.compile.kernel_source import KernelSource
from flexattn.errors import ArgumentError, CompileError, message
from flexattn.machine import cache_size, triton_versions
from flexattn.machine.kernel_store import KernelStore, existing_store, open_store, shared_store, temporary_store
from flexattn.machine.target import Target, target_of
from flexattn.machine.triton_versions import FlatLaunch
from flexattn.process.config import settings
from flexattn.process.events import debug
from flexattn.process.forks import Lock, cached_property
from flexattn.process.progress import Waiting
from flexattn.runtime import compile_workers
from flexattn.runtime.compiler import Job, StubJob, compile_job, forget_text, import_kernel, request_of
from flexattn.runtime.interpreted import replaced_globals

_KEPT_FILES = ("json", "ptx", "ttgir", "cubin", "amdgcn", "hsaco")
_LARGEST_TEXT = 1 << 20  # bytes; larger intermediate texts are not kept
_MEMORY = 512  # kernels per process
_ATTEMPTS = 3  # to find or build a kernel and read its files

_DRIVER = "driver"  # the task of building what all launches need

Compile = Callable[[Job], dict[str, bytes]]
# (request, compiled files by ending) -> launch function. Loads the kernel on the current device.
Loader = Callable[[triton_versions.Request, dict[str, Path]], triton_versions.LaunchFunction]


class OutOfResources(CompileError):
    """A kernel needs more resources than the device has. A smaller tile may fit."""

    def __init__(self, kernel: str, resource: str, asked: int, available: int) -> None:
        fix = "Use smaller tiles or fewer stages."
        super().__init__(message(f"kernel {kernel}", f"{asked} of {resource}", f"at most {available}", fix))
        self.resource = resource
        self.asked = asked
        self.available = available


class Kernel:
    """A built kernel. Launches go to the current device, on its current stream unless one is given.

    `_GpuKernel` and `_InterpretedKernel` implement it.
    """

    def __init__(self, source: KernelSource, target: Target, digest: str, folder: Path) -> None:
        self.name = source.name
        self.source = source
        self.target = target
        self.digest = digest
        self.path = folder / f"{source.name}.py"

    def __repr__(self) -> str:
        return f"Kernel({self.name}, {self.target}, {self.digest[:12]})"

    def launch(self, programs: int, arguments: tuple[Any, ...], stream: int | None = None) -> None:
        """Run `programs` instances of the kernel. Pointers are tensors or addresses; addresses are faster."""
        raise NotImplementedError

    def flat(self) -> FlatLaunch:
        """Return the launch with the least host time on the current device."""
        return FlatLaunch(
            self.launch,
            lambda programs, stream, arguments: (programs, tuple(arguments), stream),
            lambda n, descriptor: [descriptor],
        )

    def load(self) -> None:
        """Load the kernel on the current device now instead of at its first launch.

        Raises OutOfResources if it does not fit.
        """

    @property
    def shared(self) -> int:
        """Bytes of shared memory of one program."""
        return 0

    @property
    def registers(self) -> int:
        """Registers of one thread."""
        return 0

    @property
    def spills(self) -> int:
        """Bytes of stack of one thread."""
        return 0

    @property
    def ptx(self) -> str:
        """The PTX, or "" if it was not kept."""
        return ""


class _InterpretedKernel(Kernel):
    def __init__(self, source: KernelSource, target: Target, digest: str, folder: Path) -> None:
        super().__init__(source, target, digest, folder)
        self._function = import_kernel(self.path, self.path.read_text(), source)
        weakref.finalize(self, forget_text, self._function)
        self._function.fn.__globals__.update(replaced_globals())

    def launch(self, programs: int, arguments: tuple[Any, ...], stream: int | None = None) -> None:
        with _interpreting:
            self._function[(programs,)](*arguments)


class _GpuKernel(Kernel):
    def __init__(self, source: KernelSource, target: Target, digest: str, folder: Path, loader: Loader) -> None:
        super().__init__(source, target, digest, folder)
        self._loader = loader
        self._request = request_of(source)
        self._files = _compiled_files(source, folder)
        self._launchers: dict[int, triton_versions.LaunchFunction] = {}  # by device

    def launch(self, programs: int, arguments: tuple[Any, ...], stream: int | None = None) -> None:
        device = current_device()
        launch = self._launchers.get(device)
        if launch is None:
            launch = self._load(device)
        launch(programs, current_stream(device) if stream is None else stream, arguments)

    def flat(self) -> FlatLaunch:
        self.load()
        launcher = self._launchers[current_device()]
        flat = launcher.flat if isinstance(launcher, triton_versions.Launcher) else None
        return super().flat() if flat is None else flat

    def load(self) -> None:
        device = current_device()
        if device not in self._launchers:
            self._load(device)

    def _load(self, device: int) -> triton_versions.LaunchFunction:
        from triton.runtime.errors import OutOfResources as TritonOutOfResources

        for key in (_DRIVER, _stub_of(self.digest)):
            compile_workers.take(key)
        try:
            try:
                launch = self._loader(self._request, self._files)
            except (OSError, ImportError):  # files were deleted in the meantime, by a user or by cache eviction
                self._restore()
                launch = self._loader(self._request, self._files)
        except TritonOutOfResources as error:
            raise OutOfResources(self.name, error.name, error.required, error.limit) from error
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(
                f"kernel {self.name} ({self.path}) cannot be loaded on cuda:{device}: {error}"
            ) from error
        debug("load", f"{self.name} on GPU {device}")
        self._launchers[device] = launch
        return launch

    def _restore(self) -> None:
        """Rebuild files that were deleted since this kernel was built."""
        folder = _find_or_compile(self.source, self.target, self.digest)
        self.path = folder / f"{self.name}.py"
        self._files = _compiled_files(self.source, folder)

    def _file(self, ending: str) -> Path | None:
        if not self._files["json"].exists():
            self._restore()
        return self._files.get(ending)

    @property
    def shared(self) -> int:
        return self._metadata["shared"]

    @property
    def registers(self) -> int:
        return self._usage.get("REG", 0)

    @property
    def spills(self) -> int:
        return self._usage.get("STACK", 0)

    @property
    def ptx(self) -> str:
        file = self._file("ptx")
        return "" if file is None else file.read_text()

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        file = self._file("json")
        assert file is not None
        return json.loads(file.read_text())

    @cached_property
    def _usage(self) -> dict[str, int]:
        file = self._file("cubin")
        return {} if file is None else _usage_of(file)


def _usage_of(cubin: Path) -> dict[str, int]:
    """Return the registers and bytes of stack of one thread."""
    line = triton_versions.resource_usage(cubin)
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", line)}


def load_on_gpu(request: triton_versions.Request, files: dict[str, Path]) -> triton_versions.LaunchFunction:
    """Load a kernel on the current GPU with Triton's driver: the default loader."""
    if not torch.cuda.is_available():
        raise CompileError(message(f"kernel {request.name}", "no GPU", "a GPU to launch it on", "Use CPU tensors."))
    with triton_versions.cache_folder(_triton_folder()):
        return triton_versions.launcher(triton_versions.load_kernel(request, files))


def build(source: KernelSource, target: Target, loader: Loader = load_on_gpu) -> Kernel:
    """Return the kernel of `source`. Compile it if neither this process nor the cache folder has it.

    `loader` runs once per device, at the first launch or `Kernel.load`. Tests pass one to run a kernel without a GPU:
    as PTX, or on a driver that records launches. Kernels for the interpreter do not use it.
    """
    key = digest(source, target)
    with _lock:
        if (kernel := _kernels.get((key, loader))) is not None:
            _kernels.move_to_end((key, loader))
            _counts["memory_hits"] += 1
            return kernel
    _check(source, target)
    kernel = _kernel(source, target, key, loader)
    with _lock:
        _kernels[key, loader] = kernel
        while len(_kernels) > _MEMORY:
            _kernels.popitem(last=False)
    return kernel


def build_ahead(sources: Sequence[KernelSource], target: Target, here: Sequence[KernelSource] = ()) -> None:
    """Start compiling in other processes what this process will build soon. Kernels on disk are left alone.

    Those that take longest come first. This process compiles the kernels of `here` meanwhile. The C code that launches
    them is compiled in other processes, like that of `sources`.
    """
    if target.is_interpreter or not compile_workers.processes():
        return
    missing = {s: key for s in dict.fromkeys((*sources, *here)) if not _is_built(key := digest(s, target))}
    for source, key in missing.items():
        if source not in here:
            compile_workers.submit(key, functools.partial(_find_or_compile, source, target, key))
    if missing and target.backend == "cuda" and torch.cuda.is_available():
        _build_driver_ahead(target)
        first = sorted(missing, key=lambda source: source not in here)  # these are loaded first
        for source in first if triton_versions.builds_launchers() else ():
            compile_workers.submit(_stub_of(missing[source]), functools.partial(_build_stub, source, target))


@functools.cache
def expect_kernels() -> None:
    """Start the processes that compile kernels if no kernel is on disk yet, before it is known which are needed.

    Starting them takes 0.3 s, about as long as the imports and the planning before the first compile. Only the first
    call in a process looks at the disk. Of several processes that begin at once, only one starts them.
    """
    if compile_workers.processes() and any(store.begin() for store in itertools.islice(_stores(), 1)):
        compile_workers.warm_up()


@functools.cache
def _build_driver_ahead(target: Target) -> None:
    compile_workers.submit(_DRIVER, functools.partial(_build_stub, None, target))


def is_on_disk(source: KernelSource, target: Target) -> bool:
    """Whether a kernel is in the cache directory, or in the shared one."""
    key = digest(source, target)
    return any(store.find(key) is not None for store in itertools.islice(_stores(), 1)) or _find_shared(key) is not None


def _is_built(key: str) -> bool:
    with _lock:
        known = any(found == key for found, _ in _kernels)
    if known or any(store.find(key) is not None for store in itertools.islice(_stores(), 1)):
        return True
    return _find_shared(key) is not None


def _find_shared(key: str) -> Path | None:
    store = shared_store(settings().shared_cache_dir)
    return None if store is None else store.find(key)


def _stub_of(key: str) -> str:
    """Return the key of the task that compiles the C code for launches of a kernel."""
    return f"stub {key}"


def _build_stub(source: KernelSource | None, target: Target, run: compile_workers.Work) -> None:
    run(StubJob(source, _triple(target), str(_triton_folder())))


def _triple(target: Target) -> tuple[str, int | str, int]:
    return target.backend, target.arch, target.warp_size


def _kernel(source: KernelSource, target: Target, key: str, loader: Loader) -> Kernel:
    kind = _InterpretedKernel if target.is_interpreter else functools.partial(_GpuKernel, loader=loader)
    for _ in range(_ATTEMPTS):
        try:
            with _compiling.step(functools.partial(_what_is_compiled, source, target, key)):
                folder = compile_workers.take(key) or _find_or_compile(source, target, key)
            kernel = kind(source, target, key, folder)
            text = kernel.path.read_text()
        except FileNotFoundError:  # deleted in the meantime, by a user or by another process's cache eviction
            continue
        _dump(kernel, text)
        return kernel
    fix = "Set FLEXATTN_CACHE_DIR or a larger FLEXATTN_CACHE_SIZE."
    raise CompileError(message(f"kernel {source.name}", "its files deleted repeatedly", "them to be kept", fix))


def _what_is_compiled(source: KernelSource, target: Target, key: str) -> str:
    if key in _waiting:
        return f"waiting for another process that compiles {source.name} for {target} (FLEXATTN_PROGRESS=0 hides this)"
    store = open_store(settings().cache_dir)
    kept = "kept until this process ends" if store is None else f"kept in {store.root} for later processes"
    here = torch.cuda.is_initialized() and target == target_of(torch.device("cuda", current_device()))
    gpu = f"{target} ({torch.cuda.get_device_name()})" if here else f"{target}"
    return f"compiling {source.name} for {gpu}, {kept} (FLEXATTN_PROGRESS=0 hides this)"


def registers_on_disk(source: KernelSource, target: Target) -> int | None:
    """Return the registers of one thread of a kernel that is compiled already; None if it is not, or not for CUDA."""
    store, key = existing_store(settings().cache_dir), digest(source, target)
    folder = (None if store is None else store.find(key)) or _find_shared(key)
    if folder is None or not (cubin := folder / f"{source.name}.cubin").exists():
        return None
    try:
        return _usage_of(cubin).get("REG")
    except (OSError, subprocess.SubprocessError):  # no cuobjdump
        return None


def digest(source: KernelSource, target: Target) -> str:
    """Return the cache key of a kernel: a digest of everything that changes its binary."""
    parts = {
        "package": _package_version(),
        "triton": triton_versions.version(),
        "torch": torch.__version__,
        "environment": triton_versions.binary_settings(),
        "target": [target.backend, target.arch, target.warp_size],
        "name": source.name,
        "text": source.text,
        "signature": source.signature,
        "divisible": sorted(source.divisible),
        "options": [source.num_warps, source.num_stages, source.maxnreg, source.fp_fusion],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def stats() -> dict[str, int]:
    """Return the number of kernels that this process compiled, found on disk, and found in memory."""
    with _lock:
        return dict(_counts)


def clear_memory() -> None:
    """Clear the in-memory cache and reset the counts. The disk cache is not changed."""
    with _lock:
        _kernels.clear()
        _counts.update(dict.fromkeys(_counts, 0))


_lock = Lock()
_interpreting = Lock()  # Triton's interpreter patches Triton's modules while a kernel runs
_kernels: OrderedDict[tuple[str, Loader], Kernel] = OrderedDict()
_compiling = Waiting("build")
_waiting: set[str] = set()  # the keys of kernels that other processes compile
_counts = {"compiles": 0, "disk_hits": 0, "memory_hits": 0}


def _check(source: KernelSource, target: Target) -> None:
    interpreting = triton_versions.is_interpreting()
    if interpreting != target.is_interpreter:
        found = "TRITON_INTERPRET=1" if interpreting else "no TRITON_INTERPRET"
        raise CompileError(
            message(f"target {target.backend}", found, "the opposite", "Set it before importing triton.")
        )
    unknown = set(source.divisible) - {name for name, _ in source.signature}
    if unknown:
        raise CompileError(f"kernel {source.name}: divisible arguments {sorted(unknown)} are not in its signature")


def _find_or_compile(source: KernelSource, target: Target, key: str, compile_with: Compile = compile_job) -> Path:
    failure: OSError | None = None
    for store in _stores():
        if (folder := store.find(key)) is not None:
            return _found(source, folder)
        if failure is None and (folder := _find_shared(key)) is not None:
            return _found(source, folder)
        try:
            with store.lock(key, functools.partial(_waiting.add, key)):
                _waiting.discard(key)
                if (folder := store.find(key)) is not None:  # another process was faster
                    return _found(source, folder)
                folder = _compile(source, target, key, store, compile_with)
            cache_size.added(store, settings().cache_size)
            return folder
        except OSError as error:
            _tell_unwritable(store.root, error.strerror or str(error))
            failure = error
    raise CompileError(
        f"kernel {source.name}: no folder to build in is writable ({failure}). Set FLEXATTN_CACHE_DIR."
    ) from failure


def _stores() -> Iterator[KernelStore]:
    if (store := open_store(settings().cache_dir)) is not None:
        yield store
    yield temporary_store()


def _compiled_files(source: KernelSource, folder: Path) -> dict[str, Path]:
    """Return the compiled files of a cache entry by their endings."""
    found = {file.suffix[1:]: file for file in folder.glob(f"{source.name}.*") if file.suffix != ".py"}
    if "json" not in found:
        raise FileNotFoundError(f"{folder / source.name}.json")
    return found


def _found(source: KernelSource, folder: Path) -> Path:
    with _lock:
        _counts["disk_hits"] += 1
    debug("build", f"{source.name} found in {folder}")
    return folder


@functools.lru_cache(64)
def _tell_unwritable(folder: Path, reason: str) -> None:
    debug("build", f"{folder} is not writable ({reason}), kernels are kept for this process only")


def _compile(source: KernelSource, target: Target, key: str, store: KernelStore, compile_with: Compile) -> Path:
    text = _file_text(source, target, key)
    files = {f"{source.name}.py": text.encode()}
    if not target.is_interpreter:
        path = str(store.root / key / f"{source.name}.py")
        with store.staging() as folder:
            compiled = compile_with(
                Job(source, _triple(target), text, path, str(folder), triton_versions.binary_settings())
            )
        files |= {f"{source.name}.{ending}": compiled[ending] for ending in _KEPT_FILES if _worth(compiled, ending)}
    with _lock:
        _counts["compiles"] += 1
    folder = store.add(key, files)
    debug("build", f"{source.name} written to {folder}")
    return folder


def _worth(compiled: dict[str, bytes], ending: str) -> bool:
    return ending in compiled and (ending in {"json", "cubin", "hsaco"} or len(compiled[ending]) <= _LARGEST_TEXT)


def _file_text(source: KernelSource, target: Target, key: str) -> str:
    versions = f"flexattn {_package_version()}, triton {triton_versions.version()}, torch {torch.__version__}"
    head = [*source.header, f"key {key}", f"{versions}, {target}"]
    lines = [line.removeprefix("# ").rstrip() for entry in head for line in entry.splitlines()]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + source.text


def _dump(kernel: Kernel, text: str) -> None:
    if settings().print_source:
        print(text, file=sys.stderr, flush=True)
    if (folder := settings().dump_dir) is not None:
        stem, ptx = f"{kernel.name}-{kernel.digest[:12]}", kernel.ptx
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{stem}.py").write_text(text)
            if ptx:
                (folder / f"{stem}.ptx").write_text(ptx)
        except OSError as error:
            fix = "Set it to a folder of yours, or unset it."
            raise ArgumentError(
                message("FLEXATTN_DUMP", f"{str(folder)!r} ({error.strerror})", "a folder to write to", fix)
            ) from error


def _triton_folder() -> Path:
    """Return the folder for Triton's C launcher stubs, which other processes reuse."""
    for store in _stores():
        try:
            folder = store.folder(cache_size.STUBS)
            if os.access(folder, os.W_OK):
                return folder
            _tell_unwritable(store.root, "read-only")
        except OSError as error:
            _tell_unwritable(store.root, error.strerror or str(error))
    raise CompileError("No folder is writable. Set FLEXATTN_CACHE_DIR.")


@functools.cache
def _package_version() -> str:
    try:
        return importlib.metadata.version("flexattn")
    except importlib.metadata.PackageNotFoundError:
        return "clone"


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
# Returns the current raw stream of a device.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
