"""What instructions of PTX compute from registers: the kinds of the operands, and a function of numpy arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = Any  # an array with a value for each of some threads
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
    def kind(self) -> str:
        """The type that is named last."""
        found = next((p for p in reversed(self.parts) if p in KINDS), None)
        if found is None:
            raise NotImplementedError(self.text)
        return found

    @property
    def bits(self) -> int:
        return KINDS[self.kind].itemsize * 8

    @property
    def space(self) -> str:
        """Which memory it is about."""
        return next((space for space in ("shared", "local") if space in self.parts), "global")


KINDS: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
    **{f"{c}{bits}": np.dtype(f"{kind}{bits // 8}") for c, kind in (("b", "u"), ("u", "u"), ("s", "i"))
       for bits in (8, 16, 32, 64)},
}  # fmt: skip


class Registers:
    """A row of 64-bit words for each name, a word for each thread. The upper bits of narrower registers are 0."""

    def __init__(self, names: Sequence[str], threads: int) -> None:
        self.rows = {name: row for row, name in enumerate(names)}
        self.words = np.zeros((len(names), threads), np.uint64)
        self.of_kind = {kind: self.words.view(dtype)[:, :: 8 // dtype.itemsize] for kind, dtype in KINDS.items()}

    def view(self, name: str, kind: str, threads: slice | Values) -> Values:
        """Return values of a kind: a view for a slice of threads; [1] for a number in the text."""
        row = self.rows.get(name)
        return number(name, kind) if row is None else self.of_kind[kind][row, threads]


def number(text: str, kind: str) -> Values:
    """Return a number of the program's text, [1]."""
    bits = int(text[2:], 16) if text.startswith("0f") else int(text.rstrip("U"), 0)
    dtype = KINDS[kind]
    if kind == "pred":
        return np.array([bits != 0])
    return np.array([bits & (1 << 64) - 1], np.uint64).view(dtype)[:1]


@dataclass(frozen=True)
class Rule:
    """What an instruction computes: its result, of kind `target`, from operands of the kinds `sources`."""

    sources: tuple[str, ...]
    target: str
    function: Callable[..., Values]  # a ufunc writes its result into the register itself


def compiled(this: Instruction, registers: Registers, lanes: slice) -> Callable[[], object]:
    """Return what does an instruction of RULES for these threads."""
    rule = RULES[this.parts[0]](this)
    (target,), *rest = this.operands
    sources = [registers.view(x, kind, lanes) for (x,), kind in zip(rest, rule.sources, strict=True)]
    # A result that is narrower than any register fills one.
    narrow = KINDS[rule.target].itemsize == 1 and rule.target != "pred"
    result = registers.view(target, "u64" if narrow else rule.target, lanes)
    function = rule.function
    if isinstance(function, np.ufunc):
        return lambda: function(*sources, out=result)

    def compute() -> None:
        result[...] = function(*sources)

    return compute


def moved(this: Instruction, registers: Registers, lanes: slice) -> Callable[[], object]:
    """Return what does a mov, between registers or from several to one or from one to several."""
    targets, sources = this.operands
    many = max(len(targets), len(sources))
    kind = this.kind if many == 1 else f"u{this.bits // many}"
    shift = this.bits // many
    if len(sources) > 1:
        whole = registers.view(targets[0], "u64", lanes)
        parts = [registers.view(x, kind, lanes) for x in sources]

        def join() -> None:
            found = parts[0].astype(np.uint64)
            for i, part in enumerate(parts[1:], start=1):
                found = found | part.astype(np.uint64) << np.uint64(i * shift)
            whole[...] = found

        return join
    if many == 1:
        to, source = registers.view(targets[0], kind, lanes), registers.view(sources[0], kind, lanes)
        return lambda: np.copyto(to, source)
    source = registers.view(sources[0], "u64", lanes)
    kept = [(registers.view(x, kind, lanes), np.uint64(i * shift)) for i, x in enumerate(targets) if x != "_"]

    def split() -> None:
        given = source.copy()
        for to, by in kept:
            np.copyto(to, given >> by, casting="unsafe")

    return split


def _in_halves(function: np.ufunc) -> Callable[..., Values]:
    """Return a function of the two 16-bit numbers in each word."""

    def halves(x: Values) -> Values:
        return np.ascontiguousarray(x).view(np.int16).reshape(-1, 2)

    return lambda x, y: np.ascontiguousarray(function(halves(x), halves(y))).view(np.uint32)[:, 0]


def _alike(on_floats: Callable[..., Values], on_whole: Callable[..., Values]) -> Callable[[Instruction], Rule]:
    """Return the rule of an operation that floats and whole numbers have, on as many operands as it is given."""

    def rule(this: Instruction) -> Rule:
        if this.parts[-1] == "s16x2" and isinstance(on_whole, np.ufunc):
            return Rule(("u32", "u32"), "u32", _in_halves(on_whole))
        kinds = (this.kind,) * (len(this.operands) - 1)
        function = on_floats if this.kind[0] == "f" else on_whole
        if "relu" in this.parts:
            return Rule(kinds, this.kind, lambda *given: np.maximum(function(*given), 0))
        return Rule(kinds, this.kind, function)

    return rule


def _of_floats(function: Callable[..., Values]) -> Callable[[Instruction], Rule]:
    return lambda this: Rule(("f32",) * (len(this.operands) - 1), "f32", function)


def _wide(this: Instruction) -> str:
    """Return the kind of twice the width."""
    return f"{this.kind[0]}{2 * this.bits}"


def _product(this: Instruction) -> Rule:
    if "wide" in this.parts:
        dtype = KINDS[_wide(this)]
        return Rule((this.kind,) * 2, _wide(this), lambda x, y: np.multiply(x, y, dtype=dtype))
    if "hi" in this.parts:
        bits, dtype = this.bits, KINDS[this.kind]
        exact = KINDS[_wide(this)] if bits < 64 else np.dtype(object)
        return Rule((this.kind,) * 2, this.kind, lambda x, y: (x.astype(exact) * y >> bits).astype(dtype))
    return _alike(np.multiply, np.multiply)(this)


def _product_and_sum(this: Instruction) -> Rule:
    if "wide" in this.parts:
        dtype, wide = KINDS[_wide(this)], _wide(this)
        return Rule((this.kind, this.kind, wide), wide, lambda x, y, z: np.multiply(x, y, dtype=dtype) + z)
    return Rule((this.kind,) * 3, this.kind, lambda x, y, z: x * y + z)


def _fused(x: Values, y: Values, z: Values) -> Values:
    return np.multiply(x, y, dtype=np.float64) + z


def _quotient(x: Values, y: Values) -> Values:
    """Return whole quotients, rounded towards 0. That of 0 is not defined."""
    if x.dtype.kind == "u":
        return x // np.maximum(y, 1)
    return np.sign(x) * np.sign(y) * (abs(x) // np.maximum(abs(y), 1))


def _shift(left: bool) -> Callable[[Instruction], Rule]:
    """Return the rule of a shift. PTX clamps the count to the width, which leaves no bit, or only signs."""

    def rule(this: Instruction) -> Rule:
        bits, dtype, shift = this.bits, KINDS[this.kind], np.left_shift if left else np.right_shift
        signs = not left and dtype.kind == "i"

        def function(value: Values, count: Values) -> Values:
            found = shift(value, np.minimum(count, bits - 1).astype(dtype))
            return found if signs else np.where(count < bits, found, dtype.type(0))

        return Rule((this.kind, "u32"), this.kind, function)

    return rule


def _field(this: Instruction) -> Rule:
    """bfe: bits of a number, as a number of its own."""
    kind = this.kind

    def function(value: Values, first: Values, count: Values) -> Values:
        width = int(count[0])
        found = value.astype(np.uint64) >> first.astype(np.uint64) & np.uint64((1 << width) - 1)
        if kind[0] == "s":
            found = np.where(found >> np.uint64(width - 1) & np.uint64(1), found - np.uint64(1 << width), found)
        return found.astype(KINDS[kind])

    return Rule((kind, "u32", "u32"), kind, function)


def _inserted(a: Values, b: Values, first: Values, count: Values) -> Values:
    """bfi: b with the lowest bits of a at a place."""
    mask = np.uint32((1 << int(count[0])) - 1)
    return b & ~(mask << first) | (a & mask) << first


def _logic(a: Values, b: Values, c: Values, table: Values) -> Values:
    """lop3: the bits whose row of the table is 1."""
    found = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            found = found | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def _permute(a: Values, b: Values, chosen: Values) -> Values:
    """prmt: bytes of two words, or their first bits."""
    both, found = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.uint64(0)
    for i in range(4):
        byte = (chosen >> np.uint32(4 * i) & np.uint32(7)).astype(np.uint64)
        of = both >> byte * np.uint64(8) & np.uint64(255)
        repeats = chosen >> np.uint32(4 * i + 3) & np.uint32(1)  # the first bit of the byte
        of = np.where(repeats == 1, (of >> np.uint64(7)) * np.uint64(255), of)
        found = found | of << np.uint64(8 * i)
    return np.asarray(found).astype(np.uint32)


def rounded(value: Values, kind: str) -> Values:
    """Return the bits of float32 values in half precision, uint16."""
    if kind == "f16":
        return value.astype(np.float16).view(np.uint16)
    words = np.ascontiguousarray(value).view(np.uint32)
    halves = words + np.uint32(0x7FFF) + (words >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), halves).astype(np.uint16)


def widened(halves: Values, kind: str) -> Values:
    """Return float32 values of the bits of half precision, uint16."""
    if kind == "f16":
        return halves.view(np.float16).astype(np.float32)
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


_ROUNDINGS: dict[str, Callable[[Values], Values]] = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def _convert(this: Instruction) -> Rule:
    to, source = [p for p in this.parts if re.fullmatch(r"bf16x2|f16x2|bf16|[suf]\d+", p)][:2]
    if to in ("bf16x2", "f16x2"):
        half = to.removesuffix("x2")

        def pair(high: Values, low: Values) -> Values:
            return rounded(high, half).astype(np.uint32) << np.uint32(16) | rounded(low, half)

        return Rule(("f32", "f32"), "u32", pair)
    if to in ("bf16", "f16"):
        return Rule(("f32",), "u16", lambda x: rounded(x, to))
    if source in ("bf16", "f16"):
        return Rule(("u16",), "f32", lambda x: widened(np.ascontiguousarray(x), source))
    if source == "f32":
        mode = next((_ROUNDINGS[p] for p in this.parts if p in _ROUNDINGS), np.asarray)
        if to == "f32":
            return Rule(("f32",), "f32", mode)
        dtype = KINDS[to]
        return Rule(("f32",), to, lambda x: np.nan_to_num(mode(x).astype(np.float64)).astype(np.int64).astype(dtype))
    if to == "s8":  # sign-extended to its register
        return Rule((source,), "u16", lambda x: x.astype(np.int8).astype(np.int16).view(np.uint16))
    dtype = KINDS[to]
    return Rule((source,), to, lambda x: x.astype(dtype))


_COMPARISONS: dict[str, np.ufunc] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _compare(this: Instruction) -> Rule:
    name, kind = this.parts[1], this.kind
    if kind[0] != "f":
        return Rule((kind, kind), "pred", _COMPARISONS[name])
    if name in ("nan", "num"):
        return Rule((kind, kind), "pred", lambda x, y: (np.isnan(x) | np.isnan(y)) == (name == "nan"))
    compare = _COMPARISONS[name.removesuffix("u")]
    if name.endswith("u"):
        return Rule((kind, kind), "pred", lambda x, y: compare(x, y) | np.isnan(x) | np.isnan(y))
    # numpy's != is true for NaN, which ne is not.
    ordered = (lambda x, y: compare(x, y) & ~np.isnan(x) & ~np.isnan(y)) if name == "ne" else compare
    return Rule((kind, kind), "pred", ordered)


RULES: dict[str, Callable[[Instruction], Rule]] = {
    "add": _alike(np.add, np.add), "sub": _alike(np.subtract, np.subtract), "mul": _product, "mad": _product_and_sum,
    "fma": _of_floats(_fused), "min": _alike(np.fmin, np.minimum), "max": _alike(np.fmax, np.maximum),
    "neg": _alike(np.negative, np.negative), "abs": _alike(np.abs, np.abs), "div": _alike(np.divide, _quotient),
    "rem": _alike(np.fmod, lambda x, y: x - _quotient(x, y) * y), "ex2": _of_floats(np.exp2),
    "lg2": _of_floats(np.log2), "tanh": _of_floats(np.tanh), "rcp": _of_floats(np.reciprocal),
    "sqrt": _of_floats(np.sqrt), "and": _alike(np.bitwise_and, np.bitwise_and),
    "or": _alike(np.bitwise_or, np.bitwise_or), "xor": _alike(np.bitwise_xor, np.bitwise_xor),
    "not": _alike(np.invert, np.invert), "shl": _shift(left=True), "shr": _shift(left=False),
    "popc": lambda this: Rule((this.kind,), "u32", np.bitwise_count), "cvta": _alike(np.positive, np.positive),
    "bfe": _field, "bfi": lambda this: Rule(("u32",) * 4, "u32", _inserted),
    "lop3": lambda this: Rule(("u32",) * 4, "u32", _logic),
    "prmt": lambda this: Rule(("u32",) * 3, "u32", _permute), "cvt": _convert, "setp": _compare,
    "selp": lambda this: Rule((this.kind, this.kind, "pred"), this.kind, lambda x, y, which: np.where(which, x, y)),
}  # fmt: skip
