"""What mods do inside torch.compile besides computing: operations in place, modes of torch, and numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as upstream

from flexattn import create_block_mask, flex_attention, mods
from flexattn.errors import ArgumentError, ModError, MutationError, UnsupportedError

T = 48
TABLE, SLOPES = torch.randn(2, 8), torch.rand(2)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def qkv(seed: int = 0, t: int = T, **kwargs: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, t, 16, generator=generator).requires_grad_(**kwargs) for _ in range(3)]


def compiled(f: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    return torch.compile(f, backend="aot_eager", fullgraph=True, **kwargs)


def results(f: Callable[..., Tensor], x: list[Tensor], *arguments: Any) -> list[Tensor]:
    out = f(*x, *arguments)
    return [out, *torch.autograd.grad(out.square().sum(), x)]


def assert_same(f: Callable[..., Tensor], call: Callable[..., Tensor], *arguments: Any) -> None:
    """Compare a compiled and an uncompiled call bitwise."""
    x = qkv()
    for one, other in zip(results(call, x, *arguments), results(f, x, *arguments), strict=True):
        assert torch.equal(one, other)


def masked_fill(s, b, h, i, j):
    z = s * 1.5
    z.masked_fill_(i < j, -1e9)
    return z


def fill_and_add(s, b, h, i, j):
    z = s * 0.5
    other = z * 2
    z.fill_(1.0)
    z.add_(other).clamp_(max=0.5)
    return z * other


def copy(s, b, h, i, j):
    z = torch.zeros_like(s)
    z.copy_(s * SLOPES[h])
    return z


def inplace_relu(s, b, h, i, j):
    z = s + 0.1
    nn.functional.relu(z, inplace=True)
    return z


def without_gradients(s, b, h, i, j):
    with torch.no_grad():
        largest = s * 1
        largest.clamp_(max=0.25)
    return s - largest


def several_without_gradients(s, b, h, i, j):
    with torch.no_grad():
        table = SLOPES.clone()
        table.add_(1)
        table.mul_(3)
        x = s.abs()
        x.add_(1).log_()
    return s * table[h] + x


def in_inference_mode(s, b, h, i, j):
    with torch.inference_mode():
        table = SLOPES.clone()
        table.add_(1).mul_(2)
    return s * table[h]


def overload(s, b, h, i, j):
    z = s * 2
    torch.ops.aten.mul_.Tensor(z, 3)
    return z


def positional(s, b, h, i, j):
    z = s * 2
    nn.functional.elu(z, 1.0, True)
    return z


def by_keyword(s, b, h, i, j):
    z = s * 2
    nn.functional.relu(input=z, inplace=True)
    return z


IN_PLACE = (
    masked_fill, fill_and_add, copy, inplace_relu, without_gradients, several_without_gradients, in_inference_mode,
    overload, positional, by_keyword,
)  # fmt: skip


def test_several_operations_without_gradients():
    table = (SLOPES + 1) * 3

    def plain(s, b, h, i, j):
        return s * table[h] + (s.abs() + 1).log().detach()

    x = qkv()
    for one, other in zip(
        results(lambda *x: flex_attention(*x, several_without_gradients), x),
        results(lambda *x: flex_attention(*x, plain), x),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mod", IN_PLACE)
def test_operations_in_place(mod):
    def f(q, k, v):
        return flex_attention(q, k, v, mod)

    assert_same(f, compiled(f))


@pytest.mark.parametrize("of_torch", [False, True])
def test_a_mask_mod_with_an_operation_in_place(of_torch):
    def keep(b, h, q_idx, kv_idx):
        z = q_idx >= kv_idx
        torch.ops.aten.logical_and_.default(z, q_idx - kv_idx < 19)
        z.logical_and_(q_idx - kv_idx < 9)
        return z

    def plain(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 9)

    if of_torch:
        mask: Any = upstream.create_block_mask(plain, None, None, T, T, device="cpu")
        mask.mask_mod = keep
    else:
        mask = create_block_mask(keep, None, None, T, T, device="cpu")
    f = compiled(lambda q, k, v: flex_attention(q, k, v, masked_fill, mask))
    other = create_block_mask(plain, None, None, T, T, device="cpu")
    assert_same(lambda q, k, v: flex_attention(q, k, v, masked_fill, other), f)


def set_elements(s, b, h, i, j):
    z = torch.zeros(2)
    z[0] = s  # here
    z[1] = SLOPES[h]
    return z.sum()


def into_out(s, b, h, i, j):
    z = s * 2
    torch.mul(s, 2, out=z)  # here
    return z


def through_a_detached_view(s, b, h, i, j):
    z = s * 2
    y = z.detach()
    y.mul_(0)  # here
    return z


def under_a_detached_view(s, b, h, i, j):
    z = s * 2
    y = z.data
    z.mul_(0)  # here
    return y


def a_capture_through_data(s, b, h, i, j):
    table = SLOPES.data
    table.add_(1)  # here
    return s * table[h]


def a_list(s, b, h, i, j):
    table = SLOPES * 1
    torch._foreach_mul_([table], 3.0)  # here
    return s * table[h]


REFUSED = (set_elements, into_out, through_a_detached_view, under_a_detached_view, a_capture_through_data, a_list)


@pytest.mark.parametrize("mod", REFUSED)
def test_operations_in_place_that_are_refused(mod):
    """Also if no value of the result depends on them in Dynamo's graph. The error names the user's line."""
    source, first = inspect.getsourcelines(mod)
    line = first + next(n for n, text in enumerate(source) if "# here" in text)
    x = qkv()
    with pytest.raises(ModError, match="in place"):
        flex_attention(*x, mod)
    with pytest.raises(
        Exception, match=rf"{mod.__name__} at \S*{__file__.rpartition('/')[2]}:{line} changes"
    ) as raised:
        compiled(lambda q, k, v: flex_attention(q, k, v, mod))(*x)
    assert "ModError" in str(raised.value)


def into_a_capture(s, b, h, i, j):
    table = SLOPES * 2
    torch.add(table, 1, out=SLOPES)
    return s * table[h]


def a_detached_capture(s, b, h, i, j):
    table = SLOPES.detach()
    table.add_(1)
    return s * table[h]


def assigned_data(s, b, h, i, j):
    table = SLOPES * 1
    table.data = SLOPES + 5
    return s * table[h]


@pytest.mark.parametrize("mod", [into_a_capture, a_detached_capture, assigned_data])
def test_captured_tensors_are_not_changed(mod):
    """In torch.compile, Dynamo refuses these."""
    before = SLOPES.clone()
    for _ in range(2):
        with pytest.raises(ModError, match="in place"):
            flex_attention(*qkv(), mod)
        assert torch.equal(before, SLOPES)


def test_a_constant_of_a_mod_is_computed_without_autocast():
    def mod(s, b, h, i, j):
        return s * (torch.arange(16.0).view(4, 4) / 7 @ torch.full((4, 4), 1.0071))[h, 0]

    factors = (torch.arange(16.0).view(4, 4) / 7 @ torch.full((4, 4), 1.0071))[:, 0]
    x = qkv(requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        flex_attention(*x, mod)
    assert torch.equal(flex_attention(*x, mod), flex_attention(*x, lambda s, b, h, i, j: s * factors[h]))


def gated(context):
    def mod(s, b, h, i, j):
        with context():
            gate = torch.sigmoid(s) * SLOPES[h]
        return s * gate

    return mod


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, lambda: torch.set_grad_enabled(False)])
def test_gradient_modes_in_a_mod(context):
    mod = gated(context)

    def f(q, k, v):
        return flex_attention(q, k, v, mod)

    assert_same(f, compiled(f))


def test_a_mod_without_gradients():
    @torch.no_grad()
    def mod(s, b, h, i, j):
        return torch.tanh(s)

    def f(q, k, v):
        return flex_attention(q, k, v, mod)

    (x, call) = qkv(), compiled(f)
    assert torch.equal(call(*x), f(*x))
    for attend in (f, call):
        gradients = torch.autograd.grad(attend(*x).sum(), x, allow_unused=True)
        assert all(g is None or not g.any() for g in gradients[:2])


def product(enabled):
    def mod(s, b, h, i, j):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            z = (TABLE @ TABLE.t())[h, 0]
        return s + z * (i - j) * 0.1

    return mod


def with_table(table):
    return lambda s, b, h, i, j: s + table[h, 0] * (i - j) * 0.1


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("inside", [False, True, None])
def test_autocast_in_and_around_a_mod(inside, around):
    """Inside of a mod autocast is off, unless the mod turns it on."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(inside)):
        table = TABLE @ TABLE.t()
    mod = (lambda s, b, h, i, j: s + (TABLE @ TABLE.t())[h, 0] * (i - j) * 0.1) if inside is None else product(inside)

    def f(q, k, v):
        return flex_attention(q, k, v, mod)

    x = qkv(requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        expected = flex_attention(*x, with_table(table))
        assert torch.equal(f(*x), expected)
        assert torch.equal(compiled(f)(*x), expected)


class Switched(nn.Module):
    """A module whose mask can come to be true everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.factor, self.off = 5, 1, False
        self.mask = create_block_mask(self.keep, None, None, T, T, BLOCK_SIZE=16, device="cpu")

    def keep(self, b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx).abs() * self.factor < self.window
        return near | (self.window < 0) | self.off

    def forward(self, q, k, v):
        return flex_attention(q, k, v, None, self.mask)


@pytest.mark.parametrize(("name", "value"), [("window", -1), ("factor", 0), ("off", True)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_mask_whose_mod_has_become_true_is_stale(name, value, is_compiled):
    module, x = Switched(), qkv()
    call = compiled(module) if is_compiled else module
    call(*x)
    setattr(module, name, value)
    for _ in range(2):
        with pytest.raises(MutationError):
            call(*x)
    module.mask = create_block_mask(module.keep, None, None, T, T, BLOCK_SIZE=16, device="cpu")
    torch.testing.assert_close(call(*x), flex_attention(*x))


READY: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "softcap": (lambda n: (mods.softcap(n), None), (20.0, 30.0, 50.0)),
    "softcap of a product": (lambda n: (mods.softcap(2 * n), None), (20.0, 30.0, 50.0)),
    "alibi": (lambda n: (mods.alibi(n), None), (2, 2)),
    "band": (lambda n: (None, mods.band(n, 2)), (3, 4, 5)),
    "sliding_window": (lambda n: (None, mods.sliding_window(n)), (3, 4, 5)),
    "prefix_lm": (lambda n: (None, mods.prefix_lm(n)), (3, 4, 5)),
    "global_tokens": (lambda n: (None, mods.global_tokens(n)), (3, 4, 5)),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", READY)
def test_ready_mods_made_in_a_compiled_function(name, dynamic):
    """Their names contain numbers, which are symbols there."""
    make, numbers = READY[name]

    def f(q, k, v, n):
        score_mod, mask_mod = make(n)
        if mask_mod is not None:
            return flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(mask_mod(b, h, i, j), s, -float("inf")))
        return flex_attention(q, k, v, score_mod)

    call = compiled(f, dynamic=dynamic)
    for n in numbers:
        assert_same(f, call, n)


FLOATS: dict[str, Callable[[float], Callable[..., Tensor]]] = {
    "-n": lambda n: lambda s, b, h, i, j: s * (-n),
    "+n": lambda n: lambda s, b, h, i, j: s * (+n),
    "abs(n)": lambda n: lambda s, b, h, i, j: s * abs(n),
    "clamp": lambda n: lambda s, b, h, i, j: s.clamp(-abs(n), abs(n)),
    "n % 2": lambda n: lambda s, b, h, i, j: s * (n % 2),
    "several": lambda n: lambda s, b, h, i, j: torch.tanh(s / (n / 2)) * (1.0 - n * 2) + (-n) * (j - i),
}


@pytest.mark.parametrize("name", FLOATS)
def test_arithmetic_with_a_float_is_compiled_twice(name):
    def f(q, k, v, n):
        return flex_attention(q, k, v, FLOATS[name](n))

    call, counts = compiled(f), []
    for n in (0.5, -0.25, 0.7, 0.9):
        assert_same(f, call, n)
        counts.append(counters["stats"]["unique_graphs"])
    assert counts == [1, 2, 2, 2]


@pytest.mark.parametrize("of_data", [False, True])
def test_a_scale_computed_from_a_float(of_data):
    def f(q, k, v, x):
        n = x.sum().item() if of_data else x
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * n, scale=-0.5 * n)

    call, counts = compiled(f), []
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for n in (0.5, -0.25, 0.7):
            assert_same(f, call, torch.full((4,), n / 4, dtype=torch.float64) if of_data else n)
            counts.append(counters["stats"]["unique_graphs"])
    assert counts == [1, 1, 1] if of_data else [1, 2, 2]


def test_a_number_of_a_tensor_that_is_changed_later():
    def f(q, k, v, t):
        n = t.item()
        t.add_(1)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * n)

    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(Exception, match="depends on the values of tensors"),
    ):
        compiled(f)(*qkv(), torch.tensor(0.5))


def test_a_number_computed_from_a_size_in_make_fx():
    def f(q, k, v):
        n = k.shape[2]
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * n**0.5)

    with pytest.raises(UnsupportedError, match="computed from a dynamic size"):
        make_fx(f, tracing_mode="symbolic")(*qkv(requires_grad=False))


EXPORTED: dict[str, Callable[[Tensor], Callable[..., Tensor]]] = {
    "size ** 0.5": lambda k: lambda s, b, h, i, j: s * k.shape[2] ** 0.5,
    "float(size)": lambda k: lambda s, b, h, i, j: s * float(k.shape[2]),
    "round": lambda k: lambda s, b, h, i, j: s * round(k.shape[2] * 0.5) * 0.01,
    "size + 3": lambda k: lambda s, b, h, i, j: s * (k.shape[2] + 3) * 0.01,
    "a captured size": lambda k: (lambda n: lambda s, b, h, i, j: torch.where(j < n // 2, s, -s))(k.shape[2]),
    "computed from a captured size": lambda k: (lambda n: lambda s, b, h, i, j: s * n**0.5)(k.shape[2]),
    "a name with a size": lambda k: mods.alibi(k.shape[1]),
    "a captured quotient": lambda k: (lambda n: lambda s, b, h, i, j: s * n)(1.0 / k.shape[2]),
}
# What more than integer arithmetic computes from a size is a number of the program: the length is guarded.
ONE_LENGTH = ("size ** 0.5", "float(size)", "round", "computed from a captured size")


@pytest.mark.parametrize("name", EXPORTED)
def test_sizes_in_a_program_that_is_exported_without_dynamo(name):
    class Module(nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, EXPORTED[name](k))

    x, y = (qkv(seed, t, requires_grad=False) for seed, t in ((0, T), (1, 33)))
    shapes = ({2: torch.export.Dim.AUTO},) * 3
    program = torch.export.export(Module(), tuple(x), dynamic_shapes=shapes, strict=False).module()
    assert torch.equal(program(*x), Module()(*x))
    if name in ONE_LENGTH:
        with pytest.raises(AssertionError, match="Guard failed"):
            program(*y)
    else:
        assert torch.equal(program(*y), Module()(*y))


def test_an_exported_program_has_no_analysis_of_a_mod():
    class Module(nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, lambda s, b, h, i, j: s + torch.tensor([0.5, 0.25])[h] * (j - i).abs())

    program = torch.export.export(Module(), tuple(qkv(requires_grad=False)), strict=False)
    assert len(program.graph.nodes) <= 16


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="Dynamo cannot ask a function for its module")
@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (mods.alibi(4), "score_mod alibi: found 4 heads, expected those of query, 2"),
        (mods.alibi(torch.ones(4)), r"slopes of score_mod alibi: found float32 \[4\], expected \[2\]"),
        (mods.relative_bias(torch.zeros(4, 5)), r"table of score_mod relative_bias: found float32 \[4, 5\]"),
        (mods.t5_bias(torch.zeros(8, 32)), r"t5_bias: found float32 \[8, 32\], expected \[buckets, 2\]"),
    ],
    ids=lambda given: "",
)  # fmt: skip
def test_ready_mods_for_another_number_of_heads(mod, text, dynamic):
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=text):
        compiled(flex_attention, dynamic=dynamic)(*qkv(), mod)


def test_ready_mods_for_another_number_of_heads_in_a_graph():
    class Module(nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, MOD)

    MOD = mods.relative_bias(torch.zeros(4, 5))
    with pytest.raises(ArgumentError, match=r"table of score_mod relative_bias: found float32 \[4, 5\]"):
        torch.export.export(Module(), tuple(qkv(requires_grad=False)), strict=False)
    with pytest.raises(ArgumentError, match=r"table of score_mod relative_bias: found float32 \[4, 5\]"):
        flex_attention(*(x.to("meta") for x in qkv()), MOD)


def test_lists_of_a_mask_in_a_graph():
    mask = create_block_mask(mods.causal, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    read = lambda x: x + mask.kv_num_blocks.sum() + mask.full_kv_indices.sum() + mask.to_dense().sum()  # noqa: E731
    assert torch.equal(compiled(read)(torch.ones(2)), read(torch.ones(2)))


def test_ready_mods_of_any_size_compile_twice():
    """Their names have numbers, which a graph must not depend on."""
    f = compiled(flex_attention)
    for width in range(3, 25, 2):
        f(*qkv(), mods.relative_bias(torch.ones(2, width)))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, i, j: s + torch.func.jvp(torch.tanh, (s,), (torch.ones_like(s),))[1],
        lambda s, b, h, i, j: s + torch.vmap(torch.tanh)(torch.stack([s, s]))[0],
    ],
)
def test_transforms_in_a_mod_of_a_compiled_function(mod):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"test_compiled_mods\.py:\d+ uses torch\.func"):
        compiled(flex_attention)(*qkv(), mod)


@pytest.mark.parametrize("make", [lambda: mods.alibi(torch.ones(2)), lambda: mods.relative_bias(torch.ones(2, 5))])
def test_ready_mods_with_new_tables_compile_once(make):
    f = compiled(flex_attention)
    for _ in range(3):
        f(*qkv(), make())
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "transformed",
    [
        lambda x: torch.vmap(lambda y: flex_attention(y[None], y[None], y[None], mods.alibi(2)))(x),
        lambda x: torch.func.grad(lambda y: flex_attention(y, y, y).square().sum())(x),
        lambda x: torch.func.jvp(lambda y: flex_attention(y, y, y), (x,), (x,))[1],
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_a_transform_around_a_call_in_a_compiled_function_breaks_the_graph(transformed):
    x = torch.randn(2, 2, 20, 16)
    found = torch.compile(transformed, backend="aot_eager")(x)
    torch.testing.assert_close(found, transformed(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"inside of torch\.vmap, torch\.func\.grad or another"):
        compiled(transformed)(x)
