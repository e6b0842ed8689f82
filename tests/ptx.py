"""PTX on a CPU: the programs of a kernel one after the other, the threads of each side by side in numpy.

So the results of what Triton compiles for a card that is not here can be compared with float64. It has what Triton's
kernels for sm_75 to sm_89 are made of, and `ptx_hopper` adds those for sm_90; another instruction raises. Copies and
products that PTX lets overtake each other happen at once: a missing wait is not seen, but one that waits for ever is.

Instructions up to the next branch or wait are compiled once for a range of threads, into functions that write views of
registers. All programs of a kernel and all its launches use them.
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
from ptx_rules import KINDS, RULES, WARP, Instruction, Registers, Values, compiled, moved, widened
from torch import Tensor


@dataclass(frozen=True)
class Program:
    """A kernel's instructions, and where its labels are among them."""

    name: str
    code: tuple[Instruction, ...]
    labels: dict[str, tuple[int, ...]]  # labels of inline assembly have one place for each of its uses
    tables: dict[str, tuple[str, ...]]  # the labels of a brx.idx
    names: tuple[str, ...]  # of registers, parameters and symbols
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
    named = {x for this in code for x in re.findall(r"%?[A-Za-z_$][\w$.]*", this.text.partition(" ")[2])}
    names = tuple(sorted(named | {f"%{x}" for x in ("tid.x", "ctaid.x", "nctaid.x", "clock64")}))
    return Program(name[1], tuple(code), places, tables, names, None if size is None else int(size[1]))


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
        for i in {*found.tolist()}:
            threads = np.nonzero(found == i)[0]
            positions = (addresses[threads] - self.starts[i]).astype(np.int64)[:, None] + np.arange(size)
            if i < 0 or (positions >= len(self.views[i])).any():
                raise IndexError(f"{size} bytes at {addresses[threads]} are in no tensor")
            pieces.append((threads, self.views[i], positions))
        return pieces


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


@dataclass(frozen=True)
class Stretch:
    """Instructions that a range of threads does without a turn of others, and where they end."""

    end: int
    steps: tuple[Callable[[Values], None], ...]  # for these threads of the range, a mask; None is all of them


class Cta:
    """A program: its threads, their registers and their memory."""

    def __init__(self, program: Program, threads: int, shared: int) -> None:
        self.program, self.threads = program, threads
        self.registers = Registers(program.names, threads)
        self.shared = np.zeros(-(-shared // 16) * 16 + 16, np.uint8)
        self.shared_of = {size: self.shared.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.stacks = np.zeros((threads, 1024), np.uint8)
        self.targets = {place for places in program.labels.values() for place in places}
        self.stretches: dict[tuple[int, int, int, bool], Stretch] = {}
        self.of_warps = np.arange(threads) // WARP
        self.memory = Memory(())

    def run(self, parameters: Sequence[int], index: int, programs: int, memory: Memory) -> None:
        """Run one of the programs (CTAs) of a kernel; parameters are the bits of its arguments."""
        self.memory = memory
        self.registers.words.fill(0)
        self.shared.fill(0)
        self.stacks.fill(0)
        named = {f"{self.program.name}_param_{i}": value for i, value in enumerate(parameters)}
        named |= {"%ctaid.x": index, "%nctaid.x": programs}
        for name, value in named.items():
            if name in self.registers.rows:
                self.registers.words[self.registers.rows[name]] = value & (1 << 64) - 1
        self.registers.words[self.registers.rows["%tid.x"]] = np.arange(self.threads)
        self.at = np.zeros(self.threads, int)  # the instruction that each thread does next
        self.blocked = np.zeros(self.threads, bool)  # at a barrier, behind which `at` is
        self.asleep = np.zeros(self.threads, bool)  # found not READY, and nothing has happened that would change it
        self.arrived: dict[int, Values] = {}  # which threads, by barrier
        self.turns, self.first = 0, 0  # of `any_order`
        self.to_land: list[Callable[[], None]] = []  # copies that were issued and have not arrived
        self.products: dict[int, Any] = {}  # that were issued and not waited for, by warpgroup
        self.stores: dict[int, list[list[Callable[[], None]]]] = {}  # groups of copies from shared memory, by thread
        self.mbarriers: dict[int, list[int]] = {}  # by address: phase, arrivals left, and of a phase, bytes to come
        with np.errstate(all="ignore"):  # of masked places
            while self.step():
                pass

    def step(self) -> bool:
        """Let threads that are furthest behind go on to a turn of others, so that all meet again; tell if any was."""
        at, threads = self.next()
        if not len(threads):
            return False
        lanes = slice(int(threads[0]), int(threads[-1]) + 1)
        active = None
        if len(threads) < lanes.stop - lanes.start:
            active = np.zeros(lanes.stop - lanes.start, bool)
            active[threads - lanes.start] = True
        in_turns = active is not None or _order is not None or bool(_behind)
        stretch = self.stretch(at, lanes, in_turns)
        self.registers.words[self.registers.rows["%clock64"]] += np.uint64(stretch.end - at)
        self.at[threads] = stretch.end
        done = 0
        try:
            for step in stretch.steps:
                step(active)
                done += 1
        except (IndexError, NotImplementedError) as error:
            raise type(error)(f"{self.program.code[at + done].text}: {error}") from error
        return True

    def stretch(self, at: int, lanes: slice, in_turns: bool) -> Stretch:
        """Return what threads do from here until others may be next: with `in_turns`, before they meet."""
        key = (at, lanes.start, lanes.stop, in_turns)
        if key not in self.stretches:
            steps, end = [self.step_of(self.program.code[at], at, lanes)], at + 1
            while end < len(self.program.code) and self.goes_on(end, lanes, in_turns):
                steps.append(self.step_of(self.program.code[end], end, lanes))
                end += 1
            self.stretches[key] = Stretch(end, tuple(steps))
        return self.stretches[key]

    def goes_on(self, place: int, lanes: slice, in_turns: bool) -> bool:
        """Tell if threads that have done the instruction before this place do this one before others have a turn."""
        before, this = self.program.code[place - 1], self.program.code[place]
        if before.parts[0] in _TURNS or place in self.targets or this.parts[0] in READY:
            return False
        alike = ALIKE.get(this.parts[0], 1)
        return alike == 1 or (not in_turns and lanes.start % alike == 0 and lanes.stop % alike == 0)

    def step_of(self, this: Instruction, at: int, lanes: slice) -> Callable[[Values], None]:
        """Return what does an instruction for threads of a range."""
        name = this.parts[0]
        guard, wanted = this.guard if this.guard is not None else (None, True)
        holds = None if guard is None else self.registers.view(guard, "pred", lanes)

        def guarded(active: Values) -> Values:
            if holds is None:
                return active
            chosen = holds.copy() if wanted else ~holds
            return chosen if active is None else chosen & active

        if name in RULES or name == "mov":
            compute = (moved if name == "mov" else compiled)(this, self.registers, lanes)
            written = [self.registers.view(x, "u64", lanes) for x in this.operands[0] if x != "_"]

            def step(active: Values) -> None:
                active = guarded(active)
                if active is None:
                    compute()
                    return
                before = [x.copy() for x in written]
                compute()
                for now, then in zip(written, before, strict=True):
                    np.copyto(now, then, where=~active)

            return step
        if name not in STEPS:
            raise NotImplementedError(this.text)
        everyone, action = np.arange(lanes.start, lanes.stop), STEPS[name]

        def effect(active: Values) -> None:
            active = guarded(active)
            threads = everyone if active is None else everyone[active]
            if len(threads):
                action(self, this, threads, at)

        return effect

    def next(self) -> tuple[int, Values]:
        """Return the first place at which threads can go on, and which ones."""
        end = len(self.program.code)
        free = ~(self.blocked | self.asleep) & (self.at < end)
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
                return place, np.nonzero(here)[0]
        if (self.at < end).any() and self.to_land:
            self.to_land.pop()()
            return self.next()
        if (self.at < end).any():
            waiting = np.unique(self.at[self.at < end])
            raise RuntimeError(f"all threads wait, at or before {[self.program.code[p].text for p in waiting]}")
        return end, np.nonzero(free)[0]

    def places(self, free: Values) -> Iterator[tuple[int, Values]]:
        """Return where threads are, in the order in which they may go on, and which ones."""
        if _order is None and not _behind:
            yield from ((place, free) for place in sorted({*self.at[free].tolist()}))
            return
        warps = sorted(range(self.threads // WARP), key=lambda warp: warp in _behind)
        if _order is not None:
            warps = self.in_any_order(_order, warps)
        end = len(self.program.code)
        first = np.where(free, self.at, end).reshape(-1, WARP).min(1).tolist()
        for warp in warps:
            if first[warp] < end:
                yield first[warp], free & (self.of_warps == warp)

    def in_any_order(self, order: random.Random, warps: list[int]) -> list[int]:
        """Return warps in random order, after one that stays the first for a while."""
        if self.turns == 0:  # another warp is ahead for a while
            self.turns, self.first = order.randrange(1, 300), order.randrange(len(warps))
        self.turns -= 1
        order.shuffle(warps)
        return [self.first, *warps]

    def value(self, name: str, threads: Values, kind: str = "u64") -> Values:
        """Return the value of an operand in each of some threads."""
        found = self.registers.view(name, kind, threads)
        return found if name in self.registers.rows else np.repeat(found, len(threads))

    def put(self, name: str, values: Values, threads: Values, kind: str = "u64") -> None:
        self.registers.of_kind[kind][self.registers.rows[name], threads] = values

    def address(self, operand: tuple[str, ...], threads: Values) -> Values:
        base, _, offset = operand[0].strip("[] ").partition("+")
        return self.value(base.strip(), threads) + np.uint64(int(offset or 0))

    def read(self, space: str, addresses: Values, size: int, threads: Values) -> Values:
        """Return `size` bytes of each thread, as words."""
        if space == "shared":
            return self.shared_of[size][self.elements(addresses, size)].astype(np.uint64)
        found = np.zeros((len(threads), 8), np.uint8)
        if space == "local":
            found[:, :size] = self.stacks[threads[:, None], addresses.astype(int)[:, None] + np.arange(size)]
        else:
            for which, view, positions in self.memory.bytes_at(addresses, size):
                found[which, :size] = view[positions]
        return found.view(np.uint64)[:, 0]

    def elements(self, addresses: Values, size: int) -> Values:
        """Return which elements of shared memory are at addresses, which are multiples of their size."""
        if (addresses % np.uint64(size)).any():
            raise IndexError(f"{size} bytes at {addresses} are not aligned")
        return (addresses // np.uint64(size)).astype(int)

    def write(self, space: str, addresses: Values, values: Values, size: int, threads: Values) -> None:
        if space == "shared":
            self.shared_of[size][self.elements(addresses, size)] = values.astype(f"u{size}")
            return
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1, 8)[:, :size]
        if space == "local":
            self.stacks[threads[:, None], addresses.astype(int)[:, None] + np.arange(size)] = data
        else:
            for which, view, positions in self.memory.bytes_at(addresses, size):
                view[positions] = data[which]


Step = Callable[[Cta, Instruction, Values, int], None]  # for which threads, and at which place of the program


def _load(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    targets, source = this.operands[:2]
    if "param" in this.parts:
        cta.put(targets[0], cta.value(source[0].strip("[] "), threads), threads)
        return
    size = this.bits // 8
    first = cta.address(source, threads)
    found = [cta.read(this.space, first + np.uint64(i * size), size, threads) for i in range(len(targets))]
    for target, value in zip(targets, found, strict=True):
        cta.put(target, value, threads)


def _store(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    (target, sources), size = this.operands, this.bits // 8
    for i, source in enumerate(sources):
        place = cta.address(target, threads) + np.uint64(i * size)
        cta.write(this.space, place, cta.value(source, threads), size, threads)


def _prefetch(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """Check that what is brought to a cache exists."""
    cta.read("global", cta.address(this.operands[0], threads), 4, threads)


def copy(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """cp.async: so many bytes, of which the last operand says how many are not zeros."""
    if "shared" not in this.op:
        return  # a wait
    target, source, (size,), *rest = this.operands
    count = int(size, 0)
    given = cta.value(rest[0][0], threads, "u32") if rest else np.full(len(threads), count)
    to, place = cta.address(target, threads), cta.address(source, threads)
    for start in range(0, count, 4):
        offset, comes = np.uint64(start), given > start
        data = np.zeros(len(threads), np.uint64)
        if comes.any():
            data[comes] = cta.read("global", place[comes] + offset, 4, threads[comes])
        cta.write("shared", to + offset, data, 4, threads)


def _matrices(cta: Cta, addresses: Values) -> Values:
    """Return where the elements of matrices of 8 by 8 are, [warps, 4, 8, 8], from the address of each row."""
    rows = cta.elements(addresses, 16).reshape(-1, 4, 8) * 8
    return rows[..., None] + np.arange(8)


def _load_matrices(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    targets, source = this.operands
    places = _matrices(cta, cta.address(source, threads))
    for i, target in enumerate(targets):
        matrix = cta.shared_of[2][places[:, i % 4]]
        matrix = matrix.swapaxes(1, 2) if "trans" in this.parts else matrix
        cta.put(target, np.ascontiguousarray(matrix).view(np.uint32).reshape(-1), threads)  # [warps, 8, 4]


def _store_matrices(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    target, sources = this.operands
    places = _matrices(cta, cta.address(target, threads))
    for i, source in enumerate(sources):
        matrix = cta.value(source, threads, "u32").copy().view(np.uint16).reshape(-1, 8, 8)
        cta.shared_of[2][places[:, i]] = matrix.swapaxes(1, 2) if "trans" in this.parts else matrix


def terms(words: Values, kind: str) -> Values:
    """Return the floats of registers, [threads, in each register]."""
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)[:, None]
    return widened(np.ascontiguousarray(words).view(np.uint16).reshape(-1, 2), kind)


def _multiply(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """mma.m16n8k*: products of each warp, in float64 as nothing is rounded between them."""
    shape = next(p for p in this.parts if p.startswith("m16n8k"))
    kind, depth = this.parts[-3], int(shape.removeprefix("m16n8k"))
    targets, a, b, c = this.operands
    per = {"tf32": 1}.get(kind, 2)  # terms in a register
    lane, warps = np.arange(WARP), len(threads) // WARP
    row, column = lane // 4, lane % 4
    left, right = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8))
    for i, name in enumerate(a):
        given = terms(cta.value(name, threads, "u32"), kind).reshape(warps, WARP, per)
        for e in range(per):
            left[:, row + 8 * (i % 2), per * column + e + 4 * per * (i // 2)] = given[..., e]
    for i, name in enumerate(b):
        given = terms(cta.value(name, threads, "u32"), kind).reshape(warps, WARP, per)
        for e in range(per):
            right[:, per * column + e + 4 * per * i, row] = given[..., e]
    product = left @ right
    for i, (target, name) in enumerate(zip(targets, c, strict=True)):
        added = product[:, row + 8 * (i // 2), 2 * column + i % 2].reshape(-1)
        cta.put(target, added + cta.value(name, threads, "f32"), threads, "f32")


def _shuffle(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    (target,), (source,), (which,) = this.operands[:3]
    other = cta.value(which, threads).astype(int) & WARP - 1
    chosen = threads ^ other if "bfly" in this.parts else threads // WARP * WARP + other
    cta.put(target.partition("|")[0], cta.value(source, chosen), threads)


_ATOMS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y, "or": lambda x, y: x | y, "max": max, "min": min
}  # fmt: skip


def _atomic(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """atom and red, thread by thread."""
    target, place, (source,) = this.operands if this.parts[0] == "atom" else (None, *this.operands)
    rule = next(_ATOMS[p] for p in this.parts[1:] if p in _ATOMS)
    addresses, size = cta.address(place, threads), this.bits // 8
    values, kind = cta.value(source, threads, this.kind), KINDS[this.kind]
    for i in range(len(threads)):
        one = slice(i, i + 1)
        before = cta.read(this.space, addresses[one], size, threads[one])
        now = np.asarray(rule(before.view(kind)[0], values[i])).astype(kind)
        word = np.zeros(8 // size, kind)
        word[0] = now
        cta.write(this.space, addresses[one], word.view(np.uint64), size, threads[one])
        if target is not None:
            cta.put(target[0], before, threads[one])


def _reduce(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """redux.sync: over all threads of a warp."""
    (target,), (source,) = this.operands[:2]
    reduction = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}[this.parts[2]]
    values = cta.value(source, threads, this.kind).reshape(-1, WARP)
    cta.put(target, np.repeat(reduction.reduce(values, axis=1, dtype=values.dtype), WARP), threads, this.kind)


def _meet(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """bar and barrier: wait for so many threads, or for all that have not ended. bar.arrive does not wait."""
    if "warp" in this.parts:
        return
    number_of_bar = int(cta.value(this.operands[0][0], threads)[0])
    wanted = int(this.operands[1][0]) if len(this.operands) > 1 else int((cta.at < len(cta.program.code)).sum())
    arrived = cta.arrived.pop(number_of_bar, np.zeros(cta.threads, bool))
    arrived[threads] = True
    if arrived.sum() < wanted:
        cta.arrived[number_of_bar] = arrived
        if "arrive" not in this.parts:
            cta.blocked[threads] = True
    else:
        cta.blocked &= ~arrived


def _branch(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """bra, and ret, which has no target."""
    end = len(cta.program.code)
    cta.at[threads] = cta.program.target(this.operands[0][0], at) if this.operands else end


def _branch_to_one(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """brx.idx: to a label of a table."""
    (index,), (table,) = this.operands
    chosen = cta.value(index, threads)
    for i, label in enumerate(cta.program.tables[table]):
        cta.at[threads[chosen == i]] = cta.program.target(label, at)


def nothing(cta: Cta, this: Instruction, threads: Values, at: int) -> None:
    """What happened at once needs no wait."""


# How many threads do an instruction together.
ALIKE = dict.fromkeys(("bar", "mma", "ldmatrix", "stmatrix", "shfl", "redux"), WARP)
READY: dict[str, Callable[[Cta, Instruction, Values], Values]] = {}  # which threads can do an instruction now
_TURNS = ("bra", "brx", "ret", "bar", "barrier")  # after which other threads may be the next
STEPS: dict[str, Step] = {
    "ld": _load, "st": _store, "cp": copy, "prefetch": _prefetch, "ldmatrix": _load_matrices,
    "stmatrix": _store_matrices, "mma": _multiply, "shfl": _shuffle, "bar": _meet, "barrier": _meet, "atom": _atomic,
    "red": _atomic, "redux": _reduce, "bra": _branch, "ret": _branch, "brx": _branch_to_one,
}  # fmt: skip
