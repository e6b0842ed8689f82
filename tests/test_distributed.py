"""flex_attention in DistributedDataParallel and FSDP2, with parameters that a score_mod reads (gloo, on the CPU)."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flexattn import create_block_mask, flex_attention
from flexattn.errors import MutationError, UnsupportedError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

B, H, T, D = 2, 2, 64, 16
STEPS = 3


class Attention(nn.Module):
    """A layer whose score_mod and mask_mod read tensors of the layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(D, 3 * D, generator=generator) / 4)
        self.bias = nn.Parameter(torch.randn(2 * T, H, generator=generator))
        self.gain = nn.Parameter(torch.ones(H))
        self.register_buffer("ids", torch.arange(T) // 20)
        self.mask = create_block_mask(self.mask_mod, None, None, T, T, device="cpu", BLOCK_SIZE=32)
        self.seen: set[type] = set()

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (self.ids[q_idx] == self.ids[kv_idx])

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score * self.gain[h] + self.bias[q_idx - kv_idx + T, h]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(type(self.bias))
        q, k, v = (x @ self.weight).chunk(3, -1)
        return x + flex_attention(q, k, v, self.score_mod, self.mask)


class Model(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(100 * rank + step))


def train(model: nn.Module, batches: list[list[Tensor]]) -> None:
    """Take steps on the mean of the losses of each step's batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in batches:
        optimizer.zero_grad()
        for x in step:
            (model(x).square().mean() / len(step)).backward()
        optimizer.step()


def alone(world: int) -> dict[str, Tensor]:
    """Return the parameters after training in one process on the batches of all."""
    model = Model()
    train(model, [[batch(rank, step) for rank in range(world)] for step in range(STEPS)])
    return {name: p.detach() for name, p in model.named_parameters()}


def check(found: dict[str, Tensor], world: int) -> None:
    before = dict(Model().named_parameters())
    for name, expected in alone(world).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(before[name], expected, rtol=1e-3, atol=1e-4), name  # it has learned


def own_batches(rank: int) -> list[list[Tensor]]:
    return [[batch(rank, step)] for step in range(STEPS)]


def ddp(rank: int, world: int) -> None:
    model = DistributedDataParallel(Model(), broadcast_buffers=False)
    train(model, own_batches(rank))
    check({name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}, world)


def ddp_buffers(rank: int, world: int) -> None:
    """By default DDP writes the buffers of rank 0 into those of the others, also into one that the mask reads."""
    model = DistributedDataParallel(Model())
    with pytest.raises(MutationError, match="captured tensor 'ids' was changed in place"):
        model(batch(rank, 0))


def sharded(world: int, model: Model, **options: object) -> Model:
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _fsdp(rank: int, world: int, again: bool) -> None:
    model = sharded(world, Model(again))
    for layer in model.layers:
        assert isinstance(layer.bias, DTensor)
    train(model, own_batches(rank))
    for layer in model.layers:
        assert not any(issubclass(kind, DTensor) for kind in layer.seen)  # plain inside of forward
    check({name: p.full_tensor().detach() for name, p in model.named_parameters()}, world)


def fsdp(rank: int, world: int) -> None:
    _fsdp(rank, world, again=False)


def fsdp_checkpoint(rank: int, world: int) -> None:
    _fsdp(rank, world, again=True)


def fsdp_mixed(rank: int, world: int) -> None:
    """Parameters are cast to bfloat16, also those that the score_mod reads. Gradients are float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(world, Model(), mp_policy=policy)
    model(batch(rank, 0)).float().square().mean().backward()
    plain = Model().bfloat16()
    for other in range(world):
        (plain(batch(other, 0).bfloat16()).float().square().mean() / world).backward()
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), expected[name].grad.float(), rtol=0.05, atol=2e-4)


def fsdp_outside(rank: int, world: int) -> None:
    """Outside of forward the parameter is a DTensor, which a mod cannot read: the error says what to do."""
    layer = sharded(world, Model()).layers[0]
    x = batch(rank, 0)
    with pytest.raises(UnsupportedError, match=r"captured tensor gain, a torch.distributed.*DTensor.*full_tensor"):
        flex_attention(x, x, x, layer.score_mod)
    layer.unshard()
    expected = Attention()
    assert torch.equal(
        flex_attention(x, x, x, layer.score_mod, layer.mask), flex_attention(x, x, x, expected.score_mod, expected.mask)
    )
    layer.reshard()


class Limited(nn.Module):
    """A layer that builds a mask from its parameter in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = nn.Parameter(torch.full((2 * H,), 30.0))
        self.weight = nn.Parameter(torch.eye(D))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        mask = create_block_mask(
            lambda b, h, q_idx, kv_idx: kv_idx < self.limit[h], None, H, T, T, device="cpu", BLOCK_SIZE=16
        )
        return flex_attention(x, x, x, block_mask=mask)


def fsdp_mask(rank: int, world: int) -> None:
    model = Limited()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    x = batch(rank, 0)
    for limit in (30.0, 30.0, 30.0, 50.0):
        with torch.no_grad():
            model.limit.to_local().fill_(limit)
        out = model(x)
        out.sum().backward()  # FSDP frees the storage that the mask was built from
        torch.testing.assert_close(out, flex_attention(x, x[:, :, : int(limit)], x[:, :, : int(limit)]))


WORK = (ddp, ddp_buffers, fsdp, fsdp_checkpoint, fsdp_mask, fsdp_mixed, fsdp_outside)


def process(rank: int, world: int, store: str) -> None:
    faulthandler.enable()  # prints the Python frames of all threads if the process aborts
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        for work in WORK:
            work(rank, world)
    finally:
        dist.destroy_process_group()
    # The interpreter is not finalized. A gloo thread that releases a tensor in that moment needs the GIL, and ends the
    # process with "terminate called without an active exception": once in about 100 runs, on a loaded machine.
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_in_processes(world: int, tmp_path: Path) -> None:
    mp.spawn(process, args=(world, str(tmp_path / "store")), nprocs=world)
