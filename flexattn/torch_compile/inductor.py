"""inductor: how Inductor lowers the operators. Its Python code calls functions instead, those of operators.py.

A call through torch's dispatcher takes as long as the launch of a known call. Other code of Inductor (C++, as for
AOTInductor, and FX) calls the operators, and so does Python code if a private name of torch is missing. This module
does not import Inductor: it changes an Inductor that is already imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload

from flexattn.process.events import fallback

# Code in Inductor's cache on disk imports them. Versions of flexattn with the same spec.FORMAT have them.
_FUNCTIONS = "flexattn.torch_compile.operators"
_WRAPPERS = ("PythonWrapperCodegen", "SubgraphPythonWrapperCodegen")  # those that write Python
_lowered: set[OpOverload] = set()


def lower_to_functions(overloads: Sequence[OpOverload]) -> None:
    """Let Inductor, if it is imported, lower operators to calls of the functions of the same names."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or _lowered.issuperset(overloads):
        return
    _lowered.update(overloads)
    try:
        kernel = _direct_call(lowering.ir.FallbackKernel)
        for overload in overloads:
            _lower(lowering, kernel, overload)
    except (AttributeError, TypeError) as error:  # another version of torch
        fallback("torch.compile", f"Inductor calls operators through the dispatcher, because torch changed: {error}")


def _direct_call(fallback_kernel: Any) -> Any:
    """Return a class of calls in a graph of Inductor, which are those of an operator except for their code."""

    class DirectCall(fallback_kernel):
        def codegen(self, wrapper: Any) -> None:
            name = self.op_overload._schema.name.partition("::")[2]
            if type(wrapper).__name__ in _WRAPPERS and hasattr(wrapper, "add_import_once"):
                self.python_kernel_name = f"flexattn_{name}"
                wrapper.add_import_once(f"from {_FUNCTIONS} import {name} as {self.python_kernel_name}")
            super().codegen(wrapper)

    return DirectCall


def _lower(lowering: Any, kernel: Any, overload: OpOverload) -> None:
    """Replace the lowering of an operator by one that makes calls of class `kernel`."""
    create, boxed = kernel.create, lowering.ir.TensorBox.create

    def lower(*args: Any) -> list[Any]:
        return [boxed(output) for output in create(overload, *args)]

    lower._is_fallback_handler = True  # type: ignore[attr-defined]  # as that of any operator without an own lowering
    lowering.make_fallback(overload, warn=False)
    lowering.register_lowering(overload, type_promotion_kind=None)(lower)
