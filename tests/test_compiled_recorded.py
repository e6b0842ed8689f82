"""flex_attention in modes that record graphs or have no values: FakeTensorMode, meta, make_fx, torch.export."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from flexattn import AuxRequest, create_block_mask, flex_attention, mods
from flexattn.errors import FormatError, UnsupportedError
from flexattn.torch_compile.spec import FORMAT

B, H, T, D = 2, 2, 96, 16


def qkv(**kwargs):
    return [torch.randn(B, H, T, D, **kwargs) for _ in range(3)]


class Attention(nn.Module):
    """A module with a learned bias, a number, and a mask of its buffer."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(H, 2 * T))
        self.register_buffer("doc", torch.arange(T) // 20)
        self.slope = 0.25
        self.mask = create_block_mask(self.keep, None, None, T, T, BLOCK_SIZE=32, device="cpu")

    def keep(self, b, h, q_idx, kv_idx):
        return (self.doc[q_idx] == self.doc[kv_idx]) & (q_idx >= kv_idx)

    def score(self, score, b, h, q_idx, kv_idx):
        return score * self.slope + self.bias[h, q_idx - kv_idx + T]

    def forward(self, q, k, v):
        return flex_attention(q, k, v, self.score, self.mask)


def names(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    module, x = Attention(), qkv()
    program = torch.export.export(module, tuple(x), strict=strict)
    assert "flexattn.forward.default" in names(program.graph)
    y = qkv()
    assert torch.equal(program.module()(*y), module(*y))


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_length(strict):
    class Plain(nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, mods.alibi(H))

    length = torch.export.Dim("length", min=2, max=4096)
    x = qkv()
    program = torch.export.export(Plain(), tuple(x), dynamic_shapes=({2: length},) * 3, strict=strict)
    for t in (96, 33, 128):
        y = [torch.randn(B, H, t, D) for _ in range(3)]
        assert torch.equal(program.module()(*y), Plain()(*y))


def gradients(module, x, parameters):
    x = [t.detach().requires_grad_() for t in x]
    return torch.autograd.grad((module(*x) + x[0]).sum(), (*x, *parameters))


@pytest.mark.parametrize("strict", [True, False])
def test_gradients_of_an_exported_program(strict):
    module, x = Attention(), qkv()
    loaded = torch.export.export(module, tuple(x), strict=strict).module()
    expected = gradients(module, x, [module.bias])
    for called in (loaded, torch.compile(loaded, backend="aot_eager", fullgraph=True)):
        found = gradients(called, x, [*loaded.parameters()])
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    with torch.no_grad():
        assert not loaded(*x).requires_grad


def test_an_exported_program_with_a_sink():
    class Sink(nn.Module):
        def __init__(self):
            super().__init__()
            self.sink = nn.Parameter(torch.randn(H))

        def forward(self, q, k, v):
            return flex_attention(q, k, v, sink=self.sink)

    module, x = Sink(), qkv()
    loaded = torch.export.export(module, tuple(x)).module()
    expected = gradients(module, x, [module.sink])
    for called in (loaded, torch.compile(loaded, backend="aot_eager", fullgraph=True)):
        found = gradients(called, x, [*loaded.parameters()])
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_transforms_of_an_exported_program():
    module, (q, k, v) = Attention(), qkv()
    loaded = torch.export.export(module, (q, k, v)).module()
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.jvp(lambda q: loaded(q, k, v), (q,), (torch.ones_like(q),))
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda q: loaded(q, k, v).sum())(q)
    one, out = torch.ones(()), module(q, k, v)  # of other arguments
    with torch.no_grad():
        assert torch.equal(torch.func.grad(lambda s: (loaded(q, k, v) * s).sum())(one), out.sum())
    frozen = torch.export.export(module.requires_grad_(False), (q, k, v)).module()
    assert torch.equal(torch.func.grad(lambda s: (frozen(q, k, v) * s).sum())(one), out.sum())
    assert torch.equal(torch.func.jvp(lambda s: frozen(q, k, v) * s, (one,), (one,))[1], out)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.jvp(lambda q: frozen(q, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"torch\.func"):
        loaded(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f, q: make_fx(torch.vmap(f))(q[None]),
        lambda f, q: make_fx(torch.func.grad(lambda q: f(q).sum()))(q),
        lambda f, q: make_fx(torch.func.functionalize(f))(q),
        lambda f, q: torch.func.linearize(f, q),
    ],
    ids=["vmap", "grad", "functionalize", "linearize"],
)
def test_transforms_of_a_recorded_call(transformed):
    with pytest.raises(UnsupportedError, match=r"flex_attention: found a transform of torch\.func or forward mode"):
        transformed(lambda q: flex_attention(q, q, q), qkv()[0])


def test_functionalize():
    for q in qkv()[0], qkv(requires_grad=True)[0]:
        with pytest.raises(UnsupportedError, match=r"flex_attention: found .* inside of torch\.func\.functionalize"):
            torch.func.functionalize(lambda q: flex_attention(q, q, q))(q)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_gradients_of_a_recorded_graph(mode):
    module, x = Attention(), qkv()
    graph = make_fx(module, tracing_mode=mode, _allow_non_fake_inputs=True)(*x)
    found = gradients(graph, x, [])
    assert all(torch.equal(*pair) for pair in zip(found, gradients(module, x, []), strict=True))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11
def test_a_saved_program(tmp_path):
    module, x = Attention(), qkv()
    program = torch.export.export(module, tuple(x))
    torch.export.save(program, tmp_path / "program.pt2")
    assert torch.equal(torch.export.load(tmp_path / "program.pt2").module()(*x), module(*x))


def damaged(text: str) -> dict[str, str]:
    parts = json.loads(text)
    inner = json.loads(parts[1])
    return {
        "another format": json.dumps([FORMAT + 1, *parts[1:]]),
        "another format of a graph": json.dumps([FORMAT, json.dumps([inner[0] + 1, *inner[1:]]), *parts[2:]]),
        "truncated": text[:-20],
        "too few parts": json.dumps(parts[:-1]),
        "no form of a mask": json.dumps([*parts[:3], "[1]", *parts[4:]]),
        "options": json.dumps([*parts[:4], [1], *parts[5:]]),
        "a sink": json.dumps([*parts[:5], "x", *parts[6:]]),
        "null": "null",
        "garbage": "xx",
        "a string": '"xx"',
        "deep": "[" * 100_000,
        "empty": "",
    }


def test_a_damaged_program():
    module, x = Attention(), qkv()
    program = torch.export.export(module, tuple(x))
    (node,) = (n for n in program.graph.nodes if "flexattn.forward" in str(n.target))
    *others, spec = node.args
    for name, text in damaged(spec).items():
        node.args = (*others, text)
        program.graph_module.recompile()
        with pytest.raises(FormatError, match="found"):
            print(name, program.module()(*x))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode):
    slopes = torch.rand(H)

    def f(q, k, v, slopes):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())

    x = (*qkv(), slopes)
    graph = make_fx(f, tracing_mode=mode)(*x)
    assert names(graph.graph).count("flexattn.forward.default") == 1
    y = (*qkv(), torch.rand(H))
    assert torch.equal(graph(*y), f(*y))


def test_a_recorded_mod_that_reads_strides():
    """The graph is then one for these sizes and strides."""

    def f(q, k, v, table):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * table.stride(0))

    given = (*qkv(), torch.rand(6, 4).T)
    graph = make_fx(f, tracing_mode="symbolic")(*given)
    assert torch.equal(graph(*given), f(*given))
    *_, table = (n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder")
    assert all(statically_known_true(size == n) for size, n in zip(table.shape, (4, 6), strict=True))


def test_make_fx_of_a_mask():
    module, x = Attention(), qkv()
    graph = make_fx(module, tracing_mode="real")(*x)
    y = qkv()
    assert torch.equal(graph(*y), module(*y))


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors(inside):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = qkv()
    real = Attention()
    if inside:
        with mode:
            out, aux = flex_attention(*x, real.score, real.mask, return_aux=AuxRequest(lse=True, max_scores=True))
    else:
        out, aux = flex_attention(*x, mods.softcap(5.0), return_aux=AuxRequest(lse=True, max_scores=True))
    assert type(out).__name__ == "FakeTensor" and out.shape == (B, H, T, D)
    assert aux.lse.shape == aux.max_scores.shape == (B, H, T)


def test_a_module_of_fake_tensors():
    with FakeTensorMode():
        module = nn.Linear(H, 1)
        x = qkv(requires_grad=True)
        out = flex_attention(*x, lambda s, b, h, i, j: s * module.weight[0, h])
        out.sum().backward()
    assert x[0].grad.shape == x[0].shape and module.weight.grad.shape == (1, H)


def test_meta_tensors():
    q = torch.empty(B, 4, T, D, device="meta", dtype=torch.bfloat16)
    k = torch.empty(B, 2, 50, D, device="meta", dtype=torch.bfloat16)
    out = flex_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, k, enable_gqa=True)
    assert out.is_meta and out.shape == q.shape and out.stride() == (4 * T * D, D, 4 * D, 1)


@pytest.mark.parametrize("record", ["export", "make_fx", "fake"])
def test_nothing_of_a_mode_is_kept(record):
    """Constants of graphs are kept for all calls. Those of a mode have no values."""
    literal = {"export": 0.125, "make_fx": 0.375, "fake": 0.625}[record]  # that no other test has
    x = qkv()
    mask = create_block_mask(lambda b, h, i, j: (i >= j) | (j * literal < 1), None, None, T, T, device="cpu")
    loaded = pickle.loads(pickle.dumps(mask))

    class Module(nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, None, loaded)

    match record:
        case "export":
            torch.export.export(Module(), tuple(x))
        case "make_fx":
            make_fx(Module(), _allow_non_fake_inputs=True)(*x)
        case "fake":
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                Module()(*map(mode.from_tensor, x))
    b, q_idx, kv_idx = torch.tensor(0), torch.arange(T)[:, None], torch.arange(T)
    found = loaded.mask_mod(b, b, q_idx, kv_idx)
    assert type(found) is torch.Tensor
    assert torch.equal(found, (q_idx >= kv_idx) | (kv_idx * literal < 1))
