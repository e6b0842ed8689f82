"""Whether the results of a case are right: the rules of the tests for errors, and what became of a case."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from kernel_cases import given, near_bound
from oracle import errors_of, part
from torch import Tensor

from flexattn.errors import CompileError, FlexAttentionError, IndexRangeError, MutationError
from fuzz.cases import Case
from fuzz.compare import Posed, Results, ours, pose, reference
from fuzz.terms import sizes_of_terms

DEFECTS = (CompileError, IndexRangeError, MutationError)  # of flexattn's own errors; all others refuse a call
FLOORS = {2: 2.0, 4: 4.0, 8: 16.0}  # in ulp, by the size of a dtype; in float64 the dense computation is the oracle
TERMS = {2: 1.0, 4: 4.0, 8: 4.0}  # roundings of the terms of a gradient that cancel
WITH_TANH = ("softcap", "detached", "kernel case")
FEW = 256  # values are no statistics
TINY = torch.finfo(torch.float32).tiny  # below it, machines flush numbers to 0 or do not
ROOM = 2.0  # times what the tests of chosen calls allow: the worst of thousands of random ones is worse


class WrongResult(AssertionError):
    """A result is not what the reference says."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case in one engine."""

    outcome: str  # "right", "refused", "wrong" (results) or "broken" (an exception)
    about: str = ""  # the worst result, or the kind of the exception
    text: str = ""
    ratio: float = 0.0  # the largest error as a part of what is allowed

    @property
    def failed(self) -> bool:
        return self.outcome in ("wrong", "broken")

    def is_like(self, other: Verdict) -> bool:
        """Tell whether both may have one cause."""
        return self.outcome == other.outcome and (self.outcome == "wrong" or self.about == other.about)


def try_case(case: Case, device: str, options: Mapping[str, object]) -> Verdict:
    """Run a case in one engine and compare; raise nothing."""
    try:
        about, ratio = worst_error(case, device, options)
        return Verdict("right", about, ratio=ratio)
    except WrongResult as error:
        return Verdict("wrong", str(error).partition(":")[0], str(error))
    except Exception as error:
        refused = isinstance(error, FlexAttentionError) and not isinstance(error, DEFECTS)
        text = str(error) if refused else "".join(traceback.format_exception(error, limit=-4))
        return Verdict("refused" if refused else "broken", type(error).__name__, text)


def worst_error(case: Case, device: str, options: Mapping[str, object]) -> tuple[str, float]:
    """Return the name of the result that is worst, and its error as a part of what is allowed; raise WrongResult."""
    posed = pose(case, device)
    got = ours(posed, options)
    if case.deterministic:
        _assert_same_bits(got, ours(posed, options))
    compared = Compared(posed, got, reference(posed, None), reference(posed, torch.float64))
    return max(((name, compared.ratio(name)) for name in got), key=lambda found: found[1])


def _assert_same_bits(got: Results, again: Results) -> None:
    """Compare bits of what does not come from sums in any order: on a GPU those for captured tensors are."""
    for name, x in got.items():
        y = again[name]
        if x is not None and not (x.is_cuda and name.startswith("d(")) and y is not None and not torch.equal(x, y):
            raise WrongResult(f"{name}: other bits the second time, where algorithms are to be deterministic")


@dataclass(frozen=True)
class Compared:
    """The results of one case from an engine, and from dense attention in the same dtype and in float64."""

    posed: Posed
    got: Results
    near: Results
    exact: Results

    def ratio(self, name: str) -> float:
        """Return the error of a result as a part of what is allowed; raise WrongResult where that is above 1."""
        got, near, exact = self.got[name], self.near[name], self.exact[name]
        if got is None or near is None or exact is None:
            self._check_missing(name, got, exact)
            return 0.0
        try:
            self._check_kind(name, got)
            if bool((got.double() - exact.double()).abs().le(TINY).all()):
                return 0.0
            ratio, text = (self._few if got.numel() < FEW else self._many)(name, got, near, exact)
        except AssertionError as error:
            raise WrongResult(str(error)) from None
        if not ratio <= 1.0 and name in self.posed.leaves:
            ratio = min(ratio, self._part_of_terms(name, got, exact))
        if not ratio <= 1.0 and name.startswith("d(") and self.posed.case.deterministic:
            ratio = min(ratio, part(float((got.double() - exact.double()).abs().max()), self._cost_of_steps))
        if not ratio <= 1.0:
            raise WrongResult(text)
        return ratio

    def _check_missing(self, name: str, got: Tensor | None, exact: Tensor | None) -> None:
        """A gradient of zeros may be left out; lse and max_scores are there where they are asked for."""
        case = self.posed.case
        if name in ("out", "lse", "max_scores"):
            if (got is not None) != (name == "out" or name in case.aux):
                raise WrongResult(f"{name}: {'missing' if got is None else 'nobody asked for it'}")
        elif any(x is not None and bool(x.any()) for x in (got, exact)):
            raise WrongResult(f"{name}: {'missing' if got is None else 'the reference has none'}")

    def _check_kind(self, name: str, got: Tensor) -> None:
        """Check shape and dtype."""
        case, call = self.posed.case, self.posed.call
        wide = torch.float64 if case.dtype == "float64" else torch.float32
        rows = (case.B, case.H, case.M)
        expected = {
            "out": ((*rows, case.Dv), call.query.dtype), "lse": (rows, wide), "max_scores": (rows, torch.float32),
            **{name: (tuple(leaf.shape), leaf.dtype) for name, leaf in self.posed.leaves.items()},
        }  # fmt: skip
        found = (tuple(got.shape), got.dtype)
        assert found == expected[name], f"{name}: {found}, expected {expected[name]}"

    def _few(self, name: str, got: Tensor, near: Tensor, exact: Tensor) -> tuple[float, str]:
        floor = 32 + self._ulp_of_lse(name) + self._cost_of_tanh / self._eps(got)
        error, bound = near_bound(name, got, near, exact, self._eps(got), floor)
        return part(error, bound), f"{name}: largest error {error:.3g}, allowed {bound:.3g}, of few values"

    def _many(self, name: str, got: Tensor, near: Tensor, exact: Tensor) -> tuple[float, str]:
        kind = "grad" if name in self.posed.leaves else "lse" if name == "lse" else "out"
        dtype = self.posed.call.query.dtype
        ulp = torch.finfo(torch.float32 if name in ("lse", "max_scores") else dtype).eps
        floor = ROOM * (FLOORS[dtype.itemsize] + self._ulp_of_lse(name) + self._cost_of_tanh / ulp)
        if name.startswith("d("):
            floor *= self._eps(got) / torch.finfo(got.dtype).eps
        errors = errors_of(name, got, near, exact, kind, floor, ROOM)
        return (0.0, "") if errors is None else (errors.ratio, errors.text)

    @property
    def _half(self) -> bool:
        return self.posed.call.query.dtype.itemsize == 2

    def _eps(self, got: Tensor) -> float:
        """Return the rounding of a result: that of its own dtype or of the call's, whichever is coarser."""
        return max(torch.finfo(got.dtype).eps, torch.finfo(self.posed.call.query.dtype).eps)

    def _ulp_of_lse(self, name: str) -> float:
        """Return what it costs that exponents are rounded, and that a backward starts from a rounded lse."""
        lse = self.exact["lse"]
        if lse is None or self._half or name in ("lse", "max_scores"):
            return 0.0
        return _largest_finite(lse)

    @property
    def _cost_of_tanh(self) -> float:
        """Return what the hardware's tanh, within 2 ** -11, costs weights: docs/numerics.md says so."""
        case, query, lse = self.posed.case, self.posed.call.query, self.exact["lse"]
        if lse is None or not (query.is_cuda and self._half) or dict(case.options).get("EXACT"):
            return 0.0
        return _largest_finite(lse) * 2.0**-11 * any(s in case.scores for s in WITH_TANH)

    def _part_of_terms(self, name: str, got: Tensor, exact: Tensor) -> float:
        """Return the error as a part of what the rounding of the terms of a sum can do, where these cancel.

        A term is itself a sum over the head dim, whose rounding grows with the root of its length.
        """
        case, size, error = self.posed.case, self._sizes[name], (got.double() - exact.double()).abs()
        long = math.sqrt(max(case.D, case.Dv, 64) / 64)
        eps = TERMS[self.posed.call.query.dtype.itemsize] * long * self._eps(got)
        return max(part(_rms(error), eps * _rms(size)), part(float(error.max()), eps * float(size.max())))

    @cached_property
    def _cost_of_steps(self) -> float:
        """Return what it costs that sums of integers have steps, 2**-57 of a bound: docs/numerics.md says so."""
        case, call, out, lse = self.posed.case, self.posed.call, self.exact["out"], self.exact["lse"]
        assert out is not None and lse is not None
        d_out, d_lse = given(call, out, lse)
        kept = 1.0 if case.dropout_p in (0.0, 1.0) else 1.0 / (1.0 - case.dropout_p)
        of_keys = float(d_out.abs().max()) * case.Dv * (kept * float(call.value.abs().max()) + float(out.abs().max()))
        weight = 1.0
        if call.sink is not None:
            sink = torch.as_tensor(call.sink, dtype=lse.dtype, device=lse.device).detach()
            of_sink = torch.exp(sink[..., None] - lse)
            weight = min(1.0, float((1 - of_sink).max()) + 2.0**-19 * (1 + _largest_finite(lse)))
        rows = case.B * case.H * case.M
        return 2.0**-57 * rows * math.sqrt(case.N) * weight * (of_keys + float(d_lse.abs().max()))

    @cached_property
    def _sizes(self) -> dict[str, Tensor]:
        return sizes_of_terms(self.posed, self.exact)


def _largest_finite(lse: Tensor) -> float:
    return float(lse.masked_fill(lse == -math.inf, 0).abs().amax())


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
