"""packed: sequences packed end to end in one row of query and key -> a mask and mods of one long sequence.

Query q of the long sequence belongs to sequence `sequence[q]`, and its keys are [k_start[q], k_end[q]). The mods are
rewritten from positions in a sequence to rows of the long one. The block lists follow from the interval of keys that
each row attends to. All of it is computed on the device, with sizes that depend on shapes alone: the host does not
wait, and a CUDA graph may contain it. No array has a size of queries x keys, except for one bool per pair of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask, RunLists, Runs, Seen, is_same, seen
from flexattn.call.layout import check_integers
from flexattn.errors import ArgumentError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.linear import Linear
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import MASK_INPUTS, Capture
from flexattn.graph.ranges import INDEX_LIMIT
from flexattn.graph.row_bounds import Both, Complement, Condition, Either, RowInterval, Solved, WholeRows, row_bounds
from flexattn.mods.combine import noop_mask
from flexattn.process.forks import Lock
from flexattn.torch_state.transforms import outside

BLOCK = 128
LONGEST = INDEX_LIMIT // 2  # rows of the long sequence: sums of three indices stay below 2**31
_REMEMBERED = 16


@dataclass(frozen=True, eq=False)
class Packing:
    """Which sequence each query belongs to, and where the keys of this sequence are: int32 [T_q] each.

    Rows after the last sequence have no keys.
    """

    sequence: Tensor
    position: Tensor  # of the query in its sequence
    k_start: Tensor
    k_end: Tensor
    diagonal: Tensor  # the key of the same position, if the last query and the last key of a sequence are aligned

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.sequence, self.position, self.k_start, self.k_end, self.diagonal


_CAPTURES = tuple(Capture(name, torch.int32, 1) for name in Packing.__dataclass_fields__)


@torch.no_grad()
def packing_of(cu_seq_q: Tensor, cu_seq_k: Tensor, used: Tensor | None, T_q: int) -> Packing:
    """Return the packing of sequences whose rows begin at `cu_seq_q` and `cu_seq_k`, int32 [sequences + 1]."""
    with outside():
        row = torch.arange(T_q, dtype=torch.int32, device=cu_seq_q.device)
        sequence = torch.searchsorted(cu_seq_q[1:], row, right=True, out_int32=True)
        last = cu_seq_q.size(0) - 2
        exists = sequence <= last
        index = sequence.clamp(max=last).long()
        position = row - cu_seq_q[index]
        k_start = cu_seq_k[index]
        k_end = cu_seq_k[index + 1] if used is None else k_start + used[index]
        diagonal = k_end - cu_seq_q[index + 1] + row
        zero = torch.zeros((), dtype=torch.int32, device=row.device)
        found = (index.int(), position, k_start, k_end, diagonal)
        return Packing(*(torch.where(exists, x, zero) for x in found))


def packed_score(bound: BoundMod, packing: Packing) -> BoundMod:
    """Return a score_mod of positions in sequences as one of rows."""
    graph, first = _at_rows(bound.graph), len(bound.captures)
    return BoundMod(graph, (*bound.captures[:first], *packing.tensors), bound.numbers)


def packed_mask(bound: BoundMod | None, packing: Packing, window: tuple[int, int]) -> BoundMod:
    """Return the mask of the sequences as one of rows: same sequence, in the window, and `bound` if it is not None."""
    captures, numbers = ((), ()) if bound is None else (bound.captures, bound.numbers)
    graph = _mask_at_rows(None if bound is None else bound.graph, window)
    return BoundMod(graph, (*captures, *packing.tensors), numbers)


class _Rows:
    """Appends the columns of a Packing at row q_idx to a builder."""

    def __init__(self, builder: Builder, first: int) -> None:
        self.builder, self.first = builder, first
        self.q_idx, self.kv_idx = (builder.input(name, torch.int32) for name in ("q_idx", "kv_idx"))

    def of(self, name: str) -> Expr:
        """Return the column, with limits that prove that sums with indices do not wrap around."""
        position = self.first + [c.name for c in _CAPTURES].index(name)
        found = self.builder.load(position, torch.int32, [self.q_idx])
        low = -LONGEST if name == "diagonal" else 0
        return found.apply("maximum", low).apply("minimum", LONGEST)

    def of_input(self, name: str) -> Expr | None:
        """Return what replaces an input of a mod."""
        match name:
            case "b":
                return self.of("sequence")
            case "q_idx":
                return self.of("position")
            case "kv_idx":
                return self.kv_idx - self.of("k_start")
        return None


@lru_cache(512)
def _at_rows(graph: ModGraph) -> ModGraph:
    first = len(graph.captures)

    def moved(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        found = _moved_input(_Rows(builder, first), graph, i)
        return found if found is None else found.cast(graph.nodes[i].dtype)

    return rewrite(graph, moved, captures=(*graph.captures, *_CAPTURES))


def _moved_input(rows: _Rows, graph: ModGraph, i: int) -> Expr | None:
    name = next((name for name in ("b", "q_idx", "kv_idx") if graph.is_input(i, name)), None)
    return None if name is None else rows.of_input(name)


@lru_cache(512)
def _mask_at_rows(graph: ModGraph | None, window: tuple[int, int]) -> ModGraph:
    captures = () if graph is None else graph.captures
    builder = Builder()
    rows = _Rows(builder, len(captures))
    left, right = window
    keep = (rows.kv_idx >= rows.of("k_start")).apply("and", rows.kv_idx < rows.of("k_end"))
    if left >= 0:
        keep = keep.apply("and", rows.kv_idx >= rows.of("diagonal") - min(left, LONGEST))
    if right >= 0:
        keep = keep.apply("and", rows.kv_idx <= rows.of("diagonal") + min(right, LONGEST))
    if graph is not None:
        keep = keep.apply("and", _asked_in_sequence(builder, rows, graph, keep))
    name, location, numbers = ("varlen", "", ()) if graph is None else (graph.name, graph.location, graph.numbers)
    return builder.build(name, MASK_INPUTS, (*captures, *_CAPTURES), numbers, [keep], location=location)


def _asked_in_sequence(builder: Builder, rows: _Rows, graph: ModGraph, keep: Expr) -> Expr:
    """Append the graph, with its loads per (q, kv) pair at index 0 for keys of other sequences."""

    def moved(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        found = _moved_input(rows, graph, i)
        load = graph.loads.get(i)
        if found is not None or load is None or "kv_idx" not in graph.dependence[i]:
            return found if found is None else found.cast(graph.nodes[i].dtype)
        index = [keep.apply("where", made[a], builder.const(0, made[a].dtype)) for a in load.args]
        return builder.load(load.capture, load.dtype, index)

    return builder.copy(graph, moved)[graph.output]


def mask_of_rows(bound: BoundMod, lengths: tuple[int, int], H: int, both: bool) -> BlockMask:
    """Return the block lists of a packed mask, from the intervals of its rows. `both`: for a backward too."""
    with outside(), torch.no_grad():
        low, high, exact = _intervals(bound, lengths, H if bound.graph.reads("h") else 1)
        begin, end, full_begin, full_end = _blocks(low, high, lengths[1], exact)
        columns = -(-lengths[1] // BLOCK)
        kv_runs = _lists(begin, end, full_begin, full_end)
        q_runs = None
        if both:
            q_runs = _lists(*_transposed(begin, end, full_begin, full_end, columns))
        mask = BlockMask.from_runs(kv_runs, q_runs, 1, begin.size(0), lengths, BLOCK, noop_mask, full_overhangs=False)
        mask._built_from_mod = True
        return mask


def _intervals(bound: BoundMod, lengths: tuple[int, int], H: int) -> tuple[Tensor, Tensor, bool]:
    """Return the first key and the last + 1 that each row may attend to, [H, T_q], and whether it attends to all."""
    T_q, T_k = lengths
    graph, device = bound.graph, bound.captures[-1].device
    tree = row_bounds(graph, "kv_idx")
    inputs: dict[str, Tensor] = {
        "b": torch.zeros((), dtype=torch.int32, device=device),
        "h": torch.arange(H, dtype=torch.int32, device=device)[:, None],
        "q_idx": torch.arange(T_q, dtype=torch.int32, device=device),
        "kv_idx": torch.zeros((), dtype=torch.int32, device=device),
    }
    wanted = sorted(_nodes_of(tree))
    values = dict(zip(wanted, graph.evaluate(inputs, bound.captures, bound.numbers, outputs=wanted), strict=True))
    low, high, exact = _ends(tree, values, torch.zeros((), dtype=torch.int64, device=device))
    shape = (H, T_q)
    low = torch.zeros(shape, dtype=torch.int64, device=device) if low is None else low.clamp(0, T_k).expand(shape)
    high = low.new_full(shape, T_k) if high is None else high.clamp(0, T_k).expand(shape)
    return low, high, exact


def _nodes_of(tree: RowInterval) -> set[int]:
    match tree:
        case Solved(_, bound):
            return {n for n, _ in bound.terms}
        case WholeRows(node):
            return {node}
        case Complement(of):
            return _nodes_of(of)
        case Both(x, y) | Either(x, y):
            return _nodes_of(x) | _nodes_of(y)
        case Condition():
            return set()


_FAR = 2**40
Ends = tuple[Tensor | None, Tensor | None, bool]


def _ends(tree: RowInterval, values: dict[int, Any], zero: Tensor) -> Ends:
    """Return the ends of an interval, None where it has none, and whether it is all of the mask."""
    match tree:
        case Solved(side, bound):
            found = _sum_of(bound, values, zero)
            return (found, None, True) if side == "low" else (None, found, True)
        case WholeRows(node):
            return None, torch.where(values[node], zero + _FAR, zero - _FAR), True
        case Condition():
            return None, None, False
        case Complement(of):
            low, high, exact = _ends(of, values, zero)
            return high, low, exact
        case Both(x, y):
            (low, high, exact), (other_low, other_high, other_exact) = (_ends(t, values, zero) for t in (x, y))
            return (
                _either(torch.maximum, low, other_low),
                _either(torch.minimum, high, other_high),
                exact and other_exact,
            )
        case Either(x, y):
            (low, high, exact), (other_low, other_high, other_exact) = (_ends(t, values, zero) for t in (x, y))
            both_low = None if low is None or other_low is None else torch.minimum(low, other_low)
            both_high = None if high is None or other_high is None else torch.maximum(high, other_high)
            return both_low, both_high, exact and other_exact


def _sum_of(bound: Linear, values: dict[int, Any], zero: Tensor) -> Tensor:
    total = zero + bound.constant
    for node, factor in bound.terms:
        total = total + factor * values[node].long()
    return total


def _either(function: Any, x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return x if y is None else y if x is None else function(x, y)


def _blocks(low: Tensor, high: Tensor, T_k: int, exact: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the blocks [begin, end) of each row of blocks, and the full ones in them, [H, rows of blocks] each."""
    H, T_q = low.shape
    rows = -(-T_q // BLOCK) * BLOCK - T_q
    lives = low < high
    pad = torch.nn.functional.pad

    def blocks(x: Tensor, fill: int) -> Tensor:
        return pad(x, (0, rows), value=fill).view(H, -1, BLOCK)

    begin = blocks(torch.where(lives, low, _FAR), _FAR).amin(-1)
    end = blocks(torch.where(lives, high, 0), 0).amax(-1)
    end = (end + BLOCK - 1) // BLOCK
    begin = torch.minimum(begin // BLOCK, end)
    if not exact:
        return begin, end, end, end
    full_begin = (blocks(low, 0).amax(-1) + BLOCK - 1) // BLOCK
    full_end = blocks(torch.where(lives, high, 0), _FAR).amin(-1) // BLOCK
    none = full_end <= full_begin
    return begin, end, torch.where(none, end, full_begin), torch.where(none, end, full_end)


def _lists(begin: Tensor, end: Tensor, full_begin: Tensor, full_end: Tensor) -> RunLists:
    """Return lists with two partial runs and one full run per row of blocks. Runs may be empty."""
    heads, rows = begin.shape
    places = torch.arange(heads * rows + 1, dtype=torch.int32, device=begin.device)
    partial = torch.stack((begin, full_begin, full_end, end), -1).int().view(-1, 2)
    full = torch.stack((full_begin, full_end), -1).int().view(-1, 2)
    order = (end - begin).argsort(dim=-1, descending=True, stable=True).int()
    return RunLists(Runs(places * 2, partial), Runs(places, full), order)


def _transposed(
    begin: Tensor, end: Tensor, full_begin: Tensor, full_end: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same for columns: all rows from the first to the last with this column. Others are partial too."""
    column = torch.arange(columns, device=begin.device)[None, :, None]

    def hull(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        holds = (first[:, None] <= column) & (column < last[:, None])  # [H, columns, rows]
        count = holds.sum(-1)
        if holds.size(-1) == 0:
            return count, count, count
        start = holds.byte().argmax(-1)
        stop = holds.size(-1) - holds.flip(-1).byte().argmax(-1)
        return torch.where(count > 0, start, 0), torch.where(count > 0, stop, 0), count

    start, stop, _ = hull(begin, end)
    full_start, full_stop, count = hull(full_begin, full_end)
    whole = (count > 0) & (count == full_stop - full_start)
    return start, stop, torch.where(whole, full_start, stop), torch.where(whole, full_stop, stop)


class _At(NamedTuple):
    """A tensor that a result was computed from: a weak reference, its version and its address."""

    seen: Seen
    address: int

    def holds(self, tensor: Tensor) -> bool:
        return is_same(self.seen, tensor) and tensor.data_ptr() == self.address


class Memory:
    """The latest results for tensors, found by the tensors themselves at the same version.

    Tensors of inference mode have no version, so nothing is kept for them. The results must not refer to the tensors.
    """

    def __init__(self) -> None:
        self.found: OrderedDict[object, tuple[tuple[_At, ...], Any]] = OrderedDict()
        self.lock = Lock()

    def get(self, key: object, tensors: tuple[Tensor, ...], make: Any) -> Any:
        """Return make(), or the earlier result for this key and these tensors. CUDA graphs capture make()."""
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return make()
        known = self.known(key, tensors)
        if known is not None:
            return known[0]
        made, key = make(), (key, *map(id, tensors))
        if any(t.is_inference() for t in tensors):
            return made
        with self.lock:
            for other in [k for k, (at, _) in self.found.items() if any(x.seen[0]() is None for x in at)]:
                del self.found[other]
            self.found[key] = tuple(_At(seen(t), t.data_ptr()) for t in tensors), made
            self.found.move_to_end(key)
            while len(self.found) > _REMEMBERED:
                self.found.popitem(last=False)
        return made

    def known(self, key: object, tensors: tuple[Tensor, ...]) -> tuple[Any] | None:
        """Return the earlier result in a tuple, or None."""
        key = (key, *map(id, tensors))
        with self.lock:
            known = self.found.get(key)
        if known is None or not all(x.holds(t) for x, t in zip(known[0], tensors, strict=True)):
            return None
        return (known[1],)


packings, masks = Memory(), Memory()


class PackedArguments(NamedTuple):
    """The arguments of `varlen_attn` that describe packed sequences, unchecked."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    window_size: tuple[int, int] = (-1, -1)
    mask_mod: Any = None
    seqused_q: Tensor | None = None  # rows of query from there on are holes, without keys
    seqused_k: Tensor | None = None


def check_packed(given: PackedArguments, query: Tensor, key: Tensor) -> None:
    """Check lengths and offsets against query [1, Hq, T_q, D] and key [1, Hkv, T_k, D]."""
    for name, cu, rows in (("cu_seq_q", given.cu_seq_q, query.size(2)), ("cu_seq_k", given.cu_seq_k, key.size(2))):
        check_integers(name, cu, query, 1)
        if cu.size(0) < 2 or cu.size(0) != given.cu_seq_q.size(0):
            found = f"{cu.size(0)} entries"
            expected = "one more than sequences, at least 2" if name == "cu_seq_q" else f"{given.cu_seq_q.size(0)}"
            raise ArgumentError(message(name, found, expected, "Give 0 and the end of each sequence."))
        if rows > LONGEST:
            mend = "Split the batch."
            raise ArgumentError(
                message("query" if name == "cu_seq_q" else "key", f"{rows} rows", f"at most {LONGEST}", mend)
            )
        _check_ascending(name, cu, rows)
    for name, most, cu in (("max_q", given.max_q, given.cu_seq_q), ("max_k", given.max_k, given.cu_seq_k)):
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            raise ArgumentError(message(name, repr(most), "the length of the longest sequence", "Pass an int."))
        longest = int(cu.diff().max()) if cu.is_cpu else 0
        if longest > most:
            mend = f"Pass {name}={longest}, or any larger number."
            raise ArgumentError(message(name, most, f"at least the length of the longest sequence, {longest}", mend))
    check_window(given.window_size)
    if given.seqused_k is not None:
        check_integers("seqused_k", given.seqused_k, query, 1)
        _check_used(given.seqused_k, given.cu_seq_k)


def check_window(window: object) -> None:
    """Check window_size: how many keys before and after its own a query attends to, -1 for all."""
    good = isinstance(window, (tuple, list)) and len(window) == 2
    if not good or any(not isinstance(x, int) or x < -1 for x in window):  # type: ignore[attr-defined]
        mend = "(-1, 0) is causal, (255, 0) a causal window of 256."
        raise ArgumentError(message("window_size", repr(window), "two ints from -1 on", mend))


def _check_ascending(name: str, cu: Tensor, rows: int) -> None:
    """Check values on the CPU. On a GPU an assertion in a kernel fails, which the host does not wait for."""
    if cu.is_cpu:
        first, last, ascends = int(cu[0]), int(cu[-1]), bool((cu.diff() >= 0).all())
        if first != 0 or last > rows or not ascends:
            found = (
                f"values that start at {first}" if first else f"an end at {last}" if ascends else "descending values"
            )
            mend = "Pass the cumulative sum of the lengths, with 0 in front."
            raise ArgumentError(message(name, found, f"ascending values from 0 to at most {rows}", mend))
    else:
        text = f"varlen_attn: {name} must ascend from 0 to at most {rows}"
        assert_once(text, (cu,), lambda cu: (cu.diff() >= 0).all() & (cu[0] == 0) & (cu[-1] <= rows))


def assert_once(text: str, tensors: tuple[Tensor, ...], condition: Callable[..., Tensor]) -> None:
    """Let a kernel assert condition(*tensors), once for these tensors at this version, but in no CUDA graph."""
    if not torch.cuda.is_current_stream_capturing():
        _assertions.get(text, tensors, lambda: torch.ops.aten._assert_async.msg(condition(*tensors), text))


def _check_used(used: Tensor, cu: Tensor) -> None:
    if used.size(0) != cu.size(0) - 1:
        mend = "Give one length per sequence."
        raise ArgumentError(message("seqused_k", f"shape {list(used.shape)}", f"[{cu.size(0) - 1}]", mend))
    if used.is_cpu and bool(((used < 0) | (used > cu.diff())).any()):
        mend = "A sequence cannot use more keys than it has."
        raise ArgumentError(message("seqused_k", "an entry out of range", "0 to the lengths in cu_seq_k", mend))


@dataclass(frozen=True, eq=False)
class Packed:
    """The checked arguments of packed sequences."""

    packing: Packing
    window: tuple[int, int]
    used_rows: Tensor | None  # bool [T_k]: which rows of key hold a token that is used; None: all

    @staticmethod
    def of(given: PackedArguments, query: Tensor, key: Tensor) -> Packed:
        """Check the arguments and compute the packing, once for the same tensors."""
        check_packed(given, query, key)
        used_q, used_k = given.seqused_q, given.seqused_k
        tensors = tuple(t for t in (given.cu_seq_q, given.cu_seq_k, used_q, used_k) if t is not None)
        T_q, T_k = query.size(2), key.size(2)

        def make() -> tuple[Packing, Tensor | None]:
            packing = packing_of(given.cu_seq_q, given.cu_seq_k, used_k, T_q)
            if used_q is not None:
                hole = packing.position >= used_q[packing.sequence]
                packing = replace(packing, k_end=torch.where(hole, packing.k_start, packing.k_end))
            return packing, None if used_k is None else _used_rows(given.cu_seq_k, used_k, T_k)

        packing, rows = packings.get((T_q, T_k, used_q is None, used_k is None), tensors, make)
        return Packed(packing, tuple(given.window_size), rows)  # type: ignore[arg-type]

    @staticmethod
    def known(given: PackedArguments, T_q: int, T_k: int) -> Packed | None:
        """Return the packing of a call without lengths, if it is known from an earlier call. Nothing is checked."""
        window = given.window_size
        if given.seqused_q is not None or given.seqused_k is not None:
            return None
        if type(window) is not tuple or [type(x) for x in window] != [int, int]:
            return None
        found = packings.known((T_q, T_k, True, True), (given.cu_seq_q, given.cu_seq_k))
        return None if found is None else Packed(found[0][0], window, None)

    def tensors_of(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return key and value with 0 in rows that are not used. They may be NaN, and share tiles with used rows."""
        if self.used_rows is None:
            return key, value
        unused = ~self.used_rows[:, None]
        return key.masked_fill(unused, 0.0), value.masked_fill(unused, 0.0)

    def blocks_of(self, mask: BoundMod, lengths: tuple[int, int], H: int, both: bool) -> BlockMask:
        """Return the block lists of a packed mask, computed once for the same tensors."""
        key = (mask.graph, mask.numbers, lengths, H, both)
        return masks.get(key, mask.captures, lambda: mask_of_rows(mask, lengths, H, both))

    @staticmethod
    def known_blocks(mask: BoundMod, lengths: tuple[int, int], H: int, both: bool) -> BlockMask | None:
        """Return the same, if they are known from an earlier call."""
        found = masks.known((mask.graph, mask.numbers, lengths, H, both), mask.captures)
        return None if found is None else found[0]


@torch.no_grad()
def _used_rows(cu: Tensor, used: Tensor, rows: int) -> Tensor:
    with outside():
        row = torch.arange(rows, dtype=torch.int32, device=cu.device)
        index = torch.searchsorted(cu[1:], row, right=True)
        last = cu.size(0) - 2
        exists, index = index <= last, index.clamp(max=last)
        return exists & (row - cu[index] < used[index])


_assertions = Memory()
