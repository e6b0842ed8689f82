"""Programs around a mod: what it adds up is read in a few of FRAGMENTS' ways, each behind one of PLACEMENTS.

To add a way of reading state: a block `## name: expression` and the statements before it. `$` ends each of its names,
and the expression is over these names, b, h, q and k.
"""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from fuzz.state_fragments import TEXT

ARGUMENTS = "b, h, q, k"
WEIGHTS = (1.0, 0.25, 4.0, 0.75, 2.5)


def _read(text: str) -> dict[str, tuple[str, str]]:
    blocks = re.findall(r"^## ([^:\n]+): (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    return {name: (expression, source.strip()) for name, expression, source in blocks}


FRAGMENTS: dict[str, tuple[str, str]] = _read(TEXT)  # expression, source


@dataclass(frozen=True)
class Program:
    """The source of a module of each name, and how a run of it goes on. `mod` of the main module is the mod."""

    kind: str  # score or mask
    fragments: tuple[str, ...]
    placements: tuple[str, ...]
    form: str
    way: str  # of WAYS: what is called
    modules: Mapping[str, str]  # without the imports that all have

    @property
    def features(self) -> list[str]:
        return [*self.fragments, *self.placements, f"mod: {self.form}", f"{self.kind}: {self.way}"]


WAYS = {"score": ("trace", "trace", "trace", "call"), "mask": ("trace", "trace", "build")}

# Where a fragment is: its module and its source there, then how the mod gets the value.
PLACEMENTS: dict[str, tuple[str, str, str]] = {
    "inline": ("main", "{source}", "({expression})"),
    "helper": ("main", "{source}\n\n{helper}", f"read$({ARGUMENTS})"),
    "closure": ("main", "def make$():\n{indented}\n\n    return read$\n\n\nread$ = make$()", f"read$({ARGUMENTS})"),
    "module": ("other", "{source}\n\n{helper}", f"other.read$({ARGUMENTS})"),
    "imported": ("other", "{source}\n\n{helper}", f"imported$({ARGUMENTS})"),
    "exec": ("main", "scope$ = {{}}\nexec({quoted}, scope$)\nread$ = scope$['read$']", f"read$({ARGUMENTS})"),
    "method": (
        "main",
        "{source}\n\n\nclass Holder$:\n    def read(self, b, h, q, k):\n        return {expression}\n\n\n"
        "holder$ = Holder$()",
        f"holder$.read({ARGUMENTS})",
    ),
}
FORMS: dict[str, str] = {
    "function": "def mod({arguments}):\n    return {result}",
    "lambda": "mod = lambda {arguments}: {result}",
    "closure": """
def make(zero):
    def mod({arguments}):
        return {result}

    return mod


mod = make(0)""",
    "loop": """
mods = []
for zero in range(2):

    def mod({arguments}):
        return {result}

    mods.append(mod)
mod = mods[0]""",
    "method": """
class Mod:
    def run(self, {arguments}):
        return {result}


mod = Mod().run""",
    "object": """
class Mod:
    def __call__(self, {arguments}):
        return {result}


mod = Mod()""",
    "module": """
class Mod(torch.nn.Module):
    def forward(self, {arguments}):
        return {result}


mod = Mod()""",
    "partial": """
def base(zero, {arguments}):
    return {result}


mod = functools.partial(base, 0)""",
}
IMPORTS = """
import abc, builtins, collections, contextlib, contextvars, copy, dataclasses, enum, fractions, functools, itertools
import math, operator, os, re, sys, threading, types, typing, weakref
import numpy as np
import torch
"""


def program(seed: int, number: int, dropped: frozenset[int] = frozenset()) -> Program:
    """Return the program of a number, without some of its fragments."""
    draw = random.Random(f"{seed} {number}")
    names = draw.sample(sorted(FRAGMENTS), draw.randint(2, 5))
    placements = [draw.choice(list(PLACEMENTS)) for _ in names]
    kind = draw.choice(("score", "score", "mask"))
    form, way = draw.choice(list(FORMS)), draw.choice(WAYS[kind])
    kept = [i for i in range(len(names)) if i not in dropped]
    return _write(kind, form, way, {i: (names[i], placements[i]) for i in kept}, f"{seed}_{number}")


def _write(kind: str, form: str, way: str, parts: Mapping[int, tuple[str, str]], suffix: str) -> Program:
    other = f"fuzzed_other_{suffix}"
    sources = {"main": [f"import {other} as other"], "other": []}
    terms = []
    for i, (name, placement) in parts.items():
        expression, source = FRAGMENTS[name]
        helper = f"def read$({ARGUMENTS}):\n    return {expression}"
        where, text, use = PLACEMENTS[placement]
        whole = f"{source}\n\n{helper}"
        filled = text.format(
            source=source, expression=expression, helper=helper, indented=textwrap.indent(whole, "    "),
            quoted=repr(IMPORTS + whole),
        )  # fmt: skip
        sources[where].append(filled.replace("$", f"_{i}"))
        if placement == "imported":
            sources["main"].append(f"from {other} import read_{i} as imported_{i}")
        terms.append(f"{use.format(expression=expression).replace('$', f'_{i}')} * {WEIGHTS[i]}")
    total = " + ".join((*terms, "zero" if "zero" in FORMS[form] else "0"))
    result = f"score * 0.5 + {total}" if kind == "score" else f"({total} + q * 0.61 - k) % 2 < 1"
    arguments = f"score, {ARGUMENTS}" if kind == "score" else ARGUMENTS
    sources["main"].append(FORMS[form].format(arguments=arguments, result=result))
    modules = {
        other: "\n\n\n".join((IMPORTS, *sources["other"])) + "\n",
        f"fuzzed_main_{suffix}": "\n\n\n".join((IMPORTS, *sources["main"])) + "\n",
    }
    names, placements = zip(*parts.values(), strict=True) if parts else ((), ())
    return Program(kind, names, placements, form, way, modules)
