"""Interception: intercepts each torch function that a mod calls while it is traced.

make_fx records only operators. It never sees indexing with a tensor, literal tensors and reads of a tensor's value, so
these are rewritten or rejected here. Each recorded node is annotated with the user's line that created it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from flexattn.errors import ModError, UnsupportedError, message
from flexattn.process.forks import temporary
from flexattn.process.places import place
from flexattn.torch_state.symbols import example
from flexattn.torch_state.transforms import innermost, is_transformed, transforms
from flexattn.trace.follow import current_line
from flexattn.trace.operator_calls import UnknownOperator, ancestors, operator_name
from flexattn.trace.registered import meaning_of
from flexattn.trace.scalar_tape import NotScalar, ScalarTape

DATA_DEPENDENT = (
    "reads the value of a tensor in Python (if, and, or, not, int(), float(), .item(), range, max(), math.exp()). The "
    "mod runs once for all positions: write torch.where(condition, x, y) for `if`, `&`, `|`, `~` for and, or, not, "
    "torch.maximum and torch.exp for max and math.exp; capture numbers as Python numbers (n = int(t) outside of the "
    "mod)."
)
UNKNOWN_SIZE = (
    "calls an operator whose result, or the size of it, depends on the values of a tensor ({what}). Call it outside of "
    "the mod, and capture what it returns."
)
_IN_ARRAY = (
    "uses a position or score with a numpy array. Capture a tensor instead: table = torch.from_numpy(array), outside "
    "of the mod."
)
_AS_INDEX = (
    "uses a tensor as a Python index or length (of a list, a tuple, range, or in a slice). The mod runs once for all "
    "positions. Capture a tensor instead of a list: table = torch.tensor(values), outside of the mod, then "
    "table[q_idx]; single elements instead of a slice: x[q_idx] + x[q_idx + 1]; a length as a Python number "
    "(n = int(t) outside of the mod)."
)
_AS_KEY = (
    "uses a position as the key of a dict. b, h, q_idx and kv_idx are tensors. Capture a tensor instead of the dict: "
    "table = torch.tensor([value of 0, value of 1, ...]), outside of the mod, then table[h]."
)
BEYOND_INT64 = "uses the number {number}, expected one that int64 holds. Use a smaller number, or a float."
IN_PLACE = "changes {what} in place. Write x = x + y instead of x += y, and x = torch.where(...) instead of x[...] = y."
WITHOUT_GRADIENT = (
    "changes a tensor in place under torch.no_grad that was computed outside of it. PyTorch would keep the gradient "
    "from before the change. Write y = x * 2 instead of x *= 2, or change it outside of torch.no_grad."
)
VMAP = (
    "calls torch.vmap on a captured tensor. Write operations on small tensors, which broadcast: f(table)[h] or "
    "f(table[h]) instead of torch.vmap(f)(table)[h]."
)
NO_GRAD = "no_grad"  # key in a node's meta: under torch.no_grad, it changes a tensor of an earlier operation in place
GRADIENT_OF_TENSOR = "reads .grad or .grad_fn of a tensor. Read it outside of the mod, and capture a tensor."
WHETHER_GRADIENT = (
    "asks whether the score, or a tensor that it computes, requires a gradient. The mod is traced once for calls with "
    "and without gradients. Ask a captured tensor, or capture a bool."
)
# Files of torch that ask tensors of a mod whether they require a gradient, and what an error says of it.
_ASKS_FOR_GRADIENTS = {
    "eager_transforms.py": "differentiates with torch.func. Write the derivative.",
    str(Path("torch", "autograd", "functional.py")): (
        "differentiates with torch.autograd.functional. Write the derivative."
    ),
    str(Path("torch", "utils", "hooks.py")): (
        "calls a module with backward hooks, which would not run. Remove them, or call functions instead of the module."
    ),
}
CONSTANT = "constant"  # key in a node's meta: the constant tensor that the node represents
MOST_SHOWN = 16  # literal tensors with more numbers than this become one constant node
RANDOM = (
    "draws random numbers ({what}). Draw them before the call and capture the tensor. For dropout of the weights, pass "
    "dropout_p to flex_attention."
)


class Interception(TorchFunctionMode):
    """Rewrites what make_fx cannot see, rejects what cannot be traced, and records the user's line of each node."""

    def __init__(
        self, name: str, adopt: Callable[[Tensor], None], ask_for_layouts: Callable[[], None],
        tape: ScalarTape | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = name
        self.adopt = adopt  # makes a tensor that was not captured an input of the trace, by calling `replace`
        self.ask_for_layouts = ask_for_layouts  # called if the mod reads strides, which fake tensors do not have
        self.replacement: dict[int, tuple[Tensor, Tensor]] = {}  # id of a real tensor -> the tensor, its fake tensor
        self.requires_grad: dict[int, bool] = {}  # id of a fake tensor -> requires_grad of the real one
        self.tape = tape
        self._is_paused = False
        self._transforms = transforms()  # around the call

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not intercept the tracer's own calls."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def replace(self, tensor: Tensor, fake: Tensor) -> None:
        """Use `fake` in place of a captured tensor from now on."""
        self.replacement[id(tensor)] = (tensor, fake)
        self.requires_grad[id(fake)] = tensor.requires_grad

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        args, kwargs = self.as_fake(args), self.as_fake(kwargs or {})
        for number in (*args, *kwargs.values()):
            if type(number) is int and not -(2**63) <= number < 2**63:
                raise ModError(f"{self.name} at {user_line()} {BEYOND_INT64.format(number=number)}")
        if func in _REFUSED:
            raise ModError(f"{self.name} at {user_line()} {_REFUSED[func]}")
        if func in _READ_LAYOUT:
            self.ask_for_layouts()
        if func == Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return self._requires_grad(args[0])
        if func is torch.nn.functional.scaled_dot_product_attention:
            raise UnsupportedError(f"{self.name} at {user_line()} calls attention inside of a mod. Call it outside.")
        result = _REWRITES.get(func, func)(*args, **kwargs)  # type: ignore[misc]
        if self.tape is not None and not isinstance(result, Tensor) and func not in _KNOWN_OF_SCALARS:
            raise NotScalar
        if torch.is_grad_enabled():
            self.note_line()
            return result
        given = _tensors_in((args, kwargs))
        if not any(result is x for x in given):  # as an operation in place returns it
            result = _detached(result)
        self.note_line()
        self._stop_gradients(given)
        return result

    def _stop_gradients(self, given: list[Tensor]) -> None:
        """Detach the tensors that an operation under torch.no_grad has changed in place."""
        mode = _proxy_mode()
        if mode is None:
            return
        known = mode.tracer.tensor_tracker
        for x in given:
            if x in known and NO_GRAD in known[x].proxy.node.meta:
                known[x] = known[_detached(x)]
        self.note_line()

    def _requires_grad(self, tensor: Tensor) -> bool:
        """Return what a mod knows of its captured tensors; nothing of those that it computes."""
        known = self.requires_grad.get(id(tensor))
        if known is None and tensor.is_floating_point():
            for file, reason in _ASKS_FOR_GRADIENTS.items():
                if _is_called_by(file):
                    raise ModError(f"{self.name} at {user_line()} {reason}")
            if _is_asked_by_user() and self._may_learn(tensor):
                raise ModError(f"{self.name} at {user_line()} {WHETHER_GRADIENT}")
        return bool(known)

    def _may_learn(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed from the score, or from captured tensors that require a gradient."""
        mode = _proxy_mode()
        if mode is None:
            raise NotScalar
        known = mode.tracer.tensor_tracker
        captured = {known[fake].proxy.node: real for real, fake in self.replacement.values() if fake in known}
        sources = ancestors([known[tensor].proxy.node], lambda node: operator_name(node) == "detach")
        return any(
            captured[n].requires_grad if n in captured else n.meta["val"].is_floating_point()
            for n in sources if n.op == "placeholder" and isinstance(n.meta.get("val"), Tensor)
        )  # fmt: skip

    def as_fake(self, value: Any) -> Any:
        """Replace real tensors by their fake tensors."""
        if isinstance(value, Tensor):
            if id(value) not in self.replacement:
                if self._is_traced(value):
                    return value
                if is_transformed(value) and transforms() > self._transforms:
                    raise ModError(f"{self.name} at {user_line()} {VMAP}")
                self.adopt(value)
            return self.replacement[id(value)][1]
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)([self.as_fake(v) for v in value])
        if isinstance(value, dict):
            return {k: self.as_fake(v) for k, v in value.items()}
        return value

    def _is_traced(self, value: Tensor) -> bool:
        if self.tape is not None:
            return self.tape.is_traced(value)
        return type(innermost(value)) is _fake_tensor_type()

    def _graph(self) -> fx.Graph | None:
        """Return the graph in which operators are recorded now."""
        if self.tape is not None:
            return self.tape.graph
        mode = _proxy_mode()
        return None if mode is None else mode.tracer.graph

    def note_line(self) -> None:
        graph = self._graph()
        if graph is None:
            return
        line, made = user_line(), set()
        for node in reversed(graph.nodes):
            if "user_line" in node.meta:
                break
            node.meta["user_line"] = line
            made.add(node)
        if not torch.is_grad_enabled():
            for node in made:
                if _changes_values(node) and node.args[0] not in made:
                    node.meta[NO_GRAD] = True


def _proxy_mode() -> Any:
    """Return the mode of make_fx that records operators, None on a ScalarTape. The import takes a second."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode()


def _changes_values(node: fx.Node) -> bool:
    """Return whether an operator changes elements of its first argument in place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return False
    return torch.Tag.inplace_view not in target.tags


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list, dict)):
        return [x for part in (value.values() if isinstance(value, dict) else value) for x in _tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


@contextlib.contextmanager
def refused_functions(name: str) -> Iterator[None]:
    """Reject each torch.autograd.Function that this thread applies, because its own backward would not be used."""
    original = Function.__dict__["apply"]
    tracing = threading.get_ident()

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracing:
            return original.__get__(None, cls)(*args, **kwargs)
        if (like := meaning_of(cls)) is not None:
            return like(*args, **kwargs)
        raise UnsupportedError(
            f"{name}: found the torch.autograd.Function {cls.__name__} at {user_line()}, expected plain operations. "
            f"Its own backward would not be used: write what its forward computes, with detach() to stop the "
            f"gradient, or register it: flexattn.register_operator({cls.__name__}, like=...)."
        )

    def undo() -> None:
        Function.apply = original  # type: ignore[assignment]

    Function.apply = classmethod(apply)  # type: ignore[assignment]
    with temporary(undo):
        yield


def _fake_tensor_type() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


class TooManyIndices(IndexError):
    """A mod indexes more dimensions than a tensor has."""

    def __init__(self, source: Tensor, count: int) -> None:
        super().__init__(f"too many indices for tensor of dimension {source.ndim}")
        self.source = source
        self.count = count


def gather(source: Tensor, index: Any) -> Tensor:
    """tensor[index], where 0-d integer tensors gather like other index tensors."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not any(isinstance(i, (Tensor, list, range)) for i in items):
        return source[index]
    if any(i is ... for i in items):
        at = next(k for k, i in enumerate(items) if i is ...)
        given = sum(i is not None and i is not ... for i in items)
        items[at : at + 1] = [slice(None)] * (source.ndim - given)
    tensors: list[Tensor | None] = []
    for item in items:
        dim = len(tensors)
        if isinstance(item, (list, range)):
            item = _literal_tensor(list(item))
        if isinstance(item, Tensor):
            tensors.append(item)
            continue
        if item is None:
            source = source.unsqueeze(dim)
        elif isinstance(item, slice):
            source = source[(slice(None),) * dim + (item,)]
        else:
            source = source.select(dim, item)
            continue
        tensors.append(None)
    while tensors and tensors[-1] is None:
        tensors.pop()
    if len(tensors) > source.ndim:
        raise TooManyIndices(source, len(tensors))
    given = [t for t in tensors if t is not None]
    if len({t.ndim for t in given}) > 1:  # the fake kernel of aten.index does not broadcast 0-d tensors
        wide = iter(torch.broadcast_tensors(*given))
        tensors = [None if t is None else next(wide) for t in tensors]
    return torch.ops.aten.index.Tensor(source, tensors)


def _select(source: Tensor, dim: int, index: Any) -> Tensor:
    if isinstance(index, Tensor):
        return torch.ops.aten.index.Tensor(source, [None] * (dim % source.ndim) + [index])
    return source.select(dim, index)


def _literal_tensor(data: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    """torch.tensor of scalars and short lists, as nodes that show their values."""
    if isinstance(data, Tensor):
        return data.clone() if dtype is None else data.to(dtype)
    if isinstance(data, (list, tuple)):
        if _count(data) > MOST_SHOWN:
            return _constant(data, dtype, device)
        parts = [_literal_tensor(d, dtype, device) for d in data]
        if not parts:
            return torch.zeros((0,), dtype=dtype, device=device)
        common = parts[0].dtype
        for part in parts[1:]:
            common = torch.promote_types(common, part.dtype)
        return torch.stack([p.to(common) for p in parts])
    if isinstance(data, np.generic):
        dtype, data = dtype or _dtype_of(data), data.item()
    if dtype is None:
        dtype = torch.bool if isinstance(data, bool) else torch.int64
        if isinstance(data, (float, torch.SymFloat)):
            dtype = torch.get_default_dtype()
    return torch.full((), data, dtype=dtype, device=device)  # type: ignore[arg-type]


def _dtype_of(number: np.generic) -> torch.dtype:
    """Return the dtype of torch.tensor(number)."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.tensor(number).dtype


def _count(data: Any) -> int:
    """Return the number of plain numbers in a nested list, or 0 if it contains a symbol or a tensor."""
    if type(data) not in (list, tuple):
        return int(type(data) in (int, float, bool))
    counts = [_count(d) for d in data]
    return sum(counts) if all(counts) else 0


def _constant(data: Any, dtype: Any, device: Any) -> Tensor:
    """Return a tensor of plain numbers as one constant node. It is created once, not once per call."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        kept = torch.tensor(data, dtype=dtype, device=device)
    shown = torch.ops.aten.alias.default(kept)
    mode = _proxy_mode()
    assert mode is not None
    next(iter(reversed(mode.tracer.graph.nodes))).meta[CONSTANT] = kept
    return shown


def _detached(result: Any) -> Any:
    """Return the result of an operator without its gradient."""
    if isinstance(result, (tuple, list)):
        return type(result)([_detached(x) for x in result])
    return result.detach() if isinstance(result, Tensor) and result.is_floating_point() else result


def _copied(data: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    """torch.tensor: a copy without a gradient."""
    copy = _literal_tensor(data, dtype, device)
    return _detached(copy) if _has_tensor(data) else copy


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """torch.as_tensor: a tensor of the same dtype itself, a copy without a gradient of tensors in a list."""
    if isinstance(data, Tensor):
        return data if dtype is None else data.to(dtype)
    return _copied(data, dtype, device)


def _as_array(
    obj: Any, *, dtype: Any = None, device: Any = None, copy: bool | None = None, requires_grad: bool | None = None
) -> Tensor:
    found = _as_tensor(obj, dtype, device)
    found = found.clone() if copy and found is obj else found
    return _detached(found) if requires_grad is False else found


def _detach_in_place(x: Tensor) -> Tensor:
    """x.detach_(): from now on x is its detached value."""
    mode = _proxy_mode()
    if mode is None:
        raise NotScalar
    known = mode.tracer.tensor_tracker
    if known[x].proxy.node.op == "placeholder":
        raise ModError(f"a mod at {user_line()} {IN_PLACE.format(what='an argument or a captured tensor')}")
    known[x] = known[x.detach()]
    return x


def _has_tensor(data: Any) -> bool:
    return isinstance(data, Tensor) or (isinstance(data, (list, tuple)) and any(map(_has_tensor, data)))


def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    value = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    return torch.where(mask, value.to(x.dtype), x)


def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    tests = test_elements if isinstance(test_elements, Tensor) else _literal_tensor(test_elements)
    found = (elements.unsqueeze(-1) == tests.reshape(-1)).any(-1) if isinstance(elements, Tensor) else elements == tests
    return ~found if invert else found


# torch.diag and torch.trace read the offset of a tensor in its storage, which is not known.
def _diag(input: Tensor, diagonal: int = 0) -> Tensor:
    if input.dim() not in (1, 2):
        raise RuntimeError(f"diag(): expected a tensor with 1 or 2 dims, found {input.dim()}")
    return input.diag_embed(diagonal) if input.dim() == 1 else input.diagonal(diagonal).clone()


def _trace(input: Tensor) -> Tensor:
    if input.dim() != 2:
        raise RuntimeError(f"trace(): expected a matrix, found {input.dim()} dims")
    return input.diagonal().sum()


_REWRITES: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: gather,
    Tensor.select: _select,
    torch.select: _select,
    Tensor.take: lambda source, index: torch.ops.aten.index.Tensor(source.reshape(-1), [index]),
    torch.take: lambda source, index: torch.ops.aten.index.Tensor(source.reshape(-1), [index]),
    torch.tensor: _copied,
    torch.as_tensor: _as_tensor,
    torch.asarray: _as_array,
    Tensor.new_tensor: lambda x, data, dtype=None, **_: _copied(data, dtype or x.dtype, x.device),
    torch.masked_fill: _masked_fill,
    Tensor.masked_fill: _masked_fill,
    torch.isin: _isin,
    torch.diag: _diag,
    Tensor.diag: _diag,
    torch.trace: _trace,
    Tensor.trace: _trace,
    Tensor.detach_: _detach_in_place,
    torch.detach_: _detach_in_place,
    Tensor.data.__get__: Tensor.detach,  # type: ignore[attr-defined]
}
# Questions that the tensors of a trace answer otherwise than the user's.
_STATE_OF_TENSOR: tuple[Any, ...] = (
    Tensor.is_inference, torch.is_inference, Tensor._is_view, Tensor.is_shared, Tensor.is_pinned, Tensor.is_neg,
    torch.is_neg, Tensor.is_conj, torch.is_conj,
)  # fmt: skip
EXPORTS = "exports a tensor (from_dlpack). Export it outside of the mod, and capture the tensor that is imported."
_REFUSED: dict[Any, str] = {  # what an error says of them
    **dict.fromkeys((
        Tensor.__bool__, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.tolist,
        Tensor.is_nonzero, torch.is_nonzero, torch.equal, Tensor.equal, torch.allclose,
    ), DATA_DEPENDENT),
    **{
        function: f"reads {function.__name__} of a tensor, which a trace does not know. Read it before, and capture it."
        for function in _STATE_OF_TENSOR
    },
    Tensor.__dlpack__: EXPORTS, Tensor.__index__: _AS_INDEX, Tensor.__array__: _IN_ARRAY, Tensor.numpy: _IN_ARRAY,
    **dict.fromkeys((Tensor.grad.__get__, Tensor.grad_fn.__get__), GRADIENT_OF_TENSOR),  # type: ignore[attr-defined]
    Tensor.data.__set__: IN_PLACE.format(what="a tensor through .data"),  # type: ignore[attr-defined]
}  # fmt: skip

# Facts about a tensor that a ScalarTape's tensors share with the mod's, and that the guard checks.
_KNOWN_OF_SCALARS = frozenset((
    Tensor.dtype.__get__, Tensor.ndim.__get__, Tensor.dim, Tensor.is_floating_point, torch.is_floating_point,  # type: ignore[attr-defined]
    Tensor.is_complex, torch.is_complex,
))  # fmt: skip
_READ_LAYOUT = frozenset((Tensor.is_contiguous, Tensor.stride, Tensor.storage_offset))

_PACKAGES = tuple(str(Path(m.__file__).parent) for m in (torch, inspect) if m.__file__)  # torch, the standard library
_HERE = str(Path(__file__).parent)


def is_user_file(filename: str) -> bool:
    if filename.startswith(_HERE):
        return "mods" in Path(filename).parts[-2:-1]
    inside = filename.startswith(_PACKAGES) and "site-packages" not in filename.removeprefix(_PACKAGES[1])
    return not filename.startswith(_PACKAGES[0]) and not inside and not filename.startswith("<frozen")


def _is_called_by(file: str) -> bool:
    """Return whether a function of a file is running, followed or not."""
    if current_line(lambda name: name.endswith(file)) is not None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame is not None


def _is_asked_by_user() -> bool:
    """Return whether the user's code, followed or not, reads an attribute now; torch's functions read some as well."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_HERE):
        return frame is not None and is_user_file(frame.f_code.co_filename)
    followed = current_line(lambda name: True)
    return followed is not None and current_line(is_user_file) == followed


def user_line() -> str:
    """Return file:line of the innermost frame in the user's code."""
    followed = current_line(is_user_file)
    if followed is not None:
        return followed
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (line := _place_of(frame, frame.f_lineno)) is not None:
            return line
        frame = frame.f_back
    return "an unknown line"


LINES = "_flexattn_lines"  # a global of generated code: its line -> the user's line that it was made from


def _place_of(frame: FrameType, line: int) -> str | None:
    """Return file:line, or None if a frame does not run the user's code."""
    if (lines := frame.f_globals.get(LINES)) is not None:
        return lines.get(line)
    return place(frame.f_code.co_filename, line) if is_user_file(frame.f_code.co_filename) else None


def _line_of(tb: TracebackType | None) -> str:
    lines = [found for f, line in traceback.walk_tb(tb) if (found := _place_of(f, line)) is not None]
    return lines[-1] if lines else "an unknown line"


def line_of_node(node: fx.Node) -> str:
    return node.meta.get("user_line", "an unknown line")


def explain_operator(unknown: UnknownOperator) -> str:
    """Return the message for an unsupported operator: its name, the user's line, the reason, and the fix."""
    what = f"the operator {unknown.node.target} at {line_of_node(unknown.node)}"
    if unknown.reason:
        return f"{what} {unknown.reason}."
    library, _, name = str(unknown.node.target).partition(".")
    if library not in ("aten", "prims"):
        like = "torch.tanh" if "tanh" in name else "a function of torch operations"
        return (
            f"{what}, expected one that PyTorch decomposes, or that is registered. Register what it computes: "
            f"flexattn.register_operator(torch.ops.{library}.{name.partition('.')[0]}, like={like})."
        )
    return (
        f"{what}, expected one of elementwise operations, gathers and small reductions. Compute it before the call, or "
        f"write it with simpler operations."
    )


def explain_failure(error: Exception, kind: str, name: str, captured: Sequence[tuple[str, Tensor]] = ()) -> ModError:
    """Convert an exception raised by the mod to an error that names the line and the fix.

    `captured` are the tensors that the mod reads, as it sees them, with the user's names.
    """
    where = _line_of(error.__traceback__)
    text = str(error)
    if "value out of a tracing tensor" in text:
        return ModError(f"{name} at {where} {DATA_DEPENDENT}")
    if type(error).__name__.startswith(("DataDependent", "DynamicOutput", "GuardOnData")):
        what = getattr(error, "func", "nonzero, unique, bincount, repeat_interleave, x[mask]")
        return ModError(f"{name} at {where} {UNKNOWN_SIZE.format(what=what)}")
    if isinstance(error, TooManyIndices):
        shape = [example(size) for size in error.source.shape]
        called = next((f"the captured tensor `{its}`" for its, t in captured if t is error.source), "a tensor")
        found = f"{error.count} indices into {called} of shape {shape}"
        fix = "Leave out the indices of dimensions that it does not have, for example b or h."
        return ModError(message(f"{name} at {where}", found, f"at most {error.source.ndim}", fix))
    if isinstance(error, KeyError) and isinstance(error.args[0] if error.args else None, Tensor):
        return ModError(f"{name} at {where} {_AS_KEY}")
    if isinstance(error, TypeError) and "ndarray" in text and "Tensor" in text:
        return ModError(f"{name} at {where} {_IN_ARRAY}")
    if text.startswith("tensors used as indices must be"):
        fix = "Write `i // 2` instead of `i / 2`, or convert the index with .long()."
        return ModError(message(f"{name} at {where}", "an index that is no integer", "int32 or int64", fix))
    if type(error).__name__.startswith("PendingUnbacked"):  # torch calls .item() on a 0-d index of any other integer
        found, fix = "an index in another integer dtype", "Convert it with .long()."
        return ModError(message(f"{name} at {where}", found, "int32 or int64", fix))
    said = f"{name} at {where} raised {type(error).__name__}: {text or 'no message'}"
    # Python's and torch's own errors about arguments and shapes: the mod may have been written for whole tensors.
    if isinstance(error, (TypeError, IndexError)) or type(error) is RuntimeError:
        return ModError(f"{said.removesuffix('.')}. A {kind}_mod is called with 0-d tensors and must accept them.")
    return ModError(said)
