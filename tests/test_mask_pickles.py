"""Masks in pickles, in files and from DataLoader workers: lists, graph and captured values, without code."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flexattn import BlockMask, create_block_mask, flex_attention, mods, noop_mask
from flexattn.errors import FormatError, ModError, MutationError
from flexattn.graph.frozen import FrozenMod
from tests.mask_cases import MASKS, make_mask

T = 70
X = torch.randn(2, 2, T, 16, generator=torch.Generator().manual_seed(0))


def create(mod: Any, B: int | None = None, H: int | None = None, size: int = T) -> BlockMask:
    return create_block_mask(mod, B, H, size, size, device="cpu", BLOCK_SIZE=16)


def through_pickle(mask: BlockMask) -> BlockMask:
    return pickle.loads(pickle.dumps(mask))


def through_file(mask: BlockMask) -> BlockMask:
    """Load with weights_only=True (the default), which runs no code except BlockMask's own."""
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    with torch.serialization.safe_globals([BlockMask]):
        return torch.load(file, weights_only=True)


WAYS = pytest.mark.parametrize("way", [through_pickle, through_file])


def attend(mask: BlockMask, query: Tensor = X, key: Tensor = X) -> list[Tensor]:
    """Return the output and its gradients."""
    x = [t.clone().requires_grad_() for t in (query, key, key)]
    out = flex_attention(*x, block_mask=mask)
    return [out, *torch.autograd.grad(out.square().sum(), x)]


def check_equal(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@WAYS
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str, way: Callable[[BlockMask], BlockMask]) -> None:
    mask = create(make_mask(name, 256), 2, 2, 256)
    loaded = way(mask)
    for a, b in zip(mask.kv_runs.tensors, loaded.kv_runs.tensors, strict=True):
        assert torch.equal(a, b)
    assert loaded.mask_mod is noop_mask or isinstance(loaded.mask_mod, FrozenMod)
    assert loaded.pairs() == mask.pairs() and loaded.is_built
    assert [r.capture for r in loaded.equal_runs()] == [r.capture for r in mask.equal_runs()]


def own_mask() -> BlockMask:
    ids, window, slope = torch.arange(T) // 13, 9, 0.5
    return create(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q - kv < window + h * slope) & (q >= kv - b), 2, 2)


@WAYS
def test_a_closure(way: Callable[[BlockMask], BlockMask]) -> None:
    mask = own_mask()
    check_equal(attend(way(mask)), attend(mask))
    check_equal(attend(way(way(mask))), attend(mask))


@WAYS
def test_parts_of_masks(way: Callable[[BlockMask], BlockMask]) -> None:
    mask = own_mask()
    part = mask[1, :, 2:]
    query, key = X[:1, :, 32:], X[:1]
    expected = attend(part, query, key)
    check_equal(attend(way(part), query, key), expected)
    check_equal(attend(way(part).to("cpu"), query, key), expected)
    check_equal(attend(way(mask)[1, :, 2:], query, key), expected)
    picked = [torch.tensor([1, 0]), torch.tensor([1, 1]), torch.tensor([3, 0, 2])]
    for axis, index in enumerate(picked):
        taken = (slice(None),) * axis + (index,)
        query = X[:, :, :48] if axis == 2 else X
        check_equal(attend(way(mask)[taken], query, X), attend(mask[taken], query, X))
    cut = mask._adjust(50, 50)
    check_equal(attend(way(mask)._adjust(50, 50), X[:, :, :50], X[:, :, :50]), attend(cut, X[:, :, :50], X[:, :, :50]))
    wide = create(mods.causal, 1, 1)
    check_equal(attend(way(wide).expand(2, 2)), attend(wide))


@WAYS
def test_lists_with_a_mod(way: Callable[[BlockMask], BlockMask]) -> None:
    count, index = torch.tensor([[[1, 2, 1]]]), torch.tensor([[[[0, 1], [0, 1], [1, 0]]]])
    limit = torch.tensor(40)
    mask = BlockMask.from_kv_blocks(
        count, index, BLOCK_SIZE=32, mask_mod=lambda b, h, q, kv: q < limit, seq_lengths=(T, T), compute_q_blocks=True
    )
    loaded = way(mask)
    assert not loaded.is_built and loaded.shape == mask.shape
    check_equal(attend(loaded), attend(mask))
    assert way(BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=32)).mask_mod is noop_mask


def test_a_mod_that_cannot_be_traced_cannot_be_pickled() -> None:
    count, index = torch.tensor([[[1]]]), torch.tensor([[[[0]]]])
    mask = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=32, mask_mod=lambda b, h, q, kv: bool(q >= kv))
    with pytest.raises(ModError, match="mask_mod"):
        pickle.dumps(mask)


def test_a_loaded_mask_says_that_it_is_frozen() -> None:
    loaded = through_pickle(create(mods.causal))
    assert repr(loaded).startswith("BlockMask(frozen causal, ")
    assert ", frozen, " in str(loaded).splitlines()[0]
    assert repr(loaded.mask_mod).startswith("<frozen mask_mod: its captured values do not change>\ndef causal(")


def test_a_frozen_mod_is_a_mask_mod() -> None:
    limit = torch.tensor([3, 5])
    mod = lambda b, h, q, kv: (q >= kv) & (kv < limit[h])  # noqa: E731
    frozen = through_pickle(create(mod, None, 2)).mask_mod
    i = torch.arange(T)
    b, h = torch.tensor(0), torch.arange(2)[:, None, None]
    assert torch.equal(frozen(b, h, i[:, None], i), mod(b, h, i[:, None], i))
    again = create(frozen, None, 2)
    assert torch.equal(again.to_dense(), create(mod, None, 2).to_dense())


def test_changes_of_the_original_are_not_seen() -> None:
    ids = torch.arange(T) // 13
    mask = create(mods.document(ids))
    before = attend(mask)
    loaded = through_pickle(mask)
    ids.zero_()
    check_equal(attend(loaded), before)
    with pytest.raises(MutationError, match="changed in place"):
        pickle.dumps(mask)  # its lists do not agree with its mod any more


def test_changes_of_a_frozen_value_are_seen() -> None:
    loaded = through_pickle(own_mask())
    assert isinstance(loaded.mask_mod, FrozenMod)
    loaded.mask_mod.captures[0].zero_()
    with pytest.raises(MutationError, match="captured tensor 'ids' was changed in place"):
        attend(loaded)


def test_copies_keep_the_frozen_mod() -> None:
    loaded = through_pickle(own_mask())
    assert copy.deepcopy(loaded).mask_mod is copy.copy(loaded).mask_mod is loaded.mask_mod
    check_equal(attend(copy.deepcopy(loaded)), attend(loaded))


def test_a_pickle_has_the_elements_of_a_view_only() -> None:
    ids = torch.zeros(1_000_000, dtype=torch.int64)[:T]
    assert len(pickle.dumps(create(mods.document(ids)))) < 20_000


def test_a_parameter_loses_its_history() -> None:
    weight = torch.nn.Parameter(torch.arange(T).float())
    limit = weight * 2
    mask = create(lambda b, h, q, kv: limit[q] >= kv)
    loaded = through_pickle(mask)
    assert isinstance(loaded.mask_mod, FrozenMod) and not loaded.mask_mod.captures[0].requires_grad
    check_equal(attend(loaded), attend(mask))


def edits() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return changes of the state of a mask that make it invalid."""

    def change(part: int, f: Callable[[Tensor], object], name: str = "kv_runs") -> Callable[[dict[str, Any]], Any]:
        def edit(state: dict[str, Any]) -> None:
            tensors = [t.clone() for t in state[name]]
            changed = f(tensors[part])
            tensors[part] = changed if isinstance(changed, Tensor) else tensors[part]
            state[name] = tuple(tensors)

        return edit

    def of_mod(**values: object) -> Callable[[dict[str, Any]], Any]:
        return lambda state: state.update(mask_mod=state["mask_mod"] | values)

    return {
        "format": lambda state: state.update(format=2),
        "no format": lambda state: state.pop("format"),
        "lengths": lambda state: state.update(seq_lengths=(10**6, 70)),
        "negative lengths": lambda state: state.update(seq_lengths=(-1, 70)),
        "block size": lambda state: state.update(BLOCK_SIZE=(0, 16)),
        "dims": lambda state: state.update(_batch_dims=(3, 3)),
        "flag": lambda state: state.update(_separate="yes"),
        "widths": lambda state: state.update(_widths=("a", 1)),
        "a run past the end": change(1, lambda runs: runs[-1].fill_(10**6)),
        "a run before the start": change(1, lambda runs: runs[0].fill_(-5)),
        "a row past the end": change(0, lambda row_ptr: row_ptr[-1].add_(1)),
        "rows that descend": change(0, lambda row_ptr: row_ptr[1].fill_(10**6)),
        "an order past the end": change(4, lambda order: order[0].fill_(99)),
        "an order with one row twice": change(4, lambda order: order[0, 0].copy_(order[0, 1])),
        "a dtype": change(1, lambda runs: runs.long()),
        "a shape": change(1, lambda runs: runs[:, :1].contiguous()),
        "key rows": change(1, lambda runs: runs[-1].fill_(10**6), "q_runs"),
        "no lists": lambda state: state.update(kv_runs=None),
        "a graph": of_mod(graph="[]"),
        "captures": of_mod(captures=()),
        "a capture's dtype": of_mod(captures=(torch.zeros(70),)),
        "numbers": of_mod(numbers=()),
        "a number's type": of_mod(numbers=("__import__('os')", 0.5)),
        "runs": lambda state: state.update(equal_runs=((7, torch.zeros(2, 70, dtype=torch.int32)),)),
    }


@pytest.mark.parametrize("name", edits())
def test_a_changed_pickle_is_refused(name: str) -> None:
    state = own_mask().__getstate__()
    BlockMask.__new__(BlockMask).__setstate__(dict(state))
    edits()[name](state)
    with pytest.raises(FormatError, match="found"):
        BlockMask.__new__(BlockMask).__setstate__(state)


LOAD = """
import sys, torch, flexattn
with torch.serialization.safe_globals([flexattn.BlockMask]):
    mask = torch.load(sys.argv[1], weights_only=True)
x = torch.load(sys.argv[2], weights_only=True)
print(flexattn.flex_attention(x, x, x, block_mask=mask).double().sum().item().hex())
"""


def test_another_process_loads_a_mask(tmp_path) -> None:
    mask = own_mask()
    torch.save(mask, tmp_path / "mask.pt")
    torch.save(X, tmp_path / "x.pt")
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "mask.pt"), str(tmp_path / "x.pt")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == attend(mask)[0].double().sum().item().hex()


class Documents(Dataset[tuple[Tensor, BlockMask]]):
    """Batches of packed documents, each with the mask that belongs to it."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, BlockMask]:
        ids = torch.arange(T) // (index + 7)
        return ids, create(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]))


def only(items: list[Any]) -> Any:
    return items[0]


@pytest.mark.parametrize("start", [pytest.param("fork"), pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_return_masks(start: str) -> None:
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {start} on this system")
    loader = DataLoader(Documents(), batch_size=1, num_workers=1, multiprocessing_context=start, collate_fn=only)
    found = list(loader)
    assert len(found) == 3
    for ids, mask in found:
        assert isinstance(mask.mask_mod, FrozenMod)
        expected = create(mods.and_masks(mods.causal, mods.document(ids)))
        check_equal(attend(mask), attend(expected))
