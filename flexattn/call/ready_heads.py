"""ready_heads: the number of heads that a ready mod was made for, which a call compares with query."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from flexattn.call.validate import SWAPPED
from flexattn.errors import ArgumentError, message
from flexattn.mods.arguments import PerHead, described


def heads_of(score_mod: Any) -> tuple[list[str], list[int], Tensor | None]:
    """Return the name of a ready mod and its number of heads, or its name, an argument and its form, and the tensor.

    Dynamo traces this function.
    """
    # Dynamo reads the closure of a function before it can tell if it has an attribute other than these.
    if isinstance(score_mod, partial) or not hasattr(score_mod, "__module__"):
        return [], [], None
    is_ready = str(score_mod.__module__).startswith("flexattn.")
    if not is_ready or hasattr(score_mod, "__wrapped__"):  # functools.wraps copies what a ready mod says of itself
        return [], [], None
    has_table = hasattr(score_mod, "per_head")
    if not has_table and not hasattr(score_mod, "heads"):
        return [], [], None
    # Its own name may have numbers, which Dynamo would guard.
    name = score_mod.ready_name if hasattr(score_mod, "ready_name") else score_mod.__module__.split(".")[-1]
    if has_table:
        argument, tensor, form = score_mod.per_head
        return [name, argument, form], [], tensor
    return [name], [score_mod.heads], None


def check_heads(texts: Sequence[str], counts: Sequence[int], tensor: Tensor | None, heads: int, rows: int) -> None:
    """Check what `heads_of` returns. `heads`, `rows`: of query."""
    name = f"score_mod {texts[0]}" if texts else ""
    for count in counts:  # of mods.alibi(count)
        if count != heads:
            fix = f"Write mods.alibi({heads}). For some of {count} heads pass their slopes, a tensor."
            fix = SWAPPED if count == rows else fix
            raise ArgumentError(message(name, f"{count} heads", f"those of query, {heads}", fix))
    if tensor is None:
        return
    given = PerHead(texts[1], tensor, texts[2])
    if given.heads != heads:
        fix = SWAPPED if given.heads == rows else given.fix(heads)
        raise ArgumentError(message(f"{given.argument} of {name}", described(tensor), given.expected(heads), fix))
