"""Trace: a score_mod or mask_mod as Python -> ModGraph, once for each kind of mod.

A mod runs once on 0-d fake tensors under make_fx. What it captures comes in as further fake tensors and symbolic
numbers, so that the graph holds for other values, and other sizes, too. The FX graph then splits: operations on
captures alone are a *prologue* that torch runs at each call, under autograd; the rest becomes scalar expressions.

The memo: `survey` gives a key of everything reachable; Python numbers and sizes on which the run decided something
(an `if`, a shape) left guards, and a memo entry is used only where its guards hold.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexattn.aten import UnknownOperator
from flexattn.captures import Survey, substitute, survey
from flexattn.config import debug, settings
from flexattn.errors import FlexAttentionError, ModError, UnsupportedError
from flexattn.graph import MASK_INPUTS, SCORE_INPUTS, BoundMod
from flexattn.interception import Interception, UnforeseenTensor, explain_failure, line_of_node, refused_functions
from flexattn.modes import undisturbed, users_device
from flexattn.scalarize import Kind, Recorded, Traced, scalarize
from flexattn.subclasses import check_plain
from flexattn.transforms import outside

Mod = Callable[..., Any]

_MEMO_SIZE = 512
_MOST_UNFORESEEN = 64
_VARIANTS = 16  # of one key, apart by their guards


_memo: OrderedDict[tuple[Any, ...], list[Traced]] = OrderedDict()
_lock = threading.RLock()
_stats = {"traces": 0, "hits": 0}


def stats() -> dict[str, int]:
    """Return how many calls traced, and how many were served from the memo, in this process."""
    return dict(_stats)


def trace(mod: Mod, kind: Kind, score_dtype: torch.dtype = torch.float32) -> BoundMod:
    """Return `mod` as a graph, with the captured tensors and numbers of this call.

    A gradient is that of the operations recorded; `detach` and `torch.no_grad` stop it. Of a mask_mod no gradient
    flows. A `torch.autograd.Function` in a score_mod is refused, since its own backward would not be used.
    """
    found = survey(mod)
    if found.refused is not None:
        names = substitute(mod, {}, found.numbers)[1].tensor_names
        check_plain(f"{kind}_mod", found.refused, names.get(id(found.refused), "of an unknown name"))
    key = (kind, score_dtype, torch.get_default_dtype(), *found.key)
    if found.followed:
        for traced in _memo.get(key, ()):
            if traced.guard is None or traced.guard(found.tensors, found.numbers):
                _stats["hits"] += 1
                return traced.bind(found.tensors, found.numbers, found.tensors, key)
    with _lock, torch.inference_mode(False), outside():
        traced, tensors = _trace_anew(mod, kind, score_dtype, found)
        _stats["traces"] += 1
        if settings().debug:
            how = "memoised" if found.followed else "what it reads cannot be followed: it is traced at each call"
            debug("trace", f"{kind}_mod {traced.graph.location} ({how})\n{traced.graph}")
        followed = found.followed and len(tensors) == len(found.tensors)
        if followed:
            variants = _memo.setdefault(key, [])
            variants.insert(0, traced)
            del variants[_VARIANTS:]
            while len(_memo) > _MEMO_SIZE:
                _memo.popitem(last=False)
    return traced.bind(tensors, found.numbers, found.tensors, key if followed else None)


@undisturbed("flexattn")
def _trace_anew(mod: Mod, kind: Kind, score_dtype: torch.dtype, found: Survey) -> tuple[Traced, list[Tensor]]:
    """Trace until every tensor is known and every operator has a row; return the tensors that became inputs."""
    name = mod_name(mod, kind)
    _check_call(mod, kind, name)
    tensors = list(found.tensors)
    _check_tensors(tensors, name)
    decompositions: dict[Any, Callable[..., Any]] = {}
    asked = None
    while True:
        try:
            recorded = _record(mod, kind, name, score_dtype, tensors, found.numbers, decompositions)
            return scalarize(recorded, kind, name, score_dtype, location_of(mod)), tensors
        except UnforeseenTensor as unforeseen:
            check_plain(f"{kind}_mod", unforeseen.tensor, "of an unknown name")
            _check_tensors([unforeseen.tensor], name)
            tensors.append(unforeseen.tensor)
            if len(tensors) > len(found.tensors) + _MOST_UNFORESEEN:
                raise UnsupportedError(
                    f"{name}: found a real tensor made anew in each run of the mod, expected captured tensors. Make it "
                    f"before the call and capture it."
                ) from None
        except UnknownOperator as unknown:
            target = unknown.node.target
            decomposition = _decomposition(target)
            if not str(target).startswith("prims"):  # those come from decompositions, users do not write them
                asked = target
            if decomposition is None or target in decompositions:
                raise UnsupportedError(
                    f"{name}: found the operator {asked} at {line_of_node(unknown.node)}, expected one of "
                    f"elementwise operations, gathers and small reductions. Compute it before the call, or write it "
                    f"with simpler operations."
                ) from None
            decompositions[target] = decomposition


def _decomposition(target: Any) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table
    from torch._refs import nn  # noqa: F401  (registers more decompositions)

    return decomposition_table.get(target)


# Checks that need no run.


def mod_name(mod: Mod, kind: Kind) -> str:
    """Return the name of the user's function, as an identifier."""
    inner: Any = mod
    while hasattr(inner, "func"):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    return name if name.isidentifier() else f"{kind}_mod"


def location_of(mod: Mod) -> str:
    """Return file:line of the code of a mod, or an empty string for what is not written in Python."""
    inner: Any = mod
    while hasattr(inner, "func"):
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    code = getattr(inner, "__code__", None) or getattr(getattr(type(inner), "__call__", None), "__code__", None)  # noqa: B004
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _check_call(mod: Mod, kind: Kind, name: str) -> None:
    """Raise unless `mod` can be called with the positional arguments of its kind."""
    inputs, others = (SCORE_INPUTS, MASK_INPUTS) if kind == "score" else (MASK_INPUTS, SCORE_INPUTS)
    wanted = f"{kind}_mod({', '.join(inputs)})"
    if not callable(mod):
        raise ModError(f"{kind}_mod: found {mod!r}, expected a callable {wanted}. Pass a function.")
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return
    if _binds(signature, len(inputs)):
        return
    where = f" at {location_of(mod)}" if location_of(mod) else ""
    mend = f"Give it {len(inputs)} positional parameters."
    if _binds(signature, len(others)):
        mend = (
            "It looks like a mask_mod: pass it as block_mask=create_block_mask(mask_mod, ...)."
            if kind == "score"
            else "It looks like a score_mod: pass it to flex_attention as score_mod."
        )
    raise ModError(f"{kind}_mod: found {name}{signature}{where}, expected a callable {wanted}. {mend}")


def _binds(signature: inspect.Signature, count: int) -> bool:
    """Tell whether `count` positional arguments fit: all parameters without default, or *args."""
    required = [p for p in signature.parameters.values() if p.default is p.empty]
    if any(p.kind is p.KEYWORD_ONLY for p in required):
        return False
    positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in required)
    return positional == count or (variadic and positional < count)


def _check_tensors(tensors: Sequence[Tensor], name: str) -> None:
    for t in tensors:
        if t.is_complex() or t.is_quantized:
            raise UnsupportedError(f"{name}: found a captured tensor of {t.dtype}, expected a real dtype.")


# The run under make_fx.


def _record(
    mod: Mod,
    kind: Kind,
    name: str,
    score_dtype: torch.dtype,
    tensors: list[Tensor],
    numbers: Sequence[int | float],
    decompositions: dict[Any, Callable[..., Any]],
) -> Recorded:
    """Run `mod` once on fake tensors and symbolic numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv(duck_shape=False, specialize_zero_one=True)
    fakes = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    sources: dict[str, str] = {}
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    with fakes:
        scalars = _input_scalars(kind, score_dtype, device)
        captured = [_fake(t, i, environment, sources) for i, t in enumerate(tensors)]
    lifted = [_symbolic_number(n, i, environment, sources) for i, n in enumerate(numbers)]
    replaced, leaves = substitute(mod, {id(t): c for t, c in zip(tensors, captured, strict=True)}, lifted)
    mode = Interception(tensors, captured, scalars, name)
    results: list[Any] = []

    def run(scalars: list[Tensor], captured: list[Tensor], lifted: list[Any]) -> list[Any]:
        with mode, users_device():
            result = replaced(*scalars)
        results.append(result)
        return [result] if isinstance(result, Tensor) else []

    try:
        custom = refused_functions(name) if kind == "score" else contextlib.nullcontext()
        with torch.enable_grad(), fakes, _no_autocast(device.type), custom:
            traced = make_fx(run, decompositions, "real")(scalars, captured, lifted)
    except FlexAttentionError:
        raise
    except Exception as error:
        raise explain_failure(error, kind, name) from error
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    nodes = placeholders[len(scalars) : len(scalars) + len(captured)]
    number_names = {s: leaves.number_names[int(text[2:-1])] for s, text in sources.items() if text.startswith("n[")}
    size_names = {s: "size" for s, text in sources.items() if not text.startswith("n[")}
    result = _result_node(traced.graph, results[-1])
    return Recorded(
        traced.graph,
        result,
        dict(zip(placeholders, SCORE_INPUTS if kind == "score" else MASK_INPUTS, strict=False)),
        nodes,
        placeholders[len(scalars) + len(captured) :],
        {
            node: leaves.tensor_names.get(id(t), f"captured_{i}")
            for i, (node, t) in enumerate(zip(nodes, tensors, strict=True))
        },
        sources,
        number_names | size_names,
        environment,
    )


def _no_autocast(device_type: str) -> torch.autocast:
    return torch.autocast(device_type if torch.amp.is_autocast_available(device_type) else "cpu", enabled=False)


def _result_node(graph: fx.Graph, result: Any) -> Any:
    """Return the FX node of a returned tensor; anything else as it is."""
    (returned,) = next(n for n in graph.nodes if n.op == "output").args
    if not isinstance(result, Tensor):
        return result
    return returned[0] if isinstance(returned, (list, tuple)) else returned


def _input_scalars(kind: Kind, score_dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    indices = [torch.empty((), dtype=torch.int32, device=device) for _ in MASK_INPUTS]
    return [torch.empty((), dtype=score_dtype, device=device), *indices] if kind == "score" else indices


def _fake(tensor: Tensor, position: int, environment: Any, sources: dict[str, str]) -> Tensor:
    """Return a fake tensor of symbolic sizes; sizes 0 and 1 are part of the key and stay as they are."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    sizes: list[Any] = []
    for d, size in enumerate(tensor.shape):
        if size > 1:
            source = _source(f"t{position}_{d}")
            symbol = environment.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            sources[str(symbol)] = f"t[{position}].shape[{d}]"
            sizes.append(environment.create_symintnode(symbol, hint=size, source=source))
        else:
            sizes.append(size)
    return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)


def _symbolic_number(value: int | float, position: int, environment: Any, sources: dict[str, str]) -> Any:
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = _source(f"n{position}")
    symbol = environment.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    sources[str(symbol)] = f"n[{position}]"
    make = environment.create_symfloatnode if isinstance(value, float) else environment.create_symintnode
    return make(symbol, hint=value, source=source)


def _source(name: str) -> Any:
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)
