"""ModGraph and Builder: sharing, folding, keys, evaluation and the printed form."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, rewrite, without_unused
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import MASK_INPUTS, SCORE_INPUTS, Capture, Const, Number, wide


def softcap(cap: float = 20.0, name: str = "softcap") -> ModGraph:
    builder = Builder()
    score = builder.input("score", torch.float32)
    bias = builder.load(0, torch.bfloat16, [builder.input("h", torch.int32)]).cast(torch.float32)
    gain = builder.number(0, torch.float64).cast(torch.float32)
    out = (score / cap).apply("tanh") * cap + bias * gain
    return builder.build(
        name, SCORE_INPUTS, (Capture("bias", torch.bfloat16, 1),), (Number("gain", torch.float64),), [out]
    )


def test_printed() -> None:
    assert_expected_inline(
        repr(softcap()),
        """\
def softcap(score, b, h, q_idx, kv_idx, bias: bf16[:], gain: float):
    t0 = bias[h]       # bf16
    t1 = f32(t0)       # f32
    t2 = f32(gain)     # f32
    t3 = score / 20.0  # f32
    t4 = tanh(t3)      # f32
    t5 = t4 * 20.0     # f32
    t6 = t1 * t2       # f32
    t7 = t5 + t6       # f32
    return t7""",
    )


def test_equal_nodes_are_shared_and_unused_ones_dropped() -> None:
    builder = Builder()
    q, k = builder.input("q_idx", torch.int32), builder.input("kv_idx", torch.int32)
    assert (q - k).index == (q - k).index
    assert (q - k).index != (k - q).index
    q * 3  # never used
    graph = builder.build("mod", MASK_INPUTS, (), (), [q >= k])
    assert [n.op for n in graph.nodes] == ["input", "input", "ge"]


def test_constants_fold_but_zero_times_a_float_does_not() -> None:
    builder = Builder()
    score, q = builder.input("score", torch.float32), builder.input("q_idx", torch.int32)
    three = builder.const(1, torch.int32) + 2
    assert three.constant == 3
    assert (score * 0.0).constant is None
    assert (q * 0).constant == 0
    assert (score + 0.0).index == (score * 1.0).index == score.apply("neg").apply("neg").index == score.index
    assert builder.const(0.1, torch.bfloat16).constant == torch.tensor(0.1, dtype=torch.bfloat16).item()
    assert builder.const(0.0, torch.float32).index != builder.const(-0.0, torch.float32).index
    assert builder.const(float("nan"), torch.float32).index == builder.const(float("nan"), torch.float32).index


def test_the_key_is_the_program() -> None:
    assert softcap() == softcap()
    assert hash(softcap()) == hash(softcap())
    assert len({softcap().key, softcap(30.0).key, softcap(name="other").key}) == 3
    graph = softcap()
    moved = ModGraph(graph.name, graph.inputs, graph.captures, graph.numbers, graph.nodes, graph.outputs, (), "x.py:1")
    assert moved.key == graph.key


def test_dependence() -> None:
    graph = softcap()
    assert graph.reads("score") and graph.reads("h")
    assert not graph.reads("q_idx")


def test_evaluation_broadcasts() -> None:
    bias = torch.tensor([0.5, -1.0, 2.0], dtype=torch.bfloat16)
    bound = BoundMod(softcap(), (bias,), (3.0,))
    score = torch.linspace(-30, 30, 8).reshape(1, 8)
    h = torch.arange(3, dtype=torch.int32)[:, None]
    zero = torch.zeros((), dtype=torch.int32)
    expected = 20.0 * torch.tanh(score / 20.0) + bias.float()[:, None] * 3.0
    torch.testing.assert_close(bound(score, zero, h, zero, zero), expected)


def test_rewrite_replaces_nodes() -> None:
    graph = softcap()

    def shifted(builder: Builder, i: int, _: list[Expr]) -> Expr | None:
        return builder.input("score", torch.float32) + 1.0 if graph.is_input(i, "score") else None

    composed = rewrite(graph, shifted)
    assert rewrite(graph, lambda *_: None) == graph
    bias, score, zero = torch.ones(1, dtype=torch.bfloat16), torch.randn(5), torch.zeros((), dtype=torch.int32)
    expected = BoundMod(graph, (bias,), (1.0,))(score + 1.0, zero, zero, zero, zero)
    torch.testing.assert_close(BoundMod(composed, (bias,), (1.0,))(score, zero, zero, zero, zero), expected)


def test_without_unused_renumbers_what_is_left() -> None:
    builder = Builder()
    first, _, third = (builder.load(i, torch.float32, ()) for i in range(3))
    shift = builder.number(1, torch.float64).cast(torch.float32)
    about = tuple(Capture(name, torch.float32, 0) for name in "xyz")
    numbers = (Number("n", torch.float64), Number("m", torch.float64))
    graph = builder.build("f", SCORE_INPUTS, about, numbers, [third + first + shift])
    kept, captures, positions = without_unused(graph)
    assert (captures, positions) == ((0, 2), (1,))
    assert (kept.captures, kept.numbers) == ((about[0], about[2]), (numbers[1],))
    x, y, z = torch.tensor(3.0), torch.tensor(5.0), torch.tensor(7.0)
    inputs = dict.fromkeys(SCORE_INPUTS, torch.zeros(()))
    assert (
        graph.evaluate(inputs, (x, y, z), (2.0, 4.0)) == kept.evaluate(inputs, (x, z), (4.0,)) == (torch.tensor(14.0),)
    )


def test_constants_are_equal_as_they_print() -> None:
    assert Const(0.0, torch.float32) != Const(-0.0, torch.float32)
    assert Const(1, torch.int32) != Const(True, torch.int32)
    assert Const(float("nan"), torch.float32) == Const(float("nan"), torch.float32)
    assert hash(Const(float("nan"), torch.float32)) == hash(Const(float("nan"), torch.float32))


def test_wide() -> None:
    assert wide(torch.bfloat16) == wide(torch.float16) == wide(torch.float8_e4m3fn) == torch.float32
    assert wide(torch.float64) == torch.float64
    assert wide(torch.int8) == torch.int8
