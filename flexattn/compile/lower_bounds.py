"""lower_bounds: a mask's bounding graph -> text of a Triton function that bounds the mask over blocks.

The function is `bounds(b, h, q_block, kv_block, q_lo, q_hi, kv_lo, kv_hi, <captures>, <numbers>, <tables>)`. Query
blocks are rows `[n, 1]` and key blocks are columns `[1, n]`. It returns (surely true, maybe true) for each pair. The
minimum and maximum of a captured tensor over a range of indices are read from a precomputed table.
"""

from __future__ import annotations

import torch

from flexattn.compile.lower import Dialect, Writer, literal
from flexattn.compile.mod_plan import TRITON_DTYPE, TRITON_POINTER, ModPlan
from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.interval_bounds import bound
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Input, Load, Node, NumberRef, RangeLoad
from flexattn.process.frozen_class import frozen


@frozen
class TableSpec:
    """Minima and maxima of a captured tensor along one axis, [2, levels, other axes, entries].

    `own` is "q" (or "kv") if the index is q_idx (kv_idx). An entry then covers one block, and there is one level.
    Otherwise entry i of level k covers 2**k entries from i on, so two overlapping entries cover any range.
    """

    capture: int
    axis: int
    own: str | None

    def arguments(self, position: int, dtype: torch.dtype) -> tuple[tuple[str, str], ...]:
        """Return (name, Triton type) of each runtime argument."""
        name = f"table{position}"
        found = [
            (f"{name}_ptr", TRITON_POINTER[table_dtype(dtype)]),
            (f"{name}_rows", "i32"),
            (f"{name}_entries", "i32"),
        ]
        return tuple(found if self.own else [*found, (f"{name}_levels", "i32"), (f"{name}_shift", "i32")])


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a table, in which values of the captured tensor are bounded."""
    if dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


@frozen
class BoundsText:
    """A lowered bounding graph: the function and the tables that it reads."""

    text: str
    tables: tuple[TableSpec, ...]

    def arguments(self, graph: ModGraph) -> tuple[tuple[str, str], ...]:
        """Return (name, Triton type) of the arguments of all tables."""
        return tuple(a for i, t in enumerate(self.tables) for a in t.arguments(i, graph.captures[t.capture].dtype))


def lower_bounds(mod: ModPlan, dialect: Dialect) -> BoundsText:
    """Return the function `bounds` of a mask."""
    graph = _of_one_head(bound(mod.graph))
    writer = _BoxWriter(ModPlan(graph, mod.role, mod.layouts, mod.numbers), dialect)
    sure, maybe = (writer.value(o) for o in graph.outputs if o is not None)
    tables = tuple(writer.tables)
    lowered = BoundsText("", tables)
    inputs = ["b", "h", "q_block", "kv_block", "q_lo", "q_hi", "kv_lo", "kv_hi"]
    extra = [name for name, _ in lowered.arguments(mod.graph)]
    return BoundsText(writer.function("bounds", inputs, [f"return {sure}, {maybe}"], extra), tables)


def _of_one_head(graph: ModGraph) -> ModGraph:
    """Return the bounding graph for boxes with a single b and h: both ends are the same node."""
    same = {f"{name}_{end}": name for name in ("b", "h") for end in ("lo", "hi")}

    def one_head(builder: Builder, i: int, _: list[Expr]) -> Expr | None:
        match graph.nodes[i]:
            case Input(name) if name in same:
                return builder.input(same[name], torch.int64)
        return None

    return rewrite(graph, one_head, inputs=("b", "h", "q_lo", "q_hi", "kv_lo", "kv_hi"))


class _BoxWriter(Writer):
    def __init__(self, mod: ModPlan, dialect: Dialect) -> None:
        super().__init__(mod, dialect, bounded=False)
        self.tables: list[TableSpec] = []
        self._ranges: dict[tuple[int, tuple[int, ...]], tuple[str, str]] = {}

    def _write(self, node: Node, position: int) -> str:
        match node:
            case RangeLoad(op, capture):
                key = (capture, node.args)
                if key not in self._ranges:
                    self._ranges[key] = self._range(node)
                return self._ranges[key][op == "range_max"]
            case NumberRef(number):
                name = self.mod.number_name(number)
                return self.assign(f"tl.cast({name}, tl.{TRITON_DTYPE[node.dtype]})")
            case Load():
                loaded = super()._write(node, position)
                return (
                    loaded
                    if node.dtype == torch.bool
                    else self.assign(f"tl.cast({loaded}, tl.{TRITON_DTYPE[node.dtype]})")
                )
        return super()._write(node, position)

    def _range(self, node: RangeLoad) -> tuple[str, str]:
        """Write the minimum and maximum element over a box of indices; the whole range of the dtype if unknown."""
        capture = self.graph.captures[node.capture]
        name = self.mod.capture_name(node.capture)
        least, most = _limits(capture.dtype)
        pairs = list(zip(node.args[::2], node.args[1::2], strict=True))
        ranged = [axis for axis, (low, high) in enumerate(pairs) if low != high]
        if len(ranged) > 1:
            return ("False", "True") if capture.dtype == torch.bool else (literal(least), literal(most))
        inside, index = [], []
        for axis, (low, high) in enumerate(pairs):
            ok, wrapped = self._wrapped_range(low, high, f"{name}_size{axis}")
            inside.append(ok)
            index.append(wrapped)
        known = self.assign(" & ".join(inside))
        if not ranged:
            element = self._element(node, [low for low, _ in index], known)
            found = element, element
        else:
            found = self._from_table(node, ranged[0], index, known)
        low, high = (
            self.assign(f"tl.where({known}, {x}, {literal(end)})") for x, end in zip(found, (least, most), strict=True)
        )
        return (self.assign(f"{low} != 0"), self.assign(f"{high} != 0")) if capture.dtype == torch.bool else (low, high)

    def _wrapped_range(self, low: int, high: int, size: str) -> tuple[str, tuple[str, str]]:
        """Write whether a range of indices is in bounds of an axis, and the range after PyTorch's wrap-around."""
        first, last = self.value(low), self.value(high)
        if self._own(low, high):
            return f"({last} < {size})", (first, last)
        if low == high:
            value = self.assign(f"tl.where({first} < 0, {first} + {size}, {first})")
            return f"({value} >= 0) & ({value} < {size})", (value, value)
        ok = f"({first} >= -{size}) & ({last} < {size})"
        mixed = self.assign(f"({first} < 0) & ({last} >= 0)")
        first = self.assign(f"tl.where({mixed}, 0, tl.where({first} < 0, {first} + {size}, {first}))")
        last = self.assign(f"tl.where({mixed}, {size} - 1, tl.where({last} < 0, {last} + {size}, {last}))")
        return ok, (first, last)

    def _own(self, low: int, high: int) -> str | None:
        """Return "q" (or "kv") if a range is the index range of the block."""
        match self.graph.nodes[low], self.graph.nodes[high]:
            case Input("q_lo"), Input("q_hi"):
                return "q"
            case Input("kv_lo"), Input("kv_hi"):
                return "kv"
        return None

    def _element(self, node: RangeLoad, index: list[str], known: str) -> str:
        address = self.address(node, index, self.mod.capture_name(node.capture))
        dtype = TRITON_DTYPE[table_dtype(self.graph.captures[node.capture].dtype)]
        return self.assign(f"tl.load({address}, mask={known}, other=0).to(tl.{dtype})")

    def _from_table(self, node: RangeLoad, axis: int, index: list[tuple[str, str]], known: str) -> tuple[str, str]:
        capture = node.capture
        own = self._own(*node.args[2 * axis : 2 * axis + 2])
        spec = TableSpec(capture, axis, own)
        if spec not in self.tables:
            self.tables.append(spec)
        table = f"table{self.tables.index(spec)}"
        row = "0"
        for d, (first, _) in enumerate(index):
            if d != axis:
                row = first if row == "0" else f"({row} * {self.mod.capture_name(capture)}_size{d} + {first})"
        row = self.assign(f"tl.cast({row}, tl.int64)")
        if own:
            at = self.assign(f"{table}_ptr + {row} * {table}_entries + {own}_block")
            other = f"tl.cast({table}_rows, tl.int64) * {table}_entries"
            return (
                self.assign(f"tl.load({at}, mask={known}, other=0)"),
                self.assign(f"tl.load({at} + {other}, mask={known}, other=0)"),
            )
        low, high = index[axis]
        name = f"r{len(self.lines)}"
        arguments = f"{table}_ptr, {table}_rows, {table}_entries, {table}_levels, {table}_shift"
        self.lines.append(f"{name}_low, {name}_high = range_of({arguments}, {row}, {low}, {high}, {known})")
        # An entry of a coarse table covers many elements. A range of one element is read exactly.
        single = self.assign(f"{known} & ({low} == {high}) & ({table}_shift > 0)")
        element = self._element(node, [p for p, _ in index], single)
        return (
            self.assign(f"tl.where({single}, {element}, {name}_low)"),
            self.assign(f"tl.where({single}, {element}, {name}_high)"),
        )


def _limits(dtype: torch.dtype) -> tuple[int | float, int | float]:
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        return -float("inf"), float("inf")
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max
