"""Activation checkpointing in compiled functions, AOTAutograd's cache on disk, and torch's checks of the operators."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flexattn
from flexattn import mods
from flexattn.torch_compile import operators
from flexattn.torch_compile.spec import Spec
from flexattn.trace.trace import trace

B, H, T, D = 1, 2, 96, 16


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, D, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts how often an operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


KEEP = functools.partial(create_selective_checkpoint_contexts, [torch.ops.flexattn.forward.default])


@pytest.mark.parametrize("context, again", [(None, 1), (KEEP, 0)], ids=["all", "selective"])
def test_checkpoint(context, again):
    torch._dynamo.reset()
    extra = {} if context is None else {"context_fn": context}

    def inner(q, k, v):
        return flexattn.flex_attention(q.sin(), k, v, mods.softcap(5.0)).cos()

    def block(q, k, v):
        return checkpoint(inner, q, k, v, use_reentrant=False, **extra)

    x = qkv()
    expected = torch.autograd.grad(inner(*x).square().sum(), x)
    out = torch.compile(block, fullgraph=True, backend="aot_eager_decomp_partition")(*x)
    with Counter() as counter:
        found = torch.autograd.grad(out.square().sum(), x)
    assert counter.counts.get("flexattn.forward.default", 0) == again
    assert counter.counts["flexattn.backward.default"] == 1
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


CASES = {
    "plain": (None, {}),
    "alibi": (mods.alibi(H), {}),
    "max_scores": (mods.softcap(5.0), {"max_scores": True}),
    "number": (lambda s, b, h, i, j: s * SLOPE, {}),
    "sink": (None, {"sink": 0.5}),
}
SLOPE = 0.25


def operands(name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    mod, spec = CASES[name]
    bound = None if mod is None else trace(mod, "score")
    captures = [] if bound is None else list(bound.captures)
    numbers = () if bound is None else bound.numbers
    ints = [n for n in numbers if isinstance(n, int)]
    floats = [torch.tensor(n, dtype=torch.float64) for n in numbers if isinstance(n, float)]
    text = Spec(None if bound is None else bound.graph, **spec).dumps()
    return query, key, value, captures, [], [], None, None, ints, floats, None, text


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "one key head", "empty"])
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name, layout):
    q, k, v = (x.detach() for x in qkv())
    if layout == "transposed":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if layout == "one key head":
        k, v = k[:, :1], torch.randn(B, 1, T, 24)
    if layout == "empty":
        q = q[:, :, :0]
    given = operands(name, q, k, v)
    overload = "floats" if given[9] else "default"
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(operators.OPS.forward, overload), given, test_utils=utils)
    out, lse, *_ = operators.OPS.forward(*given)
    needs = [True] * 3 + [c.is_floating_point() for c in given[3]]
    torch.library.opcheck(
        getattr(operators.OPS.backward, overload),
        (torch.ones_like(out), None, out, lse, *given, needs),
        test_utils=utils,
    )


PROGRAM = """
import sys, torch, flexattn
from torch._dynamo.utils import counters
from flexattn.torch_compile import higher_order
sign = int(sys.argv[1])
resolved = []
original = higher_order.bind_mod
higher_order.bind_mod = lambda *args: (resolved.append(1), original(*args))[1]
plus = lambda s, b, h, i, j: s + t[h]
minus = lambda s, b, h, i, j: s - t[h]
t = torch.tensor([1.0, 2.0])
torch.manual_seed(0)
x = [torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3)]
mod = plus if sign > 0 else minus
f = torch.compile(lambda q, k, v: flexattn.flex_attention(q, k, v, mod), fullgraph=True)
out = f(*x)
assert torch.equal(out, flexattn.flex_attention(*x, mod))
out.sum().backward()
print(len(resolved))
"""


@pytest.mark.slow
def test_cached_graphs_of_another_process(tmp_path):
    """A second process finds the graph on disk and traces nothing. Another mod is not mistaken for it."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def resolved(sign: int) -> int:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(sign)], capture_output=True, text=True, check=True, env=environment
        )
        return int(run.stdout)

    assert resolved(1) > 0
    assert resolved(1) == 0
    assert resolved(-1) > 0
