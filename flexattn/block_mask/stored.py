"""stored: a mask as plain data, for pickles and torch.save: lists, numbers, and the text of its graph. No code is run.

The data is checked when it is loaded, so kernels read no memory that is not theirs, whatever a file contains. Which
blocks attend is taken from the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask.runs import RunLists, Runs
from flexattn.errors import FormatError, message
from flexattn.graph.equal_runs import EqualRuns
from flexattn.graph.frozen import FrozenMod, compact, invalid
from flexattn.graph.mod_graph import ModGraph

FORMAT = 1  # changes with the form of the data; the text of the graph has a format of its own

# What the plain fields of a mask may contain: the types of a tuple's elements and its possible lengths, or of a value.
_PAIRS: dict[str, tuple[tuple[type, ...], tuple[int, ...]]] = {
    "seq_lengths": ((int,), (2,)), "BLOCK_SIZE": ((int,), (2,)), "_batch_dims": ((int,), (0, 1, 2))
}  # fmt: skip
_FLAGS: dict[str, tuple[type, ...]] = {
    "full_overhangs": (bool,), "dq_kv_order_spt": (bool, type(None)), "_separate": (bool,), "_built_from_mod": (bool,)
}  # fmt: skip


def packed_lists(lists: RunLists | None) -> tuple[Tensor, ...] | None:
    """Return the tensors of some lists."""
    return None if lists is None else tuple(map(compact, lists.tensors))


def check_format(state: Any) -> None:
    """Raise FormatError unless this version of flexattn can read the data."""
    found = state.get("format", "none") if isinstance(state, dict) else "none"
    if found != FORMAT:
        fix = "Build the mask and pickle it with this version of flexattn."
        raise FormatError(message("BlockMask", f"a pickle of format {found}", f"format {FORMAT}", fix))


def read_fields(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the plain fields of a mask."""
    found = {name: state.get(name) for name in names}
    for name, (kinds, lengths) in _PAIRS.items():
        value = found[name]
        if type(value) is not tuple or len(value) not in lengths or any(type(n) not in kinds or n < 0 for n in value):
            raise invalid(name)
    for name, kinds in _FLAGS.items():
        if type(found[name]) not in kinds:
            raise invalid(name)
    if not _is_widths(found["_widths"]):
        raise invalid("_widths")
    if 0 in state["BLOCK_SIZE"]:
        raise invalid("BLOCK_SIZE")
    return found


def _is_widths(value: Any) -> bool:
    """Return whether a value is None, or the width of partial lists and that of full lists or None."""
    if value is None:
        return True
    sizes = [n for n in value if n is not None] if type(value) is tuple and len(value) == 2 else [None]
    return all(type(n) is int and n >= 0 for n in sizes) and value[0] is not None


def read_lists(name: str, tensors: Any, heads: int, rows: int, columns: int) -> RunLists:
    """Return the lists of `heads` pairs (b, h), with `rows` rows each."""
    if type(tensors) is not tuple or len(tensors) != 5 or not all(_is_int32(t) for t in tensors):
        raise invalid(name)
    lists = RunLists.from_tensors(tensors)
    if not (_is_valid(lists.partial, heads * rows, columns) and _is_valid(lists.full, heads * rows, columns)):
        raise invalid(name)
    every = torch.arange(rows, dtype=torch.int32, device=lists.order.device).expand(heads, rows)
    if lists.order.shape != every.shape or not torch.equal(lists.order.sort(-1).values, every):
        raise invalid(name)
    return lists


def read_tensor(name: str, value: Any) -> Tensor | None:
    """Return an optional field of PyTorch's masks."""
    if value is not None and not isinstance(value, Tensor):
        raise invalid(name)
    return value


def read_runs(found: Any, mod: FrozenMod) -> tuple[EqualRuns, ...]:
    """Return the runs of equal elements in captured tensors."""
    if type(found) is not tuple:
        raise invalid("equal_runs")
    return tuple([_read_run(item, mod.graph, mod.captures) for item in found])


def _read_run(item: Any, graph: ModGraph, captures: Sequence[Tensor]) -> EqualRuns:
    if type(item) is not tuple or len(item) != 2 or type(item[0]) is not int or not 0 <= item[0] < len(captures):
        raise invalid("equal_runs")
    if not _is_int32(item[1]) or item[1].shape != (2, *captures[item[0]].shape) or not graph.captures[item[0]].ndim:
        raise invalid("equal_runs")
    return EqualRuns(*item)


def _is_int32(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int32 and value.is_contiguous()


def _is_valid(runs: Runs, rows: int, columns: int) -> bool:
    """Return whether each row's runs exist, are ascending and disjoint, and are inside of the columns."""
    row_ptr, ends = runs.row_ptr, runs.runs
    if row_ptr.shape != (rows + 1,) or ends.dim() != 2 or ends.shape[1] != 2:
        return False
    if int(row_ptr[0]) != 0 or int(row_ptr[-1]) != len(ends) or bool((row_ptr.diff() < 0).any()):
        return False
    if bool(((ends[:, 0] < 0) | (ends[:, 0] >= ends[:, 1]) | (ends[:, 1] > columns)).any()):
        return False
    owners = runs.owners()
    return not bool(((owners[1:] == owners[:-1]) & (ends[1:, 0] < ends[:-1, 1])).any())
