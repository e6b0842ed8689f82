"""arguments: Argument, one runtime argument of a kernel, and where a launch gets its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.block_mask.bits import MaskBits
from flexattn.call.problem import Problem
from flexattn.process.frozen_class import frozen

Tensors = Mapping[str, Tensor]  # by their names in the templates: q, k, v, o, do, dq, dk, dv, lse_ptr, ...
NO_ARRAYS: Tensors = {}


@frozen
class FromShapes:
    """A number that is the same for all launches with the same shapes, strides and numbers."""

    value: Callable[[Problem, Tensors], int | float]


@frozen
class FromTensors:
    """A tensor or array that the engine passes under this name."""

    name: str


Part = Literal[
    "kv_runs",
    "q_runs",
    "kv_bits",
    "q_bits",
    "kv_runs_in_tiles",
    "q_runs_in_tiles",
    "kv_bits_in_tiles",
    "q_bits_in_tiles",
    "score",
    "mask",
    "sink",
    "seed",
    "seqused_k",
    "q_offsets",
    "block_table",
    "k_descale",
    "v_descale",
]


@frozen
class FromProblem:
    """A tensor of the problem: the one at `index` of a part."""

    part: Part
    index: int = 0

    def tensor(self, problem: Problem) -> Tensor:
        return PARTS[self.part](problem)[self.index]


def block_mask_of(problem: Problem) -> BlockMask:
    assert problem.block_mask is not None
    return problem.block_mask


def _q_runs(blocks: BlockMask) -> tuple[Tensor, ...]:
    assert blocks.q_runs is not None
    return blocks.q_runs.tensors


def _bits(blocks: BlockMask) -> MaskBits:
    assert blocks.bits is not None
    return blocks.bits


_ReadMask = Callable[[BlockMask], tuple[Tensor, ...]]


def _in_tiles(read: _ReadMask) -> _ReadMask:
    """Return a function that reads the same of a mask in the order of tiles."""

    def found(blocks: BlockMask) -> tuple[Tensor, ...]:
        assert blocks.in_tiles is not None
        return read(blocks.in_tiles.mask)

    return found


_LISTS_OF_MASK: dict[Part, _ReadMask] = {
    "kv_runs": lambda blocks: blocks.kv_runs.tensors,
    "q_runs": _q_runs,
    "kv_bits": lambda blocks: _bits(blocks).by_query,
    "q_bits": lambda blocks: _bits(blocks).by_key,
}
# The parts of a mask, and the same of it in the order of tiles.
IN_TILES: dict[Part, Part] = {
    "kv_runs": "kv_runs_in_tiles",
    "q_runs": "q_runs_in_tiles",
    "kv_bits": "kv_bits_in_tiles",
    "q_bits": "q_bits_in_tiles",
}
# The tensors of a BlockMask.
OF_MASK: dict[Part, _ReadMask] = {
    **_LISTS_OF_MASK,
    **{IN_TILES[part]: _in_tiles(read) for part, read in _LISTS_OF_MASK.items()},
}


def _of_mask(part: Part) -> Callable[[Problem], tuple[Tensor, ...]]:
    return lambda problem: OF_MASK[part](block_mask_of(problem))


def _score(problem: Problem) -> tuple[Tensor, ...]:
    assert problem.score is not None
    return problem.score.captures


def _mask(problem: Problem) -> tuple[Tensor, ...]:
    """Return the captures of the mask as kernels see it: with the bounds of runs of equal elements at the end."""
    assert problem.mask is not None
    if not problem.equal_runs:
        return problem.mask.captures
    return (*problem.mask.captures, *(bounds for r in problem.equal_runs for bounds in (r.starts, r.ends)))


def _sink(problem: Problem) -> tuple[Tensor, ...]:
    assert problem.sink is not None
    return (problem.sink,)


def _seed(problem: Problem) -> tuple[Tensor, ...]:
    assert problem.dropout is not None
    return (problem.dropout.seed,)


def _of_layout(name: str) -> Callable[[Problem], tuple[Tensor, ...]]:
    return lambda problem: (getattr(problem.layout, name),)


# The tensors that kernels read besides query, key and value. They are the same in each variant of a problem.
PARTS: dict[Part, Callable[[Problem], tuple[Tensor, ...]]] = {
    **{part: _of_mask(part) for part in OF_MASK},
    "score": _score,
    "mask": _mask,
    "sink": _sink,
    "seed": _seed,
    "seqused_k": _of_layout("seqused_k"),
    "q_offsets": _of_layout("q_offsets"),
    "block_table": _of_layout("block_table"),
    "k_descale": _of_layout("k_descale"),
    "v_descale": _of_layout("v_descale"),
}


@frozen
class DescriptorOf:
    """A TMA descriptor of a tensor that the engine passes under this name."""

    name: str
    block: tuple[int, ...]  # shape of a tile
    is_grid: bool = False  # its rows are a row-major grid of tokens, and have two dims


@frozen
class TileCounter:
    """An int32 counter, 0 at each launch, from which persistent programs take tile indices."""


@frozen
class RedoneTiles:
    """The device's count of tiles that were computed again."""


@frozen
class Argument:
    """One runtime argument of a kernel: its name in the template, its Triton type and the source of its value."""

    name: str
    type: str  # in Triton's notation: i32, fp32, *bf16, tensordesc<...>
    source: FromShapes | FromTensors | FromProblem | DescriptorOf | TileCounter | RedoneTiles
    divisible: bool = False  # the pointer is a multiple of 16 bytes

    @property
    def is_descriptor(self) -> bool:
        return isinstance(self.source, DescriptorOf)
