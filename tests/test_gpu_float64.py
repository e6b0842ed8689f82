"""float64 on a GPU: gradcheck there; on a CPU, that the engine keeps to the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from elsewhere import back, elsewhere, there
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, explain, flex_attention, tune
from flexattn.block_mask import BlockMask
from flexattn.call.call import Call
from flexattn.call.pose import pose
from flexattn.call.problem import Problem
from flexattn.engines import cpu, gpu_float64
from flexattn.engines.second_order import tangents
from flexattn.errors import OptionError, UnsupportedError
from flexattn.graph.bound_mod import BoundMod

M, N = 37, 45


def causal(b, h, q_idx, kv_idx):
    return q_idx + 8 >= kv_idx


def by_documents(ids):
    return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cases() -> dict[str, dict[str, Any]]:
    """Return arguments of flex_attention by name, on the CPU; `learned` are captured tensors."""
    bias, gate, index = drawn(4, M + N, seed=1), drawn(N, seed=2), (torch.arange(N) * 7 % N).int()
    ids = torch.randint(0, 3, (2, N), generator=torch.Generator().manual_seed(3))
    mask = create_block_mask(causal, None, None, M, N, "cpu", 16)
    documents = create_block_mask(by_documents(ids), 2, None, M, N, "cpu", 16)
    sliced = (index, 0.5)
    return {
        "plain": {},
        "mask": {"block_mask": mask},
        "documents": {"block_mask": documents},
        "bias": {
            "score_mod": lambda s, b, h, i, j: torch.tanh(s * gate[j]) + bias[h, i - j + N - 1], "block_mask": mask,
            "learned": (bias, gate),
        },
        "indices": {"score_mod": lambda s, b, h, i, j: s * sliced[1] + sliced[0][j] * 0.01 - bias[h, 3]},
        "sink": {"sink": drawn(4, seed=4), "block_mask": mask, "score_mod": lambda s, b, h, i, j: s - (i - j).abs()},
        "dropout": {"dropout_p": 0.25, "block_mask": mask},
        "invariant": {"kernel_options": {"BATCH_INVARIANT": True}, "block_mask": mask},
    }  # fmt: skip


def posed(arguments: dict[str, Any]) -> Problem:
    """Return the problem of a call on the CPU whose floating tensors all learn."""
    given = dict(arguments)
    for learned in given.pop("learned", ()):
        learned.requires_grad_()
    if "sink" in given:
        given["sink"].requires_grad_()
    query, key, value = (x.requires_grad_() for x in (drawn(2, 4, M, 8), drawn(2, 2, N, 8), drawn(2, 2, N, 6)))
    options = {"score_mod": None, "block_mask": None, "scale": None, "kernel_options": None, **given}
    torch.manual_seed(0)
    return pose(Call(query, key, value, enable_gqa=True, max_scores=True, **options))


def moved(problem: Problem, move: Any) -> Problem:
    """Return the problem with each tensor moved."""

    def bound(mod: BoundMod | None) -> BoundMod | None:
        return None if mod is None else BoundMod(mod.graph, tuple(map(move, mod.captures)), mod.numbers)

    mask, dropout = problem.block_mask, problem.dropout
    return replace(
        problem, query=move(problem.query), key=move(problem.key), value=move(problem.value),
        score=bound(problem.score), mask=bound(problem.mask), sink=None if problem.sink is None else move(problem.sink),
        block_mask=None if mask is None else lists_moved(mask, move),
        dropout=None if dropout is None else replace(dropout, seed=move(dropout.seed)),
    )  # fmt: skip


def lists_moved(mask: BlockMask, move: Any) -> BlockMask:
    kv_runs, q_runs = mask.kv_runs.map(move), mask.q_runs and mask.q_runs.map(move)
    return BlockMask.from_runs(kv_runs, q_runs, mask.B, mask.H, mask.seq_lengths, mask.BLOCK_SIZE, mask.mask_mod)


@torch.no_grad()
def results(engine: Any, problem: Problem, d_out: Tensor, d_lse: Tensor) -> list[Tensor]:
    """Return out, lse, the largest scores, every gradient, and the tangents along the tensors themselves."""
    out, lse, largest = engine.forward(problem)
    assert largest is not None
    needs = (True, True, True, problem.sink is not None)
    *of_inputs, capture_gradients, of_sink = engine.backward(problem, out, lse, d_out, d_lse, needs)
    gradients = [x for x in (*of_inputs, *capture_gradients, of_sink) if x is not None]
    return [out, lse, largest, *gradients, *tangents(problem, problem)]


@pytest.mark.parametrize("name", cases())
def test_every_tensor_stays_on_the_device(name: str) -> None:
    problem = posed(cases()[name])
    d_out, d_lse = drawn(2, 4, M, 6, seed=5), drawn(2, 4, M, seed=6)
    want = results(cpu, problem, d_out, d_lse)
    with elsewhere():
        found = results(gpu_float64, moved(problem, there), there(d_out), there(d_lse))
    assert len(found) == len(want) >= 8
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(back(a), b, rtol=1e-11, atol=1e-12)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Run = Callable[..., Any]


def checked(name: str, device: str) -> tuple[Run, tuple[Tensor, ...]]:
    """Return a function of query, key, value and what else learns, and its arguments."""
    B, Hq, Hkv, M, N, D = 2, 4, 2, 5, 7, 3
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 2]], device=device)
    masks = {
        "causal": create_block_mask(lambda b, h, i, j: i + 2 >= j, None, None, M, N, device, 4),
        "documents": create_block_mask(by_documents(ids), B, None, M, N, device, 4),
        "none": None,
    }
    aux = AuxRequest(lse=True)

    def run(mask: str, score_mod: Any = None, **others: Any) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            arguments = {"enable_gqa": True, "return_aux": aux, **others}
            out, found = flex_attention(q, k, v, score_mod, masks[mask], **arguments)
            return out, found.lse

        return attend

    def bias(table: Tensor) -> Any:
        return lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0) + table[h, i - j + N - 1]

    runs: dict[str, tuple[Run, tuple[int, ...]]] = {
        "plain": (lambda q, k, v: run("none")(q, k, v), ()),
        "documents": (lambda q, k, v: run("documents")(q, k, v), ()),
        "bias": (lambda q, k, v, table: run("causal", bias(table))(q, k, v), (Hq, M + N - 1)),
        "sink": (lambda q, k, v, sink: run("causal", sink=sink)(q, k, v), (Hq,)),
    }
    attend, shape = runs[name]
    shapes = [(B, Hq, M, D), (B, Hkv, N, D), (B, Hkv, N, D), *([shape] if shape else [])]
    return attend, tuple(drawn(*x, seed=i).to(device).requires_grad_() for i, x in enumerate(shapes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["plain", "documents", "bias", "sink"])
def test_gradcheck(name: str, device: str) -> None:
    attend, tensors = checked(name, device)
    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, tensors, fast_mode=True)
    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True, check_forward_ad=True, check_backward_ad=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases())
def test_as_on_a_cpu(name: str) -> None:
    problem = posed(cases()[name])
    d_out, d_lse = drawn(2, 4, M, 6, seed=5), drawn(2, 4, M, seed=6)
    want = results(cpu, problem, d_out, d_lse)
    found = results(gpu_float64, moved(problem, lambda x: x.cuda()), d_out.cuda(), d_lse.cuda())
    for a, b in zip(found, want, strict=True):
        assert a.is_cuda
        torch.testing.assert_close(a.cpu(), b, rtol=1e-11, atol=1e-12)


@pytest.mark.gpu
def test_long_sequences_take_little_memory() -> None:
    """As a tensor of queries by keys, the scores would take 2 GiB."""
    q, k, v = (drawn(1, 1, 16384, 16, seed=i).cuda().requires_grad_() for i in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flex_attention(q, k, v).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**29


@pytest.mark.gpu
def test_who_runs_on_a_gpu() -> None:
    q = drawn(1, 2, 64, 16).cuda()
    assert explain(q, q, q).engine == "gpu_float64"
    with pytest.raises(OptionError, match="found BACKEND='TRITON' with float64 on a GPU, expected AUTO"):
        flex_attention(q, q, q, kernel_options={"BACKEND": "TRITON"})
    with pytest.raises(UnsupportedError, match=r"found float64 .* on cuda:0, expected one that a Triton kernel"):
        tune(q, q, q)


def test_what_runs() -> None:
    q = drawn(1, 2, 64, 16)
    assert explain(q, q, q, target="sm_90").engine == "gpu_float64"
    assert explain(q.float(), q.float(), q.float(), target="sm_90").engine == "triton"
    assert explain(q, q, q).engine == "cpu"
    with pytest.raises(OptionError, match="found BACKEND='TRITON' with float64 on a GPU, expected AUTO"):
        explain(q, q, q, kernel_options={"BACKEND": "TRITON"}, target="sm_90")
    with pytest.raises(OptionError, match="found bwd_BACKEND='HOPPER' with float64 on a GPU, expected AUTO"):
        explain(q, q, q, kernel_options={"bwd_BACKEND": "HOPPER"}, target="sm_90")
