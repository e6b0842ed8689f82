"""bound_mod: BoundMod, a graph with the tensors and numbers of a call. Bounds over boxes are in interval_bounds.py."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexattn.errors import UnsupportedError, message
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Capture
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.lasting import is_capturing, kept_for_graphs
from flexattn.torch_state.tensor_cache import kept
from flexattn.torch_state.transforms import outside


@frozen
class BoundMod:
    """A graph with the values of one call: numbers, and captured tensors (after the prologue, part of autograd)."""

    graph: ModGraph
    captures: tuple[Tensor, ...] = ()
    numbers: tuple[int | float, ...] = ()
    reached: tuple[Tensor, ...] = field(default=(), compare=False)  # the user's tensors that captures are computed from
    reached_names: tuple[str, ...] = field(default=(), compare=False)
    source: tuple[object, tuple[int | float, ...]] | None = field(default=None, compare=False)  # see `origin`
    wide: ModGraph | None = field(default=None, compare=False)  # the graph before it was narrowed for these numbers
    prologue: tuple[str, tuple[int | float, ...]] = field(default=("", ()), compare=False)  # its text and its numbers

    @property
    def origin(self) -> object:
        """Equal for mods that compute the same function of their `reached` tensors; None if unknown."""
        return None if self.source is None else (self.source[0], repr(self.source[1]))  # repr differs for 0.0 and -0.0

    def on(self, device: torch.device) -> BoundMod:
        """Return the mod with its CPU scalars and literals moved to `device`. Other captures are not moved.

        Captures that torch negates when it reads them (`z.conj().imag`) are copied, because kernels read memory.
        """
        for capture in self.captures:
            if capture.device != device or capture.is_neg():
                break
        else:
            return self
        described = zip(self.captures, self.graph.captures, strict=True)
        moved = tuple(_on(device, c, about) for c, about in described)
        return BoundMod(self.graph, moved, self.numbers)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run the mod on tensors given in the order of its inputs."""
        (out,) = self.graph.evaluate(dict(zip(self.graph.inputs, inputs, strict=True)), self.captures, self.numbers)
        assert out is not None
        return out


def _on(device: torch.device, capture: Tensor, about: Capture) -> Tensor:
    capture = capture.resolve_neg()
    if capture.device.type != "cpu" or (capture.dim() and not about.literal):
        return capture
    if not about.literal and is_capturing(device):
        fix = "Move it to the GPU before the capture, or capture a number."
        what = f"captured tensor {about.name!r}"
        raise UnsupportedError(message(what, "a CPU scalar in a CUDA graph", f"a tensor on {device}", fix))
    if not about.literal or capture.numel() == 0:
        return capture.to(device)
    if capture.numel() <= _LARGE:
        return _copied(capture, device)
    placed = _placed.get(capture)
    if placed is None or placed.device != device:
        placed = _placed[capture] = _copied(capture, device)
    return kept_for_graphs(device, placed)


def _copied(literal: Tensor, device: torch.device) -> Tensor:
    data = literal.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return _literal_on(data, literal.dtype, literal.shape, device)


_LARGE = 1024  # elements; larger literals have one tensor per trace, so they are cached by tensor instead of by bytes
_placed = WeakTensorKeyDictionary()  # literal -> its copy on a GPU


@kept(2**26)
def _literal_on(data: bytes, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> Tensor:
    with torch.inference_mode(False), outside():
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).to(device, copy=True)
