"""Calls whose types pyright checks: the result of flex_attention follows from what is requested."""

from __future__ import annotations

from typing import assert_type

from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest as TorchsAuxRequest

import flexattn
from flexattn import AuxOutput, AuxRequest


def calls(x: Tensor, wanted: bool) -> None:
    assert_type(flexattn.flex_attention(x, x, x), Tensor)
    assert_type(flexattn.flex_attention(x, x, x, flexattn.mods.softcap(5.0), scale=0.5), Tensor)
    assert_type(flexattn.flex_attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flexattn.flex_attention(x, x, x, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])
    assert_type(flexattn.flex_attention(x, x, x, return_aux=TorchsAuxRequest(lse=True)), tuple[Tensor, AuxOutput])
    assert_type(
        flexattn.flex_attention(x, x, x, return_lse=wanted),
        Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput],
    )
