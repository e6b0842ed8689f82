"""flex_attention inside of checkpoint, autocast, inference_mode, threads, profilers and FlopCounterMode."""

from __future__ import annotations

import copy
import functools
import gc
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as upstream
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from flexattn import BlockMask, create_block_mask, flex_attention, mods, varlen_attn
from flexattn.call.call import Call
from flexattn.call.layout import LayoutArguments
from flexattn.call.pose import pose
from flexattn.engines import cpu, watched
from flexattn.errors import MutationError, UnsupportedError

B, H, T, D = 2, 2, 80, 16
MASK = create_block_mask(mods.causal, None, None, T, T, device="cpu", BLOCK_SIZE=32)


class Block(nn.Module):
    """An attention layer whose score_mod reads a parameter and a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(D, 3 * D, generator=generator) / 4)
        self.bias = nn.Parameter(torch.randn(H, 2 * T, generator=generator))
        self.register_buffer("slope", torch.tensor([0.5, 0.25]))
        self.dropout = dropout

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[h, q_idx - kv_idx + T] * self.slope[h]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.weight).chunk(3, -1)
        return flex_attention(q, k, v, self.score_mod, MASK, dropout_p=self.dropout).sin()


def inputs() -> Tensor:
    return torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(0)).requires_grad_()


def run(block: Block, around: Callable[..., Tensor]) -> list[Tensor]:
    """Return the output of two blocks in a row, and the gradients of the input and the parameters."""
    x = inputs()
    torch.manual_seed(7)
    out = around(block, around(block, x))
    block.zero_grad()
    out.square().sum().backward()
    return [out, *(t.grad for t in (x, *block.parameters()))]


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def forwards(monkeypatch) -> list[str]:
    """Return a list to which each run of the engine's forward appends."""
    runs: list[str] = []
    original = cpu.forward

    def forward(problem):
        runs.append(threading.current_thread().name)
        return original(problem)

    monkeypatch.setattr(cpu, "forward", forward)
    return runs


SAVE = {
    "products": [torch.ops.aten.mm.default, torch.ops.aten.bmm.default],
    "everything": lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE,
    "nothing": lambda context, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE,
}
CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    **{
        f"selective: {name}": {
            "use_reentrant": False,
            "context_fn": functools.partial(create_selective_checkpoint_contexts, policy),
        }
        for name, policy in SAVE.items()
    },
}


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoint(kind: str, dropout: float, forwards: list[str]) -> None:
    block = Block(dropout)
    expected = run(block, lambda f, x: f(x))
    assert len(forwards) == 2
    found = run(block, lambda f, x: checkpoint(f, x, **CHECKPOINTS[kind]))
    assert len(forwards) == 2 + 4  # each of the two blocks runs again, once
    check_equal(found, expected)


@pytest.mark.parametrize("masked", [None, "document", "any mod"])
@pytest.mark.parametrize(
    "stored",
    [SAVE["products"], SAVE["everything"], [torch.ops.aten._softmax.default], [torch.ops.aten.add.Tensor]],
    ids=["products", "everything", "softmax", "additions"],
)
def test_selective_checkpoint_of_a_first_call(stored: Any, masked: str | None) -> None:
    """What a trace computes, and what a new mask does, is not stored in place of the region's own results."""
    ids = torch.arange(T) // 30
    w, u, left, right = (torch.randn(*shape).requires_grad_() for shape in ((16, 16), (16, 16), (T, 4), (4, T)))
    table, x = torch.randn(T), torch.randn(1, 2, T, 16)
    mod = lambda s, b, h, i, j: s + (left @ right)[i, j] + torch.softmax(table, 0)[j]  # noqa: E731
    rules = {"document": mods.document(ids), "any mod": lambda b, h, i, j: ids[i] >= ids[j]}

    def layer(x: Tensor) -> Tensor:
        y = x @ w
        mask = masked and create_block_mask(rules[masked], None, None, T, T, device="cpu", BLOCK_SIZE=32)
        return flex_attention(y, y, y, mod, mask or None) @ u * torch.softmax(y[..., :1], 2) + y

    def of(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(f(x).square().sum(), (w, u, left, right)))

    context = functools.partial(create_selective_checkpoint_contexts, stored)
    for _ in range(2):  # the first call traces
        found = of(lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=context))
        assert all(type(x) is Tensor for x in found)
        check_equal(found, of(layer))


REGIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "lengths": lambda x: flex_attention(x, x, x, seqused_k=torch.tensor([20, 67], dtype=torch.int32)),
    "offsets and a mask": lambda x: flex_attention(
        x[:, :, :9], x, x, block_mask=MASK, q_offsets=torch.tensor([3, 40], dtype=torch.int32)
    ),
    "pages": lambda x: flex_attention(
        x, *(t.reshape(B, H, 5, 16, D).permute(0, 2, 3, 1, 4).flatten(0, 1) for t in (x, x * 2)),
        block_table=torch.arange(10, dtype=torch.int32).view(B, 5),
    ),
    "a mask that is cut": lambda x: flex_attention(x[:, :, :50], x, x, block_mask=MASK._adjust(50, T)),
    "a slice of a mask": lambda x: flex_attention(x[:, :, :32], x, x, block_mask=MASK[:, :, :1]),
    "a mask of lists": lambda x: flex_attention(x, x, x, block_mask=BlockMask.from_kv_blocks(
        MASK.kv_num_blocks, MASK.kv_indices, MASK.full_kv_num_blocks, MASK.full_kv_indices,
        BLOCK_SIZE=32, mask_mod=mods.causal, seq_lengths=(T, T),
    )),
}  # fmt: skip


STORED = pytest.mark.parametrize(
    "stored",
    [SAVE["products"], SAVE["everything"], [torch.ops.aten.mul.Tensor], [torch.ops.aten.slice.Tensor]],
    ids=["products", "everything", "multiplications", "slices"],
)


@pytest.mark.parametrize("name", REGIONS)
@STORED
def test_selective_checkpoint_of_a_region(name: str, stored: Any) -> None:
    """What a call computes of its arguments only the first time is not stored, nor what masks are derived with."""
    w = torch.randn(D, D, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return (REGIONS[name](x @ w) * x.mean()) @ w

    def of(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = inputs()
        return list(torch.autograd.grad(f(x).square().sum(), (x, w)))

    context = functools.partial(create_selective_checkpoint_contexts, stored)
    for _ in range(2):
        found = of(lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=context))
        check_equal(found, of(layer))


@STORED
def test_selective_checkpoint_of_nested_tensors(stored: Any) -> None:
    rows, w = torch.randn(T, H, D, requires_grad=True), torch.randn(D, D, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        return flex_attention(y, y, y).transpose(1, 2).values() @ w

    context = functools.partial(create_selective_checkpoint_contexts, stored)
    for _ in range(2):
        x = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 30, 30, T]))
        out = checkpoint(layer, x, use_reentrant=False, context_fn=context)
        assert isinstance(out, Tensor)
        found = torch.autograd.grad(out.square().sum(), (rows, w))
        x = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 30, 30, T]))
        check_equal(list(found), list(torch.autograd.grad(layer(x).square().sum(), (rows, w))))


def test_checkpoint_without_the_random_state_draws_other_dropout() -> None:
    block = Block(0.25)
    expected = run(block, lambda f, x: f(x))
    found = run(block, lambda f, x: checkpoint(f, x, use_reentrant=False, preserve_rng_state=False))
    assert torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_mask_that_changes_before_the_backward_raises(reentrant: bool) -> None:
    ids = torch.arange(T) // 30
    mask = create_block_mask(mods.document(ids), None, None, T, T, device="cpu", BLOCK_SIZE=32)
    x = inputs()
    out = checkpoint(lambda y: flex_attention(y, y, y, block_mask=mask), x, use_reentrant=reentrant)
    ids.zero_()
    with pytest.raises(MutationError, match="changed in place"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_autocast_under_checkpoint(reentrant: bool) -> None:
    block = Block()

    def casted(around: Callable[..., Tensor]) -> list[Tensor]:
        # With the cache, the gradients of a weight that is cast once are summed in bfloat16. A checkpoint casts again.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return run(block, around)

    expected = casted(lambda f, x: f(x))
    assert expected[0].dtype == torch.bfloat16 and expected[1].dtype == torch.float32
    check_equal(casted(lambda f, x: checkpoint(f, x, use_reentrant=reentrant)), expected)


def test_autocast_is_the_call_in_its_dtype() -> None:
    x = inputs()
    block = Block()
    d_out = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = flex_attention(x, x, x, block.score_mod, MASK)
        gradients = torch.autograd.grad(found, [x, block.bias], d_out)
    low = [x.bfloat16() for _ in range(3)]
    expected = flex_attention(*low, block.score_mod, MASK)
    assert torch.equal(found, expected)
    check_equal(list(gradients), list(torch.autograd.grad(expected, [x, block.bias], d_out)))
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert flex_attention(x, x, x).dtype == torch.float32


def test_inference_mode() -> None:
    block = Block()
    expected = block(inputs())
    with torch.inference_mode():
        made = create_block_mask(mods.causal, None, None, T, T, device="cpu", BLOCK_SIZE=32)
        x = inputs().detach()
        out = block(x)
        assert out.is_inference() and torch.equal(out, expected)
        assert torch.equal(flex_attention(x, x, x, block_mask=made), flex_attention(x, x, x, block_mask=MASK))
    y = inputs()  # a mask that was built in inference mode serves a call with gradients
    check_equal(*(
        [flex_attention(y, y, y, block_mask=m), *torch.autograd.grad(flex_attention(y, y, y, block_mask=m).sum(), y)]
        for m in (made, MASK)
    ))  # fmt: skip


def test_threads_with_the_same_and_with_other_mods() -> None:
    """Calls of several threads at once, with gradients, give what they give one after another."""
    shared = Block()
    own = [Block() for _ in range(6)]
    for i, block in enumerate(own):
        block.slope.mul_(i + 1)
    scales = [0.1 * i for i in range(6)]

    def work(i: int) -> list[Tensor]:
        x, scale = inputs(), scales[i]
        window = create_block_mask(mods.sliding_window(3 + i), None, None, T, T, device="cpu", BLOCK_SIZE=32)
        out = flex_attention(x, x, x, lambda s, b, h, q, kv: s * scale + kv % (i + 2), window)
        found = [out, *torch.autograd.grad(out.square().sum(), x)]
        for block in (own[i], shared):
            out = block(x)
            found += [out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]
        return found

    barrier = threading.Barrier(6)

    def at_once(i: int) -> list[Tensor]:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(at_once, range(6)))
    for i in range(6):
        check_equal(found[i], work(i))


# FlopCounterMode and profilers.


def counts(function: Callable[[], Any]) -> dict[str, dict[str, int]]:
    with FlopCounterMode(display=False) as counter:
        function()
    return {name: {str(op): n for op, n in of.items()} for name, of in counter.get_flop_counts().items()}


def test_flops_of_attended_pairs() -> None:
    q, k, v = (torch.randn(B, H, T, width, requires_grad=True) for width in (D, D, 24))
    every = B * H * T * T
    assert counts(lambda: flex_attention(q, k, v)) == {"Global": {"flexattn.attention": 2 * every * (D + 24)}}
    causal = B * H * T * (T + 1) // 2
    found = counts(lambda: flex_attention(q, k, v, mods.alibi(H), MASK).sum().backward())
    backward = 2 * causal * (3 * D + 2 * 24)
    assert found == {"Global": {"flexattn.attention": 2 * causal * (D + 24), "flexattn.attention_backward": backward}}
    found = counts(lambda: torch.autograd.grad(flex_attention(q, k, v, None, MASK).sum(), v))
    assert found["Global"]["flexattn.attention_backward"] == 2 * causal * (3 * D + 2 * 24)


@pytest.mark.parametrize("lengths", [[10, 20], [64], [5, 5, 5], [128, 128], [100, 7, 200]])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_flops_of_packed_sequences(lengths: list[int], window: tuple[int, int]) -> None:
    cu, x = torch.tensor([0, *lengths]).cumsum(0).int(), torch.randn(sum(lengths), H, D)
    pairs = sum(n * n if window[1] else n * (n + 1) // 2 for n in lengths)
    found = counts(lambda: varlen_attn(x, x, x, cu, cu, max(lengths), max(lengths), window_size=window))
    assert found["Global"] == {"flexattn.attention": 4 * D * H * pairs}


def test_flops_of_a_mask_that_is_cut_and_of_all_pairs_in_order() -> None:
    mask = create_block_mask(mods.causal, None, None, T, T, device="cpu")
    x = torch.randn(1, H, T, D)
    whole = counts(lambda: flex_attention(x, x, x, None, mask))
    assert counts(lambda: flex_attention(x, x, x, None, mask, kernel_options={"BATCH_INVARIANT": True})) == whole
    mask.seq_lengths = (T - 6, T - 6)
    y = x[:, :, : T - 6]
    cut = counts(lambda: flex_attention(y, y, y, None, mask))
    assert cut["Global"] == {"flexattn.attention": 4 * D * H * (T - 6) * (T - 5) // 2}


@pytest.mark.parametrize("randomness", ["error", "different"])
def test_dropout_in_vmap(randomness: str) -> None:
    x = torch.randn(2, 1, 1, T, D)
    with pytest.raises(UnsupportedError, match=rf"dropout_p: found .* randomness='{randomness}', expected .*'same'"):
        torch.vmap(lambda x: flex_attention(x, x, x, dropout_p=0.5), randomness=randomness)(x)
    out = torch.vmap(lambda x: flex_attention(x, x, x, dropout_p=0.5), randomness="same")(x[:1].expand_as(x))
    assert torch.equal(out[0], out[1])


def test_sequences_that_differ_in_vmap() -> None:
    x, used = torch.randn(2, H, T, D), torch.tensor([[10, 20], [30, 40]], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="seqused_k: found a tensor that differs between the entries"):
        torch.vmap(lambda n: flex_attention(x, x, x, seqused_k=n))(used)


def test_flops_of_the_gradients_that_are_needed() -> None:
    q, k, v = (torch.randn(B, H, T, D) for _ in range(3))
    v.requires_grad_()
    found = counts(lambda: flex_attention(q, k, v).sum().backward())
    assert found["Global"]["flexattn.attention_backward"] == 2 * B * H * T * T * 2 * D


def test_flops_of_masks_per_batch_and_head() -> None:
    limit = torch.tensor([[10, 20], [30, 40]])
    mask = create_block_mask(lambda b, h, q, kv: kv < limit[b, h], B, H, T, T, device="cpu", BLOCK_SIZE=32)
    x = torch.randn(B, H, T, D)
    assert counts(lambda: flex_attention(x, x, x, block_mask=mask))["Global"]["flexattn.attention"] == (
        4 * D * T * int(limit.sum())
    )


def test_counted_masks_are_freed_and_counted_again_once_edited() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ids = torch.arange(T) // 10
            self.mask = create_block_mask(self.mask_mod, None, None, T, T, device="cpu", BLOCK_SIZE=T)

        def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return self.ids[q_idx] == self.ids[kv_idx]

    def flops_of(mask: BlockMask) -> int:
        return counts(lambda: flex_attention(x, x, x, block_mask=mask))["Global"]["flexattn.attention"]

    x, layer = torch.randn(B, H, T, D), Layer()
    assert flops_of(layer.mask) == B * H * 4 * D * T * 10
    layer.ids.copy_(torch.arange(T) // 20)
    layer.mask.mask_mod = layer.mask.mask_mod  # as MutationError says
    assert flops_of(layer.mask) == B * H * 4 * D * T * 20
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None


def test_a_mask_of_pytorch_is_freed_with_what_it_refers_to() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.length = T
            causal = lambda b, h, i, j: (i >= j) & (j < self.length)  # noqa: E731
            self.mask = upstream.create_block_mask(causal, None, None, T, T, device="cpu")

    x, layer = torch.randn(B, H, T, D), Layer()
    flex_attention(x, x, x, block_mask=layer.mask)
    for other in (copy.copy(layer.mask), copy.deepcopy(layer.mask)):
        assert torch.equal(flex_attention(x, x, x, block_mask=other), flex_attention(x, x, x, block_mask=layer.mask))
    del other
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None


def test_pairs_of_pages() -> None:
    q, pages, table = torch.zeros(B, H, 3, D), torch.zeros(9, 16, H, D), torch.zeros(B, 5, dtype=torch.int32)
    problem = pose(Call(q, pages, pages, layout=LayoutArguments(block_table=table)))
    assert watched.attending_pairs(problem) == B * H * 3 * 5 * 16


def test_flops_name_the_module_and_count_recomputation() -> None:
    block = Block()
    x = inputs()
    once = counts(lambda: block(x))
    assert once["Block"] == once["Global"]
    again = counts(lambda: checkpoint(block, x, use_reentrant=False).sum().backward())["Global"]
    assert again["flexattn.attention"] == 2 * once["Global"]["flexattn.attention"]


def test_a_formula_of_the_user_is_used() -> None:
    x = inputs()
    mapping = {torch.ops.flexattn.attention: lambda count, out_shape=None, **_: 1}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        flex_attention(x, x, x)
    assert counter.get_total_flops() == 1


def test_results_while_they_are_counted() -> None:
    expected = run(Block(), lambda f, x: f(x))
    with FlopCounterMode(display=False):
        found = run(Block(), lambda f, x: f(x))
    check_equal(found, expected)


def test_profiles_name_the_mods() -> None:
    def sloped(score, b, h, q_idx, kv_idx):
        return score - 0.5 * (q_idx - kv_idx).abs()

    x = inputs()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        flex_attention(x, x, x, sloped, MASK).sum().backward()
        flex_attention(x, x, x)
    names = {event.key: event.count for event in profile.key_averages() if event.key.startswith("flexattn.")}
    assert names == {
        "flexattn.forward(score_mod=sloped, mask_mod=causal)": 1,
        "flexattn.backward(score_mod=sloped, mask_mod=causal)": 1,
        "flexattn.forward()": 1,
    }


def test_profiles_of_compiled_calls_name_the_mods() -> None:
    def sloped(score, b, h, q_idx, kv_idx):
        return score - 0.5 * (q_idx - kv_idx).abs()

    x = inputs()
    call = torch.compile(lambda x: flex_attention(x, x, x, sloped, MASK), backend="aot_eager")
    call(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call(x).sum().backward()
    names = {event.key for event in profile.key_averages() if event.key.startswith("flexattn.")}
    assert names == {f"flexattn.{p}(score_mod=sloped, mask_mod=causal)" for p in ("forward", "backward")}


def test_a_call_that_nobody_watches_is_not_wrapped(monkeypatch) -> None:
    monkeypatch.setattr(watched, "range_name", lambda *_: pytest.fail("named without a profiler"))
    monkeypatch.setattr(watched, "flops", lambda *_: pytest.fail("counted without a counter"))
    run(Block(), lambda f, x: f(x))


@pytest.mark.gpu
def test_streams() -> None:
    """Calls on two streams at once, forward and backward, give what they give on one."""
    block = Block().cuda()
    mask = create_block_mask(mods.causal, None, None, T, T, device="cuda")

    def work() -> list[Tensor]:
        x = torch.randn(B, H, 4096, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        x.requires_grad_()
        out = flex_attention(x, x, x, lambda s, b, h, q, kv: s + block.slope[h])
        y = x[:, :, :T]
        near = flex_attention(y, y, y, block_mask=mask)
        return [out, near, *torch.autograd.grad(out.square().sum() + near.square().sum(), x)]

    expected = work()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(work())
    torch.cuda.synchronize()
    for tensors in found:
        check_equal(tensors, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices() -> None:
    """A call on a device that is not the current one, with a mask that was moved to it."""
    results = []
    for device in ("cuda:0", "cuda:1"):
        x = inputs().to(device).detach().requires_grad_()
        block = Block().to(device)
        mask = MASK.to(device)
        out = flex_attention(x, x, x, block.score_mod, mask)
        results.append([t.cpu() for t in (out, *torch.autograd.grad(out.square().sum(), [x, block.bias]))])
    torch.testing.assert_close(results[0], results[1])  # gradients are summed in any order
    assert torch.equal(results[0][0], results[1][0])


def test_the_page_about_composition_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "composition.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    exec(compile("\n".join(blocks), "composition.md", "exec"), {"__name__": "page"})
