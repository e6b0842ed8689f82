"""lower: ModPlan -> the text of `@triton.jit` functions that the templates call.

A lowered score_mod is `score_mod(score, sm_scale, b, h, q_idx, kv_idx, live, <captures>, <numbers>)`, where score is
q k^T, unscaled. A gradient has `grad` first. A mask_mod has no score and no scale. Hopper kernels add `near, offset`
before `live`, and in mask_mods also bounds of the rows (row_bounds.py). Triton kernels may add `early` after `live`:
values loaded before the score was computed. b and h are scalars, q_idx is `[BLOCK_M, 1]` and kv_idx is
`[1, BLOCK_N]` (or transposed). An operation that depends only on rows therefore computes BLOCK_M values, and one that
depends on neither computes a scalar.

`live` is None, or a bool block: whether each (q, kv) pair may be read and written. It masks loads that vary with both
rows and columns, so nothing is read for pairs that the lengths, the block lists or the mask exclude. Other loads are
masked by the bounds of the captured tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from flexattn.compile.mod_plan import TRITON_DTYPE, ModPlan, layout_unit
from flexattn.errors import CompileError, message
from flexattn.graph.dependence import computed_from, uses, varies_per_pair
from flexattn.graph.linear import affine
from flexattn.graph.magnitudes import exact_in_float32
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Load, Node, NumberRef, RangeLoad, Scalar
from flexattn.graph.operators import OPS
from flexattn.graph.ranges import ranges
from flexattn.process.frozen_class import frozen

MOST_OPERATIONS = 20_000  # in a mod; Triton takes minutes to compile this many

# Dtypes that the prelude's `gather` supports.
_GATHERED = (torch.float32, torch.int32, torch.float16, torch.bfloat16, torch.int16)

# Triton's own float64 operations are correctly rounded. tl.div_rn and tl.sqrt_rn support only float32.
_DOUBLE_TEXT = {"div": "{0} / {1}", "sqrt": "tl.sqrt({0})", "sigmoid": "(1.0 / (1.0 + libdevice.exp(-{0})))"}


def _kind(node: Node) -> str:
    """Return the suffix of the prelude functions for a node."""
    return "int" if not node.dtype.is_floating_point else "double" if node.dtype == torch.float64 else "float"


@frozen
class Dialect:
    """How to write operations for a target."""

    exact: bool = False  # accurate functions instead of the hardware's approximations
    ptx: bool = False  # inline PTX is allowed
    float_index: bool = True  # lengths are below FLOAT_INDEX_LIMIT: index differences are computed in float32
    # This index (q_idx or kv_idx) is also passed as the sum of `near` and `offset`. `near` has few values per thread,
    # so few are converted to float32. `offset` is an immediate of the instruction.
    columns: str = ""
    as_written: bool = False  # no FMA contraction; NVIDIA only
    checked: bool = False  # a mask also returns a bit mask of the captures that were indexed out of bounds

    def of_masks(self, ptx: bool) -> Dialect:
        """Return the dialect of masks. All kernels, including those that classify blocks, must round masks alike."""
        return replace(self, exact=True, as_written=ptx)


def lower(mod: ModPlan, function: str, dialect: Dialect) -> str:
    """Return the text of a mask_mod, or of a gradient d(score)."""
    early = _early(mod, dialect)
    writer = Writer(mod, dialect, early)
    output = mod.graph.outputs[0]
    result = writer.value(output) if output is not None else "tl.zeros_like(grad)"
    if output is not None and mod.role == "score" and not mod.graph.dependence[output] & {"grad", "score"}:
        result = f"tl.broadcast_to({result}, score.shape)"
    if dialect.checked:
        outside = [f"tl.where({inside}, 0, {1 << (n % 31)})" for n, inside in writer.checks]
        result = f"{result}, {' | '.join(['q_idx * 0', *outside])}"
    return writer.function(function, [*_parameters(mod, dialect), *(["early"] if early else [])], [f"return {result}"])


def lower_score(mod: ModPlan, function: str, dialect: Dialect) -> str:
    """Return the text of a score_mod that takes q k^T and the scale separately and returns the new score times log2(e).

    Scale, log2(e) and all other factors that are the same for the tile are multiplied first, so a chain of products
    costs one multiplication per score. In an exact dialect the new score is not multiplied by log2(e).
    """
    early = _early(mod, dialect)
    writer = Writer(mod, dialect, early)
    output = mod.graph.outputs[0]
    assert output is not None
    result = writer.product(output, None if dialect.exact else "LOG2E")
    if "score" not in mod.graph.dependence[output]:
        varies = writer.varies(output)
        result = f"tl.broadcast_to({result}, score.shape)" if varies else f"tl.full(score.shape, {result}, tl.float32)"
    return writer.function(function, [*_parameters(mod, dialect), *(["early"] if early else [])], [f"return {result}"])


def _early(mod: ModPlan, dialect: Dialect) -> tuple[int, ...]:
    """Return the loads that a lowered mod receives as arguments.

    Hopper kernels have none. They overlap loads with the work of the other warpgroup.
    """
    return () if dialect.columns else early_loads(mod)


def early_loads(mod: ModPlan) -> tuple[int, ...]:
    """Return the loads per (q, kv) pair that can start before the score is computed: they need neither it nor a mask.

    A mask_mod has none. It is applied after the score is computed, and not in every tile.
    """
    if mod.role == "mask":
        return ()
    graph = mod.graph
    return tuple(i for i in mod.inside if varies_per_pair(graph, i) and not graph.dependence[i] & {"score", "grad"})


def lower_early_loads(mod: ModPlan, function: str, dialect: Dialect, streamed: str) -> str:
    """Return the text of a function of (b, h, q_idx, kv_idx, streamed) that returns the early loads as a tuple.

    `streamed` is the index that the loop iterates over, q_idx or kv_idx. The function also takes it as int64, for
    addresses.
    """
    writer = Writer(mod, dialect, streamed=streamed)
    values = [writer.value(i) for i in early_loads(mod)]
    return writer.function(function, ["b", "h", "q_idx", "kv_idx", "streamed"], [f"return ({', '.join(values)},)"])


def mod_parameters(graph: ModGraph) -> list[str]:
    """Return the parameters of a lowered mod. The score is unscaled, followed by its scale."""
    return [p for name in graph.inputs for p in ((name, "sm_scale") if name == "score" else (name,))]


def _parameters(mod: ModPlan, dialect: Dialect) -> list[str]:
    return [*mod_parameters(mod.graph), *(["near", "offset"] if dialect.columns else []), "live"]


@lru_cache(512)
def loads_where_live(mod: ModPlan) -> tuple[int, ...]:
    """Return the loads that a lowered mod masks by `live`: those per (q, kv) pair that may be out of bounds."""
    loads = mod.graph.loads.items()
    return tuple(i for i, node in loads if node.args and i not in mod.inside and _varies_by_score(mod.graph, i))


def _varies_by_score(graph: ModGraph, load: int) -> bool:
    return varies_per_pair(graph, load) or bool(graph.dependence[load] & {"score", "grad"})


class Writer:
    """Writes the nodes of a graph as Triton statements, each when it is first needed."""

    def __init__(
        self, mod: ModPlan, dialect: Dialect, early: tuple[int, ...] = (), streamed: str | None = None,
        bounded: bool = True,
    ) -> None:  # fmt: skip
        self.mod, self.graph, self.dialect, self.streamed = mod, mod.graph, dialect, streamed
        self.lines: list[str] = []
        self.names = {node: f"early[{i}]" for i, node in enumerate(early)}  # of nodes already written
        self.float_names: dict[int, str] = {}
        self.split: dict[str, tuple[str, str]] = {}  # by name of a sum with `offset`: the rest, the sign of `offset`
        self._unrolled: set[int] | None = None  # nodes whose distant operands are already written or being written
        self.checks: list[tuple[int, str]] = []  # (capture, condition that a load is in bounds), if checked
        if bounded and len(mod.graph.nodes) > MOST_OPERATIONS:
            found = f"{len(mod.graph.nodes)} operations in {mod.graph.name} {mod.graph.location}".rstrip()
            fix = "Store the values that its loops iterate over in a captured tensor and index it, or use CPU tensors."
            raise CompileError(message(f"{mod.role}_mod", found, f"at most {MOST_OPERATIONS} for a kernel", fix))
        self.limits: Sequence[tuple[Any, Any]] = (
            ranges(mod.graph) if bounded else ((None, None),) * len(mod.graph.nodes)
        )
        self.nonnegative = [
            i in mod.nonnegative or (low is not None and low >= 0 and mod.graph.nodes[i].dtype != torch.bool)
            for i, (low, _) in enumerate(self.limits)
        ]

    def function(self, name: str, inputs: list[str], body: list[str], extra: list[str] | None = None) -> str:
        parameters = ", ".join([*inputs, *self.mod.argument_names(), *(extra or [])])
        text = "\n".join(f"    {line}" for line in [*self.lines, *body])
        return f"@triton.jit\ndef {name}({parameters}):\n{text}\n"

    def varies(self, position: int) -> bool:
        """Return whether a node is a block (and not a scalar)."""
        return bool(self.graph.dependence[position] & {"q_idx", "kv_idx", "score", "grad"})

    def value(self, position: int) -> str:
        if position not in self.names:
            self._write_deep_operands(position)
            self.names[position] = self._write(self.graph.nodes[position], position)
        return self.names[position]

    def _write_deep_operands(self, position: int) -> None:
        """Write the operands of operands that are many operations away, innermost first.

        Operands are written recursively, and a chain of hundreds would exceed Python's recursion limit.
        """
        if self._unrolled is not None and position in self._unrolled:
            return
        stops = _stops(self.graph)
        if not stops:
            return
        needed = computed_from(self.graph, position)
        outer, self._unrolled = self._unrolled, needed
        for stop in stops:
            if stop in needed and stop != position and stop not in self.names:
                self.names[stop] = self._write(self.graph.nodes[stop], stop)
        self._unrolled = outer

    def assign(self, text: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def _write(self, node: Node, position: int) -> str:
        match node:
            case Input("score"):
                return self.assign("score * sm_scale")
            case Input(name):
                return name
            case NumberRef(number):
                return self.mod.number_name(number)
            case Const(value):
                return self._constant(value, node.dtype)
            case Load():
                return self._load(node, position)
        match node.op:
            case "cast":
                return self._cast(node)
            case "mul" | "div" if node.dtype.is_floating_point and not self.dialect.exact and self.varies(position):
                return self.product(position)
            case "mul" if self._must_round(node, position):
                return self.assign(f"product_{_kind(node)}({self.value(node.args[0])}, {self.value(node.args[1])})")
            case "floordiv" | "mod" | "fmod":
                return self._integer_division(node)
            case "shl" | "shr" if not self._is_shift(node):
                return self._call(node, f"shift_{'left' if node.op == 'shl' else 'right'}_int", 8 * node.dtype.itemsize)
            case "pow" if not node.dtype.is_floating_point:
                return self._call(node, "power_int", int(self.limits[node.args[1]][1]).bit_length())
        return self.assign(self._text(node).format(*(self.value(a) for a in node.args)))

    def _constant(self, value: Scalar, dtype: torch.dtype) -> str:
        if isinstance(value, float) and value == 0 and math.copysign(1, value) < 0 and dtype in _SIGN_BIT:
            return self.assign(_SIGN_BIT[dtype])
        return literal(value)

    def _call(self, node: Node, function: str, *constants: int) -> str:
        return self.assign(f"{function}({', '.join([*map(self.value, node.args), *map(str, constants)])})")

    def _is_shift(self, node: Node) -> bool:
        """Return whether a hardware shift supports this count. torch defines the result for other counts too."""
        low, high = self.limits[node.args[1]]
        return low is None or (low >= 0 and high < 8 * node.dtype.itemsize)  # bounding graphs check counts themselves

    def _must_round(self, node: Node, position: int) -> bool:
        """Return whether the compiler could contract a product and a sum to an FMA, which rounds once."""
        fuses = self.dialect.as_written and node.dtype in (torch.float32, torch.float64)
        return fuses and position in _summands(self.graph)

    def _text(self, node: Node) -> str:
        op, spec = node.op, OPS[node.op]
        if node.dtype == torch.float64 and op in _DOUBLE_TEXT:
            return _DOUBLE_TEXT[op]
        return spec.exact_triton if self.dialect.exact and spec.exact_triton else spec.triton

    def _cast(self, node: Node) -> str:
        source = self.graph.nodes[node.args[0]]
        if node.dtype == torch.float32 and not source.dtype.is_floating_point and self._in_float32(node.args[0]):
            return self._float_value(node.args[0])
        if isinstance(source, Const):
            return self._constant(source.value, node.dtype)
        if node.dtype == torch.bool:
            return self.assign(f"{self.value(node.args[0])} != 0")
        value = self.value(node.args[0])
        if source.op == "number" or _is_literal(value):
            # A lifted number has the type that fits its value. The cast gives the type that torch computes in. A
            # converted constant is still a literal, which has no `to` method.
            return self.assign(f"tl.cast({value}, tl.{TRITON_DTYPE[node.dtype]})")
        return self.assign(f"{value}.to(tl.{TRITON_DTYPE[node.dtype]})")

    def product(self, position: int, factor: str | None = None) -> str:
        """Write a chain of products and quotients, times `factor`. All scalar factors are multiplied first.

        A division by a scalar becomes a product with its reciprocal, and equal numerators and denominators cancel. This
        changes one or two roundings. An exact dialect keeps the chain as it is.
        """
        self._write_deep_operands(position)
        if self.dialect.exact:
            return self.value(position) if factor is None else self.assign(f"{self.value(position)} * {factor}")
        if factor is not None and (x := self._sum(position, factor)):
            return x
        varying, above, below = self._factors(position)
        for node in [n for n in above if n in below]:
            above.remove(node)
            below.remove(node)
        uniform = [factor] if factor else []
        uniform += [n if isinstance(n, str) else self.value(n) for n in above]
        scalar = " * ".join(uniform)
        if below:
            scalar = f"{scalar or '1.0'} / ({' * '.join(n if isinstance(n, str) else self.value(n) for n in below)})"
        if scalar:
            scalar = scalar if scalar.isidentifier() else self.assign(scalar)
            if len(varying) == 1 and varying[0] in self.split:
                rest, sign = self.split[varying[0]]
                return self.assign(f"{self.assign(f'{rest} * {scalar}')} {sign} offset.to(tl.float32) * {scalar}")
            varying = [*varying, scalar]
        return varying[0] if len(varying) == 1 else self.assign(" * ".join(varying))

    def _sum(self, position: int, factor: str) -> str | None:
        """Write a sum times `factor` as the sum of its scaled parts, if a part has scalar factors to merge with it."""
        node = self.graph.nodes[position]
        if node.op not in ("add", "sub") or position in self.names or not node.dtype.is_floating_point:
            return None
        if not any(above or below for _, above, below in map(self._factors, node.args)):
            return None
        x, y = (self.product(a, factor) for a in node.args)
        return self.assign(f"{x} {'+' if node.op == 'add' else '-'} {y}")

    def _factors(self, position: int) -> tuple[list[str], list[int | str], list[int | str]]:
        """Return (texts of block factors, scalar numerators, scalar denominators) of a chain of products."""
        node = self.graph.nodes[position]
        if not self.varies(position):
            return [], [position], []
        if isinstance(node, Input) and node.name == "score" and position not in self.names:
            return ["score"], ["sm_scale"], []
        used_once = uses(self.graph)[position] <= 1
        if node.op == "mul" and node.dtype.is_floating_point and used_once and position not in self.names:
            parts = [self._factors(a) for a in node.args]
            return parts[0][0] + parts[1][0], parts[0][1] + parts[1][1], parts[0][2] + parts[1][2]
        if node.op == "div" and used_once and position not in self.names:
            x, y = node.args
            varying, above, below = self._factors(x)
            if not self.varies(y):
                return varying, above, [*below, y]
        return [self._plain(position)], [], []

    def _plain(self, position: int) -> str:
        """Return the value of a node that is not part of a chain of products."""
        node = self.graph.nodes[position]
        if position not in self.names and node.op in ("mul", "div"):
            x, y = (self.value(a) for a in node.args)
            self.names[position] = self.assign(f"{x} {'*' if node.op == 'mul' else '/'} {y}")
        return self.value(position)

    def _integer_division(self, node: Node) -> str:
        x, y = (self.value(a) for a in node.args)
        whole = not node.dtype.is_floating_point
        if whole and all(self.nonnegative[a] for a in node.args):
            # Triton divides integers as C does, which equals Python's division if neither is negative.
            return self.assign(f"{x} // {y}" if node.op == "floordiv" else f"{x} % {y}")
        if whole and node.op == "fmod":
            return self.assign(f"{x} % {y}")
        return self.assign(self._text(node).format(x, y, kind=_kind(node)))

    def _load(self, node: Load, position: int) -> str:
        capture_position = node.capture
        name, capture = self.mod.capture_name(capture_position), self.graph.captures[capture_position]
        index = [self.wrapped(a, f"{name}_size{d}") for d, a in enumerate(node.args)]
        reads = self.graph.dependence[position]
        guarded = _varies_by_score(self.graph, position)
        address = self.address(node, index, name)
        # Unaligned rows are loaded element by element too. tl.load would do so through shared memory: 255 registers in
        # a forward of Swin windows (49 x 49 integers), with gathers 162.
        aligned = self.mod.layouts[capture_position].aligned
        scattered = bool(node.args) and ("q_idx" in self.graph.dependence[node.args[-1]] or not aligned)
        if not node.args or position in self.mod.inside:
            guard = "None"
        elif position in loads_where_live(self.mod) and not self.dialect.checked:
            guard = "live"
        else:
            guard = " & ".join(f"({i} >= 0) & ({i} < {name}_size{d})" for d, i in enumerate(index))
            if self.dialect.checked:
                guard = self.assign(guard)
                self.checks.append((capture_position, guard))
        if self.dialect.ptx and guarded and scattered and capture.dtype in _GATHERED and not reads & {"score", "grad"}:
            address = self._streamed_address(node, name) or address
            return self.assign(f"gather{8 * capture.dtype.itemsize}({address}, {guard})")
        text = f"tl.load({address})" if guard == "None" else f"tl.load({address}, mask={guard}, other=0)"
        return self._loaded(text, capture.dtype, guard == "live")

    def _loaded(self, text: str, dtype: torch.dtype, guarded_by_live: bool = False) -> str:
        if guarded_by_live:
            # Triton rejects `other` without a mask. live is None at compile time if all pairs are live.
            name = f"t{len(self.lines)}"
            bare = text.replace(", mask=live, other=0", "")
            self.lines.append(f"if live is None:\n        {name} = {bare}\n    else:\n        {name} = {text}")
        else:
            name = self.assign(text)
        return self.assign(f"{name} != 0") if dtype == torch.bool else name

    def wrapped(self, position: int, size: str) -> str:
        """Return an index expression with PyTorch's wrap-around, unless it is known to be non-negative."""
        value = self.value(position)
        node = self.graph.nodes[position]
        if isinstance(node, Const):
            return value if node.value >= 0 else self.assign(f"{value} + {size}")
        if self.nonnegative[position]:
            return value
        return self.assign(f"tl.where({value} < 0, {value} + {size}, {value})")

    def address(self, node: Load | RangeLoad, index: list[str], name: str) -> str:
        position = node.capture
        layout, ndim = self.mod.layouts[position], self.graph.captures[position].ndim
        unit = f" * {layout_unit(self.graph.captures[position].dtype)}" if layout.aligned else ""
        terms = [
            i if layout.dense and d == ndim - 1 else f"{self._wide(i) if layout.wide else i} * ({name}_stride{d}{unit})"
            for d, i in enumerate(index)
        ]
        return " + ".join([f"{name}_ptr", *(f"({t})" for t in terms)])

    def _streamed_address(self, node: Load, name: str) -> str | None:
        """Return the address of a load whose indices are sums, as an int64 sum with the streamed index first.

        The addresses of a thread then differ by constants, which are immediates of the instruction. This takes 1
        instruction per score instead of 4, and equal addresses are loaded once (for q_idx - kv_idx 18 of 32; 517
        instructions become 395).
        """
        sums = [affine(self.graph, a) for a in node.args]
        layout = self.mod.layouts[node.capture]
        if self.streamed is None or not layout.dense:
            return None
        uniform, streamed, own = [f"{name}_ptr"], [], []
        transposed = self.streamed == "q_idx"
        unit = f" * {layout_unit(self.graph.captures[node.capture].dtype)}" if layout.aligned else ""
        for d, form in enumerate(sums):
            if form is None:
                return None
            stride = "" if d == len(sums) - 1 else f" * ({name}_stride{d}{unit})"
            uniform += [f"{_times(factor, self._wide(self.value(n)))}{stride}" for n, factor in form.rest]
            of_streamed, of_own = (form.q, form.kv) if transposed else (form.kv, form.q)
            streamed += [f"{_times(of_streamed, 'streamed')}{stride}"] if of_streamed else []
            own += [f"{_times(of_own, self._wide('kv_idx' if transposed else 'q_idx'))}{stride}"] if of_own else []
        return " + ".join([*uniform, *streamed, *own])

    def _wide(self, index: str) -> str:
        return f"tl.cast({index}, tl.int64)"

    # Index arithmetic in float32. An int-to-float conversion per score has a quarter of the throughput of an add.

    def _in_float32(self, position: int) -> bool:
        """Return whether a node can be computed exactly in float32 from rows and columns."""
        return self.dialect.float_index and exact_in_float32(self.graph)[position]

    def _float_value(self, position: int) -> str:
        if position not in self.float_names:
            node = self.graph.nodes[position]
            if isinstance(node, Const):
                return repr(float(node.value))
            if isinstance(node, Input) and node.name == self.dialect.columns:
                return self._with_offset(position, self.assign("near.to(tl.float32)"), "+")
            if isinstance(node, Input):
                text = f"{node.name}.to(tl.float32)"
            elif node.op in ("add", "sub") and (split := self._split_sum(node)):
                return self._with_offset(position, *split)
            else:
                text = self._text(node).format(*(self._float_value(a) for a in node.args))
            self.float_names[position] = self.assign(text)
        return self.float_names[position]

    def _split_sum(self, node: Node) -> tuple[str, str] | None:
        """Return a sum with one split operand as (sum without `offset`, sign of `offset`), None if it has none."""
        x, y = (self._float_value(a) for a in node.args)
        sign = "+" if node.op == "add" else "-"
        if x in self.split and y not in self.split:
            return self.assign(f"{self.split[x][0]} {sign} {y}"), self.split[x][1]
        if y in self.split and x not in self.split:
            rest, of_offset = self.split[y]
            return self.assign(f"{x} {sign} {rest}"), "+" if sign == of_offset else "-"
        return None

    def _with_offset(self, position: int, rest: str, sign: str) -> str:
        name = self.assign(f"{rest} {sign} offset.to(tl.float32)")
        self.float_names[position] = name
        self.split[name] = rest, sign
        return name


_MOST_NESTED = 40  # recursion depth of operations


@lru_cache(64)
def _stops(graph: ModGraph) -> tuple[int, ...]:
    """Return nodes, ascending, so that at most _MOST_NESTED operations are between two of them, or one and a leaf."""
    height: list[int] = []
    found: list[int] = []
    for i, node in enumerate(graph.nodes):
        height.append(1 + max((height[a] for a in node.args), default=-1))
        if height[i] == _MOST_NESTED:
            found.append(i)
            height[i] = 0
    return tuple(found)


@lru_cache(64)
def _summands(graph: ModGraph) -> frozenset[int]:
    return frozenset(a for node in graph.nodes if node.op in ("add", "sub", "neg") for a in node.args)


def _times(factor: int, text: str) -> str:
    return {1: text, -1: f"(-{text})"}.get(factor, f"{factor} * {text}")


def _is_literal(text: str) -> bool:
    return text[0] in "-0123456789" or text in ("True", "False") or text.startswith('float("')


# Triton makes 0.0 of the literal -0.0.
_SIGN_BIT = {
    torch.float32: "tl.cast(-0x80000000, tl.int32).to(tl.float32, bitcast=True)",
    torch.float64: "tl.cast(-0x8000000000000000, tl.int64).to(tl.float64, bitcast=True)",
}


def literal(value: Scalar) -> str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return repr(value)
