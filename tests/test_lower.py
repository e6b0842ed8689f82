"""lower: the Triton text of mods."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import TestCase

from flexattn import mods
from flexattn.compile.lower import Dialect, lower, lower_score
from flexattn.compile.mod_plan import CaptureLayout, ModPlan
from flexattn.compile.scatter import lower_scatter, lower_sizes, scatter_arguments, size_names
from flexattn.graph.builder import Builder
from flexattn.graph.differentiate import differentiate
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import GRAD_INPUTS, Capture, Const, Input, Number, Operation
from flexattn.trace.trace import trace

GPU = Dialect(ptx=True)


def mod_plan(mod: Callable[..., object], kind: str = "score", aligned: bool = False, wide: bool = False) -> ModPlan:
    bound = trace(mod, kind)
    layouts = tuple(CaptureLayout(aligned, aligned, wide) for _ in bound.captures)
    return ModPlan(bound.graph, kind, layouts, tuple("fp32" if isinstance(n, float) else "i32" for n in bound.numbers))


def gradient(plan: ModPlan, wrt: tuple[int, ...] = ()) -> ModPlan:
    return replace(plan, graph=differentiate(plan.graph, wrt))


class Goldens(TestCase):
    maxDiff = None

    def test_alibi(self):
        """Index differences are computed in float32, and the slope is loaded once."""
        plan = mod_plan(mods.alibi(torch.tensor([0.5, 0.25])), aligned=True)
        self.assertExpectedInline(
            lower_score(plan, "score_mod", GPU),
            """\
@triton.jit
def score_mod(score, sm_scale, b, h, q_idx, kv_idx, live, score_slopes_0_ptr, score_slopes_0_size0):
    t0 = LOG2E * sm_scale
    t1 = score * t0
    t2 = kv_idx.to(tl.float32)
    t3 = q_idx.to(tl.float32)
    t4 = t2 - t3
    t5 = tl.load(score_slopes_0_ptr + (h), mask=(h >= 0) & (h < score_slopes_0_size0), other=0)
    t6 = LOG2E * t5
    t7 = t4 * t6
    t8 = t1 + t7
    return t8
""",
        )

    def test_softcap(self):
        """Scale, cap and log2(e) are two factors, computed once. tanh is the hardware's approximation."""
        self.assertExpectedInline(
            lower_score(mod_plan(mods.softcap(30.0)), "score_mod", GPU),
            """\
@triton.jit
def score_mod(score, sm_scale, b, h, q_idx, kv_idx, live, score_cap_0):
    t0 = tl.cast(score_cap_0, tl.float32)
    t1 = sm_scale / (t0)
    t2 = score * t1
    t3 = fast_tanh(t2)
    t4 = LOG2E * t0
    t5 = t3 * t4
    return t5
""",
        )

    def test_softcap_gradient(self):
        self.assertExpectedInline(
            lower(gradient(mod_plan(mods.softcap(30.0))), "score_grad", GPU),
            """\
@triton.jit
def score_grad(grad, score, sm_scale, b, h, q_idx, kv_idx, live, score_cap_0):
    t0 = tl.cast(score_cap_0, tl.float32)
    t1 = sm_scale / (t0)
    t2 = score * t1
    t3 = fast_tanh(t2)
    t4 = t3 * t3
    t5 = 1.0 - t4
    t6 = grad * t5
    return t6
""",
        )

    def test_sliding_window(self):
        self.assertExpectedInline(
            lower(mod_plan(mods.sliding_window(5), "mask"), "mask_mod", GPU),
            """\
@triton.jit
def mask_mod(b, h, q_idx, kv_idx, live, mask_window_0):
    t0 = q_idx >= kv_idx
    t1 = q_idx - kv_idx
    t2 = tl.cast(mask_window_0, tl.int32)
    t3 = t1 < t2
    t4 = t0 & t3
    return t4
""",
        )


def test_dialects_choose_tanh():
    plan = mod_plan(mods.softcap(30.0))
    assert "fast_tanh" in lower_score(plan, "f", GPU)
    assert "libdevice.tanh" in lower_score(plan, "f", Dialect(exact=True, ptx=True))


@pytest.mark.parametrize(("value", "text"), [(-(2**63), "-9223372036854775808"), (True, "True")])
def test_a_constant_that_is_converted_twice_is_no_literal_with_a_method(value: float, text: str):
    """The bounds of a sum of 64-bit integers compare both the sum and its double."""
    graph = ModGraph(
        "f", ("b", "h", "q_idx", "kv_idx"), (), (),
        (
            Input("kv_idx", torch.int32), Const(value, torch.int64), Operation("cast", (1,), torch.int64),
            Operation("cast", (2,), torch.float64), Operation("lt", (3, 0), torch.bool),
        ),
        (4,),
    )  # fmt: skip
    found = lower(ModPlan(graph, "mask", (), ()), "f", GPU)
    assert f"tl.cast({text}, tl.float64)" in found
    ast.parse(found)


def test_long_lengths_use_integers():
    plan = mod_plan(lambda s, b, h, i, j: s + 0.5 * (i - j))
    assert "q_idx - kv_idx" not in lower_score(plan, "f", GPU)
    assert "q_idx - kv_idx" in lower_score(plan, "f", Dialect(ptx=True, float_index=False))


def test_addresses():
    table = torch.zeros(8, 8)
    mod = lambda s, b, h, i, j: s * table[i, j]  # noqa: E731
    aligned, any_stride = (lower_score(mod_plan(mod, aligned=a), "f", GPU) for a in (True, False))
    assert "_stride0 * 4" in aligned and "_stride1" not in aligned, "strides in units of 16 bytes, the last one 1"
    assert "_stride1" in any_stride and "_stride0 * 4" not in any_stride
    assert "tl.int64)" not in aligned.replace("pointers.to(tl.int64)", "")
    assert "tl.cast(q_idx, tl.int64)" in lower_score(mod_plan(mod, wide=True), "f", GPU)


def test_negative_indices_wrap_only_where_they_may_occur():
    table = torch.zeros(8)
    assert "tl.where(" in lower_score(mod_plan(lambda s, b, h, i, j: s * table[i - j]), "f", GPU)
    assert "< 0, " not in lower_score(mod_plan(lambda s, b, h, i, j: s * table[i + j]), "f", GPU)
    # The plan of the mod has what the lengths prove.
    plan = mod_plan(lambda s, b, h, i, j: s * table[i - j])
    (load,) = [n for n, node in enumerate(plan.graph.nodes) if node.op == "load"]
    proved = replace(plan, nonnegative=plan.graph.nodes[load].args, inside=(load,))
    assert "< 0, " not in lower_score(proved, "f", GPU)


def test_scatter_sums_before_it_adds():
    """A table by head takes one atomic add per tile, a table by row one per row."""
    table = torch.zeros(8, requires_grad=True)
    sums = []
    for mod in (
        lambda s, b, h, i, j: s * table[h], lambda s, b, h, i, j: s * table[i], lambda s, b, h, i, j: s * table[i * j],
    ):  # fmt: skip
        plan = gradient(mod_plan(mod), (0,))
        text = lower_scatter(plan, "scatter", GPU, "float")
        assert text.count("tl.atomic_add") == 1
        sums.append(text.partition("def scatter(")[2].count("tl.sum("))
        assert [kind for _, kind in scatter_arguments(plan, "float")] == ["*fp32"]
        integers = lower_scatter(plan, "scatter", GPU, "integer")
        assert integers.count("add_integers(") == 1 and "tl.atomic_add" not in integers
        assert [kind for _, kind in scatter_arguments(plan, "integer")] == ["*i64", "*fp32", "*i32"]
        assert "atomic" not in lower_sizes(plan, "sizes", GPU)
    assert sums == [2, 1, 0]


def test_names_of_captures_are_made_identifiers():
    class Holder:
        table = torch.zeros(4)

    holder = Holder()
    plan = mod_plan(lambda s, b, h, i, j: s * holder.table[h])
    assert all(name.isidentifier() for name in plan.argument_names())


@pytest.mark.parametrize(
    ("captures", "numbers"),
    [
        ({0: "a1", 10: "a"}, ()),
        ({0: "x"}, ("x0_size", "x_0_size", "size0", "x_0_ptr")),
        ({0: "x", 1: "x_0_grad", 2: "x_0", 3: "x_0_size"}, ("x", "x_0", "x_ptr")),
        ({0: "é", 1: "ü", 2: "_"}, ("ß", "_")),
    ],
    ids=str,
)
@pytest.mark.parametrize("sums", ("float", "integer", "sizes"))
def test_arguments_have_names_of_their_own_whatever_the_users_names_are(captures, numbers, sums):
    names = [captures.get(i, f"other{i}") for i in range(max(captures) + 1)]
    builder = Builder()
    indices = [builder.input(name, torch.int32) for name in ("q_idx", "kv_idx")]
    loads = [builder.load(i, torch.float32, indices) for i in range(len(names))]
    graph = builder.build(
        "mod", GRAD_INPUTS, tuple(Capture(n, torch.float32, 2) for n in names),
        tuple(Number(n, torch.float64) for n in numbers), [None, *loads], sites=loads,
    )  # fmt: skip
    layout = CaptureLayout(dense=False, aligned=False, wide=False)
    plan = ModPlan(graph, "score", (layout,) * len(names), ("fp32",) * len(numbers))
    of_mod = plan.argument_names()
    found = [*of_mod, *(name for name, _ in scatter_arguments(plan, sums)), *size_names(plan)]
    assert len(set(found)) == len(found) and all(name.isidentifier() for name in found)
    # A launch passes arguments that end in _ptr as tensors.
    assert sum(name.endswith("_ptr") for name in of_mod) == len(names)
