"""Everything that is private in Triton or differs between its versions (checked: 3.6.0, 3.7.1).

Launching needs no private part for correct results: if one is missing, the public API is used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

from flexattn.process.forks import Lock, temporary
from flexattn.process.frozen_class import frozen

LaunchFunction = Callable[[int, int, tuple[Any, ...]], None]  # (programs, stream, arguments)

_BINARY_SETTINGS = (  # those that Triton omits from its keys, or keys by their effect
    "TRITON_PTXAS_PATH", "PTXAS_OPTIONS", "TRITON_OVERRIDE_ARCH", "TRITON_F32_DEFAULT", "TRITON_DEFAULT_FP_FUSION",
)  # fmt: skip
_CHECKED = {("3", "6"), ("3", "7")}  # releases whose private functions are used
_knobs_lock = Lock()  # Triton's knobs are global to the process


def version() -> str:
    import triton

    return triton.__version__


def _release() -> tuple[str, ...]:
    return tuple(version().split(".")[:2])


def has_gluon() -> bool:
    """Whether this version of Triton compiles the Gluon kernels (3.6 and 3.7 have run them on a GPU)."""
    return _release() in {("3", "6"), ("3", "7"), ("3", "8"), ("3", "9")}


def is_interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1)."""
    from triton import knobs

    return knobs.runtime.interpret


def binary_settings() -> dict[str, str]:
    """Return the environment variables that are set and change what Triton compiles."""
    found = {name: os.environ[name] for name in _BINARY_SETTINGS if name in os.environ}
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars
    except ImportError:
        return found
    return found | get_cache_invalidating_env_vars()


@contextlib.contextmanager
def cache_folder(folder: Path) -> Iterator[None]:
    """Let Triton store its files in `folder` inside the block, then restore the user's setting."""
    from triton import knobs

    scope = contextlib.ExitStack()
    with _knobs_lock:
        scope.enter_context(knobs.cache.scope())
        with temporary(scope.close):
            knobs.cache.dir = str(folder)
            yield


@frozen
class Request:
    """A compile request for Triton: a kernel without constants, with typed runtime arguments."""

    name: str
    signature: tuple[tuple[str, str], ...]
    divisible: tuple[str, ...]  # arguments that are multiples of 16
    gluon: bool = False

    def source(self, fn: Any) -> Any:
        from triton.compiler import ASTSource

        if self.gluon:
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        else:
            Source = ASTSource
        names = [name for name, _ in self.signature]
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in self.divisible}
        return Source(fn=fn, signature=dict(self.signature), constexprs={}, attrs=attributes)


def compile_kernel(
    fn: Any, request: Request, target: tuple[str, int | str, int], options: dict[str, Any], key: str
) -> dict[str, bytes]:
    """Compile `fn` for a target (backend, architecture, warp size) that need not be present.

    `key` stands for everything that changes the binary. Return the contents of the files by extension.
    """
    from triton.backends.compiler import GPUTarget

    compiled = _compile_with_key(key)(request.source(fn), target=GPUTarget(*target), options=options)
    return {name.rpartition(".")[2]: Path(path).read_bytes() for name, path in compiled.metadata_group.items()}


def _compile_with_key(key: str) -> Callable[..., Any]:
    """Return triton.compile with `key` as its cache key.

    For its own key, Triton hashes all of its files in each process: 400 MiB, 0.3 s with instructions for SHA. The
    function is copied with other globals, so that Triton's own calls, in other threads too, keep their keys.
    """
    import triton

    compile = triton.compile
    known = _release() in _CHECKED and isinstance(compile, FunctionType)
    if not known or "get_cache_key" not in compile.__code__.co_names:
        return compile
    names = {**compile.__globals__, "get_cache_key": lambda *parts, **more: key}
    own = FunctionType(compile.__code__, names, compile.__name__, compile.__defaults__, compile.__closure__)
    own.__kwdefaults__ = compile.__kwdefaults__
    return own


def builds_launchers() -> bool:
    """Whether Triton builds a launcher for each kernel (3.6), or has one for all."""
    from triton.backends.nvidia import driver

    return hasattr(driver, "make_launcher")


def build_stub(request: Request | None, target: tuple[str, int | str, int], folder: Path) -> None:
    """Build the C code that Triton otherwise builds when it loads a kernel: its launcher (0.2 to 0.3 s of gcc).

    None: the module with which Triton uses a GPU (as long). No GPU and no compiled kernel is needed.
    Without a C compiler or libcuda nothing is built.
    """
    from triton.backends.nvidia import driver

    with contextlib.suppress(Exception), cache_folder(folder):
        if request is None:
            driver.CudaUtils()
        else:
            driver.CudaLauncher(request.source(_stand_in(request)), _stand_in_metadata(request, target))


def import_compiler() -> None:
    """Import what compiling needs."""
    import triton.compiler

    if has_gluon():
        import triton.experimental.gluon._runtime  # noqa: F401


def load_kernel(request: Request, files: dict[str, Path]) -> Any:
    """Create Triton's CompiledKernel from stored files (by extension), without compiling or importing the source."""
    from triton.compiler import CompiledKernel

    digest = json.loads(files["json"].read_text())["hash"]
    names = {path.name: str(path) for path in files.values()}
    return CompiledKernel(request.source(_stand_in(request)), names, digest)


def _stand_in(request: Request) -> Any:
    """Return what the launcher reads of a kernel: arguments' names, and whether profilers get extra data."""
    return SimpleNamespace(
        __name__=request.name, arg_names=[name for name, _ in request.signature], launch_metadata=None
    )


def _stand_in_metadata(request: Request, target: tuple[str, int | str, int]) -> Any:
    """Return what the launcher's C code depends on of a compiled kernel: whether descriptors go to TMA, as on Hopper.

    Where this is wrong, Triton builds another launcher when it loads the kernel.
    """
    descriptors = sum(kind.startswith("tensordesc") for _, kind in request.signature)
    uses_tma = target[0] == "cuda" and int(target[1]) >= 90
    return SimpleNamespace(
        tensordesc_meta=[{}] * descriptors if uses_tma else None, num_ctas=1, launch_cooperative_grid=False,
        launch_pdl=False, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1,
    )  # fmt: skip


@frozen
class FlatLaunch:
    """The launch of a kernel with the least host time. Each descriptor is replaced by several arguments.

    `launch(*complete(programs, stream, arguments))` runs the kernel. Equal launches can keep the completed arguments.
    """

    launch: Callable[..., None]
    complete: Callable[[int, int, Sequence[Any]], tuple[Any, ...]]
    expand: Callable[[int, Any], list[Any]]  # (n, the n-th descriptor) -> what replaces it


@frozen
class Launcher:
    """Launches a kernel on one device."""

    launch: LaunchFunction
    flat: FlatLaunch | None  # None if Triton's C launcher cannot be called directly

    def __call__(self, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        self.launch(programs, stream, arguments)


def launcher(compiled: Any, direct: bool = True) -> Launcher:
    """Load `compiled` on the current device and return how to launch it.

    Triton's OutOfResources passes through. Pointers are tensors or addresses; an address saves a driver call.
    Without `direct`, launches use Triton's own run method instead of its C launcher.
    """
    run = compiled.run  # loads the binary
    flat = _flat_launch(compiled, run) if direct else None
    fast = _run_launch(compiled, run) if flat is None else _with_descriptors(compiled, flat)

    def public(programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        compiled[(programs, 1, 1)](*arguments, stream=stream)

    if fast is None:
        return Launcher(public, None)

    def launch(programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        if launches_are_watched():
            public(programs, stream, arguments)  # the profiler needs the launch's metadata
        else:
            fast(programs, stream, arguments)

    return Launcher(launch, flat)


def launches_are_watched() -> bool:
    """Return whether a profiler for Triton kernels, such as Proton, is active."""
    runtime: Any = _knobs().runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # a function or None, which a user may assign
        return any(hook is not None and getattr(hook, "calls", True) for hook in (enter, leave))


@functools.cache
def _knobs() -> Any:
    return sys.modules["triton.knobs"]


def _with_descriptors(compiled: Any, flat: FlatLaunch) -> LaunchFunction:
    """Return the launch that takes descriptors."""
    count = len(compiled.src.signature)
    from triton.tools.tensor_descriptor import TensorDescriptor

    def launch(programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        if len(arguments) != count:  # Triton 3.7 reads past the end of a short tuple
            raise TypeError(f"kernel {compiled.name} takes {count} arguments, {len(arguments)} were given")
        expanded: list[Any] = []
        n = 0
        for argument in arguments:
            if isinstance(argument, TensorDescriptor):
                expanded += flat.expand(n, argument)
                n += 1
            else:
                expanded.append(argument)
        flat.launch(*flat.complete(programs, stream, expanded))

    return launch


def _flat_launch(compiled: Any, run: Any) -> FlatLaunch | None:
    """Call Triton's C launcher directly, with everything but the arguments bound; None if it is not supported."""
    release = _release()
    if type(run).__name__ != "CudaLauncher" or release not in _CHECKED:
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None  # Triton then allocates memory for each launch
    function, packed = compiled.function, compiled.packed_metadata
    c_launch, expand = descriptor_launcher(run.launch)
    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl

    if release == ("3", "6"):

        def complete(programs: int, stream: int, arguments: Sequence[Any]) -> tuple[Any, ...]:
            # grid, stream, function, cooperative, dependent, 2 scratch, packed, metadata, 2 hooks, arguments
            return (
                programs, 1, 1, stream, function, cooperative, dependent,
                None, None, packed, None, None, None, *arguments,
            )  # fmt: skip

        return FlatLaunch(c_launch, complete, expand)

    annotations, kinds = run.arg_annotations, run.kernel_signature

    def complete_37(programs: int, stream: int, arguments: Sequence[Any]) -> tuple[Any, ...]:
        # grid, stream, function, cooperative, dependent, packed, metadata, 2 hooks, 2 scratch, kinds, arguments
        return (
            programs, 1, 1, stream, function, cooperative, dependent,
            packed, None, None, None, None, None, annotations, kinds, arguments,
        )  # fmt: skip

    return FlatLaunch(c_launch, complete_37, expand)


def descriptor_launcher(launch: Any) -> tuple[Any, Callable[[int, Any], list[Any]]]:
    """Return the launcher below Triton's wrapper for tensor descriptors, and `expand` of a FlatLaunch.

    Triton encodes each descriptor at each launch, which calls the driver. Below the wrapper it can be encoded once.
    """
    inner = inspect.getclosurevars(launch).nonlocals if inspect.isfunction(launch) else {}
    if not {"launcher", "tensordesc_indices", "tensordesc_meta"} <= inner.keys():
        return launch, lambda n, descriptor: [descriptor]
    from triton.backends.nvidia.driver import make_tensordesc_arg

    meta = inner["tensordesc_meta"]
    return inner["launcher"], lambda n, descriptor: make_tensordesc_arg(descriptor, meta[n])


def _run_launch(compiled: Any, run: Any) -> LaunchFunction | None:
    """Call CompiledKernel.run, for other backends and kernels with scratch memory."""
    function, packed = getattr(compiled, "function", None), getattr(compiled, "packed_metadata", None)
    if function is None or packed is None:
        return None

    def launch(programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        run(programs, 1, 1, stream, function, packed, None, None, None, *arguments)

    return launch


@functools.cache
def nvidia_tool(name: str) -> str:
    """Return the path of ptxas, cuobjdump or nvdisasm as shipped with Triton."""
    import triton

    return str(Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / name)


def resource_usage(cubin: Path) -> str:
    """Return cuobjdump's line on registers, stack and shared memory of a binary."""
    command = [nvidia_tool("cuobjdump"), "-res-usage", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
