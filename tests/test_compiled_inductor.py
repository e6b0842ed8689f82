"""Code of Inductor calls functions of flexattn in place of its operators. Modes and profilers still see operators."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.graph  # it imports a name that a test removes
from torch import Tensor
from torch._inductor import config, lowering
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import is_cudagraph_unsafe_op, run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from flexattn import create_block_mask, flex_attention, mods
from flexattn.process.events import fallbacks, forget_fallbacks
from flexattn.torch_compile import inductor, operators
from flexattn.torch_compile.operators import OPS
from flexattn.torch_compile.spec import Spec

T = 96
MASK = create_block_mask(mods.document_causal(torch.arange(T) // 40), None, None, T, T, BLOCK_SIZE=32, device="cpu")
SLOPES = mods.alibi(2)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def leaves(length: int = T) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, 2, length, 16, generator=generator).requires_grad_() for _ in range(3)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, SLOPES, MASK)


def both(call: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the output of a call and its gradients."""
    out = call(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, out.detach() * 0.5)


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(a, b, strict=True))


def called(codes: list[str]) -> list[str]:
    """Return what generated code calls in place of the operators, or the operators."""
    return re.findall(r"^ +buf\d+ = (\S*flexattn\S*)\(", "\n".join(codes), re.MULTILINE)


def test_code_calls_functions() -> None:
    compiled = torch.compile(attend, fullgraph=True)
    found, codes = run_and_get_code(both, compiled, leaves())
    assert called(codes) == ["flexattn_forward", "flexattn_backward"]
    assert equal(found, both(attend, leaves()))


def test_dynamic_shapes() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, SLOPES)

    compiled = torch.compile(biased, fullgraph=True, dynamic=True)
    for length in (48, 64, 40):
        assert equal(both(compiled, leaves(length)), both(biased, leaves(length)))


@pytest.mark.parametrize("transposed", [False, True])
def test_layouts_of_results(transposed: bool) -> None:
    def layer(x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (2, 16)) for t in x.chunk(3, 2))
        q, k, v = (t.transpose(1, 2) if transposed else t.transpose(1, 2).contiguous() for t in (q, k, v))
        return flex_attention(q, k, v).transpose(1, 2).flatten(2) + 1

    x = torch.randn(1, T, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert equal(both(torch.compile(layer, fullgraph=True), [x]), both(layer, [x]))


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_operator() -> None:
    """A mode around the backward only: Dynamo does not run compiled code inside of one."""
    inputs = leaves()
    out = torch.compile(attend, fullgraph=True)(*inputs)
    with Seen() as seen:
        found = torch.autograd.grad(out, inputs, out.detach() * 0.5)
    assert OPS.backward.default in seen.operators
    assert equal((out.detach(), *found), both(attend, leaves()))


@pytest.mark.parametrize("floats", [False, True])
def test_a_function_inside_of_a_mode_calls_the_operator(floats: bool) -> None:
    q, k, v = (x.detach() for x in leaves())
    numbers = [torch.tensor(0.5, dtype=torch.float64)] if floats else []
    arguments = (q, k, v, [], [], [], None, None, [], numbers, None, Spec(has_scale=floats).dumps())
    expected = flex_attention(q, k, v, scale=0.5 if floats else None)
    assert torch.equal(operators.forward(*arguments)[0], expected)
    with Seen() as seen:
        assert torch.equal(operators.forward(*arguments)[0], expected)
    assert seen.operators[0] is (OPS.forward.floats if floats else OPS.forward.default)
    with torch.device("meta"):
        assert torch.equal(operators.forward(*arguments)[0], expected)


def test_profilers_see_operators() -> None:
    compiled = torch.compile(attend, fullgraph=True)
    both(compiled, leaves())
    with torch.profiler.profile(acc_events=True) as profile:
        both(compiled, leaves())
    assert {"flexattn::forward", "flexattn::backward"} <= {event.name for event in profile.events() or ()}


def test_a_call_with_floats_stays_out_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor records the partitions of a graph. A partition imports what it calls."""

    def layers(q: Tensor, k: Tensor, v: Tensor, number: Any) -> Tensor:
        x = flex_attention(q * 2, k, v, lambda s, b, h, i, j: s * number)
        return flex_attention(x + 1, k, v, SLOPES) * 2

    def partitioned(scheduler: Any, node: Any, *_: Any) -> str | None:
        return "unsafe" if is_cudagraph_unsafe_op(node.node) else None  # by itself all that runs on a CPU is

    monkeypatch.setattr(Scheduler, "should_partition", partitioned)
    compiled: Any = torch.compile(layers, fullgraph=True, dynamic=True)
    q, k, v = (x.detach() for x in leaves())
    with config.patch(graph_partition=True):
        found, codes = run_and_get_code(compiled, q, k, v, 0.3)
    assert torch.equal(found, layers(q, k, v, 0.3))
    body = codes[0].partition("def partition_")[2]
    partitions, _, main = body.partition("class Runner")
    assert called([partitions]) == called([main]) == ["flexattn_forward"]


def test_other_code_calls_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_WRAPPERS", ())
    found, codes = run_and_get_code(both, torch.compile(attend, fullgraph=True), leaves())
    assert called(codes) == ["torch.ops.flexattn.forward.default", "torch.ops.flexattn.backward.default"]
    assert equal(found, both(attend, leaves()))


def test_a_version_of_torch_without_a_private_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lowerings: dict[Any, Any] = lowering.lowerings
    monkeypatch.setattr(inductor, "_lowered", set())
    for overload in operators._OVERLOADS:
        monkeypatch.delitem(lowerings, overload, raising=False)
    monkeypatch.delattr(lowering, "make_fallback")
    forget_fallbacks()
    found, codes = run_and_get_code(both, torch.compile(attend, fullgraph=True), leaves())
    assert called(codes) == ["torch.ops.flexattn.forward.default", "torch.ops.flexattn.backward.default"]
    assert equal(found, both(attend, leaves()))
    assert any("through the dispatcher" in reason for reason in fallbacks())


CACHED = """
import torch
from torch._dynamo.utils import counters
from flexattn import flex_attention, mods
q, k, v = (torch.randn(1, 2, 48, 16, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(3))
slopes = mods.alibi(2)
attend = lambda q, k, v: flex_attention(q, k, v, slopes)
results = []
for call in (torch.compile(attend, fullgraph=True), attend):
    out = call(q, k, v)
    results.append((out, *torch.autograd.grad(out, (q, k, v), out.detach())))
found = counters["inductor"]
print(all(map(torch.equal, *results)), found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
"""


def test_cached_code(tmp_path: Path) -> None:
    """A fresh process runs code from the cache on disk. The code itself imports flexattn."""
    folder = tmp_path / "inductor"
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0"}

    def output(script: str) -> str:
        command = [sys.executable, "-c", script]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    assert output(CACHED) == "True 0 2"
    code = [file for file in folder.rglob("*.py") if "flexattn_forward(" in file.read_text()]
    assert len(code) == 1
    assert output(CACHED) == "True 2 0"
    assert output(f"import runpy; print('flexattn_forward' in runpy.run_path({str(code[0])!r}))") == "True"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning")
@pytest.mark.parametrize("call", [attend, flex_attention], ids=["mods", "plain"])
def test_aotinductor(call: Callable[..., Tensor], tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return call(q, k, v)

    inputs = tuple(x.detach() for x in leaves())
    program = torch.export.export(Module(), inputs)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "module.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(path)(*inputs), call(*inputs))


def test_a_float_table_that_the_mask_computes() -> None:
    """Inductor's functions of floats differ from torch's in the last bits."""
    table = torch.rand(T)
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: torch.softmax(table, 0)[q_idx] >= torch.softmax(2 * table, 0)[kv_idx],
        None, None, T, T, device="cpu",
    )  # fmt: skip
    inputs = leaves()
    out = torch.compile(lambda q, k, v: flex_attention(q, k, v, None, mask), fullgraph=True)(*inputs)
    torch.testing.assert_close(out, flex_attention(*inputs, None, mask))
