"""Recording: one run of a mod on 0-d tensors. It returns an FX graph and the log of its reads.

A ScalarTape records a mod that uses scalars only (scalar_tape.py). Otherwise make_fx records it on fake tensors.

`follow` runs the mod. Each captured tensor becomes a fake tensor with symbolic sizes when the mod reads it, and each
captured number a symbolic number, so the graph is valid for other values and sizes.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from flexattn.errors import FlexAttentionError, ModError, UnsupportedError
from flexattn.graph.nodes import MASK_INPUTS, SCORE_INPUTS
from flexattn.process.forks import temporary
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.modes import hidden_from_modes, users_device, without_autocast
from flexattn.torch_state.subclasses import check_plain, has_no_values, is_plain
from flexattn.torch_state.symbols import example
from flexattn.torch_state.transforms import is_transformed
from flexattn.trace.follow import IS_KNOWN_VERSION, Follower, ReadLog, Refusal, Unfollowable, symbolic
from flexattn.trace.interception import EXPORTS, Interception, explain_failure, refused_functions, user_line
from flexattn.trace.scalar_tape import NotScalar, ScalarTape
from flexattn.trace.scalarize import Kind, RecordedGraph, python_text

Mod = Callable[..., Any]
Decompositions = dict[Any, Callable[..., Any]]

_MOST_ADOPTED = 64  # tensors that a mod uses but no guard can find


@frozen
class Setting:
    """Assumptions of a run. If the run shows that one is wrong, it is repeated with another setting."""

    device: torch.device  # of the captured tensors
    layouts: bool = False  # whether the mod reads strides; the trace is then valid only for the strides of its tensors
    natively: bool = False  # whether Python runs the mod: operators are recorded, reads are not, so there is no guard
    scalar: bool = False  # whether it computes with scalars alone; then a ScalarTape records it
    symbolic: bool = False  # whether captured tensors may be those of a graph or of a computation of shapes


class Leaf(NamedTuple):
    """A captured tensor (only its shape, dtype and device matter) or number of a mod, and the user's name of it."""

    name: str
    value: Tensor | int | float
    like: Tensor | None = None  # the tensor that `value` stands for, whose strides a mod may read


class Restart(BaseException):
    """The run must be repeated with another setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting


class Inputs:
    """The inputs of the FX graph, created when the mod reads them."""

    def __init__(self, setting: Setting, kind: Kind, name: str) -> None:
        self.setting = setting
        self.name = name
        self.argument = f"{kind}_mod"
        self.tape = ScalarTape() if setting.scalar else None
        fakes = _fakes() if self.tape is None else (self.tape, self.tape)
        self.environment: Any = fakes[0]  # of symbolic numbers and sizes
        self.fakes: AbstractContextManager[object] = fakes[1]
        self.interception = Interception(name, self._adopt, self._ask_for_layouts, self.tape)
        self.record: ReadLog | None = None
        self.sources: dict[str, str] = {}  # symbol -> Python text over t (tensors) and n (numbers)
        self.symbol_names: dict[str, str] = {}
        self.conditions: list[str] = []  # on the layouts of tensors of a graph
        self.tensors: list[fx.Node] = []
        self.tensor_names: list[str] = []
        self.captured: list[tuple[str, Tensor]] = []  # the user's names and the fake tensors
        self.numbers: list[fx.Node] = []

    def scalars(self, kind: Kind, score_dtype: torch.dtype) -> list[Tensor]:
        """Return the arguments of the mod."""
        if self.tape is not None:
            dtypes = (*([score_dtype] if kind == "score" else []), *[torch.int64] * len(MASK_INPUTS))
            return [self.tape.scalar(f"scalars_{i}", dtype) for i, dtype in enumerate(dtypes)]
        device = self.setting.device
        with self.fakes:
            indices = [torch.empty((), dtype=torch.int64, device=device) for _ in MASK_INPUTS]
            return [torch.empty((), dtype=score_dtype, device=device), *indices] if kind == "score" else indices

    def number(self, value: int | float, position: int, name: str) -> Any:
        """Return the symbol for a number that the mod reads."""
        if self.tape is not None:
            symbol, node = self.tape.number(value, f"number_{position}", f"n[{position}]")
            self.numbers.append(node)
            self.symbol_names[f"number_{position}"] = name
            return symbol
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = _source(f"n{position}")
        symbol = self.environment.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        self.sources[str(symbol)], self.symbol_names[str(symbol)] = f"n[{position}]", name
        make = self.environment.create_symfloatnode if isinstance(value, float) else self.environment.create_symintnode
        found = make(symbol, hint=value, source=source)
        self.numbers.append(_placeholder(f"number_{position}", found))
        return found

    def tensor(self, value: Tensor, position: int, name: str, like: Tensor | None = None) -> None:
        """Make a tensor that the mod reads an input of the graph. `like` has its layout, if that is another tensor."""
        with self.interception.paused():  # these reads are not part of the mod
            if not self.setting.symbolic or not has_no_values(value):
                check_plain(self.argument, value, name)
            if value.is_complex() or value.is_quantized:
                text = f"found a captured tensor of {value.dtype}, expected a real dtype"
                raise UnsupportedError(f"{self.name}: {text}.")
            if self.tape is not None:
                fake, node = self.tape.tensor(value, f"tensor_{position}")
            else:
                if value.device.type != "cpu" and self.setting.device.type == "cpu":
                    raise Restart(replace(self.setting, device=value.device))
                fake = self._fake(value, position, value if like is None else like)
                node = _placeholder(f"tensor_{position}", fake)
            self.tensors.append(node)
            self.tensor_names.append(name)
            self.captured.append((name, fake))
            self.interception.replace(value, fake)

    def text(self, symbol: Any) -> str:
        """Return the expression by which the guard computes a symbol from its variables."""
        record = self.record
        assert record is not None
        if record.reason:  # there will be no guard
            return "0"
        variables = {"t": record.tensor_variables, "n": record.number_variables}
        text = python_text(symbol.node.expr, self.sources)
        return re.sub(r"\b([tn])\[(\d+)\]", lambda found: f"({variables[found[1]][int(found[2])]})", text)

    def name_of(self, symbol: Any) -> str:
        """Return the user's name of a number in a symbol's expression."""
        return next((self.symbol_names[str(s)] for s in sorted(symbol.node.expr.free_symbols, key=str)), "number")

    def _fake(self, tensor: Tensor, position: int, like: Tensor) -> Tensor:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        with disable_proxy_modes_tracing(), self.fakes:
            if not self.setting.layouts:
                return torch.empty(self._sizes(tensor.shape, position), dtype=tensor.dtype, device=tensor.device)
            shape, strides = ([int(example(n)) for n in sizes] for sizes in (tensor.shape, like.stride()))
            offset = int(example(like.storage_offset()))
            if self.setting.symbolic:
                t = f"t[{position}]"
                found, expected = f"[*{t}.shape, *{t}.stride(), {t}.storage_offset()]", [*shape, *strides, offset]
                self.conditions.append(f"{found} == {expected}")
            else:
                assert self.record is not None
                self.record.check(tensor, "{0}.shape == {1} and {0}.stride() == {2}", tensor.shape, tensor.stride())
            # Storage of fake tensors is not checked: it may be smaller.
            return torch.empty((), dtype=tensor.dtype, device=tensor.device).as_strided(shape, strides, offset)

    def about_to(self, reason: str) -> None:
        """Stop a run on a tape before the mod draws or changes something: it must do so once."""
        if self.tape is not None:
            raise NotScalar

    def scripted(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a scripted function. Its operators are recorded; torch's own reads during the call are not."""
        if self.tape is not None:  # TorchScript reads sizes and devices that the tape does not see
            raise NotScalar
        args, kwargs = self.interception.as_fake(args), self.interception.as_fake(kwargs)
        with self.interception.paused():
            found = function(*args, **kwargs)
        self.interception.note_line()
        return found

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Let torch compute on real tensors, outside of the trace."""
        with self.interception.paused(), _disable_current_modes():
            yield

    def _sizes(self, shape: torch.Size, position: int) -> list[Any]:
        """Return symbols for the sizes of a tensor. Sizes 0 and 1 are guarded and stay literal."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        sizes: list[Any] = []
        for d, size in enumerate(map(example, shape)):
            if size <= 1:
                sizes.append(size)
                continue
            source = _source(f"t{position}_{d}")
            symbol = self.environment.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            self.sources[str(symbol)], self.symbol_names[str(symbol)] = f"t[{position}].shape[{d}]", "size"
            sizes.append(self.environment.create_symintnode(symbol, hint=size, source=source))
        return sizes

    def _adopt(self, tensor: Tensor) -> None:
        """Make a tensor an input if the mod got it from a location that no guard can read."""
        record = self.record
        if record is None:
            raise UnsupportedError(f"{self.name}: found a tensor that is not among its captured tensors.")
        with self.interception.paused():
            has_memory = is_plain(tensor) and not has_no_values(tensor) and not is_transformed(tensor)
            if has_memory and tensor.numel() and not tensor.data_ptr():  # it was imported from a traced tensor
                raise ModError(f"{self.name} at {user_line()} {EXPORTS}")
        record.unguarded("it uses a tensor that it creates or receives in each run")
        if len(record.tensors) >= _MOST_ADOPTED:
            raise UnsupportedError(
                f"{self.name}: found more than {_MOST_ADOPTED} tensors that are created in each run of the mod, "
                f"expected captured tensors. Create them before the call and capture them."
            )
        self.tensor(tensor, len(record.tensors), f"captured_{len(record.tensors)}")
        record.tensors.append(tensor)

    def _ask_for_layouts(self) -> None:
        if self.tape is not None:
            raise NotScalar
        if not self.setting.layouts:
            raise Restart(replace(self.setting, layouts=True))


def record_run(
    mod: Mod, kind: Kind, name: str, score_dtype: torch.dtype, decompositions: Decompositions, scalar: bool = False,
    allow_symbolic: bool = False,
) -> tuple[RecordedGraph, ReadLog]:  # fmt: skip
    """Run `mod` in `follow`, repeatedly if the setting turns out to be wrong.

    Args:
        scalar: record it on a ScalarTape, or raise NotScalar.
        allow_symbolic: captured tensors may be those of a graph or of a computation of shapes.
    """
    scalar = scalar and IS_KNOWN_VERSION
    setting = Setting(torch.device("cpu"), natively=not IS_KNOWN_VERSION, scalar=scalar, symbolic=allow_symbolic)
    reason = "this version of Python is not known"
    while True:
        try:
            with hidden_from_modes():
                recorded, record = _run(mod, kind, name, score_dtype, decompositions, setting)
            break
        except Restart as restart:
            setting = restart.setting
        except Unfollowable as unfollowable:
            setting, reason = replace(setting, natively=True, scalar=False), str(unfollowable)
    if setting.natively:
        record.reason = reason
    elif _is_watched() and not record.reason:
        _show(mod, kind, name, score_dtype, setting)
    return recorded, record


def _is_watched() -> bool:
    """Return whether a debugger, a profiler or a coverage tool watches this thread."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = monitoring is not None and any(monitoring.get_tool(i) is not None for i in range(6))
    return tools or sys.gettrace() is not None or sys.getprofile() is not None


def _show(mod: Mod, kind: Kind, name: str, score_dtype: torch.dtype, setting: Setting) -> None:
    """Run the mod once more in Python, for tools that watch it: breakpoints are hit and lines are counted."""
    setting = replace(setting, natively=True, scalar=False)
    while True:
        try:
            with hidden_from_modes():
                _run(mod, kind, name, score_dtype, {}, setting)
        except Restart as restart:  # captured tensors are on a GPU
            setting = restart.setting
        except Exception:
            return
        else:
            return


def _run(
    mod: Mod, kind: Kind, name: str, score_dtype: torch.dtype, decompositions: Decompositions, setting: Setting
) -> tuple[RecordedGraph, ReadLog]:
    inputs = Inputs(setting, kind, name)
    record = inputs.record = ReadLog(mod, inputs)
    follower = Follower(record)
    follower.passed_on = (*follower.passed_on, Restart, NotScalar)
    call = mod if setting.natively else follower.mod
    return _recorded(inputs, kind, score_dtype, decompositions, lambda scalars: symbolic(call(*scalars))), record


def record_body(
    body: Callable[..., Any], kind: Kind, name: str, score_dtype: torch.dtype, decompositions: Decompositions,
    leaves: Sequence[Leaf],
) -> RecordedGraph:  # fmt: skip
    """Run `body(*scalars, *leaves)`, a mod whose captured tensors and numbers are arguments. It reads nothing else.

    Leaves of tensors are `t[i]` and leaves of numbers are `n[i]` in the sources of symbols, each in their order.
    """
    device = next((x.value.device for x in leaves if isinstance(x.value, Tensor) and not x.value.is_cpu), None)
    setting = Setting(device or torch.device("cpu"), natively=True, symbolic=True)
    try:
        return _run_body(body, kind, name, score_dtype, decompositions, leaves, setting)
    except Restart as restart:  # it reads strides
        return _run_body(body, kind, name, score_dtype, decompositions, leaves, restart.setting)


def _run_body(
    body: Callable[..., Any], kind: Kind, name: str, score_dtype: torch.dtype, decompositions: Decompositions,
    leaves: Sequence[Leaf], setting: Setting,
) -> RecordedGraph:  # fmt: skip
    inputs = Inputs(setting, kind, name)

    def call(scalars: list[Tensor]) -> Any:
        given: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf.value, Tensor):
                inputs.tensor(leaf.value, len(inputs.tensors), leaf.name, leaf.like)
                given.append(leaf.value)  # the interception replaces it
            else:
                given.append(inputs.number(leaf.value, len(inputs.numbers), leaf.name))
        return body(*scalars, *given)

    return _recorded(inputs, kind, score_dtype, decompositions, call)


def _recorded(
    inputs: Inputs, kind: Kind, score_dtype: torch.dtype, decompositions: Decompositions,
    call: Callable[[list[Tensor]], Any],
) -> RecordedGraph:  # fmt: skip
    """Record one call of a mod on scalars."""
    setting, name = inputs.setting, inputs.name
    results: list[Any] = []
    methods = _module_methods()

    def run(scalars: list[Tensor]) -> list[Any]:
        with inputs.interception, _module_methods_as(methods), users_device():
            result = inputs.interception.as_fake(call(scalars))
        results.append(result)
        return [result] if isinstance(result, Tensor) else []

    scalars = inputs.scalars(kind, score_dtype)
    custom = refused_functions(name) if kind == "score" else contextlib.nullcontext()
    try:
        undone = temporary(lambda: _set_module_methods(methods))
        with torch.enable_grad(), inputs.fakes, without_autocast((setting.device.type, "cpu")), custom, undone:
            graph = (
                _make_fx(run, decompositions, scalars) if inputs.tape is None else _on_tape(run, inputs.tape, scalars)
            )
    except (FlexAttentionError, Unfollowable):
        raise
    except Refusal as refusal:
        raise ModError(f"{name} at {refusal.line} {refusal}") from None
    except Exception as error:
        if inputs.tape is not None:  # the run on fake tensors explains it
            raise NotScalar from error
        raise explain_failure(error, kind, name, inputs.captured) from error
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return RecordedGraph(
        graph=graph,
        result=_result_node(graph, results[-1]),
        inputs=dict(zip(placeholders, SCORE_INPUTS if kind == "score" else MASK_INPUTS, strict=False)),
        tensors=inputs.tensors,
        numbers=inputs.numbers,
        names=dict(zip(inputs.tensors, inputs.tensor_names, strict=True)),
        sources=inputs.sources,
        symbol_names=inputs.symbol_names,
        conditions=tuple(inputs.conditions),
        environment=inputs.environment,
    )


def _fakes() -> tuple[Any, Any]:
    """Return the environment of symbolic numbers and sizes, and the mode of fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv(duck_shape=False, specialize_zero_one=True)
    return environment, FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)


def _make_fx(run: Callable[..., Any], decompositions: Decompositions, scalars: list[Tensor]) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(run, decompositions, "real")(scalars).graph


def _on_tape(run: Callable[..., Any], tape: ScalarTape, scalars: list[Tensor]) -> fx.Graph:
    tape.graph.output([tape.node_of(result) for result in run(scalars)])
    return tape.graph


def _module_methods() -> dict[str, Any]:
    """Return the methods of torch.nn.Module that fx replaces while it traces."""
    return {name: torch.nn.Module.__dict__[name] for name in ("__getattr__", "__call__")}


def _set_module_methods(methods: dict[str, Any]) -> None:
    for name, method in methods.items():
        setattr(torch.nn.Module, name, method)


@contextlib.contextmanager
def _module_methods_as(methods: dict[str, Any]) -> Iterator[None]:
    """Undo fx's changes. Otherwise the mod would run fx's methods, and the guard would expect them later."""
    changed = _module_methods()
    _set_module_methods(methods)
    try:
        yield
    finally:
        _set_module_methods(changed)


def _placeholder(name: str, value: Any) -> fx.Node:
    """Add an input to the graph that is being traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

    mode = get_proxy_mode()
    assert mode is not None
    graph: fx.Graph = mode.tracer.graph
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        proxy = mode.tracer.create_proxy("placeholder", name, (), {}, name=name)
    track_tensor_tree(value, proxy, constant=None, tracer=mode.tracer)
    return proxy.node


def _result_node(graph: fx.Graph, result: Any) -> Any:
    """Return the FX node of a returned tensor. Other results are returned unchanged."""
    (returned,) = next(n for n in graph.nodes if n.op == "output").args
    if not isinstance(result, Tensor):
        return result
    return returned[0] if isinstance(returned, (list, tuple)) else returned


def _source(name: str) -> Any:
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)
