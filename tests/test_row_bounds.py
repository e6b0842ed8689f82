"""row_bounds: the lowered text of a mask, run on torch instead of Triton, gives the same as the mask_mod."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import mods
from flexattn.call.layout import Layout
from flexattn.call.positions import at_positions
from flexattn.compile.lower import Dialect
from flexattn.compile.mod_plan import ModPlan
from flexattn.compile.plan import number_type
from flexattn.compile.row_bounds import (
    lower_row_bounds,
    lower_row_interval,
    lower_with_ends,
    row_ends_of,
    streamed_ends_of,
)
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.row_bounds import is_interval, longest_row, row_bounds
from flexattn.trace.trace import trace


def of(x: Any) -> Tensor:
    return torch.as_tensor(x)


TL = SimpleNamespace(
    int1=torch.bool, int32=torch.int32, int64=torch.int64, float32=torch.float32, abs=torch.abs,
    cast=lambda x, dtype: of(x).to(dtype), where=lambda c, x, y: torch.where(of(c), of(x), of(y)),
    minimum=lambda x, y: torch.minimum(of(x), of(y)), maximum=lambda x, y: torch.maximum(of(x), of(y)),
)  # fmt: skip
HUGE = 2**31 - 1

# name: mask_mod, number of comparisons with `offset`, conditions that are not intervals
CASES: dict[str, tuple[Any, int, int]] = {
    "causal": (mods.causal, 1, 0),
    "strictly before": (lambda b, h, q, k: k < q, 1, 0),
    "after": (lambda b, h, q, k: k > q + 2, 2, 0),
    "sliding": (mods.sliding_window(7), 2, 0),
    "both sides": (lambda b, h, q, k: (q - k <= 5) & (k - q <= 3), 2, 0),
    "prefix": (mods.prefix_lm(9), 1, 0),
    "sums": (lambda b, h, q, k: q + h - 3 >= k - b, 1, 0),
    "not before": (lambda b, h, q, k: ~(k < q), 2, 0),
    "some rows": (lambda b, h, q, k: (q % 3 != 0) & (q >= k), 1, 0),
    "or some rows": (lambda b, h, q, k: (q % 3 == 0) | (q >= k), 1, 0),
    "every third": (lambda b, h, q, k: (q >= k) & (k % 3 != 0), 1, 1),
    "two ends": (lambda b, h, q, k: (k < q - 4) | (k > q + 4), 1, 1),
    "exclusive": (lambda b, h, q, k: (k <= q) ^ (k < 5), 1, 1),
    "diagonal": (lambda b, h, q, k: q == k, 1, 1),
    "twice": (lambda b, h, q, k: k + k < q, 1, 1),
    "difference": (lambda b, h, q, k: (q - k).abs() < 6, 2, 0),
    "difference and a sum": (lambda b, h, q, k: (k - q - 2).abs() + h <= 2 * q, 2, 0),
    "far difference": (lambda b, h, q, k: (q - k).abs() >= 6, 1, 1),
    "difference that may wrap": (lambda b, h, q, k, w=HUGE: (q - k + w).abs() <= w, 1, 1),
    "floats": (lambda b, h, q, k: q * 0.5 > k, 1, 1),
    "huge window": (lambda b, h, q, k, w=HUGE: (q - k < w) & (k <= q), 2, 0),
    "sum that wraps": (lambda b, h, q, k, w=HUGE: q + w >= k + w, 1, 1),
    "always": (lambda b, h, q, k: (q >= 0) | (k >= 0), 1, None),
}  # fmt: skip


def lowered(name: str, columns: str, **kinds: bool) -> tuple[str, BoundMod]:
    mod, bound = traced(name)
    return lower_row_bounds(mod, "mask_mod", Dialect(columns=columns), **kinds), bound


def traced(name: str) -> tuple[ModPlan, BoundMod]:
    bound = trace(CASES[name][0], "mask")
    return ModPlan(bound.graph, "mask", (), tuple(map(number_type, bound.numbers))), bound


@pytest.mark.parametrize(("limited", "rows"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("columns", ["kv_idx", "q_idx"])
@pytest.mark.parametrize("name", CASES)
def test_text_says_what_the_mask_says(name: str, columns: str, limited: bool, rows: bool) -> None:
    text, bound = lowered(name, columns, limited=limited, rows=rows)
    names: dict[str, Any] = {"tl": TL, "triton": SimpleNamespace(jit=lambda f: f)}
    exec(text, names)
    own, column = torch.arange(13, 61, dtype=torch.int32)[:, None], torch.arange(16, dtype=torch.int32)
    b, h = (torch.tensor(i, dtype=torch.int32) for i in (1, 2))
    for start, limit in ((0, 100), (16, 29), (48, 50)):
        streamed = (start + column)[None, :]
        places = (start + (column & 7))[None, :], (column & ~7)[None, :]
        q, kv = (own, streamed) if columns == "kv_idx" else (streamed, own)
        expected = bound(b, h, q, kv).expand(48, 16)
        expected = expected & (streamed < limit) if limited else expected
        expected = expected & (own % 5 != 0) if rows else expected
        ends = (*((limit,) if limited else ()), *((own % 5 != 0,) if rows else ()))
        found = names["mask_mod"](b, h, q, kv, *places, *ends, None, *bound.numbers)
        assert torch.equal(found.expand(48, 16), expected), text


@pytest.mark.parametrize("columns", ["kv_idx", "q_idx"])
@pytest.mark.parametrize("name", CASES)
def test_ends_of_queries_may_be_computed_before(name: str, columns: str) -> None:
    mod, bound = traced(name)
    names: dict[str, Any] = {"tl": TL, "triton": SimpleNamespace(jit=lambda f: f)}
    for text in lower_with_ends(mod, Dialect(columns=columns)):
        exec(text, names)
        assigned = re.findall(r"^    (t\d+) = ", text, re.MULTILINE) if columns == "kv_idx" else []
        assert all(len(re.findall(rf"\b{t}\b", text)) > 1 for t in assigned), text
    q, column = torch.arange(13, 61, dtype=torch.int32)[:, None], torch.arange(16, dtype=torch.int32)
    b, h = (torch.tensor(i, dtype=torch.int32) for i in (1, 2))
    for start, limit in ((0, 100), (16, 29), (48, 50)):
        ends = names["row_ends"](b, h, q, limit, *bound.numbers)
        ends = ends if isinstance(ends, tuple) else (ends,)
        assert len(ends) == len(row_ends_of(mod))
        kv, places = (start + column)[None, :], ((start + (column & 7))[None, :], (column & ~7)[None, :])
        if columns == "q_idx":
            places = q - 13 + (13 & 7), torch.full_like(q, 13 & ~7)
        found = names["mask_mod"](b, h, q, kv, *places, *ends, None, *bound.numbers)
        assert torch.equal(found.expand(48, 16), (bound(b, h, q, kv) & (kv < limit)).expand(48, 16))


@pytest.mark.parametrize("columns", ["kv_idx", "q_idx"])
@pytest.mark.parametrize("name", CASES)
def test_bounds_without_conditions(name: str, columns: str) -> None:
    mod, bound = traced(name)
    text = lower_row_interval(mod, "row_interval", Dialect(columns=columns))
    names: dict[str, Any] = {"tl": TL, "triton": SimpleNamespace(jit=lambda f: f)}
    exec(text, names)
    own, streamed = torch.arange(13, 61, dtype=torch.int32)[:, None], torch.arange(80, dtype=torch.int32)[None, :]
    b, h = (torch.tensor(i, dtype=torch.int32) for i in (1, 2))
    low, high = names["row_interval"](b, h, own, *bound.numbers)
    q, kv = (own, streamed) if columns == "kv_idx" else (streamed, own)
    between = ((low <= streamed) & (streamed < high)).expand(48, 80)
    pairs = bound(b, h, q, kv).expand(48, 80)
    assert torch.equal(between & pairs, pairs), text
    if is_interval(row_bounds(mod.graph, columns)):
        assert torch.equal(between, pairs), text


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_for_each_place(name: str) -> None:
    _, compared, others = CASES[name]
    result = lowered(name, "kv_idx", limited=True, rows=False)[0].splitlines()[-1]
    assert result.count("offset") == compared
    assert others is None or result.count(" & ") == compared + others - 1


@pytest.mark.parametrize("name", CASES)
def test_every_line_is_used(name: str) -> None:
    text, _ = lowered(name, "kv_idx", limited=True, rows=False)
    assigned = re.findall(r"^    (t\d+) = ", text, re.MULTILINE)
    assert all(len(re.findall(rf"\b{t}\b", text)) > 1 for t in assigned), text


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (mods.sliding_window(4096), 4096),
        (lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= 8, 17),
        (mods.and_masks(mods.sliding_window(77), mods.sliding_window(50), mods.causal), 50),
        (mods.and_masks(mods.sliding_window(9), mods.document(torch.arange(100) // 3)), 9),
        (lambda b, h, q_idx, kv_idx: (kv_idx <= 2 * q_idx) & (kv_idx > 2 * q_idx - 9), 9),
        (lambda b, h, q_idx, kv_idx: (kv_idx < q_idx) & (kv_idx > q_idx + 5), 0),
        (mods.causal, None),
        (mods.document(torch.arange(100) // 3), None),
        (mods.or_masks(mods.sliding_window(9), mods.prefix_lm(3)), None),
        (lambda b, h, q_idx, kv_idx: (kv_idx <= 2 * q_idx) & (kv_idx > q_idx - 9), None),
    ],
)
def test_longest_row(mask: Callable[..., Any], expected: int | None) -> None:
    bound = trace(mask, "mask")
    assert longest_row(bound.graph, bound.numbers) == expected
    moved = at_positions(bound, Layout(None, torch.zeros(3, dtype=torch.int32)))
    assert longest_row(moved.graph, moved.numbers) == expected
    b = h = torch.tensor(0)
    rows = torch.stack([bound(b, h, torch.tensor(i), torch.arange(99)) for i in range(60)])
    if expected is not None:
        spans = [int(x[-1] - x[0]) + 1 for x in (row.nonzero().flatten() for row in rows) if len(x)]
        assert max(spans, default=0) <= expected


_ENDS, _IDS = torch.arange(100), torch.arange(100) // 3


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda b, h, q_idx, kv_idx: (kv_idx < _ENDS[q_idx]) & (kv_idx % 2 == 0), ("high",)),
        (lambda b, h, q_idx, kv_idx: (kv_idx < _ENDS[q_idx]) & (kv_idx >= q_idx - 9), ("low", "high")),
        (lambda b, h, q_idx, kv_idx: q_idx < _ENDS[kv_idx], ()),
        (lambda b, h, q_idx, kv_idx: _IDS[q_idx] == _IDS[kv_idx], ()),
        (mods.causal, ()),
    ],
)
def test_ends_that_are_loaded_for_each_query(mod: Any, expected: tuple[str, ...]) -> None:
    bound = trace(mod, "mask")
    assert streamed_ends_of(ModPlan(bound.graph, "mask", (), tuple(map(number_type, bound.numbers)))) == expected
