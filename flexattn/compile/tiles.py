"""tiles: Tile, the TileKey that it was measured for, and tables of tiles as JSON text with one row per line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from flexattn.errors import ArgumentError, message
from flexattn.options import LARGEST_TILE
from flexattn.process.frozen_class import frozen

FORMAT = 1  # version of the JSON text; other versions are rejected

# The kind of a score_mod is the first that applies: it transforms the score (needs registers in the backward), loads
# for each (q, kv) pair, adds to the score, or is absent. "unaligned" takes precedence over all of them: rows are not
# aligned to 16 bytes and are loaded element by element through registers.
KINDS = ("transforms", "gathers", "adds", "none", "unaligned")


@frozen
class Tile:
    """The tile of scores that a program computes at a time, with its warps and pipeline stages."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    # BLOCK_M of dK/dV where mask_mod is applied; 0: BLOCK_M. At D 128 the mask, dK and dV together spill 4 KB of
    # registers with 64 rows, and the kernel takes 3.6 times as long.
    PARTIAL_M: int = 0
    # Issue both products of the backward (q k^T, dO v^T) before using either. Fewer values are then live during the
    # second product. D 128: dK/dV with tanh takes 2.33 ms instead of 3.08, but plain causal 2.50 instead of 1.99.
    PRODUCTS_FIRST: bool = False

    def __str__(self) -> str:
        partial = f", {self.PARTIAL_M} where masked" if self.PARTIAL_M else ""
        first = ", products first" if self.PRODUCTS_FIRST else ""
        return f"{self.BLOCK_M} x {self.BLOCK_N}, warps {self.num_warps}, stages {self.num_stages}{partial}{first}"

    @property
    def partial_m(self) -> int:
        return self.PARTIAL_M or self.BLOCK_M


@frozen
class TileKey:
    """The key that selects a tile on one architecture."""

    kernel: str  # a portable kernel: forward, backward_dq, ...
    dtype: str  # of the products: float16, bfloat16, float32, tf32 or tf32x3
    D: int
    Dv: int
    kind: str  # one of KINDS
    masked: bool  # whether there is a block mask

    @property
    def bytes(self) -> int:
        """Bytes of an element in memory."""
        return 2 if self.dtype in ("float16", "bfloat16") else 4


@frozen
class TileRow:
    """A tile, the key that it was measured for, and the architecture, device and date."""

    architecture: str  # str(Target): sm_90
    key: TileKey
    tile: Tile
    device: str
    date: str


def rows_text(rows: Iterable[TileRow]) -> str:
    """Return a table as sorted JSON text. Equal tables give equal text."""
    ordered = sorted(rows, key=lambda row: (row.architecture, row.key.kernel, row.key.bytes, *_order(row.key)))
    lines = ",\n".join(f"  {json.dumps(_record(row))}" for row in ordered)
    return f'{{\n "format": {FORMAT},\n "tiles": [\n{lines}\n ]\n}}\n'


def read_rows(text: str, name: str) -> tuple[TileRow, ...]:
    """Return the rows of a table, in order. Raise an ArgumentError that names `name` if the text is not a table."""
    try:
        table = json.loads(text)
        if table["format"] != FORMAT:
            raise ValueError(f"format {table['format']!r}")
        return tuple(_row(record) for record in table["tiles"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"
        fix = "Correct or delete it."
        raise ArgumentError(message(name, found, f"a table of tiles in format {FORMAT}", fix)) from error


def _order(key: TileKey) -> tuple[int, int, int, int, bool, str]:
    """Return the sort key for the rows of a kernel. The smallest head dims come first."""
    return KINDS.index(key.kind), max(key.D, key.Dv), key.D, key.Dv, key.masked, key.dtype


def _record(row: TileRow) -> dict[str, Any]:
    tile = {f.name: value for f in fields(Tile) if (value := getattr(row.tile, f.name)) != f.default}
    return {"architecture": row.architecture, **asdict(row.key), "tile": tile, "device": row.device, "date": row.date}


def _row(record: dict[str, Any]) -> TileRow:
    key = TileKey(**{f.name: record[f.name] for f in fields(TileKey)})
    tile = Tile(**record["tile"])
    sizes = (tile.BLOCK_M, tile.BLOCK_N, tile.partial_m)
    counts = (*sizes, tile.num_warps, tile.num_stages, tile.PARTIAL_M, key.D, key.Dv)
    texts = (record["architecture"], key.kernel, key.dtype, key.kind, record["device"], record["date"])
    possible = (
        all(type(text) is str for text in texts)
        and type(key.masked) is bool
        and all(type(n) is int for n in counts)
        and all(16 <= n <= LARGEST_TILE and not n & (n - 1) for n in sizes)
        and tile.num_warps in (1, 2, 4, 8, 16)
        and 1 <= tile.num_stages <= 16
        and key.kind in KINDS
    )
    if not possible:
        raise ValueError(f"invalid row {record}")
    return TileRow(record["architecture"], key, tile, record["device"], record["date"])
