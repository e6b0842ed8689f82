"""PTX on a CPU: the programs of a kernel one after the other, the threads of each side by side in numpy.

So the results of what Triton compiles for a card that is not here can be compared with float64. It has what Triton's
kernels for sm_75 to sm_89 are made of, and `ptx_hopper` adds those for sm_90; another instruction raises. Copies and
products that PTX lets overtake each other happen at once: a missing wait is not seen, but one that waits for ever is.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Values = Any  # uint64 of each thread: bits, the upper ones 0; for predicates 0 and 1
WARP = 32


@dataclass(frozen=True)
class Instruction:
    """`@!%p1 ld.shared.v2.b32 {%r1, %r2}, [%r3+16];` as its parts."""

    text: str
    op: str
    parts: tuple[str, ...]  # of op, which `op` begins
    guard: tuple[str, bool] | None  # the predicate, and what it must be
    operands: tuple[tuple[str, ...], ...]  # each a vector, mostly of one

    @property
    def bits(self) -> int:
        """The width of what is computed: the last one named."""
        widths = [int(p[1:]) for p in self.parts if re.fullmatch(r"[bsuf](8|16|32|64)", p)]
        return widths[-1] if widths else 32

    @property
    def space(self) -> str:
        """Which memory it is about."""
        return next((space for space in ("shared", "local") if space in self.parts), "global")

    @property
    def signed(self) -> bool:
        return any(re.fullmatch(r"s(8|16|32|64)", p) for p in self.parts)


@dataclass(frozen=True)
class Program:
    """A kernel's instructions, and where its labels are among them."""

    name: str
    code: tuple[Instruction, ...]
    labels: dict[str, tuple[int, ...]]  # labels of inline assembly have one place for each of its uses
    tables: dict[str, tuple[str, ...]]  # the labels of a brx.idx
    threads: int | None  # of a program, if the file says so

    def target(self, label: str, at: int) -> int:
        """Return where a branch at a place goes."""
        places = self.labels[label]
        return next((p for p in places if p > at), places[-1])


def parse(text: str) -> Program:
    """Return the program of a PTX file with one kernel."""
    name = re.search(r"\.entry\s+(\w+)", text)
    assert name is not None
    body = text[name.end() :].split("{", 1)[1].split("\n\t.section", 1)[0]
    body = re.sub(r"//[^\n]*", "", body)
    body = re.sub(r"\n\s*\.(loc|file|pragma)[^\n]*", "\n", body)
    body = re.sub(r"\n\s*[{}]\s*(?=\n)", "\n", body)
    code: list[Instruction] = []
    labels: dict[str, list[int]] = {}
    tables: dict[str, tuple[str, ...]] = {}
    label = ""
    for statement in re.split(r"(?<=;)|(?<=:)(?=\s)", body):
        line = " ".join(statement.split()).lstrip("{} ")  # braces of inline assembly
        if line.endswith(":"):
            label = line[:-1].split()[-1]
            labels.setdefault(label, []).append(len(code))
        elif line.startswith(".branchtargets"):
            tables[label] = tuple(re.findall(r"[$\w]+", line.removeprefix(".branchtargets")))
        elif line.endswith(";") and not line.startswith("."):
            code.append(_instruction(line.rstrip("; ")))
    size = re.search(r"\.reqntid\s+(\d+)", text)
    places = {name: tuple(found) for name, found in labels.items()}
    return Program(name[1], tuple(code), places, tables, None if size is None else int(size[1]))


def _instruction(line: str) -> Instruction:
    guarded = re.match(r"@(!?)([%\w]+) (.*)", line)
    guard = None if guarded is None else (guarded[2], not guarded[1])
    op, _, rest = (line if guarded is None else guarded[3]).partition(" ")
    operands = re.findall(r"\{([^}]*)\}|([^,{}]+)", rest)
    vectors = (tuple(x.strip() for x in (several or one).split(",")) for several, one in operands)
    return Instruction(line, op, tuple(op.split(".")), guard, tuple(v for v in vectors if v != ("",)))


class Memory:
    """Global memory: the storages of tensors, at their own addresses. What is outside of all of them raises."""

    def __init__(self, tensors: Sequence[Tensor], boxes: dict[int, Any] | None = None) -> None:
        self.boxes = boxes or {}  # what TMA descriptors describe, by their addresses
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self.starts = np.array(sorted(storages), np.uint64)
        self.views = [torch.empty(0, dtype=torch.uint8).set_(storages[int(p)]).numpy() for p in self.starts]

    def bytes_at(self, addresses: Values, size: int) -> list[tuple[Values, Any, Values]]:
        """Return (which threads, bytes of a storage, positions [threads, size] there)."""
        found = np.searchsorted(self.starts, addresses, side="right").astype(int) - 1
        pieces = []
        for i in np.unique(found):
            threads = np.nonzero(found == i)[0]
            positions = (addresses[threads] - self.starts[i]).astype(np.int64)[:, None] + np.arange(size)
            if i < 0 or (positions >= len(self.views[i])).any():
                raise IndexError(f"{size} bytes at {addresses[threads]} are in no tensor")
            pieces.append((threads, self.views[i], positions))
        return pieces


def run(
    program: Program, parameters: Sequence[int], index: int, programs: int, memory: Memory, threads: int, shared: int
) -> None:
    """Run one of the programs (CTAs) of a kernel; parameters are the bits of its arguments."""
    cta = Cta(program, parameters, (index, programs), memory, threads, shared)
    while cta.step():
        pass


_order: random.Random | None = None


@contextlib.contextmanager
def any_order(seed: int) -> Iterator[None]:
    """Let warps go on in random order, one far ahead of others."""
    global _order
    _order = random.Random(seed)
    try:
        yield
    finally:
        _order = None


_behind = range(0)


@contextlib.contextmanager
def behind(warps: range) -> Iterator[None]:
    """Let these warps go on only where no other warp can."""
    global _behind
    _behind = warps
    try:
        yield
    finally:
        _behind = range(0)


class Cta:
    """A program: its threads, their registers and their memory."""

    def __init__(
        self, program: Program, parameters: Sequence[int], place: tuple[int, int], memory: Memory, threads: int,
        shared: int,
    ) -> None:  # fmt: skip
        self.program, self.memory, self.threads = program, memory, threads
        self.shared = np.zeros(shared + 16, np.uint8)
        self.at = np.zeros(threads, int)  # the instruction that each thread does next
        self.stacks = np.zeros((threads, 1024), np.uint8)
        self.registers: dict[str, Values] = {
            "%tid.x": np.arange(threads, dtype=np.uint64), "%ctaid.x": self.all(place[0]),
            "%nctaid.x": self.all(place[1]), "%clock64": self.all(0),
        }  # fmt: skip
        self.parameters = {f"{program.name}_param_{i}": value for i, value in enumerate(parameters)}
        self.blocked = np.zeros(threads, bool)  # at a barrier, behind which `at` is
        self.arrived: dict[int, Values] = {}  # which threads, by barrier
        self.targets = {place for places in program.labels.values() for place in places}
        self.group = np.zeros(threads, bool)  # the threads that did the last instruction, if they go on alone
        self.turns, self.first = 0, 0  # of `any_order`
        self.to_land: list[Callable[[], None]] = []  # copies that were issued and have not arrived
        self.products: dict[int, Any] = {}  # that were issued and not waited for, by warpgroup
        self.stores: dict[int, list[list[Callable[[], None]]]] = {}  # groups of copies from shared memory, by thread
        self.mbarriers: dict[int, list[int]] = {}  # by address: phase, arrivals left, and of a phase, bytes to come

    def all(self, value: int) -> Values:
        return np.full(self.threads, value & (1 << 64) - 1, np.uint64)

    def step(self) -> bool:
        """Do one instruction for threads that are furthest behind, so that all meet again; tell if any was."""
        at, active = self.next()
        if at == len(self.program.code):
            return False
        self.registers["%clock64"] += np.uint64(1)
        this = self.program.code[at]
        self.at[active] = at + 1
        alone = this.parts[0] not in _TURNS and at + 1 not in self.targets
        self.group = active if alone else np.zeros(self.threads, bool)
        if this.guard is not None:
            active = self.guarded(this, active)
        if this.parts[0] in ("bra", "ret"):
            end = len(self.program.code)
            self.at[active] = self.program.target(this.operands[0][0], at) if this.operands else end
            return True
        if this.parts[0] == "brx":
            (index,), (table,) = this.operands
            for i, label in enumerate(self.program.tables[table]):
                self.at[active & (self.value(index) == i)] = self.program.target(label, at)
            return True
        if this.parts[0] in STEPS:
            try:
                STEPS[this.parts[0]](self, this, active)
            except IndexError as error:
                raise IndexError(f"{this.text}: {error}") from error
        elif this.parts[0] in _RULES:
            (target,), *rest = this.operands
            self.put(target, _RULES[this.parts[0]](this, *(self.value(x) for (x,) in rest)), active)
        else:
            raise NotImplementedError(this.text)
        return True

    def guarded(self, this: Instruction, active: Values) -> Values:
        assert this.guard is not None
        return active & (self.registers[this.guard[0]].astype(bool) == this.guard[1])

    def next(self) -> tuple[int, Values]:
        """Return the first place at which threads can go on, and which ones."""
        if self.group.any():
            at = int(self.at[np.argmax(self.group)])
            if self.program.code[at].parts[0] not in ALIKE and self.program.code[at].parts[0] not in READY:
                return at, self.group
        end = len(self.program.code)
        free = ~self.blocked & (self.at < end)
        for place, among in self.places(free):
            here = among & (self.at == place)
            this = self.program.code[place]
            alike = ALIKE.get(this.parts[0], 1)
            if alike > 1:  # whole warps or warpgroups, without the threads that have ended
                here = free & (self.at == place)
                groups = (here | (self.at == end)).reshape(-1, alike).all(1)
                here = here & np.repeat(groups, alike)
            if this.parts[0] in READY:
                here = READY[this.parts[0]](self, this, here)
            if here.any():
                return int(place), here
        if (self.at < end).any() and self.to_land:
            self.to_land.pop()()
            return self.next()
        if (self.at < end).any():
            raise RuntimeError(f"all threads wait, at {[self.program.code[p].text for p in np.unique(self.at[free])]}")
        return end, free

    def places(self, free: Values) -> Iterator[tuple[int, Values]]:
        """Return where threads are, in the order in which they may go on, and which ones."""
        if _order is None and not _behind:
            yield from ((int(place), free) for place in np.unique(self.at[free]))
            return
        warps = sorted(range(self.threads // WARP), key=lambda warp: warp in _behind)
        if _order is not None:
            warps = self.in_any_order(_order, warps)
        for warp in warps:
            among = free & (np.arange(self.threads) // WARP == warp)
            if among.any():
                yield int(self.at[among].min()), among

    def in_any_order(self, order: random.Random, warps: list[int]) -> list[int]:
        """Return warps in random order, after one that stays the first for a while."""
        if self.turns == 0:  # another warp is ahead for a while
            self.turns, self.first = order.randrange(1, 300), order.randrange(len(warps))
        self.turns -= 1
        order.shuffle(warps)
        return [self.first, *warps]

    def value(self, name: str) -> Values:
        if name.startswith("0f"):
            return self.all(int(name[2:], 16))
        if name in self.registers:
            return self.registers[name]
        if name in self.parameters:  # its address
            return self.all(self.parameters[name])
        if name.startswith("%") or name in _SYMBOLS:  # what is read before it is written is used by no thread
            return self.all(0)
        return self.all(int(name.rstrip("U"), 0))

    def put(self, name: str, value: Values, active: Values) -> None:
        value = np.asarray(value).astype(np.uint64)
        if not active.all() and name in self.registers:
            value = np.where(active, value, self.registers[name])
        self.registers[name] = value

    def address(self, operand: tuple[str, ...]) -> Values:
        base, _, offset = operand[0].strip("[] ").partition("+")
        return self.value(base.strip()) + np.uint64(int(offset or 0))

    def read(self, space: str, addresses: Values, size: int, active: Values) -> Values:
        """Return `size` bytes of each active thread, 0 elsewhere."""
        found = np.zeros((self.threads, 8), np.uint8)
        threads = np.nonzero(active)[0]
        if space == "shared":
            found[threads, :size] = self.shared[addresses[threads].astype(int)[:, None] + np.arange(size)]
        elif space == "local":
            found[threads, :size] = self.stacks[
                threads[:, None], addresses[threads].astype(int)[:, None] + np.arange(size)
            ]
        elif len(threads):
            for which, view, positions in self.memory.bytes_at(addresses[threads], size):
                found[threads[which], :size] = view[positions]
        return found.view(np.uint64)[:, 0]

    def write(self, space: str, addresses: Values, values: Values, size: int, active: Values) -> None:
        threads = np.nonzero(active)[0]
        data = values[threads].view(np.uint8).reshape(-1, 8)[:, :size]
        if space == "shared":
            self.shared[addresses[threads].astype(int)[:, None] + np.arange(size)] = data
        elif space == "local":
            self.stacks[threads[:, None], addresses[threads].astype(int)[:, None] + np.arange(size)] = data
        elif len(threads):
            for which, view, positions in self.memory.bytes_at(addresses[threads], size):
                view[positions] = data[which]

    def load(self, this: Instruction, active: Values) -> None:
        targets, source = this.operands[:2]
        if "param" in this.parts:
            self.put(targets[0], self.all(self.parameters[source[0].strip("[] ")]), active)
            return
        size = this.bits // 8
        first = self.address(source)
        found = [self.read(this.space, first + np.uint64(i * size), size, active) for i in range(len(targets))]
        for target, value in zip(targets, found, strict=True):
            self.put(target, value, active)

    def store(self, this: Instruction, active: Values) -> None:
        (target, sources), size = this.operands, this.bits // 8
        for i, source in enumerate(sources):
            self.write(this.space, self.address(target) + np.uint64(i * size), self.value(source), size, active)

    def prefetch(self, this: Instruction, active: Values) -> None:
        """Check that what is brought to a cache exists."""
        self.read("global", self.address(this.operands[0]), 4, active)

    def copy(self, this: Instruction, active: Values) -> None:
        """cp.async: so many bytes, of which the last operand says how many are not zeros."""
        if "shared" not in this.op:
            return  # a wait
        target, source, (size,), *rest = this.operands
        count = int(size, 0)
        given = self.value(rest[0][0]) if rest else self.all(count)
        for start in range(0, count, 4):
            offset = np.uint64(start)
            read = self.read("global", self.address(source) + offset, 4, active & (given > start))
            self.write("shared", self.address(target) + offset, read, 4, active)

    def load_matrices(self, this: Instruction, active: Values) -> None:
        targets, source = this.operands
        first = self.address(source).astype(int).reshape(-1, 4, 8)  # [warps, matrices, rows]
        for i, target in enumerate(targets):
            places = first[:, i % 4, :, None, None] + np.arange(16).reshape(8, 2)  # [warps, 8, 8, 2]
            matrix = self.shared[places].view(np.uint16)[..., 0]
            matrix = matrix.swapaxes(1, 2) if "trans" in this.parts else matrix
            pairs = np.ascontiguousarray(matrix).view(np.uint32)  # [warps, 8, 4]
            self.put(target, pairs.reshape(-1), active)

    def store_matrices(self, this: Instruction, active: Values) -> None:
        target, sources = this.operands
        first = self.address(target).astype(int).reshape(-1, 4, 8)
        warps = active.reshape(-1, WARP)[:, 0]
        for i, source in enumerate(sources):
            matrix = self.value(source).astype(np.uint32).view(np.uint16).reshape(-1, 8, 8)
            matrix = matrix.swapaxes(1, 2) if "trans" in this.parts else matrix
            places = first[:, i, :, None, None] + np.arange(16).reshape(8, 2)
            self.shared[places[warps]] = np.ascontiguousarray(matrix[warps])[..., None].view(np.uint8)

    def multiply(self, this: Instruction, active: Values) -> None:
        """mma.m16n8k*: products of each warp, in float64 as nothing is rounded between them."""
        shape = next(p for p in this.parts if p.startswith("m16n8k"))
        kind, depth = this.parts[-3], int(shape.removeprefix("m16n8k"))
        targets, a, b, c = this.operands
        per = {"tf32": 1}.get(kind, 2)  # terms in a register
        lane, warps = np.arange(WARP), self.threads // WARP
        row, column = lane // 4, lane % 4
        left, right = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8))
        for i, name in enumerate(a):
            terms = _numbers(self.value(name), kind).reshape(warps, WARP, per)
            for e in range(per):
                left[:, row + 8 * (i % 2), per * column + e + 4 * per * (i // 2)] = terms[..., e]
        for i, name in enumerate(b):
            terms = _numbers(self.value(name), kind).reshape(warps, WARP, per)
            for e in range(per):
                right[:, per * column + e + 4 * per * i, row] = terms[..., e]
        product = left @ right
        for i, (target, name) in enumerate(zip(targets, c, strict=True)):
            added = product[:, row + 8 * (i // 2), 2 * column + i % 2].reshape(-1) + _float(self.value(name))
            self.put(target, _bits(added.astype(np.float32)), active)

    def move(self, this: Instruction, active: Values) -> None:
        """mov, between registers or from several to one or from one to several."""
        targets, sources = this.operands
        width = this.bits // max(len(targets), len(sources))
        if len(sources) > 1:
            parts = (_cut(self.value(x), width) << np.uint64(i * width) for i, x in enumerate(sources))
            self.put(targets[0], sum(parts, start=self.all(0)), active)
            return
        value = self.value(sources[0])
        for i, target in enumerate(targets):
            if target != "_":
                self.put(target, _cut(value >> np.uint64(i * width), width), active)

    def shuffle(self, this: Instruction, active: Values) -> None:
        (target,), (source,), (which,) = this.operands[:3]
        lane = np.arange(self.threads)
        other = self.value(which).astype(int) & WARP - 1
        chosen = lane ^ other if "bfly" in this.parts else lane // WARP * WARP + other
        self.put(target.partition("|")[0], self.value(source)[chosen], active)

    def atomic(self, this: Instruction, active: Values) -> None:
        """atom and red, thread by thread."""
        target, place, (source,) = this.operands if this.parts[0] == "atom" else (None, *this.operands)
        rule = next(_RULES[p] for p in this.parts[1:] if p in ("add", "or", "max", "min"))
        addresses, values, size = self.address(place), self.value(source), this.bits // 8
        before = self.all(0)
        for thread in np.nonzero(active)[0]:
            alone = np.arange(self.threads) == thread
            there = self.read(this.space, addresses, size, alone)
            before[thread] = there[thread]
            self.write(this.space, addresses, np.where(alone, rule(this, there, values), there), size, alone)
        if target is not None:
            self.put(target[0], before, active)

    def reduce(self, this: Instruction, active: Values) -> None:
        """redux.sync: over all threads of a warp."""
        (target,), (source,) = this.operands[:2]
        reduction = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}[this.parts[2]]
        found = reduction.reduce(_whole(self.value(source), 32, this.signed).reshape(-1, WARP), axis=1)
        self.put(target, _cut(np.repeat(found, WARP).astype(np.uint64), 32), active)

    def meet(self, this: Instruction, active: Values) -> None:
        """bar and barrier: wait for so many threads, or for all that have not ended. bar.arrive does not wait."""
        if "warp" in this.parts:
            return
        number = int(self.value(this.operands[0][0])[active][0])
        wanted = int(this.operands[1][0]) if len(this.operands) > 1 else int((self.at < len(self.program.code)).sum())
        arrived = self.arrived.pop(number, np.zeros(self.threads, bool)) | active
        if arrived.sum() < wanted:
            self.arrived[number] = arrived
            self.blocked |= active & ("arrive" not in this.parts)
        else:
            self.blocked &= ~arrived

    def nothing(self, this: Instruction, active: Values) -> None:
        """What happened at once needs no wait."""


_SYMBOLS = ("global_smem", "__local_depot0", "__cudart_i2opi_f")  # shared memory, stacks; what sin of 1e5 would need
# How many threads do an instruction together.
ALIKE = dict.fromkeys(("bar", "mma", "ldmatrix", "stmatrix", "shfl", "redux"), WARP)
READY: dict[str, Callable[[Cta, Instruction, Values], Values]] = {}  # which threads can do an instruction now
_TURNS = ("bra", "brx", "ret", "bar", "barrier")  # after which other threads may be the next
STEPS: dict[str, Callable[[Cta, Instruction, Values], None]] = {
    "ld": Cta.load, "st": Cta.store, "cp": Cta.copy, "prefetch": Cta.prefetch, "ldmatrix": Cta.load_matrices,
    "mov": Cta.move, "stmatrix": Cta.store_matrices, "mma": Cta.multiply, "shfl": Cta.shuffle, "bar": Cta.meet,
    "barrier": Cta.meet, "atom": Cta.atomic, "red": Cta.atomic, "redux": Cta.reduce,
}  # fmt: skip


def _cut(value: Values, bits: int) -> Values:
    return value & np.uint64((1 << bits) - 1)


def _whole(value: Values, bits: int, signed: bool) -> Values:
    """Return bits as whole numbers, int64."""
    numbers = _cut(value, bits).astype(np.int64)
    return np.where(numbers >> (bits - 1) & 1, numbers - (1 << bits), numbers) if signed and bits < 64 else numbers


def _float(value: Values) -> Values:
    return value.astype(np.uint32).view(np.float32)


def _bits(value: Values) -> Values:
    return np.ascontiguousarray(value).view(np.uint32).astype(np.uint64)


def _numbers(value: Values, kind: str) -> Values:
    """Return the floats of registers, [threads, in each register]."""
    words = value.astype(np.uint32)
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)[:, None]
    halves = words.view(np.uint16).reshape(-1, 2)
    if kind == "f16":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _rounded(value: Values, kind: str) -> Values:
    """Return the bits of floats in another kind."""
    if kind == "f16":
        return value.astype(np.float16).view(np.uint16).astype(np.uint64)
    given = torch.from_numpy(np.ascontiguousarray(value, np.float32))
    return given.bfloat16().view(torch.int16).numpy().view(np.uint16).astype(np.uint64)


def _arithmetic(on_floats: Callable[..., Values], on_whole: Callable[..., Values]) -> Callable[..., Values]:
    """Return the rule of an operation that floats and whole numbers have."""

    def rule(this: Instruction, *values: Values) -> Values:
        if "f32" in this.parts:
            return _bits(on_floats(*map(_float, values)).astype(np.float32))
        wide = 2 * this.bits if "wide" in this.parts else this.bits
        numbers = [_whole(v, this.bits if i < 2 else wide, this.signed) for i, v in enumerate(values)]
        return _cut(on_whole(*numbers).astype(np.uint64), wide)

    return rule


def _product(this: Instruction, x: Values, y: Values) -> Values:
    if "hi" in this.parts:
        x, y = ((_whole(v, this.bits, True) if this.signed else _cut(v, this.bits)).astype(object) for v in (x, y))
        return ((x * y >> this.bits) % (1 << this.bits)).astype(np.uint64)
    return _arithmetic(np.multiply, np.multiply)(this, x, y)


def _fused(this: Instruction, x: Values, y: Values, z: Values) -> Values:
    x, y, z = (_float(v).astype(np.float64) for v in (x, y, z))
    return _bits((x * y + z).astype(np.float32))


def _quotient(x: Values, y: Values) -> Values:
    return np.sign(x) * np.sign(y) * (abs(x) // np.maximum(abs(y), 1))


def _shift_left(this: Instruction, x: Values, n: Values) -> Values:
    """PTX clamps the count to the width, which leaves no bit."""
    return np.where(n < this.bits, _cut(x << np.minimum(n, np.uint64(63)), this.bits), np.uint64(0))


def _shift_right(this: Instruction, value: Values, count: Values) -> Values:
    if not this.signed:
        return np.where(count < this.bits, _cut(value, this.bits) >> np.minimum(count, np.uint64(63)), 0)
    many = np.minimum(count, np.uint64(this.bits - 1)).astype(np.int64)
    return _cut((_whole(value, this.bits, True) >> many).astype(np.uint64), this.bits)


def _field(this: Instruction, value: Values, first: Values, count: Values) -> Values:
    width = int(count[0])
    return _cut(_whole(value >> first, width, this.signed).astype(np.uint64), this.bits)


def _logic(this: Instruction, a: Values, b: Values, c: Values, table: Values) -> Values:
    rows = [i for i in range(8) if int(table[0]) >> i & 1]
    terms = ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in rows)
    found = np.zeros_like(a)
    for term in terms:
        found |= term
    return _cut(found, 32)


def _permute(this: Instruction, a: Values, b: Values, chosen: Values) -> Values:
    both, found = _cut(a, 32) | _cut(b, 32) << np.uint64(32), np.zeros_like(a)
    for i in range(4):
        byte = chosen >> np.uint64(4 * i) & np.uint64(7)
        found |= (both >> byte * np.uint64(8) & np.uint64(255)) << np.uint64(8 * i)
    return found


_ROUNDINGS: dict[str, Callable[[Values], Values]] = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def _convert(this: Instruction, *values: Values) -> Values:
    to, source = [p for p in this.parts if re.fullmatch(r"bf16x2|f16x2|bf16|[suf]\d+", p)][:2]
    if to in ("bf16x2", "f16x2"):
        high, low = (_rounded(_float(v), to.removesuffix("x2")) for v in values)
        return high << np.uint64(16) | low
    (value,) = values
    if to in ("bf16", "f16"):
        return _rounded(_float(value), to)
    if source in ("bf16", "f16"):
        return _bits(_numbers(value, source)[:, 0].astype(np.float32))
    if source == "f32":
        mode = next((_ROUNDINGS[p] for p in this.parts if p in _ROUNDINGS), np.asarray)
        rounded = mode(_float(value))
        if to == "f32":
            return _bits(rounded)
        return _cut(np.nan_to_num(rounded.astype(np.float64)).astype(np.int64).astype(np.uint64), int(to[1:]))
    if to == "f32":
        return _bits(_whole(value, int(source[1:]), source[0] == "s").astype(np.float32))
    whole = _cut(_whole(value, int(source[1:]), source[0] == "s").astype(np.uint64), int(to[1:]))
    # An 8-bit result is sign-extended to its register.
    return _cut(_whole(whole, 8, True).astype(np.uint64), 16) if to == "s8" else whole


_COMPARISONS: dict[str, Callable[..., Values]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _compare(this: Instruction, x: Values, y: Values) -> Values:
    if this.parts[-1] == "f32":
        x, y, kind = _float(x), _float(y), this.parts[1]
        unordered = np.isnan(x) | np.isnan(y)
        if kind in ("nan", "num"):
            return unordered == (kind == "nan")
        found = _COMPARISONS[kind.removesuffix("u")](x, y)
        return found | unordered if kind.endswith("u") else found & ~unordered
    x, y = (_whole(v, this.bits, True) if this.signed else _cut(v, this.bits) for v in (x, y))
    return _COMPARISONS[this.parts[1]](x, y)


def _unary(function: Callable[[Values], Values]) -> Callable[..., Values]:
    return lambda this, x: _bits(function(_float(x)).astype(np.float32))


_RULES: dict[str, Callable[..., Values]] = {
    "add": _arithmetic(np.add, np.add), "sub": _arithmetic(np.subtract, np.subtract),
    "mul": _product, "mad": _arithmetic(np.add, lambda x, y, z: x * y + z), "fma": _fused,
    "min": _arithmetic(np.fmin, np.minimum), "max": _arithmetic(np.fmax, np.maximum),
    "neg": _arithmetic(np.negative, np.negative), "abs": _arithmetic(np.abs, np.abs),
    "div": _arithmetic(np.divide, _quotient), "rem": _arithmetic(np.fmod, lambda x, y: x - _quotient(x, y) * y),
    "ex2": _unary(np.exp2), "lg2": _unary(np.log2), "tanh": _unary(np.tanh), "rcp": _unary(np.reciprocal),
    "sqrt": _unary(np.sqrt),
    "and": lambda this, x, y: x & y, "or": lambda this, x, y: x | y, "xor": lambda this, x, y: x ^ y,
    "not": lambda this, x: _cut(~x, 1 if "pred" in this.parts else this.bits),
    "shl": _shift_left, "shr": _shift_right,
    "popc": lambda this, x: np.bitwise_count(_cut(x, this.bits)), "cvta": lambda this, x: x,
    "bfe": _field, "lop3": _logic, "prmt": _permute, "cvt": _convert, "setp": _compare,
    "selp": lambda this, x, y, which: np.where(which.astype(bool), x, y),
}  # fmt: skip
