"""weight_statistics: statistics, which computes entropies, largest weights and mass per key block of a call.

The tiles are those of the CPU engine, on any device, so nothing of size M x N is allocated. Each tile is computed
twice: for the logsumexp of its rows, then for their weights.
"""

from __future__ import annotations

from typing import NamedTuple, Never

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask
from flexattn.call.call import Call, Mod
from flexattn.call.pose import pose
from flexattn.call.problem import Problem
from flexattn.call.unknown_arguments import refuse_unknown
from flexattn.engines.cpu_scores import Scores
from flexattn.engines.cpu_tiles import Strip, Tile, strips
from flexattn.errors import ArgumentError, message
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.modes import undisturbed, unstored
from flexattn.torch_state.uncompiled import uncompiled

_MOST_SHOWN = 16  # heads of printed statistics
_BLOCK = 128  # keys of a block of a call without a mask


@frozen(eq=False)
class Statistics:
    """What `statistics` computed. Print it for a summary of each head.

    Floating-point fields are float32, or float64 for float64 inputs. K is the number of largest weights.
    """

    lse: Tensor  # [B, Hq, M], the logsumexp of the scores, and of the sink
    entropy: Tensor  # [B, Hq, M], -sum(p * log(p)) in nats over the keys, and the sink; 0 for rows without a key
    weights: Tensor  # [B, Hq, M, K], the largest weights, descending; 0 where fewer keys attend
    keys: Tensor  # [B, Hq, M, K] int64, their positions; -1 where fewer keys attend
    mass: Tensor  # [B, Hq, key blocks], the sum over all rows of the weights of a block of keys
    block: int  # keys of a block
    sink: Tensor | None  # [B, Hq, M], the weight of the sink; None without one

    def __str__(self) -> str:
        """Write a line per head: means over the rows with a key, and the blocks with the most mass."""
        B, H, M = self.entropy.shape
        sink = " sink weight" if self.sink is not None else ""
        head = f"{'b':>4} {'h':>4} {'empty rows':>10} {'entropy':>8} {'of keys':>8} {'largest':>8}{sink}"
        lines = [
            f"Statistics of {B} x {H} heads, {M:,} queries. Means over rows with a key, blocks of {self.block} keys",
            head + "  blocks with the most mass (first key: share)",
        ]
        for b, h in [divmod(i, H) for i in range(min(B * H, _MOST_SHOWN))]:
            lines.append(f"{b:>4} {h:>4} " + self._head(b, h))
        if B * H > _MOST_SHOWN:
            lines.append(f"... {B * H - _MOST_SHOWN} more heads")
        return "\n".join(lines)

    def _head(self, b: int, h: int) -> str:
        """Return the columns of one head. "of keys" is exp(entropy): so many equal weights have that entropy."""
        attends = self.keys[b, h, :, 0] >= 0
        entropy, largest = self.entropy[b, h][attends], self.weights[b, h, :, 0][attends]
        means = [float(x.mean()) if len(x) else 0.0 for x in (entropy, entropy.exp(), largest)]
        line = f"{int((~attends).sum()):>10,} {means[0]:>8.3f} {means[1]:>8.1f} {means[2]:>8.3f}"
        if self.sink is not None:
            line += f" {float(self.sink[b, h].mean()) if len(attends) else 0.0:>11.3f}"
        mass = self.mass[b, h]
        total = float(mass.sum()) or 1.0
        blocks = mass.argsort(descending=True, stable=True)[:3].tolist()
        shown = (f"{i * self.block:,}: {100 * float(mass[i]) / total:.0f}%" for i in blocks if float(mass[i]) > 0)
        return f"{line}  {', '.join(shown)}"


@uncompiled
@undisturbed("statistics")
@unstored
def statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sink: Tensor | float | None = None,
    largest: int = 4,
    **unknown: Never,
) -> Statistics:
    """Return the entropy of each row of attention weights, its largest weights, and the mass of each block of keys.

    Blocks that the mask leaves out are skipped. Memory is proportional to the rows and to the blocks of keys. Plain
    torch operations run on the device of query, for several times as long as a forward. Nothing is differentiated.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa, sink: as in flex_attention. The values are not
            read.
        largest: how many of the largest weights of each row to keep, at least 1.

    Raises:
        What flex_attention raises, and ArgumentError for another `largest`.

    Example:
        >>> import torch
        >>> import flexattn
        >>> q = k = v = torch.zeros(1, 2, 64, 32)
        >>> mask = flexattn.create_block_mask(flexattn.mods.causal, None, None, 64, 64, device="cpu")
        >>> found = statistics(q, k, v, block_mask=mask)
        >>> found.entropy[0, 0, :3]
        tensor([0.0000, 0.6931, 1.0986])
        >>> found.weights[0, 0, 1].tolist(), found.keys[0, 0, 0].tolist()
        ([0.5, 0.5, 0.0, 0.0], [0, -1, -1, -1])
    """
    if unknown:
        refuse_unknown(statistics, unknown)
    if type(largest) is not int or largest < 1:
        raise ArgumentError(message("largest", repr(largest), "an int from 1 on", "Leave it out, for 4 weights."))
    with torch.no_grad():
        problem = pose(Call(query, key, value, score_mod, block_mask, scale, enable_gqa, sink=sink), seeded=False)
        with torch.autocast(problem.query.device.type, enabled=False):
            return _statistics(problem, largest)


def _statistics(problem: Problem, largest: int) -> Statistics:
    tiles = Scores(problem)
    shape, N = problem.query.shape[:3], problem.key.shape[2]
    block = _BLOCK if problem.block_mask is None else problem.block_mask.BLOCK_SIZE[1]
    block = min(block, max(N, 1))
    lse = problem.query.new_full(shape, -torch.inf, dtype=tiles.dtype)
    entropy = torch.zeros_like(lse)
    weights = lse.new_zeros((*shape, largest))
    keys = torch.full_like(weights, -1, dtype=torch.int64)
    mass = lse.new_zeros((*shape[:2], -(-N // block)))
    sink = None if problem.sink is None else problem.sink.to(tiles.dtype)[..., None].expand(shape)
    if sink is not None:
        lse.copy_(sink)
    for strip in strips(problem) if lse.numel() and N else ():
        if strip.tiles:
            rows = _rows_of(tiles, strip, sink, largest)
            spread = _second_pass(tiles, strip, rows.lse, mass, block)
            for into, x in ((lse, rows.lse), (entropy, spread), (weights, rows.weights), (keys, rows.keys)):
                into = into if into.ndim == 4 else into[..., None]
                tiles.rows(into, strip).copy_(tiles.unstack(x, strip))
    of_sink = None
    if sink is not None:
        of_sink, terms = _weights(sink.clone(), lse)
        entropy += terms
    return Statistics(lse, entropy, weights, keys, mass, block, of_sink)


class _Rows(NamedTuple):
    """Of the rows of a strip, [batches * key heads, group * rows, ...]."""

    lse: Tensor  # [..., 1]
    weights: Tensor  # [..., K]
    keys: Tensor  # [..., K]


def _rows_of(tiles: Scores, strip: Strip, sink: Tensor | None, largest: int) -> _Rows:
    """Return the logsumexp of each row of a strip and its largest weights."""
    query = tiles.stack(tiles.problem.query, strip)
    top = query.new_full((*query.shape[:2], largest), -torch.inf)
    keys = torch.full_like(top, -1, dtype=torch.int64)
    lse = query.new_full((*query.shape[:2], 1), -torch.inf) if sink is None else tiles.stack(sink[..., None], strip)
    for tile in strip.tiles:
        s = tiles.scores(strip, tile, query, guard=True)
        lse = torch.logaddexp(lse, s.logsumexp(-1, keepdim=True))
        found, at = s.topk(min(largest, tile.width), -1)
        top, keys = torch.cat([top, found], -1), torch.cat([keys, _positions(tiles, strip, tile)[at]], -1)
        top, at = top.topk(largest, -1)
        keys = keys.gather(-1, at)
    keys = keys.masked_fill(top == -torch.inf, -1)
    return _Rows(lse, _weights(top, lse)[0], keys)


def _second_pass(tiles: Scores, strip: Strip, lse: Tensor, mass: Tensor, block: int) -> Tensor:
    """Return the entropy of each row of a strip, [..., 1]. Add its weights to the mass of their blocks."""
    query = tiles.stack(tiles.problem.query, strip)
    entropy = torch.zeros_like(lse)
    batches = slice(strip.batches.start, strip.batches.stop, strip.batches.step)
    into = mass.unflatten(1, (-1, tiles.group))[batches, slice(*strip.key_heads), slice(*strip.group)]
    for tile in strip.tiles:
        p, terms = _weights(tiles.scores(strip, tile, query, guard=True), lse)
        entropy += terms.sum(-1, keepdim=True)
        into.index_add_(-1, _positions(tiles, strip, tile) // block, p.view(tiles.shape(strip, tile)).sum(-2))
    return entropy


def _positions(tiles: Scores, strip: Strip, tile: Tile) -> Tensor:
    """Return the position of each column of a tile, int64 [keys]."""
    return tiles.indices(strip, tile)["kv_idx"].long()


def _weights(score: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return p = exp(score - lse) and -p * log(p), which are 0 for a score of -inf. `score` is overwritten."""
    logs = score.sub_(lse.masked_fill(lse == -torch.inf, 0.0))  # rows without a key
    p = logs.exp()
    return p, torch.where(p == 0, 0.0, p * -logs)
