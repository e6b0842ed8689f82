"""debugging: debug, which shows what a call computes at selected positions: scores, mask, weights and gradients.

The mods are traced and evaluated as in the CPU engine, row by row, on any device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Never

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask
from flexattn.call.call import Call, Mod
from flexattn.call.pose import pose
from flexattn.call.problem import Problem
from flexattn.call.unknown_arguments import refuse_unknown
from flexattn.engines.cpu_scores import Scores
from flexattn.engines.cpu_tiles import Strip, Tile
from flexattn.errors import ArgumentError, DeviceError, IndexRangeError, message
from flexattn.graph.differentiate import differentiate
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.uncompiled import uncompiled

_ELEMENTS = 1 << 21  # of the keys, or of the values, of a tile

_ONE = torch.Size((1,) * 5)  # a tile of one pair

Position = tuple[int, int, int, int]  # b, h, q_idx, kv_idx


@frozen
class DebugRow:
    """What a call computes for one pair of a query and a key."""

    b: int
    h: int
    q_idx: int
    kv_idx: int
    raw: float  # scale * (query . key), which score_mod receives
    score: float  # after score_mod; NaN if a masked pair indexes a captured tensor out of range
    block: str  # "full", "partial" or "empty" in block_mask; "" without one
    kept: bool  # whether the mask keeps the pair
    weight: float  # of the value of the key in the output, before dropout
    gradient: float | None  # of sum(out * d_out) with respect to raw; None without d_out


@frozen
class DebugTable:
    """The rows that `debug` returns, in the order of its positions. It prints as a table."""

    rows: tuple[DebugRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[DebugRow]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> DebugRow:
        return self.rows[index]

    def __str__(self) -> str:
        names = ("b", "h", "q_idx", "kv_idx", "raw", "score", "block", "kept", "weight", "gradient")
        cells = [names, *(tuple(_text(getattr(row, name)) for name in names) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)


def _text(value: float | int | str | None) -> str:
    """Return a field as text. A field that does not apply is "-"."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.5g}"
    return str(value)


@uncompiled
@undisturbed("debug")
def debug(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    at: Sequence[Position],
    sink: Tensor | float | None = None,
    d_out: Tensor | None = None,
    **unknown: Never,
) -> DebugTable:
    """Return scores, mask, weight and gradient of a call at selected pairs, as a table to print.

    Each row of query in `at` is computed once, over the keys that it attends to. A pair that the mask drops has weight
    and gradient 0; its scores are still shown. Scores are computed in float32, or float64 for float64 inputs.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa, sink: as in flex_attention.
        at: positions (b, h, q_idx, kv_idx), where h is a head of query.
        d_out: [B, Hq, M, Dv], the gradient of a loss with respect to the output. With it, `gradient` is that of the
            loss with respect to the raw score `scale * (query . key)`.

    Returns:
        A DebugTable of a DebugRow per position, in the same order.

    Raises:
        What flex_attention raises; IndexRangeError for a position outside of the call; ArgumentError for a position
        that is not four ints, or a d_out of another shape; DeviceError for a d_out on another device.

    Example:
        >>> import torch
        >>> import flexattn
        >>> q = k = v = torch.ones(1, 1, 4, 16)
        >>> mask = flexattn.create_block_mask(flexattn.mods.causal, None, None, 4, 4, device="cpu")
        >>> print(debug(q, k, v, flexattn.mods.softcap(2.0), mask, at=[(0, 0, 1, 0), (0, 0, 1, 2)]))
        b  h  q_idx  kv_idx  raw   score    block  kept  weight  gradient
        0  0      1       0    4  1.9281  partial   yes     0.5         -
        0  0      1       2    4  1.9281  partial    no       0         -
    """
    if unknown:
        refuse_unknown(debug, unknown)
    with torch.no_grad():
        problem = pose(Call(query, key, value, score_mod, block_mask, scale, enable_gqa, sink=sink), seeded=False)
        positions = _checked_positions(at, problem)
        if d_out is not None:
            _check_d_out(d_out, problem)
            if problem.score is not None:
                problem = replace(problem, score_grad=differentiate(problem.score.graph, ()))
        with torch.autocast(problem.query.device.type, enabled=False):
            return _table(problem, positions, d_out)


def _table(problem: Problem, positions: Sequence[Position], d_out: Tensor | None) -> DebugTable:
    tiles = Scores(problem)
    rows: dict[tuple[int, int, int], _Row] = {}
    for b, h, q, _ in positions:
        if (b, h, q) not in rows:
            rows[b, h, q] = _row(tiles, (b, h, q), d_out)
    return DebugTable(tuple(_debug_row(tiles, place, rows[place[:3]]) for place in positions))


def _checked_positions(at: Sequence[Position], problem: Problem) -> list[Position]:
    sizes = (*problem.query.shape[:3], problem.key.shape[2])
    positions = []
    for place in at:
        is_tensor = isinstance(place, (Tensor, np.ndarray))
        ints = (
            not is_tensor
            and isinstance(place, Sequence)
            and all(type(i) is int or hasattr(i, "__index__") for i in place)
        )
        if not ints or len(place) != 4 or any(isinstance(i, bool) for i in place):
            fix = "Write at=[(0, 0, 5, 3)] for batch 0, head 0, query 5 and key 3."
            if is_tensor or isinstance(at, (Tensor, np.ndarray)):
                fix = "Call .tolist() of the positions."
            raise ArgumentError(message("at", repr(place), "positions (b, h, q_idx, kv_idx) of four ints", fix))
        place = tuple(map(operator.index, place))
        for name, i, size in zip(("b", "h", "q_idx", "kv_idx"), place, sizes, strict=True):
            if not 0 <= i < size:
                fix = "Positions count from 0, and h is a head of query."
                raise IndexRangeError(message("at", f"{name} = {i} in {tuple(place)}", f"0 <= {name} < {size}", fix))
        b, h, q, kv = place
        positions.append((b, h, q, kv))
    return positions


def _check_d_out(d_out: Tensor, problem: Problem) -> None:
    expected = (*problem.query.shape[:3], problem.value.shape[3])
    if d_out.shape != expected:
        fix = "Pass the gradient of the output of this call."
        raise ArgumentError(message("d_out", f"shape {list(d_out.shape)}", f"{list(expected)}", fix))
    if d_out.device != problem.query.device:
        fix = "Move it: d_out.to(query.device)."
        raise DeviceError(message("d_out", d_out.device, f"that of query, {problem.query.device}", fix))


class _Row(NamedTuple):
    """What all pairs of one row share."""

    strip: Strip  # without tiles
    query: Tensor  # [1, 1, D]
    lse: Tensor  # scalar, with the sink
    full: tuple[tuple[int, int], ...]  # ranges of keys in full blocks
    partial: tuple[tuple[int, int], ...]
    d_out: Tensor | None  # [1, 1, Dv]
    delta: Tensor | None  # scalar, sum(out * d_out)


def _row(tiles: Scores, place: tuple[int, int, int], d_out: Tensor | None) -> _Row:
    """Compute the logsumexp and the output of a row, in tiles of its keys."""
    problem, (b, h, q) = tiles.problem, place
    (kv_head, member), full, partial = divmod(h, tiles.group), *_ranges(problem, place)
    strip = Strip(range(b, b + 1), (kv_head, kv_head + 1), (member, member + 1), (q, q + 1), ())
    query = tiles.stack(problem.query, strip)
    lse = query.new_tensor(-torch.inf)
    if problem.sink is not None:
        lse = problem.sink.expand(problem.query.shape[:2])[b, h].to(tiles.dtype)
    out = query.new_zeros((1, 1, problem.value.shape[3]))
    for tile in _tiles(problem, full, partial):
        s = tiles.scores(strip, tile, query, guard=True)
        total = torch.logaddexp(lse, s.logsumexp((0, 1, 2)))
        if d_out is not None:
            value = tiles.keys_of(problem.value, strip, tile)
            weight = _weight(s, total)
            value = torch.where(weight.mT == 0, 0.0, value)  # NaN of a masked key does not count
            out = out * _weight(lse, total) + weight @ value
        lse = total
    d_row = None if d_out is None else tiles.stack(d_out, strip)
    return _Row(strip, query, lse, full, partial, d_row, None if d_row is None else (out * d_row).sum())


def _weight(score: Tensor, lse: Tensor) -> Tensor:
    return torch.where(score == -torch.inf, 0.0, torch.exp(score - lse))


def _ranges(problem: Problem, place: tuple[int, int, int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the ranges of keys of a row in full and in partial blocks."""
    mask, N, (b, h, q) = problem.block_mask, problem.key.shape[2], place
    if mask is None:
        return ((0, N),), ()
    blocks = -(-mask.seq_lengths[0] // mask.BLOCK_SIZE[0])
    head = (b if mask.B > 1 else 0) * mask.H + (h if mask.H > 1 else 0)
    row, size = head * blocks + q // mask.BLOCK_SIZE[0], mask.BLOCK_SIZE[1]
    full, partial = (
        tuple((lo * size, min(hi * size, N)) for lo, hi in runs.between(row, row + 1).runs.cpu().tolist() if lo < hi)
        for runs in (mask.kv_runs.full, mask.kv_runs.partial)
    )
    return full, partial


def _tiles(problem: Problem, full: tuple[tuple[int, int], ...], partial: tuple[tuple[int, int], ...]) -> Iterator[Tile]:
    width = max(1, _ELEMENTS // max(problem.query.shape[3], problem.value.shape[3]))
    for ranges, is_full in ((full, True), (partial, False)):
        for first, last in ranges:
            for lo in range(first, last, width):
                hi = min(lo + width, last)
                yield Tile(((lo, hi),), hi - lo, (hi - lo) * is_full, None)


def _debug_row(tiles: Scores, place: Position, row: _Row) -> DebugRow:
    problem, strip, kv = tiles.problem, row.strip, place[3]
    listed = {"full": row.full, "partial": row.partial}
    block = next((name for name, r in listed.items() if any(lo <= kv < hi for lo, hi in r)), "empty")
    tile = Tile(((kv, kv + 1),), 1, int(block == "full"), None)
    raw = score = tiles.plain_scores(strip, tile, row.query, problem.scale)
    kept = block != "empty" and _is_kept(tiles, strip, tile)
    inputs = tiles.indices(strip, tile) | {"score": raw.view(_ONE)}
    if tiles.score is not None:
        score = tiles.score.run(inputs, _ONE)[tiles.score.graph.output]
        if not kept and any(bool(outside.outside.any()) for outside in tiles.score.outside):
            score = score.new_tensor(math.nan)
    weight = _weight(score, row.lse) if kept else raw.new_zeros(())
    gradient = None if row.d_out is None else 0.0
    if row.d_out is not None and row.delta is not None and kept and float(weight) != 0:
        d_score = weight * ((tiles.keys_of(problem.value, strip, tile) * row.d_out).sum() - row.delta)
        gradient = _through_mod(tiles, inputs, d_score)
    name = block if problem.block_mask is not None else ""
    return DebugRow(*place, float(raw), float(score), name, kept, float(weight), gradient)


def _is_kept(tiles: Scores, strip: Strip, tile: Tile) -> bool:
    """Return whether the mask keeps the pair of a tile in a partial or full block."""
    if tile.full or tiles.mask is None:
        return True
    return bool(tiles.mask.run(tiles.indices(strip, tile), _ONE)[tiles.mask.graph.output])


def _through_mod(tiles: Scores, inputs: dict[str, Tensor], d_score: Tensor) -> float:
    """Return the gradient of the raw score from that of the score."""
    if tiles.gradient is None:
        return float(d_score)
    values = tiles.gradient.run(inputs | {"grad": d_score.view(_ONE)}, _ONE)
    output = tiles.gradient.graph.outputs[0]
    return 0.0 if output is None else float(values[output])
