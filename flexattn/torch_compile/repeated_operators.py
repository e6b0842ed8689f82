"""repeated_operators: operators whose arguments are of a known kind. They launch the kernels of an equal earlier one.

The first one goes through `operators._problem`, an engine and the compiler. `engines/repeated_calls.py` is the same for
calls outside of graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from torch import Tensor

from flexattn.block_mask.prepared import Origin
from flexattn.call.problem import Problem
from flexattn.compile.arguments import PARTS, Part
from flexattn.engines.triton import KnownBackward, KnownForward
from flexattn.process.frozen_class import frozen
from flexattn.runtime.known import Pointer
from flexattn.runtime.launch import CACHES, allows_tf32, is_deterministic, remember


class Arguments(NamedTuple):
    """The arguments of both operators, in order (operators.py)."""

    query: Tensor
    key: Tensor
    value: Tensor
    captures: list[Tensor]
    lists: list[Tensor]
    sink: Tensor | None
    seed: Tensor | None
    ints: list[int]
    floats: list[Tensor]
    scale: float | None
    spec: str


@frozen
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


def key_of(given: Arguments, *others: object) -> Key | None:
    """Return the kind of an operator's arguments; None for those that are not repeated."""
    if given.sink is not None or given.seed is not None:
        return None
    numbers: tuple[object, ...] = (
        (*given.ints, *[x.item() for x in given.floats]) if given.floats else tuple(given.ints)
    )
    if 0.0 in numbers:
        numbers = tuple(map(repr, numbers))  # 0.0 == -0.0
    return (
        given.spec, given.scale, numbers, allows_tf32(), is_deterministic(), *others,
        given.key.data_ptr() == given.value.data_ptr(),
        *[memory_form(t) for t in (given.query, given.key, given.value, *given.captures)],
    )  # fmt: skip


def memory_form(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15


def find(given: Arguments, key: Key) -> tuple[RepeatedOperator, list[Pointer]] | None:
    """Return what to run for arguments of a known kind, and the pointers that it needs."""
    known = _known.get(key)
    if known is None:
        return None
    lists: dict[Part, list[Pointer]] = {}
    if given.lists:
        origin = Origin.of(given.lists[0])
        state = origin.masks.get(key)
        if state is None or state.addresses != [t.data_ptr() for t in given.lists]:
            return None
        if not origin.has_passed(given.captures[known.score_captures :]):
            return None
        lists = state.pointers
    found: list[Pointer] = []
    pointer = known.run.kernels.pointer
    for part in known.run.kernels.parts:
        if part == "score":
            found += map(pointer, given.captures[: known.score_captures])
        elif part == "mask":
            found += map(pointer, given.captures[known.score_captures :])
            found += lists[part]
        else:
            found += lists[part]
    return known, found


def keep(given: Arguments, key: Key, problem: Problem, run: KnownForward | KnownBackward | None) -> None:
    """Keep what an operator launched, if it read its arguments as they are."""
    score = () if problem.score is None else problem.score.captures
    mask = () if problem.mask is None else problem.mask.captures
    tensors = (problem.query, problem.key, problem.value, *score, *mask)
    same = (given.query, given.key, given.value, *given.captures)
    if run is None or problem.batch_invariant or len(tensors) != len(same):
        return
    if any(a.data_ptr() != b.data_ptr() or a.stride() != b.stride() for a, b in zip(tensors, same, strict=True)):
        return
    if any(t.is_neg() for t in given.captures):
        return
    remember(_known, key, RepeatedOperator(run, len(score)))
    if given.lists:
        pointers: dict[Part, list[Pointer]] = {
            part: list(map(run.kernels.pointer, PARTS[part](problem)[len(mask) if part == "mask" else 0 :]))
            for part in run.kernels.parts
            if part != "score"
        }
        kinds = Origin.of(given.lists[0]).masks
        if len(kinds) >= _MOST_KINDS:
            kinds.clear()
        kinds[key] = _Lists([t.data_ptr() for t in given.lists], pointers)
