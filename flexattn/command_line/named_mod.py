"""named_mod: the mod that a user names on a command line, FILE.py:MOD or MODULE:MOD."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flexattn.errors import ArgumentError, message
from flexattn.graph.nodes import MASK_INPUTS, SCORE_INPUTS
from flexattn.process.frozen_class import frozen
from flexattn.trace.scalarize import Kind

_KINDS: dict[int, Kind] = {len(SCORE_INPUTS): "score", len(MASK_INPUTS): "mask"}  # by positional parameters
_HELP = "FILE.py:MOD or MODULE:MOD. MOD is a name, or an expression such as 'softcap(20.0)'"


@frozen
class NamedMod:
    """A mod, what it is, and how the user named it."""

    kind: Kind
    mod: Callable[..., Any]
    text: str

    @property
    def score_mod(self) -> Callable[..., Any] | None:
        """The mod, if it is a score_mod."""
        return self.mod if self.kind == "score" else None

    @property
    def mask_mod(self) -> Callable[..., Any] | None:
        """The mod, if it is a mask_mod."""
        return self.mod if self.kind == "mask" else None


@frozen
class Shape:
    """The sizes of a call."""

    B: int
    Hq: int
    Hkv: int
    M: int
    N: int
    D: int


def add_mod(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a mod."""
    parser.add_argument("mod", metavar="FILE.py:MOD", help=_HELP)
    parser.add_argument("--kind", choices=("score", "mask"), help="default: by the number of its parameters")


def add_shape(parser: argparse.ArgumentParser, default: Shape | None) -> None:
    """Add the arguments that give a call its shape."""
    parser.add_argument(
        "--shape", type=shape_of, default=default, metavar="B,H,S,D",
        help="the shape of query, key and value; or B,Hq,Hkv,M,N,D",
    )  # fmt: skip


def shape_of(text: str) -> Shape:
    """Return the shape that a text gives: four or six numbers."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (4, 6) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected B,H,S,D or B,Hq,Hkv,M,N,D, such as 1,8,4096,64")
    B, H, S, D = sizes if len(sizes) == 4 else (0, 0, 0, 0)
    return Shape(B, H, H, S, S, D) if len(sizes) == 4 else Shape(*sizes)


def named_mod(text: str, kind: Kind | None = None) -> NamedMod:
    """Import the file and return the mod. Code of the file runs, except below `if __name__ == "__main__"`."""
    place, colon, name = text.partition(":")
    if not colon or not place or not name:
        raise ArgumentError(message("mod", repr(text), "FILE.py:MOD", "Write for example mods.py:causal."))
    module = _module_at(place)
    try:
        mod = eval(name, vars(module))
    except (NameError, SyntaxError, AttributeError) as error:
        names = ", ".join(n for n, value in vars(module).items() if inspect.isfunction(value)) or "none"
        fix = f"Functions there: {names}."
        raise ArgumentError(message("mod", f"{name!r} ({error})", f"a mod in {place}", fix)) from None
    return NamedMod(kind or _kind_of(mod, name), mod, text)


def _module_at(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            fix = "Write the path of a file that ends with .py, or the name of an installed module."
            raise ArgumentError(message("mod", f"{place!r} ({error})", "a file or a module", fix)) from None
    path = Path(place).resolve()
    if not path.is_file():
        raise ArgumentError(message("mod", repr(place), "a file", "Write the path of a Python file."))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(path.parent))  # it may import its neighbors, as when Python runs it
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _kind_of(mod: Any, name: str) -> Kind:
    fix = "Write --kind score or --kind mask."
    if not callable(mod):
        raise ArgumentError(message("mod", f"{name} = {mod!r}", "a function", "Name a score_mod or a mask_mod."))
    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError):
        raise ArgumentError(message("mod", f"{name} without a signature", "4 or 5 parameters", fix)) from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = sum(p.default is p.empty for p in positional)
    if count not in _KINDS:
        fix = f"{fix} If {name} returns a mod, write {name}(...)."
        raise ArgumentError(
            message("mod", f"{name} with {count} parameters", "5 of a score_mod or 4 of a mask_mod", fix)
        )
    return _KINDS[count]
