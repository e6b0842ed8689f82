"""The problems of tools/kernel_snapshot.py: calls of `flexattn.explain` that reach every template and most branches.

It uses only public names of flexattn, so the same file runs against versions with other module paths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import BlockMask, Explanation, mods

S = 512  # default length, which natten's grids and block_diffusion require


@dataclass(frozen=True)
class Problem:
    """One call of explain. Its name lists the differences from the defaults."""

    target: str = "sm_90"  # "cpu": none
    dtype: str = "bfloat16"
    D: int = 64
    Dv: int = 0  # 0: D
    B: int = 2
    Bkv: int = 0  # 0: B
    Hq: int = 4
    Hkv: int = 0  # 0: Hq
    M: int = S
    N: int = 0  # 0: M
    score: str = "none"
    mask: str = "none"
    block: int | tuple[int, int] = 128
    layout: str = "contiguous"
    options: tuple[tuple[str, Any], ...] = ()
    scale: float | None = None
    sink: str = "none"
    dropout_p: float = 0.0
    grad: bool = True
    deterministic: bool = False
    alone: bool = False  # the mods without tensors

    @property
    def keys(self) -> int:
        return self.N or self.M

    @property
    def name(self) -> str:
        changed = [f.name for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return " ".join([self.target, *(f"{n}={getattr(self, n)}" for n in changed)])

    def explain(self) -> Explanation:
        """Explain the problem; errors of explain pass through."""
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            return self._alone() if self.alone else self._call()
        finally:
            torch.use_deterministic_algorithms(False)

    def _alone(self) -> Explanation:
        score_mod, mask_mod = SCORES[self.score](self), MASK_MODS.get(self.mask, lambda p: None)(self)
        if mask_mod is None:
            return flexattn.explain(score_mod=score_mod)
        sizes = {"B": self.B, "H": self.Hq, "Q_LEN": self.M, "KV_LEN": self.keys, "BLOCK_SIZE": self.block}
        with torch.device("cpu"):
            return flexattn.explain(score_mod=score_mod, mask_mod=mask_mod, **sizes)

    def _call(self) -> Explanation:
        Bkv, Hkv, Dv = self.Bkv or self.B, self.Hkv or self.Hq, self.Dv or self.D
        shapes = (self.B, self.Hq, self.M, self.D), (Bkv, Hkv, self.keys, self.D), (Bkv, Hkv, self.keys, Dv)
        q, k, v = (
            LAYOUTS[self.layout](shape, getattr(torch, self.dtype)).requires_grad_(self.grad) for shape in shapes
        )
        return flexattn.explain(
            q, k, v, SCORES[self.score](self), self._block_mask(), self.scale, Hkv != self.Hq, dict(self.options),
            sink=SINKS[self.sink](self), dropout_p=self.dropout_p, target=None if self.target == "cpu" else self.target,
        )  # fmt: skip

    def _block_mask(self) -> Any:
        if self.mask == "none":
            return None
        if self.mask in MADE_MASKS:
            return MADE_MASKS[self.mask](self)
        sizes = (self.B, self.Hq) if self.mask.startswith("per ") else (None, None)
        mod = MASK_MODS[self.mask](self)
        return flexattn.create_block_mask(mod, *sizes, self.M, self.keys, device="cpu", BLOCK_SIZE=self.block)


def learned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def ids(length: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return (torch.arange(length) // 100).to(dtype)


def plain(value: Any) -> Callable[[Problem], Any]:
    return lambda p: value


def with_table(shape: Callable[[Problem], tuple[int, ...]], mod: Callable[..., Any], learn: bool = True) -> Any:
    """Return a factory of a score_mod that takes a float32 tensor and the lengths as its last arguments."""

    def make(p: Problem) -> Any:
        table, M, N = torch.zeros(shape(p), requires_grad=learn), p.M, p.keys
        return lambda s, b, h, i, j: mod(s, b, h, i, j, table, M, N)

    return make


def _document_scores(p: Problem) -> Any:
    document = ids(max(p.M, p.keys))
    return lambda s, b, h, i, j: torch.where(document[i] == document[j], s, -math.inf)


def _numbers(p: Problem) -> Any:
    factor, step = 0.75, 3
    return lambda s, b, h, i, j: s * factor + 0.01 * ((i + step) * factor - j)


def _half_tables(p: Problem) -> Any:
    half, flags = torch.zeros(p.keys, dtype=torch.bfloat16, requires_grad=True), torch.arange(p.keys) % 3 == 0
    return lambda s, b, h, i, j: torch.where(flags[j], s, s + half[j] * 0.5)


def _biases(p: Problem) -> Any:
    fixed, shared = torch.zeros(p.B, p.Hq, p.M, p.keys), learned(p.Hq, p.M, p.keys)
    return lambda s, b, h, i, j: s + fixed[b, h, i, j] + shared[h, i, j]


def _nested(p: Problem) -> Any:
    table, places = learned(8, p.Hq), torch.zeros(p.M, p.keys, dtype=torch.int32)
    return lambda s, b, h, i, j: s + table[places[i, j], h]


SCORES: dict[str, Callable[[Problem], Any]] = {
    "none": plain(None),
    "softcap": plain(mods.softcap(30.0)),
    "temperature": lambda p: mods.temperature(learned(p.Hq)),
    "alibi": lambda p: mods.alibi(p.Hq),
    "alibi learned": lambda p: mods.alibi(learned(p.Hq)),
    "relative": lambda p: mods.relative_bias(learned(p.Hq, 2 * p.M + 1)),
    "relative fixed": lambda p: mods.relative_bias(torch.zeros(p.Hq, 2 * p.M + 1)),
    "t5": lambda p: mods.t5_bias(learned(32, p.Hq)),
    "t5 causal": lambda p: mods.t5_bias(learned(32, p.Hq), bidirectional=False),
    "head gate": lambda p: mods.head_gate(learned(p.Hq)),
    "decay": plain(mods.distance_decay(0.1)),
    "decay learned": lambda p: mods.distance_decay(learned(p.Hq)),
    "shifted alibi": lambda p: mods.shifted(mods.alibi(p.Hq), 7),
    "tanh sin": plain(lambda s, b, h, i, j: torch.tanh(s / 2) * 2 + torch.sin(s) * torch.cos(s)),
    "functions": plain(lambda s, b, h, i, j: torch.erf(s) + torch.exp(-s.abs()) * torch.log1p(s * s) + s.sigmoid()),
    "square": plain(lambda s, b, h, i, j: 0.2 * s * s - s),
    "of index": plain(lambda s, b, h, i, j: s + torch.where(i > j, 0.01 * j, -0.02 * i) + h * 0.5 - b),
    "remainders": plain(lambda s, b, h, i, j: torch.where((i // 3 + j % 5) % 3 == 0, -math.inf, s * 0.7)),
    "constant": plain(lambda s, b, h, i, j: 0.5),
    "detached": plain(lambda s, b, h, i, j: (s * 2 + 1) * (s * 2).detach() * 0.1 + s),
    "documents": _document_scores,
    "numbers": _numbers,
    "bias": with_table(lambda p: (p.B, p.Hq, p.M, p.keys), lambda s, b, h, i, j, t, M, N: s + t[b, h, i, j]),
    "bias shared": with_table(lambda p: (p.Hq, p.M, p.keys), lambda s, b, h, i, j, t, M, N: s + t[h, i, j]),
    "biases": _biases,
    "bias fixed": with_table(lambda p: (p.Hq, p.M, p.keys), lambda s, b, h, i, j, t, M, N: s + t[h, i, j], False),
    "factor": with_table(lambda p: (p.Hq, p.M, p.keys), lambda s, b, h, i, j, t, M, N: s * t[h, i, j]),
    "gate": with_table(lambda p: (p.Hq, p.keys), lambda s, b, h, i, j, t, M, N: s * torch.sigmoid(t)[h, j]),
    "wrapping": with_table(lambda p: (p.Hq, p.M + p.keys), lambda s, b, h, i, j, t, M, N: s + t[h, i - j] * 0.5),
    "inside": with_table(lambda p: (p.Hq, p.M + p.keys), lambda s, b, h, i, j, t, M, N: s + t[h, i - j + N]),
    "capped table": with_table(
        lambda p: (p.Hq, 21), lambda s, b, h, i, j, t, M, N: torch.tanh((s + t[h, (i - j).clamp(-10, 10) + 10]) / 2)
    ),
    "rows columns": with_table(lambda p: (p.M + p.keys,), lambda s, b, h, i, j, t, M, N: s + t[i] * t[j] - t[j]),
    "sites": with_table(
        lambda p: (max(7, p.Hq),),
        lambda s, b, h, i, j, t, M, N: s * torch.sigmoid(t[h]) + t[(i - j) % 7] * t[-1],
    ),
    "per batch": with_table(lambda p: (p.B, 1), lambda s, b, h, i, j, t, M, N: s + t[b, 0] * t[b, -1] * (i % 2)),
    "score in index": with_table(
        lambda p: (9,), lambda s, b, h, i, j, t, M, N: s + t[(s.detach() * 2).to(torch.int32).clamp(-4, 4)], False
    ),
    "half tables": _half_tables,
    "nested": _nested,
}


def _per_head(p: Problem) -> Any:
    lengths = torch.full((p.B, p.Hq), p.keys // 2)
    return lambda b, h, i, j: (j < lengths[b, h]) | (j <= i)


def _per_batch(p: Problem) -> Any:
    document = ids(max(p.M, p.keys), torch.int64).expand(p.B, -1).contiguous()
    return lambda b, h, i, j: document[b, i] == document[b, j]


def _captured(p: Problem) -> Any:
    keep = (torch.arange(p.M)[:, None] * 7 + torch.arange(p.keys)) % 3 == 0
    return lambda b, h, i, j: keep[i, j]


def _floats(p: Problem) -> Any:
    times = torch.arange(max(p.M, p.keys)) * 0.5
    return lambda b, h, i, j: (times[i] >= times[j]) & (times[i] - times[j] < 100.0)


def _looked_up(dtype: torch.dtype) -> Callable[[Problem], Any]:
    """Return a factory of a mask that does not index its tensor by blocks, so its range table has all levels."""

    def make(p: Problem) -> Any:
        ends = (torch.arange(max(p.M, p.keys)) // 64 * 64 + 64).to(dtype)
        return lambda b, h, i, j: (j < ends[i // 2 * 2]) & (i // 3 >= j // 3)

    return make


def _sine(p: Problem) -> Any:
    return lambda b, h, i, j: torch.sin(i.float()) > torch.cos(j.float())


MASK_MODS: dict[str, Callable[[Problem], Any]] = {
    "causal": plain(mods.causal),
    "causal lower right": lambda p: mods.causal_lower_right(p.M, p.keys),
    "sliding": plain(mods.sliding_window(100)),
    "sliding both": plain(mods.sliding_window(100, causal=False)),
    "document": lambda p: mods.document(ids(max(p.M, p.keys))),
    "document causal": lambda p: mods.document_causal(ids(max(p.M, p.keys))),
    "document int64": lambda p: mods.document_causal(ids(max(p.M, p.keys), torch.int64)),
    "per batch document": _per_batch,
    "prefix": plain(mods.prefix_lm(70)),
    "per batch prefix": lambda p: mods.prefix_lm(torch.arange(p.B) * 50 + 7),
    "per head prefix": _per_head,
    "per batch padding": lambda p: mods.padding(torch.full((p.B,), p.keys // 3)),
    "natten 2d": plain(mods.natten_2d(16, 32, 5)),
    "natten 3d": plain(mods.natten_3d(8, 8, 8, 3)),
    "global": plain(mods.global_tokens(9)),
    "dilated": plain(mods.dilated(100, 3)),
    "strided": plain(mods.strided(5)),
    "block diffusion": plain(mods.block_diffusion(256, 16)),
    "tree": lambda p: mods.tree(torch.arange(p.M) // 2 - 1, p.keys - p.M),
    "and": plain(mods.and_masks(mods.causal, mods.sliding_window(100))),
    "or not": plain(mods.or_masks(mods.sliding_window(10), mods.not_mask(mods.causal))),
    "xor": plain(mods.xor_masks(mods.causal, mods.global_tokens(64))),
    "everything": plain(mods.noop_mask),
    "nothing": plain(lambda b, h, i, j: j < 0),
    "late rows": plain(lambda b, h, i, j: (i >= 40) & (j < 50)),
    "captured": _captured,
    "floats": _floats,
    "sine": _sine,
    "looked up": _looked_up(torch.int32),
    "looked up floats": _looked_up(torch.float32),
}


def _blocks_by_hand(p: Problem, make: Any, length: int, mask_mod: Any) -> Any:
    """Two blocks of rows: the first has a partial and a full block, the second a full one, which may overhang."""
    size = p.block if isinstance(p.block, int) else p.block[0]
    counts, full = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[[1, 1]]], dtype=torch.int32)
    columns = torch.tensor([[[[0, 1, 2], [0, 1, 2]]]], dtype=torch.int32)
    last = torch.tensor([[[[1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
    return make(counts, columns, full, last, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(2 * size, length))


def _checkered(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx + kv_idx) % 2 == 0


def _upstream(p: Problem) -> Any:
    mod = MASK_MODS["document causal"](p)
    return upstream.create_block_mask(mod, None, None, p.M, p.keys, device="cpu", BLOCK_SIZE=p.block)


def _with_runs(p: Problem) -> BlockMask:
    """Return a document mask with known runs of its ids, as a GPU build finds them."""
    document = ids(max(p.M, p.keys))
    starts, ends = (torch.searchsorted(document, document, right=right).int() for right in (False, True))
    mask = flexattn.create_block_mask(
        mods.document_causal(document), None, None, p.M, p.keys, device="cpu", BLOCK_SIZE=p.block
    )
    assert mask.equal_runs() == ()
    mask.equal_runs = lambda: (SimpleNamespace(capture=0, starts=starts, ends=ends),)
    return mask


MADE_MASKS: dict[str, Callable[[Problem], Any]] = {
    "torch's": _upstream,
    "torch's by hand": lambda p: _blocks_by_hand(p, upstream.BlockMask.from_kv_blocks, p.keys, _checkered),
    "by hand": lambda p: _blocks_by_hand(p, BlockMask.from_kv_blocks, p.keys, _checkered),
    "by hand without mod": lambda p: _blocks_by_hand(p, BlockMask.from_kv_blocks, p.keys, None),
    "document runs": _with_runs,
    "together": lambda p: flexattn.create_block_mask(
        mods.causal, None, None, p.M, p.keys, device="cpu", BLOCK_SIZE=p.block, separate_full_blocks=False
    ),
}

SINKS: dict[str, Callable[[Problem], Any]] = {
    "none": plain(None),
    "one": plain(0.5),
    "heads": lambda p: learned(p.Hq),
    "batches": lambda p: learned(p.B, p.Hq),
}

_Shape = tuple[int, ...]


def _transposed(shape: _Shape, dtype: torch.dtype) -> Tensor:
    B, H, rows, D = shape
    return torch.empty(B, rows, H, D, dtype=dtype).transpose(1, 2)


LAYOUTS: dict[str, Callable[[_Shape, torch.dtype], Tensor]] = {
    "contiguous": lambda shape, dtype: torch.empty(shape, dtype=dtype),
    "transposed": _transposed,
    "columns": lambda shape, dtype: torch.empty(*shape[:2], shape[3], shape[2], dtype=dtype).mT,
    "unaligned": lambda shape, dtype: torch.empty(*shape[:3], shape[3] + 1, dtype=dtype)[..., 1:],
    "packed": lambda shape, dtype: torch.empty(*shape[:3], 2 * shape[3], dtype=dtype)[..., : shape[3]],
    "expanded heads": lambda shape, dtype: torch.empty(shape[0], 1, *shape[2:], dtype=dtype).expand(shape),
    "expanded batch": lambda shape, dtype: torch.empty(1, *shape[1:], dtype=dtype).expand(shape),
    "expanded rows": lambda shape, dtype: torch.empty(*shape[:2], 1, shape[3], dtype=dtype).expand(shape),
    "wide rows": lambda shape, dtype: torch.empty_strided(
        shape, (shape[1] * shape[3], shape[3], 1 << 23, 1), dtype=dtype
    ),
}

TRITON, HOPPER = (("BACKEND", "TRITON"),), (("BACKEND", "HOPPER"),)
OPTIONS: tuple[tuple[tuple[str, Any], ...], ...] = (
    TRITON, HOPPER, (("EXACT", True),), (("USE_TMA", False),), (("BATCH_INVARIANT", True),), (("BLOCK_M", 32),),
    (("BLOCK_M", 64), ("BLOCK_N", 32)), (("BLOCK_M1", 32), ("BLOCK_N1", 64)), (("BLOCK_M2", 64), ("BLOCK_N2", 32)),
    (("num_warps", 8),), (("num_stages", 1),), (("PRESCALE_QK", True),), (("ROWS_GUARANTEED_SAFE", True),),
    (("fwd_BACKEND", "TRITON"),), (("bwd_BACKEND", "TRITON"),), (("BATCH_INVARIANT", True), *TRITON),
    (("EXACT", True), ("num_warps", 8)), (("fwd_num_stages", 2), ("bwd_num_stages", 3)),
)  # fmt: skip
CARDS = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "cpu")
DIMS = ((16, 0), (33, 0), (64, 0), (96, 0), (128, 0), (192, 128), (256, 0))
WIDTHS = ((64, 0), (128, 0), (192, 128), (256, 0))


def _grid(**choices: tuple[Any, ...]) -> Iterator[Problem]:
    """Yield a problem for each combination; "D" takes pairs (D, Dv)."""
    for values in itertools.product(*choices.values()):
        changed = dict(zip(choices, values, strict=True))
        if "D" in changed:
            changed["D"], changed["Dv"] = changed["D"]
        yield Problem(**changed)


def _problems() -> Iterator[Problem]:
    yield from _grid(target=CARDS, dtype=("float16",), D=DIMS, mask=("causal",))
    yield from _grid(target=CARDS[1:], dtype=("bfloat16", "float32"), score=("softcap", "relative"), mask=("causal",))
    yield from _grid(target=("sm_80", "sm_90", "gfx942", "cpu"), score=tuple(SCORES), mask=("causal",))
    yield from _grid(target=("sm_90",), score=tuple(SCORES), options=(TRITON,), D=((128, 0),))
    yield from _grid(target=("sm_80", "sm_90"), mask=(*MASK_MODS, "document runs", "torch's", "together"))
    yield from _grid(target=("cpu",), mask=tuple(MASK_MODS), alone=(True,))
    yield from _grid(target=("cpu",), score=tuple(SCORES)[1:], alone=(True,))
    hopper_scores = ("none", "softcap", "alibi", "bias fixed", "numbers")
    yield from _grid(D=WIDTHS, score=hopper_scores, mask=("none", "causal", "document runs"), dtype=("float16",))
    yield from _grid(D=WIDTHS[:2], score=hopper_scores, mask=("none", "causal", "document runs"), deterministic=(True,))
    yield from _grid(
        score=("relative", "t5", "alibi learned", "gate", "bias", "bias shared", "factor", "sites", "per batch"),
        target=("sm_80", "sm_90", "gfx942"), deterministic=(True,), B=(1, 2), mask=("causal",),
    )  # fmt: skip
    blocks = (32, 64, 128, 256, (128, 64), (64, 128), 100, (40, 24))
    yield from _grid(target=("sm_80", "sm_90"), block=blocks, mask=("sliding",), score=("none", "alibi"))
    yield from _grid(target=("sm_80", "sm_90"), options=OPTIONS, mask=("causal",), score=("none", "softcap"))
    for target, layout in itertools.product(("sm_80", "sm_90", "gfx942"), LAYOUTS):
        yield Problem(target, layout=layout, mask="causal", M=40 if layout == "wide rows" else 384)
    yield from _grid(target=("sm_80", "sm_90", "sm_100"), sink=tuple(SINKS)[1:], score=("none", "softcap"))
    yield from _grid(
        target=("sm_80", "sm_90", "sm_100", "gfx942", "cpu"), dropout_p=(0.2,), score=("none", "relative"),
        mask=("none", "causal"),
    )  # fmt: skip
    yield from _grid(target=("sm_80", "sm_90"), scale=(-0.7, 0.0, 3.0), score=("none", "alibi"), mask=("causal",))
    yield from _grid(target=("sm_80", "sm_90"), mask=("causal",), grad=(False,), score=("none", "relative", "softcap"))
    for target, score in itertools.product(("sm_80", "sm_90"), ("none", "bias fixed", "relative")):
        base = Problem(target, score=score, mask="causal")
        yield from (
            replace(base, Hq=8, Hkv=2), replace(base, Hq=6, Hkv=1, B=1), replace(base, Bkv=1), replace(base, M=300),
            replace(base, M=77, N=500, mask="causal lower right"), replace(base, M=1, N=700, mask="none"),
            replace(base, B=3, Bkv=1, Hq=4, Hkv=2), replace(base, D=72, layout="unaligned"),
        )  # fmt: skip
    for target, (mask, block, N), score in itertools.product(
        ("sm_80", "sm_90"),
        (("torch's by hand", 128, 384), ("by hand", 128, 381), ("by hand", 64, 192), ("by hand without mod", 40, 110)),
        ("none", "bias fixed"),
    ):
        size = block * 2
        yield Problem(target, mask=mask, block=block, M=size, N=N, score=score)
    for mask in ("causal", "document causal", "document int64", "floats", "per batch document", "captured"):
        yield Problem(mask=mask, M=4096, block=16, grad=False)  # lists of many rows of blocks
    yield Problem(mask="document causal", M=20000, B=1, Hq=1, grad=False)  # tables of granules
    for target, precision in (("sm_80", "tf32"), ("sm_90", "tf32x3"), ("gfx942", "tf32")):
        yield from _grid(target=(target,), dtype=("float32",), options=((("FLOAT32_PRECISION", precision),),), D=DIMS)
    yield from _grid(target=("sm_90", "cpu"), dtype=("float64",), score=("none", "relative"), mask=("none", "causal"))
    yield from _grid(target=("sm_90", "cpu"), M=(0,), N=(128,))
    yield Problem("cpu", options=(("BACKEND", "CPU"),), score="alibi", mask="causal")
    narrow = (("BLOCK_M", 64), ("BLOCK_N", 16), ("BLOCK_M1", 16), ("BLOCK_N1", 64), ("BLOCK_N2", 16))
    for block, mask in itertools.product((128, (24, 20), (16, 48)), ("causal", "captured")):
        yield Problem("sm_80", dropout_p=0.2, block=block, mask=mask, options=narrow if block == 128 else ())


PROBLEMS: dict[str, Problem] = {p.name: p for p in _problems()}
