"""repeated_operators: operators whose arguments are of a known kind. They launch the kernels of an equal earlier one.

The first one goes through `operators._problem`, an engine and the compiler. `engines/repeated_calls.py` is the same for
calls outside of graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flexattn.block_mask.prepared import Origin
from flexattn.call.problem import Problem
from flexattn.compile.arguments import PARTS, Part
from flexattn.engines.triton import KnownBackward, KnownForward
from flexattn.process.frozen_class import frozen
from flexattn.runtime.known import Pointer
from flexattn.runtime.launch import CACHES, allows_tf32, is_deterministic, remember


@frozen(eq=False)
class RepeatedOperator:
    """An operator whose launches are known."""

    run: Any  # a KnownForward or a KnownBackward
    score_captures: int  # number of the captures that are those of score_mod


_MOST_KINDS = 64  # of arguments that one mask is passed with


@frozen
class _Lists:
    """Pointers to the lists of a mask, and to the runs of equal elements. Kept as long as the packed lists live."""

    addresses: list[int]  # of the tensors of the mask
    pointers: dict[Part, list[Pointer]]


Key = tuple[object, ...]
_known: OrderedDict[Key, RepeatedOperator] = OrderedDict()
CACHES.append(_known)


def key_of(
    query: Tensor, key: Tensor, value: Tensor, captures: list[Tensor], ints: list[int], floats: list[Tensor],
    scale: float | None, spec: str,
) -> Key:  # fmt: skip
    """Return the kind of an operator's arguments, without lists. It runs in each call: few functions, no loops."""
    numbers: tuple[object, ...] = (*ints, *[x.item() for x in floats]) if floats else tuple(ints)
    if 0.0 in numbers:
        numbers = tuple(map(repr, numbers))  # 0.0 == -0.0
    of_key, of_value = key.data_ptr(), value.data_ptr()
    found = (
        spec, scale, numbers, allows_tf32(), is_deterministic(),
        query.shape, query.stride(), query.dtype, query.device, query.data_ptr() & 15,
        key.shape, key.stride(), key.dtype, key.device, of_key & 15,
        value.shape, value.stride(), value.dtype, value.device, of_value & 15, of_key == of_value,
    )  # fmt: skip
    return (*found, *map(memory_form, captures)) if captures else found


def memory_form(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15


def find(key: Key, captures: list[Tensor], lists: list[Tensor]) -> tuple[Any, Sequence[Pointer]] | None:
    """Return what to run for arguments of a known kind, and the pointers that it needs."""
    known = _known.get(key)
    if known is None:
        return None
    of_lists: dict[Part, list[Pointer]] = {}
    if lists:
        origin = Origin.of(lists[0])
        state = origin.masks.get(known)
        if state is None or state.addresses != [t.data_ptr() for t in lists]:
            return None
        if not origin.has_passed(captures[known.score_captures :]):
            return None
        of_lists = state.pointers
    kernels = known.run.kernels
    found: list[Pointer] = []
    for part in kernels.parts:
        if part == "score":
            found += map(kernels.pointer, captures[: known.score_captures])
            continue
        if part == "mask":
            found += map(kernels.pointer, captures[known.score_captures :])
        found += of_lists[part]
    return known.run, found


def keep(
    given: tuple[Tensor, ...], lists: list[Tensor], key: Key, problem: Problem, run: KnownForward | KnownBackward | None
) -> None:
    """Keep what an operator launched, if it read query, key, value and captures as they are given."""
    score = () if problem.score is None else problem.score.captures
    mask = () if problem.mask is None else problem.mask.captures
    tensors = (problem.query, problem.key, problem.value, *score, *mask)
    if run is None or problem.batch_invariant or len(tensors) != len(given):
        return
    if any(a.data_ptr() != b.data_ptr() or a.stride() != b.stride() for a, b in zip(tensors, given, strict=True)):
        return
    if any(t.is_neg() for t in given[3:]):
        return
    known = _known.get(key)
    if known is None or known.run is not run:
        known = RepeatedOperator(run, len(score))
        remember(_known, key, known)
    if lists:
        pointers: dict[Part, list[Pointer]] = {
            part: list(map(run.kernels.pointer, PARTS[part](problem)[len(mask) if part == "mask" else 0 :]))
            for part in run.kernels.parts
            if part != "score"
        }
        kinds = Origin.of(lists[0]).masks
        if len(kinds) >= _MOST_KINDS:
            kinds.clear()
        kinds[known] = _Lists([t.data_ptr() for t in lists], pointers)
