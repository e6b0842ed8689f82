"""graph/serialize.py: graphs as text, and texts that are no graphs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from flexattn import mods
from flexattn.errors import FormatError
from flexattn.graph.differentiate import differentiate
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const
from flexattn.graph.serialize import FORMAT, dumps, loads
from flexattn.trace.trace import trace
from tests.mask_cases import MASKS, make_mask
from tests.mod_grammar import CAPTURES, NUMBERS, build

BIAS = torch.randn(4, 300)


def graphs() -> dict[str, ModGraph]:
    slope = 0.5
    scores = {
        "alibi": mods.alibi(4),
        "softcap": mods.softcap(20.0),
        "bias": lambda s, b, h, i, j: s * slope + BIAS[h, i - j + 150].sigmoid(),
        "infinite": lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf) * math.nan + -0.0,
    }
    found = {name: trace(mod, "score").graph for name, mod in scores.items()}
    found |= {f"{name} gradient": differentiate(graph, (0,)) for name, graph in found.items() if graph.captures}
    return found | {name: trace(make_mask(name, 256), "mask").graph for name in MASKS}


GRAPHS = graphs()


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_the_same_after_a_round_trip(name):
    graph = GRAPHS[name]
    loaded = loads(dumps(graph))
    assert loaded.key == graph.key and loaded == graph and loaded.location == graph.location
    assert [c.literal for c in loaded.captures] == [c.literal for c in graph.captures]
    assert loaded.inputs == graph.inputs and repr(loaded) == repr(graph)


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-320, 2**63 - 1, -(2**63), True])
def test_constants(value):
    dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
    graph = build(lambda builder, *_: builder.const(value, dtype).cast(torch.float64) > 0.0, CAPTURES, NUMBERS).graph
    assert loads(dumps(graph)).key == graph.key
    assert repr([n for n in loads(dumps(graph)).nodes if isinstance(n, Const)]) == repr(
        [n for n in graph.nodes if isinstance(n, Const)]
    )


def test_another_format_is_named():
    parts = json.loads(dumps(GRAPHS["bias"]))
    with pytest.raises(FormatError, match=rf"graph: found format {FORMAT + 1}, expected format {FORMAT}"):
        loads(json.dumps([FORMAT + 1, *parts[1:]]))


def edits() -> dict[str, Any]:
    """Return changes of the parts of a text: (position of the part, the path in it, the new value)."""
    return {
        "name": (1, (), "x\nimport os"),
        "a name that is no identifier": (1, (), "a b"),
        "inputs": (2, (), 17),
        "a capture's name": (3, (0, 0), "x); print(1"),
        "a capture's dtype": (3, (0, 1), "f128"),
        "a capture's rank": (3, (0, 2), -1),
        "two captures of one name": (3, (0, 0), "score"),
        "a number's name": (4, (0, 0), "a.b"),
        "a number's dtype": (4, (0, 1), "bool"),
        "a kind of node": (5, (0, 0), "range"),
        "an operator": (5, (-1, 1), "__import__"),
        "an operand": (5, (-1, 2), [10**6, 0]),
        "a later operand": (5, (-1, 2), [len(json.loads(dumps(GRAPHS["bias"]))[5]) - 1, 0]),
        "a number of operands": (5, (-1, 2), [0]),
        "no nodes": (5, (), []),
        "an output": (6, (), [-1]),
        "two outputs": (6, (), [0, 0]),
        "a site": (7, (), [0]),
        "a location": (8, (), 3),
    }


@pytest.mark.parametrize("edit", edits())
def test_a_changed_text_is_refused(edit):
    position, path, value = edits()[edit]
    parts = json.loads(dumps(GRAPHS["bias"]))
    if path:
        target = parts[position]
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
    else:
        parts[position] = value
    with pytest.raises(FormatError, match="graph: found"):
        loads(json.dumps(parts))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "[1]", "1", "[" * 100_000, '["' + "x" * 100 + '"]'])
def test_other_texts_are_refused(text):
    with pytest.raises(FormatError):
        loads(text)
