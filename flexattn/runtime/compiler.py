"""compiler: Job -> the files that Triton compiles. It imports no torch, so a compile process starts in 0.2 s."""

from __future__ import annotations

import linecache
import types
from pathlib import Path
from typing import Any

from flexattn.compile.kernel_source import KernelSource
from flexattn.errors import CompileError, message
from flexattn.machine import triton_versions
from flexattn.process.frozen_class import frozen

_LONGEST_REASON = 2000  # characters of a Triton error, which may end with the whole PTX


@frozen
class Job:
    """One kernel to compile."""

    source: KernelSource
    target: tuple[str, int | str, int]  # backend, architecture, warp size
    text: str  # of the file: the source with its header
    path: str  # of the file, in the folder named for the kernel's digest; Triton writes it into the PTX
    folder: str  # for Triton's files
    settings: dict[str, str]  # environment variables that change the binary; a worker has those of its start


@frozen
class StubJob:
    """The C code that Triton builds in order to launch a kernel (3.6 only), or to use a GPU at all."""

    source: KernelSource | None  # None: what all kernels need
    target: tuple[str, int | str, int]
    folder: str  # where Triton keeps it


def run_job(job: Job | StubJob) -> dict[str, bytes]:
    """Do a job. One for stubs only writes to its folder."""
    if isinstance(job, Job):
        return compile_job(job)
    request = None if job.source is None else request_of(job.source)
    triton_versions.build_stub(request, job.target, Path(job.folder))
    return {}


def compile_job(job: Job) -> dict[str, bytes]:
    """Return the contents of the compiled files by extension."""
    if triton_versions.binary_settings() != job.settings:
        raise CompileError("environment variables of Triton were changed after this process was started")
    source = job.source
    options: dict[str, Any] = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    if source.maxnreg is not None:
        options["maxnreg"] = source.maxnreg
    if not source.fp_fusion:
        options["enable_fp_fusion"] = False
    function = import_kernel(Path(job.path), job.text, source)
    try:
        with triton_versions.cache_folder(Path(job.folder)):
            request, key = request_of(source, function), Path(job.path).parent.name
            return triton_versions.compile_kernel(function, request, job.target, options, key)
    except OSError:
        raise  # an error of the folder, not of the kernel
    except Exception as error:
        reason = str(error)[:_LONGEST_REASON]
        where = f"sm_{job.target[1]}" if job.target[0] == "cuda" else str(job.target[1])
        raise CompileError(f"kernel {source.name} cannot be compiled for {where}: {reason}") from error
    finally:
        forget_text(function)


def request_of(source: KernelSource, function: Any = None) -> triton_versions.Request:
    """Return what Triton needs to know of a kernel."""
    gluon = function is not None and function.is_gluon()
    return triton_versions.Request(source.name, source.signature, source.divisible, gluon)


def import_kernel(path: Path, text: str, source: KernelSource) -> Any:
    """Run a generated file as a module and return its kernel. The file may not be on disk yet."""
    module = types.ModuleType(f"flexattn_generated_{source.name}")
    # Triton writes the file name into the PTX as a quoted string.
    file = module.__file__ = str(path) if _is_plain(str(path)) else "/".join(path.parts[-2:])
    # Triton and tracebacks read the source of each function from linecache.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        exec(compile(text, file, "exec"), module.__dict__)
        kernel = getattr(module, source.name)
    except Exception as error:
        raise CompileError(f"kernel {source.name}: its source does not run: {error!r}") from error
    expected = [name for name, _ in source.signature]
    if kernel.arg_names != expected:
        raise CompileError(
            message(f"kernel {source.name}", kernel.arg_names, f"arguments {expected}", "Correct the template.")
        )
    return kernel


def forget_text(function: Any) -> None:
    """Remove the text of a kernel from memory. Tracebacks then read its file."""
    linecache.cache.pop(function.fn.__code__.co_filename, None)


def _is_plain(path: str) -> bool:
    return path.isprintable() and '"' not in path and "\\" not in path
