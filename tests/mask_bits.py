"""The bits of a mask's partial blocks, computed from the dense mask, and comparisons of what kernels make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn import BlockMask, create_mask
from flexattn.block_mask.bits import BITS_BLOCK, BLOCK_WORDS, COUNTED, HALF, ROW_WORDS, MaskBits, PairBits
from flexattn.block_mask.dense import dense_blocks
from flexattn.mask_build.pair_bits import is_sparse
from flexattn.reference import attention

GROUPS = BITS_BLOCK // ROW_WORDS


def reference_bits(mask: BlockMask) -> MaskBits:
    """Return the bits that a mask should have."""
    lengths = mask.seq_lengths
    dense = create_mask(mask.mask_mod, mask.B, mask.H, *lengths, device=mask.device)
    past = [-n % BITS_BLOCK for n in lengths]
    dense = torch.nn.functional.pad(dense, (0, past[1], 0, past[0]))
    partial, full = dense_blocks(mask)
    by_query, by_key = _of_direction(dense, partial), _of_direction(dense.mT, partial.mT)
    by_query = by_query._replace(count=by_query.count + (COUNTED + 1) * _taken_first(partial))
    needs = by_query.halves[:-1] & 3
    quarters, blocks, count = int((needs % 2 + needs // 2).sum()), len(needs) // 2, int(full.sum())
    sparse = is_sparse(quarters, blocks, count)
    return MaskBits(by_query, by_key, lengths, sparse, 4 * count + (quarters if sparse else 4 * blocks))


def _taken_first(partial: Tensor) -> Tensor:
    """Return which half of its partial blocks each row takes first: the last of the own block, or of the next ones."""
    firsts = []
    for row in range(partial.size(2)):
        columns = [one.nonzero().flatten().tolist() for one in partial[:, :, row].flatten(0, 1)]
        places = [sum(c < row for c in of_head) for of_head in columns]
        firsts.append([max(2 * min(p, len(c) - 1) + 1, 0) for p, c in zip(places, columns, strict=True)])
    return torch.tensor(firsts, dtype=torch.int32, device=partial.device).T.flatten()


def _of_direction(dense: Tensor, partial: Tensor) -> PairBits:
    tiles = dense.unflatten(-1, (-1, BITS_BLOCK)).unflatten(-3, (-1, BITS_BLOCK)).transpose(-3, -2)
    blocks = tiles[partial]  # [blocks, BITS_BLOCK, BITS_BLOCK]
    words = blocks.unflatten(-1, (GROUPS, ROW_WORDS)).int() << torch.arange(GROUPS, device=dense.device)[:, None]
    unused = torch.zeros(BLOCK_WORDS, dtype=torch.int16, device=dense.device)
    counts = partial.sum(-1).flatten()
    first = counts.cumsum(0, dtype=torch.int32) - counts.int()
    needs = blocks.view(-1, 2, HALF, 2, HALF).any(4).any(2)  # [blocks, half of rows, half of columns]
    starts = 2 * partial.nonzero()[:, -1, None] + torch.arange(2, device=dense.device)
    halves = (starts * 4 + needs[:, 0] + 2 * needs[:, 1]).flatten()
    of_row = torch.arange(len(counts), device=dense.device).repeat_interleave(counts)
    count = torch.zeros_like(counts).index_add_(0, of_row, needs.any(1).sum(1))
    return PairBits(
        first, torch.cat((words.sum(-2).to(torch.int16).flatten(), unused)),
        torch.cat((halves, halves.new_zeros(1))).int(), count.int(),
    )  # fmt: skip


def assert_same_bits(bits: MaskBits, mask: BlockMask) -> None:
    """Check the bits of a mask. Heads that share their blocks may share their words."""
    partial, _ = dense_blocks(mask)
    reference = reference_bits(mask)
    assert bits.computed == reference.computed
    for found, expected, blocks in zip(bits[:2], reference[:2], (partial, partial.mT), strict=True):
        counts = blocks.sum(-1).flatten().tolist()
        assert found.first.dtype == torch.int32
        assert len(found.first) == len(counts)
        for row, count in enumerate(counts):
            here, there = (x.words.view(-1, BLOCK_WORDS)[int(x.first[row]) :][:count] for x in (found, expected))
            assert len(here) == count
            assert torch.equal(here, there), f"row {row}"
            these, those = (x.halves[2 * int(x.first[row]) :][: 2 * count] for x in (found, expected))
            assert torch.equal(these, those), f"row {row}"
        assert torch.equal(found.count, expected.count)
    assert bits.skips_halves == reference_bits(mask).skips_halves


def with_bits(mask: BlockMask, skips_halves: bool | None = None) -> BlockMask:
    """Give a mask the bits that it has on Hopper, and return it. skips_halves replaces what is chosen there."""
    bits = reference_bits(mask)
    mask._bits = bits if skips_halves is None else bits._replace(skips_halves=skips_halves)
    return mask


RESULTS = ("out", "lse", "dq", "dk", "dv")


def assert_as_accurate(found: Sequence[Tensor], plain: Sequence[Tensor], oracle: Sequence[Tensor]) -> None:
    """Check results with bits where the compiler rounds other products of a score_mod than without (`plain`).

    They may differ by less than a quarter of the rounding error, which a single wrong pair exceeds.
    """
    for name, x, y, exact in zip(RESULTS, found, plain, oracle, strict=True):
        error, allowed, apart = (_rms(a.double() - b.double()) for a, b in ((x, exact), (y, exact), (x, y)))
        assert 0 < allowed < float("inf"), name
        assert error <= 1.02 * allowed, f"{name}: error {error:.3g}, without bits {allowed:.3g}"
        assert apart <= 0.25 * allowed, f"{name}: differs by {apart:.3g}, of an error of {allowed:.3g}"


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def gradients_of(out: Tensor, lse: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return out, lse and the gradients of the sum of both."""
    return [out, lse, *torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)))]


def oracle_of(inputs: Sequence[Tensor], score_mod: Any, mask_mod: Any) -> list[Tensor]:
    """Return the results in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    return gradients_of(*attention(q, k, v, score_mod, mask_mod), (q, k, v))
