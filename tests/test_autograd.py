"""Gradients: which are computed, of what, and what happens when a saved tensor changes underneath them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, flex_attention, reference
from flexattn.engines import cpu
from flexattn.errors import MutationError
from flexattn.trace.trace import trace


def inputs(dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(2, 2, length, 4, generator=generator).to(dtype).requires_grad_(grad) for length in (9, 7, 7)
    )


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def mask(mask_mod=causal, B=None, H=None):
    return create_block_mask(mask_mod, B, H, 9, 7, device="cpu", BLOCK_SIZE=4)


def biased(table: Tensor):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx] * table[h, kv_idx]

    return score_mod


def table(grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 9, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_(grad)


def test_gradcheck_of_out_and_lse() -> None:
    def run(q, k, v, t):
        out, aux = flex_attention(q, k, v, biased(t), mask(), return_aux=AuxRequest(lse=True))
        return out, aux.lse

    assert torch.autograd.gradcheck(run, (*inputs(), table()))


@pytest.mark.parametrize("use", ["out", "lse", "both"])
def test_gradients_of_either_result_equal_the_references(use: str) -> None:
    leaves = (*inputs(), table())
    twins = [x.detach().clone().requires_grad_() for x in leaves]
    out, aux = flex_attention(*leaves[:3], biased(leaves[3]), return_aux=AuxRequest(lse=True))
    out_r, lse_r = reference.attention(*twins[:3], biased(twins[3]))
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return (use != "lse") * (out * weight).sum() + (use != "out") * (lse * weight[..., 0]).sum()

    if use == "lse":  # out is not in the graph of the loss at all
        (aux.lse * weight[..., 0]).sum().backward()
    else:
        loss(out, aux.lse).backward()
    loss(out_r, lse_r).backward()
    for x, twin in zip(leaves, twins, strict=True):
        torch.testing.assert_close(x.grad if x.grad is not None else torch.zeros_like(x), twin.grad)


@pytest.mark.parametrize("which", range(4))
def test_only_what_needs_a_gradient_is_computed(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [x.detach().requires_grad_(i == which) for i, x in enumerate((*inputs(), table()))]
    given: list[tuple[object, ...]] = []
    backward = cpu.backward

    def spy(problem, out, lse, d_out, d_lse, needs):
        results = backward(problem, out, lse, d_out, d_lse, needs)
        given.append((needs, [g is not None for g in (*results[:3], *results[3])]))
        return results

    monkeypatch.setattr(cpu, "backward", spy)
    flex_attention(*leaves[:3], biased(leaves[3])).sum().backward()
    ((needs, computed),) = given
    assert needs == (which == 0, which == 1, which == 2, False)
    assert computed == [i == which for i in range(4)]
    assert [x.grad is not None for x in leaves] == [i == which for i in range(4)]


def test_nothing_is_saved_without_a_gradient() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        assert flex_attention(*inputs(grad=False), biased(table(grad=False))).grad_fn is None
        with torch.no_grad():
            assert flex_attention(*inputs(), biased(table())).grad_fn is None
        assert not saved
        flex_attention(*inputs(), biased(table()))
    assert len(saved) == 6  # query, key, value, table, out, lse


def test_saved_tensors_pass_through_hooks_and_nothing_else_keeps_them() -> None:
    q, k, v = inputs()
    expected = torch.autograd.grad(flex_attention(q, k, v, biased(table())).sum(), q)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy):
        key = k * 1
        out = flex_attention(q, key, v, biased(table()))
    alive = weakref.ref(key)
    del key
    gc.collect()
    assert alive() is None
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0], expected)


def test_max_scores_has_no_gradient() -> None:
    _, aux = flex_attention(*inputs(), return_aux=AuxRequest(lse=True, max_scores=True))
    assert aux.lse.requires_grad
    assert not aux.max_scores.requires_grad


@pytest.mark.parametrize("which", ["query", "key", "value", "table", "lengths", "out"])
def test_changing_a_saved_tensor_before_the_backward_raises(which: str) -> None:
    q, k, v = (x * 1 for x in inputs())
    lengths = torch.tensor([3, 5])
    bias = table() * 1

    def short(b, h, q_idx, kv_idx):
        return kv_idx < lengths[b]

    out = flex_attention(q, k, v, biased(bias), mask(short, B=2))
    named = {"query": q, "key": k, "value": v, "table": bias, "lengths": lengths, "out": out}
    with torch.no_grad():
        named[which].add_(1)
    with pytest.raises(MutationError, match=which) as caught:
        out.sum().backward()
    assert isinstance(caught.value, RuntimeError)
    assert f"(shape {tuple(named[which].shape)}) was changed in place, expected the values" in str(caught.value)


def test_tensors_of_one_shape_are_named_together() -> None:
    q, k, v = (torch.ones(1, 2, 16, 8, requires_grad=n == 0) for n in range(3))
    out = flex_attention(q, k, v)
    k.add_(1)
    with pytest.raises(MutationError, match=r"^one of query, key, value and the output \(shape \(1, 2, 16, 8\)\) was"):
        out.sum().backward()


@pytest.mark.parametrize("derive", [lambda x: x, lambda x: x + 1, lambda x: x.int(), lambda x: x[None][0]])
def test_changing_a_capture_after_its_mask_was_built_raises(derive) -> None:
    lengths = torch.tensor([3, 5])
    made = mask(lambda b, h, q_idx, kv_idx: kv_idx < derive(lengths)[b], B=2)
    flex_attention(*inputs(), block_mask=made)
    flex_attention(*inputs(), block_mask=made)
    lengths[0] = 4
    with pytest.raises(MutationError, match="lengths"):
        flex_attention(*inputs(), block_mask=made)


def test_two_backwards_over_one_graph() -> None:
    q, k, v = inputs()
    out = flex_attention(q, k, v, biased(table()))
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (q, k, v))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_gradient_flows_through_the_prologue_and_sums_uses() -> None:
    q, k, v = inputs()
    raw, raw_r = table(), table()

    def mod(t: Tensor):
        return lambda score, b, h, q_idx, kv_idx: score * torch.sigmoid(t)[h, q_idx] + t.T[kv_idx, h] - t[0, 0]

    flex_attention(q, k, v, mod(raw)).square().sum().backward()
    reference.attention(q, k, v, mod(raw_r))[0].square().sum().backward()
    torch.testing.assert_close(raw.grad, raw_r.grad)


@pytest.mark.parametrize(
    "derive",
    [
        lambda t: torch.nn.functional.logsigmoid(t).cumsum(-1),  # the gates of a Forgetting Transformer
        lambda t: t.sort(-1)[0].cumsum(-1),
        lambda t: torch.cat([part.cumsum(-1) for part in t.chunk(2, -1)], -1),
        lambda t: torch.nn.functional.layer_norm(t, t.shape[-1:]).cumprod(-1),
        lambda t: t * (1 + t.topk(70)[0].argmax(-1, keepdim=True)),
    ],
)
def test_operators_with_several_results_in_the_prologue(derive: Callable[[Tensor], Tensor]) -> None:
    """Scans of more elements than a kernel unrolls."""
    q, k, v = (torch.randn(1, 2, 70, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    t = torch.randn(2, 70, dtype=torch.float64, requires_grad=True)

    def mod(score, b, h, q_idx, kv_idx):
        gates = derive(t)
        return score + gates[h, q_idx] - gates[h, kv_idx]

    assert len(trace(mod, "score").graph.captures) == 1
    got, want = (f(q, k, v, mod) for f in (flex_attention, lambda *x: reference.attention(*x)[0]))
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(out.square().sum(), (q, t)) for out in (got, want)]
    torch.testing.assert_close(*grads)


def test_gradient_of_a_capture_has_its_dtype() -> None:
    q, k, v = inputs(torch.float32)
    bias = table(dtype=torch.bfloat16)
    flex_attention(q, k, v, biased(bias)).sum().backward()
    assert bias.grad is not None
    assert bias.grad.dtype == torch.bfloat16


def test_unused_parameter_of_a_mod_gets_no_gradient() -> None:
    unused = table()

    def mod(score, b, h, q_idx, kv_idx):
        unused[h, q_idx]
        return score * 2

    flex_attention(*inputs(), mod).sum().backward()
    assert unused.grad is None or torch.all(unused.grad == 0)


def test_mask_that_reads_a_parameter_gives_it_no_gradient() -> None:
    reach = torch.tensor([3.0, 5.0], requires_grad=True)
    q, k, v = inputs()
    flex_attention(q, k, v, block_mask=mask(lambda b, h, q_idx, kv_idx: kv_idx < reach[h], H=2)).sum().backward()
    assert reach.grad is None
    assert q.grad is not None


def test_checkpointing() -> None:
    q, k, v = inputs()
    bias = table()
    plain = torch.autograd.grad(flex_attention(q, k, v, biased(bias)).sum(), (q, bias))
    out = torch.utils.checkpoint.checkpoint(flex_attention, q, k, v, biased(bias), use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.sum(), (q, bias)), plain, strict=True):
        torch.testing.assert_close(a, b)
