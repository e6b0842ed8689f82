"""page: a BlockMask as one HTML file that zooms from blocks to pairs. It needs no network.

The file contains the runs of each row of blocks, and the bits of partial blocks. Equal blocks share their bits.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flexattn.block_mask.pairs import chunks, placed
from flexattn.block_mask.picture import areas, count_cells
from flexattn.block_mask.runs import Runs, runs_of
from flexattn.graph.bound_mod import BoundMod
from flexattn.process.frozen_class import frozen

_MOST_RUNS = 2**20  # runs in a page; more are joined into larger cells
_MOST_BYTES = 2**23  # bits of different partial blocks, before compression
_MOST_PER_BLOCK = 2**20  # pairs of a block whose bits are kept
_CELLS = 2**20  # cells joined at a time

_TEMPLATE = Path(__file__).with_name("page.html")


@frozen
class _Bits:
    """Which pairs of the first partial blocks attend, in the order of their runs."""

    ids: np.ndarray  # int32 [blocks], positions in `tiles`
    tiles: tuple[bytes, ...]  # one bit per pair, row by row, in whole bytes
    limit: str  # why later blocks have none; "" if all have


def html(
    bound: BoundMod, head: tuple[int, int], partial: Runs, full: Runs, lengths: tuple[int, int],
    block_size: tuple[int, int], summary: str, max_pairs: int,
) -> str:  # fmt: skip
    """Return the page of one batch and head, whose rows are the runs."""
    columns, joined = -(-lengths[1] // block_size[1]), 1
    total, lists = _count(partial), (partial, full)
    while len(lists[0].runs) + len(lists[1].runs) > _MOST_RUNS:
        joined *= 2
        lists = _joined(partial, full, columns, joined)
    tile = min(block_size[0], lengths[0]), min(block_size[1], lengths[1])
    if joined > 1:
        limit = f"It joins {joined} x {joined} blocks into one, as it holds at most {_MOST_RUNS:,} runs of blocks"
        bits = _Bits(np.zeros(0, np.int32), (), limit)
    else:
        bits = _bits_of(bound, head, partial, lengths, block_size, tile, max_pairs)
    note = f"This page has the pairs of {len(bits.ids):,} of {total:,} partial blocks"
    data = {
        "summary": summary,
        "head": head,
        "lengths": lengths,
        "block": [n * joined for n in block_size],
        "tile": tile,
        "lists": {name: _packed_runs(runs) for name, runs in zip(("partial", "full"), lists, strict=True)},
        "ids": _packed(np.diff(bits.ids, prepend=0)),
        "tiles": _deflated(b"".join(bits.tiles)),
        "note": ". ".join(text for text in (note, bits.limit) if text) + ".",
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no tag can end the script element
    return _TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", text)


def _count(runs: Runs) -> int:
    return int((runs.runs[:, 1] - runs.runs[:, 0]).sum())


def _joined(partial: Runs, full: Runs, columns: int, size: int) -> tuple[Runs, Runs]:
    """Return the partial and the full runs of cells of size x size blocks. A cell with different blocks is partial."""
    step, across = (size, size), -(-columns // size)
    band = size * max(1, _CELLS // across)
    kinds: list[tuple[Tensor, Tensor]] = []
    for start in range(0, full.rows, band):
        stop = min(start + band, full.rows)
        is_full = count_cells(full.between(start, stop), columns, step)
        is_live = count_cells(partial.between(start, stop), columns, step) + is_full > 0
        is_full = is_full == areas((stop - start, columns), step, is_full.device)
        kinds.append((is_live & ~is_full, is_full))
    some, all_ = (_stacked([runs_of(band[i]) for band in kinds]) for i in range(2))
    return some, all_


def _stacked(parts: list[Runs]) -> Runs:
    """Return the rows of all parts, one part after the other."""
    counts = torch.cat([p.row_ptr.diff() for p in parts])
    row_ptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Runs(row_ptr.int(), torch.cat([p.runs for p in parts]))


def _bits_of(
    bound: BoundMod, head: tuple[int, int], partial: Runs, lengths: tuple[int, int], block_size: tuple[int, int],
    tile: tuple[int, int], max_pairs: int,
) -> _Bits:  # fmt: skip
    """Evaluate the first partial blocks, up to the limits."""
    per_block, total = tile[0] * tile[1], _count(partial)
    if per_block > _MOST_PER_BLOCK:
        return _Bits(np.zeros(0, np.int32), (), f"Blocks of more than {_MOST_PER_BLOCK:,} pairs have none")
    wanted = min(total, max_pairs // max(1, per_block))
    limit = "" if wanted == total else f"At most {max_pairs:,} pairs are evaluated (max_pairs)"
    known: dict[bytes, int] = {}
    ids: list[int] = []
    bytes_left = _MOST_BYTES
    for c in chunks(placed(bound, partial.runs.device), head, partial, lengths, block_size):
        if len(ids) == wanted:
            break
        for bits in np.packbits(c.attends().flatten(1)[: wanted - len(ids)].cpu().numpy(), axis=1):
            key = bits.tobytes()
            bytes_left -= len(key) * (key not in known)
            if bytes_left < 0:
                limit = f"The bits of different partial blocks take at most {_MOST_BYTES:,} bytes"
                return _Bits(np.array(ids, np.int32), tuple(known), limit)
            ids.append(known.setdefault(key, len(known)))
    return _Bits(np.array(ids, np.int32), tuple(known), limit)


def _packed_runs(runs: Runs) -> dict[str, str]:
    """Return the runs of each row, as differences from the run before: most are equal, and compress well."""
    first, last = runs.runs.cpu().numpy().T if len(runs.runs) else np.zeros((2, 0), np.int32)
    return {
        "counts": _packed(runs.row_ptr.diff().cpu().numpy()),
        "first": _packed(np.diff(first, prepend=0)),
        "lengths": _packed(np.diff(last - first, prepend=0)),
    }


def _packed(numbers: np.ndarray) -> str:
    return _deflated(numbers.astype("<i4").tobytes())


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()
