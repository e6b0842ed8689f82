"""create_block_mask: mask_mod -> BlockMask. Every pair is decided exactly, in bounded memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Never, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from flexattn.block_mask import BlockMask, BuildCounts, BuiltMask, InTiles, RunLists, Runs, run_lists
from flexattn.call.arguments import as_int, fix_of_int
from flexattn.call.unknown_arguments import refuse_unknown, refuses_unknown
from flexattn.errors import ArgumentError, DeviceError, FlexAttentionError, UnsupportedError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.boxes import DTYPES
from flexattn.graph.equal_runs import usable
from flexattn.graph.interval_bounds import EMPTY, FULL, PARTIAL
from flexattn.graph.ranges import INDEX_LIMIT
from flexattn.machine.target import target_of
from flexattn.mask_build import cache as mask_cache
from flexattn.mask_build.boxes import BlockClasses, classify_all, classify_by_boxes
from flexattn.mask_build.hopper_blocks import HOPPER_BLOCKS, needs_hopper_blocks
from flexattn.mask_build.kernels import plan_mask
from flexattn.mask_build.on_gpu import build_lists, fits
from flexattn.mask_build.token_tiles import MOST_LEFT, part_left, tiles_of
from flexattn.mods.kinds import is_score_mod
from flexattn.process.events import debug, fallback, is_logging
from flexattn.runtime.build import current_stream, expect_kernels
from flexattn.torch_state.lasting import is_capturing
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.transforms import is_batched, is_transforming, outside
from flexattn.torch_state.uncompiled import uncompiled
from flexattn.trace.trace import trace

# Pairs evaluated at a time. A graph needs about 4 bytes per pair for each node: 8 MiB per node on a CPU.
_PAIRS = {"cpu": 2**21}
_PAIRS_ON_GPU = 2**24

P = ParamSpec("P")
R = TypeVar("R")


def _outside_transforms(make: Callable[P, R]) -> Callable[P, R]:
    """Hide mask building from torch.func's transforms: a mask has no gradient, and is the same for all entries."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_transforming():
            return make(*args, **kwargs)
        mod: Any = args[0] if args else kwargs.get("mask_mod", kwargs.get("mod_fn"))
        reached = trace(mod, "score" if is_score_mod(mod) else "mask").reached
        batched = next((t for t in reached if is_batched(t)), None)
        if batched is not None:
            found = f"a captured tensor of shape {tuple(batched.shape)} that differs between the entries of torch.vmap"
            fix = "Build the mask for all entries before, or exclude pairs with -inf in score_mod."
            raise UnsupportedError(message("mask_mod", found, "one mask for all entries", fix))
        with outside():
            return make(*args, **kwargs)

    return made


@uncompiled
@undisturbed("create_block_mask", hidden=True)
@_outside_transforms
@refuses_unknown
def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    **unknown: Never,
) -> BlockMask:
    """Return the BlockMask of `mask_mod(b, h, q_idx, kv_idx) -> bool` over B batches, H heads, Q_LEN queries and KV_LEN
    keys. With B or H None, the mask applies to any number of them; mask_mod must not read that index.

    `device` defaults to the device of the tensors that mask_mod captures, else the accelerator, else "cpu". BLOCK_SIZE
    is one size, or (query, key). With separate_full_blocks=False, all non-empty blocks are partial.

    The build time is proportional to the mask's boundary. On a GPU the host waits once. If a mask is built again from
    the same unchanged tensors, its lists come from a cache (see `flexattn.mask_build.cache`).

    The result of attention does not depend on BLOCK_SIZE. On a Hopper GPU, float16 and bfloat16 calls read blocks of
    128: with another BLOCK_SIZE, the mask is built twice. PyTorch's fields always describe blocks of BLOCK_SIZE. Slices
    and moved copies have the blocks of BLOCK_SIZE only.

    >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 512, 512, device="cpu")
    >>> mask.counts()  # full, partial, empty
    (6, 4, 6)
    """
    if unknown:
        refuse_unknown(create_block_mask, unknown)
    if _compile:
        warnings.warn(
            "_compile on create_block_mask does nothing: masks are built in bounded memory without it. Leave it out.",
            DeprecationWarning,
            stacklevel=4,
        )
    if not isinstance(dq_kv_order, bool):
        fix = "Tensor schedules go to BlockMask.from_kv_blocks."
        raise ArgumentError(message("dq_kv_order", type(dq_kv_order).__name__, "a bool", fix))
    B, H, Q_LEN, KV_LEN = _checked_sizes(B, H, Q_LEN, KV_LEN)
    block_size = _block_size(BLOCK_SIZE)
    bound = trace(mask_mod, "mask")
    chosen = _device(bound, device)

    of_call: dict[str, Any] = {"shape": (B, H, Q_LEN, KV_LEN), "device": chosen, "separate": separate_full_blocks}
    in_hopper_blocks = partial(built_mask, block_size=HOPPER_BLOCKS, **of_call)
    mask = built_mask(mask_mod, bound, block_size=block_size, **of_call)
    if compute_dq_write_order:
        mask._set_dq_write_order(dq_kv_order)
    if needs_hopper_blocks(chosen, block_size):
        mask._for_hopper = with_tiles(in_hopper_blocks(mask_mod, bound), bound, in_hopper_blocks)
    return with_tiles(mask, bound, in_hopper_blocks)


def with_tiles(
    mask: BlockMask, bound: BoundMod, build: Callable[[Callable[..., Any], BoundMod], BlockMask]
) -> BlockMask:
    """Give a mask the same mask in an order of tiles, if that has fewer blocks, and return the mask, prepared.

    `bound` is its mask_mod now. `build` builds a mask of its shape in the blocks that Hopper kernels read.
    """
    grid = tiles_of(mask, bound)
    if grid is not None:
        mod = grid.mod(mask.mask_mod)
        try:
            other = build(mod, trace(mod, "mask"))
        except (FlexAttentionError, torch.OutOfMemoryError) as error:  # the mask itself was built
            fallback("mask in row-major order only", str(error))
            return mask.prepare()
        if part_left(mask, other) <= MOST_LEFT:
            mask._in_tiles = InTiles(grid, other)
    return mask.prepare()


def built_mask(
    mask_mod: Callable[..., Any], bound: BoundMod, shape: tuple[int | None, int | None, int, int],
    device: torch.device, block_size: tuple[int, int], separate: bool,
) -> BlockMask:  # fmt: skip
    """Return the mask of `bound`, which is mask_mod now, from the cache or built."""
    B, H, Q_LEN, KV_LEN = shape
    sizes = sizes_read(bound, shape)
    origin = bound.origin
    key = (origin, sizes, block_size, separate, *_where(device), *map(id, bound.reached))
    if bound.reached and is_capturing(device):  # comparing their values waits for the device
        expected = "a mask_mod that captures no tensors"
        fix = "Build the mask before the capture and keep it. Replays would not build it again for other values."
        raise UnsupportedError(message("mask_mod", "captured tensors in a CUDA graph", expected, fix))
    built = mask_cache.find(key, bound, device) if origin else None
    if built is None:
        if is_capturing(device):
            expected = "the mask of an earlier call on the stream of the capture"
            fix = "Build it before the capture, or warm up on the stream that you pass to torch.cuda.graph."
            raise UnsupportedError(message("create_block_mask", "a mask to build in a CUDA graph", expected, fix))
        built = classify(bound, sizes, block_size, device, separate)
        if origin:
            mask_cache.keep(key, bound, built)
    mask = BlockMask._of_runs(
        built.by_query, built.by_key, *sizes[:2], (Q_LEN, KV_LEN), block_size, mask_mod, separate, False
    )
    mask._bits, mask._no_bits = built.bits, built.no_bits
    mask = mask._expand(B or 1, H or 1, is_exact=True)
    mask._remember(bound, usable(built.runs, bound, sizes))
    mask.build_counts = built.counts
    if is_logging():
        debug("mask", f"{built.counts}\n{mask!r}")
    return mask


def sizes_read(bound: BoundMod, shape: tuple[int | None, int | None, int, int]) -> tuple[int, int, int, int]:
    """Return what is classified of a mask of this shape: batches and heads that the mod does not read, once."""
    B, H = (n or 1 if bound.graph.reads(x) else 1 for n, x in zip(shape, ("b", "h"), strict=False))
    return B, H, *shape[2:]


@uncompiled
@undisturbed("create_mask", hidden=True)
@_outside_transforms
def create_mask(
    mod_fn: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Return bool [B, H, Q_LEN, KV_LEN], dense: where a mask_mod attends, or where a score_mod of score 0 is not -inf.

    >>> create_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 2, device="cpu").int().tolist()
    [[[[1, 0], [1, 1]]]]
    """
    B, H, Q_LEN, KV_LEN = _checked_sizes(B, H, Q_LEN, KV_LEN)
    is_score = is_score_mod(mod_fn)
    bound = trace(mod_fn, "score" if is_score else "mask")
    sizes = (B or 1, H or 1, Q_LEN, KV_LEN)
    chosen = _device(bound, device)
    bound = bound.on(chosen)
    index = [
        torch.arange(n, dtype=torch.int32, device=chosen).view(*(-1 if i == axis else 1 for i in range(4)))
        for axis, n in enumerate(sizes)
    ]
    if 0 in sizes:
        return torch.zeros(sizes, dtype=torch.bool, device=chosen)
    with torch.no_grad():
        out = bound(*((torch.zeros((), device=chosen),) if is_score else ()), *index)
        return (~torch.isneginf(out) if is_score else out).expand(sizes).contiguous()


def classify(
    bound: BoundMod, sizes: tuple[int, int, int, int], block_size: tuple[int, int], device: torch.device, separate: bool
) -> BuiltMask:
    """Return the blocks of a mask over `sizes` (B, H, Q, KV), as query rows and as key rows.

    On a GPU, generated kernels do all the work. Otherwise, boxes of blocks decide most pairs, and undecided blocks are
    evaluated pair by pair. This path also serves mods that Triton would compute differently from torch; the host then
    reads their captures. If `separate` is False, full blocks become partial.
    """
    if device.type == "cuda" and fits(sizes, block_size):
        expect_kernels()
        if (plan := plan_mask(bound, target_of(device))) is not None:
            return build_lists(plan, bound.on(device), sizes, block_size, device, separate)
    if device.type == "cuda":
        fallback("mask built on the host", "its kernels do not support its size or one of its operations")
    there = torch.device("cpu") if device.type == "meta" else device  # meta tensors have no values
    moved = bound.on(there)

    def evaluate(blocks: np.ndarray) -> np.ndarray:
        return _evaluate_blocks(moved, blocks, sizes, block_size, there)

    if {x.dtype for x in (*bound.graph.captures, *bound.graph.nodes)} <= DTYPES:
        here = replace(bound, captures=tuple(c.cpu() for c in bound.captures))
        classes = classify_by_boxes(here, *sizes, block_size, evaluate)
    else:
        classes = classify_all(*sizes, block_size, evaluate)
    counts = BuildCounts(classes.boxes, classes.samples, classes.evaluated)
    classes = classes if separate else classes.joined()
    by_query, by_key = (_lists(classes, transposed).map(lambda t: t.to(device)) for transposed in (False, True))
    return BuiltMask(by_query, by_key, counts, sum(t.nbytes for lists in (by_query, by_key) for t in lists.tensors))


def _lists(classes: BlockClasses, transposed: bool) -> RunLists:
    partial, full = (Runs(*map(torch.from_numpy, classes.runs(kind, transposed))) for kind in (PARTIAL, FULL))
    return run_lists(partial, full, classes.shape[0] * classes.shape[1])


def _evaluate_blocks(
    bound: BoundMod, blocks: np.ndarray, sizes: tuple[int, int, int, int], block_size: tuple[int, int],
    device: torch.device,
) -> np.ndarray:  # fmt: skip
    """Return the class of each block in `blocks` (int [n, 3]: b * H + h, query block, key block), uint8 [n].

    A few rows and columns of each block are evaluated first. In a mask without structure, they show that most blocks
    are partial.
    """
    # Along an axis that the mod does not read, one position represents all.
    q_size, kv_size = (n if bound.graph.reads(x) else 1 for n, x in zip(block_size, ("q_idx", "kv_idx"), strict=True))
    few, every = (_spread(q_size), _spread(kv_size)), (torch.arange(q_size), torch.arange(kv_size))
    if q_size * kv_size < 4 * few[0].numel() * few[1].numel():
        return _evaluate_pairs(bound, blocks, every, sizes, block_size, device)
    classes = _evaluate_pairs(bound, blocks, few, sizes, block_size, device)
    left = classes != PARTIAL
    classes[left] = _evaluate_pairs(bound, blocks[left], every, sizes, block_size, device)
    return classes


def _spread(size: int) -> Tensor:
    """Return a few offsets in a block: both ends, and others without a period."""
    inside = (torch.arange(1, 15) * 0.6180339887 % 1 * size).long()
    return torch.cat([torch.tensor([0, size - 1]), inside]).unique() if size > 16 else torch.arange(size)


def _evaluate_pairs(
    bound: BoundMod, blocks: np.ndarray, offsets: tuple[Tensor, Tensor], sizes: tuple[int, int, int, int],
    block_size: tuple[int, int], device: torch.device,
) -> np.ndarray:  # fmt: skip
    """Return the classes of blocks, evaluated at the positions with these offsets."""
    index = torch.from_numpy(blocks).to(device)
    q_offsets, kv_offsets = (x.to(device) for x in offsets)
    b, h = index[:, 0] // sizes[1], index[:, 0] % sizes[1]
    some = torch.zeros(len(blocks), dtype=torch.uint8, device=device)
    every = torch.ones_like(some)
    q_size, kv_size = q_offsets.numel(), kv_offsets.numel()
    most = _PAIRS.get(device.type, _PAIRS_ON_GPU)
    q_step = min(q_size, most)
    kv_step = min(kv_size, max(1, most // q_step))
    step = max(1, most // (q_step * kv_step))
    for start in range(0, len(blocks), step):
        chunk = slice(start, start + step)
        for q_start in range(0, q_size, q_step):
            for kv_start in range(0, kv_size, kv_step):
                q, kv = (
                    # Past the end the last position is repeated, which does not change any() or all() of the others.
                    (index[chunk, axis, None] * block + x[first : first + n]).clamp(max=length - 1).int()
                    for axis, block, x, first, n, length in (
                        (1, block_size[0], q_offsets, q_start, q_step, sizes[2]),
                        (2, block_size[1], kv_offsets, kv_start, kv_step, sizes[3]),
                    )
                )  # fmt: skip
                live = bound(b[chunk, None, None].int(), h[chunk, None, None].int(), q[:, :, None], kv[:, None])
                live = live.expand(len(q), q.shape[1], kv.shape[1]).contiguous().view(torch.uint8)
                some[chunk] = some[chunk].maximum(live.amax(1).amax(1))
                every[chunk] = every[chunk].minimum(live.amin(1).amin(1))
    for axis in (0, 1):
        if sizes[2 + axis] % block_size[axis]:  # a block that extends past the lengths is at most partial
            every[index[:, 1 + axis] == sizes[2 + axis] // block_size[axis]] = 0
    return torch.where(every.bool(), FULL, torch.where(some.bool(), PARTIAL, EMPTY)).to(torch.uint8).cpu().numpy()


def _checked_sizes(B: Any, H: Any, Q_LEN: Any, KV_LEN: Any) -> tuple[int | None, int | None, int, int]:
    """Return the sizes as ints."""
    B = None if B is None else _checked_size("B", B, 1)
    H = None if H is None else _checked_size("H", H, 1)
    return B, H, _checked_size("Q_LEN", Q_LEN, 0), _checked_size("KV_LEN", KV_LEN, 0)


def _checked_size(name: str, value: Any, least: int) -> int:
    size = as_int(value)
    if size is None or size < least:
        expected = f"an int >= {least}{' or None' if least else ''}"
        fix = fix_of_int(name, value, "Take it from the shape of query and key.")
        raise ArgumentError(message(name, repr(value), expected, fix))
    if size > INDEX_LIMIT:
        raise ArgumentError(message(name, repr(value), f"at most {INDEX_LIMIT}", "Split it into shorter ones."))
    return size


def _block_size(value: Any) -> tuple[int, int]:
    sizes = tuple(map(as_int, value if isinstance(value, tuple | list) else (value, value)))
    if len(sizes) != 2 or any(n is None or n < 1 for n in sizes):
        raise ArgumentError(message("BLOCK_SIZE", repr(value), "a positive int, or two: (query, key)", "Try 128."))
    return sizes  # type: ignore[return-value]


def _device(bound: BoundMod, device: torch.device | str | int | None) -> torch.device:
    """Return the device to build on, and check that the captured tensors are on it."""
    pairs = zip(bound.graph.captures, bound.captures, strict=True)
    captured = {t.device: c.name for c, t in pairs if not c.literal and (t.dim() or not t.is_cpu)}
    for found, name in captured.items():
        if found.type == "meta":
            fix = "Build the mask once the tensor has values."
            raise DeviceError(message(f"mask_mod's captured tensor {name!r}", "meta", "a tensor with values", fix))
    if device is None and len(captured) == 1:
        return next(iter(captured))
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    chosen = _torch_device(device)
    if chosen.index is None and chosen.type != "cpu":  # "cuda" becomes "cuda:0"
        is_cuda = chosen.type == "cuda"  # queried directly: an allocation takes more host time
        chosen = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.empty(0, device=chosen).device
    for found, name in captured.items():
        if found != chosen:
            fix = f"Move {name} there, or pass device={str(found)!r}."
            raise DeviceError(message(f"mask_mod's captured tensor {name!r}", found, f"{chosen}", fix))
    return chosen


def _torch_device(device: torch.device | str | int) -> torch.device:
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        fix = 'Write device="cuda" or device="cpu", or leave it out.'
        raise DeviceError(message("device", repr(device), "a device of torch", fix)) from None
    # is_initialized is fast; a process that has used its GPU has one
    if chosen.type == "cuda" and not torch.cuda.is_initialized() and not torch.cuda.is_available():
        fix = 'Write device="cpu", or leave it out.'
        raise DeviceError(message("device", repr(str(device)), "a device of this machine, where CUDA is missing", fix))
    return chosen


def _where(device: torch.device) -> tuple[object, ...]:
    """Return what else belongs to the cache key: lists built on another stream may not be ready yet."""
    return device, current_stream(device.index) if device.type == "cuda" else 0, torch.is_inference_mode_enabled()
