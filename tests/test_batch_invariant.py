"""kernel_options["BATCH_INVARIANT"]: the bits of a row on a CPU, and the form that problems get; kernels elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import invariance
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import CHECKS, SCORES, At, Inputs, attend, inputs
from oracle import assert_close_to_oracle

from flexattn import BlockMask, create_block_mask, explain, flex_attention, mods
from flexattn.errors import OptionError
from flexattn.reference import attention

ON = {"BATCH_INVARIANT": True}


def blas_takes_rows_alike(dtype: torch.dtype) -> bool:
    """Return whether BLAS rounds a row of a product independently of its position. MKL does, OpenBLAS does not."""
    a, b = torch.randn(128, 64, dtype=dtype), torch.randn(64, 512, dtype=dtype)
    turned = torch.arange(128).roll(37)
    return torch.equal((a @ b)[turned], a[turned] @ b) and torch.equal((a @ b @ b.T)[turned], a[turned] @ b @ b.T)


PLACES = (
    At(score="softcap"), At(dtype=torch.float64, D=33, Dv=7), At(dtype=torch.bfloat16, score="distance"),
)  # fmt: skip


@pytest.mark.parametrize("at", PLACES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_check(check: Callable[[At], None], at: At) -> None:
    if check in (invariance.other_queries, invariance.decoded_rows) and not blas_takes_rows_alike(torch.float32):
        pytest.skip("the BLAS of this torch rounds rows by their place in a product")
    check(at)


@pytest.mark.parametrize("check", [invariance.other_queries, invariance.blocks_of_other_classes])
def test_checks_fail_without_the_option(check: Callable[[At], None]) -> None:
    with pytest.raises(AssertionError, match="other bits"):
        check(At(options=()))


def test_threads_change_nothing() -> None:
    x = inputs(at := At())
    want = attend(at, x)
    torch.set_num_threads(2)
    try:
        invariance.assert_same(attend(at, x), want)
    finally:
        torch.set_num_threads(1)


def test_a_nan_that_a_row_does_not_attend_to_changes_nothing_on_a_cpu() -> None:
    x = inputs(at := At())
    x = replace(x, everywhere=torch.zeros_like(x.everywhere))
    value = x.value.clone()
    value[:, :, x.shift + 100 :] = torch.nan  # rows before the hundredth end before it
    got, want = attend(at, replace(x, value=value)), attend(at, x)
    assert got[0][:, :, 100:].isnan().all()
    rows = tuple(t[:, :, :100] for t in want[:4])
    invariance.assert_same((*(t[:, :, :100] for t in got[:4]), *want[4:]), (*rows, *want[4:]), invariance.OF_ROWS)


@settings(max_examples=15)
@given(st.data())
def test_rows_of_any_mask(data: st.DataObject) -> None:
    """Rows of a random mask, alone and beside rows of another one."""
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64)))
    M, N, D = data.draw(st.integers(2, 150)), data.draw(st.integers(1, 700)), data.draw(st.sampled_from((5, 16, 24)))
    first = data.draw(st.integers(0, M - 1))
    last = data.draw(st.integers(first + 1, M))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q, k, v = (torch.randn(1, 2, n, D, generator=generator, dtype=dtype) for n in (M, N, N))
    density = torch.tensor([0.0, 0.02, 0.5, 1.0])
    table, other = (
        torch.rand(M, N, generator=generator) < density[torch.randint(4, (M, 1), generator=generator)] for _ in range(2)
    )
    if not blas_takes_rows_alike(dtype):
        first = first // 128 * 128
    other[first:last] = table[first:last]
    size = data.draw(st.sampled_from((128, 64, 256)))
    whole, beside, alone = (
        _out_and_lse(query, k, v, allowed, size)
        for query, allowed in ((q, table), (q, other), (q[:, :, first:last], table[first:last]))
    )
    for a, b, c in zip(whole, beside, alone, strict=True):
        assert torch.equal(a[:, :, first:last], c)
        assert torch.equal(b[:, :, first:last], c)


def _out_and_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = create_block_mask(
        lambda b, h, i, j: allowed[i, j], None, None, *allowed.shape, device="cpu", BLOCK_SIZE=size
    )
    leaf = q.detach().requires_grad_()
    out = flex_attention(leaf, k, v, block_mask=mask, kernel_options=ON)
    (dq,) = torch.autograd.grad(out.square().sum(), leaf)
    return out.detach(), dq


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_right(dtype: torch.dtype) -> None:
    x = inputs(at := At(dtype=dtype, score="softcap"), Hq=4, Hkv=2)
    want, dense = (_reference(at, x, wide) for wide in (torch.float64, None))
    for name, got, near, oracle in zip(("out", "dq", "dk", "dv"), _of_out(at, x), dense, want, strict=True):
        assert_close_to_oracle(name, got, near, oracle, "out" if name == "out" else "grad")


def _of_out(at: At, x: Inputs) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x.query, x.key, x.value)]
    mask = invariance.build(x, 128)
    out = flex_attention(*leaves, SCORES[at.score], mask, enable_gqa=True, kernel_options=ON)
    return out.detach(), *torch.autograd.grad(out, leaves, x.d_out)


def _reference(at: At, x: Inputs, dtype: torch.dtype | None) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x.query, x.key, x.value)]
    out, _ = attention(*leaves, SCORES[at.score], x.mask_mod, dtype=dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, x.d_out.to(out.dtype))


def test_both_passes_have_one_order() -> None:
    q = torch.zeros(1, 1, 16, 16)
    with pytest.raises(OptionError, match=r"kernel_options\['fwd_BATCH_INVARIANT'\].*both passes.*'BATCH_INVARIANT'"):
        flex_attention(q, q, q, kernel_options={"fwd_BATCH_INVARIANT": True})


# The form of a problem


def posed(mask: BlockMask | None, M: int = 700, N: int = 700) -> BlockMask:
    q, k = torch.zeros(1, 2, M, 16), torch.zeros(1, 2, N, 16)
    found = explain(q, k, k, block_mask=mask, kernel_options=ON).block_mask
    assert found is not None
    return found


@pytest.mark.parametrize("size", [128, 256, 64, (96, 32)], ids=str)
def test_lists_are_one_ascending_and_partial(size: int | tuple[int, int]) -> None:
    mask = create_block_mask(mods.causal, None, None, 700, 700, device="cpu", BLOCK_SIZE=size)
    form = posed(mask)
    assert all(n % 128 == 0 for n in form.BLOCK_SIZE) and form.counts()[0] == 0 and not form.full_overhangs
    for lists in (form.kv_runs, form.q_runs):
        assert lists is not None and len(lists.full.runs) == 0
        for row in range(lists.partial.rows):
            runs = lists.partial.between(row, row + 1).runs
            assert (runs[:, 0] < runs[:, 1]).all() and (runs[1:, 0] >= runs[:-1, 1]).all()
    rows, columns = form.BLOCK_SIZE
    dense = torch.arange(700)[:, None] >= torch.arange(700)
    padded = torch.zeros(-(-700 // rows) * rows, -(-700 // columns) * columns, dtype=torch.bool)
    padded[:700, :700] = dense
    live = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).any(3).any(1)
    assert torch.equal(form.to_dense()[0, 0].bool() & live, live), "every block with a pair"
    assert form.q_runs is not None and torch.equal(form.q_runs.partial.dense(len(live)).T, form.to_dense()[0, 0].bool())


def test_the_form_of_a_mask_is_made_once() -> None:
    mask = create_block_mask(mods.causal, None, None, 700, 700, device="cpu")
    assert posed(mask) is posed(mask)
    assert posed(None) is posed(None)
    before, lists = posed(mask), create_block_mask(mods.sliding_window(9), None, None, 700, 700, device="cpu")
    mask.kv_runs, mask.q_runs = lists.kv_runs, lists.q_runs
    assert posed(mask) is not before


# The plans


def plans(options: dict[str, object], target: str = "sm_90", D: int = 128) -> dict[str, object]:
    q = torch.zeros(1, 2, 512, D, dtype=torch.bfloat16, requires_grad=True)
    mask = create_block_mask(mods.causal, None, None, 512, 512, device="cpu")
    made = explain(q, q, q, None, mask, target=target, kernel_options=options)
    return {p.spec.name: (p, s, made.full()) for p, s in zip(made.plans, made.sources, strict=True)}


def test_hopper_has_the_pair_of_kernels_and_nothing_is_fused() -> None:
    pytest.importorskip("triton")
    found = plans(ON)
    assert list(found) == ["hopper_forward", "backward_delta", "hopper_dq", "hopper_dkdv"]
    assert [source.fp_fusion for _, source, _ in found.values()] == [False, False, False, True]
    assert "batch-invariant" in next(iter(found.values()))[2]
    assert "hopper_backward" in plans({}) and "batch-invariant" not in next(iter(plans({}).values()))[2]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_no_descriptors_and_no_tuned_tiles(target: str, machine: object) -> None:
    pytest.importorskip("triton")
    from flexattn.compile.plan import tile_key
    from flexattn.compile.tile_choice import remember
    from flexattn.compile.tiles import Tile, TileRow

    options = {**ON, "BACKEND": "TRITON"}
    plan, _, _ = plans(options, target)["forward"]
    remember([TileRow(target, tile_key(plan), Tile(16, 16, 1, 1), "a card", "2026-01-01")])
    again, _, _ = plans(options, target)["forward"]
    usual, _, _ = plans({"BACKEND": "TRITON"}, target)["forward"]
    assert usual.tile == Tile(16, 16, 1, 1) and again.tile == plan.tile != usual.tile
    assert not again.tma
