"""The table of operations, row by row: values against Python's math, gradients against autograd in float64, texts."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from flexattn.graph.builder import Builder, Expr
from flexattn.graph.differentiate import differentiate
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import SCORE_INPUTS, Capture
from flexattn.graph.operators import OPS, identity_of, where

FLOATS = [-2.5, -1.0, -0.3, 0.0, 0.4, 1.0, 1.7, 3.0]
DOMAINS = {
    "log": (0.1, 9.0), "log2": (0.1, 9.0), "log10": (0.1, 9.0), "log1p": (-0.9, 9.0), "sqrt": (0.1, 9.0),
    "rsqrt": (0.1, 9.0), "asin": (-0.9, 0.9), "acos": (-0.9, 0.9), "acosh": (1.1, 9.0), "atanh": (-0.9, 0.9),
    "tan": (-1.4, 1.4), "pow": (0.1, 3.0), "erfinv": (-0.9, 0.9), "lgamma": (0.1, 9.0),
}  # fmt: skip
NONZERO_SECOND = {"div", "floordiv", "mod", "fmod", "atan2", "copysign"}
INTEGERS = [-7, -2, -1, 0, 1, 3, 12]

# What each operation is, by Python itself.
MEANING: dict[str, Callable[..., object]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow,
    "floordiv": operator.floordiv, "mod": operator.mod, "fmod": math.fmod, "neg": operator.neg, "abs": abs,
    "maximum": max, "minimum": min, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "isnan": math.isnan, "isinf": math.isinf,
    "where": lambda c, x, y: x if c else y,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.not_, "bitand": operator.and_,
    "bitor": operator.or_, "bitxor": operator.xor, "bitnot": operator.invert, "shl": operator.lshift,
    "shr": operator.rshift, "detach": lambda x: x, "rsqrt": lambda x: 1 / math.sqrt(x), "round": round,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)), "erfcx": lambda x: math.exp(x * x) * math.erfc(x),
    "erfinv": lambda x: NormalDist().inv_cdf((x + 1) / 2) / math.sqrt(2),
    **{name: getattr(math, name) for name in (
        "floor", "ceil", "trunc", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan",
        "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "copysign",
        "lgamma",
    )},
}  # fmt: skip

BOOLEAN = {"and", "or", "xor", "not"}
ON_INTEGERS = {
    "bitand",
    "bitor",
    "bitxor",
    "bitnot",
    "shl",
    "shr",
    "floordiv",
    "mod",
    "fmod",
    "add",
    "sub",
    "mul",
    "neg",
}
ON_INTEGERS |= {"abs", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"}
WITHOUT_GRADIENT = {"floordiv", "floor", "ceil", "trunc", "round", "detach"}  # of those on floats: zero everywhere


def arity(name: str) -> int:
    return sum(f"{{{i}}}" in OPS[name].triton for i in range(3))


def samples(name: str, dtype: torch.dtype) -> list[tuple[float, ...]]:
    """Return operands in the domain of an operation."""
    if dtype == torch.bool:
        base: list[float] = [False, True]
    elif not dtype.is_floating_point:
        base = INTEGERS
    elif name in DOMAINS:
        low, high = DOMAINS[name]
        base = [low + (high - low) * i / 7 for i in range(8)]
    else:
        base = FLOATS
    second = [x for x in base if x != 0 or name not in NONZERO_SECOND]
    if name in ("shl", "shr"):
        second = [0, 1, 5]
    match arity(name):
        case 1:
            return [(x,) for x in base]
        case 2:
            return [(x, y) for x in base for y in second]
    return [(c, x, y) for c in (False, True) for x in base for y in base]


def cases() -> list[tuple[str, torch.dtype]]:
    found = []
    for name in OPS:
        if name in BOOLEAN:
            found.append((name, torch.bool))
            continue
        if name in ON_INTEGERS:
            found.append((name, torch.int32))
        if name not in ("bitand", "bitor", "bitxor", "bitnot", "shl", "shr"):
            found.append((name, torch.float64))
    return found


def build(name: str, dtype: torch.dtype, *constants: float) -> tuple[Builder, Expr]:
    """Return `name` of constants, folded while it is built."""
    builder = Builder()
    dtypes = [torch.bool, dtype, dtype] if name == "where" else [dtype] * len(constants)
    return builder, builder.apply(name, *(builder.const(c, d) for c, d in zip(constants, dtypes, strict=True)))


def test_every_operation_is_tested_here() -> None:
    assert set(MEANING) == set(OPS)


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_values(name: str, dtype: torch.dtype) -> None:
    for operands in samples(name, dtype):
        _, folded = build(name, dtype, *operands)
        assert folded.constant == pytest.approx(MEANING[name](*operands), rel=1e-12, abs=1e-12), operands
        assert folded.dtype == (torch.bool if OPS[name].result == "bool" else dtype)


def graph_of(name: str) -> ModGraph:
    """Return a score_mod that applies `name` to the score and captured scalars; a condition is a captured bool."""
    builder = Builder()
    score = builder.input("score", torch.float64)
    x, y = builder.load(0, torch.float64, ()), builder.load(1, torch.float64, ())
    condition = builder.load(2, torch.bool, ())
    operands = {1: (score,), 2: (score, y), 3: (condition, score, y)}[arity(name)]
    captures = tuple(Capture(n, d, 0) for n, d in (("x", x.dtype), ("y", y.dtype), ("condition", torch.bool)))
    return builder.build(name, SCORE_INPUTS, captures, (), [builder.apply(name, *operands)])


@pytest.mark.parametrize("name", [n for n, d in cases() if d == torch.float64 and OPS[n].result != "bool"])
def test_gradients(name: str) -> None:
    rows = samples(name, torch.float64)
    columns = [
        torch.tensor(c, dtype=torch.bool if i == 0 and name == "where" else torch.float64)
        for i, c in enumerate(zip(*rows, strict=True))
    ]
    floats = [c.requires_grad_() for c in columns if c.dtype != torch.bool]
    condition = columns[0] if name == "where" else torch.tensor(True)
    captures = [torch.zeros(()), floats[-1], condition]
    graph = differentiate(graph_of(name), (1,))
    grad = torch.linspace(-1.0, 2.0, len(rows), dtype=torch.float64)
    inputs = {"grad": grad, "score": floats[0], **{n: torch.zeros((), dtype=torch.int32) for n in SCORE_INPUTS[1:]}}
    found = graph.evaluate(inputs, captures, (), load=lambda source, index: source)
    if name in WITHOUT_GRADIENT:
        assert found == (None,)
        return
    wanted = torch.autograd.grad(OPS[name].torch(*columns), floats, grad, allow_unused=True)
    by_name = dict(zip(("score", "y"), wanted, strict=False))
    sites = [graph.captures[graph.loads[s].capture].name for s in graph.sites]
    for leaf, value in zip(("score", *sites), found, strict=True):
        assert value is not None
        torch.testing.assert_close(value.detach().expand_as(grad), by_name[leaf])
    for leaf in by_name.keys() - {"score", *sites}:
        assert by_name[leaf] is None or not by_name[leaf].any(), f"no gradient for {leaf}"


def test_pow_at_zero() -> None:
    graph = differentiate(graph_of("pow"), (1,))
    for x, y in ((0.0, 0.0), (0.0, 2.0), (0.0, 1.0), (-2.0, 2.0), (2.0, 0.0)):
        score, exponent = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (x, y))
        inputs = {"grad": torch.ones(1, dtype=torch.float64), "score": score}
        inputs |= {n: torch.zeros((), dtype=torch.int32) for n in SCORE_INPUTS[1:]}
        found = graph.evaluate(inputs, [torch.zeros(()), exponent, torch.tensor(True)], ())
        wanted = torch.autograd.grad(score**exponent, (score, exponent))
        for f, w in zip(found, wanted, strict=True):
            assert f is not None
            torch.testing.assert_close(f.detach().reshape(()), w, equal_nan=True)


@pytest.mark.parametrize("name", OPS)
def test_triton_texts_are_expressions(name: str) -> None:
    for text in (OPS[name].triton, OPS[name].exact_triton):
        if text is not None:
            parsed = ast.parse(text.format("x", "y", "z", kind="int"), mode="eval")
            read = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)} & {"x", "y", "z"}
            assert read == set("xyz"[: arity(name)])


def test_identities_hold_for_every_value() -> None:
    """Wherever `identity_of` answers, the answer is what the operation computes."""
    values: list[float] = [0.0, 1.0, -2.0, math.inf, -math.inf, math.nan]
    for name in ("add", "sub", "mul", "div"):
        for constant in (0.0, 1.0):
            for swapped in (False, True):
                builder = Builder()
                x, c = builder.input("score", torch.float64), builder.const(constant, torch.float64)
                same = identity_of(name, (c, x) if swapped else (x, c))
                if isinstance(same, Expr):
                    assert same.index == x.index
                    for v in map(torch.tensor, values):
                        operands: tuple[Tensor | float, ...] = (constant, v) if swapped else (v, constant)
                        computed = OPS[name].torch(*map(torch.as_tensor, operands))
                        torch.testing.assert_close(computed, v, equal_nan=True)


def test_where_takes_a_literal_on_either_side() -> None:
    builder = Builder()
    x = builder.input("score", torch.float32)
    condition = x > 0
    assert where(condition, x, 0.0).dtype == where(condition, 0.0, x).dtype == torch.float32
    assert where(condition, x, x).index == x.index
