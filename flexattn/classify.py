"""create_block_mask: mask_mod -> BlockMask. Every pair is decided exactly, in bounded memory."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexattn import mask_cache
from flexattn.block_mask import BlockMask, BuildCounts, RunLists, Runs, run_lists, run_lists_of
from flexattn.bound import DTYPES, EMPTY, FULL, INDEX_LIMIT, PARTIAL
from flexattn.boxes import BlockClasses, classify_by_boxes
from flexattn.build import current_stream
from flexattn.config import debug, settings
from flexattn.errors import ArgumentError, DeviceError, ModError, message
from flexattn.graph import BoundMod
from flexattn.mask_build import build_lists
from flexattn.mask_kernels import plan_mask
from flexattn.target import target_of
from flexattn.trace import trace

# Pairs evaluated at a time. A graph keeps some 4 bytes a pair for each of its nodes: so this is 8 MiB a node on a CPU.
_PAIRS = {"cpu": 2**21}
_PAIRS_ON_GPU = 2**24


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
) -> BlockMask:
    """Return the BlockMask of `mask_mod(b, h, q_idx, kv_idx) -> bool` over B batches, H heads, Q_LEN queries and KV_LEN
    keys; B or H None makes one that serves any number, for a mod that does not read it.

    `device` is that of the tensors that mask_mod captures, else of the accelerator, else "cpu". BLOCK_SIZE is one size,
    or (query, key). With separate_full_blocks=False all blocks that are not empty are partial.

    Building costs what the mask's boundary costs; on a GPU the host waits once. A mask that is built again from the
    same tensors, unchanged, gets the same lists without work (see `flexattn.mask_cache`).

    >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 512, 512, device="cpu")
    >>> mask.counts()  # full, partial, empty
    (6, 4, 6)
    """
    if _compile:
        warnings.warn(
            "_compile on create_block_mask does nothing: masks are built in bounded memory without it. Leave it out.",
            DeprecationWarning,
            stacklevel=2,
        )
    if not isinstance(dq_kv_order, bool):
        mend = "Tensor schedules go to BlockMask.from_kv_blocks."
        raise ArgumentError(message("dq_kv_order", type(dq_kv_order).__name__, "a bool", mend))
    _check_sizes(B, H, Q_LEN, KV_LEN)
    block_size = _block_size(BLOCK_SIZE)
    bound = trace(mask_mod, "mask")
    _check_extents(bound, B, H)
    chosen = _device(bound, device)
    # Batches and heads that the mod does not read are classified once.
    sizes = (B or 1 if bound.graph.reads("b") else 1, H or 1 if bound.graph.reads("h") else 1, Q_LEN, KV_LEN)
    key = (bound.origin, sizes, block_size, separate_full_blocks, *_where(chosen))
    with torch.no_grad():
        lists = mask_cache.find(key, bound) if bound.origin else None
        if lists is None:
            lists = classify(bound, sizes, block_size, chosen, separate_full_blocks)
            if bound.origin:
                mask_cache.keep(key, bound, lists)
    kv_runs, q_runs, counts = lists
    mask = BlockMask.from_runs(
        kv_runs, q_runs, *sizes[:2], (Q_LEN, KV_LEN), block_size, mask_mod,
        separate_full_blocks=separate_full_blocks, full_overhangs=False,
    ).expand(B or 1, H or 1)  # fmt: skip
    mask._remember(bound)
    mask.build_counts = counts
    if settings().debug:
        debug("mask", f"{counts}\n{mask!r}")
    if compute_dq_write_order:
        mask._set_dq_write_order(dq_kv_order)
    return mask


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
    _check_sizes(B, H, Q_LEN, KV_LEN)
    is_score = _is_score_mod(mod_fn)
    bound = trace(mod_fn, "score" if is_score else "mask")
    _check_extents(bound, B, H)
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
) -> tuple[RunLists, RunLists, BuildCounts]:
    """Return the blocks of a mask over `sizes` (B, H, Q, KV), as rows of queries and as rows of keys.

    Boxes of blocks decide most where the host can read what the mod captures; what they leave open, and all else, is
    evaluated pair by pair. `separate` False: full blocks are called partial.
    """
    if device.type == "cuda" and 0 not in sizes and (plan := plan_mask(bound, target_of(device))) is not None:
        return build_lists(plan, bound.on(device), sizes, block_size, device, separate)
    if not _bounds_can_read(bound):
        some, full = _classify_all(bound.on(device), sizes, block_size, device)
        partial, full = (some & ~full, full) if separate else (some, torch.zeros_like(full))
        lists = (run_lists_of(partial, full), run_lists_of(partial.transpose(-1, -2), full.transpose(-1, -2)))
        return *lists, BuildCounts(0, 0, some.numel())
    classes = classify_by_boxes(bound, *sizes, block_size)
    counts = BuildCounts(classes.boxes, classes.samples, len(classes.unknown))
    if len(classes.unknown):
        classes = classes.resolve(_evaluate_blocks(bound.on(device), classes.unknown, sizes, block_size, device))
    classes = classes if separate else classes.joined()
    by_query, by_key = (_lists(classes, transposed).map(lambda t: t.to(device)) for transposed in (False, True))
    return by_query, by_key, counts


def _bounds_can_read(bound: BoundMod) -> bool:
    dtypes = {x.dtype for x in (*bound.graph.captures, *bound.graph.nodes)}
    return all(c.device.type == "cpu" for c in bound.captures) and dtypes <= DTYPES


def _lists(classes: BlockClasses, transposed: bool) -> RunLists:
    partial, full = (Runs(*map(torch.from_numpy, classes.runs(kind, transposed))) for kind in (PARTIAL, FULL))
    return run_lists(partial, full, classes.shape[0] * classes.shape[1])


def _evaluate_blocks(
    bound: BoundMod, blocks: np.ndarray, sizes: tuple[int, int, int, int], block_size: tuple[int, int],
    device: torch.device,
) -> np.ndarray:  # fmt: skip
    """Return the class of each of some blocks (int [n, 3]: b * H + h, query block, key block), uint8 [n]."""
    places = torch.from_numpy(blocks).to(device)
    b, h = places[:, 0] // sizes[1], places[:, 0] % sizes[1]
    some = torch.zeros(len(blocks), dtype=torch.uint8, device=device)
    every = torch.ones_like(some)
    # Along an axis that the mod does not read, one place stands for all.
    q_size, kv_size = (n if bound.graph.reads(x) else 1 for n, x in zip(block_size, ("q_idx", "kv_idx"), strict=True))
    most = _PAIRS.get(device.type, _PAIRS_ON_GPU)
    q_step = min(q_size, most)
    kv_step = min(kv_size, max(1, most // q_step))
    step = max(1, most // (q_step * kv_step))
    for start in range(0, len(blocks), step):
        chunk = slice(start, start + step)
        for q_start in range(0, q_size, q_step):
            for kv_start in range(0, kv_size, kv_step):
                q, kv = (
                    # Past the end the last place stands again: that changes neither any nor all of the others.
                    (places[chunk, axis, None] * block + torch.arange(first, min(first + n, size), device=device))
                    .clamp(max=length - 1).int()
                    for axis, block, first, n, size, length in (
                        (1, block_size[0], q_start, q_step, q_size, sizes[2]),
                        (2, block_size[1], kv_start, kv_step, kv_size, sizes[3]),
                    )
                )  # fmt: skip
                live = bound(b[chunk, None, None].int(), h[chunk, None, None].int(), q[:, :, None], kv[:, None])
                live = live.expand(len(q), q.shape[1], kv.shape[1]).contiguous().view(torch.uint8)
                some[chunk] = some[chunk].maximum(live.amax(1).amax(1))
                every[chunk] = every[chunk].minimum(live.amin(1).amin(1))
    for axis in (0, 1):
        if sizes[2 + axis] % block_size[axis]:  # what reaches past the lengths is partial at most
            every[places[:, 1 + axis] == sizes[2 + axis] // block_size[axis]] = 0
    return torch.where(every.bool(), FULL, torch.where(some.bool(), PARTIAL, EMPTY)).to(torch.uint8).cpu().numpy()


def _classify_all(
    bound: BoundMod, sizes: tuple[int, int, int, int], block_size: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return whether any pair of each block attends, and whether all do, bool [B, H, query blocks, key blocks]."""
    B, H, Q_LEN, KV_LEN = sizes
    reads = [bound.graph.reads(name) for name in bound.graph.inputs[2:]]
    evaluated = [B, H, *(n if read else min(n, 1) for n, read in zip((Q_LEN, KV_LEN), reads, strict=True))]
    blocks = [n if read else 1 for n, read in zip(block_size, reads, strict=True)]
    grid = [-(-n // block) for n, block in zip(evaluated[2:], blocks, strict=True)]
    some = torch.zeros(B, H, *grid, dtype=torch.uint8, device=device)
    every = torch.ones_like(some)
    for b, h, q, kv in _tiles(evaluated, blocks, _PAIRS.get(device.type, _PAIRS_ON_GPU)):
        live = _evaluate(bound, (b, h, q, kv), device)
        place = (slice(b.start, b.stop), slice(h.start, h.stop), *map(_place, (q, kv), blocks))
        some[place] = some[place].maximum(_reduce(live, q.block, kv.block, "amax"))
        every[place] = every[place].minimum(_reduce(live, q.block, kv.block, "amin"))
    shape = (B, H, -(-Q_LEN // block_size[0]), -(-KV_LEN // block_size[1]))
    full = every.bool().expand(shape).clone()
    if Q_LEN % block_size[0]:
        full[:, :, -1] = False
    if KV_LEN % block_size[1]:
        full[..., -1] = False
    return some.bool().expand(shape), full


@dataclass(frozen=True)
class _Span:
    """Part of an axis: whole blocks of `block` (the last of a sequence may be shorter), or a part of one block."""

    start: int
    stop: int
    block: int


def _spans(length: int, block: int, most: int) -> Iterator[_Span]:
    """Cut an axis into spans of at most `most`, which hold blocks of one size or stay within a block."""
    whole = length // block * block if block <= most else 0
    step = max(1, most // block) * block
    for start in range(0, whole, step):
        yield _Span(start, min(start + step, whole), block)
    for first in range(whole, length, block):
        last = min(first + block, length)
        for start in range(first, last, most):
            yield _Span(start, min(start + most, last), min(start + most, last) - start)


def _tiles(sizes: list[int], blocks: list[int], pairs: int) -> Iterator[tuple[_Span, _Span, _Span, _Span]]:
    """Cut (B, H, Q, KV) into tiles of at most `pairs` pairs."""
    B, H, Q, KV = sizes
    if 0 in sizes:
        return
    kv_most = max(1, min(KV, pairs // min(Q, blocks[0], 1024)))
    q_most = max(1, min(Q, pairs // kv_most))
    h_most = max(1, min(H, pairs // (kv_most * q_most)))
    b_most = max(1, min(B, pairs // (kv_most * q_most * h_most)))
    for b in _spans(B, 1, b_most):
        for h in _spans(H, 1, h_most):
            for q in _spans(Q, blocks[0], q_most):
                for kv in _spans(KV, blocks[1], kv_most):
                    yield b, h, q, kv


def _evaluate(bound: BoundMod, tile: tuple[_Span, ...], device: torch.device) -> Tensor:
    """Return where the mask attends in a tile, uint8 [b, h, q, kv]."""
    index = [
        torch.arange(s.start, s.stop, dtype=torch.int32, device=device).view(*(-1 if i == n else 1 for i in range(4)))
        for n, s in enumerate(tile)
    ]
    live = bound(*index)
    return live.expand([s.stop - s.start for s in tile]).contiguous().view(torch.uint8)


def _reduce(live: Tensor, q_block: int, kv_block: int, how: str) -> Tensor:
    """Reduce [b, h, q, kv] to blocks. As bytes and rows first, this is 20 times faster than any and all on a CPU."""
    b, h, q, kv = live.shape
    rows = getattr(live.view(b, h, q // q_block, q_block, kv), how)(3)
    return getattr(rows.view(b, h, q // q_block, kv // kv_block, kv_block), how)(4)


def _place(span: _Span, block: int) -> slice:
    return slice(span.start // block, -(-span.stop // block))


def _check_sizes(B: Any, H: Any, Q_LEN: Any, KV_LEN: Any) -> None:
    for name, value, least in (("B", B, 1), ("H", H, 1), ("Q_LEN", Q_LEN, 0), ("KV_LEN", KV_LEN, 0)):
        if least and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            expected = f"an int >= {least}{' or None' if least else ''}"
            raise ArgumentError(message(name, repr(value), expected, "Take it from the shape of query and key."))
        if value > INDEX_LIMIT:
            raise ArgumentError(message(name, repr(value), f"at most {INDEX_LIMIT}", "Cut it into shorter ones."))


def _block_size(value: Any) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
        raise ArgumentError(message("BLOCK_SIZE", repr(value), "a positive int, or two: (query, key)", "Try 128."))
    return pair


def _check_extents(bound: BoundMod, B: int | None, H: int | None) -> None:
    for name, size, argument in (("b", B, "B"), ("h", H, "H")):
        if size is None and bound.graph.reads(name):
            where = f" ({bound.graph.location})" if bound.graph.location else ""
            raise ModError(
                f"{bound.graph.name}{where} reads {name}; give {argument}: found {argument}=None, expected the number "
                f"of {'batches' if name == 'b' else 'query heads'} of the query."
            )


def _device(bound: BoundMod, device: torch.device | str | int | None) -> torch.device:
    """Return the device to build on, and check that what the mod captures is there."""
    pairs = zip(bound.graph.captures, bound.captures, strict=True)
    captured = {t.device: c.name for c, t in pairs if not c.literal and (t.dim() or t.device.type != "cpu")}
    if device is None and len(captured) == 1:
        return next(iter(captured))
    chosen = torch.device((torch.accelerator.current_accelerator() or "cpu") if device is None else device)
    if chosen.type != "cpu":
        chosen = torch.empty(0, device=chosen).device if chosen.index is None else chosen  # "cuda" becomes "cuda:0"
    for found, name in captured.items():
        if found != chosen:
            mend = f"Move {name} there, or pass device={str(found)!r}."
            raise DeviceError(message(f"mask_mod's captured tensor {name!r}", found, f"{chosen}", mend))
    return chosen


def _where(device: torch.device) -> tuple[object, ...]:
    """Return what tells apart lists that cannot stand for each other: those of another stream may not be there yet."""
    return device, current_stream(device.index) if device.type == "cuda" else 0, torch.is_inference_mode_enabled()


def _is_score_mod(mod: Callable[..., Any]) -> bool:
    """Tell a score_mod by its five required arguments."""
    parameters = inspect.signature(mod).parameters.values()
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 5
