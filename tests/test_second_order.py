"""Derivatives beyond the first, forward mode and torch.func: against torch's own of the reference, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexattn import AuxRequest, BlockMask, create_block_mask, dropout_mask, flex_attention, reference
from flexattn.call.problem import Problem
from flexattn.engines import second_order
from flexattn.errors import UnsupportedError

M, N = 5, 6
SIZES = {"B": 2, "Hq": 2, "Hkv": 2, "D": 3, "Dv": 2}
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2]])


@dataclass(frozen=True)
class Case:
    """A call: what its score_mod captures, by shape, and what differs from SIZES."""

    score_mod: Callable[..., Any] | None = None  # (captures) -> score_mod
    shapes: tuple[tuple[int, ...], ...] = ()
    mask_mod: Callable[..., Any] | None = None
    by_hand: bool = False  # blocks that are listed by hand
    sizes: tuple[tuple[str, int], ...] = ()
    in_reference: Callable[..., Any] | None = None  # score_mod as the reference gets it, where it is another
    sink: bool = False  # the last of `shapes` is a sink
    dropout_p: float = 0.0


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 2


def strict(b, h, q_idx, kv_idx):
    return q_idx > kv_idx


def document(b, h, q_idx, kv_idx):
    return (DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]) & (q_idx != 3 + h)


CASES = {
    "plain": Case(),
    "softcap": Case(lambda: lambda s, b, h, i, j: 2 * torch.tanh(s / 2)),
    "two sites": Case(lambda t: lambda s, b, h, i, j: s + t[i] + t[j], ((N,),)),
    "product": Case(lambda t: lambda s, b, h, i, j: s * t[h, i] * t[h, j], ((2, N),)),
    "scalar": Case(lambda t: lambda s, b, h, i, j: s * torch.exp(t) + t, ((),)),
    "several": Case(lambda t, u: lambda s, b, h, i, j: torch.tanh(s * t[h]) + u[b, h, i, j], ((2,), (2, 2, M, N))),
    "no score": Case(lambda t: lambda s, b, h, i, j: t[i] * t[j], ((N,),), causal),
    "detached": Case(lambda t: lambda s, b, h, i, j: s * (s * t[j]).detach() + s * s, ((N,),)),
    "prologue": Case(lambda t: lambda s, b, h, i, j: s * torch.sigmoid(t)[h, j] + t.exp().sum(), ((2, N),)),
    "infinite": Case(lambda t: lambda s, b, h, i, j: torch.where((i + j) % 3 == 0, -math.inf, s * t[j]), ((N,),)),
    "rows of -inf": Case(lambda t: lambda s, b, h, i, j: torch.where(i == 2, -math.inf, s * s * t[j]), ((N,),)),
    "causal": Case(mask_mod=causal),
    "sliding": Case(lambda t: lambda s, b, h, i, j: s + t[j - i], ((N,),), sliding),
    "rows without a key": Case(lambda t: lambda s, b, h, i, j: s * t[h], ((2,),), strict),
    "documents": Case(lambda t: lambda s, b, h, i, j: s * s + t[b, j] * t[b, i], ((2, N),), document),
    "NaN outside": Case(
        lambda t: lambda s, b, h, i, j: s + t[j] * torch.log(i - j), ((N,),), strict,
        in_reference=lambda t: lambda s, b, h, i, j: s + t[j] * torch.log((i - j).clamp(min=1)),
    ),
    "by hand": Case(lambda t: lambda s, b, h, i, j: s + t[i] * s, ((N,),), causal, by_hand=True),
    "grouped": Case(lambda t: lambda s, b, h, i, j: s * t[h], ((4,),), causal, sizes=(("Hq", 4),)),
    "grouped masks": Case(None, (), document, sizes=(("Hkv", 1),)),
    "sink": Case(shapes=((2,),), sink=True),
    "sinks of rows without a key": Case(lambda t: lambda s, b, h, i, j: s * t[h], ((2,), (2, 2)), strict, sink=True),
    "dropout": Case(lambda t: lambda s, b, h, i, j: s * s + t[j], ((N,),), causal, dropout_p=0.5),
    "sink and dropout": Case(None, ((4,),), causal, sizes=(("Hq", 4),), sink=True, dropout_p=0.5),
    "shared keys": Case(lambda t: lambda s, b, h, i, j: s * t[b], ((2,),), causal, sizes=(("Bkv", 1),)),
}  # fmt: skip


def leaves(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    n = SIZES | dict(case.sizes)
    B, Bkv = n["B"], n.get("Bkv", n["B"])
    shapes = (B, n["Hq"], M, n["D"]), (Bkv, n["Hkv"], N, n["D"]), (Bkv, n["Hkv"], N, n["Dv"])
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in (*shapes, *case.shapes))


def listed() -> tuple[BlockMask, Tensor]:
    """Return a mask whose lists leave out pairs that its mod would attend to, and which attend."""
    count, index = torch.tensor([[[1, 2, 1]]]), torch.tensor([[[[0, 1], [0, 1], [2, 0]]]])
    full = torch.tensor([[[0, 1, 0]]]), torch.tensor([[[[0], [2], [0]]]])
    made = BlockMask.from_kv_blocks(count, index, *full, BLOCK_SIZE=2, mask_mod=causal, seq_lengths=(M, N))
    blocks = torch.tensor([[1, 0, 0], [1, 1, 2], [0, 0, 1]]).repeat_interleave(2, 0).repeat_interleave(2, 1)[:M, :N]
    return made, (blocks == 2) | (blocks == 1) & (torch.arange(M)[:, None] >= torch.arange(N))


@cache
def masks(case: Case) -> tuple[BlockMask | None, Callable[..., Any] | Tensor | None]:
    """Return the mask of a case, and the same for the reference."""
    if case.by_hand:
        return listed()
    if case.mask_mod is None:
        return None, None
    B, H = (2, (SIZES | dict(case.sizes))["Hq"]) if case.mask_mod is document else (None, None)
    return create_block_mask(case.mask_mod, B, H, M, N, device="cpu", BLOCK_SIZE=2), case.mask_mod


def ours(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return (query, key, value, captures) -> (out, lse), where lse is 0 in rows without a key."""
    (mask, _), rows = masks(case), empty(case)

    def attend(q: Tensor, k: Tensor, v: Tensor, *captures: Tensor) -> tuple[Tensor, Tensor]:
        captures, sink = (captures[:-1], captures[-1]) if case.sink else (captures, None)
        mod = None if case.score_mod is None else case.score_mod(*captures)
        torch.manual_seed(7)
        out, aux = flex_attention(
            q, k, v, mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True), sink=sink, dropout_p=case.dropout_p
        )
        return out, aux.lse.masked_fill(rows, 0.0)

    return attend


def dense(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the same of the reference."""
    (_, mask), rows = masks(case), empty(case)

    def attend(q: Tensor, k: Tensor, v: Tensor, *captures: Tensor) -> tuple[Tensor, Tensor]:
        captures, sink = (captures[:-1], captures[-1]) if case.sink else (captures, None)
        make = case.in_reference or case.score_mod
        mod = None if make is None else make(*captures)
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
        torch.manual_seed(7)
        dropout = dropout_mask(case.dropout_p, (*q.shape[:3], N)).double() if case.dropout_p else None
        out, lse = reference.attention(q, k, v, mod, mask, sink=sink, dropout=dropout)
        return out, lse.masked_fill(rows, 0.0)

    return attend


@cache
def empty(case: Case) -> Tensor:
    """Return which rows have no key."""
    _, mask = masks(case)
    q, k, v, *captures = leaves(case)
    if case.sink:
        return torch.zeros(q.shape[:3], dtype=torch.bool)
    k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    return reference.attention(q, k, v, case.score_mod and case.score_mod(*captures), mask)[1] == -math.inf


def loss(attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Return a number for (query, key, value, captures) that is not linear in what `attend` returns."""

    def number(*tensors: Tensor) -> Tensor:
        out, lse = attend(*tensors)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        return (out * weight + out.square()).sum() + torch.sin(lse).sum()

    return number


def assert_same(ours: Any, wanted: Any) -> None:
    for a, b in zip(tree_leaves(ours), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.fixture
def _strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut these small problems into strips of four queries of a head, and of the last one."""
    monkeypatch.setattr(second_order, "_PAIRS", 24)


every_case = pytest.mark.parametrize("name", CASES)
in_strips = pytest.mark.usefixtures("_strips")


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"detached"}))
def test_gradcheck_and_gradgradcheck(name: str) -> None:
    tensors = [x.requires_grad_() for x in leaves(CASES[name])]
    assert gradcheck(ours(CASES[name]), tensors, fast_mode=True)
    assert gradgradcheck(ours(CASES[name]), tensors, fast_mode=True)


def test_every_element_of_the_second_derivative() -> None:
    mask = create_block_mask(causal, None, None, 2, 3, "cpu", 2)

    def attend(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        mod = lambda s, b, h, i, j: torch.tanh(s * t[i]) + t[j]  # noqa: E731
        out, aux = flex_attention(q, k, v, mod, mask, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    generator = torch.Generator().manual_seed(3)
    shapes = (1, 1, 2, 2), (1, 1, 3, 2), (1, 1, 3, 1), (3,)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert gradgradcheck(attend, tensors)


@in_strips
@every_case
def test_second_derivatives_are_the_references(name: str) -> None:
    """Products of the Hessian of a loss, and of what is passed back, by autograd."""
    case = CASES[name]

    def twice(attend: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        tensors = [x.requires_grad_() for x in leaves(case)]
        results = attend(*tensors)
        passed = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x).requires_grad_() for x in results]
        grads = torch.autograd.grad(results, tensors, passed, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(grads, (*passed, *tensors), leaves(case, seed=1), materialize_grads=True)

    assert_same(twice(ours(case)), twice(dense(case)))


@in_strips
@every_case
def test_forward_mode_is_the_references(name: str) -> None:
    case = CASES[name]
    tensors, directions = leaves(case), leaves(case, seed=1)
    wanted = torch.func.jvp(dense(case), tensors, directions)
    assert_same(torch.func.jvp(ours(case), tensors, directions), wanted)
    with forward_ad.dual_level():
        results = ours(case)(*map(forward_ad.make_dual, tensors, directions))
        assert_same([forward_ad.unpack_dual(x).tangent for x in results], wanted[1])


@in_strips
@every_case
def test_products_with_the_hessian_by_torch_func(name: str) -> None:
    """Forward over reverse, reverse over forward, reverse over reverse and forward over forward."""
    case = CASES[name]
    tensors, directions = leaves(case), leaves(case, seed=1)
    places = tuple(range(len(tensors)))

    def products(number: Callable[..., Tensor]) -> list[Any]:
        grad = torch.func.grad(number, places)

        def slope(*tensors: Tensor) -> Tensor:
            return torch.func.jvp(number, tensors, directions)[1]

        def along(*tensors: Tensor) -> Tensor:
            return sum((g * d).sum() for g, d in zip(grad(*tensors), directions, strict=True))

        return [
            torch.func.jvp(grad, tensors, directions)[1],
            torch.func.grad(slope, places)(*tensors),
            torch.func.grad(along, places)(*tensors),
            torch.func.jvp(slope, tensors, directions),
        ]

    assert_same(products(loss(ours(case))), products(loss(dense(case))))


@pytest.mark.parametrize("place", range(4))
def test_one_argument_moves(place: int) -> None:
    case = CASES["two sites"]
    tensors, direction = leaves(case), leaves(case, seed=1)[place]

    def of(attend: Callable[..., tuple[Tensor, Tensor]]) -> Any:
        def one(x: Tensor) -> tuple[Tensor, Tensor]:
            return attend(*tensors[:place], x, *tensors[place + 1 :])

        pulled = torch.func.vjp(one, tensors[place])[1]
        return torch.func.jvp(one, (tensors[place],), (direction,)), pulled(one(tensors[place]))

    assert_same(of(ours(case)), of(dense(case)))


@in_strips
def test_third_derivative() -> None:
    case = CASES["documents"]
    tensors = leaves(case)

    def thrice(number: Callable[..., Tensor]) -> Tensor:
        def once(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda q: torch.func.grad(f)(q).sin().sum()

        return torch.func.grad(once(once(lambda q: number(q, *tensors[1:]))))(tensors[0])

    assert_same(thrice(loss(ours(case))), thrice(loss(dense(case))))


@pytest.mark.parametrize("name", ["documents", "infinite"])
def test_jacobians_and_vmap(name: str) -> None:
    """torch.func.vmap calls once for each entry, so all that is made of it works too."""
    case = CASES[name]
    q, *others = leaves(case)
    queries = torch.stack([q, 2 * q])

    def of(attend: Callable[..., tuple[Tensor, Tensor]]) -> list[Any]:
        def small(q: Tensor) -> Tensor:
            return attend(q, *others)[0].sum((0, 1, 2))

        def number(x: Tensor) -> Tensor:
            return loss(attend)(*(q + x, *others[:2], others[2] * x))

        return [
            torch.func.jacrev(small)(q),
            torch.func.jacfwd(small)(q),
            torch.func.vmap(small)(queries),
            torch.func.vmap(torch.func.grad(lambda q: small(q).sin().sum()), 1)(queries.movedim(0, 1)),
            torch.func.vmap(torch.func.hessian(number))(torch.tensor([0.5, 1.5], dtype=torch.float64)),
            torch.func.grad(lambda q: torch.func.vmap(small)(q).sin().sum())(queries),
        ]

    assert_same(of(ours(case)), of(dense(case)))


def test_vmap_over_what_a_mask_captures() -> None:
    q, k, v = leaves(Case())
    blocks = BlockMask.from_kv_blocks(torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int(), seq_lengths=(M, N))

    def attend(q: Tensor, length: Tensor) -> Tensor:
        blocks.mask_mod = lambda b, h, i, j: j < length
        return torch.func.grad(lambda q: flex_attention(q, k, v, block_mask=blocks).square().sum())(q)

    lengths = torch.tensor([2, 4])
    found = torch.func.vmap(attend, (None, 0))(q, lengths)
    assert_same(found, torch.stack([attend(q, length) for length in lengths]))


@pytest.mark.parametrize("derive", [lambda x: x, lambda x: x + 1])
def test_a_mask_that_differs_between_entries_is_refused(derive: Callable[[Tensor], Tensor]) -> None:
    def attend(length: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: j < derive(length), None, None, M, N, "cpu", 2)
        return flex_attention(*leaves(Case()), block_mask=mask)

    with pytest.raises(UnsupportedError, match=r"mask_mod: found .* differs between the entries of torch.vmap"):
        torch.func.vmap(attend)(torch.tensor([2, 4]))


def test_a_mask_built_under_a_transform() -> None:
    q, k, v = leaves(Case())

    def attend(q: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=create_block_mask(document, 2, 2, M, N, "cpu", 2)).square().sum()

    assert_same(
        torch.func.grad(attend)(q),
        torch.func.grad(lambda q: dense(Case(mask_mod=document))(q, k, v)[0].square().sum())(q),
    )


def test_keys_that_nobody_attends_to_may_be_nan() -> None:
    tensors = leaves(Case())

    def twice(*tensors: Tensor) -> tuple[Tensor, ...]:
        mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < 4, None, None, M, tensors[1].shape[2], "cpu", 2)
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        (dq,) = torch.autograd.grad(flex_attention(q, k, v, block_mask=mask).sin().sum(), q, create_graph=True)
        return tuple(x[:, :, :4] for x in torch.autograd.grad(dq.square().sum(), (q, k, v)))

    q, k, v = tensors
    padded = [torch.cat([x[:, :, :4], torch.full_like(x[:, :, 4:], math.nan)], 2) for x in (k, v)]
    assert_same(twice(q, *padded), twice(q, k, v))


@in_strips
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    case = CASES["documents"]
    tensors, directions = leaves(case, dtype), leaves(case, dtype, seed=1)

    def hessian(attend: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, ...]:
        given, moved = ([x.to(dtype) for x in xs] for xs in (tensors, directions))
        return torch.func.jvp(
            torch.func.grad(lambda *x: attend(*x)[0].float().square().sum(), (0, 1, 2, 3)), (*given,), (*moved,)
        )[1]

    tolerance = {torch.bfloat16: 0.1, torch.float32: 1e-4}[dtype]
    for a, b in zip(hessian(ours(case), dtype), hessian(dense(case), torch.float64), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_under_autocast_only_the_inputs_are_cast() -> None:
    q, k, v = (x.float() for x in leaves(Case()))
    halves = [x.bfloat16() for x in (q, k, v)]
    wanted = torch.func.jvp(flex_attention, (*halves,), (*halves,))
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.func.jvp(flex_attention, (q, k, v), (q, k, v))
    assert [x.dtype for x in found] == [torch.bfloat16] * 2
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_tensor_that_only_the_run_of_the_mod_finds() -> None:
    q, k, v = leaves(Case())

    def attend(t: Tensor) -> Tensor:
        class Holder:
            table = t

        return flex_attention(q, k, v, lambda s, b, h, i, j: s * getattr(Holder, "tab" + "le")[j]).square().sum()

    case = Case(lambda t: lambda s, b, h, i, j: s * t[j], ((N,),))
    t = leaves(case)[3]
    assert_same(torch.func.grad(attend)(t), torch.func.grad(lambda t: dense(case)(q, k, v, t)[0].square().sum())(t))


@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"B": 0}], ids=str)
def test_nothing_to_attend_to(sizes: dict[str, int]) -> None:
    n = {"B": 2, "M": 3, "N": 4} | sizes
    q = torch.randn(n["B"], 2, n["M"], 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(n["B"], 2, n["N"], 3, dtype=torch.float64, requires_grad=True)
    assert (torch.func.jvp(flex_attention, (q, k, k), (q, k, k))[1] == 0).all()
    (dq,) = torch.autograd.grad(flex_attention(q, k, k).sum(), q, create_graph=True)
    assert all((g == 0).all() for g in torch.autograd.grad(dq.sum(), (q, k), materialize_grads=True))


def test_the_first_derivative_is_the_same_in_every_way() -> None:
    """Recorded or not, by autograd or torch.func, in float32: where the backward keeps an lse that is not shown."""
    case = CASES["documents"]
    tensors = [x.requires_grad_() for x in leaves(case, torch.float32)]
    plain = torch.autograd.grad(loss(ours(case))(*tensors), tensors)
    for other in (
        torch.autograd.grad(loss(ours(case))(*tensors), tensors, create_graph=True),
        torch.func.grad(loss(ours(case)), tuple(range(4)))(*(x.detach() for x in tensors)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


class _Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_nothing_of_size_queries_by_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_order, "_PAIRS", 1 << 12)
    q, k, v = (torch.randn(1, 1, 512, 4, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(flex_attention(q, k, v).sum(), q, create_graph=True)
    with _Largest() as largest:
        torch.autograd.grad(dq.sum(), (q, k, v))
    assert largest.elements <= 1 << 12
    q, k, v = (x.detach() for x in (q, k, v))
    problem, directions = Problem(q, k, v, 0.5), Problem(k, q, v, 0.5)
    with _Largest() as largest:
        second_order.tangents(problem, directions)
    assert 1 << 11 <= largest.elements <= 1 << 12


@pytest.mark.parametrize("take", [torch.autograd.functional.jacobian, torch.autograd.functional.hessian])
def test_batched_gradients_are_refused(take: Callable[..., Any]) -> None:
    q, *others = leaves(Case())
    with pytest.raises(UnsupportedError, match=r"is_grads_batched=True, expected .* Use torch\.func\.jacrev") as caught:
        take(lambda q: loss(ours(Case()))(q, *others), q, vectorize=True)
    assert isinstance(caught.value, NotImplementedError)


def test_an_empty_vmap_is_refused() -> None:
    q, k, v = leaves(Case())
    with pytest.raises(UnsupportedError, match=r"torch\.vmap: found a batch of 0"):
        torch.func.vmap(lambda q: flex_attention(q, k, v))(q[None][:0])
