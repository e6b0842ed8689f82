"""agreement: all ranks of a plan have the same one."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from flexattn.distributed.plan import ContextPlan, kept
from flexattn.errors import ArgumentError, message


def check_agreement(plan: ContextPlan) -> None:
    """Raise ArgumentError on all ranks if their plans differ. Only the first call with a plan communicates.

    Otherwise ranks would wait for rows that no one sends. It is also the first communication of the group: a first
    `batch_isend_irecv` in which only some ranks take part is undefined.
    """
    kept(plan, "agreed", lambda: _agreed(plan))


def _agreed(plan: ContextPlan) -> bool:
    text = repr((plan.length, plan.scheme, plan.chunks))
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    own = torch.tensor([digest], device=plan.device)
    every = [torch.empty_like(own) for _ in range(plan.ranks)]
    dist.all_gather(every, own, group=plan.device_mesh.get_group())
    found = torch.cat(every).tolist()
    if len(set(found)) > 1:
        first = next(rank for rank, other in enumerate(found) if other != found[0])
        fix = "Give each rank the same document ids, lengths and other values that mask_mod reads."
        raise ArgumentError(
            message("plan", f"different plans on ranks 0 and {first}", "the same plan on all ranks", fix)
        )
    return True
