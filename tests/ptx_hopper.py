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
from ptx import ALIKE, READY, STEPS, WARP, Cta, Instruction, Values, _bits, _float, _numbers

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


def _init(cta: Cta, this: Instruction, active: Values) -> None:
    (place,), (count,) = this.operands
    for address in np.unique(cta.address((place,))[active]):
        n = int(cta.value(count)[0])
        cta.mbarriers[int(address)] = [0, n, n, 0]


def _arrive(cta: Cta, this: Instruction, active: Values) -> None:
    """mbarrier.arrive, also with bytes to expect."""
    operands = [x for (x,) in this.operands if x != "_"]
    amount = cta.value(operands[1]) if len(operands) > 1 else cta.all(1)
    for thread in np.nonzero(active)[0]:
        address = int(cta.address((operands[0],))[thread])
        if "expect_tx" in this.parts:
            cta.mbarriers[address][3] += int(amount[thread])
        cta.mbarriers[address][1] -= 1 if "expect_tx" in this.parts else int(amount[thread])
        _end_phase(cta, address)


def _end_phase(cta: Cta, address: int) -> None:
    phase, left, count, to_come = cta.mbarriers[address]
    assert left >= 0, f"too many arrivals at the barrier {address}"
    if left == 0 and to_come == 0:
        cta.mbarriers[address] = [phase ^ 1, count, count, 0]


def _mbarrier(cta: Cta, this: Instruction, active: Values) -> None:
    if "try_wait" in this.parts:  # threads come here when the phase has ended
        cta.put(this.operands[0][0], cta.all(1), active)
    elif "init" in this.parts:
        _init(cta, this, active)
    elif "arrive" in this.parts:
        _arrive(cta, this, active)
    elif "inval" not in this.parts:
        raise NotImplementedError(this.text)


def _phase_has_ended(cta: Cta, this: Instruction, here: Values) -> Values:
    if "try_wait" not in this.parts or not here.any():
        return here
    waits = here if this.guard is None else cta.guarded(this, here)
    _, place, (parity,) = this.operands
    addresses, wanted = cta.address(place), cta.value(parity)
    for address in np.unique(addresses[waits]):
        phase = cta.mbarriers[int(address)][0]
        here = here & ~(waits & (addresses == address) & (wanted == phase))
    return here


# Copies of boxes.


def _copy(cta: Cta, this: Instruction, active: Values) -> None:
    global _copies
    if "tensor" not in this.parts:
        if "bulk" in this.parts:
            _bulk_group(cta, this, active)
            return
        Cta.copy(cta, this, active)
        return
    places = re.findall(r"\[([^\[\]]*)\]", this.text)
    described = next(p for p in places if "{" in p)
    plain = [p.strip() for p in places if "{" not in p]
    handle, names = described.split(",", 1)
    coordinates = [n.strip() for n in names.strip(" {}").split(",")]
    for thread in np.nonzero(active)[0]:
        box = cta.memory.boxes[int(cta.value(handle.strip())[thread])]
        at = tuple(
            np.array([cta.value(n)[thread] for n in reversed(coordinates)]).astype(np.uint32).view(np.int32).tolist()
        )
        start = int(cta.address((plain[0],))[thread])
        there, here = box.overlap(at)
        data = torch.zeros(box.shape, dtype=box.tensor.dtype)
        shared = box.places(start)
        if "mbarrier::complete_tx::bytes" in this.parts or "complete_tx::bytes" in this.op:
            data[here] = box.tensor[there]
            found = data.contiguous().view(torch.uint8).numpy().reshape(shared.shape)
            land = functools.partial(_land, cta, shared, found, int(cta.address((plain[1],))[thread]))
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


def _bulk_group(cta: Cta, this: Instruction, active: Values) -> None:
    """Stores read shared memory when their thread waits for them."""
    for thread, groups in cta.stores.items():
        if active[thread] and "commit_group" in this.parts:
            groups.append([])
        elif active[thread]:
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


def _operand(cta: Cta, descriptor: int, rows: int, is_contiguous_in_k: bool, kind: str) -> Values:
    """Return a matrix [rows, 16] from shared memory. A row has all terms of one row of a, or of one column of b."""
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
    where = swizzled(places, width)[..., None] + np.arange(2)
    words = cta.shared[where].view(np.uint16)[..., 0]
    if kind == "f16":
        return words.view(np.float16).astype(np.float64)
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


IN_FLIGHT = np.uint64(0x7FC0DEAD)  # a NaN, in accumulators that nothing may read before a wait


@dataclass
class Products:
    """The products of a warpgroup that were issued and not waited for: groups, and accumulators by their first name."""

    groups: list[list[tuple[str, Callable[[], None]]]]
    accumulators: dict[str, list[Values]]


def _multiply(cta: Cta, this: Instruction, active: Values) -> None:
    """wgmma m64nNk16: products of each warpgroup. They are computed when they are waited for."""
    for warpgroup in np.unique(np.nonzero(active)[0] // WARPGROUP):
        threads = slice(warpgroup * WARPGROUP, (warpgroup + 1) * WARPGROUP)
        products = cta.products.setdefault(int(warpgroup), Products([[]], {}))
        if "mma_async" in this.parts:
            _issue(cta, this, threads, products)
        elif "commit_group" in this.parts:
            products.groups.append([])
        elif "wait_group" in this.parts:
            while len(products.groups) - 1 > int(this.operands[0][0]):
                for _, compute in products.groups.pop(0):
                    compute()
                left = {name for group in products.groups for name, _ in group}
                products.accumulators = {x: sums for x, sums in products.accumulators.items() if x in left}


def _issue(cta: Cta, this: Instruction, threads: slice, products: Products) -> None:
    targets, _, _, (adds,), *_ = this.operands
    sums = products.accumulators.get(targets[0])
    accumulates = bool(cta.value(adds)[threads][0])
    if sums is None:
        sums = [_float(cta.value(x)[threads]) if accumulates else np.zeros(WARPGROUP) for x in targets]
        products.accumulators[targets[0]] = sums
    chosen = np.zeros(cta.threads, bool)
    chosen[threads] = True
    for target in targets:
        cta.put(target, np.full(cta.threads, IN_FLIGHT), chosen)
    named = {x: int(cta.value(x)[threads][0]) for (x, *more) in this.operands[1:3] if not more}  # descriptors
    compute = functools.partial(_compute, cta, this, chosen, sums, named, accumulates=accumulates)
    products.groups[-1].append((targets[0], compute))


def _compute(
    cta: Cta, this: Instruction, chosen: Values, sums: list[Values], descriptors: dict[str, int], *, accumulates: bool
) -> None:
    shape = next(p for p in this.parts if p.startswith("m64n"))
    n, kind = int(shape.removeprefix("m64n").removesuffix("k16")), this.parts[-1]
    targets, a, (b,), _, *flags = this.operands
    transposed = [int(x) for (x,) in flags[2:]]  # of a, if it is in shared memory, and of b
    lane = np.arange(WARPGROUP) % WARP
    row, column = np.arange(WARPGROUP) // WARP * 16 + lane // 4, 2 * (lane % 4)
    if len(a) == 4:
        left = np.zeros((64, 16))
        for i, name in enumerate(a):
            terms = _numbers(cta.value(name)[chosen], kind)
            for e in range(2):
                left[row + 8 * (i % 2), column + e + 8 * (i // 2)] = terms[..., e]
    else:
        left = _operand(cta, descriptors[a[0]], 64, not transposed[0], kind)
    right = _operand(cta, descriptors[b], n, not transposed[-1], kind)
    with np.errstate(invalid="ignore", over="ignore"):
        product = left @ right.T  # [64, n]
        for i, target in enumerate(targets):
            part = product[row + 8 * (i // 2 % 2), i // 4 * 8 + column + i % 2]
            sums[i] = (part + sums[i] if accumulates else part).astype(np.float32)
            value = cta.value(target).copy()
            value[chosen] = _bits(sums[i])
            cta.put(target, value, chosen)


def _elect(cta: Cta, this: Instruction, active: Values) -> None:
    """elect.sync: the first thread of each warp."""
    _, predicate = this.operands[0][0].split("|")
    cta.put(predicate, (np.arange(cta.threads) % WARP == 0).astype(np.uint64), active)


STEPS |= {
    "mbarrier": _mbarrier, "cp": _copy, "wgmma": _multiply, "elect": _elect, "setmaxnreg": Cta.nothing,
    "fence": Cta.nothing,
}  # fmt: skip
READY["mbarrier"] = _phase_has_ended
ALIKE |= {"wgmma": WARPGROUP, "elect": WARP, "setmaxnreg": WARP}
