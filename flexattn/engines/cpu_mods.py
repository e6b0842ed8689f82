"""Runs the graphs of mods on tiles: in-place if a value is not needed again, with loads and gradients of captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Load, Node, NumberRef, Operation, Scalar
from flexattn.graph.operators import OPS
from flexattn.process.frozen_class import frozen


@frozen
class Outside:
    """Positions with an out-of-range index into a captured tensor. It is an error only if one of them attends."""

    graph: ModGraph
    load: Load
    dimension: int
    size: int
    index: Tensor
    outside: Tensor  # bool, broadcasts to the tile

    def check(self, live: Tensor | None) -> None:
        """Raise if a position in `live` (None: all positions) has an out-of-range index."""
        outside = self.outside if live is None else self.outside & live
        if not outside.any():
            return
        index = int(torch.where(outside, self.index, 0).flatten()[outside.flatten().int().argmax()])
        raise self.graph.index_error(self.load, self.dimension, self.size, index, " at an attended position")


@dataclass
class TileGraph:
    """A graph prepared for many tiles: its constants are created, and the last use of each value is known."""

    graph: ModGraph
    captures: Sequence[Tensor]
    numbers: Sequence[int | float]
    device: torch.device
    outside: list[Outside] = field(default_factory=list)  # of the last run

    def __post_init__(self) -> None:
        nodes = self.graph.nodes
        self._fixed: dict[int, Tensor] = {}
        for i, node in enumerate(nodes):
            if isinstance(node, NumberRef):
                self._fixed[i] = self._fixed_value(self.numbers[node.position], node)
            elif isinstance(node, Const):
                self._fixed[i] = self._fixed_value(node.value, node)
        sites = (a for s in self.graph.sites for a in nodes[s].args)
        self._kept = {o for o in (*self.graph.outputs, *sites) if o is not None}
        last = {a: i for i, node in enumerate(nodes) for a in node.args}
        self._released: list[list[int]] = [[] for _ in nodes]
        for a, i in last.items():
            if a not in self._kept:
                self._released[i].append(a)

    def _fixed_value(self, value: Scalar, node: Node) -> Tensor:
        return torch.tensor(value, dtype=node.dtype, device=self.device)

    def run(self, inputs: dict[str, Tensor], shape: torch.Size, writable: tuple[str, ...] = ()) -> dict[int, Tensor]:
        """Evaluate a tile of this shape. Return the values of outputs and of the index expressions of sites.

        Inputs named in `writable` may be overwritten, and must have the shape of the tile.
        """
        self.outside = []
        values = dict(self._fixed)
        own: set[int] = set()  # full-size values without another reference
        for i, node in enumerate(self.graph.nodes):
            match node:
                case Input(name):
                    values[i] = inputs[name]
                    if name in writable:
                        own.add(i)
                    continue
                case NumberRef() | Const():
                    continue
                case Load():
                    values[i] = self._load(node, values)
                case Operation("cast" | "detach"):
                    values[i] = values[node.args[0]].to(node.dtype)
                    if values[i] is values[node.args[0]]:
                        own.discard(node.args[0])  # now two nodes refer to it
                case _:
                    args = [values[a] for a in node.args]
                    reuse = next((a for a in self._released[i] if a in own and values[a].dtype == node.dtype), None)
                    if reuse is None:
                        values[i] = OPS[node.op].torch(*args)
                    else:
                        values[i] = OPS[node.op].torch(*args, out=values[reuse])
                    if values[i].shape == shape:
                        own.add(i)
            for a in self._released[i]:
                if a not in self._fixed:
                    del values[a]
        return {i: values[i] for i in self._kept}

    def _load(self, node: Load, values: dict[int, Tensor]) -> Tensor:
        source = self.captures[node.capture]
        if not node.args:
            return source.to(node.dtype)
        index = [self._inside(node, d, values[a]) for d, a in enumerate(node.args)]
        if source.numel() == 0:
            return torch.zeros((), dtype=node.dtype, device=self.device)
        offset = flat_index(index, source.shape, source.stride())
        span = sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True)) + 1
        line = source.as_strided((span,), (1,))
        return line.index_select(0, offset.reshape(-1)).view(offset.shape).to(node.dtype)

    def _inside(self, node: Load, dimension: int, index: Tensor) -> Tensor:
        """Record positions with an out-of-range index, and clamp the index."""
        size = self.captures[node.capture].shape[dimension]
        low, high = (int(x) for x in index.aminmax())
        if low >= -size and high < size:
            return index
        outside = (index < -size) | (index >= size)
        self.outside.append(Outside(self.graph, node, dimension, size, index, outside))
        return index.clamp(-size, max(size - 1, -size))


def flat_index(index: Sequence[Tensor], sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return the linear position in memory of each indexed element (int64). Negative indices count from the end."""
    terms = []
    for i, size, stride in zip(index, sizes, strides, strict=True):
        i = i.long()
        terms.append(torch.where(i < 0, i + size, i) * stride)
    # Smallest terms first, so that only the last addition has the size of the tile.
    total, *others = sorted(terms, key=Tensor.numel)
    for term in others:
        total = total + term
    return total


class CaptureGradients:
    """Accumulates the gradients of captured tensors over tiles."""

    def __init__(self, gradient: ModGraph, captures: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._gradient = gradient
        self._captures = captures
        self.sums: dict[int, Tensor] = {}  # by position of the capture; contiguous, float32 or float64
        for site in gradient.sites:
            position = gradient.loads[site].capture
            wide = torch.promote_types(captures[position].dtype, dtype)
            self.sums[position] = torch.zeros(captures[position].shape, dtype=wide, device=captures[position].device)

    @staticmethod
    def of(problem: Problem, dtype: torch.dtype) -> CaptureGradients:
        assert problem.score is not None and problem.score_grad is not None
        return CaptureGradients(problem.score_grad, problem.score.captures, dtype)

    def add_all(self, other: CaptureGradients) -> None:
        for i, total in self.sums.items():
            total.add_(other.sums[i])

    def add(self, values: dict[int, Tensor], shape: torch.Size, excluded: Tensor | None) -> None:
        """Add a tile. `values` are those of the gradient graph; `excluded` positions contribute nothing."""
        for site, output in zip(self._gradient.sites, self._gradient.outputs[1:], strict=True):
            if output is None:
                continue
            node = self._gradient.loads[site]
            into = self.sums[node.capture]
            if into.numel() == 0:
                continue
            grad = values[output].expand(shape)
            if excluded is not None:
                grad = torch.where(excluded, 0, grad)
            index = [_five_dims(values[a]) for a in node.args]
            alike = tuple(d for d in range(5) if all(i.shape[d] == 1 for i in index))
            if alike:
                grad = grad.sum(alike, keepdim=True)
            grad = grad.to(into.dtype)
            if not index:
                into += grad.reshape(())
                continue
            index = [i.clamp(-n, n - 1) for i, n in zip(index, into.shape, strict=True)]
            offset = flat_index(index, into.shape, into.stride()).expand(grad.shape)
            if into.is_cpu:
                into.view(-1).scatter_add_(0, offset.reshape(-1), grad.reshape(-1))
            else:  # sorts by index, so sums have one order; scatter_add_ on CUDA uses atomics, and gradcheck sees it
                into.view(-1).index_put_((offset.reshape(-1),), grad.reshape(-1), accumulate=True)


def _five_dims(x: Tensor) -> Tensor:
    return x.reshape((1,) * (5 - x.ndim) + tuple(x.shape))
