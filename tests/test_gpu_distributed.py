"""flexattn.distributed on several GPUs with NCCL, next to one GPU."""

from __future__ import annotations

import os
import resource
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

import flexattn
from flexattn import AuxRequest, create_block_mask, distributed, mods

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
create_cp_plan: Any = distributed.create_cp_plan
flex_attention: Any = distributed.flex_attention
one_gpu: Any = flexattn.flex_attention
S, HQ, HKV, D = 5_000, 8, 4, 64


def started(rank: int, port: int, *case: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device)
    try:
        compare(rank, device, *case)
    finally:
        dist.destroy_process_group()


def compare(rank: int, device: torch.device, dtype: torch.dtype, name: str, p: float) -> None:
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, d_out = (
        torch.randn(2, heads, S, D, device=device, generator=generator).to(dtype) for heads in (HQ, HKV, HKV, HQ)
    )
    slopes = torch.linspace(0.01, 0.1, HQ, device=device)
    ids = torch.arange(S, device=device) // 700

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    masks = {
        "causal": mods.causal,
        "sliding": mods.sliding_window(600),
        "documents": mods.document_causal(ids),
        "none": None,
    }
    bound = 2e-3 if dtype == torch.float32 else 2e-2
    close: dict[str, Any] = {"rtol": bound, "atol": bound}
    mod = masks[name]
    mask = None if mod is None else create_block_mask(mod, None, None, S, S, device=device)
    whole = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(5)
    out, aux = one_gpu(*whole, score_mod, mask, enable_gqa=True, dropout_p=p, return_aux=AuxRequest(lse=True))
    expected = torch.autograd.grad(out, whole, d_out)
    for scheme in ("gather", "ring", "heads"):
        plan = create_cp_plan(mod, None, None, S, S, mesh, scheme=scheme)
        local = [plan.shard(x.detach(), 2).requires_grad_() for x in (q, k, v)]
        torch.manual_seed(5 + rank)
        ours, ours_aux = flex_attention(
            *local, score_mod, enable_gqa=True, dropout_p=p, plan=plan, return_aux=AuxRequest(lse=True)
        )
        what = f"{scheme}, rank {rank}"
        for found, wanted in ((ours, out), (ours_aux.lse, aux.lse)):
            torch.testing.assert_close(found, plan.shard(wanted, 2), **close, msg=lambda m, w=what: f"{w}: {m}")
        for found, wanted in zip(torch.autograd.grad(ours, local, plan.shard(d_out, 2)), expected, strict=True):
            torch.testing.assert_close(found, plan.shard(wanted, 2), **close, msg=lambda m, w=what: f"{w}: {m}")
        assert torch.equal(plan.unshard(plan.shard(out.detach(), 2), 2), out)
    if p or mask is None:
        return
    sharded = [distribute_tensor(x, mesh, (Shard(1),)) for x in (q, k, v)]
    assert torch.equal(flex_attention(*sharded, score_mod, mask, enable_gqa=True).full_tensor(), out)


@pytest.mark.parametrize(
    ("dtype", "name", "p"),
    [
        (torch.bfloat16, "causal", 0.0),
        (torch.bfloat16, "causal", 0.25),
        (torch.bfloat16, "sliding", 0.0),
        (torch.bfloat16, "none", 0.0),
        (torch.float32, "documents", 0.0),
    ],
)
def test_two_gpus_equal_one(dtype: torch.dtype, name: str, p: float) -> None:
    spawn(started, (free_port(), dtype, name, p), 2)


TIMEOUT, LIMIT = 10, 120  # seconds


def other_is_late(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump of a process with a GPU takes long
    torch.cuda.set_device(rank)
    device, timeout = torch.device("cuda", rank), timedelta(seconds=TIMEOUT)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device, timeout=timeout)
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
    plan = create_cp_plan(mods.causal, None, None, S, S, mesh, scheme="gather")
    q, k, v = (torch.randn(1, h, plan.positions.numel(), D, device=device).bfloat16() for h in (HQ, HKV, HKV))
    flex_attention(q, k, v, enable_gqa=True, plan=plan)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(LIMIT)
        return
    flex_attention(q, k, v, enable_gqa=True, plan=plan)
    torch.cuda.synchronize()
    os._exit(0)


def test_a_late_rank_ends_the_other() -> None:
    """NCCL ends a process whose collective exceeds its timeout, here within 50 s more. Nothing of ours waits."""
    started: Any = spawn(other_is_late, (free_port(),), 2, join=False)
    waits, late = started.processes
    while waits.is_alive() and late.is_alive():
        time.sleep(0.1)
    assert late.is_alive(), "it waited as long as the other rank slept"
    assert waits.exitcode != 0
    late.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
