"""Documents packed into one sequence: attention stays within a document."""

from __future__ import annotations

import torch
from torch import Tensor

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
    of_token = _ids(ids, offsets)
    if of_token.dim() == 2:

        def for_each_batch(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return of_token[b, q_idx] == of_token[b, kv_idx]

        return named(for_each_batch, "document")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return of_token[q_idx] == of_token[kv_idx]

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


def _ids(ids: Tensor | None, offsets: Tensor | None) -> Tensor:
    if (ids is None) == (offsets is None):
        found = "neither" if ids is None else "both"
        raise ValueError(f"document: found {found} of ids and offsets, expected one. Pass ids, or offsets=.")
    if offsets is None:
        assert ids is not None
        if ids.dim() not in (1, 2):
            raise ValueError(f"document: found ids of {ids.dim()} dimensions, expected [S] or [B, S]. Reshape them.")
        return ids
    if offsets.dim() != 1:
        raise ValueError(f"document: found offsets of {offsets.dim()} dimensions, expected [documents + 1].")
    tokens = torch.arange(int(offsets[-1]), device=offsets.device)
    return torch.bucketize(tokens, offsets[1:].to(tokens.dtype), right=True).int()
