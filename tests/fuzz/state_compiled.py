"""`python -m tests.fuzz --state --compiled`: the programs of `--state`, called from functions that torch.compile compiled.

A result may differ from Python's only where Dynamo's guards miss the change. Then a function that only calls the mod,
compiled next to the call, misses it too, or the call is right after torch.compile has forgotten its graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexattn import AuxRequest, flex_attention
from fuzz.state import PAIRS, Difference, M, N, Run, _result, evaluated, inputs

BACKEND = "eager"  # AOTAutograd and Inductor see what Dynamo captured; tests compare them


def _attend(query: Tensor, key: Tensor, value: Tensor, mod: Any, mask: Any) -> Tensor:
    out, aux = flex_attention(query, key, value, mod, mask, scale=1.0, return_aux=AuxRequest(lse=True))
    return torch.cat((out[0, 0], aux.lse[0, 0, :, None]), -1)


def _apply(mod: Any, args: tuple[Tensor, ...]) -> Any:
    return mod(*args)


class CompiledRun(Run):
    """A program whose calls are compiled."""

    def __init__(self, made: Any, *rest: Any) -> None:
        super().__init__(replace(made, way="call" if made.kind == "score" else "build"), *rest)
        torch._dynamo.reset()
        config: Any = torch._dynamo.config
        config.recompile_limit = config.accumulated_recompile_limit = 1000  # beyond it, functions are not compiled
        self.attend = torch.compile(_attend, backend=BACKEND)
        self.apply = torch.compile(_apply, backend=BACKEND)
        self.plain: Any = None

    def ours(self) -> Any:
        if self.made.kind == "mask":
            return super().ours()
        return self._called(self.mod, None)

    def using(self, mask: Any) -> Any:
        return self._called(None, mask)

    def _called(self, mod: Any, mask: Any) -> Any:
        self.plain = evaluated(lambda: self._by_dynamo(self.made.kind))
        return evaluated(lambda: self.attend(*inputs(), mod, mask))

    def _by_dynamo(self, kind: str) -> Tensor:
        """Return what the mod alone gives for each pair in a compiled function."""
        found = []
        for i, j in PAIRS:
            place = [torch.tensor(x, dtype=torch.int32) for x in (0, 0, i, j)]
            score = [torch.tensor(0.5 * i - j)] if kind == "score" else []
            found.append(_result(self.apply(self.mod, (*score, *place))))
        return torch.stack(found).view(M, N)

    def is_dynamos(self) -> bool:
        """Return whether Dynamo alone misses what Python sees now."""
        now = evaluated(lambda: self.exact())
        if isinstance(now, Exception) or isinstance(self.plain, Exception):
            return isinstance(now, Exception) != isinstance(self.plain, Exception)
        return not torch.equal(now.float().nan_to_num(nan=1e20), self.plain.float().nan_to_num(nan=1e20))

    def compare(self) -> Any:
        return self._unless_dynamos(super().compare)

    def compare_mask(self, mask: Any, before: Tensor) -> None:
        self._unless_dynamos(lambda: Run.compare_mask(self, mask, before))

    def _unless_dynamos(self, compare: Callable[[], Any]) -> Any:
        """Compare. A difference that Dynamo explains is counted, and what is forgotten is compared again."""
        try:
            return compare()
        except Difference:
            explained = self.is_dynamos()
            torch._dynamo.reset()
            try:
                found = compare()
            except Difference:
                if not explained:
                    raise
                found = self.python()
        self.outcome.dynamo += 1
        return found

    def agree(self, python: Tensor, ours: Any) -> None:
        if not self._is_dynamos_error(ours):
            super().agree(python, ours)

    def agree_mask(self, now: Tensor, ours: Any) -> None:
        if not self._is_dynamos_error(ours):
            super().agree_mask(now, ours)

    def _is_dynamos_error(self, ours: Any) -> bool:
        """Return whether Dynamo raised an error of its own, or one of ours inside of its own."""
        if isinstance(ours, torch._dynamo.exc.TorchDynamoException) or hasattr(ours, "real_stack"):
            self.outcome.refusals.append(f"{type(ours).__name__} of Dynamo")
            return True
        return False
