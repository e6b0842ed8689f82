"""validate: checks of the arguments of flex_attention. Errors name the argument."""

from __future__ import annotations

import math
import warnings
from collections.abc import Set
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.call.arguments import as_float
from flexattn.call.layout import FLOAT8, Layout, check_mask_layout, check_positions
from flexattn.errors import ArgumentError, DeviceError, DtypeError, MaskError, UnsupportedError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.nodes import short_dtype
from flexattn.graph.ranges import INDEX_LIMIT
from flexattn.torch_state.subclasses import check_plain, is_plain
from flexattn.trace.follow.libraries import frames_of_ours

T = TypeVar("T")
SWAPPED = (
    "query, key and value are [B, H, S, D]. If yours are [B, S, H, D], pass query.transpose(1, 2) and so on, and "
    "transpose the output back."
)
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
DEVICES = frozenset({"cpu", "cuda"})


def check_tensors(
    query: object, key: object, value: object, enable_gqa: bool, quantized: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Check kinds, ranks, sizes, dtypes and devices of query, key and value; return them. `quantized`: in float8."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        name, x = next(found for found in _named(query, key, value) if not isinstance(found[1], Tensor))
        raise DtypeError(message(name, f"a {type(x).__name__}", "a torch.Tensor", "Pass a tensor."))
    if not (is_plain(query) and is_plain(key) and is_plain(value)):
        for name, x in _named(query, key, value):
            check_plain(name, x)
    check_forms(query, key, value, enable_gqa, quantized=quantized)
    if _looks_swapped(*query.shape[1:3]) and _looks_swapped(*key.shape[1:3]):
        _warn_swapped(*query.shape[1:3])
    return query, key, value


def _looks_swapped(heads: int, rows: int) -> bool:
    """Whether sizes are more likely those of [B, S, H, D]. No model has that many heads."""
    return heads >= 256 and 2 <= rows <= 128


@cache
def _warn_swapped(heads: int, rows: int) -> None:
    """Warn once for these sizes."""
    text = f"flex_attention: query has {heads} heads of {rows} positions each. {SWAPPED}"
    warnings.warn(text, UserWarning, stacklevel=frames_of_ours())


def check_forms(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, devices: Set[str] = DEVICES, quantized: bool = False
) -> None:  # fmt: skip
    """Check ranks, sizes, dtypes and devices. The tensors may be fake, and their sizes symbols."""
    if not isinstance(enable_gqa, bool):
        fix = "Pass True to let groups of query heads share a key head, or leave it out."
        raise DtypeError(message("enable_gqa", repr(enable_gqa), "a bool", fix))
    if not query.dim() == key.dim() == value.dim() == 4:
        raise _rank(*next((name, x) for name, x in _named(query, key, value) if x.dim() != 4))
    stored = FLOAT8 if quantized else query.dtype
    if query.dtype not in DTYPES or not stored == key.dtype == value.dtype:
        raise _dtypes(query, key, value)
    device = query.device
    if device != key.device or device != value.device:
        found = f"query on {device}, key on {key.device}, value on {value.device}"
        raise DeviceError(message("query, key, value", found, "one device", f"Move them with .to({str(device)!r})."))
    if device.type not in devices:
        fix = "Move query, key and value to one of these devices."
        raise DeviceError(message("query", f"device {device}", " or ".join(sorted(DEVICES)), fix))
    _check_sizes(query.shape, key.shape, value.shape, enable_gqa)


def _named(query: T, key: T, value: T) -> tuple[tuple[str, T], ...]:
    return ("query", query), ("key", key), ("value", value)


def _rank(name: str, x: Tensor) -> UnsupportedError:
    fix = f"Add the missing dimension with {name}.unsqueeze(0)." if x.dim() == 3 else "Reshape it."
    return UnsupportedError(message(name, f"shape {tuple(x.shape)}", "4 dimensions (batch, heads, length, dim)", fix))


def _dtypes(query: Tensor, key: Tensor, value: Tensor) -> Exception:
    names = [short_dtype(x.dtype) for x in (query, key, value)]
    found = "query {}, key {}, value {}".format(*names)
    if any(name.startswith("float8") for name in names):
        fix = "Cast to bfloat16, or pass key and value as float8_e4m3fn with k_descale and v_descale."
        return UnsupportedError(message("query, key, value", found, "one dtype of f16, bf16, f32, f64", fix))
    wanted = query.dtype if query.dtype in DTYPES else torch.bfloat16
    cast = ", ".join(
        f"{n}.to({wanted})" for n, x in (("query", query), ("key", key), ("value", value)) if x.dtype != wanted
    )
    return DtypeError(message("query, key, value", found, "one dtype of f16, bf16, f32, f64", f"Cast: {cast}."))


def _check_sizes(q: torch.Size, k: torch.Size, v: torch.Size, enable_gqa: bool) -> None:
    (B, Hq, _, D), (Bkv, Hkv, N, _) = q, k
    if k[3] != D:
        fix = "Project query and key to the same head dim."
        raise ArgumentError(message("key", f"head dim {k[3]}", f"that of query, {D}", fix))
    if q[2] > INDEX_LIMIT or N > INDEX_LIMIT:
        name, length = ("query", q[2]) if q[2] > INDEX_LIMIT else ("key", N)
        fix = "Split it into shorter sequences, and merge the results by their lse."
        raise ArgumentError(message(name, f"length {length}", f"at most {INDEX_LIMIT}", fix))
    if D == 0 or v[3] == 0:
        name = "query" if D == 0 else "value"
        raise ArgumentError(message(name, "head dim 0", "at least 1", "Pass at least one channel."))
    if v[2] != N:
        fix = "Each key needs one value. Slice both in the same way."
        raise ArgumentError(message("value", f"length {v[2]}", f"that of key, {N}", fix))
    if v[1] != Hkv:
        fix = "Give key and value the same number of heads."
        raise ArgumentError(message("value", f"{v[1]} heads", f"those of key, {Hkv}", fix))
    if v[0] != Bkv:
        fix = f"Expand it: value.expand({Bkv}, -1, -1, -1)." if v[0] == 1 else "Give both the same batch size."
        raise ArgumentError(message("value", f"batch {v[0]}", f"that of key, {Bkv}", fix))
    if Bkv != B and Bkv != 1:
        fix = "Give each entry of query its keys and values, or pass batch 1 to share them."
        if B == 1:
            fix = "Give query and key one batch."
        fix += " If key holds the pages of a cache, pass its block_table: flex_attention(..., **cache.arguments())."
        raise ArgumentError(message("key", f"batch {Bkv}", f"that of query, {B}" + ", or 1" * (B != 1), fix))
    if Hq != Hkv:
        _check_groups(Hq, Hkv, enable_gqa)


def _check_groups(Hq: int, Hkv: int, enable_gqa: bool) -> None:
    divides = Hkv != 0 and Hq % Hkv == 0
    if not divides:
        fix = f"Query heads share key heads in groups: {Hq} must be a multiple of {Hkv}."
        raise ArgumentError(message("key", f"{Hkv} heads", f"a divisor of the heads of query, {Hq}", fix))
    if not enable_gqa:
        fix = "Pass enable_gqa=True to let groups of query heads share a key head."
        raise ArgumentError(message("key", f"{Hkv} heads", f"those of query, {Hq}", fix))


def check_scale(scale: float | None, head_dim: int) -> float:
    """Return the scale as a float, by default 1 / sqrt(head_dim)."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    fix = "Pass a Python float. Multiply a learnable scale into query, or into the score in score_mod."
    number = as_float("scale", scale, "a number", fix)
    if not math.isfinite(number):
        fix = "Pass None for 1 / sqrt(head dim)."
        raise ArgumentError(message("scale", number, "a finite number", fix))
    return number


def check_block_mask(
    block_mask: BlockMask, query: Tensor, key: Tensor, backward: bool, layout: Layout | None = None
) -> None:
    """Check that the mask was made for these inputs, and that it supports a backward if one may follow."""
    lengths = block_mask.seq_lengths
    if layout is not None:
        check_mask_layout(lengths, layout, query.shape[2])
        check_positions(lengths, layout, query.shape[2])
        lengths = (query.shape[2], key.shape[2])
    sizes = (*lengths, block_mask.B, block_mask.H)
    whole = None if block_mask.is_built else block_mask.BLOCK_SIZE
    check_mask_sizes(sizes, block_mask.device, block_mask.q_runs is not None, query, key, backward, whole)


def check_mask_sizes(
    sizes: tuple[int, int, int, int], device: torch.device, both: bool, query: Tensor, key: Tensor, backward: bool,
    whole: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Check a mask of `sizes` (M, N, B, H), which may be symbols. `both`: it has lists of query blocks too.

    `whole` is the size of its blocks if the user made the lists, maybe without lengths.
    """
    B, H, M, N = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    if sizes[0] != M or sizes[1] != N:
        raise MaskError(_lengths(sizes[:2], (M, N), (H, key.shape[1]), whole))
    if sizes[2] != 1 and sizes[2] != B:
        fix = f"Build it with create_block_mask(mask_mod, B={B}, ...), or B=None to share one mask."
        raise MaskError(message("block_mask", f"batch {sizes[2]}", f"that of query, {B}, or 1", fix))
    if sizes[3] != 1 and sizes[3] != H:
        fix = f"Build it with create_block_mask(mask_mod, ..., H={H}), or H=None to share one mask."
        raise MaskError(message("block_mask", f"{sizes[3]} heads", f"those of query, {H}, or 1", fix))
    if device != query.device:
        fix = f"Move it with block_mask.to({str(query.device)!r})."
        raise MaskError(message("block_mask", f"device {device}", f"that of query, {query.device}", fix))
    if backward and not both:
        fix = "Build it with compute_q_blocks=True, or call under torch.no_grad()."
        raise MaskError(message("block_mask", "no q_indices", "both directions, as a backward may follow", fix))


def check_mask_reads(B: int, H: int, bound: BoundMod, query: Tensor, by_hand: bool) -> None:
    """Reject block lists of one batch (head) for several if mask_mod reads b (h). Lists made `by_hand` are accepted."""
    if by_hand:
        return
    for name, have, wanted, what, argument in (
        ("b", B, query.shape[0], "batch", "B"),
        ("h", H, query.shape[1], "heads", "H"),
    ):
        if have == 1 and wanted > 1 and bound.graph.reads(name):
            found = f"{what} 1 with the mask_mod {bound.graph.name}, which reads {name}"
            fix = f"Build it with create_block_mask(mask_mod, {'B=..., ' * (name == 'h')}{argument}={wanted}, ...)."
            raise MaskError(message("block_mask", found, f"that of query, {wanted}", fix))


def _lengths(
    found: tuple[int, int], wanted: tuple[int, int], heads: tuple[int, int], whole: tuple[int, int] | None
) -> str:
    """Return the message for a mask of other lengths. `heads` are those of query and key."""
    fix = f"Build it with create_block_mask(mask_mod, B, H, Q_LEN={wanted[0]}, KV_LEN={wanted[1]})."
    if found == heads:
        fix = SWAPPED
    elif whole is not None and found == tuple(-(-n // size) * size for n, size in zip(wanted, whole, strict=True)):
        fix = f"{fix[:-1]}, or pass seq_lengths={wanted} to BlockMask.from_kv_blocks."
    elif wanted[0] < found[0] and wanted[1] <= found[1]:
        fix += (
            " For queries at later positions, as in decoding, keep this mask and pass q_offsets=, the position of the "
            "first query of each sequence (docs/decoding.md)."
        )
    return message("block_mask", f"lengths {found}", f"those of query and key, {wanted}", fix)


def place_captures(bound: BoundMod, device: torch.device, argument: str) -> BoundMod:
    """Return the mod with its captured tensors on `device`. CPU scalars are moved; other tensors must be on it."""
    placed = bound.on(device)
    if placed is bound:
        return bound
    for capture, described in zip(placed.captures, bound.graph.captures, strict=True):
        if capture.device != device:
            fix = f"Move it with .to({str(device)!r}) outside of the mod."
            found = f"the captured tensor {described.name} on {capture.device}"
            raise DeviceError(message(argument, found, f"the device of query, {device}", fix))
    return placed
