"""report: results of tuning, for printing and as rows of a tile table."""

from __future__ import annotations

import math
import statistics
from datetime import UTC, datetime
from pathlib import Path

from flexattn.compile.tiles import Tile, TileKey, TileRow
from flexattn.process.frozen_class import frozen

GAIN = 1.02  # speedup that a tile needs to replace the current one


@frozen
class Trial:
    """A tile with the milliseconds of each round, or a note that says why it was not measured."""

    tile: Tile
    milliseconds: tuple[float, ...] = ()
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds) if self.milliseconds else math.inf

    def __str__(self) -> str:
        if not self.milliseconds:
            return f"{'':>9}  {'':<19}  {self.tile}: {self.note}"
        low, high = min(self.milliseconds), max(self.milliseconds)
        return f"{self.median:9.3f}  {f'{low:.3f}..{high:.3f}':<19}  {self.tile}"


@frozen
class KernelTuning:
    """The trials of one kernel, starting with the current tile."""

    architecture: str
    key: TileKey
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The fastest trial, or the current tile if none is clearly faster."""
        fastest = min(self.trials, key=lambda trial: trial.median)
        return fastest if fastest.median * GAIN < self.trials[0].median else self.trials[0]

    @property
    def gain(self) -> float:
        """Speedup of the best tile over the current one."""
        return self.trials[0].median / self.best.median

    def __str__(self) -> str:
        k = self.key
        head = f"{k.kernel}  {self.architecture}  {k.dtype}  D {k.D}  Dv {k.Dv}  score_mod {k.kind}  "
        lines = [f"{head}{'masked' if k.masked else 'no mask'}: {self.gain:.2f}x", f"    {'ms':>9}  min..max"]
        ordered = sorted(self.trials, key=lambda trial: trial.median)
        return "\n".join([*lines, *(f"    {trial}{self._mark(trial)}" for trial in ordered)])

    def _mark(self, trial: Trial) -> str:
        marks = [mark for mark, marked in (("in use", self.trials[0]), ("best", self.best)) if trial is marked]
        return f"  ({', '.join(marks)})" if marks else ""


@frozen
class Tuning:
    """Results of `flexattn.tune`; `print` it to read it."""

    device: str
    kernels: tuple[KernelTuning, ...]
    fixed: tuple[str, ...] = ()  # kernels of the call with only one tile: Hopper kernels, and the small backward
    file: Path | None = None  # where the best tiles were stored

    def rows(self) -> tuple[TileRow, ...]:
        """Return the best tiles as rows of a table."""
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        return tuple(TileRow(k.architecture, k.key, k.best.tile, self.device, date) for k in self.kernels)

    def __str__(self) -> str:
        fixed = [f"{name}: its tile is fixed" for name in self.fixed]
        kept = f"remembered in {self.file}" if self.file else "not remembered"
        return "\n\n".join([f"tiles on {self.device}, {kept}", *map(str, self.kernels), *fixed])
