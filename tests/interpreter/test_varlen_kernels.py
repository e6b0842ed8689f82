"""The kernels that describe packed sequences, in Triton's interpreter, next to torch operations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch
from packed_cases import by_head
from torch import Tensor

from flexattn import BlockMask, mods
from flexattn.block_mask import Runs
from flexattn.call.varlen import block_lists, packing
from flexattn.call.varlen.mods import packed_mask
from flexattn.call.varlen.packing import Packing, packing_of
from flexattn.graph.bound_mod import BoundMod
from flexattn.trace.trace import trace

pytest.importorskip("triton")
LENGTHS = {
    "ragged": ((300, 0, 5, 129, 256, 1), (300, 7, 0, 500, 256, 40), 3),
    "full": ((300, 257), (300, 400), 0),
    "one": ((70,), (90,), 0),
    "no rows": ((0, 0), (3, 0), 0),
    "no keys": ((3, 9), (0, 0), 2),
    "many": ((3,) * 200, (2,) * 200, 1),
}


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def both_ways(monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]) -> list[object]:
    """Return the results of kernels and of torch operations."""
    found = []
    for module in (packing, block_lists):
        assert module.has_kernels(torch.device("cpu"))
    found.append(make())
    for module in (packing, block_lists):
        monkeypatch.setattr(module, "has_kernels", lambda device: False)
    return [*found, make()]


def packed(name: str, uses: bool) -> Packing:
    q, k, after = LENGTHS[name]
    used_q, used_k = (integers(*(n - n // 3 for n in lengths)) if uses else None for lengths in (q, k))
    cu_q, cu_k = (integers(0, *accumulate(lengths)) for lengths in (q, k))
    return packing_of(cu_q, cu_k, used_q, used_k, (sum(q) + after, sum(k)))


@pytest.mark.parametrize("uses", [False, True], ids=["all", "used"])
@pytest.mark.parametrize("name", LENGTHS)
def test_packings(name: str, uses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both_ways(monkeypatch, lambda: packed(name, uses))
    assert isinstance(ours, Packing) and isinstance(theirs, Packing)
    for field, x, y in zip(Packing.__dataclass_fields__, ours.tensors, theirs.tensors, strict=True):
        assert x.tolist() == y.tolist() and x.dtype == y.dtype and x.is_contiguous(), field


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (200, 0), (-1, 30), (9, 150)], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_lists_of_windows(name: str, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    check_lists(monkeypatch, name, None, window)


@pytest.mark.parametrize("mask_mod", [mods.causal, by_head, mods.sliding_window(150)])
@pytest.mark.parametrize("name", ["ragged", "full", "one", "no keys"])
def test_lists_of_masks(name: str, mask_mod: mods.MaskMod, monkeypatch: pytest.MonkeyPatch) -> None:
    check_lists(monkeypatch, name, trace(mask_mod, "mask"), (-1, 400))


def check_lists(monkeypatch: pytest.MonkeyPatch, name: str, bound: BoundMod | None, window: tuple[int, int]) -> None:
    q, k, after = LENGTHS[name]
    lengths, rows = (sum(q) + after, sum(k)), packed(name, False)
    mask = packed_mask(bound, rows, window)

    def make(longest: int = 1 << 20) -> BlockMask:
        return block_lists.mask_of_rows(mask, rows, None if bound else window, lengths, 3, True, longest)

    ours, theirs = both_ways(monkeypatch, make)
    assert isinstance(ours, BlockMask) and isinstance(theirs, BlockMask)
    for x, y in ((ours.kv_runs, theirs.kv_runs), (ours.q_runs, theirs.q_runs)):
        assert x is not None and y is not None
        assert [t.tolist() for t in x.tensors] == [t.tolist() for t in y.tensors]
    check_blocks(ours, mask)


def check_blocks(lists: BlockMask, mask: BoundMod) -> None:
    """Check that all that rows attend to is listed, and that full blocks are inside and attended to."""
    T_q, T_k = lists.seq_lengths
    h, q_idx, kv_idx = (torch.arange(n, dtype=torch.int32) for n in (3, T_q, T_k))
    inputs = {"b": integers(0), "h": h[:, None, None], "q_idx": q_idx[:, None], "kv_idx": kv_idx}
    (keep,) = mask.graph.evaluate(inputs, mask.captures, mask.numbers, outputs=[mask.graph.output])
    B = block_lists.BLOCK
    rows, columns = (-(-n // B) for n in (T_q, T_k))
    padded = torch.zeros(3, rows * B, columns * B, dtype=torch.bool)
    padded[:, :T_q, :T_k] = keep
    tiles = padded.view(3, rows, B, columns, B).transpose(2, 3).flatten(3)  # [H, rows, columns, B * B]
    for runs, transposed in ((lists.kv_runs, False), (lists.q_runs, True)):
        assert runs is not None and runs.full is not None
        wanted = tiles.transpose(1, 2) if transposed else tiles
        listed, full = (blocks_in(x, wanted) for x in (runs.partial, runs.full))
        assert not (listed & full).any()
        assert not (wanted.any(-1) & ~listed & ~full).any()
        assert not (full & ~wanted.all(-1)).any()


def blocks_in(runs: Runs, tiles: Tensor) -> Tensor:
    """Return which blocks are in runs, of the shape of tiles without the last dimension."""
    found = torch.zeros(tiles.shape[:-1], dtype=torch.bool)
    heads = runs.rows // max(found.size(1), 1)
    for row, (first, last) in enumerate(pairwise(runs.row_ptr.tolist())):
        h, r = divmod(row, found.size(1))
        for start, stop in runs.runs[first:last].tolist():
            found[h if heads > 1 else slice(None), r, start:stop] = True
    return found


@pytest.mark.parametrize(
    ("values", "most", "good"),
    [((0, 3, 3, 9), 9, True), ((0, 3, 2, 9), 9, False), ((1, 3, 9), 9, False), ((0, 3, 10), 9, False)],
)
def test_ascending_values(values: tuple[int, ...], most: int, good: bool) -> None:
    from flexattn.call.varlen import kernels

    kernel: object = kernels.pack_rows
    cu, columns = integers(*values), torch.empty(5, 12, dtype=torch.int32)
    ascends = torch.empty(2, dtype=torch.bool)
    kernel[(3,)](cu, cu, None, None, columns, ascends, len(values) - 1, most, 9, 12, 2, ROWS=4, CHECKS=True)
    assert ascends[0] == good
