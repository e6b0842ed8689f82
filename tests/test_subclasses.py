"""Subclasses of torch.Tensor as arguments and captures: plain ones compute, others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import flexattn
from flexattn.errors import UnsupportedError

Make = Callable[[Tensor], Tensor]


class Named(Tensor):
    """Only a method."""

    def greet(self) -> str:
        return "hello"


class Unit(Tensor):
    """Its own __torch_function__."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Doubled(Tensor):
    """Stands for twice the values that it holds."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Doubled:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Doubled(args[0].inner)
        plain = [2 * a.inner if isinstance(a, Doubled) else a for a in args]
        return func(*plain, **(kwargs or {}))


USES: dict[str, Callable[[Tensor, Callable[[Tensor], Any]], Any]] = {
    "query": lambda x, make: flexattn.flex_attention(make(x), x, x),
    "key": lambda x, make: flexattn.flex_attention(x, make(x), x),
    "value": lambda x, make: flexattn.flex_attention(x, x, make(x)),
    "sink": lambda x, make: flexattn.flex_attention(x, x, x, sink=make(x[0, :, 0, 0])),
    "score_mod": lambda x, make: _with_score_mod(x, make(x[0, 0, :, 0])),
    "mask_mod": lambda x, make: _with_mask_mod(x, make(x[0, 0, :, 0])),
}


def _with_score_mod(x: Tensor, table: Tensor) -> Tensor:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        squares = table * table  # at each call, before the kernel
        return score + squares[kv_idx] - table[q_idx]

    return flexattn.flex_attention(x, x, x, score_mod)


def _with_mask_mod(x: Tensor, table: Tensor) -> Tensor:
    mask = flexattn.create_block_mask(lambda b, h, i, j: table[i] <= table[j], None, None, 32, 32, "cpu", 16)
    return flexattn.flex_attention(x, x, x, block_mask=mask)


def _x() -> Tensor:
    return torch.randn(1, 2, 32, 16, generator=torch.Generator().manual_seed(0))


PLAIN: dict[str, Make] = {
    "Parameter": nn.Parameter,
    "Buffer": nn.Buffer,
    "methods": lambda t: t.as_subclass(Named),
    "Parameter with methods": lambda t: nn.Parameter(t.as_subclass(Named)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_subclasses_compute(kind: str, use: str) -> None:
    want = USES[use](_x(), lambda t: t)
    got = USES[use](_x(), PLAIN[kind])
    torch.testing.assert_close(got.detach().as_subclass(Tensor), want, rtol=0, atol=0)


REFUSED: dict[str, tuple[Make, str, str]] = {
    "__torch_function__": (lambda t: t.as_subclass(Unit), r"test_subclasses\.Unit", r"as_subclass\(torch\.Tensor\)"),
    "__torch_dispatch__": (Doubled, r"test_subclasses\.Doubled", r"with a method of its class"),
    "Parameter": (lambda t: nn.Parameter(Doubled(t), False), r"test_subclasses\.Doubled", r"with a method"),
    "FakeTensor": (
        lambda t: FakeTensorMode().from_tensor(t),
        r"FakeTensor|with and without values",
        r"It has no values|one kind",
    ),
    "UninitializedParameter": (lambda t: nn.UninitializedParameter(), r"UninitializedParameter", r"materialize"),
    "UninitializedBuffer": (lambda t: nn.parameter.UninitializedBuffer(), r"UninitializedBuffer", r"materialize"),
    "sparse": (Tensor.to_sparse, r"a tensor of layout torch\.sparse_coo", r"\.to_dense\(\)"),
    "nested": (lambda t: torch.nested.nested_tensor([t]), r"a nested tensor", r"mods\.document|layout=torch\.jagged"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_by_name(kind: str, use: str) -> None:
    make, found, fix = REFUSED[kind]
    USES[use](_x(), lambda t: t)  # so that a mod is known, of plain tensors of the same kind
    with pytest.raises(UnsupportedError, match=rf"(?s)^{use}: found .*{found}.*{fix}"):
        USES[use](_x(), make)


def test_a_capture_is_named() -> None:
    table = Doubled(torch.ones(32))
    with pytest.raises(UnsupportedError, match=r"score_mod: found the captured tensor table, a "):
        flexattn.flex_attention(_x(), _x(), _x(), lambda score, b, h, q_idx, kv_idx: score + table[kv_idx])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_masked_tensors_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"key: found .*MaskedTensor.* key\.to_tensor\(0\)"):
        USES["key"](_x(), lambda t: torch.masked.masked_tensor(t, t > 0))


@pytest.fixture
def _process_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())  # no network is needed
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("use", USES)
def test_distributed_tensors_are_refused(use: str) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(UnsupportedError, match=rf"^{use}: found .*DTensor.*\.to_local\(\) if it is sharded by batch"):
        USES[use](_x(), lambda t: distribute_tensor(t, mesh, [Shard(0)]))
    waiting = []

    def reduced(t: Tensor) -> Tensor:
        waiting.append(collectives.all_reduce(t, "sum", dist.group.WORLD))
        return waiting[0]

    with pytest.raises(UnsupportedError, match=rf"^{use}: found .*AsyncCollectiveTensor.*Wait for it: \w+\.wait\(\)"):
        USES[use](_x(), reduced)
    waiting[0].wait()
