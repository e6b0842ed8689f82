"""Mods written node by node, and hypothesis strategies for random ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.boxes import Bounds
from flexattn.graph.builder import Builder, Expr
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import MASK_INPUTS, Capture, Number

Write = Callable[..., Expr]  # write(builder, b, h, q_idx, kv_idx)
COMPARE = ("eq", "ge", "gt", "le", "lt", "ne")


def briefly(make: Callable[..., st.SearchStrategy[Write]]) -> Callable[..., st.SearchStrategy[Write]]:
    """Let a strategy print as its call: hypothesis writes nested ones out in full, and warns of their length."""

    @st.composite
    def drawn(draw, *args):
        return draw(make(*args))

    return drawn


def build(write: Callable[..., Expr], captures=(), numbers=(), inputs=MASK_INPUTS) -> BoundMod:
    """Return the mod that `write(builder, b, h, q_idx, kv_idx)` writes."""
    builder = Builder()
    dtypes = [torch.float32 if name == "score" else torch.int32 for name in inputs]
    out = write(builder, *(builder.input(name, dtype) for name, dtype in zip(inputs, dtypes, strict=True)))
    graph = builder.build(
        "mod",
        inputs,
        tuple(Capture(f"c{i}", c.dtype, c.ndim) for i, c in enumerate(captures)),
        tuple(Number(f"n{i}", torch.int64 if isinstance(n, int) else torch.float64) for i, n in enumerate(numbers)),
        [out],
    )
    return BoundMod(graph, tuple(captures), tuple(numbers))


def classify_boxes(
    bounded: ModGraph, captures: Sequence[Tensor], numbers: Sequence[int | float], boxes: np.ndarray
) -> np.ndarray:
    """Return EMPTY, FULL or UNKNOWN for each box of a mask: boxes int [n, 8] in the order of BOX_INPUTS, uint8 [n]."""
    return Bounds(bounded, tuple(captures), tuple(numbers)).classify(*np.asarray(boxes, np.int64).T)


def on_grid(mod: BoundMod, b: int, h: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    b, h = torch.tensor(b, dtype=torch.int32), torch.tensor(h, dtype=torch.int32)
    out = mod(b, h, q[:, None].int(), kv[None, :].int())
    return out.broadcast_to(len(q), len(kv))


TABLE = torch.tensor([5, 0, 3, 3, 7, -2, 1, 40, 2, 2, 11])
FLAGS = torch.tensor([True, False, True, True, True, False, False])
BIAS = torch.tensor([[0.5, -1.0, math.nan], [2.0, 0.1, math.inf]])
CAPTURES = (TABLE.int(), FLAGS, BIAS)
NUMBERS = (9, -3)


@briefly
def integers(depth: int) -> st.SearchStrategy[Write]:
    leaves = st.one_of(
        st.sampled_from([lambda bu, *i, k=k: i[k] for k in (0, 1, 2, 2, 3, 3)]),
        st.integers(-20, 60).map(lambda c: lambda bu, *i: bu.const(c, torch.int32)),
        st.sampled_from([lambda bu, *i, k=k: bu.number(k, torch.int64).cast(torch.int32) for k in (0, 1)]),
    )
    if depth == 0:
        return leaves
    inner = integers(depth - 1)
    return st.one_of(
        leaves,
        st.builds(
            lambda op, x, y: lambda bu, *i: x(bu, *i).apply(op, y(bu, *i)),
            st.sampled_from(["add", "sub", "sub", "mul", "maximum", "minimum", "bitand", "bitor", "bitxor"]),
            inner,
            inner,
        ),
        st.builds(
            lambda op, x, c: lambda bu, *i: x(bu, *i).apply(op, c),
            st.sampled_from(["floordiv", "mod", "fmod"]),
            inner,
            st.sampled_from([1, 2, 3, 8, 16, 64, -3]),
        ),
        st.builds(
            lambda op, x, y: lambda bu, *i: x(bu, *i).apply(op, y(bu, *i).apply("mod", 31)),
            st.sampled_from(["shl", "shr"]),
            inner,
            inner,
        ),
        st.builds(lambda op, x: lambda bu, *i: x(bu, *i).apply(op), st.sampled_from(["abs", "neg", "bitnot"]), inner),
        st.builds(
            lambda c, x, y: lambda bu, *i: c(bu, *i).apply("where", x(bu, *i), y(bu, *i)),
            booleans(depth - 1),
            inner,
            inner,
        ),
        st.builds(
            lambda x, back: lambda bu, *i: bu.load(0, torch.int32, [x(bu, *i).apply("mod", len(TABLE)) - back]),
            inner,
            st.sampled_from([0, 0, len(TABLE), 4]),
        ),
    )


@briefly
def floats(depth: int) -> st.SearchStrategy[Write]:
    inner = integers(max(depth - 1, 0)).map(lambda x: lambda bu, *i: x(bu, *i).cast(torch.float32))
    load = st.builds(
        lambda x, y: lambda bu, *i: bu.load(2, torch.float32, [x(bu, *i).apply("mod", 2), y(bu, *i).apply("mod", 3)]),
        integers(0),
        integers(0),
    )
    if depth == 0:
        return st.one_of(inner, load)
    deeper = floats(depth - 1)
    return st.one_of(
        inner,
        load,
        st.builds(
            lambda op, x, y: lambda bu, *i: x(bu, *i).apply(op, y(bu, *i)),
            st.sampled_from(["add", "sub", "mul", "div", "maximum", "minimum", "mod", "floordiv"]),
            deeper,
            deeper,
        ),
        st.builds(
            lambda op, x: lambda bu, *i: x(bu, *i).apply(op),
            st.sampled_from(["abs", "neg", "floor", "sqrt", "exp", "tanh", "sin", "rsqrt", "log", "sigmoid"]),
            deeper,
        ),
        st.builds(
            lambda t, x: lambda bu, *i: x(bu, *i).cast(t).cast(torch.float32),
            st.sampled_from([torch.float16, torch.bfloat16]),
            deeper,
        ),
    )


@briefly
def booleans(depth: int) -> st.SearchStrategy[Write]:
    compare = lambda operands: st.builds(  # noqa: E731
        lambda op, x, y: lambda bu, *i: x(bu, *i).apply(op, y(bu, *i)),
        st.sampled_from(COMPARE),
        operands,
        operands,
    )
    leaves = st.one_of(
        compare(integers(depth)),
        compare(integers(depth)),
        st.builds(
            lambda x: lambda bu, *i: bu.load(1, torch.bool, [x(bu, *i).apply("mod", len(FLAGS))]), integers(depth)
        ),
        compare(floats(depth)),
    )
    if depth == 0:
        return leaves
    inner = booleans(depth - 1)
    return st.one_of(
        leaves,
        st.builds(
            lambda op, x, y: lambda bu, *i: x(bu, *i).apply(op, y(bu, *i)),
            st.sampled_from(["and", "and", "or", "xor"]),
            inner,
            inner,
        ),
        st.builds(lambda x: lambda bu, *i: x(bu, *i).apply("not"), inner),
    )
