"""Calls of flex_attention that test the kernels of the Triton engine, in Triton's interpreter and on a GPU.

A Setting is the device and the scale of the sizes. CASES are calls by name, whose results are compared with the oracle.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from oracle import assert_close_to_oracle
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn import AuxRequest, BlockMask, create_block_mask, dropout_mask, flex_attention, mods
from flexattn.reference import attention

Mod = Callable[..., Any]


@dataclass(frozen=True)
class Setting:
    """Where a case runs. `size` and `block` multiply the lengths and block sizes of the smallest useful problem."""

    device: str
    dtype: torch.dtype
    size: int = 1
    block: int = 1
    options: tuple[tuple[str, object], ...] = ()

    def randn(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
        return torch.randn(shape, generator=generator).to(self.device, dtype)

    def __str__(self) -> str:
        options = "".join(f"-{value}" for _, value in self.options)
        return f"{str(self.dtype).removeprefix('torch.')}{options}"


@dataclass(frozen=True)
class Call:
    """The arguments of one call, and the captured tensors whose gradients are compared."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Mod | None = None
    mask: BlockMask | upstream.BlockMask | None = None
    mask_mod: Mod | Tensor | None = None  # the mask for the oracle
    scale: float | None = None
    learned: tuple[Tensor, ...] = ()  # captured tensors of score_mod and the sink, if their gradients are compared
    options: dict[str, object] = field(default_factory=dict)
    d_out: Callable[[Tensor], Tensor] = lambda x: x  # changes the layout of the gradient of out
    sink: Tensor | float | None = None
    dropout_p: float = 0.0


@dataclass(frozen=True)
class Sizes:
    B: int = 2
    Hq: int = 2
    Hkv: int = 1
    M: int = 50
    N: int = 70
    D: int = 16
    Dv: int = 24
    Bkv: int | None = None

    def times(self, factor: int) -> Sizes:
        """Multiply the lengths, except tiny ones and multiples of 128. Odd lengths stay odd."""
        M, N = (x if x < 16 or x % 128 == 0 else x * factor - (x * factor - x) % 2 for x in (self.M, self.N))
        return replace(self, M=M, N=N)


def inputs(at: Setting, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    s = sizes.times(at.size)
    Bkv = s.B if s.Bkv is None else s.Bkv
    shapes = ((s.B, s.Hq, s.M, s.D), (Bkv, s.Hkv, s.N, s.D), (Bkv, s.Hkv, s.N, s.Dv))
    q, k, v = (at.randn(*shape, seed=i, dtype=at.dtype) for i, shape in enumerate(shapes))
    return q, k, v


def make_call(
    at: Setting, sizes: Sizes = Sizes(), score: str | None = None, mask: str | None = None,
    block: int | tuple[int, int] = 32, **rest: Any,
) -> Call:  # fmt: skip
    """Return a call with a score_mod from SCORES and a mask from MASKS, by name."""
    q, k, v = inputs(at, sizes)
    M, N = q.shape[2], k.shape[2]
    if block == 32:
        block *= at.block
    score_mod, learned = SCORES[score](at, q.shape[1], M, N) if score else (None, ())
    mask_mod = MASKS[mask](at, M, N) if mask else None
    blocks = mask_mod and create_block_mask(mask_mod, q.shape[0], q.shape[1], M, N, device=at.device, BLOCK_SIZE=block)
    return Call(q, k, v, score_mod, blocks, mask_mod, learned=learned, options=dict(at.options), **rest)


@contextlib.contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """Set torch.use_deterministic_algorithms."""
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def results(call: Call, dtype: torch.dtype | str | None) -> tuple[Tensor | None, ...]:
    """Return (out, lse, dq, dk, dv, *d_learned) of the engine (dtype "ours") or of the dense reference in `dtype`."""
    leaves = [x.detach().requires_grad_() for x in (call.query, call.key, call.value)]
    learned = [x.requires_grad_() for x in call.learned]
    torch.manual_seed(5)  # for dropout
    if dtype == "ours":
        out, aux = flex_attention(
            *leaves, call.score_mod, call.mask, call.scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
            kernel_options={"BACKEND": "TRITON", **call.options}, sink=call.sink,
            dropout_p=call.dropout_p,
        )  # fmt: skip
        lse = aux.lse
    else:
        places = (*call.query.shape[:3], call.key.shape[2])
        dropout = dropout_mask(call.dropout_p, places, call.query.device, torch.float64) if call.dropout_p else None
        out, lse = attention(*leaves, call.score_mod, call.mask_mod, call.scale, dtype, call.sink, dropout)
    d_out, d_lse = given(call, out, lse)
    both = [(x, d) for x, d in ((out, d_out), (lse, d_lse)) if x.requires_grad]
    grads = torch.autograd.grad([x for x, _ in both], leaves + learned, [d for _, d in both], allow_unused=True)
    return out.detach(), lse.detach(), *grads


def given(call: Call, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the incoming gradients of out and lse for the backward of a call."""
    generator = torch.Generator().manual_seed(1)
    d_out, d_lse = (torch.randn(x.shape, generator=generator).to(x.device) for x in (out, lse))
    return call.d_out(d_out.to(call.query.dtype)).to(out.dtype), d_lse.to(lse.dtype) * (lse != -math.inf)


def rounding_of_ds(call: Call, out: Tensor, lse: Tensor) -> dict[str, float]:
    """Return how much one rounding of dO v^T or of delta changes an element of each gradient.

    ds = p (dO v^T - delta) is small if one key has all the weight. Dense attention then subtracts equally rounded
    numbers, but a kernel computes delta from out and dO.
    """
    d_out, _ = given(call, out, lse)
    group = call.query.size(1) // call.value.size(1)
    rounding = (
        torch.finfo(call.query.dtype).eps
        / 2
        * float((d_out.double() @ call.value.repeat_interleave(group, 1).double().transpose(-1, -2)).abs().max())
    )
    scale = call.query.size(-1) ** -0.5 if call.scale is None else abs(call.scale)
    return {
        "dq": rounding * scale * float(call.key.abs().max()),
        "dk": rounding * scale * float(call.query.abs().max()),
        "capture": rounding,
    }


def check(call: Call, loose: bool = False) -> None:
    """Compare out, lse and every gradient with the oracle. Use `loose` for cases with too few values for an rmse."""
    got = results(call, "ours")
    same, exact = results(call, None), results(call, torch.float64)
    floor = 2.0 if call.query.dtype.itemsize == 2 else 4.0
    eps = None
    if dict(call.options).get("FLOAT32_PRECISION") == "tf32":
        # TF32 has 13 bits less. Triton truncates where cuBLAS rounds, so each operand may lose a whole ulp.
        floor, eps = 4.0 * 2**13, 2.0**-10
    names = ["out", "lse", "dq", "dk", "dv", *(f"gradient of capture {i}" for i in range(len(call.learned)))]
    rounding: dict[str, float] = {}
    if call.query.dtype == torch.float32 and got[0] is not None and got[1] is not None:
        rounding = rounding_of_ds(call, got[0], got[1])
    for name, ours, near, oracle in zip(names, got, same, exact, strict=True):
        if ours is None or near is None or oracle is None:
            assert all(x is None or not x.any() for x in (ours, oracle)), f"{name}: a gradient is missing"
            continue
        kind = name if name in ("out", "lse") else "grad"
        rounded_lse = 0.0
        if kind != "lse" and call.query.dtype == torch.float32:
            # Half an ulp of a score, or of the lse that the backward reads, is an error of lse / 2 ulp in a weight.
            rounded_lse = float(got[1].masked_fill(got[1] == -math.inf, 0).abs().amax())
        bound = floor + rounded_lse
        if name.startswith("gradient"):
            bound *= max(1.0, torch.finfo(call.query.dtype).eps / torch.finfo(ours.dtype).eps)
        if loose or ours.numel() < 8:
            assert_near(name, ours, near, oracle, call.query.dtype, eps, 32 + rounded_lse)
        else:
            room = rounding.get("capture" if name.startswith("gradient") else name, 0.0)
            assert_close_to_oracle(name, ours, near, oracle, kind, bound, room=room)


def assert_near(
    name: str, got: Tensor, dense: Tensor, oracle: Tensor, dtype: torch.dtype, eps: float | None = None,
    floor: float = 32.0,
) -> None:  # fmt: skip
    """Raise unless errors are about as large as those of dense attention. `floor` is a minimal bound in eps."""
    error, bound = near_bound(name, got, dense, oracle, eps or torch.finfo(dtype).eps, floor)
    assert error <= bound, f"{name}: largest error {error:.3g}, allowed {bound:.3g}"


def near_bound(name: str, got: Tensor, dense: Tensor, oracle: Tensor, eps: float, floor: float) -> tuple[float, float]:
    """Return the largest error and the bound of assert_near. Raise for infinities at wrong positions."""
    assert torch.equal(got.isinf(), oracle.isinf()), f"{name}: infinities are at wrong positions"
    got, dense, oracle = (x.double().masked_fill(x.isinf(), 0) for x in (got, dense, oracle))
    error, error_of_dense = (float((x - oracle).abs().max()) for x in (got, dense))
    return error, 4 * error_of_dense + floor * eps * max(1.0, float(oracle.abs().max()))


# Score mods: make(setting, heads, M, N) -> (score_mod, captured tensors whose gradients are compared)


def _table(shape: Callable[[int, int, int], tuple[int, ...]], mod: Callable[..., Any], learn: bool = True) -> Any:
    """Return a function that makes mod(score, b, h, i, j, table, M, N) with one captured float32 table."""

    def make(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
        table = at.randn(*shape(H, M, N), seed=7)
        return lambda s, b, h, i, j: mod(s, b, h, i, j, table, M, N), (table,) if learn else ()

    return make


def _plain(mod: Mod) -> Any:
    return lambda at, H, M, N: (mod, ())


def _nested(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
    group = (torch.arange(max(M, N), device=at.device) * 5 % 7).to(torch.int32)
    table = at.randn(7, 7, seed=3)
    return lambda s, b, h, i, j: s + table[group[i], group[j]], (table,)


def _nested_pairs(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
    """An index that is loaded per (q, kv) pair, and is out of bounds beyond the lengths."""
    cells = torch.arange(M * N, device=at.device).view(M, N).to(torch.int32) * 5 % 7
    table = at.randn(H, 7, seed=3)
    return lambda s, b, h, i, j: s + table[h, cells[i, j]], (table,)


def _chained(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
    table = at.randn(2, H, N, seed=3)
    return lambda s, b, h, i, j: s * (1 + 0.1 * table[b][h][j]), (table,)


def _views(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
    table, dense = at.randn(N, H, 3, seed=4), at.randn(H, N, M, seed=5)
    return lambda s, b, h, i, j: s + table[:, :, 1].T[h, j] + dense.transpose(1, 2)[h, i, j], (table, dense)


def _not_contiguous(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
    """A captured strided view, and a captured tensor that is not 16-byte aligned."""
    wide, odd = at.randn(M, 2 * N, seed=4)[:, ::2], at.randn(N + 1, seed=5)[1:]
    return lambda s, b, h, i, j: s * 0.9 + wide[i, j] * odd[j], (wide, odd)


def _expanded(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
    row = at.randn(1, N, seed=4).expand(M, N)
    return lambda s, b, h, i, j: s + row[i, j], ()


def _inside(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
    """Tables larger than any tile can reach, indexed by sums in both directions. Their loads are early and unmasked."""
    half = at.randn(H, M + N + 300, seed=4, dtype=torch.float16)
    odd, pair = at.randn(H, M + N + 301, seed=5), at.randn(N + 130, M + 130, seed=6)
    mod = lambda s, b, h, i, j: s + half[h, i - j + N + 130] + odd[h, j - i + M + 130] * pair[j + 1, i]  # noqa: E731
    return mod, (odd,)


def _two_dtypes(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
    """Half and integer tables. Not bfloat16 in Triton's interpreter, which computes it incorrectly."""
    half = at.randn(N, seed=4, dtype=torch.float16 if os.environ.get("TRITON_INTERPRET") == "1" else torch.bfloat16)
    steps = torch.arange(M, device=at.device) % 5
    flags = torch.arange(N, device=at.device) % 3 == 0
    return lambda s, b, h, i, j: torch.where(flags[j], s, s + half[j] * 0.5) + 0.1 * steps[i], (half,)


def _numbers(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
    factor, step = 0.75, 3
    return lambda s, b, h, i, j: s * factor + 0.01 * ((i + step) * factor - j), ()


def _zero_d(at: Setting, H: int, M: int, N: int) -> tuple[Mod, tuple[Tensor, ...]]:
    temperature, shift = torch.tensor(1.3, device=at.device), torch.tensor(0.2, device=at.device)
    return lambda s, b, h, i, j: s / temperature + shift * (i % 3), (temperature, shift)


SCORES: dict[str, Any] = {
    "softcap": _plain(lambda s, b, h, i, j: torch.tanh(s / 2) * 2),
    "square": _plain(lambda s, b, h, i, j: 0.2 * s * s - s),
    "of_index": _plain(lambda s, b, h, i, j: s + torch.where(i > j, 0.01 * j, -0.02 * i) + h * 0.5 - b),
    "constant": _plain(lambda s, b, h, i, j: 0.5),
    "ignores_score": _plain(lambda s, b, h, i, j: (i - j) * 0.05),
    "detached": _plain(lambda s, b, h, i, j: (s * 2 + 1) * (s * 2).detach() * 0.1 + s),
    "infinite": _plain(lambda s, b, h, i, j: torch.where((i + j) % 3 == 0, -math.inf, s * 0.7)),
    "empties_rows": _plain(lambda s, b, h, i, j: torch.where(i < 10, -math.inf, s)),
    "infinite_bias": _plain(lambda s, b, h, i, j: s + torch.where((i < 10) | (j % 4 == 1), -math.inf, 0.1 * h)),
    "numbers": _numbers,
    "alibi": _table(lambda H, M, N: (H,), lambda s, b, h, i, j, t, M, N: s + 0.1 * t[h] * (j - i)),
    "relative": _table(lambda H, M, N: (H, M + N), lambda s, b, h, i, j, t, M, N: s + t[h, i - j + N]),
    "inside": _inside,
    "clamped": _table(lambda H, M, N: (H, 21), lambda s, b, h, i, j, t, M, N: s + t[h, (i - j).clamp(-10, 10) + 10]),
    "capped_table": _table(
        lambda H, M, N: (H, 21),
        lambda s, b, h, i, j, t, M, N: torch.tanh((s + t[h, (i - j).clamp(-10, 10) + 10]) / 2) * 2,
    ),
    "wrapping": _table(lambda H, M, N: (H, M + N), lambda s, b, h, i, j, t, M, N: s + t[h, i - j] * 0.5),
    "dense_bias": _table(lambda H, M, N: (2, H, M, N), lambda s, b, h, i, j, t, M, N: s + t[b, h, i, j]),
    "dense_factor": _table(lambda H, M, N: (H, M, N), lambda s, b, h, i, j, t, M, N: s * t[h, i, j]),
    "fixed_bias": _table(lambda H, M, N: (H, M, N), lambda s, b, h, i, j, t, M, N: s + t[h, i, j], learn=False),
    "replaced": _table(lambda H, M, N: (H, M, N), lambda s, b, h, i, j, t, M, N: t[h, i, j]),
    "row_plus_column": _table(lambda H, M, N: (max(M, N),), lambda s, b, h, i, j, t, M, N: s + t[i] + t[j]),
    "row_and_column": _table(lambda H, M, N: (max(M, N),), lambda s, b, h, i, j, t, M, N: s + t[i] * t[j] - t[j]),
    "sites": _table(
        lambda H, M, N: (max(7, H),),
        lambda s, b, h, i, j, t, M, N: s * torch.sigmoid(t[h]) + t[(i - j) % 7] * t[-1],
    ),
    "gate": _table(lambda H, M, N: (H, N), lambda s, b, h, i, j, t, M, N: s * torch.sigmoid(t)[h, j]),
    "per_batch": _table(lambda H, M, N: (2, 1), lambda s, b, h, i, j, t, M, N: s + t[b, 0] * t[b, -1] * (i % 2)),
    "score_in_index": _table(
        lambda H, M, N: (9,),
        lambda s, b, h, i, j, t, M, N: s + t[(s.detach() * 2).to(torch.int32).clamp(-4, 4)],
    ),
    "nested": _nested,
    "nested_pairs": _nested_pairs,
    "chained": _chained,
    "views": _views,
    "not_contiguous": _not_contiguous,
    "expanded": _expanded,
    "dtypes": _two_dtypes,
    "zero_d": _zero_d,
    # Not finite in the rows of a tile that are past the end.
    "over_rows": _table(lambda H, M, N: (M,), lambda s, b, h, i, j, t, M, N: s / (t[i].abs() + 1.0 * (i < M))),
    "fixed_over_rows": _table(
        lambda H, M, N: (M,), lambda s, b, h, i, j, t, M, N: s / (t[i].abs() + 1.0 * (i < M)), learn=False
    ),
    "one_over_rows": _table(  # the gradient of the score does not change
        lambda H, M, N: (M,), lambda s, b, h, i, j, t, M, N: s + 0.3 / (t[i].abs() + 1.0 * (i < M)), learn=False
    ),
    "log_of_rows": _table(lambda H, M, N: (H, M), lambda s, b, h, i, j, t, M, N: s + 0.1 * torch.log(t[h, i] ** 2)),
    "before_the_end": _table(lambda H, M, N: (H,), lambda s, b, h, i, j, t, M, N: s * t[h] + 2.0 / (M - i)),
}  # fmt: skip


# Masks: make(setting, M, N) -> mask_mod


def _document(at: Setting, M: int, N: int) -> Mod:
    ids = (torch.arange(max(M, N), device=at.device) // 19).to(torch.int32)
    return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)


def _lengths(at: Setting, M: int, N: int) -> Mod:
    lengths = torch.tensor([N // 3, N], device=at.device)
    return lambda b, h, i, j: j < lengths[b]


def _prefix(at: Setting, M: int, N: int) -> Mod:
    lengths = torch.tensor([[5, 11], [N // 2, 0]], device=at.device)
    return lambda b, h, i, j: (j < lengths[b, h]) | (j <= i)


def _bias_mask(at: Setting, M: int, N: int) -> Mod:
    keep = at.randn(M, N, seed=9) > 0
    return lambda b, h, i, j: keep[i, j]


def _ends(at: Setting, M: int, N: int) -> Mod:
    """Return a mask whose queries load the ends of their intervals of keys."""
    rows = torch.arange(M, dtype=torch.int32, device=at.device)
    first = rows * 7 % N // 2
    last = first + rows * 5 % 60
    return lambda b, h, i, j: (j >= first[i]) & (j < last[i]) & ((i + j) % 5 != 0)


MASKS: dict[str, Any] = {
    "causal": lambda at, M, N: mods.causal,
    "sliding": lambda at, M, N: lambda b, h, i, j: (i >= j) & (i - j < 20),
    "ahead": lambda at, M, N: lambda b, h, i, j: j > i + 2,
    "per_head_and_batch": lambda at, M, N: lambda b, h, i, j: (i + h * 17) >= j + b * 11,
    "holes": lambda at, M, N: lambda b, h, i, j: (i % 5 != 0) & (j % 3 != 0) & ((i // 32 + j // 32) % 2 == 0),
    "late_rows": lambda at, M, N: lambda b, h, i, j: (i >= 40) & (j < 50),
    "one_key": lambda at, M, N: lambda b, h, i, j: j == N - 1,
    "nothing": lambda at, M, N: lambda b, h, i, j: j < 0,
    "everything": lambda at, M, N: mods.noop_mask,
    "document": _document,
    "lengths": _lengths,
    "prefix": _prefix,
    "captured": _bias_mask,
    "ends": _ends,
}

SHAPES = (
    Sizes(Hq=2, Hkv=2), Sizes(Hq=4, Hkv=1), Sizes(B=1, Hq=6, Hkv=3, M=33, N=31), Sizes(Bkv=1),
    Sizes(B=3, Bkv=1, Hq=3, M=20), Sizes(M=1), Sizes(N=1), Sizes(B=1, Hq=1, M=1, N=1), Sizes(M=7, N=5),
    Sizes(M=97, N=11), Sizes(M=3, N=99), Sizes(M=32, N=64), Sizes(M=65, N=33),
)  # fmt: skip
DIMS = (
    (1, 1), (7, 7), (16, 1), (24, 8), (40, 40), (72, 16), (96, 96), (130, 24), (48, 192), (192, 128), (33, 65),
    (3, 257), (384, 320), (512, 512), (576, 512),
)  # fmt: skip
BLOCKS = (7, 16, 100, 256, (32, 64), (64, 16), (20, 128))


def _transposed(x: Tensor) -> Tensor:
    """Return the same values with [B, S, H, D] memory layout."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _inside_nan(x: Tensor) -> Tensor:
    """Return the same values as an unaligned view of a larger tensor that is NaN elsewhere."""
    B, H, S, D = x.shape
    around = torch.full((B, H + 1, S + 3, D + 5), math.nan, dtype=x.dtype, device=x.device)
    around[:, 1:, 1:-2, 3:-2] = x
    return around[:, 1:, 1:-2, 3:-2]


def _aligned_inside_nan(x: Tensor) -> Tensor:
    """Return the same values as a 16-byte aligned view of a larger tensor that is NaN elsewhere."""
    B, H, S, D = x.shape
    around = torch.full((B, H, S + 40, -(-D // 8) * 8 + 8), math.nan, dtype=x.dtype, device=x.device)
    around[:, :, :S, :D] = x
    return around[:, :, :S, :D]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "columns": lambda x: x.mT.contiguous().mT,
    "window": _inside_nan,
    "aligned_window": _aligned_inside_nan,
    "packed": lambda x: torch.stack([x, x * math.nan], 3).flatten(3)[..., : x.shape[3]],
    "expanded_heads": lambda x: x[:, :1].expand(x.shape),
    "expanded_batch": lambda x: x[:1].expand(x.shape),
    "expanded_rows": lambda x: x[:, :, :1].expand(x.shape),
}


def _with_layout(at: Setting, name: str) -> Call:
    layout = LAYOUTS[name]
    call = make_call(at, Sizes(Hq=4, Hkv=2), "relative", "causal")
    return replace(call, query=layout(call.query), key=layout(call.key), value=layout(call.value))


def _with_gradient_layout(at: Setting, name: str) -> Call:
    return make_call(at, Sizes(D=24), None, "causal", d_out=LAYOUTS[name])


def _with_lists(at: Setting) -> Call:
    """User-provided block lists take precedence over mask_mod. The last full block extends past the keys."""
    block = 32 * at.block
    q, k, v = inputs(replace(at, size=1), Sizes(M=2 * block, N=3 * block - 3))
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32, device=at.device)
    partial, full = (torch.tensor([[x]], dtype=torch.int32, device=at.device) for x in ([[1], [0]], [[0], [2]]))
    mask = BlockMask.from_kv_blocks(
        counts, partial, counts, full, block, lambda b, h, i, j: (i + j) % 2 == 0, (2 * block, 3 * block - 3)
    )
    i, j = (torch.arange(x.shape[2], device=at.device) for x in (q, k))
    even, column = (i[:, None] + j) % 2 == 0, j // block
    dense = torch.where(
        i[:, None] < block, (column == 0) | ((column == 1) & even), (column == 2) | ((column == 0) & even)
    )
    score_mod, learned = SCORES["dense_bias"](at, 2, q.shape[2], k.shape[2])
    return Call(q, k, v, score_mod, mask, dense, learned=learned, options=dict(at.options))


def _with_unequal_lists(at: Setting) -> Call:
    """Only full blocks, which extend past both lengths. The block size is not a multiple of the tile."""
    M, N, block = 70, 75, (40, 24)
    q, k, v = inputs(replace(at, size=1), Sizes(M=M, N=N))
    counts = torch.tensor([[[2, 1]]], dtype=torch.int32, device=at.device)
    columns = torch.tensor([[[[3, 0, 0, 0], [3, 0, 0, 0]]]], dtype=torch.int32, device=at.device)
    mask = BlockMask.from_kv_blocks(torch.zeros_like(counts), columns, counts, columns, block, None, (M, N))
    i, j = torch.arange(M, device=at.device)[:, None], torch.arange(N, device=at.device)
    dense = (j // 24 == 3) | ((i < 40) & (j < 24))
    score_mod, learned = SCORES["dense_bias"](at, 2, M, N)
    return Call(q, k, v, score_mod, mask, dense, learned=learned, options=dict(at.options))


def _with_overhanging_queries(at: Setting) -> Call:
    """Only full blocks, which extend past the queries but not past the keys. The memory there is NaN."""
    block = 32 * at.block
    M, N = block + 5, 2 * block
    q, k, v = inputs(replace(at, size=1), Sizes(M=M, N=N))
    q = torch.cat((q, q.new_full((*q.shape[:2], block, q.size(3)), torch.nan)), 2)[:, :, :M]
    counts = torch.tensor([[[2, 1]]], dtype=torch.int32, device=at.device)
    columns = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32, device=at.device)
    mask = BlockMask.from_kv_blocks(torch.zeros_like(counts), columns, counts, columns, block, None, (M, N))
    i, j = torch.arange(M, device=at.device)[:, None], torch.arange(N, device=at.device)
    return Call(q, k, v, None, mask, (i < block) | (j >= block), options=dict(at.options))


def _with_upstreams_mask(at: Setting) -> Call:
    call = make_call(at, Sizes(), "alibi", "document")
    M, N = call.query.shape[2], call.key.shape[2]
    mask = upstream.create_block_mask(call.mask_mod, None, None, M, N, device=at.device, BLOCK_SIZE=32 * at.block)
    return replace(call, mask=mask)


# Sinks: make(setting, batches, heads). Tensors require gradients.
SINKS: dict[str, Callable[[Setting, int, int], Tensor | float]] = {
    "heads": lambda at, B, H: 2 * at.randn(H, seed=11),
    "batches": lambda at, B, H: at.randn(B, H, seed=11).to(at.dtype),
    "one": lambda at, B, H: 0.0,
    "large": lambda at, B, H: 40 + at.randn(H, seed=11),
    "small": lambda at, B, H: -90 * torch.ones(H, device=at.device),
    "none": lambda at, B, H: torch.full((H,), -math.inf, device=at.device),
}


def with_sink(call: Call, at: Setting, name: str) -> Call:
    """Return the call with a sink from SINKS."""
    sink = SINKS[name](at, *call.query.shape[:2])
    return replace(call, sink=sink, learned=(*call.learned, *((sink,) if isinstance(sink, Tensor) else ())))


def _cases() -> dict[str, Callable[[Setting], Call]]:
    found: dict[str, Callable[[Setting], Call]] = {"plain": lambda at: make_call(at)}
    found |= {f"score-{n}": lambda at, n=n: make_call(at, Sizes(), n, "causal") for n in SCORES}
    found |= {f"unmasked-{n}": lambda at, n=n: make_call(at, Sizes(), n) for n in SCORES}
    found |= {f"mask-{n}": lambda at, n=n: make_call(at, Sizes(), "relative", n) for n in MASKS}
    found |= {f"mask_alone-{n}": lambda at, n=n: make_call(at, Sizes(), None, n) for n in MASKS}
    found |= {f"mask_softcap-{n}": lambda at, n=n: make_call(at, Sizes(), "softcap", n) for n in MASKS}
    for s in SHAPES:
        name = str(s)[6:-1].replace(" ", "")
        found[f"shape-{name}"] = lambda at, s=s: make_call(at, s, "of_index", None)
        found[f"shape_masked-{name}"] = lambda at, s=s: make_call(at, s, "softcap", "causal")
    found |= {
        f"dims-{D}x{V}": lambda at, D=D, V=V: make_call(at, Sizes(1, 2, 1, 37, 41, D, V), None, "causal")
        for D, V in DIMS
    }
    found |= {f"block-{b}": lambda at, b=b: make_call(at, Sizes(), "relative", "sliding", b) for b in BLOCKS}
    found |= {f"block_holes-{b}": lambda at, b=b: make_call(at, Sizes(), None, "holes", b) for b in BLOCKS[::3]}
    found |= {f"layout-{n}": lambda at, n=n: _with_layout(at, n) for n in LAYOUTS}
    found |= {f"gradient_layout-{n}": lambda at, n=n: _with_gradient_layout(at, n) for n in LAYOUTS}
    for scale in (0.0, -0.7, 3.0):
        for score in (None, "softcap", "alibi"):
            found[f"scale{scale}-{score}"] = lambda at, x=scale, n=score: make_call(at, Sizes(), n, "causal", scale=x)
    # Lengths that are multiples of tiles: loads are proved to be in bounds.
    for score in (None, "dense_bias"):
        found[f"mask_inside-{score}"] = lambda at, n=score: make_call(at, Sizes(1, 2, 1, 128, 128), n, "captured", 128)
    for sink, score, mask in (
        ("heads", None, "late_rows"), ("batches", "softcap", "causal"), ("one", "alibi", None),
        ("one", None, "nothing"),
        ("large", "relative", "sliding"), ("small", None, "causal"), ("none", None, "late_rows"),
    ):  # fmt: skip
        found[f"sink-{sink}-{score}-{mask}"] = lambda at, n=sink, s=score, m=mask: with_sink(
            make_call(at, Sizes(), s, m), at, n
        )
    for p, score, mask, block in (
        (0.3, None, None, 32), (0.1, "softcap", "causal", 32), (0.5, "relative", "sliding", (24, 20)),
        (0.2, None, "sliding", (16, 48)), (1.0, None, "late_rows", 32),
    ):  # fmt: skip
        found[f"dropout-{p}-{score}-{mask}"] = lambda at, p=p, s=score, m=mask, block=block: make_call(
            at, Sizes(), s, m, block, dropout_p=p
        )
    # All or half of a thread's eight numbers may be in the tile. A bytes mask changes the layout of 16-term products.
    for rows, keys, mask in ((16, 32, "captured"), (32, 16, "captured"), (64, 32, "causal")):
        tile = {f"BLOCK_{x}{n}": size for x, size in (("M", rows), ("N", keys)) for n in ("", 1, 2)}
        found[f"dropout_tile-{rows}x{keys}-{mask}"] = lambda at, tile=tile, m=mask: make_call(
            replace(at, options=(*at.options, *tile.items())), Sizes(M=90, N=100), None, m, dropout_p=0.2
        )
    found["dropout_unaligned"] = lambda at: make_call(at, Sizes(D=65, Dv=24), None, "captured", dropout_p=0.2)
    found["dropout-sink"] = lambda at: with_sink(make_call(at, Sizes(), None, "causal", dropout_p=0.2), at, "heads")
    found["lists"] = _with_lists
    found["unequal_lists"] = _with_unequal_lists
    found["overhanging_queries"] = _with_overhanging_queries
    found["upstreams_mask"] = _with_upstreams_mask
    return found  # fmt: skip


CASES = _cases()
# Cases with too few values or too large cancellations for the bounds of the rmse.
LOOSE = (
    "shape",
    "dims",
    "mask",
    "scale",
    "sink",
    "score-constant",
    "unmasked-constant",
    "layout-expanded",
    "gradient_layout-expanded",
)


def check_case(name: str, at: Setting) -> None:
    check(CASES[name](at), loose=name.startswith(LOOSE))
