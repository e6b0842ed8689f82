"""Documents packed into one sequence: attention stays within a document."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from flexattn.errors import ArgumentError, DtypeError, message
from flexattn.mods.arguments import check_tensor, described
from flexattn.mods.kinds import MaskMod, named


def document(ids: Tensor | None = None, *, offsets: Tensor | None = None) -> MaskMod:
    """Attend within the same document, given the document of each token or the offsets at which documents begin.

    `ids` is an integer tensor [S], or [B, S] with a packing per batch. `offsets` is [documents + 1], from 0 to the
    sequence length (cu_seqlens in other libraries).

    >>> import torch
    >>> i = torch.arange(4)
    >>> document(offsets=torch.tensor([0, 1, 4]))(i, i, i[:, None], i).int().tolist()
    [[1, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
    """
    if ids is None or offsets is not None:
        of_token_from_offsets = _of_offsets(ids, offsets)  # errors about an index explain this name

        def by_offsets(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return of_token_from_offsets[q_idx] == of_token_from_offsets[kv_idx]

        return named(by_offsets, "document")

    if not isinstance(ids, Tensor) or ids.dim() not in (1, 2):
        fix = "Give the document of each token, [B, S] with a packing per batch."
        kind = ArgumentError if isinstance(ids, Tensor) else DtypeError
        raise kind(message("ids", described(ids), "[S] or [B, S]", fix))

    if ids.dim() == 2:

        def for_each_batch(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return ids[b, q_idx] == ids[b, kv_idx]

        return named(for_each_batch, "document")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[q_idx] == ids[kv_idx]

    return named(mask, "document")


def document_causal(ids: Tensor | None = None, *, offsets: Tensor | None = None) -> MaskMod:
    """Attend causally within the same document. The arguments are those of `document`.

    >>> import torch
    >>> i = torch.arange(4)
    >>> document_causal(torch.tensor([0, 0, 1, 1]))(i, i, i[:, None], i).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    within = document(ids, offsets=offsets)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & within(b, h, q_idx, kv_idx)

    return named(mask, "document_causal")


def _of_offsets(ids: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Return the document of each token, int32 [S]."""
    if ids is not None or offsets is None:
        found = "neither of ids and offsets" if ids is None else "both of ids and offsets"
        raise ArgumentError(message("document", found, "one", "Pass ids, or offsets=."))
    fix = "Pass the cumulative sum of the lengths, with 0 in front."
    check_tensor("offsets", offsets, "[documents + 1]", fix, integers=True)
    if not torch.compiler.is_compiling():
        ends = offsets.tolist()
        if not ends or ends[0] != 0 or any(end < start for start, end in itertools.pairwise(ends)):
            found = "no values" if not ends else f"a start at {ends[0]}" if ends[0] else "descending values"
            raise ArgumentError(message("offsets", found, "ascending values from 0 to the length of a row", fix))
    tokens = torch.arange(int(offsets[-1]), device=offsets.device)
    return torch.bucketize(tokens, offsets[1:].to(tokens.dtype), right=True).int()
