"""The shared memory that Triton gives a kernel, found without machine code: a third of a second for each kernel.

Only what follows from the first half of Triton's pipeline is known here; test_targets.py builds some kernels whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triton._C.libtriton import ir, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from flexattn.compile.kernel_source import KernelSource
from flexattn.machine.target import Target
from flexattn.runtime.compiler import import_kernel, request_of


def allocated(source: KernelSource, target: Target) -> int:
    """Return the bytes of shared memory of one program."""
    function = import_kernel(Path(f"{source.name}.py"), source.text, source)
    request = request_of(source, function)
    wanted = GPUTarget(target.backend, target.arch, target.warp_size)
    backend, asked = make_backend(wanted), request.source(function)
    options = backend.parse_options({"num_warps": source.num_warps, "num_stages": source.num_stages})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = asked.make_ir(wanted, options, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, asked.language)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, {"num_ctas": 1})
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    _add_allocation(manager, target, options)
    manager.run(module, "allocate")
    return module.get_int_attr("ttg.shared")


def _add_allocation(manager: Any, target: Target, options: Any) -> None:
    if target.backend == "hip":
        from triton._C.libtriton import amd

        passes.convert.add_index_to_llvmir(manager)
        amd.passes.ttgpuir.add_allocate_shared_memory(manager)
        return
    from triton._C.libtriton import nvidia
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    version = get_ptx_version_from_options(options, int(target.arch))
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, int(target.arch), version)
