"""Masks of every kind, for builds by kernels and on a CPU. `make_mask(name, tokens)` returns a mask_mod."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import create_block_mask, flex_attention, mods
from flexattn.block_mask import RunLists
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.lower_bounds import BoundsText
from flexattn.graph.bound_mod import BoundMod
from flexattn.machine.target import Target
from flexattn.mask_build import kernels as mask_kernels
from flexattn.mask_build.kernels import MaskPlan, plan_mask
from flexattn.mods import and_masks

Mod = Callable[..., Any]  # (b, h, q_idx, kv_idx) -> bool
BATCHES, HEADS = 2, 3
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
LISTS = ("partial.row_ptr", "partial.runs", "full.row_ptr", "full.runs", "order")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(high: int, *shape: int, seed: int = 0, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=generator(seed))


def share(part: float, *shape: int, seed: int = 0) -> Tensor:
    """Return booleans, of which `part` is true."""
    return torch.rand(shape, generator=generator(seed)) < part


def documents(*shape: int) -> Tensor:
    """Return ids that ascend along the last axis, all below kinds(n)."""
    return drawn(kinds(shape[-1]), *shape).sort().values


def kinds(n: int) -> int:
    return max(7, n // 400)


def special(n: int) -> Tensor:
    """Return numbers, some of which are NaN or infinite."""
    x = torch.randn(n, generator=generator(1)) * 4
    return torch.where(share(0.1, n), torch.nan, torch.where(share(0.1, n, seed=1), torch.inf, x))


def spotted(n: int, *places: int) -> Tensor:
    """Return zeros [HEADS, n] with a few numbers that are greater, less, or none."""
    x = torch.zeros(HEADS, n)
    for row, value in zip(x, (1.0, -1.0, torch.nan), strict=True):
        row[list(places)] = value
    return x


def spotless(x: Tensor) -> Tensor:
    return (x < 1) & (x > -1)


def whole(dtype: torch.dtype) -> Callable[[int], tuple[Tensor, ...]]:
    """Return how to draw one tensor of an integer dtype."""
    least = 0 if dtype == torch.uint8 else -100
    return lambda n: (drawn(100, n, low=least).to(dtype),)


def one_of_all(conditions: Sequence[Tensor]) -> Tensor:
    """Combine conditions so that a wrong one changes the result at every position."""
    return functools.reduce(operator.xor, conditions)


def of_integers(n: int, x: Tensor) -> Mod:
    def mask(b, h, q, k):
        arithmetic = [x[q] + x[k] + 100 > 50, 3 - x[q] > x[k] * 3, -x[q] > x[k], (x[q] - x[k]).abs() > 5]
        division = [x[q] // 3 > x[k] % 5, torch.fmod(x[q], 7) > torch.fmod(x[k], 3), x[q] / 7 > x[k] / 3]
        bits = [(x[q] << (k % 5)) > x[k], (x[q] >> 2) > q - k, ((x[q] & x[k]) ^ (x[q] | 5)) > 3]
        others = [torch.where(q > k, x[q], 100) > x[k], x[q] * 0.1 > x[k] * 0.3, x[q].char() * 3 > x[k], x[q].bool()]
        return one_of_all([*arithmetic, *division, *bits, *others])

    return mask


def of_floats(n: int, x: Tensor) -> Mod:
    def mask(b, h, q, k):
        arithmetic = [x[q] + x[k] > 1, x[q] * x[k] * 0.3 > 1, x[q] / x[k] > 0.3, -x[q] > x[k].abs(), x[q] - 0.1 * k < 0]
        order = [torch.maximum(x[q], x[k]) > 1, x[q].clamp(-1, 1) > x[k], torch.where(q > k, x[q], 0.1) > x[k]]
        whole = [torch.floor(x[q]) > torch.ceil(x[k]), torch.trunc(x[k]) > 1]
        others = [x[q] != x[k], torch.isnan(x[q]), torch.isinf(x[k])]
        return one_of_all([*arithmetic, *order, *whole, *others])

    return mask


def of_bools(n: int, x: Tensor) -> Mod:
    def mask(b, h, q, k):
        comparisons = [x[q] < x[k], x[q] <= x[k], x[q] == x[k], torch.maximum(x[q], x[k]), ~x[k]]
        numbers = [x[q] + x[k].int() + 3 > 4, torch.where(x[q], q, k) > 5, torch.where(q > k, False, x[k])]
        return one_of_all([*comparisons, *numbers])

    return mask


def of_casts(n: int, x: Tensor) -> Mod:
    def mask(b, h, q, k):
        y = x[q] * 1.01
        return one_of_all([y.bfloat16() > x[k], y.half() > x[k], torch.round(q * 0.5) > k, torch.round(y) > x[k]])

    return mask


def of_thresholds(n: int, times: Tensor, x: Tensor) -> Mod:
    """Compare values that are equal at many positions, so that the last bit of a quotient, root or product decides."""

    def mask(b, h, q, k):
        down, right = (q // 12 - k // 12) * 1.0, (q % 12 - k % 12) * 1.0
        far = torch.sqrt(down**2 + right**2) <= 5.0
        buckets = times[q] // 1.1 == times[k] // 1.1
        whole = (torch.remainder(times[q], 1.1) < 0.5) & (torch.fmod(-times[k], 1.1) > -0.5)
        return one_of_all([far, buckets, whole, x[q] / 7.0 > x[k] / 3.0, times[q] * 0.3 - times[k] * 0.3 <= 0.0])

    return mask


def nested(n: int, doc: Tensor, starts: Tensor) -> Mod:
    return lambda b, h, q, k: (k >= starts[doc[q]]) & (k <= q)


def with_numbers(n: int) -> Mod:
    window, slope, far = n // 3, 0.37, 3_000_000_000
    return lambda b, h, q, k: ((q - k).abs() < window) & ((q * slope + k / 3.0) < 0.3 * n) & (q.long() * far >= k)


def views(n: int, ids: Tensor, table: Tensor) -> Mod:
    """Read through the strides of every third element, of a transposed table, of one row for all batches."""
    third, turned, same = ids[::3], table.t(), ids[:n].expand(BATCHES, n)
    return lambda b, h, q, k: (third[q] >= third[k]) & (turned[q % 5, k] | (same[b, q] == same[b, k]))


def granules(n: int, steps: Tensor) -> Mod:
    """Read ranges of a tensor that is too long for a table of its elements, and single elements of it."""
    step = len(steps) // n
    return lambda b, h, q, k: (steps[q * step] >= steps[k * step + 1]) & (steps[q * 0 + 77] < steps[k * step])


def nothing(n: int) -> tuple[Tensor, ...]:
    return ()


# Name: (the tensors for n tokens, the mod of n and these tensors).
MASKS: dict[str, tuple[Callable[[int], tuple[Tensor, ...]], Callable[..., Mod]]] = {
    # of positions
    "causal": (nothing, lambda n: mods.causal),
    "sliding": (nothing, lambda n: mods.sliding_window(n // 4)),
    "prefix": (lambda n: (torch.tensor([n // 3, 5]),), lambda n, prefix: mods.prefix_lm(prefix)),
    "padding": (lambda n: (torch.tensor([n - 20, n // 2]),), lambda n, lengths: mods.padding(lengths)),
    "dilated": (nothing, lambda n: mods.dilated(9, 7)),
    "strided": (nothing, lambda n: mods.strided(19)),
    "natten": (nothing, lambda n: mods.natten_2d(-(-n // 12), 12, 5)),
    "block diffusion": (nothing, lambda n: mods.block_diffusion(-(-n // 2), 16)),
    "remainders": (nothing, lambda n: lambda b, h, q, k: ((q - k) % 7 == 0) & (q // 5 >= k // 9)),
    "negative": (nothing, lambda n: lambda b, h, q, k: ((k - q) // 7 % 3 == 1) ^ (torch.fmod(k - q, 5) == -2)),
    "heads": (nothing, lambda n: lambda b, h, q, k: (q >= k - 30 * h) & (k < n - 20 * b)),
    "one head": (nothing, lambda n: lambda b, h, q, k: h != 1),
    "keys": (nothing, lambda n: lambda b, h, q, k: k % 50 < 40),
    "all": (nothing, lambda n: mods.noop_mask),
    "true": (nothing, lambda n: lambda b, h, q, k: True),
    "none": (nothing, lambda n: lambda b, h, q, k: q < 0),
    "numbers": (nothing, with_numbers),
    # of tensors, by one index each
    "documents": (lambda n: (documents(n).int(),), lambda n, ids: mods.document_causal(ids)),
    "batches": (lambda n: (documents(BATCHES, n),), lambda n, ids: and_masks(mods.document(ids), mods.causal)),
    "unsorted": (lambda n: (drawn(9, n),), lambda n, ids: mods.document(ids)),
    "marked": (
        lambda n: (share(0.02, n),), lambda n, marks: mods.or_masks(mods.global_tokens(marks), mods.sliding_window(20))
    ),
    "three axes": (
        lambda n: (drawn(50, BATCHES, HEADS, n),), lambda n, x: lambda b, h, q, k: x[b, h, q] >= x[b, -1, k] + h
    ),
    "scalars": (
        lambda n: (torch.tensor(n // 3), torch.tensor(0.25), torch.tensor(True)),
        lambda n, window, slope, on: lambda b, h, q, k: ((q - k).abs() < window) & (k * slope < q) & on,
    ),
    "views": (lambda n: (documents(3 * n), share(0.5, n, 5)), views),
    # of tensors, by computed indices
    "nested": (lambda n: (documents(n), torch.searchsorted(documents(n), torch.arange(kinds(n)))), nested),
    "thrice": (
        lambda n: (drawn(n, n).sort().values, drawn(60, n).short(), share(0.8, 60)),
        lambda n, x, y, on: lambda b, h, q, k: on[y[x[q]].long()] & (x[k] <= x[q]),
    ),
    "from the end": (lambda n: (documents(n),), lambda n, ids: lambda b, h, q, k: ids[q - n] == ids[-1 - k]),
    "wrapped": (lambda n: (share(0.7, n),), lambda n, on: lambda b, h, q, k: on[q - k]),
    "distances": (
        lambda n: (torch.randn(HEADS, 81, generator=generator(2)).cumsum(1),),
        lambda n, bias: lambda b, h, q, k: bias[h, (q - k).clamp(-40, 40) + 40] > 0,
    ),
    "granules": (lambda n: (drawn(5000, 20_000 // n * n + n).sort().values,), granules),
    "by a table": (
        lambda n: (drawn(100, 8, 8, low=-100).to(torch.int8), share(0.9, 256)),
        lambda n, x, on: lambda b, h, q, k: on[x[q % 8, k % 8].long()] | (q >= k),
    ),
    "sums": (
        lambda n: (spotted(2 * n, 38, 78, 80),), lambda n, x: lambda b, h, q, k: spotless(x[h, q + k]) ^ (b == 1)
    ),
    "ends": (
        lambda n: (spotted(n, 19, 40),),
        lambda n, x: lambda b, h, q, k: (spotless(x[h, q]) & spotless(x[h, k])) ^ (b == 1),
    ),
    "ancestors": (lambda n: ((torch.arange(n) - 1) // 3,), lambda n, parents: mods.tree(parents)),
    "table": (lambda n: (share(0.3, n, n),), lambda n, on: lambda b, h, q, k: on[q, k]),
    "nearly full": (lambda n: (share(0.9996, n, n),), lambda n, on: lambda b, h, q, k: on[q, k]),
    # of every dtype
    "bool": (lambda n: (share(0.5, n),), of_bools),
    **{str(dtype).removeprefix("torch."): (whole(dtype), of_integers) for dtype in INTEGERS},
    "float32": (lambda n: (special(n),), of_floats),
    "bfloat16": (lambda n: (special(n).bfloat16(),), of_floats),
    "float16": (lambda n: (special(n).half(),), of_floats),
    "casts": (lambda n: (special(n),), of_casts),
    "thresholds": (lambda n: (torch.arange(n) // 3 * 1.1, drawn(100, n, low=-100)), of_thresholds),
}  # fmt: skip
SQUARE = ("ancestors", "table", "nearly full")  # their tensors have n * n elements or bits
# Triton's interpreter does not round to bfloat16, has no rounding to whole numbers, and its fma rounds twice.
UNINTERPRETED = ("casts", "thresholds")


def make_mask(name: str, n: int, device: torch.device | str = "cpu") -> Mod:
    """Return a mask_mod for lengths of at most n, its tensors on a device."""
    tensors, make = MASKS[name]
    return make(n, *(t.to(device) for t in tensors(n)))


def outside(device: torch.device | str = "cpu") -> dict[str, Mod]:
    """Return masks that index the captured tensor `short` of 100 elements out of bounds for 120 tokens."""
    short, long = drawn(9, 100).to(device), drawn(9, 120).to(device)

    def once(q, k):
        """Return an index that is out of bounds at one position, which is not a sampled one."""
        return torch.where((q == 37) & (k == 20), 100, 0)

    return {
        "sampled": lambda b, h, q, k: short[q] == long[k],
        "below": lambda b, h, q, k: long[q] == short[k - 101],
        "evaluated": lambda b, h, q, k: short[once(q, k)] >= 0,
        "evaluated in some blocks": lambda b, h, q, k: (k >= 48) | (short[once(q, k)] >= 0),
    }


def brute_force(mod: Mod, B: int, H: int, Q: int, KV: int) -> Tensor:
    """Return the dense mask by calling the Python function on index tensors."""
    index = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in (B, H, Q, KV)), indexing="ij")
    return torch.as_tensor(mod(*index)).expand(B, H, Q, KV)


def classes(dense: Tensor, block_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return whether any, and whether every, pair of each block attends; what is past the ends does not."""
    blocks = [rows.split(block_size[1], dim=3) for rows in dense.split(block_size[0], dim=2)]
    shape = (*dense.shape[:2], len(blocks), len(blocks[0]))
    some = torch.stack([b.flatten(2).any(2) for row in blocks for b in row], -1).view(shape)
    every = torch.stack(
        [b.flatten(2).all(2) & (b.shape[2:] == block_size) for row in blocks for b in row], -1
    ).view(shape)  # fmt: skip
    return some, every


def attended(
    mask_mod: Mod, Q: int, KV: int, dtype: torch.dtype, device: str, **options: object
) -> tuple[Tensor, Tensor]:
    """Return which pairs attend in the kernels of the forward and of dV, bool [Q, KV] each."""
    mask = create_block_mask(mask_mod, None, None, Q, KV, device=device)
    q, k = (torch.zeros(1, 1, n, 64, dtype=dtype, device=device) for n in (Q, KV))
    eye = torch.eye(max(Q, KV) + 64, dtype=dtype, device=device)
    forward, backward = [], []
    for first in range(0, max(Q, KV), 64):  # a column of value, or of the gradient of out, for each key, or query
        value = eye[None, None, :KV, first : first + 64].contiguous().requires_grad_()
        out = flex_attention(q, k, value, block_mask=mask, kernel_options=options)
        forward.append(out.detach()[0, 0] != 0)
        d_out = eye[None, None, :Q, first : first + 64].contiguous()
        backward.append(torch.autograd.grad(out, value, d_out)[0][0, 0].T != 0)
    return torch.cat(forward, 1)[:, :KV].cpu(), torch.cat(backward)[:Q].cpu()


def extents(bound: BoundMod) -> tuple[int, int]:
    """Return the batches and heads that a mask is built for: those that it reads."""
    return BATCHES if bound.graph.reads("b") else 1, HEADS if bound.graph.reads("h") else 1


class Blind(MaskPlan):
    """A plan that knows nothing of any block, so that each is evaluated."""

    @cached_property
    def bounds(self) -> BoundsText:
        boxes = "b, h, q_block, kv_block, q_lo, q_hi, kv_lo, kv_hi"
        arguments = ", ".join((boxes, *self.mod.argument_names()))
        known = "return q_lo + kv_lo < 0, q_lo + kv_lo >= 0"
        return BoundsText(f"@triton.jit\ndef bounds({arguments}):\n    {known}\n", ())

    @cached_property
    def classify(self) -> KernelSource:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mask_kernels, "SAMPLES", 0)
            return super().classify


def plan_of(bound: BoundMod, target: Target, blind: bool = False) -> MaskPlan:
    """Return the plan of a mask that has one."""
    plan = plan_mask(bound, target)
    assert plan is not None
    return Blind(plan.mod, plan.interpreter) if blind else plan


def assert_same_lists(got: Sequence[RunLists], want: Sequence[RunLists]) -> None:
    """Compare both directions, wherever they are."""
    for direction, ours, theirs in zip(("by query", "by key"), got, want, strict=True):
        for name, x, y in zip(LISTS, ours.tensors, theirs.tensors, strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape, f"{direction}: {name} {x.shape}, expected {y.shape}"
            assert torch.equal(x.cpu(), y.cpu()), f"{direction}: {name} {x.tolist()}, expected {y.tolist()}"
