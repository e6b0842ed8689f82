"""equal_runs: comparisons of a tensor's elements at q and kv, and their replacement if the tensor is sorted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexattn import mods
from flexattn.graph.equal_runs import EqualRuns, captures_compared, usable, with_runs
from flexattn.trace.trace import trace

IDS = torch.tensor([0, 0, 0, 1, 1, 4, 4, 4, 4, 7])
PER_BATCH = torch.stack((IDS, IDS // 2))
FLOATS, FLAGS = IDS.float(), IDS > 3
OFFSETS = torch.tensor([1, -2])

FOUND: dict[str, Any] = {
    "documents": mods.document_causal(IDS),
    "per batch": lambda b, h, q, k: (PER_BATCH[b, q] == PER_BATCH[b, k]) & (q >= k),
    "the other way round": lambda b, h, q, k: IDS[k] == IDS[q],
    "and once more": lambda b, h, q, k: (IDS[q] == IDS[k]) & (IDS[k] > 0),
}
NOT_FOUND: dict[str, Any] = {
    "floats, which may be NaN": lambda b, h, q, k: FLOATS[q] == FLOATS[k],
    "flags": lambda b, h, q, k: FLAGS[q] == FLAGS[k],
    "another place": lambda b, h, q, k: IDS[q] == IDS[(k + 1) % 10],
    "another row": lambda b, h, q, k: PER_BATCH[b, q] == PER_BATCH[0, k],
    "rows by place": lambda b, h, q, k: PER_BATCH[q % 2, q] == PER_BATCH[q % 2, k],
    "another comparison": lambda b, h, q, k: IDS[q] >= IDS[k],
    "moved by a tensor": lambda b, h, q, k: IDS[q + OFFSETS[b]] == IDS[k],
    "one place alone": lambda b, h, q, k: IDS[q] == IDS[q],
}


def runs_of(x: torch.Tensor) -> EqualRuns:
    return EqualRuns(0, torch.stack([torch.searchsorted(x, x, right=right).int() for right in (False, True)]))


@pytest.mark.parametrize("name", [*FOUND, *NOT_FOUND])
def test_comparisons_are_found(name: str) -> None:
    mask_mod = FOUND.get(name) or NOT_FOUND[name]
    assert captures_compared(trace(mask_mod, "mask").graph) == ((0,) if name in FOUND else ())


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", FOUND)
def test_runs_say_the_same(name: str, by_key: bool) -> None:
    bound = trace(FOUND[name], "mask")
    same = with_runs(bound, (runs_of(bound.captures[0]),), by_key)
    places = torch.arange(10, dtype=torch.int32)
    index = (torch.arange(2, dtype=torch.int32)[:, None, None], torch.zeros((), dtype=torch.int32))
    inputs = (*index, places[:, None], places[None])
    assert torch.equal(same(*inputs), bound(*inputs))
    assert [c.name for c in same.graph.captures[1:]] == [
        f"{bound.graph.captures[0].name}_{x}" for x in ("starts", "ends")
    ]
    assert with_runs(bound, (), by_key) is bound


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(("q_offset", "kv_offset"), [(3, 2), (0, 4), (5, 0), (2, -1), (-2, 1), (0, 0)])
def test_moved_indices(q_offset: int, kv_offset: int, by_key: bool) -> None:
    """A part of a sequence has the runs of the whole. A negative index counts from the end, so it has none."""
    bound = trace(mods.shifted(mods.document_causal(IDS), q_offset, kv_offset), "mask")
    assert captures_compared(bound.graph) == (0,)
    found = usable((runs_of(bound.captures[0]),), bound, (1, 1, 5, 5))
    assert len(found) == (min(q_offset, kv_offset) >= 0)
    zero, places = torch.zeros((), dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    inputs = (zero, zero, places[:, None], places[None])
    assert torch.equal(with_runs(bound, found, by_key)(*inputs), bound(*inputs))


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40).map(sorted), st.booleans())
def test_of_any_ascending_tensor(values: list[int], by_key: bool) -> None:
    ids = torch.tensor(values)
    bound = trace(lambda b, h, q, k: ids[q] == ids[k], "mask")
    places = torch.arange(len(ids), dtype=torch.int32)
    zero = torch.zeros((), dtype=torch.int32)
    inputs = (zero, zero, places[:, None], places[None])
    assert torch.equal(with_runs(bound, (runs_of(ids),), by_key)(*inputs), ids[:, None] == ids[None])
