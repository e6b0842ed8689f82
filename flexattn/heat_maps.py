"""heat_maps: show, which draws the pattern of a mask and what a score_mod changes, with matplotlib, an optional extra.

The mods are traced, and their graphs are evaluated as in the CPU engine, at no more than 1,024 x 1,024 pairs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask
from flexattn.block_mask.from_torch import from_torch
from flexattn.block_mask.plot import COLOURS, import_pyplot
from flexattn.call.arguments import as_float
from flexattn.call.call import Mod
from flexattn.call.validate import place_captures
from flexattn.engines.cpu_mods import TileGraph
from flexattn.errors import ArgumentError, DtypeError, IndexRangeError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Load, NumberRef
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.uncompiled import uncompiled
from flexattn.trace.trace import trace

_CELLS = 1024  # of an axis; of a longer one, each n-th position is drawn
_SHORTEST, _LONGEST = 128, 1024  # default lengths that are derived from numbers of the mods


@uncompiled
@undisturbed("show")
def show(
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    *,
    at: tuple[int, int] = (0, 0),
    score: float = 0.0,
    path: str | os.PathLike[str] | None = None,
) -> Any:
    """Draw which pairs a mask keeps, and by how much a score_mod changes a score, and return the matplotlib figure.

    Keys go across and queries down, in tokens. Of more than 1,024 tokens, evenly spaced ones are drawn. Where the mask
    drops a pair, or score_mod returns -inf, the heat map of the scores is gray.

    Args:
        score_mod: as in flex_attention.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`.
        block_mask: a mask to draw instead of a mask_mod, with its blocks.
        Q_LEN, KV_LEN: how many queries and keys to draw. Without them, those of block_mask; or else the size of the
            captured tensors that q_idx and kv_idx index; or else as many as of the other; or else twice the largest
            int in the mods, from 128 to 1,024.
        at: (b, h), the batch and head.
        score: the score that score_mod receives everywhere. The map shows `score_mod(score) - score`.
        path: a file to save the figure to. The figure is then closed in pyplot.

    Raises:
        ArgumentError for arguments that exclude each other or are out of range; DtypeError for a block_mask of another
        type; IndexRangeError for a batch or head that block_mask does not have, and for an index that is out of range
        for a captured tensor; ImportError if matplotlib is missing; ModError for a mod that cannot be traced;
        MutationError if a value that block_mask's mod captured has changed.

    Example:
        >>> import flexattn
        >>> figure = show(flexattn.mods.alibi(8), flexattn.mods.causal, at=(0, 2))  # doctest: +SKIP
        >>> figure.savefig("alibi.png")  # doctest: +SKIP
    """
    for name, given in (("score_mod", score_mod), ("mask_mod", mask_mod), ("block_mask", block_mask)):
        if isinstance(given, Tensor):
            fix = "show takes mods: show(score_mod, mask_mod, Q_LEN=512), or show(block_mask=block_mask)."
            raise DtypeError(message(name, "a tensor", "a BlockMask" if name == "block_mask" else "a function", fix))
    score = as_float("score", score, "a number", "Pass the score that score_mod receives, such as 0.0.")
    pyplot = import_pyplot("flexattn.show", "or call BlockMask.html, which needs no other package")
    blocks = from_torch(block_mask) if type(block_mask) is upstream.BlockMask else block_mask
    if blocks is not None and not isinstance(blocks, BlockMask):
        fix = "Pass lengths as Q_LEN= and KV_LEN=, and a mask_mod as mask_mod=."
        raise DtypeError(message("block_mask", f"a {type(block_mask).__name__}", "a BlockMask or None", fix))
    _check(score_mod, mask_mod, blocks, {"Q_LEN": Q_LEN, "KV_LEN": KV_LEN}, at)
    pattern = blocks.mask_mod if blocks is not None else mask_mod
    traced = {
        "score": None if score_mod is None else trace(score_mod, "score"),
        "mask": None if pattern is None else trace(pattern, "mask"),
    }
    if blocks is not None and traced["mask"] is not None:
        blocks.check_captures(traced["mask"])
    device = _device(traced.values(), blocks)
    score_of, mask_of = (None if m is None else place_captures(m, device, f"{kind}_mod") for kind, m in traced.items())
    lengths = _lengths([m for m in (score_of, mask_of) if m is not None], blocks, Q_LEN, KV_LEN)
    grid = _Grid.of(at, lengths, device)
    with torch.no_grad():
        kept = grid.kept(mask_of, blocks)
        change = None if score_of is None else grid.values(score_of, kept, score) - score
    figure = _drawn(pyplot, grid, kept, change, "mask_mod" if blocks is None else "block_mask", score)
    if path is not None:
        figure.savefig(path)
        pyplot.close(figure)
    return figure


def _drawn(pyplot: Any, grid: _Grid, kept: Tensor | None, change: Tensor | None, mask: str, score: float) -> Any:
    """Return a figure with a panel for each of both that is not None."""
    panels = [x for x in (kept, change) if x is not None]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4.8), squeeze=False, layout="constrained"
    )
    where = f"at b={grid.at[0]}, h={grid.at[1]}"
    if kept is not None:
        from matplotlib.colors import ListedColormap  # pyright: ignore[reportMissingImports]

        colours = ListedColormap([tuple(c / 255 for c in COLOURS[kind]) for kind in ("empty", "full")])
        grid.draw(axes[0, 0], kept, f"{mask}: kept pairs\n{where}", cmap=colours, vmin=0, vmax=1)
    if change is not None:
        drawn = change.masked_fill(change.isinf() | (False if kept is None else ~kept), torch.nan)
        most = float(drawn.nan_to_num().abs().max()) or 1.0
        colours = pyplot.get_cmap("RdBu_r").with_extremes(bad="lightgray")
        title = f"score_mod: change of a score of {score:g}\n{where}"
        figure.colorbar(grid.draw(axes[0, -1], drawn, title, cmap=colours, vmin=-most, vmax=most), ax=axes[0, -1])
    return figure


def _check(
    score_mod: Mod | None, mask_mod: Mod | None, blocks: BlockMask | None, lengths: dict[str, int | None],
    at: tuple[int, int],
) -> None:  # fmt: skip
    if score_mod is None and mask_mod is None and blocks is None:
        raise ArgumentError(message("show", "nothing to draw", "a score_mod, mask_mod or block_mask", "Pass one."))
    if mask_mod is not None and blocks is not None:
        fix = "Leave mask_mod out: block_mask has its own."
        raise ArgumentError(message("mask_mod", "one next to block_mask", "one of both", fix))
    for name, length in lengths.items():
        if length is not None and (type(length) is not int or length < 1):
            fix = f"Leave {name} out for a default."
            raise ArgumentError(message(name, repr(length), "an int from 1 on", fix))
        if blocks is not None and length is not None:
            raise ArgumentError(message(name, length, "none with block_mask, which has lengths", "Leave it out."))
    if not isinstance(at, tuple) or len(at) != 2 or any(type(i) is not int or i < 0 for i in at):
        fix = "Write at=(0, 3) for batch 0 and head 3."
        raise ArgumentError(message("at", repr(at), "a pair (b, h) of ints from 0 on", fix))
    sizes = (1, 1) if blocks is None else (blocks.B, blocks.H)
    for name, i, size in zip(("b", "h"), at, sizes, strict=True):
        if size > 1 and i >= size:
            raise IndexRangeError(message("at", f"{name} = {i}", f"below {size}, as the mask has", "Choose another."))


def _device(mods: Any, blocks: BlockMask | None) -> torch.device:
    """Return the device of the mask, or of the captured tensors that are not on the CPU, or the CPU."""
    captures = [] if blocks is not None else [c for m in mods if m is not None for c in m.captures if not c.is_cpu]
    return blocks.device if blocks is not None else captures[0].device if captures else torch.device("cpu")


def _lengths(mods: list[BoundMod], blocks: BlockMask | None, Q_LEN: int | None, KV_LEN: int | None) -> tuple[int, int]:
    """Return the given lengths, or those that the mods suggest."""
    if blocks is not None:
        return blocks.seq_lengths
    numbers = [n for bound in mods for n in _ints(bound)]
    otherwise = min(max(_SHORTEST, 2 * max(numbers, default=0)), _LONGEST)
    found = [min((n for bound in mods for n in _sizes(bound, name)), default=0) for name in ("q_idx", "kv_idx")]
    queries, keys = Q_LEN or found[0], KV_LEN or found[1]
    return queries or keys or otherwise, keys or queries or otherwise


def _sizes(bound: BoundMod, name: str) -> Iterator[int]:
    """Yield the sizes of the axes of captured tensors that this input indexes."""
    for node in bound.graph.nodes:
        if isinstance(node, Load):
            for axis, index in enumerate(node.args):
                if _input_of(bound.graph, index) == name:
                    yield bound.captures[node.capture].shape[axis]


def _input_of(graph: ModGraph, position: int) -> str | None:
    """Return the input that a node is, or is a cast of."""
    node = graph.nodes[position]
    while node.op == "cast":
        node = graph.nodes[node.args[0]]
    return node.name if isinstance(node, Input) else None


def _ints(bound: BoundMod) -> Iterator[int]:
    for node in bound.graph.nodes:
        value = node.value if isinstance(node, Const) else 0
        if isinstance(node, NumberRef):
            value = bound.numbers[node.position]
        if type(value) is int:
            yield abs(value)


@frozen
class _Grid:
    """The pairs that are drawn."""

    at: tuple[int, int]
    lengths: tuple[int, int]
    step: tuple[int, int]
    indices: dict[str, Tensor]  # broadcast to [queries, keys]

    @staticmethod
    def of(at: tuple[int, int], lengths: tuple[int, int], device: torch.device) -> _Grid:
        q_step, kv_step = (max(1, -(-n // _CELLS)) for n in lengths)
        indices = {
            "b": torch.tensor([[at[0]]]), "h": torch.tensor([[at[1]]]),
            "q_idx": torch.arange(0, lengths[0], q_step)[:, None], "kv_idx": torch.arange(0, lengths[1], kv_step)[None],
        }  # fmt: skip
        indices = {name: x.to(device, torch.int32) for name, x in indices.items()}
        return _Grid(at, lengths, (q_step, kv_step), indices)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.indices["q_idx"].numel(), self.indices["kv_idx"].numel()))

    def values(self, bound: BoundMod, kept: Tensor | None, score: float = 0.0) -> Tensor:
        """Evaluate a mod. Raise if it indexes a captured tensor out of range at a pair that is kept (None: all)."""
        q_idx = self.indices["q_idx"]
        graph = TileGraph(bound.graph, bound.captures, bound.numbers, q_idx.device)
        inputs = self.indices | {"score": torch.full((1, 1), score, device=q_idx.device)}
        found = graph.run(inputs, self.shape)[bound.graph.output]
        for outside in graph.outside:
            outside.check(kept)
        return found.expand(self.shape)

    def kept(self, bound: BoundMod | None, blocks: BlockMask | None) -> Tensor | None:
        """Return which pairs a mask keeps, bool [queries, keys]. None: there is no mask."""
        if bound is None or blocks is None:
            return None if bound is None else self.values(bound, None)
        b, h = (i if size > 1 else 0 for i, size in zip(self.at, (blocks.B, blocks.H), strict=True))
        grid = [-(-n // size) for n, size in zip(blocks.seq_lengths, blocks.BLOCK_SIZE, strict=True)]
        rows, columns = (
            self.indices[name].flatten().long() // size
            for name, size in zip(("q_idx", "kv_idx"), blocks.BLOCK_SIZE, strict=True)
        )
        rows += (b * blocks.H + h) * grid[0]
        lists = blocks.kv_runs
        partial, full = (runs.take(rows).dense(grid[1])[:, columns] for runs in (lists.partial, lists.full))
        return full | (self.values(bound, partial) & partial)

    def draw(self, ax: Any, values: Tensor, title: str, **options: Any) -> Any:
        extent = (0, values.shape[1] * self.step[1], values.shape[0] * self.step[0], 0)
        image = ax.imshow(values.cpu().numpy(), extent=extent, aspect="auto", interpolation="nearest", **options)
        ax.set_xlim(0, self.lengths[1])
        ax.set_ylim(self.lengths[0], 0)
        ax.set(title=title, xlabel="key", ylabel="query")
        return image
