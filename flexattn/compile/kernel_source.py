"""kernel_source: KernelSource, the text of a kernel with everything that Triton needs to compile it."""

from __future__ import annotations

from flexattn.process.frozen_class import frozen

_LONGEST_NAME = 120  # characters; a file name has at most 255


@frozen
class KernelSource:
    """One kernel as a complete Python file. Constants are part of the text, so all arguments are runtime arguments."""

    name: str  # the kernel function's name
    text: str  # the file: mods and kernel
    header: tuple[str, ...]  # comment lines at the top of the file; not part of the key
    signature: tuple[tuple[str, str], ...]  # (argument, Triton type): ("q_ptr", "*bf16"), ("sm_scale", "fp32")
    divisible: tuple[str, ...]  # arguments that are multiples of 16; pointers are 16-byte aligned
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    fp_fusion: bool = True  # a * b + c may be contracted to an FMA


def kernel_name(kind: str, *mods: str) -> str:
    """Return the name of a kernel of this kind with these mods. Profilers show it, and it is the file name."""
    text = "_".join([kind, *mods])
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in text)[:_LONGEST_NAME]
