"""record: a BlockMask, and its copies on any device, reject changes of what its mask_mod captured."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_masks import ONE, ZERO, bind, create, live_pairs

from flexattn import flex_attention, mods
from flexattn.block_mask import BlockMask
from flexattn.block_mask.captures import survey
from flexattn.errors import MutationError
from flexattn.mask_build.create import create_block_mask
from flexattn.trace import memo
from flexattn.trace.trace import trace


class Holder:
    def __init__(self) -> None:
        self.ids = torch.zeros(64, dtype=torch.int32)
        self.weight = torch.ones(3)
        self.window = 5

    def mask(self, b, h, q_idx, kv_idx):
        return (self.ids[q_idx] == self.ids[kv_idx]) & (q_idx - kv_idx < self.window)


def test_changed_captures_raise():
    holder = Holder()
    mask = create(holder.mask, None, None, 64, 64, BLOCK_SIZE=16)
    part, crop = mask[:, :, 1:], mask._adjust(40, 40)
    for m in (mask, part, crop):
        m.check_captures(bind(m))
    holder.weight += 1  # not read by the mask
    mask.check_captures(bind(mask))
    holder.ids += 1
    for m in (mask, part, crop):
        with pytest.raises(MutationError, match="captured tensor 'ids' was changed in place, expected the values that"):
            m.check_captures(bind(m))
    mask.mask_mod = holder.mask
    mask.check_captures(bind(mask))


def test_rebound_captures_raise():
    holder = Holder()
    mask = create(holder.mask, None, None, 64, 64, BLOCK_SIZE=16)
    holder.ids = holder.ids.clone()
    with pytest.raises(MutationError, match="captured tensor 'ids' is another tensor"):
        mask.check_captures(bind(mask))
    mask = create(holder.mask, None, None, 64, 64, BLOCK_SIZE=16)
    holder.window = 6
    with pytest.raises(MutationError, match="captured number 'window' was 5 and is 6"):
        mask.check_captures(bind(mask))


def test_captures_that_torch_computes_at_each_call_are_watched_at_their_source():
    lengths = torch.tensor([3, 5, 8])

    def mod(b, h, q_idx, kv_idx):
        return kv_idx < lengths.cumsum(0)[q_idx % 3]

    mask = create(mod, None, None, 16, 16, BLOCK_SIZE=4)
    mask.check_captures(bind(mask))
    lengths[1] = 7
    with pytest.raises(MutationError, match="captured tensor 'lengths' was changed in place"):
        mask.check_captures(bind(mask))


def test_lists_have_no_record():
    ids = torch.zeros(256, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(ONE, ZERO, mask_mod=mods.document(ids))
    ids += 1
    mask.check_captures(bind(mask))


# Copies.


def test_to_moves_what_the_mod_captured():
    holder = Holder()
    bias = torch.zeros(64, dtype=torch.bool)
    mod = mods.or_masks(functools.partial(lambda t, b, h, q, kv: t[kv], bias), holder.mask, mods.document(holder.ids))
    mask = create(mod, None, None, 64, 64, BLOCK_SIZE=16)[:, :, 1:]
    assert mask.to("cpu").mask_mod is mask.mask_mod
    moved = mask.to("meta")
    assert moved.device == torch.device("meta")
    assert {t.device.type for t in survey(moved.mask_mod).tensors} == {"meta"}
    assert {t.device.type for t in survey(mask.mask_mod).tensors} == {"cpu"}
    assert holder.ids.device.type == "cpu"
    assert moved.shape == mask.shape


class Segments(torch.nn.Module):
    """A mask_mod that reads a buffer and a number, and a mask of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.arange(32) // 8)
        self.reach = 3
        self.mask = create(self.method, None, None, 32, 32, BLOCK_SIZE=16)

    def method(self, b, h, q_idx, kv_idx):
        return (self.ids[q_idx] == self.ids[kv_idx]) & (q_idx - kv_idx < self.reach)


MODS_TO_COPY = {
    "method": lambda owner: owner.method,
    "closure": lambda owner: lambda b, h, q_idx, kv_idx: owner.method(b, h, q_idx, kv_idx),
    "partial": lambda owner: functools.partial(lambda own, *places: own.method(*places), owner),
    "closure in a partial": lambda owner: functools.partial(lambda last, *p: owner.method(*p) & (p[2] < last), 31),
    "slice": lambda owner: owner.method,
}


@pytest.mark.parametrize("change", ["ids", "reach"])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", MODS_TO_COPY)
def test_a_copy_refuses_changes_of_what_its_mod_reads(kind, how, change):
    owner = Segments()
    mask = create(MODS_TO_COPY[kind](owner), None, None, 32, 32, BLOCK_SIZE=16)
    mask = mask[:, :, :1] if kind == "slice" else mask
    copied, other = how([mask, owner]) if how is copy.deepcopy else (how(mask), owner)
    # A function has no deep copy: its copy reads what the original reads.
    read_by_copy = owner if "closure" in kind else other
    accept(mask), accept(copied)
    change_of(read_by_copy, change)
    with pytest.raises(MutationError, match=change):
        accept(copied)
    if read_by_copy is not owner:
        accept(mask)
        change_of(owner, change)
    with pytest.raises(MutationError, match=change):
        accept(mask)


def accept(mask):
    mask.check_captures(trace(mask.mask_mod, "mask"))


def change_of(owner, what):
    if what == "ids":
        owner.ids[3] += 1
    else:
        owner.reach += 1


def test_a_model_is_copied_with_its_mask():
    model = Segments()
    state = {"ids": torch.arange(32) // 4}
    other = copy.deepcopy(model)
    assert torch.equal(live_pairs(other.mask), live_pairs(model.mask))
    other.load_state_dict(state)
    accept(model.mask)
    with pytest.raises(MutationError, match="ids"):
        accept(other.mask)
    model.ids[0] = 5
    with pytest.raises(MutationError, match="ids"):
        accept(copy.deepcopy(model).mask)


def test_a_mask_that_moved_refuses_changes():
    model = Segments()
    moved = model.mask.to("meta")
    assert moved.mask_mod is not model.method
    moved.mask_mod.__self__.reach = 9
    with pytest.raises(MutationError, match="reach"):
        accept(moved)
    model.ids[0] = 5
    with pytest.raises(MutationError, match="ids"):
        model.mask.to("meta")


def test_a_mod_that_is_traced_again_is_the_same() -> None:
    """Its graph may have the name of another of its kind; old graphs are forgotten."""
    ids = torch.arange(40) // 9

    def mask_of(window: int) -> BlockMask:
        mod = mods.and_masks(mods.document(ids), mods.sliding_window(window))
        return create_block_mask(mod, None, None, 40, 40, device="cpu")

    mask_of(9)
    mask = mask_of(3)
    before = trace(mask.mask_mod, "mask").graph
    memo.clear()
    after = trace(mask.mask_mod, "mask")
    assert after.graph != before
    mask.check_captures(after)
    ids += 1
    with pytest.raises(MutationError, match="'ids' was changed in place"):
        mask.check_captures(after)
    again = mask_of(3)
    memo.clear()
    other = trace(mods.and_masks(mods.document(ids), mods.sliding_window(4)), "mask")
    with pytest.raises(MutationError, match="'window' was 3 and is 4"):
        again.check_captures(other)
    with pytest.raises(MutationError, match="what mask_mod computes has changed"):
        again.check_captures(trace(mods.or_masks(mods.document(ids), mods.sliding_window(3)), "mask"))


A_NUMBER = "a number that mask_mod combines with a captured tensor has changed"
ANOTHER_GRAPH = "what mask_mod computes from the tensors that it captures has changed"


@pytest.mark.parametrize(
    ("name", "other", "text"),
    [("shift", 3, A_NUMBER), ("factor", 3.0, A_NUMBER), ("operator", torch.sub, ANOTHER_GRAPH)],
)
def test_what_is_combined_with_captured_tensors_is_watched(name: str, other: Any, text: str) -> None:
    """It goes into a tensor that is computed before the kernel, and is no number of the kernel."""
    cfg, table = SimpleNamespace(shift=1, factor=1.0, operator=torch.add), torch.tensor(2.0)

    def mask(b, h, q, k):
        return q - k < cfg.operator(table, cfg.shift) * cfg.factor

    x = torch.randn(1, 1, 8, 4)
    block_mask = create_block_mask(mask, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=4)
    flex_attention(x, x, x, block_mask=block_mask)
    setattr(cfg, name, other)
    with pytest.raises(MutationError, match=f"block_mask: {text}, expected the values that the mask was built from"):
        flex_attention(x, x, x, block_mask=block_mask)


def test_a_tensor_that_the_mod_makes_is_watched() -> None:
    cfg, table = SimpleNamespace(spans=[1.0, 2.0]), torch.arange(8)

    def mask(b, h, q, k):
        return q - k < (table.sum() * 0 + torch.tensor(cfg.spans))[b]

    x = torch.randn(1, 1, 8, 4)
    block_mask = create_block_mask(mask, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=4)
    flex_attention(x, x, x, block_mask=block_mask)
    cfg.spans[0] = 3.0
    with pytest.raises(
        MutationError, match="block_mask: a number that mask_mod combines with a captured tensor has changed"
    ):
        flex_attention(x, x, x, block_mask=block_mask)


def test_the_item_of_a_list_has_the_name_of_the_list() -> None:
    windows = [3, 4]
    mask = create(lambda b, h, q, kv: q - kv < windows[1], None, None, 32, 32)
    windows[1] = 5
    with pytest.raises(MutationError, match="captured number 'windows_1' was 4 and is 5"):
        mask.pairs()
