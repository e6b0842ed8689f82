"""sequence_form: SequenceForm, what the tensors of a layout or of packed sequences are, as text in graphs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from flexattn.call.layout import LayoutArguments
from flexattn.call.varlen.arguments import PackedArguments, check_longest, check_window
from flexattn.process.frozen_class import frozen

PACKED = ("cu_seq_q", "cu_seq_k", "seqused_q", "seqused_k")
LAYOUT = ("seqused_k", "q_offsets", "kv_positions", "block_table", "k_descale", "v_descale")


@frozen
class SequenceForm:
    """The names of the tensors of sequences, and what is a constant of the graph."""

    names: tuple[str, ...]
    window: tuple[int, int] | None = None  # of packed sequences
    by_hand: bool = False  # of a layout: block_mask is a BlockMask of flexattn, so its lists may be the user's own

    def dumps(self) -> str:
        return json.dumps([self.names, self.window, self.by_hand])

    @staticmethod
    @lru_cache(256)
    def loads(text: str) -> SequenceForm:
        names, window, by_hand = json.loads(text)
        return SequenceForm(tuple(names), None if window is None else tuple(window), by_hand)

    def layout_of(self, tensors: Sequence[Tensor]) -> LayoutArguments:
        """Return the arguments of a call with a layout."""
        given: Any = dict(zip(self.names, tensors, strict=True))
        return LayoutArguments(**given)

    def packed_of(self, tensors: Sequence[Tensor], lengths: Sequence[int]) -> PackedArguments:
        """Return the arguments of a call with packed sequences."""
        assert self.window is not None
        given: Any = dict(zip(self.names, tensors, strict=True))
        return PackedArguments(**given, max_q=lengths[0], max_k=lengths[1], window_size=self.window)


def described(
    layout: LayoutArguments | PackedArguments | None, by_hand: bool
) -> tuple[list[Tensor], list[int], str | None]:
    """Return the tensors of a layout, lengths that may be symbols, and a SequenceForm. Dynamo traces this function."""
    if layout is None:
        return [], [], None
    lengths, window = [], "null"
    if isinstance(layout, PackedArguments):
        check_longest("max_q", layout.max_q)
        check_longest("max_k", layout.max_k)
        check_window(layout.window_size)
        left, right = [range(n).stop for n in layout.window_size]  # numbers instead of symbols: they are constants
        lengths, window = [layout.max_q, layout.max_k], f"[{left}, {right}]"
        names = [name for name in PACKED if getattr(layout, name) is not None]
    else:
        names = [name for name in LAYOUT if getattr(layout, name) is not None]
    words = ", ".join([f'"{name}"' for name in names])
    text = f"[[{words}], {window}, {'true' if by_hand else 'false'}]"  # as dumps, which Dynamo cannot trace
    return [getattr(layout, name) for name in names], lengths, text
