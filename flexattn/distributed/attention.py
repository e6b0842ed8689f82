"""attention: flex_attention of sharded tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention import flex_attention as upstream

from flexattn.api import AuxOutput, AuxRequest
from flexattn.api import flex_attention as attend
from flexattn.block_mask import BlockMask, from_torch
from flexattn.call.dropout import check_dropout
from flexattn.call.pose import autocast
from flexattn.distributed.agreement import check_agreement
from flexattn.distributed.chunks import length_of
from flexattn.distributed.gathered import attend_gathered
from flexattn.distributed.heads import attend_by_heads
from flexattn.distributed.parts import Options
from flexattn.distributed.plan import ContextPlan, Scheme
from flexattn.distributed.ring import attend_ring
from flexattn.errors import ArgumentError, DtypeError, UnsupportedError, message
from flexattn.mods.at_heads import at_heads
from flexattn.torch_state.transforms import is_transforming
from flexattn.torch_state.uncompiled import uncompiled

_MOST_GATHERED = 2**32  # bytes of keys and values that a rank keeps for its backward; beyond, they are sent again
SCHEMES: dict[Scheme, Callable[..., tuple[Tensor, AuxOutput]]] = {
    "gather": attend_gathered,
    "ring": attend_ring,
    "heads": attend_by_heads,
}


@partial(uncompiled, reason="a call of flexattn.distributed.flex_attention is one graph break. Remove fullgraph=True")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    plan: ContextPlan | None = None,
    kernel_options: Mapping[str, object] | None = None,
    return_aux: AuxRequest | None = None,
    sink: Tensor | float | None = None,
    dropout_p: float = 0.0,
) -> Any:
    """Compute attention of tensors that are sharded over ranks. Each rank of the plan's mesh calls it.

    Mods see b, h, q_idx and kv_idx of the whole tensors. Gradients of tensors that mods capture, and of the sink, are
    partial, as gradients of other parameters are: sum them over the ranks. DDP and FSDP2 average them.

    Args:
        query: this rank's tokens, [B, Hq, local, D]; or a DTensor [B, Hq, S, D].
        key, value: the same of keys and values, [B, Hkv, local, D] and [B, Hkv, local, Dv].
        score_mod, scale, enable_gqa, kernel_options, sink: as in flexattn.flex_attention.
        block_mask: without a plan, the mask of the whole tensors.
        plan: from `create_cp_plan`; it contains the mask. None: no dimension of the sequence is sharded.
        dropout_p: as in flexattn.flex_attention. Rank 0 draws the seed. The dropped weights do not depend on the ranks.
        return_aux: what to return besides the output, as (out, AuxOutput), of this rank's queries.

    Returns:
        out [B, Hq, local, Dv], or a DTensor placed as query.

    Raises:
        ArgumentError if a tensor does not have this rank's tokens, or if DTensors are placed differently.
        UnsupportedError for a scheme that the plan names and that cannot compute the call.

    Example:
        >>> q, k, v = (plan.shard(x, 2) for x in (q, k, v))  # doctest: +SKIP
        >>> out = flexattn.distributed.flex_attention(q, k, v, mods.alibi(8), plan=plan)  # doctest: +SKIP

    Source: docs/distributed.md describes the schemes and what they send.
    """
    aux = AuxRequest() if return_aux is None else return_aux
    if plan is not None and block_mask is not None:
        fix = "Leave it out: the plan contains the mask."
        raise ArgumentError(message("block_mask", "a mask and a plan", "one of them", fix))
    if not isinstance(query, Tensor):
        raise DtypeError(message("query", f"a {type(query).__name__}", "a tensor", "Pass [B, Hq, local, D]."))
    options = Options(score_mod, scale, enable_gqa, kernel_options, sink, aux, check_dropout(dropout_p, query.device))
    if isinstance(query, DTensor) or isinstance(key, DTensor) or isinstance(value, DTensor):
        out, found = _of_dtensors(query, key, value, options, block_mask, plan)
    elif plan is not None:
        out, found = _of_local(plan, query, key, value, options)
    else:
        fix = "Make one with create_cp_plan, or call flexattn.flex_attention."
        raise ArgumentError(message("plan", "None with tensors that are no DTensors", "a ContextPlan", fix))
    return out if return_aux is None else (out, found)


def _with_shared_seed(options: Options, mesh: DeviceMesh) -> Options:
    """Return options whose dropout has the seed of the mesh's first rank."""
    if options.dropout is None:
        return options
    seed = options.dropout.seed.clone()
    for dim in range(mesh.ndim):
        dist.broadcast(seed, group=mesh.get_group(dim), group_src=0)
    return replace(options, dropout=replace(options.dropout, seed=seed))


def _of_local(
    plan: ContextPlan, query: Any, key: Any, value: Any, options: Options, has_seed: bool = False
) -> tuple[Tensor, AuxOutput]:
    local = length_of(plan.tokens_of(plan.rank))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dim() != 4 or x.size(2) != local:
            found = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            fix = "Pass plan.shard(x, 2) of the whole tensor, or project tokens that plan.shard returned."
            raise ArgumentError(message(name, found, f"[B, H, {local}, D], the tokens of rank {plan.rank}", fix))
        if x.dtype != query.dtype:
            raise DtypeError(message(name, str(x.dtype), f"the dtype of query, {query.dtype}", f"Cast {name}."))
    if is_transforming():
        fix = "Compute gradients by backward or torch.autograd.grad."
        raise UnsupportedError(message("plan", "forward mode, or a transform of torch.func", "neither", fix))
    q, k, v = (x for x in autocast(query, key, value) if isinstance(x, Tensor))
    scheme = scheme_of(plan, q, k, v)
    check_agreement(plan)
    if not has_seed:
        options = _with_shared_seed(options, plan.device_mesh)
    return SCHEMES[scheme](plan, q, k, v, options)


def scheme_of(plan: ContextPlan, query: Tensor, key: Tensor, value: Tensor) -> Scheme:
    """Return the scheme of a call: the one that the plan names, else the one that sends least."""
    refusal = _refusal_of_heads(plan, query, key)
    if plan.scheme == "heads" and refusal is not None:
        fix = 'Leave scheme out, or choose "gather" or "ring".'
        raise UnsupportedError(message("plan", f'scheme "heads" and {refusal}', "heads for each rank", fix))
    if plan.scheme is not None:
        return plan.scheme
    gathered, by_heads = traffic(plan, query, key, value)
    if refusal is None and by_heads < gathered:
        return "heads"
    return "ring" if gathered * key.element_size() > _MOST_GATHERED else "gather"


def _refusal_of_heads(plan: ContextPlan, query: Tensor, key: Tensor) -> str | None:
    for name, heads in (("key", key.size(1)), ("query", query.size(1))):
        if heads % plan.ranks:
            return f"{heads} heads of {name}, which {plan.ranks} ranks cannot share"
    return None


def traffic(plan: ContextPlan, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    """Return the elements that the busiest rank receives in a forward, if keys are gathered and by heads."""
    B, Hq, _, D = query.shape
    of_keys = key.size(1) * (D + value.size(3))
    gathered = plan.most_received * of_keys
    share = plan.length * (plan.ranks - 1) // plan.ranks**2
    return B * gathered, B * share * (of_keys + Hq * (D + value.size(3)))


def _of_dtensors(
    query: Any, key: Any, value: Any, options: Options, block_mask: BlockMask | None, plan: ContextPlan | None
) -> tuple[Tensor, AuxOutput]:
    """Compute a call with DTensors: of their local batches and heads, and of the plan's dimension if there is one."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, DTensor):
            raise DtypeError(
                message(name, f"a {type(x).__name__}", "a DTensor, as the others are", "Use DTensor.from_local.")
            )
        if x.placements != query.placements or x.device_mesh != query.device_mesh:
            found = f"placements {x.placements} on {x.device_mesh}"
            fix = "Call redistribute on it."
            raise ArgumentError(message(name, found, f"those of query, {query.placements} on {query.device_mesh}", fix))
    _check_placements(query, key, plan)
    options = _with_shared_seed(options, query.device_mesh)
    b, h = (_offset(query, dim) for dim in (0, 1))
    local = [x.to_local() for x in (query, key, value)]
    B, H = local[0].shape[:2]
    score_mod = options.score_mod
    if score_mod is not None and query.shape[:2] != (B, H):
        score_mod = at_heads(score_mod, b, h)
    sink = _local_sink(options.sink, query, (b, h), (B, H))
    dropout = options.dropout_at(bh_offset=b * query.shape[1] + h, heads=query.shape[1]) or None
    options = replace(options, score_mod=score_mod, sink=sink, dropout=dropout)
    if plan is not None:
        _check_sequence(query, plan)
        if plan.mask is not None and (plan.mask.B > 1 or plan.mask.H > 1) and (b or h or query.shape[:2] != (B, H)):
            found = "a mask by batch or head, and tensors sharded over batches or heads"
            fix = "Make the plan with a mask_mod of this rank's batches and heads."
            raise UnsupportedError(message("plan", found, "one mask for all batches and heads", fix))
        out, found = _of_local(plan, local[0], local[1], local[2], options, has_seed=True)
    else:
        mask = from_torch(block_mask) if type(block_mask) is upstream.BlockMask else block_mask
        if mask is not None and (mask.B > 1 or mask.H > 1):
            mask = mask[slice(b, b + B) if mask.B > 1 else slice(None), slice(h, h + H) if mask.H > 1 else slice(None)]
        out, found = attend(
            local[0], local[1], local[2], options.score_mod, mask, options.scale, options.enable_gqa,
            kernel_options=options.kernel_options, sink=options.sink, return_aux=options.aux,
            dropout_p=options.dropout_at(),
        )  # fmt: skip

    def placed(x: Tensor | None) -> Any:
        if x is None:
            return None
        shape = (*query.shape[:3], *x.shape[3:])
        return DTensor.from_local(
            x, query.device_mesh, query.placements, run_check=False, shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip

    return placed(out), AuxOutput(placed(found.lse), placed(found.max_scores))


def _check_placements(query: DTensor, key: DTensor, plan: ContextPlan | None) -> None:
    """Raise an error on all ranks alike, from the whole tensors."""
    dims = {0, 1} if plan is None else {0, 1, 2}
    for place in query.placements:
        if not (isinstance(place, Replicate) or (type(place) is Shard and place.dim in dims)):
            found, expected = f"placements {query.placements}", "Replicate, Shard(0) or Shard(1)"
            fix = "Call redistribute on it; to shard tokens, make a plan with create_cp_plan."
            raise ArgumentError(message("query", found, expected + (" or Shard(2)" if plan else ""), fix))
    sizes = query.device_mesh.shape
    parts = math.prod(n for n, p in zip(sizes, query.placements, strict=True) if isinstance(p, Shard) and p.dim == 1)
    for name, x in (("query", query), ("key", key)):
        if x.shape[1] % parts:
            found = f"{x.shape[1]} heads on {parts} ranks"
            fix = "Shard fewer heads, or replicate them."
            raise ArgumentError(message(name, found, "the same number of heads on each rank", fix))


def _local_sink(sink: Any, query: DTensor, first: tuple[int, int], sizes: tuple[int, int]) -> Any:
    """Return the part of a sink, [Hq] or [B, Hq], for the local batches and heads."""
    if isinstance(sink, DTensor):
        pairs = zip(query.placements, sink.placements, strict=True)
        # Each rank has its share of the gradient of what all of them read.
        gradients = [Partial() if isinstance(q, Shard) and isinstance(s, Replicate) else s for q, s in pairs]
        sink = sink.to_local(grad_placements=gradients)
    if not isinstance(sink, Tensor) or not sink.dim():
        return sink
    for dim, start, size in ((-1, first[1], sizes[1]), *(((0, first[0], sizes[0]),) if sink.dim() == 2 else ())):
        whole = query.shape[1] if dim == -1 else query.shape[0]
        if sink.size(dim) == whole != size:
            sink = sink.narrow(dim, start, size)
    return sink


def _offset(x: DTensor, dim: int) -> int:
    """Return the index of the first local element along a dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return int(offsets[dim])


def _check_sequence(query: DTensor, plan: ContextPlan) -> None:
    names = query.device_mesh.mesh_dim_names or ()
    sharded = [i for i, p in enumerate(query.placements) if isinstance(p, Shard) and p.dim == 2]
    own = plan.device_mesh.mesh_dim_names or ()
    if len(sharded) != 1 or (names and own and names[sharded[0]] != own[0]):
        found = f"placements {query.placements} on {query.device_mesh}"
        raise ArgumentError(
            message("query", found, f"Shard(2) on the plan's dimension {own}", "Shard the tokens there.")
        )
