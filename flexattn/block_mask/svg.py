"""svg: the blocks of a BlockMask as a small inline SVG, for notebooks."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

from flexattn.block_mask.plot import COLOURS, image
from flexattn.block_mask.runs import Runs

_MOST = (32, 32)  # cells down and across
_PIXELS = 192  # of the longer side
_LEAST_PIXELS = 24  # of a side


def html(partial: Runs, full: Runs, columns: int, summary: str, note: str) -> str:
    """Return a line of text, a picture of at most 32 x 32 cells, and its legend.

    The runs are the rows of one batch and head. A cell of several blocks has their mean color.
    """
    from html import escape  # here, because import flexattn does not need it

    line = f'<div style="font-family:monospace">{escape(summary)}</div>'
    if not (full.rows and columns):
        return line
    cells, step = image(partial, full, columns, _MOST)
    down, across = cells.shape[:2]
    scale = _PIXELS / max(full.rows, columns)
    height, width = (max(_LEAST_PIXELS, round(n * scale)) for n in (full.rows, columns))
    paths: dict[str, list[str]] = defaultdict(list)
    for y, row in enumerate(cells.tolist()):
        x = 0
        for colour, run in groupby(map(_hex, row)):
            n = len(list(run))
            paths[colour].append(f"M{x} {y}h{n}v1h-{n}z")
            x += n
    drawn = "".join(f'<path fill="{colour}" d="{"".join(d)}"/>' for colour, d in paths.items())
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {across} {down}" preserveAspectRatio="none" shape-rendering="crispEdges" '
        f'style="display:block;border:1px solid #888;margin:4px 0"><title>{escape(summary)}</title>{drawn}</svg>'
    )
    legend = " ".join(
        f'<span style="display:inline-block;width:.8em;height:.8em;border:1px solid #888;background:{_hex(c)}"></span>'
        f" {kind}&ensp;"
        for kind, c in COLOURS.items()
    )
    cell = f"{step[0]} x {step[1]} blocks per cell" if step != (1, 1) else ""
    notes = "; ".join(x for x in (note, cell) if x)
    return f'<div>{line}{picture}<div style="font-size:smaller">{legend}{escape(notes)}</div></div>'


def _hex(colour: list[int] | tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
