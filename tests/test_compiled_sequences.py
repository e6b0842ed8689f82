"""varlen_attn, and flex_attention with lengths, positions and pages, in torch.compile and other graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import pytest
import torch
from packed_cases import CASES, PackedCase, integers
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flexattn
from flexattn import AuxRequest, create_block_mask, flex_attention, mods, varlen_attn
from flexattn.call.varlen.arguments import PackedArguments
from flexattn.torch_compile.sequences import list_rows, pack_rows

H, D = 4, 16
LSE = AuxRequest(lse=True)
Step = tuple[tuple[Any, ...], list[Tensor]]  # arguments, and the tensors whose gradients are compared


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(call: Callable[..., Any], args: tuple[Any, ...], learned: list[Tensor]) -> list[Tensor]:
    """Return the outputs of a call and the gradients of tensors."""
    for x in learned:
        x.grad = None
    torch.manual_seed(0)
    found = call(*args)
    outs = list(found) if isinstance(found, tuple) else [found]
    if learned:
        sum(torch.where(o.isfinite(), o, 0.0).square().sum() for o in outs).backward()
    return [o.detach() for o in outs] + [x.grad.clone() for x in learned]


def compilations(
    f: Callable[..., Any], given: Iterable[Step], backend: str = "aot_eager", dynamic: bool | None = None
) -> list[int]:
    """Compare a function compiled and not, bitwise. Return how often it was compiled after each step."""
    compiled = torch.compile(f, fullgraph=True, backend=backend, dynamic=dynamic)
    counts = []
    for args, learned in given:
        found, expected = run(compiled, args, learned), run(f, args, learned)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y) or torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
        counts.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    return counts


def ends(*lengths: int) -> Tensor:
    return integers(0, *accumulate(lengths))


def rows(count: int, heads: int = H, seed: int = 0) -> Tensor:
    return torch.randn(count, heads, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def packed(*lengths: int, kv: tuple[int, ...] | None = None) -> Step:
    """Return query, key, value, the ends of sequences and the longest lengths."""
    others = kv or lengths
    x = [rows(sum(lengths)), rows(sum(others), 2, 1), rows(sum(others), 2, 2)]
    return (*x, ends(*lengths), ends(*others), max(lengths), max(others)), x


# Packed sequences.


@pytest.mark.parametrize("name", CASES)
def test_packed(name):
    """Each case of the tests of varlen_attn, with gradients."""
    case: PackedCase = CASES[name]
    x = case.tensors()
    assert compilations(case.run, [(x, list(x))] * 2) == [1, 1]


def plain(q, k, v, cu_q, cu_k, max_q, max_k):
    return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, enable_gqa=True, window_size=(-1, 0), return_aux=LSE)


def test_other_sequences_of_the_same_sizes():
    steps = [packed(*x) for x in ((40, 60, 30), (60, 10, 60), (60, 60, 10), (0, 60, 70))]
    steps = [((*args[:5], 70, 70), x) for args, x in steps]
    assert compilations(plain, steps) == [1] * 4


def test_other_sizes():
    steps = [packed(*x) for x in ((40, 60, 30), (61, 10, 50, 7), (1, 1), (200, 3, 5), (90,) * 7)]
    assert compilations(plain, steps) == [1, 2, 2, 2, 2]


def test_dynamic_shapes():
    lengths = ((40, 60), (70, 72)), ((60, 10, 50, 7), (1, 2, 3, 4)), ((5,) * 6, (200,) * 6)
    steps = [packed(*x, kv=y) for x, y in lengths]
    assert compilations(plain, steps, dynamic=True) == [1] * 3


def test_other_keys_than_queries():
    lengths = ((40, 60), (50, 70)), ((7, 9, 11), (30, 0, 91)), ((64, 1, 1, 3), (90, 200, 5, 5))
    steps = [packed(*x, kv=y) for x, y in lengths]
    assert compilations(plain, steps) == [1, 2, 2]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, H))
        self.sink = nn.Parameter(torch.linspace(-1, 1, H))
        self.stride = 3

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[h] * (q_idx - kv_idx).abs() * (b + 1)

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & ((kv_idx % self.stride != 1) | (h == 0))

    def forward(self, q, k, v, cu_q, cu_k, max_q, max_k):
        return varlen_attn(
            q, k, v, cu_q, cu_k, max_q, max_k, enable_gqa=True, score_mod=self.score_mod, mask_mod=self.mask_mod,
            sink=self.sink, return_aux=LSE,
        )  # fmt: skip


def test_mods_with_parameters_and_numbers():
    layer, steps = Layer(), [packed(*x) for x in ((40, 60), (30, 9, 80), (5, 6, 7))]
    learned = [(args, [*x, *layer.parameters()]) for args, x in steps]
    assert compilations(layer, learned) == [1, 2, 2]
    layer.stride = 4
    assert compilations(layer, learned)[-1] <= 5


def with_closures(q, k, v, cu_q, cu_k, max_q, max_k, table, limit, factor):
    return varlen_attn(
        q, k, v, cu_q, cu_k, max_q, max_k, enable_gqa=True,
        score_mod=lambda s, b, h, i, j: s * factor + table[h, i],
        mask_mod=lambda b, h, i, j: i - j < limit,
    )  # fmt: skip


def test_closures_and_numbers_that_change():
    def steps() -> Iterable[Step]:
        for i in range(4):
            args, x = packed(40, 60, 30)
            table = torch.randn(H, 60).requires_grad_()
            yield (*args, table, 10 + i, 0.5 + i), [*x, table]

    assert compilations(with_closures, steps()) == [1, 2, 2, 2]


def test_dropout():
    def f(q, k, v, cu_q, cu_k, max_q, max_k):
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, enable_gqa=True, dropout_p=0.25, return_aux=LSE)

    assert compilations(f, [packed(40, 60), packed(30, 70)]) == [1, 2]


def test_without_gradients():
    args, _ = packed(40, 60, 30)
    x = tuple(t.detach() if t.is_floating_point() else t for t in args[:5])
    assert compilations(plain, [((*x, 60, 60), [])]) == [1]


def test_autocast():
    def f(*args):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(*args)

    assert compilations(f, [packed(40, 60, 30)]) == [1]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_backends(backend):
    assert compilations(plain, [packed(40, 60), packed(30, 20, 9)], backend) == [1, 2]


def model(q, k, v, lengths, longest):
    """Ends that the graph computes, and two sets of them."""
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    first = varlen_attn(q, k, v, cu, cu, longest, longest)
    other = torch.cat([lengths.new_zeros(1), lengths.flip(0).cumsum(0)]).int()
    second = varlen_attn(first, k, v, other, other, longest, longest)
    return varlen_attn(second, k, v, cu, cu, longest, longest)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_ends_that_a_graph_computes(backend):
    x = [rows(100), rows(100), rows(100)]
    steps = [((*x, torch.tensor(n), 70), x) for n in ((40, 60), (30, 70), (65, 35))]
    assert compilations(model, steps, backend) == [1] * 3


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_length_that_a_graph_reads():
    def f(q, k, v, cu):
        longest = cu.diff().max().item()
        torch._check(longest >= 0)
        return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))

    x = [rows(100), rows(100), rows(100)]
    assert compilations(f, [((*x, ends(*n)), x) for n in ((40, 60), (30, 70))]) == [1, 1]


def test_layers_share_what_describes_the_sequences():
    graphs = []

    def record(graph: Any, _: Any) -> Any:
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition as partition

    backend = aot_autograd(fw_compiler=record, bw_compiler=record, partition_fn=partition)
    args, _ = packed(40, 60)

    def layers(q, *rest):
        for _ in range(3):
            q = varlen_attn(q, *rest, enable_gqa=True)
        return q

    torch.compile(layers, fullgraph=True, backend=backend)(*args).sum().backward()
    forward, backward = graphs
    assert forward.count("flexattn.pack_rows.default") == 1 and forward.count("flexattn.list_rows.default") == 1
    assert forward.count("flexattn.forward.default") == 3 and backward.count("flexattn.backward.default") == 3
    assert not any("rows" in name for name in backward)


def test_wrong_sequences_raise():
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    args, _ = packed(40, 60)
    compiled(*args)
    with pytest.raises(flexattn.FlexAttentionError, match="cu_seq_q: found"):
        compiled(*args[:3], integers(0, 70, 60), *args[4:])
    with pytest.raises(flexattn.FlexAttentionError, match="max_q: found"):
        compiled(*args[:5], 7, 60)
    for changes, text in (
        ({"window_size": (-5, 0)}, "window_size"), ({"max_q": -1}, "max_q"),
        ({"cu_seq_q": ends(100).long()}, "cu_seq_q"),
        ({"query": args[0].detach()[None]}, "query"),
    ):  # fmt: skip
        torch._dynamo.reset()
        given = dict(zip(("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"), args, strict=True))
        with pytest.raises(Exception, match=f"{text}: found"):
            torch.compile(varlen_attn, fullgraph=True, backend="aot_eager")(**(given | {"enable_gqa": True} | changes))


def test_varlen_attn_out():
    args, _ = packed(40, 60)

    def f(out, *args):
        flexattn.varlen.varlen_attn_out(out, *args, enable_gqa=True)
        return out.clone()

    compilations(f, [((torch.empty(100, H, D), *args), [])])


def padded(q, k, v, cu, used, max_q, **options):
    return varlen_attn(q, k, v, cu, None, max_q, 50, seqused_k=used, enable_gqa=True, return_aux=LSE, **options)


PADDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"window_size": (-1, 0)},
    "mods": {"mask_mod": mods.causal, "score_mod": mods.alibi(H), "window_size": (20, 5)},
    "invariant": {"num_splits": 1, "window_size": (-1, 0)},
}


@pytest.mark.parametrize("name", PADDED)
def test_a_row_of_keys_for_each_sequence(name):
    def steps() -> Iterable[Step]:
        for lengths in ((5, 1, 9), (2, 2, 8), (3, 3, 3), (7, 1, 1)):
            x = [rows(sum(lengths)), *(torch.randn(3, 50, 2, D).requires_grad_() for _ in range(2))]
            yield (*x, ends(*lengths), integers(50, *lengths[1:]), max(lengths)), x

    assert compilations(lambda *args: padded(*args, **PADDED[name]), steps())[-1] <= 3


def test_decoding_steps_of_varlen_attn():
    """One query per sequence, with pages."""
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    pages = [torch.randn(12, 16, 2, D) for _ in range(2)]
    q, cu, used = rows(3).detach(), ends(1, 1, 1), integers(5, 40, 64)

    def f(q, used, table):
        return varlen_attn(
            q, *pages, cu, None, 1, 64, seqused_k=used, block_table=table, enable_gqa=True, window_size=(-1, 0)
        )  # fmt: skip

    steps = [((q, used - i, table.flip(i % 2)), []) for i in range(4)]
    assert compilations(f, steps) == [1] * 4


def test_batch_invariant_packed():
    def f(*args):
        return varlen_attn(*args, enable_gqa=True, num_splits=1, window_size=(-1, 0))

    assert compilations(f, [packed(40, 60), packed(30, 70, 5), packed(3, 70, 50)])[-1] <= 2


# Layouts.

B, N = 3, 96


def cache(seed: int = 0, heads: int = 2, batch: int = B) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, N, D, generator=generator) for _ in range(2)]


def query(M: int = 1, seed: int = 1) -> Tensor:
    return torch.randn(B, H, M, D, generator=torch.Generator().manual_seed(seed))


def window_mask() -> flexattn.BlockMask:
    return create_block_mask(mods.sliding_window(40), None, None, N, N, BLOCK_SIZE=32, device="cpu")


def document_mask() -> flexattn.BlockMask:
    ids = torch.arange(N) // 20
    return create_block_mask(mods.document_causal(ids), None, None, N, N, BLOCK_SIZE=32, device="cpu")


class Decoding(nn.Module):
    """A step whose cache and mask are held by the module."""

    def __init__(self, mask: Any = None, score_mod: Any = None, **options: Any) -> None:
        super().__init__()
        self.mask, self.score_mod, self.options = mask, score_mod, options
        key, value = cache()
        self.register_buffer("key", key)
        self.register_buffer("value", value)

    def forward(self, q, **layout):
        return flex_attention(
            q, self.key, self.value, self.score_mod, self.mask, enable_gqa=True, return_aux=LSE, **self.options,
            **layout,
        )[0]  # fmt: skip


def torch_mask() -> Any:
    from torch.nn.attention import flex_attention as upstream

    return upstream.create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j < 40), None, None, N, N, BLOCK_SIZE=32, device="cpu"
    )


def mask_by_hand() -> flexattn.BlockMask:
    mask = window_mask()
    return flexattn.BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=32,
        mask_mod=mods.causal, seq_lengths=(N, N),
    ).prepare()  # fmt: skip


MODULES: dict[str, Callable[[], Decoding]] = {
    "plain": Decoding,
    "mods": lambda: Decoding(window_mask(), mods.alibi(H)),
    "documents": lambda: Decoding(document_mask()),
    "a mask of torch": lambda: Decoding(torch_mask()),
    "lists by hand": lambda: Decoding(mask_by_hand()),
    "sink": lambda: Decoding(None, None, sink=torch.linspace(-1, 1, H)),
}


@pytest.mark.parametrize("M", [1, 5])
@pytest.mark.parametrize("name", MODULES)
def test_lengths_that_change_in_place(name, M):
    module, used, offsets = MODULES[name](), integers(50, 10, 30), integers(45, 5, 25)
    with_offsets = name != "sink"

    def steps() -> Iterable[Step]:
        for i in range(4):
            used.add_(M)
            offsets.add_(M)
            yield (query(M, i), used, offsets), []

    def f(q, used, offsets):
        return module(q, seqused_k=used, **({"q_offsets": offsets} if with_offsets else {}))

    assert compilations(f, steps()) == [1] * 4


def test_a_cache_that_a_graph_changes():
    """The step appends its key and advances the lengths."""

    def f(q, key, value, used, token):
        where = used.long()
        key = key.index_put((torch.arange(B)[:, None], torch.arange(2), where[:, None]), token)
        offsets = used.clone()
        used.add_(1)
        return flex_attention(q, key, value, mods.alibi(H), enable_gqa=True, seqused_k=used, q_offsets=offsets)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    lengths = [integers(5, 6, 50) for _ in range(2)]
    for i in range(3):
        args = query(1, i), *cache(), 0, torch.randn(B, 2, D)
        found, expected = (g(*args[:3], used, args[4]) for g, used in zip((compiled, f), lengths, strict=True))
        assert torch.equal(found, expected) and torch.equal(*lengths)
    assert counters["stats"]["unique_graphs"] == 1


def test_dynamic_decoding():
    def f(q, k, v, used):
        return flex_attention(q, k, v, enable_gqa=True, seqused_k=used)

    def steps() -> Iterable[Step]:
        for batch, length in ((3, 96), (2, 64), (5, 200), (7, 33)):
            q, k, v = torch.randn(batch, H, 1, D), *(torch.randn(batch, 2, length, D) for _ in range(2))
            yield (q, k, v, torch.arange(1, batch + 1, dtype=torch.int32)), []

    assert compilations(f, steps()) == [1, 2, 2, 2]


def ring(shared: bool) -> Tensor:
    positions = (torch.arange(N) + 64 - N) % 128
    return positions.where(positions < 120, -1).int()[None].expand(1 if shared else B, N).contiguous()


@pytest.mark.parametrize("shared", [True, False])
def test_a_ring_buffer(shared):
    def f(q, k, v, positions, offsets, mask):
        return flex_attention(
            q, k, v, mods.alibi(H), mask, enable_gqa=True, kv_positions=positions, q_offsets=offsets
        )  # fmt: skip

    mask = create_block_mask(mods.sliding_window(40), None, None, 200, 200, device="cpu")
    steps = [((query(2, i), *cache(i), ring(shared) + i, integers(70, 80, 90), mask), []) for i in range(3)]
    assert compilations(f, steps) == [1] * 3


def pages(layout: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shape = (8, 16, 2, D) if layout == "NHD" else (8, 2, 16, D)
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("masked", [True, False])
def test_pages(layout, masked):
    mask = create_block_mask(mods.sliding_window(20), None, None, 48, 48, device="cpu") if masked else None

    def f(q, k, v, table, used, offsets):
        return flex_attention(
            q, k, v, mods.alibi(H), mask, enable_gqa=True, block_table=table, seqused_k=used, q_offsets=offsets,
            kv_layout=layout,
        )  # fmt: skip

    def steps() -> Iterable[Step]:
        for i in range(4):
            table = torch.randperm(8, generator=torch.Generator().manual_seed(i))[:6].view(1, 6).int()
            table = torch.cat([table[:, :3], table[:, 3:], table[:, :3]])
            yield (query(1, i), *pages(layout), table, integers(48, 17 + i, 1 + i), integers(47, 16 + i, i)), []

    assert compilations(f, steps()) == [1] * 4


@pytest.mark.parametrize("paged", [True, False])
def test_gradients(paged):
    def f(q, k, v, bias, used, table):
        layout = {"block_table": table} if paged else {}
        return flex_attention(
            q, k, v, lambda s, b, h, i, j: s + bias[h] * j, enable_gqa=True, seqused_k=used, return_aux=LSE, **layout
        )[0]  # fmt: skip

    def steps() -> Iterable[Step]:
        for i in range(3):
            stored = pages("NHD") if paged else cache(i)
            x = [t.requires_grad_() for t in (query(3, i), *stored, torch.randn(H))]
            yield (*x, integers(48, 17 + i, 1), torch.tensor([[0, 1, 2], [3, 4, 5], [0, 6, 7]]).int()), x

    assert compilations(f, steps()) == [1] * 3


@pytest.mark.parametrize("by_page", [True, False])
def test_float8(by_page):
    descale = torch.rand(8, 2) if by_page else torch.rand(2)

    def f(q, k, v, descale, used, table):
        return flex_attention(
            q, k, v, enable_gqa=True, seqused_k=used, block_table=table, k_descale=descale, v_descale=descale
        )  # fmt: skip

    table = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 6, 7]]).int()
    stored = pages("NHD", torch.float8_e4m3fn)
    steps = [((query(1, i), *stored, descale * (i + 1), integers(48, 17, 1), table), []) for i in range(3)]
    assert compilations(f, steps) == [1] * 3


@pytest.mark.parametrize("learned", [("query", "descale"), ("descale",)])
def test_descales_that_require_a_gradient_are_errors(learned):
    q, k, v = query(1, 0).requires_grad_("query" in learned), *pages("NHD", torch.float8_e4m3fn)
    table, used = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 6, 7]]).int(), integers(48, 17, 1)

    def f(q, descale):
        scales = {"k_descale": descale * 1.0, "v_descale": torch.ones(2)}
        return flex_attention(q, k, v, enable_gqa=True, seqused_k=used, block_table=table, **scales)

    for call in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        with pytest.raises(Exception, match="k_descale: found a tensor that requires a gradient"):
            call(q, torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_backends_of_layouts(backend):
    module, used = Decoding(window_mask(), mods.alibi(H)), integers(50, 10, 30)
    steps = [((query(1, i), used + i), []) for i in range(3)]
    assert compilations(lambda q, used: module(q, seqused_k=used, q_offsets=used - 1), steps, backend) == [1] * 3


def test_wrong_layouts_raise():
    module = Decoding(window_mask())
    compiled = torch.compile(lambda q, **layout: module(q, **layout), fullgraph=True, backend="aot_eager")
    compiled(query(), seqused_k=integers(1, 2, 3), q_offsets=integers(0, 1, 2))
    with pytest.raises(flexattn.FlexAttentionError, match="seqused_k: found"):
        compiled(query(), seqused_k=integers(1, 2, 300), q_offsets=integers(0, 1, 2))
    with pytest.raises(flexattn.FlexAttentionError, match="q_offsets: found"):
        compiled(query(), seqused_k=integers(1, 2, 3), q_offsets=integers(0, 1, 200))
    for layout, text in (
        ({"seqused_k": integers(1, 2)}, "seqused_k"), ({"seqused_k": integers(1, 2, 3).long()}, "seqused_k"),
        ({"kv_layout": "HND"}, "kv_layout"), ({"k_descale": torch.ones(2)}, "k_descale"),
    ):  # fmt: skip
        torch._dynamo.reset()
        with pytest.raises(Exception, match=f"{text}: found"):
            compiled(query(), **layout)


def test_a_mod_that_breaks_the_graph():
    def score_mod(score, b, h, q_idx, kv_idx):
        torch._dynamo.graph_break()
        return score * 2

    def f(q, k, v, used):
        return flex_attention(q.sin(), k, v, score_mod, enable_gqa=True, seqused_k=used).cos()

    def g(q, k, v, cu):
        q, k, v = q.detach(), k.detach(), v.detach()
        return varlen_attn(q.sin(), k, v, cu, cu, 60, 60, enable_gqa=True, score_mod=score_mod).cos()

    args, _ = packed(40, 60)
    for h, given in ((f, (query(), *cache(), integers(1, 2, 90))), (g, args[:4])):
        assert torch.equal(torch.compile(h, backend="aot_eager")(*given), h(*given))
    assert counters["graph_break"]


def test_nested_tensors_break_the_graph_with_a_reason():
    def f(rows, offsets):
        x = torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)
        return flex_attention(x, x, x, mods.alibi(H)).values()

    args = rows(100).detach(), torch.tensor([0, 40, 100])
    assert torch.equal(torch.compile(f, backend="aot_eager")(*args), f(*args))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="with nested tensors is one graph break"):
        torch.compile(f, backend="aot_eager", fullgraph=True)(*args)


# Other graphs.


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode):
    def f(q, k, v, cu_q, cu_k):
        return varlen_attn(q, k, v, cu_q, cu_k, 60, 60, enable_gqa=True, window_size=(-1, 0), mask_mod=mods.causal)

    args, _ = packed(40, 60, 30)
    x = [t.detach() for t in args[:5]]
    graph = make_fx(f, tracing_mode=mode)(*x)
    other = [t.detach() for t in packed(50, 30, 50)[0][:5]]
    assert torch.equal(graph(*other), f(*other))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_of_a_layout(mode):
    mask = window_mask() if mode == "real" else None  # otherwise its lists have no values

    def f(q, k, v, used, offsets):
        return flex_attention(q, k, v, mods.alibi(H), mask, enable_gqa=True, seqused_k=used, q_offsets=offsets)

    graph = make_fx(f, tracing_mode=mode)(query(), *cache(), integers(1, 2, 3), integers(0, 1, 2))
    other = query(1, 5), *cache(3), integers(70, 20, 3), integers(69, 1, 2)
    assert torch.equal(graph(*other), f(*other))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, H))

    def forward(self, q, k, v, cu):
        longest = q.size(0)
        return varlen_attn(
            q, k, v, cu, cu, longest, longest, enable_gqa=True, score_mod=lambda s, b, h, i, j: s + self.bias[h] * j
        )  # fmt: skip


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    module, length = Packed(), torch.export.Dim("length", min=2, max=4096)
    args, _ = packed(40, 60, 30)
    x = tuple(t.detach() for t in args[:4])
    shapes = ({0: length},) * 3
    program = torch.export.export(module, x, dynamic_shapes=(*shapes, None), strict=strict)
    other = tuple(t.detach() for t in packed(9, 60, 77)[0][:4])
    assert torch.equal(program.module()(*other), module(*other))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11
@pytest.mark.parametrize("strict", [True, False])
def test_export_of_a_decoding_step(strict, tmp_path):
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoding = Decoding(window_mask(), mods.alibi(H))

        def forward(self, q, used, offsets):
            return self.decoding(q, seqused_k=used, q_offsets=offsets)

    module = Step()
    program = torch.export.export(module, (query(), integers(1, 2, 3), integers(0, 1, 2)), strict=strict)
    torch.export.save(program, tmp_path / "step.pt2")
    other = query(1, 5), integers(70, 20, 3), integers(69, 1, 2)
    assert torch.equal(torch.export.load(tmp_path / "step.pt2").module()(*other), module(*other))


def test_fake_tensors():
    with FakeTensorMode():
        x = [torch.randn(100, H, D, requires_grad=True) for _ in range(3)]
        cu = torch.zeros(4, dtype=torch.int32)
        out, lse = varlen_attn(*x, cu, cu, 60, 60, window_size=(-1, 0), return_aux=LSE)
        out.sum().backward()
        used = torch.zeros(B, dtype=torch.int32)
        step = flex_attention(torch.randn(B, H, 1, D), *(torch.randn(B, H, N, D) for _ in range(2)), seqused_k=used)
    assert out.shape == x[0].shape and lse.shape == (H, 100) and x[0].grad.shape == x[0].shape
    assert step.shape == (B, H, 1, D)


def test_opcheck():
    cu = ends(40, 60, 30)
    given = cu, cu, None, None, 130, 130, 60, 60
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.flexattn.pack_rows.default, given, test_utils=utils)
    columns = pack_rows(PackedArguments(cu, cu, 60, 60), 130, 130)
    from flexattn.torch_compile.sequence_form import SequenceForm
    from flexattn.torch_compile.spec import Spec

    text = Spec(sequences=SequenceForm(("cu_seq_q", "cu_seq_k"), (-1, 0))).dumps()
    arguments = columns, [], [], [], 130, 130, H, 60, True, text
    torch.library.opcheck(torch.ops.flexattn.list_rows.default, arguments, test_utils=utils)
    assert len(list_rows(columns, [], [], [], (130, 130, H, 60), False, text)) == 5


@pytest.mark.parametrize("M", [16, 2048])
def test_short_queries_of_long_keys(M: int) -> None:
    """Whether a backward takes keys in order depends on both lengths, in the lists and where they are read."""
    cu_q, cu_k = (torch.arange(0, 5 * n, n, dtype=torch.int32) for n in (M, 1024))
    query, key = torch.randn(4 * M, 1, 8), torch.randn(4096, 1, 8)
    given = [x.requires_grad_() for x in (query, key, key.clone())]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = varlen_attn(query, key, value, cu_q, cu_k, M, 1024)
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(f(*given).square().sum(), given) for f in (attend, compiled)]
    assert all(map(torch.equal, *results))
