"""The SDPA provider on a GPU: PyTorch's own tests of its flash backend, in form, and each fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import assert_close_to_oracle
from sdpa_cases import SdpaCase, attend, attend_packed, cumulative
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flexattn
from flexattn import create_block_mask, flex_attention, mods, sdpa
from flexattn.process.events import fallbacks, forget_fallbacks
from flexattn.sdpa import operators
from flexattn.sdpa import passes as passes_of_calls

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")]

ATEN: Any = torch.ops.aten
ATTENTION: Any = torch.nn.attention
HAS_REGISTRY = hasattr(ATTENTION, "register_flash_attention_impl")
CUDA = SdpaCase(device="cuda", dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _only_flash() -> Iterator[None]:
    forget_fallbacks()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield


@pytest.fixture
def active() -> Iterator[None]:
    """The provider, activated as a user does it."""
    handle = sdpa.register()
    if HAS_REGISTRY:
        ATTENTION.activate_flash_attention_impl("flexattn")
    yield
    if handle is not None:
        handle.remove()
    else:
        ATTENTION.restore_flash_attention_impl()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the passes that flexattn computed."""
    seen: list[str] = []

    def spied(name: str) -> Callable[..., Any]:
        compute = getattr(operators, name)

        def called(*args: Any) -> Any:
            found = compute(*args)
            if found is not None:
                seen.append(name.removeprefix("repeated_"))
            return found

        return called

    for name in ("forward", "backward", "repeated_forward", "repeated_backward"):
        monkeypatch.setattr(operators, name, spied(name))
    return seen


def _attention(case: SdpaCase, tensors: list[Tensor], p: float = 0.0) -> Tensor:
    return scaled_dot_product_attention(
        *tensors, dropout_p=p, is_causal=case.causal, scale=case.scale, enable_gqa=case.Hq != case.Hkv
    )


def _check(case: SdpaCase, run: Callable[[list[Tensor]], Tensor], factors: Tensor | None = None) -> None:
    """Compare out and gradients with plain torch in the same dtype and in float64."""
    tensors = case.tensors()
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out = run(tensors)
    dense, exact = case.expected(*tensors, factors)[0], case.expected(*wide, factors)[0]
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
    found = torch.autograd.grad(out, tensors, d_out)
    of_dense, of_exact = torch.autograd.grad(dense, tensors, d_out), torch.autograd.grad(exact, wide, d_out.double())
    assert_close_to_oracle("out", out.detach(), dense.detach(), exact.detach())
    for name, x, y, z in zip(("dq", "dk", "dv"), found, of_dense, of_exact, strict=True):
        assert_close_to_oracle(name, x, y, z, "grad")


# PyTorch chooses no flash kernel for causal calls of different lengths.
SHAPES = [
    (M, N, causal)
    for M, N in ((8, 8), (103, 103), (256, 103), (143, 256), (1024, 1024))
    for causal in (False, True)
    if M == N or not causal
]


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [8, 20, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(passes: list[str], D: int, causal: bool, dtype: torch.dtype) -> None:
    case = replace(CUDA, M=143, N=143, D=D, causal=causal, dtype=dtype)
    _check(case, lambda tensors: _attention(case, tensors))
    assert passes == ["forward", "backward"] and not fallbacks()


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("heads", [(2, 2), (10, 2)], ids=["equal heads", "gqa"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("M", "N", "causal"), SHAPES)
def test_shapes(
    passes: list[str], M: int, N: int, causal: bool, scale: float | None, heads: tuple[int, int]
) -> None:  # fmt: skip
    case = replace(CUDA, M=M, N=N, D=64, causal=causal, scale=scale, Hq=heads[0], Hkv=heads[1])
    _check(case, lambda tensors: _attention(case, tensors))
    assert passes == ["forward", "backward"]


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("p", [0.22, 0.5])
@pytest.mark.parametrize("M", [103, 512])
def test_dropout(M: int, p: float) -> None:
    case = replace(CUDA, M=M, N=M, D=64, causal=True)
    torch.manual_seed(7)
    factors = flexattn.dropout_mask(p, (case.B, case.Hq, M, M), device="cuda")
    torch.manual_seed(7)
    _check(case, lambda tensors: _attention(case, tensors, p), factors)


@pytest.mark.usefixtures("active")
def test_packed_projections() -> None:
    """Query, key and value are slices of one tensor, as a model makes them."""
    case = replace(CUDA, M=200, N=200, D=64, causal=True)

    def run(tensors: list[Tensor]) -> Tensor:
        rows = torch.stack([x.transpose(1, 2) for x in tensors], 2)
        return _attention(case, [x.transpose(1, 2) for x in rows.unbind(2)])

    _check(case, run)


@pytest.mark.usefixtures("active")
def test_repeated_calls() -> None:
    case = replace(CUDA, M=256, N=256, D=64, causal=True)
    tensors = case.tensors()
    runs = []
    for _ in range(4):
        out = _attention(case, tensors)
        runs.append((out, *torch.autograd.grad(out, tensors, torch.ones_like(out))))
    for other in runs[1:]:
        assert torch.equal(other[0], runs[0][0])
        for x, y in zip(other, runs[0], strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.usefixtures("active")
def test_the_same_bits_as_a_direct_call() -> None:
    case = replace(CUDA, M=512, N=512, D=128, causal=True, Hq=4)
    tensors = [x.detach() for x in case.tensors()]
    mask = create_block_mask(mods.causal, None, None, 512, 512, device="cuda")
    assert torch.equal(_attention(case, tensors), flex_attention(*tensors, block_mask=mask, enable_gqa=True))


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_inside_torch_compile(passes: list[str], p: float, mode: str) -> None:
    case = replace(CUDA, M=256, N=256, D=64, causal=True)
    torch._dynamo.reset()
    passes_of_calls._masks.clear()  # the run before the capture makes it, and it must not stay in the graph's memory
    passes_of_calls._problem_of_sizes.cache_clear()
    passes_of_calls._passes.clear()

    @torch.compile(fullgraph=True, mode=mode)
    def compiled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=p) * 2

    if p:  # the seed is drawn inside, so only the gradients can be checked: <out, d_out> == <value, dv>
        tensors = case.tensors()
        out = compiled(*tensors)
        d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        value, dv = tensors[2], torch.autograd.grad(out, tensors, d_out)[2]
        sums = (out.double() * d_out.double()).sum(), (value.double() * dv.double()).sum()
        torch.testing.assert_close(*sums, rtol=2e-2, atol=2.0)
    else:
        for _ in range(3):
            _check(case, lambda tensors: compiled(*tensors).clone() / 2)
    assert {"forward", "backward"} <= set(passes)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("M", [256, 260])
def test_a_cuda_graph(M: int) -> None:
    case = replace(CUDA, M=M, N=M, D=64, causal=True)
    tensors = [x.detach() for x in case.tensors()]
    expected = _attention(case, tensors)
    if M == 260:  # as if the first call with these lengths were captured
        passes_of_calls._masks.clear()
        passes_of_calls._passes.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _attention(case, tensors)
    for x in tensors:
        x.neg_()
    graph.replay()
    again = _attention(case, tensors)
    torch.testing.assert_close(out, again, atol=2e-2, rtol=2e-2)
    assert not torch.equal(out, expected)
    assert bool(fallbacks()) == (M == 260)


Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # of the sequences of query, and of those of key and value
LENGTHS = ((100, 0, 37, 300), (100, 20, 64, 300))
EQUAL = ((100, 37, 300), (100, 37, 300))


def _rows(lengths: Lengths, heads: tuple[int, int]) -> list[Tensor]:
    """Return query, key and value of packed sequences, [tokens, heads, 64]."""
    sizes = ((sum(lengths[0]), heads[0]), (sum(lengths[1]), heads[1]), (sum(lengths[1]), heads[1]))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t, h, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for t, h in sizes]


def _packed() -> tuple[list[Tensor], tuple[Any, ...]]:
    sequences = (*[cumulative(x, "cuda") for x in LENGTHS], max(LENGTHS[0]), max(LENGTHS[1]))
    return _rows(LENGTHS, (4, 2)), sequences


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (32, 16)], ids=str)
def test_packed(passes: list[str], window: tuple[int, int]) -> None:
    tensors, sequences = _packed()
    out, lse, *_ = ATEN._flash_attention_forward(
        *tensors, *sequences, 0.0, window == (-1, 0), False, window_size_left=window[0], window_size_right=window[1]
    )
    exact_lse = _check_packed(out, tensors, LENGTHS, window)
    assert lse.shape == (4, sum(LENGTHS[0]))
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-2, rtol=1e-2)
    assert passes == ["forward", "backward"]


def _check_packed(out: Tensor, tensors: list[Tensor], lengths: Lengths, window: tuple[int, int]) -> Tensor:
    """Compare out [T_q, Hq, D] and gradients with the dense computation and with float64. Return the exact lse."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    dense, exact = (attend_packed(*x, lengths, window) for x in (tensors, wide))
    assert_close_to_oracle("out", out.detach(), dense[0].detach(), exact[0].detach())
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    found = torch.autograd.grad(out, tensors, d_out)
    of_dense = torch.autograd.grad(dense[0], tensors, d_out)
    of_exact = torch.autograd.grad(exact[0], wide, d_out.double())
    for name, x, y, z in zip(("dq", "dk", "dv"), found, of_dense, of_exact, strict=True):
        assert_close_to_oracle(name, x, y.nan_to_num(), z.nan_to_num(), "grad")
    return exact[1].detach()


@pytest.mark.usefixtures("active")
def test_varlen_attn_of_torch(passes: list[str]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    cu, tensors = cumulative(EQUAL[0], "cuda"), _rows(EQUAL, (2, 2))
    _check_packed(varlen.varlen_attn(*tensors, cu, cu, 300, 300), tensors, EQUAL, (-1, -1))
    assert passes == ["forward", "backward"]


@pytest.mark.usefixtures("active")
def test_jagged(passes: list[str]) -> None:
    rows, offsets = _rows(EQUAL, (2, 2)), cumulative(EQUAL[0], "cuda").long()
    given = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in rows]
    out = scaled_dot_product_attention(*given, is_causal=True).transpose(1, 2).values()
    _check_packed(out, rows, EQUAL, (-1, 0))
    assert passes == ["forward", "backward"]


@pytest.mark.parametrize("table", [False, True], ids=["lengths", "pages"])
def test_used_lengths_and_pages(table: bool) -> None:
    """Called directly: older versions of torch have no block_table in the schema."""
    query = torch.randn(2, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(6, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    pages = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32, device="cuda")
    used = torch.tensor([20, 31], dtype=torch.int32, device="cuda")
    by_sequence = [x[pages.long()].flatten(1, 2) for x in (key, value)]
    stored = (key, value) if table else by_sequence
    out, lse, *_ = sdpa.flash_attention_forward(
        query, *stored, None, None, 3, 32, 0.0, True, False, seqused_k=used, block_table=pages if table else None
    )
    for b, end in enumerate(used.tolist()):
        k, v = (x[b, :end].transpose(0, 1)[None].double() for x in by_sequence)
        expected, of_lse = attend(query[b].transpose(0, 1)[None].double(), k, v, (-1, 0), None)
        torch.testing.assert_close(out[b].double(), expected[0].transpose(0, 1), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[b].double(), of_lse[0], atol=2e-2, rtol=2e-2)


# PyTorch's own kernels.


@pytest.mark.parametrize(("M", "N"), [(100, 100), (64, 200), (200, 64)])
def test_causal_is_aligned_as_in_the_own_kernel(M: int, N: int) -> None:
    tensors = replace(CUDA, M=M, N=N, D=64).tensors()
    own, own_lse, *_ = ATEN._scaled_dot_product_flash_attention(*tensors, is_causal=True)
    with sdpa.activate():
        out, lse, *_ = ATEN._scaled_dot_product_flash_attention(*tensors, is_causal=True)
    torch.testing.assert_close(out, own, atol=2e-2, rtol=2e-2)
    has_keys = lse > -torch.inf
    torch.testing.assert_close(lse[has_keys], own_lse[has_keys], atol=2e-2, rtol=1e-2)


def test_activate_restore_and_activate_again(passes: list[str]) -> None:
    case = replace(CUDA, M=256, N=256, D=64, causal=True)
    tensors = [x.detach() for x in case.tensors()]
    own = _attention(case, tensors)
    for _ in range(2):
        passes.clear()
        with sdpa.activate():
            _attention(case, tensors)
            assert passes == ["forward"]
        assert torch.equal(_attention(case, tensors), own)
        assert passes == ["forward"]


REASONS = [
    ({"alibi_slopes": torch.tensor([0.5, 0.25])}, 0.0, False, "ALiBi slopes are only in the schema of the forward"),
    ({}, 0.1, True, "the debug mask of dropout has the format of PyTorch's own kernel"),
]


@pytest.mark.parametrize(("options", "p", "debug", "reason"), REASONS, ids=["alibi", "debug mask"])
def test_the_own_kernel_computes_what_is_not_handled(
    options: dict[str, Tensor], p: float, debug: bool, reason: str
) -> None:
    rows = [x.detach().transpose(1, 2) for x in replace(CUDA, M=128, N=128, D=64).tensors()]
    given = (*rows, None, None, 128, 128, p, True, debug)
    on_gpu = {name: x.cuda() for name, x in options.items()}

    def compute() -> tuple[Tensor, ...] | str:
        torch.manual_seed(0)
        try:
            return ATEN._flash_attention_forward(*given, **on_gpu)
        except RuntimeError as error:  # some builds of PyTorch have no kernel with ALiBi
            return str(error)

    own = compute()
    with sdpa.activate():
        found = compute()
    if isinstance(own, str) or isinstance(found, str):
        assert own == found
    else:
        assert torch.equal(found[0], own[0]) and torch.equal(found[1], own[1])
    assert fallbacks() == {f"sdpa _flash_attention_forward: {reason}": 1}


def test_what_neither_computes_raises_the_error_of_pytorch() -> None:
    query = torch.zeros(1, 2, 64, 512, device="cuda", dtype=torch.bfloat16)
    with sdpa.activate(), pytest.raises(RuntimeError):
        ATEN._scaled_dot_product_flash_attention(query, query, query)
    assert all(reason.endswith("head dims must be 1 to 256") for reason in fallbacks())
    assert fallbacks()
