"""Tree attention: candidates of speculative decoding, each attending to its ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.errors import ArgumentError, message
from flexattn.mods.arguments import check_tensor, checked_int
from flexattn.mods.kinds import MaskMod, named


def tree(parents: Tensor, prefix: int = 0) -> MaskMod:
    """Attend to the first `prefix` keys, to the query's own node and to its ancestors.

    `parents` is an integer tensor [nodes], -1 for a root, with each parent before its children. Query i is node i, and
    key prefix + i is node i. Ancestors are stored as bits, 32 per word.

    >>> import torch
    >>> i = torch.arange(4)
    >>> tree(torch.tensor([-1, 0, 0, 1]))(i, i, i[:, None], i).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """
    check_tensor("parents", parents, "[nodes]", "Give the parent of each node, -1 for a root.", integers=True)
    prefix = checked_int("prefix", prefix, 0, "It is the number of keys before those of the nodes.")
    ancestors = ancestor_bits(parents)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        node = (kv_idx - prefix).clamp(min=0)
        bit = (ancestors[q_idx, node // 32] >> (node % 32)) & 1
        return (kv_idx < prefix) | (bit == 1)

    return named(mask, "tree")


def ancestor_bits(parents: Tensor) -> Tensor:
    """Return int32 [nodes, words]: bit j % 32 of word j // 32 in row i is set if node j is i or an ancestor of i."""
    rows: list[int] = []
    for node, parent in enumerate(parents.tolist()):
        if not -1 <= parent < node:
            found = f"parent {parent} of node {node}"
            raise ArgumentError(message("parents", found, "-1 or a node before it", "Sort the nodes."))
        rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
    words = -(-len(rows) // 32)
    packed = [[row >> 32 * word & 0xFFFFFFFF for word in range(words)] for row in rows]
    bits = torch.tensor(packed, dtype=torch.int64, device=parents.device).reshape(len(rows), words)
    return torch.where(bits >= 2**31, bits - 2**32, bits).int()
