"""memory: results that depend on tensors, kept for the same tensors at the same version."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask import Seen, is_same, seen
from flexattn.process.forks import Lock
from flexattn.torch_state.lasting import is_capturing

_REMEMBERED = 16
_COMPARED = 2**20  # elements; for a larger tensor on a CPU nothing is kept


class _At(NamedTuple):
    """A tensor that a result was computed from: a weak reference, its version, its address, and values on a CPU.

    Writes through numpy or `tensor.data` leave the version as it is.
    """

    seen: Seen
    address: int
    values: Tensor | None

    @staticmethod
    def of(tensor: Tensor) -> _At:
        compared = type(tensor) is Tensor and tensor.is_cpu
        return _At(seen(tensor), tensor.data_ptr(), tensor.detach().clone() if compared else None)

    def holds(self, tensor: Tensor) -> bool:
        same = is_same(self.seen, tensor) and tensor.data_ptr() == self.address
        return same and (self.values is None or torch.equal(self.values, tensor))


class Memory:
    """The latest results for tensors, found by the tensors themselves at the same version.

    Tensors of inference mode have no version, and large ones on a CPU would have to be copied, so nothing is kept for
    them. The results must not refer to the tensors.
    """

    def __init__(self) -> None:
        self.found: OrderedDict[object, tuple[tuple[_At, ...], Any]] = OrderedDict()
        self.lock = Lock()

    def get(self, key: object, tensors: tuple[Tensor, ...], make: Any) -> Any:
        """Return make(), or the earlier result for this key and these tensors. CUDA graphs capture make()."""
        if is_capturing(tensors[0].device):
            return make()
        known = self.known(key, tensors)
        if known is not None:
            return known[0]
        if any(t.is_inference() or (t.is_cpu and t.numel() > _COMPARED) for t in tensors):
            return make()
        with torch.inference_mode(False):  # a call with gradients may find it
            made = make()
        key = (key, *map(id, tensors))
        with self.lock:
            for other in [k for k, (at, _) in self.found.items() if any(x.seen[0]() is None for x in at)]:
                del self.found[other]
            self.found[key] = tuple(map(_At.of, tensors)), made
            self.found.move_to_end(key)
            while len(self.found) > _REMEMBERED:
                self.found.popitem(last=False)
        return made

    def known(self, key: object, tensors: tuple[Tensor, ...]) -> tuple[Any] | None:
        """Return the earlier result in a tuple, or None."""
        if is_capturing(tensors[0].device):
            return None
        key = (key, *map(id, tensors))
        with self.lock:
            known = self.found.get(key)
        if known is None or not all(x.holds(t) for x, t in zip(known[0], tensors, strict=True)):
            return None
        return (known[1],)


_assertions = Memory()


def assert_once(text: str, tensors: tuple[Tensor, ...], condition: Callable[..., Tensor]) -> None:
    """Let a kernel assert condition(*tensors), once for these tensors at this version, but in no CUDA graph."""
    if not torch.cuda.is_current_stream_capturing():
        _assertions.get(text, tensors, lambda: torch.ops.aten._assert_async.msg(condition(*tensors), text))
