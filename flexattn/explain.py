"""Explanation: the printable result of each stage of a call."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.block_mask import BlockMask
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.render import KernelSource
from flexattn.errors import ArgumentError, message
from flexattn.graph.facts import ModFacts
from flexattn.graph.mod_graph import ModGraph
from flexattn.machine.target import Target, named


@dataclass(frozen=True)
class Explanation:
    """Everything between a call of flex_attention and its kernels; `print` it to read it. None: stage not present."""

    score: ModGraph | None
    gradient: ModGraph | None
    mask: ModGraph | None
    score_facts: ModFacts | None
    mask_facts: ModFacts | None
    block_mask: BlockMask | None = None
    engine: str | None = None
    plans: tuple[KernelPlan, ...] = ()  # one per kernel; empty for engines that generate none
    origins: tuple[str, ...] = ()  # where the tile of each plan comes from
    reasons: tuple[str | None, ...] = ()  # why each plan is not a Hopper kernel; None if it is one
    sources: tuple[KernelSource, ...] = ()  # one per plan
    mask_sources: tuple[KernelSource, ...] = ()  # kernels that build the mask on that GPU
    mask_bounds: ModGraph | None = None  # of a mask_mod that is explained alone
    batch_invariant: bool = False  # kernel_options["BATCH_INVARIANT"]

    def __str__(self) -> str:
        stages: list[tuple[str, object]] = [
            (_heading("score_mod", self.score), self.score),
            ("gradient of score_mod", self.gradient),
            ("facts about score_mod", self.score_facts),
            (_heading("mask_mod", self.mask), self.mask),
            ("facts about mask_mod", self.mask_facts),
            (
                "bounds of mask_mod over a box of positions",
                None if self.mask_bounds is None else f"{self.mask_bounds}\n{_BOUNDS}",
            ),
            ("block mask", None if self.block_mask is None else _blocks(self.block_mask)),
            ("engine", self.engine),
            ("order of sums", _INVARIANT if self.batch_invariant else None),
            *((f"plan {i} of {len(self.plans)}", self._plan(i - 1)) for i in range(1, len(self.plans) + 1)),
            *((f"source of {source.name}", source.text) for source in (*self.sources, *self.mask_sources)),
        ]
        return "\n\n".join(f"{_rule(title)}\n{str(text).strip()}" for title, text in stages if text is not None)

    def _plan(self, i: int) -> str:
        origin = self.origins[i] if self.origins else ""
        reason = self.reasons[i] if self.reasons else None
        return self.plans[i].text(origin) + (f"\n    hopper   no: {reason}" if reason else "")


def _heading(kind: str, graph: ModGraph | None) -> str:
    return f"{kind} {graph.location}".strip() if graph is not None else kind


_INVARIANT = """
batch-invariant: mask_mod is applied in every block, and keys ascend in tiles of one size. So the bits of a row's out,
lse, max_scores and dq do not depend on what else is computed
"""

_BOUNDS = """
Over a box of positions, ends included: the first result is true if all pairs attend, the second if some pairs may
attend. A block is full if the first is true, and empty if the second is false. Other blocks are evaluated.
"""


def _blocks(mask: BlockMask) -> str:
    """Return the mask, and its build counts if known."""
    counts = mask.build_counts
    if counts is None:
        return str(mask)
    full, partial, empty = mask.counts()
    samples = "" if counts.samples is None else f"{counts.samples:,} positions sampled, "
    return (
        f"{mask}\n{counts.boxes:,} boxes bounded, {samples}{counts.blocks:,} blocks evaluated pair by pair; "
        f"{full + partial:,} of {full + partial + empty:,} blocks live"
    )


def _rule(title: str) -> str:
    return f"-- {title} ".ljust(80, "-")


def target_named(name: str) -> Target:
    """Return the target of an architecture named as in CUDA and HIP: sm_90, gfx942."""
    if (target := named(name)) is not None:
        return target
    raise ArgumentError(message("target", repr(name), "an architecture", 'Write target="sm_90".'))
