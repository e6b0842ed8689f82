"""flexattn.distributed: equal to one process, with gloo on a CPU."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

import flexattn
from flexattn import AuxRequest, create_block_mask, distributed, mods
from flexattn.distributed import plan as plan_module
from flexattn.distributed.chunks import PER_RANK, common, cut, deal, joined, places, shares, union
from flexattn.distributed.exchange import keys_of_spans
from flexattn.distributed.needs import row_costs
from flexattn.errors import ArgumentError, DtypeError, MutationError, UnsupportedError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
SCHEMES = ("gather", "ring", "heads")
S = 1001  # no multiple of a block, nor of the number of ranks
B, HQ, HKV, D, DV = 2, 8, 4, 16, 24
IDS = torch.arange(S) // 300
PARENTS = torch.tensor([-1, *((torch.arange(1, S) * 7) % torch.arange(1, S)).tolist()])
Worker = Callable[..., None]
# Any: the workers pass lists of tensors as positional arguments.
create_cp_plan: Any = distributed.create_cp_plan
flex_attention: Any = distributed.flex_attention
one_process: Any = flexattn.flex_attention


# On ranks.

# Ranks are forked from a process that has imported what takes two seconds.
multiprocessing.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "flexattn.distributed"])


def started(rank: int, ranks: int, port: int, function: Worker, arguments: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    try:
        function(rank, ranks, *arguments)
    finally:
        dist.destroy_process_group()
    # Without the interpreter's end, in which gloo's threads may still free tensors and abort (pytorch/pytorch#179291).
    # It happened to one of some thousand processes.
    sys.stdout.flush()
    os._exit(0)


def on_ranks(ranks: int, function: Worker, *arguments: Any) -> None:
    """Run `function(rank, ranks, *arguments)` in processes of one group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(started, (ranks, port, function, arguments), ranks, start_method="forkserver")


def mesh_of(ranks: int) -> Any:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))


def inputs(length: int = S, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(B, heads, length, width, generator=generator, dtype=torch.float64).to(dtype)
        for heads, width in ((HQ, D), (HKV, D), (HKV, DV))
    )
    return q, k, v


def by_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 100 * (h + 1))


def by_batch(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < 300 + 400 * b


def far(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx < 20) | ((q_idx - kv_idx).abs() < 30)


def late(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= 500) & (kv_idx < 400)  # queries without keys, and keys far from their queries


# mask_mod, B, H
MASKS: dict[str, tuple[Any, int | None, int | None]] = {
    "none": (None, None, None),
    "causal": (mods.causal, None, None),
    "sliding_window": (mods.sliding_window(70), None, None),
    "band": (mods.band(50, 20), None, None),
    "document": (mods.document(IDS), None, None),
    "document_causal": (mods.document_causal(IDS), None, None),
    "prefix_lm": (mods.prefix_lm(torch.tensor([150, 620])), B, None),
    "padding": (mods.padding(torch.tensor([1001, 400])), B, None),
    "dilated": (mods.dilated(40, 7), None, None),
    "block_diffusion": (mods.block_diffusion(S // 2 + 1, 32), None, None),
    "causal_lower_right": (mods.causal_lower_right(S, S), None, None),
    "global_tokens": (mods.or_masks(mods.global_tokens(30), mods.and_masks(mods.causal, mods.band(90, 0))), None, None),
    "natten_2d": (mods.natten_2d(25, 41, 7), None, None),
    "natten_3d": (mods.natten_3d(5, 10, 21, (3, 5, 7)), None, None),
    "strided": (mods.strided(90), None, None),
    "tree": (mods.tree(PARENTS), None, None),
    "negated": (mods.xor_masks(mods.not_mask(mods.causal), mods.document(IDS)), None, None),
    "by_head": (by_head, None, HQ),
    "by_batch": (by_batch, B, None),
    "far": (far, None, None),
    "late": (late, None, None),
}


def close(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, msg=lambda text: f"{what}: {text}")


def equal_to_one_process(
    rank: int, ranks: int, names: tuple[str, ...], schemes: tuple[str, ...], length: int, sink: bool
) -> None:
    """Compare out, lse, row maxima and all gradients with those of the whole call."""
    mesh, whole = mesh_of(ranks), [x.requires_grad_() for x in inputs(length)]
    slopes = torch.rand(HQ, dtype=torch.float64, requires_grad=True)
    table = torch.rand(length, dtype=torch.float64, requires_grad=True)
    learned = [slopes, table, *([torch.randn(HQ, dtype=torch.float64, requires_grad=True)] if sink else [])]
    aux = AuxRequest(lse=True, max_scores=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx) / 100 + table[kv_idx] * (b + 1)

    for name in names:
        mod, masks_b, masks_h = MASKS[name]
        sizes = masks_b, masks_h
        mask = None if mod is None else create_block_mask(mod, *sizes, length, length, device="cpu")
        given: dict[str, Any] = {"enable_gqa": True, "return_aux": aux, "sink": learned[2] if sink else None}
        out, found = one_process(*whole, score_mod, mask, **given)
        d_out, d_lse = (
            torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2)) for x in (out, found.lse)
        )
        has_key = found.lse > -torch.inf
        expected = torch.autograd.grad(
            (out * d_out).sum() + torch.where(has_key, found.lse * d_lse, 0.0).sum(), (*whole, *learned)
        )
        for scheme in schemes:
            what = f"{name}, {scheme}, rank {rank} of {ranks}"
            plan = create_cp_plan(mod, *sizes, length, length, mesh, scheme=scheme)
            local = [plan.shard(x.detach(), 2).requires_grad_() for x in whole]
            ours, ours_aux = flex_attention(*local, score_mod, plan=plan, **given)
            close(ours, plan.shard(out, 2), what)
            close(ours_aux.lse, plan.shard(found.lse, 2), what)
            close(ours_aux.max_scores, plan.shard(found.max_scores, 2), what)
            mine = plan.shard(has_key, 2)
            loss = (ours * plan.shard(d_out, 2)).sum() + torch.where(
                mine, ours_aux.lse * plan.shard(d_lse, 2), 0.0
            ).sum()
            gradients = torch.autograd.grad(loss, (*local, *learned))
            for x, y in zip(gradients[:3], expected[:3], strict=True):
                close(x, plan.shard(y, 2), f"gradient, {what}")
            for x, y in zip(gradients[3:], expected[3:], strict=True):
                total = x.clone()
                dist.all_reduce(total)
                close(total, y, f"gradient of a captured tensor, {what}")
            assert torch.equal(plan.unshard(plan.shard(out.detach(), 2), 2), out)


def test_two_ranks_equal_one_process() -> None:
    on_ranks(2, equal_to_one_process, ("causal", "late", "far"), SCHEMES, S, False)


@pytest.mark.slow
def test_all_masks_on_two_ranks() -> None:
    on_ranks(2, equal_to_one_process, tuple(MASKS), SCHEMES, S, False)


@pytest.mark.slow
@pytest.mark.parametrize("i", range(3), ids=SCHEMES)
def test_all_masks_on_four_ranks(i: int) -> None:
    """Each mask with one of the schemes, as two ranks have all pairs of them."""
    on_ranks(4, equal_to_one_process, tuple(MASKS)[i::3], (SCHEMES[i],), S, False)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 130, 300])
def test_ranks_without_tokens(length: int) -> None:
    """With one to three blocks, some of four ranks have no tokens. They take part in all that is sent."""
    on_ranks(4, equal_to_one_process, ("none", "causal", "sliding_window"), SCHEMES, length, True)


def loss_of_lse(rank: int, ranks: int) -> None:
    """Without a gradient of the output, ranks without keys take part in the backward too."""
    mesh, length = mesh_of(ranks), 130
    whole = [x.requires_grad_() for x in inputs(length)[:2]]
    value = inputs(length)[2]
    given: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    _, found = one_process(*whole, value, **given)
    expected = torch.autograd.grad(found.lse.sum(), whole)
    for scheme in SCHEMES:
        plan = create_cp_plan(None, B, HQ, length, length, mesh, scheme=scheme)
        local = [plan.shard(x.detach(), 2).requires_grad_() for x in whole]
        _, aux = flex_attention(*local, plan.shard(value, 2), plan=plan, **given)
        gradients = torch.autograd.grad(aux.lse.sum(), local)
        for x, y in zip(gradients, expected, strict=True):
            close(x, plan.shard(y, 2), f"{scheme}, rank {rank}")


def test_a_loss_of_the_logsumexp_alone() -> None:
    on_ranks(4, loss_of_lse)


@pytest.mark.slow
def test_sinks() -> None:
    on_ranks(2, equal_to_one_process, ("causal", "late", "document"), SCHEMES, S, True)


def test_all_ready_masks_are_here() -> None:
    """`shifted` is of parts of sequences, and noop_mask is no mask."""
    scores = {"alibi", "distance_decay", "head_gate", "relative_bias", "softcap", "t5_bias", "temperature"}
    modules = {"arguments", "combine", "kinds", "natten", "at_heads"}
    names = {name for name in dir(mods) if not name.startswith("_")} - scores - modules
    assert names - set(MASKS) == {"shifted", "noop_mask", "xor_masks", "and_masks", "or_masks", "not_mask"}


def dropped(rank: int, ranks: int) -> None:
    """Weights are dropped as in one process, also by heads and by DTensors."""
    mesh, whole = mesh_of(ranks), [x.requires_grad_() for x in inputs()]
    mask = create_block_mask(mods.causal, None, None, S, S, device="cpu")
    torch.manual_seed(7)
    expected = one_process(*whole, None, mask, enable_gqa=True, dropout_p=0.3)
    d_out = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(4))
    gradients = torch.autograd.grad(expected, whole, d_out)
    for scheme in SCHEMES:
        plan = create_cp_plan(mods.causal, None, None, S, S, mesh, scheme=scheme)
        local = [plan.shard(x.detach(), 2).requires_grad_() for x in whole]
        torch.manual_seed(7 + rank)  # the seed of rank 0 is that of all
        out = flex_attention(*local, enable_gqa=True, dropout_p=0.3, plan=plan)
        close(out, plan.shard(expected, 2), scheme)
        for x, y in zip(torch.autograd.grad(out, local, plan.shard(d_out, 2)), gradients, strict=True):
            close(x, plan.shard(y, 2), f"gradient, {scheme}")
    for dim in (0, 1):
        sharded = [distribute_tensor(x.detach(), mesh, (Shard(dim),)) for x in whole]
        torch.manual_seed(7 + rank)
        close(flex_attention(*sharded, None, mask, enable_gqa=True, dropout_p=0.3).full_tensor(), expected, f"{dim}")


def test_dropout_does_not_depend_on_the_ranks() -> None:
    on_ranks(2, dropped)


def other_mods(rank: int, ranks: int) -> None:
    """Mods with tables by distance and with numbers of heads, and numbers that change before the backward."""
    mesh, whole = mesh_of(ranks), [x.requires_grad_() for x in inputs()]
    mask = create_block_mask(mods.causal, None, None, S, S, device="cpu")
    table = torch.randn(32, HQ, dtype=torch.float64, requires_grad=True)
    d_out = torch.randn(B, HQ, S, DV, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    t5, state = mods.t5_bias(table), {"scale": 1.0}

    def scaled(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * state["scale"]

    for scheme in SCHEMES:
        plan = create_cp_plan(mods.causal, None, None, S, S, mesh, scheme=scheme)
        local = [plan.shard(x.detach(), 2).requires_grad_() for x in whole]
        for mod, learned in ((t5, [table]), (mods.alibi(HQ), [])):
            expected = one_process(*whole, mod, mask, enable_gqa=True)
            wanted = torch.autograd.grad(expected, [*whole, *learned], d_out)
            out = flex_attention(*local, mod, enable_gqa=True, plan=plan)
            close(out, plan.shard(expected, 2), scheme)
            found = torch.autograd.grad(out, [*local, *learned], plan.shard(d_out, 2))
            for x, y in zip(found[:3], wanted, strict=False):
                close(x, plan.shard(y, 2), f"gradient, {scheme}")
            if learned:
                dist.all_reduce(found[3])
                close(found[3], wanted[3], f"gradient of the table, {scheme}")
        outs, expecteds = [], []
        for scale in (0.5, 3.0):  # the number that the mod reads has changed when the backward runs
            state["scale"] = scale
            outs.append(flex_attention(*local, scaled, enable_gqa=True, plan=plan))
            expecteds.append(one_process(*whole, scaled, mask, enable_gqa=True))
        found = torch.autograd.grad(sum(outs), local, plan.shard(d_out, 2))
        for x, y in zip(found, torch.autograd.grad(sum(expecteds), whole, d_out), strict=True):
            close(x, plan.shard(y, 2), f"numbers of the forward, {scheme}")
        with torch.autocast("cpu", torch.bfloat16):
            single = [x.detach().float().requires_grad_() for x in local]
            out = flex_attention(*single, enable_gqa=True, plan=plan)
        assert out.dtype == torch.bfloat16
        for x, y in zip(torch.autograd.grad(out.float().sum(), single), single, strict=True):
            assert x.dtype == y.dtype and x.isfinite().all()


def test_mods_with_tables_heads_and_changing_numbers() -> None:
    on_ranks(2, other_mods)


# Chunks.


def plan_of(mask_mod: Any, length: int, ranks: int) -> Any:
    """Return the chunks of a plan, and the cost of each rank, without a process group."""
    mask = create_block_mask(mask_mod, None, None, length, length, device="cpu")
    return plan_module.fastest_chunks(mask, row_costs(mask), ranks, PER_RANK, length)


def test_zig_zag_is_a_special_case() -> None:
    assert deal([i + 1 for i in range(8)], 4) == [[0, 7], [1, 6], [2, 5], [3, 4]]
    # The longest first: 10 + 7 + 6 and 9 + 8 + 1. Swapping 10 and 8 leaves a difference of 1.
    assert deal([10, 9, 8, 7, 6, 1], 2) == [[2, 3, 4], [0, 1, 5]]
    chunks, costs = plan_of(mods.causal, 65_536, 4)
    eighth = 8192
    assert [[c.tokens for c in own] for own in chunks] == [
        [(0, eighth), (7 * eighth, 8 * eighth)],
        [(eighth, 2 * eighth), (6 * eighth, 7 * eighth)],
        [(2 * eighth, 3 * eighth), (5 * eighth, 6 * eighth)],
        [(3 * eighth, 5 * eighth)],
    ]
    assert max(costs) == min(costs)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_windows_stay_with_their_neighbors(ranks: int) -> None:
    chunks, _ = plan_of(mods.sliding_window(4096), 65_536, ranks)
    assert [len(own) for own in chunks] == [1] * ranks
    assert [c.keys[0][0] for (c,) in chunks[1:]] == [c.tokens[0] - 4096 for (c,) in chunks[1:]]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_token_has_one_rank(ranks: int) -> None:
    rows = torch.randint(1, 50, (37,), generator=torch.Generator().manual_seed(ranks)).tolist()
    for per_rank in PER_RANK:
        dealt = shares(rows, ranks, per_rank)
        tokens = sorted(i for spans in dealt for start, stop in spans for i in range(start, stop))
        assert tokens == list(range(37)) and len(dealt) == ranks


def test_spans() -> None:
    assert cut(3, 4) == [(0, 0), (0, 1), (1, 2), (2, 3)]
    assert joined([(0, 2), (2, 3), (5, 5), (7, 9)]) == [(0, 3), (7, 9)]
    assert union([[(4, 6)], [(0, 2), (5, 9)]]) == [(0, 2), (4, 9)]
    assert common([(0, 5), (8, 9)], [(3, 9)]) == [(3, 5), (8, 9)]
    assert places([(6, 7), (1, 3)], [(5, 8), (0, 4)]) == [(1, 2), (4, 6)]


# What is sent.


def recorded() -> list[tuple[list[int], list[int]]]:
    """Return a list to which each all_to_all_single adds the rows that it sends to each rank, and receives."""
    found: list[tuple[list[int], list[int]]] = []
    original: Any = dist.all_to_all_single

    def record(output: Tensor, input: Tensor, received: list[int], sent: list[int], **rest: Any) -> Any:
        assert (len(output), len(input)) == (sum(received), sum(sent))
        found.append((sent, received))
        return original(output, input, received, sent, **rest)

    dist.all_to_all_single = record
    return found


def counted(rank: int, ranks: int) -> None:
    """One message forward and one backward, with the rows of one block. The first rank copies no keys."""
    messages = recorded()
    plan = create_cp_plan(mods.sliding_window(100), None, None, 2048, 2048, mesh_of(ranks), scheme="gather")
    q, k, v = (plan.shard(x, 2).requires_grad_() for x in inputs(2048, torch.float32))
    flex_attention(q, k, v, enable_gqa=True, plan=plan).sum().backward()
    (sent, received), back = messages
    assert sent == [128 if other == rank + 1 else 0 for other in range(ranks)], "one block holds the window"
    assert received == plan.received(rank) == [128 if other == rank - 1 else 0 for other in range(ranks)]
    assert back == (received, sent)
    ((keys, values),) = keys_of_spans(plan, k, v)
    is_view = [x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for x, y in ((keys, k), (values, v))]
    assert is_view == [rank == 0] * 2
    assert keys.size(2) == k.size(2) + (128 if rank else 0)


@pytest.mark.slow
def test_a_window_is_sent_to_the_next_rank_only() -> None:
    on_ranks(4, counted)


def documents_stay(rank: int, ranks: int) -> None:
    ids = torch.arange(2048) // 256
    plan = create_cp_plan(mods.document_causal(ids), None, None, 2048, 2048, mesh_of(ranks))
    assert not any(plan.received(other) for other in range(ranks)) or not any(
        map(sum, map(plan.received, range(ranks)))
    )
    assert sorted(plan.permutation.tolist()) == list(range(2048))
    tokens = torch.arange(2048)
    assert torch.equal(plan.shard(tokens, 0), plan.positions)
    assert "receives keys: none" in repr(plan)
    messages = recorded()
    q, k, v = (plan.shard(x, 2).requires_grad_() for x in inputs(2048, torch.float32))
    assert distributed.attention.scheme_of(plan, q, k, v) == "gather"
    flex_attention(q, k, v, enable_gqa=True, plan=plan).sum().backward()
    assert not messages


def test_documents_of_one_rank_are_not_sent() -> None:
    on_ranks(2, documents_stay)


def learned_twice(rank: int, ranks: int) -> None:
    """Second derivatives, the same bits each time in bfloat16, and gradients of value alone."""
    whole = [x.requires_grad_() for x in inputs()]
    mask = create_block_mask(mods.causal, None, None, S, S, device="cpu")
    out = one_process(*whole, None, mask, enable_gqa=True)
    d_out = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(4))
    first = torch.autograd.grad(out, whole, d_out, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), whole)
    plan = create_cp_plan(mods.causal, None, None, S, S, mesh_of(ranks), scheme="gather", chunks_per_rank=2)
    local = [plan.shard(x.detach(), 2).requires_grad_() for x in whole]
    ours = torch.autograd.grad(
        flex_attention(*local, enable_gqa=True, plan=plan), local, plan.shard(d_out, 2), create_graph=True
    )
    for x, y in zip(torch.autograd.grad(sum(x.square().sum() for x in ours), local), second, strict=True):
        close(x, plan.shard(y, 2), "second derivative")
    half = [x.detach().bfloat16().requires_grad_() for x in local]
    found = [
        torch.autograd.grad(flex_attention(*half, enable_gqa=True, plan=plan), half, plan.shard(d_out, 2).bfloat16())
        for _ in range(2)
    ]
    for x, y, z in zip(*found, ours, strict=True):
        assert x.dtype == torch.bfloat16 and torch.equal(x, y)
        torch.testing.assert_close(x.double(), z.detach(), rtol=0.03, atol=0.03)
    q, k, v = (x.detach() for x in local)
    of_value = torch.autograd.grad(
        flex_attention(q, k, v.requires_grad_(), enable_gqa=True, plan=plan), v, plan.shard(d_out, 2)
    )
    close(of_value[0], ours[2], "value alone")


def test_gathered_gradients() -> None:
    on_ranks(2, learned_twice)


# DTensors.


def tensor_parallel(rank: int, ranks: int) -> None:
    """Heads and batches are sharded: nothing is sent, and mods see heads and batches of the whole tensors."""

    whole = [x.requires_grad_() for x in inputs()]
    gain = torch.rand(B, HQ, dtype=torch.float64)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * gain[b, h]

    sink = torch.randn(HQ, dtype=torch.float64)
    mask = create_block_mask(by_head, None, HQ, S, S, device="cpu")
    expected = one_process(*whole, score_mod, mask, enable_gqa=True, sink=sink)
    d_out = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, whole, d_out)
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    for placements in ((Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Replicate())):
        if ranks == 2 and isinstance(placements[0], Shard):
            continue
        sharded = [distribute_tensor(x.detach(), mesh, placements).requires_grad_() for x in whole]
        out, aux = flex_attention(
            *sharded, score_mod, mask, enable_gqa=True, sink=sink, return_aux=AuxRequest(lse=True)
        )
        assert isinstance(out, DTensor) and out.placements == placements and out.shape == expected.shape
        assert aux.lse.placements == placements and aux.lse.shape == expected.shape[:3]
        close(out.full_tensor(), expected, str(placements))
        found = torch.autograd.grad(out, sharded, distribute_tensor(d_out, mesh, placements))
        for x, y in zip(found, gradients, strict=True):
            assert isinstance(x, DTensor)
            close(x.full_tensor(), y, f"gradient, {placements}")
    with pytest.raises(ArgumentError, match="key: found placements"):
        q, k, v = (
            distribute_tensor(x.detach(), mesh, p)
            for x, p in zip(
                whole, [(Replicate(), Shard(1)), (Replicate(), Replicate()), (Replicate(), Shard(1))], strict=True
            )
        )
        flex_attention(q, k, v, enable_gqa=True)
    with pytest.raises(ArgumentError, match="make a plan"):
        q, k, v = (distribute_tensor(x.detach(), mesh, (Replicate(), Shard(2))) for x in whole)
        flex_attention(q, k, v, enable_gqa=True)
    # Heads and tokens: the plan's dimension is "tp" here, and heads are sharded over "dp".
    if ranks == 4:
        plan = create_cp_plan(mods.causal, None, None, S, S, mesh["tp"], scheme="gather")
        causal = create_block_mask(mods.causal, None, None, S, S, device="cpu")
        wanted = one_process(*whole, score_mod, causal, enable_gqa=True)
        half = rank // 2
        local = [x.detach()[:, half * x.size(1) // 2 : (half + 1) * x.size(1) // 2] for x in whole]
        given = [
            DTensor.from_local(
                plan.shard(x, 2), mesh, (Shard(1), Shard(2)), run_check=False, shape=y.shape, stride=y.stride()
            )
            for x, y in zip(local, whole, strict=True)
        ]
        out = flex_attention(*given, score_mod, enable_gqa=True, plan=plan)
        assert out.placements == (Shard(1), Shard(2))
        close(out.to_local(), plan.shard(wanted[:, half * HQ // 2 : (half + 1) * HQ // 2], 2), "heads and tokens")


def test_tensor_parallel_heads() -> None:
    on_ranks(2, tensor_parallel)


@pytest.mark.slow
def test_tensor_parallel_on_two_dimensions() -> None:
    on_ranks(4, tensor_parallel)


# Inside of other features.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.slopes = nn.Parameter(torch.full((4,), 0.1))

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + self.slopes[h] * (kv_idx - q_idx)

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = flex_attention(q, k, v, self.score_mod, plan=plan)
        return x + self.proj(out.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.blocks, self.again = nn.ModuleList(Block() for _ in range(2)), again

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, plan, use_reentrant=i > 0) if self.again else block(x, plan)
        return x


def composed(rank: int, ranks: int, scheme: str) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh, x = mesh_of(ranks), torch.randn(1, 500, 32)
    plan = create_cp_plan(mods.causal, None, None, 500, 500, mesh, scheme=scheme)
    torch.manual_seed(3)
    plain, again, sharded = Stack(), Stack(True), Stack()
    again.load_state_dict(plain.state_dict())
    sharded.load_state_dict(plain.state_dict())
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    results = []
    for model in (plain, again, sharded):
        model(plan.shard(x, 1), plan).square().sum().backward()
        found = []
        for p in model.parameters():
            assert p.grad is not None
            if isinstance(p.grad, DTensor):
                found.append(p.grad.full_tensor() * ranks)  # FSDP averages
            else:
                dist.all_reduce(p.grad)
                found.append(p.grad)
        results.append(found)
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpoints_and_fsdp(scheme: str) -> None:
    on_ranks(2, composed, scheme)


def compiled(rank: int, ranks: int) -> None:
    mesh, x = mesh_of(ranks), torch.randn(1, 500, 32)
    torch.manual_seed(3)
    block = Block()
    for scheme in ("gather", "heads", "ring"):
        plan = create_cp_plan(mods.causal, None, None, 500, 500, mesh, scheme=scheme)
        local = plan.shard(x, 1)
        expected = block(local, plan)
        wanted = torch.autograd.grad(expected.square().sum(), block.qkv.weight)
        torch._dynamo.reset()
        found = torch.compile(block, backend="aot_eager")(local, plan)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), block.qkv.weight), wanted)


@pytest.mark.slow
def test_compiled_models() -> None:
    on_ranks(2, compiled)


# Errors.


def wrong_calls(rank: int, ranks: int) -> None:
    mesh = mesh_of(ranks)
    plan = create_cp_plan(mods.causal, None, None, S, S, mesh)
    q, k, v = inputs()
    with pytest.raises(ArgumentError, match=r"query: found shape .* Pass plan.shard"):
        flex_attention(q, k, v, enable_gqa=True, plan=plan)
    with pytest.raises(ArgumentError, match="plan: found None"):
        flex_attention(q, k, v, enable_gqa=True)
    with pytest.raises(ArgumentError, match="block_mask: found a mask and a plan"):
        flex_attention(q, k, v, None, create_block_mask(mods.causal, None, None, S, S, device="cpu"), plan=plan)
    with pytest.raises(ArgumentError, match="KV_LEN: found 7"):
        create_cp_plan(mods.causal, None, None, S, 7, mesh)
    with pytest.raises(ArgumentError, match="scheme: found 'star'"):
        create_cp_plan(mods.causal, None, None, S, S, mesh, scheme="star")
    with pytest.raises(ArgumentError, match="chunks_per_rank"):
        create_cp_plan(mods.causal, None, None, S, S, mesh, chunks_per_rank=17)
    heads = create_cp_plan(mods.causal, None, None, S, S, mesh, scheme="heads")
    with pytest.raises(UnsupportedError, match="3 heads"):
        flex_attention(*(heads.shard(torch.randn(1, 3, S, 8), 2) for _ in range(3)), plan=heads)
    others = create_cp_plan(mods.document(torch.arange(S) // (300 + 400 * rank)), None, None, S, S, mesh)
    with pytest.raises(ArgumentError, match="plan: found different plans on ranks 0 and 1"):
        flex_attention(*(torch.randn(1, 2, len(others.positions), 8) for _ in range(3)), plan=others)
    with pytest.raises(DtypeError, match=r"value: found torch\.float32"):
        flex_attention(plan.shard(q, 2), plan.shard(k, 2), plan.shard(v, 2).float(), enable_gqa=True, plan=plan)
    uneven = [distribute_tensor(torch.randn(1, n, 64, 8), mesh, (Shard(1),)) for n in (24, 3, 3)]
    with pytest.raises(ArgumentError, match="key: found 3 heads on 2 ranks"):
        flex_attention(*uneven, enable_gqa=True)
    partial = [DTensor.from_local(torch.randn(1, 2, 64, 8), mesh, (Partial(),)) for _ in range(3)]
    with pytest.raises(ArgumentError, match="query: found placements"):
        flex_attention(*partial)
    with pytest.raises(UnsupportedError, match="plan: found forward mode"), forward_ad.dual_level():
        flex_attention(*(plan.shard(x, 2) for x in (q, k, v)), enable_gqa=True, plan=plan)
    ids = IDS.clone()
    stale = create_cp_plan(mods.document(ids), None, None, S, S, mesh)
    ids[5] = 9
    with pytest.raises(MutationError):
        flex_attention(*(stale.shard(x, 2) for x in (q, k, v)), enable_gqa=True, plan=stale)


def test_wrong_calls_name_their_argument() -> None:
    on_ranks(2, wrong_calls)


def one_is_missing(rank: int, ranks: int, how: str) -> None:
    plan = create_cp_plan(mods.causal, None, None, 512, 512, mesh_of(ranks), scheme="gather")
    q, k, v = (plan.shard(x, 2) for x in inputs(512, torch.float32))
    distributed_c10d._set_pg_timeout(timedelta(seconds=2), plan.device_mesh.get_group())
    if rank == 1:
        if how == "killed":
            os._exit(0)
        time.sleep(6)
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed out|closed|reset"):
        flex_attention(q, k, v, enable_gqa=True, plan=plan)
    assert time.monotonic() - began < 5.5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "late"])
def test_a_missing_rank_is_an_error_within_the_timeout(how: str) -> None:
    on_ranks(2, one_is_missing, how)


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
