"""15. Context parallel: training the demo's GPT on packed documents, whose tokens are sharded over two ranks.

The same steps run in one process and on two ranks (two GPUs with NCCL, or two processes on the CPU with gloo). The
losses are the same.
"""

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import demo
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from flexattn import and_masks, mods
from flexattn.distributed import ContextPlan, create_cp_plan, flex_attention

RANKS, STEPS = 2, 8
SETTINGS = replace(demo.ON_CPU, length=1024, width=64)
DEVICE = torch.device("cuda" if torch.cuda.device_count() >= RANKS else "cpu")


class ShardedAttention(demo.Attention):
    def forward(self, x: Tensor, plan: ContextPlan) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(x)  # this rank's tokens
        out = flex_attention(q, k, v, self.score_mod(), plan=plan)  # mods see positions in the whole row
        return self.to_out(out.transpose(1, 2).flatten(2))


def train(ranks: int) -> list[float]:
    torch.manual_seed(0)
    model, (texts, _) = demo.GPT(SETTINGS), demo.read_files()
    if ranks > 1:
        for layer in model.layers:
            sharded = ShardedAttention(SETTINGS.width, SETTINGS.heads)
            sharded.load_state_dict(layer.attention.state_dict())
            layer.attention = sharded
    model = model.to(DEVICE)
    parallel = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS.rate)
    mesh = init_device_mesh(DEVICE.type, (ranks,), mesh_dim_names=("cp",)) if ranks > 1 else None
    rng, losses = random.Random(0), []
    for _ in range(STEPS):
        row = demo.pack(texts, SETTINGS, DEVICE, rng)  # the same on each rank
        if mesh is None:
            tokens, targets, mask = row.tokens, row.targets, demo.mask_of(row)
        else:
            mask_mod = and_masks(mods.causal, mods.document(row.documents))
            mask = create_cp_plan(mask_mod, None, None, len(row.tokens), len(row.tokens), mesh)
            tokens, targets = mask.shard(row.tokens, 0), mask.shard(row.targets, 0)
        # Each rank's part of the mean over the row. DDP averages gradients over the ranks, so they are scaled back.
        loss = cross_entropy(parallel(tokens, mask), targets, reduction="sum") / len(row.tokens)
        optimizer.zero_grad()
        (loss * ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach()
        if mesh is not None:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def work(rank: int, folder: str) -> None:
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    losses = train(RANKS)
    if rank == 0:
        torch.save(losses, Path(folder) / "losses.pt")
    dist.destroy_process_group()


def main() -> None:
    alone = train(1)
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (folder,), RANKS)
        together = torch.load(Path(folder) / "losses.pt")
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=1e-4, atol=0)
    print(f"{STEPS} steps: loss {alone[0]:.3f} -> {alone[-1]:.3f} alone, {together[-1]:.3f} on {RANKS} ranks")
    assert alone[-1] < 0.9 * alone[0]


if __name__ == "__main__":
    main()
