"""Reads of uniform registers that some path through a kernel does not write before.

ptxas 12.8 computed parts of descriptors in front of a loop that may be skipped, and used them after it. The PTX was
right and so was its emulation. Results on the GPU were wrong.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

ALL, ZERO = (1 << 64) - 1, 63  # URZ
WRITES = {"R2UR", "S2UR", "VOTEU", "REDUX"}
READS_ONLY = ("UTMA", "UBLK", "USETMAXREG")


@dataclass(frozen=True)
class Instruction:
    place: int
    text: str
    reads: int  # sets of registers, as bits
    writes: int
    target: int | None  # of a branch
    ends: bool  # never goes on to the next one


def instructions(sass: str) -> list[Instruction]:
    """Parse what cuobjdump -sass prints."""
    found = re.finditer(r"^\s*/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;", sass, re.MULTILINE)
    return [_instruction(int(place, 16), text) for place, text in (m.groups() for m in found)]


def _instruction(place: int, text: str) -> Instruction:
    guard, _, body = text.rpartition("@")[2].partition(" ") if text.startswith("@") else ("", "", text)
    name, _, rest = body.strip().partition(" ")
    kind, operands = name.split(".")[0], [x.strip() for x in rest.split(",")]
    if kind == "R2UR" and len(operands) == 3:  # also writes a predicate
        operands = operands[1:]
    writes = reads = 0
    for i, operand in enumerate(operands):
        if i == 0 and _writes(kind) and re.fullmatch(r"UR\d+", operand):
            wide = ".64" in name or ".WIDE" in name
            writes = _bits(int(operand[2:]), 2 if wide else 1)
            continue
        for number in map(int, re.findall(r"\bUR(\d+)\b", operand)):
            if "gdesc" in operand:  # of both operands, or with one in registers only the second half
                in_registers = re.search(r"\bR\d+, R\d+, gdesc", body) is not None
                reads |= _bits(number + 2, 2) if in_registers else _bits(number, 4)
            else:
                reads |= _bits(number, 2 if kind.startswith("U") and ".64" in name else 1)
    target = re.search(r"0x([0-9a-f]+)", rest) if kind == "BRA" else None
    is_conditional = guard != "" or re.search(r"!?U?P\w+,", rest) is not None or ".DIV" in name
    return Instruction(
        place, text, reads & ~_bits(ZERO, 1), writes, None if target is None else int(target[1], 16),
        kind in ("BRA", "EXIT", "RET", "BRX") and not is_conditional,
    )  # fmt: skip


def _writes(kind: str) -> bool:
    return kind in WRITES or (kind.startswith("U") and not kind.startswith(READS_ONLY))


def _bits(first: int, count: int) -> int:
    return (1 << count) - 1 << first


def read_before_written(sass: str) -> list[str]:
    """Return the instructions that read a uniform register which is not written on each path from the kernel's start.

    Code that only indirect branches reach is left out: what they bring is not known.
    """
    code = instructions(sass)
    index = {x.place: i for i, x in enumerate(code)}
    after = [
        [*([] if x.ends or i + 1 == len(code) else [i + 1]), *([index[x.target]] if x.target in index else [])]
        for i, x in enumerate(code)
    ]
    reached = {i for places in after for i in places}
    written = {i: ALL for i in range(len(code)) if i not in reached}  # by instruction: registers that all paths wrote
    written[0] = 0
    queue = deque(written)
    while queue:
        i = queue.popleft()
        now = written[i] | code[i].writes
        for following in after[i]:
            known = written.get(following)
            merged = now if known is None else known & now
            if merged != known:
                written[following] = merged
                queue.append(following)
    return [x.text for i, x in enumerate(code) if i in written and x.reads & ~written[i]]
