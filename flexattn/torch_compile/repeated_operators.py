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
from flexattn.call.varlen.block_lists import DIRECTION, reach_of
from flexattn.call.varlen.packing import Packing
from flexattn.compile.arguments import OF_MASK, PARTS, Part
from flexattn.engines.triton import KnownBackward, KnownForward
from flexattn.graph.bound_mod import BoundMod
from flexattn.process.frozen_class import frozen
from flexattn.runtime import tensor_forms
from flexattn.runtime.known import Pointer
from flexattn.runtime.launch import CACHES, allows_tf32, is_deterministic, remember
from flexattn.torch_compile.sequence_form import SequenceForm
from flexattn.torch_compile.spec import loads


@frozen(eq=False)
class RepeatedOperator:
    """An operator whose launches are known."""

    run: Any  # a KnownForward or a KnownBackward
    score_captures: int  # number of the operator's captures that are those of score_mod


_MOST_KINDS = 64  # of arguments that one mask is passed with


@frozen
class _Lists:
    """Pointers to the lists of a mask, and to the runs of equal elements. Kept as long as the packed lists live."""

    addresses: list[int]  # of the tensors of the mask
    pointers: dict[Part, list[Pointer]]
    all: list[Pointer]  # of all parts, in order


Key = tuple[object, ...]
_known: OrderedDict[Key, RepeatedOperator] = OrderedDict()
CACHES.append(_known)


def key_of(
    tensors: tuple[Tensor, ...], captures: list[Tensor], ints: list[int], floats: list[Tensor], scale: float | None,
    spec: str,
) -> Key:  # fmt: skip
    """Return the kind of an operator's arguments, without lists. `tensors` begin with query, key and value."""
    numbers: tuple[object, ...] = (*ints, *[x.item() for x in floats]) if floats else tuple(ints)
    if 0.0 in numbers:
        numbers = tuple(map(repr, numbers))  # 0.0 == -0.0
    shares = tensors[1].data_ptr() == tensors[2].data_ptr()
    return spec, scale, numbers, allows_tf32(), is_deterministic(), tensor_forms.key_of(*tensors, *captures), shares


def memory_form(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15


@frozen
class SequenceTensors:
    """What kernels read of a layout or of packed sequences."""

    captures: tuple[Tensor, ...]  # appended to those of each mod
    parts: dict[Part, Sequence[Tensor]]

    @staticmethod
    def of(form: SequenceForm, tensors: Sequence[Tensor], T_q: int) -> SequenceTensors:
        """Return those of an operator's argument `layout`."""
        if form.window is None:
            named: Any = dict(zip(form.names, tensors, strict=True))
            offsets = (named["q_offsets"],) if "q_offsets" in named else ()
            return SequenceTensors(offsets, {name: (t,) for name, t in named.items()})
        columns, lists = tensors[0], tensors[1:]
        parts: dict[Part, Sequence[Tensor]] = {"kv_runs": lists[:DIRECTION], "q_runs": lists[DIRECTION:]}
        return SequenceTensors(Packing.of_columns(columns, T_q).tensors, parts)


def kind_of(
    tensors: tuple[Tensor, ...], captures: list[Tensor], lists: list[Tensor], layout: list[Tensor], ints: list[int],
    floats: list[Tensor], scale: float | None, spec: str,
) -> tuple[Key | None, SequenceTensors | None]:  # fmt: skip
    """Return the kind of an operator's arguments, and the tensors of a layout or packed sequences.

    `tensors` are query, key and value, and of a backward also d_out and out. Of the lists, only the columns of a grid
    are part of it. The kind is None if calls are not repeated.
    """
    if not layout:
        found = key_of(tensors, captures, ints, floats, scale, spec)
        return (*found, lists[1].size(2)) if len(lists) > 1 else found, None
    form = loads(spec).sequences
    assert form is not None
    query, key = tensors[:2]
    if form.window is not None:
        # Sizes of the tensors follow from those of query and key, and from what the graph of mask_mod reads.
        reach = reach_of(ints[-1], key.shape[2], query.shape[1])
        ints, forms = ints[:-1], (reach, len(layout), *[t.data_ptr() & 15 for t in layout])
    elif "kv_positions" in form.names:
        return None, None
    else:
        forms = tuple(map(memory_form, layout))
    found = key_of(tensors, captures, ints, floats, scale, spec)
    return found + forms, SequenceTensors.of(form, layout, query.shape[2])


def find(
    key: Key, captures: list[Tensor], lists: list[Tensor], sequences: SequenceTensors | None = None
) -> tuple[Any, Sequence[Pointer]] | None:
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
        if not captures and sequences is None:
            return known.run, state.all
        of_lists = state.pointers
    kernels = known.run.kernels
    found: list[Pointer] = []
    for part in kernels.parts:
        if sequences is not None and part in sequences.parts:
            found += map(kernels.pointer, sequences.parts[part])
            continue
        if part == "score":
            found += map(kernels.pointer, captures[: known.score_captures])
        elif part == "mask":
            found += map(kernels.pointer, captures[known.score_captures :])
        found += of_lists.get(part, ())
        if sequences is not None and part in ("score", "mask"):
            found += map(kernels.pointer, sequences.captures)
    return known.run, found


def keep(
    given: tuple[Tensor, ...], lists: list[Tensor], key: Key, problem: Problem,
    run: KnownForward | KnownBackward | None, sequences: SequenceTensors | None,
) -> None:  # fmt: skip
    """Keep what an operator launched, if it read query, key, value and captures as they are given."""
    if run is None or problem.batch_invariant:
        return
    named, added = ({}, 0) if sequences is None else (sequences.parts, len(sequences.captures))
    score = () if problem.score is None else problem.score.captures[: len(problem.score.captures) - added]
    of_mask = len(given) - 3 - len(score)
    mask = () if problem.mask is None else PARTS["mask"](problem)
    tensors = (problem.query, problem.key, problem.value, *score, *mask[:of_mask])
    if len(tensors) != len(given) or (sequences is None and len(_captures(problem.mask)) != of_mask):
        return
    if any(a.data_ptr() != b.data_ptr() or a.stride() != b.stride() for a, b in zip(tensors, given, strict=True)):
        return
    if any(t.is_neg() for t in given[3:]):
        return
    bounds = mask[of_mask : len(mask) - added]  # of runs of equal elements
    pointers: dict[Part, list[Pointer]] = {
        part: list(map(run.kernels.pointer, bounds if part == "mask" else PARTS[part](problem)))
        for part in run.kernels.parts
        if part != "score" and part not in named
    }
    if not pointers.keys() <= _OF_LISTS or (not lists and any(pointers.values())):
        return
    blocks = problem.block_mask
    if sequences is not None and blocks is not None and not blocks.is_built:  # `as_listed` makes tensors for each call
        return
    known = _known.get(key)
    if known is None or known.run is not run:
        known = RepeatedOperator(run, len(score))
        remember(_known, key, known)
    if lists:
        kinds = Origin.of(lists[0]).masks
        if len(kinds) >= _MOST_KINDS:
            kinds.clear()
        everything = [pointer for part in run.kernels.parts for pointer in pointers.get(part, ())]
        kinds[known] = _Lists([t.data_ptr() for t in lists], pointers, everything)


_OF_LISTS = frozenset((*OF_MASK, "mask"))


def _captures(bound: BoundMod | None) -> tuple[Tensor, ...]:
    return () if bound is None else bound.captures
