"""packed: sequences packed end to end in one row of query and key -> a mask and mods of one long sequence.

Query q of the long sequence belongs to sequence `sequence[q]`, and its keys are [k_start[q], k_end[q]). The mods are
rewritten from positions in a sequence to rows of the long one. The block lists follow from the interval of keys that
each row attends to. All of it is computed on the device, with sizes that depend on shapes alone: the host does not
wait, and a CUDA graph may contain it. No array has a size of queries x keys, except for one bool per pair of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask, Seen, is_same, seen
from flexattn.call.layout import check_integers
from flexattn.call.packed_lists import mask_of_rows
from flexattn.call.packing import LONGEST, Packing, packing_of
from flexattn.errors import ArgumentError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import MASK_INPUTS, Capture
from flexattn.process.forks import Lock
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.transforms import outside

_REMEMBERED = 16


_CAPTURES = tuple(Capture(name, torch.int32, 1) for name in Packing.__dataclass_fields__)


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
    keep = rows.kv_idx >= rows.of("k_start")
    if right != 0:  # otherwise the diagonal is before k_end. A load for each row less: 64 x 256 causal 117 -> 109 us
        keep = keep.apply("and", rows.kv_idx < rows.of("k_end"))
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
        if _is_capturing(tensors):
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
        if _is_capturing(tensors):
            return None
        key = (key, *map(id, tensors))
        with self.lock:
            known = self.found.get(key)
        if known is None or not all(x.holds(t) for x, t in zip(known[0], tensors, strict=True)):
            return None
        return (known[1],)


def _is_capturing(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a CUDA graph is captured. Its tensors may change between replays."""
    return tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()


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
    """Check values on the CPU. On a GPU a kernel of `packing_of` asserts them, which the host does not wait for."""
    if cu.is_cpu:
        first, last, ascends = int(cu[0]), int(cu[-1]), bool((cu.diff() >= 0).all())
        if first != 0 or last > rows or not ascends:
            found = (
                f"values that start at {first}" if first else f"an end at {last}" if ascends else "descending values"
            )
            mend = "Pass the cumulative sum of the lengths, with 0 in front."
            raise ArgumentError(message(name, found, f"ascending values from 0 to at most {rows}", mend))


def assertions(T_q: int, T_k: int) -> tuple[str, str] | None:
    """Return messages of assertions about cu_seq_q and cu_seq_k; None in a CUDA graph, where nothing is asserted."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    return (
        f"varlen_attn: cu_seq_q must ascend from 0 to at most {T_q}",
        f"varlen_attn: cu_seq_k must ascend from 0 to at most {T_k}",
    )


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


@frozen(eq=False)
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
            packing = packing_of(given.cu_seq_q, given.cu_seq_k, used_q, used_k, (T_q, T_k), assertions(T_q, T_k))
            return packing, None if used_k is None else _used_rows(given.cu_seq_k, used_k, T_k)

        packing, rows = packings.get((T_q, T_k, used_q is None, used_k is None), tensors, make)
        return Packed(packing, tuple(given.window_size), rows)  # type: ignore[arg-type]

    @staticmethod
    def without_lengths(given: PackedArguments, query: Tensor, key: Tensor) -> Packed | None:
        """Return the packing of a call without used lengths, otherwise None. Known ones are not checked again."""
        window = given.window_size
        if given.seqused_q is not None or given.seqused_k is not None:
            return None
        if type(window) is not tuple or [type(x) for x in window] != [int, int]:
            return None
        if not isinstance(given.cu_seq_q, Tensor) or not isinstance(given.cu_seq_k, Tensor):
            return None
        found = packings.known((query.size(2), key.size(2), True, True), (given.cu_seq_q, given.cu_seq_k))
        return Packed.of(given, query, key) if found is None else Packed(found[0][0], window, None)

    def tensors_of(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return key and value with 0 in rows that are not used. They may be NaN, and share tiles with used rows."""
        if self.used_rows is None:
            return key, value
        unused = ~self.used_rows[:, None]
        return key.masked_fill(unused, 0.0), value.masked_fill(unused, 0.0)

    def blocks_of(self, mask: BoundMod, lengths: tuple[int, int], H: int, both: bool) -> BlockMask:
        """Return the block lists of a packed mask, computed once for the same tensors."""
        window = self.window if mask.graph == _mask_at_rows(None, self.window) else None
        key = (mask.graph, mask.numbers, lengths, H, both)
        return masks.get(key, mask.captures, lambda: mask_of_rows(mask, self.packing, window, lengths, H, both))


@torch.no_grad()
def _used_rows(cu: Tensor, used: Tensor, rows: int) -> Tensor:
    with outside():
        row = torch.arange(rows, dtype=torch.int32, device=cu.device)
        index = torch.searchsorted(cu[1:], row, right=True)
        last = cu.size(0) - 2
        exists, index = index <= last, index.clamp(max=last)
        return exists & (row - cu[index] < used[index])


_assertions = Memory()
