"""packing: which sequence each row of packed sequences belongs to, and where the keys of this sequence are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.graph.ranges import INDEX_LIMIT
from flexattn.machine.triton_versions import is_interpreting
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.transforms import outside

LONGEST = INDEX_LIMIT // 2  # rows of the long sequence: sums of three indices stay below 2**31
_ROWS = 256  # of a program


@frozen(eq=False)
class Packing:
    """Which sequence each query belongs to, and where the keys of this sequence are: int32 [T_q] each.

    Rows without keys, such as those after the last sequence, have k_end == k_start and diagonal < k_start.
    """

    sequence: Tensor
    position: Tensor  # of the query in its sequence
    k_start: Tensor
    k_end: Tensor
    diagonal: Tensor  # the key of the same position, if the last query and the last key of a sequence are aligned

    @staticmethod
    def of_columns(columns: Tensor, T_q: int) -> Packing:
        """Return the packing in the first T_q elements of five columns."""
        return Packing(*columns[:, :T_q].unbind())

    @property
    def stride(self) -> int:
        """Elements from a column to the next, if kernels made them."""
        return (self.position.data_ptr() - self.sequence.data_ptr()) // 4

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.sequence, self.position, self.k_start, self.k_end, self.diagonal


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device."""
    return device.type == "cuda" or (device.type == "cpu" and is_interpreting())


@torch.no_grad()
def packing_of(
    cu_seq_q: Tensor, cu_seq_k: Tensor, used_q: Tensor | None, used_k: Tensor | None, lengths: tuple[int, int],
    checks: tuple[str, str] | None = None,
) -> Packing:  # fmt: skip
    """Return the packing of sequences whose rows begin at `cu_seq_q` and `cu_seq_k`, int32 [sequences + 1].

    Of key, the first used_k of each sequence are used, and rows of query from used_q on have no keys. `checks`: what a
    kernel that asserts that cu_seq_q and cu_seq_k ascend to at most `lengths` says.
    """
    with outside():
        if has_kernels(cu_seq_q.device):
            return Packing.of_columns(_launch(cu_seq_q, cu_seq_k, used_q, used_k, lengths, checks), lengths[0])
        return _in_torch(cu_seq_q, cu_seq_k, used_q, used_k, lengths[0])


def packed_columns(
    cu_seq_q: Tensor, cu_seq_k: Tensor, used_q: Tensor | None, used_k: Tensor | None, lengths: tuple[int, int],
    checks: tuple[str, str] | None = None,
) -> Tensor:  # fmt: skip
    """Return the columns of `packing_of` as one tensor, int32 [5, width_of(T_q)]."""
    if has_kernels(cu_seq_q.device):
        return _launch(cu_seq_q, cu_seq_k, used_q, used_k, lengths, checks)
    T_q = lengths[0]
    columns = torch.zeros(5, width_of(T_q), dtype=torch.int32, device=cu_seq_q.device)
    packing = _in_torch(cu_seq_q, cu_seq_k, used_q, used_k, T_q)
    for column, found in zip(columns[:, :T_q].unbind(), packing.tensors, strict=True):
        column.copy_(found)
    return columns


def width_of(T_q: int) -> int:
    """Return the length of a column, whose first T_q elements are used. Each column is aligned to 16 bytes."""
    return (T_q + 3) // 4 * 4


def _launch(
    cu_seq_q: Tensor, cu_seq_k: Tensor, used_q: Tensor | None, used_k: Tensor | None, lengths: tuple[int, int],
    checks: tuple[str, str] | None,
) -> Tensor:  # fmt: skip
    from flexattn.call.varlen import kernels

    kernel: Any = kernels.pack_rows
    T_q, sequences = lengths[0], cu_seq_q.size(0) - 1
    width = width_of(T_q)
    columns = torch.empty(5, width, dtype=torch.int32, device=cu_seq_q.device)
    ascends = columns.new_empty(2, dtype=torch.bool)
    given = [None if t is None else t.contiguous() for t in (cu_seq_q, cu_seq_k, used_q, used_k)]
    with torch.cuda.device_of(columns):
        kernel[(max(1, -(-T_q // _ROWS)),)](
            *given, columns, ascends, sequences, *lengths, width, sequences.bit_length(),
            ROWS=_ROWS, CHECKS=checks is not None,
        )  # fmt: skip
    if checks is not None and columns.is_cuda:
        for text, good in zip(checks, ascends.unbind(), strict=True):
            torch.ops.aten._assert_async.msg(good, text)
    return columns


def _in_torch(
    cu_seq_q: Tensor, cu_seq_k: Tensor, used_q: Tensor | None, used_k: Tensor | None, T_q: int
) -> Packing:  # fmt: skip
    row = torch.arange(T_q, dtype=torch.int32, device=cu_seq_q.device)
    sequence = torch.searchsorted(cu_seq_q[1:].contiguous(), row, right=True, out_int32=True)
    last = cu_seq_q.size(0) - 2
    exists = sequence <= last
    index = sequence.clamp(max=last).long()
    position = row - cu_seq_q[index]
    k_start = cu_seq_k[index]
    k_end = cu_seq_k[index + 1] if used_k is None else k_start + used_k[index]
    diagonal = k_end - cu_seq_q[index + 1] + row
    if used_q is not None:
        hole = position >= used_q[index]
        k_end, diagonal = torch.where(hole, k_start, k_end), torch.where(hole, k_start - 1, diagonal)
    zero = torch.zeros((), dtype=torch.int32, device=row.device)
    found = (index.int(), position, k_start, k_end, diagonal + 1)
    sequence, position, k_start, k_end, after = (torch.where(exists, x, zero) for x in found)
    return Packing(sequence, position, k_start, k_end, after - 1)
