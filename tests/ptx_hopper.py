"""What kernels for sm_90 have besides: mbarriers, TMA, and products of warpgroups. Importing this file adds them.

Products and stores read their operands when they are waited for, as late as a GPU may. A box is copied to shared memory
when it is asked for, or with `late_copy` as late as possible. Numbers, addresses, swizzles and counts are those of the
GPU.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from ptx import ALIKE, READY, STEPS, Cta, copy, nothing, terms
from ptx_rules import WARP, Instruction, Values, widened

WARPGROUP = 128
HANDLES = 1 << 62  # of descriptors; no tensor is there


@dataclass(frozen=True)
class Box:
    """A TMA descriptor: a tensor, and the box that a copy moves."""

    tensor: torch.Tensor  # with the shape and the strides of the descriptor
    shape: tuple[int, ...]  # of the box
    swizzle: int  # bytes in a row of shared memory whose 16-byte parts are exchanged; 0: none

    def places(self, start: int) -> Values:
        """Return the address in shared memory of each byte of the box, [elements, bytes of one]."""
        size = self.tensor.element_size()
        offsets = start + np.arange(int(np.prod(self.shape)) * size)
        return swizzled(offsets, self.swizzle).reshape(-1, size)

    def overlap(self, coordinates: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the part of the tensor that a box at these coordinates has, and the same part of the box."""
        there, here = [], []
        for first, count, size in zip(coordinates, self.shape, self.tensor.shape, strict=True):
            low, high = min(max(first, 0), size), min(max(first + count, 0), size)
            there.append(slice(low, high))
            here.append(slice(low - first, high - first) if high > low else slice(0, 0))
        return tuple(there), tuple(here)


def swizzled(addresses: Values, width: int) -> Values:
    """Return where the bytes at these addresses are: in rows of `width` bytes, parts of 16 bytes are exchanged."""
    parts = max(1, width // 16)
    return addresses ^ (addresses >> 7 & parts - 1) << 4


# Barriers in shared memory. A phase ends when all arrivals and all bytes have come.


def _init(cta: Cta, this: Instruction, threads: Values) -> None:
    place, (count,) = this.operands
    n = int(cta.value(count, threads)[0])
    for address in {*cta.address(place, threads).tolist()}:
        cta.mbarriers[address] = [0, n, n, 0]
    cta.asleep[:] = False


def _arrive(cta: Cta, this: Instruction, threads: Values) -> None:
    """mbarrier.arrive, also with bytes to expect."""
    operands = [x for (x,) in this.operands if x != "_"]
    amounts = cta.value(operands[1], threads).tolist() if len(operands) > 1 else [1] * len(threads)
    for address, amount in zip(cta.address((operands[0],), threads).tolist(), amounts, strict=True):
        if "expect_tx" in this.parts:
            cta.mbarriers[address][3] += amount
        cta.mbarriers[address][1] -= 1 if "expect_tx" in this.parts else amount
        _end_phase(cta, address)


def _end_phase(cta: Cta, address: int) -> None:
    phase, left, count, to_come = cta.mbarriers[address]
    assert left >= 0, f"too many arrivals at the barrier {address}"
    if left == 0 and to_come == 0:
        cta.mbarriers[address] = [phase ^ 1, count, count, 0]
        cta.asleep[:] = False


def _mbarrier(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    if "try_wait" in this.parts:  # threads come here when the phase has ended
        cta.put(this.operands[0][0], np.uint64(1), threads)
    elif "init" in this.parts:
        _init(cta, this, threads)
    elif "arrive" in this.parts:
        _arrive(cta, this, threads)
    elif "inval" not in this.parts:
        raise NotImplementedError(this.text)


def _phase_has_ended(cta: Cta, this: Instruction, here: Values) -> Values:
    if "try_wait" not in this.parts or not here.any():
        return here
    threads = np.nonzero(here)[0]
    if this.guard is not None:
        threads = threads[cta.value(this.guard[0], threads, "pred") == this.guard[1]]
    _, place, (parity,) = this.operands
    addresses, wanted = cta.address(place, threads), cta.value(parity, threads)
    ended = here.copy()
    for address in {*addresses.tolist()}:
        ended[threads[(addresses == address) & (wanted == cta.mbarriers[address][0])]] = False
    cta.asleep |= here & ~ended
    return ended


# Copies of boxes.


@functools.cache
def _parts_of_copy(text: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the names of (the descriptor, the coordinates from the first dimension, other addresses)."""
    places = re.findall(r"\[([^\[\]]*)\]", text)
    handle, names = next(p for p in places if "{" in p).split(",", 1)
    coordinates = tuple(n.strip() for n in reversed(names.strip(" {}").split(",")))
    return handle.strip(), coordinates, tuple(p.strip() for p in places if "{" not in p)


def _copy(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    global _copies
    if "tensor" not in this.parts:
        (_bulk_group if "bulk" in this.parts else copy)(cta, this, threads, at)
        return
    handle, coordinates, plain = _parts_of_copy(this.text)
    for thread in threads:
        one = np.array([thread])
        box = cta.memory.boxes[int(cta.value(handle, one)[0])]
        first = tuple(int(cta.value(n, one, "s32")[0]) for n in coordinates)
        start = int(cta.address((plain[0],), one)[0])
        there, here = box.overlap(first)
        data = torch.zeros(box.shape, dtype=box.tensor.dtype)
        shared = box.places(start)
        if "mbarrier::complete_tx::bytes" in this.parts or "complete_tx::bytes" in this.op:
            data[here] = box.tensor[there]
            found = data.contiguous().view(torch.uint8).numpy().reshape(shared.shape)
            land = functools.partial(_land, cta, shared, found, int(cta.address((plain[1],), one)[0]))
            if _copies == _late:
                cta.to_land.append(land)
            else:
                land()
            _copies += 1
        else:
            store = functools.partial(_store, cta, shared, box, there, here, adds=this.parts[1] == "reduce")
            cta.stores.setdefault(int(thread), [[]])[-1].append(store)


def _store(
    cta: Cta, places: Values, box: Box, there: tuple[slice, ...], here: tuple[slice, ...], *, adds: bool
) -> None:
    found = torch.from_numpy(cta.shared[places].copy()).view(box.tensor.dtype).view(box.shape)
    box.tensor[there] = box.tensor[there] + found[here] if adds else found[here]


def _bulk_group(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """Stores read shared memory when their thread waits for them."""
    for thread in threads.tolist():
        groups = cta.stores.get(thread, [[]])
        if "commit_group" in this.parts:
            groups.append([])
            continue
        while len(groups) - 1 > int(this.operands[0][0]):
            for store in groups.pop(0):
                store()


def _land(cta: Cta, places: Values, data: Values, barrier: int) -> None:
    """Write what a copy brings, and tell its barrier."""
    cta.shared[places] = data
    cta.mbarriers[barrier][3] -= data.size
    _end_phase(cta, barrier)


_copies, _late = 0, -1  # copies to shared memory that were issued, and the number of the one that is late


@contextlib.contextmanager
def late_copy(number: int) -> Iterator[None]:
    """Let one copy, by its number, arrive when all threads wait. Who does not wait reads what was there before."""
    global _copies, _late
    _copies, _late = 0, number
    try:
        yield
    finally:
        _late = -1


# Products.


@functools.lru_cache(maxsize=4096)
def _elements(descriptor: int, rows: int, is_contiguous_in_k: bool) -> Values:
    """Return which halves of shared memory a matrix [rows, 16] has, whose descriptor this is.

    A row has all terms of one row of a, or of one column of b.
    """
    width = {0: 16, 1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    row, term = np.arange(rows)[:, None], np.arange(16)[None, :]
    if is_contiguous_in_k:
        places = start + row // 8 * stride + row % 8 * width + term * 2
        if width == 16:
            places = start + row // 8 * stride + row % 8 * 16 + term // 8 * leading + term % 8 * 2
    else:
        across = width // 2  # elements
        places = start + row % across * 2 + row // across * leading + term % 8 * width + term // 8 * stride
    return swizzled(places, width) // 2


@functools.cache
def _accumulators(count: int) -> tuple[Values, Values]:
    """Return which element (row, column) of a product of 64 rows each accumulator has, [accumulators, threads]."""
    lane, i = np.arange(WARPGROUP) % WARP, np.arange(count)[:, None]
    row, column = np.arange(WARPGROUP) // WARP * 16 + lane // 4, 2 * (lane % 4)
    return row + 8 * (i // 2 % 2), i // 4 * 8 + column + i % 2


IN_FLIGHT = np.uint64(0x7FC0DEAD)  # a NaN, in accumulators that nothing may read before a wait


@dataclass
class Products:
    """The products of a warpgroup that were issued and not waited for: groups, and accumulators by their first name."""

    groups: list[list[tuple[str, Callable[[], None]]]]
    accumulators: dict[str, Values]  # [accumulators, threads]


def _multiply(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """wgmma m64nNk16: products of each warpgroup. They are computed when they are waited for."""
    for warpgroup in {*(threads // WARPGROUP).tolist()}:
        lanes = slice(warpgroup * WARPGROUP, (warpgroup + 1) * WARPGROUP)
        products = cta.products.setdefault(warpgroup, Products([[]], {}))
        if "mma_async" in this.parts:
            _issue(cta, this, lanes, products)
        elif "commit_group" in this.parts:
            products.groups.append([])
        elif "wait_group" in this.parts:
            while len(products.groups) - 1 > int(this.operands[0][0]):
                for _, compute in products.groups.pop(0):
                    compute()
                left = {name for group in products.groups for name, _ in group}
                products.accumulators = {x: sums for x, sums in products.accumulators.items() if x in left}


def _issue(cta: Cta, this: Instruction, lanes: slice, products: Products) -> None:
    targets, _, _, (adds,), *_ = this.operands
    rows = np.array([cta.registers.rows[x] for x in targets])
    sums = products.accumulators.get(targets[0])
    accumulates = bool(cta.registers.view(adds, "pred", lanes)[0])
    if sums is None:
        sums = cta.registers.of_kind["f32"][rows, lanes] * np.float32(1 if accumulates else 0)
        products.accumulators[targets[0]] = sums
    cta.registers.words[rows, lanes] = IN_FLIGHT
    # Descriptors, which may change before the wait.
    named = {x: int(cta.registers.view(x, "u64", lanes)[0]) for (x, *more) in this.operands[1:3] if not more}
    compute = functools.partial(_compute, cta, this, lanes, rows, sums, named, accumulates=accumulates)
    products.groups[-1].append((targets[0], compute))


def _compute(
    cta: Cta, this: Instruction, lanes: slice, rows: Values, sums: Values, descriptors: dict[str, int], *,
    accumulates: bool,
) -> None:  # fmt: skip
    shape = next(p for p in this.parts if p.startswith("m64n"))
    n, kind = int(shape.removeprefix("m64n").removesuffix("k16")), this.parts[-1]
    _, a, (b,), _, *flags = this.operands
    transposed = [int(x) for (x,) in flags[2:]]  # of a, if it is in shared memory, and of b

    def operand(descriptor: int, count: int, is_transposed: int) -> Values:
        return widened(cta.shared_of[2][_elements(descriptor, count, not is_transposed)], kind)

    if len(a) == 4:
        left = np.zeros((64, 16), np.float32)
        row, column = _accumulators(8)
        for i, name in enumerate(a):
            given = terms(cta.registers.view(name, "u32", lanes), kind)
            for e in range(2):
                left[row[2 * i + e], column[2 * i + e]] = given[:, e]
    else:
        left = operand(descriptors[a[0]], 64, transposed[0])
    right = operand(descriptors[b], n, transposed[-1])
    product = left.astype(np.float64) @ right.astype(np.float64).T  # [64, n]
    part = product[_accumulators(len(rows))]
    sums[...] = part + sums if accumulates else part
    cta.registers.of_kind["f32"][rows, lanes] = sums


def _elect(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """elect.sync: the first thread of each warp."""
    _, predicate = this.operands[0][0].split("|")
    cta.put(predicate, threads % WARP == 0, threads)


STEPS |= {
    "mbarrier": _mbarrier, "cp": _copy, "wgmma": _multiply, "elect": _elect, "setmaxnreg": nothing, "fence": nothing,
}  # fmt: skip
READY["mbarrier"] = _phase_has_ended
ALIKE |= {"wgmma": WARPGROUP, "elect": WARP, "setmaxnreg": WARP}
