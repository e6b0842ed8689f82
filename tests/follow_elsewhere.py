"""Run the functions of follow_corpus by `flexattn.trace.follow` in a Python that has no torch: stand-ins are enough."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def stand_in(name: str, *classes: str) -> types.ModuleType:
    """Make an importable module with empty classes."""
    module = types.ModuleType(name)
    for cls in classes:
        setattr(module, cls, type(cls, (), {"__module__": name}))
    sys.modules[name] = module
    return module


def install() -> None:
    """Make stand-ins for torch and numpy, and flexattn importable without its __init__."""
    names = ["Tensor", "SymInt", "SymFloat", "SymBool", "finfo", "iinfo", "dtype", "device", "layout", "memory_format"]
    torch = stand_in("torch", *names)
    torch.Size = type("Size", (tuple,), {})
    torch.strided = torch.layout()
    torch.is_tensor = lambda x: False
    parts = {
        "nn": ("Module",), "autograd": ("Function",), "_ops": ("OpOverload", "OpOverloadPacket"),
        "jit": ("ScriptFunction",),
    }  # fmt: skip
    for part, classes in parts.items():
        setattr(torch, part, stand_in(f"torch.{part}", *classes))
    numpy = stand_in("numpy", "generic", "ufunc", "ndarray")
    numpy.integer = type("integer", (numpy.generic,), {})
    numpy.floating = type("floating", (numpy.generic,), {})
    package = types.ModuleType("flexattn")
    package.__path__ = [str(HERE.parent / "flexattn")]
    sys.modules["flexattn"] = package
    sys.path.insert(0, str(HERE))


def main() -> int:
    """Return 1 where a function gives something else than by Python, or its guard does not hold."""
    install()
    from follow_corpus import CASES

    from flexattn.trace.follow import IS_KNOWN_VERSION, Follower, ReadLog, guard_of

    class Literal(ReadLog):
        """Numbers stay literals: there are no symbols."""

        def _lift(self, text: str, value: Any, original: Any, name: str) -> Any:
            self._line(f"if {text} != {value!r}: return None")
            return value

        def drawn(self, value: Any) -> Any:
            return value

    assert IS_KNOWN_VERSION
    wrong = 0
    for function, argument in CASES:
        wanted = function(argument)
        record = Literal(function, types.SimpleNamespace(about_to=lambda reason: None))
        found = Follower(record).call(record.start(), (argument,))
        if repr(found) != repr(wanted) or (not record.reason and guard_of(record, [])[0](function) is None):
            print(function.__name__, wanted, found, record.reason)
            wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
