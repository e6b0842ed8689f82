"""The blocks that Hopper kernels read of a mask with another BLOCK_SIZE. Here the CPU engine reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mask_cases import MASKS, assert_same_lists, make_mask

from flexattn import create_block_mask, explain, flex_attention, mods
from flexattn.block_mask import BlockMask
from flexattn.call.blocks_read import blocks_read
from flexattn.engines import cpu
from flexattn.errors import MutationError
from flexattn.machine.target import Target
from flexattn.mask_build import create, hopper_blocks
from flexattn.process.config import settings

T = 320


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "needs_hopper_blocks", lambda device, size: size != (128, 128))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int] | None]:
    """Return the BLOCK_SIZE of each forward that the CPU engine computes."""
    sizes: list[tuple[int, int] | None] = []
    original = cpu.forward

    def forward(problem: Any) -> Any:
        sizes.append(None if problem.block_mask is None else problem.block_mask.BLOCK_SIZE)
        return original(problem)

    monkeypatch.setattr(cpu, "forward", forward)
    return sizes


def mask_of(BLOCK_SIZE: int | tuple[int, int] = 64) -> BlockMask:
    return create_block_mask(
        mods.document_causal(torch.arange(T) // 50), None, None, T, T, device="cpu", BLOCK_SIZE=BLOCK_SIZE
    )


def some(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(1, 2, T, 16).to(dtype)


@pytest.mark.parametrize("size", [(16, 32), (64, 64), (192, 64), (256, 512)])
@pytest.mark.parametrize("name", ["causal", "sliding", "batches", "heads", "table"])
def test_both_lists_are_those_of_masks_of_their_size(name: str, size: tuple[int, int]) -> None:
    assert name in MASKS
    mod = make_mask(name, T)
    mask, fields = (create_block_mask(mod, 2, 3, T, T, device="cpu", BLOCK_SIZE=size) for _ in range(2))
    wanted = create_block_mask(mod, 2, 3, T, T, device="cpu")
    other = mask._for_hopper
    assert other is not None and other.BLOCK_SIZE == (128, 128) and wanted._for_hopper is None
    assert_same_lists([other.kv_runs, other.q_runs], [wanted.kv_runs, wanted.q_runs])
    assert size == mask.BLOCK_SIZE and mask.kv_indices.equal(fields.kv_indices)
    x = torch.randn(2, 3, T, 16).half()
    assert torch.equal(flex_attention(x, x, x, block_mask=mask), flex_attention(x, x, x, block_mask=wanted))


def test_which_calls_read_them(computed: list[tuple[int, int] | None]) -> None:
    mask = mask_of()
    for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float64):
        x = some(dtype)
        flex_attention(x, x, x, block_mask=mask)
    x = some()
    flex_attention(x, x, x, block_mask=mask, kernel_options={"fwd_BLOCK_M": 64})
    flex_attention(x, x, x, block_mask=mask, kernel_options={"ROWS_GUARANTEED_SAFE": True})
    with torch.autocast("cpu", torch.bfloat16):
        flex_attention(x.float(), x.float(), x.float(), block_mask=mask)
    large, small = (128, 128), (64, 64)
    assert computed == [large, small, large, small, small, large, large]


@pytest.mark.parametrize("options", [{"BACKEND": "TRITON"}, {"bwd_BACKEND": "TRITON_DECODE"}, {"num_warps": 4}])
def test_options_of_portable_kernels_keep_the_blocks_of_the_mask(options: dict[str, object]) -> None:
    mask = mask_of()
    assert blocks_read(mask, some(), options) is mask
    assert blocks_read(mask, some(), {"BACKEND": "HOPPER"}) is mask._for_hopper


def _with_lists(mask: BlockMask) -> None:
    mask.kv_runs = mask_of().kv_runs


def _with_mod(mask: BlockMask) -> None:
    mask.mask_mod = mods.causal


def _with_lengths(mask: BlockMask) -> None:
    mask.seq_lengths = (T - 64, T)


@pytest.mark.parametrize("edit", [_with_lists, _with_mod, _with_lengths])
def test_edited_masks_are_read_as_they_are(edit: Callable[[BlockMask], None]) -> None:
    mask = mask_of()
    edit(mask)
    assert mask._for_hopper is None and blocks_read(mask, some(), None) is mask


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies(copied: Callable[[BlockMask], BlockMask], computed: list[tuple[int, int] | None]) -> None:
    mask, x = mask_of(), some()
    again = copied(mask)
    out = flex_attention(x, x, x, block_mask=again)
    assert torch.equal(out, flex_attention(x, x, x, block_mask=mask)) and computed == [(128, 128)] * 2
    again.mask_mod = mods.causal
    assert mask._for_hopper is not None and again._for_hopper is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_changed_captures_raise_for_both(dtype: torch.dtype) -> None:
    ids, x = torch.arange(T) // 50, some(dtype)
    mask = create_block_mask(mods.document_causal(ids), None, None, T, T, device="cpu", BLOCK_SIZE=32)
    flex_attention(x, x, x, block_mask=mask)
    ids[3] = 7
    with pytest.raises(MutationError):
        flex_attention(x, x, x, block_mask=mask)


def test_compiled_calls_read_the_same_blocks(computed: list[tuple[int, int] | None]) -> None:
    torch._dynamo.reset()
    graphs: list[object] = []

    def backend(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def attend(x: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        return flex_attention(x, x, x, block_mask=mask)

    for n in (T, 256, 192, 384, 448):
        ids = torch.arange(n) // 50
        mask = create_block_mask(mods.document_causal(ids), None, None, n, n, device="cpu", BLOCK_SIZE=64)
        x = torch.randn(1, 2, n, 16).bfloat16()
        assert torch.equal(attend(x, mask), flex_attention(x, x, x, block_mask=mask))
    assert computed == [(128, 128)] * 10
    assert len(graphs) == 2, "one for the first length, one for all others"
    x = some(torch.float32)
    mask = mask_of()
    assert torch.equal(attend(x, mask), flex_attention(x, x, x, block_mask=mask))
    assert computed[10:] == [(64, 64)] * 2


def test_where_masks_are_built_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gpu, needs = torch.device("cuda"), hopper_blocks.needs_hopper_blocks
    monkeypatch.setattr(hopper_blocks, "target_of", lambda device: Target("cuda", 90, 32))
    assert needs(gpu, (64, 64)) and needs(gpu, (128, 256))
    assert not needs(gpu, (128, 128)) and not needs(torch.device("cpu"), (64, 64))
    monkeypatch.setenv("FLEXATTN_WITHOUT", "hopper")
    settings.cache_clear()
    assert not needs(gpu, (64, 64))
    monkeypatch.undo()
    settings.cache_clear()
    monkeypatch.setattr(hopper_blocks, "target_of", lambda device: Target("cuda", 80, 32))
    assert not needs(gpu, (64, 64))


def test_explain_names_the_blocks_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "needs_hopper_blocks", lambda device, size: False)  # a mask of a CPU
    x, note = some(), "Hopper kernels read blocks of (128, 128) instead of the mask's BLOCK_SIZE, (64, 64)."
    found = explain(x, x, x, block_mask=mask_of(), target="sm_90")
    assert note in str(found) and note in found.full() and found.reasons[0] is None
    for page in (explain(x, x, x, block_mask=mask_of(), target="sm_80"), explain(x, x, x, block_mask=mask_of())):
        assert page.blocks_note is None and "BLOCK_SIZE=(64, 64)" in str(page)


def test_explain_without_hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel would read blocks of 128 or bits."""
    x, grid = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16), mods.natten_2d(16, 16, 5)
    neighborhoods = create_block_mask(grid, None, None, 256, 256, device="cpu")
    monkeypatch.setattr(create, "needs_hopper_blocks", lambda device, size: False)  # a mask of a CPU
    assert "bytes" in str(explain(x, x, x, block_mask=neighborhoods, target="sm_90"))
    monkeypatch.setenv("FLEXATTN_WITHOUT", "hopper")
    settings.cache_clear()
    try:
        found = explain(some(), some(), some(), block_mask=mask_of(), target="sm_90")
        of_grid = explain(x, x, x, block_mask=neighborhoods, target="sm_90")
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert found.blocks_note is None and found.plans[0].blocks == (64, 64)
    assert of_grid.block_mask is not None and of_grid.block_mask.bits is None
    assert "only Hopper kernels read them" in str(of_grid)
