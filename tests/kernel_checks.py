"""Checks of kernels besides accuracy: no leaks, consistency, errors. For the interpreter and a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_cases import SCORES, Call, Setting, Sizes, assert_near, check, inputs, make_call, results
from torch import Tensor

from flexattn import AuxRequest, BlockMask, create_block_mask, flex_attention, mods
from flexattn.errors import MutationError
from flexattn.reference import attention


def run(at: Setting, q: Tensor, k: Tensor, v: Tensor, *rest: object, **named: object) -> Tensor:
    options = {"BACKEND": "TRITON", **dict(at.options)}
    return flex_attention(q, k, v, *rest, enable_gqa=True, kernel_options=options, **named)


def bias_and_general_forms_agree(at: Setting) -> None:
    """A mod that adds to the score has its own tiles. An equivalent mod of another kind gives the same results."""
    for name, mask in (("alibi", None), ("relative", "causal"), ("infinite_bias", "causal")):
        call = make_call(at, Sizes(), name, mask)
        additive = call.score_mod
        general = replace(call, score_mod=lambda s, *i, mod=additive: torch.where(i[2] < -1, 2 * s, mod(s, *i)))
        for n, (one, other) in enumerate(zip(results(call, "ours"), results(general, "ours"), strict=True)):
            assert_near(f"{name} {mask} {n}", one, other, other.double(), at.dtype)


def two_slots_agree(at: Setting) -> None:
    """A mask_mod and a score_mod that returns -inf give the same results."""
    call = make_call(at, Sizes(), None, "causal")
    general = replace(call, mask=None, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf))
    for n, (one, other) in enumerate(zip(results(call, "ours"), results(general, "ours"), strict=True)):
        assert_near(str(n), one, other, other.double(), at.dtype)


def empty_rows(at: Setting) -> None:
    """A row without keys gives out 0 and lse -inf, for any incoming gradients."""
    q, k, v = (x.requires_grad_() for x in inputs(at, Sizes()))
    M, N = q.shape[2], k.shape[2]
    late = lambda b, h, i, j: i >= 40  # noqa: E731
    mask = create_block_mask(late, None, None, M, N, device=at.device, BLOCK_SIZE=32)
    hidden = lambda s, b, h, i, j: torch.where(i >= 40, s, -math.inf)  # noqa: E731
    for arguments in ((None, mask), (hidden, None), (mods.softcap(3.0), mask)):
        out, aux = run(at, q, k, v, *arguments, return_aux=AuxRequest(lse=True))
        assert (out[:, :, :40] == 0).all() and (aux.lse[:, :, :40] == -math.inf).all()
        assert aux.lse[:, :, 40:].isfinite().all()
        # A loss of all lse may have a NaN gradient where lse is -inf.
        d_lse = torch.where(aux.lse == -math.inf, math.nan, 1.0)
        grads = torch.autograd.grad((out, aux.lse), (q, k, v), (torch.ones_like(out), d_lse))
        assert all(g.isfinite().all() for g in grads), "NaN of rows without a key"
        assert (grads[0][:, :, :40] == 0).all()


def rows_that_are_not_numbers(at: Setting) -> None:
    """A row with a score of +inf has out NaN and lse +inf. A row with a NaN score has NaN. Their gradients are NaN."""
    leaves = [x.requires_grad_() for x in inputs(at, Sizes())]
    q, k, v = leaves
    M, N = q.shape[2], k.shape[2]
    bias = torch.zeros(M, N, device=at.device)
    infinite, nan, empty = [3, 4, 5, 9], [6], [7]
    bias[3, 1], bias[4, N - 2], bias[5, 1], bias[5, N - 2] = (math.inf,) * 4
    bias[6, N - 2], bias[7], bias[9], bias[9, 2] = math.nan, -math.inf, -math.inf, math.inf
    plain = torch.ones(M, dtype=torch.bool)
    plain[[*infinite, *nan, *empty]] = False
    score_mod = lambda s, b, h, i, j: s + bias[i, j]  # noqa: E731
    for sink in (None, 0.5):
        out, aux = run(at, q, k, v, score_mod, return_aux=AuxRequest(lse=True), sink=sink)
        want, want_lse = attention(q, k, v, score_mod, dtype=torch.float64, sink=sink)
        assert (aux.lse[:, :, infinite] == math.inf).all() and aux.lse[:, :, nan].isnan().all()
        assert torch.equal(aux.lse[:, :, empty], want_lse[:, :, empty].float())
        assert out[:, :, infinite + nan].isnan().all() and (out[:, :, empty] == 0).all()
        torch.testing.assert_close(out.double()[:, :, plain], want[:, :, plain], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(aux.lse.double()[:, :, plain], want_lse[:, :, plain], atol=1e-3, rtol=1e-3)
        grads = torch.autograd.grad(out.sum() + aux.lse[:, :, plain].sum(), leaves)
        assert grads[0][:, :, infinite + nan].isnan().all() and grads[0][:, :, plain].isfinite().all()
        assert (grads[0][:, :, empty] == 0).all()
        assert grads[1].isnan().all() and grads[2].isnan().all()


def max_scores(at: Setting) -> None:
    q, k, v = inputs(at, Sizes())
    for mod, mask_name, scale in (
        (None, None, -0.5),
        (None, "holes", 0.25),
        ("alibi", "causal", 0.5),
        ("softcap", "late_rows", None),
    ):
        call = make_call(at, Sizes(), mod, mask_name)
        _, aux = run(at, q, k, v, call.score_mod, call.mask, scale, return_aux=AuxRequest(max_scores=True))
        scores = largest_of(q, k, call, scale)
        torch.testing.assert_close(
            aux.max_scores.double(), scores, atol=2e-2 if at.dtype.itemsize == 2 else 1e-4, rtol=1e-3
        )
        assert aux.lse is None and not aux.max_scores.requires_grad


def largest_of(q: Tensor, k: Tensor, call: Call, scale: float | None) -> Tensor:
    """Return the largest score of each row, from the lse of each key alone."""
    N = k.shape[2]
    picks = [
        attention(
            q, k[:, :, n : n + 1], k[:, :, n : n + 1], _moved(call.score_mod, n), _moved_mask(call.mask_mod, n), scale
        )[1]
        for n in range(N)
    ]
    return torch.stack(picks).amax(0)


def _moved(mod: Callable[..., Tensor] | None, n: int) -> Callable[..., Tensor] | None:
    return mod and (lambda s, b, h, i, j: mod(s, b, h, i, j + n))


def _moved_mask(mod: object, n: int) -> object:
    return mod and (lambda b, h, i, j: mod(b, h, i, j + n))


def nothing_leaks_from_excluded_places(at: Setting) -> None:
    """NaN and inf in captured tensors do not change results if the mask excludes their positions."""
    for name in ("dense_bias", "dense_factor"):
        q, k, v = inputs(at, Sizes(Hkv=2, M=70, N=70))
        M, N = q.shape[2], k.shape[2]
        mask_mod = lambda b, h, i, j: (i >= j) & (j != 40) & (i != 3)  # noqa: E731
        mask = create_block_mask(mask_mod, None, None, M, N, device=at.device, BLOCK_SIZE=32 * at.block)
        score_mod, learned = SCORES[name](at, 2, M, N)
        clean = Call(q, k, v, score_mod, mask, learned=learned, options=dict(at.options))
        want = [x.clone() for x in results(clean, "ours")]
        bias = learned[0].detach()
        excluded = ~torch.ones(M, N, dtype=torch.bool, device=at.device).tril()
        excluded[3] = excluded[:, 40] = True
        for bad in (math.nan, math.inf):
            bias[..., excluded] = bad
            got = results(clean, "ours")
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), f"{name}: {bad} at an excluded position of a captured tensor changed a result"


def out_of_range_indices_at_excluded_places(at: Setting) -> None:
    q, k, v = inputs(at, Sizes(M=60, N=70))
    M, N = q.shape[2], k.shape[2]
    mask = create_block_mask(mods.causal, None, None, M, N, device=at.device, BLOCK_SIZE=32 * at.block)
    table = at.randn(M, seed=3)
    far = lambda s, b, h, i, j: s * table[torch.where(i >= j, i - j, 1 << 28)]  # noqa: E731
    near = lambda s, b, h, i, j: s * table[torch.where(i >= j, i - j, 0)]  # noqa: E731
    calls = [Call(q, k, v, mod, mask, learned=(table,), options=dict(at.options)) for mod in (far, near)]
    for one, other in zip(*(results(c, "ours") for c in calls), strict=True):
        torch.testing.assert_close(one, other)


def queries_and_keys_without_partners_may_be_nan(at: Setting) -> None:
    """Keys and values that are in no block list may be NaN."""
    q, k, v = inputs(at, Sizes(M=64, N=96))
    block = 32
    counts = torch.ones(1, 1, -(-q.shape[2] // block), dtype=torch.int32, device=at.device)
    columns = torch.zeros(1, 1, counts.shape[2], 1, dtype=torch.int32, device=at.device)
    mask = BlockMask.from_kv_blocks(counts * 0, columns, counts, columns, block, None, (q.shape[2], k.shape[2]))
    want = results(Call(q, k, v, None, mask, options=dict(at.options)), "ours")
    k, v = k.clone(), v.clone()
    k[:, :, block:] = v[:, :, block:] = math.nan
    got = results(Call(q, k, v, None, mask, options=dict(at.options)), "ours")
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def mutation_is_refused(at: Setting) -> None:
    q, k, v = inputs(at, Sizes())
    table = at.randn(2, seed=1).requires_grad_()
    scaled = lambda s, b, h, i, j: s * table[h]  # noqa: E731
    out = run(at, q, k, v, scaled)
    with torch.no_grad():
        table.add_(1)
    with pytest.raises(MutationError, match="table"):
        out.sum().backward()


def each_gradient_alone(at: Setting) -> None:
    """Requesting a single gradient gives the same result as requesting all."""
    call = make_call(at, Sizes(), "gate", "causal")
    want = results(call, "ours")[2:]
    leaves = [call.query, call.key, call.value, *call.learned]
    for n in range(4):
        for x in leaves:
            x.requires_grad_(False)
        leaves[n].requires_grad_()
        out, aux = run(at, *leaves[:3], call.score_mod, call.mask, return_aux=AuxRequest(lse=True))
        generator = torch.Generator().manual_seed(1)
        d_out, d_lse = (torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in (out, aux.lse))
        (got,) = torch.autograd.grad((out, aux.lse), leaves[n], (d_out, d_lse))
        torch.testing.assert_close(got, want[n], rtol=1e-4, atol=1e-4)  # captured gradients are summed in any order
    with torch.no_grad():
        assert not run(at, *leaves[:3], call.score_mod, call.mask).requires_grad


def gradients_of_one_result(at: Setting) -> None:
    """A loss of only out (with an expanded gradient), and a loss of only lse."""
    q, k, v = inputs(at, Sizes())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cap = mods.softcap(4.0)
    out, aux = run(at, *leaves, cap, return_aux=AuxRequest(lse=True))
    dense = attention(*leaves, cap)
    for ours, theirs in ((out.sum(), dense[0].sum()), (aux.lse.sum(), dense[1].sum())):
        got = torch.autograd.grad(ours, leaves, retain_graph=True, allow_unused=True)
        want = torch.autograd.grad(theirs, leaves, retain_graph=True, allow_unused=True)
        for g, w in zip(got, want, strict=True):
            w = torch.zeros_like(g) if w is None else w
            assert_near("gradient", torch.zeros_like(w) if g is None else g, w, w.double(), at.dtype)


def tiles_change_nothing(at: Setting) -> None:
    """Tiles from kernel_options give correct results for any block size."""
    tiles = ((16, 16), (16, 64), (64, 16), (128, 32))
    for (m, n), block in zip(tiles, (24, 64, 128, 48), strict=True):
        options = {f"BLOCK_{side}{i}": size for i in ("", 1, 2) for side, size in (("M", m), ("N", n))}
        call = make_call(at, Sizes(), "relative", "sliding", block)
        check(replace(call, options=call.options | options))


def lengths_and_values_share_kernels(at: Setting) -> None:
    """New lengths, batch sizes, values, numbers and scales do not compile kernels."""
    from flexattn.runtime.build import stats

    def one(M: int, N: int, B: int, factor: float, scale: float) -> None:
        q, k, v = inputs(at, Sizes(B, 2, 1, M, N))
        table = at.randn(2, seed=M).requires_grad_()
        mask_mod = mods.sliding_window(M // 2)
        mask = create_block_mask(mask_mod, None, None, M, N, device=at.device, BLOCK_SIZE=32)
        mod = lambda s, b, h, i, j: s * table[h] * factor  # noqa: E731
        check(Call(q, k, v, mod, mask, mask_mod, scale, (table,), dict(at.options)))

    at = replace(at, size=1)
    one(40, 40, 2, 0.5, 0.3)
    before = stats()["compiles"]
    for arguments in ((33, 70, 1, 0.25, 0.7), (64, 32, 3, 1.5, -0.1), (17, 48, 2, 2.0, 1.0)):
        one(*arguments)
    assert stats()["compiles"] == before


CHECKS: tuple[Callable[[Setting], None], ...] = (
    bias_and_general_forms_agree, two_slots_agree, empty_rows, rows_that_are_not_numbers, max_scores,
    nothing_leaks_from_excluded_places,
    out_of_range_indices_at_excluded_places, queries_and_keys_without_partners_may_be_nan, mutation_is_refused,
    each_gradient_alone, gradients_of_one_result, tiles_change_nothing, lengths_and_values_share_kernels,
)  # fmt: skip
