"""tile_choice: the tile of a kernel, from the table tuned on this machine or from the package's table.

Both tables are files named tiles.json. The package's table is next to this module, and its rows apply to all head dims
up to theirs. The table in the kernel cache folder is written by `flexattn.tune`, and its rows apply to their exact key.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path

from flexattn.compile.tiles import Tile, TileKey, TileRow, read_rows, rows_text
from flexattn.errors import ArgumentError, message
from flexattn.machine.kernel_store import KernelStore, existing_store, open_store
from flexattn.machine.target import Target
from flexattn.process.config import settings
from flexattn.process.events import debug
from flexattn.process.frozen_class import frozen

NAME = "tiles.json"
# The package's table. Its first rows were measured with triton 3.6 at 4,096 to 32,768 tokens, each kernel separately,
# with about eight candidates. `python -m benchmarks.tune --write` replaces them. dtypes of the same size share a row,
# and so do calls with and without a mask.
MEASURED = Path(__file__).with_name(NAME)
_INTERPRETER_TILE = Tile(32, 32, 4, 1)


@frozen
class TileChoice:
    """A tile and a description of where it comes from."""

    tile: Tile
    origin: str


def choose(key: TileKey, target: Target, tuned: bool = True) -> TileChoice:
    """Return the tile for `key` on a target: from this machine's table, else the nearest from the package's table.

    `tuned=False` ignores this machine's table, whose tiles depend on the machine and on whether there is a mask.
    """
    own = _remembered(settings().cache_dir).get((str(target), key)) if tuned else None
    if own is not None:
        return TileChoice(own.tile, f"tuned on this machine, {own.date}")
    return _measured(key, target)


@lru_cache(512)
def _measured(key: TileKey, target: Target) -> TileChoice:
    """Return the tile for `key` from the package's table."""
    if target.is_interpreter:
        return TileChoice(_INTERPRETER_TILE, "for the interpreter")
    rows = list(_candidates(key, target))
    fitting = (row for row in rows if key.D <= row.key.D and key.Dv <= row.key.Dv)
    row = next(fitting, None) or max((row for row in rows if row.key.kind == "none"), key=lambda row: row.key.D)
    far = "" if row.architecture == str(target) else f", the nearest to {target}"
    return TileChoice(row.tile, f"measured on {row.architecture}{far}")


def tiles_in_table(kernel: str) -> tuple[Tile, ...]:
    """Return all tiles in the package's table for a kernel, for any key."""
    return tuple(dict.fromkeys(row.tile for row in measured_rows() if row.key.kernel == kernel))


@cache
def measured_rows() -> tuple[TileRow, ...]:
    """Return the rows of the package's table."""
    return read_rows(MEASURED.read_text(), str(MEASURED))


def with_measured(rows: Iterable[TileRow]) -> str:
    """Return the text of the package's table with `rows` added. They replace rows for the same cell."""
    table = {_cell(row): row for row in measured_rows()}
    return rows_text({**table, **{_cell(row): row for row in rows}}.values())


def remember(rows: Iterable[TileRow]) -> Path:
    """Save rows in this machine's table, for this process and later ones. Return its file.

    Raises ArgumentError if the table cannot be read, so that its rows are not overwritten, or has no folder.
    """
    store = open_store(settings().cache_dir)
    if store is None:
        found = f"{settings().cache_dir}, which is not writable"
        raise ArgumentError(message("FLEXATTN_CACHE_DIR", found, "a folder for tiles", "Set it to a folder of yours."))
    with store.lock(NAME):
        table = {(row.architecture, row.key): row for row in (*_rows_of(store), *rows)}
        store.write(NAME, rows_text(table.values()))
    _remembered.cache_clear()
    return store.root / NAME


def remembered_rows() -> tuple[TileRow, ...]:
    """Return the rows of this machine's table. Raise an ArgumentError that names the file if it cannot be read."""
    store = existing_store(settings().cache_dir)
    return () if store is None else _rows_of(store)


def _cell(row: TileRow) -> tuple[object, ...]:
    """Return the key of a row in the package's table."""
    key = row.key
    return row.architecture, key.kernel, key.bytes, key.kind, key.D, key.Dv


def _candidates(key: TileKey, target: Target) -> Iterator[TileRow]:
    """Yield rows of the kernel, nearest architecture first; within one, rows of the kind before rows of kind "none"."""
    size = 4 if target.matrix_units == "fma" else key.bytes  # without matrix units, products are always in float32
    rows = [row for row in measured_rows() if (row.key.kernel, row.key.bytes) == (key.kernel, size)]
    for architecture in sorted({row.architecture for row in rows}, key=lambda name: _distance(name, target)):
        for kind in dict.fromkeys((key.kind, "none")):
            yield from (row for row in rows if (row.architecture, row.key.kind) == (architecture, kind))


def _distance(architecture: str, target: Target) -> tuple[int, int, int]:
    """Return the distance of two architectures: for NVIDIA by generation, then number; all others are farther away."""
    if architecture == str(target):
        return 0, 0, 0
    numbers = [re.fullmatch(r"sm_(\d+)", name) for name in (architecture, str(target))]
    known = [int(found[1]) for found in numbers if found is not None]
    if len(known) < 2:
        return 2, 0, 0
    ours, theirs = known
    return 1, abs(ours // 10 - theirs // 10), abs(ours - theirs)


@lru_cache(8)
def _remembered(folder: Path | None) -> dict[tuple[str, TileKey], TileRow]:
    """Return the rows of this machine's table by architecture and key. Warn once if it cannot be read."""
    try:
        rows = remembered_rows()
    except ArgumentError as error:
        warnings.warn(f"tiles tuned on this machine are ignored: {error}", stacklevel=2)
        return {}
    if rows:
        debug("tiles", f"{len(rows)} tuned on this machine, in {folder}")
    return {(row.architecture, row.key): row for row in rows}


def _rows_of(store: KernelStore) -> tuple[TileRow, ...]:
    file = str(store.root / NAME)
    try:
        text = store.read(NAME)
    except (OSError, UnicodeError) as error:
        raise ArgumentError(message(file, repr(error), "a table of tiles", "Delete it.")) from error
    return () if text is None else read_rows(text, file)
