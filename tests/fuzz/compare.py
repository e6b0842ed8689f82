"""One case: its tensors, and what an engine and the dense reference make of them."""

from __future__ import annotations

import contextlib
import math
import unittest.mock
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from kernel_cases import LAYOUTS, Call, Setting, given, with_sink
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn import AuxRequest, BlockMask, create_block_mask, dropout_mask, flex_attention
from flexattn.engines import cpu_tiles
from flexattn.reference import attention, over_all_pairs
from flexattn.trace.trace import trace
from fuzz.cases import INPUTS, Case
from fuzz.masks import Mod, dense, make_mask_mod
from fuzz.place import Place, make_place
from fuzz.score_mods import make_score_mod

Results = dict[str, Tensor | None]


@dataclass(frozen=True)
class Posed:
    """A case with its tensors."""

    case: Case
    call: Call  # its mask_mod is dense

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Everything that may want a gradient, by the name of its gradient."""
        c = self.call
        return {"dq": c.query, "dk": c.key, "dv": c.value, **{f"d(capture {i})": t for i, t in enumerate(c.learned)}}


def pose(case: Case, device: str) -> Posed:
    """Make the tensors, mods and the block mask of a case."""
    drawn = _drawn(case, device)
    query, key, value = (_laid_out(x, layout) for x, layout in zip(drawn.plain, case.layouts, strict=True))
    mask = None if drawn.mask_mod is None else _block_mask(drawn.mask_mod, case, device)
    # On a CPU: on a GPU torch divides by a number by multiplying with its reciprocal, which rounds twice.
    live = dense((drawn if device == "cpu" else _drawn(case, "cpu")).mask_mod, drawn.place)
    call = Call(
        query, key, value, drawn.score_mod, mask, live, case.scale, drawn.learned, dict(case.options),
        lambda x: _laid_out(x, case.d_out_layout), dropout_p=case.dropout_p,
    )  # fmt: skip
    return Posed(case, with_sink(call, Setting(device, query.dtype), case.sink) if case.sink else call)


@dataclass(frozen=True)
class _Drawn:
    """What is drawn for a case, the same on each device."""

    place: Place
    plain: list[Tensor]  # query, key, value
    score_mod: Mod | None
    learned: tuple[Tensor, ...]
    mask_mod: Mod | None


def _drawn(case: Case, device: str) -> _Drawn:
    place = make_place(device, (case.B, case.H, case.M, case.N), case.numbers, case.tensors)
    kv_batch = 1 if case.shares_keys else case.B
    shapes = (
        (case.B, case.H, case.M, case.D), (kv_batch, case.Hkv, case.N, case.D), (kv_batch, case.Hkv, case.N, case.Dv),
    )  # fmt: skip
    plain = [place.randn(*shape, dtype=getattr(torch, case.dtype)) for shape in shapes]
    return _Drawn(place, plain, *make_score_mod(case.scores, place), make_mask_mod(case.masks, case.join, place))


def _laid_out(x: Tensor, layout: str) -> Tensor:
    return x if layout == "contiguous" else LAYOUTS[layout](x)


def _block_mask(mask_mod: Mod, case: Case, device: str) -> BlockMask | upstream.BlockMask:
    graph = trace(mask_mod, "mask").graph
    B = case.B if graph.reads("b") or "b" in case.extent else None
    H = case.H if graph.reads("h") or "h" in case.extent else None
    sizes = (mask_mod, B, H, case.M, case.N)
    if case.mask_from == "torch":
        # PyTorch makes masks of int64 positions and reads them by int32 ones, which a shift tells apart.
        whole = lambda b, h, q, kv: mask_mod(b.int(), h.int(), q.int(), kv.int())  # noqa: E731
        return upstream.create_block_mask(whole, *sizes[1:], device=device, BLOCK_SIZE=case.block)
    separate = case.mask_from != "not separated"
    return create_block_mask(*sizes, device=device, BLOCK_SIZE=case.block, separate_full_blocks=separate)


def leaves_of(posed: Posed) -> tuple[list[Tensor], list[Tensor]]:
    """Return query, key and value as leaves, and the captured tensors; those that want a gradient require one."""
    needs, call = posed.case.needs, posed.call
    inputs = (call.query, call.key, call.value)
    leaves = [x.detach().requires_grad_(name in needs) for x, name in zip(inputs, INPUTS, strict=True)]
    return leaves, [t.requires_grad_("captures" in needs) for t in call.learned]


def ours(posed: Posed, options: Mapping[str, object]) -> Results:
    """Return what flexattn computes, its kernel_options those of the case and then `options`."""
    case, call = posed.case, posed.call
    leaves, learned = leaves_of(posed)
    request = AuxRequest(lse="lse" in case.aux, max_scores="max_scores" in case.aux)
    torch.manual_seed(case.tensors)  # of dropout
    with _deterministic(case.deterministic), _tiles_of_cpu(case.small_tiles):
        found = flex_attention(
            *leaves, call.score_mod, call.mask, call.scale, enable_gqa=True,
            kernel_options={**call.options, **options}, return_aux=request if case.aux else None,
            sink=call.sink, dropout_p=case.dropout_p,
        )  # fmt: skip
        out, aux = found if isinstance(found, tuple) else (found, None)
        lse = None if aux is None else aux.lse
        results = _with_gradients(posed, leaves, learned, out, lse)
    return results | {"max_scores": None if aux is None else aux.max_scores}


def reference(posed: Posed, dtype: torch.dtype | None) -> Results:
    """Return the results of dense attention in float64, or with dtype None in that of the case."""
    leaves, learned = leaves_of(posed)
    call, aux = posed.call, posed.case.aux
    torch.manual_seed(posed.case.tensors)
    places = (*call.query.shape[:3], call.key.shape[2])
    dropout = dropout_mask(call.dropout_p, places, call.query.device, torch.float64) if call.dropout_p else None
    out, lse = attention(*leaves, call.score_mod, call.mask_mod, call.scale, dtype, call.sink, dropout)
    results = _with_gradients(posed, leaves, learned, out, lse)
    return results | {"max_scores": _largest(posed, dtype) if "max_scores" in aux else None}


@torch.no_grad()
def _largest(posed: Posed, dtype: torch.dtype | None) -> Tensor:
    """Return the largest score of each row, which the reference does not have."""
    call = posed.call
    dtype = dtype or call.query.dtype
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    key = call.key.to(dtype).repeat_interleave(posed.case.group, 1)
    score = ((call.query.to(dtype) @ key.mT) * scale).to(torch.promote_types(dtype, torch.float32))
    if call.score_mod is not None:
        score = over_all_pairs(call.score_mod, score.shape, score)
    return (score if call.mask_mod is None else torch.where(call.mask_mod, score, -math.inf)).amax(-1)


def _with_gradients(
    posed: Posed, leaves: list[Tensor], learned: list[Tensor], out: Tensor, lse: Tensor | None
) -> Results:
    """Return out, lse and the gradients that the case wants, of a loss over out and, if it says so, lse."""
    wanted = {name: x for name, x in zip(posed.leaves, [*leaves, *learned], strict=True) if x.requires_grad}
    d_out, d_lse = given(posed.call, out.detach(), out.new_zeros(out.shape[:3]) if lse is None else lse.detach())
    roots = [(out, d_out)]
    if posed.case.lse_gradient and lse is not None:
        roots.append((lse, d_lse))
    roots = [(x, d) for x, d in roots if x.requires_grad]
    grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if roots and wanted:
        results, given_grads = zip(*roots, strict=True)
        grads = torch.autograd.grad(results, list(wanted.values()), given_grads, allow_unused=True)
    return {"out": out.detach(), "lse": None if lse is None else lse.detach(), **dict(zip(wanted, grads, strict=True))}


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _tiles_of_cpu(small: bool) -> Iterator[None]:
    """Let the CPU engine cut what would fit into one tile."""
    values = {"_SCORES": 4096, "_STACKED_ROWS": 64} if small else {}
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(unittest.mock.patch.object(cpu_tiles, name, value))
        yield
