"""pose: Call -> Problem. Everything before the engine: arguments are checked, mods are traced and differentiated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask, from_torch
from flexattn.block_mask.dense import all_partial
from flexattn.call.batch_invariant import as_batch_invariant, as_listed
from flexattn.call.call import Call, Mod
from flexattn.call.dropout import check_dropout
from flexattn.call.layout import FLOAT8, Layout, LayoutArguments, check_layout, check_pages, paged
from flexattn.call.positions import at_positions, mask_at_positions
from flexattn.call.problem import Problem, requires_grad
from flexattn.call.ready_heads import check_heads, heads_of
from flexattn.call.sinks import check_sink
from flexattn.call.validate import (
    DEVICES,
    DTYPES,
    check_block_mask,
    check_mask_reads,
    check_scale,
    check_tensors,
    place_captures,
)
from flexattn.call.varlen.arguments import Packed, PackedArguments
from flexattn.call.varlen.mods import packed_mask, packed_score
from flexattn.call.varlen.packing import Packing
from flexattn.call.wide_dtype import wide_dtype
from flexattn.errors import DtypeError, MaskError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.capture_axes import pair_axes_last
from flexattn.graph.differentiate import differentiate
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.tables_by_distance import read_tables_by_distance
from flexattn.options import validate_options
from flexattn.torch_state.modes import unstored
from flexattn.torch_state.transforms import is_transforming
from flexattn.trace.trace import trace


@unstored
def pose(call: Call, *, seeded: bool = True, on_gpu: bool = False) -> Problem:
    """Return the problem of a call.

    Args:
        call: the arguments, unchecked.
        seeded: whether dropout draws its seed from torch's generator; False if nothing will be computed.
        on_gpu: treat the tensors as on a GPU, even if they are not.
    """
    query, key, value, layout, packed = _tensors(call)
    options = validate_options(call.kernel_options)
    scale = check_scale(call.scale, query.shape[3])
    score = score_of(call.score_mod, query)  # Python -> BoundMod
    captures = () if score is None else score.captures
    sink = check_sink(call.sink, query)
    differentiable = (query, key, value, *captures) if sink is None else (query, key, value, *captures, sink)
    transformed = is_transforming()  # under a torch.func transform any tensor may be differentiated
    gradient = transformed or (torch.is_grad_enabled() and any(map(requires_grad, differentiable)))
    blocks = _blocks(call.block_mask)  # PyTorch's BlockMask -> BlockMask
    mask, by_hand = _mask_without_lists(call.layout, query), False
    if blocks is not None:
        check_block_mask(blocks, query, key, gradient, layout)
        by_hand = isinstance(call.block_mask, BlockMask) and not blocks.is_built
        mask = mask_of(blocks, query, by_hand)  # Python -> BoundMod
    equal_runs = () if mask is None or blocks is None else blocks.equal_runs()
    dropout = check_dropout(call.dropout_p, query.device, seeded)  # last: a call that is rejected draws nothing
    problem = Problem(
        query, key, value, scale, score, mask, blocks, None, equal_runs, options, sink, dropout, call.max_scores,
    )  # fmt: skip
    if packed is not None:
        problem = at_rows(problem, packed.packing, packed.window)
        assert problem.mask is not None
        blocks = packed.blocks_of(problem.mask, (query.shape[2], key.shape[2]), query.shape[1], gradient)
        problem = problem.with_fields(block_mask=blocks)
    elif layout is not None:
        problem = in_layout(problem, layout, by_hand)
    return complete(problem, gradient, on_gpu)


def at_rows(problem: Problem, packing: Packing, window: tuple[int, int]) -> Problem:
    """Return a problem whose mods are of positions in sequences as one of rows, without its block lists."""
    score = None if problem.score is None else packed_score(problem.score, packing)  # BoundMod -> BoundMod
    return problem.with_fields(score=score, mask=packed_mask(problem.mask, packing, window))


def in_layout(problem: Problem, layout: Layout, by_hand: bool) -> Problem:
    """Return a problem with a layout. Its mods get positions. `by_hand`: the user provided the lists of its mask."""
    score, mask, blocks, query = problem.score, problem.mask, problem.block_mask, problem.query
    M, N = query.shape[2], layout.capacity
    if score is not None:
        score = at_positions(score, layout)  # BoundMod -> BoundMod
    if by_hand and blocks is not None:
        mask = as_listed(mask, blocks)
    without_lists = mask is not None and blocks is None
    mask, equal_runs = mask_at_positions(mask, problem.equal_runs, layout)
    if without_lists or layout.kv_positions is not None:  # blocks of positions are not blocks of slots
        blocks = all_partial(M, N, query.device)
    read = layout.read_by_engines(query, None if blocks is None else blocks.seq_lengths)
    return problem.with_fields(score=score, mask=mask, equal_runs=equal_runs, block_mask=blocks, layout=read)


def _tensors(call: Call) -> tuple[Tensor, Tensor, Tensor, Layout | None, Packed | None]:
    """Return query, key and value, checked, and the layout of the call or its packed sequences."""
    query, key, value = autocast(call.query, call.key, call.value)
    given = call.layout
    if given is None:
        return *check_tensors(query, key, value, call.enable_gqa), None, None
    if isinstance(given, PackedArguments):
        query, key, value = check_tensors(query, key, value, call.enable_gqa)
        packed = Packed.of(given, query, key)
        return query, *packed.tensors_of(key, value), None, packed
    key, value = paged(key, value, given)
    quantized = getattr(key, "dtype", None) == FLOAT8 and (given.k_descale, given.v_descale) != (None, None)
    if given.block_table is None:
        query, key, value = check_tensors(query, key, value, call.enable_gqa, quantized)
    else:  # one page stands for the keys of a sequence
        check_pages(query, key, value)
        query, *_ = check_tensors(query, key[:1], value[:1], call.enable_gqa, quantized)
    return query, key, value, check_layout(given, query, key), None


def _mask_without_lists(given: LayoutArguments | PackedArguments | None, query: Tensor) -> BoundMod | None:
    """Trace the mask_mod of sequences."""
    if given is None or given.mask_mod is None:
        return None
    return place_captures(trace(given.mask_mod, "mask"), query.device, "mask_mod")


def complete(problem: Problem, gradient: bool, on_gpu: bool = False) -> Problem:
    """Return the problem with its mods in the form that engines compute, differentiated if a backward may follow."""
    score, query, invariant = problem.score, problem.query, problem.batch_invariant
    if score is not None:
        if not invariant:  # the size limit of a table by distance depends on the lengths
            score = read_tables_by_distance(score, query.shape[2], problem.N)  # BoundMod -> BoundMod
            if on_gpu or not query.is_cpu:
                score = pair_axes_last(score)  # BoundMod -> BoundMod
        score_grad = _differentiated(score) if gradient else None  # ModGraph -> ModGraph
        if gradient or score is not problem.score:
            problem = problem.with_fields(score=score, score_grad=score_grad)
    return as_batch_invariant(problem) if invariant else problem


def _differentiated(score: BoundMod) -> ModGraph:
    transformed = is_transforming()
    captures = enumerate(score.captures)
    return differentiate(
        score.graph, tuple(i for i, c in captures if c.requires_grad or (transformed and c.is_floating_point()))
    )


def autocast(query: object, key: object, value: object) -> tuple[object, object, object]:
    """Cast to the dtype of the autocast region around the call, as scaled_dot_product_attention does."""
    kind = query.device.type if isinstance(query, Tensor) else ""
    if kind not in DEVICES or not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return _cast(query, dtype), _cast(key, dtype), _cast(value, dtype)


def _cast(x: object, dtype: torch.dtype) -> object:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES and x.dtype != torch.float64 else x


def score_of(score_mod: Mod | None, query: Tensor) -> BoundMod | None:
    """Trace score_mod for scores of this query. Return None if it returns its score unchanged."""
    if score_mod is None:
        return None
    bound = trace(score_mod, "score", wide_dtype(query))
    if bound.graph.is_input(bound.graph.output, "score"):
        return None
    check_heads(*heads_of(score_mod), *query.shape[1:3])
    return place_captures(bound, query.device, "score_mod")


def mask_of(blocks: BlockMask, query: Tensor, by_hand: bool = False) -> BoundMod | None:
    """Trace the mask_mod of a mask. Return None if it is always true. `by_hand`: the user provided the lists."""
    bound = trace(blocks.mask_mod, "mask")
    blocks.check_captures(bound)
    if bound.graph.is_true:
        return None
    check_mask_reads(blocks.B, blocks.H, bound, query, by_hand)
    return place_captures(bound, query.device, "mask_mod")


def _blocks(block_mask: BlockMask | upstream.BlockMask | None) -> BlockMask | None:
    """Convert to our BlockMask. PyTorch's placeholder for no mask, a single block of unlimited size, becomes None."""
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    if not isinstance(block_mask, upstream.BlockMask):
        fix = "Make one with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)."
        raise DtypeError(message("block_mask", f"a {type(block_mask).__name__}", "a BlockMask or None", fix))
    boundless = upstream._LARGE_SPARSE_BLOCK_SIZE
    if tuple(block_mask.BLOCK_SIZE) == (boundless, boundless) and block_mask.mask_mod is upstream.noop_mask:
        return None
    if block_mask.mask_mod is getattr(upstream, "_sliced_mask_mod_error", None):
        fix = "Slice flexattn's BlockMask, whose mask_mod is sliced too."
        raise MaskError(message("block_mask", "a slice of PyTorch's BlockMask", "a mask with its mask_mod", fix))
    return from_torch(block_mask)
