"""KernelSource: a kernel as text, with all that Triton needs to compile it."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_NAME = 120  # characters; a file name has at most 255


@dataclass(frozen=True)
class KernelSource:
    """One kernel as a whole Python file; constants are baked in, so that it has runtime arguments only."""

    name: str  # the kernel function's name
    text: str  # the file, which defines mods and kernel
    header: tuple[str, ...]  # comment lines for the file's top: no part of the key
    signature: tuple[tuple[str, str], ...]  # (argument, Triton type), as ("q_ptr", "*bf16"), ("sm_scale", "fp32")
    divisible: tuple[str, ...]  # arguments that are multiples of 16; pointers: 16-byte aligned
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    fp_fusion: bool = True  # a * b + c may become one operation


def kernel_name(kind: str, *mods: str) -> str:
    """Return a name for a kernel of this kind with these mods in it, as profilers show it; files carry it, too."""
    text = "_".join([kind, *mods])
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in text)[:_LONGEST_NAME]
