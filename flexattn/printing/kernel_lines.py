"""kernel_lines: one line for each kernel of a call, and lists that are cut to a few lines."""

from __future__ import annotations

from collections.abc import Sequence

from flexattn.compile.kernel_plan import KernelPlan

_PASSES = {"fwd": "forward", "bwd": "backward"}
# Why each engine is the one of a call.
_ENGINES = {
    "triton": "the tensors are on a GPU, or target or BACKEND asks for kernels",
    "cpu": "the tensors are on a CPU, so torch operations compute blocks without a generated kernel",
    "gpu_float64": "kernels have no float64, so torch operations compute blocks",
    "empty": "there is no pair to compute",
}
_LONGEST = 160  # characters of a line


def engine_line(engine: str) -> str:
    """Return an engine and why it is the one of a call."""
    return f"{engine}: {_ENGINES[engine]}"


def kernel_lines(
    plans: Sequence[KernelPlan], origins: Sequence[str], reasons: Sequence[str | None], registers: Sequence[int | None]
) -> list[str]:
    """Return a line for each kernel: its pass, template and tile, and why it is not a Hopper kernel.

    Registers are those of kernels that are compiled already. None: not known.
    """
    width = max((len(plan.spec.name) for plan in plans), default=0)
    return [
        f"{_PASSES[plan.spec.phase]:<8}  {plan.spec.name:<{width}}  {_details(plan, origin, reason, count)}"
        for plan, origin, reason, count in zip(plans, origins, reasons, registers, strict=True)
    ]


def _details(plan: KernelPlan, origin: str, reason: str | None, registers: int | None) -> str:
    tile = plan.tile
    with_ = [f.name for f in plan.spec.features if f.name in plan.features and f.text]
    with_ += ["intervals of keys"] if plan.intervals else []
    parts = [
        f"{tile.BLOCK_M} x {tile.BLOCK_N}, warps {tile.num_warps}, stages {tile.num_stages}",
        f"({origin})" if origin else "",
        f", {registers} registers" if registers else "",
        f", with {', '.join(with_)}" if with_ else "",
        "; a Hopper kernel" if plan.is_hopper else f"; not Hopper: {reason}" if reason else "",
    ]
    return f"{parts[0]} {parts[1]}".rstrip() + "".join(parts[2:])


def cut(text: str, most: int) -> str:
    """Return at most `most` lines of a text, each shortened, and how many more there are."""
    lines = text.strip("\n").splitlines()
    kept = [line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..." for line in lines[:most]]
    return "\n".join(kept + ([f"    ... {len(lines) - most} more lines in full()"] if len(lines) > most else []))
