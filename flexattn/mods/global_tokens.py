"""Global tokens attend to every token and are attended to by every token (Longformer, BigBird)."""

from __future__ import annotations

from torch import Tensor

from flexattn.mods.arguments import check_tensor, checked_int
from flexattn.mods.kinds import MaskMod, named


def global_tokens(tokens: int | Tensor) -> MaskMod:
    """Attend from and to the first `tokens` tokens, or those marked in a bool tensor [S]. Combine with a local mask:

    >>> import torch
    >>> from flexattn.mods import or_masks, sliding_window
    >>> i = torch.arange(4)
    >>> or_masks(global_tokens(1), sliding_window(1))(i, i, i[:, None], i).int().tolist()
    [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    """
    if isinstance(tokens, Tensor):
        check_tensor("tokens", tokens, "[S]", "Mark the global tokens in a bool tensor, or give their number.")

        def marked(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return tokens[q_idx] | tokens[kv_idx]

        return named(marked, "global_tokens")

    tokens = checked_int("tokens", tokens, 0, "It is the number of the first tokens.")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx < tokens) | (kv_idx < tokens)

    return named(mask, "global_tokens", tokens)
