"""hopper_kernels: whether calls on a GPU may use Hopper kernels at all."""

from __future__ import annotations

from flexattn.machine.target import Target
from flexattn.machine.triton_versions import has_gluon
from flexattn.process.config import settings


def no_hopper_kernels(target: Target) -> str:
    """Return why no call on a GPU uses Hopper kernels, whatever its arguments are; "" if some may."""
    if not target.is_hopper:
        return f"{target} is not sm_90"
    if "hopper" in settings().without:
        return "FLEXATTN_WITHOUT has hopper"
    return "" if has_gluon() else "this release of Triton is not known to compile it"
