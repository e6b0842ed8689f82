"""Call: the arguments of one call of flex_attention, as the user gave them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask
from flexattn.call.layout import LayoutArguments
from flexattn.call.varlen.arguments import PackedArguments
from flexattn.process.frozen_class import frozen

Mod = Callable[..., object]


@frozen(eq=False)
class Call:
    """The arguments of flex_attention, unchecked."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    score_mod: Mod | None = None
    block_mask: BlockMask | upstream.BlockMask | None = None
    scale: float | None = None
    enable_gqa: bool = False
    kernel_options: Mapping[str, object] | None = None
    sink: Tensor | float | None = None
    dropout_p: float = 0.0
    max_scores: bool = False
    layout: LayoutArguments | PackedArguments | None = None
