"""Combinations of masks: and, or, xor, not, and the mask that excludes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.errors import ModError, message
from flexattn.mods.arguments import described
from flexattn.mods.kinds import MaskMod, call_of_factory, named


def noop_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Attend to every key. It is a mask_mod itself, passed without calling it."""
    return b.new_ones((), dtype=torch.bool)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Attend if all masks attend; without masks, attend everywhere.

    >>> import torch
    >>> from flexattn.mods import causal, sliding_window
    >>> i = torch.arange(4)
    >>> and_masks(causal, sliding_window(2))(i, i, i[:, None], i).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    _check(mask_mods)

    def and_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = b.new_ones((), dtype=torch.bool)
        for mask in mask_mods:
            result = result & mask(b, h, q_idx, kv_idx)
        return result

    return named(and_mask, "_and_".join(map(_name, mask_mods)) or "and_mask")


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Attend if any mask attends; without masks, attend nowhere.

    >>> import torch
    >>> from flexattn.mods import causal, prefix_lm
    >>> i = torch.arange(3)
    >>> or_masks(causal, lambda b, h, q, kv: kv < 2)(i, i, i[:, None], i).int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    _check(mask_mods)

    def or_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = b.new_zeros((), dtype=torch.bool)
        for mask in mask_mods:
            result = result | mask(b, h, q_idx, kv_idx)
        return result

    return named(or_mask, "_or_".join(map(_name, mask_mods)) or "or_mask")


def xor_masks(*mask_mods: MaskMod) -> MaskMod:
    """Attend if an odd number of masks attend.

    >>> import torch
    >>> from flexattn.mods import causal
    >>> i = torch.arange(3)
    >>> xor_masks(causal, noop_mask)(i, i, i[:, None], i).int().tolist()
    [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    """
    _check(mask_mods)

    def xor_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = b.new_zeros((), dtype=torch.bool)
        for mask in mask_mods:
            result = result ^ mask(b, h, q_idx, kv_idx)
        return result

    return named(xor_mask, "_xor_".join(map(_name, mask_mods)) or "xor_mask")


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """Attend if the mask does not.

    >>> import torch
    >>> from flexattn.mods import causal
    >>> i = torch.arange(3)
    >>> not_mask(causal)(i, i, i[:, None], i).int().tolist()
    [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    """
    _check((mask_mod,))

    def negated(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found = mask_mod(b, h, q_idx, kv_idx)
        return b.new_full((), not found, dtype=torch.bool) if isinstance(found, bool) else ~found

    return named(negated, f"not_{_name(mask_mod)}")


def _check(mask_mods: tuple[MaskMod, ...]) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    for n, mask in enumerate(mask_mods):
        name = f"mask_mods[{n}]"
        if type(mask).__name__ == "BlockMask":
            raise ModError(message(name, "a BlockMask", "a mask_mod", "Pass its mask_mod: block_mask.mask_mod."))
        if not callable(mask):
            text = message(name, described(mask), "a callable mask_mod", "Pass functions as single arguments.")
            raise ModError(f"All inputs should be callable mask_mods. {text}")
        code = getattr(mask, "__code__", None)
        names = None if code is None else code.co_varnames[: code.co_argcount]
        if names is None or names == _OF_MASK_MODS:
            continue
        if (call := call_of_factory(mask)) is not None:
            raise ModError(message(name, f"{_name(mask)}, which returns a mod", _EXPECTED, f"Call it: {call}."))
        if names == _OF_SCORE_MODS:
            fix = "Pass it to flex_attention as score_mod, and the mask as block_mask."
            raise ModError(message(name, f"{_name(mask)}, a score_mod", _EXPECTED, fix))


_OF_MASK_MODS = ("b", "h", "q_idx", "kv_idx")
_OF_SCORE_MODS = ("score", *_OF_MASK_MODS)
_EXPECTED = f"mask_mod({', '.join(_OF_MASK_MODS)})"


def _name(mask_mod: MaskMod) -> str:
    name = getattr(mask_mod, "__name__", type(mask_mod).__name__)
    return name if name.isidentifier() else "mask"  # for example a lambda
