"""on_gpu: the run lists of a mask, built by generated kernels on the device of its captured tensors.

The launches are range tables, classification, then count, scan and fill (for a small mask, all three at once). The host
waits once, to read the number of runs. If bounds and samples leave undecided blocks, these are evaluated, and the host
waits a second time. If the maximum number of runs takes little memory, everything is launched before the host waits.
If the mask_mod is expensive, another launch evaluates the pairs of partial blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask import BuildCounts, BuiltMask, LaterRunLists
from flexattn.block_mask.bits import BLOCK_WORDS, MaskBits
from flexattn.block_mask.one_tensor import with_symbols
from flexattn.errors import IndexRangeError, message, mod_in_messages
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import EqualRuns
from flexattn.machine.target import Target, processors, target_of
from flexattn.mask_build.boxes import MOST_RUNS, too_many_runs
from flexattn.mask_build.kernels import MaskPlan
from flexattn.mask_build.launch_plan import Recipe, Sizes, Step, TableRecipe, as_argument, bits_step, recipe_of
from flexattn.mask_build.pair_bits import NO_PARTIAL, bits_of_memory, impossible, size_of_halves, unwanted
from flexattn.process.events import fallback
from flexattn.process.progress import announce
from flexattn.runtime.build import build, current_stream

_MOST_WORDS = 2**25  # of 32 blocks: the bits of five kinds take 640 MiB
_PROGRAMS = 16  # programs per multiprocessor that search for blocks to evaluate


@functools.lru_cache(256)
def fits(sizes: Sizes, block_size: tuple[int, int]) -> bool:
    """Return whether the kernels support a mask of this size: it has blocks, and not too many."""
    B, H, Q, KV = sizes
    q_blocks, kv_blocks = -(-Q // block_size[0]), -(-KV // block_size[1])
    return 0 < B * H * max(q_blocks * -(-kv_blocks // 32), kv_blocks * -(-q_blocks // 32)) <= _MOST_WORDS


def build_lists(
    plan: MaskPlan, bound: BoundMod, sizes: Sizes, block_size: tuple[int, int], device: torch.device, separate: bool
) -> BuiltMask:
    """Return the blocks of a mask over `sizes` (B, H, Q, KV), as query rows and as key rows.

    `bound` is on `device`; no size is 0. If `separate` is False, full blocks become partial.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return build_lists(plan, bound, sizes, block_size, device, separate)
    target = target_of(device)
    captures = tuple([(t.shape, t.stride()) for t in bound.captures])
    recipe = recipe_of(plan, captures, sizes, block_size, separate, target)
    with _Build(recipe, bound, device, target) as running:
        running.launch()
        *totals, open_blocks, descends, blocks = running.wait()
        if open_blocks:
            announce(open_blocks, open_blocks * math.prod(block_size))
            running.evaluate(Step(build(plan.evaluate, target), _programs(recipe, device), recipe.evaluated))
            *totals, _, _, blocks = running.wait()
            if outside := running.outside():
                raise _outside(bound, outside)
        if max(totals) > MOST_RUNS:
            q_rows, kv_rows = recipe.rows
            raise too_many_runs((*sizes[:2], q_rows // recipe.heads, kv_rows // recipe.heads), block_size)
        kept = running.kept
        memory, begin, runs = kept, recipe.kept[2], running.runs
        if not recipe.has_room:
            memory, begin = _allocate(2 * sum(totals), device), 0
            runs = as_argument(memory, target)
            running.fill(runs)
    by_query, by_key = (
        LaterRunLists(
            functools.partial(_views, kept, memory, (recipe.kept[1], begin), totals, recipe.heads, recipe.rows, by_key)
        )
        for by_key in (0, 1)
    )
    found = () if descends else tuple([
        EqualRuns(r.capture, kept.as_strided(r.shape, r.strides, at))
        for r, at in zip(recipe.runs, recipe.kept[3:-1:2], strict=True)
    ])  # fmt: skip
    bits, no_bits = None, _no_bits(bound, found, block_size, blocks, target)
    if not no_bits:
        bits = running.pair_bits(bits_step(plan, captures, sizes, target), runs, blocks, sizes)
    size = kept.nbytes + (0 if memory is kept else memory.nbytes) + (0 if bits is None else bits.nbytes)
    return BuiltMask(by_query, by_key, BuildCounts(recipe.blocks, None, open_blocks), size, found, bits, no_bits)


def _no_bits(
    bound: BoundMod, found: tuple[EqualRuns, ...], block_size: tuple[int, int], blocks: int, target: Target
) -> str:
    """Return why a mask with so many partial blocks has no bits; "" if it has."""
    if not blocks:
        return NO_PARTIAL
    if reason := unwanted(bound.graph, block_size, tuple([r.capture for r in found]), target):
        return reason
    if reason := impossible(bound, blocks):
        fallback("mask evaluated per pair", reason)
    return reason


class _Build:
    """One build: the parts of its memory, and its launches."""

    def __init__(self, recipe: Recipe, bound: BoundMod, device: torch.device, target: Target) -> None:
        self.recipe, self.bound, self.target = recipe, bound, target
        self.stream = current_stream(device.index) if target.backend == "cuda" else 0
        self.captures = [as_argument(t, target) for t in bound.captures]
        self.kept = _allocate(recipe.scratch[-1] if recipe.together else recipe.kept[-1], device)
        self.scratch = self.kept if recipe.together else _allocate(recipe.scratch[-1], device)
        self.row_ptr, self.order, self.runs, *equal = _parts(self.kept, recipe.kept, target)
        *self.tables, full, partial, full_by_key, partial_by_key, self.unknown, self.counts, self.status = _parts(
            self.scratch, recipe.scratch, target
        )
        self.bits = (full, partial, full_by_key, partial_by_key)
        self.equal = [(self.captures[r.capture], *equal[2 * i : 2 * i + 2]) for i, r in enumerate(recipe.runs)]

    def __enter__(self) -> _Build:
        try:
            self.report = _reports.pop()
        except IndexError:  # other threads use all of them
            self.report = _Report()
        self.report.words.fill(0)
        # After a single launch, the kernel writes the host's results to host memory, so the host waits for no copy.
        self.told = self.report.pointer(self.target) if self.recipe.at_once else self.status
        return self

    def __exit__(self, *error: object) -> None:
        if error == (None, None, None):  # otherwise a kernel may still write to it
            _reports.append(self.report)

    def launch(self) -> None:
        """Launch everything that does not depend on results."""
        recipe, stream = self.recipe, self.stream
        tables = [self._table(r, at) for r, at in zip(recipe.tables, self.tables, strict=True)]
        of_mask = (*[tables[i] for i in recipe.reads], *self.captures)
        recipe.classify.launch(stream, (*self.bits, self.unknown, self.status, *of_mask), self.bound.numbers)
        for r, places in zip(recipe.runs, self.equal, strict=True):
            if r.step is not None:
                r.step.launch(stream, (*places, self.told))
        self._lists()

    def evaluate(self, step: Step) -> None:
        """Evaluate the undecided blocks pair by pair, and build the lists again."""
        unknown = _typed(self.unknown, torch.uint8)
        step.launch(self.stream, (*self.bits, unknown, self.status, *self.captures), self.bound.numbers)
        self._lists()

    def fill(self, runs: Any) -> None:
        """Write the runs, if they were not written with the lists."""
        pointers = (*self.bits, self.counts, self.told, self.row_ptr, self.order, runs)
        self.recipe.lists[2].launch(self.stream, pointers)

    def pair_bits(self, step: Step, runs: Any, blocks: int, sizes: Sizes) -> MaskBits:
        """Evaluate the pairs of partial blocks. `runs` are those that were written."""
        words = torch.empty((2, (blocks + 1) * BLOCK_WORDS), dtype=torch.int16, device=self.kept.device)
        rows = self.recipe.rows
        halves = torch.zeros(size_of_halves(blocks, rows), dtype=torch.int32, device=self.kept.device)
        written = [as_argument(t, self.target) for t in (words, halves)]
        step.launch(self.stream, (self.row_ptr, runs, *written, *self.captures), self.bound.numbers)
        firsts = [_row_ptrs(self.kept, rows, direction)[2][:-1] for direction in (0, 1)]
        bits = bits_of_memory(firsts, words, halves, sizes[2:])
        for own in (*bits.by_query[1:3], *bits.by_key[1:3]):
            with_symbols(own, 0)
        return bits

    def wait(self) -> list[int]:
        """Return counts: runs of each kind, undecided blocks, tensors that are not ascending, partial blocks."""
        if not self.recipe.at_once:
            words = self.scratch[-8:].tolist()
        else:
            if self.target.backend == "cuda":
                torch.cuda.current_stream().synchronize()
            words = self.report.words.tolist()
        return [*words[:5], *words[6:8]]

    def outside(self) -> int:
        """Return, as bits, the captures that an evaluation indexed out of range."""
        return int(self.scratch[-3])

    def _lists(self) -> None:
        recipe, stream = self.recipe, self.stream
        if recipe.at_once:
            within = self.equal[0] if recipe.runs else ()
            pointers = (*self.bits, self.unknown, self.told, self.row_ptr, self.order, self.runs, *within)
            recipe.lists[0].launch(stream, pointers)
            return
        recipe.lists[0].launch(stream, (*self.bits, self.unknown, self.counts))
        recipe.lists[1].launch(stream, (self.counts, self.row_ptr, self.told))
        if recipe.has_room:
            self.fill(self.runs)

    def _table(self, recipe: TableRecipe, memory: Any) -> Any:
        """Build a range table, and return the pointer to it."""
        table, source = _typed(memory, recipe.dtype), self.captures[recipe.capture]
        if recipe.moved is not None:
            rows = self.bound.captures[recipe.capture].movedim(recipe.moved, -1).contiguous()
            source = as_argument(rows, self.target)
        for i, step in enumerate(recipe.steps):
            step.launch(self.stream, (table,) if i else (source, table))
        return table


class _Report:
    """Words that a kernel writes and the host reads."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.zeros(8, dtype=torch.int32, device="cpu", pin_memory=torch.cuda.is_available())
        self.words = self.tensor.numpy()

    def pointer(self, target: Target) -> Any:
        return as_argument(self.tensor, target)


_reports: list[_Report] = []  # currently unused


def _programs(recipe: Recipe, device: torch.device) -> int:
    """Return the number of programs of an evaluation."""
    return min(recipe.octets, _PROGRAMS * processors(device))


def _views(
    kept: Tensor,
    memory: Tensor,
    begins: tuple[int, int],
    totals: Sequence[int],
    heads: int,
    rows: tuple[int, int],
    by_key: int,
) -> tuple[Tensor, ...]:
    """Return the tensors of `RunLists` of one direction, as views of the kernels' output (see `Recipe.kept`).

    `begins`: the start of the orders in `kept`, and of the runs in `memory`.
    """
    n = rows[by_key]
    partial, full, _ = _row_ptrs(kept, rows, by_key)
    order = begins[0] + by_key * rows[0]
    begin = begins[1] + 2 * sum(totals[: 2 * by_key])
    some, every = totals[2 * by_key : 2 * by_key + 2]
    return (
        partial, memory.as_strided((some, 2), (2, 1), begin),
        full, memory.as_strided((every, 2), (2, 1), begin + 2 * some),
        kept.as_strided((heads, n // heads), (n // heads, 1), order),
    )  # fmt: skip


def _row_ptrs(kept: Tensor, rows: tuple[int, int], by_key: int) -> list[Tensor]:
    """Return the row_ptr of the partial runs, the full runs and the partial blocks of one direction."""
    begin, step = 3 * by_key * (rows[0] + 1), rows[by_key] + 1
    return [kept.as_strided((step,), (1,), begin + i * step) for i in range(3)]


def _allocate(words: int, device: torch.device) -> Tensor:
    return torch.empty(words, dtype=torch.int32, device=device)


def _parts(memory: Tensor, starts: Sequence[int], target: Target) -> list[Any]:
    """Return pointers to the parts of memory, given their starts and the end of the last."""
    if target.is_interpreter:
        return [memory[start:end] for start, end in itertools.pairwise(starts)]
    address = memory.data_ptr()
    return [address + 4 * start for start in starts[:-1]]


def _typed(pointer: Any, dtype: torch.dtype) -> Any:
    """Return a pointer to elements of `dtype`. In the interpreter pointers are tensors; addresses have no type."""
    return pointer.view(dtype) if isinstance(pointer, Tensor) else pointer


def _outside(bound: BoundMod, captures: int) -> IndexRangeError:
    position = (captures & -captures).bit_length() - 1
    capture, tensor = bound.graph.captures[position], bound.captures[position]
    line = capture.line or bound.graph.location
    mod = mod_in_messages("mask", bound.graph.name)
    what = "a tensor that it makes" if capture.literal else repr(capture.name)
    return IndexRangeError(
        message(
            f"{mod} ({line})" if line else mod, f"an index outside of {what}, {list(tensor.shape)}",
            "indices in range for every pair within Q_LEN and KV_LEN", "Make the tensor longer, or clamp the index.",
        )
    )  # fmt: skip
