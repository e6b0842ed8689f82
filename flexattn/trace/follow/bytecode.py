"""Bytecode: a code object as the instructions and exception table that `frames` executes."""

from __future__ import annotations

import dis
import sys
import types
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

VERSIONS = ((3, 11), (3, 12), (3, 13))  # versions whose instructions `frames` implements
IS_KNOWN_VERSION = sys.version_info[:2] in VERSIONS


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; `target` is the position of a jump target in `Program.instructions`."""

    opname: str
    arg: int
    argval: Any
    argrepr: str
    offset: int
    line: int
    target: int


@dataclass(frozen=True, slots=True)
class Handler:
    """Where an exception raised at offsets in [start, end) is handled, with the stack truncated to `depth`."""

    start: int
    end: int
    target: int
    depth: int
    push_offset: bool


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of a code object, without caches and prefixes, and its exception table."""

    instructions: tuple[Instruction, ...]
    handlers: tuple[Handler, ...]

    def handler_at(self, offset: int) -> Handler | None:
        """Return the handler of an exception raised by the instruction at `offset`, or None."""
        return next((h for h in self.handlers if h.start <= offset < h.end), None)


@lru_cache(1024)
def program_of(code: types.CodeType) -> Program:
    """Decode a code object."""
    decoded = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    # A jump may target the prefix of an instruction, which means the instruction after it.
    offsets = [i.offset for i in decoded]
    position: dict[int, int] = {}
    for instruction in dis.get_instructions(code, show_caches=True):
        position[instruction.offset] = next(
            (n for n, offset in enumerate(offsets) if offset >= instruction.offset), len(offsets)
        )
    jumps = {*dis.hasjrel, *dis.hasjabs}
    line = code.co_firstlineno
    instructions: list[Instruction] = []
    for i in decoded:
        line = (i.positions.lineno if i.positions is not None else None) or line
        target = position[i.argval] if i.opcode in jumps else -1
        argval = code.co_consts[i.arg or 0] if i.opname == "KW_NAMES" else i.argval  # `dis` omits it
        instructions.append(Instruction(i.opname, i.arg or 0, argval, i.argrepr, i.offset, line, target))
    handlers = [
        Handler(start, end, position[target], depth, push) for start, end, target, depth, push in _exception_table(code)
    ]
    return Program(tuple(instructions), tuple(handlers))


def _exception_table(code: types.CodeType) -> list[tuple[int, int, int, int, bool]]:
    """Decode co_exceptiontable; its format is described in CPython's Objects/exception_handling_notes.txt."""
    table, entries = iter(code.co_exceptiontable), []

    def number() -> int:
        byte = next(table)
        value = byte & 63
        while byte & 64:
            byte = next(table)
            value = value << 6 | byte & 63
        return value

    while True:
        try:
            start = 2 * number()
        except StopIteration:
            return entries
        length, target, depth = 2 * number(), 2 * number(), number()
        entries.append((start, start + length, target, depth >> 1, bool(depth & 1)))
