"""flex_attention inside torch.compile: one graph, few compilations, and the results of the uncompiled call."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as upstream
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn import create_block_mask, flex_attention, mods
from flexattn.block_mask.from_torch import from_torch
from flexattn.block_mask.prepared import Origin
from flexattn.errors import DtypeError, RetraceWarning

B, H, T, D = 2, 2, 160, 16
Step = tuple[tuple[Any, ...], list[Tensor]]  # arguments, and the tensors whose gradients are compared


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def qkv(seed: int, t: int = T, **kwargs: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, t, D, generator=generator, **kwargs).requires_grad_() for _ in range(3)]


def steps(count: int = 3) -> list[Step]:
    return [(tuple(x), x) for x in map(qkv, range(count))]


def documents(seed: int, t: int = T) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (B, t), generator=generator).cumsum(1) // (5 + 13 * (seed % 4))


def document_mask(seed: int, t: int = T) -> flexattn.BlockMask:
    doc = documents(seed, t)

    def mask_mod(b, h, q_idx, kv_idx):
        return (doc[b, q_idx] == doc[b, kv_idx]) & (q_idx >= kv_idx)

    return create_block_mask(mask_mod, B, None, t, t, BLOCK_SIZE=32, device="cpu")


def run(call: Callable[..., Any], args: tuple[Any, ...], learned: list[Tensor]) -> list[Tensor]:
    """Return the outputs of a call and the gradients of tensors."""
    for x in learned:
        x.grad = None
    out = call(*args)
    outs = list(out) if isinstance(out, tuple) else [out]
    if learned:
        sum(o.square().sum() for o in outs).backward()
    return [o.detach() for o in outs] + [x.grad.clone() for x in learned]


def test_a_name_that_is_first_used_in_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo imports its module while it traces the function."""
    flexattn.merge_attention  # noqa: B018
    monkeypatch.delitem(vars(flexattn), "merge_attention")

    def halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        request = flexattn.AuxRequest(lse=True)
        parts = [flex_attention(q, k[:, :, s], v[:, :, s], return_aux=request) for s in (slice(64), slice(64, T))]
        return flexattn.merge_attention([out for out, _ in parts], [aux.lse for _, aux in parts])[0]

    compiled = torch.compile(halves, backend="aot_eager", fullgraph=True)
    for arguments, learned in steps(2):
        for one, other in zip(run(compiled, arguments, learned), run(halves, arguments, learned), strict=True):
            torch.testing.assert_close(one, other)
    assert counters["stats"]["unique_graphs"] == 1


def compilations(
    f: Callable[..., Any], given: Iterable[Step], backend: str = "aot_eager", dynamic: bool | None = None
) -> list[int]:
    """Compare a function compiled and not, bitwise. Return how often it was compiled after each step."""
    compiled = torch.compile(f, fullgraph=True, backend=backend, dynamic=dynamic)
    counts = []
    for args, learned in given:
        found, expected = run(compiled, args, learned), run(f, args, learned)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)
        counts.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    return counts


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.randn(H, 2 * T)), 0.5
        self.register_buffer("slope", torch.rand(H))

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score * self.scale + self.bias[h, q_idx - kv_idx + T] - self.slope[h] * (q_idx - kv_idx).abs()

    def forward(self, q, k, v):
        return flex_attention(q, k, v, self.score_mod)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(H))

    def forward(self, score, b, h, q_idx, kv_idx):
        return torch.tanh(score / 20) * 20 * self.weight[h]


def learning(module: nn.Module, count: int = 3) -> list[Step]:
    return [(args, [*x, *module.parameters()]) for args, x in steps(count)]


def test_method_of_a_module():
    layer = Layer()
    assert compilations(layer, learning(layer)) == [1, 1, 1]


def test_a_buffer_that_is_replaced_then_changed():
    layer = Layer()

    def changing():
        for step in learning(layer):
            layer.slope = torch.rand(H)
            yield step
        layer.slope.mul_(3)
        yield learning(layer)[0]

    assert compilations(layer, changing()) == [1, 1, 1, 1]


def closure(q, k, v, table):
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + table[b, i] * table[b, j])


def with_tables(sizes: Iterable[int]) -> Iterable[Step]:
    for n, t in enumerate(sizes):
        x = [*qkv(n, t), torch.randn(B, t, requires_grad=True)]
        yield tuple(x), x


def test_closure_over_a_new_tensor():
    assert compilations(closure, with_tables([T] * 4)) == [1, 1, 1, 1]


def test_new_lengths():
    assert compilations(closure, with_tables([160, 192, 224, 96, 130])) == [1, 2, 2, 2, 2]


def test_dynamic_shapes():
    assert compilations(closure, with_tables([160, 192, 224, 96]), dynamic=True) == [1, 1, 1, 1]


def of_data(q, k, v, keep, weights):
    """Captured tensors and numbers whose sizes and values depend on data."""
    i = keep.nonzero().squeeze(1)
    n, mean = keep.sum().item(), weights.mean().item()
    out = flex_attention(q, k[:, :, i], v[:, :, i], lambda s, b, h, x, y: s * mean + (i * 2 + i)[y] * weights[x])
    return out + flex_attention(q, k, v, lambda s, b, h, x, y: torch.where(y < n, s * mean, 0.5), scale=mean)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_captures_that_depend_on_data(backend):
    weights = torch.rand(T, requires_grad=True)
    given = [((*x, torch.rand(T) > share, weights), [*x, weights]) for share in (0.5, 0.2) for x in [qkv(0)]]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        assert compilations(of_data, given, backend) == [1, 1]


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda q, k, v, n: flex_attention(q, k, v, lambda s, b, h, i, j: s * min(n, 2.0)), r"score_mod at .*\.py:\d+"),
        (lambda q, k, v, n: flex_attention(q, k, v, lambda s, *i: s * (i[2] // int(n))), r"score_mod at .*\.py:\d+"),
        (lambda q, k, v, n: flex_attention(q, k, v, sink=n), "sink"),
    ],
    ids=["min", "divisor", "sink"],
)
def test_values_that_depend_on_data(call, what):
    compiled = torch.compile(lambda q, k, v, x: call(q, k, v, x.sum().item()), backend="aot_eager", fullgraph=True)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(Exception, match=rf"{what}: found a number or size that depends on the values of tensors"),
    ):
        compiled(*qkv(0), torch.rand(4))


def test_a_scale_of_numpy():
    """torch.compile makes a tensor of it."""
    scale = np.float32(0.5)

    def f(q, k, v, scale):
        return flex_attention(q, k, v, scale=scale)

    with pytest.raises(Exception, match=r"flex_attention: found .*torch.compile makes tensors of NumPy's scalars"):
        torch.compile(f, backend="aot_eager", fullgraph=True)(*qkv(0), scale)
    x = qkv(0)
    assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(*x, float(scale)), f(*x, scale))


def test_mods_that_read_strides():
    """With dynamic shapes Dynamo asks for a trace before it makes symbols of them."""

    def f(q, k, v, table):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * table.stride(0) + table.T.contiguous().stride()[0])

    def offset(q, k, v, table):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * table[1].storage_offset())

    tables = [torch.rand(4, 6), torch.rand(6, 4).T, torch.rand(4, 8), torch.rand(4, 6)]
    given = [((*x, table), x) for table in tables for x in [qkv(0)]]
    assert compilations(f, given, dynamic=True) == [1, 2, 2, 2]
    with pytest.warns(RetraceWarning, match="storage_offset"):
        x, table = qkv(0), torch.rand(6, 4)[2:]
        assert compilations(offset, [((*x, table), x)], dynamic=True) == [3]


def test_data_of_a_parameter():
    """Dynamo reads it with a function that no mode of torch sees. It has no gradient."""
    table = nn.Parameter(torch.rand(T))

    def f(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * table[j] + table.data[i - j])

    x = qkv(0)
    assert compilations(f, [(tuple(x), [*x, table])]) == [1]


def test_mod_passed_as_an_argument():
    def make(t):
        return lambda s, b, h, i, j: s + t[h]

    given = [((*x, make(torch.randn(H))), x) for x in map(qkv, range(4))]
    assert compilations(lambda q, k, v, m: flex_attention(q, k, v, m), given) == [1, 1, 1, 1]


def with_number(q, k, v, n):
    return flex_attention(q, k, v, lambda s, b, h, i, j: s - n * (i - j).abs())


@pytest.mark.parametrize("numbers", [(3, 4, 5, 6), (0.3, 0.4, 0.5, 0.6)], ids=["int", "float"])
def test_captured_numbers(numbers):
    given = [((*x, n), x) for n in numbers for x in [qkv(3)]]
    assert compilations(with_number, given) == [1, 2, 2, 2]


def test_floats_that_are_read_before_the_call():
    """An item of Dynamo's tensor stays symbolic. So does what is computed from it for a mod."""

    def before(q, k, v, n):
        return flex_attention(q * n, k, v, lambda s, b, h, i, j: s * n + (i - j) * n, scale=n)

    def computed(q, k, v, n):
        m = 2 * n + 1
        return flex_attention(q * m, k, v, lambda s, b, h, i, j: s * m)

    def for_a_mod(q, k, v, n):
        m = 2 * n + 1
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * m)

    given = [((*x, n), x) for n in (0.3, 0.4, 0.5, 0.3) for x in [qkv(3)]]
    assert compilations(before, given) == [1, 2, 2, 2]
    assert compilations(for_a_mod, given) == [3, 4, 4, 4]  # after the two of `before`
    assert compilations(computed, given)[-1] <= 6


def capped(q, k, v, n):
    return flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s / n) * n)


def checkpointed(q, k, v, n):
    return checkpoint(capped, q, k, v, n, use_reentrant=False)


@pytest.mark.parametrize(("first", "second"), list(itertools.product((capped, checkpointed), repeat=2)))
def test_calls_that_share_a_float(first, second):
    """Dynamo reads its item once. It must not be in the body of the first call, which the second cannot reach."""

    def f(q, k, v, n):
        return (first(q, k, v, n) + second(k, q, v, n)) * n

    given = [((*x, n), x) for n in (0.3, 0.4, 0.5, 0.3) for x in [qkv(3)]]
    assert compilations(f, given) == [1, 2, 2, 2]
    assert compilations(f, given, dynamic=True) == [3, 3, 3, 3]


def test_a_default_is_no_symbol():
    """A symbol that is read in a checkpointed region cannot be read in another one."""

    def f(q, k, v):
        return sum(checkpoint(flex_attention, x, k, v, mods.softcap(20.0), use_reentrant=False) for x in (q, k))

    assert compilations(f, steps(1), dynamic=True) == [1]


@pytest.mark.parametrize("name", ["dropout_p", "sink"])
def test_numbers_that_are_constants_of_a_graph(name):
    def f(q, k, v, n):
        torch.manual_seed(0)
        return flex_attention(q, k, v, **{name: n})

    compiled = torch.compile(f, backend="aot_eager")
    x = qkv(0)
    for n in (0.3, 0.4, 0.5, 0.3):
        assert torch.equal(compiled(*x, n), f(*x, n))


def test_a_changing_scale():
    given = [((*x, n), x) for n in (0.3, 0.4, 0.5, -0.6) for x in [qkv(3)]]
    assert compilations(lambda q, k, v, n: flex_attention(q, k, v, scale=n), given) == [1, 2, 2, 2]


def masked(q, k, v, mask):
    return flex_attention(q, k, v, None, mask)


def test_mask_of_new_documents():
    assert compilations(masked, [((*x, document_mask(i)), x) for i in range(5) for x in [qkv(i)]]) == [1] * 5


def test_mask_of_new_documents_and_lengths():
    given = [((*x, document_mask(t, t)), x) for t in (160, 192, 256, 96) for x in [qkv(t, t)]]
    assert compilations(masked, given) == [1, 2, 2, 2]


def test_mask_held_by_a_module():
    gate, held = Gate(), nn.Module()

    def f(q, k, v):
        return flex_attention(q, k, v, gate, held.mask)

    def given():
        for i, (args, learned) in enumerate(learning(gate, 4)):
            held.mask = document_mask(i)
            yield args, learned

    assert compilations(f, given()) == [1, 1, 1, 1]


@pytest.mark.parametrize("numbers", [(10, 20, 30, 40)])
def test_mask_with_a_number(numbers):
    def window(n):
        return create_block_mask(lambda b, h, i, j: (i - j).abs() <= n, None, None, T, T, BLOCK_SIZE=32, device="cpu")

    assert compilations(masked, [((*x, window(n)), x) for n in numbers for x in [qkv(n)]]) == [1, 2, 2, 2]


@pytest.mark.parametrize(
    "mod",
    [mods.sliding_window(np.int64(5)), mods.shifted(mods.causal, np.int32(3)), mods.band(np.int64(2), np.int8(1))],
)
def test_ready_masks_of_numpy_numbers(mod):
    """Dynamo makes tensors of numpy's numbers. Factories take them as ints."""
    mask, x = create_block_mask(mod, None, None, T, T, BLOCK_SIZE=32, device="cpu"), qkv(0)
    assert compilations(masked, [((*x, mask), x)]) == [1]


def test_a_mask_with_a_number_of_numpy():
    number = np.int64(5)
    mask = create_block_mask(lambda b, h, i, j: i - j < number, None, None, T, T, BLOCK_SIZE=32, device="cpu")
    with pytest.raises(DtypeError, match=r"mask_mod that captures a numpy number, .*Capture int\(n\)"):
        torch.compile(masked, backend="eager")(*qkv(0), mask)


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, i, j, n: j - i <= n,
        lambda b, h, i, j, n: (i - j < 9) & (n - i <= j),
        lambda b, h, i, j, n: (i - j) % 3 != n,
    ],
)
def test_a_mask_with_the_number_0(mod):
    """Dynamo makes it a literal, which a trace places elsewhere than a number."""
    n = 0
    mask = create_block_mask(lambda b, h, i, j: mod(b, h, i, j, n), None, None, T, T, BLOCK_SIZE=32, device="cpu")
    x = qkv(0)
    assert compilations(masked, [((*x, mask), x)]) == [1]


@pytest.mark.parametrize(
    "mod",
    [
        functools.partial(lambda s, b, h, i, j, t: s * t[h], t=torch.rand(H)),
        mods.alibi(H),
        mods.softcap(20.0),
        lambda s, b, h, i, j: s,
        lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
        lambda s, b, h, i, j: s + torch.tensor([0.5, 1.0])[h],
        lambda s, b, h, i, j: s * 0.0 + 1.0,
    ],
    ids=["partial", "alibi", "softcap", "identity", "causal", "literal", "constant"],
)
def test_mods(mod):
    assert compilations(lambda q, k, v: flex_attention(q, k, v, mod), steps(2)) == [1, 1]


def test_one_compilation_for_equal_layers():
    layers = nn.ModuleList([Layer() for _ in range(4)])
    block = torch.compile(lambda layer, q, k, v: layer(q, k, v), fullgraph=True, backend="aot_eager")
    x = qkv(0)
    for layer in layers:
        assert torch.equal(block(layer, *x), layer(*x))
    assert counters["stats"]["unique_graphs"] == 1


class Documents(nn.Module):
    """A module whose mask reads a buffer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("doc", documents(0))
        self.window = 40
        self.mask = self.build()

    def build(self):
        return create_block_mask(self.mask_mod, B, None, T, T, BLOCK_SIZE=32, device="cpu")

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (self.doc[b, q_idx] == self.doc[b, kv_idx]) & (q_idx >= kv_idx) & (q_idx - kv_idx < self.window)

    def forward(self, q, k, v):
        return flex_attention(q, k, v, block_mask=self.mask)


def changed_in_place(module):
    module.doc[0, 0] += 1


def replaced(module):
    module.doc = module.doc + 1


def renumbered(module):
    module.window = 20


def other_mod(module):
    module.mask_mod = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    module.mask._mask_mod = module.mask_mod


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("change", [changed_in_place, replaced, renumbered, other_mod])
def test_a_stale_mask_raises(change, backend):
    module = Documents()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x = qkv(0)
    assert torch.equal(compiled(*x), module(*x))
    change(module)
    with pytest.raises(flexattn.FlexAttentionError, match="block_mask: "):
        compiled(*x)
    module.mask = module.build()
    torch.testing.assert_close(compiled(*x), module(*x), rtol=0, atol=0)


def aux(q, k, v, sink):
    request = flexattn.AuxRequest(lse=True, max_scores=True)
    out, found = flex_attention(q, k, v, mods.alibi(H), return_aux=request, sink=sink)
    return out, found.lse, found.max_scores.detach()


def test_every_output_and_a_learned_sink():
    sink = torch.randn(H, requires_grad=True)
    assert compilations(aux, [((*x, sink), [*x, sink]) for x, _ in steps(2)]) == [1, 1]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"return_lse": True}, {"sink": 0.0}, {"scale": 0.3}, {"scale": 0.0},
        {"kernel_options": {"BATCH_INVARIANT": True}}, {"kernel_options": {"BLOCK_M": 32, "BACKEND": "AUTO"}},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:return_lse:FutureWarning")
def test_arguments(kwargs):
    mask = document_mask(1)
    assert compilations(lambda q, k, v: flex_attention(q, k, v, None, mask, **kwargs), steps(2)) == [1, 1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_dropout(backend):
    def f(q, k, v):
        return flex_attention(q, k, v, mods.softcap(5.0), dropout_p=0.3)

    compiled = torch.compile(f, fullgraph=True, backend=backend)
    x = qkv(0)
    results = []
    for call in (compiled, f, compiled):
        torch.manual_seed(7)
        results.append(run(call, tuple(x), x))
    for found, expected, again in zip(*results, strict=True):
        assert torch.equal(found, expected) and torch.equal(found, again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_gqa_and_dim_orders(dtype):
    def f(q, k, v):
        return flex_attention(q.transpose(1, 2), k.transpose(1, 2), v, mods.alibi(4), enable_gqa=True)

    given = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        shapes = (2, 40, 4, 16), (2, 50, 2, 16), (2, 2, 50, 24)
        x = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
        given.append((tuple(x), x))
    assert compilations(f, given) == [1, 1]


def test_views_of_one_tensor():
    def f(qkv):
        return flex_attention(*qkv.unbind(2), mods.alibi(H))

    x = torch.randn(B, H, 3, T, D, requires_grad=True)
    assert compilations(f, [((x,), [x])]) == [1]


def test_without_gradients():
    mask = document_mask(1)
    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    q, k, v = (x.detach() for x in qkv(0))
    expected = masked(q, k, v, mask)
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v, mask), expected)
    with torch.inference_mode():
        assert torch.equal(compiled(q, k, v, mask), expected)
    assert torch.equal(compiled(q, k, v, mask), expected)


def test_autocast():
    layer = Layer()

    def f(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(q, k, v)

    assert compilations(f, [((*x,), [*x, layer.bias]) for x, _ in steps(2)]) == [1, 1]
    with torch.autocast("cpu", torch.bfloat16):
        assert compilations(layer, learning(layer, 1)) == [2]


def test_default_device():
    with torch.device("cpu"):
        assert compilations(Layer(), steps(1)) == [1]


def test_empty_tensors():
    x = [t.detach()[:, :, :0] for t in qkv(0)]
    assert torch.compile(flex_attention, fullgraph=True, backend="aot_eager")(*x).shape == (B, H, 0, D)


def test_a_table_by_distance():
    """The operator replaces a table of buckets by one of distances, and returns the gradient of the user's table."""
    table = torch.randn(32, H, requires_grad=True)
    mod = mods.t5_bias(table)
    assert compilations(lambda q, k, v: flex_attention(q, k, v, mod), [((*x,), [*x, table]) for x, _ in steps(2)]) == [
        1,
        1,
    ]


def test_a_prologue():
    table, gate = torch.randn(H, 1, requires_grad=True), torch.randn(H, requires_grad=True)

    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.sigmoid(table)[h, 0] * gate[h] + table.exp()[h, 0] * torch.tensor([1.0] * 20)[q_idx % 20]

    assert compilations(
        lambda q, k, v: flex_attention(q, k, v, mod), [((*x,), [*x, table, gate]) for x, _ in steps(2)]
    ) == [1, 1]


def test_a_long_prologue():
    """Names of what it computes contain those of its operators."""
    weight = torch.randn(T, T)

    def f(q, k, v):
        def mod(s, b, h, i, j):
            table = weight
            for _ in range(30):
                table = torch.nn.functional.layer_norm(table, (T,)).cumsum(0)
            return s + table[i, j]

        return flex_attention(q, k, v, mod)

    assert compilations(f, steps(2)) == [1, 1]


def test_a_prologue_with_a_changing_float():
    def f(q, k, v, table, n):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + (table * n)[h] + (i - j) * n)

    table = torch.randn(H, requires_grad=True)
    given = [((*x, table, n), [*x, table]) for n in (0.5, 0.25, 0.75) for x in [qkv(0)]]
    assert compilations(f, given) == [1, 2, 2]


def test_a_divisor_that_changes_compiles_again():
    """A divisor is a literal of the kernel, as in eager calls."""

    def f(q, k, v, n):
        return flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(i // n == j // n, s, -float("inf")))

    given = [((*x, n), x) for n in (3, 4, 5, 4) for x in [qkv(0)]]
    assert compilations(f, given)[-1] <= 4


def test_gradient_of_lse():
    def f(q, k, v):
        return flex_attention(q, k, v, mods.alibi(H), return_aux=flexattn.AuxRequest(lse=True))[1].lse

    assert compilations(f, steps(1)) == [1]


# Graph breaks. Results are those of the uncompiled call.


def breaks(f, *args):
    """Return the reasons of the graph breaks of a function, after comparing its results."""
    compiled = torch.compile(f, backend="aot_eager")
    expected = f(*args)
    for _ in range(2):
        torch.testing.assert_close(compiled(*args), expected, rtol=0, atol=0)
    return list(counters["graph_break"].elements())


def test_a_mask_that_is_not_prepared():
    x = [t.detach() for t in qkv(0)]
    mask = document_mask(0)[:]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Call block_mask.prepare\(\)"):
        torch.compile(masked, fullgraph=True, backend="eager")(*x, mask)
    torch._dynamo.reset()
    found = breaks(masked, *x, mask)
    assert "is not prepared" in found[0]
    torch._dynamo.reset()
    assert torch.equal(torch.compile(masked, fullgraph=True, backend="eager")(*x, mask), masked(*x, mask))


def test_a_mask_of_torch():
    from torch.nn.attention.flex_attention import create_block_mask as torchs

    x, mask = qkv(0), torchs(mods.causal, None, None, T, T, device="cpu")
    assert not breaks(masked, *x, mask)
    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*x, mask), masked(*x, mask)
    assert torch.equal(found, expected)
    for a, b in zip(*(torch.autograd.grad(out.sum(), x) for out in (found, expected)), strict=True):
        assert torch.equal(a, b)


def test_masks_of_torch_of_any_lengths_and_changed_lists():
    from torch.nn.attention.flex_attention import create_block_mask as torchs

    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager", dynamic=True)
    for n, B, H in ((100, None, None), (170, 2, None), (300, None, 4)):
        q, mask = torch.randn(2, 4, n, 16), torchs(mods.causal, B, H, n, n, device="cpu")
        torch.testing.assert_close(compiled(q, q, q, mask), masked(q, q, q, mask))
    mask.full_kv_num_blocks.zero_()  # and only blocks of the diagonal are left
    mask.q_indices = mask.q_num_blocks = mask.full_q_indices = mask.full_q_num_blocks = None
    torch.testing.assert_close(compiled(q, q, q, mask), masked(q, q, q, mask))


def test_a_wrong_mask_of_torch():
    from torch.nn.attention.flex_attention import BlockMask

    count, index = torch.ones(1, 1, 1, dtype=torch.int32), torch.full((1, 1, 1, 1), 9, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(count, index, seq_lengths=(T, T), BLOCK_SIZE=T, compute_q_blocks=False)
    with pytest.raises(flexattn.FlexAttentionError, match="kv_indices"):
        torch.compile(masked, fullgraph=True, backend="eager")(*[t.detach() for t in qkv(0)], mask)


def test_a_mod_that_breaks_the_graph():
    def mod(score, b, h, q_idx, kv_idx):
        torch._dynamo.graph_break()
        return score * 2

    x = [t.detach() for t in qkv(0)]
    found = breaks(lambda q, k, v: flex_attention(q.sin(), k, v, mod, kernel_options={"BACKEND": "CPU"}), *x)
    assert any("Dynamo cannot trace a mod" in reason for reason in found)
    assert not any("lacks a private name" in reason for reason in found)


def test_a_mod_that_branches_on_a_value():
    def mod(score, b, h, q_idx, kv_idx):
        return score if q_idx > kv_idx else -score

    f = lambda q, k, v: flex_attention(q, k, v, mod)  # noqa: E731
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent branching"):
        torch.compile(f, fullgraph=True, backend="eager")(*qkv(0))
    torch._dynamo.reset()
    with pytest.raises(flexattn.FlexAttentionError, match=r"torch\.where"):
        torch.compile(f, backend="eager")(*qkv(0))


def assert_equal_compiled(f, *args):
    found = torch.compile(f, fullgraph=True, backend="aot_eager")(*args)
    assert torch.equal(found, f(*args))


TABLE = torch.rand(T)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, i, j: s * TABLE.sum().item(),
        lambda s, b, h, i, j: s + torch.gcd(i, j),
        lambda s, b, h, i, j: s + torch.rand(()),
        lambda s, b, h, i, j: s * 1j,
        lambda s, b, h, i, j: s + (TABLE * i).sum(),
        lambda s, b, h, i, j: s + TABLE,
        lambda s, b, h, i, j: s.softmax(-1),
    ],
    ids=["item", "operator", "random", "complex", "sum", "shape", "reduction"],
)
def test_errors_of_mods_name_the_line(mod):
    x = [t.detach() for t in qkv(0)]
    with pytest.raises(flexattn.FlexAttentionError) as uncompiled:
        flex_attention(*x, mod)
    line = f"{__file__}:{mod.__code__.co_firstlineno}"
    assert line in str(uncompiled.value)
    with pytest.raises(Exception, match=re.escape(line)):
        torch.compile(lambda q, k, v: flex_attention(q, k, v, mod), fullgraph=True, backend="aot_eager")(*x)


def test_a_mask_that_was_pickled():
    """As a worker of a DataLoader returns it."""
    compiled = torch.compile(lambda q, k, v, m: flex_attention(q, k, v, None, m), fullgraph=True, backend="aot_eager")
    for seed in range(3):
        mask = document_mask(seed)
        loaded = pickle.loads(pickle.dumps(mask))
        assert torch.equal(compiled(*qkv(0), loaded), flex_attention(*qkv(0), None, mask))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mask_mod", [
    lambda b, h, i, j: (i >= j) | (j < 3),
    lambda b, h, i, j: i // 16 == (j + 5).clamp(max=70) // 16,
    lambda b, h, i, j: torch.where(i > j, i * 0.5, 2.0) > 1.5,
])  # fmt: skip
def test_a_mask_with_literals_that_was_pickled(mask_mod):
    mask = create_block_mask(mask_mod, None, None, T, T, device="cpu")
    loaded = pickle.loads(pickle.dumps(mask))
    compiled = torch.compile(lambda q, k, v, m: flex_attention(q, k, v, None, m), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv(0), loaded), flex_attention(*qkv(0), None, mask))


def test_masks_that_were_built_in_inference_mode():
    doc, inputs = documents(0)[0], qkv(0)
    with torch.inference_mode():
        mask = create_block_mask(lambda b, h, i, j: doc[i] == doc[j], None, None, T, T, BLOCK_SIZE=32, device="cpu")
    f = lambda q, k, v: flex_attention(q, k, v, None, mask)  # noqa: E731
    out, expected = torch.compile(f, fullgraph=True, backend="aot_eager")(*inputs), f(*inputs)
    for x, y in zip(*(torch.autograd.grad(o.sum(), inputs) for o in (out, expected)), strict=True):
        assert torch.equal(x, y)


def test_lists_of_torch_that_change_in_inference_mode():
    """Others are converted once."""

    def f(q, k, v):
        return flex_attention(q, k, v, None, mask)

    with torch.inference_mode():
        x = [t.detach() for t in qkv(0)]
        mask = upstream.create_block_mask(mods.causal, None, None, T, T, device="cpu", BLOCK_SIZE=32)
        mask.q_indices = mask.q_num_blocks = mask.full_q_indices = mask.full_q_num_blocks = None
        for call in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
            before = call(*x)
            assert from_torch(mask) is from_torch(mask)
            mask.full_kv_num_blocks.zero_()
            assert not torch.equal(call(*x), before)
            mask.full_kv_num_blocks.copy_(torch.arange(T // 32))


class WithinDistance(nn.Module):
    """Attention within documents, at most `reach` apart."""

    def __init__(self, index: Any = None) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(T) // 20)
        self.reach = 9
        mask = create_block_mask(self.mask_mod, None, None, T, T, device="cpu", BLOCK_SIZE=16)
        self.mask = mask if index is None else mask[index].prepare()

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (self.ids[q_idx] == self.ids[kv_idx]) & ((q_idx - kv_idx).abs() <= self.reach)

    def forward(self, q, k, v):
        return flex_attention(q[:, :, : self.mask.seq_lengths[0]], k, v, None, self.mask)


ORIGINAL = WithinDistance()


def _in_place(module):
    module.ids.zero_()


def _rebound(module):
    module.ids = module.ids + 1


def _number(module):
    module.reach = 12


@pytest.mark.parametrize("change", [_in_place, _rebound, _number])
@pytest.mark.parametrize("make", [
    lambda: WithinDistance((slice(None), slice(None), slice(1, 3))),
    lambda: copy.deepcopy(WithinDistance()),
    lambda: copy.deepcopy(WithinDistance((slice(None), slice(None), 2))),
    lambda: copy.deepcopy(ORIGINAL),
], ids=["slice", "copy", "copy of a slice", "copy, as of a teacher"])  # fmt: skip
def test_slices_and_copies_are_not_stale(make, change):
    module = make()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv(0)), module(*qkv(0)))
    change(module)
    for call in (module, compiled):
        with pytest.raises(flexattn.errors.MutationError):
            call(*qkv(0))


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(T) // 20)
        self.register_buffer("shift", torch.zeros(1, dtype=torch.int64))
        self.mask = create_block_mask(self.mask_mod, None, None, T, T, device="cpu", BLOCK_SIZE=16)

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (self.ids + self.shift)[q_idx] == self.ids[kv_idx]

    def forward(self, q, k, v):
        return flex_attention(q, k, v, None, self.mask)


@pytest.mark.parametrize("copied", [lambda module: module, copy.deepcopy])
@pytest.mark.parametrize("forgets", [False, True])
def test_a_rebound_summand_of_what_the_mask_computes(copied, forgets):
    """On a GPU the computed values are not kept, so the mod itself is asked."""
    module = copied(Shifted())
    origin = Origin.of(module.mask._prepared.tensors[0])
    if forgets:
        origin._computed = (None,) * len(origin._computed)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(*qkv(0)), module(*qkv(0)))
    module.shift = module.shift + torch.arange(T)
    with pytest.raises(flexattn.errors.MutationError):
        compiled(*qkv(0))


def test_values_that_differ_in_the_last_bits_are_accepted_if_nothing_changed():
    ids = 1e6 + torch.arange(T) // 20
    mask = create_block_mask(lambda b, h, i, j: (ids + 0.0)[i] == (ids + 0.0)[j], None, None, T, T, device="cpu")
    origin = Origin.of(mask._prepared.tensors[0])
    origin._computed = tuple(x.nextafter(torch.tensor(torch.inf)) for x in origin._computed)
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, None, mask), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv(0)), flex_attention(*qkv(0), None, mask))


def test_only_the_length_of_a_tensor_is_read():
    ids = torch.arange(T)
    mask = create_block_mask(lambda b, h, i, j: (i < len(ids) - 3) & (i >= j), None, None, T, T, device="cpu")
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, None, mask), fullgraph=True, backend="aot_eager")
    expected = compiled(*qkv(0))
    ids.zero_()
    assert torch.equal(compiled(*qkv(0)), expected)


def test_dropout_with_a_mod_that_breaks_the_graph():
    """It draws one seed, as an uncompiled call."""

    def breaks(score, b, h, q_idx, kv_idx):
        torch._dynamo.graph_break()
        return score + 0.5 * (q_idx - kv_idx)

    def mod(score, b, h, q_idx, kv_idx):
        return score + 0.5 * (q_idx - kv_idx)

    x = [t.detach() for t in qkv(0)]  # of tensors with gradients torch warns at a break
    torch.manual_seed(0)
    expected = flex_attention(*x, mod, dropout_p=0.3), torch.get_rng_state()
    torch.manual_seed(0)
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, breaks, dropout_p=0.3), backend="aot_eager")
    torch.testing.assert_close(compiled(*x), expected[0])
    assert torch.equal(torch.get_rng_state(), expected[1])


def test_the_original_of_a_copy_may_change():
    original = WithinDistance()
    copied = copy.deepcopy(original)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    expected = compiled(*qkv(0))
    original.ids.zero_()
    assert torch.equal(compiled(*qkv(0)), expected)
    with pytest.raises(flexattn.errors.MutationError):
        torch.compile(original, fullgraph=True, backend="aot_eager")(*qkv(0))


def test_a_large_table_that_the_mask_computes_is_compared():
    ids, shift = torch.arange(70_000) // 20, torch.zeros(1, dtype=torch.int64)
    mask = create_block_mask(lambda b, h, i, j: (ids + shift)[i] == ids[j], None, None, T, T, device="cpu")
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, None, mask), fullgraph=True, backend="aot_eager")
    compiled(*qkv(0))
    shift = torch.ones(1, dtype=torch.int64)
    with pytest.raises(flexattn.errors.MutationError, match="other values"):
        compiled(*qkv(0))


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 0.1), (torch.float16, 0.01), (torch.float32, 1e-6)])
def test_small_values_that_the_mask_computes_are_compared(dtype, size):
    table, factor = (torch.rand(T) * size).to(dtype), torch.ones(1, dtype=dtype)
    mask = create_block_mask(lambda b, h, i, j: (table * factor)[i] >= size / 2, None, None, T, T, device="cpu")
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, None, mask), fullgraph=True, backend="aot_eager")
    compiled(*qkv(0))
    factor = torch.full((1,), 0.9, dtype=dtype)
    with pytest.raises(flexattn.errors.MutationError, match="other values"):
        compiled(*qkv(0))


@pytest.mark.parametrize(("first", "dtype"), [(128, torch.bfloat16), (1e6, torch.float32)])
def test_values_that_differ_in_the_last_bits_are_compared(first, dtype):
    """Inductor's results may differ by as much, so closeness alone cannot decide."""
    ids = (first + torch.arange(T) // (T // 2)).to(dtype)
    mask = create_block_mask(lambda b, h, i, j: (ids + 0.0)[i] == (ids + 0.0)[j], None, None, T, T, device="cpu")
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, None, mask), fullgraph=True, backend="aot_eager")
    compiled(*qkv(0))
    ids = torch.full_like(ids, first)
    with pytest.raises(flexattn.errors.MutationError):
        compiled(*qkv(0))


def test_masks_of_floats_in_a_module():
    """What a mask was built from is not a constant of the graph."""

    class Held(nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, None, self.mask)

    held, x = Held(), qkv(0)
    compiled = torch.compile(held, fullgraph=True, backend="aot_eager")
    for n in range(1, 12):
        keep = (lambda x: lambda b, h, i, j: (i - j).float() < x)(n + 0.5)
        held.mask = create_block_mask(keep, None, None, T, T, device="cpu")
        assert torch.equal(compiled(*x), held(*x))
    assert counters["stats"]["unique_graphs"] == 2


def test_kernel_options_that_change():
    compiled = torch.compile(
        lambda q, k, v, o: flex_attention(q, k, v, kernel_options=o), fullgraph=True, backend="aot_eager"
    )
    for size in (32, 64, 128):
        assert torch.equal(
            compiled(*qkv(0), {"BLOCK_M": size}), flex_attention(*qkv(0), kernel_options={"BLOCK_M": size})
        )


VALUES_OF_FLOATS = {
    "power": lambda s, a: s * a**2,
    "root": lambda s, a: s * a**0.5,
    "minimum": lambda s, a: s * min(a, 0.35),
    "int": lambda s, a: s * int(a * 10),
    "round": lambda s, a: s * round(a, 1),
    "quotient": lambda s, a: s * (a // 0.1) + a,
}


@pytest.mark.parametrize("name", VALUES_OF_FLOATS)
def test_floats_whose_values_a_mod_needs(name):
    """One compilation for each value."""
    mod = VALUES_OF_FLOATS[name]

    def f(q, k, v, a):
        return flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: mod(s, a) * (q_idx * a > 3))

    given = [((*x, n), x) for n in (0.3, 0.4, 0.5, 0.3) for x in [qkv(3)]]
    assert compilations(f, given) == [1, 2, 3, 3]


@pytest.mark.parametrize(("name", "number"), [("scale", 1 / np.sqrt(D)), ("sink", np.float64(0.5))])
def test_numbers_of_numpy(name, number):
    """Also as the result of a mod."""
    assert_equal_compiled(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: number), *qkv(0))
    assert_equal_compiled(lambda q, k, v: flex_attention(q, k, v, **{name: number}), *qkv(0))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("scale", True),
        ("scale", float("nan")),
        ("sink", True),
        ("sink", float("nan")),
        ("dropout_p", 2),
    ],
)
def test_numbers_are_checked(name, number):
    f = lambda q, k, v: flex_attention(q, k, v, **{name: number})  # noqa: E731
    with pytest.raises(flexattn.FlexAttentionError, match=f"{name}: found"):
        f(*qkv(0))
    with pytest.raises(Exception, match=f"{name}: found"):
        torch.compile(f, fullgraph=True, backend="aot_eager")(*qkv(0))


@pytest.mark.parametrize(
    ("wrong", "found"),
    [({"is_causal": True}, "no such keyword argument"), ({"block_mask": torch.ones(2, 2)}, "is not a BlockMask")],
)
def test_arguments_of_other_functions(wrong, found):
    f = lambda q, k, v: flex_attention(q, k, v, **wrong)  # noqa: E731
    with pytest.raises(torch._dynamo.exc.Unsupported, match=found):
        torch.compile(f, fullgraph=True, backend="eager")(*qkv(0))
    torch._dynamo.reset()
    with pytest.raises(flexattn.FlexAttentionError, match="create_block_mask"):
        torch.compile(f, backend="eager")(*qkv(0))


@pytest.mark.parametrize("kind", ["score", "mask"])
def test_a_mod_without_a_result(kind):
    def mod(*indices):
        pass

    def f(q, k, v):
        if kind == "score":
            return flex_attention(q, k, v, mod)
        cu = torch.tensor([0, 7, q.size(2)], dtype=torch.int32)
        return flexattn.varlen_attn(q[0].mT, k[0].mT, v[0].mT, cu, cu, 99, 99, mask_mod=mod)

    with pytest.raises(Exception, match=rf"{kind}_mod: found a result of type NoneType"):
        torch.compile(f, fullgraph=True, backend="eager")(*qkv(0))


def test_a_version_of_torch_without_the_private_names(monkeypatch):
    from flexattn.torch_compile import higher_order

    monkeypatch.setattr(higher_order, "HOP", None)
    x = [t.detach() for t in qkv(0)]
    found = breaks(lambda q, k, v: flex_attention(q.sin(), k, v, mods.alibi(H)).cos(), *x)
    assert found and all("lacks a private name" in reason for reason in found)


def test_calls_with_sequences_and_a_version_of_torch_without_the_private_names(monkeypatch):
    from flexattn.torch_compile import higher_order

    monkeypatch.setattr(higher_order, "HOP", None)
    x, used = [t.detach() for t in qkv(0)], torch.tensor([T // 2, 7], dtype=torch.int32)
    found = breaks(lambda q, k, v: flex_attention(q.sin(), k, v, seqused_k=used).cos(), *x)
    rows, cu = [t[0].transpose(0, 1) for t in x], torch.tensor([0, 7, T], dtype=torch.int32)
    counters.clear()
    others = breaks(lambda q, k, v: flexattn.varlen_attn(q.sin(), k, v, cu, cu, T, T).cos(), *rows)
    assert found and others and all("lacks a private name" in reason for reason in (*found, *others))
